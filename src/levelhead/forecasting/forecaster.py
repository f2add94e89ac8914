"""`SAMformer`: forecast a table of several related series, always beside the straight line.

The estimator follows scikit-learn: parameters are stored untouched, what was learnt ends in `_`, a
second `fit` starts anew, `clone` and `get_params` work. Tables come and go in the user's own
library, layout, units, names and time stamps.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.base.numerics import threads
from levelhead.data.tables import Table, read_table
from levelhead.data.windows import Scaler
from levelhead.forecasting import storage
from levelhead.forecasting.borders import Borders, divide
from levelhead.forecasting.candidates import Candidate, Network
from levelhead.forecasting.fitting import (
    Fitted,
    SeriesProblem,
    fit_models,
    refit,
    select,
)
from levelhead.forecasting.intervals import Conformal, check_coverage, last_levels
from levelhead.forecasting.judgement import candidate_errors
from levelhead.forecasting.planning import FILLS, plan_for, usable_season, wanted_season
from levelhead.forecasting.rolling import Backtest, plan_windows, roll
from levelhead.forecasting.state import FittedState, content_order

__all__ = ["SAMformer"]

FloatArray = NDArray[np.float64]

_CALIBRATION_WINDOWS = 1000


class SAMformer(BaseEstimator):  # type: ignore[misc]
    """Forecaster of multivariate series (Ilbert et al., ICML 2024) that knows the straight line.

    Candidates are the seasonal naive forecast, two closed-form lines, SAMformer and a convex blend.
    With `model="auto"` the rows after the training rows choose: of all within one standard error of
    the best, the simplest (blocked validation). The rows after those calibrate intervals. Then the
    chosen model is refitted on all rows.

    Args:
        horizon: H, steps to forecast.
        context: L, steps the model reads; "auto" takes the longest sensible one up to 512.
        model: "auto", "naive", "linear", "linear-revin", "samformer" or "blend".
        channels: columns of the table to use at all; all by default.
        targets: channels to forecast; the others are read only. All by default.
        time_column, freq, layout, missing, sentinels, duplicates: how to read tables, see
            `levelhead.read_table`.
        season: period of the naive forecast in steps; "auto" takes the step's customary one.
        start: "linear" starts SAMformer equal to the line, "glorot" as the paper does.
        rho: radius of sharpness-aware minimisation; "auto" tries .05 and .7 on the choosing rows.
        learning_rate, batch_size, epochs, patience: of training, see `TrainingSettings`.
        width: inner dimension of attention.
        revin_affine: gains and shifts per channel; without them other channels can be forecast.
        refit: refit the chosen model on all rows.
        random_state: seed of initialisation and shuffling; the same seed gives the same bits.
        num_threads: threads of the fit, None for no limit.
        device: where SAMformer trains, as torch names it.

    Attributes:
        channels_, targets_: names in the order of the fitted table.
        context_, season_: as used. borders_: which rows trained, chose and calibrated.
        chosen_: name of the chosen model. choice_: the numbers behind it (None: nothing to choose).
        candidates_: all fitted candidates. errors_: their errors on the choosing rows.
        history_: SAMformer's training, None if not trained.
        notes_: what was seen in the table and decided, in sentences.

    Raises:
        DataError: the table cannot be used; names column, row and count.
        InputError: a parameter that cannot be used.

    >>> t = np.arange(400.0)
    >>> table = np.stack([np.sin(t / 5), 10 + np.cos(t / 5)], axis=1)
    >>> model = SAMformer(horizon=3, context=24, model="linear").fit(table)
    >>> model.predict().shape
    (3, 2)
    >>> bool(abs(model.predict()[0, 0] - np.sin(400 / 5)) < 0.01)
    True
    """

    def __init__(
        self,
        horizon: int,
        context: int | Literal["auto"] = "auto",
        *,
        model: str = "auto",
        channels: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        time_column: str | None = None,
        freq: Any = None,
        layout: Literal["auto", "wide", "long"] = "auto",
        missing: Literal["error", "interpolate", "ffill"] = "error",
        sentinels: Literal["warn", "mask", "keep"] = "warn",
        duplicates: Literal["error", "first", "last", "mean"] = "error",
        season: int | Literal["auto"] | None = "auto",
        start: Literal["linear", "glorot"] = "linear",
        rho: float | Literal["auto"] = "auto",
        learning_rate: float = 1e-3,
        batch_size: int = 32,
        epochs: int = 50,
        patience: int = 6,
        width: int = 16,
        revin_affine: bool = False,
        refit: bool = True,
        random_state: int = 0,
        num_threads: int | None = 1,
        device: str = "cpu",
    ) -> None:
        self.horizon = horizon
        self.context = context
        self.model = model
        self.channels = channels
        self.targets = targets
        self.time_column = time_column
        self.freq = freq
        self.layout = layout
        self.missing = missing
        self.sentinels = sentinels
        self.duplicates = duplicates
        self.season = season
        self.start = start
        self.rho = rho
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.epochs = epochs
        self.patience = patience
        self.width = width
        self.revin_affine = revin_affine
        self.refit = refit
        self.random_state = random_state
        self.num_threads = num_threads
        self.device = device

    # ── fitting ─────────────────────────────────────────────────────────────────────────────────

    def fit(
        self,
        X: Any,
        y: None = None,
        *,
        state_dir: str | Path | None = None,
        resume: bool = False,
        show_progress: bool | None = None,
    ) -> SAMformer:
        """Fit on a table: `[T, D]` numbers with their time stamps, in any form `read_table` takes.

        Args:
            y: must be None; the series are both input and target.
            state_dir: keep a resumable training state there; `resume` goes on from it.
        """
        if y is not None:
            raise InputError("known-future covariates are not supported: pass one table as X only")
        table = self.read(X)
        with threads(self.num_threads):
            self._fit(table, None if state_dir is None else Path(state_dir), resume, show_progress)
        return self

    def read(self, X: Any) -> Table:
        """The table as this estimator reads it; a `Table` without gaps is taken as it is."""
        if self.missing not in FILLS:
            raise InputError(f"missing must be one of {', '.join(FILLS)}, not {self.missing!r}")
        if isinstance(X, Table) and self.channels is None and np.isfinite(X.values).all():
            return X
        return read_table(
            X,
            channels=self.channels,
            time_column=self.time_column,
            freq=self.freq,
            layout=self.layout,
            missing=self.missing,
            sentinels=self.sentinels,
            duplicates=self.duplicates,
        )

    def _fit(
        self, table: Table, state_dir: Path | None, resume: bool, show_progress: bool | None
    ) -> None:
        targets = self._targets(table)
        season = self._season(table)
        borders = divide(len(table), self.horizon, self.context, season)
        order = content_order(table.values, table.channels)
        names = tuple(table.channels[i] for i in order)
        values = np.ascontiguousarray(table.values.T[order])
        scaler = Scaler.fit(values[:, : borders.train])
        series = scaler.apply(values)
        judged = [i for i, n in enumerate(names) if n in set(targets)]
        problem = SeriesProblem(
            series,
            borders.context,
            self.horizon,
            (0, borders.train),
            (borders.train, borders.select),
            None if len(judged) == len(names) else judged,
            self.device,
        )
        period, season_note = usable_season(self, season, borders.context)
        plan = plan_for(self, period, len(names))
        fitted = fit_models(
            problem, plan, state_dir=state_dir, resume=resume, show_progress=show_progress
        )
        chosen, choice, fitted = select(fitted, plan, problem.validation)
        state = FittedState(
            channels=names,
            targets=tuple(names[i] for i in judged),
            context=borders.context,
            horizon=borders.horizon,
            season=plan.season,
            scaler=scaler,
            chosen=chosen,
            conformal=None,
            tail=table.rows(len(table) - borders.context, None),
            any_channels=not self.revin_affine and len(judged) == len(names),
            device=self.device,
        )
        first = borders.select - borders.context
        count = borders.rows - borders.select - self.horizon + 1
        every = max(1, count // _CALIBRATION_WINDOWS)
        conformal = Conformal.fit(state.scores(series, range(first, first + count, every)))
        beside = {n: fitted.candidates[n] for n in plan.beside}
        if self.refit:
            again = partial(
                refit, problem=problem, rows=(0, borders.rows), plan=plan, fitted=fitted
            )
            beside = {n: again(c) for n, c in beside.items()}
            chosen = again(chosen, state_dir=state_dir, resume=resume, show_progress=show_progress)
        self.errors_ = candidate_errors(state, fitted.candidates, series, borders)
        notes = tuple(n for n in (*table.notes, borders.note, season_note) if n)
        self._state = replace(
            state, chosen=chosen, conformal=conformal, beside=beside, choice=choice, notes=notes
        )
        self._describe(table, borders, fitted)

    def _describe(
        self,
        table: Table,
        borders: Borders,
        fitted: Fitted,
    ) -> None:
        self._mirror(table.channels)
        self.borders_ = borders
        self.candidates_ = fitted.candidates
        self.history_ = fitted.history

    def _mirror(self, channels: tuple[str, ...]) -> None:
        state = self._state
        self.channels_, self.targets_ = channels, state.user_targets
        self.context_, self.season_ = state.context, state.season
        self.chosen_, self.choice_, self.notes_ = state.chosen.name, state.choice, state.notes

    def _targets(self, table: Table) -> tuple[str, ...]:
        if self.targets is None:
            return table.channels
        wanted = [self.targets] if isinstance(self.targets, str) else [str(t) for t in self.targets]
        return table.select(wanted).channels

    def _season(self, table: Table) -> int | None:
        return wanted_season(self, table.season)

    # ── forecasting ─────────────────────────────────────────────────────────────────────────────

    def predict(self, X: Any = None) -> Any:
        """The H rows that follow the fitted table, or that follow `X`, in the form of that table.

        `X` needs at least `context_` rows of the fitted channels; with `revin_affine=False` other
        channels are forecast as well.
        """
        table, forecast, _, names, _ = self._forecast(X)
        return table.select(names).frame(forecast.T, table.future(forecast.shape[1]))

    def predict_interval(
        self,
        X: Any = None,
        *,
        coverage: Sequence[float] | float = (0.8, 0.95),
        adaptive: bool = False,
    ) -> pd.DataFrame:
        """Forecast and intervals: `unique_id, ds, forecast, naive, linear, lo-80, hi-80, …`.

        Half widths are calibrated per channel and step in units of the window's deviation. Channels
        that were not fitted get the pooled quantiles of all channels, marked in the last column.
        `adaptive` first moves the levels by what came true in the windows of `X`; it needs an X
        with more than context + horizon rows.
        """
        levels = check_coverage(coverage)
        X = X if X is None else self.read(X)
        table, forecast, deviation, names, scaler = self._forecast(X)
        state = self._fitted
        others = {n: self._forecast(X, c)[1] for n, c in state.beside.items() if n != self.chosen_}
        if state.conformal is None:
            raise InputError("this model holds no calibrated intervals: fit it again on more rows")
        future = table.future(state.horizon)
        frame: dict[str, Any] = {
            "unique_id": np.repeat(np.asarray(names, dtype=object), state.horizon),
            "ds": future[np.tile(np.arange(state.horizon), len(names))],
            "forecast": forecast.ravel(),
            **{name: values.ravel() for name, values in others.items()},
        }
        unfounded = [c for c in levels if not state.conformal.supports(c)]
        if unfounded:
            warnings.warn(
                f"{state.conformal.count} calibration windows cannot support a coverage of "
                f"{', '.join(map(str, unfounded))}: the largest error seen stands for it",
                LevelheadWarning,
                stacklevel=2,
            )
        for level in levels:
            moved = self._adapted(X, table, level) if adaptive else None
            half = state.half_widths(names, level, moved) * deviation * scaler.deviation[:, None]
            label = f"{100 * level:g}"
            frame[f"lo-{label}"] = (forecast - half).ravel()
            frame[f"hi-{label}"] = (forecast + half).ravel()
        known = set(state.targets)
        frame["pooled"] = np.repeat([n not in known for n in names], state.horizon)
        return pd.DataFrame(frame)

    def score(self, X: Any, y: None = None) -> float:
        """Skill over the naive forecast on all windows of `X`: 1 - MSE/MSE(naive), at most 1.

        Errors are in standardised units, over the targets.
        """
        state = self._fitted
        table = self.read(X)
        series, names, _ = state.standardise(table)
        if names != state.channels:
            raise InputError("a score needs a table with exactly the fitted channels")
        last = series.shape[1] - state.context - state.horizon
        if last < 0:
            raise InputError(
                f"a score needs at least {state.context + state.horizon} rows, {len(table)} given"
            )
        error = base = 0.0
        pair = (state.chosen, state.beside["naive"])
        for made, truth, _ in state.outcomes(series, range(last + 1), pair):
            error += float(np.sum((made[0] - truth) ** 2))
            base += float(np.sum((made[1] - truth) ** 2))
        return 1.0 - error / base if base > 0 else float(error == 0)

    def backtest(
        self,
        X: Any,
        *,
        windows: int | None = None,
        step: int | None = None,
        test_rows: int | None = None,
        refit: bool | int = False,
        coverage: Sequence[float] | float = (0.8, 0.95),
        adaptive: bool = False,
        state_dir: Path | None = None,
        resume: bool = False,
        show_progress: bool | None = None,
    ) -> Backtest:
        """Fit copies on the first rows of `X` and forecast the rest window by window.

        `windows` cutoffs lie `step` rows apart (the horizon), or as many as fit into the last
        `test_rows` (a fifth of all). `refit` fits anew at every window, or at every k-th for a
        number k; `adaptive` lets the interval levels follow what came true; `state_dir` and
        `resume` keep and take up resumable states of the fits.
        """
        table = self.read(X)
        return roll(
            self,
            table,
            plan_windows(len(table), self.horizon, windows, step, test_rows),
            refit=refit,
            coverage=coverage,
            adaptive=adaptive,
            state_dir=state_dir,
            resume=resume,
            show_progress=show_progress,
        )

    def check(self, table: Table) -> Borders:
        """Whether `table` can be fitted: names targets and rows that do not suit, fits nothing."""
        self._targets(table)
        season = self._season(table)
        borders = divide(len(table), self.horizon, self.context, season)
        usable_season(self, season, borders.context)
        return borders

    def attention(self, X: Any) -> tuple[FloatArray, tuple[str, ...]]:
        """Mean A(X) `[D, D]` of SAMformer over the last windows of `X`, and the channels' names.

        Of the network that was fitted, chosen or not; at most the last 64 windows, a context's
        tenth apart.
        """
        state = self._fitted
        network = getattr(self, "candidates_", {}).get("samformer", state.network)
        if not isinstance(network, Network):
            raise InputError(f"no SAMformer was fitted (model={self.model!r}): use model='auto'")
        series, names, _ = state.standardise(self.read(X))
        return state.mean_attention(network, series), names

    # ── files ───────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | Path) -> Path:
        """Write the fitted forecaster to a folder (model.json and model.safetensors)."""
        return storage.save(Path(path), self.get_params(deep=False), self._fitted)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "cpu") -> SAMformer:
        """A forecaster as it was saved; on the same machine its forecasts are the same bits.

        Raises `StoredFileError` for a truncated or altered file, or one of a newer version.
        """
        params, state = storage.load(Path(path), device=device)
        made = cls(**params)
        made._state = state
        made._mirror(state.tail.channels)
        return made

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    @property
    def _fitted(self) -> FittedState:
        state = getattr(self, "_state", None)
        if state is None:
            raise NotFittedError("this SAMformer is not fitted yet: call fit(table) first")
        assert isinstance(state, FittedState)
        return state

    def __sklearn_is_fitted__(self) -> bool:
        return getattr(self, "_state", None) is not None

    def _forecast(
        self, X: Any, candidate: Candidate | None = None
    ) -> tuple[Table, FloatArray, FloatArray, tuple[str, ...], Scaler]:
        """Forecast of the last window: table, `[D, H]` and `[D, 1]` per target, names, scaler."""
        state = self._fitted
        table = state.tail if X is None else X if isinstance(X, Table) else self.read(X)
        series, names, scaler = state.standardise(table)
        with threads(self.num_threads):
            windows = series[None, :, -state.context :]
            made, deviation = state.forecast_windows(windows, candidate)
        known = set(state.channels)
        shown = [
            i
            for name in table.channels
            for i in [names.index(name)]
            if name in set(state.targets) or name not in known
        ]
        picked = Scaler(scaler.mean[shown], scaler.deviation[shown])
        return (
            table,
            picked.invert(made[0][shown]),
            deviation[0][shown],
            tuple(names[i] for i in shown),
            picked,
        )

    def _adapted(self, X: Any, table: Table, level: float) -> FloatArray:
        state = self._fitted
        if X is None or len(table) <= state.context + state.horizon:
            raise InputError(
                "adaptive intervals learn from windows whose outcome is known: pass a table X of "
                f"more than {state.context + state.horizon} rows"
            )
        series, names, _ = state.standardise(table)
        if names != state.channels:
            raise InputError("adaptive intervals need a table with exactly the fitted channels")
        assert state.conformal is not None
        scores = state.scores(series, range(series.shape[1] - state.context - state.horizon + 1))
        return last_levels(state.conformal, level, scores, horizon=state.horizon)
