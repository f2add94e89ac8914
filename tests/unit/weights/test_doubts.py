"""Models that a row was not proved for: said, refused, or read as far as they can be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.doubts import NORM_UNKNOWN, NOT_AS_NAMED, caveats
from levelhead.weights.layouts import NothingMatched, Skip, find_layers, match, views

D, HEADS = 8, 2
SHAPES = {"q": (D, D), "k": (4, D), "v": (4, D), "o": (D, D)}
NAME = "model.layers.{}.self_attn"
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": 4}


def state(layers: int = 1, **more: tuple[int, ...]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    named = {f"{n}_proj.weight": s for n, s in SHAPES.items()} | more
    return {
        f"{NAME.format(i)}.{n}": torch.randn(s, generator=random)
        for i in range(layers)
        for n, s in named.items()
    }


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in tensors.items()}


def found(config: dict, tensors: dict[str, Tensor] | None = None, **more: object):
    return find_layers(shapes(tensors or state()), {**CONFIG, **config}, **more)


def test_an_unknown_type_is_read_by_names_and_said_so() -> None:
    [plan], skipped = found({"model_type": "unheard_of"})
    view = plan.apply(state().__getitem__)
    assert not skipped
    said = (
        "model_type unheard_of is not among those the row llama was proved for: read by its "
        "parameters' names alone"
    )
    assert caveats(view) == plan.caveats == (said,)
    assert view.origin("family").how == "assumed"


@pytest.mark.parametrize(
    ("config", "layout"),
    [({"model_type": "llama"}, None), ({}, None), ({"model_type": "unheard_of"}, "llama")],
)
def test_a_known_type_no_type_or_a_chosen_row_needs_no_caveat(
    config: dict, layout: str | None
) -> None:
    [plan], _ = found(config, layout=layout)
    assert plan.caveats == ()


RISKS = [
    {"use_qk_norm": True},
    {"no_rope_layers": [0, 1]},
    {"attention_sinks": 4},
    {"attn_output_gate": True},
    {"attention_chunk_size": 32},
    {"attn_temperature_tuning": True},
    {"clip_qkv": 8.0},
    {"attn_logit_softcapping": 50.0},
    {"attention_multiplier": 0.1},
    {"key_multiplier": 0.5},
    {"alibi": True},
    {"rope_interleave": True},
    {"layer_types": ["chunked_attention"]},
    {"layer_types": ["sliding_attention"], "sliding_window": 4},
    {"sliding_window": 4},
]


@pytest.mark.parametrize("risk", RISKS, ids=lambda r: next(iter(r)))
def test_a_setting_that_changes_attention_and_is_not_read_is_a_refusal(risk: dict) -> None:
    for kind in ({"model_type": "unheard_of"}, {}):
        plans, [skip] = found({**kind, **risk})
        assert not plans
        assert skip.name == NAME.format(0)
        assert skip.reason.startswith(f"the config's {next(iter(risk))} = ")
    assert found({"model_type": "unheard_of", **risk}, layout="llama")[0], "the user chose the row"


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_qk_norm": False},
        {"no_rope_layers": [1, 0]},
        {"attention_sinks": None},
        {"clip_qkv": None},
        {"key_multiplier": 1.0},
        {"layer_types": ["full_attention"], "sliding_window": 4},
        {"use_sliding_window": False, "sliding_window": 4},
    ],
)
def test_the_same_settings_switched_off_are_none(harmless: dict) -> None:
    plans, skipped = found({"model_type": "unheard_of", **harmless})
    assert (len(plans), skipped) == (1, [])


@pytest.mark.parametrize("kind", sorted(NOT_AS_NAMED))
def test_types_known_to_differ_are_refused(kind: str) -> None:
    plans, [skip] = found({"model_type": kind})
    assert not plans
    assert skip.reason.startswith(f"model_type {kind}: ")


def test_a_part_of_a_composite_model_counts() -> None:
    """Llama 4 names its text model's type inside text_config."""
    tensors = {f"language_model.{n}": t for n, t in state().items()}
    inner = {**CONFIG, "model_type": "llama4_text"}
    plans, [skip] = find_layers(shapes(tensors), {"model_type": "llama4", "text_config": inner})
    assert not plans
    assert "llama4" in skip.reason


def test_one_row_of_gains_for_all_queries_is_ambiguous() -> None:
    """OLMo 2 norms over all heads at once, others each head: names and shapes are the same."""
    gains = {"q_norm.weight": (D,), "k_norm.weight": (4,)}
    plans, [skip] = found({"model_type": "unheard_of"}, state(**gains))
    assert not plans
    assert "one norm over the queries of all heads, or one for each head" in skip.reason
    each = {"q_norm.weight": (4,), "k_norm.weight": (4,)}
    assert found({"model_type": "unheard_of"}, state(**each))[0]


# ── one layer that cannot be read does not hide the others ──


def gated() -> dict[str, Tensor]:
    tensors = state(2)
    tensors[f"{NAME.format(0)}.q_proj.weight"] = torch.randn(2 * D, D)
    return tensors


def test_gated_queries_are_skipped_and_the_others_read() -> None:
    skipped: list[Skip] = []
    [view] = views(gated(), skipped=skipped, heads=HEADS, head_dim=4)
    assert view.name == NAME.format(1)
    assert str(skipped[0]) == f"{NAME.format(0)}: queries are gated, which no row reads"
    only = {n: t for n, t in gated().items() if ".0." in n}
    with pytest.raises(NothingMatched, match="queries are gated, which no row reads"):
        list(views(only, heads=HEADS, head_dim=4))


def test_a_quantised_layer_is_skipped_and_the_others_read() -> None:
    tensors = state(3)
    name = f"{NAME.format(1)}.k_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    skipped: list[Skip] = []
    read = [view.name for view in views(tensors, skipped=skipped, heads=HEADS)]
    assert read == [NAME.format(0), NAME.format(2)]
    assert f"{name} is stored as int8" in skipped[0].reason
    with pytest.raises(InputError, match="stored as int8"):
        list(views(tensors, [1], heads=HEADS))


def test_a_type_given_as_an_argument_stands_before_the_config() -> None:
    [plan] = match(state(), heads=HEADS, model_type="cohere").plans
    assert (plan.family, plan.known) == ("cohere", True)


def test_names_of_wav2vec2_do_not_say_where_its_norms_stand() -> None:
    parts = {f"attention.{n}_proj.weight": (D, D) for n in ("q", "k", "v", "out")}
    parts |= {"layer_norm.weight": (D,), "final_layer_norm.weight": (D,)}
    tensors = {f"encoder.layers.1.{n}": torch.randn(s) for n, s in parts.items()}
    tensors["encoder.layers.0.final_layer_norm.weight"] = torch.randn(D)
    [view] = views(tensors, heads=HEADS)
    assert caveats(view) == (NORM_UNKNOWN,)
    for first, name in ((True, "1.layer_norm"), (False, "0.final_layer_norm")):
        [view] = views(tensors, heads=HEADS, norm_first=first)
        assert torch.equal(view.input_norm.gain, tensors[f"encoder.layers.{name}.weight"])
