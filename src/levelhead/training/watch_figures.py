"""From the Readings of a watched run to Figures: of a run that ended, was killed, or goes on.

Nothing here needs torch or the training. Sentences are computed from the numbers that are drawn.
Long runs are thinned to evenly spaced steps (of the loss: the median and the largest of each
stretch); of many layers and heads some are drawn, and the Figure says which.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Figure, Run
from levelhead.training.alarm_rates import Rates, shipped_rates
from levelhead.training.alarm_rules import ALARMS
from levelhead.training.alarms import Alarm, sentences
from levelhead.training.watch_course import Course, Floats, current, hidden, place_name
from levelhead.training.watch_curves import (
    CURVES,
    MOST_STEPS,
    Drawn,
    curve_figures,
    entropy_map,
    similarity_maps,
)
from levelhead.training.watch_observations import observation_sentences, observations

__all__ = ["figures", "redraw"]

MOST_ALARMS, MOST_MARKS = 40, 12


def figures(run: Run, rates: Rates | None = None) -> Drawn:
    """Arrays by name and the Figures that show them, for `Run.replace_figures`.

    `rates` are those of the alarms, by default what the package ships. A run without Readings has
    one Figure, which says so. Raises `StoredFileError` for a run that cannot be read.

    >>> import tempfile
    >>> run = Run.create(tempfile.mkdtemp(), title="A try", command="watch", settings={})
    >>> [figure.says[:24] for figure in figures(run, Rates())[1]]
    ['Nothing was sampled yet.']
    """
    course = Course(current(run.readings()))
    found = [Alarm.from_reading(reading) for reading in course.alarms]
    alarms = sorted({alarm.key: alarm for alarm in found}.values(), key=lambda a: (a.since, a.step))
    rates = shipped_rates() if rates is None else rates
    arrays: dict[str, NDArray[np.float64]] = {}
    drawn: list[Figure] = []
    for made in (
        _verdict(course, alarms, rates),
        _alarm_table(alarms),
        _loss(course, alarms),
        *(curve_figures(course, curves) for curves in CURVES),
        entropy_map(course),
        *similarity_maps(course),
    ):
        arrays |= made[0]
        drawn += made[1]
    return arrays, drawn


def redraw(run: Run) -> None:
    """Put the Figures of the Readings so far into `run`, in the place of earlier ones."""
    arrays, drawn = figures(run)
    run.replace_figures(drawn, arrays)


# ── alarms ──


def _verdict(course: Course, alarms: Sequence[Alarm], rates: Rates) -> Drawn:
    """One row an alarm: how often, how often harmful, since when, and how often it is right."""
    columns = ["raised", "of them harmful", "first since"]
    if rates.alarms:
        columns += ["recall", "at least", "false per 1,000 steps", "at most"]
    table = np.full((len(ALARMS), len(columns)), np.nan)
    for row, name in enumerate(ALARMS):
        same = [alarm for alarm in alarms if alarm.name == name]
        table[row, :2] = len(same), sum(alarm.harmful for alarm in same)
        if same:
            table[row, 2] = min(alarm.since for alarm in same)
        if (rate := rates.alarms.get(name)) is not None:
            table[row, 3:] = (
                rate.recall, rate.recall_low, rate.false_per_1000, rate.false_high
            )  # fmt: skip
    if not course.names:
        said = ["Nothing was sampled yet."]
    elif alarms:
        said = sentences(alarms)[:5]
    else:
        said = [f"No alarm in {course.last_step:,} steps."]
    said += [*observation_sentences(observations(course, alarms)), rates.says()]
    figure = Figure(
        "watch.verdict",
        "table",
        "Alarms",
        " ".join(said),
        {"values": "watch.verdict"},
        axes={"rows": "Alarm"},
        labels={"rows": [name.replace("_", " ") for name in ALARMS], "columns": columns},
    )
    return {"watch.verdict": table}, [figure]


def _alarm_table(alarms: Sequence[Alarm]) -> Drawn:
    """One row for each alarm and layer, its heads together."""
    if not alarms:
        return {}, []
    grouped: dict[tuple[bool, str, str], list[Alarm]] = {}
    for alarm in sorted(alarms, key=lambda alarm: not alarm.harmful):
        key = not alarm.harmful, alarm.name, alarm.layer or ""
        grouped.setdefault(key, []).append(alarm)
    shown = list(grouped.items())[:MOST_ALARMS]
    rows, table = [], np.empty((len(shown), 4))
    for row, ((mild, name, layer), same) in enumerate(shown):
        place = _heads_of(layer, same)
        said = f"{name.replace('_', ' ')}{', ' if place else ''}{place}"
        rows.append(f"{said}; harmful: {'no' if mild else 'yes'}")
        first = min(same, key=lambda alarm: alarm.since)
        table[row] = first.since, first.step, first.value, first.threshold
    harms = list(dict.fromkeys(alarm.harm for alarm in alarms if alarm.harmful))
    says = f"{len(alarms)} alarms, {sum(a.harmful for a in alarms)} of them harmful"
    says += f": {'; '.join(harms[:3])}." if harms else ": the loss shows no harm so far."
    says += " Numbers are those of the first head of each row."
    says += hidden(len(shown), len(grouped), "rows, the harmful ones first")
    figure = Figure(
        "watch.alarms",
        "table",
        "Where the alarms were raised",
        says,
        {"values": "watch.alarms"},
        axes={"rows": "Alarm"},
        labels={"rows": rows, "columns": ["since step", "seen at step", "value", "threshold"]},
    )
    return {"watch.alarms": table}, [figure]


def _heads_of(layer: str, alarms: Sequence[Alarm]) -> str:
    heads = sorted({alarm.head for alarm in alarms if alarm.head is not None})
    if len(heads) < 2:
        return place_name(layer, heads[0] if heads else -1)
    return f"{layer} heads {', '.join(map(str, heads))}".strip()


# ── curves ──


def _loss(course: Course, alarms: Sequence[Alarm]) -> Drawn:
    grid = course.grid("loss")
    if grid.empty:
        return {}, []
    steps, values = grid.steps, grid.values[0]
    rows, names = [values], ["loss"]
    if len(steps) > MOST_STEPS:
        parts = np.array_split(np.arange(len(steps)), MOST_STEPS)
        steps = np.array([grid.steps[part[-1]] for part in parts])
        rows = [np.array([reduce(values[part]) for part in parts]) for reduce in (_middle, _top)]
        names = ["loss (median of a stretch)", "largest of a stretch"]
    validation = course.grid("validation_loss")
    if not validation.empty:
        rows.append(_placed(validation.steps, validation.values[0], steps))
        names.append("validation")
    finite = values[np.isfinite(values)]
    says = f"From {finite[0]:.4g} to {finite[-1]:.4g} in {int(grid.steps[-1]):,} steps; "
    says += f"smallest {finite.min():.4g}."
    if bad := len(values) - len(finite):
        says += f" {bad} values are not finite."
    if not validation.empty:
        seen = validation.values[0][np.isfinite(validation.values[0])]
        says += f" Validation: {seen[-1]:.4g}, best {seen.min():.4g}."
    arrays = {"watch.loss.x": steps, "watch.loss.y": np.stack(rows)}
    roles = {"x": "watch.loss.x", "y": "watch.loss.y"}
    if marks := sorted({float(alarm.since) for alarm in alarms}):
        arrays["watch.loss.mark"] = np.array(marks[:MOST_MARKS])
        roles["mark"] = "watch.loss.mark"
        steps_named = ", ".join(f"{mark:.0f}" for mark in marks[:MOST_MARKS])
        says += f" Upright lines: since when alarms hold (steps {steps_named})."
    positive = finite.min() > 0 and finite.max() > 20 * finite.min()
    axes = {"x": "Step", "y": "Loss"} | ({"y_scale": "log"} if positive else {})
    figure = Figure("watch.loss", "lines", "Loss", says, roles, axes, labels={"series": names})
    return arrays, [figure]


def _middle(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else np.nan


def _top(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else np.nan


def _placed(at: Floats, values: Floats, steps: Floats) -> Floats:
    """`values` at the first of `steps` that is not earlier than theirs; nan elsewhere."""
    row = np.full(len(steps), np.nan)
    row[np.minimum(np.searchsorted(steps, at), len(steps) - 1)] = values
    return row
