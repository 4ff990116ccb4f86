"""One process: start one release's scheduler with the plugin, run every case in a fork of that, print JSON.

python -m speculative.process [CASE ...]
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable

from lifecycle.process import _forked, _register


def main(*wanted: str) -> None:
    _register()
    import sglang.srt.managers.scheduler  # noqa: F401  (once, for every fork)

    from speculative import cases, exhaustion, rig

    scheduler = rig.start()
    known = cases.CASES | exhaustion.CASES
    results = {name: _forked(lambda name=name: _run(known[name], scheduler)) for name in wanted or known}
    print(json.dumps(results), flush=True)
    os._exit(0)  # no thread of SGLang's has anything to finish


def _run(case: Callable[[object], dict[str, object]], scheduler: object) -> dict[str, object]:
    try:
        return case(scheduler)
    except Exception:
        return {"found": [traceback.format_exc(limit=-6)]}


if __name__ == "__main__":
    main(*sys.argv[1:])
