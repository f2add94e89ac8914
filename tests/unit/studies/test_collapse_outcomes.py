"""What the collapse study chooses and concludes, on made-up outcomes with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from levelhead.base.records import Reading
from levelhead.studies.collapse import CollapseSettings
from levelhead.studies.collapse_conclusions import conclude, knee
from levelhead.studies.collapse_measures import ALARMED, CURVES
from levelhead.studies.collapse_outcomes import FRESH, CollapseOutcomes, cell_name, starts
from levelhead.studies.collapse_statements import primary, secondary, statements
from levelhead.studies.study import Outcome, Statement

SETTINGS = CollapseSettings(
    seeds=6,
    search_seeds=2,
    selection_seeds=2,
    tasks=("digits",),
    confirm=(),
    optimisers=("adam-0.001", "sgd-0.1"),
    scales=(1.0, 0.01),
    spreads=(1.0,),
    depths=(2, 4),
    penalties=("coherence", "nuclear"),
    weights=(0.1, 1.0),
    shares=(0.5, 1.0),
)
SMALL, LARGE = (s for s in starts(SETTINGS) if s.optimiser == "adam" and s.depth == 2)
SMALL, LARGE = sorted((SMALL, LARGE), key=lambda start: start.scale)


def outcome(**values: float) -> Outcome:
    arrays = {}
    if "error" in values:
        arrays = {name: np.array([0.5, 0.6]) for name in CURVES}
        arrays |= {"at": np.array([0.0, 3.0]), "loss": np.ones(30), "head_cka": np.eye(4)}
    defaults = dict.fromkeys([f"alarm_{name}" for name in ALARMED], 0.0)
    shown = {"curve": 1.0, "best_validation": 1.0, "peak_coherence": 0.5, "last_coherence": 0.5}
    return Outcome([Reading(n, v) for n, v in (defaults | shown | values).items()], arrays)


def searched(**by_name: dict[str, float]) -> dict[str, Outcome]:
    found = {}
    for start in starts(SETTINGS):
        key = f"{start.optimiser}_{start.scale:g}_{start.depth}".replace(".", "_")
        for seed in range(2):
            name = cell_name("search", "digits", start.name, seed)
            found[name] = outcome(**by_name.get(key, {}))
    return found


def selected(weights: dict[tuple[str, float], list[dict[str, float]]]) -> dict[str, Outcome]:
    return {
        cell_name("select", "digits", f"{arm}-{weight:g}", seed): outcome(**values)
        for (arm, weight), rows in weights.items()
        for seed, values in enumerate(rows)
    }


def val(*losses: float, **more: float) -> list[dict[str, float]]:
    return [{"best_validation": loss, **more} for loss in losses]


CHOSEN = selected(
    {
        ("B.coherence", 0.1): val(0.5, 0.7, pull_mean=3.0, decay_pull_mean=2.0),
        ("B.coherence", 1.0): val(0.65, 0.65, pull_mean=8.0, decay_pull_mean=2.0),
        ("B.nuclear", 0.1): val(0.9, 0.9, alarm_head_collapse=1.0),
        ("B.nuclear", 1.0): val(0.8, 0.8, alarm_head_collapse=1.0),
        ("C.coherence", 0.1): val(0.7, 0.7),
        ("C.coherence", 1.0): val(0.6, 0.6),
        ("C.nuclear", 0.1): val(0.8, 0.8),
        ("D.core", 0.5): val(0.4, 0.4),
        ("D.core", 1.0): val(0.9, 0.9),
    }
)
COLLAPSED = searched(
    adam_0_01_2={"alarm_head_collapse": 1.0, "best_validation": 0.5},
    adam_1_2={"best_validation": 3.0},
    sgd_0_01_4={"alarm_head_collapse": 1.0, "best_validation": 9.0},
)


def verdicts(effects: dict[str, float], alarms: dict[str, float]) -> dict[str, Outcome]:
    """Errors .5 + a seed's own noise + the effect of the arm + noise of the arm."""
    weights = {"A": 0.0, "O": 0.0, "E.naive": 1.0, "B.coherence": 0.1, "B.nuclear": 1.0}
    weights |= {"C.coherence": 1.0, "C.nuclear": 0.1, "D.core": 0.5}
    draw = np.random.default_rng(0)
    common = draw.normal(0, 0.1, 6)
    found = {}
    for arm, weight in weights.items():
        errors = 0.5 + common + effects.get(arm, 0.0) + draw.normal(0, 0.01, 6)
        for seed in range(6):
            name = cell_name("verdict", "digits", f"{arm}-{weight:g}", FRESH + seed)
            found[name] = outcome(
                error=errors[seed],
                steps_to_level=10.0,
                alarm_head_collapse=alarms.get(arm, 0.0),
                naive_share_largest=1e-20,
                naive_largest=1e-30,
            )
    return found


