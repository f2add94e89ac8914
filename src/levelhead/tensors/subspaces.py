"""Leading left singular subspaces of unfoldings, exact or by warm-started block iteration.

Axes: y [n, m]; the answer is [n, rank] with orthonormal columns, in the dtype of y.

Accuracy of the exact path. The eigenvectors of the Gram y yᵀ, in float64, lose at most about
ε σ₁/σ_rank of y. They are used while σ_rank > 3·10⁻⁵ σ₁, where that is below 10⁻¹¹; otherwise the
subspace comes from the SVD of y itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.tensors.multilinear import gram, unfold

__all__ = [
    "is_large",
    "iterated_subspace",
    "leading_subspace",
    "random_matrix",
    "sketched_subspace",
]

_GRAM_LIMIT = 1e-9  # of λ_rank/λ₁, that is (σ_rank/σ₁)²
_LARGE = 256


def is_large(n: int, rest: int, rank: int) -> bool:
    """Whether block iteration from a good start is much cheaper than a full factorisation."""
    return min(n, rest) > _LARGE and 2 * rank <= min(n, rest)


def random_matrix(rows: int, columns: int, like: Tensor, seed: int) -> Tensor:
    """Standard normal [rows, columns], the same numbers on every device."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=draw, dtype=torch.float64).to(like)


def leading_subspace(x: Tensor, rank: int, axis: int = 0) -> Tensor:
    """Exact leading subspace [n, rank] of the unfolding y [n, m] of x along `axis`.

    Beyond min(n, m) columns it is completed by any orthonormal ones.
    """
    n = x.shape[axis]
    m = x.numel() // n
    kept = min(rank, n, m)
    squares = gram(x, axis) if n <= m else _other_gram(unfold(x, axis))
    values, vectors = torch.linalg.eigh(squares)
    if float(values[-kept]) > _GRAM_LIMIT * float(values[-1]):
        basis = vectors[:, -kept:].flip(1)
        if n > m:
            basis = torch.linalg.qr(unfold(x, axis).double() @ basis).Q
    else:
        basis = torch.linalg.svd(unfold(x, axis).double(), full_matrices=False).U[:, :kept]
    if kept < rank:
        basis = torch.linalg.qr(torch.cat([basis, random_matrix(n, rank - kept, basis, 0)], 1)).Q
    answer: Tensor = basis.to(x.dtype)
    return answer


def _other_gram(y: Tensor) -> Tensor:
    wide = y.double()
    return wide.mT @ wide


def iterated_subspace(y: Tensor, start: Tensor, rounds: int) -> Tensor:
    """`rounds` of block Krylov iteration from `start` [n, rank]; never decreases ‖Uᵀ y‖.

    With G = y yᵀ a round takes the best subspace (Rayleigh-Ritz) within that of G U and G² U, for
    five products of y with a matrix of `rank` columns.
    """
    basis, rank = start, start.shape[1]
    for _ in range(rounds):
        power = torch.linalg.qr(y @ (y.mT @ basis)).Q
        first = y.mT @ power
        image = y @ first
        for _ in range(2):  # twice is enough for orthogonality to rounding (Giraud et al. 2005)
            image = image - power @ (power.mT @ image)
        more = torch.linalg.qr(image).Q
        rows = torch.cat([first, y.mT @ more], 1)
        if y.dtype == torch.float64:  # eigenvalues would lose what is below 1e-8 of the largest
            turn = torch.linalg.svd(torch.linalg.qr(rows, mode="r").R).Vh.mT[:, :rank]
        else:
            turn = torch.linalg.eigh(rows.mT @ rows).eigenvectors[:, -rank:].flip(1)
        basis = torch.linalg.qr(power @ turn[:rank] + more @ turn[rank:]).Q
    return basis


def sketched_subspace(y: Tensor, rank: int, seed: int) -> Tensor:
    """Basis [n, rank] of y yᵀ y Ω with Gaussian Ω: one power step (Halko et al. 2011)."""
    sketch = torch.linalg.qr(y @ random_matrix(y.shape[1], rank, y, seed)).Q
    basis: Tensor = torch.linalg.qr(y @ (y.mT @ sketch)).Q
    return basis
