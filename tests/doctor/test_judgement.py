"""What facts mean: from a machine on which nothing is wrong, one thing is changed, and that is what must be found."""

from __future__ import annotations

import io
from typing import Any

import pytest
from machine import DSA, GIB, GPUS, HEALTHY, LAUNCH, judged

from sglang_hisparse_plugin.doctor import finding, report
from sglang_hisparse_plugin.doctor.table import PROBES

HOST_POOL = 4 * 61 * 1152  # bytes on the host for one device slot: ratio, layers, row


def real(examination: Any) -> list[tuple[str, str]]:
    return [(f.level.name.lower(), f"{f.probe}: {f.what}") for f in examination.findings if f.level]


def test_a_healthy_machine_is_ready() -> None:
    examination = judged()
    assert real(examination) == []
    assert report.verdict(examination) == "ready" and examination.worst == finding.Level.NOTE


def test_facts_are_there_for_every_probe() -> None:
    assert list(HEALTHY) == [probe.name for probe in PROBES]


def with_flags(*more: str, drop: str = "") -> list[str]:
    return [word for word in LAUNCH if word != drop] + list(more)


def with_config(text: str) -> list[str]:
    return [*LAUNCH[:-1], text]


SMALL = {**GPUS[0], "memory_mib": 40 * 1024}
ONE_CHANGE: dict[str, tuple[dict[str, Any], str, str]] = {
    "old python": ({"python.version": "3.9.1"}, "error", "python: Python 3.9.1 is too old"),
    "no wrapt": ({"python.missing": ["wrapt"]}, "error", "python: the plugin needs packages that are not here: wrapt"),
    "two copies": ({"python.installed": {"/a": "0.1.0", "/b": "0.0.9"}}, "warning", "python: several copies"),
    "not installed": ({"python.entry_point": False}, "warning", "python: SGLang will not load the plugin"),
    "damaged entry points": (
        {"python.entry_points_problem": "TypeError: x", "python.entry_point": False},
        "error",
        "python: the entry points of the installed packages cannot be read (TypeError: x)",
    ),
    "other venv": ({"python.same_interpreter": False}, "warning", "python: the server would run in the environment"),
    "no such python": ({"python.server_found": False}, "error", "python: the launch command's python does not exist"),
    "too old": ({"sglang.lacks_hisparse": True, "sglang.version": "0.5.9"}, "error", "sglang: SGLang 0.5.9 has no"),
    "needs newer python": ({"sglang.requires_python": ">=3.99"}, "error", "sglang: SGLang 0.5.12 needs Python >=3.99"),
    "torch not as pinned": (
        {"sglang.unmet": [{"name": "torch", "wanted": "==2.11.0", "installed": "2.9.1"}]},
        "warning",
        "sglang: SGLang 0.5.12 asks for torch==2.11.0 (has 2.9.1)",
    ),
    "CPU torch": ({"torch.cuda": None}, "error", "torch: torch 2.11.0+cu130 is a build without CUDA"),
    "old driver": (
        {"torch.available": False, "torch.warnings": ["The NVIDIA driver on your system is too old"]},
        "error",
        "torch: torch 2.11.0+cu130 (CUDA 13.0) cannot use the GPU: The NVIDIA driver on your system is too old",
    ),
    "no code for the GPU": ({"torch.architectures": ["sm_80"]}, "error", "torch: torch 2.11.0+cu130 has no code for"),
    "no kernels": ({"sgl_kernel": {"missing": True}}, "error", "sgl_kernel: SGLang's compiled kernels"),
    "refused": (
        {"overlays.overlays": {"swap-in": {"outcome": "refused", "reason": "Without it slow.", "evidence": "a fork"}}},
        "warning",
        "overlays: overlay swap-in is refused. Without it slow. (a fork)",
    ),
    "switched off": ({"overlays.mode": "off"}, "warning", "overlays: the plugin is switched off"),
    "not on the whitelist": ({"overlays.allowed": False}, "warning", "overlays: SGLANG_PLUGINS is set and does not"),
    "other plugin": (
        {
            "other plugins.plugins": {
                "theirs": {
                    "module": "theirs.plugin",
                    "mentions": ["sglang.jit_kernel.hisparse.load_cache_to_device_buffer_mla"],
                    "replaces": True,
                    "unread": 0,
                }
            }
        },
        "warning",
        "other plugins: plugin theirs (theirs.plugin) hooks what the plugin repairs, and may take the place of ours",
    ),
    "no nvcc": ({"toolchain.nvcc": None}, "error", "toolchain: there is no CUDA compiler (nvcc)"),
    "broken nvcc": ({"toolchain.nvcc_release": None}, "error", "toolchain: /usr/local/cuda/bin/nvcc does not run"),
    "nvcc of another CUDA": ({"toolchain.nvcc_release": "12.9"}, "warning", "toolchain: nvcc is of CUDA 12.9"),
    "home elsewhere": ({"toolchain.home_nvcc": False}, "error", "toolchain: SGLang's JIT will run /usr/local/cuda/bin"),
    "no libcudart": ({"toolchain.cudart": False}, "warning", "toolchain: the linker will look for libcudart"),
    "no compiler": ({"toolchain.compiler": None}, "error", "toolchain: there is no C++ compiler (c++)"),
    "no ninja": ({"toolchain.ninja": None}, "error", "toolchain: there is no ninja"),
    "full disk": ({"caches.folders.0.free_bytes": 1 << 20}, "error", "caches: 1 MiB are free for compiled kernels"),
    "little disk": ({"caches.folders.0.free_bytes": 500 << 20}, "warning", "caches: 500 MiB are free"),
    "read-only": (
        {"caches.folders.0.problem": "/root is on a read-only file system"},
        "error",
        "caches: no place for compiled kernels (/root/.cache): /root is on a read-only file system",
    ),
    "no GPU": ({"gpu.gpus": [], "gpu.smi_problem": "is not on PATH"}, "error", "gpu: there is no NVIDIA GPU here"),
    "no nvidia-smi": ({"gpu.smi_problem": "gives no answer in 15 s"}, "warning", "gpu: nvidia-smi gives no answer"),
    "too few GPUs": ({"gpu.gpus": GPUS[:4]}, "error", "gpu: the launch command takes 8 GPUs of this host"),
    "hidden GPUs": ({"gpu.visible": "0,1"}, "error", "gpu: the launch command takes 8 GPUs of this host"),
    "half the lanes": ({"gpu.gpus.3.width": 8}, "warning", "gpu: GPU 3 (NVIDIA H200) runs on 8 of 16 PCIe lanes"),
    "GPU in use": ({"gpu.gpus.0.used_mib": 60000}, "warning", "gpu: 59 of 140 GiB of GPU 0 (NVIDIA H200) are in use"),
    "old GPU": (
        {"gpu.gpus.0.capability": "7.5", "torch.architectures": ["sm_75", "sm_90"]},
        "error",
        "gpu: GPU 0 (NVIDIA H200) has compute capability 7.5",
    ),
    "bound to neither": (
        {"gpu.nodes.2": {"cpus": "128-191"}, "gpu.cpus": [130]},
        "warning",
        "gpu: the GPUs are on NUMA",
    ),
    "little memory": ({"memory.available_bytes": 60 * GIB}, "error", "memory: the host pool will pin"),
    "little left to the container": (
        {"memory.cgroup": {"group": "/", "limit_bytes": 64 * GIB, "left_bytes": 50 * GIB}},
        "error",
        "memory: the host pool will pin",
    ),
    "no /proc": ({"memory.available_bytes": None}, "warning", "memory: how much host memory is free cannot be read"),
    "memory may not be locked": (
        {"memory.memlock_bytes": 65536, "memory.may_lock_all": False, "transfer": {"left_out": "on request"}},
        "warning",
        "memory: memory may be locked up to 0.0625 MiB (ulimit -l), and the host pool pins",
    ),
    "no model": ({"model": {"name": "/m", "problem": "/m does not exist", "local": True}}, "error", "model: no model"),
    "damaged config": ({"model": {"name": "/m", "broken": "/m/config.json: x"}}, "error", "model: the model's config"),
    "not DSA": ({"model.architectures": ["LlamaForCausalLM"]}, "error", "model: LlamaForCausalLM is not one of"),
    "no index": (
        {"model.config.index_topk": None},
        "error",
        "model: config.json of DeepseekV32ForCausalLM has no index",
    ),
    "no architecture": ({"model.architectures": None}, "error", "model: config.json names no architecture"),
    "not a number": (
        {"model.config.kv_lora_rank": "many"},
        "error",
        "launch command: the model's configuration is dam",
    ),
    "endless": (
        {"model.config.num_hidden_layers": 10**13},
        "error",
        "launch command: the model's configuration is dam",
    ),
    "infinite": (
        {"model.config.kv_lora_rank": float("inf")},
        "error",
        "launch command: the model's configuration is da",
    ),
    "shards missing": (
        {"model.missing": 2, "model.first_missing": ["a.safetensors"], "model.weights_bytes": 640 * GIB},
        "warning",
        "model: 2 weight files that the index names are not in /models/dsa",
    ),
    "weights too large": ({"model.weights_bytes": 1200 * GIB}, "error", "launch command: the weights take 150 of each"),
    "slow link": ({"transfer.devices.0.gbps": 12.0}, "warning", "transfer: GPU 0 takes 12.0 GB/s from the host, 19%"),
    "cannot pin": ({"transfer": {"register_code": 2, "devices": []}}, "error", "transfer: 256 MB of host memory could"),
}


