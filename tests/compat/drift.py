"""Digests of every function that an overlay reads or hooks, in every tested release.

They change when a wheel does (it must not) or when an overlay looks at another function. After reading the function,
write them anew::

    python -m tests.compat.drift
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from pathlib import Path

from sglang_hisparse_plugin.demo.releases import fetch
from sglang_hisparse_plugin.matrix import TESTED
from sglang_hisparse_plugin.overlays import OVERLAYS
from sglang_hisparse_plugin.patching.outcome import Defective
from sglang_hisparse_plugin.patching.source import FunctionSource, SourceTree

RECORD = Path(__file__).with_name("digests.json")


class Watched(SourceTree):
    """A source tree that remembers which functions were asked for and are there."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.seen: dict[str, FunctionSource] = {}

    def function(self, dotted: str, qualname: str) -> FunctionSource | None:
        found = super().function(dotted, qualname)
        if found is not None:
            self.seen[found.target] = found
        return found


def hooked(tree: SourceTree) -> list[tuple[str, str]]:
    """Overlay id and target of every hook that would go into this source."""
    needed = [overlay for overlay in OVERLAYS if isinstance(overlay.probe(tree), Defective)]
    return [(overlay.id, hook.target) for overlay in needed for hook in overlay.hooks(tree)]


def digests(root: Path) -> dict[str, str]:
    """Digest of the text of each function the overlays read or hook in the source below `root`, by target."""
    tree = Watched(root)
    for _, target in hooked(tree):
        tree.function(*target.split(":"))
    return {target: digest(found) for target, found in sorted(tree.seen.items())}


def digest(function: FunctionSource) -> str:
    """Of its lines, decorators included, wherever in the file and however deep they stand."""
    node = function.node
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = function.path.read_text("utf-8").split("\n")[first - 1 : node.end_lineno]
    return hashlib.sha256(textwrap.dedent("\n".join(lines)).encode()).hexdigest()[:16]


if __name__ == "__main__":
    RECORD.write_text(json.dumps({release: digests(fetch(release)) for release in TESTED}, indent=1) + "\n")
