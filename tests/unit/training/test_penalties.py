"""Penalties on live models: what they read, how they are weighted, stored, summed and refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from levelhead.base.errors import InputError
from levelhead.nn.replacement import replace_attention
from levelhead.nn.sigma_reparam import remove_sigma_reparam, sigma_reparam
from levelhead.training import penalties, penalty_maps
from levelhead.training.penalty import Penalty, PenaltySum
from levelhead.training.penalty_layers import LiveLayers
from levelhead.training.sam import SAM
from levelhead.training.schedules import Every, Linear
from levelhead.weights.layouts import NothingMatched, views
from oracles import invariants as twin


def encoder(layers: int = 2, d: int = 8, h: int = 2, seed: int = 0, **facts: Any):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(d, h, 2 * d, dropout=0.0, batch_first=True, **facts)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def gradient(penalty: Penalty | PenaltySum, model: nn.Module) -> Tensor:
    """The gradient of the value in all parameters, zeros where there is none."""
    model.zero_grad()
    penalty.value().backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([p.flatten() for p in parts]).clone()


# ── a decoder with grouped keys, rotary positions and perhaps a norm of queries and keys ──


class Attention(nn.Module):
    def __init__(self, d: int, h: int, g: int, r: int, normed: bool, way: str) -> None:
        super().__init__()
        self.h, self.g, self.r, self.way = h, g, r, way
        self.q_proj = nn.Linear(d, h * r, bias=False)
        self.k_proj = nn.Linear(d, g * r, bias=False)
        self.v_proj = nn.Linear(d, g * r, bias=False)
        self.o_proj = nn.Linear(h * r, d, bias=False)
        if normed:
            self.q_norm, self.k_norm = nn.RMSNorm(r), nn.RMSNorm(r)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.r)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.split(self.q_proj(x), self.h), self.split(self.k_proj(x), self.g)
        v = self.split(self.v_proj(x), self.g)
        if self.way == "fused":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (t.repeat_interleave(self.h // self.g, 1) for t in (k, v))
            logits = q @ k.mT / self.r**0.5
            past = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
            logits = logits.masked_fill(~past, torch.finfo(logits.dtype).min)
            out = logits.softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Named as in Llama and Qwen 3."""

    def __init__(self, *, normed: bool = False, way: str = "fused", layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for _ in range(layers):
            block = nn.Module()
            block.self_attn = Attention(12, 4, 2, 4, normed, way)
            block.input_layernorm = nn.RMSNorm(12)
            self.model.layers.append(block)
        self.config = {
            "model_type": "qwen3" if normed else "llama",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "hidden_size": 12,
            "rope_theta": 100.0,
            "rms_norm_eps": 1e-6,
        }

    def forward(self, x: Tensor) -> Tensor:
        for block in self.model.layers:
            x = x + block.self_attn(block.input_layernorm(x))
        return x


# ── weight, schedule, state ──


def test_a_call_is_weight_times_schedule_times_value() -> None:
    penalty = penalties.coherence(encoder(), 0.3, schedule=Linear(4))
    assert penalty().item() == 0.0
    value = penalty.value().item()
    for _ in range(3):
        penalty.step()
    assert penalty().item() == pytest.approx(0.3 * 0.75 * value, rel=1e-6)


def test_where_the_factor_is_zero_nothing_is_computed() -> None:
    class Fails:
        def __call__(self) -> Tensor:
            raise AssertionError("computed")

        def advance(self) -> None: ...

        def parameters(self) -> list[nn.Parameter]:
            return []

    penalty = Penalty("fails", Fails(), 1.0, schedule=Every(2))  # type: ignore[arg-type]
    penalty.step()
    assert penalty().item() == 0.0
    penalty.step()
    with pytest.raises(AssertionError, match="computed"):
        penalty()


def test_the_value_is_the_mean_over_layers_of_the_twin() -> None:
    model = encoder(3, 12, 3)
    expected = [twin.coherence(twin.gram(twin.forms(v.map(Tensor.detach)))) for v in views(model)]
    found = penalties.coherence(model).value().item()
    assert found == pytest.approx(sum(expected) / 3, rel=1e-5)
    first = penalties.coherence(model, layers=(0,)).value().item()
    assert first == pytest.approx(expected[0], rel=1e-5)
    named = penalties.coherence(model, layers=("layers.[12].*",))
    assert named.value().item() == pytest.approx(sum(expected[1:]) / 2, rel=1e-5)


def test_values_are_those_of_dense_twins() -> None:
    model = encoder(1, 12, 3).double()
    view = next(views(model)).map(Tensor.detach)
    b, m = twin.forms(view), twin.maps(view)
    c, sigma = twin.cosines(twin.gram(b)), twin.spectra(b, 4)
    values = np.linalg.eigvalsh(c)
    modes = [
        np.linalg.svd(np.moveaxis(b, mode, 0).reshape(n, -1), compute_uv=False) ** 2
        for mode, n in enumerate(b.shape)
    ]
    shares = [e.sum() ** 2 / (e**2).sum() / len(e) for e in modes]
    ranks = np.array([twin.effective_rank(s) for s in sigma])
    spread = -(values / 3 * np.log(values / 3)).sum()
    weights = [w.square().sum().item() for w in (view.q, view.k, view.v, view.o)]
    expected = {
        penalties.coherence(model, form="ov"): twin.coherence(twin.gram(m)),
        penalties.coherence(model, form="both"): (
            twin.coherence(twin.gram(b)) + twin.coherence(twin.gram(m))
        )
        / 2,
        penalties.log_det(model, eps=0.1): np.log(1.1)
        - np.linalg.slogdet(c + 0.1 * np.eye(3))[1] / 3,
        penalties.nuclear_ratio(model, eps=0.1): 1 - np.sqrt(values + 0.01).sum() ** 2 / 9 / 1.01,
        penalties.entropy_rank(model): 1 - spread / np.log(3),
        penalties.rank_floor(model, floor=3.5): np.maximum(0, 1 - ranks / 3.5).mean(),
        penalties.nuclear_norm(model): sigma.sum(1).mean(),
        penalties.core_sparsity(model): np.mean(shares),
        penalties.l2(model): sum(weights),
    }
    for penalty, value in expected.items():
        assert penalty.value().item() == pytest.approx(value, rel=1e-9), penalty


def test_a_sum_is_the_sum_and_is_stored_as_one() -> None:
    model = encoder()
    members = (penalties.coherence(model), penalties.l2(model, 0.01, schedule=Linear(2)))
    both = sum(members)
    assert isinstance(both, PenaltySum)
    both.step()
    expected = sum(p().item() for p in members)
    assert both().item() == pytest.approx(expected, rel=1e-6)
    assert both.symmetry == tuple(n for n in members[0].symmetry if n in members[1].symmetry)
    assert (both + penalties.log_det(model)).name == "coherence + l2 + log_det"
    other = penalties.coherence(model) + penalties.l2(model, 0.01, schedule=Linear(2))
    other.load_state_dict(both.state_dict())
    assert [p.steps for p in other.penalties] == [1, 1]
    with pytest.raises(InputError, match="not the state of 2 penalties"):
        other.load_state_dict({"penalties": []})


def test_power_iteration_goes_on_from_a_state_dict() -> None:
    model = encoder(d=32, h=2)
    one = penalties.spectral_norm(model, iterations=1, width=1)
    for _ in range(3):
        one.value()
    two = penalties.spectral_norm(model, iterations=1, width=1)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert two.value().item() == one.value().item()


def test_the_spectral_norm_is_exact_to_rounding_after_some_calls() -> None:
    model = encoder(d=32, h=2)
    penalty = penalties.spectral_norm(model, form="both")
    for _ in range(10):
        found = penalty.value().item()
    expected = []
    for view in views(model):
        view = view.map(Tensor.detach)
        for stack in (twin.forms(view), twin.maps(view)):
            expected.append(twin.spectra(stack, 1).mean())
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_the_reference_of_stability_follows_at_each_step() -> None:
    model = encoder(1)
    penalty = penalties.stability(model, quantities=("qk_nuclear_norm",), decay=0.75)
    start = next(views(model)).map(Tensor.detach).qk.nuclear_norms()
    with torch.no_grad():  # B grows fourfold
        model.layers[0].self_attn.in_proj_weight.mul_(2)
    assert penalty.value().item() == pytest.approx(9.0, rel=1e-5)
    penalty.step()
    now, reference = 4 * start, start + 0.25 * 3 * start
    expected = ((now - reference).square().sum() / reference.square().sum()).item()
    assert penalty.value().item() == pytest.approx(expected, rel=1e-5)
    other = penalties.stability(model, quantities=("qk_nuclear_norm",), decay=0.75)
    assert other.value().item() < 1e-20
    other.load_state_dict(penalty.state_dict())
    assert other.value().item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match="references of"):
        penalties.stability(model).load_state_dict(penalty.state_dict())


