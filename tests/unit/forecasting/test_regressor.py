"""The regressor on arrays: scikit-learn's contract, ridge by another route, attention found."""

from __future__ import annotations

import copy
import doctest
import hashlib
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import levelhead.forecasting.regressor
from levelhead.base.errors import DivergenceError, InputError
from levelhead.data.generators import attention_windows
from levelhead.data.windows import Pairs
from levelhead.forecasting.network import fit_network, make_network
from levelhead.forecasting.regressor import PairScaling, SAMformerRegressor
from levelhead.training.loop import TrainingSettings


def quick(**settings: Any) -> SAMformerRegressor:
    """A regressor whose network trains for a moment only."""
    return SAMformerRegressor(**({"epochs": 2, "width": 4, "rho": 0.05} | settings))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def linear_data(rows: int = 120, features: int = 5, outputs: int = 3, seed: int = 0):
    """Features of unlike level and unit, noisy linear outputs with intercepts."""
    x = draw(rows, features, seed=seed) * 10.0 ** np.arange(features) + 7.0
    weights = draw(features, outputs, seed=seed + 1) / 10.0 ** np.arange(features)[:, None]
    return x, x @ weights + 0.1 * draw(rows, outputs, seed=seed + 2) - 40.0


def walks(rows: int = 90, channels: int = 2, context: int = 6, horizon: int = 2, seed: int = 0):
    """Windows of random walks at unlike levels and units: X [n, D·L], y [n, D·H]."""
    steps = draw(rows, channels, context + horizon, seed=seed).cumsum(axis=-1)
    level = 100.0 * 10.0 ** np.arange(channels)[:, None]
    paths = level + steps * 3.0 ** np.arange(channels)[:, None]
    return paths[..., :context].reshape(rows, -1), paths[..., context:].reshape(rows, -1)


# -- scikit-learn's contract -----------------------------------------------------------------------

EXPECTED_FAILURES: dict[str, str] = {}  # check → why; there is none


def expected_failures(estimator: SAMformerRegressor) -> dict[str, str]:
    return EXPECTED_FAILURES


@parametrize_with_checks(
    [
        SAMformerRegressor(),
        SAMformerRegressor(model="samformer", rho=0.05, epochs=3, width=4),
        SAMformerRegressor(model="blend", rho=0.0, epochs=2, width=4, start="glorot"),
    ],
    expected_failed_checks=expected_failures,
)
def test_scikit_learn(estimator, check):
    check(estimator)


def test_tags_say_what_is_supported():
    tags = SAMformerRegressor().__sklearn_tags__()
    assert tags.estimator_type == "regressor"
    assert tags.target_tags.required
    assert tags.target_tags.multi_output
    assert not tags.input_tags.sparse
    assert not tags.input_tags.allow_nan
    assert not tags.non_deterministic
    assert not tags.regressor_tags.poor_score


def test_docstring_examples():
    result = doctest.testmod(levelhead.forecasting.regressor, extraglobs={"np": np})
    assert result.attempted >= 4
    assert result.failed == 0


# -- the line, by scikit-learn's own ridge ---------------------------------------------------------


@pytest.mark.parametrize("refit", [True, False])
def test_line_is_ridge_on_standardised_columns(refit):
    x, y = linear_data()
    model = SAMformerRegressor(model="linear", refit=refit).fit(x, y)
    rows = len(x) if refit else len(x) - 24
    assert model.validation_count_ == 24
    x_scale, y_scale = StandardScaler().fit(x[:rows]), StandardScaler().fit(y[:rows])
    penalty = model.model_.penalty * rows
    ridge = Ridge(alpha=penalty, fit_intercept=False)
    ridge.fit(x_scale.transform(x[:rows]), y_scale.transform(y[:rows]))
    new = linear_data(seed=9)[0]
    expected = y_scale.inverse_transform(ridge.predict(x_scale.transform(new)))
    np.testing.assert_allclose(model.predict(new), expected, rtol=1e-9)


