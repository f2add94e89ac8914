"""Slow twins of the tensor algebra in float64 NumPy: loops, dense SVDs, normal equations."""

from __future__ import annotations

import itertools

import numpy as np


def unfold(x: np.ndarray, mode: int) -> np.ndarray:
    """Entry by entry: column number is the C-order index over the other axes."""
    rest = [n for k, n in enumerate(x.shape) if k != mode]
    out = np.zeros((x.shape[mode], int(np.prod(rest))))
    for index in itertools.product(*(range(n) for n in x.shape)):
        column = 0
        for k, n in enumerate(x.shape):
            if k != mode:
                column = column * n + index[k]
        out[index[mode], column] = x[index]
    return out


def mode_product(x: np.ndarray, a: np.ndarray, mode: int) -> np.ndarray:
    """Σ_j a[i, j] x[…, j, …]."""
    out = np.zeros((*x.shape[:mode], a.shape[0], *x.shape[mode + 1 :]))
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            here = (*[slice(None)] * mode, i)
            there = (*[slice(None)] * mode, j)
            out[here] += a[i, j] * x[there]
    return out


def tucker_model(core: np.ndarray, factors: list[np.ndarray]) -> np.ndarray:
    for mode, factor in enumerate(factors):
        core = mode_product(core, factor, mode)
    return core


def mode_singular_values(x: np.ndarray, mode: int) -> np.ndarray:
    return np.linalg.svd(unfold(x, mode), compute_uv=False)


def dense_stack(
    left: np.ndarray,
    right: np.ndarray,
    group: tuple[int, ...] | None = None,
    left_group: tuple[int, ...] | None = None,
) -> np.ndarray:
    """A_i = left[a_i]ᵀ right[b_i], one slice after another."""
    a = left_group or tuple(range(len(left)))
    b = group or tuple(range(len(right)))
    return np.stack([left[i].T @ right[j] for i, j in zip(a, b, strict=True)])


def hooi(x: np.ndarray, ranks: tuple[int, ...], sweeps: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """HOOI from the HOSVD with a full SVD of every partial projection."""
    factors = [
        np.linalg.svd(unfold(x, k), full_matrices=False)[0][:, :r] for k, r in enumerate(ranks)
    ]
    for _ in range(sweeps):
        for k, r in enumerate(ranks):
            y = x
            for j, factor in enumerate(factors):
                y = y if j == k else mode_product(y, factor.T, j)
            factors[k] = np.linalg.svd(unfold(y, k), full_matrices=False)[0][:, :r]
    core = x
    for k, factor in enumerate(factors):
        core = mode_product(core, factor.T, k)
    return core, factors


def sthosvd_error(x: np.ndarray, ranks: tuple[int, ...], order: list[int]) -> float:
    """Relative error of sequential truncation in the given order, by SVDs and projections."""
    y, model = x, x
    for k in order:
        u = np.linalg.svd(unfold(y, k), full_matrices=False)[0][:, : ranks[k]]
        y = mode_product(y, u.T, k)
        model = mode_product(model, u @ u.T, k)
    return float(np.linalg.norm((x - model).ravel()) / np.linalg.norm(x.ravel()))


def khatri_rao(factors: list[np.ndarray]) -> np.ndarray:
    """Column by column, by Kronecker products."""
    columns = []
    for r in range(factors[0].shape[1]):
        column = np.ones(1)
        for factor in factors:
            column = np.kron(column, factor[:, r])
        columns.append(column)
    return np.stack(columns, 1)


def cp_model(weights: np.ndarray, factors: list[np.ndarray]) -> np.ndarray:
    """Σ_r w_r a_r ∘ b_r ∘ …"""
    out = np.zeros([f.shape[0] for f in factors])
    for r, w in enumerate(weights):
        term = np.array(w)
        for factor in factors:
            term = np.multiply.outer(term, factor[:, r])
        out += term
    return out


def als(
    x: np.ndarray, factors: list[np.ndarray], order: list[int], sweeps: int
) -> list[np.ndarray]:
    """Plain alternating least squares: one dense least-squares problem a mode."""
    factors = list(factors)
    for _ in range(sweeps):
        for k in order:
            others = khatri_rao([f for j, f in enumerate(factors) if j != k])
            factors[k] = np.linalg.lstsq(others, unfold(x, k).T, rcond=None)[0].T
    return factors


def core_consistency(x: np.ndarray, weights: np.ndarray, factors: list[np.ndarray]) -> float:
    """Bro & Kiers (2003): least-squares core by pseudo-inverses against the superdiagonal."""
    loaded = [*factors[:-1], factors[-1] * weights]
    core = x
    for k, factor in enumerate(loaded):
        core = mode_product(core, np.linalg.pinv(factor), k)
    ideal = np.zeros_like(core)
    for r in range(len(weights)):
        ideal[(r,) * x.ndim] = 1.0
    return float(100.0 * (1.0 - ((core - ideal) ** 2).sum() / len(weights)))
