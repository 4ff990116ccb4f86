"""What fits, worked out by hand, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.sizing import estimate, formulas, given, plan
from sglang_hisparse_plugin.sizing.layout import Layout
from sglang_hisparse_plugin.sizing.shapes import HiSparse, ModelShape, Server, SizingError

from .cases import CONFIG

GIB = 1 << 30
MODEL = ModelShape(layers=61, draft_layers=1)
MACHINE = given.Machine(139 * GIB, 80 * GIB, 12 * GIB, 2000 * GIB, 64 * GIB, Layout(8, 8, True))
WORK = given.Workload("0.5.23", MODEL, HiSparse(), "fp8_e4m3", 65536, 2048)
SIZES = [
    "--gpu-mem=139",
    "--reserve=12",
    "--weights-per-gpu=80",
    "--host-mem=2000",
    "--context=65536",
    "--release=0.5.23",
]


def test_rows_of_deepseek() -> None:
    assert [MODEL.row_bytes(dtype) for dtype in ("bfloat16", "fp8_e4m3")] == [1152, 656]
    assert MODEL.index_bytes == 132


def test_worked_by_hand() -> None:
    """Ten requests of 640 tokens each, in pages of 64, hot buffer 128; bfloat16 rows of two layers."""
    work = given.Workload("0.5.12", ModelShape(2, index_topk=64), HiSparse(64, 128), "bfloat16", 600, 40)
    # Nine hot buffers of 192; a prompt of 640 that is admitted with 40 of output, a page and 9 x 40 x 0.098.
    assert plan.slots_needed(work, 10) == 2560  # 9 * 192 + 640 + 40 + 64 + 36 = 2508, in whole pages
    server = plan.smallest(work, 10)
    assert (server.device_tokens, server.hisparse.host_to_device_ratio) == (2560, 3)  # 10 * 640 + 64 = 6464 <= 7680
    found = {
        item.name: item.bytes for item in formulas.allocations(server) if item.owner in ("_kvcache", "coordinator")
    }
    assert found["kv_buffer"] == 2 * (2560 + 64) * 1152
    assert found["index_k_with_scale_buffer"] == 2 * 121 * 64 * 132
    assert found["lru_slots"] == 2 * 11 * 128 * 2


@pytest.mark.parametrize("release", ["0.5.10.post1", "0.5.15", "0.5.23"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("prompt", [3000, 65536, 500000])
def test_it_fits_and_one_more_would_not(release: str, kv_dtype: str, prompt: int) -> None:
    work = replace(WORK, release=release, kv_dtype=kv_dtype, prompt=prompt)
    if (release, kv_dtype) == ("0.5.10.post1", "fp8_e4m3"):
        with pytest.raises(SizingError, match=r"fp8_e4m3 came with 0\.5\.12"):
            plan.with_hisparse(work, MACHINE)
        return
    fit = plan.with_hisparse(work, MACHINE)
    budget = given.device_budget(work, MACHINE, fit.requests)
    assert fit.device_bytes <= budget <= 47 * GIB and fit.host_bytes <= MACHINE.host_budget
    assert fit.server.device_tokens >= plan.slots_needed(work, fit.requests)
    assert fit.server.logical_tokens >= fit.requests * work.total
    assert fit.limit and not any(plan.fitting(work, MACHINE, fit.requests + 1))
    plain = plan.without_hisparse(work, MACHINE)
    assert plain is None or plain.device_bytes <= budget


def test_what_limits() -> None:
    assert plan.with_hisparse(WORK, MACHINE).limit == "GPU memory; most of it for index keys"
    assert plan.with_hisparse(replace(WORK, prompt=4096), MACHINE).limit.endswith("hot buffers, prefill")
    assert plan.with_hisparse(WORK, replace(MACHINE, host=400 * GIB)).limit == "host memory"
    assert plan.with_hisparse(replace(WORK, most_requests=5), MACHINE).limit == "the number of requests allowed"


@pytest.mark.parametrize("release", ["0.5.12", "0.5.17", "0.5.23"])
def test_the_fraction_gives_sglang_the_slots(release: str) -> None:
    """By SGLang's own division (profile_max_num_token), with the fraction as it is pasted."""
    work = replace(WORK, release=release)
    fit = plan.with_hisparse(work, MACHINE)
    free, fraction = MACHINE.gpu - MACHINE.weights, given.mem_fraction(work, MACHINE, fit.requests) / 1000
    assert fraction == 0.913  # 127 of 139 GiB, rounded down
    profiled = int(free - MACHINE.gpu * (1 - fraction)) // formulas.cell_bytes(fit.server)
    assert fit.server.device_tokens <= profiled


