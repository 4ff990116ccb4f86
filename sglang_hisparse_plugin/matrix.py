"""The support matrix: what the overlays' probes say of every SGLang release, recorded once from its wheel.

``docs/matrix.json`` is the record; ``docs/matrix.md`` and the table in ``README.md`` are written from it::

    python -m sglang_hisparse_plugin.matrix record WHEEL ...   # probe wheels, then write
    python -m sglang_hisparse_plugin.matrix write
    python -m sglang_hisparse_plugin.matrix check              # exit code 1 if a file is not what `write` would write
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from .installation import Installation, find
from .overlays import OVERLAYS
from .patching.outcome import Absent, Defective, Fixed, Unknown

#: Releases whose real classes the test suite runs; the others are probed.
TESTED = ("0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.13", "0.5.15", "0.5.18", "0.5.20", "0.5.23")

WORDS = {Defective: "applied", Fixed: "upstream", Absent: "absent", Unknown: "refused"}
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
ROOT = Path(__file__).resolve().parents[1]

Record = dict[str, dict[str, Any]]
"""By release: the wheel's name and sha256, what activates the plugin, and word and evidence per overlay."""


def probe(sglang: Installation) -> dict[str, Any]:
    """What becomes of each overlay on this SGLang."""
    overlays = {}
    for overlay in OVERLAYS:
        verdict = overlay.probe(sglang.tree)
        evidence = (
            f"expected {verdict.expected}, found {verdict.found}" if isinstance(verdict, Unknown) else verdict.evidence
        )
        overlays[overlay.id] = {"outcome": WORDS[type(verdict)], "evidence": evidence}
    return {"activated_by": "entry point" if sglang.has_loader else ".pth", "overlays": overlays}


def record(wheels: Iterable[Path], known: Record) -> Record:
    """`known` with the releases in `wheels` probed anew, in the order of releases."""
    for wheel in wheels:
        release = str(parse_wheel_filename(wheel.name)[1])
        with TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if n.endswith((".py", "/METADATA"))])
            found = probe(find(Path(folder)))
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        known[release] = {"wheel": wheel.name, "sha256": sha256, **found}
    return dict(sorted(known.items(), key=lambda item: Version(item[0])))


def documents(known: Record, root: Path) -> dict[Path, str]:
    """The text of each file that shows the matrix.

    Raises:
        ValueError: the record does not have the overlays there are, or the README no place for the table.
    """
    overlays = [overlay.id for overlay in OVERLAYS]
    if stale := [release for release, entry in known.items() if [*entry["overlays"]] != overlays]:
        raise ValueError(
            f"the overlays have changed since SGLang {', '.join(stale)} was probed: record the wheels anew"
        )
    readme = root / "README.md"
    before, begin, rest = readme.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} lacks the lines {BEGIN} and {END}, between which the matrix goes")
    return {
        readme: f"{before}{BEGIN}\n{summary(known)}{END}{after}",
        root / "docs" / "matrix.json": json.dumps(known, indent=2) + "\n",
        root / "docs" / "matrix.md": details(known),
    }


def summary(known: Record) -> str:
    """A row for each run of releases that get the same treatment; releases the suite tests in bold."""
    rows = ["| SGLang | activated by | applied | fixed upstream | refused |", "|---|---|---|---|---|"]
    for _, group in itertools.groupby(known, lambda release: _treatment(known[release])):
        releases = list(group)
        names = ", ".join(f"**{r}**" if r in TESTED else r for r in releases)
        entry = known[releases[0]]
        if {found["outcome"] for found in entry["overlays"].values()} == {"absent"}:
            rows.append(f"| {names} | nothing to do | no HiSparse | | |")
            continue
        cells = [_listed(entry, word) for word in ("applied", "upstream", "refused")]
        rows.append(f"| {names} | {entry['activated_by']} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def details(known: Record) -> str:
    """The page ``docs/matrix.md``."""
    lines = [
        "# Support matrix",
        "",
        "Written by `python -m sglang_hisparse_plugin.matrix` from `docs/matrix.json`, the record of what every probe "
        "says of every release. Releases in bold are run by the test suite on their real wheels; the others are "
        "probed. A release that is not here is probed when the server starts, as all are: by structure, not by number.",
        "",
        summary(known),
        "`applied`: the release has the defect, the plugin repairs it. `upstream`: the release has a fix of its own. "
        "`refused`: the probe does not know the code. `absent`: the release has no such feature, so nothing to repair.",
        "",
        "## Overlays",
    ]
    for overlay in OVERLAYS:
        lines += ["", f"### {overlay.id}", "", f"{overlay.symptom}", "", f"Upstream: {overlay.origin}", ""]
        lines += ["| SGLang | outcome | evidence |", "|---|---|---|"]
        entries = [(release, entry["overlays"][overlay.id]) for release, entry in known.items()]
        for found, group in itertools.groupby(entries, lambda entry: entry[1]):
            releases = _span([release for release, _ in group])
            lines.append(f"| {releases} | {found['outcome']} | {found['evidence'].replace('|', '&#124;')} |")
    lines += ["", "## Wheels", "", "| SGLang | wheel | sha256 |", "|---|---|---|"]
    lines += [f"| {release} | `{e['wheel']}` | `{e['sha256']}` |" for release, e in known.items()]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when `check` finds a file that is out of date, or the record cannot be shown."""
    parser = argparse.ArgumentParser(prog="python -m sglang_hisparse_plugin.matrix", description="The support matrix.")
    parser.add_argument("action", choices=("record", "write", "check"))
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL", help="wheels of SGLang to probe (record)")
    options = parser.parse_args(arguments)
    path = ROOT / "docs" / "matrix.json"
    known = record(options.wheels, json.loads(path.read_text("utf-8")) if path.exists() else {})
    try:
        stale = [(file, text) for file, text in documents(known, ROOT).items() if _differs(file, text)]
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    for file, text in stale:
        if options.action == "check":
            print(f"{file.relative_to(ROOT)} is out of date: {parser.prog} write", file=sys.stderr)
        else:
            file.write_text(text, "utf-8")
    return int(options.action == "check" and bool(stale))


def _span(releases: list[str]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"


def _treatment(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["activated_by"], [found["outcome"] for found in entry["overlays"].values()]


def _listed(entry: dict[str, Any], word: str) -> str:
    return ", ".join(f"`{name}`" for name, found in entry["overlays"].items() if found["outcome"] == word) or "-"


def _differs(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text("utf-8") != text


if __name__ == "__main__":
    sys.exit(main())