def test_penalty_is_the_one_chosen_on_training_rows():
    x, y = linear_data(rows=40)
    model = SAMformerRegressor(model="linear").fit(x, y + 3 * draw(40, 3, seed=5))
    assert model.model_.penalty == model.candidates_["linear"].penalty
    assert not torch.equal(model.model_.head, model.candidates_["linear"].head)


def test_shared_line_of_several_channels():
    """One matrix for all channels: least squares on the stacked, standardised windows."""
    rows, channels, context, horizon = 300, 3, 4, 2
    units = np.array([1.0, 50.0, 0.02])[:, None]
    contexts = draw(rows, channels, context)
    targets = contexts @ draw(context, horizon, seed=1) + 0.3 * draw(rows, channels, horizon)
    x = (units * contexts + 5 * units).reshape(rows, -1)
    y = (units * targets - 3 * units).reshape(rows, -1)
    model = SAMformerRegressor(channels, model="linear").fit(x, y)

    def standard(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        blocks = values.reshape(rows, channels, -1)
        mean = np.stack([blocks[:, d].mean(axis=0) for d in range(channels)])
        unit = np.stack([(blocks[:, d] - mean[d]).std() for d in range(channels)])[:, None]
        return (blocks - mean) / unit, mean, unit

    (z, _, _), (w, mean, unit) = standard(x), standard(y)
    stacked_z, stacked_w = z.reshape(-1, context), w.reshape(-1, horizon)
    penalty = model.model_.penalty * len(stacked_z)
    gram = stacked_z.T @ stacked_z + penalty * np.eye(context)
    head = np.linalg.inv(gram) @ stacked_z.T @ stacked_w
    expected = ((z @ head) * unit + mean).reshape(rows, -1)
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-8, atol=1e-10)


def test_columns_are_channel_after_channel():
    x, y = walks(channels=3, context=4)
    model = SAMformerRegressor(3, model="linear").fit(x, y)
    assert (model.context_, model.horizon_, model.n_outputs_) == (4, 2, 6)
    moved = x.copy()
    moved[:, 4:8] += draw(len(x), 4)
    changed = (model.predict(moved) != model.predict(x)).any(axis=0)
    assert changed.tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("kind", ["linear", "linear-revin"])
def test_revin_line_by_weighted_least_squares(kind):
    """Centred by last value or mean, the latter weighted by 1/(s² + 1) in the channel's unit."""
    rows, channels, context = 90, 2, 6
    x, y = walks(rows, channels, context)
    model = SAMformerRegressor(channels, model=kind, revin=True).fit(x, y)
    contexts, targets = x.reshape(rows, channels, -1), y.reshape(rows, channels, -1)
    unit = np.array([contexts[:, d].std() for d in range(channels)])[:, None]
    last = contexts[..., -1:] if kind == "linear" else contexts.mean(axis=-1, keepdims=True)
    z, w = (contexts - last) / unit, (targets - last) / unit
    weight = np.ones_like(z[..., :1])
    if kind == "linear-revin":
        weight = 1 / ((contexts / unit).var(axis=-1, keepdims=True) + 1)
    flat, out = z.reshape(-1, context), w.reshape(-1, 2)
    by = weight.reshape(-1, 1) * flat
    gram = flat.T @ by + model.model_.penalty * len(flat) * np.eye(context)
    expected = last + unit * (z @ np.linalg.solve(gram, by.T @ out))
    np.testing.assert_allclose(model.predict(x), expected.reshape(rows, -1), rtol=1e-9)


@pytest.mark.parametrize("kind", ["linear", "linear-revin", "samformer", "auto"])
def test_revin_commutes_with_level_of_each_window(kind):
    """A window raised by a constant is forecast higher by that constant, whatever it is."""
    x, y = walks()
    model = quick(channels=2, model=kind, revin=True).fit(x, y)
    lift = draw(len(x), 2) * 1e3
    raised = model.predict(x + np.repeat(lift, 6, axis=1))
    np.testing.assert_allclose(raised - np.repeat(lift, 2, axis=1), model.predict(x), rtol=1e-9)


