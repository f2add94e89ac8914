"""One epoch of the toy study against the same model written the ordinary way.

    python -m pytest benchmarks/bench_toy.py -s -o python_files="bench_*.py"

CPU seconds in one process, ours and the other in turns, one thread; windows and arithmetic are the
study's (L 512, H 96, D 7, batch 32, W_V W_O factored, no biases, Adam).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from levelhead.base.numerics import threads
from levelhead.studies.toy_model import ARMS, Toy, ToyNet, built, graded_loss, learner, toy_data
from levelhead.training.fused import FusedSteps
from levelhead.training.loop import TrainingSettings, train

CONTEXT, HORIZON, CHANNELS, WIDTH, WINDOWS, ROUNDS = 512, 96, 7, 16, 10_000, 15


class Ordinary(nn.Module):
    """f(X) = [X + A(X) X W_V W_O] W with one module for each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(CONTEXT, WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(WIDTH, CONTEXT, bias=False)
        self.head = nn.Linear(CONTEXT, HORIZON, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        forecast: Tensor = self.head(x + self.output(attended))
        return forecast


def ordinary_epoch(
    windows: TensorDataset, model: Ordinary, optimizer: torch.optim.Optimizer
) -> None:
    for x, y in DataLoader(windows, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()


def our_epochs(toy: Toy, model: ToyNet, epochs: int) -> None:
    arm = ARMS["transformer"]
    learns = learner(model, arm)
    settings = TrainingSettings(epochs=epochs, patience=0, batch_size=32, restart_every=0, rho=0.0)

    def closure(index: Tensor) -> Callable[[], Tensor]:
        x, y = toy.batch(index)
        return lambda: graded_loss(learns, arm, x, y, 0.0)

    train(learns, closure, len(toy.x), None, settings, show_progress=False)


def cpu_seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def test_an_epoch_beside_the_ordinary_one(rows: Any) -> None:
    toy = toy_data(CONTEXT, HORIZON, CHANNELS, WINDOWS, 32, seed=0)
    windows = TensorDataset(toy.x.contiguous(), toy.y.contiguous())
    with threads(1):
        network = built(ARMS["transformer"], CONTEXT, HORIZON, init="keras", width=WIDTH, seed=0)
        model = Ordinary()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        ratios, seconds = [], []
        for round_ in range(ROUNDS + 1):
            other = cpu_seconds(lambda: ordinary_epoch(windows, model, optimizer))
            ours = cpu_seconds(lambda: our_epochs(toy, network, 1))
            if round_:  # the first one warms up
                ratios.append(other / ours)
                seconds.append(ours)
        x, g = toy.x[:32].reshape(-1, CONTEXT), torch.randn(32 * CHANNELS, 3 * WIDTH + HORIZON)
        w = torch.randn(CONTEXT, 3 * WIDTH + HORIZON)
        products = cpu_seconds(lambda: [(x @ w, x.T @ g) for _ in range(1000)]) / 1000
    steps = math.ceil(WINDOWS / 32)
    rows.note(
        f"an epoch of the toy study ({steps} steps of 32) / nn.Linear, SDPA, DataLoader",
        f"{median(ratios):.2f}x faster ({min(ratios):.2f}–{max(ratios):.2f}, CPU seconds)",
    )
    rows.note(
        "its two products with X alone",
        f"{products / (median(seconds) / steps):.2f} of the time of a step of ours",
    )


def test_a_step_of_adam_with_its_lists_kept(rows: Any) -> None:
    columns = 3 * WIDTH + HORIZON
    weights = [
        nn.Parameter(torch.randn(CONTEXT, columns)),
        nn.Parameter(torch.randn(WIDTH, CONTEXT)),
    ]
    optimizer = torch.optim.Adam(weights, fused=True)
    steps = FusedSteps(optimizer)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    with threads(1):
        ratios = []
        for round_ in range(ROUNDS + 1):
            other = cpu_seconds(lambda: [optimizer.step() for _ in range(300)])
            ours = cpu_seconds(lambda: [steps() for _ in range(300)])
            if round_:
                ratios.append(other / ours)
    rows.note(
        "a step of fused Adam for the toy's weights, lists kept / torch's step",
        f"{median(ratios):.2f}x faster ({min(ratios):.2f}–{max(ratios):.2f}, CPU seconds)",
    )
