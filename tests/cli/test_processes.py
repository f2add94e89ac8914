"""The installed command as a process of its own: exit codes, what is on stdout, real work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from levelhead.base.records import Run

KEYS = ["model", "horizon", "seed", "mse", "mae", "seconds", "parameters", "windows"]
COMMAND = [sys.executable, "-c", "from levelhead.cli import main; main()"]


def run(*arguments: object, script: str | None = None) -> subprocess.CompletedProcess[str]:
    command = COMMAND if script is None else [sys.executable, "-c", script]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def series() -> pd.DataFrame:
    """Two related daily waves over 400 hours."""
    draw = np.random.default_rng(0)
    wave = np.sin(np.arange(400) * np.pi / 12)
    frame = pd.DataFrame({"date": pd.date_range("2024-01-01", periods=400, freq="h")})
    frame["load"] = 10 + wave + draw.normal(0, 0.1, 400)
    frame["oil"] = 5 - 2 * wave + draw.normal(0, 0.1, 400)
    return frame


@pytest.fixture
def table(series: pd.DataFrame, tmp_path: Path) -> Path:
    path = tmp_path / "waves.csv"
    series.to_csv(path, index=False)
    return path


# ── real work ──


def test_forecast_from_a_file_to_a_report(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("forecast", table, "-H", 6, "--context", 48, "--targets", "oil", "--out", out)
    made = run(*arguments, "--coverage", "0.9")
    assert (made.returncode, made.stdout) == (0, f"{out / 'report.html'}\n"), made.stderr
    assert made.stderr.splitlines() == Run.open(out).notes()
    frame = pd.read_csv(out / "forecast.csv")
    assert frame["unique_id"].unique().tolist() == ["oil"]
    hours = pd.date_range("2024-01-17 16:00", periods=6, freq="h")
    assert frame["ds"].tolist() == hours.astype(str).tolist()
    assert {"lo-90", "hi-90"} <= set(frame.columns)
    assert "<svg" in (out / "report.html").read_text(encoding="utf-8")

    again = run(*arguments)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith(f"Error: {out} already holds a run")
    assert again.stderr.count("\n") == 1


def test_backtest_of_a_file(table: Path, tmp_path: Path) -> None:
    options = ("--context", 48, "--windows", 4, "--model", "linear", "--out", tmp_path / "out")
    made = run("backtest", table, "-H", 6, *options, "--json")
    assert made.returncode == 0, made.stderr
    rows = json.loads(made.stdout, parse_constant=pytest.fail)
    assert {row["channel"] for row in rows} == {"all", "load", "oil"}
    frame = pd.read_csv(tmp_path / "out" / "backtest.csv")
    assert {"unique_id", "ds", "cutoff", "y"} <= set(frame.columns)
    assert len(frame) == 4 * 6 * 2
    assert (tmp_path / "out" / "report.html").is_file()
    assert str(tmp_path / "out" / "report.html") in made.stderr


def test_bench_of_a_file(table: Path) -> None:
    options = ("--context", 24, "--models", "linear,linear-revin", "--json")
    made = run("bench", table, "--horizons", "6,12", "--split", "240,80,80", *options)
    assert made.returncode == 0, made.stderr
    rows = json.loads(made.stdout, parse_constant=pytest.fail)
    assert [list(row) for row in rows] == [KEYS] * 4
    cells = [(row["model"], row["horizon"], row["windows"]) for row in rows]
    assert cells == [
        ("linear", 6, 80 - 6 + 1),
        ("linear-revin", 6, 80 - 6 + 1),
        ("linear", 12, 80 - 12 + 1),
        ("linear-revin", 12, 80 - 12 + 1),
    ]
    assert made.stderr == "Split: 240 rows train, 80 validate, 80 test.\n"


# ── bad input ──


def test_a_gap_is_one_sentence_that_names_the_option(series: pd.DataFrame, tmp_path: Path) -> None:
    gap = series.copy()
    gap.loc[6, "load"] = np.nan
    gap.to_csv(tmp_path / "gap.csv", index=False)
    made = run("forecast", tmp_path / "gap.csv", "-H", 3, "--out", tmp_path / "out")
    assert (made.returncode, made.stdout) == (2, "")
    assert made.stderr.count("\n") == 1
    assert "'load' has 1 missing value, the first in row 7 (2024-01-01 06:00:00)" in made.stderr
    assert "--missing interpolate" in made.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("forecast", "absent.csv", "-H", 3), "Error: there is no file absent.csv"),
        (("report", "absent"), "Error: absent is not a run folder"),
        (("data", "get", "ETTh1", "--cache", "/dev/null/no"), "Error: /dev/null/no"),
    ],
)
def test_missing_paths(arguments: tuple[object, ...], said: str) -> None:
    made = run(*arguments)
    assert (made.returncode, made.stdout) == (2, "")
    assert made.stderr.startswith(said)
    assert made.stderr.count("\n") == 1


def test_usage_error() -> None:
    made = run("forecast", "t.csv")
    assert (made.returncode, made.stdout) == (2, "")
    assert "--horizon" in made.stderr


# ── the world around ──

STOPPED = """
import os, signal, sys, time, types
def demo(out, show_progress=None):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
sys.modules["levelhead.forecasting.commands"] = types.SimpleNamespace(demo=demo)
from levelhead.cli import main
main()
"""


def test_ctrl_c_is_130() -> None:
    made = run("demo", script=STOPPED)
    assert (made.returncode, made.stdout, made.stderr) == (130, "", "Interrupted.\n")


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        made = subprocess.run(
            [*COMMAND, "data", "list"], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert b"Traceback" not in made.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        made = subprocess.run(
            [*COMMAND, "data", "list"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert made.returncode == 2
    assert made.stderr.decode().startswith("Error: No space left on device; free some space")
    assert b"Traceback" not in made.stderr


def test_a_terminal_that_cannot_show_every_letter() -> None:
    made = subprocess.run(
        [*COMMAND, "data", "list"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert made.returncode == 0, made.stderr
    assert b"\\u2026" in made.stdout  # the mark that a checksum goes on
