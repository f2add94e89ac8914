"""Errors of all candidates on the rows that chose among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from levelhead.forecasting.borders import Borders
from levelhead.forecasting.candidates import Candidate
from levelhead.forecasting.state import FittedState

__all__ = ["candidate_errors", "channel_rows", "pooled_rows"]

FloatArray = NDArray[np.float64]

_WINDOWS = 1000  # at most about so many, evenly spread: neighbours share nearly all their steps


def pooled_rows(errors: Any) -> Any:
    """Each model's last row, which pools its channels (a channel may be called "all" itself)."""
    return errors.groupby("model", sort=False).tail(1)


def channel_rows(errors: Any) -> Any:
    """The rows of single channels."""
    return errors.drop(pooled_rows(errors).index)


def candidate_errors(
    state: FittedState,
    candidates: Mapping[str, Candidate],
    series: FloatArray,
    borders: Borders,
) -> pd.DataFrame:
    """Errors of every candidate on the choosing rows, per target and pooled ("all")."""
    first = max(borders.train - borders.context, 0)
    count = borders.select - borders.context - borders.horizon + 1 - first
    every = max(1, count // _WINDOWS)
    names = list(candidates)
    squared = np.zeros((len(names), len(state.targets)))
    absolute = np.zeros_like(squared)
    total = 0
    starts = range(first, first + count, every)
    for made, truth, _ in state.outcomes(series, starts, list(candidates.values())):
        residual = made - truth
        squared += (residual**2).sum(axis=(1, 3))
        absolute += np.abs(residual).sum(axis=(1, 3))
        total += truth.shape[0] * truth.shape[2]
    unit = state.scaler.deviation[[state.channels.index(c) for c in state.targets]]
    rows = []
    for k, name in enumerate(names):
        mse, mae = squared[k] / total, absolute[k] / total
        for channel in state.user_targets:
            j = state.targets.index(channel)
            rows.append((name, channel, mse[j], mae[j], mse[j] * unit[j] ** 2, mae[j] * unit[j]))
        rows.append((name, "all", mse.mean(), mae.mean(), np.nan, np.nan))
    columns = ["model", "channel", "mse_scaled", "mae_scaled", "mse", "mae"]
    return pd.DataFrame(rows, columns=columns)
