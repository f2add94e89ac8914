"""The table's rows for PyTorch's own layers, timm, minGPT's names and SAMformer, each proved.

References are the libraries' own modules, or, where a library is not installed, a few lines that
compute what it computes from a state_dict with its names.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from levelhead.nn.samformer import SAMformerNet
from levelhead.weights.doubts import NORM_UNKNOWN, caveats
from levelhead.weights.layouts import find_layers, match, views
from oracles.attention import attend

N = 6


def close(mine: Tensor, theirs: Tensor) -> bool:
    theirs = theirs.detach().double()
    return float((mine - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


def filled(model: nn.Module, seed: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model.eval()


def numbers(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ── nn.MultiheadAttention and nn.Transformer… ──


@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention(bias: bool) -> None:
    model = filled(nn.MultiheadAttention(12, 3, bias=bias, batch_first=True))
    [view] = views(model)
    x = numbers(1, N, 12)
    assert close(attend(view, x[0]), model(x, x, x)[0][0])
    assert (view.q_bias is not None) == bias
    parts = [t.reshape(12, 12) for t in (view.q, view.k, view.v)]
    assert torch.equal(torch.cat(parts), model.in_proj_weight)
    assert torch.equal(torch.cat(list(view.o), dim=1), model.out_proj.weight)


def test_multihead_attention_with_other_widths_of_keys() -> None:
    model = filled(nn.MultiheadAttention(12, 3, kdim=8, vdim=8, batch_first=True))
    [view] = views(model)
    assert (view.d, view.d_source, view.cross, view.family) == (12, 8, True, "torch_mha_separate")
    x, source = numbers(1, N, 12), numbers(1, 4, 8, seed=6)
    assert close(attend(view, x[0], source[0]), model(x, source, source)[0][0])


def test_values_of_another_width_than_keys_are_refused() -> None:
    model = nn.MultiheadAttention(12, 3, kdim=8, vdim=10)
    with pytest.raises(ValueError, match=r"v \[3, 4, 10\].*k|k \[3, 4, 8\].*v \[3, 4, 10\]"):
        list(views(model))


def test_a_learned_extra_token_is_skipped_with_its_reason() -> None:
    found = match(nn.MultiheadAttention(12, 3, add_bias_kv=True))
    assert not found.plans
    [skip] = found.skipped
    assert "learned token (bias_k, bias_v)" in skip.reason


@pytest.mark.parametrize("kdim", [None, 8])
def test_what_was_read_at_the_root_is_not_reported_as_unknown(kdim: int | None) -> None:
    found = match(nn.MultiheadAttention(12, 3, kdim=kdim, vdim=kdim))
    assert (len(found.plans), found.skipped) == (1, ())


def test_what_lies_beside_a_layer_at_the_root_is_still_reported() -> None:
    weights = dict(nn.MultiheadAttention(12, 3).state_dict())
    weights["odd.to_qkv.weight"] = torch.zeros(36, 12)
    found = match(weights, heads=3)
    assert len(found.plans) == 1
    assert [skip.name for skip in found.skipped] == ["odd.to_qkv.weight"]


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True, norm_first=norm_first)
    model = filled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    found = list(views(model))
    x = numbers(1, N, 12)
    inner = model.layers[0](x)
    reads = (
        [x, inner] if not norm_first else [model.layers[0].norm1(x), model.layers[1].norm1(inner)]
    )
    for view, part, at in zip(found, model.layers, reads, strict=True):
        assert close(attend(view, at[0]), part.self_attn(at, at, at)[0][0])
    expected = model.layers[1].norm1 if norm_first else model.layers[0].norm2
    assert found[1].input_norm.gain is expected.weight or torch.equal(
        found[1].input_norm.gain, expected.weight
    )
    assert found[1].input_norm.position == ("pre" if norm_first else "post")


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_state_dict_of_torch_layers_does_not_say_which_norm_is_in_front(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 16, norm_first=norm_first)
    model = filled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    state = model.state_dict()
    for view in views(state, heads=3):
        assert view.input_norm.kind == "none"
        assert caveats(view) == (NORM_UNKNOWN,)
    assert match(state, heads=3).caveats == (f"2 layers: {NORM_UNKNOWN}",)
    given = {"family": "torch_encoder", "heads": 3, "norm_first": norm_first}
    told = list(views(state, heads=3, norm_first=norm_first))
    for live, one, two in zip(views(model), told, views(state, layout=given), strict=True):
        assert caveats(live) == caveats(one) == ()
        for view in (one, two):
            assert view.input_norm.kind == live.input_norm.kind
            assert view.input_norm.position == live.input_norm.position
            assert torch.equal(view.q, live.q)
            if live.input_norm.gain is not None:
                assert torch.equal(view.input_norm.gain, live.input_norm.gain)
    gain = model.layers[1].norm1 if norm_first else model.layers[0].norm2
    assert torch.equal(told[1].input_norm.gain, gain.weight)
    name = "layers.1.norm1" if norm_first else "layers.0.norm2"
    assert told[1].origin("input_norm").source == f"norm {name}, by argument norm_first"


@pytest.mark.parametrize("norm_first", [True, False])
def test_norms_of_a_decoder(norm_first: bool) -> None:
    """Read in forward: what reaches the two attentions of the second layer is a norm's output."""
    layer = nn.TransformerDecoderLayer(12, 3, 16, norm_first=norm_first, batch_first=True)
    model = filled(nn.TransformerDecoder(layer, 2))
    seen: dict[str, Tensor] = {}
    made: list[tuple[nn.LayerNorm, Tensor]] = []
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            part.register_forward_hook(lambda m, _, out: made.append((m, out)))
    for name in ("self_attn", "multihead_attn"):
        model.layers[1].get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, args[0])
        )
    model(numbers(1, N, 12), numbers(1, 4, 12, seed=6))
    for source in (model, model.state_dict()):
        arguments = {} if source is model else {"heads": 3, "norm_first": norm_first}
        found = {v.name: v for v in views(source, **arguments)}
        for name, x in seen.items():
            [theirs] = [m for m, out in made if torch.equal(out, x)]
            assert torch.equal(found[f"layers.1.{name}"].input_norm.gain, theirs.weight), name


