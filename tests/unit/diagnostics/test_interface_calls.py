"""Overhearing an interface: who listens, until when, and what is not understood."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.diagnostics.interface_calls import interface_call, overheard


class Interface:
    def get_interface(self, name: str, default: Any) -> Any:
        return default


def attend(module: nn.Module, query: Tensor, *rest: Any, **options: Any) -> Tensor:
    return query


def test_listeners_may_leave_in_any_order() -> None:
    """Two watched models, the first of which looks away while the second still looks."""
    interface, one, two = Interface(), nn.Identity(), nn.Identity()
    heard: list[str] = []
    q = torch.randn(1, 2, 3, 4)

    def run() -> list[str]:
        heard.clear()
        for module in (one, two):
            interface.get_interface("eager", attend)(module, q, q, q, None)
        return list(heard)

    first = overheard(interface, {id(one): "one"}, lambda path, call: heard.append(path))
    second = overheard(interface, {id(two): "two"}, lambda path, call: heard.append(path))
    with first:
        with second:
            assert run() == ["one", "two"]
        assert run() == ["one"]
    first = overheard(interface, {id(one): "one"}, lambda path, call: heard.append(path))
    second = overheard(interface, {id(two): "two"}, lambda path, call: heard.append(path))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert run() == ["two"]
    second.__exit__(None, None, None)
    assert run() == []
    assert vars(interface) == {}


def test_what_stood_on_the_interface_before_stands_there_again() -> None:
    interface = SimpleNamespace(get_interface=lambda name, default: default)
    before = interface.get_interface
    with overheard(interface, {}, lambda path, call: None):
        assert interface.get_interface is not before
    assert vars(interface) == {"get_interface": before}


def test_a_window_that_only_the_kernel_knows_is_not_understood() -> None:
    """flash-attn gets a sliding window beside a mask that does not show it."""
    module, q = nn.Identity(), torch.randn(2, 2, 12, 4)
    padding = torch.ones(2, 12, dtype=torch.bool)
    for mask in (None, padding):
        options = {"is_causal": True, "sliding_window": 4}
        assert interface_call(module, q, q, (q, mask), options) is None
    shown = torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)[None, None]
    call = interface_call(module, q, q, (q, shown), {"is_causal": True, "sliding_window": 4})
    assert call is not None
    assert torch.equal(call.block()[1], shown)
    assert interface_call(module, q, q, (q, None), {"sliding_window": 12}) is not None


def test_where_a_causal_kernel_counts_from_is_not_guessed() -> None:
    """Three rows over eight keys (a cache): flash-attn's first row sees six keys, PyTorch's one."""
    module, q, k = nn.Identity(), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 8, 4)
    assert interface_call(module, q, k, (k, None), {"is_causal": True}) is None
    call = interface_call(module, q, q, (q, None), {"is_causal": True})
    assert call is not None
    assert call.causal
