"""Numbers that depend on the basis of weights, declared so: what the popular recipe looks at.

Axes as in `attention_view`; the raw head tensor is T [h, d_k, d, 3] with
T[i,·,·,c] = (q_i, k_i, v_i)[c].
It is no function of the forms B and maps M: a change of the inner basis of a head leaves what the
layer computes alone and moves all of this. It also leaves out o.

Two examples. A head with q, k and one with 2q, k/2 are the same head; their raw tensors are not
parallel. The condition number of q can be anything from 1 on; that of B cannot.

Of ranks the one over d_model alone is the layer's own: it is the dimension of the sum of all row
spaces. The others are so for weights without structure only. In the balanced gauge (see
`weights.canonical`) two of the four mode spectra become well defined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from levelhead.invariants.entry import Invariant, Verdict, declare
from levelhead.tensors.factored_svd import differentiable_singular_values
from levelhead.tensors.multilinear import mode_singular_values, multilinear_rank, unfold
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.canonical import canonical
from levelhead.weights.gauge import inner_blocks
from levelhead.weights.structure import NoPosition

__all__ = [
    "ENTRIES",
    "RAW",
    "canonical_spectrum",
    "core_slice_norms",
    "largest_singular_value",
    "raw_head_cosines",
    "raw_spectrum",
    "row_reciprocal_conditions",
    "small_product_norms",
]

RANK_TOLERANCE = 1e-9


# ── functions ──


def raw_spectrum(view: AttentionView, mode: int) -> Tensor:
    """Singular values of the mode-`mode` unfolding of T: [h], [d_k], [d] or [3], falling.

    Padded with zeros to the mode's length. The norms of the HOSVD core's slices are the same.
    """
    return _spectrum(view.head_tensor(), mode)


def canonical_spectrum(view: AttentionView, mode: int) -> Tensor:
    """`raw_spectrum` in balanced gauge: well defined for modes 1 and 2 (d_k, d_model) only."""
    return _spectrum(_canonical_tensor(view), mode)


def raw_head_cosines(view: AttentionView) -> Tensor:
    """Cosines of vec(T_i) and vec(T_j) [h, h]; zeros for a zero head."""
    rows = view.head_tensor().double().flatten(1)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    rows = rows / torch.where(lengths > 0, lengths, 1.0)
    return rows @ rows.mT


def row_reciprocal_conditions(weights: Tensor) -> Tensor:
    """σ_min/σ_max of every matrix [·, r, n]: [·], 0 for zero."""
    sigma: Tensor = torch.linalg.svdvals(weights.double())
    return sigma[:, -1] / torch.where(sigma[:, 0] > 0, sigma[:, 0], 1.0)


def small_product_norms(view: AttentionView) -> Tensor:
    """‖q_i k_iᵀ‖₂ [h], an r × r matrix: the wrong side, ‖B_i‖₂ is that of q_iᵀ k_i."""
    q, k = view.qk.expanded(torch.float64)
    norms: Tensor = torch.linalg.matrix_norm(q @ k.mT, ord=2)
    return norms


def core_slice_norms(view: AttentionView) -> Tensor:
    """Largest singular value [h] of each head slice of the HOSVD core of T, rows along d_model.

    Slice a is Σ_i u_ia T_i with u the left singular vectors of the head mode: other factors are
    orthonormal and leave norms alone.
    """
    tensor = view.head_tensor().double()
    with torch.no_grad():
        u = torch.linalg.svd(unfold(tensor, 0), full_matrices=False).U
    return largest_singular_value(torch.einsum("ia,irmc->amrc", u, tensor).flatten(2))


def largest_singular_value(matrices: Tensor) -> Tensor:
    """σ_1 of matrices [..., m, n] in float64, from the smaller Gram matrix; without gradient.

    Squaring costs the small values their digits, not the largest, and takes a fifth of the time.

    >>> largest_singular_value(torch.diag(torch.tensor([3.0, -4.0])))
    tensor(4., dtype=torch.float64)
    """
    with torch.no_grad():
        x = matrices.double()
        gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
        energies: Tensor = torch.linalg.eigvalsh(gram)
        return energies[..., -1].clamp_min(0).sqrt()


def _canonical_tensor(view: AttentionView) -> Tensor:
    return canonical(view).view.head_tensor()


def _spectrum(tensor: Tensor, mode: int) -> Tensor:
    if tensor.requires_grad:  # the way through QR has no gradient
        values: Tensor = torch.linalg.svdvals(unfold(tensor.double(), mode))
    else:
        values = mode_singular_values(tensor.double(), mode)
    return torch.nn.functional.pad(values, (0, tensor.shape[mode] - len(values)))


def _raw_ranks(view: AttentionView) -> tuple[int, ...]:
    return multilinear_rank(view.head_tensor().double(), RANK_TOLERANCE)


def _inner_energies(view: AttentionView) -> Tensor:
    """The squares of `canonical_spectrum(view, 1)`, differentiable: [d_k], falling.

    In balanced gauge Σ_i q_i q_iᵀ = k kᵀ = diag(σ) and v vᵀ = diag(τ) for each group, and its n
    heads repeat k and v: Σ_groups (1 + n) σ + n τ.
    """
    total = view.q.new_zeros(view.d_k, dtype=torch.float64)
    for group in range(view.groups):
        members = list(view.members(group))
        sides = view.q[members].movedim(1, 0).flatten(1), view.o[members].movedim(2, 0).flatten(1)
        for side, shared, count in zip(
            sides, (view.k, view.v), (1 + len(members), len(members)), strict=True
        ):
            values = differentiable_singular_values(
                side[None].double(), shared[group][None].double()
            )[0]
            padded = torch.nn.functional.pad(values, (0, view.d_k - len(values)))
            total = total + count * padded
    return total


# ── where they exist ──


def has_raw_tensor(view: AttentionView) -> str | None:
    """Why there is no raw head tensor, or None."""
    if view.d_v != view.d_k:
        return f"values are {view.d_v} and keys {view.d_k} wide: q, k and v do not stack"
    if view.cross or view.d_source != view.d:
        return "queries and keys read different sequences: q, k and v do not stack"
    return "heads are one number wide" if view.d_k == 1 else None


def _several(view: AttentionView) -> str | None:
    return "there is one head" if view.heads == 1 else has_raw_tensor(view)


def _two_wide(view: AttentionView) -> str | None:
    return "heads are one number wide" if view.d_k == 1 else None


def _small(view: AttentionView) -> str | None:
    if view.cross or view.d_source != view.d:
        return "queries and keys read different sequences: q kᵀ is no matrix of one space"
    return _two_wide(view)


def _balanced(view: AttentionView) -> str | None:
    if view.qk_norm is not None:
        return "normed queries and keys have no balanced gauge"
    if not isinstance(view.position, NoPosition) or view.latent is not None or view.tied:
        return "the balanced gauge orders components by σ only where all of GL(d_k) acts"
    return _several(view)


# ── declarations ──

INVARIANT, VARIANT, GENERIC = Verdict.INVARIANT, Verdict.VARIANT, Verdict.GENERIC


def _between_groups(view: AttentionView) -> Verdict:
    """One rotation for all heads leaves what compares heads alone."""
    return VARIANT if view.groups > 1 else GENERIC


def _between_blocks(view: AttentionView) -> Verdict:
    """One complex number for one plane is a rotation and a scale."""
    blocks = inner_blocks(view)
    return VARIANT if len(blocks.planes) + len(blocks.free) > 1 else GENERIC


# What sees the inner basis of heads, and everything else in it. Signs show, but not always.
RAW = declare(VARIANT, qk_sign=GENERIC, head_permutation=INVARIANT, basis_rotation=INVARIANT)
_HEADS = declare(RAW, qk_rotation=_between_groups, rotary_phase=_between_groups)
_MODEL = declare(RAW, qk_rotation=INVARIANT, rotary_phase=INVARIANT, qk_sign=INVARIANT)
_RANKS = declare(GENERIC, head_permutation=INVARIANT, basis_rotation=INVARIANT)
_MODEL_RANK = declare(INVARIANT, input_mean=GENERIC, qk_mean=GENERIC)
# Of one of q and k: a rotation of its rows does nothing, and a scale little.
_ROWS = declare(_MODEL, rotary_gauge=_between_blocks)
_CONDITION = declare(_ROWS, qk_scale=INVARIANT, score_scale=INVARIANT)
_CANONICAL = declare(INVARIANT, score_scale=VARIANT, input_gain=VARIANT, input_mean=VARIANT)
_SIGNED = declare(
    _CANONICAL,
    qk_gauge=_between_groups,
    vo_gauge=_between_groups,
    basis_rotation=GENERIC,
    head_permutation=GENERIC,
)

# ── rows of the catalogue ──

_T = frozenset({"q", "k", "v"})
_LATHAUWER = "De Lathauwer et al. 2000"
_MODES = ("head", "inner", "model", "qkv")
_LONG = "weights"


def _raw(name: str, function: Callable[..., Tensor], formula: str, **more: Any) -> Invariant:
    settings: dict[str, Any] = {
        "unit": _LONG,
        "source": _LATHAUWER,
        "range": "≥ 0, falling",
        "degree": 1,
        "kind": "exact",
        "reads": _T,
        "symmetries": RAW,
        "applies": has_raw_tensor,
        **more,
    }
    return Invariant(name, function, formula, **settings)


_SIGNS = "signs of components are free in balanced gauge: it is no function of the layer"
_NO_CANONICAL_GRADIENT = {
    "head": _SIGNS,
    "inner": "",
    "model": "(B Bᵀ)^½ has no gradient where σ vanish, and its SVD none where they meet",
    "qkv": _SIGNS,
}


def _modes() -> tuple[Invariant, ...]:
    found = []
    for mode, name in enumerate(_MODES):
        declared = (_HEADS, RAW, _MODEL, RAW)[mode]
        balanced = _CANONICAL if name in ("inner", "model") else _SIGNED
        found.append(
            _raw(
                f"raw_{name}_spectrum",
                lambda view, mode=mode: raw_spectrum(view, mode),
                f"σ of the {name} unfolding of T",
                symmetries=declared,
                applies=_several if name == "head" else has_raw_tensor,
            )
        )
        found.append(
            _raw(
                f"canonical_{name}_spectrum",
                partial(_spectrum, mode=mode),
                f"σ of the {name} unfolding of T in balanced gauge",
                through=_canonical_tensor,
                symmetries=balanced,
                applies=_balanced,
                reads=frozenset({"q", "k", "v", "o"}),
                smooth=_inner_energies if name == "inner" else None,
                no_gradient=_NO_CANONICAL_GRADIENT[name],
                tolerance=1e-7,
            )
        )
    return tuple(found)


ENTRIES: tuple[Invariant, ...] = (
    *_modes(),
    _raw(
        "raw_ranks",
        torch.tensor,
        f"multilinear ranks of T at {RANK_TOLERANCE:g}",
        unit="1",
        range="1 … h, d_k, d, 3",
        degree=0,
        kind="integer",
        symmetries=_RANKS,
        through=_raw_ranks,
    ),
    _raw(
        "raw_model_rank",
        lambda ranks: torch.tensor(ranks[2]),
        f"rank of the model unfolding of T at {RANK_TOLERANCE:g}: dimension of all row spaces",
        unit="1",
        range="1 … d",
        degree=0,
        kind="integer",
        symmetries=_MODEL_RANK,
        through=_raw_ranks,
    ),
    _raw(
        "raw_core_slice_norms",
        core_slice_norms,
        "‖Σ_i u_ia T_i‖₂, u the head vectors of the HOSVD of T",
        range="≥ 0",
        symmetries=_HEADS,
        applies=_several,
        no_gradient="singular vectors of the head mode have none where its values meet",
        tolerance=1e-6,
    ),
    _raw(
        "raw_head_cosines",
        raw_head_cosines,
        "⟨T_i, T_j⟩/‖T_i‖‖T_j‖",
        unit="1",
        source="common practice",
        range="-1 … 1",
        degree=0,
        symmetries=_HEADS,
        applies=_several,
        per=("head", "head"),
        span=1.0,
    ),
    _raw(
        "query_reciprocal_condition",
        lambda view: row_reciprocal_conditions(view.q),
        "σ_min/σ_max of q_i",
        unit="1",
        source="common practice",
        range="0 … 1",
        degree=0,
        reads=frozenset({"q"}),
        symmetries=_CONDITION,
        applies=_two_wide,
        per=("head",),
        span=1.0,
    ),
    _raw(
        "key_reciprocal_condition",
        lambda view: row_reciprocal_conditions(view.k),
        "σ_min/σ_max of k",
        unit="1",
        source="common practice",
        range="0 … 1",
        degree=0,
        reads=frozenset({"k"}),
        symmetries=_CONDITION,
        applies=_two_wide,
        per=("group",),
        span=1.0,
    ),
    _raw(
        "query_norm",
        lambda view: torch.linalg.matrix_norm(view.q.double()),
        "‖q_i‖_F",
        source="common practice",
        range="≥ 0",
        reads=frozenset({"q"}),
        symmetries=_MODEL,
        applies=lambda view: None,
        per=("head",),
    ),
    _raw(
        "spectral_norm_product",
        lambda view: (
            torch.linalg.matrix_norm(view.q.double(), ord=2)
            * torch.linalg.matrix_norm(view.repeat_kv().k.double(), ord=2)
        ),
        "‖q_i‖₂‖k_i‖₂, what normalising q and k apart controls; at least ‖B_i‖₂",
        unit="q·k per x²",
        source="Zhai et al. 2023 (arXiv 2303.06296)",
        range="≥ ‖B_i‖₂",
        degree=2,
        reads=frozenset({"q", "k"}),
        symmetries=_ROWS,
        applies=_two_wide,
        per=("head",),
    ),
    _raw(
        "small_product_norm",
        small_product_norms,
        "‖q_i k_iᵀ‖₂ of the r × r product: the wrong side",
        unit="weights²",
        source="common mistake of layouts",
        range="≥ 0",
        degree=2,
        reads=frozenset({"q", "k"}),
        symmetries=_ROWS,
        applies=_small,
        per=("head",),
    ),
)
