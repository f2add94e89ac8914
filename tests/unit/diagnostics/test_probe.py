"""Features of layers and heads, against attention written from the view; and no trace left."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from levelhead.base.errors import InputError
from levelhead.diagnostics.probe import probe
from levelhead.diagnostics.similarity import cka_matrix
from levelhead.nn.samformer import SAMformerNet
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.layouts import views


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(0.4 * numbers(*p.shape, seed=i))
    return model


def written(view: AttentionView, x: Tensor) -> tuple[Tensor, Tensor]:
    """(heads [h, b·n, d_v], layer [b·n, d]) of x [b, n, d], from the weights."""
    heads = []
    for i, g in enumerate(view.kv_group):
        q = x @ view.q[i].mT + (0 if view.q_bias is None else view.q_bias[i])
        k = x @ view.k[g].mT + (0 if view.k_bias is None else view.k_bias[g])
        v = x @ view.v[g].mT + (0 if view.v_bias is None else view.v_bias[g])
        heads.append((view.logit_scale * q @ k.mT).softmax(-1) @ v)
    out = sum(y @ view.o[i].mT for i, y in enumerate(heads))
    out = out if view.o_bias is None else out + view.o_bias
    return torch.stack([y.flatten(0, 1) for y in heads]), out.flatten(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention(batch_first: bool, bias: bool) -> None:
    model = filled(nn.MultiheadAttention(12, 3, bias=bias, batch_first=batch_first).double())
    [view] = views({n: t.detach() for n, t in model.state_dict().items()}, heads=3)
    x = numbers(4, 5, 12, seed=60)
    given = x if batch_first else x.transpose(0, 1)
    found = probe(model, (given, given, given))
    heads, layer = written(view, x)
    assert not found.missing
    assert torch.allclose(found.heads["torch_mha"], heads)
    assert torch.allclose(found.layers["torch_mha"], layer)
    mean = probe(model, {"query": given, "key": given, "value": given}, rows="sequences")
    assert torch.allclose(mean.layers["torch_mha"], layer.view(4, 5, 12).mean(1))
    assert torch.allclose(mean.heads["torch_mha"], heads.view(3, 4, 5, 4).mean(2))


def test_an_encoder_with_a_mask_of_padding() -> None:
    """The fast path of PyTorch's encoder calls no module; the probe must not depend on it."""
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = filled(nn.TransformerEncoder(layer, 2).double()).eval()
    x = numbers(4, 5, 12, seed=60)
    [first, _] = views({n: t.detach() for n, t in model.state_dict().items()}, heads=3)
    found = probe(model, x)
    heads, out = written(first, x)
    assert list(found.layers) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert torch.allclose(found.heads["layers.0.self_attn"], heads)
    assert torch.allclose(found.layers["layers.0.self_attn"], out)
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[0, 3:] = True
    masked = probe(model, {"src": x, "src_key_padding_mask": padding}, ["layers.1.self_attn"])
    assert masked.heads["layers.1.self_attn"].shape == (3, 20, 4)
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(m._forward_hooks for m in model.modules())


def transformers_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    tf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 32, "intermediate_size": 32, "max_position_embeddings": 64}
    tokens = {"input_ids": torch.arange(3, 24).reshape(3, 7)}
    image = {"pixel_values": numbers(3, 3, 8, 8, seed=1).float()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        made = {
            "bert": lambda: tf.BertModel(tf.BertConfig(**text)),
            "albert": lambda: tf.AlbertModel(tf.AlbertConfig(**text, embedding_size=16)),
            "gpt2": lambda: tf.GPT2Model(
                tf.GPT2Config(vocab_size=32, n_embd=24, n_layer=2, n_head=4, **ends)
            ),
            "llama": lambda: tf.LlamaModel(tf.LlamaConfig(**text, num_key_value_heads=2)),
            "vit": lambda: tf.ViTModel(
                tf.ViTConfig(**sizes, intermediate_size=32, image_size=8, patch_size=4)
            ),
        }[name]()
    return made, image if name == "vit" else tokens


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "albert"])
def test_heads_add_up_to_what_the_layer_writes(name: str) -> None:
    """Σ_i o_i y_i + o_bias is the layer's output: columns went to the right heads, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = transformers_model(name)
        model = filled(model)
        found = probe(model, batch)
        layers = list(views({n: t.detach() for n, t in model.state_dict().items()}, heads=4))
    assert not found.missing
    assert len(found.heads) == len(layers) == (1 if name == "albert" else 2)
    for view, heads in zip(layers, found.heads.values(), strict=True):
        out = torch.einsum("hmv,hrv->rm", view.o, heads)
        out = out if view.o_bias is None else out + view.o_bias
        assert torch.allclose(out, list(found.layers.values())[layers.index(view)], atol=1e-4)
    joined = cka_matrix(next(iter(found.heads.values())).unbind())
    assert joined.shape == (4, 4)
    assert not joined.isnan().any()


def test_probing_leaves_no_trace_and_runs_in_eval_mode() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(12, 3, 16, 0.5, batch_first=True),
        nn.Flatten(0, 1),
        nn.BatchNorm1d(12),
    )
    model[1].eval()
    flags = [m.training for m in model.modules()]
    before = {n: t.detach().clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    x = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(3))
    one, other = probe(model, x), probe(model, x)
    assert torch.equal(one.layers["0.self_attn"], other.layers["0.self_attn"])
    assert not one.layers["0.self_attn"].requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    with pytest.raises(AttributeError):
        probe(model, "not a batch")
    assert [m.training for m in model.modules()] == flags
    assert not any(m._forward_hooks for m in model.modules())


def test_what_has_no_features_is_named() -> None:
    net = SAMformerNet(10, 4, width=3)
    found = probe(net, torch.randn(2, 3, 10))
    assert found.missing == {
        "samformer": "its output projection is no module of its own, so none can be watched"
    }
    pair = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": nn.MultiheadAttention(4, 2)})
    pair.forward = lambda x: pair["a"](x, x, x)[0]  # type: ignore[method-assign]
    found = probe(pair, torch.randn(3, 2, 4))
    assert list(found.layers) == ["a"]
    assert found.missing == {"b": "its output projection did not run on this batch"}
    with pytest.raises(InputError, match=r"no attention layer is called 'c': there are a, b"):
        probe(pair, torch.randn(3, 2, 4), ["c"])
    with pytest.raises(InputError, match=r"rows = 'batch'"):
        probe(pair, torch.randn(3, 2, 4), rows="batch")  # type: ignore[arg-type]


def test_one_process_of_several_may_probe_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of DistributedDataParallel shares buffers, and would wait for the others."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = nn.MultiheadAttention(8, 2), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.attention(x, x, x)[0].flatten(0, 1))  # type: ignore[no-any-return]

    def wait() -> None:
        raise AssertionError("the others are waited for")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(Own())
        monkeypatch.setattr(parallel, "_sync_buffers", wait)
        found = probe(parallel, torch.randn(5, 4, 8))
    finally:
        dist.destroy_process_group()
    assert list(found.heads) == ["module.attention"]
