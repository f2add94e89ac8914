"""The sentences say what the numbers say, also where there is little to say."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.forecasting.findings import _against, findings
from levelhead.forecasting.forecaster import SAMformer
from levelhead.forecasting.planning import plan_for, usable_season


def seasonal(rows: int, channels: int = 1, season: int = 12) -> np.ndarray:
    """A trend, a season and noise."""
    t = np.arange(rows)[:, None]
    noise = np.random.default_rng(0).normal(size=(rows, channels))
    return 100 + 0.5 * t + 10 * np.sin(2 * np.pi * t / season) + noise


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        (0.5, 1.0, "50.0 % below"),
        (2.0, 1.0, "100.0 % above"),
        (1.0002, 1.0, "equal to"),
        (42.0, 1.0, "42 times"),
        (1.0, 1e-20, "far above"),
        (0.0, 0.0, "as good as"),
    ],
)
def test_how_one_error_stands_to_another(own: float, other: float, said: str) -> None:
    assert _against(own, other) == said


def test_a_short_table_takes_the_line_and_says_that_nothing_was_tested() -> None:
    model = SAMformer(24, season=12, epochs=1, rho=0.05).fit(seasonal(144))
    assert model.choice_ is not None
    assert model.choice_.blocks == 1
    assert model.chosen_ in ("linear", "linear-revin")
    first, second, third = findings(model)
    assert "too few rows to test this" in first
    assert "with one series there is nothing to attend to" in second
    assert "1 windows (1 apart) cannot support 80 % and 95 %" in third


def test_a_coverage_that_nothing_supports_is_warned_of() -> None:
    model = SAMformer(4, 24, model="linear").fit(seasonal(200, 2))
    with pytest.warns(LevelheadWarning, match=r"27 calibration windows cannot support .* 0\.99"):
        model.predict_interval(coverage=0.99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict_interval(coverage=0.9)


def test_a_season_longer_than_the_context_is_not_clipped() -> None:
    model = SAMformer(4, 24, model="naive", season=48)
    with pytest.raises(InputError, match="season of 48 rows does not fit into the context of 24"):
        model.fit(seasonal(200))
    period, note = usable_season(SAMformer(4), 48, 24)
    assert period == 1
    assert note is not None
    assert "repeats the last value" in note


def test_one_channel_has_no_transformer_unless_it_is_asked_for() -> None:
    assert plan_for(SAMformer(4), 1, 1).models == ("naive", "linear", "linear-revin")
    assert "samformer" in plan_for(SAMformer(4), 1, 2).models
    assert plan_for(SAMformer(4, model="samformer"), 1, 1).models == ("samformer",)


def test_other_channels_are_warned_of() -> None:
    model = SAMformer(4, 24, model="linear").fit(seasonal(200, 2))
    with pytest.warns(LevelheadWarning, match="fitted on other channels: the table lacks 1"):
        model.predict(seasonal(100))


def test_notes_and_choice_come_back_from_a_file(tmp_path) -> None:
    model = SAMformer(4, epochs=1, rho=0.05).fit(seasonal(200, 2))
    model.save(tmp_path / "model")
    again = SAMformer.load(tmp_path / "model")
    assert model.choice_ is not None
    assert again.choice_ == model.choice_
    assert again.notes_ == model.notes_ != ()
