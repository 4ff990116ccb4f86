"""What a patch repairs: its scenarios on the source just before it in the series, and just after it.

    python -m lifecycle.reproduce RELEASE/PATCH, as in 0.5.23/staging-memory

Exit code 0 if the scenarios, which the patch's header names, find something without it and nothing with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_hisparse_plugin.demo import releases
from sglang_hisparse_plugin.patching import patchfile, series

from . import launch
from .process import MODES

TIMEOUT_S = 600
SCRIPTS = Path(__file__).parent / "regressions"
HUNG = "the ranks wait for each other for ever"


def main(name: str) -> int:
    release, _, patch_id = name.partition("/")
    stored = series.stored()
    patches = series.read(stored[release]) if release in stored else ()
    ids = [patch.id for patch in patches]
    if patch_id not in ids:
        known = [f"{r}/{patch.id}" for r in stored for patch in series.read(stored[r]) if scenarios(patch)]
        print(f"no such patch: {name}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    at = ids.index(patch_id)
    patch = patches[at]
    print(f"{name}: {patch.fields['Description'].partition(chr(10))[0]}")
    if not scenarios(patch):
        print("its header names no scenario", file=sys.stderr)
        return 2
    before = found(release, patches[:at], scenarios(patch))
    after = found(release, patches[: at + 1], scenarios(patch))
    for label, results in (("without it", before), ("with it", after)):
        print(f"\n{label}")
        for scenario, texts in results.items():
            print(f"  {scenario}: {texts[0] if texts else 'as it should be'}")
    return 0 if all(before.values()) and not any(after.values()) else 1


def scenarios(patch: patchfile.Patch) -> list[str]:
    """The scenarios that a patch's header names."""
    return patch.fields.get("Scenarios", "").replace(",", " ").split()


def found(release: str, patches: tuple[patchfile.Patch, ...], names: list[str]) -> dict[str, list[str]]:
    """What each scenario finds on a release with these patches, of both modes."""
    with tempfile.TemporaryDirectory() as scratch:
        source, tree = releases.fetch(release), Path(scratch) / "tree"
        changes = [change for step in series.steps(patches, source) for change in step.changes]
        series.lay_over(source, {change.path: change.after for change in changes}, tree)
        env = launch.environment(tree if changes else source, "off", TMPDIR=scratch)
        if names == ["empty-on-one"]:  # of two ranks
            answers = _told(env, "ranks", "off", *names)["answers"]
            return {names[0]: [HUNG] if answers == [None, None] else [t for a in answers for t in a["findings"]]}
        if names[0].startswith("decode/"):  # scripts of the state machine, for a decode worker
            texts = [(SCRIPTS / f"{name}.txt").read_text() for name in names]
            job = [{"variant": "off", "mode": f"decode-{mode}", "scripts": texts} for mode in MODES]
            told = _told(env, "hunt", release, json.dumps(job))
            return {n: [t for part in told for t in part["found"][i]] for i, n in enumerate(names)}
        results = _told(env, "process", "off", *names)
    return {name: [text for mode in results.values() for text in _texts(mode[name])] for name in names}


def _texts(result: dict | None) -> list[str]:
    if result is None:
        return ["the process ended in the middle of the scenario"]
    return [*filter(None, [result["crash"]]), *result["findings"]]


def _told(env: dict[str, str], module: str, *arguments: str):
    command = [sys.executable, "-m", f"{__package__}.{module}", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "[{"))]
    if len(lines) != 1:
        raise SystemExit(f"the scheduler did not start:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(lines[0])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1]))
