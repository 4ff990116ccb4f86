"""Which SGLang is installed and where, found without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .patching.source import SourceTree

LOADER = "sglang/srt/plugins"


class NotInstalled(Exception):
    """There is no SGLang where it was looked for; the text says where and what to do."""


@dataclass(frozen=True)
class Installation:
    """A folder that holds the package ``sglang``: site-packages, a checkout's ``python`` or an unpacked wheel."""

    root: Path

    @cached_property
    def tree(self) -> SourceTree:
        """The source of this SGLang."""
        return SourceTree(self.root)

    @cached_property
    def version(self) -> str:
        """The release as its metadata names it; "unknown" for a source tree without metadata."""
        names = (d.version for d in importlib.metadata.distributions(path=[str(self.root)]) if d.name == "sglang")
        return next(names, "unknown")

    @property
    def has_loader(self) -> bool:
        """Whether this SGLang loads plugins itself (0.5.11 and later)."""
        return (self.root / LOADER / "__init__.py").is_file()


def find(path: Path | None = None) -> Installation:
    """The SGLang in `path`, or the one that ``import sglang`` would take.

    Raises:
        NotInstalled: there is none.
    """
    if path is not None:
        if not (path / "sglang" / "srt").is_dir():
            raise NotInstalled(f"{path} has no folder sglang/srt; give the folder that holds the package sglang")
        return Installation(path.resolve())
    spec = importlib.util.find_spec("sglang")
    folders = [Path(place) for place in (spec.submodule_search_locations if spec else None) or ()]
    sglang = next((folder for folder in folders if (folder / "srt").is_dir()), None)
    if sglang is None:
        raise NotInstalled("SGLang is not installed here; install it, or name an unpacked one with --sglang-path")
    return Installation(sglang.resolve().parent)
