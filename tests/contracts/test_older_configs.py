"""Configs of published checkpoints are older than the library: the same layers must come out.

Each row is the config that transformers writes now and how earlier versions wrote it.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from levelhead.weights.layouts import find_layers
from levelhead.weights.settings import Settings

pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from contracts.layout_cases import CASES, fill

NEWER_ONLY = ("rope_parameters", "layer_types", "attention_types", "attention_layers")
_SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}  # fmt: skip

# case → what earlier configs said instead, what the case's own config must be told to drop
OLDER: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10000.0, "rope_scaling": None},
    "llama_bias": {"rope_theta": 10000.0, "rope_scaling": _SCALED},
    "llama_linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen3": {"rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": None},
    "qwen2": {"rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": 4},
    "mistral": {"rope_theta": 10000.0},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000},
    "phi": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "stablelm": {"rope_theta": 10000, "partial_rotary_factor": 0.25},
    "gemma2": {"rope_theta": 10000.0},
    "modernbert": {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
                   "global_attn_every_n_layers": 3},
    "deberta": {"pos_att_type": "p2c|c2p"},
    "falcon_grouped": {"rope_theta": 10000.0},
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_an_older_config_means_the_same(name: str) -> None:
    [case] = [c for c in CASES if c.name == name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fill(case.make())
    state = model.state_dict()
    newer = model.config.to_dict()
    older = {k: v for k, v in newer.items() if k not in NEWER_ONLY} | OLDER[name]
    shapes = {n: tuple(t.shape) for n, t in state.items()}
    found = [find_layers(shapes, config)[0] for config in (newer, older)]
    assert [len(plans) for plans in found] == [case.layers] * 2
    for new, old in zip(*found, strict=True):
        a, b = new.apply(state.__getitem__), old.apply(state.__getitem__)
        for field in ("scale", "soft_cap", "mask", "kv_group", "family"):
            assert getattr(a, field) == getattr(b, field), field
        assert type(a.position) is type(b.position)
        for key, value in vars(a.position).items():
            other = getattr(b.position, key)
            same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
            assert same, (key, value, other)


def test_gemma3_without_layer_types() -> None:
    """Five local layers and a global one; bases differ, only the global is stretched."""
    config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 8,
            "sliding_window": 16,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "query_pre_attn_scalar": 16,
        },
    }
    shapes = {}
    for i in range(6):
        start = f"language_model.model.layers.{i}"
        for part in "qkvo":
            shapes[f"{start}.self_attn.{part}_proj.weight"] = (8, 8)
        for part in "qk":
            shapes[f"{start}.self_attn.{part}_norm.weight"] = (4,)
        for norm in ("input", "pre_feedforward"):
            shapes[f"{start}.{norm}_layernorm.weight"] = (8,)
    plans, _ = find_layers(shapes, config)
    found = [p.apply(lambda name: torch.zeros(shapes[name])) for p in plans]
    assert [(v.heads, v.d_k, v.scale) for v in found] == [(2, 4, 0.25)] * 6
    assert [v.mask.window for v in found] == [15] * 5 + [None]
    assert [v.position.theta for v in found] == [10000.0] * 5 + [1000000.0]
    assert [v.position.frequencies[0] for v in found] == [1.0] * 5 + [0.125]
    assert torch.equal(found[0].qk_norm.q_gain, torch.ones(4))


def test_an_argument_stands_before_the_config() -> None:
    shapes = {f"layers.0.self_attn.{n}_proj.weight": (8, 8) for n in "qkvo"}
    config = {
        "model_type": "llama",
        "num_attention_heads": 2,
        "rope_parameters": {"rope_theta": 5.0},
    }
    settings = Settings(config, arguments={"theta": 7.0, "heads": 4, "kv_heads": 4})
    [plan], _ = find_layers(shapes, settings)
    view = plan.apply(lambda name: torch.zeros(shapes[name]))
    assert (view.heads, view.position.theta) == (4, 7.0)
