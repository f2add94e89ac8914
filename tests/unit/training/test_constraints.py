"""Constraints: logits and forms after them by another route, and functions that must not move."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.base.records import Reading
from levelhead.diagnostics.capture import MapCapture
from levelhead.nn.head_core import HeadCoreAttention
from levelhead.nn.samformer import SAMformerNet
from levelhead.training import constraint_layers
from levelhead.training.constraint_bounds import logit_bound
from levelhead.training.constraint_layers import LiveLayers, reset_state
from levelhead.training.constraints import (
    GaugeBalance,
    QKClip,
    attach,
    balance_gauge,
    largest_logits,
    qk_clip,
)
from levelhead.training.sam import SAM
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.canonical import balance
from levelhead.weights.layouts import NothingMatched, match, views
from levelhead.weights.structure import InputNorm, QKNorm, Rope
from oracles.attention import attend

LAYER = "torch_mha"


def attention(d: int = 12, h: int = 3, seed: int = 0, **kwargs: Any) -> nn.MultiheadAttention:
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(d, h, **{"batch_first": True, "dtype": torch.float64} | kwargs)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn_like(weight))
    return layer


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def logits(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """[h, n, n], from the stored weights."""
    d, h = layer.embed_dim, layer.num_heads
    rows = x @ layer.in_proj_weight.detach().T
    if layer.in_proj_bias is not None:
        rows = rows + layer.in_proj_bias.detach()
    q, k = (rows[:, i * d : (i + 1) * d].reshape(len(x), h, -1) for i in range(2))
    return torch.einsum("nhk,mhk->hnm", q, k) / math.sqrt(d // h)


def largest(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return logits(layer, x).abs().amax((1, 2))


class Grouped(nn.Module):
    """Four heads that share two groups of keys and values, with the names of LLaMA."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(d, 8), nn.Linear(d, 4)
        self.v_proj, self.o_proj = nn.Linear(d, 4), nn.Linear(8, d)


GROUPED = {
    "module": "",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "heads": 4,
    "kv_heads": 2,
}


def grouped_logits(model: Grouped, x: Tensor) -> Tensor:
    """[4, n, n]."""
    q = model.q_proj(x).reshape(-1, 4, 2)
    k = model.k_proj(x).reshape(-1, 2, 2)[:, [0, 0, 1, 1]]
    found: Tensor = torch.einsum("nhk,mhk->hnm", q, k).detach() / math.sqrt(2)
    return found


# -- QK-clip -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_clipped_heads_reach_the_threshold_and_no_other_moves(bias: bool) -> None:
    layer, x = attention(bias=bias), tokens(9, 12)
    before, top = logits(layer, x), largest(layer, x)
    rest = copy.deepcopy(layer.state_dict())
    threshold = float(top.sort().values[0]) * 1.01  # the smallest head stays
    report = qk_clip(layer, threshold, {LAYER: top})
    after = logits(layer, x)
    clipped = top > threshold
    torch.testing.assert_close(after[~clipped], before[~clipped], rtol=1e-14, atol=0)
    torch.testing.assert_close(
        largest(layer, x)[clipped], torch.full_like(top[clipped], threshold), rtol=1e-13, atol=0
    )
    # Every logit of a clipped head is scaled alike: τ/largest times what it was.
    factor = (threshold / top)[clipped][:, None, None]
    torch.testing.assert_close(after[clipped], before[clipped] * factor, rtol=1e-12, atol=1e-12)
    assert {clip.head for clip in report.clipped} == set(clipped.nonzero()[:, 0].tolist())
    for clip in report.clipped:
        assert clip.largest == pytest.approx(float(top[clip.head]), rel=1e-15)
        assert clip.factor == pytest.approx(threshold / float(top[clip.head]), rel=1e-14)
    # Queries and keys bear it evenly; values and outputs are untouched.
    now = layer.state_dict()
    blocks = {n: s.chunk(3) for n, s in rest.items() if n.startswith("in_proj")}
    for name, (q, k, v) in blocks.items():
        new_q, new_k, new_v = now[name].chunk(3)
        assert torch.equal(new_v, v)
        root = (threshold / top).sqrt().clamp(max=1.0).repeat_interleave(4)
        root = root if q.ndim == 1 else root[:, None]
        torch.testing.assert_close(new_q, q * root, rtol=1e-14, atol=0)
        torch.testing.assert_close(new_k, k * root, rtol=1e-14, atol=0)
    assert torch.equal(now["out_proj.weight"], rest["out_proj.weight"])


