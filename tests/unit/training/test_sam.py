"""SAM against its formula in float64, and its contract as an ordinary optimiser."""

from __future__ import annotations

import copy
import doctest
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import levelhead.training.sam
import levelhead.training.second_pass
from levelhead.base.errors import InputError
from levelhead.training.sam import SAM
from levelhead.training.second_pass import frozen_power_iteration
from oracles import sam as oracle

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


class Live:
    """The oracle's problem as torch parameters and a closure that counts its calls."""

    def __init__(self, sign: float = 1.0) -> None:
        self.problem = oracle.Problem(draw(8, 4), draw(8, 3, seed=1))
        self.start = [draw(3, 4, seed=2), draw(3, seed=3)]
        self.weights = [nn.Parameter(torch.tensor(w)) for w in self.start]
        self.sign = sign
        self.seen: list[list[np.ndarray]] = []

    def loss(self) -> torch.Tensor:
        a, c = self.weights
        x, y = torch.tensor(self.problem.x), torch.tensor(self.problem.y)
        return self.sign * 0.5 * (torch.tanh(x @ a.T + c) - y).square().sum() / len(x)

    def closure(self) -> torch.Tensor:
        for weight in self.weights:
            weight.grad = None
        self.seen.append(self.numpy())
        loss = self.loss()
        loss.backward()
        return loss

    def numpy(self) -> list[np.ndarray]:
        return [w.detach().numpy().copy() for w in self.weights]


def assert_arrays(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, **EXACT)


