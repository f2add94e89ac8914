"""Unfoldings, mode products, norms and spectra of dense tensors.

Axes. A mode is an axis, counted from 0. The mode-k unfolding of x [n_0, …, n_{N-1}] is the matrix
[n_k, Π_{j≠k} n_j] whose columns run over the other axes in their order, the last one fastest
(C order). This is the convention of TensorLy and differs from Kolda & Bader's only in the order of
the columns: Gram matrices, singular values and ranks are the same.

Two examples, x = [[1, 2, 3], [4, 5, 6]] [2, 3]: the mode-0 unfolding is x, the mode-1 unfolding
is xᵀ. For y [2, 3, 4], column 4·i + k of the mode-1 unfolding is the fibre y[i, :, k].

Precision. float16 and bfloat16 are computed in float32. Norms and Gram matrices are summed in
float64 whatever the input: a float32 sum over 5·10⁷ squares is wrong in the third digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from levelhead.base.errors import InputError

__all__ = [
    "fold",
    "gram",
    "in_chunks",
    "mode_product",
    "mode_singular_values",
    "multi_mode_product",
    "multilinear_rank",
    "norm",
    "numerical_rank",
    "squared_norm",
    "unfold",
    "working",
]

# Entries that are turned into float64 at a time: 32 MB.
_CHUNK = 2**22


def working(x: Tensor) -> Tensor:
    """x in the precision it is computed in: float16 and bfloat16 become float32.

    Raises InputError for integer and complex tensors.
    """
    if not x.is_floating_point():
        raise InputError(f"a tensor of {x.dtype} was given; expected a real floating-point tensor")
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unfold(x: Tensor, mode: int) -> Tensor:
    """Mode-`mode` unfolding [n_mode, rest] of x; a copy unless the axis is already the first.

    >>> unfold(torch.arange(6.0).reshape(2, 3), 1)
    tensor([[0., 3.],
            [1., 4.],
            [2., 5.]])
    """
    mode = _axis(x, mode)
    return x.movedim(mode, 0).reshape(x.shape[mode], -1)


def fold(matrix: Tensor, mode: int, shape: Sequence[int]) -> Tensor:
    """The tensor of the given `shape` whose mode-`mode` unfolding is `matrix`.

    >>> x = torch.randn(2, 3, 4)
    >>> torch.equal(fold(unfold(x, 1), 1, x.shape), x)
    True
    """
    if not -len(shape) <= mode < len(shape):
        raise InputError(f"mode {mode} was given for {len(shape)} axes")
    mode %= len(shape)
    rest = [*shape[:mode], *shape[mode + 1 :]]
    if tuple(matrix.shape) != (shape[mode], math.prod(rest)):
        raise InputError(
            f"a matrix {list(matrix.shape)} cannot be the mode-{mode} unfolding of a tensor "
            f"{list(shape)}: expected [{shape[mode]}, {math.prod(rest)}]"
        )
    return matrix.reshape(shape[mode], *rest).movedim(0, mode)


def mode_product(x: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """x ×_mode matrix: axis `mode` of x, of length n, is multiplied by `matrix` [r, n].

    >>> mode_product(torch.ones(2, 3), torch.tensor([[1.0, 2.0]]), 0)
    tensor([[3., 3., 3.]])
    """
    mode = _axis(x, mode)
    if matrix.ndim != 2 or matrix.shape[1] != x.shape[mode]:
        raise InputError(
            f"a matrix {list(matrix.shape)} cannot multiply axis {mode} of a tensor "
            f"{list(x.shape)}: expected [r, {x.shape[mode]}]"
        )
    if mode == x.ndim - 1:
        return x @ matrix.mT
    before, after = math.prod(x.shape[:mode]), math.prod(x.shape[mode + 1 :])
    if before > after:  # many thin slices: one large product is faster than a batch of small ones
        return (x.movedim(mode, -1) @ matrix.mT).movedim(-1, mode)
    slices = x.reshape(before, x.shape[mode], after)
    if before == 1:
        product = (matrix @ slices[0])[None]
    else:
        product = torch.bmm(matrix.expand(before, -1, -1), slices)
    return product.reshape(*x.shape[:mode], matrix.shape[0], *x.shape[mode + 1 :])


def multi_mode_product(
    x: Tensor,
    matrices: Sequence[Tensor | None],
    *,
    skip: int | None = None,
    transpose: bool = False,
) -> Tensor:
    """x ×_0 A_0 ×_1 A_1 …; `None` and mode `skip` leave an axis alone; A_kᵀ if `transpose`.

    The products are made in the order of the least work, which is that of falling 1/r - 1/n.
    """
    if len(matrices) != x.ndim:
        raise InputError(f"{len(matrices)} matrices were given for a tensor of {x.ndim} axes")
    todo = {k: a.mT if transpose else a for k, a in enumerate(matrices) if a is not None}
    if skip is not None:
        todo.pop(_axis(x, skip), None)
    for mode in sorted(todo, key=lambda k: 1 / todo[k].shape[1] - 1 / todo[k].shape[0]):
        x = mode_product(x, todo[mode], mode)
    return x


def in_chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of axis 0 and what they hold in float64, about 32 MB at a time."""
    step = max(1, _CHUNK // max(1, math.prod(x.shape[1:])))
    for start in range(0, x.shape[0], step):
        part = slice(start, min(start + step, x.shape[0]))
        yield part, x[part].double()


def squared_norm(x: Tensor) -> Tensor:
    """Σ x², a float64 scalar tensor on the device of x; differentiable.

    >>> float(squared_norm(torch.tensor([3.0, 4.0])))
    25.0
    """
    if x.requires_grad or x.numel() <= _CHUNK:
        x = x.double()
        return (x * x).sum()
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for _, part in in_chunks(x if x.ndim > 1 else x[:, None]):
        total += (part * part).sum()
    return total


def norm(x: Tensor) -> Tensor:
    """Frobenius norm √Σ x², a float64 scalar tensor."""
    return squared_norm(x).sqrt()


def gram(x: Tensor, mode: int) -> Tensor:
    """Gram matrix [n_mode, n_mode] of the mode-`mode` unfolding, in float64.

    Raises InputError for tensors that are not real floating point.
    """
    mode = _axis(working(x), mode)
    n, after = x.shape[mode], math.prod(x.shape[mode + 1 :])
    if after == 1 or n == x.numel():
        rows = unfold(x, mode).double()
        return rows @ rows.mT
    total = torch.zeros(n, n, dtype=torch.float64, device=x.device)
    long = after >= n  # else the slices are thin: gather them into one wide matrix a chunk
    for _, part in in_chunks(x.reshape(-1, n, after)):
        total = total + (sum(s @ s.mT for s in part) if long else _wide_gram(part))
    return total


def _wide_gram(slices: Tensor) -> Tensor:
    rows = slices.movedim(1, 0).reshape(slices.shape[1], -1)
    return rows @ rows.mT


def mode_singular_values(x: Tensor, mode: int) -> Tensor:
    """Singular values [min(n_mode, rest)] of the mode-`mode` unfolding, falling, in float64.

    A float64 tensor goes through QR, and small values are accurate to 1e-16 of the largest one.
    Narrower inputs go through the Gram matrix in float64, which is accurate to about 1e-8 of the
    largest: less than the rounding of the input itself, at a fraction of the cost.

    >>> mode_singular_values(torch.diag(torch.tensor([3.0, 4.0])), 1)
    tensor([4., 3.], dtype=torch.float64)
    """
    mode = _axis(working(x), mode)
    rest = x.numel() // max(1, x.shape[mode])
    if x.dtype != torch.float64 and x.shape[mode] <= rest:
        energies: Tensor = torch.linalg.eigvalsh(gram(x, mode))
        return energies.clamp_min(0).sqrt().flip(0)
    tall = unfold(x, mode).double()
    tall = tall if tall.shape[0] >= tall.shape[1] else tall.mT
    values: Tensor = torch.linalg.svdvals(torch.linalg.qr(tall, mode="r").R)
    return values


def numerical_rank(values: Tensor, tolerance: float) -> int:
    """How many of `values` (falling singular values) exceed `tolerance` times the first."""
    if values.numel() == 0:
        return 0
    return int((values > tolerance * values[0]).sum())


def multilinear_rank(x: Tensor, tolerance: float | None = None) -> tuple[int, ...]:
    """Numerical rank of every unfolding of x.

    A singular value counts if it exceeds `tolerance` times the largest of its mode. By default the
    tolerance is max(n_mode, rest) machine epsilons of the dtype of x (de Lathauwer et al. 2000,
    with the tolerance of `numpy.linalg.matrix_rank`), and for float32 and narrower at least 1e-7,
    which is what their Gram matrices resolve.

    >>> multilinear_rank(torch.ones(2, 3, 4, dtype=torch.float64))
    (1, 1, 1)
    """
    ranks = []
    for mode, n in enumerate(x.shape):
        limit = tolerance
        if limit is None:
            limit = max(n, x.numel() // max(1, n)) * torch.finfo(x.dtype).eps
            limit = limit if x.dtype == torch.float64 else max(limit, 1e-7)
        ranks.append(numerical_rank(mode_singular_values(x, mode), limit))
    return tuple(ranks)


def _axis(x: Tensor, mode: int) -> int:
    if not -x.ndim <= mode < x.ndim:
        raise InputError(f"mode {mode} was given for a tensor of {x.ndim} axes {list(x.shape)}")
    return mode % x.ndim
