"""SAMformer on arrays, for windows given one by one, in scikit-learn's manner.

Axes. A row of `X [n, D·L]` holds the contexts of D channels one after the other (channel-major:
`X.reshape(n, D, L)`), a row of `y [n, D·H]` their targets in the same order. Rows are in order of
time: the last of them validate.

Two examples. With `channels=1` (the default) X has L columns and y has H, one after the other in
time or not in time at all: a column is then any feature, an output any quantity. With `channels=2`,
L = 3, H = 1 a row of X is `a1 a2 a3 b1 b2 b3` and a row of y is `a4 b4`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags, check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from levelhead.base.errors import InputError
from levelhead.base.numerics import threads
from levelhead.data.windows import Pairs
from levelhead.forecasting.candidates import Blend, Candidate, Network, forecasts
from levelhead.forecasting.fitting import PairProblem, Plan, fit_models, refit_on, select
from levelhead.forecasting.network import Start
from levelhead.forecasting.selection import Choice
from levelhead.training.loop import History, TrainingSettings

__all__ = ["PairScaling", "SAMformerRegressor"]

FloatArray = NDArray[np.float64]
Model = Literal["auto", "linear", "linear-revin", "samformer", "blend"]

_LINES: Mapping[bool, tuple[str, ...]] = {False: ("linear",), True: ("linear", "linear-revin")}
_FEWEST_ROWS = 20  # fewer leave under four validation rows: no judge of a network


@dataclass(frozen=True, eq=False)
class PairScaling:
    """Units in which windows `[n, D, L]` and targets `[n, D, H]` are fitted; all float64.

    Without RevIN every feature and every output is centred by its own training mean, so that a line
    without intercept serves as one with. The unit is the training deviation: per column with one
    channel (columns may be unlike quantities), per channel with several (a channel has one unit,
    and the model one matrix for all its steps). With RevIN level and unit are those of the channel,
    the same for contexts and targets: every model commutes with that.
    """

    x_mean: FloatArray
    x_deviation: FloatArray
    y_mean: FloatArray
    y_deviation: FloatArray

    @classmethod
    def fit(cls, contexts: FloatArray, targets: FloatArray, *, revin: bool) -> PairScaling:
        """Statistics over the given windows."""
        if revin:
            mean, deviation = _statistics(contexts, (0, 2), (0, 2))
            deviation = np.where(deviation > 0, deviation, 1.0)
            return cls(mean, deviation, mean, deviation)
        unit_axes = (0,) if contexts.shape[1] == 1 else (0, 2)
        x_mean, x_deviation = _statistics(contexts, (0,), unit_axes)
        y_mean, y_deviation = _statistics(targets, (0,), unit_axes)
        return cls(
            x_mean,
            # What never varied has taught nothing: it counts as zero ever after.
            np.where(x_deviation > 0, x_deviation, np.inf),
            y_mean,
            np.where(y_deviation > 0, y_deviation, 1.0),
        )

    def contexts(self, values: FloatArray) -> FloatArray:
        """Contexts `[n, D, L]` in the units of the fit."""
        return (values - self.x_mean) / self.x_deviation

    def targets(self, values: FloatArray) -> FloatArray:
        """Targets `[n, D, H]` in the units of the fit."""
        return (values - self.y_mean) / self.y_deviation

    def forecasts(self, values: FloatArray) -> FloatArray:
        """Forecasts `[n, D, H]` back in the units of the targets."""
        return values * self.y_deviation + self.y_mean


class SAMformerRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """`X [n, D·L]` → `y [n]` or `[n, D·H]`: SAMformer beside the line, the better one kept.

    For windows that were cut already; `SAMformer` cuts them from a table. Rows count as ordered in
    time: the last `validation_fraction` of them choose the line's λ (together with held-out blocks
    of the others), SAM's radius, the epoch and, with `model="auto"`, the model (the simplest within
    one standard error of the best); then the chosen model is fitted again on all rows. `predict`
    computes in float64 on the CPU.

    With a single channel attention has nothing to attend to (its matrix is the number 1) and the
    network is itself a line; "auto" therefore fits the closed-form line alone, as it does with
    fewer than 20 rows. Sample weights are not supported. The line costs O(n D L²) + O(L³).

    Args:
        channels: D; the numbers of features and outputs must be multiples of it.
        model: "auto", "linear", "linear-revin" (needs `revin=True`), "samformer" or "blend" (the
            best convex combination).
        revin: False: features and outputs are standardised by the training rows. True: each window
            is normalised by its own context, channel by channel; then y must be the continuation
            of X, in the same units.
        start: "linear" starts the network at the line, "glorot" at random (the paper's).
        rho: radius of sharpness-aware minimisation; "auto" trains with two and keeps the better, 0
            is plain Adam.
        learning_rate, batch_size, epochs, patience: of the network's training; see
            `TrainingSettings`.
        width: inner dimension of attention.
        validation_fraction: share of the rows, the last ones, that validate; 0 < fraction < 1.
        refit: fit the chosen model on all rows, the network for as many epochs as were best.
        random_state: seed of initialisation and shuffling, as everywhere in scikit-learn.
        threads: number of threads of the fit and of `predict`, None for whatever is set; on a fixed
            number results repeat bit for bit.
        device: where the network is trained.
        verbose: show progress on stderr.

    Attributes:
        chosen_: name of the model that predicts.
        model_: that model (`Candidate`), in the units of `scaling_`; networks in float64.
        candidates_: every fitted model by name, as fitted on the training rows alone.
        selection_: errors relative to the line and their standard errors (`Choice`), None if there
            was one model to choose from.
        history_: the network's training (`History`) and `rho_` its radius; None without a network.
        n_iter_: epochs of that training, 0 without a network.
        scaling_: units of the fit (`PairScaling`).
        context_, horizon_, n_outputs_, validation_count_: L, H, D·H, number of validation rows.
        revin_, y_ndim_: what `revin` and the number of y's axes were in `fit`.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    Raises:
        InputError: a parameter that cannot be, or columns that `channels` does not divide.

    Source: Ilbert et al., ICML 2024.

    >>> X = np.random.default_rng(0).normal(size=(200, 4))
    >>> y = X @ [1.0, 2.0, 0.0, -1.0] + 5.0
    >>> model = SAMformerRegressor().fit(X, y)
    >>> model.chosen_, model.predict(np.zeros((1, 4))).round(2)
    ('linear', array([5.]))
    """

    def __init__(
        self,
        channels: int = 1,
        *,
        model: Model = "auto",
        revin: bool = False,
        start: Start = "linear",
        rho: float | Literal["auto"] = "auto",
        learning_rate: float = 1e-3,
        batch_size: int = 32,
        epochs: int = 50,
        patience: int = 6,
        width: int = 16,
        validation_fraction: float = 0.2,
        refit: bool = True,
        random_state: int | RandomState | None = 0,
        threads: int | None = 1,
        device: str = "cpu",
        verbose: bool = False,
    ) -> None:
        self.channels = channels
        self.model = model
        self.revin = revin
        self.start = start
        self.rho = rho
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.epochs = epochs
        self.patience = patience
        self.width = width
        self.validation_fraction = validation_fraction
        self.refit = refit
        self.random_state = random_state
        self.threads = threads
        self.device = device
        self.verbose = verbose

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit on `X [n, D·L]` and `y [n]` or `[n, D·H]`, n ≥ 2, rows in order of time.

        Raises:
            InputError: see the class.
            ValueError: scikit-learn's own, for NaN, infinite, complex, sparse or unequal input.
            DivergenceError: the network's loss is not finite.
        """
        plan = self._plan()
        features, outputs = validate_data(
            self, X, y, dtype=np.float64, order="C", multi_output=True, ensure_min_samples=2
        )
        outputs = check_array(outputs, dtype=np.float64, ensure_2d=False, input_name="y")
        contexts = self._by_channel(features, "features")
        targets = self._by_channel(outputs.reshape(len(outputs), -1), "outputs")
        self.y_ndim_, self.n_outputs_ = outputs.ndim, targets[0].size
        self.context_, self.horizon_ = contexts.shape[2], targets.shape[2]
        self.revin_ = bool(self.revin)
        self.validation_count_ = self._validation_count(len(contexts))
        plan = replace(plan, models=self._models(len(contexts)))
        with threads(self.threads):
            self._fit(contexts, targets, plan)
        return self

    def _fit(self, contexts: FloatArray, targets: FloatArray, plan: Plan) -> None:
        self.scaling_, problem = self._problem(contexts, targets, self.validation_count_)
        fitted = fit_models(problem, plan, show_progress=self.verbose)
        chosen, choice, fitted = select(fitted, plan, problem.validation)
        if self.refit:
            self.scaling_, whole = self._problem(contexts, targets, 0)
            model = refit_on(chosen, whole, plan, fitted, show_progress=self.verbose)
        else:
            model = chosen
        self.model_: Candidate = _for_prediction(model)
        self.candidates_ = {n: _for_prediction(c) for n, c in fitted.candidates.items()}
        self.chosen_: str = chosen.name
        self.selection_: Choice | None = choice
        self.history_: History | None = fitted.history
        self.rho_: float | None = fitted.rho
        self.n_iter_ = 0 if fitted.history is None else len(fitted.history.epochs) - 1

    def predict(self, X: ArrayLike) -> FloatArray:
        """Predictions for `X [n, D·L]`, `[n]` if y was one-dimensional, else `[n, D·H]`; float64.

        Raises:
            NotFittedError: before `fit`.
            ValueError: scikit-learn's own, for another number of features, NaN and the like.
        """
        check_is_fitted(self)
        features = validate_data(self, X, dtype=np.float64, order="C", reset=False)
        rows, channels = len(features), self.n_features_in_ // self.context_
        contexts = self.scaling_.contexts(features.reshape(rows, channels, self.context_))
        unknown = np.zeros((rows, channels, self.horizon_))
        windows = Pairs(contexts, unknown, revin=self.revin_, dtype=torch.float64)
        with threads(self.threads):
            # Forecasts and targets are centred alike; against targets of zero the level returns.
            pieces = [made[0] - truth for made, truth in forecasts([self.model_], windows)]
        out = self.scaling_.forecasts(torch.cat(pieces, dim=1).transpose(0, 1).numpy())
        return out.reshape(-1) if self.y_ndim_ == 1 else out.reshape(rows, self.n_outputs_)

    def _plan(self) -> Plan:
        """Everything that can be said about the fit before the data are seen."""
        _check_choice("model", self.model, ("auto", "linear", "linear-revin", "samformer", "blend"))
        _check_choice("start", self.start, ("linear", "glorot"))
        for name in ("revin", "refit", "verbose"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise InputError(f"{name} must be True or False, {value!r} was given")
        if self.model == "linear-revin" and not self.revin:
            raise InputError(
                'model="linear-revin" weighs windows by their own deviation: pass revin=True, or '
                'model="linear"'
            )
        if self.rho != "auto" and not _is_number(self.rho):
            raise InputError(f'rho must be "auto" or a number >= 0, {self.rho!r} was given')
        fraction = self.validation_fraction
        if not (_is_number(fraction) and 0 < fraction < 1):
            raise InputError(f"validation_fraction must lie in 0 < f < 1, {fraction!r} was given")
        training = TrainingSettings(
            epochs=_whole("epochs", self.epochs),
            patience=_whole("patience", self.patience, least=0),
            batch_size=_whole("batch_size", self.batch_size),
            learning_rate=_number("learning_rate", self.learning_rate),
            rho=0.0 if self.rho == "auto" else float(self.rho),
        )
        if self.threads is not None:
            _whole("threads", self.threads)
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise InputError(
                f'device must be "cpu" or another device of torch, {self.device!r} was given'
            ) from error
        _whole("channels", self.channels)
        return Plan(
            models=(),
            season=1,
            training=training,
            start=self.start,
            rho="auto" if self.rho == "auto" else training.rho,
            net={"width": _whole("width", self.width), "revin": bool(self.revin)},
            seed=_seed(self.random_state),
            device=self.device,
            blended=(*_LINES[bool(self.revin)], "samformer"),
        )

    def _models(self, rows: int) -> tuple[str, ...]:
        if self.model != "auto":
            return (self.model,)
        lines = _LINES[bool(self.revin)]
        attends = self.channels > 1 and rows >= _FEWEST_ROWS
        return (*lines, "samformer", "blend") if attends else lines

    def _validation_count(self, rows: int) -> int:
        return min(max(round(rows * self.validation_fraction), 1), rows - 1)

    def _problem(
        self, contexts: FloatArray, targets: FloatArray, validation_count: int
    ) -> tuple[PairScaling, PairProblem]:
        """The fit in the units of its training rows."""
        count = len(contexts) - validation_count
        scaling = PairScaling.fit(contexts[:count], targets[:count], revin=self.revin)
        problem = PairProblem(
            scaling.contexts(contexts),
            scaling.targets(targets),
            validation_count,
            revin=self.revin,
            device=self.device,
        )
        return scaling, problem

    def _by_channel(self, values: FloatArray, what: str) -> FloatArray:
        rows, columns = values.shape
        if columns % self.channels:
            raise InputError(
                f"{columns} {what} do not divide into {self.channels} channels: give a multiple "
                "of channels, channel after channel, or change channels"
            )
        return values.reshape(rows, self.channels, columns // self.channels)


def _statistics(
    values: FloatArray, mean_axes: tuple[int, ...], unit_axes: tuple[int, ...]
) -> tuple[FloatArray, FloatArray]:
    """Mean of `values [n, D, k]` and root mean square distance to it, each over its own axes.

    Both `[D, k]` or `[D, 1]`; a deviation that is only rounding noise of the level is 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mean = values.mean(axis=mean_axes, keepdims=True)
        # Sums down a column are plain: at a high level the second pass mends their rounding.
        mean = mean + (values - mean).mean(axis=mean_axes, keepdims=True)
        deviation = np.sqrt(np.square(values - mean).mean(axis=unit_axes, keepdims=True))
    if not np.isfinite(deviation).all():
        raise InputError(
            f"values up to {np.abs(values).max():.3g} have no finite variance: rescale them"
        )
    noise = 64 * np.finfo(np.float64).eps * np.abs(values).max(axis=unit_axes, keepdims=True)
    return mean[0], np.where(deviation > noise, deviation, 0.0)[0]


def _for_prediction(candidate: Candidate) -> Candidate:
    """The same candidate with its networks copied to the CPU in float64.

    In float32 the rounding of a row would depend on how many rows are predicted with it.
    """
    if isinstance(candidate, Blend):
        return replace(candidate, members=tuple(_for_prediction(m) for m in candidate.members))
    if isinstance(candidate, Network):
        net = copy.deepcopy(candidate.net).to("cpu", torch.float64).requires_grad_(False)
        return Network(net)
    return candidate


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in known):
        raise InputError(f"{name} must be one of {', '.join(known)}, {value!r} was given")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _number(name: str, value: Any) -> float:
    if not _is_number(value):
        raise InputError(f"{name} must be a number >= 0, {value!r} was given")
    return float(value)


def _whole(name: str, value: Any, *, least: int = 1) -> int:
    if not (_is_number(value) and isinstance(value, Integral) and int(value) >= least):
        raise InputError(f"{name} must be a whole number >= {least}, {value!r} was given")
    return int(value)


def _seed(random_state: Any) -> int:
    """A seed from whatever scikit-learn takes for `random_state`; an integer is the seed itself."""
    source = check_random_state(random_state)
    if isinstance(random_state, Integral):
        return int(random_state)
    return int(source.randint(np.iinfo(np.int32).max))
