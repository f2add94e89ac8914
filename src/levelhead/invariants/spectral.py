"""Spectra of each head's QK form B_i and OV map M_i, from the factors.

Axes as in `attention_view`; B_i [d, d_source] unscaled and without biases, M_i [d_out, d_source].
Under rotary positions B_i is the form of a token with itself, B_i(0).

Two examples. q = [[2, 0]], k = [[0, 8]]: B has the singular value 16, the trace 0. o = v = 1:
M = 1.

Under a norm of queries and keys the size of B_i is free, and so are its mean over channels and the
gains: `effective_qk` puts gains and centring into the factors, and what is left up to a factor for
each head is the layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from levelhead.invariants.entry import (
    OV_MAP,
    OV_RATIO,
    QK_FORM,
    QK_RATIO,
    RANK,
    Invariant,
    Verdict,
    declare,
)
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.gauge import inner_blocks
from levelhead.weights.structure import Rope

__all__ = [
    "ENTRIES",
    "THROUGH",
    "effective_qk",
    "eigenvalue_power_sums",
    "head_map_ranks",
    "key_preference_norms",
    "largest_logit",
    "largest_logit_gain",
    "normalised_qk_spectrum",
    "numerical_ranks",
    "reciprocal_conditions",
    "stack_of",
]

Which = Literal["qk", "ov"]
RANK_TOLERANCE = 1e-9


def stack_of(view: AttentionView, which: Which) -> LowRankStack:
    """`view.qk` or `view.ov`."""
    return view.qk if which == "qk" else view.ov


class _Remembered(LowRankStack):
    """A stack that keeps what it was asked for, as far as that has no gradient."""

    def _once(self, key: tuple[object, ...], compute: Callable[[], Any]) -> Any:
        if torch.is_grad_enabled() and (self.left.requires_grad or self.right.requires_grad):
            return compute()
        kept: dict[tuple[object, ...], Any] = self.__dict__.setdefault("_kept", {})
        if key not in kept:
            kept[key] = compute()
        return kept[key]

    def svd(self, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self._once(
            ("svd", dtype), lambda: LowRankStack.svd(self, dtype=dtype)
        )
        return found

    def singular_values(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        found: Tensor = self._once(
            ("σ", dtype), lambda: LowRankStack.singular_values(self, dtype=dtype)
        )
        return found

    def head_gram(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        found: Tensor = self._once(
            ("gram", dtype), lambda: LowRankStack.head_gram(self, dtype=dtype)
        )
        return found

    def mode_singular_values(self, mode: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
        found: Tensor = self._once(
            (mode, dtype), lambda: LowRankStack.mode_singular_values(self, mode, dtype=dtype)
        )
        return found


def _remembered(view: AttentionView, which: Which) -> LowRankStack:
    stack = stack_of(view, which)
    return _Remembered(stack.left, stack.right, stack.group, left_group=stack.left_group)


# What entries of one stack are computed through: one object each, so that they share the work.
THROUGH: Mapping[str, Callable[[AttentionView], LowRankStack]] = {
    "qk": partial(_remembered, which="qk"),
    "ov": partial(_remembered, which="ov"),
}


# ── functions ──


def numerical_ranks(stack: LowRankStack, tolerance: float = RANK_TOLERANCE) -> Tensor:
    """How many singular values of each slice exceed `tolerance` times its largest: [h] int64."""
    sigma = stack.singular_values()
    return (sigma > tolerance * sigma[:, :1]).sum(-1)


def reciprocal_conditions(stack: LowRankStack) -> Tensor:
    """σ_min/σ_max of each slice [h] over its min(r, m, n) values; 0 for a slice that is zero."""
    sigma = stack.singular_values()
    return _over(sigma[:, -1], sigma[:, 0])


def eigenvalue_power_sums(stack: LowRankStack, count: int = 4) -> Tensor:
    """Σ_a λ_a^p for p = 1 … count of each slice: [h, count]; smooth where eigenvalues are not."""
    left, right = stack.expanded(torch.float64)
    small = right @ left.mT
    power, out = small, []
    for _ in range(min(count, small.shape[-1])):
        out.append(power.diagonal(dim1=-2, dim2=-1).sum(-1))
        power = power @ small
    return torch.stack(out, -1)


def head_map_ranks(view: AttentionView) -> Tensor:
    """Multilinear ranks of each head's (x_q, x_k, x_v) ↦ (x_qᵀ B x_k) M x_v: [h, 4] int64.

    (rank B, rank B, rank M, rank M), and zeros where B or M is zero.
    """
    b, m = numerical_ranks(view.qk), numerical_ranks(view.ov)
    return torch.stack((b, b, m, m), -1) * ((b > 0) & (m > 0))[:, None]


def largest_logit_gain(view: AttentionView) -> Tensor:
    """scale·‖B_i‖₂ [h]: the largest logit of two tokens of length one.

    >>> one = torch.ones(1, 1, 1)
    >>> largest_logit_gain(AttentionView(q=2 * one, k=3 * one, v=one, o=one, scale=0.5))
    tensor([3.], dtype=torch.float64)
    """
    return view.logit_scale * view.qk.spectral_norms()


def largest_logit(view: AttentionView) -> Tensor:
    """The largest logit [h] that normed queries and keys can make, in whichever direction.

    scale·n·max_a |γ_q,a γ_k,a|, n = d_k behind a root mean square and 1 behind a length; over all
    heads together n = d_k √(h g). A rotary plane counts with its larger gain of either side, and
    times the temperature². An upper bound, reached where queries and keys may point anywhere and
    nothing turns.
    """
    norm = view.qk_norm
    assert norm is not None
    one = _gain_rows(view, norm.q_gain, True).abs()
    two = _gain_rows(view, norm.k_gain, False).abs()
    warm = 1.0
    if isinstance(view.position, Rope):
        warm = view.position.temperature**2
    runs: list[tuple[int, ...]] = [(a,) for a in range(view.d_k)]
    blocks = inner_blocks(view)
    if blocks.planes and not norm.after_rope:
        runs = [*blocks.planes, *((a,) for block in blocks.free for a in block)]
    tops = [one[:, list(r)].amax(-1) * two[:, list(r)].amax(-1) for r in runs]
    many = 1 if norm.over == "head" else (view.heads * view.groups) ** 0.5
    size = 1.0 if norm.kind == "l2" else view.d_k * many
    return view.logit_scale * size * max(1.0, warm) * torch.stack(tops, -1).amax(-1)


def normalised_qk_spectrum(view: AttentionView) -> Tensor:
    """σ_a/σ_1 [h, k] of each head's effective form; zeros for a head that is zero."""
    sigma = effective_qk(view).singular_values()
    return _over(sigma, sigma[:, :1])