@pytest.mark.parametrize("name", ONE_CHANGE)
def test_what_one_change_of_the_facts_means(name: str) -> None:
    changes, level, begins = ONE_CHANGE[name]
    found = real(judged(changes))
    assert len(found) == 1 and found[0][0] == level and found[0][1].startswith(begins), found


FLAGS: dict[str, tuple[list[str], str, str]] = {
    "HiSparse is off": (with_flags(drop="--enable-hisparse"), "warning", "the launch command has no --enable-hisparse"),
    "radix cache": (with_flags(drop="--disable-radix-cache"), "error", "SGLang refuses --enable-hisparse without"),
    "hierarchical cache": (
        with_flags("--enable-hierarchical-cache"),
        "error",
        "SGLang refuses --enable-hierarchical-cache together with --disable-radix-cache",
    ),
    "heads that do not divide": (
        with_flags("--tp", "6"),
        "error",
        "128 attention heads cannot be divided among 6 ranks",
    ),
    "ranks that do not divide": (
        with_flags("--dp", "3", "--enable-dp-attention"),
        "error",
        "--dp 3 does not divide --tp 8: with --enable-dp-attention it must",
    ),
    "DP attention of one": (with_flags("--enable-dp-attention"), "warning", "--enable-dp-attention without --dp-size"),
    "attention ranks that do not divide": (
        with_flags("--attn-dp-size", "3"),
        "error",
        "--dp 3 does not divide --tp 8: with --enable-dp-attention it must",
    ),
    "two ways to say attention ranks": (
        with_flags("--attn-dp-size", "2", "--dp", "2"),
        "error",
        "SGLang refuses --dp-size 2 with --attn-dp-size 2",
    ),
    "a decode server's transfer": (
        with_flags("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"),
        "error",
        "refused, for --disaggregation-transfer-backend nixl sends pages",
    ),
    "streaming sessions": (
        with_flags("--enable-streaming-session"),
        "error",
        "refused, for --enable-streaming-session keeps a request's KV",
    ),
    "a prefill server": (
        with_flags("--disaggregation-mode", "prefill"),
        "error",
        "refused, for a prefill server does not decode",
    ),
    "stages of a decode server": (
        with_flags("--disaggregation-mode", "decode", "--tp", "4", "--pp-size", "2"),
        "error",
        "refused, for --pp-size 2 with --disaggregation-mode decode",
    ),
    "nodes": (with_flags("--nnodes", "3"), "error", "--nnodes 3 does not divide the 8 ranks"),
    "data parallelism over nodes": (
        with_flags("--nnodes", "2", "--dp", "2"),
        "error",
        "SGLang refuses --dp-size 2 on 2 nodes",
    ),
    "speculation": (
        with_flags("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
        "error",
        "SGLang 0.5.12: HiSparse with speculative decoding: this SGLang cannot serve it",
    ),
    "dtype": (
        with_flags("--kv-cache-dtype", "fp8_e5m2"),
        "error",
        "--kv-cache-dtype fp8_e5m2 does not go with HiSparse",
    ),
    "backend": (with_flags("--nsa-decode-backend", "fa3"), "error", "decode backend fa3 does not go with HiSparse"),
    "backend of fp8": (
        with_flags("--kv-cache-dtype=fp8_e4m3", "--nsa-prefill-backend", "flashmla_sparse", "--max-total-tokens=64000"),
        "error",
        "prefill backend flashmla_sparse does not go with HiSparse and a KV cache of fp8_e4m3",
    ),
    "no JSON": (with_config("{top_k:2048}"), "error", "--hisparse-config is no JSON"),
    "no object": (with_config("[]"), "error", "--hisparse-config is no JSON object"),
    "fraction": (with_config('{"host_to_device_ratio": 1.5}'), "error", "host_to_device_ratio in --hisparse-config is"),
    "float": (
        with_config('{"host_to_device_ratio": 2.0}'),
        "error",
        "host_to_device_ratio in --hisparse-config is 2.0",
    ),
    "text": (
        with_config('{"device_buffer_size": "4096"}'),
        "error",
        'device_buffer_size in --hisparse-config is "4096"',
    ),
    "huge": (with_config(f'{{"host_to_device_ratio": {10**400}}}'), "error", "host_to_device_ratio in --hisparse-conf"),
    "negative": (with_config('{"top_k": -1}'), "error", "top_k in --hisparse-config is -1"),
    "boolean": (with_config('{"top_k": true}'), "error", "top_k in --hisparse-config is true"),
    "ratio 1": (with_config('{"host_to_device_ratio": 1}'), "warning", "host_to_device_ratio 1 keeps no more"),
    "unknown key": (with_config('{"device_bufer_size": 6144}'), "warning", "--hisparse-config has a key that SGLang"),
    "small buffer": (
        with_config('{"device_buffer_size": 1024}'),
        "error",
        "device_buffer_size 1024 is less than top_k",
    ),
    "odd buffer": (with_config('{"device_buffer_size": 4100}'), "error", "device_buffer_size 4100 is no multiple of"),
    "huge buffer": (
        with_config('{"device_buffer_size": 65536}'),
        "error",
        "device_buffer_size 65536 is more than 32768",
    ),
    "other top_k": (
        with_config('{"top_k": 1024, "device_buffer_size": 4096}'),
        "warning",
        "top_k 1024 in --hisparse-config counts only for the default of device_buffer_size",
    ),
    "block size of later releases": (with_config('{"swap_in_block_size": 512}'), "warning", "swap_in_block_size does"),
    "misspelt flag": (
        with_flags("--enable-hi-sparse"),
        "error",
        "the launch command is refused: --enable-hi-sparse is",
    ),
    "no value": (
        with_flags("--context-length"),
        "error",
        "the launch command is refused: --context-length has no value",
    ),
    "no number": (with_flags("--page-size", "big"), "error", "the launch command is refused: --page-size is 'big'"),
    "too long a context": (
        with_flags("--max-total-tokens", "6400", "--context-length", "100000"),
        "warning",
        "a request of --context-length 100000 does not fit into the host pool's 25600 rows",
    ),
    "too small a pool": (with_flags("--max-total-tokens", "4096"), "error", "the device pool has 4096 slots"),
    "flags in a file": (
        with_flags("--config", "server.yaml"),
        "warning",
        "flags in server.yaml (--config) are not read",
    ),
}


@pytest.mark.parametrize(
    "more",
    [
        ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"),
        ("--attn-dp-size", "2"),
        ("--attn-dp-size", "1"),
    ],
)
def test_what_a_launch_command_may_say(more: tuple[str, ...]) -> None:
    assert real(judged(words=with_flags(*more))) == []


def test_hot_buffers_are_counted_for_every_rank_of_dp_attention() -> None:
    flags = ("--max-total-tokens", "25600", "--max-running-requests", "10")
    for more, told in ((("--attn-dp-size", "2"), False), ((), True)):
        found = [
            f.what for f in judged(words=with_flags(*flags, *more)).findings if "--max-running-requests is" in f.what
        ]
        assert bool(found) == told, found


@pytest.mark.parametrize("name", FLAGS)
def test_what_a_launch_command_means(name: str) -> None:
    words, level, begins = FLAGS[name]
    found = real(judged(words=words))
    assert len(found) == 1 and found[0][0] == level and found[0][1].startswith(f"launch command: {begins}"), found


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({}, "NOTE", "left out of account by the plugin's overlay mixed-chunk"),
        ({"overlays.mode": "off"}, "ERROR", "ends the server"),
        ({"overlays.allowed": False}, "ERROR", "ends the server"),
        ({"overlays.overlays.mixed-chunk.outcome": "skipped"}, "ERROR", "ends the server"),
        ({"overlays": {}}, "ERROR", "ends the server"),
        ({"sglang.mixed_chunk_refused": True}, "ERROR", "SGLang refuses --enable-mixed-chunk"),
    ],
)
def test_mixed_chunks_are_what_the_overlay_makes_of_them(changes: dict[str, Any], level: str, says: str) -> None:
    (found,) = (f for f in judged(changes, with_flags("--enable-mixed-chunk")).findings if "--enable-mixed" in f.what)
    assert found.level.name == level and says in found.what


