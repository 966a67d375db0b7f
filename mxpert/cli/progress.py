"""Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Advance = Callable[[float, float, str], None]
"""Called with (work done, work in all, what comes next)."""
LINE_SECONDS = 5.0


@contextmanager
def progress(console: Console, title: str) -> Iterator[Advance]:
    """Show how far a command is and how long it still takes.

    Args:
        console: standard error. title: what the command does, for example "quantising".

    Yields:
        The function to call as the work advances.
    """
    if not console.is_terminal:
        yield _Lines(console, title).advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=f"{title}: {escape(what)}"
        )


class _Lines:
    """Prints the first call and then at most one line every LINE_SECONDS."""

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title = console, title
        self.began = time.monotonic()
        self.printed: float | None = None

    def advance(self, done: float, total: float, what: str) -> None:
        now = time.monotonic()
        if self.printed is not None and now - self.printed < LINE_SECONDS:
            return
        self.printed = now
        line = f"{self.title}: {100 * done / max(total, 1):.0f} %, {what}"
        if done > 0:
            line += f", {duration((now - self.began) * (total - done) / done)} left"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A rough duration in words.

    >>> duration(4.2), duration(100), duration(7000)
    ('about 5 s', 'about 2 min', 'about 2 h')
    """
    if seconds < 90:
        return f"about {max(1, 5 * round(seconds / 5))} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:.0f} h"
