"""The one definition of change of the stability study, on values chosen by hand."""

from __future__ import annotations

import math

import pytest
import torch

from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.entry import Invariant
from levelhead.studies.stability_change import LEAST, change, is_rounding

BOUND = catalogue()["entropy_bound"]  # its natural scale is 1 nat
NORM = catalogue()["query_norm"]  # none is known
RANK = catalogue()["qk_rank"]


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2.0, 4.0), (2.0, 5.0), 0.2),  # over the larger of the two sizes
        ((2.0, 5.0), (2.0, 4.0), 0.2),
        ((4.0,), (0.0,), 1.0),
        ((3.0,), (-3.0,), 2.0),
        ((1e-4,), (2e-4,), 0.5),  # absolutely this is next to nothing
        ((1e-29,), (1e-4,), 1.0),  # and this no ratio to almost nothing
        ((1e-4,), (1e-4,), 0.0),
    ],
)
@pytest.mark.parametrize("entry", [BOUND, NORM])
def test_a_change_is_relative_to_the_size_of_the_quantity(
    entry: Invariant, before: tuple[float, ...], after: tuple[float, ...], expected: float
) -> None:
    found = change(entry, numbers(*before), numbers(*after))
    assert found == pytest.approx(expected, rel=1e-10)


def test_what_is_rounding_before_and_after_is_not_judged() -> None:
    assert change(BOUND, numbers(2.5e-29), numbers(4.7e-43)) is None
    assert change(BOUND, numbers(0.0), numbers(0.0)) is None
    # Without a natural scale a small value is a value.
    assert change(NORM, numbers(2.5e-29), numbers(1e-29)) == pytest.approx(0.6, rel=1e-10)
    assert is_rounding(BOUND, LEAST)
    assert not is_rounding(BOUND, 2 * LEAST)
    assert not is_rounding(NORM, 0.0)


def test_whole_numbers_are_measured_likewise() -> None:
    assert change(RANK, torch.tensor([4, 4]), torch.tensor([4, 3])) == 0.25
    assert change(RANK, torch.tensor([0]), torch.tensor([0])) == 0.0


def test_complex_values_are_sets() -> None:
    entry = catalogue()["qk_eigenvalues"]
    one = torch.tensor([[1 + 1j, 2 + 0j]], dtype=torch.complex128)
    assert change(entry, one, one.flip(-1)) == 0.0
    assert change(entry, one, 2 * one) == pytest.approx(0.5)


def test_what_is_no_number_has_moved() -> None:
    assert change(BOUND, numbers(math.nan), numbers(1.0)) == math.inf
    assert change(BOUND, numbers(1.0), numbers(math.nan)) == math.inf
