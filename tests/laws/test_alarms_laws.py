"""Laws of the alarms: what they say does not hang on order, names, units or how Readings arrive."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from levelhead.base.records import Reading
from levelhead.training.alarms import Alarm, Detector, detect
from unit.training.watched_runs import Values, batches

ONSET = 500
LAYER = "layers.1"


def goes_wrong(step: int, values: Values) -> None:
    """Four pathologies at once, in one layer."""
    far = max(0, step - ONSET)
    values["largest_logit", LAYER, 0] *= 1 + far / 10
    values["attention_entropy_share", LAYER, 0] /= 1 + far / 10
    values["ov_frobenius_norm", LAYER, 1] /= 1 + far
    values["map_residual", LAYER, 2] /= 1 + far


def loss(step: int, rng: random.Random) -> float:
    return 1.0 + (1.0 if step > ONSET + 100 else 0.0) + rng.gauss(0, 0.01)


RUN = list(batches(goes_wrong, steps=900, loss=loss))
FOUND = detect(r for batch in RUN for r in batch)


def told(alarms: list[Alarm]) -> list[str]:
    return sorted(f"{a.step} {a}" for a in alarms)


def test_the_run_of_these_laws_has_all_four_and_harm() -> None:
    names = {(a.name, a.head) for a in FOUND}
    assert names == {
        ("exploding_logits", 0), ("entropy_collapse", 0), ("dead_head", 1), ("rank_collapse", 2)
    }  # fmt: skip
    assert any(a.harmful for a in FOUND)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_order_within_a_step_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    detector = Detector()
    found = []
    for batch in RUN:
        found += detector.update(rng.sample(batch, len(batch)))
    assert told(found) == told(FOUND)


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, len(RUN)), max_size=6))
def test_how_many_steps_come_at_once_does_not_matter(cuts: list[int]) -> None:
    detector = Detector()
    found = []
    ends = [0, *sorted(cuts), len(RUN)]
    for start, end in pairwise(ends):
        found += detector.update(r for batch in RUN[start:end] for r in batch)
    assert told(found) == told(FOUND)


@settings(max_examples=10, deadline=None)
@given(heads=st.permutations(range(3)), prefix=st.text("ab.0", min_size=1, max_size=8))
def test_heads_and_layers_are_but_names(heads: list[int], prefix: str) -> None:
    def renamed(reading: Reading) -> Reading:
        where = dict(reading.where)
        if "layer" in where:
            where["layer"] = f"{prefix}{where['layer']}"
        if "head" in where:
            where["head"] = heads[int(where["head"])]
        return replace(reading, where=where)

    found = detect(renamed(r) for batch in RUN for r in batch)
    expected = [
        replace(a, layer=f"{prefix}{a.layer}", head=None if a.head is None else heads[a.head])
        for a in FOUND
    ]
    assert told(found) == told(expected)


@settings(max_examples=10, deadline=None)
@given(power=st.integers(-20, 20))
def test_the_unit_of_the_loss_does_not_matter(power: int) -> None:
    """Powers of two are exact, so that every comparison comes out alike."""
    given_run = [
        replace(r, value=r.value * 2.0**power) if r.name == "loss" else r
        for batch in RUN for r in batch
    ]  # fmt: skip
    found = detect(given_run)
    assert [(a.key, a.step, a.harmful) for a in found] == [
        (a.key, a.step, a.harmful) for a in FOUND
    ]


@settings(max_examples=10, deadline=None)
@given(power=st.integers(-30, 30))
def test_the_scale_of_ov_norms_does_not_matter(power: int) -> None:
    given_run = [
        replace(r, value=r.value * 2.0**power) if r.name == "ov_frobenius_norm" else r
        for batch in RUN for r in batch
    ]  # fmt: skip
    assert told(detect(given_run)) == told(FOUND)
