"""What the toy study concludes, from outcomes that are planted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from levelhead.base.records import Reading
from levelhead.studies.running import study_settings
from levelhead.studies.study import Outcome, Statement
from levelhead.studies.toy import STUDY
from levelhead.studies.toy_conclusions import conclude
from levelhead.studies.toy_interventions import account, interventions
from levelhead.studies.toy_model import toy_data
from levelhead.studies.toy_outcomes import ToyOutcomes
from levelhead.studies.toy_propositions import propositions
from levelhead.studies.toy_separation import CANDIDATES, separation

SEEDS = 4
SETTINGS = study_settings(STUDY, "standard", {"seeds": SEEDS, "optimisers": ""})
NOISE = np.array([0.01, -0.02, 0.0, 0.01])
PLAIN = {
    "loss_identity": 1.1,
    "loss_uniform": 9.0,
    "entropy": 0.01,
    "lambda_max": 50.0,
    "lambda_max_trained": 50.0,
    "rank": 6.9,
    "nuclear": 6.9,
    "own": 0.99,
    "path_norm": 5.0,
    "qk_norm": 5.0,
    "leak": 0.5,
}


def planted(
    losses: Mapping[str, float],
    more: Mapping[str, Mapping[str, float]] | None = None,
    init: str = "keras",
    noise: np.ndarray = NOISE,
) -> dict[str, Outcome]:
    """Trainings with these mean losses, and an oracle of 1; `more` changes numbers of an arm."""
    found = {}
    for arm, loss in losses.items():
        numbers = {**PLAIN, **(more or {}).get(arm, {})}
        for seed in range(SEEDS):
            values = {"loss": loss + float(noise[seed]) * (arm != "transformer"), **numbers}
            found[f"train-{init}-{arm}-{seed}"] = Outcome(
                [Reading(n, v) for n, v in values.items()]
                + [Reading(f"parameters_{n}", 1.0) for n in ("trained", "attention", "head")],
                {"epoch": np.arange(3), "own": np.array([0.1, 0.95, 0.99]), "maps": np.zeros(0)},
            )
    return found | {f"propositions-{seed}": proved() for seed in range(SEEDS)}


@cache
def measured_once() -> tuple[Reading, ...]:
    return tuple(propositions(toy_data(32, 8, 4, 512, 64, seed=0), 4, 0))


def proved(**changed: float) -> Outcome:
    """Propositions of a small problem, with an oracle of 1."""
    changed = {"oracle_validation": 1.0, **changed}
    return Outcome([replace(r, value=changed.get(r.name, r.value)) for r in measured_once()])


def answers(found: Mapping[str, Outcome]) -> dict[str, Statement]:
    return {s.name: s for s in conclude(SETTINGS, found).statements if s.name[:4] not in PROVED}


PROVED = ("prop", "iden", "thm3", "sam-")
KEPT = {"entropy-none": {"entropy": 0.0}, "entropy-floor": {"entropy": 1.2}}


def test_entropy_that_is_taken_away_and_heals_refutes_the_account() -> None:
    losses = {"transformer": 2.6, "entropy-none": 1.1, "entropy-floor": 2.9}
    found = planted(losses, KEPT)
    said = account(ToyOutcomes(SETTINGS, found))
    assert "Taking entropy away altogether heals the failure" in said
    assert said.endswith("and keeping it does harm.")
    both = answers(found)
    assert both["moves-entropy-none"].holds is True
    assert "Difference -1.5 [" in both["moves-entropy-none"].evidence


def test_entropy_that_is_kept_and_heals_agrees_with_it() -> None:
    losses = {"transformer": 2.6, "entropy-none": 2.6, "entropy-floor": 1.2}
    assert account(ToyOutcomes(SETTINGS, planted(losses, KEPT))).endswith(
        "that agrees with the published account."
    )


def test_an_intervention_that_did_not_take_shows_nothing() -> None:
    losses = {"transformer": 2.6, "entropy-none": 2.6, "entropy-floor": 1.2}
    found = planted(losses, {"entropy-floor": {"entropy": 0.89}, "entropy-none": {"entropy": 0.0}})
    assert "neither bear out" in account(ToyOutcomes(SETTINGS, found))
    told = answers(found)["moves-entropy-floor"]
    assert told.holds is None
    assert "the intervention did not take" in told.evidence
    assert "entropy ends at 0.89 nat, 1 was to be kept" in told.evidence


def test_what_is_kept_without_need_shows_nothing() -> None:
    losses = {"transformer": 2.6, "entropy-none": 2.6, "entropy-floor": 1.2}
    soft = {**KEPT, "transformer": {"entropy": 1.3}}
    assert "neither bear out" in account(ToyOutcomes(SETTINGS, planted(losses, soft)))


def test_a_small_gain_heals_nothing() -> None:
    losses = {"transformer": 2.6, "entropy-none": 2.5, "entropy-floor": 2.6}
    found = ToyOutcomes(SETTINGS, planted(losses, KEPT))
    assert interventions(found)[0].direction == -1
    assert "heals" not in account(found)


def test_an_arm_without_a_shared_seed_is_not_judged() -> None:
    found = planted({"transformer": 2.6, "entropy-none": 1.1}, KEPT)
    for seed in range(2):
        del found[f"train-keras-transformer-{seed}"], found[f"train-keras-entropy-none-{seed + 2}"]
    told = answers(found)["moves-entropy-none"]
    assert told.holds is None
    assert "unknown (no shared seed)" in told.evidence


def test_p_values_are_adjusted_over_the_interventions_that_ran() -> None:
    losses = {"transformer": 2.6, "entropy-none": 2.58, "quiet": 2.585, "sharpness": 2.59}
    found = interventions(ToyOutcomes(SETTINGS, planted(losses, KEPT)))
    assert [one.arm for one in found] == ["entropy-none", "sharpness", "quiet"]
    raw = sorted(one.found.p_value for one in found if one.found is not None)
    assert min(one.p for one in found) == pytest.approx(3 * raw[0])


def test_one_seed_judges_no_intervention() -> None:
    found = {
        name: o
        for name, o in planted({"transformer": 2.6, "entropy-none": 1.1}, KEPT).items()
        if name.endswith("-0")
    }
    told = answers(found)["moves-entropy-none"]
    assert told.holds is None
    assert "-1.49 (one seed)" in told.evidence
    assert "not judged" in account(ToyOutcomes(SETTINGS, found))


def test_a_training_that_diverged_is_named_and_in_no_mean() -> None:
    found = planted({"transformer": 2.6, "sam": 1.0, "random": 1.4})
    lost = found["train-keras-sam-2"]
    found["train-keras-sam-2"] = Outcome(
        [
            Reading(r.name, math.nan if r.name in PLAIN | {"loss": 0} else r.value)
            for r in lost.readings
        ]
        + [Reading("diverged", 1.0)],
        lost.arrays,
    )
    told = conclude(SETTINGS, found)
    assert "Diverged, and in no mean: train-keras-sam-2." in told.conclusion
    assert "sam 1 (3)" in told.conclusion[0]
    assert all("nan" not in s.evidence for s in told.statements)


@pytest.mark.parametrize(("sam", "holds"), [(1.2, True), (0.5, False)])
def test_entropy_separates_only_if_sam_keeps_it(sam: float, holds: bool) -> None:
    found = planted({"transformer": 2.6, "sam": 1.0}, {"sam": {"entropy": sam}})
    assert answers(found)["entropy-separates"].holds is holds


@pytest.mark.parametrize(
    ("oracle_gap", "identity", "holds"), [(1.6, 1.1, True), (1.6, 2.5, False), (-0.01, 0.98, None)]
)
def test_replacing_attention_is_judged_only_where_there_is_an_excess(
    oracle_gap: float, identity: float, holds: bool | None
) -> None:
    found = planted({"transformer": 1 + oracle_gap}, {"transformer": {"loss_identity": identity}})
    told = answers(found)["replaced-by-identity"]
    assert told.holds is holds
    assert ("%" in told.evidence) == (holds is not None)


@pytest.mark.parametrize(("frozen", "holds"), [(0.4, True), (0.6, False), (100.0, False)])
def test_frozen_attention_is_flat_by_the_weights_that_are_trained(
    frozen: float, holds: bool
) -> None:
    flat = {"random": {"lambda_max_trained": frozen, "lambda_max": 50.0}}
    told = answers(planted({"transformer": 2.6, "random": 1.4}, flat))["frozen-flat"]
    assert told.holds is holds
    assert told.evidence.endswith("of all weights by 1.")


def test_the_cause_of_random_attentions_excess_is_computed() -> None:
    for floor, cause in ((8.0, "the size of W_V W_O as drawn"), (0.1, "optimisation")):
        found = planted({"transformer": 2.6}) | planted({"random": 10.0}, init="glorot")
        for seed in range(SEEDS):
            found[f"propositions-{seed}"] = proved(prop21_all_excess=floor)
        assert any(s.endswith(f"is due to {cause}.") for s in conclude(SETTINGS, found).conclusion)


ARMS_SEEN = ("transformer", "random", "sam", "sigma", "sigma-fast", "sam-sigma", "quiet", "tied")


def test_the_quantity_that_orders_all_arms_separates_them() -> None:
    losses = {arm: 1.0 + 0.3 * i for i, arm in enumerate(ARMS_SEEN)}
    draw = np.random.default_rng(0)
    more = {
        arm: {**{n: float(draw.random()) for n in CANDIDATES}, "leak": loss}
        for arm, loss in losses.items()
    }
    found = separation(ToyOutcomes(SETTINGS, planted(losses, more)))
    assert found is not None
    assert found.order[0] == "leak"
    assert found.found["leak"] == pytest.approx(1.0)
    assert found.interval("leak") == (pytest.approx(1.0), pytest.approx(1.0))
    assert found.clear()
    assert "ordered best by leak (rank correlation 1.00 [1.00, 1.00]); entropy" in str(found)
    again = separation(ToyOutcomes(SETTINGS, planted(losses, more)))
    assert again is not None
    np.testing.assert_array_equal(again.draws, found.draws)


def test_two_quantities_that_order_arms_alike_are_not_told_apart() -> None:
    losses = {arm: 1.0 + 0.3 * i for i, arm in enumerate(ARMS_SEEN)}
    more = {arm: {"leak": loss, "entropy": loss} for arm, loss in losses.items()}
    found = separation(ToyOutcomes(SETTINGS, planted(losses, more)))
    assert found is not None
    assert set(found.order) == {"entropy", "leak"}  # what does not vary orders nothing
    assert not found.clear()
    assert "which is not told apart from leak" in str(found)


def test_few_arms_separate_nothing() -> None:
    assert separation(ToyOutcomes(SETTINGS, planted({"transformer": 2.6, "sam": 1.0}))) is None
