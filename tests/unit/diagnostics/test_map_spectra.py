"""Spectra on a sample, and the distance to rank one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from levelhead.diagnostics import map_spectra as spectra
from levelhead.diagnostics.attention_call import AttentionCall, logits_call
from levelhead.diagnostics.map_spectra import map_spectra, rank_one_residual


def x(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes whose singular values are computed."""
    shapes: list[tuple[int, ...]] = []
    inner = spectra._spectral

    def spy(maps: Tensor) -> Tensor:
        shapes.append(tuple(maps.shape))
        return inner(maps)

    monkeypatch.setattr(spectra, "_spectral", spy)
    return shapes


@pytest.mark.parametrize(
    ("shape", "sampled"),
    [
        ((200, 1, 7, 7), (64, 1, 7, 7)),
        ((200, 4, 7, 9), (16, 4, 7, 9)),
        ((2, 4, 7, 9), (2, 4, 7, 9)),
        ((3, 100, 7, 7), (1, 100, 7, 7)),
        ((16, 4, 128, 128), (16, 4, 128, 128)),
        ((9, 4, 256, 256), (2, 4, 256, 256)),
        ((9, 4, 300, 256), (2, 4, 256, 256)),
        ((1, 2, 1024, 1024), (1, 2, 256, 1024)),
    ],
)
def test_the_sample_is_bounded(
    shape: tuple[int, ...], sampled: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 64 matrices, at least one a head, the work of 8 of 256 × 256, at most 256 rows."""
    shapes = counted(monkeypatch)
    map_spectra(logits_call(torch.zeros(shape)))
    assert sum(s[0] * s[1] for s in shapes) == sampled[0] * sampled[1]
    assert {s[2:] for s in shapes} == {sampled[2:]}


def test_the_sample_is_even_and_the_same_each_time() -> None:
    """Of 5 entries 3 are taken, the first, the middle one and the last."""
    logits = torch.zeros(5, 1, 4, 4)
    for entry in (0, 2, 4):
        logits[entry] = 100 * torch.eye(4)
    state = torch.get_rng_state()
    found = map_spectra(logits_call(logits), matrices=3)
    assert found.nuclear_norm == pytest.approx(4)
    assert map_spectra(logits_call(logits), matrices=5).nuclear_norm == pytest.approx(2.8)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("block", [1, 4 * 30, 2**22])
def test_blocks_of_heads_and_entries_meet(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = AttentionCall(q=x(0, 5, 4, 4, 8), k=x(1, 5, 2, 30, 8))
    whole = map_spectra(call)
    monkeypatch.setattr(spectra, "_BLOCK", block)
    found = map_spectra(call)
    for name in ("nuclear_norm", "rank", "effective_rank", "residual"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name))


@pytest.mark.parametrize("shape", [(6, 6), (6, 40), (40, 6)])
def test_wide_and_tall_maps(shape: tuple[int, int]) -> None:
    """By Gram matrix or not: NumPy's singular values of the dense matrix."""
    logits = 2 * x(0, 1, 2, *shape)
    found = map_spectra(logits_call(logits))
    for head in range(2):
        values = np.linalg.svd(logits[0, head].double().softmax(-1).numpy(), compute_uv=False)
        part = values / values.sum()
        assert float(found.nuclear_norm[head]) == pytest.approx(values.sum(), rel=1e-5)
        assert float(found.rank[head]) == 6
        effective = math.exp(-(part * np.log(part)).sum())
        assert float(found.effective_rank[head]) == pytest.approx(effective, rel=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_residual_of_full_maps(masked: bool) -> None:
    """With a mask that allows everything the preference is the mean row: one formula."""
    maps = x(0, 3, 6, 5).softmax(-1)
    where = torch.ones(6, 5, dtype=torch.bool) if masked else None
    mean = torch.ones(6, 6) / 6
    expected = [float((a - mean @ a).norm() / a.norm()) for a in maps]
    torch.testing.assert_close(rank_one_residual(maps, where), torch.tensor(expected))


@pytest.mark.parametrize("n", [6, 64])
def test_residual_of_causal_maps(n: int) -> None:
    past = torch.ones(n, n).tril()
    uniform = past / past.sum(-1, keepdim=True)
    assert rank_one_residual(uniform, past.bool()) == pytest.approx(0, abs=1e-6)
    itself = rank_one_residual(torch.eye(n), past.bool())
    assert itself > 0.5
    mixed = rank_one_residual(0.5 * uniform + 0.5 * torch.eye(n), past.bool())
    assert 0.2 < mixed < itself
    liked = x(3, n).mul(2).expand(n, n).masked_fill(past == 0, -math.inf).softmax(-1)
    assert rank_one_residual(liked, past.bool()) < 0.2


def test_residual_leaves_out_rows_without_keys() -> None:
    maps = x(0, 4, 5).softmax(-1)
    closed = torch.cat((maps, torch.zeros(2, 5)))
    where = torch.tensor([True] * 4 + [False] * 2)[:, None]
    torch.testing.assert_close(rank_one_residual(closed, where), rank_one_residual(maps))
    assert rank_one_residual(torch.zeros(2, 3)) == 0


def test_maps_without_any_key_do_not_count() -> None:
    """A sentence that is all padding looks like rank collapse and is none."""
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 5, 5)
    expected = map_spectra(AttentionCall(logits=logits[1:]))
    logits[0] = -torch.inf
    found = map_spectra(AttentionCall(logits=logits))
    for name in ("nuclear_norm", "rank", "effective_rank", "residual"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