# ── training around it ──


def test_a_step_of_sam_with_a_penalty_is_that_of_the_formula() -> None:
    model = encoder(1).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    penalty = penalties.nuclear_norm(model, 0.1)
    parameters = list(model.parameters())

    def slopes() -> list[Tensor]:
        loss = model(x).square().mean() + penalty()
        return [torch.as_tensor(g) for g in torch.autograd.grad(loss, parameters)]

    start = [p.detach().clone() for p in parameters]
    first = slopes()
    norm = torch.stack([g.square().sum() for g in first]).sum().sqrt()
    with torch.no_grad():
        for p, g in zip(parameters, first, strict=True):
            p.add_(0.05 * g / norm)
    expected = [w - 0.1 * g for w, g in zip(start, slopes(), strict=True)]
    with torch.no_grad():
        for p, w in zip(parameters, start, strict=True):
            p.copy_(w)
    sam = SAM(parameters, torch.optim.SGD, rho=0.05, lr=0.1)

    def closure() -> Tensor:
        sam.zero_grad()
        loss = model(x).square().mean() + penalty()
        loss.backward()
        return loss

    sam.step(closure)
    for p, w in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-9, atol=1e-12)


def test_autocast_does_not_reach_the_value() -> None:
    model = encoder()
    made = [
        penalties.coherence(model),
        penalties.nuclear_norm(model),
        penalties.spectral_norm(model),
    ]
    for penalty in made:
        penalty.value()
        plain = penalty.value().detach()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under = penalty.value()
        assert under.dtype == torch.float32
        torch.testing.assert_close(under.detach(), plain, rtol=1e-5, atol=0)


