"""SAMformer's network against eqs. (3)-(4) written out, and the products it is allowed to form."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from levelhead.base.errors import InputError
from levelhead.nn.linear import line_as_head, moments, predict_line, solve_line
from levelhead.nn.samformer import SAMformerNet, attention_matrix
from oracles import samformer as oracle

L, H, D, B, M = 23, 6, 4, 3, 5


def windows(batch: int = B, channels: int = D, context: int = L, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 + 2.0 * torch.randn(
        batch, channels, context, generator=generator, dtype=torch.float64
    )


def network(seed: int = 1, *, dtype: torch.dtype = torch.float64, **options: Any) -> SAMformerNet:
    """A network all of whose parameters, biases and gains too, have values of some size."""
    sizes = {"context": L, "horizon": H, "channels": D, "width": M}
    net = SAMformerNet(**{**sizes, **options}).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = parameter.shape[0] ** -0.5 if parameter.ndim == 2 else 0.5
            parameter.copy_(1.5 + noise.abs() if name == "norm.gain" else scale * noise)
    return net.to(dtype)


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max())


def parameters_of(net: SAMformerNet) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}


OPTIONS = [
    {"bias": bias, "tie_qk": tied, "value": value, "revin": revin, "revin_affine": affine}
    for bias, tied, value, (revin, affine) in itertools.product(
        (True, False),
        (False, True),
        ("factored", "full"),
        ((True, True), (True, False), (False, False)),
    )
]


def label(options: dict[str, Any]) -> str:
    words = [k if v is True else f"no_{k}" if v is False else str(v) for k, v in options.items()]
    return "-".join(words) or "default"


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_forecasts_and_gradients_equal_the_equations(options: dict[str, Any]) -> None:
    net, x = network(**options), windows()
    expected_names = {"query", "key", "value", "output", "head"}
    expected_names -= {"key"} if options["tie_qk"] else set()
    expected_names -= {"output"} if options["value"] == "full" else set()
    if options["bias"]:
        expected_names |= {f"{name}_bias" for name in expected_names}
    if options["revin_affine"]:
        expected_names |= {"norm.gain", "norm.shift"}
    parameters = parameters_of(net)
    assert set(parameters) == expected_names

    expected = oracle.forecast(x, parameters, revin=options["revin"])
    made = net(x)
    assert made.shape == (B, D, H)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)

    weights = windows(context=H, seed=5)
    (made * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in net.named_parameters():
        wanted = parameters[name].grad
        assert wanted is not None
        size = float(wanted.abs().max())
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-10, atol=1e-12 * (1.0 + size))


@pytest.mark.parametrize("options", [{}, {"revin_affine": True}, {"tie_qk": True}], ids=label)
def test_gradients_of_windows_are_right_where_somebody_asks(options: dict[str, Any]) -> None:
    net = network(**options)
    ours, theirs = windows().requires_grad_(), windows().requires_grad_()
    net(ours).sin().sum().backward()
    oracle.forecast(theirs, parameters_of(net)).sin().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_core_is_the_forecast_in_normalised_units() -> None:
    net, x = network(revin_affine=True, eps=0.1), windows()
    statistics = [oracle.statistics(window, 0.1) for window in x]
    z = torch.stack([(w - m) / s for w, (m, s) in zip(x, statistics, strict=True)], dim=1)
    core = net.core(z)
    assert core.shape == (D, B, H)
    made = torch.stack([core[:, i] * s + m for i, (m, s) in enumerate(statistics)])
    torch.testing.assert_close(made, net(x), rtol=1e-12, atol=1e-12)


# -- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"revin_affine": True}, {"tie_qk": True}, {"revin": False}], ids=label
)
def test_attention_equals_equation_4(options: dict[str, Any]) -> None:
    net, x = network(**options), windows()
    with torch.no_grad():
        made = net.attention(x)
        parameters = parameters_of(net)
        revin = options.get("revin", True)
        z = [oracle.normalised(w, parameters, 1e-5) if revin else w for w in x]
        expected = torch.stack([oracle.attention(w, parameters) for w in z])
    assert made.shape == (B, D, D)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        made.sum(-1), torch.ones(B, D, dtype=torch.float64), rtol=1e-14, atol=0
    )
    assert (made >= 0).all()
    assert not torch.allclose(made.sum(-2), torch.ones(B, D, dtype=torch.float64), atol=1e-3)


def test_attention_rows_sum_to_one_for_huge_logits() -> None:
    query = 1e4 * torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0))
    rows = attention_matrix(query, -query.flip(1))
    torch.testing.assert_close(rows.sum(-1), torch.ones(5, 7))
    assert torch.isfinite(rows).all()


def test_tied_logits_are_symmetric_and_positive() -> None:
    net, x = network(tie_qk=True), windows()
    with torch.no_grad():
        attention = net.attention(x)
    # log A_ij - log A_ii = l_ij - l_ii, and l = q qᵀ/√m obeys l_ij ≤ (l_ii + l_jj)/2.
    log = attention.log()
    diagonal = log.diagonal(dim1=-2, dim2=-1)
    below = log - diagonal[..., :, None]
    assert (below + below.transpose(-1, -2) <= 1e-12).all()


@pytest.mark.parametrize("affine", [False, True])
def test_permuted_channels_give_permuted_forecasts(affine: bool) -> None:
    net, x = network(revin_affine=affine), windows()
    order = torch.tensor([2, 0, 3, 1])
    made = net(x)
    moved = net(x[:, order])
    if affine:
        assert not torch.allclose(moved, made[:, order], atol=1e-3)
        assert net.norm.gain is not None
        assert net.norm.shift is not None
        with torch.no_grad():
            net.norm.gain.copy_(net.norm.gain[order].clone())
            net.norm.shift.copy_(net.norm.shift[order].clone())
        moved = net(x[:, order])
    torch.testing.assert_close(moved, made[:, order], rtol=1e-12, atol=1e-12)


def test_channels_do_inform_each_other_and_windows_do_not() -> None:
    net, x = network(), windows()
    changed = x.clone()
    changed[0, 1] = x[1, 1]
    difference = (net(changed) - net(x)).abs().amax(dim=-1)
    assert (difference[0] > 1e-6).all()
    assert float(difference[1:].detach().max()) < 1e-12


@pytest.mark.parametrize("count", [1, 2, 33, 400])
def test_any_number_of_channels(count: int) -> None:
    net = network(channels=None, context=8, horizon=3, width=2)
    x = windows(batch=2, channels=count, context=8)
    made = net(x)
    assert made.shape == (2, count, 3)
    some = slice(0, 2) if count > 33 else slice(None)
    parameters = parameters_of(net)
    z = oracle.normalised(x[1], parameters, 1e-5)
    mean, deviation = oracle.statistics(x[1], 1e-5)
    if count <= 33:
        expected = oracle.forecast(x[1:], parameters)[0]
    else:  # the oracle's loop over 400 x 400 logits is slow; two rows are proof enough
        query, key = z[some] @ net.query + net.query_bias, z @ net.key + net.key_bias
        weights = torch.exp(query @ key.T / 2**0.5)
        mixed = weights / weights.sum(1, keepdim=True) @ (z @ net.value + net.value_bias)
        inner = z[some] + mixed @ net.output + net.output_bias
        expected = (inner @ net.head + net.head_bias) * deviation[some] + mean[some]
    torch.testing.assert_close(made[1, some], expected, rtol=1e-11, atol=1e-11)


# -- initialisation ------------------------------------------------------------------------------

KERAS = {"query": 0.0263, "key": 0.0263, "value": 0.0263, "output": 0.1066, "head": 0.0993}
GLOROT = {"query": 0.1066, "key": 0.1066, "value": 0.1066, "output": 0.1066, "head": 0.0993}


@pytest.mark.parametrize(("init", "limits"), [("keras", KERAS), ("glorot", GLOROT)])
def test_initial_draws_fill_their_limits(init: Any, limits: dict[str, float]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = SAMformerNet(512, 96, init=init)
    for name, limit in limits.items():
        weight = getattr(net, name).detach()
        assert float(weight.abs().max()) <= limit + 5e-5  # the limits have four digits
        assert float(weight.max()) > 0.98 * limit
        assert float(weight.min()) < -0.98 * limit
        # Uniform: mean 0, deviation limit/√3; 8 standard errors of n draws.
        n = weight.numel()
        assert abs(float(weight.mean())) < 8 * limit / math.sqrt(3 * n)
        assert float(weight.std()) == pytest.approx(limit / math.sqrt(3), rel=8 / math.sqrt(n))
    for name, parameter in net.named_parameters():
        assert name in limits or not parameter.any()


def test_full_values_have_the_limits_of_their_shape() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = SAMformerNet(64, 8, value="full")
    limit = math.sqrt(6 / 128)
    assert net.value.shape == (64, 64)
    assert 0.98 * limit < float(net.value.detach().abs().max()) <= limit


def test_parameters_of_the_paper() -> None:
    paper = SAMformerNet(512, 96, bias=False)
    assert {n: tuple(p.shape) for n, p in paper.named_parameters()} == {
        "query": (512, 16),
        "key": (512, 16),
        "value": (512, 16),
        "output": (16, 512),
        "head": (512, 96),
    }
    biased = sum(p.numel() for p in SAMformerNet(512, 96).parameters())
    assert biased == 4 * 512 * 16 + 512 * 96 + 3 * 16 + 512 + 96


def test_draws_follow_the_generator_and_are_independent() -> None:
    net = network()
    net.reset_parameters(torch.Generator().manual_seed(7))
    first = copy.deepcopy(net.state_dict())
    net.reset_parameters(torch.Generator().manual_seed(7))
    assert all(torch.equal(first[name], value) for name, value in net.state_dict().items())
    net.reset_parameters(torch.Generator().manual_seed(8))
    assert not torch.equal(first["query"], net.query)
    assert not torch.equal(net.query, net.key)
    assert not net.query_bias.any()  # type: ignore[union-attr]


# -- starting from a line ------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize(
    "options", [{}, {"revin_affine": True}, {"value": "full"}, {"bias": False}], ids=label
)
def test_a_start_from_the_line_is_the_line(options: dict[str, Any], trained: bool) -> None:
    draw = np.random.default_rng(0)
    series = np.cumsum(draw.normal(size=(D, 500)), axis=1)
    series = (series - series.mean(axis=1, keepdims=True)) / series.std(axis=1, keepdims=True)
    weights = solve_line(moments(series, 96, 24, 0, 300, "last"), 0.01)
    sizes = {"context": 96, "horizon": 24, "width": 16}
    if trained:  # gains and biases have moved
        net = network(dtype=torch.float32, **sizes, **options)
    else:
        net = SAMformerNet(96, 24, D, **options)
    net.start_from_line(torch.from_numpy(line_as_head(weights, "last")))
    x = 1e6 + np.stack([series[:, t : t + 96] for t in range(300, 400)])
    made = net(torch.from_numpy(x))
    assert net.head.dtype == torch.float32
    assert made.dtype == torch.float64
    np.testing.assert_allclose(made.detach(), predict_line(x, weights, "last"), rtol=0, atol=1e-5)


def test_after_a_start_from_the_line_the_gradient_reaches_the_output() -> None:
    net = SAMformerNet(L, H, D)
    head = torch.full((L, H), 1.0 / L)
    net.start_from_line(head)
    assert torch.equal(net.head, head)
    net(windows()).square().sum().backward()
    assert net.value.detach().abs().min() > 0
    assert net.output is not None
    assert net.output.grad is not None
    assert net.output.grad.abs().max() > 0
    assert net.value.grad is not None
    assert not net.value.grad.any()


# -- what is computed ----------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Every operation's name, the storages it reads and the tensors it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, set[int], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        read = {t.untyped_storage().data_ptr() for t in flat if isinstance(t, torch.Tensor)}
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.seen.append((func.overloadpacket.__name__, read, made))
        return out

    def products_with(self, matrix: torch.Tensor) -> int:
        """Matrix products that read `matrix` or a view of it."""
        storage = matrix.untyped_storage().data_ptr()
        names = {"mm", "addmm", "bmm", "baddbmm", "matmul", "_addmm_activation", "mv", "linear"}
        return sum(name in names and storage in read for name, read, _ in self.seen)

    def made(self) -> list[torch.Tensor]:
        return [t for _, _, out in self.seen for t in out]


def squares(recorder: Recorder) -> list[tuple[int, ...]]:
    """Shapes with more than one axis of length L."""
    return [tuple(t.shape) for t in recorder.made() if list(t.shape).count(L) > 1]


@pytest.mark.parametrize(
    "options", [{}, {"revin_affine": True}, {"bias": False}, {"tie_qk": True}], ids=label
)
def test_windows_meet_one_matrix_product_each_way(options: dict[str, Any]) -> None:
    net = network(**options)
    z = windows(batch=D, channels=B).contiguous()  # [D, B, L] as `core` takes it
    with Recorder() as forward:
        loss = net.core(z).square().mean()
    assert forward.products_with(z) == 1
    with Recorder() as backward:
        loss.backward()
    assert backward.products_with(z) == 1
    assert squares(forward) == squares(backward) == []
    # No gradient with respect to windows: nothing of their size but views of them.
    storage = z.untyped_storage().data_ptr()
    for tensor in (*forward.made(), *backward.made()):
        assert tensor.numel() != z.numel() or tensor.untyped_storage().data_ptr() == storage
    assert all(p.grad is not None for p in net.parameters())


def test_the_recorder_would_notice() -> None:
    z = windows(batch=D, channels=B).contiguous().requires_grad_()
    net = network(value="full")
    with Recorder() as recorder:
        net.core(z).square().mean().backward()
    assert (L, L) in squares(recorder)  # the gradient of W_V
    storage = z.untyped_storage().data_ptr()
    of_windows = [t for t in recorder.made() if t.numel() == z.numel()]
    assert any(t.untyped_storage().data_ptr() != storage for t in of_windows)
    separate = network()
    with Recorder() as recorder:
        _ = z @ separate.query, z @ separate.key
    assert recorder.products_with(z) == 2


def test_the_whole_forward_forms_no_square_either() -> None:
    with Recorder() as recorder:
        network(revin_affine=True)(windows()).square().mean().backward()
    assert len(recorder.seen) > 20
    assert squares(recorder) == []


# -- as a module ---------------------------------------------------------------------------------


def test_copies_and_state_dicts_give_equal_bits() -> None:
    net, x = network(revin_affine=True), windows()
    made = net(x)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x), made)
    fresh = SAMformerNet(L, H, D, width=M, revin_affine=True).double()
    assert not torch.equal(fresh(x), made)
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(x), made)
    with torch.no_grad():
        twin.head.zero_()
    assert torch.equal(net(x), made)


@pytest.mark.parametrize("working", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_forecasts_have_the_type_of_the_windows(working: torch.dtype, given: torch.dtype) -> None:
    net, x = network(dtype=working), windows()
    made = net(x.to(given))
    assert made.dtype == given
    exact = network()(x)
    worst = 1e-12 if working == given == torch.float64 else 2e-5
    assert largest(made.double() - exact) < worst


def test_an_offset_costs_float32_nothing() -> None:
    net, x = network(dtype=torch.float32), windows()
    shifted = net(x + 1e6) - 1e6
    assert largest(shifted - net(x)) < 1e-5


def test_refusals_name_shapes() -> None:
    net = network(revin_affine=True)
    with pytest.raises(InputError, match="reads 23 steps, windows of 22 were given"):
        net(windows(context=22))
    with pytest.raises(InputError, match=r"shape \(4, 23\) was given: add the missing axis"):
        net(windows()[0])
    for count in (1, 3):
        for call in (net, net.attention, lambda x: net.core(x.transpose(0, 1))):
            with pytest.raises(InputError, match=f"gains for 4 channels, the input has {count}"):
                call(windows(channels=count))
    for name in ("context", "horizon", "width"):
        for wrong in (0, -3, 2.0, "8"):
            with pytest.raises(InputError, match=f"{name} must be a positive integer, {wrong!r}"):
                SAMformerNet(**{"context": 8, "horizon": 2, "width": 4, name: wrong})
    with pytest.raises(InputError, match="needs the number of channels"):
        SAMformerNet(8, 2, revin_affine=True)
