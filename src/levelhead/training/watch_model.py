"""A live model as the watcher sees it: the module itself, its weights by name, its layers.

Wrappers (DistributedDataParallel, DataParallel, torch.compile, activation checkpointing) are taken
off, and so are their pieces of names. A weight that a module computes (a parametrisation, the older
weight and spectral norms, a linear layer with low-rank adapters) stands under the name it would
have as a parameter, with the value that the next forward pass uses. Reading changes nothing: no
power iteration is taken, no gradient is recorded.

Two examples. Behind `sigma_reparam` the weight "q_proj.weight" is γ W/σ(W), although the parameter
is "q_proj.parametrizations.weight.original". A layer with adapters has W + s·B·A, also while B is
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from levelhead.base.errors import InputError
from levelhead.training.second_pass import frozen_power_iteration
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.checkpoints import open_weights
from levelhead.weights.layouts import LayerPlan, Layout, NothingMatched, find_layers, views
from levelhead.weights.settings import ALIASES, Settings

__all__ = ["LiveLayers", "bare_module", "compiled_module", "layer_name", "refuse_unreadable"]

Shape = tuple[int, ...]

# What wrappers inside a model add to the names of parameters.
_PIECES = ("_orig_mod.", "_checkpoint_wrapped_module.")
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")
_PACKED = ("Linear8bitLt", "Linear4bit", "Params4bit", "Int8Params", "QuantLinear", "WQLinear")
_COUNTS = ("heads", "kv_heads", "head_dim")
_HEADS = {"heads", *ALIASES["heads"]}
_FLOAT8 = tuple(str(t) for n in dir(torch) if n.startswith("float8") and (t := getattr(torch, n)))


# ── what can be watched ──


def bare_module(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile.

    >>> net = nn.Linear(2, 2)
    >>> bare_module(nn.DataParallel(net)) is net
    True
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"watch was given a {type(model).__name__}: give it a torch module")
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, wrappers):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def compiled_module(model: nn.Module) -> nn.Module:
    """The bare module with what torch.compile put directly around it: hooks of that are dropped."""
    bare = bare_module(model)
    while model is not bare and model._modules.get("_orig_mod") is not bare:
        inner = model._modules.get("_orig_mod", model._modules.get("module"))
        assert isinstance(inner, nn.Module)
        model = inner
    return model


def refuse_unreadable(model: nn.Module) -> None:
    """Raises InputError for weights that no process holds as plain numbers.

    That is sharded ones (FSDP, DTensor), quantised ones, and those of lazy modules before their
    first forward pass.
    """
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & set(_SHARDED):
            raise _sharded(path or type(module).__name__)
        if kinds & set(_PACKED) or type(module).__module__.startswith("torch.ao.nn.quantized"):
            raise _quantised(path, type(module).__name__)
    for name, weight in model.named_parameters():
        kinds = {kind.__name__ for kind in (*type(weight).__mro__, *type(weight.data).__mro__)}
        if isinstance(weight, UninitializedParameter):
            raise InputError(
                f"{name} has no shape yet: run one forward pass before the model is watched"
            )
        if "DTensor" in kinds or "FlatParameter" in kinds:
            raise _sharded(name)
        dtype = str(weight.dtype)
        narrow = dtype in _FLOAT8 or dtype in ("torch.int8", "torch.uint8")
        if narrow or kinds & set(_PACKED) or _wraps_others(weight.data):
            raise _quantised(name, f"{type(weight.data).__name__} of {dtype}")


def _wraps_others(tensor: Any) -> bool:
    """Whether the numbers lie in other tensors, as torchao's quantised ones do."""
    return is_traceable_wrapper_subclass(tensor)


def _sharded(where: str) -> InputError:
    return InputError(
        f"{where} is sharded over processes (FSDP, DTensor), and no process holds whole weights: "
        "watch a DistributedDataParallel model, or inspect a gathered checkpoint"
    )


