"""Decompositions of a layer's tensors as numbers: mode spectra of the form stacks, CP fits.

Axes as in `attention_view`. 𝓑 [h, d, d_source] stacks the forms B_i, 𝓜 [h, d_out, d_source] the
maps M_i; both are decomposed from their factors. T [h, d_k, d, 3] is the raw head tensor, basis
dependent. Modes count from 0: head, then query (output), then key (value).

Two examples. Identical heads: 𝓑 has the head spectrum (√h ‖B‖, 0, …). One head that writes what
another reads leaves its key and output spectra apart: modes are compared within a stack only.

CP fits have a fixed rank, 4 for all but the smallest layers, and start from singular vectors:
the same fit for the same layer, up to rounding that grows over the sweeps. Only h columns of a
factor over heads can be orthogonal: the coherence of R > h is at least √((R - h)/(h (R - 1))).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from levelhead.base.errors import LevelheadWarning
from levelhead.invariants.entry import (
    OV_MAP,
    QK_FORM,
    RANK,
    Invariant,
    Verdict,
    always,
)
from levelhead.invariants.raw import RAW, has_raw_tensor, largest_singular_value
from levelhead.invariants.spectral import THROUGH, stack_of
from levelhead.tensors.cp import CPTensor, cp
from levelhead.tensors.factored_svd import triangles
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.multilinear import numerical_rank
from levelhead.weights.attention_view import AttentionView

__all__ = [
    "ENTRIES",
    "column_coherence",
    "cp_of",
    "cp_rank",
    "factor_reciprocal_conditions",
    "stack_core_slice_norms",
]

RANK_TOLERANCE = 1e-7  # what the head mode's Gram matrix resolves
Which = Literal["qk", "ov"]
What = Literal["qk", "ov", "raw"]


# ── functions ──


def cp_rank(view: AttentionView) -> int:
    """The rank of the catalogue's CP fits: 4, and no more than h, g·d_k and g·d_v.

    Beyond the ranks of the unfoldings starts would be arbitrary, and fits with them.
    """
    return min(4, view.heads, view.groups * min(view.d_k, view.d_v))


def cp_of(view: AttentionView, what: What, rank: int | None = None) -> CPTensor:
    """CP fit of 𝓑, 𝓜 or T, from singular vectors, at the catalogue's rank by default.

    A degenerate fit is told by its `degeneracy`, without a warning.
    """
    target: Tensor | LowRankStack
    target = (
        view.head_tensor().double() if what == "raw" else stack_of(view, what).to(torch.float64)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LevelheadWarning)
        return cp(target, rank or cp_rank(view), sweeps=100)


def column_coherence(factor: Tensor) -> Tensor:
    """max_{r≠s} |cos| of the columns of a factor [n, R]: a scalar, 0 for one column.

    >>> column_coherence(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    tensor(0.7071)
    """
    lengths = torch.linalg.vector_norm(factor, dim=0)
    unit = factor / torch.where(lengths > 0, lengths, 1.0)
    gram = (unit.mT @ unit).abs()
    return (gram - torch.diag(gram.diagonal())).max()


def factor_reciprocal_conditions(fit: CPTensor) -> Tensor:
    """σ_min/σ_max of each factor [modes], over min(n, R) values."""
    values = [torch.linalg.svdvals(f) for f in fit.factors]
    return torch.stack([v[-1] / torch.where(v[0] > 0, v[0], 1.0) for v in values])


def stack_core_slice_norms(stack: LowRankStack) -> Tensor:
    """Largest singular value [h] of each head slice of the HOSVD core of the stacked tensor.

    Slice a is Σ_i u_ia A_i, u the eigenvectors of the head Gram, falling: the principal mixtures
    of heads. From factors: with all rows of both sides in one [h r, ·] it is leftᵀ D_a right.
    Without gradient.
    """
    with torch.no_grad():
        vectors = torch.linalg.eigh(stack.head_gram()).eigenvectors.flip(1)
        left, right = (triangles(f.flatten(0, 1)) for f in stack.expanded(torch.float64))
        r = stack.inner
        norms = []
        for column in vectors.unbind(1):
            mixed = (left * column.repeat_interleave(r)) @ right.mT
            norms.append(largest_singular_value(mixed))
        return torch.stack(norms)


def _ranks(stack: LowRankStack) -> Tensor:
    spectra = [stack.mode_singular_values(mode) for mode in range(3)]
    return torch.tensor([numerical_rank(s, RANK_TOLERANCE) for s in spectra])


# ── rows of the catalogue ──

INVARIANT, VARIANT, GENERIC = Verdict.INVARIANT, Verdict.VARIANT, Verdict.GENERIC
_READS = {"qk": frozenset({"q", "k"}), "ov": frozenset({"v", "o"})}
_UNIT = {"qk": "q·k per x²", "ov": "y per x"}
_STACK = {"qk": "𝓑", "ov": "𝓜"}
_SIDES = {"qk": ("head", "query", "key"), "ov": ("head", "output", "value")}
_LATHAUWER = "De Lathauwer et al. 2000"
_KOLDA = "Kolda & Bader 2009, sec. 3"


def _fitted_raw(view: AttentionView) -> str | None:
    if view.tied:
        return "queries and keys are one parameter: T holds it twice, and has no best fit"
    return has_raw_tensor(view)


def _several(view: AttentionView) -> str | None:
    return "there is one head" if view.heads == 1 else None


def _stacks(which: Which) -> tuple[Invariant, ...]:
    sized = QK_FORM if which == "qk" else OV_MAP
    common: dict[str, Any] = {
        "kind": "exact",
        "reads": _READS[which],
        "source": _LATHAUWER,
        "through": THROUGH[which],
    }
    found = []
    for mode, side in enumerate(_SIDES[which]):
        found.append(
            Invariant(
                f"{which}_stack_{side}_spectrum",
                lambda stack, mode=mode: stack.mode_singular_values(mode),
                f"σ of the {side} unfolding of {_STACK[which]}; core slice norms",
                unit=_UNIT[which],
                range="≥ 0, falling",
                degree=2,
                symmetries=sized,
                # The head mode comes from the Gram matrix, which resolves the root of rounding.
                # σ have no gradient where they vanish: sums of their powers are differentiated.
                tolerance=1e-6 if mode == 0 else 1e-8,
                smooth=partial(_energies, which=which, mode=mode),
                **common,
            )
        )
    found.append(
        Invariant(
            f"{which}_stack_ranks",
            _ranks,
            f"multilinear ranks of {_STACK[which]} at {RANK_TOLERANCE:g}",
            unit="1",
            range="0 … h, d, d",
            degree=0,
            symmetries=RANK,
            **common | {"kind": "integer"},
        )
    )
    found.append(
        Invariant(
            f"{which}_core_slice_norms",
            stack_core_slice_norms,
            f"‖Σ_i u_ia A_i‖₂ of {_STACK[which]}, u the eigenvectors of the head Gram",
            unit=_UNIT[which],
            range="≥ 0",
            degree=2,
            symmetries=sized,
            applies=_several,
            tolerance=1e-6,
            no_gradient="eigenvectors of the head Gram have none where its eigenvalues meet",
            **common,
        )
    )
    return tuple(found)


def _energies(view: AttentionView, which: Which, mode: int) -> Tensor:
    """Σ σ^2p of the mode for p = 1, 2, 3, differentiable.

    Modes 1 and 2: Σ_i A_i A_iᵀ has the non-zero eigenvalues of D W, with W the Gram matrix of all
    rows of that side [h r, h r] and D the block diagonal one of the other side's heads.
    """
    stack = stack_of(view, which)
    if mode == 0:
        gram = stack.head_gram()
    else:
        own, other = stack.expanded(torch.float64)[:: 1 if mode == 1 else -1]
        rows = own.flatten(0, 1)
        blocks = (rows @ rows.mT).reshape(len(stack), stack.inner, -1)
        gram = (other @ other.mT @ blocks).flatten(0, 1)
    square = gram @ gram
    return torch.stack([m.diagonal().sum() for m in (gram, square, square @ gram)])


def _fits(what: What) -> tuple[Invariant, ...]:
    raw = what == "raw"
    fixed = what == "ov"
    sized = RAW if raw else OV_MAP if fixed else QK_FORM
    # How strongly a fit of T feels a move depends on whose components it holds, and so does whether
    # the shape of any fit feels scales of single heads.
    shape = {n: GENERIC if v is VARIANT else v for n, v in sized.items()}
    sized = shape if raw else sized
    symbol = "T" if raw else _STACK[what]
    fit_of = partial(cp_of, what=what)  # one object for all rows: they share its fits

    def row(name: str, of: Callable[[CPTensor], Tensor], formula: str, **more: Any) -> Invariant:
        settings: dict[str, Any] = {
            "unit": "1",
            "source": _KOLDA,
            "range": "0 … 1",
            "degree": 0,
            "kind": "iterative",
            "reads": frozenset({"q", "k", "v"}) if raw else _READS[what],
            "symmetries": shape,
            "applies": _fitted_raw if raw else always,
            "tolerance": 1e-3,
            "through": fit_of,
            "span": 1.0,
            **more,
        }
        return Invariant(
            f"{what}_cp_{name}",
            of,
            formula.format(symbol),
            **settings,
        )

    def error(fit: CPTensor) -> Tensor:
        return torch.tensor(fit.relative_error, dtype=torch.float64)

    def degeneracy(fit: CPTensor) -> Tensor:
        return torch.tensor(fit.degeneracy, dtype=torch.float64)

    rows = [
        row("error", error, "‖{0} - fit‖/‖{0}‖ at rank 4"),
        row(
            "weights",
            lambda fit: fit.weights,
            "component weights of {0}",
            unit="weights" if raw else _UNIT[what],
            range="≥ 0, falling",
            degree=1 if raw else 2,
            span=None,
            symmetries=sized,
        ),
        row("head_coherence", lambda fit: column_coherence(fit.factors[0]),
            "max_{{r≠s}} |cos(a_r, a_s)| of the head factor of {0}"),
        row("factor_conditions", factor_reciprocal_conditions,
            "σ_min/σ_max of each factor of {0}"),
        row("degeneracy", degeneracy, "min_{{r≠s}} Π_modes cos of components r and s of {0}",
            range="-1 … 1", source="Kruskal et al. 1989; border rank"),
    ]  # fmt: skip
    if raw:
        rows.append(
            row("shares", lambda fit: fit.shares(), "shares of q, k and v in each component of {0}")
        )
    return tuple(rows)


ENTRIES: tuple[Invariant, ...] = (
    *_stacks("qk"),
    *_stacks("ov"),
    *_fits("qk"),
    *_fits("ov"),
    *_fits("raw"),
)