# -- shapes and units ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "samformer", "blend"])
def test_shape_follows_y(kind):
    x, y = linear_data(outputs=1)
    flat = quick(model=kind).fit(x, y[:, 0])
    column = quick(model=kind).fit(x, y)
    assert flat.predict(x).shape == (120,)
    assert column.predict(x).shape == (120, 1)
    assert flat.predict(x).dtype == np.float64
    np.testing.assert_array_equal(flat.predict(x), column.predict(x)[:, 0])
    assert quick(model=kind).fit(*linear_data()).predict(x).shape == (120, 3)


@pytest.mark.parametrize("kind", ["linear", "samformer", "blend"])
def test_units_of_features_and_outputs_do_not_matter(kind):
    """Powers of two change no digit, so that the equality is exact up to the level's rounding."""
    x, y = linear_data(features=3)
    x_unit, y_unit = 2.0 ** np.array([-9, 4, 0]), 2.0 ** np.array([11, -3, 1])
    plain = quick(model=kind).fit(x, y).predict(x)
    other = quick(model=kind).fit(x * x_unit, y * y_unit).predict(x * x_unit)
    np.testing.assert_array_equal(other, plain * y_unit)


def test_score_is_r2_in_the_users_units():
    x, y = linear_data()
    model = SAMformerRegressor().fit(x, y)
    error = ((model.predict(x) - y) ** 2).sum(axis=0) / ((y - y.mean(axis=0)) ** 2).sum(axis=0)
    assert model.score(x, y) == pytest.approx(1 - error.mean(), abs=1e-12)
    assert model.score(x, y) > 0.9


def test_a_row_is_predicted_alike_alone_and_among_many():
    x, y = attention_windows(700, channels=3, context=20, horizon=2)
    x, y = x.reshape(700, -1), y.reshape(700, -1)
    model = quick(channels=3, model="samformer").fit(x, y)
    alone = np.concatenate([model.predict(x[i : i + 1]) for i in range(0, 700, 70)])
    np.testing.assert_allclose(alone, model.predict(x)[::70], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["linear", "samformer"])
def test_what_never_varied_is_ignored_and_constant_outputs_are_kept(kind):
    x, y = linear_data(features=3)
    x[:, 1], y[:, 2] = 0.1, 1 / 3
    model = quick(model=kind).fit(x, y)
    moved = x.copy()
    moved[:, 1] = 1e6
    np.testing.assert_array_equal(model.predict(moved), model.predict(x))
    if kind == "linear":
        np.testing.assert_allclose(model.predict(x)[:, 2], 1 / 3, rtol=1e-14)


def test_scaling_survives_a_large_level():
    values = 1e8 + draw(500, 1, 2)
    scaling = PairScaling.fit(values, values, revin=False)
    z = scaling.contexts(values)
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=1e-7)
    np.testing.assert_allclose(z.std(axis=0), 1, atol=1e-7)
    np.testing.assert_allclose(scaling.forecasts(scaling.targets(values)), values, rtol=1e-15)


# -- the network: validation, refit, blend ---------------------------------------------------------


def test_history_and_validation_are_of_the_last_rows():
    x, y = walks()
    model = quick(channels=2, model="samformer", epochs=4, refit=False).fit(x, y)
    assert model.chosen_ == "samformer"
    assert model.selection_ is None
    assert model.validation_count_ == 18
    assert 1 <= model.n_iter_ <= 4
    assert model.n_iter_ == len(model.history_.epochs) - 1
    unit = np.repeat(model.scaling_.y_deviation.ravel(), 2)
    mse = (((model.predict(x[-18:]) - y[-18:]) / unit) ** 2).mean()
    assert model.history_.best_validation == pytest.approx(mse, rel=1e-5)


def test_starts_equal_to_the_line():
    x, y = walks()
    line = SAMformerRegressor(2, model="linear", refit=False).fit(x, y)
    unit = np.repeat(line.scaling_.y_deviation.ravel(), 2)
    error = (((line.predict(x[-18:]) - y[-18:]) / unit) ** 2).mean()
    network = quick(channels=2, model="samformer").fit(x, y)
    assert network.history_.epochs[0].validation == pytest.approx(error, rel=1e-5)


