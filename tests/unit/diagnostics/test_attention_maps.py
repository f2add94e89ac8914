"""Statistics of attention maps against a slow twin: all ways, masks, precision, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import oracles.attention_maps as slow
from levelhead.base.errors import InputError
from levelhead.diagnostics import attention_maps
from levelhead.diagnostics.attention_maps import (
    AttentionCall,
    MapStatistics,
    logits_call,
    map_statistics,
    row_entropy,
)

NAMES = [f.name for f in fields(MapStatistics) if f.name != "method"]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def open_mask(*shape: int) -> Tensor:
    """A random mask in which every row has a key."""
    mask = drawn(*shape, seed=5) > 0
    mask[..., 0] = True
    return mask


# What a call may be, and whether a fused kernel may serve it. Shapes: b 2, h 4, n 9, m 7.
CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "causal": ({"causal": True}, True),
    "scaled": ({"scale": 0.7}, True),
    "mask": ({"allowed": open_mask(2, 1, 9, 7)}, True),
    "mask by head": ({"allowed": open_mask(2, 4, 9, 7)}, True),
    "padding": ({"allowed": open_mask(2, 1, 1, 7)}, True),
    "mask for all": ({"allowed": open_mask(9, 7)}, True),
    "mask and causal": ({"allowed": open_mask(2, 1, 9, 7), "causal": True}, False),
    "bias": ({"bias": drawn(1, 4, 9, 7)}, False),
    "bias and mask": ({"bias": drawn(2, 4, 1, 7), "allowed": open_mask(2, 1, 9, 7)}, False),
    "soft cap": ({"soft_cap": 1.5}, False),
    "soft cap, bias, causal": ({"soft_cap": 2.0, "bias": drawn(9, 7), "causal": True}, False),
    "rows without keys": (
        {"allowed": open_mask(2, 1, 9, 7) & (torch.arange(9) > 2)[:, None]},
        False,
    ),
}
each_call = pytest.mark.parametrize("name", CALLS)


def made(name: str, groups: int = 4, dtype: torch.dtype = torch.float32) -> AttentionCall:
    q, k = drawn(2, 4, 9, 8, dtype=dtype), drawn(2, groups, 7, 8, seed=1, dtype=dtype)
    return AttentionCall(q=1.5 * q, k=1.5 * k, **CALLS[name][0])


def truth(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Logits and where they count, by the slow twin."""
    assert call.q is not None
    assert call.k is not None
    logits = slow.logits_of(
        call.q, call.k, scale=call.scale, bias=call.bias, soft_cap=call.soft_cap
    )
    where = call.allowed
    if call.causal:
        past = torch.tensor([[j <= i for j in range(7)] for i in range(9)])
        where = past if where is None else where & past
    return logits, where


@each_call
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("fused", [True, False])
def test_entropy_is_that_of_the_matrix(name: str, groups: int, fused: bool) -> None:
    call = made(name, groups)
    expected = slow.entropies(*truth(call))
    torch.testing.assert_close(row_entropy(call, fused=fused).double(), expected, atol=1e-5, rtol=0)


@each_call
def test_blocks_are_exact_in_float64(name: str) -> None:
    call = made(name, dtype=torch.float64)
    found = row_entropy(call, fused=False)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, slow.entropies(*truth(call)), atol=1e-10, rtol=0)


@each_call
def test_all_statistics_are_those_of_the_matrices(name: str) -> None:
    call = made(name, 2, torch.float64)
    expected = slow.statistics(*truth(call))
    found = map_statistics(call)
    for field in NAMES:
        wanted = torch.tensor(getattr(expected, field), dtype=torch.float64)
        if not wanted.isnan().any():
            torch.testing.assert_close(getattr(found, field), wanted, atol=1e-9, rtol=1e-9)