@pytest.mark.parametrize(
    ("changes", "level"),
    [({}, "ERROR"), ({"model.longer_context": True}, "WARNING"), ({"model.config.rope_scaling": {"factor": 64}}, "")],
)
def test_a_context_that_the_model_does_not_allow(changes: dict[str, Any], level: str) -> None:
    words = with_flags("--context-length", "9999999")
    found = [f.level.name for f in judged(changes, words).findings if "configuration allows" in f.what]
    assert found == ([level] if level else [])


@pytest.mark.parametrize("failure", ["ConfigError: SGLANG_X: 'a' is no b", "FlagError: --hisparse-plugin-skip: nope"])
def test_a_setting_without_meaning_is_an_error(failure: str) -> None:
    (found,) = (f for f in judged(failures={"overlays": failure}).findings if f.probe == "overlays")
    assert found.level.name == "ERROR" and found.remedy == "correct the flag or the environment variable"


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ('{"host_to_device_ratio": 2.5}', "for host_to_device_ratio give 2 or 3"),
        ('{"host_to_device_ratio": 2.0}', "for host_to_device_ratio give 2"),
        ('{"device_buffer_size": "4096"}', "for device_buffer_size give 4096, without quotes"),
        ('{"top_k": 0.5}', "for top_k give a whole number from 1 to 16777216"),
        ('{"top_k": true}', "for top_k give a whole number from 1 to 16777216"),
        ("{top_k:2048}", "write it in single quotes: --hisparse-config '{\"device_buffer_size\": 4096}'"),
    ],
)
def test_the_remedy_names_the_key(config: str, remedy: str) -> None:
    assert [f.remedy for f in judged(words=with_config(config)).findings if f.level] == [remedy]