def test_refit_trains_on_all_rows_for_as_many_epochs_as_were_best():
    x, y, *_ = *walks(), None
    settings = {"channels": 2, "model": "samformer", "start": "glorot", "epochs": 5}
    model = quick(**settings).fit(x, y)
    best = model.history_.best_epoch
    assert best >= 1
    contexts, targets = x.reshape(90, 2, 6), y.reshape(90, 2, 2)
    scaling = PairScaling.fit(contexts, targets, revin=False)
    pairs = Pairs(scaling.contexts(contexts), scaling.targets(targets), revin=False)
    net = make_network(6, 2, 2, seed=0, width=4, revin=False)
    torch.manual_seed(1)  # the global state must not matter
    fit_network(net, pairs, None, TrainingSettings(epochs=best, rho=0.05, batch_size=32))
    with torch.no_grad():
        z = torch.from_numpy(scaling.contexts(contexts).astype(np.float32))
        expected = scaling.forecasts(net(z).double().numpy()).reshape(90, -1)
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-4, atol=1e-4)
    kept = quick(**settings, refit=False).fit(x, y)
    assert np.abs(kept.predict(x) - model.predict(x)).max() > 1e-3


@pytest.mark.parametrize("revin", [False, True])
def test_refit_starts_from_the_line_of_all_rows(revin):
    """A network that hardly moves stays at its start."""
    x, y = walks(rows=30)
    settings = {"channels": 2, "revin": revin}
    network = quick(**settings, model="samformer", learning_rate=0.0, epochs=1).fit(x, y)
    assert network.model_.net.revin is revin
    line = SAMformerRegressor(**settings, model="linear").fit(x, y)
    unit = np.repeat(line.scaling_.y_deviation.ravel(), 2)
    apart = (network.predict(x) - line.predict(x)) / unit
    assert np.abs(apart).max() < 1e-4
    # The line of the training rows alone is further away, so that the bound above says something.
    z = torch.from_numpy(line.scaling_.contexts(x.reshape(30, 2, 6)))
    moved = z @ (line.candidates_["linear"].head - line.model_.head)
    assert moved.abs().max() > 1e-2


@pytest.mark.parametrize("revin", [False, True])
def test_blend_is_the_weighted_sum_of_models_fitted_alone(revin):
    x, y = walks(rows=150)
    settings = {"channels": 2, "revin": revin, "start": "glorot", "epochs": 5, "rho": 0.05}
    blend = SAMformerRegressor(model="blend", **settings).fit(x, y)
    members = {"linear", "linear-revin", "samformer"} if revin else {"linear", "samformer"}
    assert set(blend.candidates_) == members | {"blend"}
    weights = dict(zip([m.name for m in blend.model_.members], blend.model_.weights, strict=True))
    assert sum(weights.values()) == pytest.approx(1)
    assert min(weights.values()) > 0
    alone = {n: SAMformerRegressor(model=n, **settings).fit(x, y).predict(x) for n in weights}
    expected = sum(w * alone[n] for n, w in weights.items())
    np.testing.assert_allclose(blend.predict(x), expected, rtol=1e-12)


def test_the_larger_radius_is_kept_only_if_it_validates_better():
    x, y = walks()
    settings = {"channels": 2, "model": "samformer", "start": "glorot", "epochs": 3}
    tried = {rho: quick(**settings, rho=rho).fit(x, y) for rho in (0.05, 0.7)}
    better = min(tried, key=lambda rho: tried[rho].history_.best_validation)
    auto = quick(**settings, rho="auto").fit(x, y)
    assert auto.rho_ == better
    np.testing.assert_array_equal(auto.predict(x), tried[better].predict(x))


# -- is attention found where it is, and only there? -----------------------------------------------


@pytest.fixture(scope="module")
def attended() -> tuple[np.ndarray, np.ndarray]:
    """Windows whose targets come from sharp channel attention: X [n, 7·96], y [n, 7·24]."""
    x, y = attention_windows(4800, channels=7, context=96, horizon=24, seed=1)
    return x.reshape(len(x), -1), y.reshape(len(y), -1)


TRAINED = slice(0, 4000)
HELD_OUT = slice(4000, None)


