"""Pairs of heads: distances, clusters, principal angles; and the rows of the catalogue about heads.

Axes as in `attention_view`; matrices [h, h] run over pairs of heads. Functions of forms B, maps M
or both; see `heads` for the functions of their Gram matrices.

Two examples. Two copies of one head are 0 apart, in one cluster, with all principal cosines 1. Two
heads with orthogonal row spaces have all principal cosines 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.invariants import heads
from levelhead.invariants.entry import (
    OV_MAP,
    OV_RATIO,
    QK_FORM,
    QK_RATIO,
    Invariant,
    Verdict,
    declare,
)
from levelhead.invariants.heads import Which, head_gram, normalised
from levelhead.invariants.spectral import (
    RANK_TOLERANCE,
    THROUGH,
    numerical_ranks,
    stack_of,
)
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.weights.attention_view import AttentionView

__all__ = [
    "ENTRIES",
    "head_clusters",
    "principal_cosines",
    "procrustes_distances",
    "relative_procrustes",
]

DUPLICATE = 1e-6
_ZERO = 1e-13


def procrustes_distances(stack: LowRankStack) -> Tensor:
    """d(i, j)² [h, h] between slices in balanced gauge, over all rotations of the inner basis.

    2‖A_i‖_* + 2‖A_j‖_* - 2‖l_i l_jᵀ + r_i r_jᵀ‖_* with balanced factors l, r: needs no choice of
    sign, and is defined where singular values coincide. Squared, for the root of rounding is none.
    Not a kernel: use it to cluster. Without gradient. O(h² (d r² + r³)).

    >>> eye = torch.eye(2)[:, None, :]
    >>> procrustes_distances(LowRankStack(eye, eye))[0]
    tensor([0., 4.], dtype=torch.float64)
    """
    with torch.no_grad():
        u, sigma, v = stack.svd()
        # The root of a σ that is rounding would be far more than rounding.
        alive = sigma > _ZERO * sigma[:, :1]
        root = (sigma * alive).sqrt()[:, None, :]
        left, right = (u * root).mT, (v * root).mT
        nuclear = sigma.sum(-1)
        rows = []
        for i in range(len(sigma)):
            inner = left[i] @ left.mT + right[i] @ right.mT
            common = torch.linalg.svdvals(inner).sum(-1)
            rows.append(2 * (nuclear[i] + nuclear - common))
        distances = torch.stack(rows).clamp_min(0)
        return distances - torch.diag(distances.diagonal())


def relative_procrustes(stack: LowRankStack) -> Tensor:
    """`procrustes_distances` over 2‖A_i‖_* + 2‖A_j‖_* [h, h]: 0 (the same, or zero) to 1."""
    nuclear = stack.nuclear_norms().detach()
    whole = 2 * (nuclear[:, None] + nuclear[None, :])
    return procrustes_distances(stack) / torch.where(whole > 0, whole, 1.0)


def head_clusters(stack: LowRankStack, tolerance: float = DUPLICATE) -> tuple[int, ...]:
    """A label for each slice [h]: i and j share it if a chain of near neighbours joins them.

    Neighbours have ‖A_i - A_j‖ ≤ tolerance · max(‖A_i‖, ‖A_j‖); labels count from 0 in the order
    of first heads. Distances come from the Gram matrix, which resolves about 1e-8.

    >>> one = torch.ones(1, 1, 2)
    >>> head_clusters(LowRankStack(torch.cat((one, one, 2 * one)), one, (0, 0, 0)))
    (0, 0, 1)
    """
    with torch.no_grad():
        gram = stack.head_gram()
        energy = gram.diagonal()
        square = (energy[:, None] + energy[None, :] - 2 * gram).clamp_min(0)
        near = square <= tolerance**2 * torch.maximum(energy[:, None], energy[None, :])
    labels = list(range(len(near)))
    for i in range(len(near)):
        for j in range(i):
            if bool(near[i, j]) and labels[i] != labels[j]:
                low, high = sorted((labels[i], labels[j]))
                labels = [low if a == high else a for a in labels]
    names = {a: n for n, a in enumerate(dict.fromkeys(labels))}
    return tuple(names[a] for a in labels)


def principal_cosines(stack: LowRankStack, side: Literal["left", "right"]) -> Tensor:
    """Cosines of the principal angles between slices' column ("left") or row spaces: [h, h, k].

    Falling; a slice of rank ρ < k spans ρ dimensions, and the rest are zeros. Rank as in
    `numerical_ranks`. Without gradient. Source: Björck & Golub 1973.
    """
    if side not in ("left", "right"):
        raise InputError(f"side {side!r} was given; expected 'left' or 'right'")
    with torch.no_grad():
        u, sigma, v = stack.svd()
        basis = u if side == "left" else v
        alive = sigma > RANK_TOLERANCE * sigma[:, :1]
        basis = basis * alive[:, None, :]
        rows = [torch.linalg.svdvals(one.mT @ basis) for one in basis]
        return torch.stack(rows).clamp_max(1)


def _angle_sums(stack: LowRankStack, side: Literal["left", "right"]) -> Tensor:
    """Σ cos² and Σ cos⁴ of the principal angles [2, h, h], differentiable; from projectors.

    With full rank the spaces of leftᵀ right are the row spaces of left and of right: with
    G_i = l_i l_iᵀ and C = l_i l_jᵀ the cos² are the eigenvalues of G_i⁻¹ C G_j⁻¹ Cᵀ. Where a slice
    has lower rank nothing is differentiated: the answer is constant.
    """
    rows = stack.expanded(torch.float64)[0 if side == "left" else 1]
    h, r, _ = rows.shape
    with torch.no_grad():
        if int(numerical_ranks(stack).min()) < r:
            return rows.new_zeros(2, h, h)
    inverse = torch.linalg.inv(rows @ rows.mT)
    cross = torch.einsum("iam,jbm->ijab", rows, rows)
    both = inverse[:, None] @ cross @ inverse[None, :] @ cross.mT
    first = both.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.stack([first, (both * both.mT).sum((-2, -1))])


# ── rows of the catalogue ──

_WHICH: tuple[Which, ...] = ("qk", "ov", "both")
_READS: dict[str, frozenset[str]] = {
    "qk": frozenset({"q", "k"}),
    "ov": frozenset({"v", "o"}),
    "both": frozenset({"q", "k", "v", "o"}),
}
# Scores against values: the product of both Gram matrices does not see it.
_FORM = {"qk": QK_FORM, "ov": OV_MAP, "both": declare(QK_FORM, score_scale=Verdict.INVARIANT)}
_RATIO = {"qk": QK_RATIO, "ov": OV_RATIO, "both": QK_RATIO}
_SYMBOL = {"qk": "B", "ov": "M", "both": "B⊗M"}
_UNIT = {"qk": "(q·k per x²)²", "ov": "(y per x)²", "both": "(q·k per x²)² (y per x)²"}
_DERIVED = "derived"


def _several(view: AttentionView) -> str | None:
    return "there is one head" if view.heads == 1 else None


def _by_heads(view: AttentionView) -> Verdict:
    """A scale that all heads share changes no ratio of their sizes."""
    together = view.qk_norm is not None and view.qk_norm.over == "all"
    return Verdict.INVARIANT if together else Verdict.VARIANT


# Ratios of heads' sizes.
_SIZES = {
    which: form if which == "ov" else declare(form, qk_scale=_by_heads)
    for which, form in _FORM.items()
}


def _of_c(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda gram: function(normalised(gram))


_ROY, _GAO = "Roy & Vetterli 2007", "Gao et al. 2017, participation ratio"
_COHERENCE = "Σ_{i≠j} C_ij²/(h(h-1)), C = cosines of A"
_LOG_DET = "-(1/h) log det(C + εI) + log(1 + ε) of A, ε = 1e-3"
_NUCLEAR = "(Σ √(λ + ε²))²/h² of C of A, ε = 1e-3"
_UNIT_SPAN: dict[str, Any] = {"span": 1.0}
_PAIR: dict[str, Any] = {"per": ("head", "head")}

# name, function of a Gram matrix, formula, source, range, and what else differs; by default values
# are ratios: degree 0, unit 1, whatever single heads' sizes are
_Row = tuple[str, Callable[[Tensor], Tensor], str, str, str, dict[str, Any]]
_ROWS: tuple[_Row, ...] = (
    ("cosines", normalised, "⟨A_i, A_j⟩/‖A_i‖‖A_j‖", _DERIVED, "-1 … 1", _UNIT_SPAN | _PAIR),
    ("coherence", heads.coherence, _COHERENCE, _DERIVED, "0 … 1", _UNIT_SPAN),
    (
        "effective_heads",
        _of_c(heads.participation_ratio),
        "h²/Σ C_ij² of A",
        _DERIVED,
        "1 … h",
        {},
    ),
    (
        "head_participation",
        heads.participation_ratio,
        "(tr G)²/‖G‖², G = ⟨A_i, A_j⟩",
        _GAO,
        "1 … h",
        {"symmetries": _SIZES},
    ),
    (
        "entropy_heads",
        _of_c(heads.entropy_rank),
        "exp of the entropy of λ(C)/h of A",
        _ROY,
        "1 … h",
        {},
    ),
    (
        "head_entropy_rank",
        heads.entropy_rank,
        "exp of the entropy of λ(G)/tr G, G = ⟨A_i, A_j⟩",
        _ROY,
        "1 … h",
        {"symmetries": _SIZES},
    ),
    ("log_det", heads.log_det, _LOG_DET, _DERIVED, "≥ 0", _UNIT_SPAN),
    ("nuclear_ratio", _of_c(heads.nuclear_ratio), _NUCLEAR, _DERIVED, "1/h … 1", _UNIT_SPAN),
)


# One object for each Gram matrix: entries that are computed through it share it.
_GRAMS = {which: partial(head_gram, which=which) for which in _WHICH}


def _gram_entry(which: Which) -> Invariant:
    return Invariant(
        f"{which}_gram",
        lambda gram: gram,
        "⟨A_i, A_j⟩".replace("A", _SYMBOL[which]),
        _UNIT[which],
        _DERIVED,
        "positive semidefinite",
        8 if which == "both" else 4,
        "exact",
        _READS[which],
        _FORM[which],
        per=("head", "head"),
        through=_GRAMS[which],
    )


def _functional(which: Which, row: _Row) -> Invariant:
    name, of, formula, source, spread, more = row
    table = more.get("symmetries", _RATIO)
    return Invariant(
        f"{which}_{name}",
        of,
        formula.replace("A", _SYMBOL[which]),
        "1",
        source,
        spread,
        0,
        "exact",
        _READS[which],
        applies=_several,
        through=_GRAMS[which],
        **{**more, "symmetries": table[which]},
    )


def _pairs(which: Literal["qk", "ov"]) -> tuple[Invariant, ...]:
    def distinct(stack: LowRankStack) -> Tensor:
        return torch.tensor(len(set(head_clusters(stack))))

    sides = {"qk": ("query", "key"), "ov": ("output", "value")}[which]
    symbol, reads, pair = _SYMBOL[which], _READS[which], ("head", "head")
    fronts = ("input_gain", "input_mean", "qk_mean")
    hidden = dict.fromkeys((*fronts, "qk_scale", "score_scale"), Verdict.GENERIC)
    found = [
        Invariant(
            f"{which}_procrustes",
            relative_procrustes,
            "1 - ‖l_i l_jᵀ + r_i r_jᵀ‖_*/(‖A_i‖_* + ‖A_j‖_*)".replace("A", symbol),
            "1",
            "derived: Procrustes over O(r) in balanced gauge",
            "0 … 1",
            0,
            "exact",
            reads,
            _SIZES[which],
            _several,
            pair,  # type: ignore[arg-type]
            tolerance=1e-7,
            span=1.0,
            through=THROUGH[which],
            no_gradient="balanced factors have no gradient where σ vanish, nuclear norms have "
            "kinks there",
        ),
        Invariant(
            f"{which}_distinct_heads",
            distinct,
            f"clusters of {symbol}_i whose neighbours differ by at most {DUPLICATE:g}",
            "1",
            "derived: copies of a form are one head",
            "1 … h",
            0,
            "integer",
            reads,
            declare(_RATIO[which], **hidden),
            through=THROUGH[which],
        ),
    ]
    for side, end in zip(sides, ("left", "right"), strict=True):
        # Where a map writes does not depend on what is in front of the layer, and heads that all
        # share one block of keys and values have no angles between them.
        declared = _RATIO[which]
        if side == "output":
            declared = declare(declared, **dict.fromkeys(fronts, Verdict.GENERIC))
        elif side != "query":
            declared = declare(declared, **dict.fromkeys(fronts, _by_groups))
        found.append(
            Invariant(
                f"{side}_angles",
                partial(principal_cosines, side=end),  # type: ignore[arg-type]
                f"cosines of principal angles between {side} spaces of {symbol}_i and {symbol}_j",
                "1",
                "Björck & Golub 1973",
                "0 … 1",
                0,
                "exact",
                reads,
                declared,
                lambda view, which=which: _several(view) or _full(stack_of(view, which)),  # type: ignore[misc]
                pair,  # type: ignore[arg-type]
                tolerance=1e-7,
                span=1.0,
                through=THROUGH[which],
                smooth=lambda view, end=end: _angle_sums(stack_of(view, which), end),
            )
        )
    return tuple(found)


def _by_groups(view: AttentionView) -> Verdict:
    alone = view.groups == 1 or view.cross
    return Verdict.GENERIC if alone else Verdict.VARIANT


def _full(stack: LowRankStack) -> str | None:
    """Spaces that fill everything have no angles."""
    r, (_, m, n) = stack.inner, stack.shape
    return "a head's space is the whole space" if r >= min(m, n) else None


ENTRIES: tuple[Invariant, ...] = (
    *(_gram_entry(which) for which in _WHICH),
    *(_functional(which, row) for which in _WHICH for row in _ROWS),
    *_pairs("qk"),
    *_pairs("ov"),
)
