"""Backtests against fits on prefixes and metrics by loops; nothing after a cutoff is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from levelhead.base.errors import InputError
from levelhead.data.tables import read_table
from levelhead.evaluation import accuracy
from levelhead.forecasting.forecaster import SAMformer
from levelhead.forecasting.intervals import adaptive_levels
from levelhead.forecasting.rolling import Backtest, plan_windows
from oracles import forecasting as oracle

H, L, T = 6, 24, 300
NAMES = ["load", "oil", "wind"]


def make(model: str = "linear", **settings: Any) -> SAMformer:
    small = {"horizon": H, "context": L, "epochs": 2, "width": 4, "rho": 0.05}
    return SAMformer(model=model, **(small | {"learning_rate": 0.01} | settings))


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return oracle.hourly(T, 3)


def wide(made: Backtest, column: str, cutoff: pd.Timestamp) -> np.ndarray:
    """`[H, D]` of one cutoff."""
    part = made.frame[made.frame.cutoff == cutoff]
    return part.pivot(index="ds", columns="unique_id", values=column)[NAMES].to_numpy()


# -- cutoffs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "cutoffs"),
    [
        ({}, (280, 290)),  # the last fifth
        ({"windows": 3}, (270, 280, 290)),
        ({"windows": 3, "step": 1}, (288, 289, 290)),
        ({"test_rows": 35}, (270, 280, 290)),
        ({"test_rows": 10}, (290,)),
        ({"test_rows": 14, "step": 2}, (286, 288, 290)),
    ],
)
def test_the_last_window_ends_with_the_table(given: dict[str, int], cutoffs: Any) -> None:
    rows = 300 if given else 100
    expected = cutoffs if given else tuple(c - 200 for c in cutoffs)
    assert plan_windows(rows, 10, **given).cutoffs == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"windows": 0}, "windows must be a positive whole number, 0 was given"),
        ({"step": -1}, "step must be a positive whole number"),
        ({"windows": True}, "windows must be a positive whole number, True"),
        ({"windows": 2, "test_rows": 20}, "either windows or test_rows"),
        ({"windows": 99}, "100 rows cannot hold 99 test windows of horizon 10"),
        ({"test_rows": 5}, "test_rows=5 cannot hold a forecast of 10 steps"),
    ],
)
def test_windows_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan_windows(100, 10, **given)


# -- forecasts ------------------------------------------------------------------------------------


def test_the_frame_is_long_and_complete(rows: pd.DataFrame) -> None:
    made = make("auto").backtest(rows, windows=3)
    columns = ["unique_id", "ds", "cutoff", "y", "auto", "naive", "linear"]
    bounds = ["auto-lo-80", "auto-hi-80", "auto-lo-95", "auto-hi-95"]
    assert list(made.frame.columns) == columns + bounds
    assert len(made.frame) == 3 * 3 * H
    keyed = made.frame.set_index(["cutoff", "unique_id", "ds"]).sort_index()
    assert keyed.index.is_unique
    for i, at in enumerate((T - 18, T - 12, T - 6)):
        cutoff = rows["date"][at - 1]
        assert made.frame["cutoff"].unique()[i] == cutoff
        truth = rows.iloc[at : at + H]
        np.testing.assert_allclose(wide(made, "y", cutoff), truth[NAMES], rtol=1e-5, atol=1e-4)
        part = made.frame[(made.frame.cutoff == cutoff) & (made.frame.unique_id == "oil")]
        assert list(part["ds"]) == list(truth["date"])
    assert list(make().backtest(rows, windows=1, coverage=0.5).frame.columns) == [
        *columns[:4],
        "linear",
        "naive",
        "linear-lo-50",
        "linear-hi-50",
    ]


@pytest.mark.parametrize("model", ["linear", "samformer", "auto"])
def test_without_refit_they_are_those_of_one_fit(rows: pd.DataFrame, model: str) -> None:
    made = make(model).backtest(rows, windows=4, step=5)
    forecaster = make(model).fit(rows.iloc[: T - H - 15])
    for at in (T - H - 15, T - H - 10, T - H - 5, T - H):
        given = rows.iloc[:at]
        own = forecaster.predict(given)[NAMES]
        unit = rows[NAMES].std().to_numpy()
        cutoff = rows["date"][at - 1]
        np.testing.assert_allclose(wide(made, model, cutoff) / unit, own / unit, atol=1e-6)
        intervals = forecaster.predict_interval(given, coverage=0.8)
        for bound in ("lo-80", "hi-80"):
            expected = intervals.pivot(index="ds", columns="unique_id", values=bound)[NAMES]
            got = wide(made, f"{model}-{bound}", cutoff)
            np.testing.assert_allclose(got / unit, expected / unit, atol=1e-5)


@pytest.mark.parametrize(("refit", "fitted_at"), [(True, (0, 1, 2, 3)), (2, (0, 0, 2, 2))])
def test_with_refit_they_are_those_of_a_fit_on_the_rows_before(
    rows: pd.DataFrame, refit: bool | int, fitted_at: tuple[int, ...]
) -> None:
    made = make().backtest(rows, windows=4, refit=refit)
    cutoffs = [T - 24, T - 18, T - 12, T - 6]
    for at, fit in zip(cutoffs, fitted_at, strict=True):
        own = make().fit(rows.iloc[: cutoffs[fit]]).predict(rows.iloc[:at])[NAMES]
        unit = rows[NAMES].std().to_numpy()
        got = wide(made, "linear", rows["date"][at - 1])
        np.testing.assert_allclose(got / unit, own / unit, atol=1e-6)


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_rows_after_a_cutoff_do_not_change_its_forecast(
    rows: pd.DataFrame, refit: bool, adaptive: bool
) -> None:
    options: dict[str, Any] = {"windows": 5, "refit": refit, "adaptive": adaptive}
    one = make("auto").backtest(rows, **options).frame
    other = rows.copy()
    at = T - 2 * H
    other.loc[at:, NAMES] = 99.0 + 7.0 * rows.loc[at:, NAMES] ** 2
    two = make("auto").backtest(other, **options).frame
    seen = one.cutoff <= rows["date"][at - 1]
    columns = [c for c in one.columns if c != "y"]
    assert seen.sum() == 4 * 3 * H
    pd.testing.assert_frame_equal(one.loc[seen, columns], two.loc[seen, columns], rtol=1e-9)
    assert (one.loc[~seen, "auto"] != two.loc[~seen, "auto"]).all()


def test_the_estimator_itself_is_left_alone(rows: pd.DataFrame) -> None:
    forecaster = make()
    forecaster.backtest(rows, windows=1)
    assert not hasattr(forecaster, "chosen_")
    fitted = make().fit(rows)
    before = fitted.predict()
    fitted.backtest(rows, windows=2)
    pd.testing.assert_frame_equal(fitted.predict(), before, check_exact=True)


def test_targets_alone_are_judged(rows: pd.DataFrame) -> None:
    made = make(targets=["wind", "load"]).backtest(rows, windows=2)
    assert list(made.frame["unique_id"].unique()) == ["load", "wind"]
    truth = rows.iloc[-H:][["load", "wind"]].to_numpy()
    last = made.frame[made.frame.cutoff == rows["date"][T - H - 1]]
    got = last.pivot(index="ds", columns="unique_id", values="y")[["load", "wind"]]
    np.testing.assert_allclose(got, truth, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tz", [None, "America/New_York"])
def test_every_stamp_is_one_of_the_table(tz: str | None) -> None:
    given = oracle.hourly(T, 3, tz=tz)
    made = make().backtest(oracle.long_form(given), windows=2).frame
    assert made["ds"].isin(given["date"]).all()
    assert str(made["ds"].dtype) == str(given["date"].dtype)


# -- metrics --------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_frame(rows: pd.DataFrame) -> None:
    made = make("samformer", season=3).backtest(rows, windows=5, step=4, coverage=[0.5, 0.9])
    first = T - H - 16
    history = rows.iloc[:first]
    train = history.iloc[: make().fit(history).borders_.train]
    unit = train[NAMES].std(ddof=0)
    table = made.metrics.set_index(["model", "channel"])
    for model in ("samformer", "naive", "linear"):
        each = []
        for name in NAMES:
            own = made.frame[made.frame.unique_id == name]
            error = own[model] - own["y"]
            steps = history[name].diff(3).abs().mean()
            expected = {
                "mse": (error**2).mean(),
                "mae": error.abs().mean(),
                "mse_scaled": (error**2).mean() / unit[name] ** 2,
                "mae_scaled": error.abs().mean() / unit[name],
                "mase": error.abs().mean() / steps,
            }
            if model == "samformer":
                for label, level in (("50", 0.5), ("90", 0.9)):
                    low, high = own[f"samformer-lo-{label}"], own[f"samformer-hi-{label}"]
                    tail = (1 - level) / 2
                    expected[f"coverage_{label}"] = own["y"].between(low, high).mean()
                    expected[f"width_{label}"] = (high - low).mean()
                    expected[f"pinball_{label}"] = (
                        accuracy.pinball(own["y"], low, tail)
                        + accuracy.pinball(own["y"], high, 1 - tail)
                    ) / 2
            got = table.loc[(model, name)].dropna().to_dict()
            assert got == pytest.approx(expected, rel=1e-9)
            each.append(expected)
        pooled = table.loc[(model, "all")].dropna().to_dict()
        mean = {m: np.mean([e[m] for e in each]) for m in each[0]}
        assert pooled == pytest.approx(mean, rel=1e-9)


def test_coverage_by_step_is_that_of_the_frame(rows: pd.DataFrame) -> None:
    made = make().backtest(rows, windows=6, step=3, coverage=0.8)
    frame = made.frame.assign(
        step=lambda f: ((f.ds - f.cutoff) / pd.Timedelta("1h")).astype(int),
        inside=lambda f: f.y.between(f["linear-lo-80"], f["linear-hi-80"]),
    )
    expected = frame.groupby(["unique_id", "step"])["inside"].mean()
    got = made.by_step.set_index(["channel", "step"])["coverage"]
    assert (made.by_step["level"] == 80).all()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value)
    assert len(got) == 3 * H


def test_notes_say_what_was_found(rows: pd.DataFrame) -> None:
    made = make("auto").backtest(rows, windows=4, coverage=0.8)
    pooled = made.metrics[made.metrics.channel == "all"].set_index("model")
    own, naive = pooled.loc["auto", "mse_scaled"], pooled.loc["naive", "mse_scaled"]
    chosen = make("auto").fit(rows.iloc[: T - 24]).chosen_
    assert made.notes[0] == f"4 windows; auto used: {chosen}"
    assert f"{100 * (1 - own / naive):.1f} % below naive" in " ".join(made.notes)
    covered = pooled.loc["auto", "coverage_80"]
    assert f"80 % intervals covered {100 * covered:.1f} %" in made.notes[-1]


# -- adaptive intervals ---------------------------------------------------------------------------


def test_adaptive_intervals_use_only_outcomes_that_are_known(rows: pd.DataFrame) -> None:
    made = make().backtest(rows, windows=8, step=3, coverage=0.8, adaptive=True)
    first = T - H - 21
    forecaster = make().fit(rows.iloc[:first])
    state = forecaster._fitted
    series, _, _ = state.standardise(read_table(rows))
    starts = [first + 3 * n - L for n in range(8)]
    scores = state.scores(series, starts)
    assert state.conformal is not None
    levels = list(adaptive_levels(state.conformal, 0.8, scores, stride=3, horizon=H))
    deviation = np.concatenate([s for _, _, s in state.outcomes(series, starts)])
    for n in range(8):
        half = state.conformal.half_width(0.8, levels[n]) * deviation[n]
        part = made.frame[made.frame.cutoff == rows["date"][first + 3 * n - 1]]
        for j, name in enumerate(state.targets):
            own = part[part.unique_id == name]
            unit = state.scaler.deviation[state.channels.index(name)]
            width = (own["linear-hi-80"] - own["linear-lo-80"]).to_numpy()
            np.testing.assert_allclose(width, 2 * half[j] * unit, rtol=1e-5)
    assert (levels[0] == levels[1]).all()  # two windows of three rows begin before one is over
    assert (levels[2] != levels[1]).any()


def test_adaptive_intervals_mend_a_planted_drift() -> None:
    draw = np.random.default_rng(2)
    time = np.arange(2000)
    noise = np.where(time < 1000, 0.05, 0.15)[:, None] * draw.normal(size=(2000, 2))
    values = np.sin(time / 3.0)[:, None] * [1.0, 4.0] + noise
    options: dict[str, Any] = {"windows": 240, "step": 4, "coverage": 0.8}
    covered = {
        adaptive: make()
        .backtest(values, adaptive=adaptive, **options)
        .metrics.set_index(["model", "channel"])
        .loc[("linear", "all"), "coverage_80"]
        for adaptive in (False, True)
    }
    assert covered[False] < 0.6
    assert covered[True] > 0.72
    noted = make().backtest(values, adaptive=True, **options).notes[-1]
    assert noted.startswith("adaptive 80 % intervals covered")


@pytest.mark.parametrize("refit", [0, -2])
def test_a_refit_that_is_no_number_of_windows(rows: pd.DataFrame, refit: int) -> None:
    with pytest.raises(InputError, match="refit must be True, False or a positive whole number"):
        make().backtest(rows, windows=2, refit=refit)
