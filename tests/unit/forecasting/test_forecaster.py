"""The estimator: tables in and out in the user's own form, which rows do what, what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from levelhead.base.errors import DataError, DivergenceError, InputError, LevelheadWarning
from levelhead.data.generators import followers
from levelhead.data.windows import Scaler
from levelhead.forecasting import forecaster as module
from levelhead.forecasting.candidates import Blend, Line, Network
from levelhead.forecasting.forecaster import SAMformer
from levelhead.forecasting.lines import fit_line
from oracles import forecasting as oracle

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cannot support a coverage"),
    pytest.mark.filterwarnings("ignore:the model was fitted on other channels"),
]

H, L = 6, 24
NAMES = ["load", "oil", "wind"]


def make(model: str = "linear", **settings: Any) -> SAMformer:
    small = {"horizon": H, "context": L, "epochs": 2, "width": 4, "rho": 0.05}
    small |= {"learning_rate": 0.01}
    return SAMformer(model=model, **(small | settings))


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """The forecast of the plain pandas table `[H, D]`."""
    return make().fit(oracle.hourly()).predict()[NAMES].to_numpy()


# -- forms of tables ------------------------------------------------------------------------------


def test_polars_in_polars_out(expected: np.ndarray) -> None:
    made = make().fit(pl.DataFrame(oracle.hourly().to_dict("series"))).predict()
    assert isinstance(made, pl.DataFrame)
    assert made.columns == ["date", *NAMES]
    np.testing.assert_array_equal(made.select(NAMES).to_numpy(), expected)
    stamps = pd.date_range("2024-01-30 05:00", periods=306, freq="h")[300:]
    assert made["date"].to_list() == stamps.to_pydatetime().tolist()


def test_arrow_in_arrow_out(expected: np.ndarray) -> None:
    made = make().fit(pa.Table.from_pandas(oracle.hourly(), preserve_index=False)).predict()
    assert isinstance(made, pa.Table)
    assert made.column_names == ["date", *NAMES]
    np.testing.assert_array_equal(made.select(NAMES).to_pandas().to_numpy(), expected)


def test_arrays_in_arrays_out(expected: np.ndarray) -> None:
    values = oracle.hourly()[NAMES].to_numpy()
    made = make().fit(values).predict()
    assert isinstance(made, np.ndarray)
    np.testing.assert_array_equal(made, expected)
    one = make().fit(values[:, 0])
    assert one.predict().shape == (H,)
    np.testing.assert_allclose(one.predict(), make().fit(values[:, :1]).predict()[:, 0], rtol=1e-9)


def test_long_in_long_out(expected: np.ndarray) -> None:
    made = make().fit(oracle.long_form(oracle.hourly())).predict()
    assert list(made.columns) == ["unique_id", "ds", "y"]
    assert list(made["unique_id"]) == [n for n in NAMES for _ in range(H)]
    np.testing.assert_array_equal(made["y"].to_numpy().reshape(3, H).T, expected)
    assert list(made["ds"][:H]) == list(pd.date_range("2024-02-11 17:00", periods=H, freq="h"))


def test_an_index_of_stamps_and_a_series_come_back(expected: np.ndarray) -> None:
    rows = oracle.hourly().set_index("date")
    made = make().fit(rows).predict()
    assert made.index.name == "date"
    assert list(made.columns) == NAMES
    np.testing.assert_array_equal(made.to_numpy(), expected)
    series = make().fit(rows["oil"]).predict()
    assert isinstance(series, pd.Series)
    assert series.name == "oil"
    assert list(series.index) == list(made.index)


def test_files_in(tmp_path, expected: np.ndarray) -> None:
    rows = oracle.hourly()
    rows.to_csv(tmp_path / "t.csv", index=False)
    rows.to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        made = make().fit(tmp_path / name).predict()
        np.testing.assert_allclose(made[NAMES], expected, rtol=1e-12)
        assert str(made["date"][0]) == "2024-02-11 17:00:00"


def test_the_form_of_a_forecast_is_that_of_the_table_given_last(expected: np.ndarray) -> None:
    forecaster = make().fit(oracle.hourly())
    made = forecaster.predict(pl.DataFrame(oracle.hourly().to_dict("series")))
    assert isinstance(made, pl.DataFrame)
    np.testing.assert_array_equal(made.select(NAMES).to_numpy(), expected)
    long = forecaster.predict(oracle.long_form(oracle.hourly()))
    np.testing.assert_array_equal(long["y"].to_numpy().reshape(3, H).T, expected)


# -- stamps ---------------------------------------------------------------------------------------


def stamps_after(**dates: Any) -> tuple[list[pd.Timestamp], list[pd.Timestamp]]:
    """(stamps of the forecast, stamps that follow by date_range itself)."""
    rows = oracle.hourly(200, 2, **dates)
    made = make().fit(rows).predict()
    both = pd.date_range(
        "2024-01-30 05:00", periods=200 + H, tz=dates.get("tz"), freq=dates.get("freq", "h")
    )
    return list(made["date"]), list(both[200:])


@pytest.mark.parametrize("tz", ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu"])
@pytest.mark.parametrize("freq", ["h", "15min", "D"])
def test_stamps_keep_their_zone(tz: str, freq: str) -> None:
    made, expected = stamps_after(tz=tz, freq=freq)
    assert made == expected
    assert str(made[0].tz) == tz


@pytest.mark.parametrize("freq", ["ME", "MS", "QS", "W-SUN", "B", "YE"])
def test_calendar_steps_follow_the_calendar(freq: str) -> None:
    made, expected = stamps_after(freq=freq)
    assert made == expected


@pytest.mark.parametrize(
    ("first", "hours"),
    [
        ("2024-03-31 00:00", [0, 1, 3, 4, 5, 6]),  # 02:00 does not exist
        ("2024-10-27 00:00", [0, 1, 2, 2, 3, 4]),  # 02:00 exists twice
    ],
)
@pytest.mark.parametrize("form", ["wide", "long", "polars"])
def test_hours_across_a_clock_change(first: str, hours: list[int], form: str) -> None:
    begin = pd.Timestamp(first, tz="Europe/Berlin")
    rows = oracle.hourly(200, 2)
    rows["date"] = pd.date_range(end=begin - pd.Timedelta("1h"), periods=200, freq="h")
    given: Any = rows
    if form == "long":
        given = oracle.long_form(rows)
    if form == "polars":
        given = pl.DataFrame(rows.to_dict("series"))
    made = make().fit(given).predict()
    column = made["date" if form != "long" else "ds"]
    stamps = column.to_list()[:H]
    assert [t.hour for t in stamps] == hours
    assert (stamps[-1] - stamps[0]).total_seconds() in (5 * 3600, 4 * 3600, 6 * 3600)
    utc = [t.timestamp() for t in stamps]
    assert np.diff(utc).tolist() == [3600.0] * (H - 1)


def test_history_across_a_clock_change_is_regular() -> None:
    rows = oracle.hourly(300, 2)
    rows["date"] = pd.date_range("2024-03-25", periods=300, freq="h", tz="Europe/Berlin")
    forecaster = make().fit(rows)
    plain = make().fit(oracle.hourly(300, 2))
    np.testing.assert_array_equal(forecaster.predict()[NAMES[:2]], plain.predict()[NAMES[:2]])


def test_whole_numbers_as_stamps() -> None:
    rows = oracle.hourly(200, 2).drop(columns="date")
    rows.index = pd.Index(np.arange(1000, 1000 + 200 * 5, 5))
    made = make().fit(rows).predict()
    assert list(made.index) == list(range(2000, 2000 + 5 * H, 5))
    assert list(make().fit(rows.reset_index(drop=True)).predict().index) == list(range(200, 206))


def test_intervals_have_the_stamps_of_each_channel() -> None:
    made = make().fit(oracle.hourly(tz="Europe/Berlin")).predict_interval()
    stamps = pd.date_range("2024-01-30 05:00", periods=306, freq="h", tz="Europe/Berlin")[300:]
    assert list(made["ds"]) == list(stamps) * 3


# -- which rows do what ---------------------------------------------------------------------------


def test_with_refit_the_line_is_the_ridge_on_all_rows() -> None:
    values = oracle.related(300, 2)
    forecaster = make(refit=True).fit(values)
    borders = forecaster.borders_
    scaled = (values - values[: borders.train].mean(0)) / values[: borders.train].std(0)
    line = forecaster.candidates_["linear"]
    assert isinstance(line, Line)
    z, y = oracle.stacked(scaled.T, L, H, list(range(300 - L - H + 1)), "last", None)
    head = oracle.ridge_head(z, y, line.penalty, "last")
    made = scaled[-L:].T @ head
    in_units = made.T * values[: borders.train].std(0) + values[: borders.train].mean(0)
    np.testing.assert_allclose(forecaster.predict(), in_units, atol=1e-5 * values.std())


def test_without_refit_the_line_is_that_of_the_training_rows() -> None:
    values = oracle.related(300, 2)
    forecaster = make(refit=False).fit(values)
    borders = forecaster.borders_
    series = np.ascontiguousarray(values.T)
    scaler = Scaler.fit(series[:, : borders.train])
    line = fit_line(scaler.apply(series), L, H, (0, borders.train), (borders.train, borders.select))
    made = scaler.invert(scaler.apply(series)[:, -L:] @ line.head.numpy()).T
    np.testing.assert_allclose(forecaster.predict(), made, atol=1e-5 * values.std())
    again = make(refit=True).fit(values)
    assert np.abs(again.predict() - made).max() > 1e-4 * values.std()


@pytest.mark.parametrize("model", ["samformer", "blend"])
def test_refit_trains_the_network_anew_and_without_it_it_stays(model: str) -> None:
    rows = oracle.hourly()
    kept = make(model, refit=False).fit(rows)
    chosen = kept._fitted.chosen
    networks = [m for m in getattr(chosen, "members", (chosen,)) if isinstance(m, Network)]
    assert networks == [kept.candidates_["samformer"]]
    again = make(model).fit(rows)
    assert again.history_ is not None
    assert kept.history_ is not None
    assert [e.validation for e in again.history_.epochs] == [
        e.validation for e in kept.history_.epochs
    ]
    anew = again._fitted.chosen
    assert anew is not again.candidates_[model]
    if isinstance(anew, Blend):
        assert anew.weights == again.candidates_["blend"].weights  # type: ignore[attr-defined]
    assert (again.predict()[NAMES] != kept.predict()[NAMES]).all(axis=None)


def test_the_scaler_sees_training_rows_alone() -> None:
    values = oracle.related(300, 2)
    forecaster = make("naive").fit(values)
    scaler = forecaster._fitted.scaler
    train = values[: forecaster.borders_.train]
    np.testing.assert_allclose(np.sort(scaler.mean), np.sort(train.mean(0)), rtol=1e-12)
    np.testing.assert_allclose(np.sort(scaler.deviation), np.sort(train.std(0)), rtol=1e-12)


@pytest.mark.parametrize("model", ["auto", "samformer"])
def test_calibration_rows_choose_nothing(model: str) -> None:
    """One channel, so that the order of channels cannot change with their content."""
    values = oracle.related(300, 1)
    one = make(model, refit=False).fit(values)
    other = values.copy()
    other[one.borders_.select :] = 50.0 + 9.0 * np.random.default_rng(1).normal(size=(45, 1))
    two = make(model, refit=False).fit(other)
    assert one.choice_ == two.choice_
    assert one.chosen_ == two.chosen_
    assert (one.history_ is None) == (model == "auto")  # one channel has nothing to attend to
    if one.history_ is not None and two.history_ is not None:
        assert one.history_.best_epoch == two.history_.best_epoch
    for name in ("linear", "linear-revin"):
        if name in one.candidates_:
            lines = one.candidates_[name], two.candidates_[name]
            assert lines[0].penalty == lines[1].penalty  # type: ignore[attr-defined]
    np.testing.assert_array_equal(one.predict(values), two.predict(values))
    widths = [f.predict_interval(values).eval("`hi-80` - `lo-80`") for f in (one, two)]
    assert (widths[0] != widths[1]).all()


def test_choosing_rows_do_not_calibrate() -> None:
    """The scores come from targets behind `select`; contexts may reach back."""
    values = oracle.related(300, 1)
    forecaster = make("naive", refit=False).fit(values)
    borders, state = forecaster.borders_, forecaster._fitted
    scores = []
    for cutoff in range(borders.select, borders.rows - H + 1):
        context, truth = values[cutoff - L : cutoff, 0], values[cutoff : cutoff + H, 0]
        made = np.resize(context[-state.season :], H)
        unit = state.scaler.deviation[0]
        scores.append(np.abs(made - truth) / np.sqrt(context.var() + 1e-5 * unit**2))
    half = oracle.kth_smallest(np.array(scores), 0.8)
    deviation = np.sqrt(values[-L:, 0].var() + 1e-5 * state.scaler.deviation[0] ** 2)
    made = forecaster.predict_interval(coverage=0.8)
    np.testing.assert_allclose(made["hi-80"] - made["forecast"], half * deviation, rtol=1e-4)
    np.testing.assert_allclose(made["forecast"] - made["lo-80"], half * deviation, rtol=1e-4)


def test_errors_on_the_choosing_rows_by_a_loop() -> None:
    values = oracle.related(300, 2)
    forecaster = make("naive", season=3).fit(values)
    borders = forecaster.borders_
    scale = values[: borders.train].std(axis=0)
    residuals = []
    for cutoff in range(borders.train, borders.select - H + 1):
        made = np.resize(values[cutoff - 3 : cutoff], (H, 2))
        residuals.append(made - values[cutoff : cutoff + H])
    squared = np.mean(np.square(residuals), axis=(0, 1))
    absolute = np.mean(np.abs(residuals), axis=(0, 1))
    errors = forecaster.errors_[forecaster.errors_.model == "naive"].set_index("channel")
    names = list(forecaster.channels_)
    np.testing.assert_allclose(errors.loc[names, "mse"], squared, rtol=1e-4)
    np.testing.assert_allclose(errors.loc[names, "mae"], absolute, rtol=1e-4)
    np.testing.assert_allclose(errors.loc[names, "mse_scaled"], squared / scale**2, rtol=1e-4)
    assert errors.loc["all", "mae_scaled"] == pytest.approx((absolute / scale).mean(), rel=1e-4)
    assert math.isnan(errors.loc["all", "mse"])


def test_auto_context_says_what_it_took() -> None:
    forecaster = make(context="auto").fit(oracle.hourly())
    assert forecaster.context_ == forecaster.borders_.context == 96
    assert any("context 96 steps" in note for note in forecaster.notes_)
    assert forecaster.season_ == 24
    with pytest.raises(DataError, match=r"context 197 would fit \(or context='auto'\)"):
        make(context=200).fit(oracle.hourly())


def test_season_of_the_naive_forecast() -> None:
    rows = oracle.hourly()
    last = rows[NAMES].to_numpy()
    daily = make("naive").fit(rows)
    assert daily.season_ == 24
    np.testing.assert_allclose(daily.predict()[NAMES], last[-24:-18], rtol=1e-5)
    for season, rest in ((1, last[[-1] * 6]), (4, np.vstack([last[-4:], last[-4:-2]]))):
        made = make("naive", season=season).fit(rows)
        assert made.season_ == season
        np.testing.assert_allclose(made.predict()[NAMES], rest, rtol=1e-5)
    with pytest.raises(InputError, match="season must be 'auto' or a positive whole number"):
        make("naive", season=0).fit(rows)


# -- intervals ------------------------------------------------------------------------------------


def test_coverage_on_noise_is_about_what_was_asked_for() -> None:
    """10 channels, 2000 cutoffs four rows apart: a bias of .03 would be 8 standard errors."""
    values = np.random.default_rng(4).normal(size=(14_000, 10))
    forecaster = make("naive", horizon=4, context=16, season=2).fit(values[:6000])
    table = forecaster.read(values[6000:])
    state = forecaster._fitted
    series, _, _ = state.standardise(table)
    scores = state.scores(series, range(0, 8000 - 20, 4))
    assert state.conformal is not None
    for coverage in (0.8, 0.95):
        inside = (scores <= state.conformal.half_width(coverage)).mean()
        assert abs(inside - coverage) < 0.015


def test_channels_that_were_not_fitted_get_pooled_intervals() -> None:
    rows = oracle.hourly()
    forecaster = make().fit(rows)
    new = rows[["date"]].assign(load=rows["load"], other=100.0 + 5.0 * rows["load"])
    made = forecaster.predict_interval(new, coverage=0.8).set_index("unique_id")
    assert not made.loc["load", "pooled"].any()
    assert made.loc["other", "pooled"].all()
    conformal = forecaster._fitted.conformal
    assert conformal is not None
    deviation = new["other"].iloc[-L:].std(ddof=0)
    half = conformal.half_width(0.8, pooled=True) * deviation
    np.testing.assert_allclose(
        made.loc["other", "hi-80"] - made.loc["other", "forecast"], half, rtol=1e-4
    )


def test_adaptive_intervals_follow_a_drift() -> None:
    draw = np.random.default_rng(3)
    wave = np.sin(np.arange(1200) / 3.0)[:, None] * [1.0, 5.0]
    calm = wave + 0.05 * draw.normal(size=wave.shape)
    forecaster = make().fit(calm)
    wild = wave + 0.3 * draw.normal(size=wave.shape)

    def width(adaptive: bool) -> np.ndarray:
        made = forecaster.predict_interval(wild, coverage=0.8, adaptive=adaptive)
        return (made["hi-80"] - made["lo-80"]).to_numpy()

    assert (width(True) > width(False)).all()
    points = [forecaster.predict_interval(wild, adaptive=a)["forecast"] for a in (True, False)]
    pd.testing.assert_series_equal(*points, check_exact=True)


def test_adaptive_intervals_of_every_channel_are_its_own() -> None:
    draw = np.random.default_rng(3)
    wave = np.sin(np.arange(1200) / 3.0)[:, None] * [1.0, 1.0]
    forecaster = make().fit(wave + 0.05 * draw.normal(size=wave.shape))
    mixed = wave + np.array([0.05, 0.3]) * draw.normal(size=wave.shape)
    ratio = [
        forecaster.predict_interval(mixed, coverage=0.8, adaptive=a)
        .assign(width=lambda f: f["hi-80"] - f["lo-80"])
        .groupby("unique_id")["width"]
        .mean()
        for a in (True, False)
    ]
    grown = (ratio[0] / ratio[1]).to_dict()
    assert grown["1"] > 1.3 > grown["0"]


def test_adaptive_intervals_need_outcomes_of_the_fitted_channels() -> None:
    rows = oracle.hourly()
    forecaster = make().fit(rows)
    for given in (None, rows.iloc[-(L + H) :]):
        with pytest.raises(InputError, match="pass a table X of more than 30 rows"):
            forecaster.predict_interval(given, adaptive=True)
    with pytest.raises(InputError, match="exactly the fitted channels"):
        forecaster.predict_interval(rows[["date", "load"]], adaptive=True)


# -- score, attention -----------------------------------------------------------------------------


def test_score_is_the_skill_over_the_naive_forecast() -> None:
    values = oracle.related(300, 2)
    forecaster = make(season=2).fit(values)
    scale = values[: forecaster.borders_.train].std(axis=0)
    error = base = 0.0
    for cutoff in range(L, 300 - H + 1):
        truth = values[cutoff : cutoff + H]
        made = forecaster.predict(values[:cutoff])
        naive = np.resize(values[cutoff - 2 : cutoff], (H, 2))
        error += float(np.sum(((made - truth) / scale) ** 2))
        base += float(np.sum(((naive - truth) / scale) ** 2))
    assert forecaster.score(values) == pytest.approx(1 - error / base, rel=1e-4)
    assert make("naive").fit(values).score(values) == pytest.approx(0.0, abs=1e-9)
    assert make("naive").fit(np.ones((200, 1))).score(np.ones((50, 1))) == 1.0
    with pytest.raises(InputError, match="at least 30 rows, 29 given"):
        forecaster.score(values[:29])
    with pytest.raises(InputError, match="exactly the fitted channels"):
        forecaster.score(values[:, :1])


def test_attention_is_row_stochastic_and_finds_the_leader() -> None:
    rows = oracle.hourly(800)
    forecaster = make("samformer", epochs=8).fit(rows)
    matrix, names = forecaster.attention(rows)
    assert sorted(names) == sorted(NAMES)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=1e-5)
    order = [names.index(n) for n in NAMES]
    matrix = matrix[np.ix_(order, order)]
    assert matrix[1:, 0].min() > 1 / 3  # the followers look at their leader
    with pytest.raises(InputError, match="no SAMformer was fitted"):
        make().fit(rows).attention(rows)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "prophet"}, "unknown model 'prophet': choose auto or one of naive, linear"),
        ({"start": "zero"}, "start must be 'linear' or 'glorot', 'zero' was given"),
        ({"rho": -1.0}, "rho must be 'auto' or a number >= 0, -1.0 was given"),
        ({"rho": "big"}, "rho must be 'auto' or a number >= 0, 'big' was given"),
        ({"horizon": 0}, "horizon must be a positive whole number"),
        ({"context": "short"}, "context must be 'auto' or a positive whole number"),
        ({"epochs": 0}, "epochs must be a positive integer, 0 was given"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"learning_rate": -1.0}, "learning_rate must be a number >= 0"),
        ({"width": 0, "model": "samformer"}, "width must be a positive integer"),
        ({"random_state": None, "model": "samformer"}, "seed must be an integer"),
        ({"random_state": -1, "model": "samformer"}, "seed must be an integer"),
        ({"layout": "tall"}, "layout='tall' is unknown"),
        ({"targets": ["laod"]}, "no channel 'laod': did you mean 'load'?"),
        ({"targets": []}, "no channel was asked for"),
        ({"targets": ["load", "load"]}, "'load' is asked for twice"),
    ],
)
def test_parameters_that_cannot_be_are_refused_by_fit(settings: dict[str, Any], said: str) -> None:
    forecaster = SAMformer(**({"horizon": H, "context": L} | settings))
    with pytest.raises(InputError) as error:
        forecaster.fit(oracle.hourly())
    assert said in str(error.value)


def test_covariates_are_refused() -> None:
    with pytest.raises(InputError, match="known-future covariates are not supported"):
        make().fit(oracle.hourly(), oracle.hourly())


def test_a_failed_fit_leaves_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = oracle.hourly()
    forecaster = make("samformer").fit(rows)
    before = forecaster.predict()
    forecaster.set_params(learning_rate=1e30)
    with pytest.raises(DivergenceError, match="try a smaller learning_rate"):
        forecaster.fit(rows)
    pd.testing.assert_frame_equal(forecaster.predict(), before, check_exact=True)


def test_check_says_the_same_without_fitting() -> None:
    forecaster = make(targets=["oil"])
    table = forecaster.read(oracle.hourly())
    assert forecaster.check(table).train == 210
    with pytest.raises(InputError, match="no channel 'oil'"):
        forecaster.check(forecaster.read(oracle.hourly()[["date", "load"]]))
    with pytest.raises(DataError, match="too few"):
        forecaster.check(table.rows(0, 30))


def test_missing_values_are_filled_where_asked() -> None:
    rows = oracle.hourly()
    gap = rows.copy()
    gap.loc[100:102, "oil"] = np.nan
    forecaster = make(missing="interpolate").fit(gap)
    assert any("3 missing values filled by 'interpolate'" in note for note in forecaster.notes_)
    near = forecaster.predict()[NAMES] - make().fit(rows).predict()[NAMES]
    assert (near.abs() < 0.2 * rows[NAMES].std()).all(axis=None)
    rows.loc[[5, 60, 61, 90], "load"] = -9999.0
    with pytest.warns(LevelheadWarning, match="-9999"):
        make().fit(rows)
    masked = make(sentinels="mask", missing="interpolate").fit(rows)
    assert (masked.predict()["load"] > -100).all()


# -- attention where it helps ---------------------------------------------------------------------


def test_followers_are_found_out() -> None:
    """The future of the followers lies in the leader's past, where no line can see it."""
    series = followers(5000, seed=3).T
    past, new = series[:4000], series[4000:]
    options: dict[str, Any] = {"horizon": 24, "context": 96, "epochs": 8, "rho": 0.05}
    options["refit"] = False
    net = SAMformer(model="samformer", **options).fit(past)
    line = SAMformer(model="linear", **options).fit(past)

    def error(forecaster: SAMformer) -> float:
        state = forecaster._fitted
        values, _, _ = state.standardise(forecaster.read(new))
        parts = list(state.outcomes(values, range(len(new) - 119)))
        made, truth = (np.concatenate(p) for p in ([q[0][0] for q in parts], [q[1] for q in parts]))
        return float(np.mean((made - truth) ** 2))

    assert error(net) < 0.4 * error(line)
    assert SAMformer(model="auto", **options).fit(past).chosen_ in ("samformer", "blend")


def test_calibration_windows_are_thinned_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CALIBRATION_WINDOWS", 10)
    forecaster = make("naive").fit(oracle.hourly())
    conformal = forecaster._fitted.conformal
    assert conformal is not None
    assert conformal.count == 10  # every fourth of 40