@each_call
def test_the_method_says_what_was_done(name: str) -> None:
    """A fused kernel serves what it can serve exactly and nothing else."""
    call, fused = made(name), CALLS[name][1]
    assert map_statistics(call, fused=True).method == ("fused" if fused else "chunks")
    assert map_statistics(call).method == "chunks"
    both = map_statistics(call, fused=True), map_statistics(call)
    for field in NAMES:
        torch.testing.assert_close(*(getattr(x, field) for x in both), atol=1e-5, rtol=1e-5)


def test_logits_that_a_layer_formed_are_taken_as_they_are() -> None:
    call = made("bias and mask")
    logits, where = truth(call)
    assert where is not None
    expected = map_statistics(call)
    for closed in (-math.inf, torch.finfo(torch.float32).min, -1e9):
        seen = logits_call(logits.masked_fill(~where, closed).float())
        found = map_statistics(seen)
        assert found.method == "eager"
        for field in NAMES:
            torch.testing.assert_close(
                getattr(found, field), getattr(expected, field), atol=1e-5, rtol=1e-4
            )


def test_layers_logits_are_not_written_to() -> None:
    logits = drawn(2, 3, 5, 5)
    kept = logits.clone()
    map_statistics(logits_call(logits))
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    call = made("causal", 2, dtype)
    assert call.q is not None
    assert call.k is not None
    wide = replace(call, q=call.q.float(), k=call.k.float())
    for fused in (True, False):
        assert row_entropy(call, fused=fused).dtype == torch.float32
        assert torch.equal(row_entropy(call, fused=fused), row_entropy(wide, fused=fused))
    seen = logits_call(made("plain", dtype=dtype).block()[0].to(dtype))
    assert map_statistics(seen).entropy.dtype == torch.float32


def test_rows_without_keys_are_left_out() -> None:
    """Three of five rows are closed: the means are those of the other two."""
    q, k = drawn(1, 2, 5, 4), drawn(1, 2, 6, 4, seed=1)
    some = torch.tensor([True, False, True, False, False])
    closed = map_statistics(AttentionCall(q=q, k=k, allowed=some[:, None].expand(5, 6)))
    rest = map_statistics(AttentionCall(q=q[:, :, some], k=k))
    for field in ("entropy", "entropy_share", "entropy_min", "largest_logit", "top_mass"):
        torch.testing.assert_close(getattr(closed, field), getattr(rest, field))
    torch.testing.assert_close(closed.residual, rest.residual, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(closed.nuclear_norm, rest.nuclear_norm)


def test_nothing_allowed_is_never_nan() -> None:
    closed = torch.zeros(5, 6, dtype=torch.bool)
    call = AttentionCall(q=drawn(1, 2, 5, 4), k=drawn(1, 2, 6, 4), allowed=closed)
    found = map_statistics(call)
    assert all(getattr(found, field).isfinite().all() for field in NAMES)


def test_one_key_is_neither_sharp_nor_flat() -> None:
    found = map_statistics(AttentionCall(q=drawn(1, 1, 5, 4), k=drawn(1, 1, 1, 4)))
    assert found.entropy == 0
    assert found.entropy_share == found.entropy_min == 1


@pytest.mark.parametrize("causal", [False, True])
def test_ends_of_the_scale(causal: bool) -> None:
    """Uniform: share 1, rank 1 (full), residual 0. One-hot on itself: share 0, rank n."""
    n = 6
    uniform = AttentionCall(q=torch.zeros(1, 1, n, 4), k=drawn(1, 1, n, 4), causal=causal)
    found = map_statistics(uniform)
    assert found.entropy_share == pytest.approx(1, abs=1e-6)
    assert found.residual == pytest.approx(0, abs=1e-6)
    keys = [i + 1 if causal else n for i in range(n)]
    assert found.entropy == pytest.approx(sum(map(math.log, keys)) / n, rel=1e-6)
    assert found.top_mass == pytest.approx(sum(1 / x for x in keys) / n, rel=1e-6)
    assert found.rank == (n if causal else 1)
    eye = 300 * torch.eye(n)[None, None]
    sharp = map_statistics(AttentionCall(q=eye, k=torch.eye(n)[None, None], scale=1, causal=causal))
    assert sharp.entropy_share == pytest.approx(0, abs=1e-6)
    assert sharp.top_mass == pytest.approx(1)
    assert sharp.largest_logit == 300
    assert sharp.rank == n
    assert sharp.residual > 0.5


def test_the_quantile_is_the_lower_neighbour() -> None:
    """41 rows, one of them sharp: 0.05 · 40 = 2 rows lie below the quantile."""
    logits = torch.zeros(1, 1, 41, 3)
    for row, sharpness in enumerate((50.0, 40.0, 2.0)):
        logits[0, 0, row, 0] = sharpness
    found = map_statistics(logits_call(logits))
    expected = slow.entropy(slow.row_weights([2.0, 0.0, 0.0])) / math.log(3)
    assert found.entropy_min == pytest.approx(expected, rel=1e-5)


def test_large_logits_keep_their_digits() -> None:
    """At logits of ±1000 an entropy is as exact as logits in float32 allow, and not negative."""
    call = AttentionCall(q=30 * drawn(1, 2, 8, 16), k=30 * drawn(1, 2, 8, 16, seed=1))
    expected = slow.entropies(*(truth_logits(call), None))
    for fused in (True, False):
        found = row_entropy(call, fused=fused)
        assert (found >= 0).all()
        torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=0)


