"""Who beats whom: over test windows, and beside it over seeds, adjusted for the number asked.

A place is a set and a horizon. Losses are `[N]`, one for each test window in order of time, means
over the seeds that two arms share; a difference is the first minus the second, so that below zero
the first is better. Neighbouring windows overlap: Student's t is over means of blocks of 2H of
them, which share none. Diebold and Mariano's test stands beside it, and the interval of the block
bootstrap for description (it is too narrow: see `evaluation.significance`).

The claims are named before any number is seen, and all their places form one family for Holm, but
for those that are not judged: with fewer than five blocks of 2H; with one seed, for windows take
the trained weights as given and know nothing of initialisations; and where a training was stopped
by a limit of epochs that is lower than the study's. A claim is borne out at a place if its adjusted
p is at most .05 *and* every seed has the sign of the claim; likewise its opposite. What part of a
gain another explains is not judged where that gain is not clearly there; it stays in the family,
for who is in it must not depend on the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from levelhead.evaluation.significance import (
    LEAST_BLOCKS,
    Comparison,
    block_bootstrap,
    diebold_mariano,
    holm,
    paired_blocks,
    paired_seeds,
)
from levelhead.studies.forecasting_epochs import at_equal_epochs, cut_short
from levelhead.studies.forecasting_outcomes import Losses, Place

__all__ = ["CLAIMS", "LEVEL", "Claim", "Compared", "against", "compared"]

FloatArray = NDArray[np.float64]
LEVEL = 0.05
BLOCK = 2
"""Blocks are of so many horizons."""


@dataclass(frozen=True)
class Claim:
    """That an arm's test error is below another's; or that a gain is.

    Args:
        name, says: short, and as a sentence about a set.
        better, worse: arms.
        gains: two more arms; then the gain of `better` over `worse` is held to be smaller than
            `part` of that of the first of these over the second.
        words: for what is claimed, and for its opposite.
    """

    name: str
    says: str
    better: str
    worse: str
    gains: tuple[str, str] | None = None
    part: float = 1.0
    words: tuple[str, str] = ("better", "worse")

    @property
    def arms(self) -> tuple[str, ...]:
        """All arms it needs."""
        return (self.better, self.worse, *(self.gains or ()))


_SLIPPED = ("samformer-slip", "transformer-slip")
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
        _SLIPPED,
        words=("smaller", "larger"),
    ),
    Claim(
        "slip-explains",
        "most of SAM's gain with the released code is the slip's",
        "samformer",
        "transformer",
        _SLIPPED,
        part=0.5,
        words=("more than half", "less than half"),
    ),
)
"""The primary comparisons."""


@dataclass(frozen=True, eq=False)
class Compared:
    """A claim at a place.

    Args:
        windows: Student's t over blocks of 2H test windows, of losses averaged over seeds.
        bootstrap: block bootstrap over the same windows, for description.
        diebold_mariano: the same by Diebold and Mariano, None for too few blocks.
        seeds: Student's paired t over seeds, None for one seed.
        by_seed: each seed's difference.
        blocks: how many blocks of H the test windows hold.
        reasons: why it is not judged; none if it is.
        beside: what can be said at equal numbers of epochs where a training was stopped.
        whole: the gain of which a part is asked for, if one is.
        adjusted: the p of `windows` after Holm; nan where nothing is judged.
    """

    claim: Claim
    place: Place
    windows: Comparison
    bootstrap: Comparison
    diebold_mariano: Comparison | None
    seeds: Comparison | None
    by_seed: tuple[float, ...]
    blocks: float
    reasons: tuple[str, ...] = ()
    beside: str = ""
    whole: Comparison | None = None
    adjusted: float = float("nan")

    @property
    def judged(self) -> bool:
        """Whether there is enough to judge by, and something to be judged."""
        return not self.reasons and self.askable

    @property
    def alike(self) -> bool:
        """Whether every seed's difference has the sign of the mean."""
        signs = np.sign([*self.by_seed, self.windows.difference])
        return bool((signs == signs[-1]).all())

    @property
    def askable(self) -> bool:
        """Whether the gain of which a part is asked for is there, with its interval."""
        return self.whole is None or self.whole.low > 0

    @property
    def holds(self) -> bool:
        """Whether the claim is borne out here."""
        return self._clear and self.windows.difference < 0 and self.alike

    @property
    def contrary(self) -> bool:
        """Whether its opposite is."""
        return self._clear and self.windows.difference > 0 and self.alike

    @property
    def _clear(self) -> bool:
        return self.judged and self.adjusted <= LEVEL

    @property
    def share(self) -> float | None:
        """Share of the whole gain that is not left, if there is a gain and it is a share."""
        if self.whole is None or not self.askable:
            return None
        left = self.windows.difference + self.claim.part * self.whole.difference
        share = 1 - left / self.whole.difference
        return share if 0 <= share <= 1 else None


