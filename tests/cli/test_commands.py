"""What the commands parse, call, print and leave with; the work itself is replaced."""

from __future__ import annotations

import errno
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from levelhead import __version__
from levelhead.base.errors import DataError, Interrupted, LevelheadWarning, StoredFileError
from levelhead.base.records import Run
from levelhead.cli import app
from levelhead.data import datasets

Fake = Callable[..., dict[str, Any]]
KEYS = ["model", "horizon", "seed", "mse", "mae", "seconds", "parameters", "windows"]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a stand-in for one function of a module; what it is called with is in the dict given."""

    def put(module: str, name: str, result: Any, **more: Any) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def stand_in(*arguments: Any, **options: Any) -> Any:
            seen.update(options, arguments=arguments)
            if isinstance(result, BaseException):
                raise result
            return result(*arguments, **options) if callable(result) else result

        made = ModuleType(module)
        for key, value in {name: stand_in, **more}.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, module, made)
        return seen

    return put


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(tmp_path / "run", title="A run", command="levelhead forecast", settings={})
    made.add_notes(["The line wins.", "Intervals cover 81 %."])
    return made


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    days = pd.date_range("2024-01-01", periods=40)
    frame = pd.DataFrame({"date": days, "a": range(40), "b": range(40, 80)})
    frame.to_csv(path, index=False)
    return path


# ── forecast, demo, report ──


def test_forecast_hands_over_what_was_given(fake: Fake, run: Run) -> None:
    seen = fake("levelhead.forecasting.commands", "forecast", run)
    options = {
        "--context": 48,
        "--time-column": "when",
        "--channels": "a,d",
        "--targets": 'a,"b,c", d',
        "--freq": "h",
        "--missing": "ffill",
        "--sentinels": "mask",
        "--duplicates": "mean",
        "--layout": "wide",
        "--season": 24,
        "--coverage": "0.5,.9",
        "--model": "blend",
        "--seed": 3,
        "--out": "there",
    }
    flat = [part for pair in options.items() for part in pair]
    result = call(
        "forecast", "t.csv", "--horizon", 12, *flat, "--no-refit", "--adaptive", "--resume"
    )
    assert result.exit_code == 0, result.output
    assert seen == {
        "arguments": (Path("t.csv"), 12),
        "context": 48,
        "time_column": "when",
        "channels": ["a", "d"],
        "targets": ["a", "b,c", "d"],
        "freq": "h",
        "missing": "ffill",
        "sentinels": "mask",
        "duplicates": "mean",
        "layout": "wide",
        "season": 24,
        "coverage": (0.5, 0.9),
        "model": "blend",
        "seed": 3,
        "refit": False,
        "adaptive": True,
        "out": Path("there"),
        "resume": True,
        "show_progress": None,
    }


def test_forecast_says_nothing_it_was_not_told(fake: Fake, run: Run) -> None:
    seen = fake("levelhead.forecasting.commands", "forecast", run)
    assert call("forecast", "t.csv", "-H", 3, "--freq", 2, "--no-progress").exit_code == 0
    assert (seen["context"], seen["targets"], seen["season"]) == ("auto", None, "auto")
    assert (seen["coverage"], seen["model"], seen["seed"]) == ((0.8, 0.95), "auto", 0)
    assert (seen["refit"], seen["adaptive"], seen["resume"]) == (True, False, False)
    assert seen["freq"] == 2, "a whole number steps through whole-number stamps"
    assert seen["out"] == Path("t-forecast")
    assert seen["show_progress"] is False


def test_forecast_prints_findings_on_stderr_and_the_report_on_stdout(fake: Fake, run: Run) -> None:
    fake("levelhead.forecasting.commands", "forecast", run)
    result = call("forecast", "t.csv", "-H", 3)
    assert result.stdout == f"{run.folder / 'report.html'}\n"
    assert result.stderr == "The line wins.\nIntervals cover 81 %.\n"
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "The line wins." in page


def test_a_second_forecast_takes_the_next_free_folder(fake: Fake, run: Run) -> None:
    seen = fake("levelhead.forecasting.commands", "forecast", run)
    Path("t-forecast").mkdir()
    Path("t-forecast", "report.html").touch()
    assert call("forecast", "t.csv", "-H", 3).exit_code == 0
    assert seen["out"] == Path("t-forecast-2")
    Path("t-forecast", "report.html").unlink()
    Path("t-forecast").rmdir()


@pytest.mark.parametrize("command", ["forecast", "backtest", "bench"])
def test_resume_without_a_folder_is_refused(command: str, table: Path) -> None:
    options = [] if command == "bench" else ["-H", 3]
    result = call(command, table, *options, "--resume")
    assert result.exit_code == 2
    assert "--resume needs --out" in result.stderr


def test_demo_ends_with_the_sentences_and_the_path(fake: Fake, run: Run) -> None:
    seen = fake("levelhead.forecasting.commands", "demo", run)
    result = call("demo", "--out", "there")
    assert result.exit_code == 0
    assert seen == {"arguments": (Path("there"),), "show_progress": None}
    assert result.stdout == f"{run.folder / 'report.html'}\n"
    assert result.stderr.splitlines() == run.notes()


def test_report_prints_where_it_is(run: Run, tmp_path: Path) -> None:
    result = call("report", run.folder)
    assert (result.exit_code, result.stdout) == (0, f"{run.folder / 'report.html'}\n")
    result = call("report", run.folder, "--out", tmp_path / "page.html")
    assert result.stdout == f"{tmp_path / 'page.html'}\n"
    assert "A run" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_report_of_what_is_no_run(tmp_path: Path) -> None:
    result = call("report", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {tmp_path} is not a run folder")
    assert result.stderr.count("\n") == 1


# ── backtest and bench ──


def test_backtest_prints_its_metrics(fake: Fake, run: Run) -> None:
    metrics = pd.DataFrame(
        {"model": ["line", "samformer"], "channel": ["all", "all"], "mase": [0.81234567, 0.75]}
    )
    made = SimpleNamespace(metrics=metrics, notes=["A tie."], run=run)
    seen = fake("levelhead.forecasting.backtest", "backtest", made)
    result = call("backtest", "t.csv", "-H", 4, "--windows", 9, "--step", 2, "--out", run.folder)
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "model      channel    mase\nline       all      0.8123\nsamformer  all        0.75\n"
    )
    assert result.stderr.splitlines() == ["A tie.", str(run.folder / "report.html")]
    assert (seen["arguments"], seen["windows"], seen["step"]) == ((Path("t.csv"), 4), 9, 2)
    assert (seen["test_rows"], seen["refit"], seen["out"]) == (None, False, run.folder)


def test_backtest_as_json_is_strict(fake: Fake) -> None:
    metrics = pd.DataFrame({"model": ["line"], "mase": [float("nan")], "windows": [3]})
    made = SimpleNamespace(metrics=metrics, notes=["Too short."], run=None)
    fake("levelhead.forecasting.backtest", "backtest", made)
    result = call("backtest", "t.csv", "-H", 4, "--json")
    assert json.loads(result.stdout, parse_constant=pytest.fail) == [
        {"model": "line", "mase": None, "windows": 3}
    ]
    assert result.stderr == "Too short.\n"


def bench_rows(count: int) -> list[Any]:
    row = dict(zip(KEYS, ["linear", 2, 0, 0.36451, 0.39, 1.5, 100, 7], strict=True))
    return [SimpleNamespace(**row, as_dict=lambda: dict(row)) for _ in range(count)]


def fake_bench(fake: Fake, rows: list[Any]) -> dict[str, Any]:
    def describe_split(split: tuple[int, int, int], rows: int) -> str:
        return f"{split} of {rows}"

    def ltsf_split(name: str, rows: int) -> tuple[int, int, int]:
        return (rows - 12, 4, 8)

    return fake(
        "levelhead.forecasting.bench",
        "bench",
        rows,
        describe_split=describe_split,
        ltsf_split=ltsf_split,
    )


def test_bench_prints_json_alone(fake: Fake, table: Path) -> None:
    seen = fake_bench(fake, bench_rows(2))
    result = call(
        "bench", table, "--json", "--horizons", "2, 4", "--models", "linear", "--seeds", 3
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [list(row) for row in found] == [KEYS, KEYS]
    assert found[0]["mse"] == 0.36451
    assert result.stderr == "Split: (28, 4, 8) of 40.\n"
    assert seen == {
        "arguments": (table,),
        "protocol": "ltsf",
        "context": 512,
        "split": (28, 4, 8),
        "horizons": [2, 4],
        "models": ["linear"],
        "seeds": 3,
        "out": None,
        "resume": False,
        "show_progress": None,
    }


def test_bench_says_what_auto_took(fake: Fake, table: Path) -> None:
    (row,) = bench_rows(1)
    row.model, row.took = "auto", "linear-revin"
    fake_bench(fake, [row])
    result = call("bench", table, "--json")
    assert "auto took linear-revin at 2 (seed 0)." in result.stderr
    assert [list(r) for r in json.loads(result.stdout)] == [KEYS]


def test_bench_prints_a_table_and_the_split_given(fake: Fake, table: Path) -> None:
    seen = fake_bench(fake, bench_rows(1))
    result = call("bench", table, "--split", "20,10,10")
    assert result.stdout.splitlines()[0].split() == KEYS
    assert result.stdout.splitlines()[1].split()[:4] == ["linear", "2", "0", "0.3645"]
    assert seen["split"] == (20, 10, 10)
    assert seen["horizons"] == [96, 192, 336, 720]
    assert seen["models"] == ["linear", "linear-revin", "samformer", "auto"]


def test_nothing_matched_is_3(fake: Fake, table: Path) -> None:
    fake_bench(fake, [])
    result = call("bench", table, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (3, [])
    assert "Nothing matched." in result.stderr


# ── lists ──


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bench", "t.csv", "--horizons", "96,x"), "--horizons '96,x' is no list of whole numbers"),
        (("bench", "t.csv", "--horizons", ""), "--horizons '' is no list of whole numbers"),
        (("bench", "t.csv", "--models", "a,,b"), "--models 'a,,b' is no list of names"),
        (("bench", "t.csv", "--split", "1,2"), "--split 1,2 has 2 parts"),
        (("bench", "t.csv", "--split", "1;2;3"), "--split '1;2;3' is no list of whole numbers"),
        (("forecast", "t.csv", "-H", "3", "--coverage", "80,95"), "shares between 0 and 1"),
        (("forecast", "t.csv", "-H", "3", "--coverage", "0.8;0.9"), "--coverage '0.8;0.9' is no"),
        (("forecast", "t.csv", "-H", "3", "--targets", ","), "--targets ',' is no list of names"),
        (("forecast", "t.csv", "-H", "3", "--context", "long"), "--context long is no number"),
        (("forecast", "t.csv", "-H", "3", "--context", "0"), "--context 0 is no number"),
    ],
)
def test_bad_lists_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("forecast", "t.csv"),
        ("forecast", "t.csv", "-H", "0"),
        ("forecast", "t.csv", "-H", "3", "--missing", "guess"),
        ("bench", "t.csv", "--seeds", "none"),
        ("no-such-command",),
        ("data", "get"),
    ],
)
def test_usage_errors_are_2(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


# ── errors, warnings, exit codes ──


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("column 'a' is empty; drop it"), 2, "Error: column 'a' is empty; drop it\n"),
        (StoredFileError("x is truncated"), 2, "Error: x is truncated\n"),
        (Interrupted("stopped; resume it"), 130, "Interrupted: stopped; resume it\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/there/f"),
            2,
            "Error: /there/f: No space left on device; free some space, or choose another place.\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/there"),
            2,
            "Error: /there: Permission denied; check the path and its rights, "
            "or choose another place.\n",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory"),
            2,
            "Error: No such file or directory; check the path and its rights, "
            "or choose another place.\n",
        ),
    ],
)
def test_errors_are_one_sentence_and_a_code(
    fake: Fake, error: BaseException, code: int, said: str
) -> None:
    fake("levelhead.forecasting.commands", "demo", error)
    result = call("demo")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", said)


@pytest.mark.parametrize("error", [RuntimeError("a mistake of ours"), OSError(errno.EIO, "I/O")])
def test_mistakes_of_ours_are_not_hidden(fake: Fake, error: Exception) -> None:
    fake("levelhead.forecasting.commands", "demo", error)
    result = call("demo")
    assert result.exception is error
    assert result.exit_code == 1


@pytest.mark.parametrize("arguments", [("demo", "--debug"), ("--debug", "demo")])
def test_debug_shows_where_it_came_from(fake: Fake, arguments: tuple[str, ...]) -> None:
    fake("levelhead.forecasting.commands", "demo", DataError("too short"))
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "stand_in" in result.stderr
    assert result.stderr.endswith("Error: too short\n")


def test_warnings_are_one_line_each_and_said_once(fake: Fake, run: Run) -> None:
    def work(out: Path, show_progress: bool | None) -> Run:
        for _ in range(2):
            warnings.warn("-9999 looks like a code", LevelheadWarning, stacklevel=1)
        return run

    fake("levelhead.forecasting.commands", "demo", work)
    result = call("demo")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == ["Warning: -9999 looks like a code", *run.notes()]


# ── data sets, version ──


def test_data_list_names_what_there_is() -> None:
    result = call("data", "list")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["name", "rows", "channels", "step", "MB", "licence", "sha256"]
    assert [line.split()[0] for line in lines[1:]] == [d.name for d in datasets.catalogue()]


def test_data_list_as_json_has_whole_checksums() -> None:
    found = json.loads(call("data", "list", "etth*", "--json").stdout)
    assert [entry["name"] for entry in found] == ["ETTh1", "ETTh2"]
    assert all(len(entry["sha256"]) == 64 and entry["url"] for entry in found)


def test_data_list_without_a_match_is_3() -> None:
    result = call("data", "list", "nothing*")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", "Nothing matched.\n")


def test_data_get_prints_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def get(name: str, *, cache: Path, progress: Callable[[int, int], None], **rest: Any) -> Path:
        progress(2_500_000, 3_000_000)
        seen.append(rest)
        return cache / f"{name}.csv"

    monkeypatch.setattr(datasets, "get", get)
    result = call("data", "get", "ETTh1", "ETTh2", "--cache", tmp_path, "--base-url", "http://x/")
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [f"{tmp_path / name}.csv" for name in ("ETTh1", "ETTh2")]
    assert seen == [{"base_url": "http://x/", "sha256": None, "trust_on_first_use": False}] * 2


def test_data_get_takes_a_checksum_for_one_set_only() -> None:
    result = call("data", "get", "ETTh1", "ETTh2", "--sha256", "0" * 64)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--sha256 is for one set" in result.stderr


def test_data_get_of_an_unknown_name() -> None:
    result = call("data", "get", "ETTh9")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: There is no data set named 'ETTh9'")


def test_version() -> None:
    assert call("--version").stdout == f"levelhead {__version__}\n"