def test_shared_keys_leave_the_other_heads_alone() -> None:
    torch.manual_seed(0)
    model, x = Grouped().double(), tokens(7, 8)
    before = grouped_logits(model, x)
    top = before.abs().amax((1, 2))
    order = top.sort(descending=True).indices.tolist()
    threshold = float(top[order[0]]) / 3
    given = {"attention": top.clone()}
    given["attention"][order[1:]] = 0.0  # as if nobody else were large
    [name] = [view.name for view in views(model, layout=GROUPED)]
    keys = copy.deepcopy(model.k_proj.state_dict())
    report = qk_clip(model, threshold, {name: given["attention"]}, layout=GROUPED)
    after = grouped_logits(model, x)
    assert [clip.head for clip in report.clipped] == [order[0]]
    torch.testing.assert_close(after[order[0]], before[order[0]] / 3, rtol=1e-12, atol=1e-13)
    others = order[1:]
    assert torch.equal(after[others], before[others])
    for key, value in model.k_proj.state_dict().items():
        assert torch.equal(value, keys[key])


def test_nothing_is_written_below_the_threshold() -> None:
    layer = attention()
    versions = [w._version for w in layer.parameters()]
    report = qk_clip(layer, 1e9, {LAYER: torch.tensor([1.0, 2.0, 3.0])})
    assert not report.clipped
    assert [w._version for w in layer.parameters()] == versions
    assert str(report) == "QK-clip: no head was clipped to 1e+09."


@dataclass(frozen=True)
class Statistics:
    largest_logit: Tensor


def readings(values: list[float], step: int) -> list[Reading]:
    where = [{"layer": LAYER, "head": i} for i in range(len(values))]
    found = [
        Reading("largest_logit", v, where=w, step=step) for v, w in zip(values, where, strict=True)
    ]
    return [Reading("loss", 1.0, step=step), *found]


def test_measurements_come_in_three_forms() -> None:
    values = [3.0, 40.0, 5.0]
    given: list[Any] = [
        {LAYER: values},
        {LAYER: Statistics(torch.tensor(values))},
        [*readings([900.0] * 3, 1), *readings(values, 2)],  # the latest step counts
    ]
    ends = []
    for form in given:
        layer = attention()
        report = qk_clip(layer, 10.0, form)
        assert [(c.head, c.largest) for c in report.clipped] == [(1, 40.0)]
        ends.append(layer.in_proj_weight.detach())
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    with pytest.raises(InputError, match="layer and head"):
        largest_logits([Reading("largest_logit", 1.0)])


def test_a_soft_cap_is_undone_first() -> None:
    """c·tanh(l/c): the capped logit of the clipped head is τ, by the formula of the cap."""
    cap, threshold, top = 20.0, 12.0, 19.0
    layout = GROUPED | {"kv_heads": 4, "soft_cap": cap, "k": "k_proj"}
    torch.manual_seed(0)
    model = Grouped()
    model.k_proj, model.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)
    [before] = views(model, layout=layout)
    assert before.soft_cap == cap
    before = before.map(lambda t: t.detach().clone())
    report = qk_clip(
        model, threshold, {before.name: torch.tensor([top, 0.0, 0.0, 0.0])}, layout=layout
    )
    inner = cap * math.atanh(top / cap)
    assert cap * math.tanh(report.clipped[0].factor * inner / cap) == pytest.approx(threshold)
    [after] = views(model, layout=layout)
    torch.testing.assert_close(
        after.qk.dense()[0], before.qk.dense()[0] * report.clipped[0].factor, rtol=1e-5, atol=1e-6
    )
    # A cap that rounding has reached is no reason to fail.
    assert qk_clip(model, threshold, {before.name: [cap, 0, 0, 0]}, layout=layout).clipped


