"""What penalties measure in one layer: a scalar of an AttentionView, with its declared symmetries.

Axes as in `attention_view`. A term is an `Invariant` of the catalogue's kind whose value is one
number, so that `invariants.symmetry.verify` holds it against its declaration. Small is good: every
term falls towards what its penalty wants.

Forms. "qk" means the forms B_i, "ov" the maps M_i, "both" the mean of the two numbers, "product"
(where heads are compared) B_i ⊗ M_i, whose Gram matrix is the entry-wise product of both. Under
rotary positions B_i is the form of a token with itself. Under a norm of queries and keys gains and
centring are put into B_i (`invariants.spectral.effective_qk`); what is left free is its size, so
that ratios are terms of such a layer and norms of B_i are refused.

Two examples. Heads that are copies have coherence 1, orthogonal ones 0. σ(B) = (3, 1): nuclear norm
4, spectral norm 3.

Numbers are in the weights' own dtype (float32 at least); only what acts on [h, h] matrices is
float64. Gradients are finite at repeated and at zero singular values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.invariants import heads
from levelhead.invariants.entry import (
    OV_MAP,
    OV_RATIO,
    QK_FORM,
    QK_RATIO,
    Declared,
    Invariant,
    Verdict,
    declare,
)
from levelhead.invariants.raw import RAW
from levelhead.invariants.spectral import effective_qk
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.power_iteration import largest_singular_values, random_block
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.symmetry_group import GENERATORS

__all__ = [
    "Form",
    "core_sparsity_term",
    "head_term",
    "invariant_generators",
    "l2_term",
    "nuclear_term",
    "rank_floor_term",
    "sized_stacks",
    "spectral_term",
]

Form = Literal["qk", "ov", "both", "product"]
_READS = {
    "qk": frozenset({"q", "k"}),
    "ov": frozenset({"v", "o"}),
    "both": frozenset({"q", "k", "v", "o"}),
    "product": frozenset({"q", "k", "v", "o"}),
}
# Ratios of forms with gains and centring inside see no mean over channels.
_EFFECTIVE = declare(QK_RATIO, qk_mean=Verdict.INVARIANT)
_RATIO = {"qk": _EFFECTIVE, "ov": OV_RATIO, "both": _EFFECTIVE, "product": _EFFECTIVE}
_SIZE = {"qk": QK_FORM, "ov": OV_MAP, "both": QK_FORM}
_RATIO_READS = {n: r | {"qk_norm"} if "q" in r else r for n, r in _READS.items()}
Stacks = Callable[[AttentionView], tuple[LowRankStack, ...]]


def invariant_generators(symmetries: Mapping[str, Declared]) -> tuple[str, ...]:
    """Names of the generators that are declared to leave a number alone, whatever the layer."""
    return tuple(n for n in GENERATORS if symmetries[n] is Verdict.INVARIANT)


# ── heads against one another ──


def head_term(name: str, form: Form, eps: float = 1e-3) -> Invariant:
    """How alike heads are: "coherence", "log_det", "nuclear_ratio" or "entropy_rank" of C.

    nuclear_ratio and entropy_rank are turned round: 1 - ratio and 1 - log(rank)/log h.
    """
    grams = _grams(form)

    def function(view: AttentionView) -> Tensor:
        found = [_MEASURES[name](gram.double(), eps) for gram in grams(view)]
        return _mean(found).to(view.dtype)

    return _term(name, function, _FORMULA[name], _RATIO_READS[form], _RATIO[form], _several)


def _grams(form: Form) -> Callable[[AttentionView], list[Tensor]]:
    stacks = _ratio_stacks(form)

    def grams(view: AttentionView) -> list[Tensor]:
        found = [stack.head_gram(dtype=view.dtype) for stack in stacks(view)]
        return [found[0] * found[1]] if form == "product" else found

    return grams


def _coherence(gram: Tensor, eps: float) -> Tensor:
    return heads.coherence(gram)


def _nuclear_loss(gram: Tensor, eps: float) -> Tensor:
    # Orthogonal heads reach 1 + ε².
    return 1 - heads.nuclear_ratio(heads.normalised(gram), eps) / (1 + eps**2)


def _entropy_loss(gram: Tensor, eps: float) -> Tensor:
    rank = heads.entropy_rank(heads.normalised(gram))
    # A layer of zeros has no rank at all: as far as can be, and nothing to follow.
    return 1 - rank.clamp_min(1.0).log() / math.log(max(len(gram), 2))


_MEASURES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "coherence": _coherence,
    "log_det": heads.log_det,
    "nuclear_ratio": _nuclear_loss,
    "entropy_rank": _entropy_loss,
}
_FORMULA = {
    "coherence": "Σ_{i≠j} C_ij²/(h(h-1))",
    "log_det": "-(1/h) log det(C + εI) + log(1 + ε)",
    "nuclear_ratio": "1 - (Σ √(λ(C) + ε²))²/(h²(1 + ε²))",
    "entropy_rank": "1 + Σ p log p/log h, p = λ(C)/h",
}

# ── spectra of each head ──


def nuclear_term(form: Form) -> Invariant:
    """Mean over heads of ‖A_i‖_*."""

    def function(view: AttentionView) -> Tensor:
        stacks = sized_stacks(form)(view)
        return _mean([stack.nuclear_norms(dtype=view.dtype).mean() for stack in stacks])

    return _sized("nuclear_norm", function, "Σ_i ‖A_i‖_*/h", form)


def spectral_term(form: Form, steps: int = 200) -> Invariant:
    """Mean over heads of ‖A_i‖₂ by power iteration from a random start, without memory."""

    def function(view: AttentionView) -> Tensor:
        norms = []
        for stack in sized_stacks(form)(view):
            left, right = stack.expanded(view.dtype)
            start = random_block(right, left)
            norms.append(largest_singular_values(left, right, start, steps)[0].mean())
        return _mean(norms)

    return _sized("spectral_norm", function, "Σ_i ‖A_i‖₂/h", form)


def rank_floor_term(form: Form, floor: float) -> Invariant:
    """Mean over heads of max(0, 1 - erank(A_i)/floor), erank = exp of the entropy of σ/Σσ."""

    def function(view: AttentionView) -> Tensor:
        stacks = _ratio_stacks(form)(view)
        ranks = [stack.effective_ranks(dtype=view.dtype) for stack in stacks]
        return _mean([(1 - rank / floor).clamp_min(0).mean() for rank in ranks])

    formula = "Σ_i max(0, 1 - erank(A_i)/floor)/h"
    reach = partial(_reachable, form=form, floor=floor)
    return _term("rank_floor", function, formula, _RATIO_READS[form], _RATIO[form], reach)


def _reachable(view: AttentionView, form: Form, floor: float) -> str | None:
    least = min(min(s.inner, *s.shape[1:]) for s in _ratio_stacks(form)(view))
    if floor > least:
        return f"a floor of {floor:g} lies above {least}, the rank that its heads can have"
    return None


# ── the core of the stacked forms ──


def core_sparsity_term(form: Form) -> Invariant:
    """Mean over the three modes of PR/n, PR = (Σσ²)²/Σσ⁴ of the mode's n singular values σ.

    σ of a mode are the norms of the slices of the core of the higher-order SVD of [h, d, d].
    """

    def function(view: AttentionView) -> Tensor:
        return _mean([_core_share(stack, view.dtype) for stack in _plain_stacks(form)(view)])

    # Sizes of heads count against one another, so only what rescales all of them alike does not.
    symmetries = {
        "qk": declare(QK_FORM, score_scale=Verdict.GENERIC, qk_scale=Verdict.GENERIC),
        "ov": declare(OV_MAP, score_scale=Verdict.GENERIC),
        "both": declare(QK_FORM, score_scale=Verdict.GENERIC, qk_scale=Verdict.GENERIC),
    }
    formula, applies = "Σ_modes (Σσ²)²/(n Σσ⁴)/3", _any if form == "ov" else _unnormed
    return _term("core_sparsity", function, formula, _READS[form], symmetries[form], applies)


def _core_share(stack: LowRankStack, dtype: torch.dtype) -> Tensor:
    left, right = (_of_length_one(f) for f in stack.expanded(dtype))
    h, r, _ = left.shape
    gram = LowRankStack(left, right).head_gram(dtype=dtype)
    shares = [heads.participation_ratio(gram) / h]
    total = gram.diagonal().sum()
    for own, other in ((left, right), (right, left)):
        flat = own.reshape(h * r, -1)
        # tr(M²) of M = Σ A_i A_iᵀ = Σ own_iᵀ (other_i other_iᵀ) own_i, through [h r, h r].
        x = (other @ other.mT) @ (flat @ flat.mT).reshape(h, r, h * r)
        x = x.reshape(h * r, h * r)
        energy = (x * x.mT).sum()
        ratio = total.square() / torch.where(energy > 0, energy, 1.0)
        shares.append(torch.where(energy > 0, ratio, 0.0) / min(h * r, own.shape[2]))
    return _mean(shares)


def _of_length_one(factor: Tensor) -> Tensor:
    """The factor over its own size, taken as a constant: ratios do not see it."""
    size = factor.detach().square().sum().sqrt()
    return factor / torch.where(size > 0, size, 1.0)


# ── the control ──


def l2_term() -> Invariant:
    """‖q‖² + ‖k‖² + ‖v‖² + ‖o‖² of a layer: no invariant of its function."""

    def function(view: AttentionView) -> Tensor:
        return torch.stack([w.square().sum() for w in (view.q, view.k, view.v, view.o)]).sum()

    turns = dict.fromkeys(("qk_rotation", "rotary_phase", "qk_sign"), Verdict.INVARIANT)
    symmetries = declare(RAW, **turns, key_bias=Verdict.INVARIANT, value_bias=Verdict.INVARIANT)
    symmetries = declare(symmetries, qk_gain=Verdict.GENERIC)
    reads = _READS["both"]
    return _term("l2", function, "‖q‖² + ‖k‖² + ‖v‖² + ‖o‖²", reads, symmetries, _any, "1/1")


# ── private ──


def sized_stacks(form: Form) -> Stacks:
    """The stacks whose sizes `form` speaks of. Raises InputError for a form there is not."""
    if form == "product":
        raise InputError("form 'product' compares heads; expected 'qk', 'ov' or 'both' here")
    return _plain_stacks(form)


def _plain_stacks(form: Form) -> Stacks:
    _check(form)
    if form == "qk":
        return lambda view: (view.qk,)
    return lambda view: (view.ov,) if form == "ov" else (view.qk, view.ov)


def _ratio_stacks(form: Form) -> Stacks:
    _check(form)
    if form == "qk":
        return lambda view: (effective_qk(view),)
    return lambda view: (view.ov,) if form == "ov" else (effective_qk(view), view.ov)


def _check(form: Form) -> None:
    if form not in _READS:
        raise InputError(f"form {form!r} was given; expected {', '.join(map(repr, _READS))}")


def _sized(
    name: str, function: Callable[[AttentionView], Tensor], formula: str, form: Form
) -> Invariant:
    sized_stacks(form)
    applies = _any if form == "ov" else _unnormed
    return _term(name, function, formula, _READS[form], _SIZE[form], applies)


def _term(
    name: str,
    function: Callable[[AttentionView], Tensor],
    formula: str,
    reads: frozenset[str],
    symmetries: Mapping[str, Declared],
    applies: Callable[[AttentionView], str | None],
    unit: str = "1",
) -> Invariant:
    return Invariant(
        name, function, formula, unit, "penalty", "≥ 0", None, "exact", reads, symmetries, applies
    )  # fmt: skip


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def _any(view: AttentionView) -> str | None:
    return None


def _several(view: AttentionView) -> str | None:
    return "there is one head, which has nothing to differ from" if view.heads == 1 else None


def _unnormed(view: AttentionView) -> str | None:
    if view.qk_norm is None:
        return None
    return "queries and keys are normed, so the size of q·k's form is free: use form='ov'"