def test_weights_in_bfloat16_are_computed_in_float32() -> None:
    model = encoder().bfloat16()
    for make in (penalties.coherence, penalties.nuclear_norm, penalties.core_sparsity):
        model.zero_grad()
        value = make(model).value()
        assert value.dtype == torch.float32
        value.backward()
        slope = model.layers[0].self_attn.in_proj_weight.grad
        assert slope.dtype == torch.bfloat16
        assert float(slope.abs().max()) > 0


def test_frozen_weights_get_no_gradient() -> None:
    model = encoder()
    model.layers[0].requires_grad_(False)
    penalty = penalties.coherence(model)
    penalty().backward()
    assert model.layers[0].self_attn.in_proj_weight.grad is None
    assert model.layers[1].self_attn.in_proj_weight.grad is not None
    assert all(p.requires_grad for p in penalty.parameters())
    model.requires_grad_(False)
    assert not penalty().requires_grad


def test_ddp_adds_the_penalty_once(tmp_path) -> None:
    plain, wrapped = encoder(), encoder()
    x = torch.randn(2, 3, 8)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/at", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(wrapped)
        for model, inner in ((plain, plain), (parallel, wrapped)):
            penalty = penalties.coherence(model, 3.0)
            floor = penalties.entropy_floor(model, floor=1.0)
            (model(x).square().mean() + penalty() + floor()).backward()
            assert inner.layers[0].self_attn.in_proj_weight.grad is not None
        for one, two in zip(plain.parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)
    finally:
        dist.destroy_process_group()


