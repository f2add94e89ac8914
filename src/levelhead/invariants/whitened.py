"""Numbers of a layer on its data: forms seen through the covariance of what the layer reads.

Axes as in `attention_view`. The data enter through a root L [d, n] of C = L Lᵀ = E[x xᵀ], x the
layer's input behind its norm: L' = A L if inputs move by x → A x, and values speak of L Lᵀ alone.
The whitened form of a head is Lᵀ B_i L, with the singular values of C^½ B_i C^½.

Two examples. C = I gives the plain spectra. A direction that no token has (C n = 0) is gone from
them, whatever the weights say there: such is the vector of ones behind LayerNorm.

These hold in any basis of the residual stream, orthonormal or not; plain spectra need O(d).

Source of the entropy bound: Zhai et al. 2023 (arXiv 2303.06296), Theorem 3.1, with the layer's own
logit scale inside (the paper's logits have none).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.invariants.entry import QK_FORM, QK_RATIO, Invariant, Verdict, declare
from levelhead.invariants.heads import coherence, normalised
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.structure import NoPosition

__all__ = [
    "ENTRIES",
    "centred_row_entropy_bound",
    "entropy_lower_bound",
    "spectral_entropy_bound",
    "typical_row_entropy_bound",
    "whitened_ov",
    "whitened_qk",
]

TOKENS = 128


# ── functions ──


def whitened_qk(view: AttentionView, root: Tensor) -> LowRankStack:
    """Lᵀ B_i L as a stack [h, n, n], for a root L [d, n] of the inputs' covariance."""
    root = root.to(view.q.device)
    dtype = torch.promote_types(view.dtype, root.dtype)
    q, k = view.q.to(dtype) @ root.to(dtype), view.k.to(dtype) @ root.to(dtype)
    return LowRankStack(q, k, view.qk.group)


def whitened_ov(view: AttentionView, root: Tensor) -> LowRankStack:
    """M_i L as a stack [h, d_out, n]."""
    root = root.to(view.q.device)
    dtype = torch.promote_types(view.dtype, root.dtype)
    return LowRankStack(view.o.mT.to(dtype), view.v.to(dtype) @ root.to(dtype), view.ov.group)


def entropy_lower_bound(size: Tensor | float, tokens: int) -> Tensor:
    """The least entropy (nat) of softmax over `tokens` logits whose length is at most `size`.

    log(1 + (T-1)β) + R √(T(T-1)) β/(1 + (T-1)β), β = exp(-R √(T/(T-1))). Tight; 0 logits give
    log T, and it falls to 0. Raises InputError for fewer than two tokens or a negative size.

    >>> round(float(entropy_lower_bound(0.0, 8)), 6) == round(math.log(8), 6)
    True
    """
    if tokens < 2:
        raise InputError(f"tokens={tokens} was given; expected at least 2")
    r = torch.as_tensor(size, dtype=torch.float64)
    if bool((r < 0).any()):
        raise InputError("a negative length of logits was given")
    others = tokens - 1
    # In units of the smallest exponential nothing overflows.
    beta = torch.exp(-r * math.sqrt(tokens / others))
    mass = 1 + others * beta
    return torch.log(mass) + r * math.sqrt(tokens * others) * beta / mass


def spectral_entropy_bound(
    view: AttentionView, tokens: int = TOKENS, input_size: float | None = None
) -> Tensor:
    """Theorem 3.1 [h]: R = scale·‖B_i‖₂·`input_size`, `input_size` = ‖X Xᵀ‖₂ of the tokens.

    By default `input_size` is `tokens`, that of many tokens with E[x xᵀ] = I. Every row of
    attention of such inputs has at least this entropy; often far more (it is soon vacuous).
    """
    size = float(tokens) if input_size is None else input_size
    return entropy_lower_bound(view.logit_scale * view.qk.spectral_norms() * size, tokens)


def typical_row_entropy_bound(view: AttentionView, root: Tensor, tokens: int = TOKENS) -> Tensor:
    """The bound at the root mean square length of a centred row of logits: [h].

    R² = T·scale²·tr(B C Bᵀ C), for queries and keys drawn apart from tokens of covariance C.
    Softmax does not see a row's mean, so that centred rows count; what is bounded is a typical
    row, not every one.
    """
    sizes = whitened_qk(view, root).frobenius_norms()
    return entropy_lower_bound(view.logit_scale * math.sqrt(tokens) * sizes, tokens)


def centred_row_entropy_bound(logits: Tensor) -> Tensor:
    """The bound for each row of actual logits [..., T], at its length without its mean: [...].

    >>> centred_row_entropy_bound(torch.full((1, 4), 7.0)).exp().round(decimals=6)
    tensor([4.], dtype=torch.float64)
    """
    rows = logits.double()
    rows = rows - rows.mean(-1, keepdim=True)
    return entropy_lower_bound(torch.linalg.vector_norm(rows, dim=-1), rows.shape[-1])


# ── where they exist ──


def _one_sequence(view: AttentionView) -> str | None:
    if view.cross or view.d_source != view.d:
        return "keys read another sequence, whose covariance is another"
    return None


