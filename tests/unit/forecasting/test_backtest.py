"""`backtest`: the estimator's own backtest, and the run folder it is written to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from levelhead.base.errors import InputError
from levelhead.base.records import Run
from levelhead.forecasting.backtest import backtest
from levelhead.forecasting.forecaster import SAMformer
from levelhead.report.document import write_report
from oracles import forecasting as oracle

H, L = 4, 16
OPTIONS: dict[str, Any] = {"context": L, "model": "linear", "windows": 3, "coverage": [0.5, 0.9]}


def test_it_is_the_estimators_backtest_and_writes_nothing() -> None:
    rows = oracle.hourly(200, 2)
    made = backtest(rows, H, step=2, seed=3, **OPTIONS)
    forecaster = SAMformer(H, L, model="linear", random_state=3)
    own = forecaster.backtest(rows, windows=3, step=2, coverage=[0.5, 0.9])
    pd.testing.assert_frame_equal(made.frame, own.frame, check_exact=True)
    pd.testing.assert_frame_equal(made.metrics, own.metrics, check_exact=True)
    pd.testing.assert_frame_equal(made.by_step, own.by_step, check_exact=True)
    assert made.notes == own.notes
    assert made.run is None


@pytest.mark.parametrize("tz", [None, "Europe/Berlin"])
def test_what_is_written(tmp_path: Path, tz: str | None) -> None:
    rows = oracle.hourly(200, 2, tz=tz)
    made = backtest(rows, H, out=tmp_path / "out", **OPTIONS)
    assert made.run is not None
    stored = Run.open(tmp_path / "out")
    frame = pd.read_csv(tmp_path / "out" / "backtest.csv")
    assert list(frame.columns) == list(made.frame.columns)
    assert frame["ds"].tolist() == made.frame["ds"].astype(str).tolist()
    np.testing.assert_array_equal(frame["linear"], made.frame["linear"])
    metrics = pd.read_csv(tmp_path / "out" / "metrics.csv")
    pd.testing.assert_frame_equal(metrics, made.metrics, check_dtype=False)
    assert stored.notes() == [f"{note}." for note in made.notes]
    read = {(r.where["model"], r.where["channel"], r.name): r.value for r in stored.readings()}
    key = ("linear", "oil", "coverage_90")
    own = made.metrics.set_index(["model", "channel"]).loc[key[:2], key[2]]
    assert read[key] == own
    assert stored.settings["windows"] == 3
    assert stored.settings["coverage"] == [0.5, 0.9]
    assert [f.name for f in stored.figures()] == ["errors", "coverage_50", "coverage_90"]
    by_step = made.by_step[(made.by_step.level == 90) & (made.by_step.channel == "oil")]
    np.testing.assert_array_equal(stored.array("coverage_90")[2], by_step["coverage"])
    page = write_report(stored).read_text(encoding="utf-8")
    assert "Coverage of the 90 % intervals" in page
    assert not (tmp_path / "out" / "training").exists()
    with pytest.raises(InputError, match="already holds a run"):
        backtest(rows, H, out=tmp_path / "out", **OPTIONS)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="'depth'"):
        backtest(oracle.hourly(200, 2), H, depth=3)
