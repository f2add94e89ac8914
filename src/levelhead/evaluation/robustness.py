"""Accuracy when inputs are disturbed: by noise, and by the worst a small change can do.

Axes. x [b, …] are inputs that can be moved (pixels, embeddings), y [b] or [b, n] their classes; a
model is any function x → logits [b, C] or [b, n, C]. A change δ of one example has the size
‖δ‖_∞ = max |δ| or ‖δ‖₂ over all its numbers. Functions look at the model's answers and slopes;
its weights get no gradients.

Two examples. Of a linear model with two classes and margin m = y (w·x + b), the worst change of
size ε takes ε‖w‖₁ (∞-norm) or ε‖w‖₂ off m, and one signed step finds it. A class that no change of
size ε can move has the same accuracy before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError

__all__ = ["Norm", "accuracy", "fgsm", "macro_f1", "noise_accuracy", "pgd"]

Model = Callable[[Tensor], Tensor]
Norm = Literal["linf", "l2"]
_TINY = 1e-12


def accuracy(model: Model, x: Tensor, y: Tensor) -> float:
    """Share of classes that are right, over examples (and tokens).

    >>> x, y = torch.tensor([1.0, -2.0]), torch.tensor([1, 1])
    >>> accuracy(lambda x: torch.stack([-x, x], -1), x, y)
    0.5
    """
    with torch.no_grad():
        return float((_logits(model, x, y).argmax(-1) == y).double().mean())


def macro_f1(predicted: Tensor, y: Tensor, classes: int) -> float:
    """Mean over the classes that occur of F1 = 2 tp/(2 tp + fp + fn), of equal shapes.

    >>> macro_f1(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), 3)
    0.7333333333333334
    """
    if predicted.shape != y.shape or not y.numel():
        raise InputError(
            f"classes {list(predicted.shape)} and {list(y.shape)} were given; expected equal shapes"
        )
    pairs = torch.bincount((classes * y + predicted).flatten(), minlength=classes**2)
    table = pairs.view(classes, classes).double()
    found, seen = table.sum(0), table.sum(1)
    kept = found + seen > 0
    return float((2 * table.diagonal()[kept] / (found + seen)[kept]).mean())


def noise_accuracy(
    model: Model,
    x: Tensor,
    y: Tensor,
    level: float,
    *,
    draws: int = 3,
    limits: tuple[float, float] | None = None,
    seed: int = 0,
) -> float:
    """Mean accuracy over `draws` of x + level·ε with ε standard normal, cut to `limits`.

    The noise is drawn on the CPU from `seed`, so that it is the same on every device. Raises
    InputError for a negative level or fewer than one draw.

    >>> x, y = torch.tensor([5.0, -5.0]), torch.tensor([1, 0])
    >>> noise_accuracy(lambda x: torch.stack([-x, x], -1), x, y, 0.1)
    1.0
    """
    _positive(level=level)
    if not is_whole(draws):
        raise InputError(f"draws={draws!r} was given; expected a whole number of at least 1")
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        noise = torch.randn(x.shape, generator=draw, dtype=x.dtype).to(x.device)
        found.append(accuracy(model, _cut(x + level * noise, limits), y))
    return sum(found) / draws


def fgsm(
    model: Model,
    x: Tensor,
    y: Tensor,
    radius: float,
    *,
    limits: tuple[float, float] | None = None,
) -> Tensor:
    """x + radius·sign ∂loss/∂x [b, …]: the fast gradient sign method.

    The loss is the cross-entropy of y, summed over examples. `limits`: least and largest value an
    input can have. Raises InputError for a negative radius and for logits that do not fit y.
    Source: Goodfellow, Shlens & Szegedy (ICLR 2015), section 4.

    >>> x, y = torch.tensor([1.0, -2.0]), torch.tensor([1, 0])
    >>> fgsm(lambda x: torch.stack([-x, x], -1), x, y, 0.5)
    tensor([ 0.5000, -1.5000])
    """
    _positive(radius=radius)
    return _cut(x + radius * _slope(model, x, y).sign(), limits)


def pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    radius: float,
    *,
    steps: int = 10,
    step: float | None = None,
    norm: Norm = "linf",
    limits: tuple[float, float] | None = None,
    seed: int | None = None,
) -> Tensor:
    """The change of size ≤ radius found by `steps` projected ascents of the loss: x' [b, …].

    `step` is 2.5·radius/steps by default. It starts at x, or with `seed` at a random point of the
    ball. Of the points it comes by, each example keeps the one with the largest loss, x itself
    included, so that the attack never helps the model. Raises InputError as `fgsm`, and for
    another norm or fewer than one step. Source: Madry et al. (ICLR 2018), eq. 3.

    >>> x, y = torch.tensor([1.0, -2.0]), torch.tensor([1, 0])
    >>> pgd(lambda x: torch.stack([-x, x], -1), x, y, 0.5)
    tensor([ 0.5000, -1.5000])
    """
    _positive(radius=radius)
    if norm not in ("linf", "l2"):
        raise InputError(f"norm {norm!r} was given; expected 'linf' or 'l2'")
    if not is_whole(steps):
        raise InputError(f"steps={steps!r} was given; expected a whole number of at least 1")
    pace = 2.5 * radius / steps if step is None else step
    best, worst = x.detach().clone(), _losses(model, x, y)
    at = best.clone()
    if seed is not None:
        at = _cut(_within(at + _start(x, radius, norm, seed), x, radius, norm), limits)
    for _ in range(steps):
        slope = _slope(model, at, y)
        move = slope.sign() if norm == "linf" else slope / _sizes(slope).clamp_min(_TINY)
        at = _cut(_within(at + pace * move, x, radius, norm), limits)
        losses = _losses(model, at, y)
        better = losses > worst
        worst = torch.where(better, losses, worst)
        best = torch.where(_like(better, x), at, best)
    return best


# ── private ──


def _positive(**given: float) -> None:
    for name, value in given.items():
        if not value >= 0:
            raise InputError(f"{name}={value!r} was given; expected a number of at least 0")


def _logits(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    if logits.shape[:-1] != y.shape:
        raise InputError(
            f"the model gave logits {list(logits.shape)} for classes {list(y.shape)}; expected "
            "one more axis, the classes"
        )
    return logits


def _losses(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each example [b], its tokens summed."""
    with torch.no_grad():
        return _cross_entropy(_logits(model, x, y), y)


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    found = functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return found.view(len(y), -1).sum(1)


