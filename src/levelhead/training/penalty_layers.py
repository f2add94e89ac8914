"""The attention layers of a live model, found once and read anew at every call.

    model → names and shapes → plans (once);   plans × live tensors → AttentionViews (each call)

A tensor that a parametrisation computes (σReparam, weight norm, a low-rank adapter written as one)
is read under its plain name, as the module itself reads it, so gradients reach what it is computed
from; so are weights that a module multiplies out (`plain_weights` of `nn.head_core`). Layers that
share all their weights are one layer, counted once.

Two examples. `LiveLayers(nn.MultiheadAttention(8, 2))` has one layer. A model whose twelve blocks
are one module (ALBERT) has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.checkpoints import open_weights
from levelhead.weights.folding import fold_input_norm
from levelhead.weights.layouts import Layout, match, views
from levelhead.weights.plan import LayerPlan
from levelhead.weights.settings import Settings
from levelhead.weights.stored import Weights

__all__ = ["LiveLayers"]

_PARAMETRISED = "parametrizations"


class LiveLayers:
    """Attention layers of `model`; `views()` are theirs with the weights of now, on the tape.

    Args:
        model: a module; wrapped models (DDP) do as well.
        layers: positions, names or patterns of names; None: all that are found.
        layout: a family, a mapping or a TOML file for models that no built-in row knows.
        fold: whether the norm in front is folded into the weights that read it.
        settings: what the model's config does not say: heads, kv_heads, head_dim, ….

    `names` are the layers' module paths, `skipped` what looks like attention but is not read.
    Raises NothingMatched if there is no layer, InputError for a wrong argument.

    >>> live = LiveLayers(nn.MultiheadAttention(8, 2))
    >>> live.names, live.views()[0].q.requires_grad
    (('torch_mha',), True)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Sequence[int | str] | None = None,
        layout: Layout | None = None,
        fold: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"a {type(model).__name__} was given; expected a torch module")
        if isinstance(layers, int | str):
            layers = (layers,)
        self.model, self.fold = model, fold
        self._owners = _owners(model)
        weights = self._weights()
        given = dict(settings or {})
        with torch.no_grad():
            chosen = {v.name for v in views(weights, layers, layout, **given)}
        found = match(weights, layout=layout, **given)
        self.skipped = tuple(str(skip) for skip in found.skipped)
        self._plans = self._distinct([p for p in found.plans if (p.name or p.family) in chosen])
        if not self._plans:
            raise InputError("every layer that was found holds values that are not finite")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, as `AttentionView.name`."""
        return tuple(plan.name or plan.family for plan in self._plans)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the layers' modules in `model`; "" is the model itself."""
        return tuple(plan.name for plan in self._plans)

    def views(self) -> list[AttentionView]:
        """The layers as they are now; folded if that was asked for."""
        return list(self._views())

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the layers are read from and that can learn, each once."""
        found: dict[int, nn.Parameter] = {}
        for plan in self._plans:
            for owner, attribute in (self._owner(name) for name in plan.reads):
                hosts = [getattr(owner, attribute, None)]
                if _multiplied(owner, attribute):
                    hosts = list(owner.parameters(recurse=False))
                elif is_parametrized(owner, attribute):
                    hosts = list(_parametrisation(owner, attribute).parameters())
                parameters = [p for p in hosts if isinstance(p, nn.Parameter) and p.requires_grad]
                found |= {id(p): p for p in parameters}
        return list(found.values())

    def _views(self) -> Iterator[AttentionView]:
        for number, plan in enumerate(self._plans):
            plan = self._plans[number] = self._current(plan)
            view = plan.apply(self._get)
            yield fold_input_norm(view) if self.fold else view

    # ── private ──

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that stands at a name's path now (it may have been replaced), and the rest."""
        path, attribute = self._owners[name]
        owner: nn.Module | None = self.model
        for part in path.split(".") if path else ():
            # As `get_submodule` goes, which takes ten times as long: this is asked at every step.
            owner = None if owner is None else owner._modules.get(part)
        if owner is None:
            raise InputError(f"the model has no {name} any more: make the penalty anew")
        # Of a class: a parametrised weight is a property, which asking for would compute.
        held = attribute in owner._parameters or attribute in owner._buffers
        held = held or _multiplied(owner, attribute)
        if not held and not hasattr(type(owner), attribute):
            raise InputError(f"the model has no {name} any more: make the penalty anew")
        return owner, attribute

    def _get(self, name: str) -> Tensor:
        tensor = _read(*self._owner(name))
        if hasattr(tensor, "device_mesh"):
            raise InputError(
                f"{name} is a DTensor, of which this process holds a part: penalties need whole "
                "weights; use DDP, or gather the layer first"
            )
        return tensor

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        with torch.no_grad():  # a parametrisation takes no training step for this
            found = {name: _read(*self._owner(name)) for name in self._owners}
        return {n: tuple(t.shape) for n, t in found.items() if isinstance(t, Tensor)}

    def _weights(self) -> Weights:
        return replace(open_weights(self.model), shapes=self._shapes(), get=self._get)

    def _distinct(self, plans: list[LayerPlan]) -> list[LayerPlan]:
        """The first of all plans that read the very same attention weights."""
        seen: dict[tuple[int, ...], LayerPlan] = {}
        for plan in plans:
            own = [n for n in plan.reads if n.startswith(f"{plan.name}.") or not plan.name]
            seen.setdefault(tuple(self._identity(n) for n in own), plan)
        return list(seen.values())

    def _identity(self, name: str) -> int:
        owner, attribute = self._owner(name)
        if is_parametrized(owner, attribute):
            owner, attribute = _parametrisation(owner, attribute), "original"
        return id(getattr(owner, attribute, owner))

    def _current(self, plan: LayerPlan) -> LayerPlan:
        """The plan, or one for fewer heads of the same width if heads were pruned since."""
        stored = [(n, *self._owner(n)) for n in plan.reads]
        if all(
            is_parametrized(m, a) or _multiplied(m, a) or getattr(m, a).shape == plan.shapes[n]
            for n, m, a in stored
        ):
            return plan
        shapes = self._shapes()
        width = plan.sizes.d_k, plan.sizes.d_v
        old = plan.settings
        for heads in range(plan.sizes.heads, 0, -1):
            said = Settings(
                old.config,
                where=old.where,
                arguments={**old.arguments, "heads": heads},
                before=old.before,
                side=old.side,
            )
            try:
                found = replace(plan, shapes=shapes, settings=said)
            except InputError:
                continue
            if (found.sizes.d_k, found.sizes.d_v) == width:
                return found
        raise InputError(
            f"{plan.name}: its weights have changed their shape, and not by whole heads of width "
            f"{width[0]}: make the penalty anew"
        )


