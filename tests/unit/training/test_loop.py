"""The loop against loops written by hand, and its promise to resume bit for bit.

Run as a program, `test_loop.py STATE STEP` trains the resumable problem and kills itself there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from levelhead.base.errors import DivergenceError, InputError, Interrupted, StoredFileError
from levelhead.nn.sigma_reparam import sigma_reparam
from levelhead.training.loop import Closure, History, TrainingSettings, train

COUNT = 22
SETTINGS = TrainingSettings(epochs=6, patience=0, batch_size=5, learning_rate=0.02, rho=0.1, seed=3)
STEPS = 5  # per epoch: 22 windows in batches of 5, the last of 2


class Problem:
    """Regression on 22 rows; remembers the batches, what it was judged on, and may misbehave."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        at: dict[int, Callable[[torch.Tensor], torch.Tensor]] | None = None,
        errors: list[float] | None = None,
    ) -> None:
        draw = np.random.default_rng(0)
        self.x = torch.tensor(draw.normal(size=(COUNT, 4)), dtype=dtype)
        self.y = torch.tensor(draw.normal(size=(COUNT, 2)), dtype=dtype)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 2)]
            self.model = nn.Sequential(*layers).to(dtype)
        self.at = at or {}
        self.errors = errors
        self.batches: list[torch.Tensor] = []
        self.judged: list[dict[str, torch.Tensor]] = []

    def loss(self, index: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(self.x[index]), self.y[index])

    def batch_loss(self, index: torch.Tensor) -> Closure:
        self.batches.append(index.clone())
        step = len(self.batches)
        change = self.at.get(step, lambda loss: loss)
        return lambda: change(self.loss(index))

    def validate(self) -> float:
        assert not self.model.training
        assert not torch.is_grad_enabled()
        self.judged.append(self.weights())
        if self.errors is not None:
            return self.errors[len(self.judged) - 1]
        return float(nn.functional.mse_loss(self.model(self.x[:7]), self.y[:7] + 0.3))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def train(self, settings: TrainingSettings = SETTINGS, **options: Any) -> History:
        judge = options.pop("validate", self.validate)
        return train(self.model, self.batch_loss, COUNT, judge, settings, **options)


def settings(**changes: Any) -> TrainingSettings:
    return dataclasses.replace(SETTINGS, **changes)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def without_seconds(history: History) -> str:
    """The history as text, in which nan equals nan, less the one thing that may differ."""
    record = dataclasses.asdict(history)
    for epoch in record["epochs"]:
        del epoch["seconds"]
    return json.dumps(record)


# -- one epoch by hand ---------------------------------------------------------------------------


