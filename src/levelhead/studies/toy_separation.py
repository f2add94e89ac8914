"""Which quantity of a trained model orders the arms of the toy study by how they generalise.

Points are arms: means over seeds of the last epoch, first initialisation, all arms that attend (the
interventions among them, some of which hold a candidate fixed). The measure is Spearman's rank
correlation with the excess; its uncertainty comes from drawing arms again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from levelhead.studies.study import Table
from levelhead.studies.toy_model import ARMS
from levelhead.studies.toy_outcomes import ToyOutcomes

__all__ = ["CANDIDATES", "Separation", "separation"]

Floats = NDArray[np.float64]
CANDIDATES = {
    "entropy": "entropy of attention",
    "own": "weight of a channel on itself",
    "rank": "effective rank of attention",
    "nuclear": "nuclear norm of attention",
    "lambda_max": "λ_max",
    "path_norm": "‖W_V W_O W‖₂",
    "leak": "leak, mean square of (A − I) X W_V W_O W, which is a part of the forecast",
}
_LEAST, _DRAWS = 5, 2000


@dataclass(frozen=True, eq=False)
class Separation:
    """Rank correlations with the excess over `arms`: by candidate, and draws [B, candidates]."""

    arms: tuple[str, ...]
    found: Mapping[str, float]
    draws: Floats

    @property
    def order(self) -> list[str]:
        """Candidates, the strongest first."""
        return sorted(self.found, key=lambda n: (-abs(self.found[n]), n))

    def interval(self, name: str) -> tuple[float, float]:
        """95 % of the draws."""
        own = self.draws[:, list(self.found).index(name)]
        return float(np.nanquantile(own, 0.025)), float(np.nanquantile(own, 0.975))

    def clear(self) -> bool:
        """Whether the first of `order` is stronger than the second in 95 % of the draws."""
        names = list(self.found)
        first, second = (
            np.abs(self.draws[:, names.index(n)]) for n in (self.order[0], self.order[1])
        )
        both = np.isfinite(first) & np.isfinite(second)
        return bool(np.mean(first[both] > second[both]) >= 0.95)

    def table(self) -> Table:
        """A row for each candidate."""
        rows = [[self.found[n], *self.interval(n)] for n in self.order]
        return Table(
            "separation",
            "Which quantity tells apart who generalises",
            f"Spearman's rank correlation with the excess over the means of {len(self.arms)} arms "
            "that attend; ±1 orders them perfectly; 95 % of draws of arms.",
            [f"{n}: {CANDIDATES[n]}" for n in self.order],
            ["rank correlation", "low", "high"],
            np.array(rows),
            row_axis="quantity",
        )

    def __str__(self) -> str:
        first, second = self.order[:2]
        low, high = self.interval(first)
        told = (
            f"Over {len(self.arms)} arms the excess is ordered best by {first} (rank correlation "
            f"{self.found[first]:.2f} [{low:.2f}, {high:.2f}])"
        )
        named = {first}
        if not self.clear():
            named.add(second)
            told += f", which is not told apart from {second} ({self.found[second]:.2f})"
        others = [
            n for n in ("entropy", "lambda_max", "rank") if n in self.found and n not in named
        ]
        rest = ", ".join(f"{n} {self.found[n]:.2f}" for n in others)
        return f"{told}; {rest}." if rest else f"{told}."


def separation(found: ToyOutcomes) -> Separation | None:
    """None with fewer than five arms or two candidates that vary."""
    init, oracle = found.settings.inits[0], found.oracle()
    rows: dict[str, list[float]] = {}
    for arm in found.arms(init):
        if ARMS[arm].silent:
            continue
        losses = found.final(arm, init, "loss")
        excess = [loss - oracle[s] for s, loss in losses.items() if s in oracle]
        means = [
            float(np.mean(excess)) if excess else math.nan,
            *(float(np.mean(list(found.final(arm, init, n).values()))) for n in CANDIDATES),
        ]
        if np.isfinite(means).all():
            rows[arm] = means
    if len(rows) < _LEAST:
        return None
    values = np.array(list(rows.values()))
    kept = [i for i in range(len(CANDIDATES)) if np.ptp(values[:, i + 1]) > 0]
    if len(kept) < 2:
        return None
    names = list(CANDIDATES)
    draw = np.random.default_rng(0)
    places = draw.integers(0, len(values), (_DRAWS, len(values)))
    draws = np.array([[_rank(values[p, i + 1], values[p, 0]) for i in kept] for p in places])
    told = {names[i]: _rank(values[:, i + 1], values[:, 0]) for i in kept}
    return Separation(tuple(rows), told, draws)


def _rank(x: Floats, y: Floats) -> float:
    """Spearman's correlation; nan where one of both does not vary."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    a, b = stats.rankdata(x), stats.rankdata(y)
    return float(np.corrcoef(a, b)[0, 1])
