"""Slow twins of attention with shared factors, in float64 NumPy: loops over heads and tokens."""

from __future__ import annotations

import numpy as np


def head_tensor(
    core: np.ndarray, heads: np.ndarray, inner: np.ndarray, model: np.ndarray
) -> np.ndarray:
    """W[i, a, m, c] = Σ core[α, β, μ, c] heads[i, α] inner[a, β] model[m, μ]."""
    return np.einsum("xyzc,ix,ay,mz->iamc", core, heads, inner, model)


def attention(
    logits: list[np.ndarray], values: list[np.ndarray], outputs: list[np.ndarray]
) -> np.ndarray:
    """Σ_i softmax(logits_i) values_i outputs_iᵀ [n, d]."""
    total = np.zeros((logits[0].shape[0], outputs[0].shape[0]))
    for logit, value, output in zip(logits, values, outputs, strict=True):
        for a in range(len(logit)):
            weights = np.exp(logit[a] - logit[a].max())
            weights = weights / weights.sum()
            for b in range(logit.shape[1]):
                total[a] += weights[b] * (output @ value[b])
    return total


def tucker_layer(
    w: np.ndarray, bias: np.ndarray, output: np.ndarray, shift: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """The layer of head tensor w [h, d_k, d, 3] and bias [3, h, d_k] on tokens x [n, d]."""
    h, d_k = w.shape[:2]
    logits, values, outputs = [], [], []
    for i in range(h):
        q, k, v = (x @ w[i, :, :, c].T + bias[c, i] for c in range(3))
        logits.append(q @ k.T / np.sqrt(d_k))
        values.append(v)
        outputs.append(output[:, i * d_k : (i + 1) * d_k])
    return attention(logits, values, outputs) + shift


def collaborative_logits(
    query: np.ndarray,
    key: np.ndarray,
    mixing: np.ndarray,
    bias: np.ndarray,
    x: np.ndarray,
    d_k: int,
) -> list[np.ndarray]:
    """Logits [n, n] of every head: xᵀ W̃_Qᵀ diag(m_i) W̃_K x and the content bias (W̃_Kᵀ b_i)ᵀ x."""
    found = []
    for m, b in zip(mixing, bias, strict=True):
        form = query.T @ np.diag(m) @ key
        content = key.T @ b
        found.append((x @ form @ x.T + (x @ content)[None, :]) / np.sqrt(d_k))
    return found
