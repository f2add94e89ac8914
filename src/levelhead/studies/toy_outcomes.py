"""The outcomes of the toy study, ready to be asked, and intervals of means.

Intervals are Student's t over seeds, of differences within a seed where two arms are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from levelhead.studies.study import Outcome

__all__ = ["ToyOutcomes", "mean_and_half"]

Floats = NDArray[np.float64]
_PAPER = {"context": 512, "horizon": 96, "channels": 7, "training": 10_000}


@dataclass(frozen=True, eq=False)
class ToyOutcomes:
    """Settings and outcomes by cell; `paper_sized` says whether the sizes are the paper's."""

    settings: Any
    outcomes: Mapping[str, Outcome]

    @property
    def paper_sized(self) -> bool:
        return all(getattr(self.settings, k) >= v for k, v in _PAPER.items())

    def arms(self, init: str) -> list[str]:
        return [a for a in self.settings.arms if self.trainings(a, init)]

    def trainings(self, arm: str, init: str) -> dict[int, Outcome]:
        """Outcomes by seed."""
        found = {}
        for seed in range(self.settings.seeds):
            outcome = self.outcomes.get(f"train-{init}-{arm}-{seed}")
            if outcome is not None and "epoch" in outcome.arrays:
                found[seed] = outcome
        return found

    def final(self, arm: str, init: str, name: str) -> dict[int, float]:
        """A number of the last epoch by seed; trainings that diverged are left out."""
        found = {s: o.value(name) for s, o in self.trainings(arm, init).items()}
        return {seed: value for seed, value in found.items() if not math.isnan(value)}

    def proposition(self, name: str) -> Floats:
        """One value for each seed."""
        values = [
            o.value(name)
            for s in range(self.settings.seeds)
            if (o := self.outcomes.get(f"propositions-{s}")) is not None
        ]
        return np.array(values)

    def oracle(self) -> dict[int, float]:
        return {
            s: o.value("oracle_validation")
            for s in range(self.settings.seeds)
            if (o := self.outcomes.get(f"propositions-{s}")) is not None
        }


def mean_and_half(values: Floats) -> tuple[float, float]:
    """Mean and half width of a 95 % interval by Student's t; nan for fewer than two."""
    if not values.size:
        return math.nan, math.nan
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    # Less the first one: the mean of equal values is rounded, and would deviate from them.
    error = float(np.std(values - values[0], ddof=1)) / math.sqrt(len(values))
    return mean, float(stats.t.ppf(0.975, len(values) - 1)) * error
