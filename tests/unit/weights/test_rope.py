"""Rotary positions and masks as they follow from a config, without any weights."""

from __future__ import annotations

import math

import pytest
import torch

from levelhead.weights.layouts import find_layers
from levelhead.weights.plan import LayerPlan
from levelhead.weights.structure import Mask, Rope

HEADS, WIDTH = 2, 8
SHAPES = {
    f"model.layers.{n}.self_attn.{part}_proj.weight": (HEADS * WIDTH, HEADS * WIDTH)
    for n in range(2)
    for part in "qkvo"
}
PLAIN = [10000.0 ** (-f / 4) for f in range(4)]
LENGTH = {"original_max_position_embeddings": 64}


def plans(**settings: object) -> list[LayerPlan]:
    config = {"model_type": "llama", "num_attention_heads": HEADS, "rope_theta": 10000.0}
    return find_layers(SHAPES, {**config, **settings})[0]


def position(**settings: object) -> Rope:
    view = plans(**settings)[0].apply(lambda name: torch.ones(SHAPES[name]))
    assert isinstance(view.position, Rope)
    return view.position


def test_without_scaling_frequencies_fall_geometrically() -> None:
    assert position().frequencies == pytest.approx(PLAIN, rel=1e-12)
    assert position().scaling is None


def test_linear_scaling_divides() -> None:
    found = position(rope_scaling={"type": "linear", "factor": 4.0})
    assert found.frequencies == pytest.approx([f / 4 for f in PLAIN], rel=1e-12)


def test_llama3_keeps_fast_planes_and_stretches_slow_ones() -> None:
    found = position(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **LENGTH,
        }
    )
    expected = []
    for f in PLAIN:
        turns = 64 * f / (2 * math.pi)
        share = (turns - 1) / 3 if 1 < turns < 4 else float(turns >= 4)
        expected.append(f * share + f / 8 * (1 - share))
    assert found.frequencies == pytest.approx(expected, rel=1e-12)
    assert found.frequencies[0] == PLAIN[0]
    assert found.frequencies[-1] == PLAIN[-1] / 8


def test_longrope_takes_the_factors_of_short_inputs_and_says_so() -> None:
    found = position(
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 2.0, 4.0, 8.0],
            "long_factor": [16.0] * 4,
            **LENGTH,
        },
        max_position_embeddings=256,
    )
    expected = [f / s for f, s in zip(PLAIN, (1, 2, 4, 8), strict=True)]
    assert found.frequencies == pytest.approx(expected, rel=1e-12)
    assert found.temperature == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    assert found.scaling is not None
    assert "hold for inputs of up to 64 tokens" in found.scaling


def test_a_window_counts_the_token_itself() -> None:
    shapes = dict(SHAPES)
    found, _ = find_layers(
        shapes,
        {
            "model_type": "qwen2",
            "num_attention_heads": HEADS,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    )
    masks = [plan.apply(lambda name: torch.ones(shapes[name])).mask for plan in found]
    assert masks == [Mask(causal=True, window=4), Mask(causal=True)]
