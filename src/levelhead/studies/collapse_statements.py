"""What the collapse study checks: alarms, the penalty that cannot act, and who beats whom.

Families of comparisons are fixed by the settings. What cannot be judged (cells are missing, too few
pairs of seeds, no spread to hold a difference against) is named, and counts in Holm's correction
like a comparison with the p-value one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from levelhead.evaluation.significance import Comparison, holm
from levelhead.studies.collapse_outcomes import CollapseOutcomes, known_mean, mean
from levelhead.studies.study import Statement

__all__ = [
    "Verdict",
    "borrowed_words",
    "primary",
    "reached_words",
    "secondary",
    "statements",
    "strength_words",
]

_LEVEL = 0.05
_NO_GRADIENT = 1e-8
# Few seeds say little: with fewer, differences are not judged and alarms only asked about.
_ENOUGH = 5
_OFTEN, _SELDOM = 0.8, 0.1
_MISSING = "Its cells are missing."
_UNADJUSTED = "Judged by this 95 % interval alone, not adjusted for other comparisons."

Pair = tuple[str, str, str]


@dataclass(frozen=True)
class Verdict:
    """A comparison of two arms on a task, and its p-value among its like.

    found is None for fewer than two pairs; reason is why it is not judged, "" if it is; holm is nan
    if it is not.
    """

    task: str
    first: str
    second: str
    found: Comparison | None
    holm: float
    reason: str = ""

    @property
    def judged(self) -> bool:
        """Whether there is enough to judge by."""
        return not self.reason

    @property
    def better(self) -> bool:
        """Whether the first arm is better beyond chance."""
        return (
            self.judged
            and self.found is not None
            and self.found.difference < 0
            and self.holm < _LEVEL
        )

    def __str__(self) -> str:
        told = "" if self.found is None else f"{_difference(self.found)}, "
        effect = math.nan if self.found is None else self.found.effect
        told = told if math.isnan(effect) else f"effect {effect:.2g}, {told}"
        last = f"p {self.holm:.2g} (Holm)" if self.judged else f"not judged ({self.reason})"
        return f"against {self.second} {told}{last}"


def _difference(compared: Comparison) -> str:
    return f"{compared.difference:+.3g} [{compared.low:.3g}, {compared.high:.3g}]"


# ── families of comparisons ──


def primary(found: CollapseOutcomes) -> list[Verdict]:
    """On each task the penalty that was best on validation (on tasks that confirm, both of the
    two best) against the baseline and against weight decay matched to it."""
    return _verdicts(
        found,
        [
            (task, f"B.{name}", other)
            for task in found.tasks
            for name in found.leading(task)
            for other in ("A", f"C.{name}")
        ],
    )


def secondary(found: CollapseOutcomes) -> list[Verdict]:
    """Every other penalty against both controls, and the remaining arms against the baseline."""
    pairs: list[Pair] = []
    for task in found.tasks:
        first = found.leading(task)
        names = list(found.settings.penalties) if task in found.settings.tasks else first
        pairs.append((task, "O", "A"))
        for name in names:
            if name not in first:
                pairs += [(task, f"B.{name}", "A"), (task, f"B.{name}", f"C.{name}")]
        pairs += [(task, f"C.{name}", "A") for name in names]
        pairs += [(task, "D.core", "A"), (task, "E.naive", "A")]
    return _verdicts(found, pairs)


def _verdicts(found: CollapseOutcomes, pairs: Sequence[Pair]) -> list[Verdict]:
    made = {pair: found.compared(*pair, "error") for pair in pairs}
    reasons = {pair: _reason(found, *pair) for pair in pairs}
    adjusted = holm(
        {
            " ".join(pair): 1.0 if c is None or reasons[pair] else c.p_value
            for pair, c in made.items()
        }
    )
    return [
        Verdict(*pair, c, math.nan if reasons[pair] else adjusted[" ".join(pair)], reasons[pair])
        for pair, c in made.items()
    ]


def _reason(found: CollapseOutcomes, task: str, first: str, second: str) -> str:
    """Why the test errors of two arms cannot be judged; "" if they can."""
    if {first, second} == {"A", "O"} and found.ordinary(task):
        return "both are the same setting"
    count = len(found.pairs(task, first, second, "error"))
    if count < _ENOUGH:
        some = "1 pair" if count == 1 else f"{count} pairs"
        return f"{some}, {_ENOUGH} are needed" if count else "cells are missing"
    # A difference without spread has no effect in units of it, and no p-value that means anything.
    compared = found.compared(task, first, second, "error")
    if compared is None or not compared.difference:
        return ""
    known = math.isfinite(compared.effect) and math.isfinite(compared.p_value)
    return "" if known else f"no spread over {count} pairs"


# ── statements ──


def statements(found: CollapseOutcomes) -> list[Statement]:
    """All statements of the study."""
    out = []
    first = primary(found)
    out += [_found(found, task) for task in found.settings.tasks]
    for task in found.tasks:
        out += [_fails(found, task), _alarms(found, task)]
    for task in found.tasks:
        out += [_naive(found, task), *_beats(found, task, first), _core(found, task)]
    return out


def _found(found: CollapseOutcomes, task: str) -> Statement:
    name = f"collapse-found-{task}"
    claim = f"A setting in which heads collapse was found on {task}."
    start, alarm = found.failing(task), found.alarm(task)
    if start is None:
        return Statement(name, claim, None, _MISSING, expected=False)
    outcomes = found.searched(task)[start]
    share = mean(outcomes, "alarm_head_collapse")
    gaps = found.unsearched(task)
    holds = alarm == "head_collapse"
    said = "" if alarm in (None, "head_collapse") else f" Its alarm is {alarm}."
    if gaps:
        said += f" Search cells that are missing: {gaps}."
    return Statement(
        name,
        claim,
        # What was found is found; that nothing was found needs all cells.
        None if gaps and not holds else holds,
        f"{start.name}: alarm of head collapse for {share:.0%} of the seeds (there are "
        f"{len(outcomes)} of {found.settings.search_seeds}), coherence up to "
        f"{mean(outcomes, 'peak_coherence'):.2f}.{said}",
        expected=False,
    )


def borrowed_words(found: CollapseOutcomes, task: str) -> str:
    """That a task which confirms starts from the setting of another one; "" for main tasks."""
    if task in found.settings.tasks:
        return ""
    return (
        f" All arms start from the {found.setting_word(task)} setting of {found.home()}: on {task} "
        "itself nothing was searched."
    )


def reached_words(found: CollapseOutcomes, task: str, arm: str) -> str:
    """How many runs reached half of the loss of a guess, and when."""
    outcomes = list(found.verdicts(task, arm).values())
    steps = known_mean(outcomes, "steps_to_level")
    count = sum(not math.isnan(o.value("steps_to_level")) for o in outcomes)
    when = f" after {steps:.0f} steps on average" if count else ""
    return f"{count} of {len(outcomes)} runs of {arm}{when}"


def _fails(found: CollapseOutcomes, task: str) -> Statement:
    """Whether the failing setting is worse than an ordinary start."""
    name = f"ordinary-start-{task}"
    claim = (
        f"On {task} the {found.setting_word(task)} setting has a larger test error than an "
        "ordinary start."
    )
    compared, reason = found.compared(task, "A", "O", "error"), _reason(found, task, "A", "O")
    if found.ordinary(task):
        said = "The setting has scale 1 and spread 1: it is the ordinary start."
        return Statement(name, claim, None, said, expected=False)
    if compared is None:
        return Statement(name, claim, None, _MISSING, expected=False)
    return Statement(
        name,
        claim,
        None if reason else bool(compared.low > 0),
        f"Difference {_difference(compared)}. {_by(reason)} Half of the loss of a guess is reached "
        f"by {reached_words(found, task, 'A')} and by {reached_words(found, task, 'O')} (the "
        f"ordinary start).{borrowed_words(found, task)}",
        expected=False,
    )


def _by(reason: str) -> str:
    return f"Not judged ({reason})." if reason else _UNADJUSTED


def _alarms(found: CollapseOutcomes, task: str) -> Statement:
    """The alarm goes off in the failing arm and not in the cured one."""
    name = f"alarm-{task}"
    alarm, cured = found.alarm(task), found.cured(task)
    claim = (
        f"On {task} the alarm goes off in the {found.setting_word(task)} arm (80 % of seeds or "
        "more) and not in the cured one (10 % or fewer)."
    )
    gaps = found.unselected(task)
    if found.start(task) is None or (cured is None and gaps):
        return Statement(name, claim, None, _MISSING, expected=False)
    if alarm is None:
        said = "No setting with an alarm was found."
        return Statement(name, claim, None, said, expected=False)
    if cured is None:
        # A negative result: there is nothing that could have been expected to hold.
        said = f"No penalty kept {alarm} away in selection.{borrowed_words(found, task)}"
        return Statement(name, claim, False, said, expected=False)
    own, other = (list(found.values(task, arm, f"alarm_{alarm}").values()) for arm in ("A", cured))
    if not own or not other:
        return Statement(name, claim, None, _MISSING, expected=False)
    runs = len(found.selection(task, cured, found.weight(task, cured) or 0.0))
    return Statement(
        name,
        claim,
        bool(np.mean(own) >= _OFTEN and np.mean(other) <= _SELDOM),
        f"{alarm} for {np.mean(own):.0%} of {len(own)} seeds without and {np.mean(other):.0%} of "
        f"{len(other)} with {cured} (weight {found.weight(task, cured):g}, chosen by {runs} of "
        f"{found.settings.selection_seeds} selection seeds). {_price(found, task, cured)}"
        f"{borrowed_words(found, task)}",
        # What was found on this very task must come again; elsewhere it is a question.
        expected=alarm == "head_collapse"
        and min(len(own), len(other)) >= _ENOUGH
        and task in found.settings.tasks,
    )


def _price(found: CollapseOutcomes, task: str, cured: str) -> str:
    """What silence costs: the test error of the cured arm beside the baseline's."""
    compared, reason = found.compared(task, cured, "A", "error"), _reason(found, task, cured, "A")
    if compared is None:
        return f"Test error {cured} - A: not known ({reason})."
    pairs = f"{compared.count} pairs" + (f"; not judged: {reason}" if reason else "")
    return f"Test error {cured} - A: {_difference(compared)} ({pairs})."


