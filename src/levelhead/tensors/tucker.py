"""Tucker decompositions x ≈ core ×_0 U_0 ×_1 U_1 …: ST-HOSVD, HOOI and a fast randomised mode.

Axes. x [n_0, …], core [r_0, …], factors U_k [n_k, r_k] with orthonormal columns. Modes are counted
from 0 and unfolded as in `multilinear`.

Two examples. Full ranks give x back: core ×_k U_k = x. A tensor a∘b∘c has the ranks (1, 1, 1), the
core ‖a‖‖b‖‖c‖ and the factors a/‖a‖, b/‖b‖, c/‖c‖ up to sign.

The fit is monitored through ‖x‖² - ‖core‖² without forming a residual, since with orthonormal
factors ‖x - x̂‖² = ‖x‖² - ‖core‖². Sweeps run in the precision of x (float32 for narrower types);
core, factors and error of the result are float64, and the error is that of the returned object.

The core is all-orthogonal (de Lathauwer et al. 2000): the norms of its slices along a mode are the
singular values of that mode, falling. Singular vectors keep their freedom of sign, and of rotation
where values coincide. Factors are orthonormal by construction: ‖UᵀU - I‖ says nothing about x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.interchange import tensorly_array, tensorly_class
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.multilinear import (
    gram,
    mode_product,
    multi_mode_product,
    squared_norm,
    unfold,
)
from levelhead.tensors.subspaces import (
    is_large,
    iterated_subspace,
    leading_subspace,
    sketched_subspace,
)
from levelhead.tensors.tucker_targets import (
    DenseTarget,
    StackTarget,
    Target,
    Update,
    dense_squared_error,
    stack_squared_error,
)

__all__ = ["Method", "TuckerTensor", "tucker", "tucker_of_stack"]

Method = Literal["hooi", "sthosvd", "randomised"]

# Below this, ‖x‖² - ‖core‖² has cancelled too far for nine digits: form the residual.
_CANCELLED = 1e-6

# Power sweeps in front of HOOI of a stack: they cost as much as one and do as much as two.
_WARM = 3


@dataclass(frozen=True, eq=False)
class TuckerTensor:
    """core [r_0, …] and factors [n_k, r_k], float64; `relative_error` is ‖x - x̂‖/‖x‖.

    `sweeps` were made; `converged` tells whether the error had settled to the tolerance (always
    so for "sthosvd", which has no sweeps); `history` holds the monitored relative errors.
    """

    core: Tensor
    factors: tuple[Tensor, ...]
    relative_error: float
    sweeps: int = 0
    converged: bool = True
    history: tuple[float, ...] = ()

    def reconstruct(self) -> Tensor:
        """x̂ [n_0, …], multiplied out."""
        x = self.core
        for mode, factor in enumerate(self.factors):
            x = mode_product(x, factor, mode)
        return x

    def error(self, x: Tensor | LowRankStack) -> float:
        """‖x - x̂‖/‖x‖ from the residual itself, in float64; x̂ is never whole in memory.

        Raises InputError if x has another shape. For x = 0 it is ‖x̂‖.
        """
        shape = tuple(u.shape[0] for u in self.factors)
        if tuple(x.shape) != shape:
            raise InputError(f"a tensor {list(x.shape)} was given; expected {list(shape)}")
        factors = list(self.factors)
        if isinstance(x, LowRankStack):
            with torch.no_grad():
                total = float(x.frobenius_norms().square().sum())
            error = stack_squared_error(x, self.core, factors)
        else:
            total = float(squared_norm(x.detach()))
            error = dense_squared_error(x.detach(), self.core, factors)
        return math.sqrt(error / total) if total > 0 else math.sqrt(error)

    def core_norms(self, mode: int) -> Tensor:
        """Frobenius norms [r_mode] of the core's slices along `mode`: the mode's singular values.

        >>> x = torch.diag(torch.tensor([3.0, 4.0]))
        >>> tucker(x, (2, 2)).core_norms(0)
        tensor([4., 3.], dtype=torch.float64)
        """
        return unfold(self.core, mode).square().sum(1).sqrt()

    def slice_spectral_norms(self, mode: int, rows: int | None = None) -> Tensor:
        """Largest singular value [r_mode] of every slice of the core along `mode`.

        A slice of more than two axes is unfolded along axis `rows` of the core, by default the
        longest one that is left.
        """
        left = [k for k in range(self.core.ndim) if k != mode % self.core.ndim]
        if rows is None:
            rows = max(left, key=lambda k: self.core.shape[k])
        if rows not in left:
            raise InputError(f"rows {rows} was given; expected one of the axes {left}")
        slices = self.core.movedim((mode, rows), (0, 1)).flatten(2)
        norms: Tensor = torch.linalg.matrix_norm(slices, ord=2)
        return norms

    def to_tensorly(self) -> Any:
        """The same decomposition as a `tensorly.tucker_tensor.TuckerTensor`.

        Arrays are those of TensorLy's current backend. Raises InputError without TensorLy.
        """
        tucker_class = tensorly_class("tucker_tensor", "TuckerTensor")
        return tucker_class((tensorly_array(self.core), [tensorly_array(u) for u in self.factors]))


def tucker(
    x: Tensor,
    ranks: Sequence[int],
    *,
    method: Method = "hooi",
    tolerance: float = 1e-5,
    sweeps: int = 50,
    seed: int = 0,
) -> TuckerTensor:
    """Tucker decomposition of x [n_0, …] with core [r_0, …]; without gradient.

    "hooi" (de Lathauwer et al. 2000b) starts at ST-HOSVD and sweeps until the relative error
    changes by less than `tolerance` (at most `sweeps` times). Subspaces of modes with more than
    256 entries on both sides follow by one warm-started block Krylov step a sweep instead of a full
    factorisation: the error still falls in every sweep. "sthosvd" (Vannieuwenhoven et al. 2012) is
    exact truncation mode by mode, from the shortest to the longest. "randomised" finds every
    subspace from a Gaussian sketch (Halko et al. 2011, one power step) and then makes at least one
    sweep of HOOI: the fastest, and up to a few per cent worse.

    Raises InputError for ranks outside 1 .. n_k, entries that are not finite, or no sweep.

    >>> x = torch.einsum("i,j,k->ijk", torch.ones(2), torch.ones(3), torch.ones(4))
    >>> fit = tucker(x, (1, 1, 1))
    >>> fit.relative_error < 1e-7, [list(u.shape) for u in fit.factors]
    (True, [[2, 1], [3, 1], [4, 1]])
    """
    wanted = _checked(tuple(x.shape), ranks, method, sweeps)
    with torch.no_grad():
        return _fit(DenseTarget(x, wanted), wanted, method, tolerance, sweeps, seed)


def tucker_of_stack(
    stack: LowRankStack,
    ranks: Sequence[int],
    *,
    method: Method = "hooi",
    tolerance: float = 1e-5,
    sweeps: int = 50,
    seed: int = 0,
) -> TuckerTensor:
    """Tucker decomposition of the stacked tensor [h, m, n] from its factors; without gradient.

    As `tucker`; no [m, n] slice is formed, and the work is O(h r (m + n)(r_1 + r_2)) a sweep. Here
    the sweeps of "randomised" are power steps (`power_sweeps`), a quarter of the work of HOOI's:
    6 of them come to within 0.3 % of its error on spectra without any fall, 3 on falling ones. For
    large slices "hooi" makes 3 of them before it begins.

    >>> stack = LowRankStack(torch.ones(2, 1, 3), torch.ones(2, 1, 4))
    >>> [list(u.shape) for u in tucker_of_stack(stack, (1, 1, 1)).factors]
    [[2, 1], [3, 1], [4, 1]]
    """
    wanted = _checked(stack.shape, ranks, method, sweeps)
    with torch.no_grad():
        target = StackTarget(stack)
        if method == "sthosvd":
            return _fit(target, wanted, method, tolerance, sweeps, seed)
        factors = target.start(_starting(wanted, method, seed))
        step = target.power_sweeps(factors)
        if method == "randomised":
            return _swept(target, factors, step, tolerance, sweeps)
        for _ in range(_WARM if target.is_large(wanted) else 0):
            step()
        return _swept(
            target,
            factors,
            lambda: target.sweep(factors, _following(wanted, factors)),
            tolerance,
            sweeps,
        )


def _checked(
    shape: tuple[int, ...], ranks: Sequence[int], method: str, sweeps: int
) -> tuple[int, ...]:
    wanted = tuple(int(r) for r in ranks)
    if len(wanted) != len(shape) or any(
        not 1 <= r <= n for r, n in zip(wanted, shape, strict=False)
    ):
        raise InputError(
            f"ranks {wanted} were given for a tensor {list(shape)}: expected one rank for each "
            "axis, from 1 to its length"
        )
    if method not in ("hooi", "sthosvd", "randomised"):
        raise InputError(f"method {method!r} was given; expected 'hooi', 'sthosvd' or 'randomised'")
    if method != "sthosvd" and sweeps < 1:
        raise InputError(f"sweeps={sweeps} was given: {method!r} makes at least one sweep")
    return wanted


def _fit(
    target: Target,
    ranks: tuple[int, ...],
    method: Method,
    tolerance: float,
    sweeps: int,
    seed: int,
) -> TuckerTensor:
    factors = target.start(_starting(ranks, method, seed))
    if method == "sthosvd":
        return _finished(target, factors, (), True)
    return _swept(
        target,
        factors,
        lambda: target.sweep(factors, _following(ranks, factors)),
        tolerance,
        sweeps,
    )


def _swept(
    target: Target,
    factors: list[Tensor],
    sweep: Callable[[], float],
    tolerance: float,
    sweeps: int,
) -> TuckerTensor:
    """Sweep until the error settles; `sweep` updates `factors` and returns ‖core‖²."""
    total = target.squared_norm
    history: list[float] = []
    converged = total == 0.0
    if not converged:
        for _ in range(sweeps):
            explained = sweep()
            history.append(math.sqrt(max(0.0, total - explained) / total))
            if len(history) > 1 and history[-2] - history[-1] < tolerance:
                converged = True
                break
    return _finished(target, factors, tuple(history), converged)


def _finished(
    target: Target, factors: list[Tensor], history: tuple[float, ...], converged: bool
) -> TuckerTensor:
    total = target.squared_norm
    core, factors = _standardised(target, factors)
    if total == 0.0:
        return TuckerTensor(core, tuple(factors), 0.0)
    square = total - float(squared_norm(core))
    if square < _CANCELLED * total:
        square = target.squared_error(core, factors)
    error = math.sqrt(square / total)
    return TuckerTensor(core, tuple(factors), error, len(history), converged, history)


def _starting(ranks: tuple[int, ...], method: Method, seed: int) -> Update:
    def update(mode: int, y: Tensor, axis: int) -> Tensor:
        rank, n = ranks[mode], y.shape[axis]
        rest = y.numel() // n
        if method == "randomised" and rank < min(n, rest):
            return sketched_subspace(unfold(y, axis), rank, seed + mode)
        if method == "hooi" and is_large(n, rest, rank):
            rows = unfold(y, axis)
            return iterated_subspace(rows, sketched_subspace(rows, rank, seed + mode), 1)
        return leading_subspace(y, rank, axis)

    return update


def _following(ranks: tuple[int, ...], factors: list[Tensor]) -> Update:
    def update(mode: int, y: Tensor, axis: int) -> Tensor:
        n = y.shape[axis]
        if is_large(n, y.numel() // n, ranks[mode]):
            return iterated_subspace(unfold(y, axis), factors[mode], 1)
        return leading_subspace(y, ranks[mode], axis)

    return update


def _standardised(target: Target, factors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Core and factors in float64, orthonormal to rounding, the core all-orthogonal."""
    exact = [_orthonormal(u) for u in factors]
    core = target.core(exact)
    turns = [torch.linalg.eigh(gram(core, k)).eigenvectors.flip(1) for k in range(core.ndim)]
    core = multi_mode_product(core, turns, transpose=True)
    return core, [u @ turn for u, turn in zip(exact, turns, strict=True)]


def _orthonormal(factor: Tensor) -> Tensor:
    """The nearest thing to `factor` that is orthonormal in float64; an identity stays one."""
    q, r = torch.linalg.qr(factor.double())
    basis: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return basis