# ── what is read ──


def test_a_reparametrised_weight_is_read_as_the_module_reads_it() -> None:
    model = encoder()
    before = penalties.nuclear_norm(model).value().item()
    sigma_reparam(model)
    penalty = penalties.nuclear_norm(model)
    assert penalty.value().item() == pytest.approx(before, rel=1e-5)
    penalty.value().backward()
    gamma = model.layers[0].self_attn.parametrizations.in_proj_weight[0].gamma
    assert float(gamma.grad[:2].abs().min()) > 0
    assert any(p is gamma for p in penalty.parameters())
    remove_sigma_reparam(model)
    assert penalties.nuclear_norm(model).value().item() == pytest.approx(before, rel=1e-5)


def test_a_low_rank_adapter_with_a_zero_factor_learns() -> None:
    class Adapter(nn.Module):
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(2, columns))
            self.b = nn.Parameter(torch.zeros(rows, 2))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.b @ self.a

    model = encoder(1).requires_grad_(False)
    attention = model.layers[0].self_attn
    adapter = Adapter(24, 8)
    parametrize.register_parametrization(attention, "in_proj_weight", adapter)
    for make in (penalties.coherence, penalties.nuclear_norm, penalties.spectral_norm):
        adapter.zero_grad()
        make(model).value().backward()
        assert float(adapter.b.grad.norm()) > 0
        assert float(adapter.a.grad.norm()) == 0.0


def test_layers_that_are_one_module_count_once() -> None:
    model = encoder(3)
    model.layers[1] = model.layers[0]
    live = LiveLayers(model)
    assert live.names == ("layers.0.self_attn", "layers.2.self_attn")
    model = encoder(2)
    for name in ("in_proj_weight", "in_proj_bias"):  # the same parameters in two modules
        setattr(model.layers[1].self_attn, name, getattr(model.layers[0].self_attn, name))
    assert len(LiveLayers(model).names) == 2  # their outputs still differ
    model.layers[1].self_attn.out_proj = model.layers[0].self_attn.out_proj
    assert len(LiveLayers(model).names) == 1


def test_grouped_and_rotary_layers() -> None:
    model = Decoder()
    [view, _] = views(model)
    assert (view.heads, view.groups, view.position.tag) == (4, 2, "rope")
    view = view.map(Tensor.detach)
    found = penalties.coherence(model, layers=(0,), form="product").value().item()
    gram = twin.gram(twin.forms(view)) * twin.gram(twin.maps(view))
    assert found == pytest.approx(twin.coherence(gram), rel=1e-4)
    sigma = twin.spectra(twin.forms(view), 4)
    norm = penalties.nuclear_norm(model, layers=(0,)).value().item()
    assert norm == pytest.approx(sigma.sum(1).mean(), rel=1e-5)


def test_under_a_norm_of_queries_and_keys_ratios_stand_and_sizes_are_refused() -> None:
    model = Decoder(normed=True)
    for make in (penalties.nuclear_norm, penalties.spectral_norm, penalties.core_sparsity):
        with pytest.raises(InputError, match="queries and keys are normed"):
            make(model)
        assert make(model, form="ov").value().item() > 0
    penalty = penalties.coherence(model)
    before = penalty.value().item()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():  # gains are part of the form, and a scale of q is nothing
        attention.q_norm.weight[1:3] *= 3.0
    moved = penalty.value().item()
    assert moved != pytest.approx(before, rel=1e-3)
    with torch.no_grad():
        attention.k_norm.weight[1:3] /= 3.0
        attention.q_proj.weight *= 2.0
    assert penalty.value().item() == pytest.approx(before, rel=1e-5)


