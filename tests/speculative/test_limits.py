"""What cannot be right is refused with the numbers and the remedy, all of it at once; what can is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hisparse_plugin import config, upstream
from sglang_hisparse_plugin.kernels import build
from sglang_hisparse_plugin.speculative import limits


def arguments(**changed: Any) -> SimpleNamespace:
    """A server that speculates in the one way that is served."""
    served = {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 1,
        "speculative_adaptive": False,
        "enable_multi_layer_eagle": False,
        "disaggregation_mode": "null",
        "pp_size": 1,
        "enable_two_batch_overlap": False,
        "model_path": "model",
        "speculative_draft_model_path": "model",
    }
    return SimpleNamespace(**served | changed)


def pools(
    *,
    top_k: int = 2048,
    buffer: int = 4096,
    page: int = 64,
    requests: int = 8,
    rows: int = 100_000,
    device: str = "cpu",
    **more: Any,
) -> SimpleNamespace:
    return SimpleNamespace(
        top_k=top_k,
        device_buffer_size=buffer,
        padded_buffer_size=buffer + page,
        mem_pool_device=SimpleNamespace(page_size=page),
        req_to_token_pool=SimpleNamespace(size=requests),
        token_to_kv_pool_allocator=SimpleNamespace(hisparse_attn_allocator=SimpleNamespace(size=rows)),
        req_to_device_buffer=SimpleNamespace(device=SimpleNamespace(type=device)),
        **more,
    )


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*limits.FUSED_TOP_K, config.SKIP_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "changed", [{}, {"speculative_algorithm": "NEXTN"}, {"speculative_eagle_topk": None}, {"disaggregation_mode": None}]
)
def test_what_is_served_is_not_refused(changed: dict[str, Any]) -> None:
    limits.check_arguments(arguments(**changed))


def test_arguments_that_a_release_does_not_have_are_no_reason() -> None:
    limits.check_arguments(SimpleNamespace(speculative_algorithm="EAGLE"))


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("speculative_algorithm", "EAGLE3", "use --speculative-algorithm EAGLE"),
        ("speculative_algorithm", "NGRAM", "use --speculative-algorithm EAGLE"),
        ("speculative_algorithm", "STANDALONE", "use --speculative-algorithm EAGLE"),
        ("speculative_eagle_topk", 4, "use --speculative-eagle-topk 1"),
        ("speculative_adaptive", True, "leave --speculative-adaptive out"),
        ("enable_multi_layer_eagle", True, "leave --enable-multi-layer-eagle out"),
        ("disaggregation_mode", "decode", "without PD disaggregation"),
        ("disaggregation_mode", "prefill", "without PD disaggregation"),
        ("pp_size", 2, "without pipeline parallelism"),
        ("enable_two_batch_overlap", True, "leave --enable-two-batch-overlap out"),
    ],
)
def test_an_argument_is_refused_with_its_value_and_remedy(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(limits.Unsupported, match=f"{name} is {value!r}: .*{remedy}"):
        limits.check_arguments(arguments(**{name: value}))


@pytest.mark.parametrize(("mode", "refused"), [("null", True), (None, True), ("prefill", True), ("decode", False)])
def test_without_overlap_who_is_staged_has_no_draft_and_on_a_decode_server_nobody_is(mode: Any, refused: bool) -> None:
    given = arguments(disable_overlap_schedule=True, disaggregation_mode=mode, speculative_num_steps=2)
    found = [str(problem) for problem in limits.of_sglang(given)]
    assert len(found) == refused and all("leave --disable-overlap-schedule out" in problem for problem in found)


def test_every_argument_is_tried_above() -> None:
    tried = test_an_argument_is_refused_with_its_value_and_remedy.pytestmark[0].args[1]
    assert {name for name, _, _ in tried} == set(limits.ARGUMENTS)


def test_all_reasons_are_said_at_once() -> None:
    with pytest.raises(limits.Unsupported) as refusal:
        limits.check_arguments(arguments(speculative_eagle_topk=4, pp_size=2))
    assert "eagle_topk is 4" in str(refusal.value) and "pp_size is 2" in str(refusal.value)


@pytest.mark.parametrize("name", limits.FUSED_TOP_K)
@pytest.mark.parametrize(("value", "refused"), [("0", True), ("false", True), ("No", True), ("1", False), ("t", False)])
def test_the_fused_top_k_switch(name: str, value: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    if not refused:
        limits.check_arguments(arguments())
        return
    with pytest.raises(limits.Unsupported, match=f"{name} is off: unset it"):
        limits.check_arguments(arguments())


def test_our_swap_in_may_not_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.SKIP_VARIABLE, "observe")
    limits.check_arguments(arguments())
    monkeypatch.setenv(config.SKIP_VARIABLE, "observe,swap-in")
    with pytest.raises(limits.Unsupported, match=r"swap-in is left out.*do not skip it"):
        limits.check_arguments(arguments())


@pytest.mark.parametrize(
    ("architecture", "found", "drafts", "refused"),
    [
        (limits.V32, False, "model", True),
        (limits.V32, False, None, True),
        (limits.V32, False, "another", False),
        (limits.V32, True, "model", False),
        ("DeepseekV3ForCausalLM", False, "model", False),
    ],
)
def test_a_next_token_layer_that_is_not_found(
    architecture: str, found: bool, drafts: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "finds_next_token_layer", lambda _name: found)
    runner = SimpleNamespace(
        server_args=arguments(speculative_draft_model_path=drafts),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture])),
    )
    if not refused:
        limits.check_model(runner)
        return
    with pytest.raises(limits.Unsupported, match=r"0.5.12 or later, or add\s+--json-model-override-args"):
        limits.check_model(runner)


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [
        (2, {}),
        (3, {"buffer": 6144}),
        (4, {"buffer": 8192}),
        (4, {"top_k": 16, "buffer": 64}),
        (2, {"requests": 24, "rows": 24 * 4160}),
        (63, {"top_k": 1, "buffer": 64}),
    ],
)
def test_pools_that_fit_to_the_last_row(steps: int, sizes: dict[str, int]) -> None:
    limits.check_pools(pools(**sizes), steps)


@pytest.mark.parametrize(
    ("steps", "sizes", "says"),
    [
        (
            3,
            {},
            "3 draft tokens select up to 3 x 2048 rows, the hot buffer has 4096: set device_buffer_size to 6144 or",
        ),
        (3, {}, "or --speculative-num-steps to 1"),
        (5, {"top_k": 16, "buffer": 64}, "5 x 16 rows, the hot buffer has 64: set device_buffer_size to 80 or more"),
        (64, {"top_k": 1}, "64 draft tokens do not fit an extra page of 64 rows: at most 63"),
        (2, {"page": 1}, "at most 0"),
        (
            2,
            {"requests": 25, "rows": 25 * 4160 - 1},
            "buffer of 4160 rows from its first step on; 25 of them need 104000 rows and the device pool has 103999: "
            "set --max-running-requests to 24, or a smaller device_buffer_size",
        ),
        (2, {"requests": 1, "rows": 4159}, "give the KV cache more memory, or a smaller device_buffer_size"),
        (2, {"is_dsv4_hisparse": True}, "DeepSeek-V4's compressed KV cache is not covered"),
    ],
)
def test_pools_that_cannot_be_right(steps: int, sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(limits.Unsupported) as refusal:
        limits.check_pools(pools(**sizes), steps)
    assert says in str(refusal.value)


def test_two_drafts_that_do_not_fit_name_no_number_of_steps() -> None:
    with pytest.raises(limits.Unsupported) as refusal:
        limits.check_pools(pools(buffer=2048), 2)
    assert "--speculative-num-steps" not in str(refusal.value)


@pytest.mark.parametrize(("device", "compiler", "refused"), [("cuda", None, True), ("cuda", "nvcc", False)])
def test_a_gpu_needs_a_compiler(
    device: str, compiler: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: compiler)
    if not refused:
        limits.check_pools(pools(device=device), 2)
        return
    with pytest.raises(limits.Unsupported, match="put nvcc on PATH or set CUDA_HOME"):
        limits.check_pools(pools(device=device), 2)
