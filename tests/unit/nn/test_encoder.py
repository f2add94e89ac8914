"""The small encoder against its formula written out, its starts, and patches cut by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.diagnostics.probe import probe
from levelhead.invariants.heads import coherence, head_gram
from levelhead.nn.encoder import Encoder, draw_heads, image_patches
from levelhead.nn.replacement import replace_attention
from levelhead.weights.layouts import views


def norm(x: Tensor, layer: nn.Module) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / spread * layer.get_parameter("weight") + layer.get_parameter("bias")


def written_out(model: Encoder, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Tokens after the last block and all maps, one head and one query after another."""
    at = model.embedding(x) + model.positions[: x.shape[1]]
    hidden = torch.zeros(x.shape, dtype=torch.bool)
    if model.padding is not None:
        hidden = x == model.padding
    everything = []
    for block in model.layers:
        seen, attention = norm(at, block.norm1), block.self_attn  # type: ignore[arg-type]
        d, h = attention.embed_dim, attention.num_heads
        r = d // h
        written, maps = attention.out_proj.bias.expand_as(at).clone(), []
        for i in range(h):
            rows = [slice(part * d + i * r, part * d + (i + 1) * r) for part in range(3)]
            q, k, v = (
                seen @ attention.in_proj_weight[s].T + attention.in_proj_bias[s] for s in rows
            )
            logits = torch.einsum("bnr,bmr->bnm", q, k) / math.sqrt(r)
            weight = logits.exp() * (~hidden)[:, None, :]
            weight = weight / weight.sum(-1, keepdim=True)
            written += weight @ v @ attention.out_proj.weight[:, i * r : (i + 1) * r].T
            maps.append(weight)
        everything.append(torch.stack(maps, 1))
        at = at + written
        inner = norm(at, block.norm2) @ block.linear1.weight.T + block.linear1.bias  # type: ignore
        gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        at = at + gelu @ block.linear2.weight.T + block.linear2.bias  # type: ignore
    return at, everything


def encoder(seed: int = 0, **options: object) -> Encoder:
    torch.manual_seed(seed)
    sizes = {"tokens": 6, "vocabulary": 9, "layers": 2, "heads": 2, "width": 8, **options}
    model = Encoder(4, **sizes).double()  # type: ignore[arg-type]
    for block in model.layers:
        nn.init.normal_(block.self_attn.in_proj_bias)  # type: ignore[union-attr, arg-type]
        nn.init.normal_(block.norm1.weight)  # type: ignore[union-attr, arg-type]
    return model


TOKENS = torch.tensor([[3, 1, 4, 0, 0], [5, 2, 6, 7, 8]])


@pytest.mark.parametrize("readout", ["mean", "last", "each"])
def test_logits_are_those_of_the_formula(readout: str) -> None:
    model = encoder(readout=readout, padding=0 if readout == "mean" else None)
    at, _ = written_out(model, TOKENS)
    if readout == "mean":
        at = torch.stack([at[0, :3].mean(0), at[1].mean(0)])
    elif readout == "last":
        at = at[:, -1]
    expected = norm(at, model.norm) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-10, atol=1e-12)


def test_maps_are_the_softmax_of_each_head_and_leave_padding_out() -> None:
    model = encoder(padding=0)
    _, expected = written_out(model, TOKENS)
    maps = model.maps(TOKENS)
    assert [list(m.shape) for m in maps] == [[2, 2, 5, 5]] * 2
    for found, wanted in zip(maps, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        assert not found[0, :, :, 3:].any()


def test_what_follows_padding_does_not_change_a_text() -> None:
    model = encoder(padding=0)
    longer = torch.cat([TOKENS, torch.zeros(2, 1, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(longer), model(TOKENS), rtol=1e-10, atol=1e-12)


def test_patches_are_embedded_by_a_linear_map() -> None:
    model = encoder(vocabulary=None, patch=5)
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    linear = model.embedding
    expected = x @ linear.weight.T + linear.bias + model.positions  # type: ignore
    torch.testing.assert_close(model.embed(x), expected)
    torch.testing.assert_close(model(x), model.from_embedded(expected))


def test_its_attention_is_read_by_layouts_probes_and_replacements() -> None:
    model = encoder()
    found = list(views(model))
    assert [v.name for v in found] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert found[1].input_norm.position == "pre"
    torch.testing.assert_close(found[1].q[1], model.layers[1].self_attn.in_proj_weight[4:8])  # type: ignore
    before = model(TOKENS)
    assert set(probe(model, TOKENS).heads) == {"layers.0.self_attn", "layers.1.self_attn"}
    assert len(replace_attention(model)) == 2
    torch.testing.assert_close(model(TOKENS), before, rtol=1e-9, atol=1e-11)


def test_a_start_scales_weights_and_pulls_heads_towards_the_first() -> None:
    model = encoder(heads=4)
    before = next(iter(views(encoder(heads=4))))
    draw_heads(model, scale=0.5, spread=0.2)
    after = next(iter(views(model)))
    for name in ("q", "k", "v", "o"):
        w = getattr(before, name)
        expected = 0.5 * (0.8 * w[:1] + 0.2 * w)
        torch.testing.assert_close(getattr(after, name), expected)


def test_spread_zero_makes_copies_and_one_leaves_heads_alone() -> None:
    model = encoder()
    assert coherence(head_gram(next(iter(views(model))))).item() < 0.5
    weights = model.layers[0].self_attn.in_proj_weight.clone()  # type: ignore[union-attr, operator]
    draw_heads(model, spread=1.0)
    torch.testing.assert_close(model.layers[0].self_attn.in_proj_weight, weights)  # type: ignore
    draw_heads(model, spread=0.0)
    for which in ("qk", "ov"):
        gram = head_gram(next(iter(views(model))), which)  # type: ignore[arg-type]
        assert coherence(gram).item() == pytest.approx(1.0, rel=1e-12)


def test_patches_are_cut_row_after_row() -> None:
    images = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    found = image_patches(images, 2)
    assert list(found.shape) == [2, 6, 12]
    for place, (row, column) in enumerate((r, c) for r in (0, 2) for c in (0, 2, 4)):
        expected = images[:, :, row : row + 2, column : column + 2].reshape(2, -1)
        assert torch.equal(found[:, place], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": None}, "give either vocabulary"),
        ({"patch": 4}, "give either vocabulary"),
        ({"width": 9}, "width 9 is no multiple of heads 2"),
        ({"layers": 0}, "layers=0 was given"),
        ({"readout": "first"}, "readout 'first' was given"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encoder(**options)


def test_inputs_and_starts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="7 tokens were given"):
        encoder()(torch.zeros(1, 7, dtype=torch.long))
    with pytest.raises(InputError, match=r"scale=-1\.0 was given"):
        draw_heads(encoder(), scale=-1.0)
    with pytest.raises(InputError, match=r"Linear has no nn\.MultiheadAttention"):
        draw_heads(nn.Linear(2, 2))
    with pytest.raises(InputError, match="patches of 3 do not divide images of 4 × 6"):
        image_patches(torch.zeros(1, 4, 6), 3)
    with pytest.raises(InputError, match=r"images \[4, 6\] were given"):
        image_patches(torch.zeros(4, 6), 2)
