"""What an entry of the catalogue is: a function of a view, and what it declares about itself.

Axes as in `attention_view`. A declaration says for every generator of `weights.symmetry_group`
what a number does when a layer moves by it. Values may have heads (or key/value groups) along
their first axes: then a permutation of heads permutes them, and that is meant by invariant.

Two examples. The singular values of B_i do not see `qk_gauge`, which moves q and k but not their
product: declared invariant. The condition number of q sees it: declared variant.

A generator that moves nothing an entry reads needs no declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.symmetry_group import GENERATORS, Generator

__all__ = [
    "OV_MAP",
    "OV_RATIO",
    "QK_FORM",
    "QK_RATIO",
    "RANK",
    "Declared",
    "Invariant",
    "Verdict",
    "always",
    "declare",
    "square_root",
]


class Verdict(Enum):
    """What an entry does under a generator."""

    INVARIANT = "invariant"
    VARIANT = "variant"
    GENERIC = "variant in general"  # though special weights or fits may hide it: not tested
    NOT_APPLICABLE = "not applicable"

    def __str__(self) -> str:
        return self.value


INVARIANT, VARIANT, GENERIC = Verdict.INVARIANT, Verdict.VARIANT, Verdict.GENERIC
Declared = Verdict | Callable[[AttentionView], Verdict]
Kind = Literal["exact", "integer", "iterative", "data"]
_WITHOUT_GRADIENT = {
    "integer": "a count has no gradient",
    "iterative": "a fit at a fixed rank ends near its minimum, not at it",
}


def always(view: AttentionView) -> str | None:
    """An entry that exists for every layer."""
    return None


@dataclass(frozen=True)
class Invariant:
    """One entry: `function` of a view (kind "data": of a view and a root of E[x xᵀ]).

    Args:
        name, formula, unit, source: as they are printed.
        range: of values, in words.
        degree: values grow by c^degree if q, k, v and o all grow by c; None: not so.
        kind: "exact"; "integer", a count at the stated tolerance; "iterative", a fit at a fixed
            rank; "data", which takes a covariance. Counts and fits have no gradient test.
        reads: the fields of a view that it looks at.
        symmetries: for generators that move what it reads what it does under them.
        applies: (view) → why the entry does not exist for this layer, or None.
        per: what the first axes run over, "head" or "group"; other axes are sorted or fixed.
        tolerance: the largest relative change that is rounding.
        span: what changes are measured against; by default the largest value.
        through: (view) → what `function` takes instead of the view; entries that share it share
            the work.
        smooth: what the gradient test differentiates instead (for eigenvalues: power sums).
        no_gradient: why there is no gradient test; empty where there is one.
    """

    name: str
    function: Callable[..., Tensor]
    formula: str
    unit: str
    source: str
    range: str
    degree: int | None
    kind: Kind
    reads: frozenset[str]
    symmetries: Mapping[str, Declared]
    applies: Callable[[AttentionView], str | None] = always
    per: tuple[Literal["head", "group"], ...] = ()
    tolerance: float = 1e-8
    span: float | None = None
    through: Callable[[AttentionView], Any] | None = None
    smooth: Callable[..., Tensor] | None = None
    no_gradient: str = ""

    def __post_init__(self) -> None:
        if self.kind in _WITHOUT_GRADIENT:
            object.__setattr__(self, "no_gradient", _WITHOUT_GRADIENT[self.kind])
        unknown = set(self.symmetries) - set(GENERATORS)
        assert not unknown, f"{self.name} declares unknown generators {sorted(unknown)}"

    @property
    def gradient(self) -> bool:
        """Whether there is a gradient test."""
        return not self.no_gradient

    def __call__(self, view: AttentionView, covariance: Tensor | None = None) -> Tensor:
        """The value, float64 (or int64, complex128).

        `covariance` [d, d] is needed, and looked at, by the kind "data". Raises InputError where
        the entry does not exist for this layer, with the reason.
        """
        if (reason := self.applies(view)) is not None:
            raise InputError(f"{view.name} has no {self.name}: {reason}")
        if self.kind != "data":
            return self.function(view if self.through is None else self.through(view))
        if covariance is None or covariance.shape != (view.d, view.d):
            given = "none" if covariance is None else list(covariance.shape)
            raise InputError(
                f"{self.name} needs the covariance of the layer's input: expected "
                f"[{view.d}, {view.d}], {given} was given"
            )
        return self.function(view, square_root(covariance))

    def verdict(self, view: AttentionView, generator: Generator) -> tuple[Verdict, str]:
        """What the entry declares for this layer and generator, with the reason if it says none."""
        if (reason := self.applies(view)) is not None:
            return Verdict.NOT_APPLICABLE, reason
        if not generator.moves & self.reads:
            return Verdict.INVARIANT, "it does not read what moves"
        declared = self.symmetries[generator.name]
        return (declared if isinstance(declared, Verdict) else declared(view)), ""


def square_root(covariance: Tensor) -> Tensor:
    """A matrix L [d, n] with L Lᵀ = the covariance [d, d], float64; it may be singular.

    Values that speak of L do so through L Lᵀ only. Raises InputError for a matrix that is not
    symmetric, or has an eigenvalue below zero by more than rounding.

    >>> square_root(torch.diag(torch.tensor([4.0, 9.0])))
    tensor([[2., 0.],
            [0., 3.]], dtype=torch.float64)
    """
    c = covariance.double()
    if c.ndim != 2 or c.shape[0] != c.shape[1] or not torch.allclose(c, c.mT, rtol=1e-5):
        raise InputError(f"a covariance {list(c.shape)} was given; expected a symmetric [d, d]")
    values, vectors = torch.linalg.eigh((c + c.mT) / 2)
    if float(values[0]) < -1e-6 * float(values[-1].abs()):
        raise InputError(
            f"the covariance has the eigenvalue {float(values[0]):.3g}: it is no covariance"
        )
    root: Tensor = vectors * values.clamp_min(0).sqrt() @ vectors.mT
    return root


# ── declarations that many entries share ──


def declare(base: Mapping[str, Declared] | Verdict, **changes: Declared) -> dict[str, Declared]:
    """A declaration for every generator: that of `base`, but for the generators named."""
    start = dict.fromkeys(GENERATORS, base) if isinstance(base, Verdict) else base
    return {**start, **changes}


# Of B alone, with its size: the scales of normed queries and keys, and of scores, show.
QK_FORM = declare(
    INVARIANT,
    qk_scale=VARIANT,
    qk_mean=VARIANT,
    score_scale=VARIANT,
    input_gain=VARIANT,
    input_mean=VARIANT,
)
# Of each B_i up to its size.
QK_RATIO = declare(QK_FORM, qk_scale=INVARIANT, score_scale=INVARIANT)
# Of M alone.
OV_MAP = declare(QK_FORM, qk_scale=INVARIANT, qk_mean=INVARIANT)
OV_RATIO = declare(OV_MAP, score_scale=INVARIANT)
# Ranks see no scales, and means only where weights have structure.
RANK = declare(QK_RATIO, input_gain=INVARIANT, qk_mean=GENERIC, input_mean=GENERIC)
