"""Arguments that would end a server later end it while they are read: one line, exit code 1, nothing loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from sites import Site, server_arguments

SPECULATION = {
    "--speculative-algorithm": "EAGLE",
    "--speculative-eagle-topk": "1",
    "--speculative-num-steps": "2",
    "--speculative-num-draft-tokens": "3",
}
NOWHERE = "install 0.5.10 to 0.5.15, where the plugin serves it, or 0.5.22 or later"


def config(text: str) -> tuple[str, ...]:
    return "--hisparse-config", text


def speculation(*extra: str, **changed: str) -> tuple[str, ...]:
    flags = SPECULATION | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return *(part for flag in flags.items() for part in flag), *extra


ENDED = {  # release, flags, what the line says
    "ratio": (
        "0.5.10.post1",
        config('{"host_to_device_ratio": 2.5}'),
        "host_to_device_ratio is 2.5 in --hisparse-config",
    ),
    "page": ("0.5.23", config('{"device_buffer_size": 4100}'), "no multiple of the page of 64 tokens"),
    "mtp": ("0.5.11", speculation(*config('{"top_k": 64, "device_buffer_size": 256}')), "--json-model-override-args"),
    "buffer": (
        "0.5.12",
        speculation(*config('{"top_k": 64, "device_buffer_size": 128}')),
        "3 draft tokens select up to 3 x 64 rows, the hot buffer has 128: set device_buffer_size to 192",
    ),
    "slots": (
        "0.5.12",
        speculation("--max-running-requests", "9", "--max-total-tokens", "36864"),
        "9 of them need 37440 rows and the device pool has 36864: set --max-running-requests to 8",
    ),
    "ngram": (
        "0.5.12",
        speculation(speculative_algorithm="NGRAM"),
        "speculative_algorithm is 'NGRAM': use --speculative",
    ),
    "tree": (
        "0.5.15",
        speculation(speculative_eagle_topk="4", speculative_num_draft_tokens="4"),
        "speculative_eagle_topk is 4: use --speculative-eagle-topk 1",
    ),
    "drafts": (
        "0.5.23",
        speculation(speculative_num_steps="4"),
        "5 draft tokens are not among the 2 to 4 that this SGLang's kernel takes: set --speculative-num-steps to 3",
    ),
    "nowhere": ("0.5.18", speculation(), NOWHERE),
    "strict": ("0.5.20", speculation("--hisparse-plugin", "strict"), NOWHERE),
}


@pytest.mark.parametrize(("sglang", "flags", "says"), ENDED.values(), ids=ENDED, indirect=["sglang"])
def test_it_ends_with_the_reason(site: Site, sglang: Path, model: Path, flags: tuple[str, ...], says: str) -> None:
    ended = site.run(*server_arguments(model, *flags), sglang=sglang)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("HiSparse plugin: ")]
    assert ended.returncode == 1, ended.stdout[-3000:]
    assert len(lines) == 1 and says in lines[0], ended.stdout[-3000:]
    assert "Traceback" not in ended.stdout and "Load weight begin" not in ended.stdout, ended.stdout[-3000:]