def _quantised(where: str, what: str) -> InputError:
    return InputError(
        f"{where} is quantised ({what}), and its numbers lie in scales and codes: watch the model "
        "in float32, bfloat16 or float16"
    )


# ── weights by name ──


@dataclass(frozen=True)
class _Weight:
    """One weight: how its value is read, its shape, and the names of the parameters behind it."""

    read: Callable[[], Tensor]
    shape: Shape
    behind: tuple[str, ...]


def _weights(model: nn.Module) -> dict[str, _Weight]:
    """Every weight and buffer of a model under the name it is known by."""
    found: dict[str, _Weight] = {}
    for name, tensor in (
        *model.named_buffers(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ):
        found[name] = _Weight(lambda tensor=tensor: tensor, tuple(tensor.shape), (name,))  # type: ignore[misc]
    for path, module in model.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for name, read, below in _computed(module):
            behind = tuple(n for n in found if n.startswith(tuple(f"{start}{b}" for b in below)))
            shape = _shape_of(module, name, read)
            for gone in behind:
                found.pop(gone)
            found[start + name] = _Weight(read, shape, behind)
    return found


def _computed(module: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor], tuple[str, ...]]]:
    """(name, how to read it, beginnings of the names behind it) of weights a module computes."""
    if parametrize.is_parametrized(module):
        held: Any = module.parametrizations
        for name in held:
            yield name, _parametrised(module, name), (f"parametrizations.{name}.",)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            parts: tuple[str, ...] = (f"{hook.name}_g", f"{hook.name}_v")
            yield hook.name, lambda hook=hook: hook.compute_weight(module), parts  # type: ignore[misc]
        elif isinstance(hook, SpectralNorm):
            parts = (f"{hook.name}_orig", f"{hook.name}_u", f"{hook.name}_v")
            yield hook.name, lambda hook=hook: hook.compute_weight(module, False), parts  # type: ignore[misc]
    yield from _multiplied_out(module)
    base: Any = getattr(module, "base_layer", None)
    if isinstance(base, nn.Module) and hasattr(module, "lora_A") and hasattr(module, "lora_B"):
        yield "weight", lambda: _with_adapters(module), ("base_layer.weight", "lora_")
        bias = getattr(base, "bias", None)
        if isinstance(bias, Tensor):
            yield "bias", lambda: bias, ("base_layer.bias",)


def _multiplied_out(
    module: nn.Module,
) -> Iterator[tuple[str, Callable[[], Tensor], tuple[str, ...]]]:
    """Weights of known names that a module (a low-rank head core) multiplies out of its factors."""
    plain: Any = getattr(module, "plain_weights", None)
    if not callable(plain):
        return
    with torch.no_grad():
        names = tuple(plain())
    own = [name for name, _ in module.named_parameters()]
    factors = tuple(name for name in own if name not in names)
    for name in names:
        if name not in own:
            yield name, lambda name=name: plain()[name], factors  # type: ignore[misc]