BASES = {
    "sgd": (torch.optim.SGD, {"lr": 0.3}, lambda: oracle.Sgd(0.3)),
    "sgd-momentum": (
        torch.optim.SGD,
        {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.1},
        lambda: oracle.Sgd(0.3, 0.9, 0.1),
    ),
    "adam": (
        torch.optim.Adam,
        {"lr": 0.02, "weight_decay": 0.1},
        lambda: oracle.Adam(0.02, weight_decay=0.1),
    ),
    "adamw": (
        torch.optim.AdamW,
        {"lr": 0.02, "weight_decay": 0.1},
        lambda: oracle.Adam(0.02, weight_decay=0.1, decoupled=True),
    ),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_steps_equal_the_formula(base: str, adaptive: bool, steps: int) -> None:
    cls, kwargs, twin = BASES[base]
    live = Live()
    sam = SAM(live.weights, cls, rho=0.7, adaptive=adaptive, **kwargs)
    losses = [sam.step(live.closure) for _ in range(steps)]
    expected, expected_losses = oracle.run(
        live.problem, live.start, twin(), [0.7, 0.7], [adaptive, adaptive], steps
    )
    assert_arrays(live.numpy(), expected)
    np.testing.assert_allclose([float(v) for v in losses], expected_losses, **EXACT)
    assert not losses[0].requires_grad
    assert sam.ascent_steps == steps
    assert len(live.seen) == 2 * steps


def test_groups_have_their_own_radius_and_one_norm() -> None:
    live = Live()
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    frozen.grad = torch.full_like(frozen, 5.0)  # left over from earlier; not part of the norm
    idle = nn.Parameter(torch.ones(2, dtype=torch.float64))
    groups = [
        {"params": [live.weights[0]], "rho": 0.2, "lr": 0.5},
        {"params": [live.weights[1]], "adaptive": True},
        {"params": [idle]},
    ]
    sam = SAM(groups, torch.optim.SGD, rho=0.9, lr=0.1)
    sam.param_groups[2]["params"].append(frozen)
    sam.step(live.closure)
    start = live.start
    there = oracle.displaced(start, live.problem.gradient(start), [0.2, 0.9], [False, True])
    assert_arrays(live.seen[1], there)
    g = live.problem.gradient(there)
    assert_arrays(live.numpy(), [start[0] - 0.5 * g[0], start[1] - 0.1 * g[1]])
    assert torch.equal(idle, torch.ones(2, dtype=torch.float64))


def test_maximising_looks_for_the_lowest_value_nearby() -> None:
    up, down = Live(sign=-1.0), Live()
    SAM(up.weights, torch.optim.SGD, rho=0.4, lr=0.1, maximize=True).step(up.closure)
    SAM(down.weights, torch.optim.SGD, rho=0.4, lr=0.1).step(down.closure)
    assert_arrays(up.seen[1], down.seen[1])
    assert_arrays(up.numpy(), down.numpy())
    gradient = [-g for g in up.problem.gradient(up.start)]
    there = oracle.displaced(up.start, gradient, [0.4, 0.4], [False, False], maximize=True)
    assert_arrays(up.seen[1], there)


@pytest.mark.parametrize("base", BASES)
def test_radius_zero_is_the_base_bit_for_bit(base: str) -> None:
    cls, kwargs, _ = BASES[base]
    live, plain = Live(), Live()
    sam, optimiser = SAM(live.weights, cls, rho=0.0, **kwargs), cls(plain.weights, **kwargs)
    for _ in range(3):
        sam.step(live.closure)
        plain.closure()
        optimiser.step()
    assert all(map(torch.equal, live.weights, plain.weights))
    assert sam.ascent_steps == 0
    assert len(live.seen) == 3


def test_accumulated_micro_batches_equal_the_full_batch() -> None:
    full, split = Live(), Live()
    SAM(full.weights, torch.optim.AdamW, rho=0.3, lr=0.1).step(full.closure)
    sam = SAM(split.weights, torch.optim.AdamW, rho=0.3, lr=0.1)
    x, y = torch.tensor(split.problem.x), torch.tensor(split.problem.y)

    def closure() -> float:
        sam.zero_grad()
        total = 0.0
        for rows in (slice(0, 3), slice(3, 4), slice(4, 8)):
            a, c = split.weights
            part = 0.5 * (torch.tanh(x[rows] @ a.T + c) - y[rows]).square().sum() / len(x)
            part.backward()
            total += part.item()
        return total

    loss = sam.step(closure)
    assert isinstance(loss, float)
    np.testing.assert_allclose(loss, split.problem.loss(split.start), **EXACT)
    assert_arrays(split.numpy(), full.numpy())


# -- weights come back ---------------------------------------------------------------------------


def awkward() -> list[nn.Parameter]:
    """Weights for which (w + ε) − ε differs from w in float32."""
    return [nn.Parameter(torch.tensor([1e-7, 3.3e-5, -0.1])), nn.Parameter(torch.tensor([1e6]))]


def test_weights_return_bit_for_bit_when_the_second_pass_raises() -> None:
    weights = awkward()
    before = [w.detach().clone() for w in weights]
    sam = SAM(weights, torch.optim.SGD, rho=0.37, lr=1.0)
    calls = itertools.count()

    def closure() -> torch.Tensor:
        sam.zero_grad()
        if next(calls) == 1:
            assert not any(map(torch.equal, weights, before))
            raise OSError("the second pass fails")
        loss = weights[0].sum() + 3.0 * weights[1].sum()
        loss.backward()
        return loss

    with pytest.raises(OSError, match="the second pass fails"):
        sam.step(closure)
    assert all(map(torch.equal, weights, before))
    assert sam.step(lambda: _grad_one(weights)) == 1.0
    assert torch.equal(weights[0], before[0] - 1.0)


def _grad_one(weights: list[nn.Parameter]) -> float:
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return 1.0


def test_weights_without_gradient_in_one_pass() -> None:
    weights = awkward()
    before = [w.detach().clone() for w in weights]
    sam = SAM(weights, torch.optim.SGD, rho=0.37, lr=0.5)
    calls = itertools.count()

    def closure() -> float:
        sam.zero_grad()
        used = weights[next(calls)]  # the first weight in pass one, the second in pass two
        used.grad = torch.ones_like(used)
        return 0.0

    sam.step(closure)
    assert torch.equal(weights[0], before[0])
    assert torch.equal(weights[1], before[1] - 0.5)
    assert sam.ascent_steps == 1


def test_a_zero_gradient_makes_a_plain_step() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    sam = SAM([weight], torch.optim.SGD, lr=0.5, weight_decay=0.2)
    calls = []

    def closure() -> float:
        calls.append(weight.detach().clone())
        weight.grad = torch.zeros(2)
        return 4.0

    assert sam.step(closure) == 4.0
    assert len(calls) == 1
    assert sam.ascent_steps == 0
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, -1.8]))


