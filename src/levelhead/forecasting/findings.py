"""What a fit has shown, in three sentences that follow from its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from levelhead.forecasting.candidates import Blend
from levelhead.forecasting.forecaster import SAMformer
from levelhead.forecasting.judgement import pooled_rows

__all__ = ["findings"]

_WORTH = 0.01  # a gain of less than one per cent hardly pays for a trained model


def findings(estimator: SAMformer, coverage: Sequence[float] = (0.8, 0.95)) -> list[str]:
    """What was chosen and why; whether a transformer was worth it; what the intervals rest on."""
    pooled = pooled_rows(estimator.errors_).set_index("model")
    error = {str(name): float(value) for name, value in pooled["mse_scaled"].items()}
    sentences = (
        _choice(estimator, error),
        _transformer(estimator, error),
        _intervals(estimator, coverage),
    )
    return [f"{s}." for s in sentences]


def _choice(estimator: SAMformer, error: dict[str, float]) -> str:
    chosen, choice, borders = estimator.chosen_, estimator.choice_, estimator.borders_
    rows = borders.select - borders.train
    line = _against(error["linear"], error["naive"])
    if chosen == "naive" and choice is None:
        return f"The naive forecast was asked for; on {rows} rows the line's error is {line} it"
    if chosen == "naive" and choice is not None and choice.blocks > 1:
        return (
            f"The naive forecast stands: on the {rows} rows that chose, no other model was better "
            f"beyond one standard error over {choice.blocks} blocks (the line: {line} it)"
        )
    doubt = ""
    if choice is not None and choice.blocks < 2:
        doubt = " (too few rows to test this: it is the best closed form)"
    return (
        f"{_named(estimator)} forecasts: on the {rows} rows that chose, its squared error is "
        f"{_against(error.get(chosen, math.nan), error['naive'])} the naive forecast's{doubt}"
    )


def _transformer(estimator: SAMformer, error: dict[str, float]) -> str:
    history, own = estimator.history_, error.get("samformer")
    if own is None or history is None:
        if estimator.model == "auto":
            return "No transformer was tried: with one series there is nothing to attend to"
        return f"No transformer was trained: model={estimator.model!r} was asked for"
    if estimator.start == "linear" and history.best_epoch == 0:
        return (
            f"A transformer was not worth it: in {len(history.epochs) - 1} epochs SAMformer found "
            "nothing better than the straight line it started from"
        )
    line = min(error[n] for n in ("linear", "linear-revin") if n in error)
    against = f"SAMformer's squared error is {_against(own, line)} the straight line's"
    if "samformer" not in _members(estimator):
        if own < line:
            against += ", which is within one standard error or owed to a few blocks"
        return f"A transformer was not worth it: {against}"
    if own < (1 - _WORTH) * line:
        return f"A transformer was worth it: {against}"
    return f"A transformer made hardly a difference: {against}"


def _intervals(estimator: SAMformer, coverage: Sequence[float]) -> str:
    borders = estimator.borders_
    rows = borders.rows - borders.select
    windows = rows - borders.horizon + 1
    apart = max(1, rows // borders.horizon)
    base = (
        f"Intervals are calibrated on the last {rows} rows, per channel and step, in units of each "
        "window's deviation; they assume that the near future errs like those rows"
    )
    unfounded = [c for c in coverage if math.ceil((windows + 1) * c - 1e-9) > windows]
    if unfounded:
        labels = " and ".join(f"{100 * c:g} %" for c in unfounded)
        return (
            f"{base}, but {windows} windows ({apart} apart) cannot support {labels}: the largest "
            "error seen stands for it, and too little will be covered"
        )
    if apart < 5:
        return (
            f"{base}; these rows hold only {apart} windows that do not overlap: take them as rough"
        )
    return base


def _members(estimator: SAMformer) -> list[str]:
    chosen = estimator._fitted.chosen
    return [m.name for m in chosen.members] if isinstance(chosen, Blend) else [chosen.name]


def _named(estimator: SAMformer) -> str:
    names = {
        "naive": "the naive forecast",
        "linear": "the straight line",
        "linear-revin": "the RevIN-weighted line",
        "samformer": "SAMformer",
    }
    members = [names[m] for m in _members(estimator)]
    if len(members) == 1:
        return members[0][0].upper() + members[0][1:]
    return f"A blend of {', '.join(members[:-1])} and {members[-1]}"


def _against(own: float, other: float) -> str:
    """ "3.1 % below", "4.2 times": how one error stands to another."""
    if not other > 1e-12:  # standardised units: both are exact up to rounding
        return "as good as" if own <= 1e-12 else "far above"
    ratio: Any = own / other
    if abs(ratio - 1.0) < 5e-4:
        return "equal to"
    if ratio > 10.0:
        return f"{ratio:.3g} times"
    return f"{100 * abs(ratio - 1.0):.1f} % {'above' if ratio > 1 else 'below'}"
