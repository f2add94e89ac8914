"""The outcomes of the collapse study, ready to be asked, and what is chosen from them.

Choices look at validation rows alone. The failing setting of a task is, among those of the first
depth where the alarm of head collapse went off for every search seed, the one with the worst
validation loss. What happens to some seeds only is luck, and would be gone with others. Without
such a setting any other alarm of attention counts in the same way, and without any the setting that
learns most slowly: there training stalls, but not by what an alarm names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levelhead.evaluation.significance import Comparison, paired_seeds
from levelhead.studies.collapse_measures import ALARMED
from levelhead.studies.collapse_tasks import missing_task
from levelhead.studies.collapse_training import Start
from levelhead.studies.study import Outcome

__all__ = ["FRESH", "CollapseOutcomes", "cell_name", "known_mean", "main_arms", "mean", "starts"]

FRESH = 1000
"""The first seed of the verdicts."""

_ALL = 1.0
# Stand in for the names of the best penalties as long as selection has not told them.
_UNKNOWN = ("best", "second")


def main_arms(names: Sequence[str]) -> list[str]:
    """Arms whose weight is chosen on a grid.

    >>> main_arms(["coherence"])
    ['B.coherence', 'C.coherence', 'D.core']
    """
    return [f"B.{n}" for n in names] + [f"C.{n}" for n in names] + ["D.core"]


def cell_name(kind: str, task: str, middle: str, seed: int) -> str:
    """`middle` is the name of a setting, or "arm-weight"."""
    return f"{kind}-{task}-{middle}-{seed}"


def starts(settings: Any) -> list[Start]:
    """All settings of the search: every scale at the first spread, other spreads at scale one."""
    shapes = [(scale, settings.spreads[0]) for scale in settings.scales]
    shapes += [(settings.scales[0], spread) for spread in settings.spreads[1:]]
    found = []
    for optimiser in settings.optimisers:
        kind, _, rate = optimiser.partition("-")
        for depth in settings.depths:
            found += [
                Start("sgd" if kind == "sgd" else "adam", float(rate), scale, spread, depth)
                for scale, spread in shapes
            ]
    return found


@dataclass(frozen=True, eq=False)
class CollapseOutcomes:
    """Settings and outcomes by cell."""

    settings: Any
    outcomes: Mapping[str, Outcome]

    @property
    def tasks(self) -> list[str]:
        """All tasks that the settings ask for and that can be made, main ones first.

        Unlike `judged_tasks` they do not hang on which cells are finished.
        """
        own = ("own",) if self.settings.data else ()
        named = dict.fromkeys((*self.settings.tasks, *self.settings.confirm, *own))
        told = {"text": self.settings.text, "data": self.settings.data}
        return [t for t in named if missing_task(t, **told) is None or self.verdicts(t, "A")]

    # ── search ──

    def searched(self, task: str) -> dict[Start, list[Outcome]]:
        """Outcomes of the search by setting."""
        found = {}
        for start in starts(self.settings):
            names = (
                cell_name("search", task, start.name, seed)
                for seed in range(self.settings.search_seeds)
            )
            outcomes = [o for n in names if (o := self.outcomes.get(n)) is not None]
            if outcomes:
                found[start] = outcomes
        return found

    def failing(self, task: str) -> Start | None:
        """The setting that the verdicts are about; None before the search. See the module."""
        candidates = {
            start: outcomes
            for start, outcomes in self.searched(task).items()
            if start.depth == self.settings.depths[0]
        }
        if not candidates:
            return None
        alarm = self._alarm(candidates)
        measure = "curve"
        if alarm is not None:
            measure = "best_validation"
            candidates = {
                start: outcomes
                for start, outcomes in candidates.items()
                if mean(outcomes, f"alarm_{alarm}") >= _ALL
            }
        return max(candidates, key=lambda s: (mean(candidates[s], measure), s.name))

    def alarm(self, task: str) -> str | None:
        """The alarm of the failing setting; None if it raises none.

        Tasks that confirm have the setting, and so the alarm, of `home`.
        """
        task = task if task in self.settings.tasks else self.home()
        start = self.failing(task)
        return None if start is None else self._alarm({start: self.searched(task)[start]})

    def start(self, task: str) -> Start | None:
        """The setting that the task's verdicts start from: its own, or that of `home`."""
        return self.failing(task if task in self.settings.tasks else self.home())

    def ordinary(self, task: str) -> bool:
        """Whether that setting is itself the ordinary start: arms A and O are then the same."""
        start = self.start(task)
        return start is not None and start.scale == start.spread == 1

    def setting_word(self, task: str) -> str:
        """ "failing" for a setting that raises an alarm, "slowest" for one that raises none."""
        return "slowest" if self.alarm(task) is None else "failing"

    def unsearched(self, task: str) -> int:
        """How many cells of the search at the first depth are missing."""
        depth = self.settings.depths[0]
        asked = sum(start.depth == depth for start in starts(self.settings))
        there = sum(len(o) for start, o in self.searched(task).items() if start.depth == depth)
        return int(asked * self.settings.search_seeds - there)

    def _alarm(self, candidates: Mapping[Start, Sequence[Outcome]]) -> str | None:
        for name in ALARMED:
            if any(mean(found, f"alarm_{name}") >= _ALL for found in candidates.values()):
                return name
        return None

    # ── select ──

    def grid(self, arm: str) -> tuple[float, ...]:
        """The weights that an arm is tried with."""
        found: tuple[float, ...] = (
            self.settings.shares if arm.startswith("D") else self.settings.weights
        )
        return found

    def selection(self, task: str, arm: str, weight: float) -> list[Outcome]:
        """Outcomes over the selection seeds."""
        names = (
            cell_name("select", task, f"{arm}-{weight:g}", seed)
            for seed in range(self.settings.selection_seeds)
        )
        return [o for n in names if (o := self.outcomes.get(n)) is not None]

    def strength(self, task: str, arm: str, weight: float) -> float | None:
        """What the arm is told: `weight` itself, for C.<penalty> the coefficient as strong as it.

        None before the penalty's selection runs, and if none of them has pulls to match (they
        diverged before one was measured); 0 for a penalty that never pulled.
        """
        if not arm.startswith("C."):
            return weight
        outcomes = self.selection(task, f"B.{arm[2:]}", weight)
        if not outcomes:
            return None
        pulls, decays = (
            [v for o in outcomes if math.isfinite(v := o.value(name))]
            for name in ("pull_mean", "decay_pull_mean")
        )
        if not pulls or not decays:
            return None
        return float(np.mean(pulls) / np.mean(decays)) if np.mean(decays) > 0 else None

    def weight(self, task: str, arm: str) -> float | None:
        """The weight with the lowest mean validation loss, the smaller one of equals."""
        means = {
            weight: value
            for weight in self.grid(arm)
            if math.isfinite(value := mean(self.selection(task, arm, weight), "best_validation"))
        }
        return min(means, key=lambda w: (means[w], w)) if means else None

    def score(self, task: str, arm: str) -> float:
        """Mean validation loss of the arm at its weight; nan if it was not tried."""
        weight = self.weight(task, arm)
        if weight is None:
            return math.nan
        return mean(self.selection(task, arm, weight), "best_validation")

    def knee(self, task: str, arm: str) -> float:
        """The simplest weight whose validation loss is within one standard error of the lowest.

        That is the largest λ, for more of a penalty means more structure, and the smallest share
        of the head core. nan if the arm was not tried.
        """
        chosen = self.weight(task, arm)
        if chosen is None:
            return math.nan
        best = [o.value("best_validation") for o in self.selection(task, arm, chosen)]
        error = float(np.std(best, ddof=1)) / math.sqrt(len(best)) if len(best) > 1 else 0.0
        limit = float(np.mean(best)) + error
        kept = [
            weight
            for weight in self.grid(arm)
            if mean(self.selection(task, arm, weight), "best_validation") <= limit
        ]
        pick = min if arm.startswith("D") else max
        return pick(kept, default=math.nan)

    def unselected(self, task: str) -> int:
        """How many selection cells of the penalties that the task tries are missing."""
        names = self.leading(task)
        names = list(self.settings.penalties) if task in self.settings.tasks else names
        asked = len(names) * len(self.settings.weights) * self.settings.selection_seeds
        there = sum(
            len(self.selection(task, f"B.{name}", weight))
            for name in names
            for weight in self.settings.weights
        )
        return int(asked - there)

    def tried(self, task: str) -> bool:
        """Whether the selection runs of penalties are over: some are there."""
        return any(math.isfinite(self.score(task, f"B.{n}")) for n in self.settings.penalties)

    def ranked(self, task: str) -> list[str]:
        """Penalties, the best on validation first."""
        scores = {n: self.score(task, f"B.{n}") for n in self.settings.penalties}
        kept = [n for n, score in scores.items() if math.isfinite(score)]
        return sorted(kept, key=lambda name: (scores[name], name))

    def best_penalties(self) -> list[str]:
        """The two with the best mean rank over the main tasks; [] before they were tried."""
        orders = [order for task in self.settings.tasks if (order := self.ranked(task))]
        if not orders:
            return []
        names = [n for n in orders[0] if all(n in order for order in orders)]
        return sorted(names, key=lambda n: (sum(order.index(n) for order in orders), n))[:2]

    def leading(self, task: str) -> list[str]:
        """Penalties of the primary comparisons: the best, or where it confirms the two best.

        How many there are is fixed by the settings: "best" and "second" stand for what selection
        has not told yet.
        """
        main = task in self.settings.tasks
        known = self.ranked(task)[:1] if main else self.best_penalties()
        count = 1 if main else min(2, len(self.settings.penalties))
        return [*known, *_UNKNOWN[len(known) :]][:count]

    def cured(self, task: str) -> str | None:
        """The best penalty whose runs at its weight never raised the alarm; None if there is none.

        Only selection runs are looked at.
        """
        alarm = self.alarm(task)
        for name in self.ranked(task):
            weight = self.weight(task, f"B.{name}")
            if alarm is None or weight is None:
                continue
            if mean(self.selection(task, f"B.{name}", weight), f"alarm_{alarm}") == 0:
                return f"B.{name}"
        return None

    def home(self) -> str:
        """The main task whose failing setting further tasks share: the last that was searched."""
        known = [task for task in self.settings.tasks if self.searched(task)]
        return known[-1] if known else str(self.settings.tasks[-1])

    # ── verdict ──

    @property
    def judged_tasks(self) -> list[str]:
        """Tasks with verdicts, main ones first."""
        named = dict.fromkeys((*self.settings.tasks, *self.settings.confirm, "own"))
        return [task for task in named if self.verdicts(task, "A")]

    def verdicts(self, task: str, arm: str) -> dict[int, Outcome]:
        """Outcomes of an arm at its weight, by seed."""
        fixed = {"A": 0.0, "O": 0.0, "E.naive": 1.0}
        weight = fixed[arm] if arm in fixed else self.weight(task, arm)
        if weight is None:
            return {}
        found = {}
        for seed in range(FRESH, FRESH + self.settings.seeds):
            outcome = self.outcomes.get(cell_name("verdict", task, f"{arm}-{weight:g}", seed))
            if outcome is not None:
                found[seed] = outcome
        return found

    def arms(self, task: str) -> list[str]:
        """Arms with verdicts."""
        named = ["A", "O", *main_arms(self.settings.penalties), "E.naive"]
        return [arm for arm in named if self.verdicts(task, arm)]

    def values(self, task: str, arm: str, name: str) -> dict[int, float]:
        """A number by seed; seeds where it does not exist are left out."""
        found = {s: o.value(name) for s, o in self.verdicts(task, arm).items()}
        return {seed: value for seed, value in found.items() if not math.isnan(value)}

    def pairs(self, task: str, first: str, second: str, name: str) -> list[int]:
        """Seeds for which both arms have a finite number of that name."""
        a, b = self.values(task, first, name), self.values(task, second, name)
        return sorted(s for s in set(a) & set(b) if math.isfinite(a[s]) and math.isfinite(b[s]))

    def compared(self, task: str, first: str, second: str, name: str) -> Comparison | None:
        """First minus second, paired by seeds; None for fewer than two pairs."""
        both = self.pairs(task, first, second, name)
        if len(both) < 2:
            return None
        a, b = self.values(task, first, name), self.values(task, second, name)
        return paired_seeds([a[s] for s in both], [b[s] for s in both])

    def coefficient(self, task: str, arm: str) -> float | None:
        """What weight decay of arm C is told at its weight; None for other arms."""
        weight = self.weight(task, arm) if arm.startswith("C.") else None
        return None if weight is None else self.strength(task, arm, weight)

    def copies(self, task: str) -> list[str]:
        """Arms C whose coefficient is 0, for their penalty never pulled: A under another name."""
        named = (f"C.{n}" for n in self.settings.penalties)
        return [arm for arm in named if self.coefficient(task, arm) == 0]

    def pull_ratio(self, task: str, name: str) -> float:
        """Measured mean pull of C.<name> over that of B.<name>, in verdicts of the same seeds.

        nan where pulls were not measured, or the penalty's are zero.
        """
        both = self.pairs(task, f"C.{name}", f"B.{name}", "pull_mean")
        decay, penalty = (self.values(task, f"{x}.{name}", "pull_mean") for x in "CB")
        total = sum(penalty[s] for s in both)
        return sum(decay[s] for s in both) / total if total > 0 else math.nan


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    """Mean of a number over outcomes; nan without any."""
    values = [o.value(name) for o in outcomes]
    return float(np.mean(values)) if values else math.nan


def known_mean(outcomes: Sequence[Outcome], name: str) -> float:
    """Mean over those outcomes that have the number; nan without any."""
    values = [v for o in outcomes if not math.isnan(v := o.value(name))]
    return float(np.mean(values)) if values else math.nan
