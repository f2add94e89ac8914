"""Trainings that were stopped before they were done, and what can still be compared.

Temporal attention and brief sets have fewer epochs than the rest. Where such a limit ended a
training, a difference of test errors is one of budgets as well. Test errors are those of the
weights with the best validation error; of other epochs validation errors alone are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from levelhead.studies.forecasting_models import ARMS
from levelhead.studies.forecasting_outcomes import Losses, Place

__all__ = ["at_equal_epochs", "cut_short"]


def cut_short(losses: Losses, place: Place, arms: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """A phrase for each arm with a training that was ended by its limit of epochs."""
    said = []
    for arm in arms:
        stopped = losses.stopped(place, arm, seeds)
        if stopped:
            limit, whole = losses.limit(place, arm), losses.settings.epochs
            some = "" if len(stopped) == len(seeds) else f" in {len(stopped)} of {len(seeds)} seeds"
            said.append(f"{arm} stopped at {limit} of {whole} epochs{some}")
    return said


def at_equal_epochs(losses: Losses, place: Place, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """Validation errors of two arms within the epochs that both had; "" if neither was stopped.

    A closed form has no epochs, so that there is nothing to say of it. Says that it is not possible
    for gains, of four arms, and where a curve is missing. Where both arms keep weights of those
    epochs, the test errors are those of equal numbers of epochs, and that is said.
    """
    stopped = any(losses.stopped(place, arm, seeds) for arm in arms)
    if not stopped or any(ARMS[arm].line is not None for arm in arms):
        return ""
    limit = min(losses.limit(place, arm) for arm in arms)
    best = {arm: _best_within(losses, place, arm, seeds, limit) for arm in arms}
    if len(arms) != 2 or None in best.values():
        return "what would show it at equal numbers of epochs is not stored"
    kept = [losses.seeds(place, arm)[s].value("best_epoch") for arm in arms for s in seeds]
    numbers = ", ".join(f"{arm} {value:.4f}" for arm, value in best.items())
    tested = (
        "the weights that were kept are of these epochs"
        if max(kept) <= limit
        else "test errors of these epochs are not stored"
    )
    return f"lowest validation error within {limit} epochs: {numbers}; {tested}"


def _best_within(
    losses: Losses, place: Place, arm: str, seeds: Sequence[int], limit: int
) -> float | None:
    """Mean over seeds of the lowest validation error up to that epoch; None without its curve."""
    runs = losses.seeds(place, arm)
    curves = [runs[s].arrays.get("curve.validation_curve") if s in runs else None for s in seeds]
    found = [c[: limit + 1] for c in curves if c is not None and np.isfinite(c[: limit + 1]).any()]
    if len(found) < len(seeds) or not found:
        return None
    return float(np.mean([np.nanmin(curve) for curve in found]))