def test_what_cannot_be_clipped_is_refused_with_a_reason() -> None:
    layer = attention()
    start = copy.deepcopy(layer.state_dict())
    report = qk_clip(layer, 10.0, {LAYER: torch.tensor([1.0, math.nan, 400.0])})
    assert "head 1 is nan" in str(report)
    report = qk_clip(layer, 10.0, {LAYER: torch.tensor([1.0, 400.0])})
    assert "[2] were given for 3 heads" in str(report)
    layer.in_proj_weight.requires_grad_(False)
    report = qk_clip(layer, 10.0, {LAYER: torch.tensor([1.0, 400.0, 1.0])})
    assert "in_proj_weight is frozen" in str(report)
    assert not report.clipped
    for name, value in layer.state_dict().items():
        assert torch.equal(value, start[name])
    for threshold in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="threshold"):
            qk_clip(layer, threshold, {})
        with pytest.raises(InputError, match="threshold"):
            QKClip(threshold)
    with pytest.raises(InputError, match="'bound'"):
        qk_clip(layer, 1.0, "weights")  # type: ignore[arg-type]
    with pytest.raises(NothingMatched, match="no attention layer"):
        qk_clip(nn.Linear(2, 2), 1.0, {})


def test_models_that_hide_their_weights_are_refused() -> None:
    layer = attention()
    parametrizations.weight_norm(layer.out_proj)
    with pytest.raises(InputError, match=r"parametrisation.*levelhead\.remove_sigma_reparam"):
        qk_clip(layer, 1.0, {})

    class Sharded(nn.Parameter):
        placements = ("Shard(0)",)

    sharded = nn.ModuleDict({"a": attention()})
    sharded["a"].out_proj.bias = Sharded(torch.zeros(12, dtype=torch.float64))
    with pytest.raises(InputError, match="DTensor"):
        balance_gauge(sharded)


def test_layers_with_adapters_are_named_and_left_alone() -> None:
    """What an adapter adds to a weight is not in it: scaling the weight would not scale the sum."""
    model = nn.ModuleDict({"a": attention(), "b": attention()})
    model["b"].lora_A = nn.Parameter(torch.zeros(2, 12))
    start = copy.deepcopy(model["b"].state_dict())
    clip = qk_clip(model, 10.0, {"a": [1.0, 40.0, 1.0], "b": [1.0, 40.0, 1.0]})
    balanced = balance_gauge(model)
    for report in (clip, balanced):
        assert "b: torch_mha has no b.lora_A" in str(report)
    assert [c.layer for c in clip.clipped] == ["a"]
    for name, value in model["b"].state_dict().items():
        assert torch.equal(value, start[name])


