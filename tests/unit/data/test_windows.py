"""Windows against a loop over windows; what is a view, what is cast and when."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from levelhead.base.errors import InputError
from levelhead.data.windows import Batch, Held, Pairs, Scaler, Windows, held, starts_within
from oracles import windows as oracle

L, H = 12, 5
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def naive(series: np.ndarray, starts: list[int], eps: float = 1e-5) -> tuple[np.ndarray, ...]:
    """Oracle batches: context, target, mean, deviation, all channel-major."""
    made = [oracle.normalised(*oracle.cut(series, t, L, H), eps) for t in starts]
    x, y, mean, deviation = (np.stack(part, axis=1) for part in zip(*made, strict=True))
    return x, y, mean[..., None], deviation[..., None]


def assert_batch(batch: Batch, expected: tuple[np.ndarray, ...], **tolerance: float) -> None:
    got = (batch.context, batch.target, batch.mean, batch.deviation)
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
        np.testing.assert_allclose(g.double().numpy(), e, **(tolerance or EXACT))


# -- scaler --------------------------------------------------------------------------------------


def test_scaler_standardises_and_goes_back() -> None:
    series = draw(3, 50) * np.array([[1e-3], [1.0], [1e4]]) + np.array([[0.0], [1e6], [-3.0]])
    scaler = Scaler.fit(series)
    scaled = scaler.apply(series)
    np.testing.assert_allclose(scaled.mean(axis=1), 0.0, atol=1e-9)
    np.testing.assert_allclose((scaled**2).mean(axis=1), 1.0, rtol=1e-9)
    np.testing.assert_allclose(scaler.invert(scaled), series, rtol=1e-15, atol=1e-12)


def test_scaler_inverts_any_leading_axes() -> None:
    scaler = Scaler(np.array([1.0, -2.0]), np.array([3.0, 0.5]))
    values = draw(4, 6, 2, 7)
    back = scaler.invert(values)
    np.testing.assert_array_equal(back[2, 5, 0], values[2, 5, 0] * 3.0 + 1.0)
    np.testing.assert_array_equal(back[1, 3, 1], values[1, 3, 1] * 0.5 - 2.0)


@pytest.mark.parametrize("level", [0.0, 5.0, 0.1, 1e6 + 0.1, -1e-300])
def test_scaler_leaves_a_constant_channel_at_zero(level: float) -> None:
    series = np.vstack([np.full(777, level), draw(777)])
    scaler = Scaler.fit(series)
    assert scaler.deviation[0] == 1.0
    scaled = scaler.apply(series)
    # The mean of equal numbers may be off by rounding; it must not be blown up to deviation one.
    np.testing.assert_allclose(scaled[0], 0.0, atol=1e-12 * max(1.0, abs(level)))
    np.testing.assert_allclose(scaler.invert(scaled), series, rtol=1e-15, atol=1e-15)


def test_scaler_keeps_a_small_but_real_deviation() -> None:
    series = 1e6 + 1e-6 * draw(1, 400)
    assert Scaler.fit(series).deviation[0] == pytest.approx(1e-6, rel=0.1)


# -- starts --------------------------------------------------------------------------------------


def test_no_window_of_a_test_block_is_dropped() -> None:
    rows, horizon = 2880, 96
    first, stop = starts_within(11520, 14400, 512, horizon, reach_back=True)
    assert stop - first == rows - horizon + 1
    assert (first + 512, stop - 1 + 512 + horizon) == (11520, 14400)


def test_every_row_of_a_block_is_somebodys_target_and_no_other_row_is() -> None:
    series = np.arange(60.0)[None]
    windows = Windows(series, L, H, *starts_within(30, 47, L, H, reach_back=True))
    batch = windows.batch(torch.arange(len(windows)))
    seen = (batch.target.double() + batch.mean).flatten().round().unique()
    assert seen.tolist() == list(range(30, 47))


@pytest.mark.parametrize("reach_back", [True, False])
@pytest.mark.parametrize("rows", [(0, 3), (18, 20), (19, 20), (20, 20)])
def test_rows_without_a_window_make_an_empty_source(
    rows: tuple[int, int], reach_back: bool
) -> None:
    span = starts_within(*rows, 6, 4, reach_back=reach_back)
    windows = Windows(draw(2, 20), 6, 4, *span)
    assert len(windows) == 0
    assert windows.batch(torch.arange(0)).context.shape == (2, 0, 6)


def test_a_series_shorter_than_one_window_holds_none() -> None:
    windows = Windows(draw(3, 7), 6, 4, *starts_within(0, 7, 6, 4, reach_back=False))
    assert len(windows) == 0
    assert windows.batch(torch.arange(0)).target.shape == (3, 0, 4)


# -- windows -------------------------------------------------------------------------------------


def test_windows_are_views_of_the_series() -> None:
    series = draw(3, 40)
    windows = Windows(series, L, H, 2, 20)
    assert windows.series is series
    assert np.shares_memory(windows._view.numpy(), series)
    assert windows._view.data_ptr() == series.ctypes.data + 2 * series.itemsize
    before = windows.batch(torch.tensor([4])).target
    series[:, 6 + L] += 3.0
    after = windows.batch(torch.tensor([4])).target
    np.testing.assert_allclose((after - before)[:, 0, 0], 3.0, rtol=1e-6)
    assert torch.equal(after[..., 1:], before[..., 1:])


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "read-only"])
def test_batches_equal_a_loop_in_float64(layout: str) -> None:
    series = draw(4, 60) * 7.0 + 3.0
    if layout == "transposed":
        series = np.ascontiguousarray(series.T).T
    elif layout == "strided":
        series = np.repeat(series, 2, axis=1)[:, ::2]
    elif layout == "read-only":
        series.setflags(write=False)
    windows = Windows(series, L, H, 3, 30, dtype=torch.float64)
    assert len(windows) == 27
    assert windows.channels == 4
    index = torch.tensor([0, 26, 5, 5])
    assert_batch(windows.batch(index), naive(series, [3, 29, 8, 8]))
    assert np.shares_memory(windows._view.numpy(), series)


def test_statistics_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    series = draw(2, 60)
    whole = Windows(series, L, H).batch(torch.arange(44))
    monkeypatch.setattr("levelhead.data.windows._CHUNK_ELEMENTS", 7 * L)
    pieces = Windows(series, L, H).batch(torch.arange(44))
    assert torch.equal(whole.mean, pieces.mean)
    assert torch.equal(whole.deviation, pieces.deviation)


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e3])
def test_an_offset_costs_no_accuracy_even_in_float32(scale: float) -> None:
    series = 1e6 + scale * draw(2, 80, seed=1)
    batch = Windows(series, L, H).batch(torch.arange(64))
    assert batch.context.dtype == batch.target.dtype == batch.deviation.dtype == torch.float32
    assert batch.mean.dtype == torch.float64
    expected = naive(series, list(range(64)))
    deviation = expected[3]
    np.testing.assert_allclose(batch.context.double(), expected[0], rtol=0, atol=1e-6)
    slip = (batch.target.double().numpy() - expected[1]) / deviation
    assert np.abs(slip).max() < 1e-6
    np.testing.assert_allclose(batch.mean.numpy(), expected[2], rtol=1e-15)
    # Casting first, the usual order, would miss the bound by far.
    assert np.abs(series.astype(np.float32) - series).max() / scale > 1e-5


def test_eps_is_in_squared_units_of_the_series() -> None:
    series = draw(2, 40)
    windows = Windows(series, L, H, eps=0.25, dtype=torch.float64)
    assert_batch(windows.batch(torch.arange(3)), naive(series, [0, 1, 2], eps=0.25))


@pytest.mark.parametrize("level", [0.0, 5.0, 1e6])
def test_constant_channels_become_zero(level: float) -> None:
    series = np.vstack([np.full(40, level), draw(40)])
    batch = Windows(series, L, H).batch(torch.arange(20))
    assert torch.equal(batch.context[0], torch.zeros(20, L))
    assert torch.equal(batch.target[0], torch.zeros(20, H))
    assert torch.equal(batch.mean[0], torch.full((20, 1), level, dtype=torch.float64))
    np.testing.assert_allclose(batch.deviation[0], math.sqrt(1e-5), rtol=1e-6)


def test_only_judged_channels_have_targets() -> None:
    series = draw(4, 50)
    judged = Windows(series, L, H, judged=[3, 1], dtype=torch.float64)
    assert judged.judged is not None
    assert judged.judged.tolist() == [3, 1]
    batch = judged.batch(torch.arange(6))
    x, y, mean, deviation = naive(series, list(range(6)))
    assert_batch(batch, (x, y[[3, 1]], mean, deviation))
    core = torch.from_numpy(draw(4, 6, H, seed=2))
    np.testing.assert_allclose(batch.centred(core), (core.numpy() * deviation)[[3, 1]], **EXACT)


def test_centred_puts_the_deviation_back() -> None:
    batch = Windows(draw(3, 50), L, H, dtype=torch.float64).batch(torch.arange(4))
    core = torch.from_numpy(draw(3, 4, H, seed=2))
    np.testing.assert_array_equal(batch.centred(core), core * batch.deviation)


def test_a_batch_moves_with_all_its_parts() -> None:
    meta = torch.device("meta")
    batch = Windows(draw(3, 50), L, H, judged=[1], device="meta").batch(torch.arange(4))
    parts = (batch.context, batch.target, batch.mean, batch.deviation, batch.judged)
    assert all(part is not None and part.device == meta for part in parts)
    every = Windows(draw(3, 50), L, H).batch(torch.arange(4)).to(meta)
    assert every.judged is None
    assert every.target.device == meta


# -- pairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("judged", [None, [2, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairs_equal_windows_on_the_same_windows(
    judged: list[int] | None, dtype: torch.dtype
) -> None:
    series = 1e3 + draw(3, 50)
    cuts = [oracle.cut(series, t, L, H) for t in range(34)]
    contexts, targets = (np.stack(part) for part in zip(*cuts, strict=True))
    pairs = Pairs(contexts, targets, judged=judged, dtype=dtype)
    windows = Windows(series, L, H, judged=judged, dtype=dtype)
    assert (len(pairs), pairs.channels, pairs.context, pairs.horizon) == (34, 3, L, H)
    index = torch.tensor([33, 0, 7])
    ours, theirs = pairs.batch(index), windows.batch(index)
    tight = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 1e-12}
    np.testing.assert_allclose(ours.context, theirs.context, **tight)
    np.testing.assert_allclose(ours.target, theirs.target, **tight)
    np.testing.assert_allclose(ours.deviation, theirs.deviation, **tight)
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-14)
    assert ours.context.dtype == dtype
    assert (ours.judged is None) == (judged is None)


def test_pairs_are_views_and_may_be_read_only() -> None:
    contexts, targets = draw(6, 2, L), draw(6, 2, H)
    contexts.setflags(write=False)
    pairs = Pairs(contexts, targets)
    assert np.shares_memory(pairs._contexts.numpy(), contexts)
    assert np.shares_memory(pairs._targets.numpy(), targets)


def test_pairs_without_revin_are_used_as_they_are() -> None:
    contexts, targets = draw(6, 2, L) + 4.0, draw(6, 2, H)
    batch = Pairs(contexts, targets, revin=False, dtype=torch.float64).batch(torch.tensor([5, 1]))
    np.testing.assert_array_equal(batch.context, contexts[[5, 1]].swapaxes(0, 1))
    np.testing.assert_array_equal(batch.target, targets[[5, 1]].swapaxes(0, 1))
    assert torch.equal(batch.mean, torch.zeros(2, 2, 1, dtype=torch.float64))
    assert torch.equal(batch.deviation, torch.ones(2, 2, 1, dtype=torch.float64))


# -- refusals ------------------------------------------------------------------------------------


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(InputError, match=r"\(40,\) was given: pass channels first"):
        Windows(draw(40), L, H)
    with pytest.raises(InputError, match=r"16 steps hold no window.*give at least 17 steps"):
        Windows(draw(2, 16), L, H)
    with pytest.raises(InputError, match=r"starts 0 \.\. 25 .* only the starts 0 \.\. 24"):
        Windows(draw(2, 40), L, H, 0, 25)
    for start, stop in ((-1, 5), (6, 5)):
        with pytest.raises(InputError, match="were asked for"):
            Windows(draw(2, 40), L, H, start, stop)
    with pytest.raises(InputError, match="float64 arrays, float32 was given"):
        Windows(draw(2, 40).astype(np.float32), L, H)
    with pytest.raises(InputError, match=r"\(4, 2, 12\) and \(3, 2, 5\)"):
        Pairs(draw(4, 2, L), draw(3, 2, H))
    with pytest.raises(InputError, match="float64 arrays, int64 was given"):
        Pairs(np.ones((4, 2, L), dtype=np.int64), draw(4, 2, H))


@pytest.mark.parametrize("judged", [None, [2, 0]])
@pytest.mark.parametrize("elements", [1, 100, 1 << 21])
def test_held_windows_are_the_same_bits(
    judged: list[int] | None, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Windows(draw(3, 40), 6, 4, 2, 25, judged=judged)
    monkeypatch.setattr("levelhead.data.windows._CHUNK_ELEMENTS", elements)
    kept = held(source)
    assert isinstance(kept, Held)
    assert (len(kept), kept.channels, kept.context, kept.horizon) == (23, 3, 6, 4)
    for index in (torch.tensor([5, 22, 0, 5]), torch.arange(23)):
        expected, got = source.batch(index), kept.batch(index)
        for name in ("context", "target", "mean", "deviation"):
            ours, theirs = getattr(got, name), getattr(expected, name)
            assert ours.dtype == theirs.dtype
            assert ours.is_contiguous()
            assert torch.equal(ours, theirs), name
        assert got.judged is source.judged
    assert kept.judged is source.judged


def test_windows_are_held_only_within_the_limit() -> None:
    source = Windows(draw(3, 40), 6, 4, judged=[1])
    # float32 of six steps and a deviation for three channels, of four steps for one; a float64 mean
    needed = len(source) * (4 * (3 * 7 + 4) + 8 * 3)
    assert isinstance(held(source, limit=needed), Held)
    assert held(source, limit=needed - 1) is source
    none = Windows(draw(3, 40), 6, 4, 3, 3)
    assert held(none) is none
    with pytest.raises(InputError, match="no window to hold"):
        Held(none)
