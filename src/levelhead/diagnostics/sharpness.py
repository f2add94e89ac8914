"""Sharpness of a loss at the weights as they are: λ_max of its Hessian, and SAM's rise.

A closure gives the loss as a differentiable tensor, without backward inside. Several closures are
chunks of one batch: their losses are averaged and memory is that of one chunk. Parameters that are
frozen are not looked at; parameters that the loss does not use have a Hessian of zero. If the
closure drops out, all passes draw one mask: what is measured is the sharpness of the loss under
that mask. Weights, `.grad`, buffers and random states are bit for bit as before.

Both numbers depend on the gauge: two settings of the weights with the same function can differ by
any factor. `canonical_sharpness` measures at the balanced gauge.

Two examples. For L = w² the eigenvalue is 2 wherever w is. At w = 1 SAM's rise for ρ = 0.1 is
1.1² - 1² = 0.21.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.diagnostics.hessian import Closures, Hessian, Parameters, Surface, surface
from levelhead.diagnostics.lanczos import RitzPairs, leading
from levelhead.diagnostics.undisturbed import kept_values
from levelhead.weights.balancing import plan_balance
from levelhead.weights.layouts import Layout, match
from levelhead.weights.plan import LayerPlan
from levelhead.weights.write_back import commit

__all__ = [
    "Curvature",
    "Curvatures",
    "Sharpness",
    "canonical_sharpness",
    "largest_eigenvalue",
    "leading_eigenpairs",
    "sam_sharpness",
]


# How many times a random direction's share of the start an earlier vector has.
_EARLIER = 10.0


@dataclass(frozen=True, eq=False)
class Curvature:
    """An eigenvalue of the Hessian and how sure it is.

    Args:
        value: the eigenvalue, in units of the loss over those of the weights squared.
        residual: ‖H v - value·v‖: an eigenvalue lies within this of `value`.
        vector: v of length one, one tensor for each trained parameter, in its shape.
        steps: Hessian-vector products used.
        converged: whether the residual is within the tolerance asked for.
    """

    value: float
    residual: float
    vector: tuple[Tensor, ...]
    steps: int
    converged: bool


@dataclass(frozen=True, eq=False)
class Curvatures:
    """Several eigenpairs, largest first: values and residuals [k], vectors[i] as `Curvature`'s."""

    values: tuple[float, ...]
    residuals: tuple[float, ...]
    vectors: tuple[tuple[Tensor, ...], ...]
    steps: int
    converged: bool


def largest_eigenvalue(
    closure: Closures,
    params: Parameters,
    *,
    tolerance: float = 0.01,
    max_steps: int = 100,
    seed: int = 0,
    start: Sequence[Tensor] | None = None,
    by_magnitude: bool = False,
) -> Curvature:
    """λ_max of the loss's Hessian over `params`, by Lanczos.

    Stops at a residual of `tolerance`·|λ|, confirmed by three more products. Some eigenvalue then
    lies that near, and as a rule far nearer, for the error falls with the square of the residual;
    that it is the largest is not proved, but sure where the random start is not almost orthogonal
    to its vector. At 5 % that often fails: the value can still belong to the next eigenvalues
    (errors of 6 to 11 % were seen on clustered spectra).

    Args:
        closure: gives the loss; or several closures, one for each chunk of the batch, which are
            averaged.
        params: the parameters, or their module.
        max_steps: bound on Hessian-vector products, and on the vectors of N entries in memory. If
            it is reached a LevelheadWarning is given and `converged` is False.
        seed: of the start vector; global random states are not touched.
        start: a vector from an earlier measurement. It is weighed so little (its part is ten times
            a random one's) that another eigenvalue, grown larger since, is still found, and saves
            a product or two; from the vector alone errors of 80 % were seen.
        by_magnitude: look for the eigenvalue of largest magnitude instead, signed.

    Raises InputError for a loss that is not a finite number, does not depend on the parameters or
    cannot be differentiated twice.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> found = largest_eigenvalue(lambda: w[0] ** 2 + 3 * w[1] ** 2, [w])
    >>> round(found.value, 4), found.steps
    (6.0, 2)
    """
    found = leading_eigenpairs(
        closure,
        params,
        1,
        tolerance=tolerance,
        max_steps=max_steps,
        seed=seed,
        start=start,
        by_magnitude=by_magnitude,
    )
    [value], [residual], [vector] = found.values, found.residuals, found.vectors
    return Curvature(value, residual, vector, found.steps, found.converged)