def test_a_lone_layer_knows_its_norm() -> None:
    model = filled(nn.TransformerEncoderLayer(12, 3, 16, norm_first=True))
    [view] = views(model)
    assert torch.equal(view.input_norm.gain, model.norm1.weight)
    [view] = views(model.state_dict(), heads=3)
    assert caveats(view) == (NORM_UNKNOWN,)
    [view] = views(filled(nn.TransformerEncoderLayer(12, 3, 16)))
    assert (view.input_norm.kind, caveats(view)) == ("none", ())


def test_norm_first_is_true_or_false() -> None:
    state = nn.TransformerEncoderLayer(12, 3, 16).state_dict()
    with pytest.raises(ValueError, match=r"norm_first is 'maybe'; expected true or false"):
        match(state, heads=3, norm_first="maybe")
    with pytest.raises(ValueError, match=r"has no keyword 'colour'"):
        match(state, layout={"family": "torch_encoder", "colour": 3})
    with pytest.raises(ValueError, match=r"family 'torch' is none of"):
        match(state, layout={"family": "torch", "heads": 3})


def test_heads_of_a_state_dict_must_be_given() -> None:
    model = filled(nn.MultiheadAttention(12, 3))
    with pytest.raises(ValueError, match=r"do not say .*\(heads= in Python, --heads on"):
        list(views(model.state_dict()))
    [view] = views(model.state_dict(), heads=3)
    assert view.heads == 3
    assert str(view.origin("q")) == "read (argument heads)"
    with pytest.raises(ValueError, match=r"12 rows of queries cannot be 5 heads of width 2"):
        list(views(model.state_dict(), heads=5))


