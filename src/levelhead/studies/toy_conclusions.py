"""What follows from the cells of the toy study: tables and computed sentences.

"Excess" is a validation loss above the oracle's, the least-squares line of the same data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from levelhead.studies.study import Findings, Outcome, Table
from levelhead.studies.toy_figures import figures
from levelhead.studies.toy_model import ARMS
from levelhead.studies.toy_outcomes import ToyOutcomes, mean_and_half
from levelhead.studies.toy_statements import statements

__all__ = ["conclude"]

_MEASURES = (
    "loss",
    "training_loss",
    "loss_identity",
    "loss_uniform",
    "own",
    "entropy",
    "rank",
    "nuclear",
    "leak",
    "attended",
    "qk_norm",
    "vo_norm",
    "path_norm",
    "lambda_max",
    "sam_sharpness",
)
_CANDIDATES = ("entropy", "own", "rank", "nuclear", "lambda_max", "leak", "qk_norm", "path_norm")
_INTERVENTIONS = tuple(name for name, arm in ARMS.items() if ":" in arm.says)


def conclude(settings: Any, outcomes: Mapping[str, Outcome]) -> Findings:
    """Findings of the study; see the top of this file."""
    found = ToyOutcomes(settings, outcomes)
    tables = [_final_table(found, init) for init in settings.inits]
    tables += [_difference_table(found), _optimiser_table(found), _count_table(found)]
    tables += [_proposition_table(found)]
    separation = _separation(found)
    if separation:
        tables.append(_separation_table(separation))
    arrays, drawn = figures(found)
    shown = [table for table in tables if table.values.size]
    return Findings(shown, arrays, drawn, statements(found), _sentences(found, separation))


# ── tables ──


def _final_table(found: ToyOutcomes, init: str) -> Table:
    arms = found.arms(init)
    columns = ["seeds", "excess", "± 95 %", *_MEASURES]
    values = np.full((len(arms), len(columns)), np.nan)
    oracle = found.oracle()
    for row, arm in enumerate(arms):
        losses = found.final(arm, init, "loss")
        excess = np.array([v - oracle[s] for s, v in losses.items() if s in oracle])
        values[row, 0] = len(losses)
        values[row, 1:3] = mean_and_half(excess)
        for column, name in enumerate(_MEASURES, 3):
            numbers = list(found.final(arm, init, name).values())
            values[row, column] = float(np.mean(numbers)) if numbers else math.nan
    return Table(
        f"final-{init}",
        f"After training, {init} limits",
        "Means over seeds of the last epoch; excess is above the least-squares oracle.",
        arms,
        columns,
        values,
        row_axis="arm",
    )


def _difference_table(found: ToyOutcomes) -> Table:
    """Every arm against the transformer, within seeds, first initialisation."""
    init = found.settings.inits[0]
    base = found.final("transformer", init, "loss")
    arms = [a for a in found.arms(init) if a != "transformer"]
    values = np.full((len(arms), 4), np.nan)
    for row, arm in enumerate(arms):
        losses = found.final(arm, init, "loss")
        pairs = np.array([losses[s] - base[s] for s in losses if s in base])
        mean, half = mean_and_half(pairs)
        values[row] = len(pairs), mean, mean - half, mean + half
    return Table(
        "against-transformer",
        "Validation loss minus the transformer's",
        "Differences within seeds, with 95 % intervals; interventions change one thing each.",
        [f"{arm} ({ARMS[arm].says})" for arm in arms],
        ["seeds", "difference", "low", "high"],
        values,
        row_axis="arm",
    )


def _optimiser_table(found: ToyOutcomes) -> Table:
    rows, values = [], []
    settings = found.settings
    for arm in ("transformer", "random"):
        for optimiser in settings.optimisers:
            cells = [
                found.outcomes.get(f"optimiser-{arm}-{optimiser}-{rate:g}")
                for rate in settings.rates
            ]
            rows.append(f"{arm}, {optimiser}")
            values.append([math.nan if c is None else c.value("loss") for c in cells])
    return Table(
        "optimisers",
        "Validation loss by optimiser and rate (the paper's Figure 15)",
        f"One seed, {settings.optimiser_epochs} epochs; a gap is a training that diverged.",
        rows if settings.optimisers else [],
        [f"{rate:g}" for rate in settings.rates],
        np.array(values, dtype=float).reshape(-1, len(settings.rates)),
        row_axis="arm and optimiser",
        best="min",
    )


def _count_table(found: ToyOutcomes) -> Table:
    init = found.settings.inits[0]
    arms = found.arms(init)
    names = ("trained", "attention", "head")
    values = [
        [next(iter(found.final(arm, init, f"parameters_{n}").values())) for n in names]
        for arm in arms
    ]
    return Table(
        "parameters",
        "Parameters",
        "trained: all that receive gradients; attention: W_Q, W_K, W_V and W_O; head: W.",
        arms,
        list(names),
        np.array(values, dtype=float).reshape(-1, 3),
        row_axis="arm",
    )


def _proposition_table(found: ToyOutcomes) -> Table:
    first = next((o for n, o in found.outcomes.items() if n.startswith("propositions")), None)
    names = [] if first is None else sorted(r.name for r in first.readings)
    values = np.array(
        [[np.mean(v), np.min(v), np.max(v)] for n in names if (v := found.proposition(n)).size]
    )
    return Table(
        "propositions",
        "Numbers behind the propositions",
        "Mean, least and largest over seeds.",
        names,
        ["mean", "least", "largest"],
        values.reshape(-1, 3),
        row_axis="number",
    )


def _separation(found: ToyOutcomes) -> dict[str, float]:
    """Rank correlation of each candidate with the excess, over all runs with learned attention."""
    oracle = found.oracle()
    excess: list[float] = []
    rows: list[list[float]] = []
    for init in found.settings.inits:
        for arm in found.arms(init):
            if ARMS[arm].mixing != "learned" or ARMS[arm].silent:
                continue
            for seed, outcome in found.trainings(arm, init).items():
                if seed in oracle and math.isfinite(outcome.value("loss")):
                    excess.append(outcome.value("loss") - oracle[seed])
                    rows.append([outcome.value(n) for n in _CANDIDATES])
    if len(rows) < 4:
        return {}
    values = np.array(rows)
    result = {}
    for column, name in enumerate(_CANDIDATES):
        usable = np.isfinite(values[:, column])
        if usable.sum() >= 4 and np.ptp(values[usable, column]) > 0:
            rho = stats.spearmanr(values[usable, column], np.array(excess)[usable]).statistic
            result[name] = float(rho)
    return result


def _separation_table(separation: Mapping[str, float]) -> Table:
    names = sorted(separation, key=lambda n: (-abs(separation[n]), n))
    return Table(
        "separation",
        "Which quantity tells apart who generalises",
        "Rank correlation with the excess over all runs with learned or random attention; ±1 "
        "orders the runs perfectly.",
        names,
        ["rank correlation"],
        np.array([[separation[n]] for n in names]),
        row_axis="quantity",
    )


# ── sentences ──


def _sentences(found: ToyOutcomes, separation: Mapping[str, float]) -> list[str]:
    init = found.settings.inits[0]
    oracle = found.oracle()
    said = []
    if oracle:
        said.append(
            f"Validation loss after {found.settings.epochs} epochs, {init} limits, means over "
            f"{found.settings.seeds} seeds: oracle {np.mean(list(oracle.values())):.4g}, "
            + ", ".join(
                f"{arm} {np.mean(list(found.final(arm, init, 'loss').values())):.4g}"
                for arm in found.arms(init)
            )
            + "."
        )
    said += [_moved(found, init)]
    if separation:
        order = sorted(separation, key=lambda n: -abs(separation[n]))
        said.append(
            f"Over all runs the quantity that orders the excess best is {order[0]} (rank "
            f"correlation {separation[order[0]]:.2f}); entropy has "
            f"{separation.get('entropy', math.nan):.2f}, λ_max "
            f"{separation.get('lambda_max', math.nan):.2f}."
        )
    floors = found.proposition("prop21_all_excess")
    last = found.settings.inits[-1]
    random = found.final("random", last, "loss")
    if floors.size and random and oracle and last == "glorot":
        excess = np.mean([random[s] - oracle[s] for s in random if s in oracle])
        said.append(
            f"Random attention with glorot limits ends {excess:.3g} above the oracle; the best W "
            f"for it is {np.mean(floors):.3g} above on the training windows (Prop. 2.1's scope): "
            "its floor is set by the size of W_V W_O, not by optimisation."
        )
    return [sentence for sentence in said if sentence]


def _moved(found: ToyOutcomes, init: str) -> str:
    """Which intervention moves validation loss, and which does not."""
    base = found.final("transformer", init, "loss")
    moves = []
    for arm in _INTERVENTIONS:
        losses = found.final(arm, init, "loss")
        pairs = np.array([losses[s] - base[s] for s in losses if s in base])
        if not pairs.size:
            continue
        mean, half = mean_and_half(pairs)
        clear = "" if len(pairs) == 1 else (" clearly" if abs(mean) > half else " not clearly")
        moves.append(f"{arm} {mean:+.3g}{clear}")
    if not moves:
        return ""
    return f"Against the transformer the interventions move validation loss so: {', '.join(moves)}."