def named(found: list[Statement], name: str) -> Statement:
    [statement] = [s for s in found if s.name == name]
    return statement


# ── choices ──


def test_the_failing_setting_has_the_alarm_of_head_collapse_at_the_first_depth() -> None:
    found = CollapseOutcomes(SETTINGS, COLLAPSED)
    assert found.failing("digits") == SMALL
    assert found.alarm("digits") == "head_collapse"


def test_an_alarm_that_only_some_seeds_raise_is_not_what_fails() -> None:
    names = [cell_name("search", "digits", LARGE.name, seed) for seed in (0, 1)]
    outcomes = {**COLLAPSED, names[0]: outcome(alarm_head_collapse=1.0, best_validation=99.0)}
    assert CollapseOutcomes(SETTINGS, outcomes).failing("digits") == SMALL
    alone = {**searched(), names[0]: outcome(alarm_head_collapse=1.0, curve=0.1)}
    assert CollapseOutcomes(SETTINGS, alone).alarm("digits") is None


def test_other_alarms_count_where_heads_do_not_collapse() -> None:
    outcomes = searched(
        adam_1_2={"alarm_exploding_logits": 1.0, "best_validation": 0.2},
        sgd_0_01_2={"best_validation": 3.0},
    )
    found = CollapseOutcomes(SETTINGS, outcomes)
    assert found.failing("digits") == LARGE
    assert found.alarm("digits") == "exploding_logits"


def test_without_any_alarm_the_slowest_setting_is_taken() -> None:
    found = CollapseOutcomes(SETTINGS, searched(sgd_1_2={"curve": 2.0}, adam_1_2={"curve": 1.5}))
    start = found.failing("digits")
    assert start is not None
    assert (start.optimiser, start.scale) == ("sgd", 1.0)
    assert found.alarm("digits") is None
    assert CollapseOutcomes(SETTINGS, {}).failing("digits") is None


def test_weights_are_chosen_by_mean_validation_loss_and_penalties_ranked_by_it() -> None:
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN})
    assert found.weight("digits", "B.coherence") == 0.1
    assert found.weight("digits", "C.coherence") == 1.0
    assert found.weight("digits", "D.core") == 0.5
    assert found.weight("digits", "B.unknown") is None
    assert found.ranked("digits") == ["coherence", "nuclear"]
    assert found.best_penalties() == ["coherence", "nuclear"]
    assert found.cured("digits") == "B.coherence"


def test_a_penalty_that_lets_the_alarm_go_off_has_cured_nothing() -> None:
    loud = selected({("B.coherence", 0.1): val(0.1, 0.1, alarm_head_collapse=1.0)})
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN, **loud})
    assert found.ranked("digits")[0] == "coherence"
    assert found.cured("digits") is None


def test_the_strength_of_weight_decay_is_the_ratio_of_mean_pulls() -> None:
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN})
    assert found.strength("digits", "C.coherence", 0.1) == pytest.approx(1.5)
    assert found.strength("digits", "C.coherence", 1.0) == pytest.approx(4.0)
    assert found.strength("digits", "B.coherence", 0.1) == 0.1
    assert found.strength("digits", "C.nuclear", 0.1) == 0.0  # no pull was ever read
    assert found.strength("digits", "C.unknown", 0.1) is None


def test_the_knee_is_the_largest_weight_within_a_standard_error_of_the_best() -> None:
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN})
    # Best .6 ± .1 at .1; .65 lies within, .8 would not.
    assert knee(found, "digits", "B.coherence") == 1.0
    assert knee(found, "digits", "C.coherence") == 1.0
    assert knee(found, "digits", "D.core") == 0.5


# ── verdicts ──


