"""What counts as a step, which gradients belong to it, and which loss belongs to which step."""

from __future__ import annotations

import pytest
import torch

from levelhead.base.errors import InputError
from levelhead.training.sam import SAM
from levelhead.training.watch_steps import Losses, OptimizerSteps, innermost


class Seen:
    """Notes what happens around steps of the optimisers, with the weight at that moment."""

    def __init__(self, optimizers: object, weight: torch.Tensor) -> None:
        self.events: list[tuple[str, float]] = []
        self.weight = weight
        self.steps = OptimizerSteps(optimizers, self.begin, self.finish)
        self.steps.attach()

    def begin(self, late: bool) -> None:
        self.events.append(("late" if late else "begin", float(self.weight.detach())))

    def finish(self) -> None:
        self.events.append(("finish", float(self.weight.detach())))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def one_weight(value: float = 3.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(value))


def test_a_step_begins_before_the_update_and_is_finished_after_it() -> None:
    w = one_weight(1.0)
    optimizer = torch.optim.SGD([w], lr=0.5)
    seen = Seen(optimizer, w)
    w.grad = torch.tensor(1.0)
    optimizer.step()
    assert seen.events == [("begin", 1.0), ("finish", 0.5)]
    seen.steps.detach()
    optimizer.step()
    assert len(seen.events) == 2


def test_a_closure_is_told_because_its_gradients_come_later() -> None:
    w = one_weight()
    optimizer = torch.optim.LBFGS([w], lr=0.5, max_iter=4)
    seen = Seen(optimizer, w)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = (w - 1) ** 2
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert seen.names == ["late", "finish"] * 2
    assert len(calls) > 2  # and yet two steps


def test_sam_makes_one_step_between_undisplaced_weights() -> None:
    w = one_weight(2.0)
    sam = SAM([w], torch.optim.SGD, rho=0.5, lr=0.1)
    seen = Seen(sam, w)
    inside = []

    def closure() -> torch.Tensor:
        sam.zero_grad()
        inside.append(float(w.detach()))
        loss = 0.5 * w**2
        loss.backward()
        return loss

    sam.step(closure)
    assert inside == [2.0, 2.5]
    # The step is made at w = 2 with the gradient at w + ρ = 2.5.
    assert seen.events == [("begin", 2.0), ("finish", pytest.approx(1.75))]


def test_a_scaler_that_leaves_a_step_out_makes_none() -> None:
    w = one_weight(1.0)
    optimizer = torch.optim.SGD([w], lr=0.5)
    seen = Seen(optimizer, w)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(w * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    # The scaled gradient is inf, then 2 (the scale was halved), unscaled 1.
    assert seen.events == [("begin", 1.0), ("finish", 0.5)]


class Fused(torch.optim.SGD):
    """Takes scaled gradients, as fused optimisers do."""

    _step_supports_amp_scaling = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if not float(self.found_inf):
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad / self.grad_scale * 0.5)


def test_a_fused_step_under_a_scaler() -> None:
    """A fused optimiser is always called; scale and infinities are its own affair."""
    w = one_weight(1.0)
    optimizer = Fused([w], lr=0.5)
    seen = Seen(optimizer, w)
    factors = []
    seen.steps._begin = lambda late: factors.append(seen.steps.gradient_factor())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(w * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert factors == [1 / 4]  # halved by the infinity
    assert seen.events == [("finish", 0.5)]


def test_several_optimizers_make_one_step_together() -> None:
    one, two = one_weight(), one_weight()
    first, second = torch.optim.SGD([one], lr=0.1), torch.optim.SGD([two], lr=0.1)
    seen = Seen([first, second], two)
    for weight in (one, two):
        weight.grad = torch.tensor(1.0)
    for order in ((first, second), (second, first)):
        for optimizer in order:
            optimizer.step()
    assert seen.names == ["begin", "finish"] * 2


def test_what_is_no_optimizer_is_refused() -> None:
    w = one_weight()
    sgd = torch.optim.SGD([w], lr=0.1)
    for wrong in ("adam", [], [sgd, sgd], [sgd, 3]):
        with pytest.raises(InputError, match="optimizer is a"):
            OptimizerSteps(wrong, lambda late: None, lambda: None)


def test_wrappers_are_taken_off() -> None:
    w = one_weight()
    sgd = torch.optim.SGD([w], lr=0.1)

    class Wrapper:
        optimizer = sgd

    assert innermost(Wrapper()) is sgd
    sam = SAM([w], torch.optim.Adam)
    assert innermost(sam) is sam.base_optimizer


# ── losses ──


@pytest.mark.parametrize("order", ["before", "after"])
def test_losses_belong_to_their_step_in_either_order(order: str) -> None:
    losses, steps = Losses(), 0
    for i in range(1, 6):
        loss = torch.tensor(float(i))
        if order == "before":
            losses.add(loss, steps, 1)
        steps += 1
        if order == "after":
            losses.add(loss, steps, 1)
    assert losses.take(steps) == [("loss", i, float(i)) for i in range(1, 6)]


def test_losses_between_two_steps_are_micro_batches_of_one() -> None:
    losses = Losses()
    assert losses.none
    for value in (1.0, torch.tensor(2.0), torch.tensor(6.0, dtype=torch.float16)):
        losses.add(value, 0, 1)
    losses.add(3.0, 1, 1)
    assert losses.take(1) == [("loss", 1, 3.0)]
    assert losses.take(2) == [("loss", 2, 3.0)]
    assert not losses.none
    late = Losses()
    for value, steps in ((5.0, 1), (1.0, 2), (2.0, 2)):
        late.add(value, steps, 1)
    assert late.take(2) == [("loss", 1, 5.0), ("loss", 2, 1.5)]


def test_sums_of_micro_batches_do_not_overflow_in_half_precision() -> None:
    losses = Losses()
    for _ in range(2):
        losses.add(torch.tensor(60000.0, dtype=torch.float16), 0, 1)
    assert losses.take(1) == [("loss", 1, 60000.0)]


def test_a_scheduler_is_no_optimizer() -> None:
    w = one_weight()
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([w], lr=0.1), 2)
    for given in (scheduler, [scheduler]):
        with pytest.raises(InputError, match="a scheduler: give the optimizer it schedules"):
            OptimizerSteps(given, lambda late: None, lambda: None)


def test_losses_count_on_in_a_resumed_run() -> None:
    losses = Losses()
    losses.add(1.0, 51, 51)
    losses.add(2.0, 52, 51)
    assert losses.take(60) == [("loss", 51, 1.0), ("loss", 52, 2.0)]


def test_losses_are_copied_and_detached() -> None:
    losses, w = Losses(), one_weight(2.0)
    loss = w * 1.0
    losses.add(loss, 1, 1)
    with torch.no_grad():
        loss.div_(2)
    [(_, _, value)] = losses.take(1)
    assert value == 2.0


def test_losses_keep_their_precision_and_order() -> None:
    losses = Losses()
    values = [1 / 3, torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([0.5])]
    for i, value in enumerate(values, 1):
        losses.add_at(value, i)
    losses.add(0.25, 3, 1, "validation_loss")
    assert losses.take(3) == [
        ("loss", 1, 1 / 3),
        ("loss", 2, 1 / 3),
        ("loss", 3, 0.5),
        ("validation_loss", 3, 0.25),
    ]


def test_what_is_not_one_number_is_refused() -> None:
    losses = Losses()
    with pytest.raises(InputError, match=r"loss has the shape \[2\]; expected one number"):
        losses.add(torch.ones(2), 1, 1)
    with pytest.raises(InputError, match="expected a tensor of one number"):
        losses.add("low", 1, 1)
