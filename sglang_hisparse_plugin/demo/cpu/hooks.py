"""Which module gets which stand-in, and when: on import, in every process."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Sequence
from types import ModuleType

import wrapt

#: module -> (our module, our function that is called with it once it is imported)
_AFTER_IMPORT = {
    "torch": ("torch_cpu", "adapt"),
    "sglang.srt.distributed.parallel_state": ("groups", "adapt"),
    "sglang.srt.mem_cache.hisparse_memory_pool": ("transfers", "adapt"),
    "sglang.srt.mem_cache.memory_pool": ("transfers", "adapt_pool"),
    "sglang.srt.mem_cache.memory_pool_host": ("transfers", "adapt"),
    "sglang.srt.mem_cache.pool_host.mla": ("transfers", "adapt"),
    "sglang.srt.model_executor.model_runner": ("model_runner", "adapt"),
    "sglang.jit_kernel.hisparse": ("swap_in", "adapt"),
    "sglang.kernels.ops.kvcache.hisparse": ("swap_in", "adapt"),
    "sglang.srt.layers.attention.utils": ("indexer", "adapt_lengths"),
    "sglang.srt.layers.attention.triton_ops.pad": ("indexer", "adapt_lengths"),
    "sglang.kernels.ops.attention.utils": ("indexer", "adapt_lengths"),
    "sglang.kernels.ops.attention.pad": ("indexer", "adapt_lengths"),
    "sglang.srt.layers.attention.dsa_backend": ("attention", "adapt_backend"),
    "sglang.srt.arg_groups.speculative_hook": ("speculative", "adapt_overlap"),
    "sglang.srt.speculative.eagle_utils": ("speculative", "adapt"),
    "sglang.srt.speculative.eagle_info": ("speculative_sampling", "adapt"),
    "sglang.srt.speculative.eagle_info_v2": ("speculative", "adapt"),
    "sglang.srt.speculative.triton_ops.cache_locs": ("speculative", "adapt"),
    "sglang.kernels.ops.speculative.cache_locs": ("speculative", "adapt"),
    "sglang.kernels.ops.speculative.eagle": ("speculative", "adapt"),
    "sglang.kernels.ops.speculative.spec_tree": ("speculative", "adapt"),
    "sglang.kernels.ops.speculative.tree": ("speculative", "adapt_kernels"),
    "sglang.kernels.ops.kvcache.cache_move": ("speculative", "adapt"),
    "sglang.srt.mem_cache.allocation": ("speculative", "adapt"),
    "sglang.srt.speculative.eagle_worker_common": ("speculative", "adapt"),
    "sglang.srt.speculative.spec_utils": ("speculative", "adapt"),
    "sglang_hisparse_plugin.kernels.reference": ("swap_in", "adapt_reference"),
    "sglang.srt.layers.attention.nsa.nsa_indexer": ("indexer", "adapt"),
    "sglang.srt.layers.attention.dsa.dsa_indexer": ("indexer", "adapt"),
}

#: packages and modules of kernels that cannot be imported without a GPU's software
_STUBS = ("sgl_kernel", "flash_mla", "sglang.jit_kernel.dsa.cutedsl_paged_mqa_logits")
#: the same as above for modules of theirs
_STUBBED = {
    "sgl_kernel": [("attention", "adapt_top_k"), ("speculative", "adapt_kernels"), ("speculative_sampling", "adapt")],
    "sgl_kernel.flash_mla": [("attention", "adapt_flash_mla")],
    "flash_mla": [("attention", "adapt_flash_mla")],
    "sgl_kernel.kvcacheio": [("transfers", "adapt")],
}


def install() -> None:
    """Idempotent: a second call in the same process changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name, (module, function) in _AFTER_IMPORT.items():
        wrapt.register_post_import_hook(_Deferred(module, function), name)


class _Deferred:
    """Imports our side only when SGLang's side has been imported: a stand-in may import torch."""

    def __init__(self, module: str, function: str) -> None:
        self.module, self.function = module, function

    def __call__(self, imported: ModuleType) -> None:
        getattr(importlib.import_module(f"{__package__}.{self.module}"), self.function)(imported)


class _Finder(importlib.abc.MetaPathFinder):
    """Supplies stubs of kernel packages, and prepares `torchvision` for a CPU build of torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _STUBS or fullname.partition(".")[0] in _STUBS:
            return importlib.machinery.ModuleSpec(fullname, _StubLoader(), is_package=True)
        if fullname == "torchvision":
            _declare_torchvision_ops()
        return None


class _StubLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for where in _STUBBED.get(module.__name__, ()):
            _Deferred(*where)(module)


class _Stub(ModuleType):
    """Any name can be imported; calling one that has no stand-in says which it was."""

    def __getattr__(self, name: str) -> _Missing:
        return _Missing(self.__name__, name)


class _Missing:
    def __init__(self, owner: str, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__name__ = self.__qualname__ = f"{owner}.{name}"

    def __getattr__(self, name: str) -> _Missing:
        return _Missing(self.__name__, name)

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{self.__name__} needs a GPU and has no CPU stand-in")


_torchvision_ops: list[object] = []  # a torch Library forgets its operators when it is collected


def _declare_torchvision_ops() -> None:
    """The index's default torchvision is built for CUDA: its operators are looked up but not there on a CPU."""
    if _torchvision_ops or importlib.metadata.version("torchvision").endswith("+cpu"):
        return
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision_ops.append(library)
