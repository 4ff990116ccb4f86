"""The kernel's own source, compiled for CPU threads (`emulated/`), on the cases of the GPU tests that are small.

A block has fewer threads than on a GPU, so that more rounds are played. What depends on the order in which a GPU makes
memory visible, and what needs 512 threads, is for the GPU tests.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_dependent import SMALL, chain, check, told_by_calls
from test_hand_worked import *  # noqa: F403  run again, on the `op` of this file
from test_traces import run
from world import World

from sglang_hisparse_plugin.kernels import build

SIZES = [(4, 6), (33, 100), (33, 300), (64, 128)]
SHAPES = [(1, 64), (2, 64), (8, 64)]  # blocks, threads: answers from a list, alone and in a cluster; and one by one
BY_ARCH = {900: [(*size, *shape) for size in SIZES for shape in SHAPES]}  # what is compiled


class Branch(enum.IntFlag):
    """What depends on the size alone, in the order of `branches_of` in emulated.cpp."""

    ROUNDS = enum.auto()  # a warp looks up more places than its registers hold: the new order is from shared memory
    EVEN = enum.auto()  # all lanes have as many places, all the time
    NEIGHBOURS = enum.auto()  # a lane counts the hits of neighbouring words
    NO_BIT_LEFT = enum.auto()  # the table cannot tell an empty bucket from a negative token
    NO_SHIFT = enum.auto()  # nor has it room for an entry times two
    TWOS_OF_WORDS = enum.auto()  # neighbouring words for every lane, if those of a warp let it


# Architecture, top_k, hot buffer, blocks, threads. 890 stands for those of 99 KB of shared memory, with a small table.
BRANCHES = {
    (900, 40, 830, 1, 64): Branch.ROUNDS,  # 13 words a warp, 7 and 6 at once, and of the last one not all places
    (900, 40, 830, 8, 64): Branch(0),
    (900, 40, 1640, 2, 64): Branch.ROUNDS,  # the same in a cluster, where nothing may be told twice
    (900, 64, 2040, 1, 64): Branch.ROUNDS | Branch.NEIGHBOURS | Branch.TWOS_OF_WORDS,
    (900, 64, 2048, 1, 64): Branch.ROUNDS | Branch.EVEN | Branch.NEIGHBOURS | Branch.TWOS_OF_WORDS,
    (900, 64, 2048, 8, 64): Branch.EVEN | Branch.NEIGHBOURS | Branch.TWOS_OF_WORDS,
    (900, 64, 4096, 1, 96): Branch.ROUNDS | Branch.TWOS_OF_WORDS,  # 43 words a warp: some lane's four are of two warps
    (890, 2100, 2200, 1, 64): Branch.ROUNDS | Branch.NO_BIT_LEFT,
    (890, 2100, 2200, 8, 64): Branch.NO_BIT_LEFT,
    (890, 4100, 4200, 1, 64): Branch.ROUNDS | Branch.NO_BIT_LEFT | Branch.NO_SHIFT,
}
for arch, *instance in BRANCHES:
    BY_ARCH.setdefault(arch, []).append(tuple(instance))
HERE = Path(__file__).parent / "emulated"
GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")


class IndexArray(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("element_bytes", ctypes.c_int32)]


@functools.cache
def parameters() -> type[ctypes.Structure]:
    """`SwapInParams`, as the header declares it."""
    text = (build.source_root() / "hisparse" / "params.h").read_text()
    body = text.partition("struct SwapInParams {")[2].partition("\n};")[0]
    kinds = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32, "bool": ctypes.c_bool}
    kinds |= {"IndexArray": IndexArray, "RowShape": ctypes.c_int32 * 8}
    fields = []
    for kind, names in re.findall(r"^  (?:const )?([\w ]+?\*?) ([\w, ]+);", body, re.M):
        fields += [(name, ctypes.c_void_p if kind.endswith("*") else kinds[kind]) for name in names.split(", ")]
    return type("SwapInParams", (ctypes.Structure,), {"_fields_": fields})


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The kernel for every size and shape, by architecture."""
    root = tmp_path_factory.mktemp("emulated")
    shutil.copytree(build.source_root(), root, dirs_exist_ok=True)
    for name in ("ptx.cuh", "cuda_on_threads.h"):
        shutil.copy(HERE / name, root / "common" / name)
    kernel = root / "hisparse" / "kernel.cuh"
    declared = "extern __shared__ __align__(16) char shared_memory[];"
    assert declared in kernel.read_text()
    kernel.write_text(kernel.read_text().replace(declared, "char* shared_memory = this_block->shared;"))
    found = {}
    for arch, instances in BY_ARCH.items():
        cases = " ".join(f"CASE({', '.join(map(str, instance))})" for instance in instances)
        flags = ["-std=c++20", "-O1", "-pthread", "-fPIC", "-shared", "-w", f"-DSGL_CUDA_ARCH={arch}"]
        library = str(root / f"kernel_{arch}.so")
        subprocess.run([GXX, *flags, f"-DCASES={cases}", f"-I{root}", HERE / "emulated.cpp", "-o", library], check=True)
        found[arch] = ctypes.CDLL(library)
    return found