@pytest.mark.parametrize(
    ("loss", "gradient"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))]
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_nothing_is_displaced_by_what_is_not_finite(
    loss: float, gradient: float, as_tensor: bool
) -> None:
    weight, sound = (nn.Parameter(torch.tensor([1.0])) for _ in range(2))
    sam = SAM([weight, sound], torch.optim.SGD, lr=0.5)
    calls = []

    def closure() -> float | torch.Tensor:
        calls.append(torch.stack([weight.detach(), sound.detach()]))
        weight.grad, sound.grad = torch.tensor([gradient]), torch.tensor([1.0])
        return torch.tensor(loss) if as_tensor else loss

    returned = sam.step(closure)
    np.testing.assert_equal(float(returned), loss)
    assert len(calls) == 1
    assert sam.ascent_steps == 0
    # What the base does with such a gradient is not hidden.
    np.testing.assert_equal(weight.item(), 1.0 - 0.5 * gradient)
    assert sound.item() == 0.5


# -- kinds of weights ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adaptive", "start", "gradient", "move"),
    [
        # Each gradient is a float16 number, their norm 1.2e5 is not.
        (False, [2.0] * 4, [6e4] * 4, [0.25] * 4),
        # |w| g is 3e-9 and 4e-9, zero in float16; T²g/‖Tg‖ = w (0.6, 0.8) = (0.006, 0.008).
        (True, [0.01, 0.01], [3e-7, 4e-7], [0.003, 0.004]),
    ],
)
def test_half_precision_neither_overflows_nor_underflows(
    adaptive: bool, start: list[float], gradient: list[float], move: list[float]
) -> None:
    weight = nn.Parameter(torch.tensor(start, dtype=torch.float16))
    seen = []
    sam = SAM([weight], torch.optim.SGD, rho=0.5, adaptive=adaptive, lr=0.0)

    def closure() -> float:
        seen.append(weight.detach().float())
        weight.grad = torch.tensor(gradient, dtype=torch.float16)
        return 1.0

    sam.step(closure)
    # 3e-7 itself is a float16 number only to 8 %.
    torch.testing.assert_close(seen[1] - seen[0], torch.tensor(move), rtol=0.1, atol=0.0)


