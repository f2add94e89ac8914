"""The series of the forecasting study and how the literature cuts them.

Axes: a series is `[D, T]`, standardised by its training rows. Rows in order train, validate and
test; stamps are ignored; every window whose target lies in the test rows counts. This is the
protocol "ltsf" of `forecasting.bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from levelhead.base.errors import InputError
from levelhead.data.datasets import cache_folder, catalogue, get
from levelhead.data.generators import followers
from levelhead.data.tables import read_table
from levelhead.data.windows import Scaler, Windows
from levelhead.forecasting.bench import ltsf_split
from levelhead.forecasting.fitting import SeriesProblem

__all__ = ["MADE", "SETS", "paper_rate", "posed", "require", "series"]

FloatArray = NDArray[np.float64]
MADE = "made"
"""A small series made on the spot: a leader and followers that repeat it 12 steps later."""

_MADE_STEPS, _MADE_CHANNELS, _MADE_LAG = 900, 4, 12
_FILES = {dataset.name: dataset.file for dataset in catalogue()}
SETS = (*_FILES, MADE)
_SLOW = ("weather", "electricity", "traffic")


def paper_rate(name: str) -> float:
    """Adam's rate of the released script for a set.

    >>> paper_rate("ETTh1"), paper_rate("weather")
    (0.001, 0.0001)
    """
    return 1e-4 if name in _SLOW else 1e-3


def require(names: Sequence[str], data: str) -> None:
    """Raise InputError unless the files of all sets are there; names the command that fetches them.

    `data` is a folder, or "" for the cache that `levelhead data get` fills.
    """
    missing = [n for n in names if n != MADE and not _path(n, data).is_file()]
    if missing:
        folder = Path(data) if data else cache_folder()
        raise InputError(
            f"{folder} does not hold {', '.join(_FILES[n] for n in missing)}: fetch with "
            f"'levelhead data get {' '.join(missing)}', or name a folder with --set data=FOLDER"
        )


def series(name: str, data: str = "") -> FloatArray:
    """The values of a set `[D, T]`, in its own units; a file of the cache is verified first.

    >>> series("made").shape
    (4, 900)
    """
    if name == MADE:
        return followers(_MADE_STEPS, channels=_MADE_CHANNELS, lag=_MADE_LAG, seed=0)
    require([name], data)
    path = _path(name, data) if data else get(name)
    table = read_table(path, time="ignore", sentinels="keep")
    return np.ascontiguousarray(table.values.T)


def posed(name: str, data: str, context: int, horizon: int) -> tuple[SeriesProblem, Windows]:
    """The problem (training and validation windows) of a set, and its test windows.

    Raises InputError for missing files and for rows too few for context and horizon.
    """
    values = series(name, data)
    train, validation, test = ltsf_split(name, values.shape[1])
    values = values[:, : train + validation + test]
    scaled = Scaler.fit(values[:, :train]).apply(values)
    problem = SeriesProblem(scaled, context, horizon, (0, train), (train, train + validation))
    judged = problem.windows((train + validation, train + validation + test), reach_back=True)
    if not (len(problem.train) and len(problem.validation) and len(judged)):
        raise InputError(
            f"the {values.shape[1]} rows of {name} are too few for context {context} and horizon "
            f"{horizon}: training rows must hold both, validation and test rows the horizon"
        )
    return problem, judged


def _path(name: str, data: str) -> Path:
    return (Path(data) if data else cache_folder()) / _FILES[name]