def test_sharing_layers_swap_in_less_often() -> None:
    shared = tuple(layer % 4 != 0 for layer in range(61))
    fits = [plan.with_hisparse(replace(WORK, model=replace(MODEL, shared_index=s)), MACHINE) for s in ((), shared)]
    alone, together = (estimate.swap_in(fit, (0.9,)) for fit in fits)
    assert (alone["calls"], together["calls"]) == (61, 16)
    assert alone["rows"][0]["shared_ms"] == 0 < together["rows"][0]["shared_ms"]


def test_index_sharing_as_sglang_reads_it() -> None:
    def shared(**config: object) -> str:
        shape = ModelShape.from_config({**CONFIG, "num_hidden_layers": 7, **config})
        return "".join("FS"[share] for share in shape.shared_index)

    assert shared() == shared(index_topk_freq=1) == ""
    assert shared(index_topk_freq=3) == "FFSSFSS"
    assert shared(index_topk_freq=3, index_skip_topk_offset=4) == "FFFFSSF"
    assert shared(index_topk_pattern="FFSSFSS") == "FFSSFSS"
    assert shared(indexer_types=["full", "shared", "full"]) == "FSFFFFF"
    assert shared(cli_factor=2) == "FSFSFSF"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["size", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_command(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"--model={config}", *SIZES, "--json", "--tp=8", "--dp=8", "--dp-attention")
    report = json.loads(out)
    fit = plan.with_hisparse(WORK, MACHINE)
    assert code == 0 and report["hisparse"]["requests"] == 8 * fit.requests
    assert f"--max-running-requests {8 * fit.requests}" in report["flags"]
    assert sum(report["hisparse"]["device_parts"].values()) == report["hisparse"]["device_bytes"] == fit.device_bytes
    flag = next(flag for flag in report["flags"] if flag.startswith("--hisparse-config"))
    assert HiSparse.from_json(flag.split("'")[1]) == fit.server.hisparse
    code, text, _ = run(capsys, f"--model={config}", *SIZES, "--tp=8", "--dp=8", "--dp-attention")
    assert code == 0 and flag in text and "Requests at once" in text


def test_that_hisparse_gains_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight ranks pin the same rows in little host memory; with enough of it there is no such note."""
    said = "no more requests fit with HiSparse than without"
    for host, holds in (("100", True), ("2000", False)):
        report = json.loads(run(capsys, "--layers=61", *SIZES, "--tp=8", f"--host-mem={host}", "--json")[1])
        assert (report["hisparse"]["requests"] <= report["without"]["requests"]) == holds
        assert any(note.startswith(said) for note in report["notes"]) == holds


def test_numbers_by_hand_are_the_same_model(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_file, by_hand = (
        json.loads(run(capsys, *arguments, *SIZES, "--json")[1])["hisparse"]
        for arguments in ([f"--model={config / 'config.json'}"], ["--layers=61"])
    )
    assert by_file == by_hand


@pytest.mark.parametrize(
    ("arguments", "changed", "said"),
    [
        ([], {"index_topk": None}, "no model with DeepSeek Sparse Attention"),
        ([], {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ([], {"compress_ratios": [4, 128]}, "size covers DeepSeek Sparse Attention only"),
        (['--hisparse-config={"device_buffer_size":1024}'], {}, "Give at least 2048"),
        (['--hisparse-config={"device_buffer_size":4100}'], {}, "no multiple of the page size 64: give 4160"),
        (["--hisparse-config={"], {}, "is no JSON (from character 2 on)"),
        (["--host-mem=80"], {}, "host memory is too small"),
        (["--context=20000000"], {"max_position_embeddings": None}, "a context of 20002048 tokens fits nowhere"),
        (["--weights-per-gpu=135"], {}, "spread the weights over more GPUs"),
        (["--weights=600"], {}, "and not both"),
        (["--release=0.5.9"], {}, "it came with 0.5.10"),
        (["--release=new"], {}, "is no release of SGLang"),
        (["--tp=8", "--dp=3", "--dp-attention"], {}, "does not divide"),
        (["--draft-tokens=9"], {}, "takes 2 to 4"),
        (["--draft-tokens=3", "--release=0.5.12"], {}, "give 6144 or more in --hisparse-config"),
        (["--layers=3"], {}, "exclude each other"),
        ([], {"max_position_embeddings": "x"}, 'max_position_embeddings is "x", which is no whole number'),
        ([], {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, which is no whole number"),
        ([], {"index_topk": True}, "index_topk is true, which is no whole number"),
        ([], {"index_kpool": "x"}, 'index_kpool is "x"'),
        ([], {"indexer_types": 3}, "indexer_types and index_topk_pattern are"),
        ([], {"text_config": "x"}, "text_config is no object"),
        ([], {"rope_scaling": {"factor": "x"}}, "rope_scaling is no object whose factor"),
        (['--hisparse-config={"top_k":1e999}'], {}, "top_k in --hisparse-config is Infinity: a whole number"),
        (["--context=163840"], {}, "the 163840 that the model takes"),
        (["--context=163840"], {"rope_scaling": {"factor": 40, "original_max_position_embeddings": 4096}}, "takes"),
        (["--release=0.5.18", "--draft-tokens=4"], {}, "take 0.5.10 to 0.5.15 with this plugin, or 0.5.22 and later"),
        ([], {"architectures": ["DeepseekV4ForCausalLM"]}, "DeepseekV4ForCausalLM is not covered"),
        ([], {"architectures": ["MiniMaxM3SparseForCausalLM"], "index_topk": None}, "is not covered"),
        (["--plot=x.pdf"], {}, "ends in .png or .svg"),
    ],
)
def test_bad_input_names_the_remedy(
    arguments: list[str], changed: dict, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    code, out, err = run(capsys, f"--model={tmp_path}", *SIZES, "--tp=8", "--json", *arguments)
    assert code == 2 and said in " ".join(err.split()) and said in json.loads(out)["error"]


@pytest.mark.parametrize(
    "argument",
    [f"--{name}=0" for name in ("tp", "dp", "gpus-per-node", "weights-per-gpu", "gpu-mem", "context", "max-requests")]
    + ["--gpu-mem=" + 320 * "9", "--gpu-mem=nan", "--tp=-1", f"--layers={10**12}", "--context=" + 5000 * "9"],
)
def test_wrong_use_is_said_in_json_too(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["size", "--layers=61", *SIZES, "--json", argument])
    said = capsys.readouterr()
    assert argument.split("=", maxsplit=1)[0] in json.loads(said.out)["error"] and "error: " in said.err


def test_wrong_use_of_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, printed in (
        (["--json", "--bogus"], True),
        (["--bogus"], False),
        (["--bogus", "--", "--json"], False),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["doctor", *arguments])
        assert bool(capsys.readouterr().out) == printed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk(config: Path) -> None:
    for more in ([], ["--json"]):
        command = [sys.executable, "-m", "sglang_hisparse_plugin.cli", "size", f"--model={config}", *SIZES, *more]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (
            2,
            "sglang-hisparse size: the output is lost: No space left on device\n",
        )


def test_rope_scaling_lengthens_the_context_and_unknown_names_are_noted(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {**CONFIG, "rope_scaling": {"factor": 2.0}, "architectures": ["NewForCausalLM"]}
    (config / "config.json").write_text(json.dumps(other))
    code, out, _ = run(capsys, f"--model={config}", *SIZES, "--context=163840", "--json")
    assert code == 0 and any("NewForCausalLM is unknown here" in note for note in json.loads(out)["notes"])


def test_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (([f"--model={tmp_path}"], "cannot read"), ([], "no model: give --model")):
        code, _, err = run(capsys, *arguments, *SIZES)
        assert code == 2 and said in " ".join(err.split())
    (tmp_path / "config.json").write_text("{")
    assert "is no JSON" in " ".join(run(capsys, f"--model={tmp_path}", *SIZES)[2].split())


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture(config: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = config / f"concurrency.{suffix}"
    assert run(capsys, f"--model={config}", *SIZES, f"--plot={file}")[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_formulas_need_only_the_standard_library() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('rich','packaging','torch','wrapt','matplotlib')))\n"
    code += "from sglang_hisparse_plugin.sizing import estimate, formulas, kernel_model, plan, shapes"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_server_of_no_whole_pages() -> None:
    with pytest.raises(SizingError, match="no whole pages"):
        Server("0.5.23", MODEL, HiSparse(), "bfloat16", 100, 1, 100)
