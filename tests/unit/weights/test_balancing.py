"""The balanced gauge in a live module: what moves, what stays, and why."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from levelhead.nn.samformer import SAMformerNet
from levelhead.weights.balancing import balance_module, plan_balance
from levelhead.weights.canonical import balance
from levelhead.weights.layouts import match, views

D = 12


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(0.5 * numbers(*p.shape, seed=i))
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def test_a_plan_changes_nothing_and_the_move_keeps_the_function() -> None:
    layer = nn.TransformerEncoderLayer(D, 3, 16, batch_first=True, dropout=0.0)
    model = filled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double())
    x = numbers(2, 5, D, seed=99)
    before, stored = model(x).detach(), state(model)
    planned = plan_balance(model, match(model).plans)
    assert all(torch.equal(t, stored[n]) for n, t in state(model).items())
    moved = balance_module(model, match(model).plans)
    assert moved.written == planned.written
    assert not moved.left
    assert {n for n, t in state(model).items() if not torch.equal(t, stored[n])} == set(
        moved.written
    )
    assert torch.allclose(model(x), before, rtol=1e-9, atol=1e-11)
    for view in views(state(model), heads=3):
        assert float(balance(view).qk.max()) < 1e-12
        assert float(balance(view).ov.max()) < 1e-12
        assert not bool(view.v_bias.any())


def test_values_without_an_output_projection_stay_and_queries_move() -> None:
    net = filled(SAMformerNet(10, 4, width=3, value="full").double())
    x = numbers(2, 5, 10, seed=7)
    before = net(x).detach()
    moved = balance_module(net, match(net).plans)
    assert set(moved.written) == {"query", "key", "query_bias", "key_bias"}
    assert "values and output stay as they are, for o is computed" in moved.left["samformer"]
    assert torch.allclose(net(x), before, rtol=1e-10)
    [view] = views(state(net))
    assert float(balance(view).qk.max()) < 1e-12


class Pair(nn.Module):
    """Two layers one behind the other."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x, x, x)[0]
        return self.other(y, y, y)[0]  # type: ignore[no-any-return]


def mha() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(D, 3, batch_first=True, bias=False).double()


def test_a_layer_used_twice_is_moved_once() -> None:
    shared = mha()
    model = filled(Pair(shared, shared))
    x = numbers(2, 5, D, seed=4)
    before = model(x).detach()
    moved = balance_module(model, match(model).plans)
    assert moved.written == ("one.in_proj_weight", "one.out_proj.weight")
    assert not moved.left
    assert torch.allclose(model(x), before, rtol=1e-10)


def test_layers_that_share_a_part_only_stay_together() -> None:
    model = filled(Pair(mha(), mha()))
    model.other.in_proj_weight = model.one.in_proj_weight
    stored = state(model)
    moved = balance_module(model, match(model).plans)
    assert moved.written == ()
    assert set(moved.left) == {"one", "other"}
    assert "is shared by layers that cannot be balanced together" in moved.left["one"]
    assert all(torch.equal(t, stored[n]) for n, t in state(model).items())


def test_a_weight_with_another_use_stays() -> None:
    model = filled(Pair(mha(), mha()))
    model.decoder = nn.Linear(D, D, bias=False).double()
    model.decoder.weight = model.one.out_proj.weight
    stored = state(model)
    moved = balance_module(model, match(model).plans)
    assert moved.layers == ("other",)
    assert moved.left["one"] == "one.out_proj.weight is also decoder.weight, which would change"
    assert torch.equal(model.one.in_proj_weight, stored["one.in_proj_weight"])


def test_a_layer_without_weights_of_its_own_rank_keeps_its_function() -> None:
    """A zero head: nothing to balance, nothing that is not finite."""
    model = filled(mha())
    with torch.no_grad():
        model.in_proj_weight[:4] = 0
    x = numbers(2, 5, D, seed=4)
    before = model(x, x, x)[0].detach()
    balance_module(model, match(model).plans)
    assert torch.allclose(model(x, x, x)[0], before, rtol=1e-9, atol=1e-12)
