"""Who beats whom: over test windows, and beside it over seeds, adjusted for the number asked.

A place is a set and a horizon. Losses are `[N]`, one for each test window in order of time, means
over the seeds that two arms share; a difference is the first minus the second, so that below zero
the first is better. Neighbouring windows overlap, so that blocks of H of them are drawn together.

The claims are named before any number is seen, and all their places form one family for Holm, but
for those whose test windows hold fewer than five blocks: two or three blocks drawn again and again
tell nothing of chance, so that nothing is judged there. A claim is borne out at a place if its
adjusted p is at most .05 *and* every seed has the sign of the claim: the bootstrap takes the
trained weights as given and knows nothing of initialisations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.evaluation.significance import (
    Comparison,
    block_bootstrap,
    diebold_mariano,
    holm,
    paired_seeds,
)
from levelhead.studies.forecasting_models import ARMS
from levelhead.studies.study import Outcome

__all__ = ["CLAIMS", "Claim", "Compared", "Losses", "Place", "against", "compared"]

FloatArray = NDArray[np.float64]
Place = tuple[str, int]
LEVEL = 0.05
LEAST_BLOCKS = 5


@dataclass(frozen=True)
class Claim:
    """That an arm's test error is below another's; or that a gain is.

    Args:
        name, says: short, and as a sentence about a set.
        better, worse: arms.
        gains: two more arms; then the gain of `better` over `worse` is held to be smaller than
            that of the first of these over the second.
    """

    name: str
    says: str
    better: str
    worse: str
    gains: tuple[str, str] | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        """All arms it needs."""
        return (self.better, self.worse, *(self.gains or ()))


CLAIMS = (
    Claim("sam", "SAM makes the transformer better", "samformer", "transformer"),
    Claim("line", "SAMformer is better than the straight line", "samformer", "line"),
    Claim("attention", "attention makes SAMformer better than A = I", "samformer", "identity"),
    Claim("channel", "channel attention is better than temporal", "samformer", "temporal"),
    Claim("sigma", "SAM makes the transformer better than σReparam does", "samformer", "sigma"),
    Claim(
        "slip",
        "SAM gains less with a correct RevIN than with the released slip",
        "samformer",
        "transformer",
        ("samformer-slip", "transformer-slip"),
    ),
)
"""The primary comparisons."""


@dataclass(frozen=True, eq=False)
class Losses:
    """Outcomes by cell, asked for the losses of an arm at a place."""

    settings: Any
    outcomes: Mapping[str, Outcome]

    @property
    def places(self) -> list[Place]:
        """Sets and horizons with at least one finished cell, in the order of the settings."""
        return [
            (name, horizon)
            for name in self.settings.sets
            for horizon in self.settings.horizons
            if self.arms((name, horizon))
        ]

    def arms(self, place: Place) -> list[str]:
        """The arms that finished a cell at `place`."""
        return [arm for arm in self.settings.arms if self.seeds(place, arm)]

    def seeds(self, place: Place, arm: str) -> dict[int, Outcome]:
        """Outcomes by seed."""
        named = {s: f"{place[0]}-{place[1]}-{arm}-{s}" for s in range(self.settings.seeds)}
        return {s: self.outcomes[n] for s, n in named.items() if n in self.outcomes}

    def values(self, place: Place, arm: str, name: str) -> FloatArray:
        """One reading by seed."""
        return np.array([o.value(name) for o in self.seeds(place, arm).values()])

    def mean(self, place: Place, arm: str, name: str) -> float:
        """Mean of a reading over seeds; nan if there is none."""
        values = self.values(place, arm, name)
        return float(values.mean()) if values.size else float("nan")

    def by_seed(self, place: Place, arm: str) -> dict[int, FloatArray]:
        """Squared errors `[N]` by seed; a closed form has the same ones for every seed."""
        found = {s: o.arrays["squared"] for s, o in self.seeds(place, arm).items()}
        if ARMS[arm].line is not None and found:
            return dict.fromkeys(range(self.settings.seeds), next(iter(found.values())))
        return found


@dataclass(frozen=True, eq=False)
class Compared:
    """A claim at a place.

    Args:
        windows: block bootstrap over test windows of losses averaged over seeds.
        diebold_mariano: the same by Diebold and Mariano, None for too few blocks.
        seeds: Student's paired t over seeds, None for one seed.
        alike: every seed's difference has the sign of the mean.
        blocks: how many blocks of H the test windows hold.
        adjusted: the bootstrap's p after Holm; nan for too few blocks.
    """

    claim: Claim
    place: Place
    windows: Comparison
    diebold_mariano: Comparison | None
    seeds: Comparison | None
    alike: bool
    blocks: float
    adjusted: float = float("nan")

    @property
    def judged(self) -> bool:
        """Whether there are enough blocks to judge by."""
        return self.blocks >= LEAST_BLOCKS

    @property
    def holds(self) -> bool:
        """Whether the claim is borne out here."""
        return self.adjusted <= LEVEL and self.windows.difference < 0 and self.alike


def compared(losses: Losses) -> list[Compared]:
    """Every claim at every place where its arms ran, adjusted as one family."""
    found = [
        made
        for claim in CLAIMS
        for place in losses.places
        if (made := _compared(losses, claim, place)) is not None
    ]
    family = {str(i): c.windows.p_value for i, c in enumerate(found) if c.judged}
    adjusted = holm(family)
    return [replace(c, adjusted=adjusted.get(str(i), math.nan)) for i, c in enumerate(found)]


def _compared(losses: Losses, claim: Claim, place: Place) -> Compared | None:
    runs = {arm: losses.by_seed(place, arm) for arm in claim.arms}
    shared = sorted(set.intersection(*(set(run) for run in runs.values())))
    if not _comparable(list(runs.values())):
        return None
    pairs = [_sides(claim, {arm: run[seed] for arm, run in runs.items()}) for seed in shared]
    first = np.mean([a for a, _ in pairs], axis=0)
    second = np.mean([b for _, b in pairs], axis=0)
    horizon, count = place[1], len(first)
    windows = _bootstrap(losses, first, second, horizon)
    enough = count >= LEAST_BLOCKS * horizon
    tested = diebold_mariano(first, second, lags=horizon - 1) if enough else None
    means = np.array([[a.mean(), b.mean()] for a, b in pairs])
    signs = np.sign(means[:, 0] - means[:, 1])
    over = paired_seeds(means[:, 0], means[:, 1]) if len(shared) > 1 else None
    alike = bool((signs == np.sign(windows.difference)).all())
    return Compared(claim, place, windows, tested, over, alike, count / horizon)


def _sides(claim: Claim, run: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """What is compared `[N]`: two losses, or two gains (worse minus better)."""
    better, worse = run[claim.better], run[claim.worse]
    if claim.gains is None:
        return better, worse
    return worse - better, run[claim.gains[1]] - run[claim.gains[0]]


def against(losses: Losses, place: Place, arm: str, base: str) -> Comparison | None:
    """An arm minus another at a place, seeds averaged; for description, not a test.

    The interval is nan where the windows hold too few blocks.
    """
    runs = losses.by_seed(place, arm), losses.by_seed(place, base)
    shared = sorted(set(runs[0]) & set(runs[1]))
    if not _comparable(runs):
        return None
    first, second = (np.mean([run[s] for s in shared], axis=0) for run in runs)
    found = _bootstrap(losses, first, second, place[1])
    enough = found.count >= LEAST_BLOCKS * place[1]
    return found if enough else replace(found, low=math.nan, high=math.nan)


def _comparable(runs: Sequence[Mapping[int, FloatArray]]) -> bool:
    """Whether the arms share a seed and were judged on as many windows: a statement says if not."""
    lengths = {len(losses) for run in runs for losses in run.values()}
    return bool(set.intersection(*map(set, runs))) and len(lengths) == 1


def _bootstrap(losses: Losses, first: FloatArray, second: FloatArray, horizon: int) -> Comparison:
    block = min(horizon, len(first))
    return block_bootstrap(first, second, block=block, draws=losses.settings.draws)
