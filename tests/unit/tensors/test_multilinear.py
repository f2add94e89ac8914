"""Unfoldings, products, norms and spectra against loops and dense SVDs."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch

import levelhead.tensors.multilinear
from levelhead.base.errors import InputError
from levelhead.tensors.multilinear import (
    fold,
    gram,
    mode_product,
    mode_singular_values,
    multi_mode_product,
    multilinear_rank,
    norm,
    squared_norm,
    unfold,
)
from oracles import tensors as oracle

SHAPES = [(3, 4), (2, 3, 4), (4, 3, 2), (3, 2, 5, 3), (1, 4, 1, 2)]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def test_examples_in_the_docstrings() -> None:
    found = doctest.testmod(levelhead.tensors.multilinear)
    assert found.attempted > 5
    assert found.failed == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_unfoldings_and_products_entry_by_entry(shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    matrices = [draw(2 + k, n, seed=k) for k, n in enumerate(shape)]
    for mode, matrix in enumerate(matrices):
        rows = unfold(torch.tensor(x), mode)
        np.testing.assert_array_equal(rows, oracle.unfold(x, mode))
        np.testing.assert_array_equal(fold(rows, mode, shape), x)
        np.testing.assert_array_equal(fold(rows, mode - len(shape), shape), x)
        got = mode_product(torch.tensor(x), torch.tensor(matrix), mode)
        np.testing.assert_allclose(got, oracle.mode_product(x, matrix, mode), rtol=0, atol=1e-13)
        rows = oracle.unfold(x, mode)
        np.testing.assert_allclose(gram(torch.tensor(x), mode), rows @ rows.T, rtol=0, atol=1e-13)
    given = [torch.tensor(m) for m in matrices]
    got = multi_mode_product(torch.tensor(x), given)
    np.testing.assert_allclose(got, oracle.tucker_model(x, matrices), rtol=0, atol=1e-11)
    got = multi_mode_product(torch.tensor(x), [g.mT for g in given], skip=-1, transpose=True)
    np.testing.assert_allclose(got, oracle.tucker_model(x, matrices[:-1]), rtol=0, atol=1e-11)
    kept = [None, *given[1:]]
    got = multi_mode_product(torch.tensor(x), kept)
    expected = oracle.tucker_model(x, [np.eye(shape[0]), *matrices[1:]])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [*SHAPES, (5, 300, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mode_singular_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.tensor(draw(*shape)).to(dtype)
    for mode in range(len(shape)):
        expected = oracle.mode_singular_values(x.double().numpy(), mode)
        got = mode_singular_values(x, mode)
        assert got.dtype == torch.float64
        limit = 1e-13 if dtype == torch.float64 else 1e-7
        np.testing.assert_allclose(got, expected, rtol=0, atol=limit * expected[0])


def test_small_singular_values_of_float64_survive() -> None:
    """A Gram matrix would put 1e-8 of the largest value in place of 1e-11."""
    u, v = (np.linalg.qr(draw(n, 3, seed=n))[0] for n in (4, 30))
    x = torch.tensor(u * np.array([1.0, 1e-5, 1e-11]) @ v.T).reshape(4, 5, 6)
    got = mode_singular_values(x, 0)
    np.testing.assert_allclose(got[:3], [1.0, 1e-5, 1e-11], rtol=1e-4)


def test_multilinear_rank() -> None:
    parts = [draw(n, r, seed=n) for n, r in ((5, 2), (6, 3), (7, 4))]
    x = torch.tensor(oracle.tucker_model(draw(2, 3, 4), parts))
    assert multilinear_rank(x) == (2, 3, 4)
    assert multilinear_rank(x.float()) == (2, 3, 4)
    assert multilinear_rank(x + 1e-6 * torch.tensor(draw(5, 6, 7)), 1e-3) == (2, 3, 4)
    assert multilinear_rank(x + 1e-6 * torch.tensor(draw(5, 6, 7))) == (5, 6, 7)
    assert multilinear_rank(torch.zeros(2, 3)) == (0, 0)


def test_the_norm_of_many_float32_entries_is_summed_in_float64() -> None:
    """What float32 accumulation loses: a constant's square, added five million times."""
    x = torch.full((5, 1_000_003), 0.1)
    exact = float(np.float32(0.1)) ** 2
    assert float(squared_norm(x)) == pytest.approx(exact * x.numel(), rel=1e-13)
    assert float(norm(x.reshape(-1))) == pytest.approx((exact * x.numel()) ** 0.5, rel=1e-13)
    naive = np.float32(0.0)
    for part in np.full(5000, np.float32(0.1) ** 2 * 1000, dtype=np.float32):
        naive = naive + part
    assert abs(naive / (exact * 5e6) - 1) > 1e-7  # so that the promise above means something


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_summed_in_float64(dtype: torch.dtype) -> None:
    x = torch.tensor(100 * draw(3, 40, 7)).to(dtype)  # the squares overflow float16
    wide = x.double().numpy()
    assert float(squared_norm(x)) == pytest.approx(float((wide**2).sum()), rel=1e-14)
    np.testing.assert_allclose(gram(x, 1), oracle.unfold(wide, 1) @ oracle.unfold(wide, 1).T)


def test_gram_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levelhead.tensors.multilinear, "_CHUNK", 24)
    for shape in ((6, 3, 8), (6, 8, 3), (4, 6, 1), (20, 3)):
        x = draw(*shape)
        for mode in range(len(shape)):
            rows = oracle.unfold(x, mode)
            np.testing.assert_allclose(gram(torch.tensor(x), mode), rows @ rows.T, atol=1e-12)
        assert float(squared_norm(torch.tensor(x))) == pytest.approx((x**2).sum(), rel=1e-14)


def test_squared_norm_has_its_gradient() -> None:
    x = torch.tensor(draw(3, 4), requires_grad=True)
    squared_norm(x).backward()
    np.testing.assert_allclose(x.grad, 2 * draw(3, 4), rtol=1e-15)


def test_errors_say_what_was_expected() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"mode 2 was given for a tensor of 2 axes"):
        unfold(x, 2)
    with pytest.raises(InputError, match=r"\[4, 5\] cannot multiply axis 1 .* expected \[r, 3\]"):
        mode_product(x, torch.zeros(4, 5), 1)
    with pytest.raises(InputError, match=r"expected \[3, 2\]"):
        fold(x, 1, (2, 3))
    with pytest.raises(InputError, match="mode -3 was given"):
        fold(x, -3, (2, 3))
    with pytest.raises(InputError, match="1 matrices were given"):
        multi_mode_product(x, [None])
    with pytest.raises(InputError, match=r"torch.int64 was given"):
        gram(torch.zeros(2, 3, dtype=torch.int64), 0)
    with pytest.raises(InputError, match=r"torch.complex64 was given"):
        mode_singular_values(torch.zeros(2, 3, dtype=torch.complex64), 0)