def compared(losses: Losses) -> list[Compared]:
    """Every claim at every place where its arms ran, adjusted as one family."""
    found = [
        made
        for claim in CLAIMS
        for place in losses.places
        if (made := _compared(losses, claim, place)) is not None
    ]
    family = {str(i): c.windows.p_value for i, c in enumerate(found) if not c.reasons}
    adjusted = holm(family)
    return [replace(c, adjusted=adjusted.get(str(i), math.nan)) for i, c in enumerate(found)]


def _compared(losses: Losses, claim: Claim, place: Place) -> Compared | None:
    runs = {arm: losses.by_seed(place, arm) for arm in claim.arms}
    if not _comparable(list(runs.values())):
        return None
    shared = sorted(set.intersection(*(set(run) for run in runs.values())))
    pairs = [_sides(claim, {arm: run[seed] for arm, run in runs.items()}) for seed in shared]
    first = np.mean([a for a, _ in pairs], axis=0)
    second = np.mean([b for _, b in pairs], axis=0)
    horizon, count = place[1], len(first)
    windows = paired_blocks(first, second, block=BLOCK * horizon)
    enough = windows.count >= LEAST_BLOCKS
    means = np.array([[a.mean(), b.mean()] for a, b in pairs])
    reasons = cut_short(losses, place, claim.arms, shared)
    reasons += ["one seed"] * (len(shared) < 2)
    if not enough:
        reasons.append(f"{windows.count} of the {LEAST_BLOCKS} blocks of 2H that are needed")
    elif not windows.judged:
        reasons.append("no deviation between blocks")
    gained = None
    if claim.part != 1:
        gained = paired_blocks(second / claim.part, np.zeros(count), block=BLOCK * horizon)
    return Compared(
        claim,
        place,
        windows,
        _bootstrap(losses, first, second, horizon),
        diebold_mariano(first, second, horizon=horizon) if enough else None,
        paired_seeds(means[:, 0], means[:, 1]) if len(shared) > 1 else None,
        tuple((means[:, 0] - means[:, 1]).tolist()),
        count / horizon,
        tuple(reasons),
        at_equal_epochs(losses, place, claim.arms, shared),
        gained,
    )


def _sides(claim: Claim, run: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """What is compared `[N]`: two losses, or a gain (worse minus better) and a part of another."""
    better, worse = run[claim.better], run[claim.worse]
    if claim.gains is None:
        return better, worse
    return worse - better, claim.part * (run[claim.gains[1]] - run[claim.gains[0]])


def against(losses: Losses, place: Place, arm: str, base: str) -> Comparison | None:
    """An arm minus another at a place, seeds averaged; for description, not a test.

    The interval is Student's over blocks, nan where the windows hold too few of them.
    """
    runs = losses.by_seed(place, arm), losses.by_seed(place, base)
    shared = sorted(set(runs[0]) & set(runs[1]))
    if not _comparable(runs):
        return None
    first, second = (np.mean([run[s] for s in shared], axis=0) for run in runs)
    return paired_blocks(first, second, block=BLOCK * place[1])


def _comparable(runs: Sequence[Mapping[int, FloatArray]]) -> bool:
    """Whether the arms share a seed and were judged on as many windows: a statement says if not."""
    lengths = {len(losses) for run in runs for losses in run.values()}
    return bool(set.intersection(*map(set, runs))) and len(lengths) == 1


def _bootstrap(losses: Losses, first: FloatArray, second: FloatArray, horizon: int) -> Comparison:
    block = min(horizon, len(first))
    return block_bootstrap(first, second, block=block, draws=losses.settings.draws)
