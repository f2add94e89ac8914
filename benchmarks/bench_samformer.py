"""SAMformer: a SAM step, a whole fit and its memory against the same written the ordinary way."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from levelhead import SAMformer
from levelhead.data.windows import Scaler, Windows, starts_within
from levelhead.forecasting.network import make_network
from levelhead.training.sam import SAM
from ordinary import OrdinarySAMformer, sam_step, stepper

CHANNELS, CONTEXT = 7, 512


def own_stepper(horizon: int, batch: int):
    """One SAM step of ours as the loop does it: cut a batch from the series, two passes, Adam."""
    series = np.random.default_rng(0).normal(size=(CHANNELS, 8640)).cumsum(axis=1)
    windows = Windows(Scaler.fit(series).apply(series), CONTEXT, horizon)
    net = make_network(CONTEXT, horizon, CHANNELS, seed=0, revin_affine=True)
    optimizer = SAM(net.parameters(), torch.optim.Adam, rho=0.7, lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        index = torch.randint(len(windows), (batch,), generator=generator)
        made = windows.batch(index)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(made.centred(net.core(made.context)), made.target)
            loss.backward()
            return loss

        with optimizer.ascent_pass(net):
            optimizer.step(closure)

    return step


@pytest.mark.parametrize("horizon", [96, 720])
@pytest.mark.parametrize("batch", [256, 32])
@pytest.mark.parametrize("full", [True, False], ids=["full", "factored"])
def test_sam_step(rows, horizon: int, batch: int, full: bool) -> None:
    """The peer gets its batch for nothing; ours cuts and normalises it within the step."""
    kind = "value='full'" if full else "W_V W_O"
    rows.ratio(
        f"SAM step, batch {batch}, L {CONTEXT}, H {horizon}, D {CHANNELS} vs ordinary {kind}",
        own_stepper(horizon, batch),
        stepper(CHANNELS, CONTEXT, horizon, batch, full=full),
        rounds=15,
    )


def ordinary_epoch(series: np.ndarray, horizon: int) -> float:
    """Seconds of one epoch of the ordinary model with a DataLoader on the training rows."""
    first, last = starts_within(0, 8640, CONTEXT, horizon, reach_back=False)
    view = torch.from_numpy(series.astype(np.float32)).unfold(1, CONTEXT + horizon, 1)
    view = view[:, first:last].transpose(0, 1).contiguous()
    data = TensorDataset(view[..., :CONTEXT], view[..., CONTEXT:])
    model = OrdinarySAMformer(CHANNELS, CONTEXT, horizon, 16, full=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    for x, y in DataLoader(data, batch_size=256, shuffle=True):
        sam_step(model, optimizer, x, y, 0.7)
    return time.perf_counter() - began


def test_whole_fit(rows, real_data: Path) -> None:
    """The whole automatic fit (lines, two radii, choice, intervals, refit) against 100 epochs.

    Epochs of the peer are alike: two are timed, one before and one after the fit, and scaled.
    """
    horizon = 96
    frame = pd.read_csv(real_data / "ETTh1.csv").iloc[: 8640 + 2880]
    values = np.ascontiguousarray(frame.iloc[:, 1:].to_numpy(float).T)
    series = Scaler.fit(values[:, :8640]).apply(values)
    before = ordinary_epoch(series, horizon)
    began = time.perf_counter()
    model = SAMformer(horizon, CONTEXT).fit(frame)
    ours = time.perf_counter() - began
    after = ordinary_epoch(series, horizon)
    peer = 100 * (before + after) / 2
    rows.note(
        "whole auto fit of ETTh1, H 96 vs 100 ordinary epochs (batch 256, DataLoader)",
        f"{peer / ours:.1f}x faster (ours {ours:.1f} s, chose {model.chosen_})",
    )


@pytest.mark.parametrize("horizon", [96, 720])
def test_peak_memory(rows, real_data: Path, horizon: int) -> None:
    """Peak resident memory of the fit above that of the imports, in a process of its own."""
    script = Path(__file__).with_name("peak_memory.py")
    command = [sys.executable, str(script), str(real_data / "ETTh1.csv"), str(horizon)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    rows.note(f"peak memory of the auto fit of ETTh1, H {horizon}", f"{found.stdout.strip()} MB")
