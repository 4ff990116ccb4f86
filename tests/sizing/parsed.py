"""In a process of one release: what its real ServerArgs make of flags on a GPU of so much memory.

    python -m sizing.parsed < [{"gpu_mib": N, "config": {...}, "flags": [...]}, ...]

Prints for each what was parsed, as the server reads it after its own checks and defaults, or the refusal. Only the size
of the GPU's memory is not asked of a driver.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ASKED = (
    *("tp_size", "dp_size", "enable_dp_attention", "nnodes", "enable_hisparse", "hisparse_config", "kv_cache_dtype"),
    *("page_size", "context_length", "max_running_requests", "max_total_tokens", "mem_fraction_static"),
    *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
)


def parse(config: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            parsed = prepare_server_args([f"--model-path={folder}", "--device=cuda", "--skip-tokenizer-init", *flags])
            if hasattr(parsed, "resolve_once"):  # from 0.5.20: what the server does first
                parsed.resolve_once()
        except (AssertionError, ValueError, argparse.ArgumentError, SystemExit) as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(ImportError):  # from 0.5.20: what was resolved is beside the record
            from sglang.srt.arg_groups.overrides import resolved_view

            parsed = resolved_view(parsed)
        found = {name: getattr(parsed, name) for name in ASKED}
        if (groups := getattr(parsed, "attn_dp_size", 1)) > 1:  # what newer releases make of --enable-dp-attention
            found |= {"enable_dp_attention": True, "dp_size": groups * found["dp_size"]}
        graphs = getattr(parsed, "cuda_graph_config", None)
        return {**found, "graphs": graphs.decode.max_bs if graphs else parsed.cuda_graph_max_bs}


def main() -> None:
    from sglang.srt.utils import common

    jobs = json.load(sys.stdin)
    found = []
    for job in jobs:
        with contextlib.redirect_stdout(sys.stderr):
            common.get_device_memory_capacity = lambda *_, mib=job["gpu_mib"], **__: mib
            for name in ("server_args", "arg_groups.memory_hook"):
                if module := sys.modules.get(f"sglang.srt.{name}"):
                    module.get_device_memory_capacity = common.get_device_memory_capacity
            found.append(parse(job["config"], job["flags"]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