def test_what_was_left_out_on_request_is_not_blamed_on_the_release() -> None:
    """By way of a third overlay, too, and where two need each other."""

    def entry(*names: str) -> dict[str, str]:
        return {"outcome": "refused", "reason": "Lost.", "evidence": f"it only makes sense with {', '.join(names)}"}

    facts = {
        "a": {"outcome": "skipped", "reason": "left out on request"},
        "b": entry("a", "c"),
        "c": entry("b"),
        "d": {**entry(), "evidence": "expected x; found y"},
    }
    found = judged({"overlays.overlays": facts, "overlays.skip": ["a"]}).findings
    remedies = {f.what.split()[1]: f.remedy for f in found if f.probe == "overlays"}
    assert remedies["b"] == remedies["c"] == ("take a out of --hisparse-plugin-skip (or SGLANG_HISPARSE_PLUGIN_SKIP)")
    assert remedies["d"].startswith("use a release from the support matrix")


def test_the_remedies_sizes_fit() -> None:
    """The pool that the flags ask for, by hand; what is suggested must fit, and a page more must not."""
    words = with_flags("--max-total-tokens", "64000")
    free = 64 * GIB
    (found,) = (f for f in judged({"memory.available_bytes": free + 10 * GIB}, words).findings if f.level)
    assert f"{8 * (64000 + 0.25) * HOST_POOL / GIB:.1f} GiB (8 ranks" in found.what
    slots = int(found.remedy.split("--max-total-tokens ")[1].split(",")[0])
    assert 8 * HOST_POOL * slots <= free < 8 * HOST_POOL * (slots + 2 * 64)
    assert not real(judged({"memory.available_bytes": free + 10 * GIB}, with_flags("--max-total-tokens", str(slots))))


