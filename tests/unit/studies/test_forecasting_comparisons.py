"""Comparisons and answers of the forecasting study, from losses that were planted."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats

from levelhead.base.records import Reading
from levelhead.evaluation.significance import holm
from levelhead.studies.forecasting import STUDY, ForecastingSettings
from levelhead.studies.forecasting_comparisons import CLAIMS, against, compared
from levelhead.studies.forecasting_conclusions import conclude
from levelhead.studies.forecasting_models import ARMS
from levelhead.studies.forecasting_outcomes import Losses
from levelhead.studies.study import Findings, Outcome, Statement

COUNT, HORIZON = 400, 6
LEVELS = {"line": 1.0, "transformer": 1.3, "samformer": 0.9, "sigma": 1.1, "temporal": 0.9}


def settings(**changes: object) -> ForecastingSettings:
    base = {"sets": ("made",), "brief": (), "horizons": (HORIZON,), "seeds": 2, "draws": 2000}
    return ForecastingSettings.model_validate(base | changes)


def noise(seed: int, size: float = 0.05, count: int = COUNT) -> np.ndarray:
    return size * np.random.default_rng(seed).normal(size=count)


def outcome(losses: np.ndarray, **numbers: float) -> Outcome:
    values = {"mse": float(losses.mean()), "mae": 0.5, "windows": float(len(losses)), **numbers}
    readings = [Reading(name, value) for name, value in values.items()]
    return Outcome(readings, {"squared": losses, "absolute": losses})


def planted(
    levels: Mapping[str, float], horizon: int = HORIZON, apart: float = 0.0
) -> dict[str, Outcome]:
    """Two seeds of each arm, `apart` from one another; a line has one."""
    cells = {}
    for place, (arm, level) in enumerate(levels.items()):
        for seed in range(1 if ARMS[arm].line else 2):
            shift = apart * (seed - 0.5) if arm == "samformer" else 0.0
            losses = level + shift + noise(10 * place + seed)
            cells[f"made-{horizon}-{arm}-{seed}"] = outcome(losses)
    return cells


def answer(found: Findings, name: str) -> Statement:
    return next(s for s in found.statements if s.name == name)


def test_a_planted_difference_is_found_with_its_size_and_adjusted_as_one_family() -> None:
    cells = planted(LEVELS)
    found = {c.claim.name: c for c in compared(Losses(settings(), cells))}
    assert set(found) == {"sam", "line", "channel", "sigma"}  # no slipped arm was planted
    mean = {
        arm: np.mean([o.arrays["squared"] for n, o in cells.items() if f"-{arm}-" in n], axis=0)
        for arm in LEVELS
    }
    for name, worse in (("sam", "transformer"), ("line", "line"), ("sigma", "sigma")):
        expected = (mean["samformer"] - mean[worse]).mean()
        assert found[name].windows.difference == pytest.approx(expected, rel=1e-12)
        assert found[name].windows.difference == pytest.approx(0.9 - LEVELS[worse], abs=0.02)
        assert found[name].holds
    assert not found["channel"].holds
    adjusted = holm({name: c.windows.p_value for name, c in found.items()})
    assert {name: c.adjusted for name, c in found.items()} == adjusted
    blocks = np.array_split(mean["samformer"] - mean["transformer"], COUNT // (2 * HORIZON))
    p = stats.ttest_1samp([block.mean() for block in blocks], 0).pvalue
    assert found["sam"].windows.p_value == pytest.approx(p, rel=1e-6)
    assert found["sam"].blocks == pytest.approx(COUNT / HORIZON)


def test_a_line_stands_beside_every_seed() -> None:
    found = {c.claim.name: c for c in compared(Losses(settings(), planted(LEVELS)))}
    seeds = found["line"].seeds
    assert seeds is not None
    assert seeds.count == 2
    cells = planted(LEVELS)
    line = cells[f"made-{HORIZON}-line-0"].value("mse")
    pairs = [cells[f"made-{HORIZON}-samformer-{s}"].value("mse") - line for s in (0, 1)]
    assert seeds.difference == pytest.approx(np.mean(pairs), rel=1e-9)


def test_seeds_of_both_signs_bear_nothing_out() -> None:
    # Seeds at .6 and 1.2: the mean is .1 below the line, and the windows are sure of it.
    found = {c.claim.name: c for c in compared(Losses(settings(), planted(LEVELS, apart=0.6)))}
    line = found["line"]
    assert line.windows.difference < -0.05
    assert line.adjusted < 0.05
    assert not line.alike
    assert not line.holds
    assert found["sam"].holds  # 1.2 is still below 1.3


def test_a_claim_in_the_wrong_direction_is_not_borne_out() -> None:
    levels = {"transformer": 0.9, "samformer": 1.3}
    [found] = compared(Losses(settings(), planted(levels)))
    assert found.adjusted < 0.05
    assert found.alike
    assert not found.holds


def test_of_the_slip_gains_are_compared() -> None:
    levels = {"transformer": 1.1, "samformer": 1.0}
    levels |= {"transformer-slip": 1.5, "samformer-slip": 1.05}
    found = conclude(settings(), planted(levels))
    [slip] = [c for c in compared(Losses(settings(), planted(levels))) if c.claim.name == "slip"]
    assert slip.windows.difference == pytest.approx(0.1 - 0.45, abs=0.02)
    assert slip.holds
    said = answer(found, "slip-explains-made")
    assert said.holds is True
    assert not said.expected
    share = int(said.evidence.split(" % of it the slip's")[0].split()[-1])
    assert share == pytest.approx(100 * (1 - 0.1 / 0.45), abs=3)
    # Held against half of the released gain, on blocks of the very windows.
    [half] = [c for c in compared(Losses(settings(), planted(levels))) if c.claim.part != 1]
    assert half.windows.difference == pytest.approx(0.1 - 0.45 / 2, abs=0.02)


def test_the_slip_explains_nothing_where_gains_are_equal() -> None:
    levels = {"transformer": 1.1, "samformer": 1.0}
    levels |= {"transformer-slip": 1.3, "samformer-slip": 1.2}
    found = conclude(settings(), planted(levels))
    assert answer(found, "slip-explains-made").holds is False
    assert "less than half at 1 of 1" in answer(found, "slip-explains-made").evidence
    assert answer(found, "slip-made").holds is False


def test_without_a_released_gain_no_share_of_it_is_told() -> None:
    # Half of the released gain, -.05, is clearly more than the correct one, -.2.
    levels = {"transformer": 1.0, "samformer": 1.2}
    levels |= {"transformer-slip": 1.0, "samformer-slip": 1.1}
    found = conclude(settings(), planted(levels))
    said = answer(found, "slip-explains-made")
    assert said.holds is None
    assert not said.failed
    assert said.evidence.startswith("Nothing can be judged: H 6 ")
    assert said.evidence.endswith(": with the slip SAM has no clear gain to explain, not judged.")
    assert "%" not in said.evidence
    assert "p " not in said.evidence.replace("slip ", "")
    # Nor is it among what is judged: SAM's own two claims are, and that is all.
    [verdicts] = [s for s in found.conclusion if "primary comparisons can be judged" in s]
    assert verdicts.startswith("2 of 3 primary comparisons can be judged: ")
    [table] = [t for t in found.tables if t.name == "comparisons"]
    judged = dict(zip(table.rows, table.values[:, table.columns.index("judged")], strict=True))
    assert judged["slip-explains, made series 6"] == 0
    assert judged["slip, made series 6"] == 1
    # But who is in the family does not depend on what the numbers turned out to be.
    claims = compared(Losses(settings(), planted(levels)))
    expected = holm({c.claim.name: c.windows.p_value for c in claims})
    assert len(expected) == 3
    assert {c.claim.name: c.adjusted for c in claims} == expected


def test_p_is_said_to_be_over_windows_and_seeds_stand_beside_it() -> None:
    cells = planted(LEVELS, apart=0.6)
    found = conclude(settings(), cells)
    line = cells[f"made-{HORIZON}-line-0"].value("mse")
    each = sorted(cells[f"made-{HORIZON}-samformer-{s}"].value("mse") - line for s in (0, 1))
    said = answer(found, "line-made").evidence
    assert said.startswith("Better at 0 of 1: H 6 -0.")
    windows, seeds = said.split(" after Holm, ")
    assert ", over test windows [-0." in windows
    assert "] and p " in windows
    assert seeds == f"over 2 seeds {each[0]:+.4f} to {each[1]:+.4f}, of both signs."
    assert answer(found, "sam-made").evidence.count("of both signs") == 0
    [verdicts] = [s for s in found.conclusion if "primary comparisons can be judged" in s]
    assert verdicts.startswith("4 of 4 primary comparisons can be judged: 1 borne out (sam (")
    assert verdicts.endswith(
        ", the opposite of 0, 3 neither way. For either, p over test windows after Holm must be at "
        "most 0.05, and the difference of every seed must have the same sign."
    )


def test_the_made_series_is_called_so() -> None:
    found = conclude(settings(), planted(LEVELS))
    assert answer(found, "sam-made").claim.startswith("On the made series SAM makes ")
    assert answer(found, "slip-made").claim.startswith("On the made series SAM gains ")
    shown = [*found.conclusion, *(s.claim + s.evidence for s in found.statements)]
    shown += [f.title + f.says for f in found.figures]
    shown += [name for t in found.tables for name in (*t.rows, *t.columns)]
    assert not [text for text in shown if re.search(r"\bmade \d|[Oo]n made\b", text)]
    said = STUDY.limits(settings())
    assert said[0].startswith("The made series is synthetic")
    assert not any("synthetic" in s for s in STUDY.limits(settings(sets=("ETTh1",))))


def test_the_mean_and_the_worst_of_a_start_from_the_line_are_told() -> None:
    cells = {
        f"made-{HORIZON}-from-line-{seed}": outcome(
            1 + noise(seed), line_validation=0.5, first_validation=0.5, validation=0.5 * kept
        )
        for seed, kept in enumerate((0.985, 0.915))
    }
    said = answer(conclude(settings(), cells), "never-worse")
    assert said.holds is True
    assert said.evidence == (
        "Validation error beside the line's, over 2 trainings: mean -5 %, in the worst of them "
        "-1.5 %."
    )


def test_a_share_outside_of_a_whole_is_not_told() -> None:
    # A correct RevIN loses with SAM what the released code gains: "200 %" is no share.
    levels = {"transformer": 1.0, "samformer": 1.2}
    levels |= {"transformer-slip": 1.2, "samformer-slip": 1.0}
    said = answer(conclude(settings(), planted(levels)), "slip-explains-made")
    assert said.holds is True
    assert "%" not in said.evidence


def test_what_the_slip_explains_is_not_judged_without_its_cells_or_with_few_blocks() -> None:
    levels = {"transformer": 1.1, "samformer": 1.0}
    assert answer(conclude(settings(), planted(levels)), "slip-explains-made").holds is None
    levels |= {"transformer-slip": 1.5, "samformer-slip": 1.05}
    long = planted({**levels, "samformer": 0.5}, horizon=100)
    alone = conclude(settings(horizons=(100,)), long)
    assert answer(alone, "slip-explains-made").holds is None
    assert "clearly" not in answer(alone, "slip-explains-made").evidence
    both = answer(
        conclude(settings(horizons=(6, 100)), planted(levels) | long), "slip-explains-made"
    )
    assert both.holds is True  # by the one horizon that can be judged
    assert both.evidence.startswith("More than half at 1 of 1: H 6 ")


def test_arms_with_the_slip_stand_in_no_ranking() -> None:
    levels = {"line": 1.0, "transformer": 1.1, "samformer": 1.05}
    levels |= {"transformer-slip": 0.5, "samformer-slip": 0.4}
    found = conclude(settings(), slipped_numbers(planted(levels)))
    assert not any("lowest samformer-slip" in sentence for sentence in found.conclusion)
    assert any("lowest line" in sentence for sentence in found.conclusion)
    for table in found.tables:
        if table.name in ("mse", "mae", "against-line"):
            assert not any("slip" in row for row in table.rows)
        if table.best:
            assert table.name in ("mse", "mae")
            assert "mark" not in table.says  # the report says of its own accord what is bold
    bars = [figure for figure in found.figures if figure.kind == "bars"]
    assert len(bars) == 2
    assert not any("slip" in name for figure in bars for name in figure.labels["names"])
    [spread] = [table for table in found.tables if table.name == "spread"]
    assert "samformer-slip" in spread.rows


def test_seeds_that_agree_to_the_bit_do_not_deviate() -> None:
    losses = 0.1 + noise(0)
    cells = {f"made-{HORIZON}-samformer-{seed}": outcome(losses) for seed in range(3)}
    assert np.std([losses.mean()] * 3, ddof=1) > 0  # a mean is rounded
    found = conclude(settings(seeds=3, arms=("samformer",)), cells)
    [spread] = [table for table in found.tables if table.name == "spread"]
    assert spread.values.tolist() == [[0.0]]
    [bars] = [figure for figure in found.figures if figure.name == "mse.made"]
    assert found.arrays[bars.arrays["error"]].tolist() == [0.0]


def test_patience_that_ended_with_the_limit_is_no_stop() -> None:
    cells = planted(LEVELS)
    waited = {
        name: outcome(o.arrays["squared"], epochs=3.0, best_epoch=1.0) for name, o in cells.items()
    }
    for patience, stopped in ((2, False), (3, True), (0, True)):
        given = settings(**CAPPED, patience=patience)
        said = conclude(given, waited).conclusion
        assert any("Stopped before" in s for s in said) is stopped


def test_equal_errors_and_trainings_that_kept_their_start_are_said() -> None:
    losses = 0.1 + noise(0)
    started = {"line_validation": 0.5, "first_validation": 0.5, "validation": 0.5}
    cells = {
        f"made-{HORIZON}-line-0": outcome(losses),
        f"made-{HORIZON}-from-line-0": outcome(losses, **started, best_epoch=0.0),
        f"made-{HORIZON}-transformer-0": outcome(losses + 1, best_epoch=0.0),
        f"made-{HORIZON}-transformer-1": outcome(losses + 1, best_epoch=4.0),
    }
    said = conclude(settings(), cells).conclusion
    assert any("lowest line and from-line (0." in s for s in said)
    assert any(
        "at 1 set-horizon pairs: line at 1, from-line at 1 (equal ones count for each)." in s
        for s in said
    )
    [kept] = [s for s in said if s.startswith("Kept the weights they began with")]
    assert f"transformer (made series {HORIZON}) in 1 of 2 seeds" in kept
    assert f"from-line (made series {HORIZON}) in 1 of 1 seeds" in kept


def test_a_start_from_the_line_that_the_grid_leaves_out_is_not_missed() -> None:
    cells = planted({"line": 1.0, "transformer": 1.1})
    names = {
        horizons: {s.name for s in conclude(settings(other_horizons=horizons), cells).statements}
        for horizons in ((HORIZON,), (HORIZON + 1,))
    }
    assert "starts-equal" in names[(HORIZON,)]
    assert "starts-equal" not in names[(HORIZON + 1,)]


def test_validation_curves_begin_after_the_first_epoch() -> None:
    found = conclude(settings(**CAPPED), curved(planted(LEVELS), 4))
    [drawn] = [figure for figure in found.figures if figure.name == "validation_curve.made"]
    assert found.arrays[drawn.arrays["x"]].tolist() == list(range(1, 10))
    rows = dict(zip(drawn.labels["series"], found.arrays[drawn.arrays["y"]], strict=True))
    assert rows["temporal"][:3].tolist() == [0.8, 0.8, 0.5]
    assert np.isnan(rows["temporal"][3:]).all()
    assert "from epoch 1 on" in drawn.says


def slipped_numbers(cells: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """The same with the reading that slipped arms have besides."""
    return {
        name: outcome(o.arrays["squared"], mse_correct=0.7) if "slip" in name else o
        for name, o in cells.items()
    }


def test_the_slip_table_has_the_gain_of_each_way_of_judging() -> None:
    levels = {"transformer": 1.1, "samformer": 1.0}
    levels |= {"transformer-slip": 1.5, "samformer-slip": 1.05}
    found = conclude(settings(), slipped_numbers(planted(levels)))
    [table] = [t for t in found.tables if t.name == "slip"]
    assert table.rows == [
        f"made series {HORIZON}, {how}" for how in ("correct", "released", "put right")
    ]
    np.testing.assert_allclose(table.values[:2], [[1.1, 1.0, 0.1], [1.5, 1.05, 0.45]], atol=0.02)
    np.testing.assert_allclose(table.values[2], [0.7, 0.7, 0.0], atol=1e-12)
    np.testing.assert_allclose(table.values[:, 2], table.values[:, 0] - table.values[:, 1])


def test_answers_count_horizons() -> None:
    cells = planted(LEVELS) | planted({**LEVELS, "samformer": 1.05}, horizon=12)
    found = conclude(settings(horizons=(6, 12)), cells)
    line = answer(found, "line-made")
    assert line.holds is False
    assert line.claim.endswith("(at more than half of what can be judged of horizons 6 and 12).")
    assert line.evidence.startswith("Better at 1 of 2, worse at 1 of 2: H 6 -0.")
    assert answer(found, "sam-made").holds is True
    assert answer(found, "slip-made").holds is None
    assert all(not answer(found, f"{c.name}-made").failed for c in CLAIMS)
    [said] = [s for s in found.conclusion if "primary comparisons can be judged" in s]
    assert said.startswith("8 of 8 primary comparisons")
    borne_out, opposite = said.split("the opposite of")
    assert "line (made series 6)" in borne_out
    assert "line (made series 12)" in opposite


def test_one_horizon_is_not_called_more_than_half() -> None:
    line = answer(conclude(settings(horizons=(6, 12)), planted(LEVELS)), "line-made")
    assert line.claim.endswith("(tried at horizon 6 alone).")


def test_with_one_shared_seed_nothing_is_judged() -> None:
    cells = {k: o for k, o in planted(LEVELS).items() if k.endswith("-0") or "samf" in k}
    found = {c.claim.name: c for c in compared(Losses(settings(), cells))}
    sam = found["sam"]
    assert sam.alike  # of itself, which is why it does not count
    assert not sam.judged
    assert not sam.holds
    assert np.isnan(sam.adjusted)
    assert sam.windows.p_value < 1e-6
    assert found["line"].holds  # the line is every seed's
    said = answer(conclude(settings(), cells), "sam-made")
    assert said.holds is None
    assert "(one seed: not judged)" in said.evidence


def curved(cells: dict[str, Outcome], best: int) -> dict[str, Outcome]:
    """Temporal attention stopped after 3 epochs; SAMformer went on to 9, kept those of `best`."""
    made = dict(cells)
    for name, found in cells.items():
        epochs = 3 if "temporal" in name else 9 if "samformer" in name else None
        if epochs is None:
            continue
        curve = np.full(epochs + 1, 0.8)
        curve[3] = 0.5 if "temporal" in name else 0.6
        kept = 3.0 if "temporal" in name else float(best)
        curve[int(kept)] = min(curve[int(kept)], 0.55)
        again = outcome(found.arrays["squared"], epochs=float(epochs), best_epoch=kept)
        arrays = {**again.arrays, "curve.validation_curve": curve}
        made[name] = Outcome(again.readings, arrays)
    return made


CAPPED = {"costly_epochs": 3, "epochs": 50}


def test_a_training_that_a_limit_stopped_bears_nothing_out() -> None:
    cells = curved(planted({**LEVELS, "temporal": 1.2}), best=7)
    found = conclude(settings(**CAPPED), cells)
    said = answer(found, "channel-made")
    assert said.holds is None
    assert "temporal stopped at 3 of 50 epochs: not judged" in said.evidence
    assert (
        "lowest validation error within 3 epochs: samformer 0.6000, temporal 0.5000; test errors "
        "of these epochs are not stored"
    ) in said.evidence
    assert answer(found, "sam-made").holds is True
    assert any("temporal (made series 6) at 3." in sentence for sentence in found.conclusion)
    # The same trainings, ended by patience: the limit is the study's own.
    free = answer(conclude(settings(epochs=50, costly_epochs=50), cells), "channel-made")
    assert free.holds is True
    assert "epochs" not in free.evidence


def test_weights_that_both_kept_in_the_epochs_of_both_are_compared_at_equal_epochs() -> None:
    cells = curved(planted({**LEVELS, "temporal": 1.2}), best=2)
    said = answer(conclude(settings(**CAPPED), cells), "channel-made").evidence
    assert "samformer 0.5500, temporal 0.5000; the weights that were kept are of these" in said


def test_without_curves_it_is_said_that_equal_epochs_cannot_be_compared() -> None:
    cells = curved(planted(LEVELS), best=7)
    name = f"made-{HORIZON}-samformer-1"
    arrays = {k: a for k, a in cells[name].arrays.items() if not k.startswith("curve")}
    cells[name] = Outcome(cells[name].readings, arrays)
    said = answer(conclude(settings(**CAPPED), cells), "channel-made").evidence
    assert "(what would show it at equal numbers of epochs is not stored)" in said


def test_brief_sets_are_stopped_for_every_arm() -> None:
    cells = curved(planted({**LEVELS, "temporal": 1.2}), best=7)
    given = settings(**{**CAPPED, "brief": ("made",), "costly_epochs": 9})
    said = answer(conclude(given, cells), "line-made")
    assert said.holds is None
    assert "(samformer stopped at 9 of 50 epochs: not judged)" in said.evidence


def test_with_few_blocks_of_the_horizon_nothing_is_judged() -> None:
    cells = planted(LEVELS) | planted(LEVELS, horizon=100)  # 400 windows: four blocks
    given = settings(horizons=(6, 100))
    found = conclude(given, cells)
    line = answer(found, "line-made")
    assert line.holds is True
    assert line.evidence.startswith("Better at 1 of 1: H 6 -0.")
    assert "(2 of the 5 blocks of 2H that are needed: not judged)" in line.evidence
    few = [c for c in compared(Losses(given, cells)) if c.place[1] == 100]
    assert not any(c.holds for c in few)
    assert all(c.diebold_mariano is None and np.isnan(c.adjusted) for c in few)
    alone = conclude(settings(horizons=(100,)), cells)
    assert answer(alone, "line-made").holds is None
    difference = against(Losses(given, cells), ("made", 100), "samformer", "line")
    assert difference is not None
    assert np.isnan([difference.low, difference.high]).all()
    # What cannot be judged does not count among the comparisons that p is adjusted for.
    both = {c.claim.name: c.adjusted for c in compared(Losses(given, cells)) if c.judged}
    one = {c.claim.name: c.adjusted for c in compared(Losses(settings(), planted(LEVELS)))}
    assert both == one


def test_unequal_test_windows_fail_the_study() -> None:
    cells = planted(LEVELS)
    assert answer(conclude(settings(arms=tuple(LEVELS)), cells), "same-windows").holds is True
    del cells[f"made-{HORIZON}-samformer-0"]
    cells[f"made-{HORIZON}-sigma-1"] = outcome(noise(3, count=COUNT - 1) + 1.0)
    kept = {k: o for k, o in cells.items() if "sigma-0" not in k and "samformer" not in k}
    said = answer(conclude(settings(arms=tuple(LEVELS)), kept), "same-windows")
    assert said.failed
    assert "399 or 400" in said.evidence


@pytest.mark.parametrize(
    ("first", "kept", "fails"),
    [
        (0.5, 0.45, set()),
        (0.5, 0.5, set()),
        (0.51, 0.45, {"starts-equal"}),
        (0.5, 0.51, {"never-worse"}),
        (float("nan"), float("nan"), {"starts-equal", "never-worse"}),
    ],
)
def test_what_must_hold_of_a_start_from_the_line(
    first: float, kept: float, fails: set[str]
) -> None:
    numbers = {"line_validation": 0.5, "first_validation": first, "validation": kept}
    cells = {f"made-{HORIZON}-from-line-0": outcome(1 + noise(0), **numbers)}
    found = conclude(settings(), cells)
    assert {s.name for s in found.statements if s.failed} == fails


@pytest.mark.parametrize(("level", "fails"), [(0.3639, False), (0.38, True)])
def test_the_line_must_have_its_known_error(level: float, fails: bool) -> None:
    losses = np.full(2785, level)
    losses[:2] += 0.01, -0.01
    cells = {"ETTh1-96-line-0": outcome(losses)}
    given = settings(sets=("ETTh1",), horizons=(96,), arms=("line",))
    assert answer(conclude(given, cells), "known-line").failed is fails
    other = given.model_copy(update={"context": 96})
    assert not [s for s in conclude(other, cells).statements if s.name == "known-line"]


def test_nothing_finished_is_said_and_fails() -> None:
    found = conclude(settings(), {})
    assert answer(found, "same-windows").holds is None
    assert answer(found, "same-windows").failed
    assert answer(found, "line-made").holds is None
    assert found.tables == []


def test_a_difference_to_the_line_is_an_interval_around_it() -> None:
    losses = Losses(settings(), planted(LEVELS))
    found = against(losses, ("made", HORIZON), "transformer", "line")
    assert found is not None
    assert found.low < found.difference < found.high
    assert found.difference == pytest.approx(0.3, abs=0.02)
    assert against(losses, ("made", HORIZON), "both", "line") is None


def test_every_figure_of_planted_losses_names_what_it_shows() -> None:
    found = conclude(settings(), planted(LEVELS))
    bars = {f.name: f for f in found.figures if f.kind == "bars"}
    assert set(bars) == {"mse.made", "line.made"}
    values = found.arrays[bars["mse.made"].arrays["values"]]
    names = bars["mse.made"].labels["names"]
    assert values[names.index("samformer")] == pytest.approx(0.9, abs=0.02)
    error = found.arrays[bars["mse.made"].arrays["error"]]
    # One seed has no interval, rather than one of no width.
    assert np.isnan(error[names.index("line")])
    assert error[names.index("samformer")] > 0
    assert "samformer is lowest" in bars["mse.made"].says or "temporal" in bars["mse.made"].says
    assert list(names) == ["line", "transformer", "samformer", "sigma", "temporal"]


def test_bars_without_any_interval_have_no_array_for_it() -> None:
    cells = {k: o for k, o in planted(LEVELS, horizon=100).items() if k.endswith("-0")}
    found = conclude(settings(horizons=(100,)), cells)
    bars = [figure for figure in found.figures if figure.kind == "bars"]
    assert [set(figure.arrays) for figure in bars] == [{"values"}, {"values"}]


def test_effects_and_intervals_stand_before_p() -> None:
    found = conclude(settings(), planted(LEVELS))
    for name in ("comparisons", "comparisons-seeds"):
        [table] = [table for table in found.tables if table.name == name]
        assert list(table.columns[:5]) == ["difference", "low", "high", "effect", "p"]
    [table] = [table for table in found.tables if table.name == "comparisons"]
    [sam] = [c for c in compared(Losses(settings(), planted(LEVELS))) if c.claim.name == "sam"]
    row = table.values[table.rows.index(f"sam, made series {HORIZON}")]
    shown = dict(zip(table.columns, row, strict=True))
    assert shown["p Holm"] == sam.adjusted
    assert (shown["blocks of 2H"], shown["windows"], shown["judged"]) == (33, COUNT, 1)
    assert shown["low"] < shown["difference"] < shown["high"]
    assert shown["bootstrap low"] < shown["difference"] < shown["bootstrap high"]


def test_the_names_of_the_study_are_of_its_arms() -> None:
    assert {arm for claim in CLAIMS for arm in claim.arms} <= set(ARMS)
    assert STUDY.settings is ForecastingSettings
