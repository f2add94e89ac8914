"""Slow twins of σReparam in float64 NumPy: exact singular values, one power step, the gradient."""

from __future__ import annotations

import numpy as np


def spectral_norm(w: np.ndarray) -> float:
    """Largest singular value, from the eigenvalues of WᵀW."""
    return float(np.sqrt(np.linalg.eigvalsh(w.T @ w)[-1]))


def leading(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit u, v with W v = σ u."""
    v = np.linalg.eigh(w.T @ w)[1][:, -1]
    image = w @ v
    return image / np.linalg.norm(image), v


def reparametrised(w: np.ndarray, gamma: float) -> np.ndarray:
    """γ W/σ(W) with the exact σ."""
    return gamma * w / spectral_norm(w)


def power_step(w: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u ← W v/‖W v‖, v ← Wᵀ u/‖Wᵀ u‖."""
    u = w @ v
    u = u / np.sqrt(np.sum(u * u))
    v = w.T @ u
    return u, v / np.sqrt(np.sum(v * v))


def estimated(w: np.ndarray, gamma: float, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """γ W/(uᵀ W v) for given vectors."""
    return gamma * w / float(u @ w @ v)


def gradient(
    w: np.ndarray, gamma: float, u: np.ndarray, v: np.ndarray, back: np.ndarray
) -> tuple[np.ndarray, float]:
    """Gradients in W and γ of ⟨back, Ŵ⟩, entry by entry from dŴ = γ/σ (dW − ⟨u vᵀ, dW⟩ W/σ)."""
    sigma = float(u @ w @ v)
    out = np.zeros_like(w)
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            d_w = np.zeros_like(w)
            d_w[i, j] = 1.0
            d_hat = gamma / sigma * (d_w - u[i] * v[j] * w / sigma)
            out[i, j] = np.sum(back * d_hat)
    return out, float(np.sum(back * w) / sigma)
