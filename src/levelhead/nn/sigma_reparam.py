"""σReparam: weight matrices whose spectral norm is a learnable number (Zhai et al., 2303.06296).

    Ŵ = γ W / σ(W),   σ(W) = uᵀ W v, the largest singular value,   γ a learnable scalar

A weight is [rows, columns] = [outputs, inputs] for a Linear, any orientation otherwise: σ is the
same. u [blocks, rows/blocks] and v [blocks, columns] start as the exact singular vectors. Each
training forward of the module that owns the weight takes one power step before it reads the weight,

    u ← W v/‖W v‖,   v ← Wᵀ u/‖Wᵀ u‖,

without gradient. A weight that training reads outside such a forward (by another method, or by a
parent that reads its child's weight) takes one step at the first read with gradients after it has
changed. All other reading, under `no_grad` or again, changes nothing; evaluation takes no step.
σ is differentiated through W with u and v fixed: dŴ = γ/σ (dW − ⟨u vᵀ, dW⟩ W/σ).

**Freezing protocol.** A module that takes power-iteration steps in its forward pass has a boolean
attribute `power_iteration_frozen`; while it is true no such step is taken, and loading a
state_dict leaves the vectors as stored. `SAM.ascent_pass` sets it in the second pass on every
module that has the attribute, whoever wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from levelhead.base.errors import InputError
from levelhead.nn.sigma_targets import Blocks, attention_weights, named_weights
from levelhead.weights.layouts import Layout

__all__ = [
    "SigmaReparam",
    "frozen_power_iteration",
    "remove",
    "remove_sigma_reparam",
    "sigma_reparam",
]

Module = TypeVar("Module", bound=nn.Module)
_NARROW = (torch.float16, torch.bfloat16)
# Attribute of a module with a reparametrised weight: its parameters' order before.
_ORDER = "_order_before_sigma_reparam"


def sigma_reparam(
    module: Module,
    gamma: float | Literal["preserve"] = "preserve",
    names: Sequence[str] = ("weight",),
    *,
    layers: Sequence[str] | Literal["all"] | None = None,
    layout: Layout | None = None,
) -> Module:
    """Replace weights W of `module` by γ W/σ(W), in place, and return the module.

    `gamma="preserve"` starts γ at σ(W): the map is unchanged (bit for bit in evaluation, to
    rounding after a power step); a number starts every γ there, the paper's is 1.0.

    `names` picks the 2-D weights: `"weight"` is that of every Linear-like submodule and the
    projections of every `nn.MultiheadAttention`, with Q, K and V of a joint `in_proj_weight` as
    separate blocks (γ [3]); any other name is a parameter of that name anywhere in `module`, or a
    dotted path to one. With `layers`, names or patterns of attention layers as `weights.layouts`
    finds them ("all": every one; `layout` as there), it is instead the matrices of their queries,
    keys, values and outputs, in transformers' models too; of a fused one Q, K and V are separate
    blocks where they are equally large. Build the optimiser afterwards: γ is a new parameter.
    Weights keep their identity and stay shared where they were shared.

    Recomputation (`torch.utils.checkpoint`) calls modules again: put its backward pass in
    `frozen_power_iteration`.

    Raises InputError if a name matches nothing, for `names` beside `layers`, for a weight that is
    not 2-D, empty, complex, not finite or shared with one that would stay as it is, and for a γ
    that is not positive.

    >>> import torch
    >>> layer = torch.nn.Linear(3, 2, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
    >>> _ = sigma_reparam(layer, gamma=1.0)
    >>> torch.linalg.matrix_norm(layer.weight, 2).item()
    1.0
    >>> layer.parametrizations.weight[0].gamma
    Parameter containing:
    tensor(1., requires_grad=True)
    """
    if gamma != "preserve" and not (
        isinstance(gamma, (int, float)) and math.isfinite(gamma) and gamma > 0.0
    ):
        raise InputError(
            f"sigma_reparam got gamma={gamma!r}; give 'preserve' or a finite number > 0."
        )
    if layers is None:
        targets = named_weights(module, (names,) if isinstance(names, str) else tuple(names))
    else:
        if tuple(names) != ("weight",):
            raise InputError("sigma_reparam got names and layers; give one of them.")
        targets = attention_weights(module, layers, layout)
    callers = {
        id(attention.out_proj): attention
        for attention in module.modules()
        if isinstance(attention, nn.MultiheadAttention)
    }
    made: dict[int, SigmaReparam] = {}
    for target in targets:
        weight = target.weight
        sigma = made.get(id(weight))
        if sigma is None:
            start = 1.0 if gamma == "preserve" else float(gamma)
            sigma = made[id(weight)] = SigmaReparam(weight, start, target.blocks)
        _give_own_class(target.host)
        vars(target.host).setdefault(_ORDER, tuple(target.host._parameters))
        with frozen_power_iteration(sigma):  # torch reads the weight once to check it
            parametrize.register_parametrization(target.host, target.name, sigma)
        sigma.note(weight)
        weights: Any = target.host.parametrizations
        weights[target.name].register_load_state_dict_post_hook(_synchronise_after_load)
        if gamma == "preserve":
            with torch.no_grad():
                sigma.gamma.copy_(sigma.sigma(weight))
        caller = callers.get(id(target.host), target.host)
        if _power_steps not in caller._forward_pre_hooks.values():
            caller.register_forward_pre_hook(_power_steps)
    return module


def remove(module: Module) -> Module:
    """Fold every σReparam of `module` back into plain weights, in place; return the module.

    Each weight becomes, bit for bit, what it was read as: outputs in evaluation are unchanged, and
    so are those in training with the u and v of the last forward. The parameter objects are those
    from before `sigma_reparam`, in their order; γ leaves the module. Raises InputError if there is
    nothing to fold or another parametrisation lies on top.

    >>> import torch
    >>> layer = sigma_reparam(torch.nn.Linear(3, 2), gamma=1.0)
    >>> before = layer.weight.detach()
    >>> torch.equal(remove(layer).weight, before)
    True
    """
    found = [
        (host, name, weights)
        for host in module.modules()
        for name, weights in _reparametrised(host)
    ]
    if not found:
        raise InputError(f"{type(module).__name__} holds no σReparam; there is nothing to remove.")
    for host, name, weights in found:
        if len(weights) != 1:
            raise InputError(
                f"{name!r} of {type(host).__name__} has other parametrisations besides σReparam; "
                f"remove those first."
            )
    with torch.no_grad():
        # All values first: a shared weight must not be folded twice.
        folded = {id(w.original): (w.original, getattr(h, n).detach()) for h, n, w in found}
        for host, name, _ in found:
            _give_own_class(host)
            parametrize.remove_parametrizations(host, name, leave_parametrized=False)
        for weight, value in folded.values():
            weight.copy_(value)
    for host, _, _ in found:
        _restore_order(host)
    for host in module.modules():
        for key in [k for k, hook in host._forward_pre_hooks.items() if hook is _power_steps]:
            del host._forward_pre_hooks[key]
    return module


remove_sigma_reparam = remove


@contextmanager
def frozen_power_iteration(*models: nn.Module) -> Iterator[None]:
    """No module of `models` takes a power step in this context (protocol: top of the module).

    Loading a state_dict inside it keeps the stored u and v, which an exact resume needs; outside,
    u and v become the exact singular vectors of what was loaded.
    """
    modules: list[Any] = [module for model in models for module in model.modules()]
    held = [module for module in modules if hasattr(module, "power_iteration_frozen")]
    was = [module.power_iteration_frozen for module in held]
    try:
        for module in held:
            module.power_iteration_frozen = True
        yield
    finally:
        for module, value in zip(held, was, strict=True):
            module.power_iteration_frozen = value


class SigmaReparam(nn.Module):
    """The map W → γ W/σ(W) of one weight; made by `sigma_reparam`.

    W [rows, columns] may be several matrices (see `Blocks`), each with its own σ and γ: for
    matrices one above the other γ [] or [blocks], u [blocks, rows/blocks], v [blocks, columns].
    While σ is zero W passes unchanged, with its plain gradient (γ preserved from a zero matrix is
    zero, and learns once W has moved).
    """

    gamma: nn.Parameter
    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor, gamma: float = 1.0, blocks: Blocks | int = 1) -> None:
        super().__init__()
        self.blocks = Blocks(blocks) if isinstance(blocks, int) else blocks
        self.power_iteration_frozen = False
        # Which tensor, in which version, u and v have last seen; whether a read of it has already
        # taken the step of the next forward; whether a forward has just taken its step and will
        # read now, so that there is nothing to ask (a device would have to be waited for).
        self._seen = (0, 0)
        self._ahead = False
        self._called = False
        # Once training reads outside a forward: the weight as u and v have last seen it.
        self._outside = False
        self._copy: Tensor | None = None
        count, rows, columns = self.blocks.cut(weight.detach()).shape
        shape = () if count == 1 else (count,)
        start = torch.full(shape, gamma, dtype=weight.dtype, device=weight.device)
        self.gamma = nn.Parameter(start, requires_grad=weight.requires_grad)
        self.register_buffer("u", weight.detach().new_zeros(count, rows))
        self.register_buffer("v", weight.detach().new_zeros(count, columns))

    def forward(self, weight: Tensor) -> Tensor:
        """Return Ŵ [rows, columns], after a power step if training missed one (see the top)."""
        called, self._called = self._called, False
        reads = self._steps() and torch.is_grad_enabled() and not called
        if reads and self._has_changed(weight):
            self._iterate(weight)
            self._ahead = True
        if reads and not self._outside:
            self._outside = True
            self.note(weight)
        sigma = self.sigma(weight)
        # The inner `where` keeps the gradient of the branch not taken finite.
        zero = sigma.abs() < torch.finfo(sigma.dtype).tiny
        ratio = torch.where(zero, 1.0, self.gamma / torch.where(zero, 1.0, sigma))
        return self.blocks.joined(self.blocks.cut(weight) * ratio.reshape(-1, 1, 1), weight.shape)

    def sigma(self, weight: Tensor) -> Tensor:
        """uᵀ W v of each block, [] or [blocks], differentiable in W; computed in float32 or wider.

        It is rounded to W's precision, so that γ = σ gives a ratio of exactly 1.
        """
        stack = _wide(self.blocks.cut(weight))
        # Copies: a power step of a second forward would change what this one's backward needs.
        u, v = self.u.clone().to(stack.dtype), self.v.clone().to(stack.dtype)
        with _as_wide(stack):
            image = (stack @ v.unsqueeze(-1)).squeeze(-1)
        return (u * image).sum(-1).reshape(self.gamma.shape).to(weight.dtype)

    def power_step(self, weight: Tensor) -> None:
        """Take the power step of one forward for W [rows, columns]: in training, unless frozen."""
        if self._steps():
            if not self._ahead or self._has_changed(weight):
                self._iterate(weight)
            self._ahead, self._called = False, True

    @torch.no_grad()
    def synchronise(self, weight: Tensor) -> None:
        """Set u and v to the exact singular vectors of W, if W is finite."""
        if not torch.isfinite(weight).all():
            return
        left, _, right = torch.linalg.svd(_wide(self.blocks.cut(weight)), full_matrices=False)
        self.u.copy_(left[..., :, 0])
        self.v.copy_(right[..., 0, :])
        self.note(weight)

    def note(self, weight: Tensor) -> None:
        """Take u and v to belong to W as it is now."""
        self._seen = (id(weight), weight._version)
        self._copy = weight.detach().clone() if self._outside else None

    def right_inverse(self, value: Tensor) -> Tensor:
        """Take an assigned weight as the new W; its scale is γ's business."""
        self.synchronise(value)
        return value

    def _steps(self) -> bool:
        return self.training and not self.power_iteration_frozen

    def _has_changed(self, weight: Tensor) -> bool:
        known, version = self._seen
        if known == id(weight):
            if version != weight._version or self._copy is None:
                return version != weight._version
            # torch's fused optimisers, and writing through `.data`, leave the version as it is.
            return not torch.equal(weight, self._copy.to(weight))
        self.note(weight)  # of a tensor not met before (a copy of the module's) no past is known
        return False

    @torch.no_grad()
    def _iterate(self, weight: Tensor) -> None:
        stack = _wide(self.blocks.cut(weight))
        with _as_wide(stack):
            v = self.v.to(stack.dtype).unsqueeze(-1)
            self.u.copy_(_unit_or(stack @ v, self.u))
            u = self.u.to(stack.dtype).unsqueeze(-1)
            self.v.copy_(_unit_or(stack.mT @ u, self.v))
        self.note(weight)

    def extra_repr(self) -> str:
        return f"blocks={self.blocks}"


def _wide(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype in _NARROW else weight


def _as_wide(stack: Tensor) -> AbstractContextManager[object]:
    """No autocast: products of what is wide are not narrowed."""
    kind = stack.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _unit_or(column: Tensor, previous: Tensor) -> Tensor:
    """column/‖column‖ [blocks, n]; where that is 0 or NaN, `previous`, or it would stay lost."""
    vector = column.squeeze(-1)
    norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    sound = (norm > torch.finfo(norm.dtype).tiny) & torch.isfinite(norm)
    return torch.where(sound, vector / norm, previous.to(vector.dtype))


def _reparametrised(host: nn.Module) -> list[tuple[str, ParametrizationList]]:
    if not parametrize.is_parametrized(host):
        return []
    lists: Any = host.parametrizations
    return [
        (name, weights)
        for name, weights in lists.items()
        if any(isinstance(step, SigmaReparam) for step in weights)
    ]


def _power_steps(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: one power step for each weight the module is about to read."""
    hosts = [module]
    if isinstance(module, nn.MultiheadAttention):
        hosts.append(module.out_proj)  # read, never called
    for host in hosts:
        for _, weights in _reparametrised(host):
            sigma: Any = weights[0]
            sigma.power_step(weights.original)


def _synchronise_after_load(weights: Any, incompatible_keys: Any) -> None:
    sigma = weights[0]
    if not sigma.power_iteration_frozen:
        sigma.synchronise(weights.original)


def _restore_order(host: nn.Module) -> None:
    """Put the parameters in the order from before: optimisers know theirs by number."""
    own = host._parameters
    order = [name for name in vars(host).pop(_ORDER, ()) if name in own]
    for name in [*order, *(name for name in own if name not in order)]:
        own[name] = own.pop(name)


def _give_own_class(host: nn.Module) -> None:
    """torch keeps a parametrised weight as a property of a class that deep copies share: without
    a class of its own, adding or removing one here would do so in all copies."""
    if parametrize.is_parametrized(host):
        shared = type(host)
        body = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
        host.__class__ = type(shared.__name__, shared.__bases__, body)
