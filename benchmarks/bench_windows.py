"""Batches of windows that are held against batches that are cut and normalised anew.

    python -m pytest benchmarks/bench_windows.py -s -o python_files="bench_*.py"

CPU seconds in one process, in turns, one thread; random series of the sizes of ETTh1 and weather.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from levelhead.base.numerics import threads
from levelhead.data.windows import Held, Windows, WindowSource

CONTEXT, BATCH, STEPS, ROUNDS = 512, 32, 200, 9


def seconds(source: WindowSource, order: torch.Tensor) -> float:
    began = time.process_time()
    for index in order.split(BATCH)[:STEPS]:
        source.batch(index)
    return (time.process_time() - began) / STEPS


@pytest.mark.parametrize(
    ("name", "channels", "rows_", "horizon"),
    [("ETTh1", 7, 8_640, 96), ("ETTh1", 7, 8_640, 720), ("weather", 21, 36_887, 96)],
)
def test_a_batch_of_held_windows(
    name: str, channels: int, rows_: int, horizon: int, rows: Any
) -> None:
    series = np.random.default_rng(0).normal(size=(channels, rows_))
    cut = Windows(series, CONTEXT, horizon)
    kept = Held(cut)
    order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(0))
    with threads(1):
        pairs = [(seconds(cut, order), seconds(kept, order)) for _ in range(ROUNDS + 1)][1:]
    rows.note(
        f"a batch of {BATCH} windows of {name} ({channels} channels, H {horizon}), held / cut anew",
        f"{median(other / ours for other, ours in pairs):.1f}x faster "
        f"({median(other for other, _ in pairs) * 1e3:.2f} ms anew)",
    )
