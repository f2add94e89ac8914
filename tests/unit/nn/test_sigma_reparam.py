"""σReparam against exact singular values, and its life as a parametrisation."""

from __future__ import annotations

import copy
import doctest
import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import levelhead.nn.sigma_reparam
from levelhead.base.errors import InputError
from levelhead.nn.sigma_reparam import (
    SigmaReparam,
    frozen_power_iteration,
    remove,
    remove_sigma_reparam,
    sigma_reparam,
)
from levelhead.training.sam import SAM
from oracles import sigma as oracle


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def linear(rows: int = 4, columns: int = 6, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False, dtype=torch.float64)
    layer.weight.data.copy_(torch.tensor(draw(rows, columns, seed=seed)))
    return layer


def step_of(layer: nn.Module, name: str = "weight") -> SigmaReparam:
    return layer.parametrizations[name][0]  # type: ignore[index, return-value, union-attr]


def original(layer: nn.Module, name: str = "weight") -> nn.Parameter:
    return layer.parametrizations[name].original  # type: ignore[index, return-value, union-attr]


def read(layer: nn.Module, name: str = "weight") -> np.ndarray:
    return getattr(layer, name).detach().numpy().copy()


class Raw(nn.Module):
    """Matrices held as bare parameters, one of them read twice per forward, one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.tensor(draw(6, 3, seed=1)))
        self.key = nn.Parameter(torch.tensor(draw(6, 3, seed=2)))
        self.bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.head = linear(2, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ self.query) @ (x @ self.key).mT
        return self.head(torch.softmax(scores, -1) @ x + self.bias @ (self.query @ self.query.mT))


# -- the map -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5), (1, 7), (7, 1)])
@pytest.mark.parametrize("gamma", [1.0, 0.3])
def test_the_weight_is_gamma_over_the_spectral_norm(shape: tuple[int, int], gamma: float) -> None:
    layer = linear(*shape)
    w = read(layer)
    assert sigma_reparam(layer, gamma=gamma) is layer
    np.testing.assert_allclose(read(layer), oracle.reparametrised(w, gamma), rtol=1e-12)
    np.testing.assert_allclose(oracle.spectral_norm(read(layer)), gamma, rtol=1e-12)
    x = torch.tensor(draw(3, shape[1]))
    expected = x.numpy() @ oracle.reparametrised(w, gamma).T
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_preserve_keeps_the_map_exactly(dtype: torch.dtype) -> None:
    layer = linear().to(dtype)
    x = torch.tensor(draw(3, 6)).to(dtype)
    before, weight = layer(x), layer.weight.detach().clone()
    sigma_reparam(layer, gamma="preserve").eval()
    assert layer.weight.dtype == dtype
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer(x), before)
    exact = oracle.spectral_norm(weight.double().numpy())
    precision = torch.finfo(dtype).eps
    np.testing.assert_allclose(step_of(layer).gamma.item(), exact, rtol=2 * precision + 1e-12)
    layer.train()
    torch.testing.assert_close(layer(x), before, rtol=8 * precision, atol=8 * precision)


def test_gamma_is_one_learnable_scalar_and_the_weight_keeps_its_identity() -> None:
    layer = linear()
    weight = layer.weight
    sigma_reparam(layer, gamma=1.0)
    assert original(layer) is weight
    assert step_of(layer).gamma.shape == ()
    assert [name for name, _ in layer.named_parameters()] == [
        "parametrizations.weight.original",
        "parametrizations.weight.0.gamma",
    ]
    frozen = linear()
    frozen.weight.requires_grad_(False)
    sigma_reparam(frozen)
    assert not any(p.requires_grad for p in frozen.parameters())


def test_gradients_equal_the_formula() -> None:
    layer = sigma_reparam(linear(), gamma=0.7)
    w, back = original(layer).detach().numpy(), draw(4, 6, seed=5)
    u, v = step_of(layer).u[0].numpy(), step_of(layer).v[0].numpy()
    (layer.weight * torch.tensor(back)).sum().backward()
    expected_w, expected_gamma = oracle.gradient(w, 0.7, u, v, back)
    np.testing.assert_allclose(original(layer).grad.numpy(), expected_w, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(step_of(layer).gamma.grad.item(), expected_gamma, rtol=1e-12)


def test_gradients_equal_finite_differences_of_the_exact_norm() -> None:
    layer = sigma_reparam(linear(3, 4), gamma=0.7)

    def exact(w: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return gamma * w / torch.linalg.matrix_norm(w, 2)

    def ours(w: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        names = ["parametrizations.weight.original", "parametrizations.weight.0.gamma"]
        # Identity in, so that the output is Ŵᵀ.
        eye = torch.eye(4, dtype=torch.float64)
        return torch.func.functional_call(layer, dict(zip(names, (w, gamma), strict=True)), eye).mT

    w = original(layer).detach().clone().requires_grad_()
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    layer.eval()
    jacobians = zip(
        torch.autograd.functional.jacobian(ours, (w, gamma)),
        torch.autograd.functional.jacobian(exact, (w, gamma)),
        strict=True,
    )
    for got, expected in jacobians:
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)

    def synchronised(w: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        step_of(layer).synchronise(w)
        return ours(w, gamma)

    assert torch.autograd.gradcheck(synchronised, (w, gamma))


# -- power steps ---------------------------------------------------------------------------------


def test_one_power_step_per_training_forward_and_none_for_reading() -> None:
    layer = sigma_reparam(linear(), gamma=0.7)
    sigma = step_of(layer)
    original(layer).data.copy_(torch.tensor(draw(4, 6, seed=9)))
    w, v = original(layer).detach().numpy(), sigma.v[0].numpy().copy()
    for _ in range(3):
        layer(torch.zeros(1, 6, dtype=torch.float64))
        u, v = oracle.power_step(w, v)
        np.testing.assert_allclose(sigma.u[0].numpy(), u, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(sigma.v[0].numpy(), v, rtol=1e-12, atol=1e-14)
        for _ in range(2):
            np.testing.assert_allclose(read(layer), oracle.estimated(w, 0.7, u, v), rtol=1e-12)
    layer.eval()(torch.zeros(1, 6, dtype=torch.float64))
    np.testing.assert_allclose(sigma.v[0].numpy(), v, rtol=1e-12, atol=1e-14)


def test_power_steps_converge_to_the_spectral_norm() -> None:
    layer = sigma_reparam(linear(), gamma=1.0)
    original(layer).data.copy_(torch.tensor(draw(4, 6, seed=9)))
    for _ in range(300):
        layer(torch.zeros(1, 6, dtype=torch.float64))
    np.testing.assert_allclose(oracle.spectral_norm(read(layer)), 1.0, rtol=1e-10)


def test_a_weight_read_twice_takes_one_step_per_forward() -> None:
    net = sigma_reparam(Raw(), gamma=1.0, names=("query", "key", "weight"))
    original(net, "query").data.copy_(torch.tensor(draw(6, 3, seed=9)))
    w, v = original(net, "query").detach().numpy(), step_of(net, "query").v[0].numpy().copy()
    net(torch.tensor(draw(5, 6)))
    u, v = oracle.power_step(w, v)
    np.testing.assert_allclose(step_of(net, "query").u[0].numpy(), u, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(step_of(net, "query").v[0].numpy(), v, rtol=1e-12, atol=1e-14)


def change(layer: nn.Module, seed: int) -> np.ndarray:
    """Replace W as an optimiser would; return the new one."""
    with torch.no_grad():
        original(layer).copy_(torch.tensor(draw(4, 6, seed=seed)))
    return original(layer).detach().numpy().copy()


def change_silently(layer: nn.Module, seed: int) -> np.ndarray:
    """The same through `.data`, which leaves the version of the tensor as it is."""
    original(layer).data.copy_(torch.tensor(draw(4, 6, seed=seed)))
    return original(layer).detach().numpy().copy()


@pytest.mark.parametrize("change", [change, change_silently])
def test_a_weight_read_outside_a_forward_takes_one_step_per_change(
    change: Callable[[nn.Module, int], np.ndarray],
) -> None:
    layer = sigma_reparam(linear(), gamma=0.7)
    sigma = step_of(layer)
    start = sigma.v.clone()
    assert layer.weight.requires_grad  # read, but unchanged since the exact start
    assert torch.equal(sigma.v, start)
    v = start[0].numpy().copy()
    for seed in (11, 12):
        w = change(layer, seed)
        with torch.no_grad():
            assert torch.equal(layer.weight, layer.weight)  # a look
        np.testing.assert_array_equal(sigma.v[0].numpy(), v)
        u, v = oracle.power_step(w, v)
        for _ in range(2):
            np.testing.assert_allclose(read(layer), oracle.estimated(w, 0.7, u, v), rtol=1e-12)
        v = sigma.v[0].numpy().copy()


def test_entries_that_change_places_are_a_change() -> None:
    layer = sigma_reparam(linear(), gamma=0.7)
    assert layer.weight.requires_grad
    v = step_of(layer).v[0].numpy().copy()
    w = original(layer).detach().flip(1).numpy().copy()
    original(layer).data.copy_(torch.tensor(w))
    u, v = oracle.power_step(w, v)
    np.testing.assert_allclose(read(layer), oracle.estimated(w, 0.7, u, v), rtol=1e-12)


def test_a_weight_that_was_read_outside_a_forward_may_change_its_type() -> None:
    layer = sigma_reparam(linear(), gamma=0.7)
    assert layer.weight.requires_grad
    layer.float()
    assert layer.weight.dtype == torch.float32
    norm = float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
    assert norm == pytest.approx(0.7, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_steps_of_fused_optimisers_are_followed_outside_a_forward(
    kind: Any, dtype: torch.dtype
) -> None:
    # Their kernels do not count up the versions of the weights.
    layer = sigma_reparam(linear().to(dtype), gamma=0.7)
    optimizer = kind([original(layer)], lr=0.1, fused=True)
    for _ in range(30):
        optimizer.zero_grad()
        (layer.weight.float() - 1).square().sum().backward()
        version = original(layer)._version
        optimizer.step()
        assert original(layer)._version == version
    assert layer.weight.requires_grad  # read in training
    norm = float(torch.linalg.matrix_norm(layer.weight.detach().float(), 2))
    assert norm == pytest.approx(0.7, rel=0.02)


def test_a_forward_takes_one_step_also_where_the_optimiser_is_fused() -> None:
    layer = sigma_reparam(linear(), gamma=0.7)
    optimizer = torch.optim.SGD([original(layer)], lr=0.1, fused=True)
    x = torch.tensor(draw(3, 6))
    for _ in range(3):
        optimizer.zero_grad()
        v = step_of(layer).v[0].numpy().copy()
        layer(x).square().sum().backward()
        _, expected = oracle.power_step(original(layer).detach().numpy(), v)
        np.testing.assert_allclose(step_of(layer).v[0].numpy(), expected, rtol=1e-12)
        optimizer.step()


def test_a_read_before_the_forward_does_not_add_a_step() -> None:
    alone, watched = (sigma_reparam(linear(), gamma=0.7) for _ in range(2))
    x = torch.tensor(draw(3, 6))
    for seed in (11, 12, 13):
        change(alone, seed)
        change(watched, seed)
        assert watched.weight.square().sum() > 0.0
        assert torch.equal(watched(x), alone(x))
        assert torch.equal(watched(x), alone(x))
    assert torch.equal(step_of(watched).v, step_of(alone).v)


def test_a_copy_read_outside_a_forward_continues_alike() -> None:
    layer = sigma_reparam(linear(), gamma=0.7)
    change(layer, 11)
    assert layer.weight.requires_grad
    other = copy.deepcopy(layer)
    assert torch.equal(other.weight, layer.weight)
    change(layer, 12)
    change(other, 12)
    assert torch.equal(other.weight, layer.weight)
    assert torch.equal(step_of(other).v, step_of(layer).v)


def test_two_forwards_before_one_backward() -> None:
    layer = sigma_reparam(linear(), gamma=1.0)
    x = torch.tensor(draw(3, 6))
    (layer(x).sum() * layer(2 * x).square().sum()).backward()
    assert torch.isfinite(original(layer).grad).all()


def test_frozen_iterations_stand_still() -> None:
    layer = sigma_reparam(linear(), gamma=1.0)
    original(layer).data.copy_(torch.tensor(draw(4, 6, seed=9)))
    u, v = step_of(layer).u.clone(), step_of(layer).v.clone()
    with frozen_power_iteration(layer):
        layer(torch.zeros(1, 6, dtype=torch.float64))
        with frozen_power_iteration(layer):
            pass
        layer(torch.zeros(1, 6, dtype=torch.float64))
    assert torch.equal(step_of(layer).u, u)
    assert torch.equal(step_of(layer).v, v)
    layer(torch.zeros(1, 6, dtype=torch.float64))
    assert not torch.equal(step_of(layer).v, v)


def test_sam_uses_the_first_pass_vectors_in_the_second() -> None:
    layer = sigma_reparam(linear(), gamma=0.7)
    weight, sigma = original(layer), step_of(layer)
    weight.data.copy_(torch.tensor(draw(4, 6, seed=9)))
    w, gamma, x = weight.detach().numpy().copy(), 0.7, draw(3, 6)
    u, v = oracle.power_step(w, sigma.v[0].numpy().copy())
    sam = SAM(layer.parameters(), torch.optim.SGD, rho=0.5, lr=0.1)

    def closure() -> torch.Tensor:
        sam.zero_grad()
        loss = 0.5 * layer(torch.tensor(x)).square().sum()
        loss.backward()
        return loss

    def gradient(w: np.ndarray, gamma: float) -> tuple[np.ndarray, float]:
        hat = oracle.estimated(w, gamma, u, v)
        return oracle.gradient(w, gamma, u, v, (x @ hat.T).T @ x)

    with sam.ascent_pass(layer):
        sam.step(closure)
    g_w, g_gamma = gradient(w, gamma)
    norm = np.sqrt(np.sum(g_w**2) + g_gamma**2)
    g_w, g_gamma = gradient(w + 0.5 * g_w / norm, gamma + 0.5 * g_gamma / norm)
    np.testing.assert_allclose(weight.detach().numpy(), w - 0.1 * g_w, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(sigma.gamma.item(), gamma - 0.1 * g_gamma, rtol=1e-11)
    np.testing.assert_allclose(sigma.u[0].numpy(), u, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(sigma.v[0].numpy(), v, rtol=1e-12, atol=1e-14)


# -- which weights -------------------------------------------------------------------------------


def test_by_default_linear_weights_only() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm([3, 4]), linear(2, 4), nn.Conv1d(2, 2, 3))
    sigma_reparam(net)
    assert [parametrize.is_parametrized(m) for m in net] == [False, False, True, False]


def test_named_parameters_and_dotted_paths() -> None:
    net = sigma_reparam(Raw(), gamma=1.0, names=("query", "head.weight"))
    assert set(net.parametrizations) == {"query"}
    assert not parametrize.is_parametrized(net, "key")
    np.testing.assert_allclose(oracle.spectral_norm(read(net, "query")), 1.0, rtol=1e-12)
    np.testing.assert_allclose(oracle.spectral_norm(read(net.head)), 1.0, rtol=1e-12)
    table = sigma_reparam(nn.Embedding(5, 4), gamma=1.0)  # asked for by itself
    np.testing.assert_allclose(oracle.spectral_norm(read(table)), 1.0, rtol=1e-6)


def attention(**kwargs: int) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **kwargs)
    for i, weight in enumerate(layer.parameters()):
        weight.data.copy_(torch.tensor(draw(*weight.shape, seed=i)))
    return layer


def plain_attention(
    x: torch.Tensor, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, layer: nn.Module
) -> torch.Tensor:
    """Softmax attention of two heads written out, with the biases of `layer`."""
    bq, bk, bv = layer.in_proj_bias.chunk(3)
    q, k, v = (
        (x @ torch.tensor(w).T + b).unflatten(-1, (2, 4)).transpose(1, 2)
        for w, b in ((q, bq), (k, bk), (v, bv))
    )
    mixed = torch.softmax(q @ k.mT / 2.0, -1) @ v
    return mixed.transpose(1, 2).flatten(-2) @ torch.tensor(o).T + layer.out_proj.bias


@pytest.mark.parametrize("training", [True, False])
def test_attention_blocks_have_a_norm_each(training: bool) -> None:
    layer, x = attention(), torch.tensor(draw(2, 5, 8))
    parts = [w.copy() for w in np.split(read(layer, "in_proj_weight"), 3)]
    out = read(layer.out_proj)
    sigma_reparam(layer, gamma=0.8).train(training)
    assert step_of(layer, "in_proj_weight").gamma.shape == (3,)
    q, k, v, o = (oracle.reparametrised(w, 0.8) for w in (*parts, out))
    np.testing.assert_allclose(read(layer, "in_proj_weight"), np.vstack([q, k, v]), rtol=1e-12)
    with torch.no_grad():
        got = layer(x, x, x, need_weights=False)[0]
        torch.testing.assert_close(got, plain_attention(x, q, k, v, o, layer), rtol=1e-9, atol=1e-9)


def test_attention_steps_once_for_every_projection() -> None:
    layer, x = attention(), torch.tensor(draw(2, 5, 8))
    sigma_reparam(layer, gamma=1.0)
    joint, out = original(layer, "in_proj_weight"), original(layer.out_proj)
    joint.data.copy_(torch.tensor(draw(24, 8, seed=31)))
    out.data.copy_(torch.tensor(draw(8, 8, seed=32)))
    before = step_of(layer, "in_proj_weight").v.numpy().copy()
    before_out = step_of(layer.out_proj).v[0].numpy().copy()
    layer(x, x, x)
    after = [
        oracle.power_step(w, v)[1]
        for w, v in zip(np.split(joint.detach().numpy(), 3), before, strict=True)
    ]
    np.testing.assert_allclose(step_of(layer, "in_proj_weight").v.numpy(), after, atol=1e-13)
    _, after_out = oracle.power_step(out.detach().numpy(), before_out)
    np.testing.assert_allclose(step_of(layer.out_proj).v[0].numpy(), after_out, atol=1e-13)


def test_attention_with_separate_projections() -> None:
    layer = sigma_reparam(attention(kdim=3, vdim=5), gamma=1.0)
    assert set(layer.parametrizations) == {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
    for name in layer.parametrizations:
        np.testing.assert_allclose(oracle.spectral_norm(read(layer, name)), 1.0, rtol=1e-12)


def tied() -> nn.ModuleList:
    net = nn.ModuleList([linear(5, 5, seed=1), linear(5, 5, seed=2)])
    net[1].weight = net[0].weight
    return net


def test_shared_weights_stay_shared() -> None:
    net = tied()
    w = read(net[0])
    sigma_reparam(net, gamma=0.6)
    assert original(net[0]) is original(net[1])
    assert step_of(net[0]) is step_of(net[1])
    assert len(list(net.parameters())) == 2
    remove(net)
    assert net[0].weight is net[1].weight
    np.testing.assert_allclose(read(net[0]), oracle.reparametrised(w, 0.6), rtol=1e-12)
    with pytest.raises(InputError, match=r"'1.weight' shares its weight"):
        sigma_reparam(tied(), names=("0.weight",))


def test_arguments_are_checked() -> None:
    for gamma in (0.0, -1.0, float("nan"), "keep"):
        with pytest.raises(InputError, match="gamma"):
            sigma_reparam(linear(), gamma=gamma)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no weight for \['quary'\].*\['query', 'key', 'head"):
        sigma_reparam(Raw(), names=("query", "quary"))
    with pytest.raises(InputError, match="found no weight"):
        sigma_reparam(nn.LayerNorm(3), names=())
    with pytest.raises(InputError, match=r"'bias' has shape \[6\]; a 2-D weight"):
        sigma_reparam(Raw(), names=("query", "bias"))
    with pytest.raises(InputError, match="is empty"):
        sigma_reparam(nn.ParameterDict({"a": nn.Parameter(torch.zeros(0, 3))}), names=("a",))
    with pytest.raises(InputError, match="complex64; real"):
        sigma_reparam(nn.Linear(2, 2, dtype=torch.complex64))
    broken = linear()
    broken.weight.data[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"'weight' holds values that are not finite"):
        sigma_reparam(broken)
    assert not parametrize.is_parametrized(broken)
    with pytest.raises(InputError, match="found no weight"):
        sigma_reparam(sigma_reparam(linear()))


# -- zero matrices -------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", ["preserve", 1.0])
def test_a_zero_matrix_stays_finite_and_can_leave_zero(gamma: float | str) -> None:
    layer = linear()
    layer.weight.data.zero_()
    sigma_reparam(layer, gamma=gamma)  # type: ignore[arg-type]
    x, back = torch.tensor(draw(3, 6)), torch.tensor(draw(3, 4))
    out = layer(x)
    assert torch.equal(out, torch.zeros_like(out))
    (out * back).sum().backward()
    torch.testing.assert_close(original(layer).grad, back.mT @ x, rtol=1e-12, atol=1e-12)
    assert torch.equal(step_of(layer).gamma.grad, torch.zeros((), dtype=torch.float64))
    with torch.no_grad():
        original(layer).sub_(0.1 * original(layer).grad)
    w = original(layer).detach().numpy()
    for _ in range(300):
        layer(x)
    expected = oracle.reparametrised(w, 0.0 if gamma == "preserve" else 1.0)
    np.testing.assert_allclose(read(layer), expected, rtol=1e-9, atol=1e-12)


# -- folding back, copies, files -----------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_remove_folds_with_equal_outputs(training: bool) -> None:
    net = nn.Sequential(linear(6, 6), attention(), linear(6, 6, seed=4))
    net[1] = Raw()
    sigma_reparam(net, gamma=0.7, names=("weight", "query", "key"))
    query = original(net[1], "query")
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.tensor(draw(5, 6))
    net[2] = nn.Identity()
    for _ in range(3):
        optimiser.zero_grad()
        net(x).square().sum().backward()
        optimiser.step()
    net.train(training)
    before = net(x)
    assert remove(net) is net
    assert torch.equal(net(x), before)
    assert net[1].query is query
    assert not any("parametrizations" in name for name in net.state_dict())
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert type(net[0]) is nn.Linear
    with pytest.raises(InputError, match="nothing to remove"):
        remove_sigma_reparam(net)


def test_remove_from_attention_and_again() -> None:
    layer, x = attention().eval(), torch.tensor(draw(2, 5, 8))
    for _ in range(2):
        sigma_reparam(layer, gamma=0.7)
        before = layer(x, x, x)[0]
        assert torch.equal(remove(layer)(x, x, x)[0], before)
    assert not layer._forward_pre_hooks


def test_other_parametrisations_on_top_are_left_alone() -> None:
    class Double(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return 2 * w

    layer = sigma_reparam(linear(), gamma=1.0)
    parametrize.register_parametrization(layer, "weight", Double())
    with pytest.raises(InputError, match="other parametrisations besides"):
        remove(layer)
    np.testing.assert_allclose(oracle.spectral_norm(read(layer)), 2.0, rtol=1e-12)


def test_copies_live_their_own_lives() -> None:
    net = sigma_reparam(Raw(), gamma=0.7, names=("query",))
    other = copy.deepcopy(net)
    x = torch.tensor(draw(5, 6))
    assert torch.equal(other(x), net(x))
    sigma_reparam(other, gamma=0.7, names=("key",))
    assert isinstance(net.key, nn.Parameter)
    remove(other)
    assert isinstance(other.query, nn.Parameter)
    np.testing.assert_allclose(oracle.spectral_norm(read(net, "query")), 0.7, rtol=1e-12)
    original(net, "query").data.copy_(torch.tensor(draw(6, 3, seed=9)))
    v = step_of(net, "query").v.clone()
    third = copy.deepcopy(net)
    third(x)
    assert torch.equal(step_of(net, "query").v, v)
    assert not torch.equal(step_of(third, "query").v, v)


def trained(seed: int = 0) -> nn.Linear:
    """A layer whose u and v lag behind its weight, as after an optimiser step."""
    layer = sigma_reparam(linear(seed=seed), gamma=0.7)
    original(layer).data.add_(torch.tensor(0.3 * draw(4, 6, seed=9)))
    return layer


def saved(layer: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    return file


@pytest.mark.parametrize("assign", [False, True])
def test_loading_makes_sigma_exact_at_once(assign: bool) -> None:
    source, target = trained(), sigma_reparam(linear(seed=3), gamma=1.0)
    assert abs(oracle.spectral_norm(read(source)) - 0.7) > 1e-3
    target.load_state_dict(torch.load(saved(source), weights_only=True), assign=assign)
    expected = oracle.reparametrised(original(source).detach().numpy(), 0.7)
    np.testing.assert_allclose(read(target), expected, rtol=1e-12)
    w = original(target).detach().numpy()
    np.testing.assert_allclose(
        np.outer(step_of(target).u, step_of(target).v), np.outer(*oracle.leading(w)), atol=1e-10
    )


def test_loading_inside_the_freezing_context_resumes_bit_for_bit() -> None:
    source, target = trained(), sigma_reparam(linear(seed=3), gamma=1.0)
    with frozen_power_iteration(target):
        target.load_state_dict(torch.load(saved(source), weights_only=True))
    x = torch.tensor(draw(3, 6))
    for _ in range(2):
        assert torch.equal(target(x), source(x))


def test_loading_weights_that_are_not_finite_keeps_the_vectors() -> None:
    source, target = trained(), sigma_reparam(linear(seed=3), gamma=1.0)
    original(source).data[0, 0] = float("nan")
    target.load_state_dict(source.state_dict())
    target(torch.zeros(1, 6, dtype=torch.float64))
    assert torch.equal(step_of(target).v, step_of(source).v)


def test_assigning_a_weight_sets_w_and_leaves_gamma() -> None:
    layer = sigma_reparam(linear(), gamma=0.7)
    w = draw(4, 6, seed=8)
    layer.weight = torch.tensor(w)
    np.testing.assert_allclose(read(layer), oracle.reparametrised(w, 0.7), rtol=1e-12)


def test_moves_between_dtypes_take_everything_along() -> None:
    layer = sigma_reparam(linear(), gamma=0.7).float()
    assert {t.dtype for t in itertools.chain(layer.parameters(), layer.buffers())} == {
        torch.float32
    }
    np.testing.assert_allclose(oracle.spectral_norm(read(layer).astype(float)), 0.7, rtol=1e-6)
    out = layer(torch.ones(2, 6))
    assert out.dtype == torch.float32
    meta = layer.to("meta")
    assert meta.weight.device.type == "meta"
    assert meta(torch.ones(2, 6, device="meta")).shape == (2, 4)


def test_sigma_is_wide_inside_autocast() -> None:
    """bfloat16 products would miss σ by up to 2⁻⁸, and γ = σ would change the map."""
    layer = sigma_reparam(linear().float())
    before = original(layer).detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.eval().weight, before)
        layer.train()
        for _ in range(60):
            layer(torch.zeros(1, 6))
    expected = oracle.spectral_norm(before.double().numpy())
    assert step_of(layer).sigma(before).item() == pytest.approx(expected, rel=1e-6)


def test_documented_examples_run() -> None:
    assert doctest.testmod(levelhead.nn.sigma_reparam).failed == 0
