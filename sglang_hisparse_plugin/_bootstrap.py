"""Activation on SGLang releases without a plugin loader, started by ``sglang_hisparse_plugin.pth`` in every process.

Until something imports SGLang this is one entry in ``sys.meta_path``: no import beyond `sys`.
"""

import sys


class _Watcher:
    """Sees the first import of ``sglang``, steps aside and opens the plugin's door."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "sglang":
            sys.meta_path.remove(self)
            _activate()


def _activate() -> None:
    try:
        from .plugin import activate

        activate()
    except Exception as error:
        import os

        print(f"HiSparse plugin: not active: {type(error).__name__}: {error}", file=sys.stderr)
        if os.environ.get("SGLANG_HISPARSE_PLUGIN") == "strict":
            raise SystemExit(1) from error


if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Watcher())
