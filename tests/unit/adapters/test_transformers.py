"""transformers' attention interface as a probe: tiny models from configs, offline."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import oracles.attention_maps as slow
from levelhead.adapters.transformers import attention_probe
from levelhead.base.errors import InputError
from levelhead.diagnostics.attention_maps import AttentionCall, row_entropy
from levelhead.diagnostics.capture import MapCapture
from levelhead.weights import layouts

SIZES = {
    "vocab_size": 32,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {
    "vocab_size": 32,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": 32,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 5,
    "decoder_start_token_id": 0,
}
BLOOM = {
    "vocab_size": 32,
    "hidden_size": 24,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VIT = {**{k: SIZES[k] for k in list(SIZES)[1:5]}, "image_size": 8, "patch_size": 4}
CAP = {**GROUPED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "sliding_window": 4}

# Model, config class, settings; which family it stands for.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", SIZES),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", CAP),
    "bloom": ("BloomForCausalLM", "BloomConfig", BLOOM),
    "vit": ("ViTModel", "ViTConfig", VIT),
    "albert": ("AlbertModel", "AlbertConfig", {**SIZES, "embedding_size": 8}),
}
INTERFACED = [name for name in MODELS if name != "bloom"]
TOKENS = torch.randint(3, 31, (2, 7), generator=torch.Generator().manual_seed(1))
PADDING = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


def built(name: str, attention: str) -> tuple[nn.Module, list[str]]:
    """A tiny model with weights far from the usual start, and its layers' names."""
    kind, config, settings = MODELS[name]
    made = getattr(tf, config)(**settings, attn_implementation=attention)
    model: nn.Module = getattr(tf, kind)(made)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 1.5 / max(parameter.shape[-1], 1) ** 0.5)
    return model.eval(), [plan.name for plan in layouts.match(model).plans]


def given(name: str, padded: bool) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))}
    batch = {"input_ids": TOKENS}
    if padded:
        batch["attention_mask"] = PADDING
    return batch | ({"decoder_input_ids": TOKENS[:, :5]} if name == "t5" else {})


