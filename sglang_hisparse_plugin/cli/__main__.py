"""``python -m sglang_hisparse_plugin.cli``."""

from . import main

raise SystemExit(main())
