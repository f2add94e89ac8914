"""Figures of the collapse study: courses, losses, trade-off curves; see also `collapse_pictures`.

Lines are medians over seeds, and runs that ended early are left out where they do not reach.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Figure
from levelhead.studies.collapse_measures import CURVES
from levelhead.studies.collapse_outcomes import CollapseOutcomes, mean
from levelhead.studies.collapse_pictures import add_cka, add_errors, add_maps

__all__ = ["figures"]

Floats = NDArray[np.float64]
Made = tuple[dict[str, NDArray[Any]], list[Figure]]
_SMOOTHED = 20
_EPOCHS = {"x": "epoch", "y": "validation loss, nat", "y_scale": "log"}


def figures(found: CollapseOutcomes) -> Made:
    """Arrays by name, and the Figures that draw them."""
    made: Made = ({}, [])
    for task in found.judged_tasks:
        arms = _shown(found, task)
        for name, unit in CURVES.items():
            _add_course(found, task, arms, name, unit, made)
        _add_loss(found, task, arms, made)
        _add_validation(found, task, arms, made)
        _add_range(found, task, arms, made)
        _add_trade_offs(found, task, made)
        add_errors(found, task, arms, made)
        add_maps(found, task, arms, made)
        add_cka(found, task, arms, made)
    return made


def _shown(found: CollapseOutcomes, task: str) -> list[str]:
    """Both baselines, the best and the cured penalty with their controls, the head core."""
    names = [f"B.{n}" for n in found.ranked(task)[:1]]
    if (cured := found.cured(task)) is not None:
        names.append(cured)
    wanted = ["A", "O", *names, *(f"C.{n[2:]}" for n in names), "D.core"]
    return [arm for arm in dict.fromkeys(wanted) if found.verdicts(task, arm)]


def _add_lines(
    made: Made, key: str, title: str, says: str, y: Floats, series: list[str], x: Floats,
    axes: dict[str, str], mark: list[float] | None = None,
) -> None:  # fmt: skip
    """Put lines y [k, n] over x [n] among what is made."""
    arrays = {"x": x, "y": y} | ({"mark": np.array(mark)} if mark else {})
    made[0].update({f"{key}.{role}": array for role, array in arrays.items()})
    roles = {role: f"{key}.{role}" for role in arrays}
    made[1].append(Figure(key, "lines", title, says, roles, axes=axes, labels={"series": series}))


def _add_course(
    found: CollapseOutcomes, task: str, arms: list[str], name: str, unit: str, made: Made
) -> None:
    """One quantity at the sampled steps, a line for each arm."""
    lines: list[Floats] = []
    at: Floats | None = None
    for arm in arms:
        outcomes = list(found.verdicts(task, arm).values())
        longest = max(outcomes, key=lambda o: len(o.arrays["at"]))
        at = longest.arrays["at"] if at is None or len(longest.arrays["at"]) > len(at) else at
        lines.append(_median([o.arrays[name] for o in outcomes]))
    if at is None:
        return
    y = _padded(lines, len(at))
    known = {arm: line[np.isfinite(line)] for arm, line in zip(arms, y, strict=True)}
    ends = {arm: line[-1] for arm, line in known.items() if line.size}
    said = ""
    if ends:
        low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
        said = f" At the end {low} is lowest ({ends[low]:.3g}), {high} highest ({ends[high]:.3g})."
    _add_lines(
        made,
        f"{name.replace('_', '-')}-{task}",
        f"{unit[0].upper()}{unit[1:]}, {task}",
        f"Medians over seeds.{said}",
        y,
        arms,
        at,
        {"x": "steps done", "y": name.replace("_", " ")},
    )


# ── losses ──


def _add_loss(found: CollapseOutcomes, task: str, arms: list[str], made: Made) -> None:
    """The loss of the task, means over 20 steps, medians over seeds."""
    lines = [
        _median([_smooth(o.arrays["loss"]) for o in found.verdicts(task, arm).values()])
        for arm in arms
    ]
    length = max(map(len, lines), default=0)
    if length == 0:
        return
    _add_lines(
        made,
        f"loss-{task}",
        f"Training loss, {task}",
        f"Means over {_SMOOTHED} steps, medians over seeds. {_first(found, task, arms)}",
        _padded(lines, length),
        arms,
        np.arange(_SMOOTHED, _SMOOTHED + length, dtype=float),
        {"x": "step", "y": "cross-entropy, nat", "y_scale": "log"},
    )


def _first(found: CollapseOutcomes, task: str, arms: list[str]) -> str:
    """Which arm reaches the level first, of those of which most seeds reach it."""
    steps = {}
    for arm in arms:
        each = [o.value("steps_to_level") for o in found.verdicts(task, arm).values()]
        # Over more than half of finite values the median is finite as well.
        if sum(map(math.isfinite, each)) > len(each) / 2:
            steps[arm] = float(np.median([v if math.isfinite(v) else math.inf for v in each]))
    level = "half of the loss of a guess"
    if not steps:
        return f"No arm reaches {level} for more than half of its seeds."
    fast = min(steps, key=steps.__getitem__)
    said = f"{level.capitalize()} is reached first by {fast}, after {steps[fast]:.0f} steps"
    slow = [arm for arm in arms if arm not in steps]
    if "A" in steps and fast != "A":
        said += f" (A: {steps['A']:.0f})"
    if slow:
        said += f"; not by more than half of the seeds of {', '.join(slow)}"
    return f"{said}. Seeds that never reach it count as later than all others."


def _judged(found: CollapseOutcomes, task: str, arm: str) -> Floats | None:
    """Validation losses [seeds, epochs + 1] of an arm, nan where there are none."""
    rows = [o.arrays["judged"] for o in found.verdicts(task, arm).values() if "judged" in o.arrays]
    if not rows:
        return None
    found_rows = _padded(rows, max(map(len, rows)))
    return np.where(np.isfinite(found_rows), found_rows, np.nan)


def _add_validation(found: CollapseOutcomes, task: str, arms: list[str], made: Made) -> None:
    """Validation loss by epoch."""
    rows = {arm: r for arm in arms if (r := _judged(found, task, arm)) is not None}
    if not rows:
        return
    lines = {arm: _median(list(r)) for arm, r in rows.items()}
    length = max(map(len, lines.values()))
    lowest = {arm: np.nanmin(v) for arm, v in lines.items() if np.isfinite(v).any()}
    said = ""
    if lowest:
        best = min(lowest, key=lowest.__getitem__)
        at = int(np.nanargmin(lines[best]))
        said = f" The lowest is that of {best}: {lowest[best]:.3g} after {at} epochs."
    _add_lines(
        made,
        f"validation-{task}",
        f"Validation loss by epoch, {task}",
        f"Medians over seeds, epoch 0 before training.{said}",
        _padded(list(lines.values()), length),
        list(lines),
        np.arange(length, dtype=float),
        _EPOCHS,
    )


def _add_range(found: CollapseOutcomes, task: str, arms: list[str], made: Made) -> None:
    """The same of the baseline and the best penalty, with the smallest and the largest of seeds."""
    best = [f"B.{name}" for name in found.ranked(task)[:1]]
    rows = {
        arm: r
        for arm in ("A", *best)
        if arm in arms and (r := _judged(found, task, arm)) is not None
    }
    if not rows:
        return
    length = max(r.shape[1] for r in rows.values())
    # inf is neither the smallest nor nan; -inf never the largest.
    lines = []
    for r in rows.values():
        kept = np.isfinite(r).any(axis=0)
        for line in (
            np.where(np.isfinite(r), r, np.inf).min(axis=0),
            _median(list(r)),
            np.where(np.isfinite(r), r, -np.inf).max(axis=0),
        ):
            lines.append(np.where(kept, line, np.nan))
    named = " and of ".join(rows)
    _add_lines(
        made,
        f"validation-range-{task}",
        f"Spread of the validation loss over seeds, {task}",
        f"Smallest, median and largest over the seeds of {named}, epoch by epoch.",
        _padded(lines, length),
        [f"{arm}, {which}" for arm in rows for which in ("smallest", "median", "largest")],
        np.arange(length, dtype=float),
        _EPOCHS,
    )


# ── trade-off ──


def _add_trade_offs(found: CollapseOutcomes, task: str, made: Made) -> None:
    """Validation loss over the weight: of all penalties, of their controls, of the best two."""
    names = found.ranked(task)
    if len(found.settings.weights) < 2 or not names:
        return
    best = names[0]
    level, which = _baseline(found, task)
    knee, chosen = found.knee(task, f"B.{best}"), found.weight(task, f"B.{best}")
    heard = (
        f"Validation loss, for accuracy is not read on validation rows; means over selection seeds,"
        f" A as a level ({which})."
    )
    marked = f"{best} is lowest at {chosen:g}; its knee, the line, is {knee:g}"
    control = found.weight(task, f"C.{best}")
    other = (
        ""
        if control is None
        else f" C.{best} is lowest at {control:g}, its knee is {found.knee(task, f'C.{best}'):g}."
    )
    matched = "the weight of C is that of the penalty it is matched to"
    for kind, title, arms, said in (
        ("", "of penalties", [f"B.{n}" for n in names], f"{marked} (largest weight within one "
         "standard error)."),
        ("-decay", "of weight decay", [f"C.{n}" for n in names], f"Here {matched}; the line is the "
         f"knee of B.{best}."),
        ("-best", f"of {best} and its weight decay", [f"B.{best}", f"C.{best}"],
         f"{marked}.{other} Here {matched}."),
    ):  # fmt: skip
        weights = found.settings.weights
        y = [[mean(found.selection(task, a, w), "best_validation") for w in weights] for a in arms]
        _add_lines(
            made,
            f"trade-off{kind}-{task}",
            f"Validation loss over the weight {title}, {task}",
            f"{heard} {said}",
            np.array([*y, [level] * len(weights)]),
            [*arms, "A"],
            np.log10(np.array(weights)),
            {"x": "log10 of the weight", "y": "validation loss, nat", "y_scale": "log"},
            [math.log10(knee)] if math.isfinite(knee) else None,
        )


def _baseline(found: CollapseOutcomes, task: str) -> tuple[float, str]:
    """Mean validation loss of A from the task's setting, and of which runs it is.

    The search has the seeds of selection; tasks that confirm have no search of their own.
    """
    start = found.failing(task)
    if start is not None:
        return mean(found.searched(task)[start], "best_validation"), "of the search seeds"
    runs = list(found.verdicts(task, "A").values())
    return mean(runs, "best_validation"), "of the verdicts' seeds"


def _smooth(losses: Floats) -> Floats:
    width = min(_SMOOTHED, len(losses))
    kept: Floats = np.convolve(losses, np.full(width, 1 / width), mode="valid")
    return kept


def _median(rows: list[Floats]) -> Floats:
    """The median of rows, those that ended early left out where they do not reach."""
    padded = _padded(rows, max(map(len, rows)))
    kept = np.isfinite(padded).any(axis=0)
    found = np.full(padded.shape[1], np.nan)
    found[kept] = np.nanmedian(padded[:, kept], axis=0)
    return found


def _padded(rows: list[Floats], length: int) -> Floats:
    return np.array([np.pad(r, (0, length - len(r)), constant_values=np.nan) for r in rows])
