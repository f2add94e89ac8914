"""What the loss was like: levels, noise and swing by formula, and what counts as gain or harm."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from levelhead.training.alarm_loss import RECENT, LossState, LossTrack, harm, loss_gained, swing
from levelhead.training.alarm_rules import Thresholds

LIMITS = Thresholds()


def track(losses: list[float], every: int = 50) -> tuple[LossTrack, list[LossState | None]]:
    found = LossTrack()
    states = []
    for step, loss in enumerate(losses, 1):
        found.add(step, loss)
        if step % every == 0:
            states.append(found.close(step))
    return found, states


def test_level_is_the_median_of_the_last_losses_and_peak_the_largest_of_all_new_ones() -> None:
    _, (first, second) = track([float(i) for i in range(100)])
    assert first is not None
    assert second is not None
    # Of losses 50 … 99 the last 32 are 68 … 99.
    assert second.level == (83 + 84) / 2
    assert (second.step, second.peak) == (100, 99.0)
    assert second.fallen == first.level - second.level
    assert second.reach == 50


def test_noise_is_the_standard_deviation_of_white_noise_around_a_course() -> None:
    rng = random.Random(0)
    found = []
    for _ in range(200):
        _, (state,) = track([5 - 0.01 * i + rng.gauss(0, 0.3) for i in range(RECENT)], RECENT)
        assert state is not None
        found.append(state.noise)
    # The mean of 200 estimates, each with a relative error of about 15 %.
    assert sum(found) / len(found) == pytest.approx(0.3, rel=0.06)


def test_scale_is_between_level_and_learned_range() -> None:
    falling = [400.0] * 50 + [1.0] * 50
    _, (_, last) = track(falling)
    assert last is not None
    assert last.scale == pytest.approx(math.sqrt(399 * 1.0))
    _, (_, last) = track([400.0] * 50 + [1e-9] * 50)
    assert last is not None
    assert last.scale == pytest.approx(4.0)


@pytest.mark.parametrize("half", [0.0, 0.25])
@pytest.mark.parametrize("period", [2, 8])
def test_swing_is_the_amplitude_of_a_loss_that_jumps_to_and_fro(half: float, period: int) -> None:
    # Up for half a period, down for the other: its second difference at that distance is 4 half.
    losses = [1 - 0.01 * i + half * (-1) ** (i // (period // 2)) for i in range(RECENT)]
    assert swing(losses) == pytest.approx(half, abs=1e-9)


def test_few_losses_have_no_level_and_no_swing() -> None:
    few, states = track([1.0] * 7, every=7)
    assert states == [None]
    assert few.close(7) is None
    assert math.isnan(swing([1.0] * 8))


def test_nan_losses_are_left_out_unless_they_are_half_of_all() -> None:
    _, (state,) = track([1.0] * 40 + [math.nan] * 10)
    assert state is not None
    assert (state.level, state.finite) == (1.0, True)
    _, (_, state) = track([1.0] * 50 + [math.inf] * 50)
    assert state is not None
    assert not state.finite
    _, (state,) = track([math.nan] * 50)
    assert state is None


def test_a_state_without_new_losses_is_the_last_one() -> None:
    found, (state,) = track([1.0] * 50)
    assert found.close(60) is state


def test_a_restart_forgets_the_losses_after_it() -> None:
    found, _ = track([9.0] * 100)
    for step in range(60, 80):
        found.add(step, 1.0)
    state = found.close(80)
    assert state is not None
    assert (state.level, state.fallen) == (1.0, 0.0)


def state(**changes: object) -> LossState:
    usual = LossState(
        step=100, level=1.0, error=0.01, noise=0.05, peak=1.1, scale=1.0, fallen=0.0, reach=60,
        swing=0.0, finite=True,
    )  # fmt: skip
    return replace(usual, **changes)  # type: ignore[arg-type]


def test_a_gain_exceeds_noise_and_a_share_of_the_scale() -> None:
    error = math.hypot(0.01, 0.01)
    for fall, gained in (
        (LIMITS.loss_z * error * 1.01, True),
        (LIMITS.loss_z * error * 0.99, False),
    ):
        assert loss_gained(state(), state(level=1 - fall), LIMITS) is gained
    large = state(scale=1000.0, level=1 - LIMITS.loss_gain * 500)
    assert not loss_gained(state(), large, LIMITS)


@pytest.mark.parametrize(
    ("now", "peak", "word"),
    [
        ({}, 1.1, ""),
        ({"finite": False}, 1.1, "finite"),
        ({"level": 1.5}, 1.1, "rose from 1 (step 100) to 1.5 (step 300)"),
        ({}, 2.0, "spiked to 2"),
        ({"validation": 1.2, "best_validation": 1.0, "validated": 250}, 1.1, "validation"),
        ({"validation": 1.2, "best_validation": 1.0, "validated": 90}, 1.1, ""),
        ({"validation": 1.2, "best_validation": 1.0, "validated": 250, "level": 1.01}, 1.1, ""),
    ],
)
def test_harm(now: dict[str, object], peak: float, word: str) -> None:
    found = harm(state(), state(**{"step": 300, "reach": 150, **now}), 120, peak, LIMITS)
    assert word in found
    assert bool(found) == bool(word)


def test_a_standstill_counts_right_after_a_fall_and_not_long_after() -> None:
    before = state(fallen=0.5)
    now = state(step=200, reach=130)
    assert "stands still" in harm(before, now, 120, 1.1, LIMITS)
    assert harm(before, now, 50, 1.1, LIMITS) == ""
    assert harm(before, state(step=200, reach=130, fallen=0.4), 120, 1.1, LIMITS) == ""
    assert harm(state(), now, 120, 1.1, LIMITS) == ""
