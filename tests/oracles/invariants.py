"""Slow twins of the catalogue in float64 NumPy, from dense forms, and of its gradients.

Everything starts from the dense B_i [d, d_source] and M_i [d_out, d_source], multiplied out one by
one.
"""

from __future__ import annotations

import itertools

import numpy as np
import scipy.linalg

from levelhead.weights.attention_view import AttentionView


def forms(view: AttentionView) -> np.ndarray:
    """B_i = q_iᵀ k_g(i)."""
    q, k = view.q.double().numpy(), view.k.double().numpy()
    return np.stack([q[i].T @ k[g] for i, g in enumerate(view.kv_group)])


def maps(view: AttentionView) -> np.ndarray:
    """M_i = o_i v_g(i)."""
    o, v = view.o.double().numpy(), view.v.double().numpy()
    return np.stack([o[i] @ v[g] for i, g in enumerate(view.kv_group)])


def spectra(stack: np.ndarray, count: int) -> np.ndarray:
    return np.stack([np.linalg.svd(a, compute_uv=False)[:count] for a in stack])


def effective_rank(sigma: np.ndarray) -> float:
    p = sigma / sigma.sum()
    p = p[p > 1e-14]
    return float(np.exp(-(p * np.log(p)).sum()))


def gram(stack: np.ndarray) -> np.ndarray:
    h = len(stack)
    out = np.zeros((h, h))
    for i, j in itertools.product(range(h), repeat=2):
        out[i, j] = (stack[i] * stack[j]).sum()
    return out


def cosines(g: np.ndarray) -> np.ndarray:
    length = np.sqrt(np.diag(g))
    return g / np.outer(length, length)


def coherence(g: np.ndarray) -> float:
    c, h = cosines(g), len(g)
    return sum(c[i, j] ** 2 for i in range(h) for j in range(h) if i != j) / (h * (h - 1))


def coherence_gradient(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """∂q_i = k_i Γ_iᵀ and ∂k_i = q_i Γ_i with the slope Γ_i of coherence in B_i.

    Γ_i = 4/(h(h-1)‖B_i‖) [Σ_{j≠i} C_ij B̂_j - (Σ_{j≠i} C_ij²) B̂_i].
    """
    h = len(q)
    b = np.stack([q[i].T @ k[i] for i in range(h)])
    norms = np.sqrt((b**2).sum((1, 2)))
    unit = b / norms[:, None, None]
    c = cosines(gram(b))
    to_q, to_k = np.zeros_like(q), np.zeros_like(k)
    for i in range(h):
        others = [j for j in range(h) if j != i]
        slope = sum(c[i, j] * unit[j] for j in others)
        slope = slope - sum(c[i, j] ** 2 for j in others) * unit[i]
        slope = 4 / (h * (h - 1) * norms[i]) * slope
        to_q[i], to_k[i] = k[i] @ slope.T, q[i] @ slope
    return to_q, to_k


def participation(g: np.ndarray) -> float:
    return float(np.trace(g) ** 2 / (g**2).sum())


def entropy_rank(g: np.ndarray) -> float:
    p = np.linalg.eigvalsh(g) / np.trace(g)
    p = p[p > 1e-14]
    return float(np.exp(-(p * np.log(p)).sum()))


def log_det(g: np.ndarray, eps: float = 1e-3) -> float:
    c, h = cosines(g), len(g)
    sign, value = np.linalg.slogdet(c + eps * np.eye(h))
    assert sign > 0
    return float(-value / h + np.log1p(eps))


def nuclear_ratio(g: np.ndarray, eps: float = 1e-3) -> float:
    values = np.clip(np.linalg.eigvalsh(g), 0, None)
    roots = np.sqrt(values + eps**2 * values.mean()).sum()
    return float(roots**2 / (len(g) * values.sum()))


def unfolding_spectrum(stack: np.ndarray, mode: int) -> np.ndarray:
    rows = np.moveaxis(stack, mode, 0).reshape(stack.shape[mode], -1)
    values = np.linalg.svd(rows, compute_uv=False)
    return np.pad(values, (0, stack.shape[mode] - len(values)))


def procrustes(stack: np.ndarray, r: int) -> np.ndarray:
    """min over rotations of the balanced factors' distance, squared, by orthogonal Procrustes."""
    factors = []
    for a in stack:
        u, s, v = np.linalg.svd(a)
        root = np.sqrt(s[:r])[:, None]
        factors.append(np.concatenate([root * u[:, :r].T, root * v[:r]], axis=1))
    h = len(stack)
    out = np.zeros((h, h))
    for i, j in itertools.product(range(h), repeat=2):
        turn, _ = scipy.linalg.orthogonal_procrustes(factors[i].T, factors[j].T)
        out[i, j] = ((factors[i].T @ turn - factors[j].T) ** 2).sum()
    return out


def principal_cosines(stack: np.ndarray, r: int, side: str) -> np.ndarray:
    h = len(stack)
    spaces = []
    for a in stack:
        u, _, v = np.linalg.svd(a)
        spaces.append(u[:, :r] if side == "left" else v[:r].T)
    out = np.zeros((h, h, r))
    for i, j in itertools.product(range(h), repeat=2):
        out[i, j] = np.sort(np.cos(scipy.linalg.subspace_angles(spaces[i], spaces[j])))[::-1]
    return out


def rotation(view: AttentionView, n: int) -> np.ndarray:
    """R(n) [d_k, d_k] of rotary positions."""
    out = np.eye(view.d_k)
    rope = view.position
    for (e, o), theta in zip(rope.planes, rope.frequencies, strict=True):
        c, s = np.cos(n * theta), np.sin(n * theta)
        out[e, e], out[o, o], out[e, o], out[o, e] = c, c, -s, s
    return out


def forms_at(view: AttentionView, n: int) -> np.ndarray:
    """B_i(n) = q_iᵀ R(n) k_i: the logits' form of a key n tokens after the query."""
    q, k, turn = view.q.numpy(), view.k.numpy(), rotation(view, n)
    return np.stack([q[i].T @ turn @ k[g] for i, g in enumerate(view.kv_group)])


def square_root(c: np.ndarray) -> np.ndarray:
    return np.real(scipy.linalg.sqrtm(c))


def entropy(logits: np.ndarray) -> float:
    p = np.exp(logits - logits.max())
    p = p / p.sum()
    return float(-(p * np.log(np.clip(p, 1e-300, None))).sum())


def raw_tensor(view: AttentionView) -> np.ndarray:
    q, k, v = (t.double().numpy() for t in (view.q, view.k, view.v))
    out = np.zeros((view.heads, view.d_k, view.d, 3))
    for i, g in enumerate(view.kv_group):
        out[i, :, :, 0], out[i, :, :, 1], out[i, :, :, 2] = q[i], k[g], v[g]
    return out
