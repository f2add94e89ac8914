"""PyTorch's own attention in every form of its arguments, against the weights it returns itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.diagnostics.attention_maps import row_entropy
from levelhead.diagnostics.capture import MapCapture
from levelhead.diagnostics.torch_attention import function_call, module_call, sdpa_call

N, B, D, H = 5, 2, 8, 2
CAUSAL = nn.Transformer.generate_square_subsequent_mask(N)
PADDING = torch.tensor([[False] * N, [False] * 3 + [True] * 2])


def x(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def entropy_of(weights: Tensor) -> Tensor:
    return -torch.special.xlogy(weights, weights).sum(-1)


# Arguments of the module, and of its forward; d of keys and values is kdim and vdim.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "no bias": ({"bias": False}, {}),
    "other widths": ({"kdim": 6, "vdim": 3}, {}),
    "key and value biases": ({"add_bias_kv": True}, {}),
    "zeros appended": ({"add_zero_attn": True}, {}),
    "both appended, masked": (
        {"add_bias_kv": True, "add_zero_attn": True},
        {"attn_mask": CAUSAL < 0, "key_padding_mask": PADDING},
    ),
    "causal": ({}, {"attn_mask": CAUSAL}),
    "causal hint": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "boolean mask": ({}, {"attn_mask": CAUSAL < 0}),
    "mask by head": ({}, {"attn_mask": x(9, B * H, N, N)}),
    "padding": ({}, {"key_padding_mask": PADDING}),
    "padding of numbers": (
        {"batch_first": True},
        {"key_padding_mask": torch.zeros(B, N).masked_fill(PADDING, -math.inf)},
    ),
    "causal hint and padding": (
        {},
        {"attn_mask": CAUSAL < 0, "is_causal": True, "key_padding_mask": PADDING},
    ),
}


def module_and_inputs(options: dict[str, Any]) -> tuple[nn.MultiheadAttention, list[Tensor]]:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(D, H, **options)
    nn.init.normal_(module.out_proj.weight)
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
    widths = (D, module.kdim, module.vdim)
    if widths == (D, D, D):
        tokens = x(1, B, N, D) if module.batch_first else x(1, N, B, D)
        return module, [3 * tokens] * 3
    return module, [3 * x(i, N, B, width) for i, width in enumerate(widths)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_every_form_of_arguments(form: str, need_weights: bool, training: bool, grad: bool) -> None:
    """Slow path, fast path (eval without gradients) and function: one entropy, nothing changed."""
    options, given = FORMS[form]
    module, inputs = module_and_inputs(options)
    _, weights = module(*inputs, **given, average_attn_weights=False)
    expected = entropy_of(weights).mean((0, 2))
    module.train(training)
    with torch.set_grad_enabled(grad), MapCapture(module, [""]) as capture:
        plain = module(*inputs, **given, need_weights=need_weights)
        capture.armed = True
        armed = module(*inputs, **given, need_weights=need_weights)
        found = capture.collect()[""]
    torch.testing.assert_close(found.entropy, expected.detach(), atol=1e-5, rtol=0)
    assert torch.equal(plain[0], armed[0])
    assert capture.missing() == {}


@pytest.mark.parametrize("form", FORMS)
def test_row_by_row(form: str) -> None:
    options, given = FORMS[form]
    module, inputs = module_and_inputs(options)
    _, weights = module(*inputs, **given, average_attn_weights=False)
    found = row_entropy(module_call(module, inputs, given))
    torch.testing.assert_close(found, entropy_of(weights).detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched_input(batch_first: bool) -> None:
    module, _ = module_and_inputs({"batch_first": batch_first})
    tokens, padding = 3 * x(1, N, D), PADDING[1]
    given = {"key_padding_mask": padding, "attn_mask": CAUSAL < 0}
    _, weights = module(tokens, tokens, tokens, **given, average_attn_weights=False)
    found = row_entropy(module_call(module, (tokens,) * 3, given))
    torch.testing.assert_close(found[0], entropy_of(weights).detach(), atol=1e-5, rtol=0)


def test_the_function_called_directly() -> None:
    """An own module that calls PyTorch's function with separate projections."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, _ = module_and_inputs({"kdim": 6, "vdim": 3})

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            m = self.inner
            return nn.functional.multi_head_attention_forward(
                q, k, v, D, H, None, m.in_proj_bias, None, None, False, 0.0,  # type: ignore[arg-type]
                m.out_proj.weight, m.out_proj.bias, use_separate_proj_weight=True,
                q_proj_weight=m.q_proj_weight, k_proj_weight=m.k_proj_weight,
                v_proj_weight=m.v_proj_weight, average_attn_weights=False,
            )  # fmt: skip

    model = Own()
    inputs = [x(i, N, B, width) for i, width in enumerate((D, 6, 3))]
    _, weights = model(*inputs)
    found = row_entropy(_captured_call(model, inputs))
    torch.testing.assert_close(found, entropy_of(weights).detach(), atol=1e-5, rtol=0)


