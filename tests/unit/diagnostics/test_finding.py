"""From layer names to modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from levelhead.base.errors import InputError
from levelhead.diagnostics.capture import MapCapture
from levelhead.diagnostics.finding import compiled_at, find_modules


def test_the_whole_model_by_its_family_or_by_nothing() -> None:
    model = nn.MultiheadAttention(8, 2)
    for name in ("", "torch_mha"):
        [found] = find_modules(model, [name])
        assert found.module is model
        assert (found.name, found.way, found.heads) == (name, "module", 2)


def test_a_parent_of_one_attention_module_stands_for_it() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2), nn.TransformerDecoderLayer(8, 2))
    encoder, decoder, inner = find_modules(model, ["0", "1", "0.self_attn"])
    assert encoder.module is inner.module is model[0].self_attn
    assert (encoder.way, decoder.way) == ("module", "listen")
    assert inner.around is model[0]


def test_own_subclasses_are_listened_to() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            return super().forward(*args, **kwargs)  # type: ignore[arg-type]

    assert find_modules(Own(8, 2), [""])[0].way == "listen"


def test_parametrised_weights_are_not_computed_anew_in_training() -> None:
    """spectral_norm moves its vectors whenever its weight is read in training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    parametrizations.spectral_norm(model[0], "in_proj_weight")
    tokens = torch.randn(5, 2, 8)
    model.train()
    assert find_modules(model, ["0"])[0].way == "listen"
    with MapCapture(model, ["0"]) as capture:
        for _ in range(2):
            capture.armed = True
            model[0](tokens, tokens, tokens)
        armed = {n: b.clone() for n, b in model.named_buffers()}
        assert list(capture.collect()) == ["0"]
    torch.manual_seed(0)
    twin = nn.Sequential(nn.MultiheadAttention(8, 2))
    parametrizations.spectral_norm(twin[0], "in_proj_weight")
    tokens = torch.randn(5, 2, 8)
    for _ in range(2):
        twin[0](tokens, tokens, tokens)
    assert armed
    assert all(torch.equal(b, armed[n]) for n, b in twin.named_buffers())
    assert find_modules(model.eval(), ["0"])[0].way == "module"


def test_heads_are_those_that_the_module_or_the_caller_says() -> None:
    model = nn.Linear(2, 2)
    assert find_modules(model, [""])[0].heads is None
    model.num_attention_heads = 4  # type: ignore[assignment]
    assert find_modules(model, [""])[0].heads == 4
    assert find_modules(model, [""], {"": 2})[0].heads == 2


def test_what_is_compiled_around_and_below() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    modules = dict(model.named_modules())
    assert compiled_at("0.0", modules) is None
    model[0].compile(backend="eager")
    assert compiled_at("0.0", modules) == compiled_at("0", modules) == "'0'"
    assert compiled_at("1", modules) is None
    assert compiled_at("", modules) == "'0'"
    model.compile(backend="eager")
    assert compiled_at("1", modules) == "the model"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match=r"layer 'here'.*\(it has 0, 1, …\)"):
        find_modules(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["here"])
