"""CP decompositions x ≈ Σ_r w_r a_r ∘ b_r ∘ c_r … by alternating least squares.

Axes. x [n_0, …]; factor k is [n_k, R] with unit columns, weights [R] fall and are not negative.
Modes are counted from 0 and unfolded as in `multilinear`.

Two examples. A tensor a∘b∘c with unit vectors has the weight 1 and the factors a, b, c, up to
signs that cancel. The 2 × 2 identity has the weights (1, 1) and the unit vectors as factors (and,
as a matrix, many other decompositions: CP is unique from three modes on only).

One sweep updates the modes in their order, the longest one last, and makes two products with the
whole tensor. Its iterates are those of plain ALS in that order. Sweeps run in the precision of x
(float32 for narrower types), the small systems in float64; the result is float64, and its error is
the true one of the returned object, from the residual.

ALS may diverge where no best approximation exists: components grow and cancel. Then the product
of two components' cosines over all modes tends to -1 (`degeneracy`) while the weights of both grow
beyond the size of x, and the fit says so (Krijnen, Dijkstra & Stegeman 2008). Two components that
are nearly opposite but short, as in a poor fit of noise, are no sign of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.base.numerics import threads
from levelhead.tensors.cp_line_search import extrapolated
from levelhead.tensors.cp_targets import (
    CPTarget,
    DenseCPTarget,
    StackCPTarget,
    cp_squared_error,
)
from levelhead.tensors.interchange import tensorly_array, tensorly_class
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.multilinear import squared_norm
from levelhead.tensors.subspaces import leading_subspace, random_matrix

__all__ = ["CPTensor", "Init", "cp", "largest_useful_rank"]

Init = Literal["svd", "qr", "random"]

# Fits of at most so many products a sweep are far faster on one thread than on several.
_SMALL = 1 << 24
# A pair of components whose cosines multiply to less than this cancels more than half its length …
_ALARM_COSINE = -0.85
# … and diverges if both are longer than x, so that they can only be there to cancel, and still grow
# by this factor over the second half of the sweeps.
_ALARM_GROWTH = 1.05


@dataclass(frozen=True, eq=False)
class CPTensor:
    """weights [R], falling, and factors [n_k, R] with unit columns, float64.

    `relative_error` is ‖x - x̂‖/‖x‖. `degeneracy` is the smallest product over all modes of two
    components' cosines, from -1 to 1; `degenerate` says that it is near -1 for two components whose
    weights are larger than ‖x‖ and still grew. `converged`: the error settled to the tolerance
    before the sweeps ran out. `history` holds the monitored relative error after each of the
    `sweeps`.
    """

    weights: Tensor
    factors: tuple[Tensor, ...]
    relative_error: float
    sweeps: int = 0
    converged: bool = True
    degeneracy: float = 1.0
    degenerate: bool = False
    history: tuple[float, ...] = field(default=(), repr=False)

    @property
    def rank(self) -> int:
        """R, the number of components."""
        return self.weights.shape[0]

    def reconstruct(self) -> Tensor:
        """x̂ [n_0, …], multiplied out.

        >>> one = torch.ones(1, 1)
        >>> CPTensor(torch.tensor([2.0]), (one, one, one), 0.0).reconstruct()
        tensor([[[2.]]])
        """
        rows = self.factors[0] * self.weights
        for factor in self.factors[1:-1]:
            rows = (rows[:, None] * factor[None]).flatten(0, 1)
        return (rows @ self.factors[-1].mT).reshape([f.shape[0] for f in self.factors])

    def error(self, x: Tensor | LowRankStack) -> float:
        """‖x - x̂‖/‖x‖ from the residual itself, in float64; x̂ is never whole in memory.

        Raises InputError if x has another shape. For x = 0 it is ‖x̂‖.
        """
        shape = tuple(f.shape[0] for f in self.factors)
        if tuple(x.shape) != shape:
            raise InputError(f"a tensor {list(x.shape)} was given; expected {list(shape)}")
        with torch.no_grad():
            if isinstance(x, LowRankStack):
                total = float(x.frobenius_norms().square().sum())
            else:
                total = float(squared_norm(x))
            error = cp_squared_error(x, self.weights, self.factors)
        return math.sqrt(error / total) if total > 0 else math.sqrt(error)

    def shares(self, mode: int = -1) -> Tensor:
        """How each component's energy is spread over axis `mode`: [n_mode, R], columns sum to 1.

        Along the axis of length 3 of a head tensor these are the shares of Q, K and V.
        """
        return self.factors[mode].square()

    def to_tensorly(self) -> Any:
        """The same decomposition as a `tensorly.cp_tensor.CPTensor`.

        Arrays are those of TensorLy's current backend. Raises InputError without TensorLy.
        """
        cp_class = tensorly_class("cp_tensor", "CPTensor")
        return cp_class((tensorly_array(self.weights), [tensorly_array(f) for f in self.factors]))


def cp(
    x: Tensor | LowRankStack,
    rank: int,
    *,
    init: Init | Sequence[Tensor] = "svd",
    starts: int = 1,
    sweeps: int = 200,
    tolerance: float = 1e-6,
    line_search: bool = True,
    seed: int = 0,
) -> CPTensor:
    """CP decomposition of x [n_0, …] with `rank` components; without gradient.

    `init`: "svd" takes leading singular vectors of the unfoldings, "qr" orthonormal bases of
    random sketches of them, "random" normal numbers; missing columns are random. Or factors
    [n_k, rank]. Of several `starts` the best is returned; those after the first differ by `seed`,
    and begin at random for "svd". Sweeps end when the relative error changes by less than
    `tolerance`; while sweeping, errors below 1e-8 (3e-4 in float32) are not told apart.
    `line_search` follows each sweep's step on to the minimum of the exact polynomial (enhanced
    line search, Rajih, Comon & Harshman 2008): fewer sweeps, and other iterates.

    x may be a LowRankStack: its stacked tensor [h, m, n] is fitted from the factors.

    Warns (LevelheadWarning) of a degenerate fit. Raises InputError for a tensor of fewer than two
    axes, entries that are not finite, or arguments out of range.

    >>> x = torch.einsum("i,j,k->ijk", torch.ones(2), torch.ones(3), torch.ones(4))
    >>> fit = cp(x.double(), 1)
    >>> round(float(fit.weights[0]) ** 2, 9), fit.relative_error < 1e-9
    (24.0, True)
    """
    if len(x.shape) < 2 or 0 in x.shape:
        raise InputError(
            f"a tensor {list(x.shape)} was given; expected two axes or more, none empty"
        )
    for name, value in (("rank", rank), ("starts", starts), ("sweeps", sweeps)):
        if value < 1:
            raise InputError(f"{name}={value} was given; expected at least 1")
    with torch.no_grad(), threads(1 if _products(x, rank) <= _SMALL else None):
        target: CPTarget = StackCPTarget(x) if isinstance(x, LowRankStack) else DenseCPTarget(x)
        best: CPTensor | None = None
        for start in range(starts):
            factors = _start(target, rank, init, start, seed)
            fit = _als(target, factors, sweeps, tolerance, line_search)
            error = math.sqrt(cp_squared_error(x, fit.weights, fit.factors))
            total = math.sqrt(target.squared_norm)
            fit = replace(fit, relative_error=error / total if total > 0 else error)
            if best is None or fit.relative_error < best.relative_error:
                best = fit
    assert best is not None  # starts >= 1
    if best.degenerate:
        warnings.warn(
            f"the CP fit of rank {rank} is degenerate: components grow and cancel (cosine "
            f"{best.degeneracy:.3f}), so a best approximation may not exist; use a lower rank, or "
            "a Tucker decomposition",
            LevelheadWarning,
            stacklevel=2,
        )
    return best


def largest_useful_rank(shape: Sequence[int]) -> int:
    """The product of all sizes but the largest: with so many components every tensor is exact.

    >>> largest_useful_rank((12, 384, 384)), largest_useful_rank((12, 32, 384, 3))
    (4608, 1152)
    """
    return math.prod(shape) // max(shape)


def _products(x: Tensor | LowRankStack, rank: int) -> int:
    """About how many multiplications one product with all of x takes."""
    if isinstance(x, LowRankStack):
        return (x.left.numel() + x.right.numel()) * rank
    return x.numel() * rank


def _start(
    target: CPTarget, rank: int, init: Init | Sequence[Tensor], start: int, seed: int
) -> list[Tensor]:
    if not isinstance(init, str):
        return _given(target, rank, init)
    if init not in ("svd", "qr", "random"):
        raise InputError(f"init {init!r} was given; expected 'svd', 'qr', 'random' or factors")
    draw = seed + 1009 * start
    like = torch.zeros((), dtype=target.dtype, device=target.device)
    factors = []
    for mode, n in enumerate(target.shape):
        factor = random_matrix(n, rank, like, draw + mode)
        kept = min(rank, n)
        if init == "svd" and start == 0:
            factor[:, :kept] = leading_subspace(target.unfolding(mode), kept)
        elif init == "qr":
            rows = target.unfolding(mode)
            sketch = rows @ random_matrix(rows.shape[1], kept, like, draw + mode + 500)
            factor[:, :kept] = torch.linalg.qr(sketch).Q
        factors.append(factor)
    return factors


def _given(target: CPTarget, rank: int, factors: Sequence[Tensor]) -> list[Tensor]:
    expected = [(n, rank) for n in target.shape]
    if [tuple(f.shape) for f in factors] != expected:
        raise InputError(
            f"initial factors {[list(f.shape) for f in factors]} were given; expected "
            f"{[list(shape) for shape in expected]}"
        )
    return [f.detach().to(target.device, target.dtype).clone() for f in factors]


def _als(
    target: CPTarget, factors: list[Tensor], sweeps: int, tolerance: float, line_search: bool
) -> CPTensor:
    """Alternating least squares from `factors`; `relative_error` is filled in by the caller."""
    last, total = target.order[-1], target.squared_norm
    grams = [_gram(f) for f in factors]
    history: list[float] = []
    sizes: list[Tensor] = []
    inner = 0.0

    def solve(mode: int, mttkrp: Tensor) -> None:
        nonlocal inner
        factor = _least_squares(_product(grams, mode), mttkrp)
        if mode == last:
            inner = float((mttkrp.double() * factor).sum())
        else:
            factor = factor / _lengths(factor)
        factors[mode] = factor.to(target.dtype)
        grams[mode] = _gram(factors[mode])

    for number in range(sweeps):
        old = list(factors)
        target.sweep(factors, solve)
        square = total - 2.0 * inner + float(_product(grams).sum())
        if line_search and number > 0 and number + 1 < sweeps:
            square = extrapolated(target, old, factors, grams, square)
        history.append(math.sqrt(max(square, 0.0) / total) if total > 0 else 0.0)
        sizes.append(factors[last].double().square().sum(0).sqrt())
        if len(history) > 1 and abs(history[-2] - history[-1]) < tolerance:
            break
    converged = len(history) > 1 and abs(history[-2] - history[-1]) < tolerance
    return _finished(factors, history, sizes, converged, math.sqrt(total))


def _finished(
    factors: list[Tensor],
    history: list[float],
    sizes: list[Tensor],
    converged: bool,
    size: float,
) -> CPTensor:
    """`sizes` holds the components' lengths [R] after each sweep, `size` is ‖x‖."""
    exact = [f.double() for f in factors]
    lengths = [_lengths(f) for f in exact]
    unit = [f / length for f, length in zip(exact, lengths, strict=True)]
    # A column that is zero kept the length 1: its weight is zero.
    alive = torch.stack([f.abs().amax(0) > 0 for f in exact]).all(0)
    weights = torch.where(alive, torch.stack(lengths).prod(0), 0.0)
    order = weights.argsort(descending=True, stable=True)
    unit = [f[:, order] for f in unit]
    cosines = _product([_gram(f) for f in unit])
    cosines.fill_diagonal_(1.0)
    degeneracy = float(cosines.min())
    growing = (sizes[-1] > _ALARM_GROWTH * sizes[len(sizes) // 2])[order] & (weights[order] > size)
    cancelling = (cosines < _ALARM_COSINE) & growing[:, None] & growing[None, :]
    return CPTensor(
        weights[order],
        tuple(unit),
        math.nan,
        len(history),
        converged,
        degeneracy,
        bool(cancelling.any()),
        tuple(history),
    )


def _least_squares(gram: Tensor, mttkrp: Tensor) -> Tensor:
    """mttkrp gram⁻¹ in float64; the minimum-norm solution where gram is singular to rounding."""
    rows = mttkrp.double()
    triangle, failed = torch.linalg.cholesky_ex(gram)
    pivots = triangle.diagonal()
    if int(failed) == 0 and float(pivots.min()) > 1e-7 * float(pivots.max()):
        return torch.cholesky_solve(rows.mT, triangle).mT
    solution: Tensor = rows @ torch.linalg.pinv(gram, hermitian=True)
    return solution


def _lengths(factor: Tensor) -> Tensor:
    lengths = factor.square().sum(0).sqrt()
    return torch.where(lengths > 0, lengths, 1.0)


def _gram(factor: Tensor) -> Tensor:
    wide = factor.double()
    return wide.mT @ wide


def _product(grams: Sequence[Tensor], skip: int | None = None) -> Tensor:
    """Entry-wise product of the Gram matrices, but that of mode `skip`."""
    chosen = [g for k, g in enumerate(grams) if k != skip]
    return torch.stack(chosen).prod(0)
