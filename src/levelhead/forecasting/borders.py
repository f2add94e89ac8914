"""Which rows train, which choose, which calibrate, and how long a context they can carry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from levelhead.base.arguments import is_whole
from levelhead.base.errors import DataError, InputError

__all__ = ["Borders", "divide"]

_LONGEST_CONTEXT = 512
_FEWEST_WINDOWS = 8
_SHARE = 0.15


@dataclass(frozen=True)
class Borders:
    """Rows 0 .. train-1 train, train .. select-1 choose, select .. rows-1 calibrate."""

    train: int
    select: int
    rows: int
    context: int
    horizon: int
    note: str | None = None


def divide(
    rows: int, horizon: int, context: int | Literal["auto"], season: int | None = None
) -> Borders:
    """Divide `rows` for a forecast of `horizon` steps from `context` steps.

    15 % of the rows choose and 15 % calibrate, but each holds at least two horizons if that fits,
    one if it must. `context="auto"` takes the longest sensible one: at most 512 steps and at most
    half of what the training rows can spare, whole seasons if there is room for one.

    >>> divide(1000, 24, "auto", 24).context
    336
    >>> divide(17420, 96, "auto").context
    512

    Raises:
        DataError: the rows hold too few windows; says what would fit.
    """
    _check(horizon, context)
    for least in (2 * horizon, horizon):
        held = max(math.ceil(_SHARE * rows), least)
        train = rows - 2 * held
        spare = train - horizon - _FEWEST_WINDOWS + 1
        # Two horizons held back are not worth a context (about half the spare) shorter than one.
        sensible = 2 * horizon if least > horizon else 1
        if spare >= (sensible if context == "auto" else context):
            break
    else:
        raise DataError(_too_short(rows, horizon, context))
    if context != "auto":
        return Borders(train, train + held, rows, int(context), int(horizon))
    longest = max(1, min(_LONGEST_CONTEXT, (train - horizon) // 2, spare))
    if season is not None and 1 < season <= longest < _LONGEST_CONTEXT:
        longest -= longest % season
    note = (
        f"context {longest} steps: the longest sensible one for {rows} rows and horizon {horizon}"
    )
    return Borders(train, train + held, rows, longest, int(horizon), note)


def _check(horizon: int, context: int | str) -> None:
    if not is_whole(horizon):
        raise InputError(f"horizon must be a positive whole number of steps, {horizon!r} was given")
    if context != "auto" and not is_whole(context):
        raise InputError(
            f"context must be 'auto' or a positive whole number, {context!r} was given"
        )


def _too_short(rows: int, horizon: int, context: int | str) -> str:
    # train = rows - 2 max(.15 rows, h) must hold context + horizon + 7 rows.
    wanted = 1 if context == "auto" else int(context)
    fits = 0
    for candidate in range(horizon - 1, 0, -1):
        held = max(math.ceil(_SHARE * rows), candidate)
        if rows - 2 * held >= wanted + candidate + _FEWEST_WINDOWS - 1:
            fits = candidate
            break
    given = f"{rows} rows are too few for context {context} and horizon {horizon}"
    if context != "auto":
        held = max(math.ceil(_SHARE * rows), horizon)
        room = rows - 2 * held - horizon - _FEWEST_WINDOWS + 1
        if room >= 1:
            return f"{given}: context {room} would fit (or context='auto')"
    if fits:
        return f"{given}: horizon {fits} would fit with context {context}"
    needed = (
        math.ceil((wanted + horizon + _FEWEST_WINDOWS - 1 + 2 * horizon) / (1 - 2 * _SHARE)) + 2
    )
    return f"{given}: give about {needed} rows or more"