def _captured_call(model: nn.Module, inputs: list[Tensor]) -> Any:
    """What the function was called with, by PyTorch's own means of overriding."""
    calls: list[Any] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is nn.functional.multi_head_attention_forward:
                calls.append(function_call(args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Watch():
        model(*inputs)
    return calls[0]


def test_what_cannot_be_known_is_refused() -> None:
    module, (tokens, *_) = module_and_inputs({})
    args = (tokens, tokens, tokens, D, H, module.in_proj_weight, module.in_proj_bias)
    args = (*args, None, None, False, 0.0, module.out_proj.weight, module.out_proj.bias)
    with pytest.raises(InputError, match="static_k"):
        function_call(args, {"static_k": torch.zeros(B * H, N, D // H)})
    parts = [torch.ones(3, H, 4), torch.ones(2, H, 4)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(InputError, match="nested"):
        sdpa_call((nested, nested, nested), {}, None)


# ── TransformerEncoderLayer and TransformerEncoder ──


ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "post": ({}, {}),
    "pre": ({"norm_first": True}, {}),
    "causal": ({}, {"mask": CAUSAL, "is_causal": True}),
    "padded, nested": ({}, {"src_key_padding_mask": PADDING}),
    "padded, pre": ({"norm_first": True}, {"src_key_padding_mask": PADDING}),
    "padded and masked": ({}, {"src_key_padding_mask": PADDING, "mask": CAUSAL < 0}),
    "odd heads": ({"nhead": 1}, {}),
    "not batch first": ({"batch_first": False}, {}),
}


@pytest.fixture
def fast_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often PyTorch's kernel for a whole layer runs."""
    counted: list[int] = []
    kernel = torch._transformer_encoder_layer_fwd

    def counting(*args: Any) -> Any:
        counted.append(1)
        return kernel(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counting)
    return counted


@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested"
)
@pytest.mark.parametrize("form", ENCODERS)
@pytest.mark.parametrize("mode", ["eval, no grad", "eval", "training"])
def test_encoders_keep_their_fast_path(form: str, mode: str, fast_layers: list[int]) -> None:
    """Armed, disarmed or never watched: the same path and bits; the entropies of the slow path."""
    options, given = ENCODERS[form]
    torch.manual_seed(0)
    settings = {"d_model": D, "nhead": H, "dim_feedforward": 16, "dropout": 0.0}
    layer = nn.TransformerEncoderLayer(**{**settings, "batch_first": True, **options})
    model = nn.TransformerEncoder(layer, 2).train(mode == "training")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    tokens = x(1, B, N, D) if options.get("batch_first", True) else x(1, N, B, D)
    names = ["layers.0.self_attn", "layers.1.self_attn"]
    with torch.set_grad_enabled("no grad" not in mode):
        plain = model(tokens, **given)
        fast = len(fast_layers)
        with MapCapture(model, names) as capture:
            disarmed = model(tokens, **given)
            capture.armed = True
            armed = model(tokens, **given)
            found = capture.collect()
            capture.armed = False
    assert torch.equal(plain, disarmed)
    assert torch.equal(plain, armed)
    assert len(fast_layers) == 3 * fast
    assert capture.missing() == {}
    if mode == "eval, no grad" and form in ("post", "pre", "causal", "padded, nested"):
        assert fast == 2
    expected = _slow_entropies(model, tokens, given)
    for name, rows in zip(names, expected, strict=True):
        # Nested tensors have no rows for padding.
        real = ~PADDING if "nested" in form and fast else torch.ones(B, N, dtype=torch.bool)
        entropies = torch.stack([r[real].mean() for r in rows.transpose(0, 1)])
        torch.testing.assert_close(found[name].entropy, entropies, atol=1e-5, rtol=0)


def _slow_entropies(
    model: nn.TransformerEncoder, tokens: Tensor, given: dict[str, Any]
) -> list[Tensor]:
    """Row by row, from the weights that each self_attn returns on the slow path."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        module._forward_hooks.clear()
        kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
        seen.append(module(*args, **kwargs)[1])

    for layer in model.layers:
        layer.self_attn.register_forward_hook(hook, with_kwargs=True)  # type: ignore[union-attr]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model(tokens, **given)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return [entropy_of(w).detach() for w in seen]


def test_parents_and_subclasses_keep_the_fast_path(fast_layers: list[int]) -> None:
    """By the layer's name its attention is read; what could only be heard is named instead."""

    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(D, H, 16, batch_first=True))
    own = Own(D, H, batch_first=True)
    model.append(own)
    model.eval()
    tokens = x(1, B, N, D)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), MapCapture(model, ["0", "1"]) as capture:
            plain = [model[0](tokens), own(tokens, tokens, tokens)[0]]
            capture.armed = True
            armed = [model[0](tokens), own(tokens, tokens, tokens)[0]]
            assert all(map(torch.equal, plain, armed))
            assert set(capture.collect()) == ({"0", "1"} if grad else {"0"})
            assert grad or "fast path" in capture.missing()["1"]
    assert fast_layers == [1, 1]


def test_a_layer_alone_keeps_its_fast_path(fast_layers: list[int]) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 16, batch_first=True).eval()
    tokens = x(1, B, N, D)
    with torch.no_grad(), MapCapture(layer, ["self_attn"]) as capture:
        capture.armed = True
        layer(tokens)
        assert fast_layers == [1]
        assert list(capture.collect()) == ["self_attn"]