def effective_qk(view: AttentionView) -> LowRankStack:
    """B_i with the gains, and the centring, of a norm of queries and keys inside: [h, d, d_source].

    Without such a norm it is `view.qk`.
    """
    norm = view.qk_norm
    if norm is None:
        return view.qk
    q, k = view.q, view.k
    if norm.kind == "layer":
        axes = (1,) if norm.over == "head" else (0, 1)
        q, k = q - q.mean(axes, keepdim=True), k - k.mean(axes, keepdim=True)
    if norm.q_gain is not None:
        q = q * norm.q_gain.to(q)[..., None]
    if norm.k_gain is not None:
        k = k * norm.k_gain.to(k)[..., None]
    return LowRankStack(q, k, view.qk.group)


def key_preference_norms(view: AttentionView) -> Tensor:
    """‖k_iᵀ b_q,i‖ [h]: how strongly the bias of queries prefers some keys whatever the query."""
    assert view.q_bias is not None
    keys = view.qk.expanded(torch.float64)[1]
    preferred = torch.einsum("hrd,hr->hd", keys, view.q_bias.double())
    norms: Tensor = torch.linalg.vector_norm(preferred, dim=-1)
    return norms


def _gain_rows(view: AttentionView, gain: Tensor | None, queries: bool) -> Tensor:
    if gain is None:
        gain = torch.ones(view.d_k, dtype=torch.float64, device=view.q.device)
    gain = gain.double()
    if gain.ndim == 1:
        return gain.expand(view.heads, -1)
    return gain if queries else gain[list(view.kv_group)]


