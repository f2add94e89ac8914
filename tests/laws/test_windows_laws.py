"""Laws of windows: enumeration by force, and what a change of units may change."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from levelhead.data.windows import Scaler, Windows, starts_within
from oracles import windows as oracle


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 15), st.integers(0, 15), st.integers(1, 8), st.integers(1, 6), st.booleans())
def test_starts_within_finds_what_enumeration_finds(
    start: int, rows: int, context: int, horizon: int, reach_back: bool
) -> None:
    first, stop = starts_within(start, start + rows, context, horizon, reach_back=reach_back)
    expected = oracle.starts(start, start + rows, context, horizon, reach_back)
    assert list(range(first, stop)) == expected
    # Also an empty range is one that `Windows` accepts for a series with these rows.
    assert 0 <= first <= stop <= max(start + rows - context - horizon + 1, 0)


@st.composite
def cut_series(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int, int]:
    """A series `[D, T]`, context, horizon, and a range of starts that holds a window."""
    context, horizon = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    count, channels = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    series = np.random.default_rng(seed).normal(size=(channels, count + context + horizon - 1))
    start = draw(st.integers(0, count - 1))
    return series, context, horizon, start, draw(st.integers(start + 1, count))


@settings(max_examples=60, deadline=None)
@given(cut_series(), st.sampled_from([0.0, 10.0, -1e3]), st.sampled_from([1.0, 0.1, 30.0]))
def test_batches_equal_windows_normalised_one_by_one(
    cut: tuple[np.ndarray, int, int, int, int], offset: float, scale: float
) -> None:
    series, context, horizon, start, stop = cut
    series = offset + scale * series
    windows = Windows(series, context, horizon, start, stop, eps=1e-3, dtype=torch.float64)
    batch = windows.batch(torch.arange(len(windows)))
    assert len(windows) == stop - start
    tolerance = {"rtol": 1e-10, "atol": 1e-12 * (abs(offset) + scale)}
    for i, t in enumerate(range(start, stop)):
        x, y, mean, deviation = oracle.normalised(
            *oracle.cut(series, t, context, horizon), eps=1e-3
        )
        np.testing.assert_allclose(batch.context[:, i], x, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(batch.target[:, i], y, **tolerance)
        np.testing.assert_allclose(batch.mean[:, i, 0], mean, **tolerance)
        np.testing.assert_allclose(batch.deviation[:, i, 0], deviation, rtol=1e-9)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-1e9, 1e9, width=32), min_size=7, max_size=7), min_size=1, max_size=4
    )
)
def test_a_scaler_loses_nothing(rows: list[list[float]]) -> None:
    series = np.array(rows)
    scaler = Scaler.fit(series)
    back = scaler.invert(scaler.apply(series))
    size = np.abs(series).max(axis=1, keepdims=True)
    assert (np.abs(back - series) <= 8 * np.finfo(float).eps * size).all()
    assert (scaler.deviation > 0).all()
