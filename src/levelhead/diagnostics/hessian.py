"""Products of a loss's Hessian with vectors, by differentiating twice.

H v = ∇(∇L · v) (Pearlmutter 1994). For one closure the graph of L and of its gradient is kept, and
a product costs one backward pass. Several closures stand for chunks of one batch whose losses are
averaged: then graphs are built anew for each product and freed chunk by chunk, so that memory is
that of one chunk, at three to four times the time for each product.

Axes. A vector is flat [N]: all trained parameters one after the other. Every forward starts from
the same random states, so that dropout draws the same masks and L is one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from levelhead.base.errors import InputError
from levelhead.diagnostics.undisturbed import (
    RandomState,
    kept_buffers,
    kept_random_state,
    own_casts,
    uncompiled,
)

__all__ = ["Closure", "Closures", "Hessian", "Parameters", "Surface", "surface"]

Closure = Callable[[], Tensor]
Closures = Closure | Iterable[Closure]
Parameters = nn.Module | Iterable[Tensor]


class Surface:
    """The loss as a function of its trained parameters; made by `surface`.

    `params` are the parameters that require a gradient, each once; N their entries in all.
    """

    def __init__(
        self, closures: Sequence[Closure], params: Sequence[Tensor], state: RandomState
    ) -> None:
        self.closures, self.params, self._state = closures, params, state
        self.dtype = torch.float32
        for p in params:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self.device = params[0].device
        self.size = sum(p.numel() for p in params)

    def losses(self) -> Iterator[Tensor]:
        """The loss of each chunk, differentiable, from the same random states each time."""
        self._state.restore()
        with torch.enable_grad():
            for closure in self.closures:
                torch.clear_autocast_cache()  # the weights may have moved since
                loss = closure()
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    raise InputError(
                        f"the closure gave {_shown(loss)}; expected the loss as a tensor of one "
                        "number, not yet differentiated"
                    )
                yield loss.reshape(())

    def value(self) -> float:
        """The loss, averaged over chunks. Raises InputError if it is not finite."""
        # With a graph, though none is needed: without one, fast paths would round otherwise.
        total = sum(float(loss.detach()) for loss in self.losses())
        return _finite(total / len(self.closures))

    def gradient(self) -> tuple[float, list[Tensor]]:
        """(loss, its gradient for each parameter), averaged over chunks."""
        total, found = 0.0, [torch.zeros_like(p) for p in self.params]
        for loss in self.losses():
            total += _finite(float(loss.detach()))
            for mine, more in zip(found, self._first(loss, keep=False), strict=True):
                mine += more / len(self.closures)
        return total / len(self.closures), found

    def _first(self, loss: Tensor, *, keep: bool) -> tuple[Tensor, ...]:
        if not loss.requires_grad:
            raise InputError(
                "the closure's loss depends on none of the parameters: it was detached, computed "
                "under no_grad, or belongs to another model"
            )
        with _twice():
            return torch.autograd.grad(
                loss, self.params, create_graph=keep, allow_unused=True, materialize_grads=True
            )


class Hessian:
    """v [N] → H v [N] in the widest dtype of the parameters (at least float32)."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._kept: list[tuple[Tensor, Tensor]] | None = None
        self._checked = False
        if len(surface.closures) == 1:
            [loss] = surface.losses()
            _finite(float(loss.detach()))
            self._kept = self._pairs(loss)

    def __call__(self, v: Tensor) -> Tensor:
        """H v."""
        if self._kept is not None:
            return self._product(self._kept, v, keep=True)
        total = torch.zeros_like(v)
        for loss in self._surface.losses():
            _finite(float(loss.detach()))
            total += self._product(self._pairs(loss), v, keep=False)
        return total / len(self._surface.closures)

    def _pairs(self, loss: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(parameter, its gradient) for all of them."""
        first = self._surface._first(loss, keep=True)
        if not self._checked:
            _refuse_dead_ends(first)
            self._checked = True
        return list(zip(self._surface.params, first, strict=True))

    def _product(self, pairs: list[tuple[Tensor, Tensor]], v: Tensor, *, keep: bool) -> Tensor:
        # Where the loss is linear the gradient is a constant, with no graph to go back through.
        parts = torch.split(v, [p.numel() for p, _ in pairs])
        bent = [
            (g, part.view(p.shape).to(g))
            for (p, g), part in zip(pairs, parts, strict=True)
            if g.requires_grad
        ]
        if not bent:
            return torch.zeros_like(v)
        with _twice():
            found = torch.autograd.grad(
                [g for g, _ in bent],
                self._surface.params,
                [part for _, part in bent],
                retain_graph=keep,
                allow_unused=True,
                materialize_grads=True,
            )
        return torch.cat([f.reshape(-1).to(v) for f in found])


@contextmanager
def surface(closure: Closures, params: Parameters) -> Iterator[Surface]:
    """The loss over its parameters; random states and buffers are as before on leaving.

    Inside, attention runs on PyTorch's MATH kernel, the only one that can be differentiated twice
    on every device, and compiled modules run eagerly.

    Raises InputError if there is no closure, or no parameter that requires a gradient.
    """
    closures = [closure] if callable(closure) else list(closure)
    if not closures:
        raise InputError("no closure was given; expected one, or one for each chunk of the batch")
    modules = (params,) if isinstance(params, nn.Module) else ()
    given = params.parameters() if isinstance(params, nn.Module) else params
    trained = [p for p in {id(p): p for p in given}.values() if p.requires_grad]
    if not trained:
        raise InputError("none of the parameters requires a gradient: unfreeze those to look at")
    for p in trained:
        if p.is_complex():
            raise InputError(f"a complex parameter {list(p.shape)} was given; expected real ones")
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(uncompiled())
        stack.enter_context(own_casts())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(kept_buffers(*modules))
        state = stack.enter_context(kept_random_state(trained))
        yield Surface(closures, trained, state)


@contextmanager
def _twice() -> Iterator[None]:
    """Errors of an operation without a second derivative, in the user's terms."""
    try:
        yield
    except RuntimeError as error:
        said = " ".join(str(error).split())
        if any(w in said for w in ("derivative for", "once_differentiable", "double backward")):
            raise InputError(
                f"the loss cannot be differentiated twice ({said[:160]}): use attention and layers "
                "in plain PyTorch (eager or sdpa) for this measurement"
            ) from error
        raise


def _refuse_dead_ends(gradients: Iterable[Tensor]) -> None:
    """Functions marked @once_differentiable end the graph in a node that autograd may never run.

    Their second derivative would silently count as zero.
    """
    waiting = [g.grad_fn for g in gradients if g.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name().rpartition("::")[2] == "Error":
            raise InputError(
                "the loss cannot be differentiated twice (one of its functions is marked "
                "@once_differentiable): use layers in plain PyTorch for this measurement"
            )
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        waiting += following


def _finite(loss: float) -> float:
    if not abs(loss) < float("inf"):
        raise InputError(
            f"the closure's loss is {loss}: sharpness is defined where the loss is finite only"
        )
    return loss


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
