"""One reading under one rule: what is usual, where a streak begins and ends, what excuses it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from levelhead.training.alarm_loss import LossState
from levelhead.training.alarm_rules import Thresholds, rules
from levelhead.training.alarm_series import Evidence, Sample, Series

LIMITS = Thresholds()
RULES = {rule.name: rule for rule in rules(LIMITS)}
NAN = float("nan")


def judged(
    name: str, values: Iterable[float], levels: Iterable[float] = (), witness: float = NAN
) -> list[tuple[int, Evidence]]:
    """(place in `values`, evidence) of all alarms; `levels` are those of the loss, noise 0.01."""
    series, found = Series(RULES[name], LIMITS), []
    losses = [
        LossState(step=step, level=level, error=0.003, noise=0.01, peak=level, scale=1.0,
                  fallen=0.0, reach=0, swing=0.0, finite=True)
        for step, level in enumerate(levels)
    ]  # fmt: skip
    for step, value in enumerate(values):
        loss = losses[step] if losses else None
        if evidence := series.judge(Sample(step, value, witness, loss)):
            found.append((step, evidence))
    return found


RESTLESS = [10.0, 100, 20, 90, 15, 95, 30, 100, 12, 80]


def test_sharpness_is_held_against_the_upper_quartile_of_earlier_values() -> None:
    usual = 95.0  # seven of ten are smaller
    spike = 1.01 * LIMITS.sharpness_rise * usual
    assert judged("sharpness_spike", [*RESTLESS, 0.99 * LIMITS.sharpness_rise * usual, 10.0]) == []
    assert judged("sharpness_spike", [*RESTLESS, spike, 10.0, 10.0]) == []
    # One value above it, the next ones not back by the factor `clear`: a spike.
    held = [spike / LIMITS.clear] * (LIMITS.sharpness_persistence - 1)
    ((step, evidence),) = judged("sharpness_spike", [*RESTLESS, spike, *held, 10.0])
    assert (step, evidence.since, evidence.value) == (10 + len(held), 10, spike)
    assert evidence.threshold == pytest.approx(LIMITS.sharpness_rise * usual)
    assert f"λ_max {spike:.3g}, above" in evidence.says


@pytest.mark.parametrize(("after", "raised"), [(0.7, 1), (0.5, 0)])
def test_sharpness_may_grow_while_the_loss_falls_by_much(after: float, raised: int) -> None:
    values, levels = [*[2.0] * 5, *[9.0] * 3, 2.0], [*[1.0] * 5, *[after] * 4]
    assert 1 - 0.7 < LIMITS.sharpness_gain < 1 - 0.5
    assert len(judged("sharpness_spike", values, levels)) == raised


def test_a_wild_history_does_not_hide_copies() -> None:
    wild = [0.001 * 1.9**i for i in range(10)]
    ((_, evidence),) = judged("head_collapse", [*wild, 1.0, 1.0, 1.0])
    assert (evidence.since, evidence.threshold) == (10, LIMITS.coherence_hard)
    assert judged("head_collapse", [*wild, 0.85, 0.85, 0.85]) == []


@pytest.mark.parametrize(("back", "raised"), [(0.99, 1), (1.01, 0)])
def test_a_streak_ends_when_a_value_is_back_by_the_factor(back: float, raised: int) -> None:
    near = LIMITS.dead_level * LIMITS.clear * back
    values = [1.0] * 5 + [0.01] + [near] * (LIMITS.persistence - 1) + [1.0]
    found = judged("dead_head", values)
    assert len(found) == raised
    assert all(evidence.value == 0.01 for _, evidence in found)


def test_what_spoilt_the_loss_first_gains_nothing_by_recovering() -> None:
    values = [0.9, 0.9, 0.9, 0.9, 0.3, 0.1, *[0.01] * 6]
    before = [1.0] * 4
    spoilt = [*before, 1.3, 1.5, 1.3, *[1.1] * 5]
    assert len(judged("entropy_collapse", values, spoilt)) == 1
    gained = [*before, 1.3, 1.5, 1.3, *[0.8] * 5]
    assert judged("entropy_collapse", values, gained) == []
    assert math.isclose(spoilt[-1] - gained[-1], 0.3)


def test_it_began_at_half_of_the_factor_before_the_threshold() -> None:
    half = LIMITS.entropy_level * math.sqrt(LIMITS.entropy_fall)
    values = [0.9] * 5 + [1.05 * half, 0.95 * half, 0.04, 0.04, 0.04]
    ((step, evidence),) = judged("entropy_collapse", values, [1.0] * len(values))
    assert (step, evidence.since) == (9, 6)
