"""How far a demo is: spinners for a person, else plain lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Say = Callable[[str], None]


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[str], Say]]:
    """Something that begins a task and returns what says how far it is."""
    if not console.is_terminal:
        yield lambda name: _line_by_line(console, name)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as shown:

        def begin(name: str) -> Say:
            task = shown.add_task(name)
            return lambda text: shown.update(task, description=f"{name}: {text}")

        yield begin


def _line_by_line(console: Console, name: str) -> Say:
    last = ""

    def say(text: str) -> None:
        nonlocal last
        if text != last:
            line(console, f"{name}: {text}")
        last = text

    return say


def line(console: Console, text: str) -> None:
    """As it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