def test_one_norm_over_mixed_dtypes() -> None:
    weights = [
        nn.Parameter(torch.zeros(1, dtype=dtype))
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    sam = SAM([{"params": weights[:2]}, {"params": weights[2:]}], torch.optim.SGD, rho=1.0, lr=0.1)
    seen = []

    def closure() -> float:
        seen.append([w.item() for w in weights])
        for weight, g in zip(weights, (2.0, 3.0, 6.0), strict=True):
            weight.grad = torch.full_like(weight, g)
        return 1.0

    sam.step(closure)
    np.testing.assert_allclose(seen[1], [2 / 7, 3 / 7, 6 / 7], rtol=4e-3)
    np.testing.assert_allclose(seen[1][:2], [2 / 7, 3 / 7], rtol=1e-7)
    assert [w.dtype for w in weights] == [torch.float64, torch.float32, torch.bfloat16]


def test_complex_weights_are_refused_and_not_kept() -> None:
    with pytest.raises(InputError, match=r"complex weight of shape \[2\]"):
        SAM([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], torch.optim.SGD, lr=0.1)
    sam = SAM([nn.Parameter(torch.zeros(2))], torch.optim.SGD, lr=0.1)
    with pytest.raises(InputError, match="complex"):
        sam.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    assert len(sam.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    sam = SAM(table.parameters(), torch.optim.SGD, lr=0.1)

    def closure() -> torch.Tensor:
        loss = table(torch.tensor([1])).sum()
        loss.backward()
        return loss

    with pytest.raises(InputError, match=r"sparse.*shape \[4, 2\]"):
        sam.step(closure)
    assert torch.equal(table.weight, before)


# -- an ordinary optimiser -----------------------------------------------------------------------


@pytest.mark.parametrize("closure", [None, 3.0])
def test_a_missing_closure_is_refused(closure: object) -> None:
    sam = SAM(awkward(), torch.optim.SGD, lr=0.1)
    with pytest.raises(InputError, match=r"instead of a closure; pass a function that zeroes"):
        sam.step(closure)  # type: ignore[arg-type]


def test_arguments_are_checked() -> None:
    weights = awkward()
    for rho in (-0.1, float("nan"), float("inf"), "0.05"):
        with pytest.raises(InputError, match="radius"):
            SAM(weights, torch.optim.SGD, rho=rho, lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="class of a base optimiser"):
        SAM(weights, torch.optim.SGD(weights, lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="class of a base optimiser"):
        SAM(weights, SAM)
    with pytest.raises(InputError, match="LBFGS evaluates the loss itself"):
        SAM(weights, torch.optim.LBFGS)
    with pytest.raises(InputError, match="Adadelta has an option 'rho' of its own"):
        SAM(weights, torch.optim.Adadelta)
    with pytest.raises(ValueError, match="empty parameter list"):
        SAM([], torch.optim.SGD, lr=0.1)


def test_groups_state_and_defaults_are_the_base_optimisers() -> None:
    live = Live()
    sam = SAM(live.weights, torch.optim.AdamW, lr=0.1)
    assert isinstance(sam, torch.optim.Optimizer)
    sam.step(live.closure)
    assert sam.param_groups is sam.base_optimizer.param_groups
    assert sam.state is sam.base_optimizer.state
    assert set(sam.state) == set(live.weights)
    assert sam.defaults["rho"] == 0.05
    assert sam.defaults["betas"] == (0.9, 0.999)
    extra = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sam.add_param_group({"params": extra, "rho": 0.5, "lr": 1.0})
    assert [(g["rho"], g["adaptive"], g["lr"]) for g in sam.param_groups] == [
        (0.05, False, 0.1),
        (0.5, False, 1.0),
    ]
    assert len(sam.base_optimizer.param_groups) == 2
    sam.zero_grad()
    assert all(w.grad is None for w in live.weights)
    assert repr(sam).startswith("SAM over AdamW (")


def test_named_parameters_and_a_base_that_fills_its_state_early() -> None:
    net = nn.Linear(2, 1)
    sam = SAM(net.named_parameters(), torch.optim.Adagrad, lr=0.1)
    assert sam.param_groups[0]["param_names"] == ["weight", "bias"]

    def closure() -> torch.Tensor:
        sam.zero_grad()
        loss = net(torch.ones(3, 2)).square().mean()
        loss.backward()
        return loss

    sam.step(closure)
    assert float(sam.state[net.weight]["step"]) == 1.0


def test_state_dicts_are_those_of_the_base() -> None:
    cls, kwargs, twin = BASES["adamw"]
    live, plain = Live(), Live()
    sam, base = SAM(live.weights, cls, rho=0.7, **kwargs), cls(plain.weights, **kwargs)
    sam.step(live.closure)
    plain.closure()
    base.step()
    state, reference = sam.state_dict(), base.state_dict()
    assert state.keys() == reference.keys()
    assert state["param_groups"] == reference["param_groups"]
    assert state["state"].keys() == reference["state"].keys()
    assert all(state["state"][i].keys() == reference["state"][i].keys() for i in reference["state"])
    base.load_state_dict(state)
    torch.testing.assert_close(base.state_dict(), state, rtol=0.0, atol=0.0)

    other = Live()
    for weight, value in zip(other.weights, live.weights, strict=True):
        weight.data.copy_(value)
    again = SAM(other.weights, cls, rho=0.7, lr=99.0)
    again.load_state_dict(torch.load(_saved(base.state_dict()), weights_only=True))
    assert again.param_groups is again.base_optimizer.param_groups
    assert [(g["lr"], g["rho"], g["adaptive"]) for g in again.param_groups] == [(0.02, 0.7, False)]
    again.step(other.closure)
    expected, _ = oracle.run(live.problem, live.start, twin(), [0.7, 0.7], [False, False], 2)
    assert_arrays(other.numpy(), expected)


def _saved(state: dict[str, object]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_loading_into_the_base_directly_keeps_the_groups_shared() -> None:
    live = Live()
    sam = SAM(live.weights, torch.optim.SGD, lr=0.1, momentum=0.9)
    sam.step(live.closure)
    sam.base_optimizer.load_state_dict(sam.base_optimizer.state_dict())
    sam.param_groups[0]["lr"] = 0.7
    assert sam.base_optimizer.param_groups[0]["lr"] == 0.7
    assert sam.state is sam.base_optimizer.state


def test_state_dict_hooks_run_once_each() -> None:
    live, heard = Live(), []
    sam = SAM(live.weights, torch.optim.SGD, lr=0.1)
    sam.register_state_dict_pre_hook(lambda opt: heard.append(("pre save", opt)))
    sam.register_state_dict_post_hook(lambda opt, state: {**state, "note": 1})
    sam.register_load_state_dict_pre_hook(
        lambda opt, state: {k: v for k, v in state.items() if k != "note"}
    )
    sam.register_load_state_dict_post_hook(lambda opt: heard.append(("post load", opt)))
    state = sam.state_dict()
    assert state["note"] == 1
    sam.load_state_dict(state)
    assert heard == [("pre save", sam), ("post load", sam)]


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.4, total_steps=6),
}


@pytest.mark.parametrize("on_base", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_move_the_rate_of_the_step(name: str, on_base: bool) -> None:
    live, plain = Live(), Live()
    sam = SAM(live.weights, torch.optim.SGD, rho=0.1, lr=0.2, momentum=0.9)
    base = torch.optim.SGD(plain.weights, lr=0.2, momentum=0.9)
    schedule = SCHEDULERS[name](sam.base_optimizer if on_base else sam)
    reference = SCHEDULERS[name](base)
    velocity: list[np.ndarray] | None = None
    for _ in range(3):
        before = live.numpy()
        rate, mu = (base.param_groups[0][key] for key in ("lr", "momentum"))
        sam.step(live.closure)
        g = live.problem.gradient(live.seen[-1])
        velocity = (
            g if velocity is None else [mu * v + gi for v, gi in zip(velocity, g, strict=True)]
        )
        assert_arrays(live.numpy(), [w - rate * v for w, v in zip(before, velocity, strict=True)])
        plain.closure()
        base.step()
        schedule.step()
        reference.step()


def test_step_hooks_fire_once_per_step() -> None:
    live = Live()
    heard: list[tuple[str, object]] = []
    sam = SAM(live.weights, torch.optim.SGD, lr=0.1)
    sam.register_step_pre_hook(lambda opt, a, k: heard.append(("pre", opt)))
    sam.register_step_post_hook(lambda opt, a, k: heard.append(("post", opt)))
    sam.base_optimizer.register_step_pre_hook(lambda opt, a, k: heard.append(("base pre", opt)))
    sam.base_optimizer.register_step_post_hook(lambda opt, a, k: heard.append(("base post", opt)))
    handles = [
        register_optimizer_step_pre_hook(lambda opt, a, k: heard.append(("global pre", opt))),
        register_optimizer_step_post_hook(lambda opt, a, k: heard.append(("global post", opt))),
    ]
    try:
        sam.step(live.closure)
    finally:
        for handle in handles:
            handle.remove()
    base = sam.base_optimizer
    assert heard == [
        ("global pre", sam),
        ("pre", sam),
        ("base pre", base),
        ("base post", base),
        ("post", sam),
        ("global post", sam),
    ]


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy"])
def test_copies_continue_alike(how: str) -> None:
    live = Live()
    sam = SAM(live.weights, torch.optim.AdamW, rho=0.3, lr=0.1)
    sam.step(live.closure)
    if how == "pickle":
        sam2, weights = pickle.loads(pickle.dumps((sam, live.weights)))
    elif how == "deepcopy":
        sam2, weights = copy.deepcopy((sam, live.weights))
    else:
        sam2, weights = copy.copy(sam), live.weights
    assert sam2.ascent_steps == 1
    assert sam2.param_groups is sam2.base_optimizer.param_groups
    assert sam2.param_groups[0]["params"][0] is weights[0]
    twin = Live()
    twin.weights = weights
    sam2.step(twin.closure)
    if how != "copy":
        assert not torch.equal(weights[0], live.weights[0])
        sam.step(live.closure)
        assert all(map(torch.equal, weights, live.weights))
    assert sam2.ascent_steps == 2


def test_gradients_are_computed_inside_no_grad_too() -> None:
    live, plain = Live(), Live()
    with torch.no_grad():
        SAM(live.weights, torch.optim.SGD, lr=0.1).step(live.closure)
        assert not torch.is_grad_enabled()
    SAM(plain.weights, torch.optim.SGD, lr=0.1).step(plain.closure)
    assert all(map(torch.equal, live.weights, plain.weights))


# -- with a GradScaler ---------------------------------------------------------------------------


class Scaled(Live):
    """`Live` in float32 with a scaler; `overflow` names the pass in which a gradient is inf."""

    def __init__(self, overflow: int | None = None) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.tensor(w)) for w in self.start]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        self.overflow = overflow

    def closure(self) -> torch.Tensor:
        for weight in self.weights:
            weight.grad = None
        self.seen.append(self.numpy())
        loss = self.loss()
        self.scaler.scale(loss).backward()
        if self.overflow == len(self.seen):
            self.weights[1].grad[0] = float("inf")
        return loss


@pytest.mark.parametrize("base", ["sgd-momentum", "adamw", "adamw-fused"])
def test_scaled_steps_equal_the_formula(base: str) -> None:
    cls, kwargs, twin = BASES[base.removesuffix("-fused")]
    live = Scaled()
    fused = {"fused": True} if base.endswith("fused") else {}
    sam = SAM(live.weights, cls, rho=0.7, **kwargs, **fused)
    losses = [float(sam.step(live.closure, live.scaler)) for _ in range(3)]
    expected, expected_losses = oracle.run(
        live.problem, live.start, twin(), [0.7, 0.7], [False, False], 3
    )
    assert_arrays(live.numpy(), expected)
    np.testing.assert_allclose(losses, expected_losses, **EXACT)
    assert live.scaler.get_scale() == 1024.0 * 2**3  # growth_interval is one step


@pytest.mark.parametrize("overflow", [1, 2])
def test_an_inf_in_either_pass_leaves_out_the_update(overflow: int) -> None:
    live = Scaled(overflow)
    sam = SAM(live.weights, torch.optim.AdamW, rho=0.7, lr=0.1)
    loss = sam.step(live.closure, live.scaler)
    np.testing.assert_allclose(float(loss), live.problem.loss(live.start), **EXACT)
    assert all(np.array_equal(w, s) for w, s in zip(live.numpy(), live.start, strict=True))
    assert len(live.seen) == overflow
    assert not sam.state
    assert live.scaler.get_scale() == 512.0
    live.overflow = None
    sam.step(live.closure, live.scaler)
    twin = oracle.Adam(0.1, weight_decay=0.01, decoupled=True)
    expected, _ = oracle.run(live.problem, live.start, twin, [0.7, 0.7], [False, False], 1)
    assert_arrays(live.numpy(), expected)
    assert live.scaler.get_scale() == 1024.0


def test_a_second_pass_that_raises_leaves_the_scaler_usable() -> None:
    live = Scaled()
    sam = SAM(live.weights, torch.optim.SGD, rho=0.7, lr=0.1)

    def closure() -> torch.Tensor:
        if live.seen:
            raise OSError("the second pass fails")
        return live.closure()

    with pytest.raises(OSError, match="the second pass fails"):
        sam.step(closure, live.scaler)
    assert all(np.array_equal(w, s) for w, s in zip(live.numpy(), live.start, strict=True))
    sam.step(live.closure, live.scaler)
    expected, _ = oracle.run(
        live.problem, live.start, oracle.Sgd(0.1), [0.7, 0.7], [False, False], 1
    )
    assert_arrays(live.numpy(), expected)


def test_scaler_step_is_refused_in_one_sentence() -> None:
    live = Scaled()
    sam = SAM(live.weights, torch.optim.SGD, lr=0.1)
    live.closure()
    with pytest.raises(InputError, match=r"call sam.step\(closure, scaler\) instead"):
        live.scaler.step(sam)
    with pytest.raises(InputError, match=r"call sam.step\(closure, scaler\) instead"):
        live.scaler.step(sam, live.closure)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        live.scaler.step(sam, closure=live.closure)  # torch's own refusal comes first here
    assert all(np.array_equal(w, s) for w, s in zip(live.numpy(), live.start, strict=True))
    live.scaler.update()
    sam.step(live.closure, live.scaler)
    assert sam.ascent_steps == 1


def test_a_disabled_scaler_changes_nothing() -> None:
    live, plain = Scaled(), Live()
    live.scaler = torch.amp.GradScaler("cpu", enabled=False)
    SAM(live.weights, torch.optim.SGD, lr=0.1).step(live.closure, live.scaler)
    SAM(plain.weights, torch.optim.SGD, lr=0.1).step(plain.closure)
    assert all(map(torch.equal, live.weights, plain.weights))


# -- the second pass leaves no trace -------------------------------------------------------------


def norm_net() -> tuple[nn.Sequential, oracle.NormNet, torch.Tensor]:
    net = nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Linear(4, 2, bias=False)
    ).double()
    for i, weight in enumerate(net.parameters()):
        weight.data.copy_(torch.tensor(draw(*weight.shape, seed=10 + i)))
    x = draw(6, 3, seed=20)
    return net, oracle.NormNet(x), torch.tensor(x)


