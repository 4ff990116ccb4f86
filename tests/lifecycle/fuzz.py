"""The state machine for as long as one likes: `make fuzz`.

A failure is shrunk and written to `regressions/`, where the suite plays it from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

from . import launch, register
from .launch import Ended
from .process import ALL_MODES

REGRESSIONS = Path(__file__).parent / "regressions"
STEPS = 20


def main() -> int:
    options = _options()
    reports: list[dict] = []
    for release in options.release:
        hunt = {"seconds": options.seconds / len(ALL_MODES), "steps": STEPS, "seed": options.seed}
        hunt["collect"] = options.variant == "off"
        job = [{"variant": options.variant, "mode": mode, "hunts": [hunt]} for mode in ALL_MODES]
        try:
            results = launch.hunt(release, job, options.seconds + 900, _say)
        except Ended as error:
            _say(str(error))
            reports.append({"release": release, "ended": str(error)})
            continue
        reports += [
            {"release": release, "variant": result["variant"], "mode": result["mode"], **result["hunts"][0]}
            for result in results
        ]
    for report in reports:
        if report.get("failure"):
            report["script"] = str(write(report))
    if options.json:
        print(json.dumps(reports, indent=1))
    else:
        print("\n".join(map(_line, reports)))
    return int(any(report.get("failure") or "ended" in report for report in reports))


def write(report: dict) -> Path:
    """The smallest script of a failure, as a file of its own."""
    lines, evidence = report["failure"]
    text = "\n".join([f"# found on {report['release']}, {report['mode']}, seed {report['seed']}", *lines, ""])
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    folder = REGRESSIONS / ("decode" if report["mode"].startswith("decode") else "")
    path = folder / f"{report['release']}-{report['mode']}-{digest}.txt"
    path.write_text(f"# {' '.join(evidence.split())[:300]}\n{text}")
    return path


def _line(report: dict) -> str:
    if "ended" in report:
        return f"{report['release']}: did not come to an end"
    where = f"{report['release']} {report['mode']} ({report['variant']})"
    counts = f"{report['different']} different sequences, {report['events']} events, {report['took']:.0f} s"
    known = "".join(f"\n    {name}: sequence {first}" for name, (first, _, _) in sorted(report["known"].items()))
    failed = f"\n    FAILED: {report['failure'][1][:500]}\n    {report['script']}" if report["failure"] else ""
    return f"{where}: {counts}{known}{failed}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lifecycle.fuzz", description=__doc__)
    parser.add_argument("--release", nargs="+", default=register.RELEASES, metavar="R", help="default: all tested")
    parser.add_argument("--seconds", type=float, default=60, help="for each release (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=("plugin", "off"), default="plugin", help="off: what SGLang alone shows")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of lines")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
