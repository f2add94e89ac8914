"""Laws of the forecaster for random problems: units, order, borders, intervals, choice, blends."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from levelhead.base.errors import DataError
from levelhead.forecasting.borders import Borders, divide
from levelhead.forecasting.forecaster import SAMformer
from levelhead.forecasting.intervals import Conformal
from levelhead.forecasting.rolling import plan_windows
from levelhead.forecasting.selection import (
    TRAINED,
    Entrant,
    blend_weights,
    block_means,
    choose,
)
from oracles import forecasting as oracle

few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(max_examples=150, deadline=None)
sizes = st.integers(1, 400)
contexts = st.one_of(st.just("auto"), st.integers(1, 300))


# -- borders --------------------------------------------------------------------------------------


def attempt(rows: int, horizon: int, context: Any, season: int | None = None) -> Borders | str:
    try:
        return divide(rows, horizon, context, season)
    except DataError as error:
        return str(error)


@many
@given(st.integers(1, 3000), st.integers(1, 200), contexts, st.one_of(st.none(), sizes))
def test_borders_hold_windows_or_say_what_would(
    rows: int, horizon: int, context: Any, season: int | None
) -> None:
    """Whatever is said to fit does fit: another context, another horizon, or more rows."""
    found = attempt(rows, horizon, context, season)
    if isinstance(found, Borders):
        assert 0 < found.train < found.select < found.rows == rows
        assert found.train - found.context - horizon + 1 >= 8
        assert found.select - found.train >= horizon
        assert found.rows - found.select >= horizon
        assert found.context == context or (context == "auto" and 1 <= found.context <= 512)
        return
    if said := re.search(r"context (\d+) would fit", found):
        assert isinstance(attempt(rows, horizon, int(said[1])), Borders)
        assert isinstance(attempt(rows, horizon, int(said[1]) + 1), str)
        assert isinstance(attempt(rows, horizon, "auto"), Borders)
    elif said := re.search(r"horizon (\d+) would fit with context", found):
        assert 1 <= int(said[1]) < horizon
        assert isinstance(attempt(rows, int(said[1]), context), Borders)
        assert isinstance(attempt(rows, int(said[1]) + 1, context), str)
    else:
        said = re.search(r"give about (\d+) rows or more", found)
        assert said is not None
        assert int(said[1]) > rows
        assert isinstance(attempt(int(said[1]), horizon, context), Borders)


@many
@given(st.integers(20, 3000), st.integers(1, 100), st.integers(2, 200))
def test_auto_takes_whole_seasons_and_what_it_takes_fits(
    rows: int, horizon: int, season: int
) -> None:
    found = attempt(rows, horizon, "auto", season)
    if isinstance(found, Borders):
        assert found.context % season == 0 or found.context < season or found.context == 512
        assert isinstance(attempt(rows, horizon, found.context), Borders)


@many
@given(st.integers(2, 500), st.integers(1, 30), st.integers(1, 20), st.integers(1, 40))
def test_backtest_windows_lie_in_the_table(
    rows: int, horizon: int, windows: int, step: int
) -> None:
    try:
        plan = plan_windows(rows, horizon, windows, step)
    except ValueError:
        assert rows - horizon - (windows - 1) * step < 1
        return
    assert len(plan.cutoffs) == windows
    assert plan.cutoffs[-1] + horizon == rows
    assert plan.cutoffs[0] >= 1
    assert set(np.diff(plan.cutoffs)) <= {step}


# -- forecasts ------------------------------------------------------------------------------------


def line(values: Any, **changes: Any) -> SAMformer:
    options: dict[str, Any] = {"horizon": 3, "context": 8, "model": "linear"}
    return SAMformer(**(options | changes)).fit(values)


@few
@given(
    st.integers(0, 50),
    st.floats(1e-6, 1e6),
    st.floats(-1e3, 1e3),
    st.sampled_from(["linear", "linear-revin", "naive"]),
    st.booleans(),
)
def test_units_change_a_forecast_as_they_change_the_series(
    seed: int, scale: float, shift: float, model: str, negative: bool
) -> None:
    """a·x + b is forecast as a·f + b, the shift up to a thousand deviations."""
    values = oracle.waves(120, 2, seed)
    unit = values.std(axis=0)
    factor = -scale if negative else scale
    moved = line(factor * (values + shift * unit), model=model)
    plain = line(values, model=model)
    expected = factor * (plain.predict() + shift * unit)
    np.testing.assert_allclose(moved.predict() / unit / scale, expected / unit / scale, atol=1e-4)
    widths = [f.predict_interval(coverage=0.8).eval("`hi-80` - `lo-80`") for f in (moved, plain)]
    np.testing.assert_allclose(widths[0] / scale, widths[1], rtol=1e-2, atol=1e-4 * unit.max())


@few
@given(st.integers(1, 9), st.randoms(use_true_random=False), st.integers(0, 50), st.booleans())
def test_the_order_of_channels_changes_no_bit(
    channels: int, random: Any, seed: int, network: bool
) -> None:
    values = oracle.related(120, channels, seed)
    names = [f"c{i}" for i in range(channels)]
    turned = random.sample(names, channels)
    rows = pd.DataFrame(values, columns=names)
    options: dict[str, Any] = {"model": "samformer" if network else "linear-revin"}
    options |= {"epochs": 1, "width": 2, "rho": 0.05, "start": "glorot"}
    one, two = (line(rows[n], **options) for n in (names, turned))
    assert list(two.predict().columns) == turned
    pd.testing.assert_frame_equal(two.predict()[names], one.predict(), check_exact=True)


@few
@given(st.integers(0, 50), st.integers(8, 60))
def test_rows_before_the_context_do_not_matter_at_predict(seed: int, length: int) -> None:
    values = oracle.waves(120, 2, seed)
    forecaster = line(values)
    np.testing.assert_array_equal(
        forecaster.predict(values[-length:]), forecaster.predict(values[-8:])
    )


# -- intervals ------------------------------------------------------------------------------------


finite = st.floats(0, 1e6, allow_subnormal=False)


@many
@given(
    st.integers(1, 60).flatmap(lambda n: arrays(np.float64, (n, 2, 2), elements=finite)),
    st.floats(0.01, 0.99),
    st.floats(0.01, 0.99),
)
def test_half_widths_are_scores_and_grow_with_coverage(
    scores: np.ndarray, one: float, two: float
) -> None:
    conformal = Conformal.fit(scores)
    low, high = (conformal.half_width(c) for c in sorted((one, two)))
    assert (low <= high).all()
    for d, h in np.ndindex(2, 2):
        assert low[d, h] in scores[:, d, h]
        share = (scores[:, d, h] <= low[d, h]).mean()
        assert share >= min(1.0, min(one, two) - 1e-9)
    np.testing.assert_array_equal(
        Conformal.fit(scores[::-1]).half_width(one), conformal.half_width(one)
    )
    np.testing.assert_allclose(
        Conformal.fit(4.0 * scores).half_width(one), 4.0 * conformal.half_width(one)
    )


# -- choice and blends ----------------------------------------------------------------------------


errors = st.floats(0.01, 100.0)


@many
@given(
    st.integers(1, 12).flatmap(
        lambda b: st.lists(
            st.tuples(st.integers(0, 3), arrays(np.float64, b, elements=errors)),
            min_size=1,
            max_size=5,
        )
    ),
    st.randoms(use_true_random=False),
)
def test_a_choice_is_as_simple_as_its_errors_allow(drawn: Any, random: Any) -> None:
    entrants = [Entrant(f"m{i}", s, e) for i, (s, e) in enumerate(drawn)]
    found = choose(entrants)
    by_name = {e.name: e for e in entrants}
    chosen, best = by_name[found.chosen], by_name[found.best]
    assert found.errors[found.best] == min(found.errors.values())
    if found.blocks == 1:  # nothing is known of the spread: the best of the closed forms
        closed = [e for e in entrants if e.simplicity < TRAINED] or entrants
        assert found.errors[found.chosen] == min(found.errors[e.name] for e in closed)
        return
    assert chosen.simplicity <= best.simplicity
    assert found.excess[found.chosen] <= found.standard_errors[found.chosen] or chosen is best
    for e in entrants:
        if e.simplicity < chosen.simplicity:
            assert found.excess[e.name] > found.standard_errors[e.name]
    means = sorted(found.errors.values())
    if all(b > a * (1 + 1e-9) for a, b in pairwise(means)):
        assert choose(random.sample(entrants, len(entrants))).chosen == found.chosen


@many
@given(st.integers(2, 4).flatmap(lambda k: arrays(np.float64, (k, 6), elements=st.floats(-9, 9))))
def test_a_blend_is_convex_and_no_worse_than_its_best_member(residuals: np.ndarray) -> None:
    products = residuals @ residuals.T / 6
    weights = blend_weights(products)
    assert weights.min() >= 0
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-9)
    error = weights @ products @ weights
    size = max(1.0, np.diag(products).max())
    assert error <= np.diag(products).min() + 1e-9 * size
    # Karush-Kuhn-Tucker: no member's gradient lies below those of the members that are used.
    gradient = products @ weights
    assert gradient.min() >= error - 1e-6 * size


@many
@given(st.integers(1, 300), st.integers(1, 60))
def test_blocks_share_out_the_windows(count: int, horizon: int) -> None:
    marks = np.arange(count, dtype=float)
    means = block_means(marks, horizon)
    assert len(means) <= 12
    assert (np.diff(means) > 0).all()
    lengths = [len(p) for p in np.array_split(marks, len(means))]
    np.testing.assert_allclose(np.average(means, weights=lengths), marks.mean())