def eager_matrices(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The matrices that the model itself returns, [b, h, n, m] a layer and kind."""
    out = model(**batch, output_attentions=True)
    return {k: list(v) for k, v in out.items() if k.endswith("attentions") and v is not None}


def entropy(weights: Tensor) -> Tensor:
    return -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2)).detach()


def numbers(out: Any) -> list[Tensor]:
    return [v.detach() for v in out.values() if isinstance(v, Tensor)]


@pytest.mark.parametrize("with_probe", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_entropies_are_those_of_the_eager_matrices(
    name: str, attention: str, with_probe: bool
) -> None:
    """Relative bias, ALiBi, soft cap, groups, padding: all layers, and outputs equal by the bit.

    Padded rows count in the model's matrices as they do in the maps; only BLOOM and soft caps
    need the eager way in either case.
    """
    if name == "bloom" and with_probe:
        pytest.skip("BLOOM does not use the interface")
    attention = "eager" if name in ("bloom", "gemma2") else attention
    reference, names = built(name, "eager")
    model, _ = built(name, attention)
    batch = given(name, padded=name != "vit")
    matrices = eager_matrices(reference, batch)
    expected = {
        layer: entropy(weights)
        for layer, weights in zip(names, _in_order(names, matrices), strict=True)
    }
    plain = numbers(model(**batch))
    probes = [attention_probe()] if with_probe else []
    with MapCapture(model, names, probes) as capture:
        capture.armed = True
        armed = numbers(model(**batch))
        found = capture.collect()
    assert capture.missing() == {}
    assert all(map(torch.equal, plain, armed))
    for layer in names:
        torch.testing.assert_close(found[layer].entropy, expected[layer], atol=1e-5, rtol=0)


def _in_order(names: list[str], matrices: dict[str, list[Tensor]]) -> list[Tensor]:
    kinds = {"EncDecAttention": "cross_attentions", "encoder.block": "encoder_attentions"}
    if "attentions" in matrices:
        # ALBERT's one layer runs twice: the first time counts.
        return matrices["attentions"][: len(names)]
    left = {k: iter(v) for k, v in matrices.items()}
    return [
        next(left[next((k for part, k in kinds.items() if part in n), "decoder_attentions")])
        for n in names
    ]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_probe_sees_groups_scale_and_cap(attention: str) -> None:
    model, _ = built("llama", attention)
    calls: list[tuple[str, AttentionCall]] = []
    with attention_probe().attach(model, lambda path, call: calls.append((path, call))):
        model(**given("llama", padded=False))
    assert [path for path, _ in calls] == [f"model.layers.{i}.self_attn" for i in range(2)]
    call = calls[0][1]
    assert call.q is not None
    assert call.k is not None
    assert (call.q.shape[1], call.k.shape[1]) == (4, 2)
    assert call.scale == pytest.approx(8**-0.5)
    logits, where = call.block()
    expected = slow.entropies(logits, where)
    torch.testing.assert_close(row_entropy(call).double(), expected, atol=1e-5, rtol=0)
    capped, _ = built("gemma2", "eager")
    with attention_probe().attach(capped, lambda path, call: calls.append((path, call))):
        capped(**given("gemma2", padded=False))
    assert calls[-1][1].soft_cap == 2.0
    assert calls[-1][1].block()[0].abs().max() <= 2.0


@pytest.mark.parametrize("name", INTERFACED)
def test_everything_is_restored(name: str) -> None:
    """The interface, the config, the model; also after an exception."""
    model, _ = built(name, "sdpa" if name != "gemma2" else "eager")
    interface = tf.AttentionInterface
    shared = dict(interface._global_mapping)
    local = tf.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before, config = dict(vars(local)), copy.deepcopy(model.config.to_dict())  # type: ignore
    with (
        pytest.raises(RuntimeError, match="inside"),
        attention_probe().attach(model, lambda path, call: None),
    ):
        raise RuntimeError("inside")
    assert dict(interface._global_mapping) == shared
    assert dict(vars(local)) == before
    assert model.config.to_dict() == config  # type: ignore[operator, union-attr]
    assert not any(m._forward_hooks for m in model.modules())


def test_other_models_pass_through() -> None:
    model, _ = built("bert", "sdpa")
    other, _ = built("llama", "eager")
    batch = given("llama", padded=True)
    plain, calls = numbers(other(**batch)), []
    with attention_probe().attach(model, lambda path, call: calls.append(path)):
        with attention_probe().attach(model, lambda path, call: calls.append(path)):
            assert all(map(torch.equal, plain, numbers(other(**batch))))
        assert calls == []
        model(**given("bert", padded=False))
    assert calls == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]


def test_training_is_the_same_by_the_bit() -> None:
    """Dropout, gradients and the random state, with the probe and without."""

    def step(armed: bool) -> list[Tensor]:
        model, names = built("bert", "sdpa")
        model.train()
        torch.manual_seed(0)
        with MapCapture(model, names, [attention_probe()]) as capture:
            capture.armed = armed
            model(**given("bert", padded=True))[0].square().sum().backward()
            assert set(capture.collect()) == (set(names) if armed else set())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [*gradients, torch.get_rng_state()]

    assert all(map(torch.equal, step(False), step(True)))


def test_flex_attention_is_missing_with_a_remedy() -> None:
    """A probe cannot read its block masks either."""
    model, names = built("bert", "sdpa")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flex_attention"  # type: ignore[union-attr]
    with MapCapture(model, names) as capture:
        capture.armed = True
        said = capture.missing()
    assert "flex_attention" in said[names[0]]
    assert said[names[0]].endswith("seen: choose attn_implementation='sdpa'")


def test_a_model_without_the_interface_is_refused() -> None:
    model, names = built("bloom", "eager")
    with pytest.raises(InputError, match=r"BloomForCausalLM.*leave the probe away"):
        MapCapture(model, names, [attention_probe()])
