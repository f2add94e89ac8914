"""A cell of the forecasting study: judged as the bench judges, resumed to the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from levelhead.data.generators import followers
from levelhead.forecasting.bench import PAPER, bench
from levelhead.studies import forecasting_training
from levelhead.studies.forecasting import STUDY, ForecastingSettings
from levelhead.studies.forecasting_data import MADE, posed, series
from levelhead.studies.forecasting_training import Task, fitted, window_errors
from levelhead.studies.running import study_settings
from levelhead.studies.study import Outcome, Workspace

CONTEXT, HORIZON = 24, 6
TRAINING = replace(PAPER, epochs=3, learning_rate=5e-3, seed=1)


def settings() -> ForecastingSettings:
    found = study_settings(STUDY, "quick")
    assert isinstance(found, ForecastingSettings)
    return found.model_copy(update={"width": 16, "curvature_every": 2})


def done(arm: str, folder: Path, **changes: object) -> Outcome:
    problem, test = posed(MADE, "", CONTEXT, HORIZON)
    training = replace(TRAINING, **changes)  # type: ignore[arg-type]
    return fitted(Task(arm, problem, test, training, {"arm": arm}), settings(), Workspace(folder))


def test_the_line_and_samformer_are_those_of_the_bench(tmp_path: Path) -> None:
    rows = bench(
        series(MADE).T,
        context=CONTEXT,
        horizons=[HORIZON],
        models=["linear", "linear-revin", "samformer"],
        training=replace(TRAINING, seed=0),
    )
    arms = {"linear": "line", "linear-revin": "line-revin", "samformer": "samformer"}
    for row in rows:
        (tmp_path / row.model).mkdir()
        found = done(arms[row.model], tmp_path / row.model, seed=0)
        assert found.value("mse") == pytest.approx(row.mse, rel=1e-9)
        assert found.value("mae") == pytest.approx(row.mae, rel=1e-9)
        assert found.value("windows") == row.windows == len(found.arrays["squared"])


def test_errors_by_window_are_those_of_a_loop() -> None:
    problem, test = posed(MADE, "", CONTEXT, HORIZON)
    line = problem.line("linear")
    squared, absolute = window_errors(line, test)
    head = line.head.numpy()
    for n in (0, 17, len(test) - 1):
        rows = problem.series[:, test.start + n : test.start + n + CONTEXT + HORIZON]
        context, truth = rows[:, :CONTEXT], rows[:, CONTEXT:]
        mean = context.mean(axis=1, keepdims=True)
        # Columns of the head sum to one, so that the deviation of the window cancels.
        residual = (context - mean) @ head + mean - truth
        assert squared[n] == pytest.approx((residual**2).mean(), rel=1e-4)
        assert absolute[n] == pytest.approx(np.abs(residual).mean(), rel=1e-4)


def test_the_series_is_cut_and_scaled_as_the_literature_does() -> None:
    problem, test = posed(MADE, "", CONTEXT, HORIZON)
    values = followers(900, channels=4, lag=12, seed=0)
    head = values[:, :630]
    expected = (values - head.mean(axis=1, keepdims=True)) / head.std(axis=1, keepdims=True)
    np.testing.assert_allclose(problem.series, expected, rtol=1e-12)
    assert (len(problem.train), len(problem.validation)) == (630 - 29, 90 - 5)
    assert (test.start, test.stop) == (720 - CONTEXT, 900 - CONTEXT - HORIZON + 1)


def same(first: Outcome, second: Outcome) -> None:
    assert list(first.readings) == list(second.readings)
    assert first.arrays.keys() == second.arrays.keys()
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, second.arrays[name])


@pytest.mark.parametrize("arm", ["samformer", "both", "transformer-slip"])
def test_a_cell_that_was_stopped_goes_on_to_the_same_numbers(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = done(arm, tmp_path / "whole")
    judge = forecasting_training._Looks.judge
    calls = []

    def fails(self: forecasting_training._Looks) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("stopped")
        return judge(self)

    monkeypatch.setattr(forecasting_training._Looks, "judge", fails)
    with pytest.raises(RuntimeError, match="stopped"):
        done(arm, tmp_path / "parts")
    curves = Workspace(tmp_path / "parts").state("curves", "jsonl")
    assert len(curves.read_text().splitlines()) == 2
    # As if it had been stopped between judging an epoch and keeping its state.
    with curves.open("a") as file:
        file.write('{"epoch": 2, "validation_curve": 1e9, "entropy_share": 5.0}\n')
    same(whole, done(arm, tmp_path / "parts"))
    assert len(calls) == 5  # before the first step, three epochs, and the one that failed


def test_curves_have_a_place_for_every_epoch(tmp_path: Path) -> None:
    found = done("samformer", tmp_path)
    arrays = found.arrays
    np.testing.assert_array_equal(arrays["curve.epoch"], [0, 1, 2, 3])
    np.testing.assert_array_equal(
        np.isfinite(arrays["curve.lambda_max"]), [True, False, True, False]
    )
    best = int(found.value("best_epoch"))
    assert arrays["curve.validation_curve"][best] == found.value("validation")
    assert np.nanmin(arrays["curve.validation_curve"]) == found.value("validation")
    assert found.value("balanced") == 1
    assert 0 < found.value("entropy_share") < 1


def test_a_slipped_arm_is_judged_as_released_and_without_the_slip(tmp_path: Path) -> None:
    found = done("transformer-slip", tmp_path)
    assert found.value("mse") == found.arrays["squared"].mean()
    assert found.value("mse_correct") == found.arrays["correct.squared"].mean()
    assert found.value("mse") != found.value("mse_correct")
    # With batches of one there is no batch-mate: the slip is none.
    (tmp_path / "one").mkdir()
    alone = done("transformer-slip", tmp_path / "one", batch_size=1, epochs=1, steps_per_epoch=5)
    np.testing.assert_allclose(
        alone.arrays["squared"], alone.arrays["correct.squared"], rtol=1e-4, atol=1e-6
    )


def test_sharpness_of_sigma_reparam_is_that_of_its_plain_weights(tmp_path: Path) -> None:
    problem, _ = posed(MADE, "", CONTEXT, HORIZON)
    given = settings()
    looks = []
    for name in ("samformer", "both"):
        arm = forecasting_training.ARMS[name]
        net = forecasting_training.built(
            arm, CONTEXT, HORIZON, 4, width=16, init="glorot", seed=0
        ).eval()
        if arm.gamma is None:  # the same function in plain weights
            with torch.no_grad():
                for weight in ("query", "key", "value", "output", "head"):
                    parameter = getattr(net, weight)
                    parameter /= torch.linalg.matrix_norm(parameter, 2)
        train, held = problem.train, problem.validation
        looks.append(forecasting_training._Looks(net, arm, train, held, TRAINING, given))
    plain, folded = (look.sharpness()["lambda_max"] for look in looks)
    assert folded == pytest.approx(plain, rel=0.02)


def test_a_training_that_diverges_is_noted_and_judged_at_its_best(tmp_path: Path) -> None:
    found = done("transformer", tmp_path, learning_rate=1e30, restart_every=0)
    assert "training diverged" in found.notes[0]
    assert np.isfinite(found.value("mse"))
    assert np.isnan(found.value("epochs"))
