"""Functionals of head similarity: gradients, edge cases, and the trap they replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.invariants.heads import (
    coherence,
    entropy_rank,
    head_gram,
    log_det,
    normalised,
    nuclear_ratio,
    participation_loss,
    participation_ratio,
)
from levelhead.tensors.multilinear import unfold
from levelhead.tensors.tucker import tucker
from levelhead.weights.attention_view import AttentionView
from oracles import invariants as twin
from oracles.layers import layer

FUNCTIONALS: dict[str, Callable[[Tensor], Tensor]] = {
    "coherence": coherence,
    "participation ratio": participation_ratio,
    "participation ratio of C": lambda g: participation_ratio(normalised(g)),
    "participation loss": participation_loss,
    "entropy rank": entropy_rank,
    "entropy rank of C": lambda g: entropy_rank(normalised(g)),
    "log det": log_det,
    "nuclear ratio": nuclear_ratio,
    "nuclear ratio of C": lambda g: nuclear_ratio(normalised(g)),
}
every_functional = pytest.mark.parametrize("name", FUNCTIONALS)


def collapsed(noise: float = 0.0, h: int = 6) -> AttentionView:
    """h copies of one head, with relative noise."""
    view = layer(0, h=h)
    random = torch.Generator().manual_seed(1)

    def copies(t: Tensor) -> Tensor:
        drawn = torch.randn(t.shape, generator=random, dtype=t.dtype)
        return t[:1].expand_as(t) * (1 + noise * drawn)

    return replace(view, q=copies(view.q), k=copies(view.k), v=copies(view.v), o=copies(view.o))


def orthogonal(h: int = 4, d_k: int = 2) -> AttentionView:
    eye = torch.eye(h * d_k, dtype=torch.float64).reshape(h, d_k, h * d_k)
    return AttentionView(q=eye, k=eye, v=eye, o=eye.mT)


def two_groups() -> AttentionView:
    """Three copies each of two orthogonal heads."""
    view = orthogonal(2, 2)
    rows = [0, 0, 0, 1, 1, 1]
    return AttentionView(q=view.q[rows], k=view.k[rows], v=view.v[rows], o=view.o[rows])


def slopes(functional: Callable[[Tensor], Tensor], view: AttentionView) -> tuple[Tensor, Tensor]:
    q, k = view.q.clone().requires_grad_(), view.k.clone().requires_grad_()
    value = functional(head_gram(replace(view, q=q, k=k)))
    to_q, to_k = torch.autograd.grad(value, (q, k))
    return to_q, to_k


# ── values ──


@pytest.mark.parametrize(
    ("view", "coherent", "heads"),
    [
        (orthogonal(), 0.0, 4.0),
        (collapsed(), 1.0, 1.0),
        (two_groups(), 0.4, 2.0),
        (layer(0, h=6, d=64, d_k=8), None, None),
    ],
    ids=["orthogonal", "collapsed", "two groups", "random"],
)
def test_known_arrangements(view: AttentionView, coherent: float | None, heads) -> None:
    g = head_gram(view)
    c = normalised(g)
    if coherent is None:
        assert float(coherence(g)) < 0.02
        assert float(participation_ratio(c)) > 5.5
        return
    assert float(coherence(g)) == pytest.approx(coherent, abs=1e-12)
    assert float(participation_ratio(c)) == pytest.approx(heads, abs=1e-10)
    assert float(entropy_rank(c)) == pytest.approx(heads, abs=1e-8)
    assert float(nuclear_ratio(c)) == pytest.approx(heads / len(c), abs=0.01)
    loss = 1 - (heads - 1) / (len(c) - 1)
    assert float(participation_loss(c)) == pytest.approx(loss, abs=1e-10)
    if coherent == 0.0:
        assert float(log_det(g)) == pytest.approx(0.0, abs=1e-12)


def test_one_head_and_dead_heads() -> None:
    one = head_gram(layer(h=1))
    assert float(coherence(one)) == 0.0
    assert float(participation_loss(one)) == 0.0
    assert float(participation_ratio(one)) == pytest.approx(1.0)
    assert float(entropy_rank(one)) == pytest.approx(1.0)
    view = orthogonal()
    q = view.q.clone()
    q[2] = 0
    g = head_gram(replace(view, q=q))
    assert normalised(g).diagonal().tolist() == pytest.approx([1, 1, 0, 1], abs=1e-15)
    assert float(participation_ratio(g)) == pytest.approx(3.0)
    assert float(entropy_rank(g)) == pytest.approx(3.0, abs=1e-6)
    assert float(coherence(g)) == 0.0
    assert float(log_det(g)) == pytest.approx(0.0, abs=1e-12)
    for functional in FUNCTIONALS.values():
        nothing = functional(torch.zeros(4, 4, dtype=torch.float64))
        assert bool(nothing.isfinite())


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="'qk', 'ov' or 'both'"):
        head_gram(layer(), "kq")  # type: ignore[arg-type]
    for function in (coherence, participation_ratio, entropy_rank, log_det, nuclear_ratio):
        with pytest.raises(InputError, match=r"expected \[h, h\]"):
            function(torch.ones(2, 3))
    for function in (log_det, nuclear_ratio):
        with pytest.raises(InputError, match="positive"):
            function(torch.eye(2), eps=0.0)


# ── gradients ──


def test_the_gradient_of_coherence_is_the_closed_form() -> None:
    view = layer(3, h=5, d_k=3)
    expected = twin.coherence_gradient(view.q.numpy(), view.k.numpy())
    for found, closed in zip(slopes(coherence, view), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), closed, rtol=2e-12, atol=1e-15)


@every_functional
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    view = layer(3, h=3, d_k=2, d=4)

    def f(q: Tensor, k: Tensor) -> Tensor:
        return FUNCTIONALS[name](head_gram(replace(view, q=q, k=k)))

    inputs = view.q.clone().requires_grad_(), view.k.clone().requires_grad_()
    assert torch.autograd.gradcheck(f, inputs, atol=1e-6)


@every_functional
@pytest.mark.parametrize(
    "view",
    [collapsed(), collapsed(1e-4), orthogonal(), two_groups()],
    ids=["collapsed", "nearly collapsed", "orthogonal", "two groups"],
)
def test_gradients_are_finite_and_gauge_invariant_everywhere(name: str, view) -> None:
    """T8, and the Noether identity (∂f/∂q) qᵀ = k (∂f/∂k)ᵀ; 0 at exact collapse."""
    to_q, to_k = slopes(FUNCTIONALS[name], view)
    assert bool(to_q.isfinite().all())
    assert bool(to_k.isfinite().all())
    mu = to_q @ view.q.mT - view.k @ to_k.mT
    size = float(to_q.norm() * view.q.norm()) + 1e-12
    assert float(mu.norm()) < 1e-9 * max(size, 1e-3)


@pytest.mark.parametrize(
    "name", ["coherence", "entropy rank of C", "log det", "nuclear ratio of C"]
)
def test_exact_collapse_is_a_saddle_and_near_collapse_is_not(name: str) -> None:
    at, near = slopes(FUNCTIONALS[name], collapsed())[0], slopes(FUNCTIONALS[name], collapsed(1e-4))
    assert float(at.norm()) < 1e-6 * float(near[0].norm()) + 1e-9
    assert float(near[0].norm()) > 1e-6


def test_log_det_escapes_collapse_where_coherence_hardly_moves() -> None:
    near = collapsed(1e-4)
    sizes = {n: float(slopes(f, near)[0].norm()) for n, f in FUNCTIONALS.items()}
    assert sizes["log det"] > 30 * sizes["coherence"]
    assert sizes["nuclear ratio of C"] > 30 * sizes["coherence"]


@every_functional
def test_scale_free_functionals_do_not_pull_on_scales(name: str) -> None:
    if name in ("participation ratio", "participation loss", "entropy rank", "nuclear ratio"):
        return  # of G: each head's size counts
    view = layer(3, h=4)
    to_q, _ = slopes(FUNCTIONALS[name], view)
    per_head = (to_q * view.q).sum((1, 2)).abs().max()
    assert float(per_head) < 1e-12 + 1e-12 * float(to_q.norm())


@pytest.mark.parametrize("name", ["entropy rank", "nuclear ratio"])
def test_second_derivatives_are_an_error_and_not_zero(name: str) -> None:
    g = head_gram(layer()).requires_grad_()
    (slope,) = torch.autograd.grad(FUNCTIONALS[name](g), g, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


# ── the trap ──


@pytest.mark.parametrize(
    "view",
    [layer(0, h=6), collapsed(0.01), two_groups()],
    ids=["random", "collapsed", "two groups"],
)
def test_orthonormality_of_a_tucker_factor_says_nothing(view: AttentionView) -> None:
    """‖UᵀU - I‖² of HOOI's head factor is zero for every layer, and has no gradient."""
    raw = view.head_tensor()
    for x in (raw, view.qk.dense()):
        rank = min(2, len(x))
        u = tucker(x, (rank, *x.shape[1:])).factors[0]
        assert float((u.mT @ u - torch.eye(rank, dtype=u.dtype)).square().sum()) < 1e-20
    x = layer(0, h=6).head_tensor().requires_grad_()
    u = torch.linalg.svd(unfold(x, 0), full_matrices=False).U
    penalty = (u.mT @ u - torch.eye(6, dtype=u.dtype)).square().sum()
    (slope,) = torch.autograd.grad(penalty, x)
    assert float(slope.norm()) < 1e-20
    assert float(penalty.detach()) < 1e-20


def test_as_a_free_parameter_it_is_a_property_of_the_parametrisation() -> None:
    x = layer(0, h=4).head_tensor()
    fit = tucker(x, x.shape)
    a = torch.eye(4, dtype=x.dtype) + 0.3 * torch.randn(
        4, 4, generator=torch.Generator().manual_seed(0), dtype=x.dtype
    )
    core = torch.einsum("ab,brmc->armc", torch.linalg.inv(a), fit.core)
    other = replace(fit, core=core, factors=(fit.factors[0] @ a, *fit.factors[1:]))
    assert other.error(x) < 1e-13
    u = other.factors[0]
    assert float((u.mT @ u - torch.eye(4, dtype=u.dtype)).square().sum()) > 0.1
