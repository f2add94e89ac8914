"""Thread limits and small numerical helpers shared by all folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock, Thread, current_thread

import torch
from threadpoolctl import threadpool_limits

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError

__all__ = ["threads"]


class _Limits:
    """Limits of blocks that run in several Python threads at once.

    BLAS pools belong to the whole process: while blocks of one thread set them, those of others
    leave them alone. torch's number belongs to each thread, but the last one set becomes the
    number that other threads start from: a thread's outermost block restores what held before any
    block began. Otherwise one block would restore what another had set, and outlive it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._depth: dict[Thread, int] = {}
        self._owner: Thread | None = None
        self._torch = 1

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        thread = current_thread()
        with self._lock:
            if not self._depth:
                self._owner, self._torch = thread, torch.get_num_threads()
            self._depth[thread] = self._depth.get(thread, 0) + 1
            owner = self._owner
        before = torch.get_num_threads()
        try:
            with threadpool_limits(limits=count) if owner is thread else nullcontext():
                torch.set_num_threads(count)
                yield
        finally:
            with self._lock:
                self._depth[thread] -= 1
                if not self._depth[thread]:
                    del self._depth[thread]
                    before = self._torch
                    if owner is thread:
                        self._owner = None
            torch.set_num_threads(before)


_limits = _Limits()


@contextmanager
def threads(count: int | None = 1) -> Iterator[None]:
    """Run BLAS, OpenMP and torch on `count` threads; the previous limits return on exit.

    Many small factorisations are far faster on one thread than on several, and a fit on a fixed
    number of threads repeats bit for bit. `None` leaves everything as it is.

    >>> import torch
    >>> before = torch.get_num_threads()
    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    if count is None:
        yield
        return
    if not is_whole(count):
        raise InputError(f"threads must be a positive whole number or None, {count!r} was given")
    with _limits.hold(count):
        yield
