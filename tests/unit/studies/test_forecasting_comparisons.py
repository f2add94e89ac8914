"""Comparisons and answers of the forecasting study, from losses that were planted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from levelhead.base.records import Reading
from levelhead.evaluation.significance import holm
from levelhead.studies.forecasting import STUDY, ForecastingSettings
from levelhead.studies.forecasting_comparisons import CLAIMS, Losses, against, compared
from levelhead.studies.forecasting_conclusions import conclude
from levelhead.studies.forecasting_models import ARMS
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
    assert adjusted["sam"] == pytest.approx(4 / 2000)


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
    share = int(said.evidence.split("; ")[1].split(" %")[0])
    assert share == pytest.approx(100 * (1 - 0.1 / 0.45), abs=3)


def test_the_slip_explains_nothing_where_gains_are_equal() -> None:
    levels = {"transformer": 1.1, "samformer": 1.0}
    levels |= {"transformer-slip": 1.3, "samformer-slip": 1.2}
    found = conclude(settings(), {k: o for k, o in planted(levels).items() if k[-1] == "0"})
    assert answer(found, "slip-explains-made").holds is False
    assert answer(found, "slip-made").holds is False


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
    assert table.rows == [f"made {HORIZON}, {how}" for how in ("correct", "released", "put right")]
    np.testing.assert_allclose(table.values[:2], [[1.1, 1.0, 0.1], [1.5, 1.05, 0.45]], atol=0.02)
    np.testing.assert_allclose(table.values[2], [0.7, 0.7, 0.0], atol=1e-12)
    np.testing.assert_allclose(table.values[:, 2], table.values[:, 0] - table.values[:, 1])


def test_answers_count_horizons() -> None:
    cells = planted(LEVELS) | planted({**LEVELS, "samformer": 1.05}, horizon=12)
    found = conclude(settings(horizons=(6, 12)), cells)
    line = answer(found, "line-made")
    assert line.holds is False
    assert line.evidence.startswith("At 1 of 2: H 6 -0.")
    assert answer(found, "sam-made").holds is True
    assert answer(found, "slip-made").holds is None
    assert all(not answer(found, f"{c.name}-made").failed for c in CLAIMS)


def test_with_few_blocks_of_the_horizon_nothing_is_judged() -> None:
    cells = planted(LEVELS) | planted(LEVELS, horizon=100)  # 400 windows: four blocks
    given = settings(horizons=(6, 100))
    found = conclude(given, cells)
    line = answer(found, "line-made")
    assert line.holds is True
    assert line.evidence.startswith("At 1 of 1: H 6 -0.")
    assert "(4.0 blocks of H, not judged)" in line.evidence
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
    assert "samformer is lowest" in bars["mse.made"].says or "temporal" in bars["mse.made"].says
    assert list(names) == ["line", "transformer", "samformer", "sigma", "temporal"]


def test_the_names_of_the_study_are_of_its_arms() -> None:
    assert {arm for claim in CLAIMS for arm in claim.arms} <= set(ARMS)
    assert STUDY.settings is ForecastingSettings
