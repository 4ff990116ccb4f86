"""A decode step, watched for what would make the host wait for the forward pass on a GPU.

That is whatever reads from the device, or sends to it and waits for it to arrive, once the scheduler's stream has been
told to wait for the pass. On a CPU all tensors are alike. Here those that are on the device on a GPU are marked, and so
is what is computed from them. Looked at is what the coordinator does for a step, less the copy of KV rows, which a
stand-in does.
"""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .world import World

READS = {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
TABLES = ("req_to_device_buffer", "req_to_host_pool", "req_device_buffer_token_locs")


class OnDevice(torch.Tensor):
    """The mark."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def marked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


class Watch(TorchFunctionMode):
    """From now on `world` finds what a step waits for, and whether it is told the slots that its batch has."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.steps, self.aside = world, 0, False
        self.after_the_pass = False
        """The scheduler's stream has been told to wait for the pass under way."""
        c = world.coordinator
        c.decode_producer_stream = torch.cpu.Stream()
        watch = self

        def wait_stream(stream, other):
            watch.waits_for(stream, other)

        torch.cpu.Stream.wait_stream = wait_stream
        vars(c).update({name: marked(getattr(c, name)) for name in TABLES})
        c.mem_pool_device.full_to_hisparse_device_index_mapping = marked(world.pools.mapping)
        prepare, self._map = ScheduleBatch.prepare_for_decode, c.map_last_loc_to_buffer
        copy = c.mem_pool_host.backup_from_device_all_layer

        def prepare_marked(batch):
            batch.req_pool_indices = marked(batch.req_pool_indices)
            prepare(batch)
            batch.req_pool_indices = plain(batch.req_pool_indices)

        def copy_aside(pool, host, device, **kwargs):
            self.aside = True
            copy(pool, plain(host), plain(device), **kwargs)
            self.aside = False

        make = torch.tensor

        def made(*args, pin_memory=False, **kwargs):
            if pin_memory:  # is for the host
                kwargs.pop("device", None)
            return make(*args, **kwargs)

        torch.tensor = made
        ScheduleBatch.prepare_for_decode = prepare_marked
        c.map_last_loc_to_buffer = self._watched
        c.mem_pool_host.backup_from_device_all_layer = copy_aside

    def _watched(self, seq_lens, out_cache_loc, slots, seq_lens_cpu, slots_cpu=None) -> None:
        """Stands for the coordinator's `map_last_loc_to_buffer`."""
        self.steps += 1
        self.after_the_pass = False
        told = slots.cpu() if slots_cpu is None else slots_cpu
        self.world.expect(told.tolist() == plain(slots).tolist(), "a step is told other slots than its batch has")
        more = () if slots_cpu is None else (slots_cpu,)
        with self:
            self._map(marked(seq_lens), marked(out_cache_loc), slots, seq_lens_cpu, *more)

    def waits_for(self, stream, other) -> None:
        """Stands for the stream's own; from 0.5.11 on it is a stream for backups that waits."""
        c = self.world.coordinator
        backups = getattr(c, "decode_backup_stream", None)
        self.after_the_pass |= other is c.decode_producer_stream and stream is not backups

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.aside:
            return result
        waits = self.after_the_pass
        name, leaves = func.__name__, pytree.tree_leaves((args, kwargs))
        there = any(isinstance(leaf, OnDevice) for leaf in leaves)
        if waits and there and (name in READS or (name == "__getitem__" and _by_mask(args[1]))):
            self.world.expect(False, f"a step waits for the forward pass: {name}")
        sent = name in {"tensor", "to"} and not there and any(_names_device(leaf) for leaf in leaves)
        if waits and sent and not kwargs.get("non_blocking"):
            self.world.expect(False, f"a step waits for the forward pass: {name}")
        if name == "cpu":
            return plain(result)
        return pytree.tree_map_only(torch.Tensor, marked, result) if there or sent else result


def _by_mask(index) -> bool:
    """Whether an index says which by a mask, whose hits must be counted before there is a result."""
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in pytree.tree_leaves(index))


def _names_device(leaf) -> bool:
    return isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu")
