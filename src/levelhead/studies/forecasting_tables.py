"""Tables of the forecasting study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.evaluation.significance import LEAST_BLOCKS
from levelhead.studies.forecasting_comparisons import Compared, against
from levelhead.studies.forecasting_models import ARMS
from levelhead.studies.forecasting_outcomes import Losses, named
from levelhead.studies.study import Table

__all__ = ["radii", "tables"]

FloatArray = NDArray[np.float64]
_MEASURES = (
    "validation",
    "training_loss",
    "lambda_max",
    "sam_rise",
    "entropy_share",
    "own",
    "rank",
    "epochs",
    "best_epoch",
    "parameters",
)


def tables(losses: Losses, claims: Sequence[Compared]) -> list[Table]:
    """All tables that have a number in them."""
    made = [
        _by_place(losses, "mse", "Test mean squared error"),
        _by_place(losses, "mae", "Test mean absolute error"),
        _spread(losses),
        _against_line(losses),
        _claims(claims),
        _over_seeds(claims),
        _slip(losses),
        _radii(losses),
        _measures(losses),
    ]
    return [table for table in made if table.values.size]


def _by_place(losses: Losses, measure: str, title: str) -> Table:
    places = losses.places
    arms = [arm for arm in losses.settings.arms if not ARMS[arm].slip]
    values = [[losses.mean(place, arm, measure) for place in places] for arm in arms]
    return Table(
        measure,
        title,
        "Standardised values, every test window counted, means over seeds. Arms with the slip, "
        "whose loss is another, are in the slip's table.",
        arms,
        [named(place) for place in places],
        np.array(values, dtype=float).reshape(len(arms), len(places)),
        row_axis="arm",
        best="min",
    )


def _spread(losses: Losses) -> Table:
    places, arms = losses.places, losses.settings.arms
    values = np.full((len(arms), len(places)), np.nan)
    for at in np.ndindex(values.shape):
        found = losses.values(places[at[1]], arms[at[0]], "mse")
        if len(found) > 1:
            values[at] = (found - found[0]).std(ddof=1)  # none where all are equal
    kept = np.isfinite(values).any(axis=1)
    return Table(
        "spread",
        "Deviation of the test error over initialisations",
        "Over seeds; an empty cell has fewer than two. Arms with the slip: of the error with it.",
        [arm for arm, keep in zip(arms, kept, strict=True) if keep],
        [named(place) for place in places],
        values[kept],
        row_axis="arm",
    )


def _against_line(losses: Losses) -> Table:
    rows, values = [], []
    for place in losses.places:
        base = losses.mean(place, "line", "mse")
        for arm in losses.ranked(place):
            found = None if arm == "line" else against(losses, place, arm, "line")
            if found is not None:
                share = 100 * found.difference / base
                rows.append(f"{named(place)}, {arm}")
                values.append([found.difference, found.low, found.high, share])
    return Table(
        "against-line",
        "Test error minus the straight line's",
        "Seeds averaged; 95 % intervals by Student's t over blocks of 2H test windows, not "
        "adjusted. Below zero the arm is better. No interval for fewer than "
        f"{LEAST_BLOCKS} blocks. Without arms with the slip, which are judged by another loss.",
        rows,
        ["difference", "low", "high", "% of the line's"],
        np.array(values, dtype=float).reshape(-1, 4),
        row_axis="place and arm",
    )


_COLUMNS = (
    "difference",
    "low",
    "high",
    "effect",
    "p",
    "p Holm",
    "p DM",
    "bootstrap low",
    "bootstrap high",
    "blocks of 2H",
    "windows",
    "judged",
)


def _claims(claims: Sequence[Compared]) -> Table:
    values = []
    for c in claims:
        over, tested, drawn = c.windows, c.diebold_mariano, c.bootstrap
        shown = (drawn.low, drawn.high) if over.judged else (math.nan, math.nan)
        values.append(
            [
                *(over.difference, over.low, over.high, over.effect, over.p_value, c.adjusted),
                *(math.nan if tested is None else tested.p_value, *shown),
                *(over.count, drawn.count, c.judged),
            ]
        )
    return Table(
        "comparisons",
        "The primary comparisons, over test windows",
        "First arm minus second (of slip: gain with a correct RevIN minus gain with the slip; of "
        "slip-explains: minus half of it), seeds averaged. Interval, effect (over the deviation of "
        "blocks) and p by Student's t over means of blocks of 2H windows, p adjusted for all that "
        "is judged by Holm; beside it Diebold and Mariano's p. The block bootstrap's interval is "
        f"too narrow and only described. With fewer than {LEAST_BLOCKS} blocks there is no "
        "interval. judged: 0 also for one seed, for trainings that a limit of epochs stopped and "
        "for a part of a gain that is not there.",
        [f"{c.claim.name}, {named(c.place)}" for c in claims],
        _COLUMNS,
        np.array(values, dtype=float).reshape(-1, len(_COLUMNS)),
        row_axis="claim and place",
    )


def _over_seeds(claims: Sequence[Compared]) -> Table:
    found = [(c, c.seeds) for c in claims if c.seeds is not None]
    return Table(
        "comparisons-seeds",
        "The primary comparisons, over initialisations",
        "The same differences, by Student's paired t over seeds; not adjusted. No interval and no "
        "p where all seeds agree exactly. alike: 1 if every seed has the sign of the mean.",
        [f"{c.claim.name}, {named(c.place)}" for c, _ in found],
        ["difference", "low", "high", "effect", "p", "seeds", "alike"],
        np.array(
            [
                [s.difference, s.low, s.high, s.effect, s.p_value, s.count, c.alike]
                for c, s in found
            ],
            dtype=float,
        ).reshape(-1, 7),
        row_axis="claim and place",
    )


_JUDGED = (
    ("correct", "transformer", "samformer", "mse"),
    ("released", "transformer-slip", "samformer-slip", "mse"),
    ("put right", "transformer-slip", "samformer-slip", "mse_correct"),
)


def _slip(losses: Losses) -> Table:
    """SAM's gain with a correct RevIN, with the released slip, and with slipped weights alone."""
    rows, values = [], []
    for place in losses.places:
        for how, plain, sam, measure in _JUDGED:
            pair = [losses.mean(place, arm, measure) for arm in (plain, sam)]
            if losses.seeds(place, "transformer-slip") and np.isfinite(pair).all():
                rows.append(f"{named(place)}, {how}")
                values.append([*pair, pair[0] - pair[1]])
    return Table(
        "slip",
        "What the released de-normalisation does to SAM's gain",
        "Test errors with a correct RevIN; trained and judged with the slip, as released; trained "
        "with it and put right to be judged.",
        rows,
        ["transformer", "samformer", "gain"],
        np.array(values, dtype=float).reshape(-1, 3),
        row_axis="place and RevIN",
    )