def test_primary_comparisons_are_paired_t_tests_with_holms_correction() -> None:
    told = verdicts({"B.coherence": -0.1}, {})
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN, **told})
    made = primary(found)
    assert [(v.first, v.second) for v in made] == [
        ("B.coherence", "A"),
        ("B.coherence", "C.coherence"),
    ]
    raw = [
        stats.ttest_rel(
            list(found.values("digits", v.first, "error").values()),
            list(found.values("digits", v.second, "error").values()),
        ).pvalue
        for v in made
    ]
    least, most = sorted(raw)
    expected = {least: 2 * least, most: max(2 * least, most)}
    for verdict, p in zip(made, raw, strict=True):
        assert verdict.holm == pytest.approx(expected[p], rel=1e-9)
        assert verdict.better
    others = {(v.first, v.second) for v in secondary(found)}
    assert ("B.nuclear", "C.nuclear") in others
    assert ("D.core", "A") in others
    assert not any(first == "B.coherence" for first, _ in others)


@pytest.mark.parametrize(
    ("effects", "beats"),
    [
        ({"B.coherence": -0.1}, True),
        ({"B.coherence": -0.1, "C.coherence": -0.1}, False),  # no better than weight decay
        ({"B.coherence": 0.1}, False),  # worse than both, however surely
        ({}, False),
    ],
)
def test_a_penalty_must_beat_both_controls(effects: dict[str, float], beats: bool) -> None:
    told = verdicts(effects, {})
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN, **told})
    statement = named(statements(found), "beats-digits-coherence")
    assert statement.holds is beats
    assert not statement.expected


@pytest.mark.parametrize(
    ("alarms", "holds"),
    [
        ({"A": 1.0}, True),
        ({"A": 1.0, "B.coherence": 1.0}, False),
        ({"A": 0.0}, False),
        ({"A": 1.0, "B.nuclear": 1.0}, True),
    ],
)
def test_the_alarm_must_go_off_in_the_failing_arm_alone(
    alarms: dict[str, float], holds: bool
) -> None:
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN, **verdicts({}, alarms)})
    statement = named(statements(found), "alarm-digits")
    assert statement.holds is holds
    assert statement.expected


def test_without_a_failing_setting_the_alarm_is_not_judged_and_nothing_fails() -> None:
    found = CollapseOutcomes(SETTINGS, {**searched(), **CHOSEN, **verdicts({}, {})})
    made = statements(found)
    assert named(made, "alarm-digits").holds is None
    assert named(made, "collapse-found-digits").holds is False
    assert not any(s.failed for s in made)


def test_a_naive_penalty_with_a_gradient_would_fail_the_study() -> None:
    told = verdicts({}, {})
    name = cell_name("verdict", "digits", "E.naive-1", FRESH)
    told[name] = outcome(error=0.5, naive_share_largest=1e-3, naive_largest=1.0)
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN, **told})
    statement = named(statements(found), "naive-digits")
    assert statement.failed
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN, **verdicts({}, {})})
    assert named(statements(found), "naive-digits").holds


def test_findings_have_all_tables_and_say_what_they_found() -> None:
    told = verdicts({"B.coherence": -0.1, "O": -0.2}, {"A": 1.0})
    findings = conclude(SETTINGS, {**COLLAPSED, **CHOSEN, **told})
    tables = {table.name: table for table in findings.tables}
    assert set(tables) == {
        "search-digits", "grid-digits-best-validation", "grid-digits-peak-coherence",
        "verdict-digits", "robustness-digits", "primary", "secondary",
    }  # fmt: skip
    grid = tables["grid-digits-best-validation"]
    row = list(grid.rows).index("B.coherence")
    np.testing.assert_allclose(grid.values[row], [0.6, 0.65, 0.1, 1.0])
    said = " ".join(findings.conclusion)
    assert "raised the alarm of head collapse for 100 % of the search seeds" in said
    assert "B.coherence beats both the baseline and weight decay" in said
    assert named(list(findings.statements), "ordinary-start-digits").holds
    kinds = {figure.name: figure.kind for figure in findings.figures}
    assert kinds["trade-off-digits"] == "lines"
    assert kinds["head-cka-digits-a"] == "heatmap"


def test_no_cells_at_all_conclude_in_nothing_but_questions() -> None:
    findings = conclude(SETTINGS, {})
    assert findings.tables == []
    assert all(s.holds is None for s in findings.statements)
    assert not any(s.failed for s in findings.statements)
