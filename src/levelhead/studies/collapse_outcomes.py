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
from levelhead.studies.collapse_training import Start
from levelhead.studies.study import Outcome

__all__ = ["FRESH", "CollapseOutcomes", "cell_name", "main_arms", "starts"]

FRESH = 1000
"""The first seed of the verdicts."""

_ALL = 1.0


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

        None before the penalty's selection runs; 0 for a penalty that never pulled.
        """
        if not arm.startswith("C."):
            return weight
        outcomes = self.selection(task, f"B.{arm[2:]}", weight)
        if not outcomes:
            return None
        pull, decay = mean(outcomes, "pull_mean"), mean(outcomes, "decay_pull_mean")
        return pull / decay if pull > 0 and decay > 0 else 0.0

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

    def compared(self, task: str, first: str, second: str, name: str) -> Comparison | None:
        """First minus second, paired by seeds; None for fewer than two pairs."""
        a, b = self.values(task, first, name), self.values(task, second, name)
        both = sorted(set(a) & set(b))
        if len(both) < 2:
            return None
        return paired_seeds([a[s] for s in both], [b[s] for s in both])


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    """Mean of a number over outcomes; nan without any."""
    values = [o.value(name) for o in outcomes]
    return float(np.mean(values)) if values else math.nan
