"""The propositions behind the toy study, held against numbers in float64.

Axes as in `toy_model`; a single window is X [D, L]. Ilbert et al. (2024): Propositions 2.1, 2.2.
Zhai et al. (2303.06296): Theorem 3.1. Foret et al. (2010.01412): the first-order solution of SAM.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from levelhead.base.records import Reading
from levelhead.studies.toy_model import ARMS, Toy, built

__all__ = ["entropy_bound", "propositions"]


def propositions(toy: Toy, width: int, seed: int) -> list[Reading]:
    """All numbers of one seed, as Readings with the source "propositions"."""
    draw = torch.Generator().manual_seed(104_729 * seed + 1)
    found: dict[str, float] = {}
    found |= _prop_21(toy, width, seed)
    found |= _identifiability(toy, draw)
    found |= _prop_22(toy, width, draw)
    found |= _theorem_31(toy, width, seed, draw)
    found |= _sam_first_order(draw)
    where = {"seed": seed}
    return [Reading(n, v, where=where, source="propositions") for n, v in found.items()]


def _frozen_tokens(toy: Toy, width: int, seed: int, count: int | None = None) -> Tensor:
    """P = X + A(X) X W_V W_O of a random transformer, all windows stacked: [N·D, L]."""
    context, horizon = toy.truth.shape
    model = built(ARMS["random"], context, horizon, init="glorot", width=width, seed=seed)
    x = toy.x if count is None else toy.x[:count]
    rows = []
    with torch.no_grad():
        for piece in torch.split(x, 1024):
            maps = model.maps(piece).double()
            tokens = piece.double()
            assert model.output is not None
            value = model.value.double() @ model.output.double()
            rows.append((tokens + maps @ tokens @ value).flatten(0, 1))
    return torch.cat(rows)


def _prop_21(toy: Toy, width: int, seed: int) -> dict[str, float]:
    """One window: W exists and is not unique. All windows: none exists.

    The affine space of solutions for one window has dimension (L − rank P) H, which the proposition
    gives as (L − D) H; what is needed is D < L, whatever H is.
    """
    context, horizon = toy.truth.shape
    channels = toy.x.shape[1]
    truth = toy.truth.double()
    one = _frozen_tokens(toy, width, seed, 1)
    x = toy.x[0].double()
    target = x @ truth
    solution = torch.linalg.lstsq(one, target, driver="gelsd").solution
    rank = int(torch.linalg.matrix_rank(one))
    joined = int(torch.linalg.matrix_rank(torch.cat((one, target), dim=1)))
    everything = _frozen_tokens(toy, width, seed)
    targets = toy.x.flatten(0, 1).double() @ truth
    gram = everything.mT @ everything
    common = torch.linalg.pinv(gram, hermitian=True) @ (everything.mT @ targets)
    residual = torch.linalg.matrix_norm(everything @ common - targets)
    few = max(1, context // channels)
    fits = _stack_residual(toy, width, seed, few, truth)
    too_many = _stack_residual(toy, width, seed, 2 * few + 2, truth)
    return {
        "prop21_rank": rank,
        "prop21_rank_joined": joined,
        "prop21_dimension": (context - rank) * horizon,
        "prop21_one_residual": float(
            torch.linalg.matrix_norm(one @ solution - target) / torch.linalg.matrix_norm(target)
        ),
        "prop21_distance_to_truth": float(
            torch.linalg.matrix_norm(solution - truth) / torch.linalg.matrix_norm(truth)
        ),
        "prop21_few_residual": fits,
        "prop21_more_residual": too_many,
        "prop21_all_residual": float(residual / torch.linalg.matrix_norm(targets)),
        "prop21_all_excess": float((residual**2) / targets.numel()),
    }


def _stack_residual(toy: Toy, width: int, seed: int, count: int, truth: Tensor) -> float:
    """Relative residual of one W for `count` windows together."""
    tokens = _frozen_tokens(toy, width, seed, count)
    targets = toy.x[:count].flatten(0, 1).double() @ truth
    solution = torch.linalg.lstsq(tokens, targets, driver="gelsd").solution
    miss = torch.linalg.matrix_norm(tokens @ solution - targets)
    return float(miss / torch.linalg.matrix_norm(targets))


def _identifiability(toy: Toy, draw: torch.Generator) -> dict[str, float]:
    """W_toy from noisy windows: least squares errs by σ √(H tr (XᵀX)⁻¹), if the rank is L."""
    context, horizon = toy.truth.shape
    x = toy.x.flatten(0, 1).double()
    y = toy.y.flatten(0, 1).double()
    gram = x.mT @ x
    inverse = torch.linalg.pinv(gram, hermitian=True)
    solution = inverse @ (x.mT @ y)
    error = torch.linalg.matrix_norm(solution - toy.truth.double())
    expected = math.sqrt(horizon * float(inverse.trace()))
    x_val = toy.x_val.flatten(0, 1).double()
    y_val = toy.y_val.flatten(0, 1).double()
    return {
        "identifiable_rank": int(torch.linalg.matrix_rank(gram, hermitian=True)),
        "identifiable_context": context,
        "ols_error": float(error),
        "ols_error_ratio": float(error) / expected,
        "oracle_validation": float((x_val @ solution - y_val).square().mean()),
        "truth_validation": float((x_val @ toy.truth.double() - y_val).square().mean()),
    }


def _prop_22(toy: Toy, width: int, draw: torch.Generator, cases: int = 200) -> dict[str, float]:
    """‖X B Xᵀ‖_* ≤ ‖B‖₂ ‖X‖_F² for B of every kind, and the sharper Σ σ_k(B) σ_k(X)²."""
    _, channels, context = toy.x.shape
    plain, sharp, positive = 0.0, 0.0, 0.0
    least = math.inf
    for case in range(cases):
        x = toy.x[case % len(toy.x)].double()
        q = torch.randn(context, width, generator=draw, dtype=torch.float64)
        k = torch.randn(context, width, generator=draw, dtype=torch.float64)
        ratios = [_ratios(x, q, k), _ratios(x, q, q)]
        plain = max(plain, ratios[0][0])
        sharp = max(sharp, ratios[0][1])
        positive = max(positive, ratios[1][0])
        # the symmetric part of q kᵀ has the eigenvalues of a small matrix: is it ever PSD?
        small = torch.cat((q, k), 1)
        sign = torch.linalg.eigvals(
            (small.mT @ small)
            @ torch.kron(
                torch.tensor([[0.0, 0.5], [0.5, 0.0]], dtype=q.dtype),
                torch.eye(width, dtype=q.dtype),
            )
        ).real
        least = min(least, float(sign.min() / sign.max()))
    top = _aligned(context, channels, width, draw)
    return {
        "prop22_ratio": plain,
        "prop22_sharp_ratio": sharp,
        "prop22_psd_ratio": positive,
        "prop22_least_eigenvalue": least,
        "prop22_tight": top,
    }


def _ratios(x: Tensor, q: Tensor, k: Tensor) -> tuple[float, float]:
    nuclear = float(torch.linalg.svdvals((x @ q) @ (x @ k).mT).sum())
    r_q, r_k = (torch.linalg.qr(m, mode="r").R for m in (q, k))
    sigma = torch.linalg.svdvals(r_q @ r_k.mT)
    own = torch.linalg.svdvals(x).square()
    count = min(len(sigma), len(own))
    sharp = float((sigma[:count] * own[:count]).sum())
    return nuclear / float(sigma[0] * own.sum()), nuclear / sharp


def _aligned(context: int, channels: int, width: int, draw: torch.Generator) -> float:
    """The ratio where rows of X lie in the top eigenspace of a positive B: it is attained."""
    rank = min(channels, width)
    frame = torch.linalg.qr(torch.randn(context, width, generator=draw, dtype=torch.float64)).Q
    mix = torch.randn(channels, rank, generator=draw, dtype=torch.float64)
    return _ratios(mix @ frame[:, :rank].mT, frame, frame)[0]


def entropy_bound(radius: Tensor, tokens: int) -> Tensor:
    """Least entropy in nat of softmax(l) with ‖l − mean l‖₂ ≤ radius (Zhai et al., Thm 3.1).

    >>> round(float(entropy_bound(torch.tensor(0.0), 7)), 4)   # log 7
    1.9459
    """
    stretched = radius * math.sqrt(tokens / (tokens - 1))
    beta = (-stretched).exp()
    total = 1 + (tokens - 1) * beta
    return total.log() + radius * math.sqrt(tokens * (tokens - 1)) * beta / total


def _theorem_31(toy: Toy, width: int, seed: int, draw: torch.Generator) -> dict[str, float]:
    """The bound for every row of random attention, by spectral norms and by centred rows."""
    _, channels, context = toy.x.shape
    x = toy.x[:64].double()
    slack, spectral_mean, row_mean, true_mean = math.inf, 0.0, 0.0, 0.0
    for scale in (0.1, 0.3, 1.0):
        q = (
            scale
            * torch.randn(context, width, generator=draw, dtype=torch.float64)
            / math.sqrt(context)
        )
        k = torch.randn(context, width, generator=draw, dtype=torch.float64) / math.sqrt(context)
        logits = (x @ q) @ (x @ k).mT
        entropy = _entropy(logits)
        rows = torch.linalg.vector_norm(logits - logits.mean(-1, keepdim=True), dim=-1)
        by_row = entropy_bound(rows, channels)
        r_q, r_k = (torch.linalg.qr(m, mode="r").R for m in (q, k))
        norm = torch.linalg.matrix_norm(r_q @ r_k.mT, 2)  # of W_K W_Qᵀ, as the theorem has it
        sizes = torch.linalg.matrix_norm(x @ x.mT, 2)
        spectral = entropy_bound(norm * sizes, channels)
        slack = min(
            slack, float((entropy - by_row).min()), float((by_row.min(-1).values - spectral).min())
        )
        spectral_mean += float(spectral.mean()) / 3
        row_mean += float(by_row.mean()) / 3
        true_mean += float(entropy.mean()) / 3
    spike = torch.zeros(channels, dtype=torch.float64)
    spike[0] = 1.0
    spike = spike - spike.mean()
    spike = 2.0 * spike / torch.linalg.vector_norm(spike)
    tight = _entropy(spike) - entropy_bound(torch.tensor(2.0, dtype=torch.float64), channels)
    return {
        "thm31_least_slack": slack,
        "thm31_spectral": spectral_mean,
        "thm31_centred_row": row_mean,
        "thm31_entropy": true_mean,
        "thm31_tight_gap": abs(float(tight)),
    }


def _entropy(logits: Tensor) -> Tensor:
    """Entropy in nat of softmax over the last axis."""
    logarithms = torch.log_softmax(logits, dim=-1)
    return -(logarithms.exp() * logarithms).sum(-1)


def _sam_first_order(draw: torch.Generator, size: int = 40) -> dict[str, float]:
    """ε̂ = ρ∇L/‖∇L‖ against the true maximum of a quadratic on the sphere, solved exactly.

    For L(w+ε) = gᵀε + ½εᵀHε the maximum on ‖ε‖ = ρ is at ε = (μI − H)⁻¹ g with ‖ε‖ = ρ, μ ≥ λ_max.
    """
    g = torch.randn(size, generator=draw, dtype=torch.float64)
    h = torch.randn(size, size, generator=draw, dtype=torch.float64)
    h = (h + h.mT) / 2
    values, vectors = torch.linalg.eigh(h)
    coordinates = vectors.mT @ g
    found = {}
    for rho in (1e-3, 1e-2, 1e-1):
        low, high = float(values[-1]) + 1e-12, float(values[-1]) + float(g.norm()) / rho + 1.0
        for _ in range(200):
            middle = (low + high) / 2
            long = float((coordinates / (middle - values)).norm()) > rho
            low, high = (middle, high) if long else (low, middle)
        best = coordinates / (high - values)
        largest = float(coordinates @ best + 0.5 * (values * best.square()).sum())
        step = rho * coordinates / coordinates.norm()
        first = float(coordinates @ step + 0.5 * (values * step.square()).sum())
        found[f"sam_first_order_{rho:g}"] = 1 - first / largest
    return found