def masks_from(seed: int, count: int) -> list[np.ndarray]:
    """The masks dropout draws one after the other from `seed`."""
    torch.manual_seed(seed)
    ones = torch.ones(6, 4, dtype=torch.float64)
    return [nn.functional.dropout(ones, 0.4).numpy() for _ in range(count)]


def test_both_passes_share_masks_and_statistics_follow_the_first() -> None:
    masks = masks_from(7, 3)
    assert not np.array_equal(masks[0], masks[1])
    net, twin, x = norm_net()
    sam = SAM(net.parameters(), torch.optim.SGD, rho=0.3, lr=0.2)

    def closure() -> torch.Tensor:
        sam.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    weights = [w.detach().numpy().copy() for w in net.parameters()]
    mean, var = np.zeros(4), np.ones(4)
    torch.manual_seed(7)
    with sam.ascent_pass(net) as same:
        assert same is sam
        for mask in masks[:2]:
            loss = sam.step(closure)
            np.testing.assert_allclose(float(loss), twin.loss(weights, mask), rtol=1e-12)
            mean, var = twin.running(weights[0], mean, var)
            there = oracle.displaced(weights, twin.gradient(weights, mask), [0.3] * 4, [False] * 4)
            g = twin.gradient(there, mask)
            weights = [w - 0.2 * gi for w, gi in zip(weights, g, strict=True)]
    for got, expected in zip(net.parameters(), weights, strict=True):
        np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(net[1].running_mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(net[1].running_var.numpy(), var, rtol=1e-12)
    assert net[1].num_batches_tracked.item() == 2
    ones = torch.ones(6, 4, dtype=torch.float64)
    np.testing.assert_array_equal(nn.functional.dropout(ones, 0.4).numpy(), masks[2])


def test_outside_the_context_both_passes_count() -> None:
    net, _, x = norm_net()
    sam = SAM(net.parameters(), torch.optim.SGD, lr=0.2)

    def closure() -> torch.Tensor:
        sam.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    with sam.ascent_pass(net):
        sam.step(closure)
    assert net[1].num_batches_tracked.item() == 1
    sam.step(closure)
    assert net[1].num_batches_tracked.item() == 3


class Iterating(nn.Module):
    """A module that takes part in the freezing protocol and mistreats its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.power_iteration_frozen = False
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("expanded", torch.zeros(1).expand(5))
        self.register_buffer("absent", None)
        self.frozen_in: list[bool] = []

    def forward(self) -> torch.Tensor:
        self.frozen_in.append(self.power_iteration_frozen)
        self.replaced = self.replaced + 1.0
        self.written.data.add_(1.0)
        return self.weight.square().sum()


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_and_freezing_return_also_when_the_second_pass_raises(fails: bool) -> None:
    net = Iterating()
    sam = SAM(net.parameters(), torch.optim.SGD, lr=0.2)

    def closure() -> torch.Tensor:
        sam.zero_grad()
        loss = net()
        torch.rand(len(net.frozen_in))
        if fails and len(net.frozen_in) == 2:
            raise OSError("the second pass fails")
        loss.backward()
        return loss

    torch.manual_seed(3)
    torch.rand(1)
    after_one = torch.rand(3)
    torch.manual_seed(3)
    with sam.ascent_pass(net):
        if fails:
            with pytest.raises(OSError, match="the second pass fails"):
                sam.step(closure)
        else:
            sam.step(closure)
    assert net.frozen_in == [False, True]
    assert net.power_iteration_frozen is False
    assert net.replaced.tolist() == [1.0, 1.0]
    assert net.written.tolist() == [1.0, 1.0]
    assert torch.equal(torch.rand(3), after_one)


def test_freezing_restores_what_was_set() -> None:
    outer = nn.ModuleList([Iterating(), Iterating(), nn.Linear(1, 1)])
    outer[0].power_iteration_frozen = True
    with frozen_power_iteration(outer):
        assert [m.power_iteration_frozen for m in outer[:2]] == [True, True]
    assert [m.power_iteration_frozen for m in outer[:2]] == [True, False]
    assert not hasattr(outer[2], "power_iteration_frozen")


def test_ascent_pass_needs_modules() -> None:
    sam = SAM(awkward(), torch.optim.SGD, lr=0.1)
    with pytest.raises(InputError, match="torch modules"), sam.ascent_pass():
        pass
    with pytest.raises(InputError, match="torch modules"), sam.ascent_pass(3):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("module", [levelhead.training.sam, levelhead.training.second_pass])
def test_documented_examples_run(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
