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
from levelhead.studies.collapse_outcomes import CollapseOutcomes, known_mean, main_arms, mean
from levelhead.studies.collapse_pictures import DISTURBED, disturbances
from levelhead.studies.collapse_statements import (
    Verdict,
    borrowed_words,
    primary,
    secondary,
    statements,
    strength_words,
)
from levelhead.studies.study import Findings, Outcome, Table

__all__ = ["conclude"]

_HALF = "half of the loss of a guess"
_SEARCHED = (
    "best_validation",
    "reached",
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
    "reached",
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
    shown = [table for table in tables if np.isfinite(table.values).any()]
    return Findings(shown, arrays, drawn, statements(found), _sentences(found, first))


# ── tables ──


def _search_table(found: CollapseOutcomes, task: str) -> Table:
    searched = found.searched(task)
    columns = ["seeds", *_SEARCHED, *(f"{name} (share)" for name in ALARMED), "since"]
    values = np.full((len(searched), len(columns)), np.nan)
    for row, outcomes in enumerate(searched.values()):
        values[row, 0] = len(outcomes)
        names = [*_SEARCHED, *(f"alarm_{name}" for name in ALARMED)]
        values[row, 1:-1] = [
            (known_mean if name == "steps_to_level" else mean)(outcomes, name) for name in names
        ]
        since = [o.value(f"alarm_{n}_since") for o in outcomes for n in ALARMED]
        values[row, -1] = min((s for s in since if not math.isnan(s)), default=math.nan)
    start, asked = found.failing(task), found.settings.search_seeds
    said = (
        "" if start is None else f" Chosen as the {found.setting_word(task)} setting: {start.name}."
    )
    fewer = [s.name for s, outcomes in searched.items() if len(outcomes) < asked]
    if fewer:
        said += f" With fewer seeds than the {asked} asked for: {', '.join(fewer)}."
    return Table(
        f"search-{task}",
        f"Which settings fail on {task}",
        f"Means over seeds, steps over those that reached {_HALF}; alarms as the share of seeds "
        f"that raised them.{said}",
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
        values[row, size + 1] = found.knee(task, arm)
    shares = ", ".join(f"{share:g}" for share in found.settings.shares)
    return Table(
        f"grid-{task}-{name.replace('_', '-')}",
        f"{title} over the grid of weights, {task}",
        f"Means over selection seeds ({found.settings.selection_seeds}). Chosen: lowest validation "
        "loss. Knee: largest weight within one standard error of it, of D.core the smallest share "
        f"(a larger one means less structure). The columns of D.core are its shares {shares}.",
        arms,
        [*(f"{weight:g}" for weight in found.settings.weights), "chosen", "knee"],
        values,
        row_axis="arm",
    )


def _verdict_table(found: CollapseOutcomes, task: str) -> Table:
    arms = found.arms(task)
    alarm = f"alarm_{found.alarm(task) or ALARMED[0]}"
    told = ("weight", "coefficient", "pull over its B's", "seeds")
    columns = [*told, *_JUDGED, f"{alarm} (share)", "harmful (share)"]
    values = np.full((len(arms), len(columns)), np.nan)
    for row, arm in enumerate(arms):
        chosen = found.weight(task, arm) if arm in main_arms(found.settings.penalties) else None
        coefficient = found.coefficient(task, arm)
        values[row, 0] = math.nan if chosen is None else chosen
        values[row, 1] = math.nan if coefficient is None else coefficient
        values[row, 2] = found.pull_ratio(task, arm[2:]) if arm.startswith("C.") else math.nan
        values[row, 3] = len(found.verdicts(task, arm))
        for column, name in enumerate((*_JUDGED, alarm, "harmful"), len(told)):
            numbers = list(found.values(task, arm, name).values())
            values[row, column] = float(np.mean(numbers)) if numbers else math.nan
    copies = [arm for arm in found.copies(task) if arm in arms]
    marked = f" Copies of A, for their coefficient is 0: {', '.join(copies)}." if copies else ""
    return Table(
        f"verdict-{task}",
        f"All arms on fresh seeds, {task}",
        f"Means over seeds, steps over those that reached {_HALF}; error, F1 and loss on test "
        "rows. The weight of C is that of the penalty it is matched to, the coefficient what it "
        f"was told; where both weights differ, B and C are not equally strong.{marked}"
        f"{borrowed_words(found, task)}",
        arms,
        columns,
        values,
        row_axis="arm",
    )


def _robustness_table(found: CollapseOutcomes, task: str) -> Table:
    arms, names = found.arms(task), disturbances(found.settings)
    values = np.full((len(arms), len(names)), np.nan)
    for row, arm in enumerate(arms):
        for column, name in enumerate(names):
            numbers = list(found.values(task, arm, name).values())
            values[row, column] = float(np.mean(numbers)) if numbers else math.nan
    return Table(
        f"robustness-{task}",
        f"Test error under disturbance, {task}",
        f"On the first {DISTURBED} test rows (all, if there are fewer); noise_0 is the undisturbed "
        "error of these rows. Noise and attacks act on pixels, or on embeddings in units of their "
        "root mean square.",
        arms,
        names,
        values,
        row_axis="arm",
        best="min",
    )


def _comparison_table(name: str, title: str, verdicts: Sequence[Verdict]) -> Table:
    values = np.full((len(verdicts), 7), np.nan)
    for row, v in enumerate(verdicts):
        if v.found is not None:
            c = v.found
            values[row, :6] = c.count, c.effect, c.difference, c.low, c.high, c.p_value
        values[row, 6] = v.holm
    return Table(
        name,
        title,
        "First minus second within seeds: below zero the first is better. Effect is the mean over "
        "the deviation of differences; Holm's p-values are over this table, whose rows the "
        f"settings fix; what is not judged counts with p = 1.{_unjudged(verdicts)}",
        [f"{v.task}: {v.first} - {v.second}" for v in verdicts],
        ["pairs", "effect", "difference", "low", "high", "p", "p (Holm)"],
        values,
        row_axis="comparison",
    )


def _unjudged(verdicts: Sequence[Verdict]) -> str:
    """Which comparisons are not judged, by reason."""
    said = ""
    for reason in dict.fromkeys(v.reason for v in verdicts if v.reason):
        rows = [f"{v.task}: {v.first} - {v.second}" for v in verdicts if v.reason == reason]
        which = "all" if len(rows) == len(verdicts) else "; ".join(rows)
        said += f" Not judged ({reason}): {which}."
    return said


# ── sentences ──


def _sentences(found: CollapseOutcomes, verdicts: Sequence[Verdict]) -> list[str]:
    out = [said for task in found.settings.tasks if (said := _search_sentence(found, task))]
    for task in dict.fromkeys(v.task for v in verdicts):
        own = [v for v in verdicts if v.task == task]
        for arm in dict.fromkeys(v.first for v in own):
            pair = [v for v in own if v.first == arm]
            if not all(v.judged for v in pair):
                verb = "is not judged against"
            else:
                verb = "beats" if all(v.better for v in pair) else "does not beat"
            out.append(
                f"On {task} {arm} {verb} both the baseline and weight decay matched to it: "
                f"{'; '.join(map(str, pair))}. {strength_words(found, task, arm[2:])}"
                f"{borrowed_words(found, task)}"
            )
    return out


def _search_sentence(found: CollapseOutcomes, task: str) -> str:
    start = found.failing(task)
    if start is None:
        return ""
    outcomes, asked = found.searched(task)[start], found.settings.search_seeds
    seeds = "1 search seed" if len(outcomes) == 1 else f"{len(outcomes)} search seeds"
    if len(outcomes) < asked:
        seeds += f" ({asked} were asked for)"
    alarm = found.alarm(task)
    raised = "no alarm of attention went off for all seeds of a setting; this one learns slowest"
    if alarm is not None:
        count = sum(o.value(f"alarm_{alarm}") > 0 for o in outcomes)
        raised = f"the alarm of {alarm.replace('_', ' ')} went off for {count} of {seeds}"
    return (
        f"On {task}, setting {start.name}: {raised}. Coherence of heads reached "
        f"{mean(outcomes, 'peak_coherence'):.2f} and ended at "
        f"{mean(outcomes, 'last_coherence'):.2f} (mean of {seeds})."
    )