def rate(step: int, fraction_of: int, cycle: int) -> float:
    """The cosine from .02 to 1e-6 over `cycle` epochs of `fraction_of` steps, from step 0."""
    phase = (step % (fraction_of * cycle)) / (fraction_of * cycle)
    return 1e-6 + (0.02 - 1e-6) * (1 + math.cos(math.pi * phase)) / 2


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_plain_adam_equals_a_loop_by_hand_bit_for_bit(decay: float) -> None:
    ours, theirs = Problem(), Problem()
    history = ours.train(settings(epochs=2, rho=0.0, weight_decay=decay), validate=None)

    kind = torch.optim.AdamW if decay else torch.optim.Adam
    optimizer = kind(theirs.model.parameters(), lr=1.0, weight_decay=decay, fused=True)
    losses: list[float] = []
    for step, index in enumerate(ours.batches):
        optimizer.param_groups[0]["lr"] = rate(step, STEPS, 5)
        optimizer.zero_grad()
        loss = theirs.loss(index)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same(ours.weights(), theirs.weights())
    assert history.steps == 2 * STEPS == len(ours.batches)
    assert [e.training_loss for e in history.epochs[1:]] == [
        sum(losses[:STEPS]) / STEPS,
        sum(losses[STEPS:]) / STEPS,
    ]


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_equals_its_formula(adaptive: bool) -> None:
    ours, theirs = Problem(dtype=torch.float64), Problem(dtype=torch.float64)
    ours.train(settings(epochs=2, rho=0.3, adaptive=adaptive), validate=None)

    weights = list(theirs.model.parameters())
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    for step, index in enumerate(ours.batches):
        there = [w.detach().clone() for w in weights]
        gradients = torch.autograd.grad(theirs.loss(index), weights)
        size = [w.detach().abs() if adaptive else torch.ones_like(w) for w in weights]
        total = sum(float((t * g).square().sum()) for t, g in zip(size, gradients, strict=True))
        with torch.no_grad():
            for w, t, g in zip(weights, size, gradients, strict=True):
                w += 0.3 * t * t * g / math.sqrt(total)
        gradients = torch.autograd.grad(theirs.loss(index), weights)
        with torch.no_grad():
            for w, start, m, v, g in zip(weights, there, first, second, gradients, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                unbiased, spread = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
                w.copy_(start - rate(step, STEPS, 5) * unbiased / (spread.sqrt() + 1e-8))
    for name, expected in theirs.weights().items():
        torch.testing.assert_close(ours.weights()[name], expected, rtol=1e-11, atol=1e-13)


def test_every_epoch_sees_every_window_once_in_a_new_order() -> None:
    problem = Problem()
    problem.train(settings(epochs=3))
    epochs = [problem.batches[i : i + STEPS] for i in range(0, 3 * STEPS, STEPS)]
    orders = [torch.cat(batches).tolist() for batches in epochs]
    assert all(sorted(order) == list(range(COUNT)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert [len(batch) for batch in epochs[0]] == [5, 5, 5, 5, 2]


def test_steps_per_epoch_caps_and_draws_anew() -> None:
    problem = Problem()
    history = problem.train(settings(epochs=4, steps_per_epoch=2))
    assert [len(batch) for batch in problem.batches] == [5] * 8
    assert history.steps == 8
    assert len({tuple(batch.tolist()) for batch in problem.batches}) == 8
    assert Problem().train(settings(epochs=1, steps_per_epoch=99)).steps == STEPS


# -- learning rate -------------------------------------------------------------------------------


def test_the_rate_falls_along_a_cosine_and_restarts() -> None:
    plan = TrainingSettings(learning_rate=1.0, minimal_rate=0.2, restart_every=4)
    assert plan.rate(0, 0.0) == pytest.approx(1.0)
    assert plan.rate(1, 0.0) == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)))
    assert plan.rate(2, 0.0) == pytest.approx(0.6)
    assert plan.rate(2, 0.5) == pytest.approx(0.2 + 0.4 * (1 - math.sin(math.pi / 8)))
    assert plan.rate(3, 1.0) == pytest.approx(0.2)
    assert plan.rate(4, 0.0) == pytest.approx(1.0)
    assert TrainingSettings(learning_rate=0.3, restart_every=0).rate(17, 0.4) == 0.3


@pytest.mark.parametrize("rho", [0.0, 0.1])
def test_the_optimiser_steps_at_that_rate(rho: float) -> None:
    seen: list[float] = []
    hook = register_optimizer_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    try:
        Problem().train(settings(epochs=5, restart_every=2, rho=rho))
    finally:
        hook.remove()
    np.testing.assert_allclose(seen, [rate(i, STEPS, 2) for i in range(5 * STEPS)], rtol=1e-12)


# -- judging -------------------------------------------------------------------------------------


def test_patience_ends_and_the_best_weights_stay() -> None:
    problem = Problem(errors=[5.0, 4.0, 2.0, 3.0, 2.0, 2.5, 1.0])
    history = problem.train(settings(patience=3))
    assert [e.validation for e in history.epochs] == [5.0, 4.0, 2.0, 3.0, 2.0, 2.5]
    assert [e.epoch for e in history.epochs] == list(range(6))
    assert (history.best_epoch, history.best_validation) == (2, 2.0)
    assert history.ended == "no better validation error for 3 epochs"
    assert history.steps == 5 * STEPS
    assert_same(problem.weights(), problem.judged[2])
    assert not torch.equal(problem.judged[2]["0.weight"], problem.judged[5]["0.weight"])
    assert not problem.model.training


def test_epoch_zero_counts() -> None:
    problem = Problem(errors=[1.0, 2.0, 3.0, 1.5])
    start = problem.weights()
    history = problem.train(settings(patience=3))
    assert history.best_epoch == 0
    assert math.isnan(history.epochs[0].training_loss)
    assert_same(problem.weights(), start)
    assert_same(problem.judged[0], start)


def test_no_patience_never_stops() -> None:
    problem = Problem(errors=[1.0, *range(2, 8)])
    history = problem.train(settings(patience=0))
    assert history.ended == "6 epochs done"
    assert len(history.epochs) == 7
    assert_same(problem.weights(), problem.judged[0])


def test_without_a_judge_the_last_weights_stay() -> None:
    judged, blind = Problem(errors=[1.0] * 7), Problem()
    judged.train()
    history = blind.train(settings(patience=1), validate=None)
    assert (history.best_epoch, history.ended) == (6, "6 epochs done")
    assert all(math.isnan(e.validation) for e in history.epochs)
    assert_same(blind.weights(), judged.judged[6])
    assert not blind.model.training


