"""Which reason an observation has, for courses that are made for each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levelhead.base.records import Reading
from levelhead.training.alarms import Detector
from levelhead.training.watch_course import Course
from levelhead.training.watch_observations import observation_sentences, observations

WHERE = {"layer": "a", "head": 1}


def course(
    share: Callable[[int], float],
    logit: Callable[[int], float] = lambda i: 5.0 if i < 30 else 50.0,
    loss: Callable[[int], float] = lambda i: 1.0 if i < 30 else 0.1,
    count: int = 60,
) -> list[Reading]:
    found = []
    for i in range(count):
        found += [Reading("loss", loss(i) + 1e-3 * (i % 3), "1", {}, 10 * i + k) for k in range(10)]
        found.append(Reading("attention_entropy_share", share(i), "1", WHERE, 10 * i + 9))
        found.append(Reading("largest_logit", logit(i), "1", WHERE, 10 * i + 9))
    return found


def jump(i: int) -> float:
    return 0.5 if i < 30 else 0.01


@pytest.mark.parametrize(
    ("readings", "reason"),
    [
        (course(lambda i: 0.01), "it began so"),
        (course(lambda i: 0.5 if i < 2 else 0.01), "it began so"),
        (course(lambda i: 0.5 if i < 59 else 0.01),
         "it is 1 sampled step old, and an alarm takes 3"),
        (course(lambda i: 0.5 * 0.955**i, count=100), "it came slowly"),
        (course(jump, logit=lambda i: 5.0), "the largest logit did not grow with it"),
        (course(jump), "the loss gained by it"),
    ],
)  # fmt: skip
def test_the_reason_is_the_one_that_kept_the_alarm_away(readings, reason) -> None:
    assert Detector().update(readings) == []
    [found] = observations(Course(readings), [])
    assert (found.name, found.layer, found.head) == ("entropy_collapse", "a", 1)
    assert found.reason == reason
    assert str(found) == (
        f"Attention is sharp in a head 1: an observation, no alarm, since {reason}."
    )


def test_what_raised_an_alarm_or_came_back_is_none() -> None:
    readings = course(jump, loss=lambda i: 1.0)
    alarms = Detector().update(readings)
    assert alarms
    assert observations(Course(readings), alarms) == []
    # With alarms switched off nobody can say that the loss kept it away.
    [found] = observations(Course(readings), [])
    assert found.reason == "no alarm was raised for it"
    assert observations(Course(course(lambda i: 0.01 if i < 30 else 0.5)), []) == []


def test_many_places_of_one_reason_are_one_sentence() -> None:
    readings = [
        Reading("map_residual", 0.01, "1", {"layer": "a", "head": head}, 1) for head in range(5)
    ]
    [said] = observation_sentences(observations(Course(readings), []))
    assert said == (
        "Attention is the same in every row in a head 0, a head 1, a head 2 and 2 more: an "
        "observation, no alarm, since it began so."
    )
