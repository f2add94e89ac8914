"""The gradients that the toy model writes itself, and the loop's contract with such a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.studies.toy_model import (
    ARMS,
    Arm,
    Joined,
    ToyNet,
    built,
    graded_loss,
    learner,
    mean_loss,
    measured,
    toy_data,
)
from levelhead.training.loop import TrainingSettings, train

SETTINGS = TrainingSettings(
    epochs=3, patience=0, batch_size=8, learning_rate=0.01, restart_every=0, rho=0.0, seed=1
)
TOY = toy_data(16, 4, 3, 20, 10, seed=0)
OWN = ["transformer", "sam", "tied", "sam-tied"]
TAPE = [arm for arm in ARMS if arm not in (*OWN, "sharpness")]


def network(arm: str) -> ToyNet:
    return built(ARMS[arm], 16, 4, init="keras", width=2, seed=3)


def fitted(
    arm: str,
    loss: Callable[..., Tensor],
    state: Path | None = None,
    learns: Callable[[ToyNet, Arm], ToyNet | Joined] = learner,
    **changes: object,
) -> ToyNet:
    model = network(arm)
    taught = learns(model, ARMS[arm])

    def closure(index: Tensor) -> Callable[[], Tensor]:
        x, y = TOY.batch(index)
        return lambda: loss(taught, ARMS[arm], x, y, 1.0)

    settings = TrainingSettings(**{**vars(SETTINGS), **changes})
    train(taught, closure, 20, None, settings, state_path=state, resume=True, show_progress=False)
    return model


def as_it_is(model: ToyNet, arm: Arm) -> ToyNet:
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
    ours = fitted(arm, graded_loss, rho=rho).state_dict()
    tape = fitted(arm, mean_loss, learns=as_it_is, rho=rho).state_dict()
    start = network(arm).state_dict()
    for name, value in tape.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(value, start[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [{}, {"weight_decay": 0.1}, {"optimizer": "sgd", "weight_decay": 0.1}],
    ids=["adam", "adamw", "sgd"],
)
def test_weights_side_by_side_train_to_the_same_bits(changes: dict[str, object]) -> None:
    ours = fitted("transformer", graded_loss, **changes)
    apart = fitted("transformer", graded_loss, learns=as_it_is, **changes)
    start = network("transformer").state_dict()
    for name, value in apart.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
        assert not torch.allclose(value, start[name], rtol=1e-2, atol=1e-3)
    assert measured(ours, TOY.x_val, TOY.y_val) == measured(apart, TOY.x_val, TOY.y_val)


def test_only_a_plain_training_of_all_five_weights_is_joined() -> None:
    joined = {arm for arm in ARMS if isinstance(learner(network(arm), ARMS[arm]), Joined)}
    assert joined == {"transformer"}


def test_what_is_trained_side_by_side_is_seen_in_the_model_and_copies_are_whole() -> None:
    model = network("transformer")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    joined = learner(model, ARMS["transformer"])
    assert isinstance(joined, Joined)
    assert {k: tuple(v.shape) for k, v in joined.state_dict().items()} == {
        "weight": (16, 10),
        "output": (2, 16),
    }
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        joined.weight += 1
        joined.output += 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] + 1)
        assert torch.equal(copied.state_dict()[name], before[name])


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
        fitted("transformer", stops, tmp_path / "state")
    resumed = fitted("transformer", graded_loss, tmp_path / "state").state_dict()
    for name, value in fitted("transformer", graded_loss).state_dict().items():
        assert torch.equal(resumed[name], value), name


def test_the_loop_refuses_a_loss_that_has_neither_graph_nor_gradient() -> None:
    def detached(*given: object) -> Tensor:
        return mean_loss(*given).detach()  # type: ignore[arg-type]

    with pytest.raises(InputError, match="depends on no trained weight"):
        fitted("transformer", detached, learns=as_it_is)
