"""Progress of long work on a terminal: rate and time left; silent everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

__all__ = ["Advance", "progress"]


class Advance(Protocol):
    """Reports `count` finished units and, optionally, what was found so far."""

    def __call__(self, count: int = 1, note: str | None = None) -> None: ...


# The display that is live in this context: a terminal can show only one at a time.
_shown: ContextVar[Progress | None] = ContextVar("levelhead_progress", default=None)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "–/s", style="dim")


def _silent(count: int = 1, note: str | None = None) -> None:
    return None


@contextmanager
def progress(label: str, total: int, *, enabled: bool | None = None) -> Iterator[Advance]:
    """Show a bar of `total` units on stderr while the block runs.

    `enabled=None` shows it only when stderr is a terminal. A bar inside another bar's block becomes
    a second line of the same display.

    >>> with progress("windows", 3, enabled=False) as advance:
    ...     advance(3)
    """
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield _silent
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    outer = _shown.get()
    if outer is not None:
        task = outer.add_task(label, total=total, note="")
        try:
            yield partial(_advance, outer, task)
        finally:
            outer.remove_task(task)
        return
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        token = _shown.set(bar)
        try:
            yield partial(_advance, bar, bar.add_task(label, total=total, note=""))
        finally:
            _shown.reset(token)


def _advance(bar: Progress, task: TaskID, count: int = 1, note: str | None = None) -> None:
    if note is None:
        bar.advance(task, count)
    else:
        bar.update(task, advance=count, note=note)