def test_cross_attention() -> None:
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)
    penalty = penalties.coherence(model, layers=("*multihead_attn",))
    assert penalty.quantity.live.names == ("layers.0.multihead_attn",)
    floor = penalties.entropy_floor(model, floor=1.0)
    model(torch.randn(2, 3, 8), torch.randn(2, 5, 8))
    (penalty() + floor()).backward()
    assert float(model.layers[0].multihead_attn.in_proj_weight.grad.norm()) > 0


def test_folding_puts_the_norm_in_front_into_the_weights() -> None:
    model = Decoder(layers=1)
    gain = model.model.layers[0].input_layernorm.weight
    with torch.no_grad():
        gain.copy_(torch.linspace(0.5, 2.0, 12))
    raw = penalties.nuclear_norm(model).value().item()
    model.zero_grad()
    penalty = penalties.nuclear_norm(model, fold=True)
    penalty.value().backward()
    assert float(gain.grad.norm()) > 0
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for each in (attention.q_proj, attention.k_proj):
            each.weight.mul_(gain)
        gain.fill_(1.0)
    after = penalties.nuclear_norm(model).value().item()
    folded = penalty.value().item()
    assert folded == pytest.approx(after, rel=1e-5)
    assert raw != pytest.approx(after, rel=1e-2)


def test_heads_may_be_pruned_while_training() -> None:
    model = Decoder()
    made = [penalties.coherence(model), penalties.spectral_norm(model), penalties.stability(model)]
    for penalty in made:
        penalty.value()
    attention = model.model.layers[0].self_attn
    kept = torch.arange(8)  # the first group's two heads of four rows
    for name in ("q_proj", "o_proj"):
        linear = getattr(attention, name)
        axis = 0 if name == "q_proj" else 1
        linear.weight = nn.Parameter(linear.weight.detach().index_select(axis, kept))
    for name in ("k_proj", "v_proj"):
        linear = getattr(attention, name)
        linear.weight = nn.Parameter(linear.weight.detach())
    for penalty in made:
        assert bool(penalty.value().isfinite())
    assert [v.heads for v in made[0].quantity.live.views()] == [2, 4]
    attention.q_proj.weight = nn.Parameter(torch.randn(7, 12))
    with pytest.raises(InputError, match="not by whole heads of width 4"):
        made[0].value()


# ── maps ──


@pytest.mark.parametrize("way", ["fused", "eager"])
@pytest.mark.parametrize("rows", [None, 3])
def test_shares_are_those_of_the_maps(
    way: str, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against maps computed from the layer's input; values and gradients."""
    model, x = Decoder(way=way, layers=1), torch.randn(2, 7, 12)
    block = model.model.layers[0]
    with torch.no_grad():
        block.self_attn.q_proj.weight.mul_(5)
    monkeypatch.setattr(penalty_maps, "_CHUNK", 1)  # one sentence at a time
    penalty = penalties.entropy_floor(model, floor=0.9, rows=rows)
    model(x)
    found = penalty.value()
    assert found.item() > 0.05
    at = block.input_layernorm(x)
    q = block.self_attn.q_proj(at).unflatten(-1, (4, 4)).transpose(1, 2)
    k = block.self_attn.k_proj(at).unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, 1)
    logits = (q @ k.mT / 2).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -1e9)
    p = logits.softmax(-1)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
    chosen = range(1, 7) if rows is None else (3, 6)  # rows 0, 3, 6; row 0 has one key
    shares = torch.stack([entropy[..., i] / torch.tensor(i + 1.0).log() for i in chosen], -1)
    expected = (0.9 - shares.mean((0, 2))).clamp_min(0).mean()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weight = block.self_attn.k_proj.weight
    [slope] = torch.autograd.grad(found, weight)
    [other] = torch.autograd.grad(expected, weight)
    torch.testing.assert_close(slope, other, rtol=1e-4, atol=1e-6)
    penalty.close()
    assert not model._forward_pre_hooks
    assert not block.self_attn._forward_hooks


