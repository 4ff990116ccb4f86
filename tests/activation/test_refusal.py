"""A server that cannot serve speculation with HiSparse ends before weights are loaded, and says why.

That the guard stops no other server is seen in test_servers.py, which starts every release in strict mode.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Site, server_arguments

SPECULATION = (
    *("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"),
    *("--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3"),
)
WHY = "Install 0.5.12 to 0.5.15, where the plugin serves it, or 0.5.22 or later"


@pytest.mark.parametrize(("sglang", "mode"), [("0.5.18", "auto"), ("0.5.20", "strict")], indirect=["sglang"])
def test_where_nothing_serves_it_the_launcher_ends_with_the_reason(
    site: Site, sglang: Path, model: Path, mode: str
) -> None:
    ended = site.run(*server_arguments(model, "--hisparse-plugin", mode, *SPECULATION), sglang=sglang)
    assert ended.returncode != 0, ended.stdout[-3000:]
    assert WHY in ended.stdout and "Load weight begin" not in ended.stdout, ended.stdout[-3000:]


@pytest.mark.parametrize("sglang", ["0.5.12"], indirect=True)
def test_where_it_is_served_what_cannot_be_right_is_refused_before_weights_are_loaded(
    site: Site, sglang: Path, model: Path
) -> None:
    argv = server_arguments(model, "--hisparse-plugin-skip", "swap-in", *SPECULATION)
    ended = site.run(*argv, sglang=sglang)
    assert ended.returncode != 0, ended.stdout[-3000:]
    assert "SGLang's own kernel knows no draft tokens: do not skip it" in ended.stdout, ended.stdout[-3000:]
    assert "Load weight begin" not in ended.stdout


@pytest.mark.parametrize("sglang", ["0.5.11"], indirect=True)
def test_a_next_token_layer_that_sglang_does_not_find_is_refused_with_the_remedy(
    site: Site, sglang: Path, model: Path
) -> None:
    ended = site.run(*server_arguments(model, *SPECULATION), sglang=sglang)
    assert ended.returncode != 0, ended.stdout[-3000:]
    assert "--json-model-override-args" in ended.stdout and "Load weight begin" not in ended.stdout
