"""Layers that share factors inside torch's own encoders and decoders: no shortcut past them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.nn.collaborative import CollaborativeAttention
from levelhead.nn.head_core import HeadCoreAttention
from levelhead.nn.replacement import replace_attention, restore_attention

# torch says so once, when the plain encoder nests its tensors.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def encoder(**kwargs: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    kwargs = {"batch_first": True, "dropout": 0.0} | kwargs
    layer = nn.TransformerEncoderLayer(8, 2, 16, **kwargs)
    nested = not kwargs.get("norm_first", False)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[0, 3:] = padded[2, 4:] = True
    return x, padded


class Counter:
    """How often the attention layers of a model were called."""

    def __init__(self, model: nn.Module) -> None:
        self.calls = 0
        for module in model.modules():
            if isinstance(module, HeadCoreAttention):
                project = module.project
                module.project = self.counted(project)  # type: ignore[method-assign]

    def counted(self, project: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls += 1
            return project(*args)

        return call


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_calls_the_new_layers(
    norm_first: bool, padding: bool, grad: bool, training: bool
) -> None:
    """Evaluation without gradients is where torch would read in_proj_weight, or nest tensors."""
    model = encoder(norm_first=norm_first)
    x, padded = batch()
    mask = padded if padding else None
    new = copy.deepcopy(model)
    assert replace_attention(new) == ("layers.0.self_attn", "layers.1.self_attn")
    counter = Counter(new)
    model.train(training)
    new.train(training)
    with torch.set_grad_enabled(grad):
        expected = model(x, src_key_padding_mask=mask)
        got = new(x, src_key_padding_mask=mask)
    assert counter.calls == 2
    seen = ~padded if padding else torch.ones_like(padded)  # nested tensors leave zeros behind
    torch.testing.assert_close(got[seen], expected[seen], **CLOSE)


def test_low_ranks_change_the_output_in_evaluation_too() -> None:
    model = encoder().eval()
    x, padded = batch()
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padded)
        replace_attention(model, (1, 2, 4))
        after = model(x, src_key_padding_mask=padded)
    assert (after - before)[~padded].abs().max() > 1e-3


def test_an_encoder_built_from_such_a_layer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    replace_attention(layer, (1, 4, 8))
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim"):
        model = nn.TransformerEncoder(layer, 2).eval()
    x, padded = batch()
    with torch.no_grad():
        assert model(x.float(), src_key_padding_mask=padded).isfinite().all()


def test_a_decoder_has_both_kinds_of_attention() -> None:
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0), 2).double()
    x, source = (t.transpose(0, 1) for t in (batch()[0], batch()[0].flip(1)))
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    before = model(x, source, tgt_mask=causal)
    names = replace_attention(model, shared=1.0)
    assert len(names) == 4
    assert isinstance(model.layers[0].multihead_attn, CollaborativeAttention)
    torch.testing.assert_close(model(x, source, tgt_mask=causal), before, **CLOSE)


def test_back_to_plain_layers() -> None:
    model = encoder()
    x, _ = batch()
    names = tuple(model.state_dict())
    before = model(x)
    replace_attention(model)
    assert tuple(model.state_dict()) != names
    assert restore_attention(model) == ("layers.0.self_attn", "layers.1.self_attn")
    assert set(model.state_dict()) == set(names)
    torch.testing.assert_close(model(x), before, **CLOSE)


def test_some_layers_and_shared_ones() -> None:
    model = encoder()
    assert replace_attention(model, layers=["layers.1.*"]) == ("layers.1.self_attn",)
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    twice = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)})
    twice["b"] = twice["a"]
    assert replace_attention(twice) == ("a", "b")
    assert twice["a"] is twice["b"]


def test_arguments_are_checked_before_anything_changes() -> None:
    with pytest.raises(InputError, match="from_attention"):
        replace_attention(nn.MultiheadAttention(8, 2))
    with pytest.raises(InputError, match="to_attention"):
        restore_attention(HeadCoreAttention(8, 2))
    with pytest.raises(InputError, match=r"^Linear holds no nn\.MultiheadAttention to replace\.$"):
        replace_attention(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"^TransformerEncoder holds no HeadCoreAttention or Coll"):
        restore_attention(encoder())
    with pytest.raises(InputError, match=r"layers=\[\] names no layer"):
        replace_attention(encoder(), layers=[])
    with pytest.raises(InputError, match="one of them"):
        replace_attention(encoder(), (1, 1, 1), shared=3)
    model = encoder()
    with pytest.raises(InputError, match=r"'layers.7.\*'"):
        replace_attention(model, layers=["layers.7.*"])
    model.layers[1].self_attn = nn.MultiheadAttention(8, 2, add_zero_attn=True)
    with pytest.raises(InputError, match=r"layers.1.self_attn: .*adds no token"):
        replace_attention(model)
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    # Ranks that one layer has and another does not.
    mixed = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 1)])
    with pytest.raises(InputError, match="1: ranks"):
        replace_attention(mixed, (2, 4, 8))
    assert type(mixed[0]) is nn.MultiheadAttention
