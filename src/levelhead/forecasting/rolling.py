"""Forecasts from many cutoffs, judged by what came: the honest picture of a forecaster.

A backtest fits copies of an estimator on the rows before a cutoff and forecasts the rows after it;
all cutoffs that share a fit run as one batch. Nothing after a cutoff reaches the model or the
intervals of that cutoff; adaptive intervals use outcomes that are known by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import clone

from levelhead.base.errors import InputError
from levelhead.base.progress import progress
from levelhead.data.tables import Table
from levelhead.evaluation import accuracy
from levelhead.forecasting.intervals import adaptive_levels, check_coverage
from levelhead.forecasting.judgement import channel_rows, pooled_rows
from levelhead.forecasting.state import FittedState

__all__ = ["Backtest", "WindowPlan", "plan_windows", "roll"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class WindowPlan:
    """Cutoffs (rows seen) of a backtest, `step` apart."""

    cutoffs: tuple[int, ...]
    step: int


@dataclass(frozen=True, eq=False)
class Backtest:
    """Forecasts and their errors.

    `frame` is long: `unique_id, ds, cutoff, y`, a column per model and `<model>-lo-80`,
    `<model>-hi-80` … for the first. `metrics` has a row per model and channel ("all" pools them):
    MSE and MAE in the user's units and standardised, MASE, and for the first model coverage, mean
    width and pinball loss per level. `by_step` is the coverage per channel and step.
    """

    frame: pd.DataFrame
    metrics: pd.DataFrame
    by_step: pd.DataFrame
    notes: tuple[str, ...]


class Estimator(Protocol):
    """What a backtest needs of a forecaster."""

    horizon: int
    model: str
    chosen_: str

    @property
    def _fitted(self) -> FittedState: ...

    def fit(
        self,
        X: Any,
        y: None = None,
        *,
        state_dir: Path | None = None,
        resume: bool = False,
        show_progress: bool | None = None,
    ) -> Any: ...


def plan_windows(
    rows: int,
    horizon: int,
    windows: int | None = None,
    step: int | None = None,
    test_rows: int | None = None,
) -> WindowPlan:
    """Cutoffs such that every window lies in the last rows; the last window ends with the table.

    >>> plan_windows(100, 10, windows=3).cutoffs
    (70, 80, 90)
    """
    for name, value in (("windows", windows), ("step", step), ("test_rows", test_rows)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise InputError(f"{name} must be a positive whole number, {value!r} was given")
    if windows is not None and test_rows is not None:
        raise InputError("give either windows or test_rows, not both")
    if test_rows is not None and test_rows < horizon:
        raise InputError(
            f"test_rows={test_rows} cannot hold a forecast of {horizon} steps: give at least that"
        )
    apart = horizon if step is None else step
    if windows is None:
        region = max(horizon, rows // 5) if test_rows is None else test_rows
        windows = (region - horizon) // apart + 1
    first = rows - horizon - (windows - 1) * apart
    if windows < 1 or first < 1:
        raise InputError(
            f"{rows} rows cannot hold {max(windows, 1)} test windows of horizon {horizon} that are "
            f"{apart} rows apart: ask for fewer windows or a shorter horizon"
        )
    return WindowPlan(tuple(first + i * apart for i in range(windows)), apart)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Windows of one fit, in the user's units and channel order: models `[K, N, J, H]`."""

    names: tuple[str, ...]
    channels: tuple[str, ...]
    made: FloatArray
    truth: FloatArray
    half: dict[float, FloatArray]
    deviation: FloatArray