def truth_logits(call: AttentionCall) -> Tensor:
    assert call.q is not None
    assert call.k is not None
    return slow.logits_of(call.q, call.k)


def test_values_that_are_not_finite_stay_visible() -> None:
    found = map_statistics(logits_call(torch.full((1, 1, 3, 3), math.nan)))
    assert found.nuclear_norm.isnan()
    with_k = drawn(1, 1, 3, 4)
    with_k[0, 0, 0, 0] = math.nan
    assert map_statistics(AttentionCall(q=drawn(1, 1, 3, 4), k=with_k)).entropy.isnan()


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in entries."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        outs = result if isinstance(result, tuple | list) else (result,)
        # Views and expanded tensors are no memory of their own.
        sizes = [
            t.untyped_storage().nbytes() // t.element_size() for t in outs if isinstance(t, Tensor)
        ]
        self.entries = max(self.entries, *sizes, 0)
        return result


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda c: row_entropy(c, fused=False), 2**19),
        (lambda c: row_entropy(c, fused=True), 2**19),
        (map_statistics, 2**21),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_bounded(
    make: Callable[[AttentionCall], object], bound: int, causal: bool
) -> None:
    """A map of 4096 × 4096 has 2²⁴ entries a head; no tensor comes near one of them."""
    q, k = torch.zeros(1, 2, 4096, 4), torch.zeros(1, 1, 4096, 4)
    with Largest() as largest:
        make(AttentionCall(q=q, k=k, causal=causal))
    assert q.numel() <= largest.entries <= bound


def test_blocks_meet_at_their_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any size of block gives the same numbers: rows, batch entries and both are cut."""
    call = made("bias and mask", 2)
    whole = map_statistics(call)
    for size in (1, 4 * 7 * 2, 4 * 7 * 9):
        monkeypatch.setattr(attention_maps, "_BLOCK", size)
        found = map_statistics(call)
        for field in NAMES:
            torch.testing.assert_close(getattr(found, field), getattr(whole, field))


def test_no_gradient_and_no_random_number() -> None:
    call = made("causal")
    assert call.q is not None
    state = torch.get_rng_state()
    tracked = replace(call, q=call.q.requires_grad_())
    found = map_statistics(tracked, fused=True)
    assert not found.entropy.requires_grad
    assert not row_entropy(tracked).requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def test_matrices_must_be_some() -> None:
    with pytest.raises(InputError, match="matrices = 0"):
        map_statistics(made("plain"), matrices=0)
