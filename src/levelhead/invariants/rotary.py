"""What rotary positions make of queries and keys: energies of frequencies, forms over all offsets.

Axes as in `attention_view`. With rotary positions a head's logits are x_aᵀ B_i(b - a) x_b, where
B_i(n) = Σ_f Re(e^{inθ_f} H_f) (+ what does not turn), H_f = conj(q_f) k_fᵀ of rank one, q_f =
q_{e_f} + i q_{o_f}. B_i(0) alone, which the spectra speak of, holds less.

Two examples. A plane with q_f = (1, i) has |q_f| = √2. Two heads whose keys differ by a factor of
modulus one in every plane have the same energies, and different forms.

Under a norm of queries and keys that stands before the rotation, gains and centring are inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.invariants.entry import QK_FORM, QK_RATIO, Invariant, Verdict, declare
from levelhead.invariants.heads import coherence
from levelhead.invariants.spectral import effective_qk
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.gauge import inner_blocks
from levelhead.weights.structure import Rope

__all__ = [
    "ENTRIES",
    "frequency_energies",
    "frequency_shares",
    "is_rotary",
    "rotary_gram",
    "rotary_parts",
]


def frequency_energies(view: AttentionView) -> Tensor:
    """|q_f||k_f| of each head and turning plane [h, planes], ‖H_f‖ of the form's part there.

    >>> one = torch.eye(2)[None]
    >>> view = AttentionView(q=3 * one, k=one, v=one, o=one, position=Rope("half", 2, 100.0))
    >>> frequency_energies(view)
    tensor([[6.]], dtype=torch.float64)
    """
    q, k = _complex_rows(view)
    sizes = [torch.linalg.vector_norm(rows, dim=(-2, -1)) for rows in (q, k)]
    return torch.as_tensor(sizes[0] * sizes[1])


def frequency_shares(view: AttentionView) -> Tensor:
    """`frequency_energies` divided by their sum in each head [h, planes]; zeros for a zero head."""
    energies = frequency_energies(view)
    total = energies.sum(-1, keepdim=True)
    return energies / torch.where(total > 0, total, 1.0)


def rotary_gram(view: AttentionView) -> Tensor:
    """The average over all offsets n of ⟨B_i(n), B_j(n)⟩: [h, h], O(h² d_k d).

    ½ Re Σ_f (q_jf^H q_if)(k_if^H k_jf) of the planes, with offsets so long that frequencies do not
    beat, plus ⟨·,·⟩ of the dimensions that do not turn.
    """
    q, k = _complex_rows(view)
    q, k = torch.complex(*q.unbind(2)), torch.complex(*k.unbind(2))
    by_q = torch.einsum("jfm,ifm->ijf", q.conj(), q)
    by_k = torch.einsum("ifm,jfm->ijf", k.conj(), k)
    gram = 0.5 * (by_q * by_k).sum(-1).real
    for block in inner_blocks(view).free:
        left, right = (t[:, list(block)] for t in _rows(view))
        inner = torch.einsum("iam,jbm->ijab", left, left)
        gram = gram + (inner * torch.einsum("iam,jbm->ijab", right, right)).sum((-2, -1))
    return gram


def rotary_parts(view: AttentionView) -> tuple[LowRankStack, ...]:
    """Stacks whose slices, p for each head one after the other, add up to `rotary_gram`.

    ⟨A_i, A_j⟩ averaged over all offsets is Σ over stacks and a < p of ⟨S[i p + a], S[j p + a]⟩. The
    first stack holds √½ Re H_f and √½ Im H_f of each turning plane f, with H_f = conj(q_f) k_fᵀ;
    every further one a block of dimensions that do not turn.

    >>> one = torch.eye(2)[None]
    >>> view = AttentionView(q=one, k=one, v=one, o=one, position=Rope("half", 2, 100.0))
    >>> float(rotary_parts(view)[0].frobenius_norms().square().sum()), float(rotary_gram(view))
    (2.0, 2.0)
    """
    parts = []
    if inner_blocks(view).planes:
        q, k = _complex_rows(view)
        turned = torch.stack((k[:, :, 1], -k[:, :, 0]), 2)  # of -i k: its real part is Im
        left = (0.5**0.5 * q)[:, :, None].expand(-1, -1, 2, -1, -1)
        right = torch.stack((k, turned), 2)
        parts.append(LowRankStack(left.flatten(0, 2), right.flatten(0, 2)))
    for block in inner_blocks(view).free:
        left, right = (rows[:, list(block)] for rows in _rows(view))
        parts.append(LowRankStack(left, right))
    return tuple(parts)


def _rows(view: AttentionView) -> tuple[Tensor, Tensor]:
    """Queries and keys of each head [h, d_k, ·] as they are turned."""
    norm = view.qk_norm
    stack = view.qk if norm is not None and norm.after_rope else effective_qk(view)
    return stack.expanded(torch.float64)


def _complex_rows(view: AttentionView) -> tuple[Tensor, Tensor]:
    """q_f and k_f of each head [h, planes, 2, ·], real and imaginary part."""
    planes = torch.tensor(inner_blocks(view).planes, device=view.q.device)
    q, k = _rows(view)
    return q[:, planes], k[:, planes]


def is_rotary(view: AttentionView) -> bool:
    """Whether some plane of queries and keys turns with position."""
    return isinstance(view.position, Rope) and bool(inner_blocks(view).planes)


def _rotary(view: AttentionView) -> str | None:
    return None if is_rotary(view) else "there are no rotary positions"


def _several(view: AttentionView) -> str | None:
    if view.heads == 1:
        return "there is one head"
    return _rotary(view)


_READS = frozenset({"q", "k", "qk_norm"})
_EFFECTIVE = declare(QK_FORM, qk_mean=Verdict.INVARIANT)
_EFFECTIVE_RATIO = declare(QK_RATIO, qk_mean=Verdict.INVARIANT)
_ROFORMER = "Su et al. 2021 (arXiv 2104.09864), eq. 16; derived"

ENTRIES: tuple[Invariant, ...] = (
    Invariant(
        "frequency_energies",
        frequency_energies,
        "|q_f||k_f| of each rotary plane",
        "q·k per x²",
        _ROFORMER,
        "≥ 0",
        2,
        "exact",
        _READS,
        _EFFECTIVE,
        _rotary,
        ("head",),
    ),
    Invariant(
        "frequency_shares",
        frequency_shares,
        "|q_f||k_f|/Σ_f |q_f||k_f|",
        "1",
        _ROFORMER,
        "0 … 1",
        0,
        "exact",
        _READS,
        _EFFECTIVE_RATIO,
        lambda view: (
            _rotary(view) or (None if len(inner_blocks(view).planes) > 1 else "one plane turns")
        ),
        ("head",),
        span=1.0,
    ),
    Invariant(
        "rotary_gram",
        rotary_gram,
        "mean over offsets n of ⟨B_i(n), B_j(n)⟩",
        "(q·k per x²)²",
        _ROFORMER,
        "positive semidefinite",
        4,
        "exact",
        _READS,
        _EFFECTIVE,
        _rotary,
        ("head", "head"),
    ),
    Invariant(
        "rotary_coherence",
        lambda view: coherence(rotary_gram(view)),
        "mean over i ≠ j of the squared cosines of B_i(n) and B_j(n), over all n",
        "1",
        _ROFORMER,
        "0 … 1",
        0,
        "exact",
        _READS,
        _EFFECTIVE_RATIO,
        _several,
        span=1.0,
    ),
)
