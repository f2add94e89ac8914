"""Choosing among candidates on validation rows, never on test rows.

Overlapping windows are not independent: errors are averaged over blocks of consecutive windows, and
the spread over blocks gives the standard error of a difference (blocked validation). Of all
candidates within one standard error of the best, the simplest is taken (Breiman et al. 1984,
3.4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm as normal
from scipy.stats import t as student_t

__all__ = ["Choice", "Entrant", "blend_weights", "block_means", "choose", "relative_blocks"]

FloatArray = NDArray[np.float64]

_MOST_BLOCKS = 12

TRAINED = 2
"""Simplicity from which a candidate is trained step by step; below it lie closed forms."""
_STILL = 1e-6


@dataclass(frozen=True, eq=False)
class Entrant:
    """A candidate's name, simplicity class (0 simplest) and relative error per block `[blocks]`."""

    name: str
    simplicity: int
    errors: FloatArray


@dataclass(frozen=True)
class Choice:
    """The chosen name, the best name, and the numbers behind it.

    `errors`, `excess` over the best and the `standard_errors` of that excess are relative to the
    reference line (1.0 = as good as the line), by name.
    """

    chosen: str
    best: str
    errors: dict[str, float]
    excess: dict[str, float]
    standard_errors: dict[str, float]
    blocks: int


def block_means(values: FloatArray, horizon: int) -> FloatArray:
    """Means of `values [N, ...]` over blocks of consecutive windows, `[blocks, ...]`.

    At most twelve blocks, none shorter than the horizon if the rows allow two; then neighbouring
    blocks share targets of one window's length at most.

    >>> block_means(np.arange(6.0), 3)
    array([1., 4.])
    """
    count = int(np.clip(len(values) // max(horizon, 1), 2, _MOST_BLOCKS))
    parts = np.array_split(values, min(count, len(values)))
    return np.stack([p.mean(axis=0) for p in parts])


def relative_blocks(products: FloatArray, reference: int, horizon: int) -> FloatArray:
    """Block means of `products [N, K, K]`, each divided by the reference's error in that block.

    A block with ten times the variance, or one that holds a broken sensor, then counts as much as
    any other: what matters is who is better, block by block.
    """
    blocks = block_means(products, horizon)
    level = blocks[:, reference, reference]
    # Where every sensor stands still the line errs by nothing, and any ratio to it is noise.
    level = np.maximum(level, max(_STILL * level.mean(), np.finfo(np.float64).tiny))
    return np.asarray(blocks / level[:, None, None])


def choose(entrants: Sequence[Entrant]) -> Choice:
    """The simplest entrant within one standard error of the best; the better of equally simple.

    One standard error is widened to Student's t at the same level (84 % one-sided), since a spread
    over two or three blocks is hardly known. Over a single block it is not known at all: then the
    better of the closed forms is taken, since nothing speaks for a trained model.
    """
    errors = np.stack([e.errors for e in entrants], axis=1)
    count, means = len(errors), errors.mean(axis=0)
    best = int(np.argmin(means))
    excess = means - means[best]
    if count > 1:
        spread = (errors - errors[:, [best]]).std(axis=0, ddof=1) / np.sqrt(count)
        standard = spread * student_t.ppf(normal.cdf(1.0), count - 1)
    else:
        standard = np.full(len(means), np.inf)
    everyone = range(len(entrants))
    if count > 1:
        within = [i for i in everyone if excess[i] <= standard[i] or i == best]
        chosen = min(within, key=lambda i: (entrants[i].simplicity, means[i]))
    else:
        closed = [i for i in everyone if entrants[i].simplicity < TRAINED] or list(everyone)
        chosen = min(closed, key=lambda i: means[i])
    names = [e.name for e in entrants]
    return Choice(
        names[chosen],
        names[best],
        dict(zip(names, means.tolist(), strict=True)),
        dict(zip(names, excess.tolist(), strict=True)),
        dict(zip(names, standard.tolist(), strict=True)),
        count,
    )


def blend_weights(products: FloatArray) -> FloatArray:
    """w ≥ 0, Σ w = 1 that minimises wᵀ E w for `products` E `[K, K]` (symmetric, PSD); exact.

    Each set of active members has a closed form; for the few candidates here all sets are tried.

    >>> blend_weights(np.array([[1.0, 0.0], [0.0, 1.0]]))
    array([0.5, 0.5])
    """
    size = len(products)
    best: FloatArray = np.eye(size)[int(np.argmin(np.diag(products)))]
    best_error = float(np.diag(products).min())
    scale = max(float(np.diag(products).mean()), np.finfo(np.float64).tiny)
    for members in range(2, size + 1):
        for chosen in combinations(range(size), members):
            inner = products[np.ix_(chosen, chosen)]
            # Lagrange's equations rather than E w = 1, which opposite errors leave unsolvable.
            system = np.ones((members + 1, members + 1))
            system[:-1, :-1] = inner / scale
            system[-1, -1] = 0.0
            right = np.append(np.zeros(members), 1.0)
            solved = np.linalg.lstsq(system, right, rcond=1e-12)[0][:-1]
            solved /= solved.sum()
            error = float(solved @ inner @ solved)
            if solved.min() >= 0 and error < best_error * (1 - 1e-12):
                best = np.zeros(size)
                best[list(chosen)] = solved
                best_error = error
    return best
