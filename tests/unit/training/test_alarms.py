"""Each rule on a run with its pathology planted at a known step, and on the healthy run like it."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable

import pytest

from levelhead.base.errors import InputError
from levelhead.base.records import Reading
from levelhead.training.alarm_rules import ALARMS, CURES
from levelhead.training.alarms import Alarm, Detector, Thresholds, detect, sentences
from unit.training.watched_runs import EVERY, Change, Values, batches, falling

ONSET = 1000
LAYER = "layers.1"


def after(step: int) -> int:
    """How many steps since the onset."""
    return max(0, step - ONSET)


def sharpens(step: int, values: Values) -> None:
    growth = math.exp(after(step) / 60)
    values["attention_entropy_share", LAYER, 2] /= growth
    values["largest_logit", LAYER, 2] *= min(growth, 5)


def flattens(step: int, values: Values) -> None:
    values["map_residual", LAYER, 0] *= math.exp(-after(step) / 40)


def copies(step: int, values: Values) -> None:
    for which in ("qk_coherence", "ov_coherence"):
        values[which, LAYER, None] += (0.8 - values[which, LAYER, None]) * min(1, after(step) / 200)


def dies(step: int, values: Values) -> None:
    values["ov_frobenius_norm", LAYER, 1] *= math.exp(-after(step) / 40)


def spikes(step: int, values: Values) -> None:
    if 0 < after(step) <= 100:
        values["largest_hessian_eigenvalue", None, None] *= 8


def explodes(step: int, values: Values) -> None:
    values["largest_logit", LAYER, 0] *= math.exp(after(step) / 80)


def stands(step: int, rng: random.Random) -> float:
    """A loss that has come down, and stands still from the onset on."""
    return falling(min(step, ONSET), random.Random(step)) + 0 * rng.random()


def swings(step: int, rng: random.Random) -> float:
    return falling(step, rng) + (0.5 * (-1) ** step if step > ONSET else 0)


PLANTED: list[tuple[str, Change | None, tuple[str | None, int | None]]] = [
    ("entropy_collapse", sharpens, (LAYER, 2)),
    ("rank_collapse", flattens, (LAYER, 0)),
    ("head_collapse", copies, (LAYER, None)),
    ("dead_head", dies, (LAYER, 1)),
    ("sharpness_spike", spikes, (None, None)),
    ("exploding_logits", explodes, (LAYER, 0)),
    ("loss_oscillation", None, (None, None)),
]


def run_of(name: str, change: Change | None) -> list[list[Reading]]:
    if change is None:
        return list(batches(loss=swings))
    return list(batches(change, loss=stands))


@pytest.mark.parametrize(("name", "change", "place"), PLANTED, ids=[row[0] for row in PLANTED])
def test_a_planted_pathology_is_named_where_and_when_it_began(
    name: str, change: Change | None, place: tuple[str | None, int | None]
) -> None:
    first, *later = detect([r for batch in run_of(name, change) for r in batch])
    assert (first.name, first.layer, first.head) == (name, *place)
    assert ONSET < first.since <= ONSET + 15 * EVERY
    assert first.since < first.step <= ONSET + 25 * EVERY
    assert {(a.name, a.layer, a.head) for a in later} <= {(name, *place)}
    assert name in CURES
    assert CURES[name] in str(first)
    assert f"since step {first.since}" in str(first)


def test_every_alarm_has_a_planted_run_here() -> None:
    assert tuple(row[0] for row in PLANTED) == ALARMS


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_is_silent(seed: int) -> None:
    assert detect(r for batch in batches(steps=6000, seed=seed) for r in batch) == []


# ── what is sharp, uniform or redundant for good reasons ──


def learning(step: int, rng: random.Random) -> float:
    """A loss that stands still and then, at the onset, comes down within 300 steps."""
    return 2.0 - 1.9 * min(1, after(step) / 300) + rng.gauss(0, 0.01)


@pytest.mark.parametrize("change", [sharpens, flattens, copies], ids=lambda f: f.__name__)
def test_what_the_loss_gains_by_is_no_collapse(change: Change) -> None:
    limits = Thresholds(rank_hard=1e-12)
    given = [r for batch in batches(change, loss=learning, steps=2400) for r in batch]
    assert detect(given, limits) == []
    given = [r for batch in batches(change, loss=stands, steps=2400) for r in batch]
    assert detect(given, limits) != []


def test_beyond_the_hard_limit_the_loss_is_not_asked() -> None:
    given = [r for batch in batches(flattens, loss=learning) for r in batch]
    assert [a.name for a in detect(given, Thresholds(rank_hard=0.002))] == ["rank_collapse"]


def test_entropy_that_falls_without_growing_logits_is_no_collapse() -> None:
    def sharper_input(step: int, values: Values) -> None:
        sharpens(step, values)
        values["largest_logit", LAYER, 2] = 8.0

    assert detect(r for b in batches(sharper_input, loss=stands) for r in b) == []

    def no_logits(step: int, values: Values) -> None:
        sharpens(step, values)
        for key in [key for key in values if key[0] == "largest_logit"]:
            del values[key]

    found = detect(r for b in batches(no_logits, loss=stands) for r in b)
    assert {a.name for a in found} == {"entropy_collapse"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention_entropy_share", 0.01), ("map_residual", 0.001), ("ov_frobenius_norm", 0.01)],
)
def test_what_was_so_from_the_start_has_no_onset(name: str, value: float) -> None:
    def born(step: int, values: Values) -> None:
        values[name, LAYER, 0] = value * (1 + 0.1 * random.Random(step).random())

    assert detect(r for batch in batches(born, loss=stands) for r in batch) == []


def test_copies_in_qk_alone_are_no_head_collapse() -> None:
    def alike(step: int, values: Values) -> None:
        values["qk_coherence", LAYER, None] += 0.9 * min(1, after(step) / 200)

    assert detect(r for batch in batches(alike, loss=stands) for r in batch) == []


def test_sharpness_that_grows_slowly_and_a_single_outlier_are_no_spike() -> None:
    def grows(step: int, values: Values) -> None:
        values["largest_hessian_eigenvalue", None, None] *= math.exp(step / 1000)
        if step == ONSET:
            values["largest_hessian_eigenvalue", None, None] *= 50

    assert detect(r for batch in batches(grows, steps=6000) for r in batch) == []


def test_one_spike_of_the_loss_is_no_oscillation() -> None:
    def once(step: int, rng: random.Random) -> float:
        return falling(step, rng) + 30 * (step == ONSET)

    assert detect(r for batch in batches(loss=once) for r in batch) == []


# ── harm ──


def harm_of(change: Change, loss: Callable[[int, random.Random], float]) -> list[Alarm]:
    return detect(r for batch in batches(change, loss=loss, steps=2400) for r in batch)


def test_without_evidence_from_the_loss_an_alarm_is_not_harmful() -> None:
    found = harm_of(dies, falling)
    assert [a.harmful for a in found] == [False]
    assert found[0].harm == ""
    assert "no harm" in str(found[0])


def test_a_loss_that_rises_turns_the_alarm_harmful_once() -> None:
    def rises(step: int, rng: random.Random) -> float:
        return falling(step, rng) + (1.0 if step > ONSET + 400 else 0.0)

    first, second = harm_of(dies, rises)
    assert (first.harmful, second.harmful) == (False, True)
    assert first.key == second.key
    assert ONSET + 400 < second.step <= ONSET + 400 + 2 * EVERY
    assert second.harm.startswith("the loss ")
    assert second.harm in str(second)


def test_spikes_nans_and_a_standstill_are_harm_too() -> None:
    def spiking(step: int, rng: random.Random) -> float:
        return falling(step, rng) + 3.0 * (step == ONSET + 500)

    def broken(step: int, rng: random.Random) -> float:
        return math.nan if step > ONSET + 500 else falling(step, rng)

    def stalled(step: int, rng: random.Random) -> float:
        return 3 - min(step, ONSET) / 500 + rng.gauss(0, 0.001)

    for loss, word in ((spiking, "spiked to 3."), (broken, "no longer finite"),
                       (stalled, "stands still")):  # fmt: skip
        *_, last = harm_of(dies, loss)
        assert last.harmful
        assert word in last.harm


def test_a_validation_gap_is_harm() -> None:
    detector = Detector()
    found = []
    for batch in batches(dies, steps=2400):
        step = max(reading.step or 0 for reading in batch)
        extra = Reading("validation_loss", 1.0 + after(step) / 2000, step=step)
        found += detector.update([*batch, extra])
    *_, last = found
    assert last.harmful
    assert "validation loss rose from 1 to" in last.harm


# ── how Readings come ──


def keys(alarms: list[Alarm]) -> list[tuple[object, ...]]:
    return [(a.key, a.step, a.harmful) for a in alarms]


def test_all_at_once_is_the_same_as_step_by_step() -> None:
    given = run_of("", sharpens)
    detector = Detector()
    found = [alarm for batch in given for alarm in detector.update(batch)]
    assert keys(found) == keys(detect(r for batch in given for r in batch))
    assert [a.key for a in detector.open] == [found[-1].key]


def test_other_places_and_names_do_not_matter() -> None:
    given = run_of("", sharpens)
    noise = [Reading("qk_rank", math.nan, step=20), Reading("loss", 1.0), Reading("x", 1.0)]
    noise += [Reading("alarm.dead_head", 1.0, "", {"since": 1, "harmful": 1}, 20)]
    noise += [Reading("largest_logit", 1e9, "", {"layer": "layers.0", "other": 1}, 20)]
    assert keys(detect([*noise, *(r for b in given for r in b)])) == keys(
        detect(r for b in given for r in b)
    )


def test_missing_and_nan_readings_are_passed_over() -> None:
    def gaps(step: int, values: Values) -> None:
        sharpens(step, values)
        if step % (3 * EVERY) == 0:
            values["attention_entropy_share", LAYER, 2] = math.nan
            del values["largest_logit", LAYER, 0]

    first, *_ = detect(r for b in batches(gaps, loss=stands) for r in b)
    assert (first.name, first.layer, first.head) == ("entropy_collapse", LAYER, 2)


def test_infinite_logits_are_an_alarm_without_any_history() -> None:
    def infinite(step: int, values: Values) -> None:
        values["largest_logit", LAYER, 0] = math.inf

    (found,) = detect(r for b in batches(infinite, steps=200) for r in b)
    assert (found.name, found.step, found.since) == ("exploding_logits", 3 * EVERY, EVERY)


def test_an_alarm_clears_and_may_come_again() -> None:
    def twice(step: int, values: Values) -> None:
        if ONSET < step <= ONSET + 200 or 1600 < step <= 1800:
            values["largest_logit", LAYER, 0] = 300.0

    detector = Detector()
    found, still = [], {}
    for batch in batches(twice):
        found += detector.update(batch)
        still[max(r.step or 0 for r in batch)] = len(detector.open)
    assert [a.since for a in found] == [ONSET + EVERY, 1600 + EVERY]
    assert [still[s] for s in (1000, 1100, 1240, 1260, 1700, 2000)] == [0, 1, 1, 0, 1, 0]


def test_a_value_near_its_threshold_raises_one_alarm() -> None:
    def trembles(step: int, values: Values) -> None:
        if step > ONSET:
            values["largest_logit", LAYER, 0] = 130.0 if step // EVERY % 5 else 90.0

    assert len(detect(r for b in batches(trembles) for r in b)) == 1


def test_a_restart_from_an_earlier_step_begins_series_anew() -> None:
    given = run_of("", explodes)
    detector = Detector()
    for batch in given[:60]:  # up to step 1200, well into the explosion
        detector.update(batch)
    healthy = list(batches(loss=stands))
    found = [alarm for batch in healthy[45:] for alarm in detector.update(batch)]
    assert found == []
    assert detector.open == []


def test_memory_does_not_grow_with_the_run() -> None:
    def held(value: object, seen: set[int]) -> int:
        if id(value) in seen:
            return 0
        seen.add(id(value))
        size = sys.getsizeof(value)
        inner = (
            [*value] if isinstance(value, tuple | list | set) or hasattr(value, "maxlen") else []
        )
        inner += [*value, *value.values()] if isinstance(value, dict) else []
        inner += [vars(value)] if hasattr(value, "__dict__") and not isinstance(value, type) else []
        return size + sum(held(part, seen) for part in inner)

    sizes = []
    detector = Detector()
    for count, batch in enumerate(batches(steps=12000, layers=1)):
        detector.update(batch)
        if count in (100, 590):
            sizes.append(held(detector, set()))
    assert sizes[0] > 10_000
    assert sizes[1] < 1.1 * sizes[0]


# ── alarms as records, thresholds ──


def alarm(**changes: object) -> Alarm:
    given: dict[str, object] = {
        "name": "dead_head", "step": 90, "since": 60, "layer": "a", "head": 0, "value": 0.0125,
        "threshold": 0.05, "evidence": "small", "harmful": True, "harm": "it rose",
    }  # fmt: skip
    return Alarm(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"layer": None, "head": None, "harmful": False}])
def test_an_alarm_comes_back_from_its_reading(changes: dict[str, object]) -> None:
    given = alarm(**changes)
    reading = given.reading()
    assert reading.name == "alarm.dead_head"
    assert (reading.value, reading.step, reading.source) == (0.0125, 90, "alarm")
    assert (reading.where["since"], reading.where["harmful"]) == (60, int(given.harmful))
    assert Alarm.from_reading(reading) == given


@pytest.mark.parametrize(
    "reading",
    [
        Reading("loss", 1.0, step=1),
        Reading("alarm.unknown", 1.0, "", {"since": 1}, 1),
        Reading("alarm.dead_head", 1.0, "", {}, 1),
        Reading("alarm.dead_head", 1.0, "", {"since": 1}),
    ],
)
def test_other_readings_are_no_alarms(reading: Reading) -> None:
    with pytest.raises(InputError, match="is no alarm"):
        Alarm.from_reading(reading)


def test_sentences_take_the_heads_of_a_layer_together() -> None:
    given = [alarm(head=1, harmful=False, harm=""), alarm(head=0, since=50), alarm(head=1)]
    (said,) = sentences(given)
    assert said.startswith("Dead head in a, heads 0, 1, since step 50: small. Harmful: it rose.")
    assert len(sentences([*given, alarm(layer="b")])) == 2


@pytest.mark.parametrize(
    "wrong", [{"persistence": 0}, {"clear": 1.0}, {"entropy_fall": math.nan}, {"loss_gain": -1}]
)
def test_thresholds_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Thresholds(**wrong)  # type: ignore[arg-type]
