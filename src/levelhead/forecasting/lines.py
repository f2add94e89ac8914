"""Fitting the line: blocked validation of λ, one factorisation per block of training rows.

λ is judged on the validation rows and on K held-out blocks of the training rows (whole windows on
either side of the block train, windows inside it judge): a validation range of a few horizons alone
is too short to place it. Errors are relative to each block's best before they are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from levelhead.base.errors import InputError
from levelhead.data.windows import starts_within
from levelhead.forecasting.candidates import Line
from levelhead.nn.linear import (
    Centre,
    LinePath,
    Moments,
    line_as_head,
    moments,
    pair_moments,
    revin_moments,
    solve_line,
)

__all__ = [
    "PENALTIES",
    "LineKind",
    "fit_line",
    "fit_line_to_pairs",
    "refit_line",
    "refit_line_to_pairs",
]

FloatArray = NDArray[np.float64]
LineKind = Literal["linear", "linear-revin"]

PENALTIES: tuple[float, ...] = tuple(float(10.0**e) for e in np.arange(-4.0, 3.01, 0.5))
"""λ grid: half decades, in squared units of the standardised series."""

_BLOCKS = 4
_STILL = 1e-9
_REVIN_FLOOR = 1.0
_REVIN_PAIRS = 60_000


@dataclass(frozen=True)
class _Family:
    """How one kind of line is centred, how its windows are weighted, how it is judged."""

    kind: LineKind
    context: int
    horizon: int

    @property
    def centre(self) -> Centre:
        return "last" if self.kind == "linear" else "mean"

    def judged(self, series: FloatArray, span: tuple[int, int]) -> Moments:
        return moments(series, self.context, self.horizon, *span, self.centre)

    def fitted(self, series: FloatArray, span: tuple[int, int]) -> Moments:
        if self.kind == "linear":
            return self.judged(series, span)
        pairs = series.shape[0] * (span[1] - span[0])
        return revin_moments(
            series,
            self.context,
            self.horizon,
            *span,
            floor=_REVIN_FLOOR,
            every=max(1, -(-pairs // _REVIN_PAIRS)),
        )

    def line(self, weights: FloatArray, penalty: float) -> Line:
        head = line_as_head(weights, self.centre)
        return Line(torch.from_numpy(np.ascontiguousarray(head)), penalty, self.kind)

    def pairs(
        self, contexts: FloatArray, targets: FloatArray, *, revin: bool, fitted: bool
    ) -> Moments:
        """Moments of windows given one by one, weighted as the line is judged or `fitted`."""
        floor = _REVIN_FLOOR if revin and fitted and self.kind == "linear-revin" else None
        return pair_moments(contexts, targets, self.centre if revin else None, floor=floor)

    def pair_line(self, weights: FloatArray, penalty: float, *, revin: bool) -> Line:
        """The line for windows given one by one: without RevIN its weights are its head."""
        if revin:
            return self.line(weights, penalty)
        return Line(torch.from_numpy(weights), penalty, self.kind)


def fit_line(
    series: FloatArray,
    context: int,
    horizon: int,
    train: tuple[int, int],
    validation: tuple[int, int],
    kind: LineKind = "linear",
) -> Line:
    """Line fitted on the windows of the rows `train`, λ chosen by blocked validation.

    Args:
        series: `[D, T]`, standardised.
        train, validation: first row and one past the last; validation contexts reach back.
    """
    family = _Family(kind, context, horizon)
    span = starts_within(*train, context, horizon, reach_back=False)
    if span[1] <= span[0]:
        raise InputError(
            f"{train[1] - train[0]} training rows hold no window of context {context} + horizon "
            f"{horizon}: give more rows or shorten them"
        )
    whole = family.fitted(series, span)
    curves = [
        LinePath(fitted).errors(judged, PENALTIES)
        for fitted, judged in _blocks(family, series, train)
    ]
    judged_span = starts_within(*validation, context, horizon, reach_back=True)
    if judged_span[1] > judged_span[0]:
        curves.append(LinePath(whole).errors(family.judged(series, judged_span), PENALTIES))
    penalty = _best_penalty(curves)
    return family.line(solve_line(whole, penalty), penalty)


def fit_line_to_pairs(
    contexts: FloatArray,
    targets: FloatArray,
    validation_count: int,
    kind: LineKind = "linear",
    *,
    revin: bool = True,
) -> Line:
    """Line for windows `[N, D, L]` and targets `[N, D, H]` given one by one.

    The last `validation_count` windows judge λ, as do held-out blocks of the others. With
    `revin=False` nothing is centred: a plain ridge without intercept.
    """
    family = _Family(kind, contexts.shape[2], targets.shape[2])
    count = len(contexts) - validation_count

    def fitted(*spans: slice) -> Moments:
        parts = [family.pairs(contexts[s], targets[s], revin=revin, fitted=True) for s in spans]
        return _total(parts)

    def judged(span: slice) -> Moments:
        return family.pairs(contexts[span], targets[span], revin=revin, fitted=False)

    whole = fitted(slice(0, count))
    curves = []
    edges = np.linspace(0, count, _BLOCKS + 1).astype(int).tolist()
    if count >= 2 * _BLOCKS:
        for a, b in pairwise(edges):
            outside = fitted(slice(0, a), slice(b, count))
            curves.append(LinePath(outside).errors(judged(slice(a, b)), PENALTIES))
    if validation_count:
        curves.append(LinePath(whole).errors(judged(slice(count, None)), PENALTIES))
    penalty = _best_penalty(curves)
    return family.pair_line(solve_line(whole, penalty), penalty, revin=revin)


def refit_line(line: Line, series: FloatArray, train: tuple[int, int]) -> Line:
    """The same kind of line with the same λ on other rows."""
    family = _family_of(line)
    context, horizon = line.head.shape
    span = starts_within(*train, context, horizon, reach_back=False)
    return family.line(solve_line(family.fitted(series, span), line.penalty), line.penalty)


def refit_line_to_pairs(
    line: Line, contexts: FloatArray, targets: FloatArray, *, revin: bool = True
) -> Line:
    """The same kind of line with the same λ for other windows `[N, D, L]`, targets `[N, D, H]`."""
    family = _family_of(line)
    whole = family.pairs(contexts, targets, revin=revin, fitted=True)
    return family.pair_line(solve_line(whole, line.penalty), line.penalty, revin=revin)


def _family_of(line: Line) -> _Family:
    kind: LineKind = "linear" if line.name == "linear" else "linear-revin"
    context, horizon = line.head.shape
    return _Family(kind, context, horizon)


def _best_penalty(curves: list[FloatArray]) -> float:
    if not curves:
        return 1.0  # one window or two: nothing to judge with; a unit of variance per input
    # A block in which nothing moves has no error but rounding's: it must not outvote the others.
    floor = max(_STILL * max(float(c.max()) for c in curves), np.finfo(np.float64).tiny)
    smallest = [max(float(c.min()), floor) for c in curves]
    relative = np.mean([c / s for c, s in zip(curves, smallest, strict=True)], axis=0)
    return PENALTIES[int(np.argmin(relative))]


def _blocks(
    family: _Family, series: FloatArray, train: tuple[int, int]
) -> Iterator[tuple[Moments, Moments]]:
    """(moments outside block k, moments inside block k) for the blocks that hold windows."""
    context, horizon = family.context, family.horizon
    edges = np.linspace(train[0], train[1], _BLOCKS + 1).astype(int).tolist()
    whole = (train[0], train[1])
    for k in range(_BLOCKS):
        inside = starts_within(edges[k], edges[k + 1], context, horizon, reach_back=True)
        inside = (max(inside[0], whole[0]), inside[1])
        outside = [
            starts_within(whole[0], edges[k], context, horizon, reach_back=False),
            starts_within(edges[k + 1], whole[1], context, horizon, reach_back=False),
        ]
        spans = [s for s in outside if s[1] > s[0]]
        if inside[1] > inside[0] and spans:
            fitted = _total([family.fitted(series, s) for s in spans])
            yield fitted, family.judged(series, inside)


def _total(parts: list[Moments]) -> Moments:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