def error(model: SAMformerRegressor, data: tuple[np.ndarray, np.ndarray]) -> float:
    x, y = data
    return float(((model.predict(x[HELD_OUT]) - y[HELD_OUT]) ** 2).mean())


def fit_attended(data: tuple[np.ndarray, np.ndarray], **settings: Any) -> SAMformerRegressor:
    schedule = {"epochs": 10, "learning_rate": 3e-3, "batch_size": 64, "rho": 0.05}
    x, y = data
    return SAMformerRegressor(channels=7, **(schedule | settings)).fit(x[TRAINED], y[TRAINED])


@pytest.mark.parametrize("revin", [False, True])
def test_samformer_is_far_below_the_line_where_channels_attend(attended, revin):
    line = fit_attended(attended, model="linear", revin=revin)
    samformer = fit_attended(attended, model="samformer", revin=revin)
    assert error(samformer, attended) <= 0.4 * error(line, attended)


def test_auto_finds_attention_without_being_told(attended):
    model = fit_attended(attended, model="auto", rho="auto")
    assert model.chosen_ in {"samformer", "blend"}
    assert set(model.candidates_) == {"linear", "samformer", "blend"}
    assert model.selection_.errors["samformer"] < 0.4
    line = fit_attended(attended, model="linear")
    assert error(model, attended) <= 0.4 * error(line, attended)


@pytest.mark.parametrize("seed", range(4))
def test_auto_costs_nothing_where_channels_do_not_attend(seed):
    """Whatever is chosen there, it is as good as the line on rows nobody has seen."""
    contexts = draw(2400, 3, 8, seed=seed)
    targets = contexts @ draw(8, 2, seed=seed) + 0.5 * draw(2400, 3, 2, seed=seed)
    x, y = contexts.reshape(2400, -1), targets.reshape(2400, -1)
    auto = quick(channels=3, epochs=5).fit(x[:400], y[:400])
    line = quick(channels=3, model="linear").fit(x[:400], y[:400])
    assert set(auto.selection_.errors) == {"linear", "samformer", "blend"}
    assert auto.chosen_ == auto.model_.name == auto.selection_.chosen
    assert ((auto.predict(x[400:]) - y[400:]) ** 2).mean() <= 1.01 * (
        (line.predict(x[400:]) - y[400:]) ** 2
    ).mean()


def test_auto_with_one_channel_is_the_line():
    """The network of one channel is a line as well: second differences of its output vanish."""
    x, y = linear_data()
    network = quick(model="samformer", start="glorot").fit(x, y)
    a, b = x[:40], x[40:80]
    middle = network.predict((a + b) / 2)
    np.testing.assert_allclose((network.predict(a) + network.predict(b)) / 2, middle, rtol=1e-9)
    auto = SAMformerRegressor().fit(x, y)
    assert (auto.chosen_, auto.selection_, auto.history_, auto.n_iter_) == ("linear", None, None, 0)
    assert list(auto.candidates_) == ["linear"]


def test_auto_with_revin_and_one_channel_chooses_between_lines():
    model = SAMformerRegressor(revin=True).fit(*walks(channels=1))
    assert model.chosen_ in {"linear", "linear-revin"}
    assert set(model.selection_.errors) == {"linear", "linear-revin"}


# -- few rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("revin", [False, True])
@pytest.mark.parametrize("kind", ["auto", "linear", "samformer", "blend"])
@pytest.mark.parametrize("rows", [2, 3, 5, 19])
def test_few_rows(rows, kind, revin):
    x, y = walks(rows=rows)
    model = quick(channels=2, model=kind, revin=revin).fit(x, y)
    assert model.validation_count_ == max(1, round(0.2 * rows))
    assert np.isfinite(model.predict(x)).all()
    if kind == "auto":
        assert model.chosen_.startswith("linear")
        assert model.history_ is None


def test_two_rows_are_joined():
    model = SAMformerRegressor().fit([[0.0], [2.0]], [1.0, 5.0])
    np.testing.assert_allclose(model.predict([[0.0], [2.0], [1.0]]), [1.0, 5.0, 3.0], atol=1e-3)


