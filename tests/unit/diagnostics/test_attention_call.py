"""One convention for calls: shapes, kinds of masks, heads folded into other axes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import oracles.attention_maps as slow
from levelhead.base.errors import InputError
from levelhead.diagnostics.attention_call import (
    AttentionCall,
    attention_call,
    logits_call,
    split_mask,
)


def weights_by_torch(q: Tensor, k: Tensor, **options: object) -> Tensor:
    """The matrix of weights, by attention over the identity instead of values."""
    m = k.shape[-2]
    v = torch.eye(m, dtype=q.dtype).expand(*k.shape[:-2], m, m)
    return F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]


MASKS: dict[str, dict[str, object]] = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": torch.rand(5, 6, generator=torch.Generator().manual_seed(1)) > 0.3},
    "added": {"attn_mask": torch.randn(5, 6, generator=torch.Generator().manual_seed(2))},
    "scaled": {"scale": 0.3},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_a_call_is_what_torch_computes(name: str, lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(*lead, 5, 4, generator=generator, dtype=torch.float64)
    k = torch.randn(*lead, 6, 4, generator=generator, dtype=torch.float64)
    options = dict(MASKS[name])
    if isinstance(mask := options.get("attn_mask"), Tensor) and mask.is_floating_point():
        options["attn_mask"] = mask = mask.double()
    expected = weights_by_torch(q, k, **options)
    call = attention_call(
        q,
        k,
        mask=options.get("attn_mask"),  # type: ignore[arg-type]
        causal=bool(options.get("is_causal")),
        scale=options.get("scale"),  # type: ignore[arg-type]
    )
    logits, where = call.block()
    found = slow.maps_of(logits, where)
    torch.testing.assert_close(found.reshape(expected.shape), expected.nan_to_num(0.0))


def test_masks_of_five_axes_and_folded_heads_find_their_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.randn(2, 3, 2, 5, 6, generator=generator)
    q, k = (torch.randn(2, 3, 2, s, 4, generator=generator) for s in (5, 6))
    call = attention_call(q, k, mask=mask)
    torch.testing.assert_close(call.block()[0], (q @ k.mT / 2 + mask).reshape(6, 2, 5, 6))
    folded = attention_call(
        q.reshape(12, 5, 4), k.reshape(12, 6, 4), mask=mask.reshape(12, 5, 6), heads=2
    )
    torch.testing.assert_close(folded.block()[0], call.block()[0])


def test_keys_of_one_batch_entry_serve_all() -> None:
    q, k = torch.ones(3, 2, 5, 4), torch.ones(1, 2, 6, 4)
    assert attention_call(q, k).shape == (3, 2, 5, 6)


@pytest.mark.parametrize(
    ("shape", "heads", "expected"),
    [
        ((5, 6), None, (1, 1, 5, 6)),
        ((8, 5, 6), None, (8, 1, 5, 6)),
        ((8, 5, 6), 4, (2, 4, 5, 6)),
        ((2, 4, 5, 6), None, (2, 4, 5, 6)),
        ((4, 2, 5, 6), 4, (2, 4, 5, 6)),
        ((3, 2, 2, 5, 6), 4, (3, 4, 5, 6)),
        ((3, 2, 4, 5, 6), 4, (6, 4, 5, 6)),
    ],
)
def test_logits_of_any_shape(
    shape: tuple[int, ...], heads: int | None, expected: tuple[int, ...]
) -> None:
    assert logits_call(torch.zeros(shape), heads).shape == expected


def test_folded_heads_are_batch_major() -> None:
    logits = torch.arange(8.0)[:, None, None].expand(8, 2, 2)
    call = logits_call(logits, heads=4)
    assert call.logits is not None
    assert call.logits[1, 2, 0, 0] == 6


@pytest.mark.parametrize(
    ("mask", "allowed", "bias"),
    [
        ([True, False], [True, False], None),
        ([0.0, 0.0], None, None),
        ([0.0, -math.inf], [True, False], None),
        ([0.0, torch.finfo(torch.float32).min], [True, False], None),
        ([0.0, -10000.0], [True, False], None),
        ([1.0, -math.inf], [True, False], [1.0, 0.0]),
        ([1.0, -1e9], [True, False], [1.0, 0.0]),
        ([1.0, -10000.0], [True, True], [1.0, -10000.0]),
        ([1.0, 0.0], [True, True], [1.0, 0.0]),
    ],
)
def test_masks_are_split(
    mask: list[float], allowed: list[bool] | None, bias: list[float] | None
) -> None:
    found = split_mask(torch.tensor(mask))
    assert [None if t is None else t.tolist() for t in found] == [allowed, bias]


def test_float16_has_its_own_end() -> None:
    mask = torch.tensor([1.0, torch.finfo(torch.float16).min], dtype=torch.float16)
    allowed, bias = split_mask(mask)
    assert allowed is not None
    assert allowed.tolist() == [True, False]
    assert bias is not None
    assert bias.dtype == torch.float32


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([0, 3])])
@pytest.mark.parametrize("heads", [slice(None), slice(1, 3), torch.tensor([3, 0])])
def test_blocks_are_parts_of_the_whole(rows: slice | Tensor, heads: slice | Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    call = AttentionCall(
        q=torch.randn(2, 4, 5, 8, generator=generator),
        k=torch.randn(2, 2, 5, 8, generator=generator),
        bias=torch.randn(1, 4, 5, 5, generator=generator),
        causal=True,
        soft_cap=1.0,
    )
    whole, open_ = call.block()
    assert open_ is not None
    part, where = call.block(torch.tensor([1]), heads, rows)
    assert where is not None
    m = part.shape[-1]
    torch.testing.assert_close(part, whole[1:2][:, heads][:, :, rows][..., :m])
    assert torch.equal(where, open_[:, :, rows][..., :m])
    assert not open_[:, :, rows][..., m:].any()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, "needs q and k, or logits"),
        ({"q": torch.ones(1, 2, 3, 4)}, "needs q and k, or logits"),
        ({"q": torch.ones(1, 3, 3, 4), "k": torch.ones(1, 2, 3, 4)}, "g dividing h"),
        ({"q": torch.ones(1, 2, 3, 4), "k": torch.ones(1, 2, 3, 5)}, r"q \[1, 2, 3, 4\]"),
        ({"logits": torch.ones(2, 3, 4)}, r"logits \[2, 3, 4\]"),
        (
            {"logits": torch.ones(1, 2, 3, 4), "bias": torch.ones(3, 5)},
            r"bias \[3, 5\].*\[1, 2, 3, 4\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(parts: dict[str, Tensor], said: str) -> None:
    with pytest.raises(InputError, match=said):
        AttentionCall(**parts)  # type: ignore[arg-type]


def test_queries_without_keys_like_them_are_refused() -> None:
    with pytest.raises(InputError, match="were given"):
        attention_call(torch.ones(2, 3, 4), torch.ones(3, 4))