def test_steps_are_taken_in_training_mode_and_frozen_weights_stay() -> None:
    modes: list[bool] = []

    def note(loss: torch.Tensor) -> torch.Tensor:
        modes.append(problem.model.training)
        return loss

    problem = Problem(at=dict.fromkeys(range(1, 2 * STEPS + 1), note))
    problem.model[0].bias.requires_grad_(False)
    start = problem.weights()
    problem.train(settings(epochs=2))
    assert modes == [True] * 4 * STEPS  # two passes per step
    end = problem.judged[-1]
    assert torch.equal(start["0.bias"], end["0.bias"])
    assert not torch.equal(start["0.weight"], end["0.weight"])


def test_the_second_pass_of_sam_leaves_no_trace_in_the_model() -> None:
    problem = Problem()
    problem.model.insert(1, nn.BatchNorm1d(6))
    history = problem.train(settings(epochs=2), validate=None)
    assert problem.model[1].num_batches_tracked.item() == history.steps == 2 * STEPS


# -- divergence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rho", [0.0, 0.1])
def test_a_loss_that_is_not_finite_ends_training(value: float, rho: float) -> None:
    problem = Problem(at={13: lambda loss: loss * value}, errors=[3.0, 1.0, 2.0])
    with pytest.raises(DivergenceError) as caught:
        problem.train(settings(rho=rho))
    message = str(caught.value)
    assert f"the loss became {value} at step 13 (epoch 3): try a smaller" in message
    assert f"learning_rate (now 0.02) or rho (now {rho:g})" in message
    assert_same(problem.weights(), problem.judged[1])
    assert not problem.model.training


def test_weights_that_are_not_finite_are_never_the_last_ones() -> None:
    def endless_slope(loss: torch.Tensor) -> torch.Tensor:
        return loss + torch.sqrt(0.0 * problem.model[0].weight).sum()  # finite, its gradient is not

    problem = Problem(at={2 * STEPS: endless_slope})
    twin = Problem()
    twin.train(settings(epochs=1), validate=None)
    with pytest.raises(DivergenceError, match=r"a weight became .* at step 10 \(epoch 2\)"):
        problem.train(validate=None)
    assert_same(problem.weights(), twin.weights())


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_validation_error_that_is_not_finite_ends_training(epoch: int) -> None:
    errors = [3.0, 1.0, 2.0]
    errors[epoch] = math.nan
    problem = Problem(errors=errors)
    where = rf"validation error became nan at step {epoch * STEPS} \(epoch {epoch}\)"
    with pytest.raises(DivergenceError, match=where):
        problem.train()
    assert_same(problem.weights(), problem.judged[min(epoch, 1)])


# -- seeds ---------------------------------------------------------------------------------------


def test_a_seed_decides_everything() -> None:
    first, again, other = Problem(), Problem(), Problem()
    histories = [first.train(), again.train(), other.train(settings(seed=4))]
    assert_same(first.weights(), again.weights())
    assert without_seconds(histories[0]) == without_seconds(histories[1])
    assert not torch.equal(first.weights()["0.weight"], other.weights()["0.weight"])
    assert not torch.equal(torch.cat(first.batches[:STEPS]), torch.cat(other.batches[:STEPS]))


def test_training_without_dropout_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    Problem().train()
    assert torch.equal(torch.get_rng_state(), before)


# -- stopping and going on -----------------------------------------------------------------------


@pytest.fixture
def handlers() -> Iterator[dict[int, Any]]:
    """Handlers of our own, so that a signal that is not caught fails the test and nothing else."""

    def missed(number: int, frame: object) -> None:
        raise AssertionError(f"signal {number} was not noted")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, missed) for number in numbers}
    yield dict.fromkeys(numbers, missed)
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(loss: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return loss

    sent: list[int] = []
    return change


def uninterrupted(**options: Any) -> tuple[dict[str, torch.Tensor], str]:
    problem = Problem(**options)
    history = problem.train()
    return problem.weights(), without_seconds(history)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, 3, 5, 13, 26])
def test_interrupted_and_resumed_gives_the_same_bits(
    number: int, step: int, handlers: dict[int, Any], tmp_path: Path
) -> None:
    state = tmp_path / "a.state"
    stopped = Problem(at={step: send(number)})
    with pytest.raises(Interrupted) as caught:
        stopped.train(state_path=state)
    done = step // STEPS
    name = signal.Signals(number).name
    assert (
        str(caught.value) == f"{name} after {done} epochs: the state is in {state}, resume to go on"
    )
    assert caught.value.exit_code == 130
    assert state.is_file()
    best = min(range(done + 1), key=lambda e: _error(stopped, e))
    assert_same(stopped.weights(), stopped.judged[best])
    assert {n: signal.getsignal(n) for n in handlers} == handlers

    resumed = Problem()
    history = resumed.train(state_path=state, resume=True)
    weights, expected = uninterrupted()
    assert_same(resumed.weights(), weights)
    assert without_seconds(history) == expected
    assert len(resumed.batches) == (6 - done) * STEPS


