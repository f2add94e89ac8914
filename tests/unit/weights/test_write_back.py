"""Writing views back into PyTorch's own layers, mappings, tied weights, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.nn.samformer import SAMformerNet
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.canonical import canonical
from levelhead.weights.layouts import find_layers, match, views
from levelhead.weights.plan import LayerPlan
from levelhead.weights.write_back import placement, write_view, write_views

D, H = 12, 3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(**options: object) -> nn.MultiheadAttention:
    model = nn.MultiheadAttention(D, H, batch_first=True, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(numbers(*p.shape, seed=i))
    return model


def only(model: object) -> tuple[LayerPlan, AttentionView]:
    [plan], [view] = match(model).plans, views(model)
    return plan, view


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 8, "vdim": 8}])
def test_each_entry_lands_where_the_layer_stores_it(options: dict[str, object]) -> None:
    """New random tensors, put together by hand in the layout of nn.MultiheadAttention."""
    model = attention(**options)
    plan, view = only(model)
    new = {n: numbers(*getattr(view, n).shape, seed=40 + i) for i, n in enumerate("qkvo")}
    for n in ("q_bias", "k_bias", "v_bias", "o_bias"):
        if getattr(view, n) is not None:
            new[n] = numbers(*getattr(view, n).shape, seed=50)
    written = write_view(model, plan, replace(view, **new))
    assert set(written) == {n for n, _ in model.named_parameters()}
    parts = [new[n].reshape(D, -1) for n in "qkv"]
    if "kdim" in options:
        stored = [model.q_proj_weight, model.k_proj_weight, model.v_proj_weight]
    else:
        stored = list(model.in_proj_weight.chunk(3))
    assert all(torch.equal(a, b) for a, b in zip(parts, stored, strict=True))
    assert torch.equal(torch.cat(list(new["o"]), dim=1), model.out_proj.weight)
    if "q_bias" in new:
        joined = torch.cat([new[f"{n}_bias"].reshape(-1) for n in "qkv"])
        assert torch.equal(joined, model.in_proj_bias)
        assert torch.equal(new["o_bias"], model.out_proj.bias)


def test_the_balanced_view_keeps_the_output_and_a_void_bias_becomes_zero() -> None:
    model = attention()
    plan, view = only(model)
    x = numbers(2, 5, D, seed=9)
    before = model(x, x, x)[0].detach()
    balanced = canonical(view).view
    assert balanced.k_bias is None
    write_view(model, plan, balanced)
    assert bool((model.in_proj_bias[D : 2 * D] == 0).all())
    assert torch.allclose(model(x, x, x)[0], before, rtol=1e-10, atol=1e-12)


def test_a_mapping_is_written_in_place_and_in_its_own_dtype() -> None:
    state = {n: t.to(torch.bfloat16) for n, t in attention().state_dict().items()}
    kept = dict(state)
    [plan] = match(state, heads=H).plans
    [view] = views(state, heads=H)
    assert view.q.dtype == torch.float32
    assert write_view(state, plan, view) == ()
    write_view(state, plan, replace(view, v=2 * view.v))
    assert all(state[n] is kept[n] for n in state)
    assert torch.equal(state["in_proj_weight"][2 * D :].float(), 2 * view.v.reshape(D, D))
    assert torch.equal(
        state["in_proj_weight"][: 2 * D].float(),
        torch.cat((view.q.reshape(D, D), view.k.reshape(D, D))),
    )


def test_one_parameter_for_queries_and_keys_is_written_once() -> None:
    net = SAMformerNet(10, 4, width=3, tie_qk=True).double()
    plan, view = only(net)
    view = replace(view, **{n: getattr(view, n).detach().clone() for n in ("q", "k")})
    x = numbers(2, 5, 10, seed=3)
    before = net.attention(x).detach()
    turn = torch.linalg.qr(numbers(3, 3, seed=8))[0]
    turned = replace(
        view,
        q=turn @ view.q,
        k=turn @ view.k,
        q_bias=view.q_bias @ turn.mT,
        k_bias=view.k_bias @ turn.mT,
    )
    expected = (turn @ view.q)[0].mT
    assert set(write_view(net, plan, turned)) <= {"query", "query_bias"}
    assert torch.allclose(net.attention(x), before, rtol=1e-12)
    assert torch.allclose(net.query, expected)
    with pytest.raises(InputError, match=r"share entries of query, .* different values"):
        write_view(net, plan, replace(view, q=2 * view.q))
    with pytest.raises(InputError, match=r"share entries of query"):
        write_view(net, plan, replace(view, q=2 * view.q, k=3 * view.k))


def test_two_layers_that_share_a_tensor_must_agree() -> None:
    model = nn.ModuleDict({"a": attention(), "b": attention()})
    model["b"].in_proj_weight = model["a"].in_proj_weight
    plans = match(model).plans
    one, other = views(model)
    placed = [placement(plan) for plan in plans]
    kept = model["a"].in_proj_weight.detach().clone()
    tripled = replace(other, q=3 * other.q)
    doubled = [replace(v, q=2 * v.q) for v in (one, other)]
    assert write_views(model, list(zip(placed, doubled, strict=True))) == ("a.in_proj_weight",)
    assert torch.equal(model["b"].in_proj_weight[:D], 2 * kept[:D])
    with pytest.raises(
        InputError, match=r"a: q and another part or layer share entries of b\.in_proj"
    ):
        write_views(model, [(placed[0], doubled[0]), (placed[1], tripled)])


def test_what_cannot_be_written_is_refused_before_anything_is() -> None:
    net = SAMformerNet(10, 4, width=3, value="full", bias=False).double()
    plan, view = only(net)
    assert not placement(plan).copied("o")
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    with pytest.raises(InputError, match=r"100 entries of o are computed"):
        write_view(net, plan, replace(view, q=2 * view.q, o=2 * view.o))
    with pytest.raises(InputError, match=r"q_bias, for which the layer has no place"):
        write_view(net, plan, replace(view, q_bias=torch.ones(1, 3)))
    with pytest.raises(InputError, match=r"scale 2\.0 was given, but the layer's is 0\.577"):
        write_view(net, plan, replace(view, scale=2.0))
    with pytest.raises(InputError, match=r"soft_cap 3\.0 was given, but the layer's is None"):
        write_view(net, plan, replace(view, soft_cap=3.0))
    with pytest.raises(InputError, match=r"v \[1, 9, 10\] was given; the layer's is \[1, 10, 10\]"):
        write_view(net, plan, replace(view, v=view.v[:, :9], o=view.o[..., :9]))
    with pytest.raises(InputError, match=r"the target has no query, which the plan reads"):
        write_view({"head": net.head}, plan, view)
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


def test_a_constant_is_not_a_copy() -> None:
    """What stands for a missing output projection is the identity."""
    net = SAMformerNet(4, 2, width=2, value="full", bias=False)
    [plan] = match(net).plans
    found = placement(plan)
    assert found.computed["o"].numel() == 16
    assert all(found.copied(n) for n in "qkv")
    assert found.stored("v") == ("value",)


def test_a_gain_with_one_added_is_not_a_copy_of_its_neighbour() -> None:
    """Gemma stores gain - 1: numbered entries plus one look like the next entries."""
    start = "model.layers.0.self_attn"
    state = {f"{start}.{n}_proj.weight": numbers(4, 4, seed=i) for i, n in enumerate("qkvo")}
    state["model.layers.0.input_layernorm.weight"] = numbers(4, seed=9)
    [plan], _ = find_layers(
        {n: tuple(t.shape) for n, t in state.items()},
        {"model_type": "gemma", "num_attention_heads": 2, "num_key_value_heads": 2},
    )
    found = placement(plan)
    assert found.copied("o")
    assert found.computed["input_norm.gain"].tolist() == [0, 1, 2, 3]
