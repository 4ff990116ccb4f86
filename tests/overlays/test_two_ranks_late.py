"""Two ranks with gloo agree on whose transfer is over, whichever of them hears of it first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sglang_hisparse_plugin.demo.server import free_port

TESTS = Path(__file__).parent.parent


def test_both_ranks_poll_the_same_transfers() -> None:
    """A client gives "a" up. Rank 0 hears that all was sent, rank 1 of a failure of "c"; later rank 1 hears, too."""
    port = str(free_port())
    command = [sys.executable, "-m", f"{__package__}.two_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port], cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    answers = [rank.communicate(timeout=180) for rank in ranks]
    assert not any(rank.returncode for rank in ranks), answers
    zero, one = (json.loads(out.splitlines()[-1]) for out, _ in answers)
    assert zero["told"] == one["told"] == [["a", "b", "c"], ["b", "c"], ["b", "c"], ["a", "b", "c"]]
    assert (zero["alone"], one["alone"]) == (True, False), "each for itself would have polled another set"
