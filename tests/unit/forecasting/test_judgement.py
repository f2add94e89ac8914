"""Errors of all candidates on the choosing rows, window by window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from levelhead.forecasting import judgement
from levelhead.forecasting.forecaster import SAMformer
from oracles import forecasting as oracle

H, L = 6, 24


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return oracle.related(300, 3)


def fit(values: np.ndarray, **settings: Any) -> SAMformer:
    small: dict[str, Any] = {"epochs": 2, "width": 4, "rho": 0.05, "learning_rate": 0.01}
    return SAMformer(H, L, refit=False, **(small | settings)).fit(values)


@pytest.mark.parametrize("targets", [None, ["2", "0"]])
def test_errors_of_every_candidate_by_a_loop(values: np.ndarray, targets: Any) -> None:
    forecaster = fit(values, targets=targets)
    borders, names = forecaster.borders_, forecaster.targets_
    place = [int(n) for n in names]
    unit = values[: borders.train].std(axis=0)[place]
    table = forecaster.errors_.set_index(["model", "channel"])
    assert list(dict.fromkeys(forecaster.errors_.model)) == list(forecaster.candidates_)
    for model in forecaster.candidates_:
        residuals = []
        for cutoff in range(borders.train, borders.select - H + 1):
            forecast = forecaster._forecast(values[:cutoff], forecaster.candidates_[model])[1]
            residuals.append(forecast.T - values[cutoff : cutoff + H, place])
        squared = np.mean(np.square(residuals), axis=(0, 1))
        absolute = np.mean(np.abs(residuals), axis=(0, 1))
        own = table.loc[model].loc[list(names)]
        np.testing.assert_allclose(own["mse"], squared, rtol=1e-4)
        np.testing.assert_allclose(own["mae"], absolute, rtol=1e-4)
        np.testing.assert_allclose(own["mse_scaled"], squared / unit**2, rtol=1e-4)
        np.testing.assert_allclose(own["mae_scaled"], absolute / unit, rtol=1e-4)
        pooled = table.loc[(model, "all")]
        assert pooled["mse_scaled"] == pytest.approx(np.mean(squared / unit**2), rel=1e-4)
        assert pooled["mae_scaled"] == pytest.approx(np.mean(absolute / unit), rel=1e-4)
        assert np.isnan(pooled[["mse", "mae"]].to_numpy(float)).all()


def test_many_windows_are_thinned_evenly(
    values: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(values, model="naive", season=1)
    monkeypatch.setattr(judgement, "_WINDOWS", 10)
    thinned = fit(values, model="naive", season=1)
    borders = thinned.borders_
    cutoffs = range(borders.train, borders.select - H + 1, 4)  # every fourth of 40
    residuals = [values[c - 1] - values[c : c + H] for c in cutoffs]
    squared = np.mean(np.square(residuals), axis=(0, 1))
    errors = thinned.errors_.set_index(["model", "channel"]).loc["naive"].loc[["0", "1", "2"]]
    np.testing.assert_allclose(errors["mse"], squared, rtol=1e-4)
    assert not thinned.errors_.equals(whole.errors_)
