"""Calls of attention functions that an interface gives out by name, overheard.

transformers keeps them in `AttentionInterface`; nothing here imports it. A function is called as
`function(module, query, key, value, attention_mask, **options)`, with query [b, h, n, d], key
[b, g, m, d] and options such as scaling, softcap, position_bias and is_causal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.diagnostics.attention_call import AttentionCall, attention_call

__all__ = ["interface_call", "overheard"]

_LISTENERS = "_levelhead_listeners"
_Listener = tuple[Mapping[int, str], Callable[[str, AttentionCall], None]]
_CAPS = ("softcap", "soft_cap", "logit_cap")


@contextmanager
def overheard(
    interface: Any,
    paths: Mapping[int, str],
    receive: Callable[[str, AttentionCall], None],
) -> Iterator[None]:
    """Whatever function the interface gives out also tells `receive`, until the block is left.

    `paths` names modules by their id; calls of others, and what is compiled, pass untouched.
    Overriding `get_interface` reaches eager functions, too, which live with the models and are
    only its default.
    """
    own = vars(interface)
    if _LISTENERS not in own:
        own[_LISTENERS] = [], own.get("get_interface")
        own["get_interface"] = _telling(interface.get_interface, own[_LISTENERS][0])
    listeners, before = own[_LISTENERS]
    mine = paths, receive
    listeners.append(mine)
    try:
        yield
    finally:
        # Those who listen need not leave in the order in which they came.
        listeners.remove(mine)
        if not listeners:
            del own[_LISTENERS], own["get_interface"]
            if before is not None:
                own["get_interface"] = before


def _telling(give: Callable[..., Any], listeners: Sequence[_Listener]) -> Callable[..., Any]:
    def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        inner = give(name, default)

        def told(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling():
                for paths, receive in tuple(listeners):
                    path = paths.get(id(module))
                    if path is not None:
                        call = interface_call(module, query, key, rest, options)
                        if call is not None:
                            receive(path, call)
            return inner(module, query, key, *rest, **options)

        return told

    return get_interface


def interface_call(
    module: nn.Module, query: Tensor, key: Tensor, rest: tuple[Any, ...], options: dict[str, Any]
) -> AttentionCall | None:
    """What the function was asked for, None where that is not understood.

    `rest` is (value, attention_mask, …).
    """
    mask = rest[1] if len(rest) > 1 else options.get("attention_mask")
    if not (mask is None or isinstance(mask, Tensor)):
        return None
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", False)) if causal is None else bool(causal)
    n, m = query.shape[-2], key.shape[-2]
    window = options.get("sliding_window")
    if window is not None and m > window and (mask is None or mask.ndim == 2):
        return None  # the kernel keeps to the window by itself, each in its own way
    if mask is not None and mask.ndim == 2:
        # flash-attn takes padding [b, m] and the causal flag at once; it counts from the right.
        mask = mask[:, None, None, -m:].bool()
        if causal and n != m:
            return None
    else:
        causal = causal and mask is None and n > 1
        if causal and n != m:
            return None  # flash-attn counts from the right, PyTorch from the left
    if mask is not None and mask.ndim == 4:
        mask = mask[..., :m]
    cap = next((c for n in _CAPS if (c := options.get(n)) is not None), None)
    try:
        return attention_call(
            query,
            key,
            mask=mask,
            causal=causal,
            scale=options.get("scaling"),
            bias=options.get("position_bias"),
            soft_cap=cap,
        )
    except (InputError, RuntimeError):
        # Not a plain call; the functions below it may still be seen.
        return None