def _parametrised(module: nn.Module, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        # A spectral norm takes its power steps in training mode only.
        held: Any = module.parametrizations
        parts = [part for part in held[name].modules() if part.training]
        try:
            for part in parts:
                part.training = False
            with frozen_power_iteration(held[name]):
                value: Tensor = held[name]()
            return value
        finally:
            for part in parts:
                part.training = True

    return read


def _with_adapters(module: nn.Module) -> Tensor:
    """W + Σ s·B·A over the active adapters of a linear layer, as in LoRA (arXiv 2106.09685)."""
    layer: Any = module
    weight: Tensor = layer.base_layer.weight
    if getattr(layer, "merged", False):
        return weight
    for name, down, up in _adapters(layer):
        if name is not None and hasattr(layer, "get_delta_weight"):
            weight = weight + layer.get_delta_weight(name).to(weight)
            continue
        scale = getattr(layer, "scaling", 1.0)
        scale = scale[name] if isinstance(scale, Mapping) else scale
        weight = weight + (up @ down * scale).to(weight)
    return weight


def _adapters(layer: Any) -> Iterator[tuple[str | None, Tensor, Tensor]]:
    """(name, A [r, in], B [out, r]) of the adapters in use; None for the name of a single one."""
    if not isinstance(layer.lora_A, nn.ModuleDict | nn.ParameterDict):
        yield None, _matrix(layer.lora_A), _matrix(layer.lora_B)
        return
    active = getattr(layer, "active_adapters", None) or list(layer.lora_A.keys())
    for name in [active] if isinstance(active, str) else active:
        if name in layer.lora_A:
            yield name, _matrix(layer.lora_A[name]), _matrix(layer.lora_B[name])


def _matrix(part: Any) -> Tensor:
    matrix: Tensor = part if isinstance(part, Tensor) else part.weight
    return matrix


def _shape_of(module: nn.Module, name: str, read: Callable[[], Tensor]) -> Shape:
    base = getattr(module, "base_layer", None)
    if isinstance(base, nn.Module) and isinstance(held := getattr(base, name, None), Tensor):
        return tuple(held.shape)
    with torch.no_grad():
        return tuple(read().shape)


# ── layers ──


class LiveLayers:
    """The attention layers of a live model, planned once and again when shapes have changed.

    Args:
        model: the bare module.
        layout, arguments: as for `weights.layouts.match`.

    Raises InputError for a wrong layout or argument, and for heads that contradict the num_heads of
    a module. `changed` holds a sentence for every time that
    shapes changed (heads that were pruned), and is emptied by whoever reads it.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.layout = layout
        self.arguments = dict(arguments or {})
        self.plans: tuple[LayerPlan, ...] = ()
        self.skipped: tuple[str, ...] = ()
        self.changed: list[str] = []
        self._weights: dict[str, _Weight] = {}
        self._real: dict[str, str] = {}
        self._scan()
        self._plan()

    def _scan(self) -> None:
        with torch.no_grad():
            real = _weights(self.model)
        self._weights = {_plain_name(name): weight for name, weight in real.items()}
        self._real = {}
        for path, _ in self.model.named_modules(remove_duplicate=False):
            self._real.setdefault(_plain_name(path), path)  # the outermost of a wrapped part

    def _plan(self, heads: Mapping[str, Mapping[str, int]] | None = None) -> None:
        opened = open_weights(self.model)
        attributes = {_plain_name(path): dict(v) for path, v in opened.attributes.items()}
        arguments = self.arguments
        if heads:  # what the user said of them once holds no longer
            arguments = {n: value for n, value in arguments.items() if n not in _COUNTS}
        for path, counts in (heads or {}).items():
            known = attributes.get(path, {})
            live = any(name in known for name in ("num_heads", "n_head", "n_heads"))
            attributes[path] = known if live else {**counts, **known}
        settings = Settings(opened.config, where=opened.config_where, arguments=arguments)
        plans, skipped = find_layers(
            self.shapes, settings, layout=self.layout, attributes=attributes
        )
        self.plans = tuple(plans)
        self.skipped = tuple(str(skip) for skip in skipped)
        if heads is None:
            self._refuse_contradiction()

    def _refuse_contradiction(self) -> None:
        """Arguments stand before attributes, but a module that is at hand knows its heads."""
        for plan in self.plans if _HEADS & self.arguments.keys() else ():
            module = self.model.get_submodule(self._real.get(plan.name, plan.name))
            own = getattr(module, "num_heads", None)
            if isinstance(own, int) and own != plan.sizes.heads:
                raise InputError(
                    f"heads={plan.sizes.heads} was given, but {layer_name(plan)} "
                    f"({type(module).__name__}) has num_heads={own}: leave heads out"
                )

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of all weights by name."""
        return {name: weight.shape for name, weight in self._weights.items()}

    def refuse_none(self) -> None:
        """Raises NothingMatched (or InputError with the reason) if no layer was found."""
        if not self.plans:
            opened = replace(open_weights(self.model), shapes=self.shapes)
            for _ in views(opened, layout=self.layout, **self.arguments):
                break
            raise NothingMatched(f"no attention layer was recognised in {opened.where}")

    def refresh(self) -> None:
        """Look at the names and shapes again; plan again if a layer's have changed."""
        before = self.shapes
        self._scan()
        after = self.shapes
        if after == before:
            return
        old = {plan.name: plan for plan in self.plans}
        counts = {name: _new_counts(plan, before, after) for name, plan in old.items()}
        pruned = any(
            counts[n] != {"heads": p.sizes.heads, "kv_heads": p.sizes.groups}
            for n, p in old.items()
        )
        self._plan(counts if pruned else None)
        new = {plan.name: plan for plan in self.plans}
        for name in sorted(old.keys() | new.keys()):
            was, now = old.get(name), new.get(name)
            if was is None or now is None:
                self.changed.append(f"{name} {'was added' if was is None else 'is gone'}")
            elif was.sizes != now.sizes:
                self.changed.append(
                    f"{name} changed from {was.sizes.heads} to {now.sizes.heads} heads"
                )

    @property
    def names(self) -> list[str]:
        """Names of the layers, as their views have them."""
        return [layer_name(plan) for plan in self.plans]

    @property
    def stored_plans(self) -> tuple[LayerPlan, ...]:
        """Plans of the layers whose weights are all parameters or buffers of their own names."""
        return tuple(
            plan
            for plan in self.plans
            if all(self._weights[name].behind == (name,) for name in plan.reads)
        )

    def module_path(self, layer: str) -> str:
        """The path of a layer's module in the bare model, wrappers' pieces included."""
        paths = {layer_name(plan): plan.name for plan in self.plans}
        return self._real.get(paths.get(layer, layer), layer)

    def parameters(self) -> dict[str, list[str]]:
        """Layer → names of the parameters behind its weights, also behind computed ones.

        A parameter with several names has the one that `named_parameters` gives it.
        """
        once = {id(p): name for name, p in self.model.named_parameters()}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        return {
            layer_name(plan): [
                once[id(every[name])]
                for read in plan.reads
                for name in self._weights[read].behind
                if name in every
            ]
            for plan in self.plans
        }

    def view(self, plan: LayerPlan) -> AttentionView:
        """The layer as it is now; without gradients.

        Raises InputError for a tensor that holds no plain numbers.
        """
        with torch.no_grad():
            return plan.apply(lambda name: self._weights[name].read().detach())


def layer_name(plan: LayerPlan) -> str:
    """A layer's name as its view has it: the module's path, or the family's where that is empty."""
    return plan.name or plan.family


def _plain_name(name: str) -> str:
    for piece in _PIECES:
        name = name.replace(piece, "")
    return name.removesuffix("._orig_mod").removesuffix("._checkpoint_wrapped_module")


def _new_counts(
    plan: LayerPlan, before: Mapping[str, Shape], after: Mapping[str, Shape]
) -> dict[str, int]:
    """Heads and groups of a layer, also if its weights changed shape and heads kept their width."""
    counts = {"heads": plan.sizes.heads, "kv_heads": plan.sizes.groups}
    ratios = []
    for name in plan.reads:
        if name not in after or len(after[name]) != len(before[name]):
            return counts
        pairs = zip(after[name], before[name], strict=True)
        ratios.append(next((new / old for new, old in pairs if new != old), 1.0))
    if all(ratio == 1.0 for ratio in ratios):
        return counts
    matrices = [r for n, r in zip(plan.reads, ratios, strict=True) if len(before[n]) > 1]
    first = next(ratio for ratio in ratios if ratio != 1.0)
    counts["heads"] = round(plan.sizes.heads * first)
    if all(ratio == first for ratio in matrices):
        counts["kv_heads"] = round(plan.sizes.groups * first)
    return counts
