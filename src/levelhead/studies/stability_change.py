"""How far a quantity moved: one definition for every table of the stability study.

The largest |after - before| of its values, over the largest |value| of either. So a change is at
most 2, for what vanishes and for what appears alike, and small quantities are held against their
own size. Where the catalogue knows a natural scale (1 nat, 1 for a cosine), values below
`LEAST` of it are rounding before and after, and are not judged.
"""

from __future__ import annotations

from torch import Tensor

from levelhead.invariants.entry import Invariant
from levelhead.invariants.symmetry import relative_change

__all__ = ["LEAST", "STAYS", "change", "is_rounding"]

STAYS = 1e-6
"""A relative change below this is rounding."""
LEAST = 1e-9
"""Of its natural scale: rounding, some 1e-15 of that scale, is 1e-6 of what is as small."""


def is_rounding(entry: Invariant, size: float) -> bool:
    """Whether values of that largest size are too small, beside the entry's scale, to be judged."""
    return entry.span is not None and size <= LEAST * entry.span


def change(entry: Invariant, before: Tensor, after: Tensor) -> float | None:
    """The change from `before` to `after` (same shape); None where both are rounding, inf for NaN.

    >>> import torch
    >>> from levelhead.invariants.catalogue import catalogue
    >>> bound = catalogue()["entropy_bound"]  # in nat
    >>> change(bound, torch.tensor([0.5, 2.0]), torch.tensor([0.5, 1.5]))
    0.25
    >>> change(bound, torch.tensor([1e-29]), torch.tensor([1e-43])) is None
    True
    """
    difference = relative_change(before, after, span=1.0)
    if difference == float("inf"):
        return difference
    size = max(float(before.abs().max()), float(after.abs().max()))
    if is_rounding(entry, size):
        return None
    return difference / size if size > 0 else 0.0
