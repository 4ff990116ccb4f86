"""Attributes that an object has while SGLang's own code runs, and not afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def meanwhile(owner: Any, **attributes: Any) -> Iterator[None]:
    """`owner` itself, not its class, has these `attributes`; in the end it has those of its own that it had."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)
