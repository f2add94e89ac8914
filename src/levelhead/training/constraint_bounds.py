"""How large the logits of a layer can be, from its weights and the length of its tokens.

    |scale · (q x_a + b_q)ᵀ R (k x_b + b_k)| ≤ scale · ‖[q b_q]ᵀ [k b_k]‖₂ · (‖x‖² + 1)

Axes as in `weights.attention_view`; a bias is one more column, which a token meets with a 1. Under
rotary positions R is a rotation that depends on a - b, and ‖q‖₂‖k‖₂ takes the place of ‖qᵀk‖₂.

Two examples. Behind an RMSNorm without gain ‖x‖ = √d. Behind a LayerNorm with gain γ and bias β the
norm is folded first (W diag(γ), b + W β), and ‖x‖ ≤ √d holds for what is left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.folding import fold_input_norm
from levelhead.weights.structure import Disentangled, Rope

__all__ = ["logit_bound", "uncapped"]

# A cap's artanh is infinite at the cap, which float32 rounds to from about 9 times the cap on.
_BELOW_CAP = 1 - 1e-7


def logit_bound(view: AttentionView, token_norm: float | None = None) -> Tensor:
    """A bound on the largest |logit| of every head [h], float64; without gradient.

    After scale and soft cap, without biases of position. `token_norm`: the largest ‖x‖ of what q
    and k read; by default √d behind the layer's own norm. Raises InputError where that is unknown
    (no norm, cross-attention), for a norm inside the layer, and for disentangled positions.

    >>> one = torch.ones(1, 1, 1)
    >>> logit_bound(AttentionView(q=2 * one, k=3 * one, v=one, o=one, scale=0.5), token_norm=2.0)
    tensor([12.], dtype=torch.float64)
    """
    if view.qk_norm is not None or view.latent is not None:
        raise InputError(f"{view.name}: its queries and keys are normed, which bounds them already")
    if isinstance(view.position, Disentangled):
        raise InputError(f"{view.name}: no bound is known for disentangled positions: measure")
    if token_norm is None:
        if view.input_norm.kind == "none" or view.cross:
            raise InputError(
                f"{view.name}: no norm tells how long its tokens can be: measure its largest "
                "logits (QKClip with source=capture.collect of a MapCapture), or give token_norm"
            )
        view, token_norm = fold_input_norm(view), math.sqrt(view.d)
    with torch.no_grad():
        biased = view.q_bias is not None or view.k_bias is not None
        left, right = view.q, view.k
        if biased:
            left = _with_bias(view.q, view.q_bias)
            right = _with_bias(view.k, view.k_bias)
        if isinstance(view.position, Rope):
            sizes = [torch.linalg.matrix_norm(x.double(), ord=2) for x in (left, right)]
            spectral = sizes[0] * sizes[1][list(view.kv_group)]
            spectral = spectral * max(1.0, view.position.temperature) ** 2
        else:
            spectral = LowRankStack(left, right, tuple(view.kv_group)).spectral_norms()
        bound: Tensor = view.logit_scale * spectral * (token_norm**2 + (1.0 if biased else 0.0))
        if view.soft_cap is not None:
            bound = view.soft_cap * torch.tanh(bound / view.soft_cap)
    return bound


def uncapped(logit: float, cap: float | None) -> float:
    """The logit before a soft cap c·tanh(·/c) that made it `logit`; without a cap itself.

    >>> uncapped(3.0, None), round(uncapped(5 * math.tanh(0.4), 5.0), 9)
    (3.0, 2.0)
    """
    if cap is None:
        return logit
    return cap * math.atanh(min(logit / cap, _BELOW_CAP))


def _with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    column = torch.zeros_like(weight[..., :1]) if bias is None else bias[..., None]
    return torch.cat((weight, column), dim=-1)
