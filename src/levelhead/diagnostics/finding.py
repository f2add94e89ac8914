"""From the names of attention layers to the modules that run them, and what may hide them.

A layer's name is that of its AttentionView: the path of the module that holds its weights, or,
where the whole model is the layer (`nn.MultiheadAttention`, `SAMformerNet`), "" or the family of
the plan that read it. Looking at a module's forward sees all below it, so that a parent
("encoder.layer.0.attention" of BERT) serves as well as the innermost module.

Three ways lead to a layer's attention: *listen* to the functions its forward calls; read the
arguments of an `nn.MultiheadAttention` ("module"), whose fast path calls nothing that could be
heard and is left by PyTorch as soon as anything listens; and read those of an
`nn.TransformerEncoderLayer` whose own fast path never calls its `self_attn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from levelhead.base.errors import InputError
from levelhead.weights.layouts import TABLE

__all__ = ["Found", "compiled_at", "fast_path_at", "find_modules"]

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_ORIGINAL = "_orig_mod"

Way = Literal["listen", "module"]


@dataclass(frozen=True, eq=False)
class Found:
    """The module that runs a layer.

    Args:
        name: as it was asked for.
        module: whose forward is looked at.
        way: how; see the top of this module.
        heads: how many heads it has, where it says so.
        around: the `nn.TransformerEncoderLayer` it belongs to, if any.
        compiled: the path of what torch.compile was applied to, if the layer is part of it.
        implementation: which attention its transformers config chose.
    """

    name: str
    module: nn.Module
    way: Way
    heads: int | None = None
    around: nn.TransformerEncoderLayer | None = None
    compiled: str | None = None
    implementation: str | None = None


def find_modules(
    model: nn.Module, layers: Sequence[str], heads: Mapping[str, int] | None = None
) -> list[Found]:
    """The modules of the named layers.

    Raises InputError for a name that is neither a module of the model nor stands for all of it.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(8, 2))
    >>> [found] = find_modules(model, ["1"])
    >>> found.way, found.heads, found.compiled
    ('module', 2, None)
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    # A compiled model has its layers below _orig_mod; names from before compilation have not.
    plain = {_without_original(path): path for path in reversed(modules)}
    encoders = {
        id(m.self_attn): m for m in modules.values() if isinstance(m, nn.TransformerEncoderLayer)
    }
    found = []
    for name in layers:
        path = _path(name, modules, plain)
        module = modules[path]
        inner = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
        module = inner[0] if len(inner) == 1 else module
        found.append(
            Found(
                name,
                module,
                _way(module),
                (heads or {}).get(name) or _heads_of(module),
                encoders.get(id(module)),
                compiled_at(path, modules),
                _implementation(module),
            )
        )
    return found


def fast_path_at(module: nn.Module) -> bool:
    """Whether PyTorch's multi-head attention in or below `module` may now take its fast path.

    >>> module = nn.MultiheadAttention(8, 2).eval()
    >>> fast_path_at(module), fast_path_at(module.train())
    (False, False)
    >>> with torch.no_grad():
    ...     fast_path_at(module.eval())
    True
    """
    return any(
        isinstance(m, nn.MultiheadAttention)
        and not m.training
        and not (torch.is_grad_enabled() and any(p.requires_grad for p in m.parameters()))
        for m in module.modules()
    )


def compiled_at(path: str, modules: Mapping[str, nn.Module]) -> str | None:
    """The outermost compiled module around or below `path` ("the model" for all); None if none.

    Below counts because listening while compiled code runs would compile it again.
    """
    pieces = path.split(".") if path else []
    above = [".".join(pieces[:i]) for i in range(len(pieces) + 1)]
    below = [p for p in modules if p.startswith(f"{path}." if path else "")]
    for place in (*above, *below):
        if _is_compiled(modules[place]):
            return f"{place!r}" if place else "the model"
    return None


def _is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module) or module.compile(); without loading the compiler to ask it."""
    wrapped = isinstance(module._modules.get(_ORIGINAL), nn.Module)
    return wrapped or module._compiled_call_impl is not None


def _without_original(path: str) -> str:
    return ".".join(piece for piece in path.split(".") if piece != _ORIGINAL)


def _path(name: str, modules: Mapping[str, nn.Module], plain: Mapping[str, str]) -> str:
    for path in (name, plain.get(_without_original(name))):
        if path is not None and path in modules:
            return path
    if name in {plan.family for plan in TABLE}:
        return plain[""]
    shown = ", ".join(path for path in list(modules)[1:5])
    raise InputError(
        f"layer {name!r} was asked for, but the model has no module of that name (it has {shown}, "
        "…): give names of its attention layers, as levelhead.weights.layouts.match finds them"
    )


def _way(module: nn.Module) -> Way:
    if not isinstance(module, nn.MultiheadAttention):
        return "listen"
    if type(module).forward is not nn.MultiheadAttention.forward:
        return "listen"
    # Reading a parametrised weight computes it anew, and in training that may change its state.
    return "listen" if parametrize.is_parametrized(module) and module.training else "module"


def _heads_of(module: nn.Module) -> int | None:
    for owner in _owners(module):
        for name in _HEADS:
            count = getattr(owner, name, None)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    return None


def _owners(module: nn.Module) -> Iterator[object]:
    yield module
    yield from module.children()
    if (config := getattr(module, "config", None)) is not None:
        yield config


def _implementation(module: nn.Module) -> str | None:
    for owner in module.modules():
        config = getattr(owner, "config", None)
        if isinstance(name := getattr(config, "_attn_implementation", None), str):
            return name
    return None
