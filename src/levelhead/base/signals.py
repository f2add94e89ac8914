"""Stopping cleanly: Ctrl-C and SIGTERM are noted and acted on between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["noted_signals"]


@contextmanager
def noted_signals() -> Iterator[Callable[[], str | None]]:
    """While the block runs, the first SIGINT or SIGTERM is only noted; ask what came by calling.

    A second signal acts as it did before, so that a stuck program can still be stopped. Outside the
    main thread, where Python delivers no signals, nothing is changed, and a signal that the program
    ignores (a job in the background, say) stays ignored.

    >>> with noted_signals() as stopped_by:
    ...     stopped_by() is None
    True
    """
    seen: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # None stands for a handler that was not set from Python and could not be put back.
    before = {n: h for n, h in handlers.items() if h is not None and h != signal.SIG_IGN}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(signal.Signals(number).name)
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: seen[0] if seen else None
    finally:
        restore()