def roll(
    estimator: Estimator,
    table: Table,
    plan: WindowPlan,
    *,
    refit: bool | int = False,
    coverage: Sequence[float] | float = (0.8, 0.95),
    adaptive: bool = False,
    state_dir: Path | None = None,
    resume: bool = False,
    show_progress: bool | None = None,
) -> Backtest:
    """Fit on the rows before each cutoff (once, at all or at every k-th) and judge the rest.

    With `state_dir` every fit keeps its resumable state there; `resume` takes finished and begun
    fits up again.
    """
    levels = check_coverage(coverage)
    horizon, cutoffs = estimator.horizon, plan.cutoffs
    every = len(cutoffs) if refit is False else 1 if refit is True else int(refit)
    if every < 1:
        raise InputError(f"refit must be True, False or a positive whole number, {refit!r} given")
    edges = [*range(0, len(cutoffs), every), len(cutoffs)]
    pieces: list[_Piece] = []
    chosen: list[str] = []
    with progress("fits", len(edges) - 1, enabled=show_progress) as advance:
        for a, b in pairwise(edges):
            model = clone(estimator).fit(
                table.rows(0, cutoffs[a]),
                state_dir=None if state_dir is None else state_dir / f"cutoff-{cutoffs[a]}",
                resume=resume,
                show_progress=show_progress,
            )
            chosen.append(model.chosen_)
            name = estimator.model
            pieces.append(_piece(model._fitted, name, table, cutoffs[a:b], levels, plan, adaptive))
            advance(1)
    whole = _join(pieces)
    season = model._fitted.season
    scale = _naive_scales(table.rows(0, cutoffs[0]), whole.channels, season)
    bounds = {c: (whole.made[0] - h, whole.made[0] + h) for c, h in whole.half.items()}
    frame = _frame(whole, bounds, table, cutoffs, horizon)
    metrics, by_step = _metrics(whole, bounds, scale)
    return Backtest(frame, metrics, by_step, _notes(whole, metrics, chosen, levels, adaptive))


def _piece(
    state: FittedState,
    name: str,
    table: Table,
    cutoffs: Sequence[int],
    levels: Sequence[float],
    plan: WindowPlan,
    adaptive: bool,
) -> _Piece:
    series, _, _ = state.standardise(table)
    models = {name: state.chosen} | {n: c for n, c in state.beside.items() if n != name}
    starts = [c - state.context for c in cutoffs]
    parts = list(state.outcomes(series, starts, list(models.values())))
    made = np.concatenate([p[0] for p in parts], axis=1)
    truth = np.concatenate([p[1] for p in parts])
    deviation = np.concatenate([p[2] for p in parts])
    assert state.conformal is not None
    half = {}
    for level in levels:
        scores = np.abs(made[0] - truth) / deviation
        if adaptive:
            used = adaptive_levels(
                state.conformal, level, scores, stride=plan.step, horizon=state.horizon
            )
            units = np.stack(
                [state.conformal.half_width(level, lv) for lv, _ in zip(used, scores, strict=False)]
            )
        else:
            units = state.conformal.half_width(level)[None]
        half[level] = units * deviation
    order = [state.targets.index(c) for c in state.user_targets]
    place = [state.channels.index(c) for c in state.user_targets]
    mean = state.scaler.mean[place][:, None]
    unit = state.scaler.deviation[place][:, None]
    return _Piece(
        tuple(models),
        state.user_targets,
        made[:, :, order] * unit + mean,
        truth[:, order] * unit + mean,
        {c: h[:, order] * unit for c, h in half.items()},
        unit,
    )


def _join(pieces: list[_Piece]) -> _Piece:
    first = pieces[0]
    return _Piece(
        first.names,
        first.channels,
        np.concatenate([p.made for p in pieces], axis=1),
        np.concatenate([p.truth for p in pieces]),
        {c: np.concatenate([p.half[c] for p in pieces]) for c in first.half},
        first.deviation,
    )


def _naive_scales(table: Table, channels: Sequence[str], season: int) -> FloatArray:
    history = table.select(channels).values.T
    usable = season if season < history.shape[1] else 1
    return accuracy.seasonal_naive_scale(history, usable)


