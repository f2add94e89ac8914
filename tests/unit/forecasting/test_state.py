"""Fitted state: channels in an order of their content, windows forecast and judged one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from levelhead.base.errors import InputError
from levelhead.data.tables import read_table
from levelhead.forecasting.candidates import Network
from levelhead.forecasting.forecaster import SAMformer
from levelhead.forecasting.state import FittedState, content_order
from oracles import forecasting as oracle

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cannot support a coverage"),
    pytest.mark.filterwarnings("ignore:the model was fitted on other channels"),
]

H, L = 6, 24


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return oracle.related(300, 3)


@pytest.fixture(scope="module")
def state(values: np.ndarray) -> FittedState:
    options: dict[str, Any] = {"epochs": 2, "width": 4, "rho": 0.05, "learning_rate": 0.01}
    return SAMformer(H, L, model="samformer", **options).fit(values)._fitted


def test_the_order_depends_on_content_and_then_on_names() -> None:
    draw = np.random.default_rng(0)
    values, names = draw.normal(size=(50, 6)), list("abcdef")
    values[:, 4] = values[:, 1]  # copies are told apart by name
    order = [names[i] for i in content_order(values, names)]
    for _ in range(20):
        turn = draw.permutation(6)
        turned = content_order(values[:, turn], [names[i] for i in turn])
        assert [names[turn[i]] for i in turned] == order
    assert order.index("b") + 1 == order.index("e")
    np.testing.assert_array_equal(
        content_order(np.asfortranarray(values), names), content_order(values, names)
    )


def test_windows_are_forecast_as_the_series_is(state: FittedState, values: np.ndarray) -> None:
    """Batched and one by one, in standardised units; chunks as small as can be."""
    series, names, scaler = state.standardise(read_table(values))
    assert names == state.channels
    starts = range(40, 100, 7)
    pieces = list(state.outcomes(series, starts))
    made = np.concatenate([m[0] for m, _, _ in pieces])
    truth, scale = (np.concatenate([p[i] for p in pieces]) for i in (1, 2))
    contexts = np.stack([series[:, t : t + L] for t in starts])
    alone, deviations = state.forecast_windows(contexts)
    np.testing.assert_allclose(alone, made, atol=1e-5)
    for n, t in enumerate(starts):
        np.testing.assert_allclose(truth[n], series[:, t + L : t + L + H], atol=1e-5)
        expected = np.sqrt(series[:, t : t + L].var(axis=1) + 1e-5)
        np.testing.assert_allclose(scale[n, :, 0], expected, rtol=1e-5)
        np.testing.assert_allclose(deviations[n, :, 0], expected, rtol=1e-5)
    scores = np.abs(made - truth) / scale
    np.testing.assert_allclose(state.scores(series, starts), scores, rtol=1e-4)
    assert scaler is state.scaler


def test_targets_alone_are_judged(values: np.ndarray) -> None:
    forecaster = SAMformer(H, L, model="linear", targets=["2", "0"]).fit(values)
    state = forecaster._fitted
    assert set(state.targets) == {"0", "2"}
    assert state.user_targets == ("0", "2")
    series, _, _ = state.standardise(read_table(values))
    made, truth, scale = next(state.outcomes(series, [0, 1], [state.chosen] * 2))
    assert (made.shape, truth.shape, scale.shape) == ((2, 2, 2, H), (2, 2, H), (2, 2, 1))
    for j, name in enumerate(state.targets):
        at = state.channels.index(name)
        np.testing.assert_allclose(truth[0, j], series[at, L : L + H], atol=1e-5)


def test_new_channels_are_scaled_by_their_own_context(
    state: FittedState, values: np.ndarray
) -> None:
    new = np.column_stack([values[:100, 1], 7e4 + 300 * values[:100, 2]])
    table = read_table(new)
    table = replace(table, channels=("1", "new"))
    series, names, scaler = state.standardise(table)
    at = names.index("new")
    assert scaler.mean[at] == pytest.approx(new[-L:, 1].mean())
    assert scaler.deviation[at] == pytest.approx(new[-L:, 1].std())
    known = state.channels.index("1")
    assert scaler.mean[1 - at] == state.scaler.mean[known]
    np.testing.assert_allclose(series[at, -L:].std(), 1.0)


def test_half_widths_of_unknown_channels_are_pooled(state: FittedState) -> None:
    own = state.half_widths(["1", "new", "0"], 0.8)
    assert state.conformal is not None
    each = state.conformal.half_width(0.8)
    np.testing.assert_array_equal(own[0], each[state.targets.index("1")])
    np.testing.assert_array_equal(own[2], each[state.targets.index("0")])
    np.testing.assert_array_equal(own[1], state.conformal.half_width(0.8, pooled=True))
    with pytest.raises(InputError, match="no rows were left to calibrate"):
        replace(state, conformal=None).half_widths(["1"], 0.8)


def test_mean_attention_is_over_the_last_windows(state: FittedState, values: np.ndarray) -> None:
    network = state.chosen
    assert isinstance(network, Network)
    series, _, _ = state.standardise(read_table(values[:40]))
    ends = range(40, L - 1, -2)  # a tenth of the context apart, from the last row backwards
    windows = np.stack([series[:, e - L : e] for e in ends])
    expected = network.net.attention(torch.from_numpy(windows)).mean(dim=0).detach().numpy()
    np.testing.assert_allclose(state.mean_attention(network, series), expected, rtol=1e-5)
