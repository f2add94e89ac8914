"""Penalties beside the training step they are added to, and norms of forms beside dense ones.

The step: forward, backward and AdamW of a transformer encoder (d 512, 8 layers, 8 heads, width 2048
between) on batches of 8 × 256 tokens in float32. A penalty's row is the time of its forward and
backward, measured in turns with the step, as a share of the step's; in CPU seconds of one thread,
which other work on the machine moves less than it moves the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.power_iteration import largest_singular_values, random_block
from levelhead.training import penalties
from levelhead.training.penalty import Penalty

WIDTH, LAYERS, HEADS, BATCH, TOKENS = 512, 8, 8, 8, 256
ROUNDS = 3

MAKERS: dict[str, Callable[[nn.Module], Penalty]] = {
    "coherence, qk": penalties.coherence,
    "coherence, qk and ov": lambda m: penalties.coherence(m, form="both"),
    "coherence, product": lambda m: penalties.coherence(m, form="product"),
    "log_det, qk": penalties.log_det,
    "nuclear_ratio, qk": penalties.nuclear_ratio,
    "entropy_rank, qk": penalties.entropy_rank,
    "spectral_norm, qk": penalties.spectral_norm,
    "spectral_norm, qk and ov": lambda m: penalties.spectral_norm(m, form="both"),
    "nuclear_norm, qk": penalties.nuclear_norm,
    "rank_floor, qk": lambda m: penalties.rank_floor(m, floor=63.0),
    "core_sparsity, qk": penalties.core_sparsity,
    "stability": penalties.stability,
    "l2": penalties.l2,
}


class Step:
    """The model and one step of its training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2048, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x, self.y = torch.randn(2, BATCH, TOKENS, WIDTH)

    def __call__(self, penalty: Callable[[], Any] | None = None) -> None:
        self.optimizer.zero_grad()
        loss = (self.model(self.x) - self.y).square().mean()
        if penalty is not None:
            loss = loss + penalty()
        loss.backward()
        self.optimizer.step()


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


def seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def test_shares_of_a_step(rows, step: Step) -> None:
    """Weights move between rounds, so that warm starts are what they are in training."""
    made = {name: make(step.model) for name, make in MAKERS.items()}
    step()
    for penalty in made.values():
        penalty.value().backward()
    whole, parts = [], {name: [] for name in made}
    for _ in range(ROUNDS):
        whole.append(seconds(step))
        for name, penalty in made.items():
            parts[name].append(seconds(lambda p=penalty: p.value().backward()) / whole[-1])
    rows.note(
        f"training step, d {WIDTH}, {LAYERS} layers, batch {BATCH} × {TOKENS}",
        f"{statistics.median(whole):.2f} CPU s",
    )
    for name, shares in parts.items():
        text = f"{100 * statistics.median(shares):.2f} % of the step"
        rows.note(name, f"{text} ({100 * min(shares):.2f}–{100 * max(shares):.2f})")


def test_entropy_floor(rows, step: Step) -> None:
    """Its gradient runs through the model, so the step with it stands beside the one without."""
    for taken in (None, 32):
        penalty = penalties.entropy_floor(step.model, floor=0.99, rows=taken)
        ratios = []
        for _ in range(ROUNDS):
            plain = seconds(step)
            ratios.append(seconds(lambda p=penalty: step(p)) / plain - 1)
        penalty.close()
        name = f"entropy_floor, {'all' if taken is None else taken} rows"
        text = f"{100 * statistics.median(ratios):.1f} % of the step"
        rows.note(name, f"{text} ({100 * min(ratios):.1f}–{100 * max(ratios):.1f})")


def bert_stack() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    left, right = torch.randn(2, 12, 64, 768) * 0.02
    return left.requires_grad_(), right.requires_grad_()


def test_norms_with_gradient_against_dense(rows) -> None:
    """12 heads [768, 768] of inner width 64, forward and backward, everything in float32."""
    left, right = bert_stack()

    def dense(order: str | int) -> Callable[[], None]:
        def call() -> None:
            matrices = left.mT @ right
            torch.linalg.matrix_norm(matrices, ord=order).sum().backward()

        return call

    def nuclear(dtype: torch.dtype) -> Callable[[], None]:
        stack = LowRankStack(left, right)
        return lambda: stack.nuclear_norms(dtype=dtype).sum().backward()

    block = random_block(right, left)
    _, block = largest_singular_values(left, right, block, 64)

    def spectral() -> None:
        largest_singular_values(left, right, block)[0].sum().backward()

    for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        rows.ratio(
            f"nuclear norms of 12 QK forms with gradient, {name} vs dense float32",
            nuclear(dtype),
            dense("nuc"),
            rounds=3,
            warm=1,
        )
    rows.ratio(
        "spectral norms of 12 QK forms with gradient vs dense", spectral, dense(2), rounds=3, warm=1
    )


def test_error_of_power_iteration(rows, step: Step) -> None:
    """Eight steps of eight directions from the last block, while training moves the weights."""
    penalty = penalties.spectral_norm(step.model)
    penalty.value()
    worst = 0.0
    for _ in range(3):
        step()
        found = float(penalty.value().detach())
        views = penalty.quantity.live.views()
        exact = torch.stack([v.qk.spectral_norms().detach().mean() for v in views]).mean()
        worst = max(worst, abs(found / float(exact) - 1))
    rows.note("spectral_norm: relative error after a step", f"{worst:.1e}, a lower bound")
    left, right = bert_stack()
    exact = LowRankStack(left, right).spectral_norms().detach()
    block, errors = random_block(right, left), []
    for _ in range(8):
        sigma, block = largest_singular_values(left, right, block, 8)
        errors.append(float((1 - sigma.detach() / exact).abs().max()))
    rows.note(
        "largest error of random forms after 8, 16, 32, 64 steps from a random start",
        ", ".join(f"{errors[i]:.0e}" for i in (0, 1, 3, 7)),
    )
