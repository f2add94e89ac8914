"""What it costs to watch a training run: time of a sampled step, and memory over many steps."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from levelhead.training.watch import watch

WIDTH, LAYERS, HEADS, BATCH, TOKENS, EVERY = 512, 8, 8, 8, 256, 50
ROUNDS = 3
STEPS = 2_000


def encoder(width: int, heads: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """CPU seconds of a step, of all threads: what else the machine does counts less."""
    began = time.process_time()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return time.process_time() - began


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["invariants and maps", "invariants", "maps"])
def test_overhead(rows, tmp_path: Path, what: str) -> None:
    """A step that is sampled and one that is not take turns; the surplus is spread over 50."""
    model = encoder(WIDTH, HEADS, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    more = {} if "invariants" in what else {"invariants": ()}
    surplus, plain = [], []
    with watch(model, optimizer, every=2, maps="maps" in what, out=tmp_path, alarms=False, **more):
        one_step(model, optimizer, x)  # the first step is sampled, and warms everything up
        for _ in range(ROUNDS):
            sampled = one_step(model, optimizer, x)
            plain.append(one_step(model, optimizer, x))
            surplus.append(sampled / plain[-1] - 1)
    ratio = statistics.median(surplus)
    spread = f"{min(surplus):.2f}–{max(surplus):.2f}"
    rows.note(
        f"watch, {what}: d {WIDTH}, {LAYERS} layers, {BATCH} x {TOKENS} tokens, {HEADS} heads",
        f"a sampled step takes {ratio:.2f} steps more ({spread}); every={EVERY}: "
        f"{100 * ratio / EVERY:.2f} % (step {statistics.median(plain):.2f} s)",
    )


def test_unsampled_steps(rows, tmp_path: Path) -> None:
    """Steps in turns with and without the watcher on a model so small that hooks could show."""
    model, x = encoder(32, 4, 2), torch.randn(4, 16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    quotients = []
    for round_ in range(7):
        bare = statistics.median(one_step(model, optimizer, x) for _ in range(100))
        with watch(model, optimizer, every=10**6, out=tmp_path / str(round_)):
            one_step(model, optimizer, x)
            watched = statistics.median(one_step(model, optimizer, x) for _ in range(100))
        quotients.append(watched / bare - 1)
    rows.note(
        "watch, a step that is not sampled: d 32, 2 layers, 4 x 16 tokens",
        f"{100 * statistics.median(quotients):+.1f} % of a step of {1e3 * bare:.1f} ms",
    )


@pytest.mark.timeout(3600)
def test_memory(rows, tmp_path: Path) -> None:
    """Resident memory over 2,000 steps, sampled every 10th."""
    model, x = encoder(32, 4, 2), torch.randn(4, 16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    process, sizes = psutil.Process(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with watch(model, optimizer, every=10, out=tmp_path) as run:
            for step in range(1, STEPS + 1):
                one_step(model, optimizer, x)
                run.step(1.0 / step)
                if step % 200 == 0:
                    gc.collect()
                    sizes.append(process.memory_info().rss / 1e6)
    rows.note(
        f"watch, memory over {STEPS} steps, every=10",
        f"{sizes[0]:.0f} MB after 200 steps, {sizes[4]:.0f} after 1000, {sizes[-1]:.0f} at the end",
    )
