"""Rows as tables of pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["frame"]


def frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A table of the rows, with the given columns where there are none.

    pandas is imported here: the command line prints its table without it, and starts faster.

    >>> frame([], ["layer"]).shape, frame([{"layer": "a", "head": 0}], ["layer"]).shape
    ((0, 1), (1, 2))
    """
    import pandas as pd

    return pd.DataFrame(list(rows), columns=None if rows else list(columns))
