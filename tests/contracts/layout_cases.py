"""One row per family for the proof of the layouts: a tiny model, randomly filled, and its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import nn

_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {
    "vocab_size": 32,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_IMAGE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
}
_PAIR = {
    "vocab_size": 32,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 1,
    "max_position_embeddings": 64,
    **_ENDS,
}
_LATENT = {
    **_TEXT,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
}
_T5 = {
    "vocab_size": 32,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 5,
}
_SOUND = {
    **_IMAGE,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 3],
    "conv_stride": [2, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
_LONG = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {**_LONG, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Case:
    """A family: the plan that must read it, how the model is made, how many layers it has."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    layers: int = 2
    inputs: str = "tokens"

    def __str__(self) -> str:
        return self.name


def _row(
    name: str,
    model: str,
    config: str,
    settings: dict[str, Any],
    *,
    family: str | None = None,
    layers: int = 2,
    inputs: str = "tokens",
) -> Case:
    def make() -> nn.Module:
        made = getattr(tf, config)(**settings)
        return getattr(tf, model)(made)

    return Case(name, family or name, make, layers, inputs)


def _clip(**more: Any) -> dict[str, Any]:
    return {"text_config": {**_TEXT, **_ENDS, **more}, "vision_config": _IMAGE}


CASES = (
    _row("bert", "BertModel", "BertConfig", _TEXT),
    _row(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 32, "n_embd": 24, "n_layer": 2, "n_head": 4},
    ),
    _row(
        "gpt2_inverse",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 32,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 4,
            "scale_attn_by_inverse_layer_idx": True,
        },
        family="gpt2",
    ),
    _row("llama", "LlamaForCausalLM", "LlamaConfig", _GROUPED),
    _row(
        "llama_bias",
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_GROUPED, "attention_bias": True, "head_dim": 8, "rope_parameters": _LLAMA3},
        family="llama",
    ),
    _row(
        "llama_linear",
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_GROUPED, "rope_parameters": {**_LONG, "rope_type": "linear"}},
        family="llama",
    ),
    _row(
        "llama_yarn",
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_GROUPED, "head_dim": 16, "rope_parameters": {**_LONG, "rope_type": "yarn"}},
        family="llama",
    ),
    _row("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}),
    _row("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {**_TEXT, "hidden_size": 32}),
    _row(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 32,
            "d_model": 24,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 5,
        },
        layers=6,
        inputs="pair",
    ),
    _row(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{k: v for k, v in _PAIR.items() if k != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 7,
            "max_target_positions": 8,
        },
        layers=6,
        inputs="sound",
    ),
    _row("vit", "ViTModel", "ViTConfig", _IMAGE, inputs="image"),
    _row("roberta", "RobertaModel", "RobertaConfig", {**_TEXT, **_ENDS}, family="bert"),
    _row(
        "electra", "ElectraModel", "ElectraConfig", {**_TEXT, "embedding_size": 16}, family="bert"
    ),
    _row(
        "bert_decoder",
        "BertLMHeadModel",
        "BertConfig",
        {**_TEXT, "is_decoder": True},
        family="bert",
    ),
    _row(
        "esm",
        "EsmModel",
        "EsmConfig",
        {
            **_TEXT,
            "position_embedding_type": "rotary",
            "pad_token_id": 0,
            "mask_token_id": 31,
            "hidden_size": 32,
        },
    ),
    _row(
        "distilbert",
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 32, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 32},
    ),
    _row("albert", "AlbertModel", "AlbertConfig", {**_TEXT, "embedding_size": 16}, layers=1),
    _row(
        "deberta",
        "DebertaV2Model",
        "DebertaV2Config",
        {
            **_TEXT,
            "relative_attention": True,
            "position_buckets": 4,
            "max_relative_positions": -1,
            "pos_att_type": ["c2p", "p2c"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
        },
        family="deberta-v2",
    ),
    _row(
        "deberta_own",
        "DebertaV2Model",
        "DebertaV2Config",
        {
            **_TEXT,
            "relative_attention": True,
            "max_relative_positions": 4,
            "pos_att_type": ["p2c"],
            "share_att_key": False,
        },
        family="deberta-v2",
    ),
    _row(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 32,
            "hidden_size": 24,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 3,
            "attention_types": [[["global", "local"], 1]],
            "intermediate_size": 32,
        },
    ),
    _row(
        "gptj",
        "GPTJForCausalLM",
        "GPTJConfig",
        {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    ),
    _row(
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 32, "hidden_size": 24, "n_layer": 2, "n_head": 6},
    ),
    _row(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    ),
    _row(
        "falcon_grouped",
        "FalconForCausalLM",
        "FalconConfig",
        {
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
        },
        family="falcon",
    ),
    _row(
        "falcon_alibi",
        "FalconForCausalLM",
        "FalconConfig",
        {
            "vocab_size": 32,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
            "multi_query": False,
            "bias": True,
        },
        family="falcon",
    ),
    _row("mistral", "MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 3}),
    _row(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_GROUPED, "num_local_experts": 2},
        family="mistral",
    ),
    _row("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    _row(
        "qwen2_sliding",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        family="qwen2",
    ),
    _row("gemma", "GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}),
    _row(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **_GROUPED,
            "head_dim": 8,
            "sliding_window": 3,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 1.5,
            "attn_implementation": "eager",
        },
    ),
    _row(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_GROUPED,
            "head_dim": 8,
            "sliding_window": 3,
            "query_pre_attn_scalar": 10,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    _row(
        "phi",
        "PhiForCausalLM",
        "PhiConfig",
        {**_TEXT, "hidden_size": 32, "partial_rotary_factor": 0.5},
    ),
    _row(
        "phi_norm",
        "PhiForCausalLM",
        "PhiConfig",
        {**_TEXT, "hidden_size": 32, "qk_layernorm": True},
        family="phi",
    ),
    _row("phi3", "Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "pad_token_id": 0}),
    _row(
        "modernbert",
        "ModernBertModel",
        "ModernBertConfig",
        {**_TEXT, **_ENDS, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
    ),
    _row(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 32,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 32,
            "word_embed_proj_dim": 24,
        },
    ),
    _row("bart", "BartForConditionalGeneration", "BartConfig", _PAIR, layers=6, inputs="pair"),
    _row(
        "mbart",
        "MBartForConditionalGeneration",
        "MBartConfig",
        _PAIR,
        family="whisper",
        layers=6,
        inputs="pair",
    ),
    _row("marian", "MarianMTModel", "MarianConfig", _PAIR, family="bart", layers=6, inputs="pair"),
    _row(
        "clip", "CLIPModel", "CLIPConfig", {**_clip(), "projection_dim": 8}, layers=4, inputs="both"
    ),
    _row("siglip", "SiglipTextModel", "SiglipTextConfig", {**_TEXT, **_ENDS}),
    _row(
        "siglip_vision",
        "SiglipVisionModel",
        "SiglipVisionConfig",
        _IMAGE,
        family="siglip",
        layers=3,
        inputs="image",
    ),
    _row("deit", "DeiTModel", "DeiTConfig", _IMAGE, family="vit", inputs="image"),
    _row(
        "beit",
        "BeitModel",
        "BeitConfig",
        {**_IMAGE, "use_relative_position_bias": True},
        inputs="image",
    ),
    _row(
        "beit_shared",
        "BeitModel",
        "BeitConfig",
        {**_IMAGE, "use_shared_relative_position_bias": True},
        family="beit",
        inputs="image",
    ),
    _row("dinov2", "Dinov2Model", "Dinov2Config", _IMAGE, inputs="image"),
    _row(
        "patchtst",
        "PatchTSTModel",
        "PatchTSTConfig",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 24,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "ffn_dim": 32,
            "norm_type": "layernorm",
        },
        inputs="series",
    ),
    _row(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**_LATENT, "q_lora_rank": 12},
        family="deepseek",
    ),
    _row(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_LATENT, "q_lora_rank": 12},
        family="deepseek",
    ),
    _row(
        "deepseek_lite",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**_LATENT, "q_lora_rank": None},
        family="deepseek",
    ),
    _row("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    _row("stablelm", "StableLmForCausalLM", "StableLmConfig", {**_GROUPED, "hidden_size": 32}),
    _row("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", _GROUPED),
    _row(
        "granite", "GraniteForCausalLM", "GraniteConfig", {**_GROUPED, "attention_multiplier": 0.3}
    ),
    _row(
        "smollm3",
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {**_GROUPED, "no_rope_layers": [1, 0], "pad_token_id": 0},
    ),
    _row("cohere", "CohereForCausalLM", "CohereConfig", {**_GROUPED, "use_qk_norm": True}),
    _row(
        "cohere2",
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {**_GROUPED, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    _row("glm", "GlmForCausalLM", "GlmConfig", {**_GROUPED, "head_dim": 8, "pad_token_id": 0}),
    _row("xlm_roberta", "XLMRobertaModel", "XLMRobertaConfig", {**_TEXT, **_ENDS}, family="bert"),
    _row("camembert", "CamembertModel", "CamembertConfig", {**_TEXT, **_ENDS}, family="bert"),
    _row(
        "mt5", "MT5ForConditionalGeneration", "MT5Config", _T5, family="t5", layers=6, inputs="pair"
    ),
    _row(
        "umt5",
        "UMT5ForConditionalGeneration",
        "UMT5Config",
        _T5,
        family="t5",
        layers=6,
        inputs="pair",
    ),
    _row(
        "pegasus",
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        _PAIR,
        family="whisper",
        layers=6,
        inputs="pair",
    ),
    _row(
        "m2m_100",
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        _PAIR,
        family="whisper",
        layers=6,
        inputs="pair",
    ),
    _row(
        "blenderbot",
        "BlenderbotForConditionalGeneration",
        "BlenderbotConfig",
        _PAIR,
        family="whisper",
        layers=6,
        inputs="pair",
    ),
    _row(
        "opt_post",
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 32,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 32,
            "word_embed_proj_dim": 16,
            "do_layer_norm_before": False,
        },
        family="opt",
    ),
    _row("clip_text", "CLIPTextModel", "CLIPTextConfig", {**_TEXT, **_ENDS}, family="clip"),
    _row(
        "clip_vision", "CLIPVisionModel", "CLIPVisionConfig", _IMAGE, family="clip", inputs="image"
    ),
    _row(
        "siglip_both",
        "SiglipModel",
        "SiglipConfig",
        _clip(),
        family="siglip",
        layers=5,
        inputs="both",
    ),
    _row(
        "yolos",
        "YolosModel",
        "YolosConfig",
        {**_IMAGE, "image_size": [8, 8], "num_detection_tokens": 3},
        family="vit",
        inputs="image",
    ),
    _row("vit_msn", "ViTMSNModel", "ViTMSNConfig", _IMAGE, family="vit", inputs="image"),
    _row(
        "data2vec_vision",
        "Data2VecVisionModel",
        "Data2VecVisionConfig",
        {**_IMAGE, "use_relative_position_bias": True},
        family="beit",
        inputs="image",
    ),
    _row(
        "dinov2_registers",
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        _IMAGE,
        family="dinov2",
        inputs="image",
    ),
    _row(
        "glm4",
        "Glm4ForCausalLM",
        "Glm4Config",
        {**_GROUPED, "head_dim": 8, "pad_token_id": 0},
        family="glm",
    ),
    _row(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_GROUPED,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
        family="qwen2",
    ),
    _row(
        "phi3_long",
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            **_GROUPED,
            "pad_token_id": 0,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 4.0],
            },
        },
        family="phi3",
    ),
    _row(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **_GROUPED,
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
        },
        family="qwen3",
    ),
)


