"""How many CP components: the error curve and the core consistency over a range of ranks.

Axes as in `cp`: x [n_0, …], factors [n_k, R].

Core consistency (CORCONDIA; Bro & Kiers 2003) is 100 (1 - ‖G - I‖²/R) with G the least-squares
Tucker core [R, R, …] for the fitted factors, the weights taken into one of them, and I the
superdiagonal core of a CP model. With E the residual of the fit, the least-squares core nearest to
I is I + E ×_k A_k⁺, hence

    consistency = 100 (1 - ‖E ×_0 A_0⁺ ×_1 A_1⁺ …‖²/R).

This is Bro & Kiers's number where all A_k have full column rank; where R exceeds an axis, their
core is not unique and theirs is below 100 even for an exact fit. It equals 100 for an exact fit,
stays high while the components are what the data hold, and falls, also below 0, once the model
fits more than trilinear structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.cp import CPTensor, cp
from levelhead.tensors.multilinear import multi_mode_product, squared_norm

__all__ = ["RankPoint", "choose_rank", "core_consistency", "cp_rank_curve"]


@dataclass(frozen=True, eq=False)
class RankPoint:
    """One rank of a curve: its fit and the core consistency in per cent, at most 100."""

    rank: int
    relative_error: float
    consistency: float
    fit: CPTensor


def core_consistency(x: Tensor, fit: CPTensor) -> float:
    """Core consistency of a fit to x [n_0, …] in per cent, at most 100, in float64.

    Needs one tensor of the size of x. Components of weight zero count as inconsistent in nothing.

    >>> x = torch.einsum("i,j,k->ijk", torch.ones(2), torch.ones(3), torch.ones(4)).double()
    >>> round(core_consistency(x, cp(x, 1)), 6)
    100.0
    """
    residual = x.detach().double() - fit.reconstruct()
    loaded = [*fit.factors[:-1], fit.factors[-1] * fit.weights]
    inverses: list[Tensor | None] = []
    for factor in loaded:
        u, sigma, _ = torch.linalg.svd(factor, full_matrices=False)
        # A⁺ = V Σ⁻¹ Uᵀ, and V changes no norm.
        alive = sigma > max(factor.shape) * torch.finfo(sigma.dtype).eps * sigma[0]
        inverses.append((u[:, alive] / sigma[alive]).mT)
    excess = float(squared_norm(multi_mode_product(residual, inverses)))
    return 100.0 * (1.0 - excess / fit.rank)


def cp_rank_curve(x: Tensor, ranks: Sequence[int] | None = None, **options: Any) -> list[RankPoint]:
    """Fits of rising rank with their errors and core consistencies.

    `ranks` are by default h, 1.5 h, 2 h, 3 h and 4 h with h = n_0: below h, a component cannot
    even be given to every head. `options` go to `cp`.

    Raises InputError if `ranks` is empty; what `cp` raises.
    """
    chosen = [x.shape[0] * k // 2 for k in (2, 3, 4, 6, 8)] if ranks is None else list(ranks)
    if not chosen:
        raise InputError("no ranks were given; expected at least one")
    points = []
    for rank in sorted(set(chosen)):
        fit = cp(x, rank, **options)
        points.append(RankPoint(rank, fit.relative_error, core_consistency(x, fit), fit))
    return points


def choose_rank(curve: Sequence[RankPoint], consistency: float = 50.0) -> int:
    """The largest rank that is not degenerate and at least `consistency` per cent consistent.

    If there is none, the smallest rank of the curve: no rank is supported by the data. The limit
    of 50 is Bro & Kiers's border to "problematic"; they call 90 "very appropriate".
    """
    sound = [p.rank for p in curve if p.consistency >= consistency and not p.fit.degenerate]
    return max(sound) if sound else min(p.rank for p in curve)