def test_weights_that_are_not_stored_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout may read what a module computes; there is no place to write it to."""
    model = nn.ModuleDict({"a": attention(), "b": attention()})
    seen = match(model)
    model["b"] = HeadCoreAttention.from_attention(model["b"])
    monkeypatch.setattr(constraint_layers, "match", lambda *_, **__: seen)
    report = balance_gauge(model)
    assert [layer.layer for layer in report.layers] == ["a"]
    assert "b: b.in_proj_weight is computed from other parameters" in str(report)
    del model["a"]
    with pytest.raises(NothingMatched, match="not stored"):
        balance_gauge(model)


def test_shared_layers_are_clipped_once() -> None:
    twice = nn.ModuleDict({"a": attention()})
    twice["b"] = twice["a"]
    before = twice["a"].in_proj_weight.detach().clone()
    report = qk_clip(twice, 10.0, {"a": [1.0, 20.0, 1.0], "b": [1.0, 40.0, 1.0]})
    assert [(c.layer, c.largest) for c in report.clipped] == [("a", 40.0)]
    factor = twice["a"].in_proj_weight.detach()[4:8] / before[4:8]
    torch.testing.assert_close(factor, torch.full_like(factor, 0.5), rtol=1e-12, atol=0)


def test_wrappers_do_not_change_names() -> None:
    layer = attention()
    wrapped = nn.Module()
    wrapped._orig_mod = layer  # as torch.compile wraps it
    [clip] = qk_clip(wrapped, 10.0, {LAYER: [1.0, 40.0, 1.0]}).clipped
    assert clip.layer == LAYER
    model = nn.ModuleDict({"inner": attention()})
    [clip] = qk_clip(model, 10.0, {"module._orig_mod.inner": [1.0, 40.0, 1.0]}).clipped
    assert clip.layer == "inner"


def test_the_object_remembers_the_largest_since_it_acted() -> None:
    layer, clip = attention(), QKClip(10.0)
    clip.observe({LAYER: torch.tensor([20.0, 1.0, 1.0])})
    clip.observe(readings([5.0, 1.0, 40.0], 3))
    assert [(c.head, c.largest) for c in clip.apply(layer).clipped] == [(0, 20.0), (2, 40.0)]
    assert not clip.apply(layer).clipped
    clip.observe({LAYER: torch.tensor([20.0, 1.0, 1.0, 90.0])})  # before a head was pruned
    clip.observe({LAYER: torch.tensor([1.0, 50.0, 1.0])})
    assert [(c.head, c.largest) for c in clip.apply(layer).clipped] == [(1, 50.0)]
    sourced = QKClip(10.0, source=lambda: {LAYER: [1.0, 30.0, 1.0]})
    assert [c.head for c in sourced.apply(layer).clipped] == [1]


# -- bounds from weights -------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_bounds_hold_and_are_reached(rope: bool, bias: bool) -> None:
    """The largest logit over many tokens on the sphere stays below; a search comes near."""
    torch.manual_seed(0)
    h, d_k, d = 2, 4, 6
    q, k = (torch.randn(h, d_k, d, dtype=torch.float64) for _ in range(2))
    shifts = torch.randn(2, h, d_k, dtype=torch.float64) if bias else (None, None)
    view = AttentionView(
        q=q,
        k=k,
        v=k,
        o=q.mT,
        q_bias=shifts[0],
        k_bias=shifts[1],
        position=Rope("half", 4, 100.0) if rope else AttentionView(q=q, k=k, v=k, o=q.mT).position,
    )
    x = tokens(4000, d)
    x = 3.0 * x / x.norm(dim=-1, keepdim=True)
    queries = torch.einsum("hkd,nd->hnk", q, x) + (0 if shifts[0] is None else shifts[0][:, None])
    keys = torch.einsum("hkd,nd->hnk", k, x) + (0 if shifts[1] is None else shifts[1][:, None])
    if rope:  # the worst rotation makes every plane's product its lengths' product
        planes = [
            queries.unflatten(-1, (2, 2)).norm(dim=-2),
            keys.unflatten(-1, (2, 2)).norm(dim=-2),
        ]
        found = torch.einsum("hnk,hmk->hnm", *planes).amax((1, 2)) / 2
    else:
        found = torch.einsum("hnk,hmk->hnm", queries, keys).abs().amax((1, 2)) / 2
    bound = logit_bound(view, token_norm=3.0)
    assert (found <= bound).all()
    assert (found > (0.3 if rope or bias else 0.8) * bound).all()


def test_a_norm_tells_how_long_tokens_are() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, 6, dtype=torch.float64) for _ in range(2))
    gain, shift = torch.rand(6, dtype=torch.float64) + 0.5, torch.randn(6, dtype=torch.float64)
    view = AttentionView(q=q, k=k, v=k, o=q.mT, input_norm=InputNorm("layer", gain, shift, 1e-5))
    x = nn.functional.layer_norm(tokens(3000, 6), (6,), gain, shift)
    found = torch.einsum("hkd,nd,hkf,mf->hnm", q, x[:300], k, x).abs().amax((1, 2)) / math.sqrt(3)
    bound = logit_bound(view)
    assert (found <= bound).all()
    assert (found > 0.3 * bound).all()
    capped = logit_bound(replace(view, soft_cap=5.0))
    torch.testing.assert_close(capped, 5 * torch.tanh(bound / 5))
    for other, word in (
        (replace(view, input_norm=InputNorm("none")), "token_norm"),
        (replace(view, cross=True), "token_norm"),
        (replace(view, qk_norm=QKNorm("rms", "head", None, None, 1e-6)), "normed"),
    ):
        with pytest.raises(InputError, match=word):
            logit_bound(other)


def test_clipping_by_the_bound_needs_no_measurement() -> None:
    layer, x = attention(bias=False), tokens(50, 12)
    x = x / x.norm(dim=-1, keepdim=True)
    [view] = views(layer)
    expected = torch.linalg.matrix_norm(view.qk.dense().detach(), 2) / 2
    report = QKClip(1.0, source="bound", token_norm=1.0).apply(layer)
    for clip in report.clipped:
        assert clip.largest == pytest.approx(float(expected[clip.head]), rel=1e-10)
    assert len(report.clipped) == int((expected > 1.0).sum()) > 0
    assert float(largest(layer, x).max()) <= 1.0
    assert "token_norm" in str(qk_clip(layer, 1.0, "bound"))


def test_a_layer_that_no_bound_speaks_of_is_heard_once() -> None:
    """Post-norm: nothing stands in front of the first layer, a norm in front of the second."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    first = model.layers[0].self_attn.in_proj_weight
    before = first.detach().clone()
    with attach(QKClip(0.1, source="bound"), model, optimizer) as clipping:
        with pytest.warns(LevelheadWarning) as heard:
            optimizer.step()
        assert {c.layer for c in clipping.report.clipped} == {"layers.1.self_attn"}  # type: ignore[attr-defined]
        optimizer.step()  # a second warning would be an error here
    assert len(heard) == 1
    for words in ("layers.0.self_attn", "1 layer", "source=capture.collect", "token_norm"):
        assert words in str(heard[0].message)
    assert torch.equal(first, before)