def as_params(
    *, num_top_k, hot_buffer_size, item_size_bytes, skip_io=False, host_cache, device_buffer, **call
) -> ctypes.Structure:
    """A call's arguments as a launch has them."""
    p = parameters()(row_bytes=item_size_bytes, skip_io=skip_io, buffer_width=call["device_buffer_locs"].size(1))
    p.requests = call["lru_slots"].size(0)
    p.host_rows, p.host_row_stride = host_cache.data_ptr(), host_cache.stride(0) * host_cache.element_size()
    p.device_rows = device_buffer.data_ptr()
    p.device_row_stride = device_buffer.stride(0) * device_buffer.element_size()
    strides = {"device_buffer_tokens": "buffer_tokens", "device_buffer_locs": "buffer_locs", "lru_slots": "lru"}
    strides |= {"top_k_tokens": "top_k", "top_k_device_locs": "locs_out", "host_cache_locs": "host_locs"}
    strides |= {"miss_src": "miss_src", "miss_dst": "miss_dst"}
    for name, tensor in call.items():
        if tensor is None:
            continue
        if name in ("req_pool_indices", "seq_lens", "tail_start"):
            setattr(p, name, IndexArray(tensor.data_ptr(), tensor.element_size()))
        else:
            setattr(p, name, tensor.data_ptr())
        if name in strides:
            setattr(p, strides[name] + "_stride", tensor.stride(0))
    return p


def run_calls(library: ctypes.CDLL, shape: tuple[int, int], calls: list[dict]) -> None:
    """Runs calls one after the other, the next one started before the last has ended."""
    first = calls[0]
    size = (first["top_k_tokens"].size(0), first["num_top_k"], first["hot_buffer_size"])
    params = (parameters() * len(calls))(*(as_params(**call) for call in calls))
    assert library.swap_in(params, len(calls), *size, *shape), f"not compiled: {size}"


def one_call(library: ctypes.CDLL, shape: tuple[int, int], **call) -> None:
    run_calls(library, shape, [call])


def name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@pytest.fixture(params=SHAPES, ids=name)
def chained(request, libraries):
    """`run_calls` in one shape."""
    return functools.partial(run_calls, libraries[900], request.param)


@pytest.fixture
def op(chained):
    """A swap-in op, called as the others are."""
    return lambda **call: chained([call])


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.mark.parametrize(("item", "stride", "offset"), [(16, 16, 0), (7, 9, 1)])
def test_steps(op, device, item, stride, offset) -> None:
    world = World(requests=3, context=600, top_k=33, hot=300, item=item, stride=stride, offset=offset, device=device)
    run(world, op, 8)


def test_tokens_of_one_bucket(op, device) -> None:
    """As in `test_traces`: all tokens share a bucket, and some stand there twice."""
    world = World(requests=1, context=66 << 14, top_k=64, hot=128, item=1, device=device)
    for repeated in (0, 5):
        tokens = [(k % (64 - repeated)) << 14 for k in range(64)]
        world.rng.shuffle(tokens)
        world.step(op, [0], [tokens], [world.context])


def test_calls_that_depend_on_each_other(chained, device) -> None:
    """As in `test_dependent`: a call that did not wait for the one before would read the tables from before it."""
    world = World(requests=2, context=400, top_k=33, hot=100, device=device)
    for tail in (False, True):
        calls = chain(world, steps=3, tail=tail)
        chained([call.arguments for call in calls])
        check(world, calls)


def test_what_a_request_is_told_by_may_be_written_by_the_call_before(chained, device) -> None:
    top_k, hot, context = SMALL
    world = World(requests=2, context=context, top_k=top_k, hot=hot, device=device)
    calls, asked = told_by_calls(world)
    chained([call.arguments for call in calls[:4]])
    chained([call.arguments for call in calls[4:]])
    check(world, asked)


def hits_only(world: World, length: int) -> list[int]:
    """A top-k of which nothing is missed: tokens of the buffer, the newest, and one that selects nothing."""
    held = [token for token in world.expected[0].tokens[: world.hot] if 0 <= token < length - 1]
    chosen = world.rng.sample(held, min(len(held), world.top_k - 2))
    chosen += [length - 1] + [-1] * (world.top_k - 1 - len(chosen))
    world.rng.shuffle(chosen)
    return chosen


@pytest.mark.parametrize("instance", BRANCHES, ids=name)
def test_branches(libraries, device, instance) -> None:
    """What only some sizes reach. Hits and misses, of a table whose buckets have to be shared."""
    arch, top_k, hot, *shape = instance
    library = libraries[arch]
    assert Branch(library.branches(top_k, hot, *shape)) == BRANCHES[instance]
    world = World(requests=1, context=20000, top_k=top_k, hot=hot, item=5, device=device)

    op = functools.partial(one_call, library, shape)
    for step, length in enumerate((19000, 19001, 20000)):
        world.step(op, [0], [hits_only(world, length)], [length], plan=True)
        tails = [length - 3] if step == 1 else None
        world.step(op, [0], [world.choose(length)], [length], tails=tails, counters=True)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=name)
@pytest.mark.parametrize("late", [0, 1])
def test_a_block_that_is_late(libraries, device, shape, late) -> None:
    """It empties its table when the others have found what they look for, and told it so."""
    library = libraries[900]
    world = World(requests=1, context=600, top_k=64, hot=128, device=device)
    library.let_be_late(late)
    try:
        for top_k in (world.choose(600, junk=0), hits_only(world, 600)):
            world.step(functools.partial(one_call, library, shape), [0], [top_k], [600])
    finally:
        library.let_be_late(-1)


def test_an_error_is_found(op, device) -> None:
    """The control: one wrong row of the device cache fails the comparison."""
    world = World(requests=1, context=400, top_k=64, hot=128, item=16, device=device)

    def wrong(**call) -> None:
        op(**call)
        call["device_buffer"].view(torch.uint8).flatten()[5] ^= 1

    with pytest.raises(AssertionError):
        run(world, wrong, 1, batch=1, low=200)