def test_decoder_layer_has_a_self_and_a_cross_attention() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 16, batch_first=True)
    model = filled(nn.TransformerDecoder(layer, 1))
    own, cross = views(model)
    assert (own.name, own.cross) == ("layers.0.self_attn", False)
    assert (cross.name, cross.cross) == ("layers.0.multihead_attn", True)
    assert own.origin("mask").how == "assumed"
    x, source = numbers(1, N, 12), numbers(1, 4, 12, seed=6)
    theirs = model.layers[0].multihead_attn(x, source, source)[0]
    assert close(attend(cross, x[0], source[0]), theirs[0])


# ── timm ──


def timm_attention(state: dict[str, Tensor], x: Tensor, heads: int, eps: float = 1e-6) -> Tensor:
    """timm's `Attention.forward`, written from its `qkv` reshape, without dropout."""
    n, d = x.shape
    qkv = x @ state["qkv.weight"].T + state.get("qkv.bias", torch.zeros(3 * d))
    q, k, v = qkv.reshape(n, 3, heads, d // heads).permute(1, 2, 0, 3)
    if "q_norm.weight" in state:
        width = (d // heads,)
        q = nn.functional.layer_norm(q, width, state["q_norm.weight"], state["q_norm.bias"], eps)
        k = nn.functional.layer_norm(k, width, state["k_norm.weight"], state["k_norm.bias"], eps)
    y = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    y = y.transpose(0, 1).reshape(n, d)
    return y @ state["proj.weight"].T + state["proj.bias"]


def timm_state(qk_norm: bool, d: int = 12, heads: int = 3) -> dict[str, Tensor]:
    shapes = {"qkv.weight": (3 * d, d), "qkv.bias": (3 * d,), "proj.weight": (d, d)}
    shapes["proj.bias"] = (d,)
    if qk_norm:
        for name in ("q_norm", "k_norm"):
            shapes |= {f"{name}.weight": (d // heads,), f"{name}.bias": (d // heads,)}
    return {n: numbers(*s, seed=i) * 0.5 for i, (n, s) in enumerate(shapes.items())}


@pytest.mark.parametrize("qk_norm", [False, True])
def test_timm(qk_norm: bool) -> None:
    state = timm_state(qk_norm)
    whole = {f"blocks.1.attn.{n}": t for n, t in state.items()}
    whole |= {"blocks.1.norm1.weight": torch.ones(12), "blocks.1.norm1.bias": torch.zeros(12)}
    [view] = views(whole) if qk_norm else views(whole, heads=3)
    x = numbers(N, 12)
    assert close(attend(view, x), timm_attention(state, x, 3))
    assert (view.input_norm.kind, view.input_norm.eps) == ("layer", 1e-6)
    parts = [t.reshape(12, 12) for t in (view.q, view.k, view.v)]
    assert torch.equal(torch.cat(parts), state["qkv.weight"])
    if qk_norm:
        assert view.origin("q").how == "inferred"


def test_timm_with_separate_biases_of_queries_and_values() -> None:
    """BEiT in timm: no bias of keys, q_bias and v_bias beside a qkv without one."""
    state = timm_state(False)
    q_bias, v_bias = state["qkv.bias"][:12], state["qkv.bias"][24:]
    state["qkv.bias"] = torch.cat((q_bias, torch.zeros(12), v_bias))
    stored = {n: t for n, t in state.items() if n != "qkv.bias"}
    stored |= {"q_bias": q_bias, "v_bias": v_bias}
    [view] = views({f"blocks.0.attn.{n}": t for n, t in stored.items()}, heads=3)
    x = numbers(N, 12)
    assert close(attend(view, x), timm_attention(state, x, 3))


def test_timm_windows_are_skipped_with_their_reason() -> None:
    state = {f"blocks.0.attn.{n}": t for n, t in timm_state(False).items()}
    state["blocks.0.attn.relative_position_bias_table"] = numbers(9, 3)
    found = match(state, heads=3)
    assert not found.plans
    assert "relative_position_bias_table" in found.skipped[0].reason


# ── minGPT and nanoGPT ──


def test_nanogpt_linear_is_not_taken_for_gpt2_conv1d() -> None:
    """The same names with [3d, d] matrices: rows are outputs, attention is causal."""
    d, heads = 12, 3
    state = {
        "c_attn.weight": numbers(3 * d, d, seed=1),
        "c_attn.bias": numbers(3 * d, seed=2),
        "c_proj.weight": numbers(d, d, seed=3),
        "c_proj.bias": numbers(d, seed=4),
    }
    x = numbers(N, d)
    q, k, v = (x @ state["c_attn.weight"].T + state["c_attn.bias"]).split(d, dim=1)
    q, k, v = (t.view(N, heads, d // heads).transpose(0, 1)[None] for t in (q, k, v))
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
    y = y.transpose(0, 1).reshape(N, d) @ state["c_proj.weight"].T + state["c_proj.bias"]
    stored = {f"transformer.h.0.attn.{n}": t for n, t in state.items()}
    [view] = views(stored, heads=heads)
    assert (view.family, view.mask.kind) == ("nanogpt", "causal")
    assert close(attend(view, x), y)
    turned = {n: t.T.contiguous() if t.ndim == 2 else t for n, t in stored.items()}
    [view] = views(turned, heads=heads)
    assert view.family == "gpt2"
    assert close(attend(view, x), y)


# ── MPT ──


def mpt_shapes() -> dict[str, tuple[int, ...]]:
    parts = {"Wqkv": (36, 12), "out_proj": (12, 12)}
    return {f"transformer.blocks.0.attn.{n}.weight": s for n, s in parts.items()}


def test_mpt_takes_the_odd_slopes_of_the_next_power_of_two_first() -> None:
    [plan], _ = find_layers(mpt_shapes(), {"model_type": "mpt", "n_heads": 3})
    view = plan.apply(lambda name: torch.ones(mpt_shapes()[name]))
    assert view.position.slopes == (2**-4, 2**-8, 2**-2)
    assert view.mask.causal


@pytest.mark.parametrize(
    "setting", [{"clip_qkv": 6.0}, {"qk_ln": True}, {"alibi": False}, {"alibi_bias_max": 16}]
)
def test_other_kinds_of_mpt_are_refused(setting: dict) -> None:
    config = {"model_type": "mpt", "n_heads": 3, "attn_config": setting}
    plans, [skip] = find_layers(mpt_shapes(), config)
    assert not plans
    assert f"attn_config {next(iter(setting))} = " in skip.reason


# ── SAMformer ──


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("value", ["factored", "full"])
@pytest.mark.parametrize("tie_qk", [True, False])
def test_samformer(value: str, tie_qk: bool, bias: bool) -> None:
    net = SAMformerNet(10, 4, width=3, value=value, tie_qk=tie_qk, bias=bias, revin=False)
    filled(net)
    [view] = views(net)
    assert (view.heads, view.d, view.d_out, view.tied) == (1, 10, 10, tie_qk)
    assert view.d_v == (10 if value == "full" else 3)
    x = numbers(5, 10)
    with torch.no_grad():
        values = x @ net.value + (net.value_bias if bias else 0)
        written = net.attention(x[None])[0] @ values
        if net.output is not None:
            written = written @ net.output + (net.output_bias if bias else 0)
        assert close(attend(view, x), written)
    assert view.q.requires_grad


# ── own attention modules under names that many use ──


class Own(nn.Module):
    """Softmax attention from four Linears; `names` are theirs, a path for the last."""

    def __init__(
        self,
        names: tuple[str, ...],
        width: int = 12,
        heads: int = 3,
        groups: int = 3,
        source: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.names, self.n_heads = names, heads
        d_k = 4
        q, k, v, o = names
        self.add_module(q, nn.Linear(width, heads * d_k, bias=bias))
        self.add_module(k, nn.Linear(source or width, groups * d_k, bias=bias))
        self.add_module(v, nn.Linear(source or width, groups * d_k, bias=bias))
        out = nn.Linear(heads * d_k, width)
        at, _, below = o.partition(".")
        self.add_module(at, nn.Sequential(out, nn.Dropout(0.1)) if below else out)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        q, k, v, o = (self.get_submodule(name) for name in self.names)
        source = x if source is None else source
        cut = [p(t).unflatten(-1, (-1, 4)) for p, t in ((q, x), (k, source), (v, source))]
        query, key, value = (t.transpose(0, 1)[None] for t in cut)
        y = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)[0]
        return o(y.transpose(0, 1).flatten(1))


OWN = {
    "diffusers": ("to_q", "to_k", "to_v", "to_out.0"),
    "lucidrains": ("to_q", "to_k", "to_v", "to_out"),
    "meta": ("wq", "wk", "wv", "wo"),
    "o_proj": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "out_proj": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "minGPT": ("query", "key", "value", "proj"),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("names", OWN.values(), ids=OWN)
def test_own_modules_are_read_by_their_names(names: tuple[str, ...], bias: bool) -> None:
    part = Own(names, bias=bias)
    model = filled(nn.ModuleDict({"stage": nn.ModuleList([nn.ModuleDict({"attn": part})])}))
    found = match(model)
    assert [p.name for p in found.plans] == ["stage.0.attn"]
    assert found.skipped == ()
    [view] = views(model)
    x = numbers(N, 12)
    assert close(attend(view, x), part(x))
    assert str(view.origin("q")) == "read (module attribute n_heads)"
    assert torch.equal(torch.cat(list(view.o), dim=1), part.get_submodule(names[3]).weight)
    assert (view.q_bias is not None) == bias
    # Nothing that names do not say is guessed, and a reader is told.
    assert (view.family, view.input_norm.kind, view.position.tag) == ("generic", "none", "none")
    for field in ("position", "mask", "scale", "input_norm"):
        assert view.origin(field).how == "assumed"
    [said] = caveats(view)
    for word in ("positions", "mask", "norm in front is folded", "layout"):
        assert word in said
    with pytest.raises(ValueError, match=r"do not say .*\(heads= in Python"):
        list(views(model.state_dict()))
    for again in (views(model.state_dict(), heads=3), views(model, layout="generic")):
        assert torch.equal(next(again).q, view.q)


def test_a_bare_own_module_is_read_whole() -> None:
    model = filled(Own(OWN["diffusers"], groups=3))
    found = match(model)
    assert ([p.family for p in found.plans], found.skipped) == (["generic"], ())
    x = numbers(N, 12)
    assert close(attend(next(views(model)), x), model(x))


def test_own_modules_may_share_keys_and_read_another_sequence() -> None:
    x, source = numbers(N, 12), numbers(5, 8, seed=6)
    model = filled(nn.ModuleDict({"a": Own(OWN["meta"], heads=4, groups=2)}))
    [view] = views(model)
    assert (view.kv_group, view.cross) == ((0, 0, 1, 1), False)
    assert close(attend(view, x), model["a"](x))
    model = filled(nn.ModuleDict({"attn2": Own(OWN["diffusers"], source=8)}))
    [view] = views(model)
    assert (view.cross, view.d_source) == (True, 8)
    assert close(attend(view, x, source), model["attn2"](x, source))
    [view] = views(nn.ModuleDict({"attn2": Own(OWN["diffusers"])}))
    assert view.cross


@pytest.mark.parametrize(
    "more", ["norm_q.weight", "rotary_emb.inv_freq", "to_out.1.weight", "null_kv"]
)
def test_own_modules_with_more_in_them_are_refused_with_its_name(more: str) -> None:
    state = dict(nn.ModuleDict({"attn": Own(OWN["diffusers"])}).state_dict())
    [view] = views(state | {"attn.mask": torch.ones(6, 6)}, heads=3)
    assert view.heads == 3
    found = match(state | {f"attn.{more}": torch.ones(4)}, heads=3)
    [skip] = found.skipped
    assert (found.plans, skip.name) == ((), "attn")
    assert f"generic has no attn.{more}, which may change what it does" in skip.reason


def test_a_row_of_a_family_goes_before_the_generic_one() -> None:
    shapes = {f"layers.0.attention.w{n}.weight": (8, 8) for n in "qkvo"}
    [plan], _ = find_layers(shapes, {"n_heads": 2})
    assert plan.family == "meta_llama"
    # Of a type that no row was proved for, names that many use say too little.
    shapes = {n.replace("layers.0", "net"): s for n, s in shapes.items()}
    [plan], _ = find_layers(shapes, {"n_heads": 2})
    assert plan.family == "generic"
    plans, [skip] = find_layers(shapes, {"n_heads": 2, "model_type": "novel"})
    assert not plans
    assert skip.name == "net.attention"
    plans, [skip] = find_layers({"net.a.to_q.weight": (8, 8)}, {"n_heads": 2})
    assert "it has no net.a.to_k.weight" in skip.reason


# ── names alone ──


def test_the_first_row_that_suits_is_taken_and_said_to_be_assumed() -> None:
    shapes = {
        f"model.layers.0.self_attn.{n}_proj.weight": s
        for n, s in {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}.items()
    }
    [plan], skipped = find_layers(shapes, {"num_attention_heads": 4})
    view = plan.apply(lambda name: torch.ones(shapes[name]))
    assert (plan.family, plan.known, skipped) == ("llama", False, [])
    assert view.origin("position").how == "assumed"
    assert view.origin("q").how == "read"
    assert view.kv_group == (0, 0, 1, 1)
    [plan], _ = find_layers(shapes, {"num_attention_heads": 4, "model_type": "cohere"})
    view = plan.apply(lambda name: torch.ones(shapes[name]))
    assert (plan.family, view.position.layout) == ("cohere", "interleaved")
    assert view.origin("mask").how == "inferred"
    biased = {**shapes, "model.layers.0.self_attn.q_proj.bias": (8,)}
    [plan], _ = find_layers(biased, {"num_attention_heads": 4})
    assert plan.family == "qwen2"
    normed = {**shapes}
    normed |= {f"model.layers.0.self_attn.{n}_norm.weight": (2,) for n in "qk"}
    [plan], _ = find_layers(normed)
    assert (plan.family, plan.sizes.heads, plan.sizes.groups) == ("qwen3", 4, 2)


def test_a_config_that_contradicts_the_weights_is_an_error() -> None:
    shapes = {
        f"layers.0.self_attn.{n}_proj.weight": s
        for n, s in {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}.items()
    }
    _, [skip] = find_layers(shapes, {"num_attention_heads": 4, "num_key_value_heads": 4})
    assert "4 rows of keys do not fit heads of width 2 in 4 groups" in skip.reason
    _, [skip] = find_layers(shapes, {"num_attention_heads": 0})
    assert "num_attention_heads is 0; expected a whole number" in skip.reason
    _, [skip] = find_layers(shapes, {"num_attention_heads": "many"})
    assert "'many'" in skip.reason


def test_what_looks_like_attention_but_is_unknown_is_listed() -> None:
    shapes = {f"strange.{i}.q_lin.weight": (8, 8) for i in range(3)} | {"head.weight": (2, 8)}
    plans, [skip] = find_layers(shapes)
    assert not plans
    assert (skip.name, "(3 found)" in skip.reason) == ("strange.*.q_lin.weight", True)
    with pytest.raises(
        ValueError, match=r"no attention layer was recognised .*strange\.\*\.q_lin"
    ) as e:
        list(views({n: torch.ones(s) for n, s in shapes.items()}))
    assert e.value.exit_code == 3


def test_layers_come_in_their_numbers_order_and_can_be_chosen() -> None:
    state = {f"blocks.{i}.attn.{n}": t for i in (10, 2, 0) for n, t in timm_state(False).items()}
    names = [plan.name for plan in match(state, heads=3).plans]
    assert names == ["blocks.0.attn", "blocks.2.attn", "blocks.10.attn"]
    chosen = [view.name for view in views(state, [-1, "blocks.0.*"], heads=3)]
    assert chosen == ["blocks.0.attn", "blocks.10.attn"]
    with pytest.raises(ValueError, match=r"layer 3 was asked for, but 3 were found"):
        list(views(state, [3], heads=3))
    with pytest.raises(ValueError, match=r"no layer is called 'x'"):
        list(views(state, ["x"], heads=3))