def test_masks_of_multihead_attention_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    monkeypatch.setattr(penalty_maps, "_CHUNK", 1)
    penalty = penalties.entropy_floor(model, floor=1.0)
    _, p = model(x, x, x, key_padding_mask=padding, attn_mask=causal, average_attn_weights=False)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    keys = (~causal[None] & ~padding[:, None]).sum(-1)[:, None].expand(2, 2, 5)
    share = torch.where(keys >= 2, entropy / keys.clamp_min(2).log(), 0).sum((0, 2))
    expected = (1 - share / (keys >= 2).sum((0, 2))).mean()
    torch.testing.assert_close(penalty.value(), expected, rtol=1e-5, atol=1e-6)


def test_a_learned_bias_in_the_mask_gets_its_gradient() -> None:
    class Biased(nn.MultiheadAttention):
        def parts(self) -> tuple[Tensor, Tensor]:
            return self.in_proj_weight, self.in_proj_bias

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (
                F.linear(x, w, b).unflatten(-1, (2, 4)).transpose(1, 2)
                for w, b in zip(
                    self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True
                )
            )
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.table, scale=1.0)

    model = Biased(8, 2)
    model.table = nn.Parameter(torch.randn(2, 5, 5))
    model(torch.randn(3, 5, 8))
    penalty = penalties.entropy_floor(model, floor=1.0)
    model(torch.randn(3, 5, 8))
    penalty.value().backward()
    assert float(model.table.grad.norm()) > 0


def test_the_last_forward_with_gradients_counts_and_outputs_stay() -> None:
    model, x = encoder(1), torch.randn(2, 4, 8)
    plain = model(x)
    penalty = penalties.entropy_floor(model, floor=1.0)
    with pytest.raises(InputError, match="ran no attention with gradients"):
        penalty()
    assert torch.equal(model(x), plain)
    first = penalty.value().item()
    model(3 * torch.randn(2, 4, 8))
    assert penalty.value().item() != first
    model(x)
    assert penalty.value().item() == pytest.approx(first, rel=1e-6)
    with torch.no_grad():
        model(x)
    with pytest.raises(InputError, match="call the model"):
        penalty()


def test_rows_without_keys_and_saturated_maps_have_finite_slopes() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    padding = torch.ones(2, 4, dtype=torch.bool)
    padding[0, :2] = False  # the second sentence has no keys at all
    penalty = penalties.entropy_floor(model, floor=1.0)
    with torch.no_grad():
        model.in_proj_weight.mul_(100)
    model(x, x, x, key_padding_mask=padding, need_weights=False)
    penalty.value().backward()
    assert bool(model.in_proj_weight.grad.isfinite().all())


# ── the control ──


