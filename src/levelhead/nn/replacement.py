"""Swapping the attention layers of a model for such that share factors, and back.

Axes as in `nn.masked_attention`. Every `nn.MultiheadAttention` below a module is replaced, wherever
it stands: in `nn.TransformerEncoder` and `nn.TransformerDecoder` as well as in own models.

Two examples. `replace_attention(model, (0.5, 1.0, 1.0))` halves the head rank of every layer.
`replace_attention(model); restore_attention(model)` gives the model that was, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from levelhead.base.errors import InputError
from levelhead.nn.collaborative import CollaborativeAttention
from levelhead.nn.head_core import HeadCoreAttention, Ranks
from levelhead.nn.masked_attention import MaskedAttention

__all__ = ["replace_attention", "restore_attention"]


def replace_attention(
    model: nn.Module,
    ranks: Ranks = None,
    *,
    shared: int | float | None = None,
    layers: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Put a `HeadCoreAttention` in place of every `nn.MultiheadAttention`; names of those replaced.

    Each starts from the layer it replaces (`from_attention`): at full ranks outputs stay. Layers
    that were one object stay one. Build the optimiser afterwards. Encoders around them give up
    nested tensors, torch's shortcut in evaluation that reads in_proj_weight past the layer.

    Args:
        ranks: (R_h, R_k, R_d) as in `HeadCoreAttention`; shares where layers differ in size.
        shared: D, to make `CollaborativeAttention` instead; then leave `ranks` out.
        layers: names or patterns of names; None: all.

    Raises InputError before anything is replaced if a layer cannot be, none is there, a name
    matches nothing, or `model` itself is one (use `from_attention`).

    >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> replace_attention(model, (1, 4, 8)), type(model.self_attn).__name__
    (('self_attn',), 'HeadCoreAttention')
    """
    if shared is not None and ranks is not None:
        raise InputError(
            "ranks are those of a head core, shared is D of collaborative attention: "
            "give one of them."
        )

    def make(attention: nn.MultiheadAttention) -> nn.Module:
        if shared is not None:
            return CollaborativeAttention.from_attention(attention, shared)
        return HeadCoreAttention.from_attention(attention, ranks)

    nothing = "no nn.MultiheadAttention to replace"
    names = _swap(model, nn.MultiheadAttention, make, layers, nothing)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(module, MaskedAttention) for module in encoder.modules()
        ):
            encoder.use_nested_tensor = False
    return names


def restore_attention(model: nn.Module, *, layers: Sequence[str] | None = None) -> tuple[str, ...]:
    """Put a plain `nn.MultiheadAttention` with equal outputs in place of each layer of this folder.

    Raises InputError before anything is replaced if there is none, `model` itself is one (use
    `to_attention`), or a `CollaborativeAttention` needs more dimensions than a plain head has.

    >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> names = replace_attention(model)
    >>> restore_attention(model), type(model.self_attn).__name__
    (('self_attn',), 'MultiheadAttention')
    """

    def make(attention: HeadCoreAttention | CollaborativeAttention) -> nn.Module:
        return attention.to_attention()

    nothing = "no HeadCoreAttention or CollaborativeAttention: there is nothing to restore"
    return _swap(model, (HeadCoreAttention, CollaborativeAttention), make, layers, nothing)


def _swap(
    model: nn.Module,
    kind: type[nn.Module] | tuple[type[nn.Module], ...],
    make: Callable[..., nn.Module],
    layers: Sequence[str] | None,
    nothing: str,
) -> tuple[str, ...]:
    """Replace modules of a kind; all are made before the first is put in.

    `nothing` ends the sentence "<model> holds" where none is there.
    """
    if isinstance(model, kind):
        raise InputError(
            f"the model is itself a {type(model).__name__} and has no place to be replaced in: "
            f"use from_attention or to_attention"
        )
    places = {
        f"{prefix}.{name}" if prefix else name: (parent, name, child)
        for prefix, parent in model.named_modules()
        for name, child in parent._modules.items()
        if isinstance(child, kind)
    }
    if not places:
        raise InputError(f"{type(model).__name__} holds {nothing}.")
    if layers is not None and not layers:
        raise InputError(f"layers={layers!r} names no layer; leave it out to take all of them.")
    chosen = {
        path: place
        for path, place in places.items()
        if layers is None or any(fnmatchcase(path, pattern) for pattern in layers)
    }
    unmatched = [p for p in layers or () if not any(fnmatchcase(path, p) for path in places)]
    if unmatched:
        raise InputError(
            f"{type(model).__name__} has no layer to replace called {unmatched[0]!r}; there are "
            f"{list(places)[:8]}."
        )
    made: dict[int, nn.Module] = {}
    for path, (_, _, child) in chosen.items():
        if id(child) not in made:
            try:
                made[id(child)] = make(child)
            except InputError as error:
                raise InputError(f"{path}: {error}") from error
    for parent, name, child in chosen.values():
        parent._modules[name] = made[id(child)]
    return tuple(chosen)
