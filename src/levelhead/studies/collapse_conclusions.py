"""What follows from the cells of the collapse study: tables and computed sentences.

Differences are of test errors within a seed, so that below zero the first arm is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from levelhead.studies.collapse_figures import figures
from levelhead.studies.collapse_measures import ALARMED
from levelhead.studies.collapse_outcomes import CollapseOutcomes, main_arms, mean
from levelhead.studies.collapse_statements import Verdict, primary, secondary, statements
from levelhead.studies.study import Findings, Outcome, Table

__all__ = ["conclude", "knee"]

_SEARCHED = (
    "best_validation",
    "error",
    "steps_to_level",
    "peak_coherence",
    "last_coherence",
    "harmful",
)
_JUDGED = (
    "error",
    "macro_f1",
    "test_loss",
    "best_validation",
    "curve",
    "steps_to_level",
    "roughness",
    "peak_coherence",
    "last_coherence",
    "head_cka",
    "layer_cka",
    "pull_mean",
    "parameters",
)


def conclude(settings: Any, outcomes: Mapping[str, Outcome]) -> Findings:
    """Findings of the study; see the top of this file."""
    found = CollapseOutcomes(settings, outcomes)
    tables = [_search_table(found, task) for task in settings.tasks]
    for task in found.judged_tasks:
        tables += [
            _grid_table(found, task, "best_validation", "Validation loss"),
            _grid_table(found, task, "peak_coherence", "Largest coherence of a layer"),
            _verdict_table(found, task),
            _robustness_table(found, task),
        ]
    first, others = primary(found), secondary(found)
    tables.append(_comparison_table("primary", "Primary comparisons of test errors", first))
    tables.append(_comparison_table("secondary", "All other comparisons of test errors", others))
    arrays, drawn = figures(found)
    shown = [table for table in tables if table.values.size]
    return Findings(shown, arrays, drawn, statements(found), _sentences(found, first))


# ── tables ──


def _search_table(found: CollapseOutcomes, task: str) -> Table:
    searched = found.searched(task)
    columns = ["seeds", *_SEARCHED, *(f"{name} (share)" for name in ALARMED), "since"]
    values = np.full((len(searched), len(columns)), np.nan)
    for row, outcomes in enumerate(searched.values()):
        values[row, 0] = len(outcomes)
        names = [*_SEARCHED, *(f"alarm_{name}" for name in ALARMED)]
        values[row, 1:-1] = [mean(outcomes, name) for name in names]
        since = [o.value(f"alarm_{n}_since") for o in outcomes for n in ALARMED]
        values[row, -1] = min((s for s in since if not math.isnan(s)), default=math.nan)
    start = found.failing(task)
    said = "" if start is None else f" Chosen: {start.name}."
    return Table(
        f"search-{task}",
        f"Which settings fail on {task}",
        f"Means over seeds; alarms as the share of seeds that raised them.{said}",
        [start.name for start in searched],
        columns,
        values,
        row_axis="setting",
    )


def _grid_table(found: CollapseOutcomes, task: str, name: str, title: str) -> Table:
    """Arms × weights, with the weight that was chosen and the knee."""
    arms = [arm for arm in main_arms(found.settings.penalties) if found.weight(task, arm)]
    size = len(found.settings.weights)
    values = np.full((len(arms), size + 2), np.nan)
    for row, arm in enumerate(arms):
        for column, weight in enumerate(found.grid(arm)[:size]):
            values[row, column] = mean(found.selection(task, arm, weight), name)
        weight_chosen = found.weight(task, arm)
        values[row, size] = math.nan if weight_chosen is None else weight_chosen
        values[row, size + 1] = knee(found, task, arm)
    shares = ", ".join(f"{share:g}" for share in found.settings.shares)
    return Table(
        f"grid-{task}-{name.replace('_', '-')}",
        f"{title} over the grid of weights, {task}",
        f"Means over {found.settings.selection_seeds} seeds. Chosen: lowest validation loss. Knee: "
        "largest weight within one standard error of it. The columns of D.core are its shares "
        f"{shares}.",
        arms,
        [*(f"{weight:g}" for weight in found.settings.weights), "chosen", "knee"],
        values,
        row_axis="arm",
    )


def knee(found: CollapseOutcomes, task: str, arm: str) -> float:
    """The largest weight whose validation loss lies within one standard error of the lowest."""
    chosen = found.weight(task, arm)
    if chosen is None:
        return math.nan
    best = [o.value("best_validation") for o in found.selection(task, arm, chosen)]
    error = float(np.std(best, ddof=1)) / math.sqrt(len(best)) if len(best) > 1 else 0.0
    limit = float(np.mean(best)) + error
    kept = [
        weight
        for weight in found.grid(arm)
        if mean(found.selection(task, arm, weight), "best_validation") <= limit
    ]
    return max(kept, default=math.nan)


def _verdict_table(found: CollapseOutcomes, task: str) -> Table:
    arms = found.arms(task)
    columns = ["weight", "seeds", *_JUDGED, "alarm (share)", "harmful (share)"]
    values = np.full((len(arms), len(columns)), np.nan)
    for row, arm in enumerate(arms):
        chosen = found.weight(task, arm) if arm in main_arms(found.settings.penalties) else None
        values[row, 0] = math.nan if chosen is None else chosen
        values[row, 1] = len(found.verdicts(task, arm))
        for column, name in enumerate(
            (*_JUDGED, f"alarm_{found.alarm(task) or ALARMED[0]}", "harmful"), 2
        ):
            numbers = list(found.values(task, arm, name).values())
            values[row, column] = float(np.mean(numbers)) if numbers else math.nan
    return Table(
        f"verdict-{task}",
        f"All arms on fresh seeds, {task}",
        "Means over seeds; error, F1 and loss on test rows. The alarm is that of the setting.",
        arms,
        columns,
        values,
        row_axis="arm",
    )


def _robustness_table(found: CollapseOutcomes, task: str) -> Table:
    settings, arms = found.settings, found.arms(task)
    names = [f"noise_{level:g}" for level in settings.noises]
    names += [f"{kind}_{radius:g}" for kind in ("fgsm", "pgd") for radius in settings.radii]
    values = np.full((len(arms), len(names)), np.nan)
    for row, arm in enumerate(arms):
        for column, name in enumerate(names):
            numbers = list(found.values(task, arm, name).values())
            values[row, column] = float(np.mean(numbers)) if numbers else math.nan
    return Table(
        f"robustness-{task}",
        f"Test error under disturbance, {task}",
        "Noise and attacks act on pixels, or on embeddings in units of their root mean square.",
        arms,
        names,
        values,
        row_axis="arm",
        best="min",
    )


def _comparison_table(name: str, title: str, verdicts: Sequence[Verdict]) -> Table:
    values = np.array(
        [
            [v.found.effect, v.found.difference, v.found.low, v.found.high, v.found.p_value, v.holm]
            for v in verdicts
        ],
        dtype=float,
    ).reshape(-1, 6)
    return Table(
        name,
        title,
        "First minus second within seeds: below zero the first is better. Effect is the mean over "
        "the deviation of differences; Holm's p-values are over this table.",
        [f"{v.task}: {v.first} - {v.second}" for v in verdicts],
        ["effect", "difference", "low", "high", "p", "p (Holm)"],
        values,
        row_axis="comparison",
    )


# ── sentences ──


def _sentences(found: CollapseOutcomes, verdicts: Sequence[Verdict]) -> list[str]:
    out = []
    for task in found.settings.tasks:
        start = found.failing(task)
        if start is None:
            continue
        alarm = found.alarm(task)
        outcomes = found.searched(task)[start]
        raised = (
            "no alarm of attention"
            if alarm is None
            else f"the alarm of {alarm.replace('_', ' ')} for "
            f"{100 * mean(outcomes, f'alarm_{alarm}'):.0f} % of the search seeds"
        )
        out.append(
            f"On {task} the setting {start.name} raised {raised}; coherence of heads reached "
            f"{mean(outcomes, 'peak_coherence'):.2f} and ended at "
            f"{mean(outcomes, 'last_coherence'):.2f}."
        )
    for task in dict.fromkeys(v.task for v in verdicts):
        own = [v for v in verdicts if v.task == task]
        for arm in dict.fromkeys(v.first for v in own):
            pair = [v for v in own if v.first == arm]
            won = all(v.better for v in pair)
            out.append(
                f"On {task} {arm} {'beats' if won else 'does not beat'} both the baseline and "
                f"weight decay of equal strength: {'; '.join(map(str, pair))}."
            )
    return out
