"""Words that sentences about tables share, and the warning that carries them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from levelhead.base.errors import LevelheadWarning

__all__ = ["count", "some", "warn"]


def count(number: int, noun: str) -> str:
    """`3 rows`, `1 row`."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def some(names: Iterable[str], most: int = 4) -> str:
    """Quote up to `most` names and count the rest.

    >>> some(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    quoted = [repr(str(n)) for n in names]
    more = f" and {len(quoted) - most} more" if len(quoted) > most else ""
    return ", ".join(quoted[:most]) + more


def warn(sentence: str) -> None:
    """Issue a `LevelheadWarning` at the caller of the package's public function."""
    warnings.warn(sentence, LevelheadWarning, stacklevel=_outside())


def _outside() -> int:
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("levelhead."):
        level, frame = level + 1, frame.f_back
    return level
