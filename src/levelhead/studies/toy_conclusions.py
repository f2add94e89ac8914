"""What follows from the cells of the toy study: tables and computed sentences.

"Excess" is a validation loss above the oracle's, the least-squares line of the same data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from levelhead.studies.study import Findings, Outcome, Table
from levelhead.studies.toy_figures import figures
from levelhead.studies.toy_interventions import account
from levelhead.studies.toy_model import ARMS
from levelhead.studies.toy_outcomes import ToyOutcomes, mean_and_half
from levelhead.studies.toy_separation import Separation, separation
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
    "lambda_max_trained",
    "sam_sharpness",
)
# What is said of attention means nothing where nothing is attended.
_ATTENDING = ("own", "entropy", "rank", "nuclear", "loss_identity", "loss_uniform", "qk_norm")


def conclude(settings: Any, outcomes: Mapping[str, Outcome]) -> Findings:
    """Findings of the study; see the top of this file."""
    found = ToyOutcomes(settings, outcomes)
    tables = [_final_table(found, init) for init in settings.inits]
    tables += [_difference_table(found), _optimiser_table(found), _count_table(found)]
    tables += [_proposition_table(found)]
    separated = separation(found)
    if separated is not None:
        tables.append(separated.table())
    arrays, drawn = figures(found)
    shown = [table for table in tables if table.values.size]
    return Findings(shown, arrays, drawn, statements(found), _sentences(found, separated))


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
            unused = name == "qk_norm" and ARMS[arm].mixing != "learned"
            silent = unused or (ARMS[arm].silent and name in _ATTENDING)
            numbers = [] if silent else list(found.final(arm, init, name).values())
            values[row, column] = float(np.mean(numbers)) if numbers else math.nan
    return Table(
        f"final-{init}",
        f"After training, {init} limits",
        "Means over seeds of the last epoch. excess: loss above the least-squares oracle; "
        "loss_identity, loss_uniform: with A replaced by I or by the mean of all channels after "
        "training; own: weight of a channel on itself; leak, attended: mean squares of the parts "
        "(A − I) X W_V W_O W and A X W_V W_O W of the forecast; qk_norm, vo_norm, path_norm: "
        "spectral norms of W_Q W_Kᵀ, W_V W_O, W_V W_O W; lambda_max: of all weights at the "
        "balanced gauge, lambda_max_trained: of those that are trained; sam_sharpness: rise of the "
        "loss along the gradient.",
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
    for arm in settings.optimiser_arms:
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
        f"One seed, {settings.optimiser_epochs} epochs; a gap is a training that diverged or is "
        "missing.",
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
        "Mean, least and largest over seeds. prop21: ranks, residuals of the best W for one, few, "
        "more and all windows; prop22: nuclear norms over their bounds; thm31: entropies and their "
        "bounds in nat; sam_first_order: relative gap to the true maximum, by radius.",
        names,
        ["mean", "least", "largest"],
        values.reshape(-1, 3),
        row_axis="number",
    )


# ── sentences ──


def _sentences(found: ToyOutcomes, separated: Separation | None) -> list[str]:
    init = found.settings.inits[0]
    oracle = found.oracle()
    said = []
    if oracle:
        said.append(
            f"Validation loss after {found.settings.epochs} epochs, {init} limits, means over "
            f"seeds (how many): oracle {np.mean(list(oracle.values())):.4g} ({len(oracle)}), "
            + ", ".join(
                f"{arm} {np.mean(losses):.4g} ({len(losses)})"
                for arm in found.arms(init)
                if (losses := list(found.final(arm, init, "loss").values()))
            )
            + "."
        )
    said += [account(found), _sigma(found, init), _limits_change(found)]
    said += ["" if separated is None else str(separated), _floor(found, oracle), *_lost(found)]
    return [sentence for sentence in said if sentence]


def _sigma(found: ToyOutcomes, init: str) -> str:
    """What γ at the start and the rate change for σReparam."""
    ways = {
        "sigma": "γ = 1",
        "sigma-fast": "γ = 1 at ten times the rate",
        "sigma-kept": "γ = σ(W)",
        "sigma-kept-fast": "γ = σ(W) at ten times the rate",
    }
    ends = {
        says: np.mean(list(losses.values()))
        for arm, says in ways.items()
        if (losses := found.final(arm, init, "loss"))
    }
    if len(ends) < 2:
        return ""
    told = ", ".join(f"{value:.4g} ({says})" for says, value in ends.items())
    return f"σReparam ends at {told}."


def _limits_change(found: ToyOutcomes) -> str:
    """What other limits of the start change, over the arms and seeds that have both."""
    first, *others = found.settings.inits
    said = []
    for init in others:
        moves = []
        for arm in found.arms(init):
            here, there = found.final(arm, init, "loss"), found.final(arm, first, "loss")
            pairs = [(there[s], here[s]) for s in here if s in there]
            if pairs:
                before, after = np.mean(pairs, axis=0)
                count = f"{len(pairs)} seed{'s' * (len(pairs) > 1)}"
                moves.append(f"{arm} ends at {after:.4g} instead of {before:.4g} ({count})")
        if moves:
            said.append(f"With {init} instead of {first} limits {', '.join(moves)}.")
    return " ".join(said)


def _floor(found: ToyOutcomes, oracle: Mapping[int, float]) -> str:
    """How much of the excess of random attention no W could have avoided (Prop. 2.1's scope)."""
    floors, random = found.proposition("prop21_all_excess"), found.final("random", "glorot", "loss")
    excesses = [random[s] - oracle[s] for s in random if s in oracle]
    if not floors.size or not excesses or not np.isfinite(excesses).all():
        return ""
    excess, floor = float(np.mean(excesses)), float(np.mean(floors))
    cause = "the size of W_V W_O as drawn" if floor > excess / 2 else "optimisation"
    return (
        f"Random attention with glorot limits ends {excess:.3g} above the oracle. The best W for "
        f"it, in closed form, errs by {floor:.3g} on the training windows without their noise: "
        f"most of the excess is due to {cause}."
    )


def _lost(found: ToyOutcomes) -> list[str]:
    """Trainings that diverged; their numbers are left out of all means."""
    names = [n for n, o in found.outcomes.items() if o.value("diverged") == 1]
    return [f"Diverged, and in no mean: {', '.join(names)}."] if names else []
