"""How alike two sets of features are: debiased centred kernel alignment (CKA).

Axes. n examples (rows), p and q features: x [n, p], y [n, q], row a of both from one example.
K = x xᵀ and L = y yᵀ are Gram matrices [n, n], K̃ and L̃ the same with a zero diagonal.

    HSIC₁(K, L) = (tr K̃L̃ + 1ᵀK̃1 1ᵀL̃1/((n-1)(n-2)) - 2/(n-2) 1ᵀK̃L̃1)/(n(n-3))
    CKA = HSIC₁(K, L)/√(HSIC₁(K, K) HSIC₁(L, L))

(Song et al., JMLR 13 (2012) 1393, eq. 5; Nguyen, Raghu and Kornblith, arXiv 2010.15327, eq. 2.)
HSIC₁ is unbiased where rows are independent, so independent features have a CKA near 0, of either
sign; the plain estimator gives .33 for two independent normal features at n = p = 128.

Two examples. CKA(x, x) = 1, and so is CKA(x, 3 x Q + c) for an orthogonal Q and any row c. For
features that do not vary over the rows CKA says nothing: nan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from levelhead.base.errors import InputError

__all__ = ["cka_matrix", "debiased_cka"]

# Features whose spread is this share of their size are constant up to rounding.
_CONSTANT = 1e-12


def debiased_cka(x: Tensor, y: Tensor) -> Tensor:
    """CKA of x [n, p] and y [n, q] in float64: 1 alike, near 0 independent, may be negative.

    Unchanged by rotations of the features, a factor and an added row. nan where a set of features
    is the same in every row. Computed from feature products or Gram matrices, whichever is less
    work. Source: top of this module.

    Raises InputError for other numbers of rows, fewer than 4, or values that are not finite.

    >>> x = torch.randn(20, 3)
    >>> round(float(debiased_cka(x, 2 * x.flip(1) + 1)), 6)
    1.0
    """
    return cka_matrix((x, y))[0, 1]


def cka_matrix(features: Sequence[Tensor]) -> Tensor:
    """CKA of each pair among m sets of features [n, p_i]: [m, m], float64, ones on the diagonal.

    Rows and columns of constant features are nan. Raises InputError as `debiased_cka`.

    >>> x = torch.randn(20, 3)
    >>> [[round(v, 6) for v in row] for row in cka_matrix([x, -x, torch.ones(20, 1)]).tolist()]
    [[1.0, 1.0, nan], [1.0, 1.0, nan], [nan, nan, nan]]
    """
    with torch.no_grad():
        centred = _centred(features)
        hsic = _hsic(centred)
        scale = hsic.diagonal().clamp(min=0).sqrt()
        found = (hsic + hsic.mT) / (2 * scale[:, None] * scale)
        found.fill_diagonal_(1.0)
        constant = torch.tensor(
            [not bool(x.any()) for x in centred], dtype=torch.bool, device=found.device
        )
        constant |= scale == 0
        nan = torch.full_like(found, float("nan"))
        return torch.where(constant[:, None] | constant, nan, found)


def _centred(features: Sequence[Tensor]) -> list[Tensor]:
    """In float64, minus the mean row, of size about 1 (CKA sees neither); 0 where constant."""
    if not features:
        raise InputError("no features were given; expected tensors [n, p], a row per example")
    n = len(features[0]) if features[0].ndim else 0
    found: list[Tensor] = []
    for x in features:
        if x.ndim != 2 or len(x) != n or not x.shape[1]:
            shapes = ", ".join(str(list(f.shape)) for f in features[:6])
            raise InputError(
                f"features {shapes} were given; expected [n, p] with the same n, a row per example"
            )
        whole = x.double()
        centred = whole - whole.mean(0)
        spread, size = (torch.linalg.vector_norm(t) for t in (centred, whole))
        if not bool(torch.isfinite(size)):
            raise InputError("features hold values that are not finite: leave those examples out")
        varies = spread > _CONSTANT * size
        found.append(torch.where(varies, centred / torch.where(varies, spread, 1.0), 0.0))
    if n < 4:
        raise InputError(f"{n} examples were given; the unbiased estimator needs at least 4")
    return found


def _hsic(features: Sequence[Tensor]) -> Tensor:
    """HSIC₁ of every pair [m, m].

    Only tr K̃L̃ takes work: by feature products n·(Σp)² or by Gram matrices n²·(Σp + m²).
    """
    n, m = len(features[0]), len(features)
    width = sum(x.shape[1] for x in features)
    square = torch.stack([x.square().sum(1) for x in features])  # [m, n], diagonals of K
    rows = torch.stack([x @ x.sum(0) for x in features]) - square  # [m, n], K̃1
    sums = rows.sum(1)
    traces = _by_grams(features) if n * (width + m * m) < width * width else _by_products(features)
    traces = traces - square @ square.mT
    means = torch.outer(sums, sums) / ((n - 1) * (n - 2))
    return (traces + means - 2 / (n - 2) * rows @ rows.mT) / (n * (n - 3))


def _by_grams(features: Sequence[Tensor]) -> Tensor:
    """tr KL of every pair from the Gram matrices, a block of rows at a time."""
    n, m = len(features[0]), len(features)
    found = features[0].new_zeros(m, m)
    step = max(1, 2**24 // (n * m))
    for start in range(0, n, step):
        block = torch.stack([(x[start : start + step] @ x.mT).reshape(-1) for x in features])
        found += block @ block.mT
    return found


def _by_products(features: Sequence[Tensor]) -> Tensor:
    """tr KL = ‖xᵀy‖² of every pair, one set against all at a time."""
    joined = torch.cat(list(features), dim=1)
    widths = torch.tensor([x.shape[1] for x in features], device=joined.device)
    owner = torch.repeat_interleave(torch.arange(len(features), device=joined.device), widths)
    found = joined.new_zeros(len(features), len(features))
    for i, x in enumerate(features):
        found[i].index_add_(0, owner, (x.mT @ joined).square().sum(0))
    return found
