"""What a watcher leaves on a model between steps, so that the model can be copied and stored.

`copy.deepcopy` and `torch.save` take a module's hooks along. A hook that held on to the watcher
would take it along too, with its open run and the model again; those here become hooks that do
nothing. Example: a copy of the weights for evaluation (EMA) that is made inside the block.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from levelhead.diagnostics.capture import MapCapture

__all__ = ["Hook", "WatchedCapture"]


class Hook:
    """Calls a method as long as its object lives; a copy, or one that was stored, does nothing.

    >>> class Counter:
    ...     count = 0
    ...     def add(self, *_: object) -> None:
    ...         self.count += 1
    >>> import copy
    >>> counter = Counter()
    >>> hook = Hook(counter.add)
    >>> hook(), copy.deepcopy(hook)(), counter.count
    (None, None, 1)
    """

    def __init__(self, method: Any = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling() or self._method is None:
            return
        method = self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


class WatchedCapture(MapCapture):
    """A capture whose hooks, in a copied or stored model, watch no module."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()


class _Inert(MapCapture):
    """What a copied model's hooks belong to."""

    def __init__(self) -> None:
        self._watched = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()
