"""Figures of the forecasting study: errors by arm, differences to the line, radii, curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Figure
from levelhead.studies.forecasting_comparisons import against
from levelhead.studies.forecasting_outcomes import Losses, Place, named, the_set
from levelhead.studies.forecasting_tables import radii
from levelhead.studies.toy_outcomes import mean_and_half

__all__ = ["figures"]

FloatArray = NDArray[np.float64]
Made = tuple[Figure, Mapping[str, NDArray[Any]]]
# Title, unit, first epoch. Before the first step the error is that of drawn weights: several times
# what follows, which would all lie on one line.
_CURVES = {
    "validation_curve": ("Validation error", "mean squared error", 1),
    "lambda_max": ("Largest Hessian eigenvalue, balanced gauge", "λ_max", 0),
    "entropy_share": ("Entropy of attention", "share of log n", 0),
}


def figures(losses: Losses) -> tuple[dict[str, NDArray[Any]], list[Figure]]:
    """Arrays by name, and the Figures that draw them; for each set at its first horizon."""
    first = losses.settings.horizons[0]
    places = [place for place in losses.places if place[1] == first]
    made: list[Made | None] = []
    for place in places:
        made += [_errors(losses, place), _to_line(losses, place)]
        made += [_curve(losses, place, name) for name in _CURVES]
    made.append(_radii(losses))
    drawn = [found for found in made if found is not None]
    arrays = {key: array for _, stored in drawn for key, array in stored.items()}
    return arrays, [figure for figure, _ in drawn]


def _errors(losses: Losses, place: Place) -> Made | None:
    arms = losses.ranked(place)
    if not arms:
        return None
    pairs = [mean_and_half(losses.values(place, arm, "mse")) for arm in arms]
    values, error = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    key = f"mse.{place[0]}"
    best = arms[int(np.nanargmin(values))]
    return _bars(
        key,
        f"Test error by arm, {named(place)}",
        f"Means over seeds with 95 % intervals over initialisations (none for one seed), without "
        f"arms with the slip. {best} is lowest ({np.nanmin(values):.4g}).",
        "mean squared error",
        arms,
        (values, error),
    )


def _to_line(losses: Losses, place: Place) -> Made | None:
    arms, values, error = [], [], []
    for arm in losses.ranked(place):
        found = None if arm == "line" else against(losses, place, arm, "line")
        if found is not None:
            arms.append(arm)
            values.append(found.difference)
            error.append((found.high - found.low) / 2)
    if not arms:
        return None
    clear = [a for a, v, e in zip(arms, values, error, strict=True) if v + e < 0]
    better = ", ".join(clear) if clear else "no arm"
    return _bars(
        f"line.{place[0]}",
        f"Test error minus the straight line's, {named(place)}",
        "Seeds averaged, 95 % intervals by Student's t over blocks of 2H test windows (none for "
        f"too few blocks), not adjusted. Below zero with its interval: {better}.",
        "difference of mean squared errors",
        arms,
        (np.array(values), np.array(error)),
    )


def _bars(
    key: str,
    title: str,
    says: str,
    unit: str,
    names: list[str],
    values: tuple[FloatArray, FloatArray],
) -> Made:
    arrays = {f"{key}.values": values[0]}
    if np.isfinite(values[1]).any():  # nan: this bar has no interval
        arrays[f"{key}.error"] = values[1]
    roles = {name.removeprefix(f"{key}."): name for name in arrays}
    figure = Figure(key, "bars", title, says, roles, axes={"x": unit}, labels={"names": names})
    return figure, arrays


def _curve(losses: Losses, place: Place, name: str) -> Made | None:
    """The median over seeds by epoch, a line for each arm that was trained.

    Curves of a loss are without arms with the slip, whose loss is another.
    """
    title, unit, first = _CURVES[name]
    arms, lines = [], []
    for arm in losses.arms(place) if name == "entropy_share" else losses.ranked(place):
        runs = [o.arrays.get(f"curve.{name}") for o in losses.seeds(place, arm).values()]
        curves = [run for run in runs if run is not None and np.isfinite(run[first:]).any()]
        if curves:
            arms.append(arm)
            lines.append(_median(curves))
    if not lines:
        return None
    longest = max(map(len, lines))
    y = np.array([np.pad(v, (0, longest - len(v)), constant_values=np.nan) for v in lines])
    y[:, :first] = np.nan
    kept = np.isfinite(y).any(axis=0)
    y = y[:, kept]
    ends = [line[np.isfinite(line)][-1] for line in y]
    low, high = int(np.argmin(ends)), int(np.argmax(ends))
    key = f"{name}.{place[0]}"
    arrays = {f"{key}.x": np.flatnonzero(kept).astype(float), f"{key}.y": y}
    finite = y[np.isfinite(y)]
    log = bool(finite.min() > 0 and finite.max() > 20 * finite.min())
    figure = Figure(
        key,
        "lines",
        f"{title}, {named(place)}",
        f"Medians over seeds, from epoch {first} on; each line ends where training did. At its "
        f"end {arms[low]} is lowest "
        f"({ends[low]:.3g}), {arms[high]} highest ({ends[high]:.3g}).",
        {"x": f"{key}.x", "y": f"{key}.y"},
        axes={"x": "epoch", "y": unit, "y_scale": "log" if log else "linear"},
        labels={"series": arms},
    )
    return figure, arrays


def _median(curves: list[FloatArray]) -> FloatArray:
    """Of curves of unlike length, over those that have the epoch."""
    longest = max(map(len, curves))
    stacked = np.array([np.pad(c, (0, longest - len(c)), constant_values=np.nan) for c in curves])
    out = np.full(longest, np.nan)
    seen = np.isfinite(stacked).any(axis=0)
    out[seen] = np.nanmedian(stacked[:, seen], axis=0)
    return out


def _radii(losses: Losses) -> Made | None:
    at, names, values = radii(losses)
    if not names:
        return None
    relative = values / values[:, :1]
    if not np.isfinite(relative).any():
        return None
    best = ", ".join(
        f"ρ = {at[int(np.nanargmin(row))]:g} on {the_set(name)}"
        for name, row in zip(names, values, strict=True)
    )
    figure = Figure(
        "radii",
        "lines",
        "Sensitivity to SAM's radius",
        f"Test error over that without SAM, H = {losses.settings.horizons[0]}, seed 0. Lowest at "
        f"{best}.",
        {"x": "radii.x", "y": "radii.y"},
        axes={"x": "ρ", "y": "error over that at ρ = 0"},
        labels={"series": names},
    )
    return figure, {"radii.x": np.array(at), "radii.y": relative}
