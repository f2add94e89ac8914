"""From a forecaster's parameters to a plan: what they mean for this table."""

from __future__ import annotations

from typing import Any

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError
from levelhead.forecasting.fitting import MODELS, Plan
from levelhead.training.loop import TrainingSettings

__all__ = ["FILLS", "plan_for", "usable_season", "wanted_season"]

FILLS = ("error", "interpolate", "ffill")
"""What a forecaster may do with missing values; a table that keeps them cannot be fitted."""

_STEPS_PER_EPOCH = 256


def plan_for(estimator: Any, season: int, channels: int) -> Plan:
    """What to fit for a table of so many channels.

    With one channel attention has nothing to attend to (A(X) = 1) and the network is a line:
    "auto" then leaves it out.
    """
    models: tuple[str, ...] = MODELS if estimator.model == "auto" else (estimator.model,)
    if set(models) - set(MODELS):
        raise InputError(
            f"unknown model {estimator.model!r}: choose auto or one of {', '.join(MODELS)}"
        )
    if estimator.model == "auto" and channels == 1:
        models = ("naive", "linear", "linear-revin")
    if estimator.start not in ("linear", "glorot"):
        raise InputError(f"start must be 'linear' or 'glorot', {estimator.start!r} was given")
    rho = estimator.rho
    if rho != "auto" and not (isinstance(rho, int | float) and rho >= 0):
        raise InputError(f"rho must be 'auto' or a number >= 0, {rho!r} was given")
    training = TrainingSettings(
        epochs=estimator.epochs,
        patience=estimator.patience,
        batch_size=estimator.batch_size,
        learning_rate=estimator.learning_rate,
        minimal_rate=min(1e-6, estimator.learning_rate),
        steps_per_epoch=_STEPS_PER_EPOCH,
    )
    return Plan(
        models,
        season,
        training,
        estimator.start,
        rho,
        {"width": estimator.width, "revin_affine": estimator.revin_affine},
        estimator.random_state,
        estimator.device,
        beside=("naive", "linear"),
    )


def wanted_season(estimator: Any, customary: int | None) -> int | None:
    """The season asked for, or the step's customary one."""
    season = estimator.season
    if season is None or season == "auto":
        return customary
    if not is_whole(season):
        raise InputError(f"season must be 'auto' or a positive whole number, {season!r} was given")
    return int(season)


def usable_season(estimator: Any, season: int | None, context: int) -> tuple[int, str | None]:
    """(period of the naive forecast, a sentence if it is not the customary one).

    The naive forecast repeats a season that lies in the context. A customary season that is longer
    gives way to the last value; one that was asked for is refused.
    """
    if season is None or season <= context:
        return season or 1, None
    if estimator.season not in (None, "auto"):
        raise InputError(
            f"a season of {season} rows does not fit into the context of {context}: give a longer "
            "context (more rows), or a shorter season"
        )
    return 1, (
        f"the season of {season} rows is longer than the context of {context}: the naive "
        "forecast repeats the last value"
    )
