"""The formulas against every tensor that the real classes of each release allocate, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
from lifecycle import launch
from lifecycle import server as lifecycle

from sglang_hisparse_plugin.demo import releases
from sglang_hisparse_plugin.sizing import formulas
from sglang_hisparse_plugin.sizing.shapes import HiSparse, ModelShape, Server

from . import cases

RELEASES = ("0.5.10.post1", "0.5.11", "0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.23")


@cache
def measured(release: str) -> dict[str, dict[str, int]]:
    """What `census` found in a process of this release."""
    sglang = releases.fetch(release)
    env = launch.environment(sglang, "off")
    command = [sys.executable, "-m", "sizing.census"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def started(release: str, kv_dtype: str = "bfloat16") -> Server:
    """The server that `lifecycle.server` starts, as its flags say."""
    return Server(
        release=release,
        model=ModelShape.from_config(lifecycle.MODEL),
        hisparse=HiSparse(lifecycle.TOP_K, lifecycle.HOT_BUFFER, lifecycle.RATIO),
        kv_dtype=kv_dtype,
        device_tokens=lifecycle.DEVICE_TOKENS,
        requests=lifecycle.SLOTS,
        context=2048,
    )


def built(release: str, name: str) -> Server:
    case = cases.BUILT[name]
    server = Server(
        release=release,
        model=case.model,
        hisparse=case.hisparse,
        kv_dtype=case.kv_dtype,
        device_tokens=case.device_tokens,
        requests=case.requests,
        context=0,
        draft_tokens=case.draft_tokens,
    )
    return replace(server, context=case.columns - formulas.row_tokens(server))


def computed(server: Server) -> dict[str, int]:
    return {f"{item.owner}.{item.name}": item.bytes for item in formulas.allocations(server)}


def per_release(*values: tuple[str, ...]) -> list:
    """Tests of one release on one worker: they share its process."""
    return [
        pytest.param(release, *rest, marks=pytest.mark.xdist_group(f"sizing-{release}"))
        for release in RELEASES
        for rest in (values or ((),))
    ]


@pytest.mark.parametrize("release", per_release())
def test_a_started_server_allocates_what_the_formulas_say(release: str) -> None:
    assert computed(started(release)) == measured(release)["started"]


@pytest.mark.parametrize(("release", "name"), per_release(("built",), ("wider",)))
def test_other_sizes_rows_and_layers(release: str, name: str) -> None:
    assert computed(built(release, name)) == measured(release)[name]


@pytest.mark.xdist_group("sizing-0.5.23")
def test_speculation() -> None:
    """Before 0.5.22 a coordinator has no tables for it."""
    assert computed(built("0.5.23", "speculating")) == measured("0.5.23")["speculating"]


@pytest.mark.parametrize(("release", "name"), per_release(("built",), ("wider",)))
def test_the_pool_without_hisparse(release: str, name: str) -> None:
    server = built(release, name)
    page_lists = 8 * (server.device_tokens // 64)
    tables = 4 * formulas.request_rows(server) * formulas.row_tokens(server)
    assert sum(measured(release)[f"plain {name}"].values()) == (
        formulas.plain_device_bytes(server) - page_lists - tables
    )


@pytest.mark.parametrize(("release", "kv_dtype"), per_release(*[(dtype,) for dtype in cases.TORCH_DTYPES]))
def test_what_sglang_takes_a_slot_for(release: str, kv_dtype: str) -> None:
    assert formulas.cell_bytes(started(release, kv_dtype)) == measured(release)["cells"][kv_dtype]


@pytest.mark.parametrize(
    ("change", "grows"),
    [
        ({"requests": lifecycle.SLOTS + 1}, "coordinator.lru_slots"),
        ({"device_tokens": lifecycle.DEVICE_TOKENS + 64}, "mem_pool_host.kv_buffer"),
        ({"context": 2049}, "coordinator.req_to_host_pool"),
        ({"hisparse": HiSparse(lifecycle.TOP_K, lifecycle.HOT_BUFFER + 64, 2)}, "coordinator.req_device_buffer_tokens"),
        ({"hisparse": HiSparse(lifecycle.TOP_K, lifecycle.HOT_BUFFER, 3)}, "index_key_cache.buffer"),
        ({"hisparse": HiSparse(lifecycle.TOP_K + 1, lifecycle.HOT_BUFFER, 2)}, "coordinator.top_k_device_locs_buffer"),
    ],
)
@pytest.mark.xdist_group("sizing-0.5.23")
def test_control_another_configuration_is_not_what_was_allocated(change: dict, grows: str) -> None:
    there, other = measured("0.5.23")["started"], computed(replace(started("0.5.23"), **change))
    assert other != there and other[grows] > there[grows]


@pytest.mark.xdist_group("sizing-0.5.23")
def test_control_one_release_is_not_another() -> None:
    assert computed(started("0.5.23")) != measured("0.5.12")["started"]