def _error(problem: Problem, epoch: int) -> float:
    twin = Problem()
    twin.model.load_state_dict(problem.judged[epoch])
    twin.model.eval()
    with torch.no_grad():
        return twin.validate()


def test_a_stop_without_a_state_says_so(handlers: dict[int, Any]) -> None:
    problem = Problem(at={7: send(signal.SIGTERM)})
    with pytest.raises(Interrupted, match="SIGTERM after 1 epochs: no state was asked for"):
        problem.train()


def test_an_interruption_in_the_last_step_changes_nothing(handlers: dict[int, Any]) -> None:
    problem = Problem(at={6 * STEPS: send(signal.SIGINT)})
    history = problem.train()
    weights, expected = uninterrupted()
    assert_same(problem.weights(), weights)
    assert without_seconds(history) == expected


def test_a_killed_process_resumes_to_the_same_bits(tmp_path: Path) -> None:
    state = tmp_path / "killed.state"
    done = subprocess.run(
        [sys.executable, __file__, str(state), "13"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["killed.state"]
    resumed = Problem()
    history = resumed.train(state_path=state, resume=True)
    weights, expected = uninterrupted()
    assert_same(resumed.weights(), weights)
    assert without_seconds(history) == expected
    assert len(resumed.batches) == 4 * STEPS


def test_dropout_and_power_iterations_resume_to_the_same_bits(
    handlers: dict[int, Any], tmp_path: Path
) -> None:
    def problem(**options: Any) -> Problem:
        made = Problem(dropout=0.4, **options)
        sigma_reparam(made.model, gamma=1.0)
        return made

    state = tmp_path / "a.state"
    torch.manual_seed(5)
    whole = problem()
    expected = without_seconds(whole.train())
    torch.manual_seed(5)
    with pytest.raises(Interrupted):
        problem(at={13: send(signal.SIGINT)}).train(state_path=state)
    torch.manual_seed(6)
    resumed = problem()
    history = resumed.train(state_path=state, resume=True)
    assert_same(resumed.judged[-1], whole.judged[-1])
    assert_same(resumed.weights(), whole.weights())
    assert without_seconds(history) == expected


@pytest.mark.parametrize("rho", [0.0, 0.1])
def test_power_iterations_outside_a_forward_resume_to_the_same_bits(
    rho: float, handlers: dict[int, Any], tmp_path: Path
) -> None:
    class Direct(Problem):
        def loss(self, index: torch.Tensor) -> torch.Tensor:
            first, last = self.model[0], self.model[3]
            hidden = torch.tanh(self.x[index] @ first.weight.T)  # read, never called
            return nn.functional.mse_loss(hidden @ last.weight.T, self.y[index])

    def problem(**options: Any) -> Problem:
        made = Direct(**options)
        sigma_reparam(made.model, gamma=1.0)
        return made

    state, chosen = tmp_path / "a.state", settings(rho=rho)
    whole = problem()
    expected = without_seconds(whole.train(chosen))
    with pytest.raises(Interrupted):
        problem(at={13: send(signal.SIGINT)}).train(chosen, state_path=state)
    resumed = problem()
    history = resumed.train(chosen, state_path=state, resume=True)
    assert_same(resumed.weights(), whole.weights())
    assert without_seconds(history) == expected


def test_a_finished_state_has_nothing_left_to_do(tmp_path: Path) -> None:
    state = tmp_path / "a.state"
    first, again = Problem(errors=[3.0, 1.0, 2.0, 2.0]), Problem()
    history = first.train(settings(patience=2), state_path=state)
    repeated = again.train(settings(patience=2), state_path=state, resume=True)
    assert again.batches == again.judged == []
    assert without_seconds(repeated) == without_seconds(history)
    assert_same(again.weights(), first.weights())


def test_without_resume_an_old_state_is_overwritten_at_once(
    handlers: dict[int, Any], tmp_path: Path
) -> None:
    state = tmp_path / "a.state"
    Problem().train(settings(seed=9), state_path=state)
    with pytest.raises(Interrupted, match="after 0 epochs: the state is in "):
        Problem(at={2: send(signal.SIGINT)}).train(state_path=state)
    resumed = Problem()
    assert without_seconds(resumed.train(state_path=state, resume=True)) == uninterrupted()[1]


def test_resume_without_a_file_starts_anew(tmp_path: Path) -> None:
    problem = Problem()
    history = problem.train(state_path=tmp_path / "new.state", resume=True)
    weights, expected = uninterrupted()
    assert_same(problem.weights(), weights)
    assert without_seconds(history) == expected


def test_handlers_come_back_after_every_way_out(handlers: dict[int, Any]) -> None:
    def fail(loss: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken closure")

    Problem().train(settings(epochs=1))
    assert {n: signal.getsignal(n) for n in handlers} == handlers
    for at, kind in (({3: fail}, RuntimeError), ({3: lambda x: x * math.nan}, DivergenceError)):
        with pytest.raises(kind):
            Problem(at=at).train()
        assert {n: signal.getsignal(n) for n in handlers} == handlers


# -- stored states that cannot be used -----------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "a.state"
    Problem().train(settings(epochs=2), state_path=path)
    return path


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"rho": 0.2}, {"epochs": 3}, {"learning_rate": 0.03}], ids=str
)
def test_other_settings_are_refused(change: dict[str, Any], state: Path) -> None:
    problem = Problem()
    start = problem.weights()
    with pytest.raises(StoredFileError, match=r"was written with settings .* resume with the same"):
        problem.train(settings(**{"epochs": 2, **change}), state_path=state, resume=True)
    assert_same(problem.weights(), start)


