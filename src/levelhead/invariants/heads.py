"""How alike a layer's heads are: functions of the Gram matrix of their forms, values and gradients.

Axes. G [h, h] with G_ij = ⟨A_i, A_j⟩ for forms A = B, maps A = M, or B ⊗ M (the entry-wise product
of both Gram matrices). C is G divided by lengths, C_ij = G_ij/√(G_ii G_jj). Every function takes
either, unless it says otherwise; what is meant is said by the name of a catalogue entry.

Two examples. Three orthogonal heads: C = I, coherence 0, three effective heads. Three copies of one
head: C = 1, coherence 1, one effective head.

All are finite and differentiable once at collapsed, at orthogonal and at zero heads. At exact
collapse every gradient is zero (a saddle): only noise leaves it. Second derivatives of those that
need eigenvalues are refused. The orthonormality of a Tucker factor over heads is no substitute:
HOOI makes UᵀU = I whatever the heads are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView

__all__ = [
    "Which",
    "coherence",
    "entropy_rank",
    "head_gram",
    "log_det",
    "normalised",
    "nuclear_ratio",
    "participation_loss",
    "participation_ratio",
]

Which = Literal["qk", "ov", "both"]

# A head whose energy is below this share of the heads' mean counts as having no direction.
_GUARD = 1e-12
_LOG_FLOOR = 1e-12


def head_gram(
    view: AttentionView, which: Which = "qk", *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """⟨A_i, A_j⟩ [h, h] in `dtype` from factors, for A = B, M or B ⊗ M; O(h² d_k² d).

    Raises InputError for another `which`.

    >>> one = torch.eye(2)[:, None, :]
    >>> head_gram(AttentionView(q=one, k=2 * one, v=one, o=one.mT))
    tensor([[4., 0.],
            [0., 4.]], dtype=torch.float64)
    """
    if which == "both":
        return view.qk.head_gram(dtype=dtype) * view.ov.head_gram(dtype=dtype)
    if which not in ("qk", "ov"):
        raise InputError(f"{which!r} was given; expected 'qk', 'ov' or 'both'")
    return (view.qk if which == "qk" else view.ov).head_gram(dtype=dtype)


def normalised(gram: Tensor) -> Tensor:
    """C [h, h] with C_ij = G_ij/√(G_ii G_jj); a zero head has zeros, on the diagonal too."""
    _square(gram)
    energy = gram.diagonal()
    mean = energy.detach().mean()
    floor = (_GUARD * mean).clamp_min(torch.finfo(gram.dtype).tiny)
    # Where there is nothing at all, slopes would be those of a division by the tiniest number.
    length = energy.maximum(torch.where(mean > 0, floor, 1.0)).sqrt()
    return gram / length[:, None] / length[None, :]


def coherence(gram: Tensor) -> Tensor:
    """Σ_{i≠j} C_ij²/(h(h-1)), a scalar in [0, 1]; 0 for one head.

    >>> coherence(torch.ones(3, 3)), coherence(torch.eye(3))
    (tensor(1.), tensor(0.))
    """
    c = normalised(gram)
    h = len(c)
    if h == 1:
        return c.sum() * 0
    off = c - torch.diag(c.diagonal())
    return off.square().sum() / (h * (h - 1))


def participation_ratio(matrix: Tensor) -> Tensor:
    """(tr G)²/‖G‖_F², a scalar in [1, h] (0 for zero): heads that take part.

    Of C it is h²/Σ C_ij², a falling function of coherence.

    >>> participation_ratio(torch.eye(3))
    tensor(3.)
    """
    _square(matrix)
    total = matrix.square().sum()
    safe = torch.where(total > 0, total, 1.0)
    return matrix.diagonal().sum().square() / safe


def participation_loss(matrix: Tensor) -> Tensor:
    """1 - (PR - 1)/(h - 1), a scalar from 0 (all heads differ) to 1 (one is left); 0 for h = 1."""
    h = len(matrix)
    if h == 1:
        return matrix.sum() * 0
    return 1 - (participation_ratio(matrix) - 1) / (h - 1)


def entropy_rank(matrix: Tensor) -> Tensor:
    """exp(-Σ p log p) with p = λ(G)/tr G, a scalar in [1, h] (0 for zero).

    Its gradient has no 1/(λ_i - λ_j). Logarithms stop at 1e-12. Source: Roy & Vetterli 2007.

    >>> round(float(entropy_rank(torch.eye(3))), 5)
    3.0
    """
    _square(matrix)
    total = matrix.diagonal().sum()
    alive = total > 0
    p = matrix / torch.where(alive, total, 1.0)
    entropy = _trace_of(p, _entropy_term, _entropy_slope)
    return torch.where(alive, entropy.exp(), 0.0)


def log_det(gram: Tensor, eps: float = 1e-3) -> Tensor:
    """-(1/h) log det(C + εI) + log(1 + ε), a scalar ≥ 0: 0 for orthogonal heads.

    Its gradient is the strongest near collapse, and bounded by ‖∂C‖/(hε). Raises InputError for
    eps ≤ 0.
    """
    if eps <= 0:
        raise InputError(f"eps={eps} was given; expected a positive number")
    c = normalised(gram)
    eye = torch.eye(len(c), dtype=c.dtype, device=c.device)
    # A zero head counts as one of its own, not as a copy of nothing.
    c = c + torch.diag((c.diagonal() == 0).to(c.dtype))
    triangle = torch.linalg.cholesky(c + eps * eye)
    whole = 2 * triangle.diagonal().log().sum()
    return torch.as_tensor(torch.log1p(c.new_tensor(eps)) - whole / len(c))


def nuclear_ratio(matrix: Tensor, eps: float = 1e-3) -> Tensor:
    """(Σ √(λ + ε²λ̄))²/(h Σ λ), a scalar from 1/h to 1, both up to ε (0 for zero).

    Without ε: ‖𝓑_(1)‖_*²/(h ‖𝓑‖²) of the stacked forms' head unfolding. Raises InputError for
    eps ≤ 0.
    """
    if eps <= 0:
        raise InputError(f"eps={eps} was given; expected a positive number")
    _square(matrix)
    h = len(matrix)
    total = matrix.diagonal().sum()
    alive = total > 0
    p = matrix / torch.where(alive, total, 1.0)
    eye = torch.eye(h, dtype=p.dtype, device=p.device)
    # No eigenvalue of a Gram matrix lies below the shift: what does is rounding, of float32 say,
    # and a root's slope there would be noise of any size.
    floor = eps**2 / h
    roots = _trace_of(
        p + floor * eye, partial(_root_term, floor=floor), partial(_root_slope, floor=floor)
    )
    return torch.where(alive, roots.square() / h, 0.0)


# ── traces of functions of a symmetric matrix ──


def _entropy_term(p: Tensor) -> Tensor:
    return -p.clamp_min(0) * p.clamp_min(_LOG_FLOOR).log()


def _entropy_slope(p: Tensor) -> Tensor:
    return -p.clamp_min(_LOG_FLOOR).log() - (p > _LOG_FLOOR).to(p)


def _root_term(p: Tensor, floor: float) -> Tensor:
    return p.clamp_min(floor).sqrt()


def _root_slope(p: Tensor, floor: float) -> Tensor:
    return 0.5 / p.clamp_min(floor).sqrt()


def _trace_of(
    matrix: Tensor, term: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]
) -> Tensor:
    """Σ_a f(λ_a), with the gradient V f'(λ) Vᵀ: finite where eigenvalues coincide."""
    value: Tensor = _SpectralTrace.apply(matrix, term, slope)  # type: ignore[no-untyped-call]
    return value


class _SpectralTrace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        matrix: Tensor,
        term: Callable[[Tensor], Tensor],
        slope: Callable[[Tensor], Tensor],
    ) -> Tensor:
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        ctx.save_for_backward(values, vectors)
        ctx.slope = slope
        return term(values).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        values, vectors = ctx.saved_tensors
        return grad * (vectors * ctx.slope(values)) @ vectors.mT, None, None


def _square(matrix: Tensor) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"a Gram matrix {list(matrix.shape)} was given; expected [h, h]")
