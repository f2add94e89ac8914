"""Figures of the collapse study: courses, trade-off curves, attention maps side by side, CKA."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Figure
from levelhead.studies.collapse_measures import CURVES
from levelhead.studies.collapse_outcomes import FRESH, CollapseOutcomes, mean

__all__ = ["figures"]

Floats = NDArray[np.float64]
Made = tuple[dict[str, NDArray[Any]], list[Figure]]
_SMOOTHED = 20


def figures(found: CollapseOutcomes) -> Made:
    """Arrays by name, and the Figures that draw them."""
    made: Made = ({}, [])
    for task in found.judged_tasks:
        arms = _shown(found, task)
        for name, unit in CURVES.items():
            _add_course(found, task, arms, name, unit, made)
        _add_loss(found, task, arms, made)
        _add_trade_off(found, task, made)
        _add_maps(found, task, arms, made)
        _add_cka(found, task, arms, made)
    return made


def _shown(found: CollapseOutcomes, task: str) -> list[str]:
    """Both baselines, the best and the cured penalty with their controls, the head core."""
    names = [f"B.{n}" for n in found.ranked(task)[:1]]
    if (cured := found.cured(task)) is not None:
        names.append(cured)
    wanted = ["A", "O", *names, *(f"C.{n[2:]}" for n in names), "D.core"]
    return [arm for arm in dict.fromkeys(wanted) if found.verdicts(task, arm)]


def _add_course(
    found: CollapseOutcomes, task: str, arms: list[str], name: str, unit: str, made: Made
) -> None:
    """The median over seeds of one quantity at the sampled steps, a line for each arm."""
    lines, at = [], None
    for arm in arms:
        outcomes = list(found.verdicts(task, arm).values())
        longest = max(outcomes, key=lambda o: len(o.arrays["at"]))
        at = longest.arrays["at"] if at is None or len(longest.arrays["at"]) > len(at) else at
        lines.append(_median([o.arrays[name] for o in outcomes]))
    if at is None:
        return
    y = _padded(lines, len(at))
    ends = {arm: line[np.isfinite(line)][-1] for arm, line in zip(arms, y, strict=True)}
    key = f"{name.replace('_', '-')}-{task}"
    made[0][f"{key}.x"], made[0][f"{key}.y"] = at, y
    low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    made[1].append(
        Figure(
            key,
            "lines",
            f"{unit[0].upper()}{unit[1:]}, {task}",
            f"Medians over seeds. At the end {low} is lowest ({ends[low]:.3g}), {high} highest "
            f"({ends[high]:.3g}).",
            {"x": f"{key}.x", "y": f"{key}.y"},
            axes={"x": "steps done", "y": name.replace("_", " ")},
            labels={"series": arms},
        )
    )


def _add_loss(found: CollapseOutcomes, task: str, arms: list[str], made: Made) -> None:
    """The loss of the task, means over 20 steps, medians over seeds."""
    lines = [
        _median([_smooth(o.arrays["loss"]) for o in found.verdicts(task, arm).values()])
        for arm in arms
    ]
    length = max(map(len, lines), default=0)
    if length == 0:
        return
    key = f"loss-{task}"
    made[0][f"{key}.x"] = np.arange(length) + float(_SMOOTHED)
    made[0][f"{key}.y"] = _padded(lines, length)
    steps = {
        arm: np.median(list(found.values(task, arm, "steps_to_level").values())) for arm in arms
    }
    fast = min(steps, key=steps.__getitem__)
    made[1].append(
        Figure(
            key,
            "lines",
            f"Training loss, {task}",
            f"Means over {_SMOOTHED} steps, medians over seeds. Half of the loss of a guess is "
            f"reached first by {fast}, after {steps[fast]:.0f} steps (A: {steps['A']:.0f}).",
            {"x": f"{key}.x", "y": f"{key}.y"},
            axes={"x": "step", "y": "cross-entropy, nat", "y_scale": "log"},
            labels={"series": arms},
        )
    )


def _add_trade_off(found: CollapseOutcomes, task: str, made: Made) -> None:
    """Validation loss over the weight of each penalty."""
    names = found.ranked(task)
    weights = found.settings.weights
    if len(weights) < 2 or not names:
        return
    y = np.array(
        [
            [mean(found.selection(task, f"B.{n}", w), "best_validation") for w in weights]
            for n in names
        ]
    )
    key = f"trade-off-{task}"
    made[0][f"{key}.x"], made[0][f"{key}.y"] = np.log10(np.array(weights)), y
    weight = found.weight(task, f"B.{names[0]}")
    made[1].append(
        Figure(
            key,
            "lines",
            f"Validation loss over the weight of penalties, {task}",
            f"Means over selection seeds. Lowest: {names[0]} at {weight:g}; knees stand in the "
            "table of the grid.",
            {"x": f"{key}.x", "y": f"{key}.y"},
            axes={"x": "log10 of the weight", "y": "validation loss, nat", "y_scale": "log"},
            labels={"series": names},
        )
    )


def _add_maps(found: CollapseOutcomes, task: str, arms: list[str], made: Made) -> None:
    """Attention of one test example, all heads of all shown arms beside one another, by layer."""
    stacks = {
        arm: outcome.arrays["maps"]
        for arm in arms
        if (outcome := found.verdicts(task, arm).get(FRESH)) is not None
        and "maps" in outcome.arrays
    }
    if not stacks:
        return
    layers, heads, n, _ = next(iter(stacks.values())).shape
    for layer in range(layers):
        key = f"maps-{task}-layer-{layer}"
        made[0][f"{key}.values"] = np.concatenate(
            [head for maps in stacks.values() for head in maps[layer]], axis=1
        )
        made[1].append(
            Figure(
                key,
                "heatmap",
                f"Attention side by side, {task}, layer {layer}",
                "One test example, first fresh seed; a row is a token that asks. Heads that are "
                "copies show the same pattern twice.",
                {"values": f"{key}.values"},
                axes={"x": "arm, head: key", "y": "query"},
                labels={
                    "rows": [str(i) for i in range(n)],
                    "columns": [
                        f"{arm}, head {h}: {k}"
                        for arm in stacks
                        for h in range(heads)
                        for k in range(n)
                    ],
                },
            )
        )


def _add_cka(found: CollapseOutcomes, task: str, arms: list[str], made: Made) -> None:
    """Debiased CKA between all heads, means over seeds, for the baseline and the others."""
    for arm in arms:
        matrices = [o.arrays["head_cka"] for o in found.verdicts(task, arm).values()]
        size = len(matrices[0])
        heads = found.settings.heads
        names = [f"layer {i // heads}, head {i % heads}" for i in range(size)]
        key = f"head-cka-{task}-{arm.replace('.', '-').lower()}"
        made[0][f"{key}.values"] = np.nanmean(matrices, axis=0)
        off = ~np.eye(size, dtype=bool)
        made[1].append(
            Figure(
                key,
                "heatmap",
                f"How alike what heads write is, {task}, {arm}",
                f"Debiased CKA, mean over seeds; {made[0][f'{key}.values'][off].mean():.2f} "
                "between different heads.",
                {"values": f"{key}.values"},
                axes={"x": "head", "y": "head"},
                labels={"rows": names, "columns": names},
            )
        )


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
