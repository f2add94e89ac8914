"""From a forecasting problem to fitted candidates and a choice among them.

One code path serves the forecaster (a table), the bench (fixed borders) and the regressor (windows
given one by one): each is a `Problem`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from levelhead.base.errors import InputError
from levelhead.data.windows import Pairs, Windows, WindowSource, starts_within
from levelhead.forecasting.candidates import (
    Blend,
    Candidate,
    Line,
    Network,
    SeasonalNaive,
    residual_products,
)
from levelhead.forecasting.lines import (
    LineKind,
    fit_line,
    fit_line_to_pairs,
    refit_line,
    refit_line_to_pairs,
)
from levelhead.forecasting.network import Start, fit_network, make_network
from levelhead.forecasting.selection import Choice, Entrant, blend_weights, choose, relative_blocks
from levelhead.training.loop import History, TrainingSettings

__all__ = [
    "MODELS",
    "Fitted",
    "PairProblem",
    "Plan",
    "Problem",
    "SeriesProblem",
    "fit_models",
    "refit",
    "refit_on",
    "select",
]

FloatArray = NDArray[np.float64]
ModelName = Literal["naive", "linear", "linear-revin", "samformer", "blend"]
MODELS: tuple[ModelName, ...] = ("naive", "linear", "linear-revin", "samformer", "blend")

_SIMPLICITY: Mapping[str, int] = {
    "naive": 0,
    "linear": 1,
    "linear-revin": 1,
    "samformer": 2,
    "blend": 3,
}
_RHO_GRID = (0.05, 0.7)
_BLENDED = ("linear", "linear-revin", "samformer")


class Problem(Protocol):
    """Windows to train on, windows to judge with, and how to solve for a line."""

    @property
    def train(self) -> WindowSource: ...

    @property
    def validation(self) -> WindowSource: ...

    @property
    def fingerprint(self) -> str: ...

    def line(self, kind: LineKind) -> Line: ...

    def refit_line(self, line: Line) -> Line:
        """The same kind of line with the same λ on the training windows."""


@dataclass(frozen=True, eq=False)
class SeriesProblem:
    """A standardised `series [D, T]` with training rows followed by validation rows."""

    series: FloatArray
    context: int
    horizon: int
    train_rows: tuple[int, int]
    validation_rows: tuple[int, int]
    judged: Sequence[int] | None = None
    device: torch.device | str = "cpu"

    def windows(self, rows: tuple[int, int], *, reach_back: bool) -> Windows:
        """The windows whose targets lie in these rows."""
        span = starts_within(*rows, self.context, self.horizon, reach_back=reach_back)
        return Windows(
            self.series, self.context, self.horizon, *span, judged=self.judged, device=self.device
        )

    @property
    def train(self) -> Windows:
        return self.windows(self.train_rows, reach_back=False)

    @property
    def validation(self) -> Windows:
        return self.windows(self.validation_rows, reach_back=True)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the series, by which a resumed training knows its data again."""
        return hashlib.sha256(np.ascontiguousarray(self.series).tobytes()).hexdigest()

    @property
    def judged_series(self) -> FloatArray:
        """The channels whose forecasts count."""
        return self.series if self.judged is None else self.series[list(self.judged)]

    def line(self, kind: LineKind) -> Line:
        return fit_line(
            self.judged_series,
            self.context,
            self.horizon,
            self.train_rows,
            self.validation_rows,
            kind,
        )

    def refit_line(self, line: Line) -> Line:
        return refit_line(line, self.judged_series, self.train_rows)