def _slope(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """∂ Σ loss/∂x [b, …]."""
    with torch.enable_grad():
        at = x.detach().clone().requires_grad_()
        loss = _cross_entropy(_logits(model, at, y), y).sum()
        return torch.autograd.grad(loss, at)[0]


def _start(x: Tensor, radius: float, norm: Norm, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if norm == "linf":
        uniform = torch.rand(x.shape, generator=draw, dtype=x.dtype).to(x.device)
        return radius * (2 * uniform - 1)
    normal = torch.randn(x.shape, generator=draw, dtype=x.dtype).to(x.device)
    share = torch.rand(len(x), generator=draw, dtype=x.dtype).to(x.device)
    # Uniform in the ball of k numbers: the radius is the k-th root of a uniform share.
    share = share ** (1.0 / max(x[0].numel(), 1))
    return radius * _like(share, x) * normal / _sizes(normal).clamp_min(_TINY)


def _within(at: Tensor, x: Tensor, radius: float, norm: Norm) -> Tensor:
    """The point of the ball around x that is nearest to `at`."""
    change = at - x
    if norm == "linf":
        return x + change.clamp(-radius, radius)
    return x + change * (radius / _sizes(change).clamp_min(_TINY)).clamp(max=1.0)


def _sizes(change: Tensor) -> Tensor:
    """‖δ‖₂ of each example, with axes to multiply by."""
    return _like(change.flatten(1).norm(dim=1) if change.ndim > 1 else change.abs(), change)


def _like(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (x.ndim - 1))


def _cut(x: Tensor, limits: tuple[float, float] | None) -> Tensor:
    return x if limits is None else x.clamp(*limits)
