"""What the collapse study checks: alarms, the penalty that cannot act, and who beats whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from levelhead.evaluation.significance import Comparison, holm
from levelhead.studies.collapse_outcomes import CollapseOutcomes, mean
from levelhead.studies.study import Statement

__all__ = ["Verdict", "primary", "secondary", "statements"]

_LEVEL = 0.05
_NO_GRADIENT = 1e-8
# Few seeds say little: with fewer, alarms are only asked about.
_ENOUGH = 5
_OFTEN, _SELDOM = 0.8, 0.1


@dataclass(frozen=True)
class Verdict:
    """A comparison of two arms on a task, and its p-value among its like."""

    task: str
    first: str
    second: str
    found: Comparison
    holm: float

    @property
    def better(self) -> bool:
        """Whether the first arm is better beyond chance."""
        return self.found.difference < 0 and self.holm < _LEVEL

    def __str__(self) -> str:
        effect = "" if math.isnan(self.found.effect) else f"effect {self.found.effect:.2g}, "
        return (
            f"against {self.second} {effect}{self.found.difference:+.3g} "
            f"[{self.found.low:.3g}, {self.found.high:.3g}], p {self.holm:.2g} (Holm)"
        )


def primary(found: CollapseOutcomes) -> list[Verdict]:
    """On each task the penalty that was best on validation (on tasks that confirm, both of the
    two best) against the baseline and against weight decay of equal strength."""
    pairs = []
    for task in found.judged_tasks:
        ranked = found.ranked(task)
        names = ranked[:1] if task in found.settings.tasks else ranked
        pairs += [(task, f"B.{n}", other) for n in names for other in ("A", f"C.{n}")]
    return _verdicts(found, pairs)


def secondary(found: CollapseOutcomes) -> list[Verdict]:
    """Every other penalty against both controls, and the remaining arms against the baseline."""
    first = {(v.task, v.first) for v in primary(found)}
    pairs = []
    for task in found.judged_tasks:
        for arm in found.arms(task):
            if arm == "A" or (task, arm) in first:
                continue
            pairs.append((task, arm, "A"))
            if arm.startswith("B."):
                pairs.append((task, arm, f"C.{arm[2:]}"))
    return _verdicts(found, pairs)


def _verdicts(found: CollapseOutcomes, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict]:
    made = {pair: found.compared(*pair, "error") for pair in pairs}
    known = {pair: comparison for pair, comparison in made.items() if comparison is not None}
    adjusted = holm({" ".join(pair): c.p_value for pair, c in known.items()})
    return [Verdict(*pair, c, adjusted[" ".join(pair)]) for pair, c in known.items()]


def statements(found: CollapseOutcomes) -> list[Statement]:
    """All statements of the study."""
    out = []
    first = primary(found)
    out += [_found(found, task) for task in found.settings.tasks]
    for task in dict.fromkeys((*found.settings.tasks, *found.judged_tasks)):
        out += [_fails(found, task), _alarms(found, task)]
    for task in found.judged_tasks:
        out += [_naive(found, task), *_beats(found, task, first), _core(found, task)]
    return out


def _found(found: CollapseOutcomes, task: str) -> Statement:
    name = f"collapse-found-{task}"
    claim = f"A setting in which heads collapse was found on {task}."
    start, alarm = found.failing(task), found.alarm(task)
    if start is None:
        return Statement(name, claim, None, "Its cells are missing.", expected=False)
    outcomes = found.searched(task)[start]
    share = mean(outcomes, "alarm_head_collapse")
    return Statement(
        name,
        claim,
        alarm == "head_collapse",
        f"{start.name}: alarm of head collapse for {share:.0%} of {len(outcomes)} seeds, coherence "
        f"up to {mean(outcomes, 'peak_coherence'):.2f}"
        + ("." if alarm in (None, "head_collapse") else f"; its alarm is {alarm}."),
        expected=False,
    )


def _fails(found: CollapseOutcomes, task: str) -> Statement:
    """Whether the failing setting is worse than an ordinary start."""
    name = f"ordinary-start-{task}"
    claim = f"On {task} the failing setting has a larger test error than an ordinary start."
    compared = found.compared(task, "A", "O", "error")
    if compared is None:
        return Statement(name, claim, None, "Its cells are missing.", expected=False)
    slow, plain = (
        np.mean(list(found.values(task, arm, "steps_to_level").values())) for arm in ("A", "O")
    )
    return Statement(
        name,
        claim,
        bool(compared.low > 0),
        f"Difference {compared.difference:+.3g} [{compared.low:.3g}, {compared.high:.3g}]; half of "
        f"the loss of a guess is reached after {slow:.0f} steps, {plain:.0f} from an ordinary "
        "start.",
        expected=False,
    )


def _alarms(found: CollapseOutcomes, task: str) -> Statement:
    """The alarm goes off in the failing arm and not in the cured one."""
    name = f"alarm-{task}"
    alarm, cured = found.alarm(task), found.cured(task)
    claim = (
        f"On {task} the alarm goes off in the failing arm (80 % of seeds or more) and not in the "
        "cured one (10 % or fewer)."
    )
    if alarm is None or not found.verdicts(task, "A"):
        why = "No setting with an alarm was found." if alarm is None else "Its cells are missing."
        return Statement(name, claim, None, why, expected=False)
    if cured is None:
        return Statement(
            name, claim, None, f"No penalty kept {alarm} away in selection.", expected=False
        )
    shares = []
    for arm in ("A", cured):
        numbers = list(found.values(task, arm, f"alarm_{alarm}").values())
        shares.append(float(np.mean(numbers)) if numbers else math.nan)
    count = len(found.verdicts(task, "A"))
    return Statement(
        name,
        claim,
        bool(shares[0] >= _OFTEN and shares[1] <= _SELDOM),
        f"{alarm} for {shares[0]:.0%} of {count} seeds without and {shares[1]:.0%} with {cured} "
        f"(weight {found.weight(task, cured):g}).",
        # What was found on this very task must come again; elsewhere it is a question.
        expected=alarm == "head_collapse" and count >= _ENOUGH and task in found.settings.tasks,
    )


def _naive(found: CollapseOutcomes, task: str) -> Statement:
    name = f"naive-{task}"
    claim = f"On {task} the gradient of ‖UᵀU - I‖² is nothing beside that of the loss (below 1e-8)."
    shares = list(found.values(task, "E.naive", "naive_share_largest").values())
    values = list(found.values(task, "E.naive", "naive_largest").values())
    if not shares:
        return Statement(name, claim, None, "Its cells are missing.", expected=False)
    compared = found.compared(task, "E.naive", "A", "error")
    moved = "" if compared is None else f"; test error moved by {compared.difference:+.2g}"
    return Statement(
        name,
        claim,
        bool(max(shares) < _NO_GRADIENT),
        f"Largest share {max(shares):.1e}, largest value {max(values):.1e}{moved}.",
    )


def _beats(found: CollapseOutcomes, task: str, verdicts: Sequence[Verdict]) -> list[Statement]:
    out = []
    own = [v for v in verdicts if v.task == task]
    for arm in dict.fromkeys(v.first for v in own):
        pair = [v for v in own if v.first == arm]
        out.append(
            Statement(
                f"beats-{task}-{arm[2:]}",
                f"On {task} {arm} at weight {found.weight(task, arm):g} has a smaller test error "
                "than the baseline and than weight decay of equal strength.",
                len(pair) == 2 and all(v.better for v in pair),
                f"Test error {'; '.join(map(str, pair))}.",
                expected=False,
            )
        )
    return out


def _core(found: CollapseOutcomes, task: str) -> Statement:
    name, claim = f"core-{task}", f"On {task} the low-rank head core beats the baseline."
    compared = found.compared(task, "D.core", "A", "error")
    if compared is None:
        return Statement(name, claim, None, "Its cells are missing.", expected=False)
    return Statement(
        name,
        claim,
        bool(compared.high < 0),
        f"Share {found.weight(task, 'D.core'):g}: {compared.difference:+.3g} "
        f"[{compared.low:.3g}, {compared.high:.3g}].",
        expected=False,
    )
