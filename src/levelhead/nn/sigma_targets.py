"""Which weights σReparam replaces, and how a stored matrix falls into those that have a σ each.

Axes. A stored weight is [rows, columns], any orientation: a matrix and its transpose have the same
singular values. `Blocks.cut` gives [blocks, m, n], one matrix for each σ.

Two examples. in_proj_weight [3d, d] of `nn.MultiheadAttention` is `Blocks(3)`, Q, K and V one above
the other. GPT-2's c_attn.weight [d, 3d] is `Blocks(3, sideways=True)`, and is cut into Qᵀ, Kᵀ, Vᵀ
turned upright.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from levelhead.base.errors import InputError
from levelhead.weights.layouts import LayerPlan, Layout, NothingMatched, find_layers, match
from levelhead.weights.stores import Fused, PackedProjection
from levelhead.weights.write_back import placement

__all__ = ["Blocks", "Target", "attention_weights", "named_weights"]

# In a MultiheadAttention these are the weights of Linear layers in all but name.
_ATTENTION_BLOCKS = {
    "in_proj_weight": 3,
    "q_proj_weight": 1,
    "k_proj_weight": 1,
    "v_proj_weight": 1,
}


@dataclass(frozen=True)
class Blocks:
    """`count` matrices in one: along its rows, or its columns if `sideways`.

    `repeats`: they alternate, one part of each in turn, so often (the heads of GPT-NeoX).

    >>> w = torch.arange(12.0).reshape(2, 6)
    >>> Blocks(3, sideways=True).cut(w)[0]
    tensor([[0., 6.],
            [1., 7.]])
    >>> torch.equal(Blocks(3, sideways=True).joined(Blocks(3, sideways=True).cut(w), w.shape), w)
    True
    """

    count: int = 1
    sideways: bool = False
    repeats: int = 1

    def cut(self, weight: Tensor) -> Tensor:
        """[count, m, n] of a stored weight."""
        rows = weight.mT if self.sideways else weight
        parts = rows.reshape(self.repeats, self.count, -1, rows.shape[-1])
        return parts.movedim(1, 0).reshape(self.count, -1, rows.shape[-1])

    def joined(self, stack: Tensor, shape: torch.Size) -> Tensor:
        """The stored weight of this shape from [count, m, n]."""
        parts = stack.reshape(self.count, self.repeats, -1, stack.shape[-1])
        rows = parts.movedim(0, 1).reshape(-1, stack.shape[-1])
        return (rows.mT if self.sideways else rows).reshape(shape)


class Target(NamedTuple):
    """A weight to be replaced: its module, its name there, its path, itself, its blocks."""

    host: nn.Module
    name: str
    path: str
    weight: nn.Parameter
    blocks: Blocks


def attention_weights(
    module: nn.Module, layers: Sequence[str] | Literal["all"], layout: Layout | None
) -> list[Target]:
    """The matrices of q, k, v and o of these attention layers, checked.

    Raises NothingMatched for a module without attention; InputError for a name that no layer has,
    for layers that are reparametrised already and for such whose weights are products.
    """
    plans = match(module, layout=layout).plans
    called = {plan.name or plan.family: plan for plan in plans}
    patterns = ("*",) if layers == "all" else (layers,) if isinstance(layers, str) else layers
    if not patterns:
        raise InputError(f"sigma_reparam: layers={layers!r} names no layer; 'all' takes every one.")
    missing = [p for p in patterns if not any(fnmatchcase(name, p) for name in called)]
    if missing:
        raise _no_layer(module, missing[0], list(called), layout)
    owned = {path: (host, name, weight) for host, name, path, weight in _owned(module)}
    chosen: dict[str, Target] = {}
    for name, plan in called.items():
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        placed = placement(plan)
        if not all(placed.copied(role) for role in "qkv"):
            raise InputError(
                f"sigma_reparam: the queries, keys or values of {name} are products of stored "
                f"matrices; name those matrices in names."
            )
        for path in dict.fromkeys(path for role in "qkvo" for path in placed.stored(role)):
            if path not in owned:
                raise InputError(
                    f"sigma_reparam: {path} is computed from other parameters, not stored; name "
                    f"those matrices in names."
                )
            host, own, weight = owned[path]
            chosen[path] = Target(host, own, path, weight, _blocks_of(plan, path))
    return _checked(list(chosen.values()), _owned(module))


def _no_layer(
    module: nn.Module, pattern: str, called: list[str], layout: Layout | None
) -> InputError:
    """The error for a pattern that no layer has, `called` the names of those that are there."""
    what = f"this {type(module).__name__}"
    # A weight W behind a parametrisation is stored as parametrizations.W.original.
    shapes = {
        name.replace("parametrizations.", "").removesuffix(".original"): tuple(weight.shape)
        for name, weight in module.named_parameters(remove_duplicate=False)
    }
    plans, skipped = find_layers(shapes, layout=layout)
    named = [plan.name for plan in plans] + [skip.name for skip in skipped if skip.by_settings]
    if any(fnmatchcase(name, pattern) for name in named if name not in called):
        where = what if pattern == "*" else f"{pattern!r} of {what}"
        return InputError(
            f"sigma_reparam: {where}: its attention weights are already "
            f"reparametrised; fold them first (levelhead.remove_sigma_reparam)."
        )
    if not called:
        return NothingMatched(
            f"no attention layer was recognised in {what}: describe its names in a layout."
        )
    return InputError(
        f"sigma_reparam found no attention layer called {pattern!r} in {what}; there are "
        f"{called[:8]}."
    )


def _blocks_of(plan: LayerPlan, path: str) -> Blocks:
    store, sizes = plan.plan.store, plan.sizes
    below = path.removeprefix(f"{plan.name}.")
    if isinstance(store, PackedProjection) and below == "in_proj_weight":
        return Blocks(3)
    if isinstance(store, Fused) and below == store.anchor and sizes.heads == sizes.groups:
        repeats = sizes.heads if store.order == "grouped" else 1
        return Blocks(3, store.input_major, repeats)
    return Blocks()


def named_weights(module: nn.Module, names: tuple[str, ...]) -> list[Target]:
    """The weights that `names` ask for, checked."""
    owned = _owned(module)
    asked = [(entry, _asked_by(entry[0], entry[1], entry[2], names)) for entry in owned]
    matched = {name for _, found in asked for name in found}
    missing = [name for name in names if name not in matched]
    if missing or not names:
        available = [path for _, _, path, weight in owned if weight.ndim == 2]
        raise InputError(
            f"sigma_reparam found no weight for {missing or list(names)} in "
            f"{type(module).__name__}; its plain 2-D parameters are {available[:12]}."
        )
    chosen = [
        Target(h, n, path, w, Blocks(_ATTENTION_BLOCKS.get(n, 1) if _is_attention(h) else 1))
        for (h, n, path, w), found in asked
        if found
    ]
    return _checked(chosen, owned)


_Owned = list[tuple[nn.Module, str, str, nn.Parameter]]


def _owned(module: nn.Module) -> _Owned:
    """(module, name, path, parameter) of all parameters that are no parametrisation's."""
    return [
        (host, name, f"{prefix}.{name}" if prefix else name, weight)
        for prefix, host in module.named_modules()
        if not isinstance(host, ParametrizationList) and "parametrizations." not in f"{prefix}."
        for name, weight in host._parameters.items()
        if weight is not None
    ]


