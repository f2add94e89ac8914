"""The attention layers of a live model, for constraints that write into their weights.

    model → plans (layouts) → LiveLayer: view, new view → stored parameters, optimiser's memory

Axes as in `weights.attention_view`. A model wrapped by DistributedDataParallel or torch.compile is
looked at without its wrapper, and layers are called by their names inside.

Two examples. `LiveLayers().of(model)` is the list of layers of a model, whose plans are found once
and again when a shape has changed. `reset_state(optimizer, [weight])` makes Adam forget its moments
of that weight: its next step is that of a new parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adagrad, Optimizer

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.layouts import LayerPlan, Layout, NothingMatched, Skip, match
from levelhead.weights.write_back import Placement, placement, write_view

__all__ = ["LiveLayer", "LiveLayers", "broadcast", "refusals", "reset_state", "unwrapped"]

_QK = ("q", "k", "q_bias", "k_bias")
_ALL = (*_QK, "v", "o", "v_bias")


@dataclass(eq=False)
class LiveLayer:
    """One attention layer: its plan, and the model's tensors by every name they have.

    `aliases` are other names of the module, and layers that read the very same tensors.
    """

    plan: LayerPlan
    tensors: Mapping[str, Tensor]
    aliases: tuple[str, ...] = ()
    _placed: Placement | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The name that its AttentionView has."""
        return self.plan.name or self.plan.family

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name (of a bare layer also its path, "") and its aliases."""
        return tuple(dict.fromkeys((self.name, self.plan.name, *self.aliases)))

    def view(self) -> AttentionView:
        """Its weights as they are now, detached."""
        return self.plan.apply(lambda name: self.tensors[name].detach())

    def placed(self) -> Placement:
        """Where its weights are stored; found once."""
        if self._placed is None:
            self._placed = placement(self.plan)
        return self._placed

    def frozen(self, fields: Sequence[str] = _ALL) -> str | None:
        """The first stored parameter of these fields that does not train, or None."""
        for name in (n for f in fields for n in self.placed().stored(f)):
            if not self.tensors[name].requires_grad:
                return name
        return None

    def write(self, view: AttentionView) -> tuple[str, ...]:
        """Write a view back; which tensors changed. Raises InputError where that cannot be."""
        return write_view(self.tensors, self.plan, view, self.placed())


class LiveLayers:
    """Finds the layers of a model, and remembers plans until a shape or the model changes.

    `layers` are names or patterns, None all; `layout` and `arguments` as in `layouts.views`.
    `skipped` is what looks like attention in the model last seen but cannot be read, and why.
    """

    def __init__(
        self,
        layers: Sequence[str] | None = None,
        layout: Layout | None = None,
        **arguments: object,
    ) -> None:
        self._layers = layers
        self._layout = layout
        self._arguments = arguments
        self._known: dict[str, tuple[int, ...]] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._plans: list[LayerPlan] = []
        self._placed: dict[str, Placement] = {}
        self._aliases: dict[str, tuple[str, ...]] = {}
        self.skipped: tuple[Skip, ...] = ()

    def of(self, model: nn.Module) -> list[LiveLayer]:
        """The layers of `model`, one for each set of tensors.

        Raises InputError for sharded parameters and weights behind a parametrisation, and
        NothingMatched for a model without attention.
        """
        model = unwrapped(model)
        tensors: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
        tensors |= dict(model.named_parameters(remove_duplicate=False))
        self._refuse(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        # Models of the same shapes may have other numbers of heads.
        known = None if self._model is None else self._model()
        if model is not known or shapes != self._known:
            self._plans, self._placed = self._find(model, shapes), {}
            self._aliases = _aliases(model, [plan.name for plan in self._plans])
            self._known, self._model = shapes, weakref.ref(model)
        found: dict[tuple[int, ...], LiveLayer] = {}
        for plan in self._plans:
            key = tuple(id(tensors[name]) for name in plan.reads)
            if key in found:
                others = (plan.name, *self._aliases[plan.name])
                found[key].aliases = tuple(dict.fromkeys((*found[key].aliases, *others)))
            else:
                placed = self._placed.get(plan.name)
                found[key] = LiveLayer(plan, tensors, self._aliases[plan.name], placed)
        return list(found.values())

    def keep(self, layers: Iterable[LiveLayer]) -> None:
        """Remember where the weights of these layers are stored."""
        self._placed |= {x.plan.name: x._placed for x in layers if x._placed is not None}

    def _find(self, model: nn.Module, stored: Collection[str]) -> list[LayerPlan]:
        found = match(model, layout=self._layout, **self._arguments)
        computed = {
            plan.name: Skip(plan.name, f"{missing} is computed from other parameters, not stored")
            for plan in found.plans
            if (missing := next((name for name in plan.reads if name not in stored), None))
        }
        plans = [plan for plan in found.plans if plan.name not in computed]
        skipped = (*computed.values(), *found.skipped)
        if not plans:
            reason = f" ({skipped[0]})" if skipped else ""
            raise NothingMatched(
                f"no attention layer was recognised in this {type(model).__name__}{reason}: "
                f"describe its names in a layout"
            )
        if self._layers is None:
            self.skipped = skipped
            return plans
        from_names = {plan.name or plan.family: plan for plan in plans}
        wanted: set[str] = set()
        for pattern in self._layers:
            named = {name for name in from_names if fnmatchcase(name, pattern)}
            if not named:
                raise InputError(f"no layer is called {pattern!r}; there are {list(from_names)}.")
            wanted |= named
        self.skipped = ()
        return [plan for name, plan in from_names.items() if name in wanted]

    @staticmethod
    def _refuse(tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if hasattr(tensor, "placements"):
                raise InputError(
                    f"{name} is a DTensor, of which this process holds a part; constraints act on "
                    f"whole weights: use DistributedDataParallel, or gather the weights first."
                )
            if "parametrizations." in name:
                raise InputError(
                    f"{name} is behind a parametrisation, so its layer has no weights to write to; "
                    f"fold it first (σReparam: levelhead.remove_sigma_reparam)."
                )


def _aliases(model: nn.Module, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The other names of the modules that have these names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    by_module: dict[int, list[str]] = {}
    for name, module in modules.items():
        by_module.setdefault(id(module), []).append(name)
    own = {name: by_module[id(modules[name])] if name in modules else [] for name in names}
    return {name: tuple(n for n in own[name] if n != name) for name in names}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def broadcast(model: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Give every process the tensors of the first one, if `model` is DistributedDataParallel.

    All compute the same, but on unlike processors not to the last bit, and replicas must not drift.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
        source = torch.distributed.get_global_rank(group, 0)
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), source, group)


def reset_state(optimizer: Optimizer, weights: Iterable[Tensor]) -> list[Tensor]:
    """Make `optimizer` forget these weights; those of which it had a state are returned.

    Their entries are removed, as they are before a parameter's first step. Adagrad, which fills its
    state when it is built, gets its initial values; LBFGS, whose history is of all weights at once,
    forgets everything.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.Adam([weight])
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> len(reset_state(optimizer, [weight])), len(optimizer.state)
    (1, 0)
    """
    known = [weight for weight in weights if optimizer.state.get(weight)]
    base = getattr(optimizer, "base_optimizer", optimizer)
    if isinstance(base, LBFGS):
        trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        affected = [weight for weight in weights if id(weight) in trained]
        if affected:
            optimizer.state.clear()
        return affected
    start = {
        id(weight): group.get("initial_accumulator_value", 0.0)
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    for weight in known:
        if isinstance(base, Adagrad):
            state = optimizer.state[weight]
            state["step"].zero_()
            state["sum"].fill_(start[id(weight)])
        else:
            del optimizer.state[weight]
    return known


def refusals(refused: Sequence[Skip]) -> str:
    """The end of a report's sentence: how many layers were refused, and why the first one."""
    if not refused:
        return ""
    return f"; {len(refused)} refused ({refused[0]})"
