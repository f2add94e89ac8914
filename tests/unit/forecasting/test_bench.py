"""The bench against the protocol written out in NumPy, and what it stores and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from levelhead.base.errors import InputError
from levelhead.base.records import Run
from levelhead.data.windows import Scaler
from levelhead.forecasting import bench as module
from levelhead.forecasting import fitting
from levelhead.forecasting.bench import (
    BENCH_MODELS,
    PAPER,
    bench,
    default_training,
    describe_split,
    ltsf_split,
)
from levelhead.forecasting.lines import LineKind, fit_line
from levelhead.report.document import write_report
from levelhead.training.loop import TrainingSettings
from oracles import forecasting as oracle

L, SPLIT = 24, (220, 60, 70)
QUICK = TrainingSettings(epochs=2, learning_rate=0.01)


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return oracle.related(360, 3)


def run(values: Any, *models: str, **changes: Any) -> list[module.BenchRow]:
    options: dict[str, Any] = {"context": L, "split": SPLIT, "horizons": (6,), "training": QUICK}
    return bench(values, models=models, **(options | changes))


# -- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "split"),
    [
        ("ETTh1.csv", 17420, (8640, 2880, 2880)),
        ("/data/ETTh2.parquet", 14400, (8640, 2880, 2880)),
        ("ETTm1.csv", 69680, (34560, 11520, 11520)),
        ("ETTm2.csv", 57600, (34560, 11520, 11520)),
        ("ETTh1.csv", 14399, (10079, 1441, 2879)),  # too short for months: by shares
        ("weather.csv", 52696, (36887, 5270, 10539)),
        ("exchange_rate.csv", 7588, (5311, 760, 1517)),
        ("electricity.csv", 26304, (18412, 2632, 5260)),
        ("my_ETTh1.csv", 17420, (12194, 1742, 3484)),
        ("", 1000, (700, 100, 200)),
    ],
)
def test_the_split_of_the_literature(name: str, rows: int, split: tuple[int, int, int]) -> None:
    assert ltsf_split(name, rows) == split
    assert sum(split) <= rows


def test_the_split_is_told() -> None:
    said = describe_split((8640, 2880, 2880), 17420)
    assert said == "8640 rows train, 2880 validate, 2880 test, 3020 rows after them unused"
    assert describe_split((7, 1, 2), 10) == "7 rows train, 1 validate, 2 test"


def test_a_file_is_split_by_its_name(tmp_path: Path) -> None:
    rows = oracle.hourly(360, 2)
    rows.to_csv(tmp_path / "mine.csv", index=False)
    (row,) = bench(tmp_path / "mine.csv", context=L, horizons=[6], models=["linear"])
    assert row.windows == 72 - 6 + 1
    (own,) = run(rows, "linear", split=(251, 37, 72))
    assert (own.mse, own.mae) == (row.mse, row.mae)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "linear-revin"])
@pytest.mark.parametrize("horizon", [1, 6, 60])
def test_errors_are_those_of_the_protocol(values: np.ndarray, kind: LineKind, horizon: int) -> None:
    (row,) = run(values, kind, horizons=(horizon,))
    train, validation, test = SPLIT
    series = np.ascontiguousarray(values[: sum(SPLIT)].T)
    scaled = Scaler.fit(series[:, :train]).apply(series)
    line = fit_line(scaled, L, horizon, (0, train), (train, train + validation), kind)
    mse, mae, windows = oracle.protocol_errors(values, SPLIT, L, horizon, line.head.numpy())
    assert row.windows == windows == test - horizon + 1
    assert row.mse == pytest.approx(mse, rel=1e-5)
    assert row.mae == pytest.approx(mae, rel=1e-5)
    assert (row.model, row.horizon, row.seed) == (kind, horizon, 0)
    assert row.parameters == L * horizon


def test_naive_repeats_the_last_value(values: np.ndarray) -> None:
    (row,) = run(values, "naive")
    head = np.zeros((L, 6))
    head[-1] = 1.0
    mse, mae, _ = oracle.protocol_errors(values, SPLIT, L, 6, head)
    assert (row.mse, row.mae) == (pytest.approx(mse, rel=1e-5), pytest.approx(mae, rel=1e-5))
    assert row.parameters == 0


def test_test_rows_choose_nothing(values: np.ndarray) -> None:
    other = values.copy()
    other[280:] = 1e3 * np.random.default_rng(0).normal(size=(80, 3))
    seen: list[Any] = []
    for given in (values, other):
        cell = module._Cell(
            module.read_table(given, time="ignore", sentinels="keep"),
            SPLIT,
            L,
            6,
            QUICK,
            "cpu",
            None,
        )
        problem, plan = cell.problem(), replace(cell.plan("auto", 0), training=QUICK, rho=0.05)
        fitted = fitting.fit_models(problem, plan)
        _, choice, _ = fitting.select(fitted, plan, problem.validation)
        assert fitted.history is not None
        seen.append((choice, [e.validation for e in fitted.history.epochs]))
    assert seen[0] == seen[1]


def test_rows_behind_the_split_are_not_seen(values: np.ndarray) -> None:
    other = values.copy()
    other[sum(SPLIT) :] = 1e9
    one, two = (run(v, "linear", "samformer") for v in (values, other))
    assert [(r.mse, r.mae) for r in one] == [(r.mse, r.mae) for r in two]


def test_stamps_are_ignored_and_sentinels_kept(values: np.ndarray) -> None:
    rows = pd.DataFrame(values, columns=list("abc"))
    rows.insert(0, "date", pd.date_range("2024-01-01", periods=360, freq="h"))
    rows.loc[5:9, "a"] = -9999.0
    irregular = rows.copy()
    irregular.loc[100:, "date"] += pd.Timedelta("17min")
    one, two = (run(t, "linear") for t in (rows, irregular))
    assert (one[0].mse, one[0].mae) == (two[0].mse, two[0].mae)


@pytest.mark.parametrize("model", BENCH_MODELS)
def test_every_model_runs_and_repeats(values: np.ndarray, model: str, monkeypatch) -> None:
    quick = replace(QUICK, steps_per_epoch=256)
    monkeypatch.setattr(module, "default_training", lambda seed: replace(quick, seed=seed))
    one, two = (run(values, model) for _ in range(2))
    assert [(r.mse, r.mae, r.windows) for r in one] == [(r.mse, r.mae, r.windows) for r in two]
    assert 0 < one[0].mae < 2
    assert one[0].model == model
    assert one[0].seconds > 0


# -- seeds, batches, the paper's protocol ---------------------------------------------------------


def test_seeds_run_where_something_is_drawn(values: np.ndarray) -> None:
    rows = run(values, "linear", "samformer", seeds=3)
    assert [(r.model, r.seed) for r in rows] == [
        ("linear", 0),
        ("samformer", 0),
        ("samformer", 1),
        ("samformer", 2),
    ]
    assert len({r.mse for r in rows[1:]}) == 3
    assert run(values, "samformer", seeds=2)[1].mse == rows[2].mse


def test_batch_size_changes_no_line(values: np.ndarray) -> None:
    models = ("naive", "linear", "linear-revin")
    one, two = (run(values, *models, training=replace(QUICK, batch_size=b)) for b in (3, 256))
    assert [(r.mse, r.mae) for r in one] == [(r.mse, r.mae) for r in two]


def test_samformer_is_the_papers(values: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    make = fitting.make_network

    def spy(*sizes: int, **options: Any) -> Any:
        seen.append({"sizes": sizes, **options})
        return make(*sizes, **options)

    monkeypatch.setattr(fitting, "make_network", spy)
    (row,) = run(values, "samformer")
    (given,) = seen
    assert given["sizes"] == (L, 6, 3)
    assert given["line"] is None  # Glorot's start
    assert given["revin_affine"] is True
    # 4 matrices L x 16, the head, five biases, gain and shift per channel
    assert row.parameters == 4 * L * 16 + L * 6 + (16 * 3 + L + 6) + 2 * 3
    assert (PAPER.learning_rate, PAPER.batch_size, PAPER.rho) == (1e-3, 32, 0.7)
    assert (PAPER.epochs, PAPER.restart_every, PAPER.minimal_rate) == (300, 5, 1e-6)


def test_auto_is_what_the_forecaster_does() -> None:
    cell = module._Cell(None, SPLIT, L, 6, PAPER, "cpu", None)  # type: ignore[arg-type]
    plan = cell.plan("auto", 5)
    assert plan.models == fitting.MODELS
    assert (plan.start, plan.rho, plan.seed) == ("linear", "auto", 5)
    assert plan.training == default_training(5)


# -- records --------------------------------------------------------------------------------------


def test_rows_and_settings_are_stored(values: np.ndarray, tmp_path: Path) -> None:
    rows = run(values, "linear", "samformer", horizons=(3, 6), seeds=2, out=tmp_path / "out")
    assert len(rows) == 2 * 3
    stored = Run.open(tmp_path / "out")
    settings = stored.settings
    assert settings["split"] == list(SPLIT)
    assert (settings["context"], settings["horizons"], settings["seeds"]) == (L, [3, 6], 2)
    assert settings["models"] == ["linear", "samformer"]
    assert settings["training"]["learning_rate"] == 0.01
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for reading in stored.readings():
        found.setdefault(tuple(reading.where.values()), {})[reading.name] = reading.value
    assert found == {
        (r.model, r.horizon, r.seed, r.took): {
            "mse": r.mse,
            "mae": r.mae,
            "seconds": r.seconds,
            "parameters": r.parameters,
            "windows": r.windows,
        }
        for r in rows
    }
    table = stored.array("mse")
    assert table[0, 1] == next(r.mse for r in rows if (r.model, r.horizon) == ("linear", 6))
    pair = [r.mse for r in rows if (r.model, r.horizon) == ("samformer", 3)]
    assert table[1, 0] == pytest.approx(np.mean(pair))
    assert not (tmp_path / "out" / "training").exists()
    assert write_report(stored).is_file()
    json.dumps([r.as_dict() for r in rows], allow_nan=False)
    with pytest.raises(InputError, match="already holds a run"):
        run(values, "linear", out=tmp_path / "out")


def test_an_interrupted_bench_goes_on(
    values: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"horizons": (3, 6), "seeds": 2}
    whole = run(values, "linear", "samformer", **options)
    judge = module.test_errors
    judged: list[int] = []

    def stopping(*given: Any) -> tuple[float, float]:
        judged.append(1)
        if len(judged) == 4:
            raise KeyboardInterrupt
        return judge(*given)

    monkeypatch.setattr(module, "test_errors", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(values, "linear", "samformer", out=tmp_path / "out", **options)
    rows = run(values, "linear", "samformer", out=tmp_path / "out", resume=True, **options)
    assert len(judged) == 4 + 3  # three cells were done
    assert [(r.mse, r.mae) for r in rows] == [(r.mse, r.mae) for r in whole]
    with pytest.raises(InputError, match="was made with seeds = 2, not 1"):
        run(values, "linear", "samformer", out=tmp_path / "out", resume=True, horizons=(3, 6))


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": "m4"}, "protocol 'm4' is not known: use 'ltsf'"),
        ({"models": ("linear", "lstm")}, "unknown model 'lstm': choose from naive, linear"),
        ({"seeds": 0}, "seeds must be at least 1, 0 was given"),
        ({"split": (300, 60, 70)}, "fit into 360 rows is needed, 300,60,70 was given"),
        ({"split": (220, 0, 70)}, "three positive row counts"),
        ({"split": (220, 60)}, "three positive row counts"),
        ({"split": (29, 60, 70)}, "too short for context 24 and horizon 6"),
        ({"split": (220, 5, 70)}, "validation and test rows the horizon"),
        ({"split": (220, 60, 5)}, "validation and test rows the horizon"),
        ({"horizons": (6, 0)}, "horizon must be a positive whole number of steps, 0"),
        ({"horizons": ()}, "at least one horizon"),
        ({"context": 0}, "context must be a positive whole number of steps, 0"),
    ],
)
def test_what_cannot_be_is_refused(values: np.ndarray, changes: Any, said: str) -> None:
    options: dict[str, Any] = {"context": L, "split": SPLIT, "horizons": (6,), "models": ["linear"]}
    with pytest.raises(InputError) as error:
        bench(values, **(options | changes))
    assert said in str(error.value)


def test_nothing_is_written_for_what_is_refused(values: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run(values, "lstm", out=tmp_path / "out")
    with pytest.raises(InputError):
        run(values, "linear", split=(1, 1, 1), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- real data ------------------------------------------------------------------------------------


def test_the_line_on_real_data(real_data: Path) -> None:
    rows = bench(real_data / "ETTh1.csv", models=["linear"])
    assert [r.horizon for r in rows] == [96, 192, 336, 720]
    assert [r.windows for r in rows] == [2785, 2689, 2545, 2161]
    for row, limit in zip(rows, (0.3645, 0.397, 0.419, 0.438), strict=True):
        assert row.mse <= limit
