"""The forecasting study: its grid, its settings, its data, the same bytes twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from levelhead.base.errors import InputError
from levelhead.data.generators import followers
from levelhead.studies.forecasting import STUDY, ForecastingSettings
from levelhead.studies.forecasting_conclusions import KNOWN
from levelhead.studies.forecasting_data import MADE, posed, require, series
from levelhead.studies.running import run_study, study_settings
from levelhead.studies.study import Cell

SMALL = {"arms": "line,transformer,samformer", "epochs": 1, "horizons": "6", "seeds": 1}


def cells(tmp_path: Path, preset: str = "standard", **overrides: object) -> list[Cell]:
    for name in ("ETTh1", "exchange_rate", "weather"):
        (tmp_path / f"{name}.csv").touch()
    given = study_settings(STUDY, preset, {"data": str(tmp_path), **overrides})
    return list(STUDY.cells(given))


def test_the_standard_grid(tmp_path: Path) -> None:
    found = cells(tmp_path)
    counts = Counter((c.given["set"], c.given["horizon"], c.given["arm"]) for c in found)
    for name in ("ETTh1", "exchange_rate"):
        for horizon in (96, 192, 336, 720):
            assert counts[name, horizon, "transformer"] == counts[name, horizon, "line"] * 3 == 3
        assert counts[name, 96, "samformer"] == 3 + 4  # and four other radii
        assert [counts[name, h, "both"] for h in (96, 192, 336, 720)] == [3, 3, 3, 3]
        assert [counts[name, h, "temporal"] for h in (96, 192)] == [1, 0]
    brief = {arm for (name, _, arm), n in counts.items() if name == "weather" and n == 1}
    assert {h for name, h, _ in counts if name == "weather"} == {96}
    assert brief == set(ForecastingSettings().arms) - {"temporal"}
    assert len({c.name for c in found}) == len(found)


def test_the_full_grid_leaves_nothing_out(tmp_path: Path) -> None:
    counts = Counter(
        (c.given["set"], c.given["horizon"], c.given["arm"])
        for c in cells(tmp_path, "full", rhos="")
    )
    settings = ForecastingSettings()
    assert set(counts) == {
        (name, horizon, arm)
        for name in settings.sets
        for horizon in settings.horizons
        for arm in settings.arms
    }
    assert set(counts.values()) == {1, 3, 5}


def test_what_takes_longest_begins_first(tmp_path: Path) -> None:
    found = cells(tmp_path)
    assert [c.given["arm"] for c in found[:2]] == ["temporal", "temporal"]
    assert found[2].given["set"] == "weather"


def test_costly_cells_end_after_fewer_epochs(tmp_path: Path) -> None:
    settings = {"arms": "transformer", "horizons": "6", "seeds": 1, "brief": "made"}
    small = {**settings, "epochs": 3, "costly_epochs": 2, "patience": 0}
    run_study(STUDY, tmp_path / "brief", preset="quick", overrides=small, show_progress=False)
    run_study(
        STUDY,
        tmp_path / "whole",
        preset="quick",
        overrides={**small, "brief": ""},
        show_progress=False,
    )
    for folder, epochs in (("brief", 2), ("whole", 3)):
        table = (tmp_path / folder / "tables" / "measures.csv").read_text().splitlines()
        columns = table[0].split(",")
        assert float(table[1].split(",")[columns.index("epochs") - len(columns)]) == epochs


def test_radii_are_given_to_samformer_alone(tmp_path: Path) -> None:
    found = {c.name: c.given for c in cells(tmp_path)}
    assert found["ETTh1-96-rho0.05-0"]["rho"] == 0.05
    assert found["ETTh1-96-samformer-0"]["rho"] == 0.7
    assert not any("rho" in name for name in found if name.startswith("weather"))


def test_missing_files_are_one_sentence_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "ETTh1.csv").touch()
    with pytest.raises(InputError) as raised:
        STUDY.cells(ForecastingSettings(data=str(tmp_path)))
    said = str(raised.value)
    assert "does not hold exchange_rate.csv, weather.csv" in said
    assert "levelhead data get exchange_rate weather" in said
    assert "--set data=FOLDER" in said


def test_without_a_folder_the_cache_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"levelhead data get ETTh1'"):
        require(["ETTh1", MADE], "")
    (tmp_path / "ETTh1.csv").touch()
    require(["ETTh1", MADE], "")


def test_a_file_of_the_cache_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path))
    (tmp_path / "ETTh1.csv").write_text("date,a\n2020-01-01,1\n")
    with pytest.raises(ValueError, match="not the expected file"):
        series("ETTh1")


def test_a_file_of_the_users_folder_is_read_as_it_stands(tmp_path: Path) -> None:
    values = followers(120, channels=2, lag=3, seed=1).T
    rows = [f"2020-01-01,{a},{b}" for a, b in values.tolist()]
    (tmp_path / "exchange_rate.csv").write_text("\n".join(["date,a,b", *rows]) + "\n")
    np.testing.assert_allclose(series("exchange_rate", str(tmp_path)), values.T, rtol=1e-12)
    problem, test = posed("exchange_rate", str(tmp_path), 10, 4)
    assert problem.train_rows == (0, 84)
    assert len(test) == 24 - 3


def test_rows_that_are_too_few_are_named() -> None:
    with pytest.raises(InputError, match="900 rows of made are too few for context 24"):
        posed(MADE, "", 24, 91)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("arms", "line,sam", "'sam' is not one of line"),
        ("sets", "ETTh9", "(?i)'ETTh9' is not one of ETTh1"),
    ],
)
def test_unknown_arms_and_sets_are_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        study_settings(STUDY, "quick", {name: value})


def test_the_same_settings_give_the_same_bytes(tmp_path: Path) -> None:
    for place in ("one", "two"):
        result = run_study(
            STUDY, tmp_path / place, preset="quick", overrides=SMALL, show_progress=False
        )
        assert not result.failed
        assert result.left_out == ()
    first, second = (tmp_path / place for place in ("one", "two"))
    names = sorted(path.name for path in (first / "tables").iterdir())
    assert {"mse.csv", "comparisons.csv", "against-line.csv", "measures.csv"} <= set(names)
    for name in names:
        one, two = ((f / "tables" / name).read_bytes() for f in (first, second))
        assert one == two
    assert (first / "statements.json").read_bytes() == (second / "statements.json").read_bytes()
    notes = " ".join(result.run.notes())
    assert "Lowest mean test error at 1 set-horizon pairs" in notes
    assert "One seed says nothing about the spread" in notes


def test_limits_say_which_arms_run_less_and_which_trainings_are_shorter() -> None:
    assert not any("Left out at" in s for s in STUDY.limits(ForecastingSettings()))
    said = STUDY.limits(ForecastingSettings(other_horizons=(96,)))
    assert "Temporal attention is left out at horizons 192, 336, 720 and has 1 of 3 seeds." in said
    assert (
        "Left out at horizons 192, 336, 720: random, sigma, both, from-line, identity, "
        "transformer-slip, samformer-slip."
    ) in said
    assert any(
        s.startswith("At most 20 epochs for temporal attention and weather, at most 300 for all")
        for s in said
    )
    assert any("6 to 7 %" in s for s in said)
    assert any("timings.csv" in s for s in said)
    assert not any("hour" in s for s in said)


def test_limits_say_nothing_that_the_full_study_has_not() -> None:
    said = STUDY.limits(study_settings(STUDY, "full"))
    assert "Temporal attention has 3 of 5 seeds." in said
    assert "All trainings have at most 300 epochs." in said
    assert not any("eft out at" in s or "One seed" in s for s in said)
    given = study_settings(STUDY, "standard", {"brief": "", "temporal_seeds": 3})
    said = STUDY.limits(given)
    assert any(s.startswith("At most 20 epochs for temporal attention, at most 300") for s in said)
    assert "Temporal attention is left out at horizons 192, 336, 720." in said
    alone = STUDY.limits(study_settings(STUDY, "standard", {"arms": "line", "brief": ""}))
    assert not any("emporal" in s for s in alone)


def test_a_limit_of_epochs_is_told_from_the_trainings_themselves(tmp_path: Path) -> None:
    overrides = {"arms": "transformer,samformer,temporal", "horizons": "6", "temporal_seeds": 2}
    overrides |= {"epochs": 4, "costly_epochs": 2, "patience": 0}
    result = run_study(STUDY, tmp_path, preset="quick", overrides=overrides, show_progress=False)
    statements = json.loads((tmp_path / "statements.json").read_text())
    [channel] = [s for s in statements if s["name"] == "channel-made"]
    assert not result.failed
    assert channel["holds"] is None
    assert "temporal stopped at 2 of 4 epochs" in channel["evidence"]
    assert "lowest validation error within 2 epochs: samformer 0." in channel["evidence"]


WITH_INTERCEPT = [("ETTh1", 336, 1.0, 0.4184), ("ETTh1", 720, 0.1, 0.4367)]
"""Set, horizon, penalty, test error: what the line was once taken to have."""


@pytest.mark.parametrize(
    ("name", "horizon", "penalty", "error", "intercept"),
    [(*place, *known, False) for place, known in KNOWN.items()]
    + [(*known, True) for known in WITH_INTERCEPT],
)
def test_known_errors_are_those_of_a_ridge_that_is_written_out(
    name: str, horizon: int, penalty: float, error: float, intercept: bool, real_data: Path
) -> None:
    table = np.loadtxt(real_data / f"{name}.csv", delimiter=",", skiprows=1, usecols=range(1, 8))
    month, context = 30 * 24, 512  # 12 months of training, 4 of validation, 4 of test
    training, test, end = 12 * month, 16 * month, 20 * month
    table = (table - table[:training].mean(0)) / table[:training].std(0)

    def windows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        cut = np.lib.stride_tricks.sliding_window_view(table[start:stop], context + horizon, axis=0)
        rows = cut.reshape(-1, context + horizon)
        rows = rows - rows[:, context - 1 : context]
        return rows[:, :context], rows[:, context:]

    x, y = windows(0, training)
    x_mean, y_mean = (x.mean(0), y.mean(0)) if intercept else (0.0, 0.0)
    x, y = x - x_mean, y - y_mean
    head = np.linalg.solve(x.T @ x + penalty * len(x) * np.eye(context), x.T @ y)
    x, y = windows(test - context, end)
    missed = (x - x_mean) @ head + y_mean - y
    assert np.mean(missed**2) == pytest.approx(error, abs=5e-5 if intercept else 1e-5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("horizons", "0", "1 or more"),
        ("other_horizons", "-1", "1 or more"),
        ("horizons", "", "at least one"),
        ("sets", "", "at least one"),
        ("arms", "", "at least one"),
        ("horizons", "6,6", "twice"),
        ("rhos", "-1", "above 0"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_by_name(name: str, value: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        study_settings(STUDY, "quick", {name: value})
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)