def test_every_layer_that_is_newly_refused_is_heard() -> None:
    layer, clip = attention(), QKClip(10.0)
    clip.observe({LAYER: torch.tensor([1.0, 40.0, math.nan])})
    with pytest.warns(LevelheadWarning, match=r"torch_mha: the largest logit of head 2 is nan"):
        clip.apply(layer)


def test_a_clip_that_measures_nothing_is_refused_before_a_step() -> None:
    layer, clip = attention(), QKClip(10.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for act in (lambda: clip.apply(layer), lambda: attach(clip, layer, optimizer)):
        with pytest.raises(InputError, match=r"has no largest logits.*source=capture\.collect"):
            act()
    assert not optimizer._optimizer_step_post_hooks
    clip.observe({LAYER: torch.tensor([1.0, 40.0, 1.0])})
    with attach(clip, layer, optimizer) as clipping:
        optimizer.step()
        optimizer.step()
    assert clipping.steps == 2
    for source in ("x", 3, {LAYER: [1.0, 1.0, 1.0]}):
        with pytest.raises(InputError, match=r"source=.* was given; expected a function"):
            QKClip(10.0, source=source)  # type: ignore[arg-type]


@pytest.mark.parametrize("constraint", [QKClip(10.0, source="bound"), GaugeBalance()])
def test_a_model_without_attention_is_refused_when_a_constraint_is_attached(
    constraint: Any,
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NothingMatched, match="no attention layer"):
        attach(constraint, model, optimizer)
    assert not optimizer._optimizer_step_post_hooks


# -- gauge balancing -----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_stay_and_weights_are_balanced(
    dtype: torch.dtype, limit: float, bias: bool
) -> None:
    layer = attention(16, 4, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.in_proj_weight /= 4  # logits of ordinary size: rounding is not amplified
        layer.in_proj_weight[:16] *= 8
    x = tokens(2, 6, 16, dtype=dtype)
    before = layer(x, x, x)[0].detach()
    [view] = views(layer)
    nuclear = view.qk.nuclear_norms().detach()
    report = balance_gauge(layer)
    assert report.refused == ()
    assert report.layers[0].qk > 0.5
    change = (layer(x, x, x)[0].detach() - before).norm() / before.norm()
    assert float(change) < limit
    [now] = views(layer)
    found = balance(now.map(lambda t: t.detach()))
    assert float(found.qk.max()) < limit
    assert float(found.ov.max()) < limit
    # The shortest weights with these forms: ½(‖q‖² + ‖k‖²) is the nuclear norm.
    half = (now.q.square().sum((1, 2)) + now.k.square().sum((1, 2))) / 2
    torch.testing.assert_close(half.detach().double(), nuclear.double(), rtol=1e-5, atol=0)


def test_groups_are_balanced_together() -> None:
    torch.manual_seed(0)
    model = Grouped().double()
    with torch.no_grad():
        model.q_proj.weight.mul_(5.0)
    [view] = views(model, layout=GROUPED)
    x = tokens(6, 8)
    before = attend(view, x)
    report = balance_gauge(model, layout=GROUPED)
    [now] = views(model, layout=GROUPED)
    torch.testing.assert_close(attend(now, x), before, rtol=1e-12, atol=1e-13)
    q, k = now.q.detach(), now.k.detach()
    for group, heads in enumerate(((0, 1), (2, 3))):
        left = sum(q[i] @ q[i].T for i in heads)
        torch.testing.assert_close(left, k[group] @ k[group].T, rtol=1e-11, atol=1e-12)
    assert set(report.written) >= {"q_proj.weight", "k_proj.weight", "v_proj.weight"}


@pytest.mark.parametrize("tie_qk", [False, True])
@pytest.mark.parametrize("value", ["factored", "full"])
def test_tied_keys_and_values_without_output_keep_the_function(tie_qk: bool, value: Any) -> None:
    torch.manual_seed(0)
    model = SAMformerNet(16, 4, 5, width=6, tie_qk=tie_qk, value=value).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    x = tokens(3, 5, 16)
    before = model(x).detach()
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    report = balance_gauge(model)
    torch.testing.assert_close(model(x).detach(), before, rtol=1e-12, atol=1e-12)
    assert report.layers[0].kept == (
        "values, which no output projection reads" if value == "full" else ""
    )
    moved = {name for name, weight in model.named_parameters() if not weight.equal(start[name])}
    assert moved == set(report.written)
    assert "query" in moved
    assert ("value" in moved) == (value == "factored")


OPTIMISERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "sam": lambda p: SAM(p, torch.optim.Adam, rho=0.01, lr=0.01),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = tokens(2, 5, 12, seed=seed)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x, x, x)[0].square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_after_the_reset_the_next_step_is_a_first_one(name: str) -> None:
    """Rewritten weights step as in a fresh optimiser; the untouched o_bias goes on."""
    model = attention(dropout=0.0)
    optimizer = OPTIMISERS[name](model.parameters())
    for seed in range(3):
        step(model, optimizer, seed)
    report = GaugeBalance().apply(model, optimizer)
    assert set(report.reset) == {"in_proj_weight", "in_proj_bias", "out_proj.weight"}
    said = str(report).partition(":")[0]
    assert said == "gauge balancing, which reset the optimiser's state of 3 parameters"
    twin = copy.deepcopy(model)
    fresh = OPTIMISERS[name](twin.parameters())
    step(model, optimizer, 7)
    step(twin, fresh, 7)
    for key in report.reset:
        assert torch.equal(model.get_parameter(key), twin.get_parameter(key)), key
    assert not torch.equal(model.out_proj.bias, twin.out_proj.bias)
    # Without an optimiser nothing is reset, and the report does not claim it.
    assert GaugeBalance().apply(model).reset == ()