def leading_eigenpairs(
    closure: Closures,
    params: Parameters,
    k: int,
    *,
    tolerance: float = 0.01,
    max_steps: int = 100,
    seed: int = 0,
    start: Sequence[Tensor] | None = None,
    by_magnitude: bool = False,
) -> Curvatures:
    """The k largest eigenvalues of the Hessian with their vectors, orthonormal, by one Lanczos.

    Each has a residual of at most `tolerance`·|its value|. Of exactly equal eigenvalues one copy
    is found. Fewer than k are given where there are fewer parameters. Arguments and errors are
    those of `largest_eigenvalue`.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> found = leading_eigenpairs(lambda: w[0] ** 2 + 3 * w[1] ** 2, [w], 2)
    >>> [round(value, 4) for value in found.values]
    [6.0, 2.0]
    """
    for name, given in (("k", k), ("max_steps", max_steps)):
        if given < 1:
            raise InputError(f"{name} = {given} was given; expected a whole number from 1 up")
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance {tolerance} was given; expected a share between 0 and 1")
    with surface(closure, params) as loss:
        found = leading(
            Hessian(loss),
            _start(loss, seed, start),
            k,
            tolerance=tolerance,
            max_steps=max_steps,
            largest=not by_magnitude,
            generator=torch.Generator().manual_seed(seed + 1),
        )
        vectors = tuple(_in_shapes(row, loss) for row in found.vectors)
    if not found.converged:
        _warn(found, tolerance)
    return Curvatures(
        tuple(found.values.tolist()),
        tuple(found.residuals.tolist()),
        vectors,
        found.steps,
        found.converged,
    )


def sam_sharpness(closure: Closures, params: Parameters, rho: float, *, steps: int = 1) -> float:
    """L(w + ρ g/‖g‖) - L(w): how far the loss rises within ρ, to first order (arXiv 2010.01412).

    With more `steps` the point moves on to w + ρ g'/‖g'‖ with the gradient g' where it stands,
    and the largest loss that was met counts: never less than with fewer steps, never more than
    the true maximum over ‖ε‖ ≤ ρ. Zero where the gradient is zero.

    Args:
        closure, params: as in `largest_eigenvalue`.
        rho: the radius ρ, in units of the weights; one norm over all parameters.

    Raises InputError for a radius that is not positive or a loss that is not finite.

    >>> w = torch.tensor([1.0], requires_grad=True)
    >>> round(sam_sharpness(lambda: (w**2).sum(), [w], 0.1), 4)
    0.21
    """
    if not 0 < rho < float("inf"):
        raise InputError(f"rho = {rho} was given; expected a positive radius")
    if steps < 1:
        raise InputError(f"steps = {steps} was given; expected a whole number from 1 up")
    with surface(closure, params) as loss, kept_values(loss.params):
        origin = [p.detach().clone() for p in loss.params]
        before, gradient = loss.gradient()
        highest = before
        for step in range(steps):
            size = _norm(gradient)
            if size == 0:
                break
            with torch.no_grad():
                for p, w, g in zip(loss.params, origin, gradient, strict=True):
                    p.copy_(w + (rho / size) * g)
            if step + 1 < steps:
                here, gradient = loss.gradient()
            else:
                here = loss.value()
            highest = max(highest, here) if step else here
    return highest - before


@dataclass(frozen=True, eq=False)
class Sharpness:
    """Both numbers at the balanced gauge, and what of the model that gauge covers.

    Args:
        largest_eigenvalue: of the Hessian.
        sam: SAM's rise for radius `rho`.
        balanced: the attention layers that were moved for the measurement.
        left: layers (or "model") that were not or in part, with the reason: for these the
            numbers still depend on the gauge.
    """

    largest_eigenvalue: Curvature
    sam: float
    rho: float
    balanced: tuple[str, ...]
    left: Mapping[str, str]


