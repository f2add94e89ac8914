"""Weights of live models by the names and values their next forward pass uses."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.nn.replacement import replace_attention
from levelhead.nn.sigma_reparam import sigma_reparam
from levelhead.training.watch import watch
from levelhead.training.watch_model import LiveLayers, bare_module, refuse_unreadable
from levelhead.weights.layouts import NothingMatched, match, views


def attention(seed: int = 0, **more: object) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True, **more)})


# torch's own, when its compiler is first imported
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Separate(nn.Module):
    """Projections of their own, as decoders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))


LAYOUT = {"module": "attn", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


def separate() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"attn": Separate()})


def q_of(layers: LiveLayers) -> Tensor:
    """The query weight of the only layer as one matrix."""
    return layers.view(layers.plans[0]).q.flatten(0, 1)


# ── what wraps ──


@compiles
def test_wrappers_are_taken_off() -> None:
    model = attention()
    compiled = torch.compile(model)
    assert bare_module(compiled) is model
    assert bare_module(nn.DataParallel(compiled)) is model
    with pytest.raises(InputError, match="give it a torch module"):
        bare_module(3)  # type: ignore[arg-type]


@compiles
def test_names_inside_compiled_parts_are_those_of_the_model() -> None:
    model = attention()
    plain = LiveLayers(model).names
    model["attn"] = torch.compile(model["attn"])
    layers = LiveLayers(model)
    assert layers.names == plain == ["attn"]
    assert model.get_submodule(layers.module_path("attn")) is model["attn"]
    assert next(iter(layers.parameters()["attn"])) == "attn._orig_mod.in_proj_weight"
    assert len(layers.parameters()["attn"]) == 4


# ── what is computed ──


def test_sigma_reparam_is_read_without_a_power_step() -> None:
    model = separate()
    sigma_reparam(model, gamma=2.0)
    model["attn"].q_proj.parametrizations.weight.original.data *= 3
    before = {name: b.clone() for name, b in model.named_buffers()}
    layers = LiveLayers(model, LAYOUT)
    found = q_of(layers)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    model.eval()
    assert torch.equal(found, model["attn"].q_proj.weight)
    assert layers.stored_plans == ()
    assert "attn.q_proj.parametrizations.weight.0.gamma" in layers.parameters()["attn"]


@pytest.mark.parametrize("kind", ["new", "old"])
@pytest.mark.parametrize("norm", ["weight", "spectral"])
def test_weight_and_spectral_norm(kind: str, norm: str) -> None:
    model = separate()
    home = nn.utils.parametrizations if kind == "new" else nn.utils
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        getattr(home, f"{norm}_norm")(model["attn"].q_proj)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name and p.ndim == 2:
                p *= torch.linspace(1, 2, p.numel()).view_as(p)
    layers = LiveLayers(model, LAYOUT)
    before = {name: b.clone() for name, b in model.named_buffers()}
    for _ in range(2):
        found = q_of(layers)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    model.eval()
    with torch.no_grad():
        out = model["attn"].q_proj(torch.eye(8)) - model["attn"].q_proj(torch.zeros(8))
    torch.testing.assert_close(found, out.T, rtol=1e-5, atol=1e-6)


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear, several: bool) -> None:
        super().__init__()
        self.base_layer = base
        down, up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(up.weight)
        self.lora_A = nn.ModuleDict({"one": down}) if several else down
        self.lora_B = nn.ModuleDict({"one": up}) if several else up
        self.scaling = {"one": 0.5} if several else 0.5
        base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.lora_A, self.lora_B
        if isinstance(a, nn.ModuleDict):
            return self.base_layer(x) + 0.5 * b["one"](a["one"](x))
        return self.base_layer(x) + 0.5 * b(a(x))


@pytest.mark.parametrize("several", [True, False])
def test_adapters_count_and_a_zero_factor_is_none(several: bool) -> None:
    model = separate()
    base = model["attn"].q_proj
    model["attn"].q_proj = adapted = Adapted(base, several)
    layers = LiveLayers(model, LAYOUT)
    assert layers.names == ["attn"]
    assert torch.equal(q_of(layers), base.weight)
    up = adapted.lora_B["one"] if several else adapted.lora_B
    nn.init.normal_(up.weight)
    with torch.no_grad():
        out = adapted(torch.eye(8)) - adapted(torch.zeros(8))
    torch.testing.assert_close(q_of(layers), out.T, rtol=1e-5, atol=1e-6)
    names = layers.parameters()["attn"]
    assert sum("lora" in name for name in names) == 2
    assert "attn.q_proj.base_layer.weight" in names


# ── what changes ──


def test_plans_are_kept_until_shapes_change() -> None:
    model = separate()
    layers = LiveLayers(model, LAYOUT)
    first = layers.plans
    layers.refresh()
    assert layers.plans is first
    part = model["attn"]
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(part, name, nn.Linear(8, 4))
    part.out_proj = nn.Linear(4, 8)
    part.num_heads = 1
    layers.refresh()
    assert layers.changed == ["attn changed from 2 to 1 heads"]
    assert layers.view(layers.plans[0]).d_k == 4
    del part.q_proj
    layers.refresh()
    assert layers.changed[1:] == ["attn is gone"]


# ── what is refused ──


def test_nothing_is_named() -> None:
    layers = LiveLayers(nn.Linear(2, 2))
    with pytest.raises(NothingMatched, match="names seen are weight, bias"):
        layers.refuse_none()
    LiveLayers(attention()).refuse_none()


def test_models_whose_numbers_lie_elsewhere_are_refused() -> None:
    refuse_unreadable(attention())
    refuse_unreadable(attention(dtype=torch.bfloat16))
    refuse_unreadable(attention(device="meta"))

    class FSDPModule(nn.Module):
        pass

    class Linear4bit(nn.Linear):
        pass

    packed = nn.Linear(2, 2)
    packed.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    eighth = nn.Linear(2, 2)
    eighth.weight = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    for model, said in (
        (nn.Sequential(FSDPModule()), "0 is sharded over processes"),
        (nn.Sequential(Linear4bit(2, 2)), r"0 is quantised \(Linear4bit\)"),
        (packed, "weight is quantised"),
        (eighth, "weight is quantised"),
        (nn.LazyLinear(3), "run one forward pass"),
    ):
        with pytest.raises(InputError, match=said):
            refuse_unreadable(model)


def test_sharded_tensors_are_refused(tmp_path) -> None:
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(InputError, match="weight is sharded"):
            refuse_unreadable(model)
    finally:
        distributed.destroy_process_group()


def test_layers_are_those_of_the_table() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8), 2)
    layers = LiveLayers(model)
    assert layers.names == [plan.name for plan in match(model).plans]
    assert len(layers.names) == 4
    assert layers.stored_plans == layers.plans


def test_a_low_rank_head_core_is_watched_as_the_layer_it_stands_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
    )
    replace_attention(model, ranks=(0.5, 1.0, 0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, every=1, out=tmp_path / "run") as run:
        for x in torch.randn(2, 4, 5, 8):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss)
    readings = run.readings()
    for layer in ("layers.0.self_attn", "layers.1.self_attn"):
        found = {r.name for r in readings if r.where.get("layer") == layer}
        assert {"qk_effective_rank", "attention_entropy", "gradient_norm"} <= found
    core = model.layers[0].self_attn
    [view] = list(views(model, layers=[0]))
    torch.testing.assert_close(view.qk.dense(), core.view().qk.dense())
