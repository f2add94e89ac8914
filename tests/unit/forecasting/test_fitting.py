"""Problems, plans and what is fitted: the right rows, the right start, every choice kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from levelhead.base.errors import InputError
from levelhead.data.windows import Scaler
from levelhead.forecasting import fitting
from levelhead.forecasting.candidates import Blend, Candidate, Line, Network
from levelhead.forecasting.fitting import (
    Fitted,
    PairProblem,
    Plan,
    SeriesProblem,
    fit_models,
    refit,
    refit_on,
    select,
)
from levelhead.forecasting.lines import refit_line
from levelhead.training.loop import TrainingSettings
from oracles import forecasting as oracle
from oracles import windows as window_oracle

L, H, D = 24, 6, 3
TRAIN, SELECT, T = 210, 255, 300


@pytest.fixture(scope="module")
def series() -> np.ndarray:
    values = np.ascontiguousarray(oracle.related(T, D).T)
    return Scaler.fit(values[:, :TRAIN]).apply(values)


def problem(series: np.ndarray, **changes: Any) -> SeriesProblem:
    rows: dict[str, Any] = {"train_rows": (0, TRAIN), "validation_rows": (TRAIN, SELECT)}
    return SeriesProblem(series, L, H, **(rows | changes))


def plan(*models: str, **changes: Any) -> Plan:
    training = TrainingSettings(epochs=2, learning_rate=0.01)
    options: dict[str, Any] = {"rho": 0.05, "net": {"width": 4}}
    return Plan(models, 2, training, **(options | changes))


def weights(candidate: Candidate) -> torch.Tensor:
    assert isinstance(candidate, Network)
    return torch.cat([p.detach().flatten() for p in candidate.net.parameters()])


# -- problems -------------------------------------------------------------------------------------


def test_targets_lie_in_the_rows_and_training_contexts_too(series: np.ndarray) -> None:
    given = problem(series)
    for windows, rows, back in (
        (given.train, (0, TRAIN), False),
        (given.validation, (TRAIN, SELECT), True),
        (given.windows((SELECT, T), reach_back=True), (SELECT, T), True),
    ):
        expected = window_oracle.starts(*rows, L, H, back)
        assert (windows.start, windows.stop) == (expected[0], expected[-1] + 1)
        assert len(windows) == rows[1] - rows[0] - H + 1 - (0 if back else L)


def test_lines_see_the_judged_channels_alone(series: np.ndarray) -> None:
    one = problem(series, judged=[2, 0])
    alone = problem(np.ascontiguousarray(series[[2, 0]]))
    assert torch.equal(one.line("linear").head, alone.line("linear").head)  # type: ignore[arg-type]
    line = one.line("linear-revin")
    assert torch.equal(one.refit_line(line).head, alone.refit_line(line).head)
    assert one.train.judged.tolist() == [2, 0]  # type: ignore[union-attr]


def test_pairs_validate_with_their_last_windows() -> None:
    draw = np.random.default_rng(0)
    contexts, targets = draw.normal(size=(30, D, L)), draw.normal(size=(30, D, H))
    given = PairProblem(contexts, targets, 7)
    assert (len(given.train), len(given.validation)) == (23, 7)
    last = given.validation.batch(torch.tensor([6]))
    raw = contexts[29].mean(axis=1)
    np.testing.assert_allclose(last.mean[:, 0, 0], raw, rtol=1e-9)


# -- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "beside", "start", "fitted"),
    [
        (("naive",), (), "linear", ["naive"]),
        (("linear-revin",), (), "linear", ["linear-revin"]),
        (("linear-revin",), ("naive", "linear"), "linear", ["naive", "linear", "linear-revin"]),
        (("samformer",), (), "glorot", ["samformer"]),
        (("samformer",), (), "linear", ["linear", "samformer"]),
        (("blend",), (), "linear", ["linear", "linear-revin", "samformer"]),
        (fitting.MODELS, (), "linear", ["naive", "linear", "linear-revin", "samformer"]),
    ],
)
def test_what_is_needed_is_fitted_and_nothing_else(
    series: np.ndarray, models: Any, beside: Any, start: Any, fitted: list[str]
) -> None:
    found = fit_models(problem(series), plan(*models, beside=beside, start=start))
    assert list(found.candidates) == fitted
    assert (found.history is None) == ("samformer" not in fitted)


def test_an_unknown_model_is_refused(series: np.ndarray) -> None:
    with pytest.raises(InputError, match="unknown model 'lstm': choose from naive, linear"):
        fit_models(problem(series), plan("naive", "lstm"))


@pytest.mark.parametrize("start", ["linear", "glorot"])
def test_the_start_is_the_one_asked_for(
    series: np.ndarray, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Line | None] = []
    make = fitting.make_network

    def spy(*sizes: int, line: Line | None = None, **options: Any) -> Any:
        given.append(line)
        return make(*sizes, line=line, **options)

    monkeypatch.setattr(fitting, "make_network", spy)
    found = fit_models(problem(series), plan("samformer", start=start))
    assert given == [found.candidates["linear"] if start == "linear" else None]


def test_the_better_of_two_radii_is_kept(series: np.ndarray) -> None:
    each = {r: fit_models(problem(series), plan("samformer", rho=r)) for r in (0.05, 0.7)}
    both = fit_models(problem(series), plan("samformer", rho="auto"))
    errors = {r: f.history.best_validation for r, f in each.items() if f.history is not None}
    best = min(errors, key=lambda r: errors[r])
    assert errors[0.05] != errors[0.7]
    assert both.rho == best
    kept = both.candidates["samformer"]
    assert torch.equal(weights(kept), weights(each[best].candidates["samformer"]))


def test_states_are_kept_apart_by_radius(series: np.ndarray, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "states"
    one = fit_models(problem(series), plan("samformer", rho="auto"), state_dir=folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        "training-rho-0.05.state",
        "training-rho-0.7.state",
    ]
    two = fit_models(problem(series), plan("samformer", rho="auto"), state_dir=folder, resume=True)
    made = [weights(f.candidates["samformer"]) for f in (one, two)]
    assert torch.equal(*made)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_batch_size_changes_no_metric(series: np.ndarray, batch_size: int) -> None:
    """The judgement before the first step is of the same weights whatever the batches are."""
    settings = TrainingSettings(epochs=1, learning_rate=0.0, minimal_rate=0.0)
    histories = [
        fit_models(
            problem(series), replace(plan("samformer"), training=replace(settings, batch_size=b))
        ).history
        for b in (32, batch_size)
    ]
    errors = [[e.validation for e in h.epochs] for h in histories if h is not None]
    assert errors[0] == errors[1]
    assert errors[0][0] == errors[0][1]


# -- choosing and fitting again -------------------------------------------------------------------


def test_the_choice_is_among_the_models_asked_for(series: np.ndarray) -> None:
    given = problem(series)
    asked = plan("naive", "linear", beside=("naive", "linear"))
    found = fit_models(given, plan(*fitting.MODELS))
    chosen, choice, _ = select(found, asked, given.validation)
    assert choice is not None
    assert set(choice.errors) == {"naive", "linear"}
    assert chosen is found.candidates[choice.chosen]
    assert choice.errors["linear"] == pytest.approx(1.0)
    none = given.windows((TRAIN, TRAIN), reach_back=True)
    fallback, without, _ = select(found, asked, none)
    assert fallback is found.candidates["linear"]
    assert without is None


def test_everything_is_refitted_on_the_rows_given(series: np.ndarray) -> None:
    given, asked = problem(series), plan(*fitting.MODELS)
    found = fit_models(given, asked)
    for name in ("linear", "linear-revin"):
        line = found.candidates[name]
        assert isinstance(line, Line)
        again = refit(line, given, (0, T), asked, found)
        assert isinstance(again, Line)
        assert torch.equal(again.head, refit_line(line, series, (0, T)).head)
    naive = found.candidates["naive"]
    assert refit(naive, given, (0, T), asked, found) is naive


def test_a_network_is_refitted_from_its_seed_for_the_best_number_of_epochs(
    series: np.ndarray,
) -> None:
    given, asked = problem(series), plan("samformer")
    found = fit_models(given, asked)
    assert found.history is not None
    assert found.history.best_epoch == 2
    network = found.candidates["samformer"]
    same = refit_on(network, given, asked, found)
    assert torch.equal(weights(same), weights(network))  # the same rows: the same weights
    assert same is not network
    other = refit(network, given, (0, T), asked, found)
    assert not torch.equal(weights(other), weights(network))
    assert isinstance(other, Network)
    assert not other.net.training

    line = found.candidates["linear"]
    assert isinstance(line, Line)
    found.history.best_epoch = 0
    start = refit(network, given, (0, T), asked, found)
    assert isinstance(start, Network)
    whole = refit_line(line, series, (0, T)).head
    torch.testing.assert_close(start.net.head.detach(), whole.float())
    assert not start.net.output.detach().any()  # type: ignore[union-attr]


def test_a_blend_keeps_its_weights(series: np.ndarray) -> None:
    given, asked = problem(series), plan("linear", "samformer")
    found = fit_models(given, asked)
    members = (found.candidates["linear"], found.candidates["samformer"])
    blend = Blend(members, (0.3, 0.7))
    again = refit(blend, given, (0, T), asked, Fitted(found.candidates, found.history, found.rho))
    assert isinstance(again, Blend)
    assert again.weights == (0.3, 0.7)
    alone = [refit(m, given, (0, T), asked, found) for m in members]
    assert torch.equal(again.members[0].head, alone[0].head)  # type: ignore[attr-defined]
    assert torch.equal(weights(again.members[1]), weights(alone[1]))
