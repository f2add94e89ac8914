"""Slow twins of SAM: the formulas of the papers and of the base optimisers, in float64 NumPy.

Weights and gradients are lists of arrays; nothing here imports the package or torch.optim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Arrays = list[np.ndarray]


@dataclass
class Problem:
    """L = ½ Σ_b ‖tanh(A x_b + c) − y_b‖²/B with its gradient by hand; weights [A, c]."""

    x: np.ndarray  # [B, n]
    y: np.ndarray  # [B, m]

    def loss(self, weights: Arrays) -> float:
        a, c = weights
        return float(0.5 * np.sum((np.tanh(self.x @ a.T + c) - self.y) ** 2) / len(self.x))

    def gradient(self, weights: Arrays) -> Arrays:
        a, c = weights
        t = np.tanh(self.x @ a.T + c)
        back = (t - self.y) * (1.0 - t**2) / len(self.x)  # [B, m]
        return [back.T @ self.x, back.sum(axis=0)]


def displaced(
    weights: Arrays,
    gradients: Arrays,
    rho: list[float],
    adaptive: list[bool],
    maximize: bool = False,
) -> Arrays:
    """w + ρ T² g/‖T g‖, T = |w| or 1, with the norm over everything; w − … when maximising."""
    total = 0.0
    for w, g, relative in zip(weights, gradients, adaptive, strict=True):
        for wi, gi in zip(w.ravel(), g.ravel(), strict=True):
            total += ((abs(wi) if relative else 1.0) * gi) ** 2
    norm = total**0.5
    sign = -1.0 if maximize else 1.0
    moved = []
    for w, g, r, relative in zip(weights, gradients, rho, adaptive, strict=True):
        scale = w**2 if relative else np.ones_like(w)
        moved.append(w + sign * r * scale * g / norm)
    return moved


@dataclass
class Sgd:
    """v ← μ v + (g + λ w) (v = g + λ w at first), w ← w − η v."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    velocity: Arrays = field(default_factory=list)

    def step(self, weights: Arrays, gradients: Arrays) -> Arrays:
        pulled = [g + self.weight_decay * w for w, g in zip(weights, gradients, strict=True)]
        if not self.velocity:
            self.velocity = pulled
        else:
            self.velocity = [
                self.momentum * v + p for v, p in zip(self.velocity, pulled, strict=True)
            ]
        return [w - self.lr * v for w, v in zip(weights, self.velocity, strict=True)]


@dataclass
class Adam:
    """Kingma & Ba, algorithm 1; λ enters the gradient, or the weight directly when decoupled."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    first: Arrays = field(default_factory=list)
    second: Arrays = field(default_factory=list)
    t: int = 0

    def step(self, weights: Arrays, gradients: Arrays) -> Arrays:
        b1, b2 = self.betas
        if not self.first:
            self.first = [np.zeros_like(w) for w in weights]
            self.second = [np.zeros_like(w) for w in weights]
        self.t += 1
        out = []
        for i, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            if self.decoupled:
                w = w - self.lr * self.weight_decay * w
            else:
                g = g + self.weight_decay * w
            self.first[i] = b1 * self.first[i] + (1 - b1) * g
            self.second[i] = b2 * self.second[i] + (1 - b2) * g**2
            m = self.first[i] / (1 - b1**self.t)
            v = self.second[i] / (1 - b2**self.t)
            out.append(w - self.lr * m / (np.sqrt(v) + self.eps))
        return out


def run(
    problem: Problem,
    weights: Arrays,
    base: Sgd | Adam,
    rho: list[float],
    adaptive: list[bool],
    steps: int,
) -> tuple[Arrays, list[float]]:
    """Weights after `steps` SAM steps, and the loss before each."""
    losses = []
    for _ in range(steps):
        losses.append(problem.loss(weights))
        there = displaced(weights, problem.gradient(weights), rho, adaptive)
        weights = base.step(weights, problem.gradient(there))
    return weights, losses


@dataclass
class NormNet:
    """x → x Aᵀ → batch normalisation (γ, β, batch statistics) → mask ⊙ → · r → mean square.

    `mask` is the dropout mask divided by the keep probability. Running statistics follow the
    batch ones with momentum 0.1, the variance unbiased.
    """

    x: np.ndarray  # [B, n]
    eps: float = 1e-5

    def loss(self, weights: Arrays, mask: np.ndarray) -> float:
        a, scale, shift, r = weights
        h = self.x @ a.T
        z = (h - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + self.eps)
        return float(np.mean((((z * scale + shift) * mask) @ r.T) ** 2))

    def gradient(self, weights: Arrays, mask: np.ndarray) -> Arrays:
        a, scale, shift, r = weights
        rows = len(self.x)
        h = self.x @ a.T
        std = np.sqrt(h.var(axis=0) + self.eps)
        z = (h - h.mean(axis=0)) / std
        dropped = (z * scale + shift) * mask
        out = dropped @ r.T
        d_out = 2.0 * out / out.size
        d_r = d_out.T @ dropped
        d_affine = (d_out @ r) * mask
        d_z = d_affine * scale
        d_h = (d_z - d_z.mean(axis=0) - z * (d_z * z).mean(axis=0)) / std
        assert d_h.shape == (rows, a.shape[0])
        return [d_h.T @ self.x, (d_affine * z).sum(axis=0), d_affine.sum(axis=0), d_r]

    def running(
        self, a: np.ndarray, mean: np.ndarray, var: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        h = self.x @ a.T
        return 0.9 * mean + 0.1 * h.mean(axis=0), 0.9 * var + 0.1 * h.var(axis=0, ddof=1)