def _unnormed(view: AttentionView) -> str | None:
    if view.qk_norm is not None:
        return "queries and keys are normed: logits are no bilinear form of the input"
    return None


def _bilinear(view: AttentionView) -> str | None:
    """Logits must be scale · x_aᵀ B x_b and nothing else (a soft cap only shortens them)."""
    if view.weighting != "softmax":
        return "rows of attention are no distribution"
    if view.qk_norm is not None:
        return _unnormed(view)
    if not isinstance(view.position, NoPosition):
        return "logits also depend on positions"
    if view.q_bias is not None:
        return "a bias of queries adds to the logits"
    if view.latent is not None:
        return "queries and keys are divided by norms of their token"
    return _one_sequence(view)


def _several(view: AttentionView) -> str | None:
    return "there is one head" if view.heads == 1 else _one_sequence(view)


# ── rows of the catalogue ──

INVARIANT = Verdict.INVARIANT
# What is in front of the layer moves the covariance along.
_QK = declare(QK_FORM, input_gain=INVARIANT, input_mean=INVARIANT)
_QK_RATIO = declare(QK_RATIO, input_gain=INVARIANT, input_mean=INVARIANT)
_OV = declare(_QK, qk_scale=INVARIANT, qk_mean=INVARIANT)
_READS = frozenset({"q", "k"})
_SOURCE = "derived: the metric of the data, invariant under GL(d)"


def _data(name: str, function: Callable[..., Tensor], formula: str, **more: Any) -> Invariant:
    settings: dict[str, Any] = {
        "unit": "q·k",
        "source": _SOURCE,
        "range": "≥ 0",
        "degree": 2,
        "kind": "data",
        "reads": _READS,
        "symmetries": _QK,
        "applies": _one_sequence,
        "per": ("head",),
        **more,
    }
    return Invariant(name, function, formula, **settings)


ENTRIES: tuple[Invariant, ...] = (
    _data(
        "whitened_qk_spectrum",
        lambda view, root: whitened_qk(view, root).singular_values(),
        "σ_a(C^½ B_i C^½)",
        range="≥ 0, falling",
    ),
    _data(
        "whitened_qk_effective_rank",
        lambda view, root: whitened_qk(view, root).effective_ranks(),
        "exp of the entropy of σ/Σσ of C^½ B_i C^½",
        unit="1",
        range="1 … d_k",
        degree=0,
        symmetries=_QK_RATIO,
        applies=lambda view: (
            _one_sequence(view) or ("a head has one singular value" if view.d_k == 1 else None)
        ),
    ),
    _data(
        "whitened_qk_cosines",
        lambda view, root: normalised(whitened_qk(view, root).head_gram()),
        "cosines of C^½ B_i C^½ and C^½ B_j C^½",
        unit="1",
        range="-1 … 1",
        degree=0,
        symmetries=_QK_RATIO,
        applies=_several,
        per=("head", "head"),
        span=1.0,
    ),
    _data(
        "whitened_qk_coherence",
        lambda view, root: coherence(whitened_qk(view, root).head_gram()),
        "mean over i ≠ j of the squared cosines of C^½ B_i C^½",
        unit="1",
        range="0 … 1",
        degree=0,
        symmetries=_QK_RATIO,
        applies=_several,
        per=(),
        span=1.0,
    ),
    _data(
        "whitened_ov_spectrum",
        lambda view, root: whitened_ov(view, root).singular_values(),
        "σ_a(M_i C^½)",
        unit="y",
        range="≥ 0, falling",
        reads=frozenset({"v", "o"}),
        symmetries=_OV,
    ),
    _data(
        "logit_rms",
        lambda view, root: view.logit_scale * whitened_qk(view, root).frobenius_norms(),
        "scale·‖C^½ B_i C^½‖_F: root mean square of logits of tokens drawn apart",
        unit="logit",
        applies=lambda view: _one_sequence(view) or _unnormed(view),
    ),
    _data(
        "entropy_bound_typical",
        typical_row_entropy_bound,
        f"Thm 3.1 at R² = T·scale²·tr(B C Bᵀ C), T = {TOKENS}",
        unit="nat",
        source="Zhai et al. 2023 (arXiv 2303.06296), Thm 3.1, for centred rows",
        range="0 … log T",
        degree=None,
        applies=_bilinear,
        span=1.0,
    ),
    Invariant(
        "entropy_bound",
        spectral_entropy_bound,
        f"Thm 3.1 at R = scale·σ_1(B_i)·T, T = {TOKENS} tokens with E[x xᵀ] = I",
        "nat",
        "Zhai et al. 2023 (arXiv 2303.06296), Thm 3.1",
        "0 … log T",
        None,
        "exact",
        _READS,
        # Under generators that move σ_1 it may be 0 before and after, to rounding.
        declare(QK_FORM, input_gain=Verdict.GENERIC, input_mean=Verdict.GENERIC),
        _bilinear,
        ("head",),
        span=1.0,
    ),
)
