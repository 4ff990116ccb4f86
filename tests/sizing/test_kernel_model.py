"""The expected time of a swap-in: what was measured where it was, and near it elsewhere."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hisparse_plugin.sizing import kernel_model

RECORD = Path(__file__).parents[2] / "docs" / "measurements" / "swap_in_h200.json"
MODEL = kernel_model.stored()


def test_the_stored_model_is_what_the_record_says() -> None:
    """When the record is renewed: ``python -m sglang_hisparse_plugin.sizing.kernel_model`` with its name."""
    wanted = kernel_model.compact(json.loads(RECORD.read_text()), "docs/measurements/swap_in_h200.json")
    assert json.loads(kernel_model.STORED.read_text()) == wanted


@pytest.mark.parametrize("kernel", MODEL.us)
def test_measured_points_are_given_back(kernel: str) -> None:
    for cell in json.loads(RECORD.read_text())["cells"]:
        point = [cell[key] for key in ("batch", "misses", "row_bytes", "hot")]
        assert MODEL.call_us(kernel, *point) == pytest.approx(cell["us"][kernel])


@pytest.mark.parametrize(("axis", "left_out"), [(0, 4), (0, 16), (1, 128), (1, 410), (1, 1024)])
def test_a_point_that_was_left_out_is_predicted(axis: int, left_out: int) -> None:
    known = {point: us for point, us in MODEL.us["plugin"].items() if point[axis] != left_out}
    model = replace(MODEL, us={"plugin": known})
    errors = [
        abs(model.call_us("plugin", *point) / us - 1)
        for point, us in MODEL.us["plugin"].items()
        if point[axis] == left_out and point[1] != 0
    ]
    assert statistics.median(errors) < 0.06 and max(errors) < 0.3


def test_one_miss_costs_a_round_trip() -> None:
    assert MODEL.call_us("plugin", 1, 1, 656, 4096) > MODEL.call_us("plugin", 1, 0, 656, 4096) + 1.5


def test_beyond_the_grid_the_link_is_the_limit() -> None:
    rate = (
        64 * 2048 * 656 / (MODEL.call_us("plugin", 128, 2048, 656, 4096) - MODEL.call_us("plugin", 64, 2048, 656, 4096))
    )
    assert 0.85 < rate / 1e3 / MODEL.scattered_gbps[656] < 1.1
    assert MODEL.copy_us(64, 2048, 656) == pytest.approx(64 * 2048 * 656 / MODEL.scattered_gbps[656] / 1e3)


@pytest.mark.parametrize(
    ("release", "kernel"),
    [((0, 5, 10), "sglang 0.5.10.post1"), ((0, 5, 18), "sglang 0.5.12"), ((0, 6, 0), "sglang 0.5.23")],
)
def test_the_kernel_of_a_release(release: tuple[int, ...], kernel: str) -> None:
    assert MODEL.upstream(release) == kernel