def test_other_data_are_refused(state: Path) -> None:
    problem = Problem()
    with pytest.raises(StoredFileError, match="written with count 22, now 21 is asked for"):
        train(
            problem.model,
            problem.batch_loss,
            21,
            problem.validate,
            settings(epochs=2),
            state_path=state,
            resume=True,
        )


def rewritten(path: Path, **changes: Any) -> None:
    """Change the record in the file's header."""
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["levelhead"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata={"levelhead": json.dumps({**record, **changes})})


def test_another_version_is_refused(state: Path) -> None:
    rewritten(state, version=99)
    with pytest.raises(StoredFileError, match="written with version 99, now 1 is asked for"):
        Problem().train(settings(epochs=2), state_path=state, resume=True)


@pytest.mark.parametrize("damage", ["truncated", "cut short", "garbage", "empty", "foreign", "odd"])
def test_damaged_states_get_one_sentence(damage: str, state: Path) -> None:
    content = state.read_bytes()
    if damage == "foreign":
        save_file({"weight": torch.zeros(3)}, state)
    elif damage == "odd":
        rewritten(state, history=[1, 2])
    else:
        parts = {"truncated": content[:-1], "cut short": content[:50], "garbage": b"no state" * 99}
        state.write_bytes(parts.get(damage, b""))
    with pytest.raises(StoredFileError) as caught:
        Problem().train(settings(epochs=2), state_path=state, resume=True)
    message = str(caught.value)
    assert message.startswith(f"{state} does not hold a training state that can be resumed (")
    assert message.endswith("): delete it to start again")
    assert "\n" not in message


def test_the_state_of_another_model_is_refused_in_one_sentence(state: Path) -> None:
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    problem = Problem()
    with pytest.raises(StoredFileError) as caught:
        train(
            other,
            problem.batch_loss,
            COUNT,
            None,
            settings(epochs=2),
            state_path=state,
            resume=True,
        )
    assert "size mismatch" in str(caught.value)
    assert "\n" not in str(caught.value)


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("epochs", [0, -1, 2.5]),
        ("batch_size", [0, "32"]),
        ("steps_per_epoch", [0, -1, 1.5]),
        ("restart_every", [-1, 2.5]),
        ("seed", [-1, 0.5, 1 << 31]),
        ("learning_rate", [-1e-3, math.nan, math.inf]),
        ("minimal_rate", [-1e-9, math.nan]),
        ("rho", [-0.1, math.inf]),
        ("weight_decay", [-1.0]),
        ("patience", [-1]),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InputError, match=f"{name} must be .*given"):
            TrainingSettings(**{name: value})


def test_nothing_to_train_is_refused() -> None:
    problem = Problem()
    with pytest.raises(InputError, match="no window to train on"):
        train(problem.model, problem.batch_loss, 0, None, SETTINGS)
    problem.model.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        problem.train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    here, step = sys.argv[1:]

    def die(loss: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return loss

    Problem(at={int(step): die}).train(state_path=Path(here))


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "a.state"
    Problem().train(state_path=state, data="one")
    with pytest.raises(StoredFileError, match="was written for other data"):
        Problem().train(state_path=state, resume=True, data="two")
