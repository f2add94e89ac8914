"""The head core against its formula, and as a drop-in for nn.MultiheadAttention."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.nn.collaborative import CollaborativeAttention
from levelhead.nn.head_core import HeadCoreAttention
from levelhead.nn.masked_attention import MaskedAttention
from levelhead.weights.layouts import views
from oracles import head_core as oracle
from oracles.attention import attend

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def plain(seed: int = 0, d: int = 12, h: int = 3, **kwargs: Any) -> nn.MultiheadAttention:
    """A layer far from its start: biases that count, logits that are not small."""
    torch.manual_seed(seed)
    kwargs = {"batch_first": True, "dtype": torch.float64} | kwargs
    layer = nn.MultiheadAttention(d, h, **kwargs)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn_like(weight) / math.sqrt(d) * 1.5)
    return layer


def tokens(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def randomised(layer: nn.Module, seed: int = 2) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / 2)
    return layer


def numpy(tensor: Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.detach().numpy()


MODES = {
    "tucker": (HeadCoreAttention, {"ranks": (2, 3, 5)}),
    "collaborative": (CollaborativeAttention, {"shared": 3}),
}
both = pytest.mark.parametrize("mode", MODES)


def made(mode: str, **kwargs: Any) -> MaskedAttention:
    kind, own = MODES[mode]
    torch.manual_seed(5)
    layer = kind(12, 3, **{"batch_first": True, "dtype": torch.float64} | own | kwargs)
    randomised(layer)
    return layer


def dense(layer: MaskedAttention) -> nn.MultiheadAttention:
    """The same weights in a plain layer."""
    return layer.to_attention()  # type: ignore[attr-defined,no-any-return]


# -- the formula ---------------------------------------------------------------------------------


def test_the_output_is_that_of_the_multiplied_out_tensor() -> None:
    layer = made("tucker")
    assert isinstance(layer, HeadCoreAttention)
    factors = (layer.head_factor, layer.inner_factor, layer.model_factor)
    w = oracle.head_tensor(numpy(layer.core), *map(numpy, factors))
    np.testing.assert_allclose(numpy(layer.head_tensor()), w, **EXACT)
    x = tokens(5, 12)
    bias = numpy(layer.in_proj_bias).reshape(3, 3, 4)
    output, shift = numpy(layer.out_proj.weight), numpy(layer.out_proj.bias)
    expected = oracle.tucker_layer(w, bias, output, shift, x.numpy())
    np.testing.assert_allclose(numpy(layer(x, x, x)[0]), expected, **EXACT)


def test_collaborative_logits_are_shared_forms_with_gains() -> None:
    layer = made("collaborative")
    assert isinstance(layer, CollaborativeAttention)
    x = tokens(5, 12)
    parts = (layer.shared_query, layer.shared_key, layer.mixing, layer.mixed_bias)
    logits = oracle.collaborative_logits(*map(numpy, parts), x.numpy(), 4)
    values = x.numpy() @ numpy(layer.value_proj.weight).T + numpy(layer.value_proj.bias)
    output = numpy(layer.out_proj.weight)
    slices = [slice(4 * i, 4 * i + 4) for i in range(3)]
    expected = oracle.attention(
        logits, [values[:, s] for s in slices], [output[:, s] for s in slices]
    )
    expected = expected + numpy(layer.out_proj.bias)
    np.testing.assert_allclose(numpy(layer(x, x, x)[0]), expected, **EXACT)


def test_collaborative_attention_is_a_head_core_with_fixed_factors() -> None:
    """U_h = [m, 1], U_k = I, and a core that holds the shared matrices (top of the module)."""
    layer = made("collaborative", bias=False)
    assert isinstance(layer, CollaborativeAttention)
    query, key, mixing = map(numpy, (layer.shared_query, layer.shared_key, layer.mixing))
    core = np.zeros((4, 3, 12, 2))
    for b in range(3):
        core[b, b, :, 0] = query[b]
        core[3, b, :, 1] = key[b]
    heads = np.concatenate((mixing, np.ones((3, 1))), axis=1)
    w = oracle.head_tensor(core, heads, np.eye(3), np.eye(12))
    view = layer.view()
    np.testing.assert_allclose(numpy(view.q), w[..., 0], **EXACT)
    np.testing.assert_allclose(numpy(view.k), w[..., 1], **EXACT)


@both
@pytest.mark.parametrize("bias", [True, False])
def test_the_view_is_the_layer(mode: str, bias: bool) -> None:
    layer = made(mode, bias=bias)
    x, source = tokens(5, 12), tokens(7, 12, seed=3)
    out, _ = layer(x, source, source)
    torch.testing.assert_close(out, attend(layer.view(), x, source), **EXACT)


@both
def test_gradients_through_the_view_reach_every_factor(mode: str) -> None:
    layer = made(mode)
    view = layer.view()
    (view.qk.nuclear_norms().sum() + view.ov.nuclear_norms().sum()).backward()
    left = {n for n, w in layer.named_parameters() if w.grad is None or not bool(w.grad.any())}
    assert left <= {"in_proj_bias", "mixed_bias", "value_proj.bias", "out_proj.bias"}


def test_the_named_weights_are_read_by_the_layouts() -> None:
    layer = made("tucker")
    assert isinstance(layer, HeadCoreAttention)
    [found] = views(layer.plain_weights(), heads=3)
    own = layer.view()
    for name in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias"):
        torch.testing.assert_close(getattr(found, name), getattr(own, name), **EXACT)
    assert found.q.requires_grad


# -- as nn.MultiheadAttention --------------------------------------------------------------------


def masks(n: int, m: int, b: int, h: int) -> dict[str, dict[str, Any]]:
    later = torch.ones(n, m, dtype=torch.bool).triu(1)
    padded = torch.zeros(b, m, dtype=torch.bool)
    padded[0, -2:] = True
    added = tokens(n, m, seed=7)
    each = tokens(b * h, n, m, seed=8) > 1.0
    each[..., 0] = False
    return {
        "none": {},
        "boolean": {"attn_mask": later},
        "added": {"attn_mask": added},
        "each head": {"attn_mask": each},
        "padding": {"key_padding_mask": padded},
        "added padding": {"key_padding_mask": tokens(b, m, seed=9)},
        "both": {"attn_mask": later, "key_padding_mask": padded},
        "causal": {"attn_mask": later, "is_causal": True},
        "causal and padding": {
            "attn_mask": later,
            "is_causal": True,
            "key_padding_mask": padded,
        },
    }


@both
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", masks(2, 2, 2, 2))
def test_masks_do_what_they_do_there(mode: str, name: str, batch_first: bool) -> None:
    layer = made(mode, batch_first=batch_first)
    twin = dense(layer)
    given = masks(6, 6, 2, 3)[name]
    x = tokens(2, 6, 12) if batch_first else tokens(6, 2, 12)
    for more in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        out, weights = layer(x, x, x, **given, **more)
        expected, attention = twin(x, x, x, **given, **more)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        assert (weights is None) == (attention is None)
        if weights is not None:
            torch.testing.assert_close(weights, attention, rtol=1e-10, atol=1e-12)


@both
def test_sources_and_single_sequences(mode: str) -> None:
    layer = made(mode)
    twin = dense(layer)
    x, source, values = tokens(2, 4, 12), tokens(2, 7, 12, seed=3), tokens(2, 7, 12, seed=4)
    for one, other in zip(layer(x, source, values), twin(x, source, values), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    padded = torch.zeros(7, dtype=torch.bool)
    padded[-1] = True
    alone = (x[0], source[0], values[0])
    got = layer(*alone, key_padding_mask=padded)
    expected = twin(*alone, key_padding_mask=padded)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    # The axis order of batches does not matter without one.
    layer.batch_first = False
    torch.testing.assert_close(layer(*alone)[0], twin(*alone)[0], rtol=1e-10, atol=1e-12)


@both
def test_dropout_only_in_training(mode: str) -> None:
    layer = made(mode, dropout=0.5)
    x = tokens(2, 6, 12)
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    layer.train()
    torch.manual_seed(0)
    _, weights = layer(x, x, x, average_attn_weights=False)
    dropped = (weights == 0).double().mean()
    # 216 weights, each dropped with probability 1/2: eight standard deviations.
    assert abs(float(dropped) - 0.5) < 8 * 0.5 / math.sqrt(weights.numel())
    torch.manual_seed(0)
    one = layer(x, x, x, need_weights=False)[0]
    torch.manual_seed(0)
    assert torch.equal(one, layer(x, x, x, need_weights=False)[0])


@both
def test_what_is_not_supported_is_refused(mode: str) -> None:
    for kwargs, word in (
        ({"kdim": 5}, "kdim=5"),
        ({"vdim": 5}, "vdim=5"),
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"dropout": 1.5}, "dropout"),
    ):
        with pytest.raises(InputError, match=word):
            made(mode, **kwargs)
    kind, own = MODES[mode]
    assert kind(12, 3, kdim=12, vdim=12, **own).kdim == 12
    with pytest.raises(InputError, match="multiple"):
        kind(12, 5, **own)
    layer = made(mode)
    x = tokens(2, 6, 12)
    for given, word in (
        ({"attn_mask": torch.zeros(5, 6)}, r"attn_mask \[5, 6\]"),
        ({"key_padding_mask": torch.zeros(2, 5)}, r"key_padding_mask \[2, 5\]"),
        ({"attn_mask": torch.zeros(6, 6, dtype=torch.long)}, "int64"),
        ({"is_causal": True}, "is_causal"),
    ):
        with pytest.raises(InputError, match=word):
            layer(x, x, x, **given)


# -- from a layer and back -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [HeadCoreAttention, CollaborativeAttention])
def test_full_ranks_compute_the_same(kind: Any, bias: bool, dtype: torch.dtype) -> None:
    start = plain(bias=bias, dtype=dtype, dropout=0.25)
    layer = kind.from_attention(start)
    assert (layer.training, layer.dropout, layer.batch_first) == (True, 0.25, True)
    start.eval()
    layer.eval()
    x = tokens(2, 6, 12).to(dtype)
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    for one, other in zip(layer(x, x, x), start(x, x, x), strict=True):
        torch.testing.assert_close(one, other, rtol=exact, atol=exact)
    back = layer.to_attention()
    assert not back.training
    for one, other in zip(back(x, x, x), start(x, x, x), strict=True):
        torch.testing.assert_close(one, other, rtol=exact, atol=exact)


def test_low_ranks_are_the_best_of_their_kind() -> None:
    """A layer of ranks (2, 3, 5) is found again; of any other no worse than ST-HOSVD."""
    inner = made("tucker")
    start = dense(inner)
    layer = HeadCoreAttention.from_attention(start, (2, 3, 5))
    x = tokens(2, 6, 12)
    torch.testing.assert_close(layer(x, x, x)[0], start(x, x, x)[0], rtol=1e-9, atol=1e-10)
    full = plain()
    tensor = HeadCoreAttention.from_attention(full).head_tensor()
    errors = [
        torch.linalg.vector_norm(
            HeadCoreAttention.from_attention(full, (2, 3, 5), method=method).head_tensor() - tensor
        )
        for method in ("hooi", "sthosvd")
    ]
    assert 0 < errors[0] <= errors[1] * (1 + 1e-9)


def test_low_collaborative_ranks_are_found_again() -> None:
    inner = made("collaborative")
    layer = CollaborativeAttention.from_attention(dense(inner), 3, sweeps=2000)
    forms, found = inner.view().qk.dense(), layer.view().qk.dense()
    assert torch.linalg.vector_norm(found - forms) < 1e-5 * torch.linalg.vector_norm(forms)
    x = tokens(2, 6, 12)
    # ALS stops at a relative change of 1e-6; the content bias is solved for exactly after it.
    torch.testing.assert_close(layer(x, x, x)[0], inner(x, x, x)[0], rtol=1e-3, atol=1e-3)


def test_ranks_may_be_shares_and_are_checked() -> None:
    assert HeadCoreAttention(12, 3, ranks=(1.0, 0.5, 0.25)).ranks == (3, 2, 3)
    assert HeadCoreAttention(12, 3).ranks == (3, 4, 12)
    assert CollaborativeAttention(12, 3, shared=0.5).shared == 6
    for ranks in ((4, 4, 12), (0, 1, 1), (1, 1), (1.5, 1, 1), (True, 1, 1)):
        with pytest.raises(InputError, match="ranks"):
            HeadCoreAttention(12, 3, ranks=ranks)
    for shared in (0, 13, 1.5, "all"):
        with pytest.raises(InputError, match="shared"):
            CollaborativeAttention(12, 3, shared=shared)  # type: ignore[arg-type]


def test_parameters_are_counted() -> None:
    layer = HeadCoreAttention(12, 3, ranks=(2, 3, 5))
    rest = {"in_proj_bias", "out_proj.weight", "out_proj.bias"}
    shared = sum(w.numel() for n, w in layer.named_parameters() if n not in rest)
    assert layer.shared_parameters == shared == 2 * 3 + 3 * 4 + 5 * 12 + 2 * 3 * 5 * 3
    assert layer.plain_parameters == nn.MultiheadAttention(12, 3).in_proj_weight.numel()
    other = CollaborativeAttention(12, 3, shared=5)
    assert other.shared_parameters == 5 * (2 * 12 + 3)
    assert other.plain_parameters == 2 * 12 * 12


@pytest.mark.parametrize("kind", [HeadCoreAttention, CollaborativeAttention])
def test_what_has_no_head_tensor_is_refused(kind: Any) -> None:
    with pytest.raises(InputError, match="Linear"):
        kind.from_attention(nn.Linear(2, 2))
    with pytest.raises(InputError, match="widths 5 and 12"):
        kind.from_attention(nn.MultiheadAttention(12, 3, kdim=5))
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(InputError, match="adds no token"):
            kind.from_attention(nn.MultiheadAttention(12, 3, **{option: True}))


def test_a_collaborative_layer_that_needs_more_dimensions_is_not_folded() -> None:
    layer = randomised(CollaborativeAttention(12, 3, shared=6))
    with pytest.raises(InputError, match="more than the 4 dimensions"):
        layer.to_attention()
    biased = made("collaborative")
    assert isinstance(biased, CollaborativeAttention)
    with torch.no_grad():
        biased.mixing[1, 2] = 0.0  # the content bias of head 1 leaves the span of its keys
    with pytest.raises(InputError, match="head 1"):
        biased.to_attention()


@pytest.mark.parametrize("kind", [HeadCoreAttention, CollaborativeAttention])
def test_frozen_parts_stay_frozen(kind: Any) -> None:
    start = plain()
    start.in_proj_weight.requires_grad_(False)
    start.out_proj.bias.requires_grad_(False)
    layer = kind.from_attention(start)
    trains = {name for name, w in layer.named_parameters() if w.requires_grad}
    assert (
        trains
        == {"in_proj_bias", "mixed_bias", "value_proj.bias", "out_proj.weight"}
        & dict(layer.named_parameters()).keys()
    )
    back = layer.to_attention()
    assert not back.in_proj_weight.requires_grad
    assert not back.out_proj.bias.requires_grad
    assert back.out_proj.weight.requires_grad


# -- training ------------------------------------------------------------------------------------


@both
def test_gradients_are_those_of_finite_differences(mode: str) -> None:
    layer = made(mode)
    x = tokens(1, 3, 12)
    names = [name for name, _ in layer.named_parameters()]

    def out(*weights: Tensor) -> Tensor:
        given = dict(zip(names, weights, strict=True))
        called: Any = torch.func.functional_call(layer, given, (x, x, x))
        return (called[0] * torch.linspace(-1, 1, 12, dtype=torch.float64)).sum()

    weights = tuple(w.detach().clone().requires_grad_() for w in layer.parameters())
    assert torch.autograd.gradcheck(out, weights, eps=1e-6, atol=1e-7, rtol=1e-5)


@both
def test_fifty_steps_train_every_factor(mode: str) -> None:
    torch.manual_seed(0)
    kind, own = MODES[mode]
    layer = kind(12, 3, batch_first=True, **own)
    x, y = tokens(16, 6, 12).float(), tokens(16, 6, 12, seed=3).float().roll(1, 1)
    start = copy.deepcopy(layer.state_dict())
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (layer(x, x, x, need_weights=False)[0] - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]
    for name, weight in layer.state_dict().items():
        assert not torch.equal(weight, start[name]), name


@both
def test_state_dicts_and_seeds(mode: str) -> None:
    kind, own = MODES[mode]
    layers = []
    for _ in range(2):
        torch.manual_seed(11)
        layers.append(kind(12, 3, **own))
    for one, other in zip(*(layer.state_dict().values() for layer in layers), strict=True):
        assert torch.equal(one, other)
    file = io.BytesIO()
    torch.save(randomised(layers[0]).state_dict(), file)
    file.seek(0)
    layers[1].load_state_dict(torch.load(file, weights_only=True))
    x = tokens(6, 2, 12).float()
    assert torch.equal(layers[0](x, x, x)[0], layers[1](x, x, x)[0])


def test_a_new_layer_is_as_large_as_a_plain_one() -> None:
    torch.manual_seed(0)
    layer = HeadCoreAttention(96, 4, ranks=(2, 12, 48))
    entries = layer.head_tensor().detach()
    # The core has 3456 normal numbers: its energy deviates by √(2/3456) = 2.4 %, six times that.
    assert float(entries.square().mean()) == pytest.approx(1 / (2 * 96), rel=0.15)


def test_half_precision_and_autocast() -> None:
    layer = made("tucker").float()
    x = tokens(2, 6, 12).float()
    exact = layer(x, x, x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        narrow = layer(x, x, x, attn_mask=torch.zeros(6, 6, dtype=torch.bool))[0]
        assert narrow.dtype == torch.bfloat16
        kernel = layer(x, x, x, need_weights=False)[0]
    size = float(exact.detach().abs().max())
    for out in (narrow, kernel, layer.bfloat16()(*[x.bfloat16()] * 3)[0]):
        assert float((out.float() - exact).detach().abs().max()) < 0.1 * size


@both
def test_the_layer_compiles_to_one_graph(mode: str) -> None:
    layer = made(mode)
    x = tokens(2, 6, 12)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for given in ({"need_weights": False}, {}):
        torch.testing.assert_close(compiled(x, x, x, **given)[0], layer(x, x, x, **given)[0])


def test_a_model_shows_its_layers_as_attention_with_gradients() -> None:
    """Under the names of the plain layer, once, and nothing of it under its factors' names."""
    layer = HeadCoreAttention(8, 2, ranks=(1, 3, 5))
    model = nn.ModuleDict({"first": layer, "rest": nn.Linear(8, 8)})
    with torch.no_grad():
        layer.in_proj_bias.normal_()
    [found] = views(model)
    expected = layer.view()
    assert found.name == "first"
    for name in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    found.k.square().sum().backward()
    assert layer.core.grad is not None
