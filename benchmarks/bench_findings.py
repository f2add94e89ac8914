"""The figures that the README states about accuracy: generators and intervals (not speed)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from levelhead import SAMformer, SAMformerRegressor
from levelhead.data.generators import attention_windows, followers

CHANNELS, CONTEXT, HORIZON = 7, 96, 24


def below(error: float, line: float) -> str:
    """How far an error lies below the line's."""
    return f"{100 * (1 - error / line):.0f} % below the line"


def test_attention_windows(rows) -> None:
    """Windows made by eq. (3) with a sharp A(X): 6,000 to fit, 1,500 to judge."""
    x, y = (a.reshape(len(a), -1) for a in attention_windows(7500, seed=0))
    errors = {}
    for model in ("linear", "samformer", "auto"):
        fitted = SAMformerRegressor(CHANNELS, model=model).fit(x[:6000], y[:6000])
        errors[model] = float(np.mean((fitted.predict(x[6000:]) - y[6000:]) ** 2))
    for model in ("samformer", "auto"):
        note = f"{errors[model]:.3f}, {below(errors[model], errors['linear'])}"
        if model == "auto":
            note += f" (chose {fitted.chosen_})"
        rows.note(f"test MSE on windows of eq. (3), {model} (line {errors['linear']:.3f})", note)


def test_followers(rows) -> None:
    """Followers of an AR(2) leader: 8,500 rows to fit, 1,500 to judge."""
    series = followers(10_000, seed=0).T
    for model in ("samformer", "auto"):
        found = SAMformer(HORIZON, CONTEXT, model=model).backtest(series, test_rows=1500, step=1)
        pooled = found.metrics[found.metrics.channel == "all"].set_index("model")["mse_scaled"]
        note = f"{pooled[model]:.3f}, {below(pooled[model], pooled['linear'])}; {found.notes[0]}"
        rows.note(f"test MSE on followers, {model} (line {pooled['linear']:.3f})", note)


@pytest.mark.parametrize(
    ("file", "rows_used", "test_rows"), [("ETTh1", 14_400, 2_880), ("exchange_rate", None, 1_517)]
)
def test_coverage(rows, real_data: Path, file: str, rows_used: int, test_rows: int) -> None:
    """80 % intervals at H 96 on the literature's test rows, every window, per channel."""
    frame = pd.read_csv(real_data / f"{file}.csv").iloc[:rows_used]
    for adaptive in (False, True):
        model = SAMformer(96, 512)
        found = model.backtest(frame, test_rows=test_rows, step=1, adaptive=adaptive)
        own = found.metrics[(found.metrics.model == "auto") & (found.metrics.channel != "all")]
        per = ", ".join(f"{c:.3f}" for c in own["coverage_80"])
        kind = "adaptive" if adaptive else "fixed"
        rows.note(f"coverage of {kind} 80 % intervals, {file}, H 96", per)