def test_lbfgs_forgets_its_whole_history() -> None:
    model = attention(dropout=0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    step(model, optimizer, 0)
    assert optimizer.state
    balance_gauge(model, optimizer)
    assert not optimizer.state
    other = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    assert reset_state(other, model.parameters()) == []


def test_parameters_of_another_optimiser_are_not_named() -> None:
    model = attention()
    optimizer = torch.optim.Adam([model.out_proj.weight], lr=0.01)
    step(model, optimizer, 0)
    assert balance_gauge(model, optimizer).reset == ("out_proj.weight",)


def test_what_cannot_be_balanced_is_refused_untouched() -> None:
    model = nn.ModuleDict(
        {
            "frozen": attention(),
            "narrow": attention(dtype=torch.bfloat16),
            "tied": attention(),
            "free": attention(),
        }
    )
    model["frozen"].out_proj.weight.requires_grad_(False)
    head = nn.Linear(12, 12, bias=False)
    head.weight = model["tied"].out_proj.weight
    model["head"] = head
    start = copy.deepcopy(model.state_dict())
    report = balance_gauge(model)
    assert [x.layer for x in report.layers] == ["free"]
    reasons = {skip.name: skip.reason for skip in report.refused}
    assert reasons.keys() == {"frozen", "narrow", "tied"}
    assert "out_proj.weight is frozen" in reasons["frozen"]
    assert "bfloat16" in reasons["narrow"]
    assert "is also head.weight" in reasons["tied"]
    for name, value in model.state_dict().items():
        same = torch.equal(value, start[name])
        assert same or name.startswith("free")


def test_shared_layers_are_balanced_once() -> None:
    twice = nn.ModuleDict({"a": attention()})
    twice["b"] = twice["a"]
    x = tokens(1, 5, 12)
    before = twice["a"](x, x, x)[0].detach()
    report = balance_gauge(twice)
    assert [x.layer for x in report.layers] == ["a"]
    torch.testing.assert_close(twice["b"](x, x, x)[0].detach(), before, rtol=1e-12, atol=1e-12)


# -- in a loop -----------------------------------------------------------------------------------


def test_attached_constraints_act_after_every_nth_step() -> None:
    model = attention(dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    balancing = attach(GaugeBalance(), model, optimizer, every=3)
    imbalance = []
    for seed in range(6):
        step(model, optimizer, seed)
        imbalance.append(float(balance(next(views(model))).qk.detach().max()))
    assert [value < 1e-10 for value in imbalance] == [False, False, True] * 2
    assert balancing.steps == 6
    assert "balanced" in str(balancing.report)
    balancing.remove()
    for seed in range(3):
        step(model, optimizer, seed)
    assert balancing.steps == 6
    with pytest.raises(InputError, match="every=0"):
        attach(GaugeBalance(), model, optimizer, every=0)


def test_a_clip_in_the_loop_bounds_logits_that_would_explode() -> None:
    x = tokens(12, 12)

    def train(clip: bool) -> float:
        model = attention(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        constraint = QKClip(8.0, source=lambda: {LAYER: largest(model, x)})
        handle = attach(constraint, model, optimizer)
        if not clip:
            handle.remove()
        for _ in range(10):
            optimizer.zero_grad()
            model(x, x, x)[0][:, 0].mean().backward()
            optimizer.step()
        return float(largest(model, x).max())

    assert train(True) <= 8.0 * (1 + 1e-12)
    assert train(False) > 12.0


def test_what_a_capture_saw_is_what_is_clipped() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True).double()
    with torch.no_grad():
        model.self_attn.in_proj_weight.mul_(6.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = tokens(1, 9, 12)
    before = largest(model.self_attn, x[0])
    with MapCapture(model, ["self_attn"]) as capture:
        handle = attach(QKClip(5.0, source=capture.collect), model, optimizer)
        capture.armed = True
        model(x).square().mean().backward()
        capture.armed = False
        optimizer.step()
    handle.remove()
    report: Any = handle.report
    measured = {clip.head: clip.largest for clip in report.clipped}
    assert measured.keys() == set((before > 5.0).nonzero()[:, 0].tolist())
    for head, value in measured.items():
        assert value == pytest.approx(float(before[head]), rel=1e-6)
    # The step that lies between measuring and clipping is small.
    assert float(largest(model.self_attn, x[0]).max()) == pytest.approx(5.0, rel=0.02)
    bare = attention()
    assert qk_clip(bare, 10.0, {"": [1.0, 40.0, 1.0]}).clipped[0].head == 1


def test_plans_are_found_again_when_heads_are_pruned() -> None:
    found = LiveLayers()
    model = nn.ModuleDict({"a": attention(12, 3)})
    [layer] = found.of(model)
    placed = layer.placed()
    found.keep([layer])
    [again] = found.of(model)
    assert again.placed() is placed
    model["a"] = attention(8, 2)
    [other] = found.of(model)
    assert other.view().heads == 2
    assert other.placed() is not placed
    with pytest.raises(InputError, match="called 'b"):
        LiveLayers(["b*"]).of(model)
    assert [x.name for x in LiveLayers(["a*"]).of(model)] == ["a"]


@pytest.mark.parametrize("act", [GaugeBalance(), QKClip(1e-3, source="bound", token_norm=1.0)])
def test_a_model_of_equal_shapes_and_other_heads_is_looked_at_anew(act: Any) -> None:
    few, many = attention(12, 3), attention(12, 6, seed=2)
    act.apply(few)
    x = tokens(2, 5, 12)
    before = many(x, x, x)[0].detach()
    report = act.apply(many)
    if isinstance(act, QKClip):
        assert [clip.head for clip in report.clipped] == list(range(6))
    else:
        torch.testing.assert_close(many(x, x, x)[0].detach(), before, rtol=1e-10, atol=1e-10)
