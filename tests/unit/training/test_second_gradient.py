"""The second pass of SAM made by somebody else's loop, against the formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracles.sam as slow
from levelhead.base.errors import InputError
from levelhead.training.second_gradient import SecondGradient


class Net(nn.Module):
    """tanh(A x + c); c is not the module's, but the optimiser's all the same."""

    def __init__(self, start: slow.Arrays) -> None:
        super().__init__()
        self.a, c = (nn.Parameter(torch.tensor(w)) for w in start)
        self.outside = [c]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.a.T + self.outside[0])


def problem() -> tuple[slow.Problem, slow.Arrays]:
    draw = np.random.default_rng(0)
    twin = slow.Problem(draw.normal(size=(6, 3)), draw.normal(size=(6, 2)))
    return twin, [draw.normal(size=(2, 3)), draw.normal(size=2)]


def passes(twin: slow.Problem, net: Net, count: int) -> list[Callable[[bool], None]]:
    """Forward and backward pass of each of `count` micro-batches."""

    def over(rows: slice) -> Callable[[bool], None]:
        def again(last: bool) -> None:
            lasts.append(last)
            errors = net(torch.tensor(twin.x[rows])) - torch.tensor(twin.y[rows])
            (0.5 * errors.square().sum() / len(twin.x)).backward()

        return again

    lasts: list[bool] = []
    net.lasts = lasts
    size = 6 // count
    return [over(slice(i * size, (i + 1) * size)) for i in range(count)]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_become_those_of_the_displaced_weights(
    count: int, adaptive: bool, maximize: bool
) -> None:
    twin, start = problem()
    there = slow.displaced(start, twin.gradient(start), [0.3] * 2, [adaptive] * 2, maximize)
    expected = twin.gradient(there)
    net = Net(start)
    second = SecondGradient(0.3, adaptive)
    for again in (micros := passes(twin, net, count)):
        second.before(net, again)
        again(False)
    net.lasts.clear()
    groups = [{"params": [net.a]}, {"params": net.outside}]
    second.take([group | {"maximize": maximize, "lr": 0.1} for group in groups])
    assert net.lasts == [False] * (len(micros) - 1) + [True]
    for p, w, g in zip((net.a, *net.outside), start, expected, strict=True):
        assert np.array_equal(p.detach().numpy(), w)
        assert p.grad is not None
        assert np.allclose(p.grad.numpy(), g, rtol=1e-12, atol=1e-15)
    assert second.ascents == 1


@pytest.mark.parametrize("factor", [0.0, math.nan, math.inf])
def test_without_a_direction_the_gradient_stays(factor: float) -> None:
    twin, start = problem()
    net = Net(start)
    (again,) = passes(twin, net, 1)
    second = SecondGradient(0.3)
    second.before(net, again)
    again(True)
    kept = []
    for p in (net.a, *net.outside):
        assert p.grad is not None
        p.grad *= factor
        kept.append(p.grad.clone())
    net.lasts.clear()
    second.take([{"params": [net.a, *net.outside]}])
    assert net.lasts == []
    assert second.ascents == 0
    for p, g in zip((net.a, *net.outside), kept, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=0, equal_nan=True)


def test_a_pass_that_raises_leaves_the_weights_where_they_were() -> None:
    twin, start = problem()
    net = Net(start)
    (again,) = passes(twin, net, 1)

    def fails(last: bool) -> None:
        assert not np.array_equal(net.a.detach().numpy(), start[0])
        raise OSError("no")

    second = SecondGradient(0.3)
    second.before(net, fails)
    again(True)
    with pytest.raises(OSError, match="no"):
        second.take([{"params": [net.a]}])
    assert np.array_equal(net.a.detach().numpy(), start[0])


def test_micro_batches_are_passed_again_once_and_may_be_forgotten() -> None:
    twin, start = problem()
    net = Net(start)
    (again,) = passes(twin, net, 1)
    second = SecondGradient(0.3)
    second.before(net, again)
    again(True)
    second.take([{"params": [net.a]}])
    with pytest.raises(InputError, match="no micro-batch to pass again"):
        second.take([{"params": [net.a]}])
    second.before(net, again)
    second.forget()
    with pytest.raises(InputError, match="no micro-batch to pass again"):
        second.take([{"params": [net.a]}])


def test_a_radius_of_nothing_does_nothing_and_a_wrong_one_is_refused() -> None:
    off = SecondGradient(0.0)
    off.before(nn.Linear(1, 1), lambda last: pytest.fail("passed again"))
    off.take([])
    for rho in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="radius"):
            SecondGradient(rho)
