"""What the collapse study may say when numbers are few, missing, equal or of unequal strength."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from levelhead.base.records import Figure
from levelhead.studies import collapse_measures
from levelhead.studies.collapse import STUDY
from levelhead.studies.collapse_conclusions import conclude
from levelhead.studies.collapse_outcomes import FRESH, CollapseOutcomes, cell_name, starts
from levelhead.studies.collapse_pictures import DISTURBED
from levelhead.studies.collapse_statements import primary, secondary, statements
from levelhead.studies.running import study_settings
from levelhead.studies.study import Findings, Outcome, Statement, Table
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
    without,
)

KNOWN = {**COLLAPSED, **CHOSEN}
LOUD = {"A": 1.0}


def concluded(told: dict[str, Outcome]) -> tuple[list[Statement], Findings]:
    outcomes = {**KNOWN, **told}
    return statements(CollapseOutcomes(SETTINGS, outcomes)), conclude(SETTINGS, outcomes)


def table_of(findings: Findings, name: str) -> Table:
    [table] = [t for t in findings.tables if t.name == name]
    return table


def cell_of(table: Table, row: str, column: str) -> float:
    return float(table.values[list(table.rows).index(row), list(table.columns).index(column)])


def figure_of(findings: Findings, name: str) -> Figure:
    [figure] = [f for f in findings.figures if f.name == name]
    return figure


def drawn(findings: Findings, name: str, role: str) -> np.ndarray:
    return np.asarray(findings.arrays[figure_of(findings, name).arrays[role]])


# ── weight decay as strong, or not ──


PULLS = {"B.coherence": {"pull_mean": 4.0}, "C.coherence": {"pull_mean": 1.0}}


def test_both_weights_the_coefficient_and_the_ratio_of_pulls_are_named() -> None:
    made, findings = concluded(verdicts({}, {}, PULLS))
    # Chosen: B at .1; C at 1, whose coefficient is 8 / 2.
    said = named(made, "beats-digits-coherence").evidence
    assert (
        "C.coherence is matched to B.coherence at 1 (coefficient 4), the penalty has 0.1: chosen "
        "on the same grid, not of equal strength; in the verdicts it pulled 0.25 times as hard."
        in said
    )
    assert "not of equal strength" in " ".join(findings.conclusion)
    table = table_of(findings, "verdict-digits")
    assert cell_of(table, "B.coherence", "weight") == 0.1
    assert cell_of(table, "C.coherence", "weight") == 1.0
    assert cell_of(table, "C.coherence", "coefficient") == 4.0
    assert cell_of(table, "C.coherence", "pull over its B's") == 0.25
    assert math.isnan(cell_of(table, "B.coherence", "coefficient"))


def test_equal_weights_are_not_called_unequal() -> None:
    told = selected({("C.coherence", 0.1): val(0.1, 0.1)})
    found = CollapseOutcomes(SETTINGS, {**KNOWN, **told, **verdicts({}, {}, PULLS)})
    said = named(statements(found), "beats-digits-coherence").evidence
    assert "at 0.1 (coefficient 1.5), the weight of the penalty itself; pulls in" in said
    assert "not of equal strength" not in said


def test_weight_decay_of_coefficient_zero_is_called_a_copy_of_the_baseline() -> None:
    still = selected({("B.coherence", 1.0): val(0.65, 0.65, pull_mean=0.0, decay_pull_mean=2.0)})
    made, findings = concluded({**still, **verdicts({}, {})})
    assert "it is a copy of A" in named(made, "beats-digits-coherence").evidence
    table = table_of(findings, "verdict-digits")
    assert "Copies of A, for their coefficient is 0: C.coherence." in table.says
    assert cell_of(table, "C.coherence", "coefficient") == 0.0


# ── families, pairs, spread ──


def test_missing_cells_are_not_judged_yet_count_in_holms_family() -> None:
    told = without(verdicts({"B.coherence": -0.1}, {}), "verdict-digits-C.coherence")
    made, findings = concluded(told)
    first, second = primary(CollapseOutcomes(SETTINGS, {**KNOWN, **told}))
    assert (second.first, second.second, second.reason) == (
        "B.coherence",
        "C.coherence",
        "cells are missing",
    )
    found = CollapseOutcomes(SETTINGS, told | KNOWN)
    raw = stats.ttest_rel(
        *(list(found.values("digits", arm, "error").values()) for arm in ("B.coherence", "A"))
    ).pvalue
    assert first.holm == pytest.approx(2 * raw, rel=1e-9)
    assert math.isnan(second.holm)
    statement = named(made, "beats-digits-coherence")
    assert statement.holds is None
    assert "against C.coherence not judged (cells are missing)" in statement.evidence
    said = " ".join(findings.conclusion)
    assert "B.coherence is not judged against both" in said
    assert "does not beat" not in said
    table = table_of(findings, "primary")
    assert table.rows[1] == "digits: B.coherence - C.coherence"
    assert "Not judged (cells are missing): digits: B.coherence - C.coherence." in table.says


def test_a_lost_control_is_not_judged_even_where_the_other_was_not_beaten() -> None:
    told = without(verdicts({"B.coherence": 0.1}, {}), "verdict-digits-C.coherence")
    assert named(concluded(told)[0], "beats-digits-coherence").holds is None


@pytest.mark.parametrize("kept", [2, 4])
def test_fewer_than_five_pairs_are_shown_and_not_judged(kept: int) -> None:
    gone = [f"-{FRESH + seed}" for seed in range(kept, 6)]
    told = without(verdicts({"B.coherence": -0.1, "O": -0.3, "D.core": -0.3}, LOUD), *gone)
    made, findings = concluded(told)
    for name in ("beats-digits-coherence", "ordinary-start-digits", "core-digits"):
        statement = named(made, name)
        assert statement.holds is None, name
        assert f"ot judged ({kept} pairs, 5 are needed)" in statement.evidence
    table = table_of(findings, "primary")
    assert (table.values[:, 0] == kept).all()
    assert np.isfinite(table.values[:, 2:6]).all()
    assert np.isnan(table.values[:, 6]).all()
    assert f"Not judged ({kept} pairs, 5 are needed): all." in table.says


def test_five_pairs_are_judged() -> None:
    told = without(verdicts({"B.coherence": -0.1}, {}), f"-{FRESH + 5}")
    assert named(concluded(told)[0], "beats-digits-coherence").holds


def test_a_difference_without_any_spread_is_not_judged() -> None:
    same = {"A": {"error": 0.5}, "B.coherence": {"error": 0.25}, "C.coherence": {"error": 0.5}}
    told = verdicts({}, {}, same)
    statement = named(concluded(told)[0], "beats-digits-coherence")
    assert statement.holds is None
    assert "not judged (no spread over 6 pairs)" in statement.evidence
    equal = {arm: {"error": 0.5} for arm in same}
    assert named(concluded(verdicts({}, {}, equal))[0], "beats-digits-coherence").holds is False


def test_the_family_is_that_of_the_settings_whatever_is_finished() -> None:
    every = secondary(CollapseOutcomes(SETTINGS, {**KNOWN, **verdicts({}, {})}))
    some = secondary(
        CollapseOutcomes(SETTINGS, {**KNOWN, **without(verdicts({}, {}), "D.core", "C.nuclear")})
    )
    assert [(v.first, v.second) for v in every] == [(v.first, v.second) for v in some]
    assert [v.first for v in some if not v.judged] == ["B.nuclear", "C.nuclear", "D.core"]
    confirming = SETTINGS.model_copy(update={"confirm": ("recall",)})
    empty = primary(CollapseOutcomes(confirming, {}))
    assert [(v.task, v.first, v.second) for v in empty] == [
        ("digits", "B.best", "A"),
        ("digits", "B.best", "C.best"),
        ("recall", "B.best", "A"),
        ("recall", "B.best", "C.best"),
        ("recall", "B.second", "A"),
        ("recall", "B.second", "C.second"),
    ]
    assert {v.reason for v in empty} == {"cells are missing"}


# ── the setting ──


def test_an_ordinary_failing_setting_is_not_held_against_itself() -> None:
    told = searched(adam_1_2={"alarm_head_collapse": 1.0})
    found = CollapseOutcomes(SETTINGS, {**told, **CHOSEN, **verdicts({"O": -0.3}, LOUD)})
    assert found.failing("digits") == LARGE
    statement = named(statements(found), "ordinary-start-digits")
    assert statement.holds is None
    assert "it is the ordinary start" in statement.evidence
    assert {v.reason for v in secondary(found) if v.first == "O"} == {"both are the same setting"}


def test_steps_are_means_of_those_who_reached_the_level_beside_how_many_did() -> None:
    told = verdicts({"O": -0.3}, LOUD, {"A": {"steps_to_level": math.nan}})
    told[cell_name("verdict", "digits", "A-0", FRESH)] = outcome(error=0.6, steps_to_level=40.0)
    made, _ = concluded(told)
    said = named(made, "ordinary-start-digits").evidence
    assert "1 of 6 runs of A after 40 steps on average and by 6 of 6 runs of O after 10" in said
    assert "not adjusted for other comparisons" in said
    nobody = verdicts({}, LOUD, {"A": {"steps_to_level": math.nan}})
    assert (
        "by 0 of 6 runs of A and by"
        in named(concluded(nobody)[0], "ordinary-start-digits").evidence
    )


def test_the_search_table_counts_seeds_and_leaves_those_out_that_never_reached_the_level() -> None:
    told = searched(
        adam_0_01_2={"alarm_head_collapse": 1.0, "steps_to_level": math.nan, "reached": 0.0}
    )
    names = [cell_name("search", "digits", SMALL.name, seed) for seed in (0, 1)]
    told[names[0]] = outcome(alarm_head_collapse=1.0, steps_to_level=30.0, reached=1.0)
    table = table_of(conclude(SETTINGS, told), "search-digits")
    assert cell_of(table, SMALL.name, "steps_to_level") == 30.0
    assert cell_of(table, SMALL.name, "reached") == 0.5
    assert "fewer seeds" not in table.says
    findings = conclude(SETTINGS, without(told, names[1]))
    table = table_of(findings, "search-digits")
    assert cell_of(table, SMALL.name, "seeds") == 1
    assert f"With fewer seeds than the 2 asked for: {SMALL.name}." in table.says
    assert "1 of 1 search seed (2 were asked for)" in findings.conclusion[0]


def test_that_nothing_was_found_needs_the_whole_search() -> None:
    quiet = searched()
    found = named(statements(CollapseOutcomes(SETTINGS, quiet)), "collapse-found-digits")
    assert found.holds is False
    gone = cell_name("search", "digits", SMALL.name, 1)
    found = named(
        statements(CollapseOutcomes(SETTINGS, without(quiet, gone))), "collapse-found-digits"
    )
    assert found.holds is None
    assert "Search cells that are missing: 1." in found.evidence
    deep = next(s for s in starts(SETTINGS) if s.depth == 4)
    rest = without(quiet, cell_name("search", "digits", deep.name, 1))
    found = named(statements(CollapseOutcomes(SETTINGS, rest)), "collapse-found-digits")
    assert found.holds is False


def test_without_an_alarm_the_setting_is_the_slowest_and_not_failing() -> None:
    found = CollapseOutcomes(SETTINGS, {**searched(sgd_0_01_2={"curve": 9.0}), **verdicts({}, {})})
    said = " ".join(map(str, statements(found)))
    assert "the slowest setting has a larger test error" in said
    assert "failing" not in said


# ── the alarm ──


def test_that_no_penalty_silences_the_alarm_is_a_negative_result() -> None:
    loud = selected(
        {
            (arm, weight): val(0.5, 0.6, alarm_head_collapse=1.0)
            for arm in ("B.coherence", "B.nuclear")
            for weight in (0.1, 1.0)
        }
    )
    statement = named(concluded({**loud, **verdicts({}, LOUD)})[0], "alarm-digits")
    assert statement.holds is False
    assert not statement.failed
    found = CollapseOutcomes(
        SETTINGS,
        {**COLLAPSED, **without(loud, "select-digits-B.nuclear-1-1"), **verdicts({}, LOUD)},
    )
    statement = named(statements(found), "alarm-digits")
    assert statement.holds is None


def test_the_price_of_silence_is_told_with_its_interval() -> None:
    told = verdicts({"B.coherence": 0.2}, LOUD)
    found = CollapseOutcomes(SETTINGS, {**KNOWN, **told})
    statement = named(statements(found), "alarm-digits")
    assert statement.holds
    errors = [
        np.array(list(found.values("digits", arm, "error").values()))
        for arm in ("B.coherence", "A")
    ]
    d = errors[0] - errors[1]
    half = stats.t.ppf(0.975, 5) * d.std(ddof=1) / math.sqrt(6)
    expected = f"{d.mean():+.3g} [{d.mean() - half:.3g}, {d.mean() + half:.3g}] (6 pairs)"
    assert f"Test error B.coherence - A: {expected}" in statement.evidence


@pytest.mark.parametrize("arm", ["A-0", "B.coherence"])
def test_the_alarm_is_not_judged_without_cells_of_either_arm(arm: str) -> None:
    told = without(verdicts({}, LOUD), f"verdict-digits-{arm}")
    assert named(concluded(told)[0], "alarm-digits").holds is None


# ── the rest ──


def test_the_naive_statement_says_that_it_is_near_trivial() -> None:
    said = named(concluded(verdicts({}, {}))[0], "naive-digits").evidence
    assert "Near trivial: U is square, 2 × 2 for 2 heads" in said
    assert "over 6 of 6 seeds" in said


def test_tasks_that_confirm_say_whose_setting_they_have() -> None:
    settings = SETTINGS.model_copy(update={"confirm": ("recall",)})
    there = {
        name.replace("-digits-", "-recall-"): o
        for name, o in {**CHOSEN, **verdicts({"O": -0.3}, LOUD)}.items()
    }
    found = CollapseOutcomes(settings, {**KNOWN, **there})
    made = statements(found)
    words = (
        "All arms start from the failing setting of digits: on recall itself nothing was searched"
    )
    for name in ("ordinary-start", "alarm", "beats", "core"):
        name = f"{name}-recall" + ("-coherence" if name == "beats" else "")
        assert words in named(made, name).evidence
    assert not any(words in s.evidence for s in made if "digits" in s.name)
    # Both of the two best are held against both controls.
    assert [v.first for v in primary(found) if v.task == "recall"] == [
        "B.coherence", "B.coherence", "B.nuclear", "B.nuclear",
    ]  # fmt: skip


# ── figures ──


def test_only_arms_of_which_most_seeds_reach_the_level_reach_it_first() -> None:
    late = {arm: {"steps_to_level": math.nan} for arm in ("A", "C.coherence", "D.core")}
    late |= {"O": {"steps_to_level": 30.0}, "B.coherence": {"steps_to_level": 20.0}}
    told = verdicts({}, {}, late)
    # One lucky seed of A, at once, and half of those of C: not more than half.
    told[cell_name("verdict", "digits", "A-0", FRESH)] = outcome(error=0.5, steps_to_level=1.0)
    for seed in range(FRESH, FRESH + 3):
        name = cell_name("verdict", "digits", "C.coherence-1", seed)
        told[name] = outcome(error=0.5, steps_to_level=1.0)
    said = figure_of(concluded(told)[1], "loss-digits").says
    assert "reached first by B.coherence, after 20 steps; not by more than half" in said
    assert "seeds of A, C.coherence, D.core." in said
    never = {arm: {"steps_to_level": math.nan} for arm in (*late, "O", "B.coherence")}
    said = figure_of(concluded(verdicts({}, {}, never))[1], "loss-digits").says
    assert "No arm reaches half of the loss of a guess" in said


def test_validation_losses_are_drawn_by_epoch_with_smallest_and_largest() -> None:
    told = verdicts({}, {})
    for seed, last in enumerate((0.1, 0.2, 0.3, 0.4, 0.9, math.inf)):
        name = cell_name("verdict", "digits", "A-0", FRESH + seed)
        o = outcome(error=0.5)
        told[name] = Outcome(o.readings, {**o.arrays, "judged": np.array([2.0, last])})
    _, findings = concluded(told)
    figure = figure_of(findings, "validation-digits")
    line = list(figure.labels["series"]).index("A")
    np.testing.assert_allclose(drawn(findings, "validation-digits", "y")[line], [2.0, 0.3])
    np.testing.assert_allclose(drawn(findings, "validation-digits", "x"), [0.0, 1.0])
    low, middle, high = drawn(findings, "validation-range-digits", "y")[:3]
    np.testing.assert_allclose([low[1], middle[1], high[1]], [0.1, 0.3, 0.9])
    assert (
        "Smallest, median and largest over the seeds of A and of B.coherence"
        in figure_of(findings, "validation-range-digits").says
    )


def test_the_trade_off_shows_controls_the_baseline_and_the_knee() -> None:
    _, findings = concluded(verdicts({}, {}))
    figure = figure_of(findings, "trade-off-best-digits")
    assert figure.labels["series"] == ("B.coherence", "C.coherence", "A")
    # A of the search in the failing setting has .5.
    np.testing.assert_allclose(
        drawn(findings, figure.name, "y"), [[0.6, 0.65], [0.7, 0.6], [0.5, 0.5]]
    )
    np.testing.assert_allclose(drawn(findings, figure.name, "x"), [-1.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(drawn(findings, figure.name, "mark"), [0.0], atol=1e-12)
    assert "coherence is lowest at 0.1; its knee, the line, is 1" in figure.says
    assert "for accuracy is not read on validation rows" in figure.says
    decay = figure_of(findings, "trade-off-decay-digits")
    assert decay.labels["series"] == ("C.coherence", "C.nuclear", "A")


def test_errors_are_bars_and_disturbed_rows_stand_beside_themselves() -> None:
    told = verdicts({"B.coherence": -0.1}, {})
    _, findings = concluded(told)
    names = figure_of(findings, "error-digits").labels["names"]
    values = [o.value("error") for n, o in told.items() if n.startswith("verdict-digits-A-0-")]
    place = names.index("A")
    assert drawn(findings, "error-digits", "values")[place] == pytest.approx(np.mean(values))
    assert drawn(findings, "error-digits", "error")[place] == pytest.approx(stats.sem(values))
    assert figure_of(findings, "macro-f1-digits").kind == "bars"
    noisy = figure_of(findings, "error-noise-1-digits")
    assert noisy.labels["names"][:2] == ("A, undisturbed", "A, noise_1")
    np.testing.assert_allclose(drawn(findings, noisy.name, "values")[:2], [0.25, 0.5])
    assert "The first 200 test rows" in noisy.says
    assert collapse_measures._ATTACKED == DISTURBED
    table = table_of(findings, "robustness-digits")
    assert list(table.columns)[:2] == ["noise_0", "noise_0.3"]
    assert cell_of(table, "A", "noise_0") == 0.25


def test_layers_are_drawn_beside_heads_and_unknown_entries_stay_unknown() -> None:
    told = verdicts({}, {})
    for seed in range(6):
        o = told[name := cell_name("verdict", "digits", "O-0", FRESH + seed)]
        told[name] = Outcome(o.readings, {**o.arrays, "head_cka": np.full((4, 4), np.nan)})
    _, findings = concluded(told)
    names = [f.name for f in findings.figures]
    shown = [n for n in names if n.startswith("head-cka-digits")]
    assert names[names.index(shown[-1]) + 1] == "layer-cka-digits"
    figure = figure_of(findings, "layer-cka-digits")
    assert "between different layers A 0.25, O 0.25" in figure.says
    assert drawn(findings, figure.name, "values").shape == (2, 2 * len(shown))
    assert figure.labels["columns"][:3] == ("A, layer 0", "A, layer 1", "O, layer 0")
    assert np.isnan(drawn(findings, "head-cka-digits-o", "values")).all()
    assert "between different heads not known" in figure_of(findings, "head-cka-digits-o").says


# ── limits ──


@pytest.mark.parametrize("preset", ["quick", "standard", "full"])
def test_limits_name_the_sizes_of_the_preset_and_whose_rows_are_fixed(preset: str) -> None:
    settings = study_settings(STUDY, preset)
    said = " ".join(STUDY.limits(settings))
    steps = {"quick": 100, "standard": 32 * 31, "full": 80 * 31}[preset]
    assert f"trained for at most {steps} steps" in said
    assert "The rows of digits are the same for every seed" in said
    assert "an hour" not in said