def radii(losses: Losses) -> tuple[list[float], list[str], FloatArray]:
    """Radii [r], sets [s] and test errors [s, r] of SAMformer at the first horizon, seed 0.

    Radius 0 is the transformer.
    """
    settings: Any = losses.settings
    first = settings.horizons[0]
    at = sorted({0.0, settings.rho, *settings.rhos})
    rows, names = [], []
    for name in settings.sets:
        ends = {rho: f"rho{rho:g}-0" for rho in settings.rhos}
        ends |= {0.0: "transformer-0", settings.rho: "samformer-0"}
        cells = [losses.outcomes.get(f"{name}-{first}-{ends[rho]}") for rho in at]
        errors = [math.nan if cell is None else cell.value("mse") for cell in cells]
        if np.isfinite(errors).sum() > 2:
            rows.append(errors)
            names.append(name)
    return at, names, np.array(rows, dtype=float).reshape(-1, len(at))


def _radii(losses: Losses) -> Table:
    at, names, values = radii(losses)
    return Table(
        "rho",
        "Sensitivity to SAM's radius",
        f"Test mean squared error at H = {losses.settings.horizons[0]}, seed 0; 0 is without SAM.",
        names,
        [f"{rho:g}" for rho in at],
        values,
        row_axis="set",
    )


def _measures(losses: Losses) -> Table:
    rows, values = [], []
    for place in losses.places:
        for arm in losses.arms(place):
            rows.append(f"{named(place)}, {arm}")
            values.append([losses.mean(place, arm, name) for name in _MEASURES])
    return Table(
        "measures",
        "What the fitted models are like",
        "Means over seeds. lambda_max and sam_rise (ρ .05) of the trained loss at the balanced "
        "gauge; entropy_share of log n, own weight and effective rank of attention on validation "
        "windows; epochs done and the one that was kept. Arms with the slip: of the loss with it.",
        rows,
        list(_MEASURES),
        np.array(values, dtype=float).reshape(-1, len(_MEASURES)),
        row_axis="place and arm",
    )
