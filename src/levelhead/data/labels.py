"""Names of columns, channels and series: made distinct, and picked by the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from levelhead.base.errors import DataError, InputError
from levelhead.data.messages import some

__all__ = ["distinct_names", "listed", "pick"]


def listed(channels: Sequence[str] | str) -> list[str]:
    """Names as a list, also where one stands alone."""
    return [channels] if isinstance(channels, str) else [str(c) for c in channels]


def pick(wanted: Sequence[str] | str, names: Sequence[str], noun: str = "channel") -> list[int]:
    """Places of the wanted names; unknown and repeated ones are refused."""
    asked = listed(wanted)
    for i, name in enumerate(asked):
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"no {noun} {name!r}: {hint}the table has {some(names, 12)}")
        if name in asked[:i]:
            raise InputError(f"{noun} {name!r} is asked for twice; name each once")
    if not asked:
        raise InputError(f"no {noun} was asked for; name at least one of {some(names, 12)}")
    return [list(names).index(name) for name in asked]


def distinct_names(labels: Iterable[Any]) -> list[str]:
    """Column labels as distinct strings; an empty one is named by its place."""
    labels = list(labels)
    names = [
        str(c)
        if isinstance(c, tuple) or not (pd.isna(c) or str(c).strip() == "")
        else f"column {i}"
        for i, c in enumerate(labels, 1)
    ]
    for i, name in enumerate(names):
        if name in names[:i]:
            first = names.index(name) + 1
            raise DataError(
                f"column name {name!r} occurs twice (columns {first} and {i + 1}); rename one"
            )
    return names