def _over(a: Tensor, b: Tensor) -> Tensor:
    return torch.as_tensor(a / torch.where(b > 0, b, 1.0))


# ── where they exist ──


def _square(view: AttentionView, which: Which) -> str | None:
    if view.cross:
        return "queries and keys read different sequences: there is no trace"
    _, m, n = stack_of(view, which).shape
    return None if m == n else f"slices are [{m}, {n}]: there is no trace"


def _two_wide(view: AttentionView, which: Which) -> str | None:
    _, m, n = stack_of(view, which).shape
    return "a head has one singular value" if min(stack_of(view, which).inner, m, n) == 1 else None


def _unnormed(view: AttentionView) -> str | None:
    return (
        None if view.qk_norm is None else "normed queries and keys have no size: see largest_logit"
    )


def _normed(view: AttentionView) -> str | None:
    norm = view.qk_norm
    if norm is None:
        return "logits grow with the input: see largest_logit_gain"
    if norm.q_shift is not None or norm.k_shift is not None:
        return "the norm of queries and keys adds a shift"
    return None


def _biased(view: AttentionView) -> str | None:
    if view.q_bias is None:
        return "queries have no bias"
    return None if view.qk_norm is None else "the bias lies inside the norm of queries"


# ── rows of the catalogue ──

_READS = {"qk": frozenset({"q", "k"}), "ov": frozenset({"v", "o"})}
_SYMBOL = {"qk": "B_i", "ov": "M_i"}
_UNIT = {"qk": "q·k per x²", "ov": "y per x"}
_SVD = "Golub & Van Loan 2013, sec. 2.4"
_DEFINITION = "definition"
_LOGIT = "Zhai et al. 2023 (arXiv 2303.06296), sec. 3"


_STACK, _ROY = LowRankStack, "Roy & Vetterli 2007"
_RANK_FORMULA = f"#{{a: σ_a(A) > {RANK_TOLERANCE:g} σ_1}}"
_COUNT = "1 … d_k, 0 for a zero head"

# name, function of a stack, formula (A is B_i or M_i), source, range, degree, and what else differs
_Row = tuple[str, Callable[[LowRankStack], Tensor], str, str, str, int, dict[str, Any]]
_ROWS: tuple[_Row, ...] = (
    ("spectrum", _STACK.singular_values, "σ_a(A)", _SVD, "≥ 0, falling", 2, {}),
    ("nuclear_norm", _STACK.nuclear_norms, "Σ_a σ_a(A)", _SVD, "≥ 0", 2, {}),
    ("spectral_norm", _STACK.spectral_norms, "σ_1(A)", _SVD, "≥ 0", 2, {}),
    ("frobenius_norm", _STACK.frobenius_norms, "‖A‖_F", _SVD, "≥ 0", 2, {}),
    (
        "effective_rank",
        _STACK.effective_ranks,
        "exp(-Σ_a p_a log p_a), p = σ(A)/Σσ",
        _ROY,
        _COUNT,
        0,
        {"applies": _two_wide},
    ),
    (
        "participation_rank",
        partial(_STACK.effective_ranks, kind="participation"),
        "(Σ σ²)²/Σ σ⁴ of A",
        "Gao et al. 2017, participation ratio",
        _COUNT,
        0,
        {"applies": _two_wide},
    ),
    (
        "reciprocal_condition",
        reciprocal_conditions,
        "σ_min(A)/σ_max(A)",
        _SVD,
        "0 … 1",
        0,
        {"applies": _two_wide, "span": 1.0},
    ),
    (
        "rank",
        numerical_ranks,
        _RANK_FORMULA,
        _SVD,
        "0 … d_k",
        0,
        {"kind": "integer", "symmetries": RANK},
    ),
    ("trace", _STACK.traces, "tr A", _DEFINITION, "any", 2, {"applies": _square}),
    (
        "eigenvalues",
        _STACK.eigenvalues,
        "non-zero λ_a(A)",
        _DEFINITION,
        "complex",
        2,
        {"applies": _square, "smooth": eigenvalue_power_sums},
    ),
)