def _frame(
    whole: _Piece,
    bounds: dict[float, tuple[FloatArray, FloatArray]],
    table: Table,
    cutoffs: Sequence[int],
    horizon: int,
) -> pd.DataFrame:
    count, width = len(cutoffs), len(whole.channels)
    rows = np.array([[c + np.arange(horizon) for _ in range(width)] for c in cutoffs]).ravel()
    seen = np.repeat(np.asarray(cutoffs) - 1, width * horizon)
    columns: dict[str, Any] = {
        "unique_id": np.tile(np.repeat(np.asarray(whole.channels, object), horizon), count),
        "ds": table.time[rows],
        "cutoff": table.time[seen],
        "y": whole.truth.ravel(),
    }
    columns |= {n: whole.made[k].ravel() for k, n in enumerate(whole.names)}
    for level, (low, high) in bounds.items():
        columns[f"{whole.names[0]}-lo-{100 * level:g}"] = low.ravel()
        columns[f"{whole.names[0]}-hi-{100 * level:g}"] = high.ravel()
    return pd.DataFrame(columns)


def _metrics(
    whole: _Piece, bounds: dict[float, tuple[FloatArray, FloatArray]], scales: FloatArray
) -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = []
    for k, name in enumerate(whole.names):
        per = [
            _errors(whole.truth[:, j], whole.made[k, :, j], whole.deviation[j, 0], scales[j])
            for j in range(len(whole.channels))
        ]
        if k == 0:
            for j, row in enumerate(per):
                row.update(_interval_errors(whole.truth[:, j], bounds, j))
        for channel, row in zip(whole.channels, per, strict=True):
            rows.append({"model": name, "channel": channel, **row})
        pooled = {m: float(np.mean([row[m] for row in per])) for m in per[0]}
        rows.append({"model": name, "channel": "all", **pooled})
    steps = []
    for level, (low, high) in bounds.items():
        inside = ((low <= whole.truth) & (whole.truth <= high)).mean(axis=0)
        for j, channel in enumerate(whole.channels):
            for h in range(inside.shape[1]):
                steps.append((100 * level, channel, h + 1, float(inside[j, h])))
    by_step = pd.DataFrame(steps, columns=["level", "channel", "step", "coverage"])
    return pd.DataFrame(rows), by_step


def _errors(
    truth: FloatArray, made: FloatArray, deviation: float, scale: float
) -> dict[str, float]:
    squared, absolute = accuracy.mse(truth, made), accuracy.mae(truth, made)
    return {
        "mse": squared,
        "mae": absolute,
        "mse_scaled": squared / deviation**2,
        "mae_scaled": absolute / deviation,
        "mase": accuracy.mase(truth, made, float(scale)),
    }


def _interval_errors(
    truth: FloatArray, bounds: dict[float, tuple[FloatArray, FloatArray]], channel: int
) -> dict[str, float]:
    found = {}
    for level, (low, high) in bounds.items():
        label, low, high = f"{100 * level:g}", low[:, channel], high[:, channel]
        tail = (1.0 - level) / 2.0
        found[f"coverage_{label}"] = accuracy.coverage(truth, low, high)
        found[f"width_{label}"] = accuracy.width(low, high)
        lower, upper = accuracy.pinball(truth, low, tail), accuracy.pinball(truth, high, 1 - tail)
        found[f"pinball_{label}"] = (lower + upper) / 2.0
    return found


def _notes(
    whole: _Piece,
    metrics: pd.DataFrame,
    chosen: list[str],
    levels: Sequence[float],
    adaptive: bool,
) -> tuple[str, ...]:
    pooled = pooled_rows(metrics).set_index("model")
    first = whole.names[0]
    kinds = ", ".join(sorted(set(chosen)))
    notes = [f"{whole.made.shape[1]} windows; {first} used: {kinds}"]
    for name in whole.names[1:]:
        own, other = (float(pooled["mse_scaled"][n]) for n in (first, name))
        if other > 0:
            change = 100 * (own / other - 1)
            notes.append(
                f"MSE (standardised) {own:.4g}, {abs(change):.1f} % "
                f"{'above' if change > 0 else 'below'} {name} ({other:.4g})"
            )
    for level in levels:
        label = f"{100 * level:g}"
        rows = channel_rows(metrics)
        per = rows[rows.model == first][f"coverage_{label}"]
        kind = "adaptive " if adaptive else ""
        notes.append(
            f"{kind}{label} % intervals covered {100 * per.mean():.1f} % (channels "
            f"{100 * per.min():.1f} to {100 * per.max():.1f} %)"
        )
    return tuple(notes)