def canonical_sharpness(
    model: nn.Module,
    closure: Closures,
    *,
    rho: float = 0.05,
    params: Parameters | None = None,
    plans: Sequence[LayerPlan] | None = None,
    layout: Layout | None = None,
    tolerance: float = 0.01,
    max_steps: int = 100,
    seed: int = 0,
    start: Sequence[Tensor] | None = None,
) -> Sharpness:
    """λ_max and SAM's rise with the model's attention weights at the balanced gauge.

    The weights of every attention layer that `weights.layouts` finds are moved in place to the
    shortest point of their orbit (the function stays; see `weights.balancing`), measured there,
    and put back bit for bit, also after an error. Models with the same function then have the same
    sharpness, as far as `left` is empty.

    Args:
        closure: gives the loss of `model`; see `largest_eigenvalue` for it and for the others.
        rho: SAM's radius at that gauge.
        params: by default all of the model's.
        plans: the attention layers, by default what `layouts.match(model, layout=layout)` finds.

    Raises InputError as `largest_eigenvalue` and `sam_sharpness` do.

    >>> attention = nn.MultiheadAttention(4, 2, batch_first=True)
    >>> x = torch.randn(8, 3, 4)
    >>> loss = lambda: attention(x, x, x)[0].square().mean()
    >>> found = canonical_sharpness(attention, loss)
    >>> found.balanced, dict(found.left)
    (('torch_mha',), {})
    """
    plans = match(model, layout=layout).plans if plans is None else plans
    moved = plan_balance(model, plans)
    left = dict(moved.left)
    if not plans:
        left["model"] = "no attention layer was recognised, so the weights stay as they are"
    looked_at = model if params is None else params
    with kept_values(moved.tensors):
        commit(moved.sheets.values())
        top = largest_eigenvalue(
            closure, looked_at, tolerance=tolerance, max_steps=max_steps, seed=seed, start=start
        )
        sam = sam_sharpness(closure, looked_at, rho)
    return Sharpness(top, sam, rho, moved.layers, left)


def _start(loss: Surface, seed: int, given: Sequence[Tensor] | None) -> Tensor:
    """A random unit vector, with a small part of an earlier one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(loss.size, generator=generator, dtype=torch.float32)
    drawn /= torch.linalg.vector_norm(drawn.double())
    start = drawn.to(loss.device, loss.dtype)
    if given is None:
        return start
    if [t.shape for t in given] != [p.shape for p in loss.params]:
        raise InputError(
            f"a start of {len(given)} tensors was given that does not have the shapes of the "
            f"{len(loss.params)} trained parameters: give the vector of an earlier measurement"
        )
    earlier = torch.cat([t.detach().reshape(-1).to(start) for t in given])
    size = torch.linalg.vector_norm(earlier)
    share = _EARLIER / loss.size**0.5
    mixed: Tensor = start + share * earlier / torch.where(size > 0, size, 1)
    return mixed


def _in_shapes(row: Tensor, loss: Surface) -> tuple[Tensor, ...]:
    parts = torch.split(row, [p.numel() for p in loss.params])
    return tuple(part.view(p.shape) for part, p in zip(parts, loss.params, strict=True))


def _norm(parts: Sequence[Tensor]) -> float:
    """Over all tensors, in float64: float32 sums of many squares lose digits."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    size = float(torch.linalg.vector_norm(torch.stack(norms)))
    if not size < float("inf"):
        raise InputError("the gradient of the closure's loss is not finite")
    return size


def _warn(found: RitzPairs, tolerance: float) -> None:
    worst = float((found.residuals / found.values.abs().clamp(min=1e-300)).max())
    warnings.warn(
        f"after {found.steps} Hessian-vector products the residual is {worst:.1%} of the "
        f"eigenvalue, not {tolerance:.1%}: give more max_steps",
        LevelheadWarning,
        stacklevel=4,
    )