CASES += (
    _row(
        "olmo3",
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {**_GROUPED, "sliding_window": 3},
        family="olmo2",
    ),
    _row("ernie4_5", "Ernie4_5ForCausalLM", "Ernie4_5Config", {**_GROUPED, "head_dim": 6}),
    _row("eurobert", "EuroBertModel", "EuroBertConfig", {**_TEXT, **_ENDS, "mask_token_id": 3}),
    _row(
        "rembert",
        "RemBertModel",
        "RemBertConfig",
        {**_TEXT, "input_embedding_size": 12},
        family="bert",
    ),
    _row(
        "roberta_prelayernorm",
        "RobertaPreLayerNormModel",
        "RobertaPreLayerNormConfig",
        {**_TEXT, "pad_token_id": 0},
    ),
    _row(
        "jamba",
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_GROUPED,
            "attn_layer_period": 1,
            "attn_layer_offset": 0,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
        },
    ),
    _row(
        "mpt",
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 32, "d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    ),
    _row(
        "mpt_three_heads",
        "MptForCausalLM",
        "MptConfig",
        {
            "vocab_size": 32,
            "d_model": 24,
            "n_heads": 3,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"softmax_scale": 0.7},
        },
        family="mpt",
    ),
    _row(
        "deberta_first",
        "DebertaModel",
        "DebertaConfig",
        {
            **_TEXT,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "max_relative_positions": 5,
        },
        family="deberta",
    ),
    _row("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", _SOUND, inputs="wave"),
    _row(
        "wav2vec2_stable",
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {**_SOUND, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        family="wav2vec2",
        inputs="wave",
    ),
    _row("hubert", "HubertModel", "HubertConfig", _SOUND, family="wav2vec2", inputs="wave"),
)


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights far from their usual start: uniform attention would prove nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise / max(parameter.shape[-1], 1) ** 0.5 * 1.5)
    return model.eval()


def run(model: nn.Module, kind: str) -> None:
    """One forward pass on fixed inputs."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 31, (1, 7), generator=generator)
    image = torch.randn(1, 3, 8, 8, generator=generator)
    given: dict[str, Any] = {
        "tokens": {"input_ids": tokens},
        "pair": {"input_ids": tokens, "decoder_input_ids": tokens[:, :5]},
        "image": {"pixel_values": image},
        "both": {"input_ids": tokens, "pixel_values": image},
        "sound": {
            "input_features": torch.randn(1, 8, 14, generator=generator),
            "decoder_input_ids": tokens[:, :5],
        },
        "wave": {"input_values": torch.randn(1, 30, generator=generator)},
        "series": {"past_values": torch.randn(1, 16, 2, generator=generator)},
    }[kind]
    with torch.no_grad():
        model(**given)