def test_equal_strength_matches_the_norms_of_gradients() -> None:
    model = encoder()
    penalty = penalties.coherence(model, 0.3, form="both", schedule=Linear(5))
    control = penalties.equal_strength(penalties.l2(model), penalty)
    norms = [p.weight * float(gradient(p, model).norm()) for p in (control, penalty)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert control.schedule == Linear(5)
    floor = penalties.rank_floor(model, floor=1.01)
    with pytest.raises(InputError, match="rank_floor has no gradient"):
        penalties.equal_strength(penalties.l2(model), floor)


# ── the trap ──


def test_the_orthonormality_of_a_tucker_factor_is_no_penalty() -> None:
    """Zero, and without gradient, for copies of a head, where coherence is one."""
    model = nn.MultiheadAttention(12, 3).double()
    [view] = views(model)
    near = view.q[:1] + 1e-3 * view.q, view.k[:1] + 1e-3 * view.k
    forms = near[0].mT @ near[1]
    u = torch.linalg.svd(forms.flatten(1), full_matrices=False).U  # the head factor of HOSVD
    trap = (u.mT @ u - torch.eye(3, dtype=u.dtype)).square().sum()
    [slope] = torch.autograd.grad(trap, model.in_proj_weight)
    assert trap.item() <= 1e-20
    assert float(slope.norm()) <= 1e-20
    assert twin.coherence(twin.gram(forms.detach().numpy())) > 0.99


# ── refusals ──


def test_wrong_arguments_are_refused_in_a_sentence() -> None:
    model = encoder()
    with pytest.raises(NothingMatched):
        penalties.coherence(nn.Linear(2, 2))
    with pytest.raises(InputError, match="expected a torch module"):
        penalties.coherence(model.state_dict())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="form 'kq' was given"):
        penalties.coherence(model, form="kq")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected 'qk', 'ov' or 'both'"):
        penalties.nuclear_norm(model, form="product")
    with pytest.raises(InputError, match="weight=-1 was given"):
        penalties.coherence(model, -1)
    for weight in ("a", None, True, float("nan"), 1j):
        with pytest.raises(InputError, match=f"weight={weight!r} was given; expected a finite"):
            penalties.l2(model, weight)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"weight={weight!r} was given; expected a finite"):
            penalties.entropy_floor(model, weight)  # type: ignore[arg-type]
    assert not model.layers[0].self_attn._forward_hooks
    assert penalties.l2(model, np.float32(0.5)).weight == 0.5
    with pytest.raises(InputError, match="there is one head"):
        penalties.coherence(encoder(1, 4, 1))
    with pytest.raises(InputError, match=r"a floor of 9 lies above 4"):
        penalties.rank_floor(model, floor=9.0)
    with pytest.raises(InputError, match="above 1"):
        penalties.rank_floor(model, floor=0.5)
    with pytest.raises(InputError, match=r"floor=None was given; .* above 1, .*half of d_k"):
        penalties.rank_floor(model)
    for number in ("a", None, True):
        with pytest.raises(InputError, match=f"floor={number!r} was given"):
            penalties.rank_floor(model, floor=number)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"floor={number!r} was given"):
            penalties.entropy_floor(model, floor=number)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"decay={number!r} was given"):
            penalties.stability(model, decay=number)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"eps={number!r} was given"):
            penalties.log_det(model, eps=number)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="eps=0"):
        penalties.log_det(model, eps=0.0)
    with pytest.raises(InputError, match=r"floor=1\.5"):
        penalties.entropy_floor(model, floor=1.5)
    with pytest.raises(InputError, match="rows=0"):
        penalties.entropy_floor(model, rows=0)
    with pytest.raises(InputError, match="decay=2"):
        penalties.stability(model, decay=2.0)
    with pytest.raises(InputError, match="qk_rank has no gradient"):
        penalties.stability(model, quantities=("qk_rank",))
    with pytest.raises(InputError, match="iterations=0"):
        penalties.spectral_norm(model, iterations=0)
    with pytest.raises(InputError, match="unknown argument 'layer'"):
        penalties.coherence(model, layer=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="not parametrised by CP factors"):
        penalties.cp_coherence(model)
    with pytest.raises(InputError, match="expected matrices"):
        penalties.cp_coherence([torch.ones(2, 3), torch.ones(2, 4)])
    with pytest.raises(InputError, match="one component"):
        penalties.cp_coherence([torch.ones(2, 1)])
    with pytest.raises(InputError, match=r"modes \(3,\)"):
        penalties.cp_coherence([torch.ones(2, 2)], modes=(3,))
    zero = nn.MultiheadAttention(4, 2, add_zero_attn=True)
    penalties.entropy_floor(zero)
    with pytest.raises(InputError, match="adds keys of its own"):
        zero(*[torch.randn(3, 1, 4)] * 3)
    with pytest.raises(InputError, match="expected that of a penalty"):
        penalties.l2(encoder()).load_state_dict({})