def _naive(found: CollapseOutcomes, task: str) -> Statement:
    name = f"naive-{task}"
    claim = f"On {task} the gradient of ‖UᵀU - I‖² is nothing beside that of the loss (below 1e-8)."
    shares = list(found.values(task, "E.naive", "naive_share_largest").values())
    values = list(found.values(task, "E.naive", "naive_largest").values())
    if not shares or not values:
        return Statement(name, claim, None, _MISSING, expected=False)
    compared = found.compared(task, "E.naive", "A", "error")
    moved = "" if compared is None else f"; test error moved by {compared.difference:+.2g}"
    heads = found.settings.heads
    return Statement(
        name,
        claim,
        bool(max(shares) < _NO_GRADIENT),
        f"Largest share {max(shares):.1e}, largest value {max(values):.1e} over {len(shares)} of "
        f"{found.settings.seeds} seeds{moved}. Near trivial: U is square, {heads} × {heads} for "
        f"{heads} heads, and orthogonal by construction.",
    )


def strength_words(found: CollapseOutcomes, task: str, name: str) -> str:
    """Both weights, the coefficient of weight decay, and how hard the two were seen to pull."""
    own, other = (found.weight(task, f"{letter}.{name}") for letter in "BC")
    coefficient = found.coefficient(task, f"C.{name}")
    if own is None or other is None or coefficient is None:
        return f"There is no weight decay matched to B.{name}."
    if coefficient == 0:
        return f"C.{name} has coefficient 0, for the penalty never pulled: it is a copy of A."
    matched = f"C.{name} is matched to B.{name} at {other:g} (coefficient {coefficient:.3g})"
    matched += (
        ", the weight of the penalty itself"
        if own == other
        else f", the penalty has {own:g}: chosen on the same grid, not of equal strength"
    )
    ratio = found.pull_ratio(task, name)
    if math.isnan(ratio):
        return f"{matched}; pulls in the verdicts are not known."
    return f"{matched}; in the verdicts it pulled {ratio:.2g} times as hard."


