"""The gradients that the toy model writes itself, and the loop's contract with such a loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.studies.toy_model import ARMS, ToyNet, built, graded_loss, mean_loss, toy_data
from levelhead.training.loop import TrainingSettings, train

SETTINGS = TrainingSettings(
    epochs=3, patience=0, batch_size=8, learning_rate=0.01, restart_every=0, rho=0.0, seed=1
)
TOY = toy_data(16, 4, 3, 20, 10, seed=0)
OWN = ["transformer", "sam", "tied", "sam-tied"]
TAPE = [arm for arm in ARMS if arm not in (*OWN, "sharpness")]


def network(arm: str) -> ToyNet:
    return built(ARMS[arm], 16, 4, init="keras", width=2, seed=3)


def fitted(arm: str, loss: Callable[..., Tensor], rho: float, state: Path | None = None) -> ToyNet:
    model = network(arm)

    def closure(index: Tensor) -> Callable[[], Tensor]:
        x, y = TOY.batch(index)
        return lambda: loss(model, ARMS[arm], x, y, 1.0)

    settings = TrainingSettings(**{**vars(SETTINGS), "rho": rho})
    train(model, closure, 20, None, settings, state_path=state, resume=True, show_progress=False)
    return model


def test_a_batch_is_the_windows_at_its_positions() -> None:
    index = torch.tensor([7, 0, 19])
    x, y = TOY.batch(index)
    assert torch.equal(x, TOY.x[index])
    assert torch.equal(y, TOY.y[index])
    assert x.shape == (3, 3, 16)
    assert y.shape == (3, 3, 4)


@pytest.mark.parametrize("arm", OWN)
def test_written_gradients_are_those_of_the_model_on_the_tape(arm: str) -> None:
    model = network(arm)
    weights = [p for p in model.parameters() if p.requires_grad]
    expected = torch.nn.functional.mse_loss(model.core(TOY.x), TOY.y)
    slopes = torch.autograd.grad(expected, weights)
    loss = graded_loss(model, ARMS[arm], TOY.x, TOY.y, 1.0)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())
    for weight, slope in zip(weights, slopes, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, slope, rtol=1e-4, atol=1e-6 * float(slope.norm()))
        # Fused Adam goes through weight and gradient side by side, as they lie in memory.
        assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("arm", TAPE)
def test_other_arms_leave_the_derivative_to_the_loop(arm: str) -> None:
    model = network(arm)
    loss = graded_loss(model, ARMS[arm], TOY.x, TOY.y, 1.0)
    assert loss.requires_grad
    assert all(p.grad is None for p in model.parameters())
    expected = mean_loss(model, ARMS[arm], TOY.x, TOY.y, 1.0)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(("arm", "rho"), [("transformer", 0.0), ("tied", 0.0), ("sam", 0.1)])
def test_training_is_that_of_the_tape(arm: str, rho: float) -> None:
    ours, tape = (fitted(arm, loss, rho).state_dict() for loss in (graded_loss, mean_loss))
    start = network(arm).state_dict()
    for name, value in tape.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(value, start[name], rtol=1e-2, atol=1e-3)


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    calls = 0

    def stops(*given: object) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:  # the second of three steps in the second epoch
            raise Stopped
        return graded_loss(*given)  # type: ignore[arg-type]

    with pytest.raises(Stopped):
        fitted("transformer", stops, 0.0, tmp_path / "state")
    resumed = fitted("transformer", graded_loss, 0.0, tmp_path / "state").state_dict()
    for name, value in fitted("transformer", graded_loss, 0.0).state_dict().items():
        assert torch.equal(resumed[name], value), name


def test_the_loop_refuses_a_loss_that_has_neither_graph_nor_gradient() -> None:
    def detached(*given: object) -> Tensor:
        return mean_loss(*given).detach()  # type: ignore[arg-type]

    with pytest.raises(InputError, match="depends on no trained weight"):
        fitted("transformer", detached, 0.0)
