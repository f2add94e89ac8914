"""Debiased CKA against the estimator written from its definition, and its laws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.diagnostics.similarity import cka_matrix, debiased_cka


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hsic_by_counting(x: Tensor, y: Tensor) -> float:
    """The U-statistic itself: the mean over all ordered quadruples of different rows.

    Song et al. 2012, theorem 2: K_ij (L_ij + L_qr - 2 L_iq), expectation of HSIC.
    """
    one, other = x @ x.mT, y @ y.mT
    total, count = 0.0, 0
    for i, j, q, r in itertools.permutations(range(len(x)), 4):
        total += float(one[i, j] * (other[i, j] + other[q, r] - 2 * other[i, q]))
        count += 1
    return total / count


@pytest.mark.parametrize(("p", "q"), [(2, 3), (40, 2), (30, 50)])
def test_it_is_the_mean_over_all_quadruples(p: int, q: int) -> None:
    x, y = numbers(7, p, seed=1), numbers(7, q, seed=2)
    y[:, :2] += x[:, :2]
    expected = hsic_by_counting(x, y) / math.sqrt(hsic_by_counting(x, x) * hsic_by_counting(y, y))
    assert float(debiased_cka(x, y)) == pytest.approx(expected, rel=1e-9)


def biased(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    cross = (x.mT @ y).square().sum()
    return float(cross / ((x.mT @ x).norm() * (y.mT @ y).norm()))


def test_independent_features_are_near_zero_where_the_plain_estimator_is_not() -> None:
    """Before the run: 40 pairs at n = 128, p = 128; the bias that matters is 8 standard errors.

    One value spreads by about 1/n, so the mean of 40 by .0013; the plain one is .5 off.
    """
    plain, ours = [], []
    for seed in range(40):
        x, y = numbers(128, 128, seed=2 * seed), numbers(128, 128, seed=2 * seed + 1)
        plain.append(biased(x, y))
        ours.append(float(debiased_cka(x, y)))
    assert sum(plain) / 40 > 0.3
    assert abs(sum(ours) / 40) < 8 * 0.0013
    assert min(ours) < 0 < max(ours)


def test_rotations_factors_and_shifts_do_not_count() -> None:
    x, y = numbers(20, 6, seed=1), numbers(20, 5, seed=2)
    y[:, 0] = x[:, 0] ** 2
    turn = torch.linalg.qr(numbers(6, 6, seed=3))[0]
    expected = float(debiased_cka(x, y))
    moved = 1e3 * x @ turn + 50 * numbers(6, seed=4)
    assert float(debiased_cka(moved, 1e-3 * y)) == pytest.approx(expected, rel=1e-9)
    assert float(debiased_cka(moved, x)) == pytest.approx(1.0, rel=1e-9)
    # Other maps do count.
    stretched = x * torch.tensor([10.0, 1, 1, 1, 1, 1])
    assert abs(float(debiased_cka(stretched, y)) / expected - 1) > 0.05


def test_products_and_gram_matrices_agree() -> None:
    """Wide features are compared by Gram matrices, narrow ones by products; a matrix mixes both."""
    wide = [numbers(12, 90, seed=i) for i in range(3)]
    narrow = [w @ numbers(90, 2, seed=9) for w in wide]
    joined = cka_matrix([*wide, *narrow])
    assert torch.equal(joined, joined.mT)
    assert bool((joined.diagonal() == 1).all())
    alone = cka_matrix(narrow)
    assert torch.allclose(joined[3:, 3:], alone, rtol=1e-9)
    assert float(joined[0, 4]) == pytest.approx(float(debiased_cka(wide[0], narrow[1])), rel=1e-9)


def test_constant_features_are_nan_and_spoil_nothing() -> None:
    x, y = numbers(10, 3, seed=1), numbers(10, 3, seed=2)
    constant = torch.full((10, 2), 0.1, dtype=torch.float32)
    found = cka_matrix([x, constant, y])
    assert found[1].isnan().all()
    assert found[:, 1].isnan().all()
    assert float(found[0, 2]) == pytest.approx(float(debiased_cka(x, y)))
    assert math.isnan(float(debiased_cka(x, torch.zeros(10, 1))))


def test_tiny_and_huge_features_are_in_range() -> None:
    x = numbers(10, 3, seed=1)
    assert float(debiased_cka(1e-150 * x, 1e150 * x)) == pytest.approx(1.0)


def test_what_cannot_be_compared() -> None:
    x = numbers(10, 3, seed=1)
    with pytest.raises(InputError, match=r"\[10, 3\], \[9, 3\] were given; expected .* the same n"):
        debiased_cka(x, x[:9])
    with pytest.raises(InputError, match=r"3 examples were given; .* at least 4"):
        debiased_cka(x[:3], x[:3])
    with pytest.raises(InputError, match="not finite"):
        debiased_cka(x, x / 0)
    with pytest.raises(InputError, match="no features"):
        cka_matrix([])