def _parametrisation(owner: nn.Module, attribute: str) -> nn.Module:
    return cast(nn.ModuleDict, owner.parametrizations)[attribute]


def _multiplied(owner: nn.Module, attribute: str) -> bool:
    """Whether a module has this weight only multiplied out, in `plain_weights`."""
    return attribute not in owner._parameters and hasattr(owner, "plain_weights")


def _read(owner: nn.Module, attribute: str) -> Tensor:
    plain: Any = owner
    found = plain.plain_weights() if _multiplied(owner, attribute) else {}
    tensor: Tensor = found[attribute] if found else getattr(owner, attribute)
    return tensor


def _owners(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Where each parameter or buffer lives: full name → (path of the module, attribute)."""
    found: dict[str, tuple[str, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if _PARAMETRISED in path.split("."):
            continue
        names = [*module._parameters, *module._buffers]
        if is_parametrized(module):
            names += list(cast(nn.ModuleDict, module.parametrizations))
        start = f"{path}." if path else ""
        with torch.no_grad():  # a parametrisation takes no training step for this
            if callable(plain := getattr(module, "plain_weights", None)):
                # Its own names are factors; those with a dot are parameters of modules below.
                names = [name for name in plain() if "." not in name]
            found |= {f"{start}{n}": (path, n) for n in names if _read(module, n) is not None}
    return found