def test_tables_and_index_rows_that_sglang_does_not_count() -> None:
    """To 0.5.16 the budget forgets the index rows of the host's tokens: 132 bytes x 61 layers x (ratio - 1) a slot."""
    words = with_config('{"host_to_device_ratio": 20}')
    old = {"sglang.version": "0.5.12", "memory.available_bytes": 10**14}
    (found,) = (f for f in judged(old, words).findings if f.level)
    assert (found.probe, found.level.name) == ("launch command", "WARNING")  # the fraction is SGLang's own to choose
    assert "larger than it reckons with" in found.what
    assert judged(old, [*words, "--mem-fraction-static", "0.88"]).worst == finding.Level.ERROR
    assert real(judged({**old, "sglang.version": "0.5.18"}, words)) == []


def test_without_weights_the_estimate_is_only_a_limit() -> None:
    changes = {"memory.available_bytes": 60 * GIB, "model.weights_bytes": 0, "sglang.version": "0.5.18"}
    found = real(judged(changes))
    assert [level for level, _ in found] == ["warning"] and "up to" in found[0][1]


@pytest.mark.parametrize(
    ("release", "dtype", "code"),
    [("0.5.10.post1", "bfloat16", 0), ("0.5.10.post1", "fp8_e4m3", 2), ("0.5.12", "auto", 0)],
)
def test_blackwell_takes_fp8_unless_told_otherwise(release: str, dtype: str, code: int) -> None:
    backends = {"bfloat16": ["flashmla_sparse"]} if release != "0.5.12" else HEALTHY["sglang"]["backends_by_dtype"]
    gpus = [{**gpu, "name": "NVIDIA B200", "capability": "10.0"} for gpu in GPUS]
    changes = {"sglang.version": release, "sglang.backends_by_dtype": backends, "gpu.gpus": gpus}
    assert judged(changes, with_flags("--kv-cache-dtype", dtype, "--max-total-tokens", "64000")).worst == code