def test_a_module_that_was_replaced_is_read_where_it_stood() -> None:
    """Pruning by new Linears, as transformers does, and a whole new attention layer."""
    model = encoder(layers=1)
    made = [penalties.l2(model), penalties.coherence(model, fold=True)]
    attention = model.layers[0].self_attn = encoder(layers=1, seed=5).layers[0].self_attn
    fresh = [penalties.l2(model), penalties.coherence(model, fold=True)]
    for old, new in zip(made, fresh, strict=True):
        assert old.value().item() == new.value().item()
        old.value().backward()
        assert attention.in_proj_weight.grad is not None
        assert {id(p) for p in old.parameters()} == {id(p) for p in new.parameters()}
    model.layers[0].self_attn = nn.Identity()
    with pytest.raises(InputError, match=r"no layers\.0\.self_attn\.in_proj_weight any"):
        made[0].value()


@pytest.mark.parametrize("where", ["one key", "padding", "empty batch"])
def test_where_no_row_has_a_choice_the_floor_asks_nothing(where: str) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    penalty = penalties.entropy_floor(model, floor=0.5)
    b, n = (0 if where == "empty batch" else 2), (1 if where == "one key" else 3)
    hidden = torch.arange(n).expand(b, n) > 0
    x = torch.randn(b, n, 8)
    model(x, x, x, key_padding_mask=hidden if where == "padding" else None)
    value = penalty.value()
    value.backward()
    assert value.item() == 0.0
    assert not model.in_proj_weight.grad.any()


def test_an_interrupted_forward_leaves_nothing_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch runs no hook after a KeyboardInterrupt."""

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    model, x = Decoder(), torch.randn(2, 5, 12)
    penalty = penalties.entropy_floor(model, floor=1.0)
    model(x)
    before = penalty.value().item()
    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert torch._C._len_torch_function_stack() == 1
    model(x)
    assert torch._C._len_torch_function_stack() == 0
    assert [len(calls) for calls in penalty.quantity.maps.calls().values()] == [1, 1]
    assert penalty.value().item() == before


def test_a_model_whose_maps_are_seen_can_be_copied() -> None:
    """As weight averaging does; the copy's forwards do not count for the original."""
    model, x = Decoder(), torch.randn(2, 5, 12)
    penalty = penalties.entropy_floor(model, floor=1.0)
    model(x)
    before = penalty.value().item()
    other = copy.deepcopy(model)
    other(10 * x)
    assert penalty.value().item() == before
    model(10 * x)
    assert penalty.value().item() != before


def test_a_head_core_is_penalised_as_the_layer_it_stands_for() -> None:
    """Values are those of the plain layer, and gradients those of its weights, through factors."""
    model = encoder(layers=1)
    expected = penalties.coherence(model).value().item()
    replace_attention(model)
    penalty = penalties.coherence(model)
    core = model.layers[0].self_attn
    assert penalty.value().item() == pytest.approx(expected, rel=1e-4)
    penalty.value().backward()
    weight = core.plain_weights()["in_proj_weight"]
    plain = nn.MultiheadAttention(8, 2)
    plain.in_proj_weight.data.copy_(weight.detach())
    plain.out_proj.weight.data.copy_(core.out_proj.weight.detach())
    penalties.coherence(plain).value().backward()
    slope = torch.autograd.grad(weight, core.core, plain.in_proj_weight.grad)[0]
    torch.testing.assert_close(core.core.grad, slope, rtol=1e-3, atol=1e-6)
    assert {id(p) for p in penalty.parameters()} >= {id(core.core), id(core.model_factor)}
    with torch.no_grad():
        core.core.mul_(2)
    assert penalties.l2(model).value().item() == pytest.approx(
        sum(w.square().sum().item() for w in core.plain_weights().values() if w.ndim == 2), rel=1e-5
    )