@dataclass(frozen=True, eq=False)
class PairProblem:
    """Windows `[N, D, L]` and targets `[N, D, H]`; the last part of them validates."""

    contexts: FloatArray
    targets: FloatArray
    validation_count: int
    revin: bool = True
    device: torch.device | str = "cpu"

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all windows and targets."""
        found = hashlib.sha256(np.ascontiguousarray(self.contexts).tobytes())
        found.update(np.ascontiguousarray(self.targets).tobytes())
        return found.hexdigest()

    def _pairs(self, span: slice) -> Pairs:
        return Pairs(self.contexts[span], self.targets[span], revin=self.revin, device=self.device)

    @property
    def train(self) -> Pairs:
        return self._pairs(slice(None, len(self.contexts) - self.validation_count))

    @property
    def validation(self) -> Pairs:
        return self._pairs(slice(len(self.contexts) - self.validation_count, None))

    def line(self, kind: LineKind) -> Line:
        return fit_line_to_pairs(
            self.contexts, self.targets, self.validation_count, kind, revin=self.revin
        )

    def refit_line(self, line: Line) -> Line:
        count = len(self.contexts) - self.validation_count
        return refit_line_to_pairs(
            line, self.contexts[:count], self.targets[:count], revin=self.revin
        )


@dataclass(frozen=True)
class Plan:
    """What to fit and how.

    `net` holds options of `SAMformerNet`; `rho="auto"` trains once per radius of a small grid and
    keeps the better validation error; `blended` names what a blend may be made of.
    """

    models: tuple[str, ...]
    season: int
    training: TrainingSettings
    start: Start = "linear"
    rho: float | Literal["auto"] = "auto"
    net: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    device: torch.device | str = "cpu"
    beside: tuple[str, ...] = ()
    blended: tuple[str, ...] = _BLENDED

    def needs(self, name: str) -> bool:
        """Whether a model must be fitted: for itself, to stand beside, or for the blend."""
        return name in (*self.models, *self.beside) or (
            "blend" in self.models and name in self.blended
        )


@dataclass(frozen=True, eq=False)
class Fitted:
    """Fitted candidates by name and what their training reported."""

    candidates: dict[str, Candidate]
    history: History | None = None
    rho: float | None = None


def fit_models(
    problem: Problem,
    plan: Plan,
    *,
    state_dir: Path | None = None,
    resume: bool = False,
    show_progress: bool | None = None,
) -> Fitted:
    """Fit the plan's models (all but the blend) on the problem's training windows."""
    unknown = sorted(set(plan.models) - set(MODELS))
    if unknown:
        raise InputError(f"unknown model {unknown[0]!r}: choose from {', '.join(MODELS)}")
    _check_device(plan.device)
    found: dict[str, Candidate] = {}
    if plan.needs("naive"):
        found["naive"] = SeasonalNaive(plan.season, problem.train.horizon)
    needs_line = plan.needs("samformer") and plan.start == "linear"
    if plan.needs("linear") or needs_line:
        found["linear"] = problem.line("linear")
    if plan.needs("linear-revin"):
        found["linear-revin"] = problem.line("linear-revin")
    history, rho = None, None
    if plan.needs("samformer"):
        if state_dir is not None:
            state_dir.mkdir(parents=True, exist_ok=True)
        line = found.get("linear") if plan.start == "linear" else None
        assert line is None or isinstance(line, Line)
        network, history, rho = _best_network(
            problem, plan, line, state_dir=state_dir, resume=resume, show_progress=show_progress
        )
        found["samformer"] = network
    return Fitted({n: found[n] for n in MODELS if n in found}, history, rho)


def _check_device(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"device {str(device)!r} cannot be used here ({reason}): use 'cpu'"
        ) from error


def _best_network(
    problem: Problem,
    plan: Plan,
    line: Line | None,
    *,
    state_dir: Path | None,
    resume: bool,
    show_progress: bool | None,
) -> tuple[Network, History, float]:
    train, validation = problem.train, problem.validation
    grid: tuple[float, ...] = _RHO_GRID if plan.rho == "auto" else (plan.rho,)
    if not len(validation):
        grid = grid[:1]  # nothing can tell the radii apart: the smallest
    best: tuple[Network, History, float] | None = None
    for rho in grid:
        settings = replace(plan.training, rho=rho, seed=plan.seed)
        net = make_network(
            train.context,
            train.horizon,
            train.channels,
            seed=plan.seed,
            line=line,
            device=plan.device,
            **plan.net,
        )
        history = fit_network(
            net,
            train,
            validation if len(validation) else None,
            settings,
            state_path=None if state_dir is None else state_dir / f"training-rho-{rho:g}.state",
            resume=resume,
            data="" if state_dir is None else problem.fingerprint,
            show_progress=show_progress,
        )
        if best is None or history.best_validation < best[1].best_validation:
            best = Network(net), history, rho
    assert best is not None
    return best


def select(
    fitted: Fitted, plan: Plan, validation: WindowSource
) -> tuple[Candidate, Choice | None, Fitted]:
    """The chosen candidate, why, and the candidates with the blend added."""
    members = [n for n in _BLENDED if n in fitted.candidates]
    candidates = dict(fitted.candidates)
    if len(validation) == 0 or (len(plan.models) == 1 and plan.models[0] != "blend"):
        wanted = plan.models[0] if len(plan.models) == 1 else "linear"
        return candidates[wanted], None, fitted
    names = list(candidates)
    products = residual_products([candidates[n] for n in names], validation)
    blocks = relative_blocks(products, names.index(members[0]), validation.horizon)
    entrants = [
        Entrant(n, _SIMPLICITY[n], blocks[:, i, i]) for i, n in enumerate(names) if n in plan.models
    ]
    if "blend" in plan.models and len(members) > 1:
        inner = blocks[np.ix_(range(len(blocks)), *[[names.index(m) for m in members]] * 2)]
        weights = blend_weights(inner.mean(axis=0))
        used = [(candidates[m], float(w)) for m, w in zip(members, weights, strict=True) if w > 0]
        candidates["blend"] = Blend(tuple(m for m, _ in used), tuple(w for _, w in used))
        entrants.append(Entrant("blend", _SIMPLICITY["blend"], _held_out_blend(inner)))
    choice = choose(entrants)
    complete = replace(fitted, candidates=candidates)
    return candidates[choice.chosen], choice, complete


def _held_out_blend(products: FloatArray) -> FloatArray:
    """Error of the blend on each block with the weights of the other blocks, `[blocks]`."""
    count = len(products)
    if count < 2:
        return np.array([w @ products[0] @ w for w in [blend_weights(products[0])]])
    errors = []
    for i in range(count):
        weights = blend_weights(np.delete(products, i, axis=0).mean(axis=0))
        errors.append(float(weights @ products[i] @ weights))
    return np.array(errors)


def refit(
    chosen: Candidate,
    problem: SeriesProblem,
    rows: tuple[int, int],
    plan: Plan,
    fitted: Fitted,
    *,
    state_dir: Path | None = None,
    resume: bool = False,
    show_progress: bool | None = None,
) -> Candidate:
    """`refit_on` for other rows of a series."""
    whole = replace(problem, train_rows=rows)
    return refit_on(
        chosen,
        whole,
        plan,
        fitted,
        state_dir=state_dir,
        resume=resume,
        show_progress=show_progress,
    )


def refit_on(
    chosen: Candidate,
    problem: Problem,
    plan: Plan,
    fitted: Fitted,
    *,
    state_dir: Path | None = None,
    resume: bool = False,
    show_progress: bool | None = None,
) -> Candidate:
    """The same kind of model on the training windows of `problem`, with every choice kept.

    λ stays; the network starts anew (from the refitted line, if it started from one) and trains for
    the number of epochs after which its validation error was best.
    """
    if isinstance(chosen, Blend):
        again = partial(
            refit_on,
            problem=problem,
            plan=plan,
            fitted=fitted,
            state_dir=state_dir,
            resume=resume,
            show_progress=show_progress,
        )
        members = tuple(again(m) for m in chosen.members)
        return replace(chosen, members=members)
    if isinstance(chosen, Line):
        return problem.refit_line(chosen)
    if not isinstance(chosen, Network):
        return chosen
    assert fitted.history is not None
    assert fitted.rho is not None
    line = fitted.candidates.get("linear") if plan.start == "linear" else None
    windows = problem.train
    net = make_network(
        windows.context,
        windows.horizon,
        windows.channels,
        seed=plan.seed,
        line=problem.refit_line(line) if isinstance(line, Line) else None,
        device=plan.device,
        **plan.net,
    )
    epochs = fitted.history.best_epoch
    if epochs > 0:
        settings = replace(plan.training, rho=fitted.rho, seed=plan.seed, epochs=epochs)
        fit_network(
            net,
            windows,
            None,
            settings,
            state_path=None if state_dir is None else state_dir / "training-refit.state",
            resume=resume,
            data="" if state_dir is None else problem.fingerprint,
            show_progress=show_progress,
        )
    net.eval()
    return Network(net)
