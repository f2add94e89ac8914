"""Arms of the collapse study: what pulls how hard, and what never pulls."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from levelhead.nn.encoder import Encoder, draw_heads
from levelhead.nn.replacement import replace_attention
from levelhead.studies.collapse_arms import (
    PENALTIES,
    Addition,
    addition,
    gradient_norm,
    naive_penalty,
    readable,
    structured,
)
from levelhead.training.penalties import coherence, l2
from levelhead.weights.layouts import views

TOKENS = torch.randint(0, 9, (5, 6), generator=torch.Generator().manual_seed(0))


def model(seed: int = 0, spread: float = 0.1) -> Encoder:
    torch.manual_seed(seed)
    made = Encoder(3, tokens=6, vocabulary=9, width=16)
    draw_heads(made, spread=spread)
    return made


def loss_of(net: nn.Module) -> Tensor:
    found: Tensor = net(TOKENS).square().mean()
    return found


@pytest.mark.parametrize("spread", [1.0, 1e-2])
def test_the_naive_penalty_is_zero_and_pulls_nothing_whatever_the_heads_are(spread: float) -> None:
    net = model(spread=spread)
    added = addition("E.naive", 1.0, net)
    whole = added(loss_of(net), True)
    assert added.measured["naive"] < 1e-26
    assert added.measured["naive_share"] < 1e-12
    assert whole.item() == pytest.approx(loss_of(net).item(), rel=1e-6)
    # The factor it speaks of, by numpy; that of the raw tensor's head unfolding.
    view = next(iter(views(net)))
    u = np.linalg.svd(view.head_tensor().detach().double().flatten(1).numpy(), full_matrices=False)
    expected = float(np.square(u.U.T @ u.U - np.eye(2)).sum())
    assert abs(naive_penalty(view).item() - expected) < 1e-26
    # Heads that are nearly copies are what a penalty on them should see.
    assert (coherence(net).value().item() > 0.9) == (spread < 0.1)


def test_the_pull_is_the_norm_of_the_gradient_in_attention_weights() -> None:
    net = model()
    added = addition("B.coherence", 0.3, net)
    whole = added(loss_of(net), True)
    attention = [
        p
        for name, p in net.named_parameters()
        if name.endswith(("self_attn.in_proj_weight", "self_attn.out_proj.weight"))
    ]
    difference = whole - loss_of(net)
    slopes = torch.autograd.grad(difference, attention, allow_unused=True)
    expected = sum(s.double().square().sum().item() for s in slopes if s is not None) ** 0.5
    assert added.measured["pull"] == pytest.approx(expected, rel=1e-3)
    assert added.measured["decay_pull"] == pytest.approx(
        2 * sum(p.double().square().sum().item() for p in attention) ** 0.5 / 2, rel=1e-5
    )  # the mean over two layers of ‖W‖² has the gradient 2W/2


def test_weight_decay_with_the_ratio_of_pulls_is_as_strong_as_the_penalty() -> None:
    net = model()
    penalty = addition("B.log_det", 0.1, net)
    penalty(loss_of(net), True)
    strength = penalty.measured["pull"] / penalty.measured["decay_pull"]
    decay = addition("C.log_det", strength, net)
    whole = decay(loss_of(net), True)
    assert decay.measured["pull"] == pytest.approx(penalty.measured["pull"], rel=1e-6)
    expected = loss_of(net).item() + strength * l2(net).value().item()
    assert whole.item() == pytest.approx(expected, rel=1e-5)


def test_weight_decay_of_a_penalty_that_never_pulled_is_nothing() -> None:
    net = model()
    loss = loss_of(net)
    assert addition("C.entropy_floor", 0.0, net)(loss, True) is loss
    assert addition("A", 0.0, net)(loss, True) is loss


@pytest.mark.parametrize("name", sorted(PENALTIES))
def test_every_penalty_adds_its_weight_times_a_number_and_pulls_in_proportion(name: str) -> None:
    net = model(spread=0.3)
    found = {}
    for weight in (0.5, 1.0):
        added = addition(f"B.{name}", weight, net)
        loss = loss_of(net)
        if name == "stability":  # at rest until weights move
            with torch.no_grad():
                net.layers[0].self_attn.in_proj_weight.mul_(1.5)  # type: ignore[union-attr, operator]
        found[weight] = (added(loss, True) - loss).item(), added.measured["pull"]
        added.close()
        if name == "stability":
            with torch.no_grad():
                net.layers[0].self_attn.in_proj_weight.div_(1.5)  # type: ignore[union-attr, operator]
    for low, high in zip(found[0.5], found[1.0], strict=True):
        assert high == pytest.approx(2 * low, rel=1e-2, abs=1e-5)
    if name not in ("entropy_floor", "rank_floor"):  # these rest where all is well
        assert found[1.0][1] > 0


@pytest.mark.parametrize("name", ["stability", "spectral", "coherence"])
def test_the_state_of_a_penalty_survives_json(name: str) -> None:
    net = model()
    first, second = (addition(f"B.{name}", 0.5, net) for _ in range(2))
    with torch.no_grad():
        net.layers[1].self_attn.in_proj_weight.mul_(1.1)  # type: ignore[union-attr, operator]
    first(loss_of(net), False)
    first.step()
    second.load(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    loss = loss_of(net)
    assert torch.equal(second(loss, False), first(loss, False))


def test_the_head_core_is_put_in_place_and_read_as_plain_layers() -> None:
    net = model()
    structured("B.coherence", 0.5, net)
    assert isinstance(net.layers[0].self_attn, nn.MultiheadAttention)  # type: ignore[union-attr]
    structured("D.core", 0.5, net)
    assert net.layers[0].self_attn.ranks == (2, 4, 8)  # type: ignore[union-attr]
    plain = readable(net, "D.core")
    torch.testing.assert_close(plain(TOKENS), net(TOKENS), rtol=1e-4, atol=1e-5)
    assert len(list(views(plain))) == 2
    assert net.layers[0].self_attn.ranks == (2, 4, 8)  # type: ignore[union-attr]
    assert readable(net, "A") is net
    whole = model()
    replace_attention(whole)
    torch.testing.assert_close(whole(TOKENS), model()(TOKENS), rtol=1e-4, atol=1e-5)


def test_what_depends_on_nothing_has_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(3))
    assert gradient_norm(torch.ones(()), [weight]) == 0.0
    assert gradient_norm((2 * weight).sum(), [weight]) == pytest.approx(2 * 3**0.5)
    assert Addition().state() == {}
