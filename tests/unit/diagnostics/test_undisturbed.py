"""Context managers that put everything back, also after an error."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from levelhead.diagnostics.undisturbed import (
    RandomState,
    kept_buffers,
    kept_random_state,
    kept_values,
    uncompiled,
    uses,
)


def draws() -> tuple[float, float, float]:
    return float(torch.rand(1)), float(np.random.rand()), random.random()  # noqa: NPY002


def test_random_states_come_back_after_an_error() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with kept_random_state():
        expected = draws()

    def look() -> None:
        with kept_random_state() as kept:
            assert draws() == expected
            assert draws() != expected
            kept.restore()
            assert draws() == expected
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert torch.equal(torch.get_rng_state(), state)
    assert draws() == expected


class Odd(nn.Module):
    """Changes its buffers in every way: in place, by replacement, by adding one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("kept", torch.full((2,), float("nan")))
        self.register_buffer("late", None)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.kept = torch.ones(2)
        self.late = torch.ones(1)
        self.register_buffer("cache", x)
        return self.norm(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("named", [True, False])
def test_buffers_come_back_as_the_same_objects(named: bool) -> None:
    model = Odd()
    objects = {n: id(b) for n, b in model.named_buffers()}

    def look() -> None:
        with kept_buffers(*((model,) if named else ())):
            model(torch.randn(5, 2))
            model(torch.randn(5, 2))
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert {n: id(b) for n, b in model.named_buffers()} == objects
    assert bool((model.count == 0).all())
    assert bool(model.kept.isnan().all())
    assert model.late is None
    assert not hasattr(model, "cache")
    assert int(model.norm.num_batches_tracked) == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(2))
    model(torch.randn(5, 2))
    assert int(model.count[0]) == 1


def test_an_untouched_buffer_stays_valid_for_a_graph_that_holds_it() -> None:
    model = nn.BatchNorm1d(2).eval()
    x = torch.randn(5, 2, requires_grad=True)
    y = model(x)
    version = model.running_mean._version
    with kept_buffers(model):
        model(torch.randn(5, 2))
    assert model.running_mean._version == version
    y.sum().backward()


def test_values_and_flags_come_back_bit_for_bit() -> None:
    w = torch.tensor([0.1, -0.0, float("nan")])
    bits = w.view(torch.int32).clone()
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout().eval(), nn.ReLU()))
    flags = [m.training for m in model.modules()]

    def look() -> None:
        with kept_values([w]), uses(model, training=False):
            w.add_(3)
            assert not any(m.training for m in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert torch.equal(w.view(torch.int32), bits)
    assert [m.training for m in model.modules()] == flags


def test_compiled_functions_run_eagerly_inside() -> None:
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(1)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend)  # type: ignore[arg-type]
    with uncompiled():
        assert float(compiled(torch.ones(()))) == 2
    assert not seen
    compiled(torch.ones(()))
    assert seen


def test_the_generator_of_mps_is_asked_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of torch differ in whether it takes one; there is one such device."""
    kept: list[torch.Tensor] = [torch.tensor([7])]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: kept[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", kept.append)
    there = SimpleNamespace(device=torch.device("mps"))
    RandomState.now([there]).restore()  # type: ignore[list-item]
    assert [int(state) for state in kept] == [7, 7]