def _beats(found: CollapseOutcomes, task: str, verdicts: Sequence[Verdict]) -> list[Statement]:
    out = []
    own = [v for v in verdicts if v.task == task]
    for arm in dict.fromkeys(v.first for v in own):
        pair = [v for v in own if v.first == arm]
        weight = found.weight(task, arm)
        at = "its weight" if weight is None else f"weight {weight:g}"
        out.append(
            Statement(
                f"beats-{task}-{arm[2:]}",
                f"On {task} {arm} at {at} has a smaller test error than the baseline and than "
                "weight decay matched to it, whose weight is chosen on the same grid.",
                all(v.better for v in pair) if all(v.judged for v in pair) else None,
                f"Test error {'; '.join(map(str, pair))}. {strength_words(found, task, arm[2:])}"
                f"{borrowed_words(found, task)}",
                expected=False,
            )
        )
    return out


def _core(found: CollapseOutcomes, task: str) -> Statement:
    name, claim = f"core-{task}", f"On {task} the low-rank head core beats the baseline."
    compared, reason = (
        found.compared(task, "D.core", "A", "error"),
        _reason(found, task, "D.core", "A"),
    )
    if compared is None:
        return Statement(name, claim, None, _MISSING, expected=False)
    return Statement(
        name,
        claim,
        None if reason else bool(compared.high < 0),
        f"Share {found.weight(task, 'D.core'):g}: {_difference(compared)}. {_by(reason)}"
        f"{borrowed_words(found, task)}",
        expected=False,
    )
