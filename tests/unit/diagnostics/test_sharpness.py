"""Sharpness against dense Hessians, formulas and laws; and that measuring leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.diagnostics.sharpness import (
    canonical_sharpness,
    largest_eigenvalue,
    leading_eigenpairs,
    sam_sharpness,
)
from levelhead.nn.head_core import HeadCoreAttention
from levelhead.nn.samformer import SAMformerNet
from levelhead.weights.gauge import act_on_qk, act_on_vo, random_linear, shift_value_bias
from levelhead.weights.layouts import match, views
from levelhead.weights.write_back import write_view


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def filled(model: nn.Module, scale: float = 0.4) -> nn.Module:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(scale * numbers(*p.shape, seed=i))
    return model


def dense_hessian(loss: Callable[[], Tensor], params: list[Tensor]) -> Tensor:
    """Row by row, from the definition: derivatives of each entry of the gradient."""
    grads = torch.autograd.grad(loss(), params, create_graph=True, allow_unused=True)
    rows = []
    for p, g in zip(params, grads, strict=True):
        for j in range(p.numel()):
            if g is None or not g.requires_grad:
                rows.append(torch.zeros(sum(q.numel() for q in params), dtype=p.dtype))
                continue
            row = torch.autograd.grad(
                g.reshape(-1)[j], params, retain_graph=True, allow_unused=True
            )
            rows.append(
                torch.cat(
                    [
                        (torch.zeros_like(q) if r is None else r).reshape(-1)
                        for q, r in zip(params, row, strict=True)
                    ]
                )
            )
    return torch.stack(rows)


def squares(w: Tensor) -> Tensor:
    return (w**2).sum()


def samformer() -> tuple[nn.Module, Callable[[], Tensor]]:
    net = filled(SAMformerNet(12, 3, width=2, revin=False).double(), 0.3)
    x, y = numbers(16, 3, 12, seed=50), numbers(16, 3, 3, seed=51)
    return net, lambda: nn.functional.mse_loss(net(x), y)


def encoder(dropout: float = 0.0) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = filled(nn.TransformerEncoderLayer(4, 2, 6, dropout, batch_first=True).double())
    x, y = numbers(6, 3, 4, seed=50), numbers(6, 3, 4, seed=51)
    return model, lambda: nn.functional.mse_loss(model(x), y)


def two_layers() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = filled(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), 1.0)
    x, y = numbers(10, 5, seed=50), torch.arange(10) % 3
    return model, lambda: nn.functional.cross_entropy(model(x), y)


@pytest.mark.parametrize("make", [samformer, encoder, two_layers])
def test_eigenvalues_are_those_of_the_dense_hessian(
    make: Callable[[], tuple[nn.Module, Callable[[], Tensor]]],
) -> None:
    model, loss = make()
    params = list(model.parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        dense = dense_hessian(loss, params)
    values = torch.linalg.eigvalsh(dense).flip(0)
    found = largest_eigenvalue(loss, model)
    assert found.converged
    assert found.residual <= 0.01 * found.value
    assert found.value == pytest.approx(float(values[0]), rel=0.01)
    several = leading_eigenpairs(loss, model, 4, tolerance=1e-8, max_steps=400)
    assert several.values == pytest.approx(values[:4].tolist(), rel=1e-7)
    flat = torch.cat([t.reshape(-1) for t in several.vectors[0]])
    assert [t.shape for t in several.vectors[0]] == [p.shape for p in params]
    assert torch.allclose(dense @ flat, values[0] * flat, atol=1e-6 * float(values[0]))
    magnitude = largest_eigenvalue(loss, model, by_magnitude=True, tolerance=1e-6, max_steps=400)
    extreme = values[values.abs().argmax()]
    assert magnitude.value == pytest.approx(float(extreme), rel=1e-5)


def test_chunks_average_to_the_whole_batch() -> None:
    model = filled(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), 1.0)
    x, y = numbers(12, 5, seed=50), numbers(12, 3, seed=51)

    def part(rows: slice) -> Callable[[], Tensor]:
        return lambda: nn.functional.mse_loss(model(x[rows]), y[rows])

    chunks = [part(slice(i, i + 4)) for i in (0, 4, 8)]
    whole = largest_eigenvalue(part(slice(0, 12)), model, tolerance=1e-9)
    found = largest_eigenvalue(iter(chunks), model, tolerance=1e-9)
    assert found.value == pytest.approx(whole.value, rel=1e-9)
    assert sam_sharpness(chunks, model, 0.3) == pytest.approx(
        sam_sharpness(part(slice(0, 12)), model, 0.3), rel=1e-9
    )


def quadratic(*diagonal: float) -> tuple[Tensor, Callable[[], Tensor]]:
    d = torch.tensor(diagonal, dtype=torch.float64)
    w = torch.ones(len(diagonal), dtype=torch.float64, requires_grad=True)
    return w, lambda: 0.5 * (d * w * w).sum()


def test_signs_zero_frozen_unused_and_shared() -> None:
    w, loss = quadratic(-3.0, -1.0)
    assert largest_eigenvalue(loss, [w]).value == pytest.approx(-1.0, rel=1e-6)
    assert largest_eigenvalue(loss, [w], by_magnitude=True).value == pytest.approx(-3.0, rel=1e-6)
    linear = largest_eigenvalue(w.sum, [w])
    assert (linear.value, linear.residual, linear.converged) == (0.0, 0.0, True)
    unused = torch.ones(3, dtype=torch.float64, requires_grad=True)
    frozen = torch.ones(3, dtype=torch.float64)
    found = largest_eigenvalue(loss, [unused, w, w, frozen], by_magnitude=True)
    assert found.value == pytest.approx(-3.0, rel=1e-6)
    assert [t.shape for t in found.vector] == [(3,), (2,)]
    assert not found.vector[0].abs().max() > 1e-8
    # Frozen parameters do not count: the Hessian is that of the others.
    with_frozen = largest_eigenvalue(lambda: loss() + 100 * (frozen**2).sum(), [w, frozen])
    assert with_frozen.value == pytest.approx(-1.0, rel=1e-6)


def test_half_precision_parameters_are_measured_in_float32() -> None:
    w = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    found = largest_eigenvalue(lambda: squares(w.float()), [w])
    assert found.vector[0].dtype == torch.float32
    assert found.value == pytest.approx(2.0, rel=0.01)


def test_an_earlier_vector_does_not_hide_a_larger_eigenvalue() -> None:
    w, loss = quadratic(*[1.0, 1.5], *(0.3 / i for i in range(1, 400)))
    stale = torch.zeros_like(w)
    stale[0] = 1.0
    for seed in range(20):
        found = largest_eigenvalue(loss, [w], start=[stale], seed=seed)
        assert found.value == pytest.approx(1.5, rel=0.01)
    with pytest.raises(InputError, match="does not have the shapes of the 1 trained parameters"):
        largest_eigenvalue(loss, [w], start=[stale, stale])


def test_too_few_steps_warn() -> None:
    model, loss = encoder()
    with pytest.warns(LevelheadWarning, match=r"after 2 Hessian-vector products .* more max_steps"):
        found = largest_eigenvalue(loss, model, tolerance=1e-6, max_steps=2)
    assert (found.steps, found.converged) == (2, False)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda w: w.sum() * float("nan"), "loss is nan"),
        (lambda w: w.sum() * float("inf"), "loss is inf"),
        (lambda w: w * 2, r"gave a tensor of shape \[2\]"),
        (lambda w: 3.0, "gave a float"),
        (lambda w: w.detach().sum(), "depends on none of the parameters"),
    ],
)
def test_losses_that_cannot_be_measured(loss: Callable[[Tensor], Tensor], words: str) -> None:
    w = torch.ones(2, requires_grad=True)
    before = w.detach().clone()
    with pytest.raises(InputError, match=words):
        largest_eigenvalue(lambda: loss(w), [w])
    with pytest.raises(InputError, match=words):
        sam_sharpness(lambda: loss(w), [w], 0.1)
    assert torch.equal(w, before)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


def test_arguments_that_cannot_be_used() -> None:
    w, loss = quadratic(1.0, 2.0)
    frozen = torch.ones(2)
    for call, words in (
        (lambda: largest_eigenvalue([], [w]), "no closure"),
        (lambda: largest_eigenvalue(loss, [frozen]), "none of the parameters requires"),
        (lambda: leading_eigenpairs(loss, [w], 0), "k = 0"),
        (lambda: largest_eigenvalue(loss, [w], tolerance=0), "tolerance 0"),
        (lambda: sam_sharpness(loss, [w], 0.0), r"rho = 0\.0"),
        (lambda: sam_sharpness(loss, [w], 0.1, steps=0), "steps = 0"),
        (
            lambda: largest_eigenvalue(lambda: squares(Once.apply(w)), [w]),
            "differentiated twice",
        ),
    ):
        with pytest.raises(InputError, match=words):
            call()


# ── SAM's rise ──


def test_sam_rise_is_the_formula() -> None:
    w, loss = quadratic(3.0, 0.5)
    gradient = torch.tensor([3.0, 0.5], dtype=torch.float64)
    there = 1 + 0.7 * gradient / gradient.norm()
    expected = 0.5 * float(gradient @ (there**2 - 1))
    assert sam_sharpness(loss, [w], 0.7) == pytest.approx(expected, rel=1e-12)


def test_more_steps_approach_the_maximum_over_the_ball() -> None:
    """On a quadratic the maximum over ‖ε‖ = ρ is found by scanning the circle."""
    w, loss = quadratic(3.0, 0.5)
    angles = torch.linspace(0, 2 * torch.pi, 200_001, dtype=torch.float64)
    at = 1 + 0.7 * torch.stack((angles.cos(), angles.sin()))
    maximum = float((1.5 * at[0] ** 2 + 0.25 * at[1] ** 2).max()) - 1.75
    one, many = sam_sharpness(loss, [w], 0.7), sam_sharpness(loss, [w], 0.7, steps=20)
    assert one < many <= maximum * (1 + 1e-9)
    assert many == pytest.approx(maximum, rel=1e-8)


def test_sam_rise_at_a_critical_point_is_zero() -> None:
    w = torch.zeros(3, requires_grad=True)
    assert sam_sharpness(lambda: squares(w), [w], 0.1) == 0.0


# ── the gauge ──


def regauged(model: nn.Module, seed: int) -> None:
    """Another setting of the weights with the same function."""
    generator = torch.Generator().manual_seed(seed)
    [plan], [view] = match(model).plans, views(model)
    view = act_on_qk(view, random_linear(view.groups, view.d_k, generator, 300.0))
    view = act_on_vo(view, random_linear(view.groups, view.d_v, generator, 300.0))
    if view.v_bias is not None and view.o_bias is not None:
        view = shift_value_bias(view, numbers(*view.v_bias.shape, seed=seed))
        view = replace(view, k_bias=view.k_bias + numbers(*view.k_bias.shape, seed=seed))
    write_view(model, plan, view)


@pytest.mark.parametrize("make", [samformer, encoder])
def test_two_gauges_of_one_function_have_one_canonical_sharpness(
    make: Callable[[], tuple[nn.Module, Callable[[], Tensor]]],
) -> None:
    raw, canonical = [], []
    for seed in (None, 1, 2):
        model, loss = make()
        value = float(loss().detach())
        if seed is not None:
            regauged(model, seed)
            assert float(loss().detach()) == pytest.approx(value, rel=1e-10)
        stored = [p.detach().clone() for p in model.parameters()]
        raw.append((largest_eigenvalue(loss, model).value, sam_sharpness(loss, model, 0.05)))
        found = canonical_sharpness(model, loss, rho=0.05)
        assert not found.left
        assert len(found.balanced) == 1
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), stored, strict=True))
        canonical.append((found.largest_eigenvalue.value, found.sam))
    for pair in canonical[1:]:
        assert pair == pytest.approx(canonical[0], rel=0.01)
    for pair in raw[1:]:
        assert abs(pair[0] / raw[0][0] - 1) > 0.1
        assert abs(pair[1] / raw[0][1] - 1) > 0.1


def test_weights_come_back_after_an_error_too() -> None:
    model, loss = encoder()
    stored = [p.detach().clone() for p in model.parameters()]
    calls = []

    def failing() -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of data")
        return loss()

    with pytest.raises(RuntimeError, match="out of data"):
        canonical_sharpness(model, failing)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), stored, strict=True))


def test_a_model_without_attention_says_so() -> None:
    model, loss = two_layers()
    found = canonical_sharpness(model, loss)
    assert found.left == {
        "model": "no attention layer was recognised, so the weights stay as they are"
    }
    assert found.largest_eigenvalue.value == largest_eigenvalue(loss, model).value


# ── no trace ──


def test_measuring_leaves_no_trace() -> None:
    """Dropout, batch norm and a closure that draws: weights, grads, buffers, random states."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    x = numbers(8, 4, seed=1, dtype=torch.float32)
    seen: list[float] = []

    def loss() -> Tensor:
        noise = random.random() + np.random.rand()  # noqa: NPY002
        found: Tensor = (model(x) + noise).square().mean()
        seen.append(float(found.detach()))
        return found

    loss().backward()
    before = {n: t.detach().clone() for n, t in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    seen.clear()
    first = largest_eigenvalue([loss, loss], model)
    again = largest_eigenvalue([loss, loss], list(model.parameters()))
    sam_sharpness(loss, model, 0.1, steps=3)
    canonical_sharpness(model, loss)
    assert first.value == again.value
    assert len(set(seen[: 2 * first.steps : 2])) == 1
    assert seen[0] != seen[1]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert random.getstate() == states[2]


def test_a_compiled_model_is_measured_as_it_was_written() -> None:
    model, loss = two_layers()
    expected = largest_eigenvalue(loss, model).value
    compiled = torch.compile(model, backend="eager")
    x, y = numbers(10, 5, seed=50), torch.arange(10) % 3
    compiled(x)
    found = largest_eigenvalue(lambda: nn.functional.cross_entropy(compiled(x), y), compiled)
    assert found.value == pytest.approx(expected, rel=1e-12)


def test_an_autocast_around_it_keeps_no_stale_weights() -> None:
    """Autocast remembers narrow copies of weights: of those before they were displaced."""
    model = two_layers()[0].float()
    x, y = numbers(10, 5, seed=50).float(), torch.arange(10) % 3

    def narrow() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(model(x).float(), y)

    expected = sam_sharpness(narrow, model, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        found = sam_sharpness(lambda: nn.functional.cross_entropy(model(x).float(), y), model, 0.5)
    assert expected > 0.01
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_head_core_stays_where_it_is_and_is_named() -> None:
    layer = HeadCoreAttention(8, 2, ranks=(1, 3, 5), batch_first=True)
    x = torch.randn(4, 3, 8)
    found = canonical_sharpness(layer, lambda: layer(x, x, x)[0].square().mean())
    assert found.balanced == ()
    assert "computed from others" in found.left["torch_mha"]