def _entry(which: Which, row: _Row) -> Invariant:
    name, of, formula, source, spread, degree, more = row
    sized, ratio = (QK_FORM, QK_RATIO) if which == "qk" else (OV_MAP, OV_RATIO)
    settings: dict[str, Any] = {"symmetries": sized if degree else ratio, "kind": "exact", **more}
    if "applies" in more:
        settings["applies"] = partial(more["applies"], which=which)
    if "smooth" in more:
        settings["smooth"] = lambda view: more["smooth"](stack_of(view, which))
    return Invariant(
        f"{which}_{name}",
        of,
        formula.replace("A", _SYMBOL[which]),
        _UNIT[which] if degree else "1",
        source,
        spread,
        degree,
        reads=_READS[which],
        per=("head",),
        through=THROUGH[which],
        **settings,
    )


ENTRIES: tuple[Invariant, ...] = (
    *(_entry("qk", row) for row in _ROWS),
    *(_entry("ov", row) for row in _ROWS),
    Invariant(
        "ov_trace_products",
        lambda view: view.ov.trace_products(),
        "tr(M_i M_j)",
        "y² per x²",
        "first fundamental theorem for matrices under conjugation",
        "any",
        4,
        "exact",
        _READS["ov"],
        OV_MAP,
        partial(_square, which="ov"),
        ("head", "head"),
    ),
    Invariant(
        "qk_normalised_spectrum",
        normalised_qk_spectrum,
        "σ_a/σ_1 of q_iᵀ Γ_q Γ_k k_i (gains and centring of a norm of q and k inside)",
        "1",
        "derived: what scales, gains and means of normed queries and keys leave",
        "0 … 1, falling",
        0,
        "exact",
        frozenset({"q", "k", "qk_norm"}),
        declare(QK_RATIO, qk_mean=Verdict.INVARIANT),
        partial(_two_wide, which="qk"),
        ("head",),
        span=1.0,
    ),
    Invariant(
        "largest_logit_gain",
        largest_logit_gain,
        "scale·σ_1(B_i)",
        "logit per x²",
        _LOGIT,
        "≥ 0",
        2,
        "exact",
        _READS["qk"],
        QK_FORM,
        _unnormed,
        ("head",),
    ),
    Invariant(
        "largest_logit",
        largest_logit,
        "scale·n·max_a |γ_q,a γ_k,a|",
        "logit",
        "derived: Cauchy-Schwarz behind the norms",
        "≥ 0",
        0,
        "exact",
        frozenset({"qk_norm"}),
        QK_RATIO,
        _normed,
        ("head",),
    ),
    Invariant(
        "key_preference_norm",
        key_preference_norms,
        "‖k_iᵀ b_q,i‖",
        "q·k per x",
        "derived: what of the biases of queries and keys softmax sees",
        "≥ 0",
        1,
        "exact",
        frozenset({"q_bias", "k"}),
        QK_FORM,
        _biased,
        ("head",),
    ),
    Invariant(
        "head_map_ranks",
        head_map_ranks,
        "multilinear ranks of B_i ⊗ M_i",
        "1",
        "derived: (rank B, rank B, rank M, rank M)",
        "0 … d_k, d_v",
        0,
        "integer",
        frozenset({"q", "k", "v", "o"}),
        RANK,
        per=("head",),
    ),
)
