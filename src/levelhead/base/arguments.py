"""Small checks of arguments, used by every folder."""

from __future__ import annotations

from numbers import Integral

__all__ = ["is_whole"]


def is_whole(value: object, least: int = 1) -> bool:
    """Whether `value` is a whole number >= `least`: NumPy's integers count, booleans do not.

    >>> is_whole(3), is_whole(True), is_whole(2.0), is_whole(0, least=0)
    (True, False, False, True)
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return int(value) >= least
