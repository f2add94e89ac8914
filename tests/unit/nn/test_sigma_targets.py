"""Which weights σReparam takes by the names of attention layers, and how fused ones are cut."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.nn.head_core import HeadCoreAttention
from levelhead.nn.sigma_reparam import (
    SigmaReparam,
    frozen_power_iteration,
    remove,
    sigma_reparam,
)
from levelhead.nn.sigma_targets import Blocks, attention_weights
from levelhead.training.constraints import balance_gauge
from levelhead.weights.layouts import NothingMatched

# torch says so once, when an encoder nests its tensors.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.mark.parametrize("sideways", [False, True])
@pytest.mark.parametrize(
    ("count", "repeats", "rows", "columns"),
    [(1, 1, 3, 4), (3, 1, 2, 4), (3, 4, 2, 5), (2, 3, 1, 1), (4, 2, 3, 2)],
)
def test_blocks_are_cut_and_joined(
    count: int, repeats: int, rows: int, columns: int, sideways: bool
) -> None:
    """Entry by entry: part p of block b is at rows (p·count + b)·rows of the upright matrix."""
    blocks = Blocks(count, sideways, repeats)
    upright = torch.arange(float(count * repeats * rows * columns)).reshape(-1, columns)
    stored = upright.T.contiguous() if sideways else upright
    found = blocks.cut(stored)
    assert found.shape == (count, repeats * rows, columns)
    for b in range(count):
        for part in range(repeats):
            for i in range(rows):
                at = (part * count + b) * rows + i
                assert torch.equal(found[b, part * rows + i], upright[at])
    assert torch.equal(blocks.joined(found, stored.shape), stored)


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return model


def test_layers_take_attention_and_nothing_else() -> None:
    model = sigma_reparam(encoder(), layers=["layers.1.*"])
    found = {
        name.removesuffix(".0")
        for name, module in model.named_modules()
        if isinstance(module, SigmaReparam)
    }
    start = "layers.1.self_attn."
    assert found == {
        f"{start}parametrizations.in_proj_weight",
        f"{start}out_proj.parametrizations.weight",
    }
    gamma = model.get_parameter(f"{start}parametrizations.in_proj_weight.0.gamma")
    weight = model.layers[1].self_attn.parametrizations.in_proj_weight.original
    expected = torch.linalg.matrix_norm(weight.detach().double().reshape(3, 8, 8), 2)
    torch.testing.assert_close(gamma.detach().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_torch_encoders_read_the_reparametrised_weight(padding: bool, grad: bool) -> None:
    """Also where evaluation without gradients would take torch's shortcut past the layer."""
    model = encoder().eval()
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 3:] = True
    mask = padded if padding else None
    seen = ~padded if padding else torch.ones_like(padded)

    def run() -> Tensor:
        with torch.set_grad_enabled(grad):
            out: Tensor = model(x, src_key_padding_mask=mask)[seen].detach()
        return out

    before = run()
    sigma_reparam(model, layers="all")
    torch.testing.assert_close(run(), before, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gamma"):
                weight.mul_(0.3)
    scaled = run()
    assert (scaled - before).abs().max() > 1e-2
    remove(model)
    torch.testing.assert_close(run(), scaled, rtol=1e-6, atol=1e-6)


def test_state_dicts_and_folding_before_constraints() -> None:
    one, other = (sigma_reparam(encoder(), layers="all") for _ in range(2))
    with torch.no_grad():
        for weight in one.parameters():
            weight.add_(0.1)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    with frozen_power_iteration(other):  # keeps the saved u and v
        other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    with frozen_power_iteration(one, other):
        assert torch.equal(one(x), other(x))
    with pytest.raises(InputError, match="fold it first"):
        balance_gauge(other)
    remove(other)
    assert len(balance_gauge(other).layers) == 2


def test_folding_restores_the_order_that_optimisers_count_by() -> None:
    model = encoder()
    names = [name for name, _ in model.named_parameters()]
    same = [id(weight) for weight in model.parameters()]
    for _ in range(2):
        sigma_reparam(model, layers="all")
        sigma_reparam(model, names=("layers.0.linear1.weight",))
        remove(model)
        assert [name for name, _ in model.named_parameters()] == names
        assert [id(weight) for weight in model.parameters()] == same
    apart = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    names = [name for name, _ in apart.named_parameters()]
    remove(sigma_reparam(apart, names=("v_proj_weight", "q_proj_weight")))
    assert [name for name, _ in apart.named_parameters()] == names


def test_arguments_are_checked() -> None:
    model: Any = encoder()
    with pytest.raises(InputError, match="names and layers"):
        sigma_reparam(model, names=("in_proj_weight",), layers="all")
    with pytest.raises(InputError, match=r"called 'layers.5'.*layers.0.self_attn"):
        sigma_reparam(model, layers=["layers.0.*", "layers.5"])
    with pytest.raises(NothingMatched, match="no attention layer was recognised in this Linear"):
        sigma_reparam(nn.Linear(2, 2), layers="all")
    with pytest.raises(InputError, match=r"layers=\[\] names no layer"):
        sigma_reparam(model, layers=[])
    assert not any(isinstance(module, SigmaReparam) for module in model.modules())
    [target] = [
        t
        for t in attention_weights(nn.MultiheadAttention(4, 2), "all", None)
        if t.blocks.count == 3
    ]
    assert target.path == "in_proj_weight"


def test_a_second_time_says_that_it_was_done() -> None:
    done = "its attention weights are already reparametrised"
    for model in (encoder(), nn.MultiheadAttention(4, 2)):
        sigma_reparam(model, layers="all")
        # It names nothing that was not typed.
        said = f"^sigma_reparam: this {type(model).__name__}: {done}"
        with pytest.raises(InputError, match=said):
            sigma_reparam(model, layers="all")
    some: Any = sigma_reparam(encoder(), layers=["layers.0.*"])
    with pytest.raises(InputError, match=done):
        sigma_reparam(some, layers=["layers.0.self_attn"])
    with pytest.raises(InputError, match=r"called 'layers.7'"):
        sigma_reparam(some, layers=["layers.7"])
    sigma_reparam(some, layers="all")  # the rest
    # Another weight that is reparametrised is no attention.
    other = sigma_reparam(nn.Linear(3, 3))
    with pytest.raises(NothingMatched, match="no attention layer was recognised"):
        sigma_reparam(other, layers="all")


def test_products_of_matrices_are_named_instead() -> None:
    class Latent(nn.Module):
        """Low-rank projections under DeepSeek's names."""

        def __init__(self) -> None:
            super().__init__()
            self.q_a_proj, self.q_b_proj = (
                nn.Linear(16, 6, bias=False),
                nn.Linear(6, 20, bias=False),
            )
            self.q_a_layernorm, self.kv_a_layernorm = nn.RMSNorm(6), nn.RMSNorm(8)
            self.kv_a_proj_with_mqa = nn.Linear(16, 12, bias=False)
            self.kv_b_proj = nn.Linear(8, 22, bias=False)
            self.o_proj = nn.Linear(10, 16, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": Latent()})])
            self.config = {
                "model_type": "deepseek_v3",
                "num_attention_heads": 2,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 6,
                "qk_rope_head_dim": 4,
                "v_head_dim": 5,
                "rope_theta": 10000.0,
            }

    with pytest.raises(InputError, match="products of stored matrices"):
        sigma_reparam(Model(), layers="all")


def test_weights_that_are_multiplied_out_are_refused_by_name() -> None:
    model = nn.Sequential(HeadCoreAttention(8, 2))
    with pytest.raises(InputError, match=r"0\.in_proj_weight is computed from other parameters"):
        attention_weights(model, "all", None)
