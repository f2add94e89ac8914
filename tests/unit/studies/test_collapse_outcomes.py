"""What the collapse study chooses and concludes, on made-up outcomes with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from levelhead.studies.collapse_conclusions import conclude
from levelhead.studies.collapse_outcomes import FRESH, CollapseOutcomes, cell_name
from levelhead.studies.collapse_statements import primary, secondary, statements
from unit.studies.planted_collapse import (
    CHOSEN,
    COLLAPSED,
    LARGE,
    SETTINGS,
    SMALL,
    named,
    outcome,
    searched,
    selected,
    val,
    verdicts,
)

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
    assert found.strength("digits", "C.nuclear", 0.1) is None  # no pull was ever read
    lost = selected(
        {("B.nuclear", 0.1): [val(0.5, pull_mean=math.nan)[0], val(0.5, pull_mean=3.0)[0]]}
    )
    assert CollapseOutcomes(SETTINGS, lost).strength("digits", "C.nuclear", 0.1) is None
    assert found.strength("digits", "C.unknown", 0.1) is None


def test_the_knee_is_the_largest_weight_within_a_standard_error_of_the_best() -> None:
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN})
    # Best .6 ± .1 at .1; .65 lies within, .8 would not.
    assert found.knee("digits", "B.coherence") == 1.0
    assert found.knee("digits", "C.coherence") == 1.0
    assert found.knee("digits", "D.core") == 0.5


def test_the_knee_of_the_head_core_is_the_smallest_share_within_a_standard_error() -> None:
    told = selected({("D.core", 0.5): val(0.45, 0.45), ("D.core", 1.0): val(0.3, 0.5)})
    found = CollapseOutcomes(SETTINGS, {**COLLAPSED, **CHOSEN, **told})
    assert found.weight("digits", "D.core") == 1.0
    assert found.knee("digits", "D.core") == 0.5


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
    assert "the alarm of head collapse went off for 2 of 2 search seeds" in said
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
