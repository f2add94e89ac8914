"""Sharpness-aware minimisation as an ordinary torch optimiser.

One step, for a loss L, weights w and groups g (Foret et al., arXiv:2010.01412, eq. 2 with p = 2;
the adaptive form is Kwon et al., arXiv:2102.11600, eq. 6 without its constant η):

    T = 1, or |w| elementwise when adaptive
    ε_g = ρ_g T² ∇L(w) / ‖T ∇L(w)‖₂       one norm, over all weights of all groups together
    w ← base optimiser's step from w, with the gradient ∇L(w + ε)

With autocast, accumulation, DistributedDataParallel and a GradScaler, all of it inside the closure:

    def closure():
        sam.zero_grad()
        total = torch.zeros((), device=device)
        for i, (x, y) in enumerate(micro_batches):
            last = i + 1 == len(micro_batches)
            with contextlib.nullcontext() if last else ddp.no_sync():
                with torch.autocast("cuda", torch.float16):
                    loss = criterion(ddp(x), y) / len(micro_batches)
                scaler.scale(loss).backward()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        return total / torch.distributed.get_world_size()

    with sam.ascent_pass(ddp):
        loss = sam.step(closure, scaler)

The backward pass of the last micro-batch averages the gradients over the processes, in both passes:
ε and the step are those of the whole batch, and the same in every process, without any word between
them here. The loss is averaged because SAM looks whether it is finite: all processes must take, or
leave out, the second pass together. Leave out what you do not use; bfloat16 needs no scaler.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from levelhead.base.errors import InputError
from levelhead.training.second_pass import Footprint

__all__ = ["SAM"]

Loss = Tensor | float
_OWN_OPTIONS = ("rho", "adaptive")
_NARROW = (torch.float16, torch.bfloat16)


class SAM(Optimizer):
    """Minimise the loss at the worst weights within a radius ρ instead of at the weights.

    `params` is what any torch optimiser takes (tensors, named tensors, or groups; a group may set
    its own `rho` and `adaptive`); `rho` ≥ 0 is the radius in units of the weights, `adaptive`
    makes it relative to each weight; everything else goes to `base_optimizer_class`. Groups,
    state and defaults *are* those of `base_optimizer`, so learning-rate schedulers,
    `add_param_group` and state_dicts work as for the base alone. A state_dict is the base's, also
    when read by a plain base optimiser: `rho` and `adaptive` are settings and stay as constructed.
    `ascent_steps` counts the displacements made. With `maximize=True` the worst weights are those
    of the lowest value, so the displacement goes down. Weights without gradient are left alone.

    Raises InputError for a ρ that is not a number ≥ 0, complex weights, sparse gradients and base
    optimisers that need a closure themselves or have an option of the name `rho` or `adaptive`.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> sam = SAM([w], torch.optim.SGD, rho=0.5, lr=0.1)
    >>> def closure():
    ...     sam.zero_grad()
    ...     loss = 0.5 * w.square().sum()
    ...     loss.backward()
    ...     return loss
    >>> sam.step(closure)          # the loss before the step: (3² + 4²)/2
    tensor(12.5000)
    >>> w.data                     # w - 0.1 (w + 0.5 w/‖w‖), ‖w‖ = 5
    tensor([2.6700, 3.5600])

    Micro-batches are looped over inside the closure, so that both passes see the whole batch:

    >>> def closure():
    ...     sam.zero_grad()
    ...     total = 0.0
    ...     for x, y in [(1.0, 2.0), (0.0, 1.0)]:
    ...         loss = (w[0] * x - y) ** 2 / 2       # divided by the number of micro-batches
    ...         loss.backward()
    ...         total += loss.item()
    ...     return total
    >>> round(sam.step(closure), 3)                  # (0.67² + 1²)/2
    0.724
    """

    # A GradScaler reads this; it is true of `step(closure, scaler)`, and it lets `step` notice
    # that it was called by `scaler.step(sam)`, which knows nothing of a second pass.
    _step_supports_amp_scaling = True

    base_optimizer: Optimizer
    ascent_steps: int

    def __init__(
        self,
        params: Any,
        base_optimizer_class: type[Optimizer],
        rho: float = 0.05,
        adaptive: bool = False,
        **base_kwargs: Any,
    ) -> None:
        _check_base_class(base_optimizer_class)
        base = base_optimizer_class(params, **base_kwargs)
        clash = [name for name in _OWN_OPTIONS if name in base.defaults]
        if clash:
            raise InputError(
                f"{base_optimizer_class.__name__} has an option {clash[0]!r} of its own, which "
                f"would be taken for SAM's; choose another base optimiser."
            )
        base.defaults.update(rho=rho, adaptive=adaptive)
        self.base_optimizer = base
        self.ascent_steps = 0
        self._footprints: list[Footprint] = []
        # Optimizer.__init__ empties the state and groups it shares with the base, then adds the
        # groups again; some bases (Adagrad) have filled their state already.
        state = base.state
        super().__init__(list(base.param_groups), base.defaults)
        base.state = state

    # The base optimiser owns these three; a second copy could only go stale.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the base optimiser, each with `rho` and `adaptive` besides its options."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the base optimiser, per weight; SAM keeps none."""
        return self.base_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The options a group gets when it does not set them."""
        return self.base_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base_optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its own `rho`, `adaptive` and base options where it names them."""
        self.base_optimizer.add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Loss] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Loss:
        """Take one step and return the loss of the first pass (detached; a float as it is).

        `closure` zeroes the gradients, computes the loss, calls backward and returns the loss; it
        is called at w and again at w + ε. All displaced weights are back, bit for bit, before the
        base optimiser steps, also when the second pass raises (then the base does not step). If
        the gradient is zero there is nowhere to go: the second pass is left out and the base steps
        on the first. The same holds if the first loss or the norm is not finite: the weights are
        never displaced by NaN, and the base does with such gradients what it does without SAM;
        look at the returned loss to stop.

        With an enabled `scaler` the closure calls `scaler.scale(loss).backward()` and returns the
        unscaled loss; the gradients of both passes are unscaled here, an inf or NaN in either
        leaves out the update, and `scaler.update()` is called here, once. `scaler.step(sam)`
        raises. Raises InputError without a closure and for sparse gradients.
        """
        self._refuse_calls_from_a_scaler()
        if not callable(closure):
            raise InputError(
                f"SAM.step got {closure!r} instead of a closure; pass a function that zeroes the "
                f"gradients, computes the loss, calls backward and returns the loss."
            )
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        before = [footprint.random_state() for footprint in self._footprints]
        with torch.enable_grad():
            loss = closure()
        if isinstance(loss, Tensor):
            loss = loss.detach()
        first = _Pass(self.param_groups, scaler)
        second = first
        try:
            if first.sound:
                with self._displaced(loss) as moved:
                    if moved:
                        self._second_pass(closure, before)
                        second = _Pass(self.param_groups, scaler)
            if second.sound:
                self._base_step()
        finally:
            if scaler is not None:
                scaler.update()
        return loss

    @contextmanager
    def ascent_pass(self, *models: nn.Module) -> Iterator[SAM]:
        """Within this context the second pass of each `step` leaves no trace in `models`.

        Wrap one step or a whole loop. In the second pass the random states of the first (the CPU's
        and those of the CUDA devices the models are on) are replayed, so that dropout draws the
        same masks; power-iteration steps are frozen (protocol: `training.second_pass`); and all
        buffers of the models, such as running statistics and `num_batches_tracked` of BatchNorm,
        which still normalises with its batch, end as the first pass left them. After the step the
        random states go on as after one pass. Generators of your own, NumPy's and Python's, are not
        replayed. Raises InputError without a module.

        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        >>> sam = SAM(net.parameters(), torch.optim.SGD, lr=0.1)
        >>> def closure():
        ...     sam.zero_grad()
        ...     loss = net(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> with sam.ascent_pass(net):
        ...     loss = sam.step(closure)
        >>> int(net[1].num_batches_tracked)
        1
        """
        if not models or not all(isinstance(model, nn.Module) for model in models):
            raise InputError(
                f"SAM.ascent_pass needs the torch modules the closure runs; got {models!r}."
            )
        self._footprints.append(Footprint(models))
        try:
            yield self
        finally:
            self._footprints.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the base optimiser: nothing in it is SAM's."""
        for pre in self._optimizer_state_dict_pre_hooks.values():
            pre(self)
        state = self.base_optimizer.state_dict()
        for group in state["param_groups"]:
            for name in _OWN_OPTIONS:
                group.pop(name, None)
        for post in self._optimizer_state_dict_post_hooks.values():
            state = post(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of SAM or of a plain base optimiser; `rho`, `adaptive` stay as set."""
        state_dict = state_dict.copy()
        for pre in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre(self, state_dict) or state_dict
        own = [{name: group[name] for name in _OWN_OPTIONS} for group in self.param_groups]
        self.base_optimizer.load_state_dict(state_dict)
        for group, options in zip(self.param_groups, own, strict=True):
            group.update(options)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"base_optimizer": self.base_optimizer, "ascent_steps": self.ascent_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._footprints = []
        super().__setstate__(state)

    def __repr__(self) -> str:
        return f"SAM over {self.base_optimizer!r}"

    @contextmanager
    def _displaced(self, loss: Loss) -> Iterator[bool]:
        """Move the weights to w + ε inside the block; yields whether there was anywhere to go."""
        with torch.no_grad():
            moves, norm = _ascent(self.param_groups)
        moves = [move for move in moves if move.rho != 0.0]
        if not (moves and norm > 0.0 and math.isfinite(norm) and _is_finite(loss)):
            yield False
            return
        weights = [weight for move in moves for weight in move.weights]
        saved = [weight.detach().clone() for weight in weights]
        try:
            with torch.no_grad():
                for move in moves:
                    torch._foreach_add_(move.weights, move.direction, alpha=move.rho / norm)
            # Autocast around the step keeps narrow copies of weights; these are not w + ε.
            torch.clear_autocast_cache()
            del moves, move  # the first gradients need not outlive the second pass's zero_grad
            self.ascent_steps += 1
            yield True
        finally:
            # A copy, not a subtraction: (w + ε) - ε is not w in floating point.
            with torch.no_grad():
                torch._foreach_copy_(weights, saved)
            torch.clear_autocast_cache()

    def _second_pass(self, closure: Callable[[], Loss], before: list[list[Tensor]]) -> None:
        with ExitStack() as stack, torch.enable_grad():
            for footprint, state in zip(self._footprints, before, strict=True):
                stack.enter_context(footprint.replayed(state))
            closure()

    def _base_step(self) -> None:
        """Step the base optimiser with its own hooks; torch's global hooks fire for SAM alone."""
        base = self.base_optimizer
        step: Any = type(base).step
        unhooked = step.__wrapped__ if getattr(step, "hooked", False) else step
        args: tuple[Any, ...] = (base,)
        kwargs: dict[str, Any] = {}
        for pre in base._optimizer_step_pre_hooks.values():
            args, kwargs = pre(base, args, kwargs) or (args, kwargs)
        unhooked(*args, **kwargs)
        for post in base._optimizer_step_post_hooks.values():
            post(base, args, kwargs)
        vars(base)["_opt_called"] = True  # a scheduler built on the base looks for it

    def _refuse_calls_from_a_scaler(self) -> None:
        """`scaler.step(sam)` marks the optimiser with these two attributes, then calls step."""
        marks = [name for name in ("grad_scale", "found_inf") if name in vars(self)]
        for name in marks:
            delattr(self, name)
        if marks:
            raise InputError(
                "scaler.step(sam) cannot run SAM's second pass; call sam.step(closure, scaler) "
                "instead, with a closure that calls scaler.scale(loss).backward()."
            )


class _Pass:
    """What a GradScaler sees of one pass: it unscales an optimiser only once between updates, so
    each pass comes as its own; it calls `step` only if all gradients are finite."""

    def __init__(
        self, param_groups: list[dict[str, Any]], scaler: torch.amp.GradScaler | None
    ) -> None:
        self.param_groups = param_groups
        self.sound = scaler is None
        if scaler is not None:
            scaler.step(self)  # type: ignore[arg-type]

    def step(self) -> None:
        self.sound = True


class _Move(NamedTuple):
    """Weights, the direction T²∇ of their displacement, and ρ with the sign of the ascent."""

    weights: list[Tensor]
    direction: list[Tensor]
    rho: float


def _ascent(param_groups: list[dict[str, Any]]) -> tuple[list[_Move], float]:
    """Directions per group, and ‖T∇‖₂ over all of them (0 when there is no gradient at all)."""
    moves: list[_Move] = []
    norms: list[Tensor] = []
    for group in param_groups:
        weights = [p for p in group["params"] if p.requires_grad and p.grad is not None]
        if not weights:
            continue
        gradients = [_dense(weight.grad) for weight in weights]
        scaled: Any = gradients
        direction: Any = gradients
        if group["adaptive"]:
            size = torch._foreach_abs(_wide(weights))
            scaled = torch._foreach_mul(_wide(gradients), size)
            direction = torch._foreach_mul(scaled, size)
        norms += torch._foreach_norm(_wide(scaled))
        sign = -1.0 if group.get("maximize", False) else 1.0
        moves.append(_Move(weights, direction, sign * float(group["rho"])))
    if not norms:
        return moves, 0.0
    dtype = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    joint = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    return moves, float(torch.linalg.vector_norm(joint))


def _wide(tensors: Any) -> list[Tensor]:
    """Half precision squares to zero or infinity; anything wider stays as it is."""
    return [tensor.float() if tensor.dtype in _NARROW else tensor for tensor in tensors]


def _dense(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        raise InputError(
            f"SAM got a gradient of layout {gradient.layout} for a weight of shape "
            f"{list(gradient.shape)}; it needs dense ones: pass sparse=False to the embedding."
        )
    return gradient


def _is_finite(loss: Any) -> bool:
    if isinstance(loss, Tensor):
        return bool(torch.isfinite(loss).all())
    return not isinstance(loss, (int, float)) or math.isfinite(loss)


def _check_base_class(base: Any) -> None:
    if not (isinstance(base, type) and issubclass(base, Optimizer)) or issubclass(base, SAM):
        raise InputError(
            f"SAM needs the class of a base optimiser, such as torch.optim.AdamW, and its options "
            f"as keywords; got {base!r}."
        )
    arguments = list(inspect.signature(base.step).parameters.values())[1:]
    if any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments):
        raise InputError(
            f"{base.__name__} evaluates the loss itself in every step and cannot be SAM's base; "
            f"choose one that steps on given gradients, such as SGD or AdamW."
        )


def _check_group(group: dict[str, Any]) -> None:
    rho = group["rho"]
    if not isinstance(rho, (int, float)) or not math.isfinite(rho) or rho < 0.0:
        raise InputError(f"SAM got rho={rho!r}; it is a radius: give a finite number ≥ 0.")
    for weight in group["params"]:
        if weight.is_complex():
            raise InputError(
                f"SAM got a complex weight of shape {list(weight.shape)}; it works on real "
                f"weights: split it into real and imaginary parts."
            )
