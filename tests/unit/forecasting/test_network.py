"""Networks drawn from their seed alone, equal to their line at the start, trained by its loss."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from levelhead.data.windows import Scaler, Windows
from levelhead.forecasting.candidates import Line, Network, residual_products
from levelhead.forecasting.lines import LineKind, fit_line
from levelhead.forecasting.network import fit_network, make_network
from levelhead.training.loop import TrainingSettings
from oracles import forecasting as oracle

L, H, D = 24, 6, 3


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_the_seed_alone_decides() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    one = make_network(L, H, D, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(weights(make_network(L, H, D, seed=5)), weights(one))
    assert not torch.equal(weights(make_network(L, H, D, seed=6)), weights(one))
    whole = np.int64(5)  # as it comes from an array
    assert torch.equal(weights(make_network(L, H, D, seed=whole)), weights(one))  # type: ignore[arg-type]


def test_draws_of_other_threads_do_not_reach_the_network() -> None:
    """The state of torch's generator belongs to all threads of a process."""
    expected = weights(make_network(L, H, D, seed=5))
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            torch.rand(3)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        made = [weights(make_network(L, H, D, seed=5)) for _ in range(50)]
    finally:
        stop.set()
        thread.join()
    assert all(torch.equal(m, expected) for m in made)


@pytest.mark.parametrize("kind", ["linear", "linear-revin"])
@pytest.mark.parametrize("affine", [False, True])
def test_started_from_a_line_it_is_that_line(kind: LineKind, affine: bool) -> None:
    """In the user's units, at an offset of 1e6 with deviations about one: to 1e-5."""
    series = np.ascontiguousarray(oracle.waves(300, D).T)
    series = 1e6 + (series - series.mean(1, keepdims=True)) / series.std(1, keepdims=True)
    scaler = Scaler.fit(series)
    line = fit_line(scaler.apply(series), L, H, (0, 200), (200, 300), kind)
    net = make_network(L, H, D, seed=0, line=line, revin_affine=affine)
    contexts = np.stack([series[:, t : t + L] for t in range(0, 250, 5)])
    by_line = contexts @ line.head.numpy()
    by_net = net(torch.from_numpy(contexts)).detach().numpy()
    np.testing.assert_allclose(by_net, by_line, rtol=0, atol=1e-5)
    assert net.value.abs().max() > 0  # or no gradient would ever reach attention


def test_without_a_line_the_start_is_glorots() -> None:
    net = make_network(L, H, D, seed=0)
    limit = np.sqrt(6 / (L + H))
    assert 0.8 * limit < float(net.head.detach().abs().max()) <= limit
    assert float(net.output.detach().abs().max()) > 0  # type: ignore[union-attr]


def test_it_is_trained_and_judged_by_the_error_of_denormalised_forecasts() -> None:
    series = np.ascontiguousarray(oracle.waves(200, D).T)
    series = Scaler.fit(series).apply(series)
    train, validation = Windows(series, L, H, 0, 100), Windows(series, L, H, 100)
    net = make_network(L, H, D, seed=0, width=4)
    start = [float(residual_products([Network(net)], w).mean()) for w in (train, validation)]
    settings = TrainingSettings(epochs=2, batch_size=100, learning_rate=1e-3, rho=0.0)
    history = fit_network(net, train, validation, settings)
    first = history.epochs[1]
    assert history.epochs[0].validation == pytest.approx(start[1], rel=1e-12)
    # one step an epoch: the loss of the first is that of the start
    assert first.training_loss == pytest.approx(start[0], rel=1e-5)
    kept = float(residual_products([Network(net)], validation).mean())
    assert kept == min(e.validation for e in history.epochs) == history.best_validation


def test_without_validation_it_trains_to_the_end() -> None:
    series = np.ascontiguousarray(oracle.waves(100, D).T)
    net = make_network(L, H, D, seed=0, width=4)
    before = weights(net)
    settings = TrainingSettings(epochs=3, patience=1)
    for empty in (None, Windows(series, L, H, 0, 0)):
        history = fit_network(net, Windows(series, L, H), empty, settings)
        assert len(history.epochs) == 4
        assert history.ended == "3 epochs done"
        assert not torch.equal(weights(net), before)


def test_the_line_is_left_alone() -> None:
    head = torch.full((L, H), 1 / L, dtype=torch.float64)
    line = Line(head.clone(), 1.0)
    series = np.ascontiguousarray(oracle.waves(100, D).T)
    net = make_network(L, H, D, seed=0, line=line)
    fit_network(net, Windows(series, L, H), None, TrainingSettings(epochs=1))
    assert torch.equal(line.head, head)