def test_the_flags_top_k_counts_to_0_5_11() -> None:
    changes = {"sglang.version": "0.5.11", "sglang.top_k_from_model": False, "model.config.index_topk": 1024}
    assert real(judged(changes))[0][1].startswith("launch command: top_k is 2048, but the model's")


def test_what_was_pinned_past_the_limit_is_evidence() -> None:
    limit = {"memory.memlock_bytes": 65536, "memory.may_lock_all": False}
    assert real(judged(limit)) == []
    rdma = real(judged(limit, with_flags("--disaggregation-mode", "decode")))
    assert [level for level, _ in rdma] == ["warning"] and "RDMA registers it" in rdma[0][1]


@pytest.mark.parametrize("probe", [probe.name for probe in PROBES])
@pytest.mark.parametrize("failure", ["died of SIGSEGV", "no answer in 20 s", "OSError: x", "ImportError: x"])
def test_a_probe_that_died_is_a_finding_and_no_end(probe: str, failure: str) -> None:
    examination = judged(failures={probe: failure})
    assert real(examination)
    assert {
        f.probe for f in examination.findings if f.level and f.what.startswith(f"{probe} could not be judged")
    } == set()
    report.write(examination, io.StringIO())


@pytest.mark.parametrize("facts", [{}, {"gpus": None}, [], "text", None, 7])
@pytest.mark.parametrize("probe", [probe.name for probe in PROBES])
def test_facts_of_no_known_shape_end_nothing(probe: str, facts: Any) -> None:
    examination = judged({probe: facts})
    report.write(examination, io.StringIO())
    assert report.as_json(examination)["verdict"]


def test_a_finding_has_a_remedy() -> None:
    with pytest.raises(ValueError):
        finding.error("something is wrong", "")


def test_the_worst_comes_first_and_is_the_verdict() -> None:
    examination = judged({"gpu.gpus.3.width": 8, "toolchain.nvcc": None})
    assert [f.level.name for f in examination.findings if f.level] == ["ERROR", "WARNING"]
    assert report.verdict(examination).startswith("will not serve: there is no CUDA compiler")
    assert report.verdict(judged({"gpu.gpus.3.width": 8})).startswith("will serve, but GPU 3 (NVIDIA H200) runs on 8")
    out = io.StringIO()
    report.write(examination, out)
    assert out.getvalue().count(" -> ") == len(examination.findings)
    assert "\nVerdict: will not serve: there is no CUDA compiler" in out.getvalue()


def test_the_figures_by_hand() -> None:
    assert DSA["num_hidden_layers"] * 4 * 1152 == HOST_POOL
