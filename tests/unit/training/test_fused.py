"""Steps with kept lists give torch's bits; where they cannot be kept the step is torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from levelhead.training.fused import FusedSteps

ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD


def weights(count: int = 3) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(5, n + 1, generator=draw)) for n in range(count)]


def give_gradients(weights: list[nn.Parameter], step: int, missing: int | None = None) -> None:
    draw = torch.Generator().manual_seed(step)
    for number, weight in enumerate(weights):
        gradient = torch.randn(weight.shape, generator=draw)
        weight.grad = None if number == missing else gradient


def both(kind: Any, options: dict[str, Any], missing: dict[int, int] | None = None) -> FusedSteps:
    """Twelve steps of ours and of torch's own, which must be equal; ours is returned."""
    ours, theirs = weights(), weights()
    optimizer, other = kind(ours, **options), kind(theirs, **options)
    steps = FusedSteps(optimizer)
    for step in range(12):
        for group in (*optimizer.param_groups, *other.param_groups):
            group["lr"] = 0.1 / (step + 1)
        for given in (ours, theirs):
            give_gradients(given, step, (missing or {}).get(step))
        steps()
        other.step()
    for weight, expected in zip(ours, theirs, strict=True):
        assert torch.equal(weight, expected)
        for name, value in other.state[expected].items():
            assert torch.equal(optimizer.state[weight][name], value), name
    return steps


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ADAM, {}),
        (ADAM, {"weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}),
        (ADAMW, {"weight_decay": 0.1}),
        (ADAM, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ],
)
def test_kept_lists_give_the_bits_of_torch(kind: Any, options: dict[str, Any]) -> None:
    assert both(kind, {"fused": True, **options})._lists is not None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ADAM, {"fused": True, "amsgrad": True}),
        (ADAM, {"fused": True, "maximize": True}),
        (ADAM, {"fused": False}),
        (SGD, {"fused": True, "lr": 0.1, "momentum": 0.9}),
    ],
)
def test_other_optimisers_step_as_torch_does(kind: Any, options: dict[str, Any]) -> None:
    assert both(kind, options)._lists is None


def test_a_weight_without_gradient_is_left_alone_as_torch_does() -> None:
    both(ADAM, {"fused": True}, missing={0: 1, 5: 2, 6: 2})


def test_two_groups_keep_their_options() -> None:
    ours, theirs = weights(2), weights(2)
    optimizer, other = (
        ADAM([{"params": given[:1]}, {"params": given[1:], "lr": 0.2}], lr=0.1, fused=True)
        for given in (ours, theirs)
    )
    steps = FusedSteps(optimizer)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        steps()
        other.step()
    assert all(torch.equal(weight, expected) for weight, expected in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("place", ["pre", "post", "global pre", "global post"])
def test_hooks_are_heard_at_every_step(place: str) -> None:
    given = weights()
    heard: list[object] = []
    optimizer = ADAM(given, fused=True)
    register = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "global pre": register_optimizer_step_pre_hook,
        "global post": register_optimizer_step_post_hook,
    }[place]
    steps = FusedSteps(optimizer)
    for step in range(5):
        give_gradients(given, step)
        if step == 2:
            handle = register(lambda *_: heard.append(1))
        if step == 4:
            handle.remove()
        steps()
    assert len(heard) == 2


def test_after_load_state_dict_the_new_state_is_stepped() -> None:
    given = weights()
    optimizer = ADAM(given, fused=True)
    steps = FusedSteps(optimizer)
    for step in range(3):
        give_gradients(given, step)
        steps()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps.forget()
    for step in (3, 4):
        give_gradients(given, step)
        steps()
    assert [int(optimizer.state[w]["step"]) for w in given] == [5, 5, 5]
