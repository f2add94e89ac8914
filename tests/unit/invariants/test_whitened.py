"""Numbers on data against dense twins, and the entropy bound against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from levelhead.base.errors import InputError
from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.whitened import (
    centred_row_entropy_bound,
    entropy_lower_bound,
    spectral_entropy_bound,
    typical_row_entropy_bound,
)
from oracles import invariants as twin
from oracles.layers import layer

# Entropies of short logits hardly differ.
EXACT = {"gtol": 1e-11}


def covariance(d: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(3 * d, d)) * np.linspace(0.1, 2, d)
    return x.T @ x / len(x)


def test_whitened_entries_are_those_of_dense_whitened_forms() -> None:
    view = layer(1, h=4, g=2, d_k=3, d_v=2)
    c = covariance(10)
    root = twin.square_root(c)
    b = np.stack([root @ x @ root for x in twin.forms(view)])
    m = np.stack([x @ root for x in twin.maps(view)])
    given = torch.tensor(c)

    def same(name: str, expected: object) -> None:
        found = catalogue()[name](view, given).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)

    sigma = twin.spectra(b, 3)
    same("whitened_qk_spectrum", sigma)
    same("whitened_qk_effective_rank", [twin.effective_rank(s) for s in sigma])
    same("whitened_qk_cosines", twin.cosines(twin.gram(b)))
    same("whitened_qk_coherence", twin.coherence(twin.gram(b)))
    same("whitened_ov_spectrum", twin.spectra(m, 2))
    same("logit_rms", view.logit_scale * np.sqrt((b**2).sum((1, 2))))


def test_logit_rms_is_that_of_tokens_drawn_apart() -> None:
    view = layer(1, h=2)
    c = covariance(10)
    random = np.random.default_rng(1)
    root = np.linalg.cholesky(c)
    x, y = (random.normal(size=(200_000, 10)) @ root.T for _ in range(2))
    logits = view.logit_scale * np.einsum("na,hab,nb->hn", x, twin.forms(view), y)
    found = catalogue()["logit_rms"](view, torch.tensor(c)).numpy()
    # The relative standard error of a second moment of products of Gaussians is about 1 %.
    np.testing.assert_allclose(np.sqrt((logits**2).mean(1)), found, rtol=0.05)


# ── Theorem 3.1 ──


@pytest.mark.parametrize("tokens", [2, 5, 16])
@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
def test_the_bound_is_the_least_entropy(tokens: int, size: float) -> None:
    """T11: never above a random case, and what an optimiser over the ball finds."""
    bound = float(entropy_lower_bound(size, tokens))
    random = np.random.default_rng(0)
    for _ in range(300):
        logits = random.normal(size=tokens)
        logits *= size / np.linalg.norm(logits)
        assert twin.entropy(logits) >= bound - 1e-12

    def least(z: np.ndarray) -> float:
        return 1e3 * twin.entropy(size * z / np.linalg.norm(z))

    starts = [random.normal(size=tokens) + 2 * np.eye(tokens)[0] for _ in range(4)]
    found = min(minimize(least, s, method="BFGS", options=EXACT).fun / 1e3 for s in starts)
    assert found == pytest.approx(bound, abs=4e-8)


@pytest.mark.parametrize("size", [0.5, 2.0, 6.0])
def test_the_bound_is_tight_at_a_centred_spike(size: float) -> None:
    tokens = 9
    spike = np.eye(tokens)[0] - 1 / tokens
    logits = size * spike / np.linalg.norm(spike)
    assert twin.entropy(logits) == pytest.approx(
        float(entropy_lower_bound(size, tokens)), abs=1e-12
    )


def test_the_bound_falls_from_log_t_to_zero() -> None:
    sizes = torch.tensor([0.0, 0.1, 1.0, 10.0, 1e3, 1e6])
    found = entropy_lower_bound(sizes, 64)
    assert float(found[0]) == pytest.approx(math.log(64), abs=1e-12)
    assert bool((found.diff() < 0).sum() >= 4)
    assert float(found[-1]) == 0.0
    assert bool(found.isfinite().all())
    with pytest.raises(InputError, match="at least 2"):
        entropy_lower_bound(1.0, 1)
    with pytest.raises(InputError, match="negative"):
        entropy_lower_bound(-1.0, 4)


def test_attention_of_real_tokens_keeps_above_the_bounds() -> None:
    """The layer's own scale is inside; centred rows give far more than the spectral bound."""
    view = layer(2, h=3, d_k=4, scale=0.7)
    random = np.random.default_rng(3)
    x = random.normal(size=(12, 10)) * 0.5
    size = np.linalg.norm(x @ x.T, 2)
    spectral = spectral_entropy_bound(view, 12, float(size)).numpy()
    for head, b in enumerate(twin.forms(view)):
        logits = 0.7 * x @ b @ x.T
        entropies = np.array([twin.entropy(row) for row in logits])
        assert (entropies >= spectral[head] - 1e-12).all()
        rows = centred_row_entropy_bound(torch.tensor(logits)).numpy()
        assert (entropies >= rows - 1e-12).all()
        assert rows.mean() > spectral[head]
    default = spectral_entropy_bound(view).numpy()
    norms = np.array([np.linalg.norm(b, 2) for b in twin.forms(view)])
    expected = entropy_lower_bound(torch.tensor(0.7 * norms * 128), 128).numpy()
    np.testing.assert_allclose(default, expected, rtol=1e-10, atol=1e-300)


def test_the_typical_row_has_the_length_that_the_bound_takes() -> None:
    """R² = T scale² tr(B C Bᵀ C) is the mean square length of rows of T independent keys."""
    view = layer(2, h=2, scale=0.05)
    c = covariance(10)
    root = torch.linalg.cholesky(torch.tensor(c))
    found = typical_row_entropy_bound(view, root, 20)
    squares = [0.05**2 * 20 * np.trace(b @ c @ b.T @ c) for b in twin.forms(view)]
    expected = entropy_lower_bound(torch.tensor(squares).sqrt(), 20)
    torch.testing.assert_close(found, expected)
