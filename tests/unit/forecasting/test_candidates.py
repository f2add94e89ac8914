"""Candidates on normalised windows, against loops; one chunk size whatever else is set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from levelhead.data.windows import Pairs, Windows
from levelhead.forecasting.candidates import (
    Blend,
    Candidate,
    Line,
    Network,
    SeasonalNaive,
    chunk_size,
    forecasts,
    residual_products,
)
from levelhead.forecasting.network import make_network
from oracles import forecasting as oracle
from oracles import windows as window_oracle

L, H, D = 12, 5, 3


@pytest.fixture(scope="module")
def series() -> np.ndarray:
    return np.ascontiguousarray(oracle.waves(120, D).T)


def a_line() -> Line:
    head = np.random.default_rng(1).normal(size=(L, H)) / L
    return Line(torch.from_numpy(head + (1 - head.sum(axis=0)) / L), 0.1)


def members() -> list[Candidate]:
    net = make_network(L, H, D, seed=3, width=4)
    line = a_line()
    return [
        SeasonalNaive(4, H),
        line,
        Network(net),
        Blend((line, Network(net)), (0.25, 0.75)),
    ]


# -- each of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("season", [1, 2, 3, 5, 12])
def test_naive_repeats_the_last_season(season: int) -> None:
    context = torch.arange(2.0 * 3 * L).view(2, 3, L)
    got = SeasonalNaive(season, H).core(context)
    for step in range(H):
        expected = context[..., L - season + step % season]
        assert torch.equal(got[..., step], expected)


def test_line_is_its_head() -> None:
    context = torch.randn(D, 7, L, generator=torch.Generator().manual_seed(0))
    line = a_line()
    expected = np.einsum("dbl,lh->dbh", context.double().numpy(), line.head.numpy())
    np.testing.assert_allclose(line.core(context).numpy(), expected, atol=1e-6)
    assert line.core(context).dtype == torch.float32
    assert line.parameters == L * H


def test_a_line_forecasts_in_the_units_of_the_series(series: np.ndarray) -> None:
    """Columns that sum to one commute with the window's level and deviation."""
    line = a_line()
    (made, _), *_ = forecasts([line], Windows(series, L, H))
    for d in range(D):
        for n in (0, 50):
            context = series[d, n : n + L]
            expected = context @ line.head.numpy() - context.mean()
            np.testing.assert_allclose(made[0, d, n], expected, atol=1e-5 * context.std())


def test_network_is_its_core_without_gradients() -> None:
    network = members()[2]
    assert isinstance(network, Network)
    context = torch.randn(D, 7, L, generator=torch.Generator().manual_seed(0))
    got = network.core(context)
    assert not got.requires_grad
    assert torch.equal(got, network.net.core(context).detach())
    narrow = network.core(context.double())
    assert narrow.dtype == torch.float64
    assert network.parameters == sum(p.numel() for p in network.net.parameters())


def test_blend_is_the_weighted_sum() -> None:
    _, line, network, blend = members()
    context = torch.randn(D, 7, L, generator=torch.Generator().manual_seed(0))
    expected = 0.25 * line.core(context) + 0.75 * network.core(context)
    torch.testing.assert_close(blend.core(context), expected, rtol=1e-6, atol=1e-7)
    assert blend.parameters == line.parameters + network.parameters + 1


# -- how they are judged --------------------------------------------------------------------------


@pytest.mark.parametrize("judged", [None, [2, 0]])
def test_residual_products_are_means_over_channels_and_steps(
    series: np.ndarray, judged: list[int] | None
) -> None:
    found = members()
    source = Windows(series, L, H, start=5, stop=95, judged=judged)
    got = residual_products(found, source)
    assert got.shape == (90, 4, 4)
    assert got.dtype == np.float64
    for n in (0, 41, 89):
        context, target = window_oracle.cut(series, 5 + n, L, H)
        x, y, _, deviation = window_oracle.normalised(context, target, 1e-5)
        batch = torch.from_numpy(x)[:, None]
        residuals = [
            (c.core(batch)[:, 0].double().numpy() * deviation[:, None] - y)[judged or slice(None)]
            for c in found
        ]
        expected = [[np.mean(r * s) for s in residuals] for r in residuals]
        np.testing.assert_allclose(got[n], expected, rtol=2e-5, atol=1e-6 * np.max(expected))


def test_every_window_is_forecast_once_in_order(
    series: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Windows(series, L, H)
    whole = residual_products(members(), source)
    monkeypatch.setattr("levelhead.forecasting.candidates._FORECAST_ELEMENTS", 7 * D * (L + H + D))
    assert chunk_size(D, L, H) == 7
    np.testing.assert_allclose(residual_products(members(), source), whole, rtol=1e-4)


def test_pairs_and_windows_are_judged_alike(series: np.ndarray) -> None:
    cuts = [window_oracle.cut(series, n, L, H) for n in range(104)]
    pairs = Pairs(*(np.stack(part) for part in zip(*cuts, strict=True)))
    one, two = (residual_products(members(), s) for s in (pairs, Windows(series, L, H)))
    np.testing.assert_array_equal(one, two)


def test_chunks_depend_on_the_model_alone_and_stay_small() -> None:
    assert chunk_size(1, 16, 4) == 512
    assert chunk_size(5000, 512, 96) == 1
    for channels in (1, 7, 21, 321, 862):
        size = chunk_size(channels, 512, 720)
        assert size * channels * (512 + 720 + channels) * 8 <= 16 << 20 or size == 1
