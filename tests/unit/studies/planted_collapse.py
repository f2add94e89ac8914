"""Made-up outcomes of the collapse study, with known answers."""

from __future__ import annotations

import numpy as np

from levelhead.base.records import Reading
from levelhead.studies.collapse import CollapseSettings
from levelhead.studies.collapse_measures import ALARMED, CURVES
from levelhead.studies.collapse_outcomes import FRESH, cell_name, starts
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
        arrays |= {"layer_cka": np.full((2, 2), 0.25), "judged": np.array([2.0, values["error"]])}
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


def verdicts(
    effects: dict[str, float],
    alarms: dict[str, float],
    more: dict[str, dict[str, float]] | None = None,
) -> dict[str, Outcome]:
    """Errors .5 + a seed's own noise + the effect of the arm + noise of the arm; `more` by arm."""
    weights = {"A": 0.0, "O": 0.0, "E.naive": 1.0, "B.coherence": 0.1, "B.nuclear": 1.0}
    weights |= {"C.coherence": 1.0, "C.nuclear": 0.1, "D.core": 0.5}
    draw = np.random.default_rng(0)
    common = draw.normal(0, 0.1, 6)
    found = {}
    for arm, weight in weights.items():
        errors = 0.5 + common + effects.get(arm, 0.0) + draw.normal(0, 0.01, 6)
        for seed in range(6):
            name = cell_name("verdict", "digits", f"{arm}-{weight:g}", FRESH + seed)
            told = {
                "error": errors[seed],
                "macro_f1": 1 - errors[seed],
                "noise_0": 0.25,
                "noise_0.3": 0.375,
                "noise_1": 0.5,
                "steps_to_level": 10.0,
                "alarm_head_collapse": alarms.get(arm, 0.0),
                "naive_share_largest": 1e-20,
                "naive_largest": 1e-30,
            }
            found[name] = outcome(**told | (more or {}).get(arm, {}))
    return found


def without(outcomes: dict[str, Outcome], *parts: str) -> dict[str, Outcome]:
    """Outcomes whose names hold none of `parts`."""
    return {name: o for name, o in outcomes.items() if not any(part in name for part in parts)}


def named(found: list[Statement], name: str) -> Statement:
    [statement] = [s for s in found if s.name == name]
    return statement