def _checked(chosen: list[Target], owned: _Owned) -> list[Target]:
    for target in chosen:
        _check(target)
    taken = {(id(target.host), target.name) for target in chosen}
    weights = {id(target.weight) for target in chosen}
    for host, name, path, weight in owned:
        if id(weight) in weights and (id(host), name) not in taken:
            raise InputError(
                f"{path!r} shares its weight with one that sigma_reparam is to replace and would "
                f"no longer equal it; add it to names or give it a weight of its own."
            )
    return chosen


def _asked_by(host: nn.Module, name: str, path: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` mean this parameter."""
    kinds = {path} if name == "weight" else {path, name}
    if (name == "weight" and _is_linear(host)) or (
        _is_attention(host) and name in _ATTENTION_BLOCKS
    ):
        kinds.add("weight")
    return [asked for asked in names if asked in kinds]


def _is_attention(host: nn.Module) -> bool:
    return isinstance(host, nn.MultiheadAttention)


def _is_linear(host: nn.Module) -> bool:
    """nn.Linear and its look-alikes, such as the Conv1D of GPT-2: not embeddings, not norms."""
    features = hasattr(host, "in_features") and hasattr(host, "out_features")
    return isinstance(host, nn.Linear) or features or (hasattr(host, "nx") and hasattr(host, "nf"))


def _check(target: Target) -> None:
    weight, what = target.weight, None
    if weight.ndim != 2:
        what = f"has shape {list(weight.shape)}; a 2-D weight is needed"
    elif weight.numel() == 0:
        what = f"is empty (shape {list(weight.shape)}); leave it out"
    elif weight.is_complex() or not weight.is_floating_point():
        what = f"is of type {weight.dtype}; real floating-point numbers are needed"
    elif not torch.isfinite(weight).all():
        what = "holds values that are not finite; mend them first"
    if what:
        raise InputError(f"sigma_reparam: {target.path!r} {what}.")
