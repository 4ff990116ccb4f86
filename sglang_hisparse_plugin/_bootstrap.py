"""Activation on SGLang releases without a plugin loader.

``sglang_hisparse_plugin.pth`` puts a watcher in ``sys.meta_path`` of every Python process with one expression and no
import; in a virtual environment twice, for `site` reads the file twice. At the first import of ``sglang`` it calls
`activate`.
"""

import os
import sys


def activate() -> None:
    """Open the plugin's door, or say why not; SGLang goes on without it, unless the user asked for strict."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "watches", "") != "sglang"]
    try:
        from .plugin import activate as open_door

        open_door()
    except Exception as error:
        print(f"HiSparse plugin: not active: {type(error).__name__}: {error}", file=sys.stderr)
        if os.environ.get("SGLANG_HISPARSE_PLUGIN") == "strict":
            raise SystemExit(1) from error