def test_one_row_is_refused():
    with pytest.raises(ValueError, match=r"1 sample\(s\).*minimum of 2 is required"):
        SAMformerRegressor().fit([[1.0, 2.0]], [1.0])


# -- repetition, copies, frames, company -----------------------------------------------------------

PROGRAM = """
import hashlib
import numpy as np
from levelhead.forecasting.regressor import SAMformerRegressor

draw = np.random.default_rng(3)
x, y = draw.normal(size=(80, 12)), draw.normal(size=(80, 6))
model = SAMformerRegressor(3, model="blend", epochs=2, start="glorot", random_state=5).fit(x, y)
digest = hashlib.sha256(model.predict(x).tobytes()).hexdigest()
"""


def test_two_processes_give_the_same_bits():
    here: dict[str, Any] = {}
    exec(PROGRAM, here)
    run = [sys.executable, "-c", PROGRAM + "print(digest)"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == here["digest"]
    assert hashlib.sha256(here["model"].predict(here["x"]).tobytes()).hexdigest() == here["digest"]


def test_seeds():
    x, y = walks()
    made = {
        name: quick(channels=2, model="samformer", start="glorot", random_state=state).fit(x, y)
        for name, state in {
            "five": 5,
            "numpy five": np.int64(5),
            "six": 6,
            "state": np.random.RandomState(7),
            "same state": np.random.RandomState(7),
        }.items()
    }
    made = {name: model.predict(x) for name, model in made.items()}
    np.testing.assert_array_equal(made["five"], made["numpy five"])
    np.testing.assert_array_equal(made["state"], made["same state"])
    assert (made["five"] != made["six"]).any()
    assert (made["five"] != made["state"]).any()


def test_global_random_states_and_threads_stay_as_they_were():
    legacy = np.random.mtrand._rand
    before = torch.get_rng_state(), legacy.get_state()[1].copy(), torch.get_num_threads()
    model = quick(channels=2, model="samformer").fit(*walks())
    model.predict(walks()[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(legacy.get_state()[1], before[1])
    assert torch.get_num_threads() == before[2]


def test_fit_runs_on_the_threads_asked_for(monkeypatch):
    seen = []
    module = levelhead.forecasting.regressor
    inner = module.fit_models

    def watched(*given, **options):
        seen.append(torch.get_num_threads())
        return inner(*given, **options)

    monkeypatch.setattr(module, "fit_models", watched)
    for count in (1, 2):
        SAMformerRegressor(model="linear", threads=count).fit(*linear_data())
    assert seen == [1, 2]


def test_copies_and_second_fits():
    x, y = walks()
    model = quick(channels=2, model="blend").fit(x, y)
    made = model.predict(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(other.predict(x), made)
        assert other.history_.best_epoch == model.history_.best_epoch
    fresh = clone(model)
    assert fresh.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        fresh.predict(x)
    np.testing.assert_array_equal(fresh.fit(x, y).predict(x), made)
    np.testing.assert_array_equal(model.fit(x[:, :6], y[:, :2]).fit(x, y).predict(x), made)


def test_parameters_set_after_the_fit_do_not_touch_it():
    x, y = walks()
    model = quick(channels=2, model="samformer").fit(x, y)
    made = model.predict(x)
    model.set_params(revin=True, channels=4, model="linear", width=3)
    np.testing.assert_array_equal(model.predict(x), made)


def test_inputs_are_left_alone():
    x, y = walks()
    kept = x.copy(), y.copy()
    x.flags.writeable = y.flags.writeable = False
    quick(channels=2, model="samformer").fit(x, y).predict(x)
    np.testing.assert_array_equal(x, kept[0])
    np.testing.assert_array_equal(y, kept[1])


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_feature_names(frame):
    x, y = linear_data(features=3)
    names = ["alpha", "beta", "gamma"]
    columns = dict(zip(names, x.T, strict=True))
    model = SAMformerRegressor().fit(frame(columns), y)
    assert model.feature_names_in_.tolist() == names
    np.testing.assert_array_equal(
        model.predict(frame(columns)), SAMformerRegressor().fit(x, y).predict(x)
    )
    turned = {name: columns[name] for name in names[::-1]}
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame(turned))


def test_in_a_grid_search():
    x, y = walks()
    search = GridSearchCV(
        quick(channels=2),
        {"model": ["linear", "samformer"], "width": np.array([2, 3]), "revin": np.array([True])},
        cv=TimeSeriesSplit(3),
        error_score="raise",
    ).fit(x, y)
    assert search.best_score_ > 0.5
    assert search.predict(x).shape == y.shape


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "naive"}, "model must be one of auto, linear.*'naive' was given"),
        ({"model": ["linear"]}, "model must be one of"),
        ({"model": "linear-revin"}, "pass revin=True"),
        ({"start": "zero"}, "start must be one of linear, glorot"),
        ({"revin": "yes"}, "revin must be True or False, 'yes' was given"),
        ({"refit": 1}, "refit must be True or False, 1 was given"),
        ({"rho": "large"}, 'rho must be "auto" or a number'),
        ({"rho": -0.1}, "rho must be a number >= 0, -0.1 was given"),
        ({"learning_rate": None}, "learning_rate must be a number"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number"),
        ({"epochs": 0}, "epochs must be a whole number >= 1, 0 was given"),
        ({"patience": -1}, "patience must be a whole number >= 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"width": True}, "width must be a whole number"),
        ({"channels": 0}, "channels must be a whole number"),
        ({"threads": 0}, "threads must be a whole number"),
        ({"device": "abacus"}, "device must be .cpu. or another device of torch, 'abacus'"),
        ({"validation_fraction": 0}, "validation_fraction must lie in 0 < f < 1, 0 was given"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie in 0 < f < 1"),
        ({"channels": 4}, "6 features do not divide into 4 channels"),
        ({"channels": 3}, "4 outputs do not divide into 3 channels"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    x, y = walks(context=3)
    with pytest.raises(InputError, match=message):
        quick(**settings).fit(x, y)


@pytest.mark.parametrize(
    ("x", "y", "error"),
    [
        ([[np.nan], [1.0]], [1.0, 2.0], ValueError),
        ([[0.0], [np.inf]], [1.0, 2.0], ValueError),
        ([[0.0], [1.0]], [1.0, np.nan], ValueError),
        (np.array([[0.0], [1.0j]]), [1.0, 2.0], ValueError),
        ([[0.0], [1.0]], np.array([1.0, 2.0j]), ValueError),
        ([[0.0], [1.0]], ["a", "b"], ValueError),
        ([[0.0], [1.0]], [1.0, 2.0, 3.0], ValueError),
        ([0.0, 1.0], [1.0, 2.0], ValueError),
        ([[0.0], [1.0]], np.zeros((2, 0)), ValueError),
        ([[0.0], [1.0]], np.zeros((2, 1, 1)), ValueError),
        ([[0.0], [1.0]], None, ValueError),
        (sparse.csr_array([[0.0], [1.0]]), [1.0, 2.0], TypeError),
        ([[0.0], [1.0]], sparse.csr_array([[0.0], [1.0]]), TypeError),
        ([[-1e200], [1e200]], [1.0, 2.0], InputError),
    ],
)
def test_data_that_cannot_be(x, y, error):
    with pytest.raises(error):
        SAMformerRegressor().fit(x, y)


def test_predict_refuses_other_columns():
    model = SAMformerRegressor().fit(*linear_data(features=3))
    with pytest.raises(ValueError, match="expecting 3 features"):
        model.predict(np.zeros((2, 4)))


def test_sample_weights_are_not_taken():
    x, y = linear_data()
    with pytest.raises(TypeError, match="sample_weight"):
        SAMformerRegressor().fit(x, y, sample_weight=np.ones(len(x)))


def test_a_diverging_network_says_so():
    x, y = walks()
    with pytest.raises(DivergenceError, match="smaller learning_rate"):
        quick(channels=2, model="samformer", learning_rate=1e30, epochs=20).fit(x, y)


def test_progress_only_when_asked(capfd):
    settings = {"channels": 2, "model": "samformer"}
    quick(**settings).fit(*walks())
    assert capfd.readouterr() == ("", "")
