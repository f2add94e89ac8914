"""One suite for every model of the forecaster: what a user may rely on whatever is chosen."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from levelhead.base.errors import DataError, InputError
from levelhead.forecasting.forecaster import SAMformer
from oracles import forecasting as oracle

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cannot support a coverage"),
    pytest.mark.filterwarnings("ignore:the model was fitted on other channels"),
]

MODELS = ("naive", "linear", "linear-revin", "samformer", "blend", "auto")
H, L = 6, 24
TRAINED = ("samformer", "blend", "auto")
ROOT = Path(__file__).resolve().parents[2]

every_model = pytest.mark.parametrize("model", MODELS)


def make(model: str, **settings: Any) -> SAMformer:
    """A forecaster whose network trains for a moment only."""
    small = {"horizon": H, "context": L, "epochs": 2, "width": 4, "rho": 0.05}
    small |= {"learning_rate": 0.01}
    return SAMformer(model=model, **(small | settings))


def table() -> pd.DataFrame:
    return oracle.hourly(300, 3)


@functools.cache
def fitted(model: str) -> SAMformer:
    """Shared by the tests below, none of which may change it."""
    return make(model).fit(table())


def digest(forecaster: SAMformer) -> str:
    """Of a forecast and its intervals; floats are written so that no two have the same text."""
    made, intervals = forecaster.predict(), forecaster.predict_interval(coverage=[0.5, 0.9])
    text = made.to_csv(index=False) + intervals.to_csv(index=False)
    return hashlib.sha256(text.encode()).hexdigest()


def same_forecasts(one: SAMformer, two: SAMformer) -> None:
    pd.testing.assert_frame_equal(one.predict(), two.predict(), check_exact=True)
    pd.testing.assert_frame_equal(one.predict_interval(), two.predict_interval(), check_exact=True)


def test_the_suite_sees_networks_that_have_learnt() -> None:
    """Started from the line, a network that gained nothing would be the line once more."""
    network = fitted("samformer")
    assert network.history_ is not None
    assert network.history_.best_epoch == 2
    members = fitted("blend")._fitted.chosen.members  # type: ignore[attr-defined]
    assert [m.name for m in members] == ["linear-revin", "samformer"]
    assert fitted("auto").chosen_ == "samformer"
    forecasts = [fitted(m).predict()["load"].to_numpy() for m in MODELS[:5]]
    assert all((a != b).any() for i, a in enumerate(forecasts) for b in forecasts[:i])


# ── what comes out ──


@every_model
def test_names_stamps_and_order_of_the_table(model: str) -> None:
    made = fitted(model).predict()
    assert list(made.columns) == ["date", "load", "oil", "wind"]
    future = pd.date_range("2024-01-30 05:00", periods=306, freq="h")[300:]
    assert list(made["date"]) == list(future)
    assert made.notna().all(axis=None)


@every_model
def test_a_forecast_follows_from_the_last_context_rows_alone(model: str) -> None:
    rows = table()
    forecaster = fitted(model)
    pd.testing.assert_frame_equal(
        forecaster.predict(rows.iloc[-L:]), forecaster.predict(), check_exact=True
    )
    pd.testing.assert_frame_equal(forecaster.predict(rows), forecaster.predict(), check_exact=True)


@every_model
@pytest.mark.parametrize(("scale", "shift"), [(4.0, 0.0), (1e-3, 1e4), (-37.5, 2.0)])
def test_forecasts_are_in_the_users_units(model: str, scale: float, shift: float) -> None:
    rows = table()
    names = ["load", "oil", "wind"]
    moved = rows.copy()
    moved[names] = scale * rows[names] + shift
    expected = scale * fitted(model).predict()[names] + shift
    made = make(model).fit(moved).predict()[names]
    # float32 sums in another order of channels, and a network trained through two epochs of them
    tolerance = 1e-3 if model in TRAINED else 1e-5
    unit = abs(scale) * rows[names].std()
    assert ((made - expected).abs() <= tolerance * unit).all(axis=None)


@every_model
def test_permuted_columns_permute_the_outputs_and_nothing_else(model: str) -> None:
    rows = table()
    made = make(model).fit(rows[["date", "wind", "load", "oil"]])
    assert list(made.predict().columns) == ["date", "wind", "load", "oil"]
    names = ["load", "oil", "wind"]
    pd.testing.assert_frame_equal(
        made.predict()[names], fitted(model).predict()[names], check_exact=True
    )
    one, two = (
        f.predict_interval().set_index(["unique_id", "ds"]).sort_index()
        for f in (made, fitted(model))
    )
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    given = fitted(model).predict(rows[["oil", "date", "wind", "load"]])
    assert list(given.columns) == ["oil", "date", "wind", "load"]
    pd.testing.assert_frame_equal(given[names], fitted(model).predict()[names], check_exact=True)


@every_model
@pytest.mark.parametrize("channels", [1, 2, 33, 400])
def test_any_number_of_channels(model: str, channels: int) -> None:
    values = oracle.waves(120, channels, seed=4)
    forecaster = make(model, horizon=3, context=16, epochs=1).fit(values)
    made = forecaster.predict()
    assert made.shape == (3, channels)
    near = np.abs(made - values[-16:].mean(axis=0)) < 8 * values.std(axis=0)
    assert near.all()
    assert len(forecaster.predict_interval()) == 3 * channels


# ── fitting again, copies, parameters ──


@every_model
def test_a_second_fit_starts_anew_and_gives_the_same_bits(model: str) -> None:
    forecaster = make(model).fit(oracle.waves(200, 2, seed=9))
    forecaster.predict()
    same_forecasts(forecaster.fit(table()), fitted(model))
    assert forecaster.channels_ == ("load", "oil", "wind")


@every_model
def test_copies_after_fit_and_after_predict(model: str) -> None:
    forecaster = fitted(model)
    same_forecasts(copy.deepcopy(forecaster), forecaster)
    again = clone(forecaster)
    with pytest.raises(NotFittedError, match=r"call fit\(table\) first"):
        again.predict()
    same_forecasts(again.fit(table()), forecaster)


@every_model
def test_parameters_are_kept_as_given_and_come_back(model: str) -> None:
    forecaster = fitted(model)
    given = forecaster.get_params()
    assert given == make(model).get_params()
    assert all(clone(forecaster).get_params()[name] is given[name] for name in given)
    other = SAMformer(1).set_params(**given)
    same_forecasts(other.fit(table()), forecaster)
    with pytest.raises(ValueError, match="Invalid parameter 'depth'"):
        other.set_params(depth=3)


@every_model
def test_parameters_set_after_the_fit_wait_for_the_next(model: str) -> None:
    forecaster = copy.deepcopy(fitted(model)).set_params(horizon=2, context=9)
    same_forecasts(forecaster, fitted(model))
    assert len(forecaster.fit(table()).predict()) == 2


@every_model
def test_before_the_fit_there_is_no_forecast(model: str) -> None:
    forecaster = make(model)
    for ask in (forecaster.predict, forecaster.predict_interval, lambda: forecaster.score(table())):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            ask()


# ── intervals ──


@every_model
def test_intervals_stand_around_the_forecast_and_leave_it_alone(model: str) -> None:
    forecaster = fitted(model)
    before = forecaster.predict()
    made = forecaster.predict_interval(coverage=[0.5, 0.8, 0.95, 0.99])
    pd.testing.assert_frame_equal(forecaster.predict(), before, check_exact=True)
    assert list(made["unique_id"].unique()) == ["load", "oil", "wind"]
    for name in before.columns[1:]:
        own = made[made.unique_id == name]
        np.testing.assert_array_equal(own["forecast"], before[name])
        assert list(own["ds"]) == list(before["date"])
    columns = ["lo-99", "lo-95", "lo-80", "lo-50", "forecast", "hi-50", "hi-80", "hi-95", "hi-99"]
    steps = np.diff(made[columns].to_numpy(), axis=1)
    assert (steps >= 0).all()
    assert steps.sum() > 0
    assert not made["pooled"].any()
    beside = [n for n in ("naive", "linear") if n != forecaster.chosen_]
    assert [c for c in made.columns if c in ("naive", "linear")] == beside


@every_model
def test_the_models_beside_are_those_models(model: str) -> None:
    made = fitted(model).predict_interval()
    for name in ("naive", "linear"):
        if name in made:
            own = fitted(name).predict_interval()["forecast"]
            np.testing.assert_allclose(made[name], own, rtol=1e-12)


# ── what cannot be forecast ──


@every_model
def test_fewer_rows_than_the_context_are_refused(model: str) -> None:
    with pytest.raises(InputError, match=r"last 24 rows \(the fitted context\), 23 were given"):
        fitted(model).predict(table().iloc[-23:])


@every_model
def test_a_missing_value_is_refused_with_its_place(model: str) -> None:
    rows = table()
    rows.loc[7, "oil"] = np.nan
    with pytest.raises(DataError, match=r"'oil' has 1 missing value, the first in row 8"):
        make(model).fit(rows)
    with pytest.raises(DataError, match="'oil'"):
        fitted(model).predict(rows)


@every_model
def test_constant_and_nearly_constant_channels_are_kept(model: str) -> None:
    rows = table()
    rows["constant"] = 1e6 / 3
    rows["nearly"] = 1e6
    rows.loc[::7, "nearly"] += 1e-7
    forecaster = make(model).fit(rows)
    made = forecaster.predict()
    np.testing.assert_allclose(made["constant"], 1e6 / 3, rtol=1e-9)
    np.testing.assert_allclose(made["nearly"], 1e6, rtol=1e-12, atol=1e-5)
    intervals = forecaster.predict_interval()
    assert np.isfinite(intervals.select_dtypes(float)).all(axis=None)
    assert "constant constant, kept" in " ".join(forecaster.notes_).replace("'", "")


@every_model
def test_whole_numbers_truth_values_and_objects_are_numbers(model: str) -> None:
    rows = table()
    whole = pd.DataFrame({"date": rows["date"]})
    whole["count"] = (10 * rows["load"]).round().astype("int64")
    whole["open"] = rows["oil"] > rows["oil"].median()
    whole["text"] = rows["wind"].round(3).astype(object)
    plain = whole.astype({"count": float, "open": float, "text": float})
    made, expected = (make(model).fit(t).predict() for t in (whole, plain))
    pd.testing.assert_frame_equal(made, expected, check_exact=True)
    assert made["open"].dtype == np.float64


# ── targets ──


@every_model
def test_only_targets_come_out(model: str) -> None:
    forecaster = make(model, targets=["wind", "load"]).fit(table())
    assert list(forecaster.predict().columns) == ["date", "load", "wind"]
    assert list(forecaster.predict_interval()["unique_id"].unique()) == ["load", "wind"]
    assert forecaster.targets_ == ("load", "wind")
    assert list(forecaster.predict(table().iloc[-50:]).columns) == ["date", "load", "wind"]
    assert set(forecaster.errors_.channel) == {"load", "wind", "all"}
    if model not in TRAINED:  # nothing else then has a say
        rows = table()
        rows["oil"] = np.arange(300.0) ** 2
        other = make(model, targets=["wind", "load"]).fit(rows)
        pd.testing.assert_frame_equal(other.predict(), forecaster.predict(), rtol=1e-6)
        alone = make(model).fit(table()[["date", "load", "wind"]])
        pd.testing.assert_frame_equal(alone.predict(), forecaster.predict(), rtol=1e-6)
    with pytest.raises(InputError, match="lacks oil"):
        forecaster.predict(table()[["date", "load", "wind"]])


# ── other channels ──


@every_model
def test_other_channels_are_forecast_without_gains(model: str) -> None:
    rows = table().iloc[-60:]
    other = rows[["date", "load"]].assign(new=5.0 + 2.0 * rows["oil"])
    forecaster = fitted(model)
    made = forecaster.predict(other)
    assert list(made.columns) == ["date", "load", "new"]
    assert (abs(made["new"] - other["new"].iloc[-L:].mean()) < 8 * other["new"].std()).all()
    intervals = forecaster.predict_interval(other).groupby("unique_id")["pooled"].all()
    assert dict(intervals) == {"load": False, "new": True}
    if model not in TRAINED:  # attention apart, each channel is forecast by itself
        expected = 5.0 + 2.0 * forecaster.predict(rows)["oil"]
        np.testing.assert_allclose(made["new"], expected, atol=1e-4 * other["new"].std())


@pytest.mark.parametrize("settings", [{"revin_affine": True}, {"targets": ["load", "oil"]}])
def test_other_channels_are_refused_where_channels_differ(settings: dict[str, Any]) -> None:
    forecaster = make("samformer", **settings).fit(table())
    rows = table().rename(columns={"wind": "breeze"})
    with pytest.raises(InputError, match="revin_affine=False and without targets="):
        forecaster.predict(rows)
    with pytest.raises(InputError, match="adds more"):
        forecaster.predict(table().assign(more=1.0 + np.arange(300.0)))


# ── at once, and elsewhere ──


@pytest.mark.parametrize("model", ["linear", "auto"])
def test_four_fits_at_once_in_threads(model: str, tmp_path: Path) -> None:
    made: dict[int, SAMformer] = {}

    def fit(i: int) -> None:
        forecaster = make(model).fit(table(), state_dir=tmp_path / f"state-{i}")
        forecaster.save(tmp_path / f"model-{i}")
        made[i] = SAMformer.load(tmp_path / f"model-{i}")

    threads = [threading.Thread(target=fit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        same_forecasts(made[i], fitted(model))


SCRIPT = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from contracts import test_forecasters as contract
from levelhead.forecasting.forecaster import SAMformer

folder = Path(sys.argv[2])

def work(name):
    found = {}
    for path in sorted(folder.glob("given-*")):
        found[path.name] = contract.digest(SAMformer.load(path))
    for model in ("samformer", "blend"):
        forecaster = contract.make(model).fit(contract.table(), state_dir=folder / f"state-{name}")
        forecaster.save(folder / f"own-{name}-{model}")
        found[model] = contract.digest(SAMformer.load(folder / f"own-{name}-{model}"))
        other = contract.make(model, random_state=1).fit(contract.table())
        found[f"{model} other seed"] = contract.digest(other)
    (folder / f"{name}.json").write_text(json.dumps(found))

children = []
for name in range(4):  # nothing has run yet but imports, which need not be done four times
    if (child := os.fork()) == 0:
        try:
            work(name)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are made by fork")
def test_the_same_bits_in_other_processes(tmp_path: Path) -> None:
    """Four processes at once in one folder load what was saved here, fit and save their own."""
    zoned = make("blend").fit(oracle.hourly(200, 2, tz="Europe/Berlin"))
    long = make("auto").fit(oracle.long_form(table()))
    forecasters = {m: fitted(m) for m in MODELS} | {"zoned": zoned, "long": long}
    for name, forecaster in forecasters.items():
        forecaster.save(tmp_path / f"given-{name}")
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, ROOT / "tests", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "77"},
        timeout=200,
        check=False,
    )
    assert all((tmp_path / f"{i}.json").exists() for i in range(4)), ran.stderr
    answers = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(4)]
    assert answers[1:] == answers[:1] * 3
    for name, forecaster in forecasters.items():
        assert answers[0][f"given-{name}"] == digest(forecaster), name
    for model in ("samformer", "blend"):
        assert answers[0][model] == digest(fitted(model))
        assert answers[0][f"{model} other seed"] != answers[0][model]


@every_model
def test_a_stored_forecaster_forecasts_the_same_bits(model: str, tmp_path: Path) -> None:
    forecaster = fitted(model)
    assert forecaster.save(tmp_path / "deep" / "model") == tmp_path / "deep" / "model"
    loaded = SAMformer.load(str(tmp_path / "deep" / "model"))
    same_forecasts(loaded, forecaster)
    rows = table().iloc[:-13]
    pd.testing.assert_frame_equal(loaded.predict(rows), forecaster.predict(rows), check_exact=True)
    assert loaded.score(rows) == forecaster.score(rows)
    assert loaded.get_params() == forecaster.get_params()
    for name in ("channels_", "targets_", "context_", "season_", "chosen_"):
        assert getattr(loaded, name) == getattr(forecaster, name)
    same_forecasts(loaded.fit(table()), forecaster)
    assert sorted(p.name for p in (tmp_path / "deep" / "model").iterdir()) == [
        "model.json",
        "model.safetensors",
    ]
