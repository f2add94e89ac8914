"""What the toy study checks: the order of the arms, the published account, the propositions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from levelhead.studies.study import Statement
from levelhead.studies.toy_interventions import moved
from levelhead.studies.toy_outcomes import ToyOutcomes, mean_and_half

__all__ = ["statements"]

Floats = NDArray[np.float64]


def statements(found: ToyOutcomes) -> list[Statement]:
    """All statements of the study."""
    return [*_order(found), *_accounts(found), *moved(found), *_propositions(found)]


# ── statements ──


def _order(found: ToyOutcomes) -> list[Statement]:
    """oracle ≤ SAM < random < transformer under the first initialisation."""
    init = found.settings.inits[0]
    oracle = found.oracle()
    pairs = (
        ("oracle-sam", "The oracle is not worse than SAM.", None, "sam"),
        ("sam-random", "SAM generalises better than random attention.", "sam", "random"),
        (
            "random-transformer",
            "Random attention generalises better than trained.",
            "random",
            "transformer",
        ),
    )
    out = []
    for name, claim, better, worse in pairs:
        low = oracle if better is None else found.final(better, init, "loss")
        high = found.final(worse, init, "loss")
        differences = np.array([high[s] - low[s] for s in high if s in low])
        out.append(
            _difference_statement(name, claim, differences, found.paper_sized, better is None)
        )
    return out


def _difference_statement(
    name: str, claim: str, differences: Floats, expected: bool, weak: bool
) -> Statement:
    """The claim that a difference is positive (or, if `weak`, not negative)."""
    if not differences.size or not np.isfinite(differences).all():
        return Statement(name, claim, None, "Its cells are missing.", expected)
    mean, half = mean_and_half(differences)
    if weak or len(differences) == 1:
        holds = bool(mean >= 0) if weak else bool(mean > 0)
    else:
        holds = bool(mean - half > 0)
    interval = f"[{mean - half:.4g}, {mean + half:.4g}]" if len(differences) > 1 else "one seed"
    told = f"Loss of the second minus that of the first: {mean:.4g}, {interval}."
    return Statement(name, claim, holds, told, expected)


def _accounts(found: ToyOutcomes) -> list[Statement]:
    """The published account, held against interventions; answered, not expected."""
    init = found.settings.inits[0]
    out = []
    curves = found.trainings("transformer", init)
    firsts = [float(o.arrays["own"][1]) for o in curves.values() if len(o.arrays["own"]) > 1]
    if firsts:
        out.append(
            Statement(
                "identity-early",
                "Attention is near the identity after the first epoch (own weight ≥ .9).",
                bool(min(firsts) >= 0.9),
                f"Least over seeds {min(firsts):.3f}.",
                found.paper_sized,
            )
        )
    out += _entropy_separates(found, init)
    out += _replaced(found, init)
    out += _sigma_rank(found, init)
    out += _frozen_flat(found, init)
    counts = found.outcomes.get(f"train-{init}-transformer-0")
    if counts is not None:
        share = counts.value("parameters_attention") / counts.value("parameters_trained")
        out.append(
            Statement(
                "two-per-cent",
                "Attention adds only about 2 % of the parameters.",
                bool(share <= 0.03),
                f"W_Q, W_K, W_V and W_O are {100 * share:.0f} %.",
                expected=False,
            )
        )
    return out


def _sigma_rank(found: ToyOutcomes, init: str) -> list[Statement]:
    """The account that σReparam trades entropy collapse for rank collapse."""
    with_it, without = (found.final(a, init, "rank") for a in ("sigma", "transformer"))
    pairs = np.array([with_it[s] - without[s] for s in with_it if s in without])
    if not pairs.size:
        return []
    mean, half = mean_and_half(pairs)
    rank, nuclear = (
        [float(np.mean(list(found.final(a, init, n).values()))) for a in ("sigma", "transformer")]
        for n in ("rank", "nuclear")
    )
    return [
        Statement(
            "sigma-rank",
            "σReparam lowers the effective rank of attention.",
            bool(mean + half < 0) if math.isfinite(half) else None,
            f"It ends at {rank[0]:.3g} of {found.settings.channels}, without it at {rank[1]:.3g}; "
            f"nuclear norms {nuclear[0]:.3g} and {nuclear[1]:.3g}"
            + ("." if math.isfinite(half) else "; one seed tells no difference."),
            expected=False,
        )
    ]


def _entropy_separates(found: ToyOutcomes, init: str) -> list[Statement]:
    """The published account: the failing arm's entropy collapses, SAM's does not."""
    limit = math.log(found.settings.channels)
    ends = {arm: found.final(arm, init, "entropy") for arm in ("transformer", "sam")}
    if not all(ends.values()):
        return []
    (low, low_half), (high, high_half) = (
        mean_and_half(np.array(list(values.values())) / limit) for values in ends.values()
    )
    few = not math.isfinite(low_half + high_half)
    low_half, high_half = (0.0, 0.0) if few else (low_half, high_half)
    return [
        Statement(
            "entropy-separates",
            "Entropy separates the failing arm from SAM: it ends below a tenth of the largest "
            "possible without SAM, above half of it with SAM.",
            bool(low + low_half < 0.1 and high - high_half > 0.5),
            f"Shares of log {found.settings.channels}: {_give(low, low_half)} without SAM, "
            f"{_give(high, high_half)} with it{', one seed' if few else ''}.",
            expected=False,
        )
    ]


def _give(value: float, half: float) -> str:
    return f"{value:.3f} ± {half:.3f}" if half else f"{value:.3f}"


def _frozen_flat(found: ToyOutcomes, init: str) -> list[Statement]:
    """The paper's Figure 3b: with frozen attention the surface is orders of magnitude flatter."""
    told = {}
    for name in ("lambda_max_trained", "lambda_max"):
        frozen, trained = (found.final(a, init, name) for a in ("random", "transformer"))
        logs = np.array([math.log10(trained[s] / frozen[s]) for s in trained if s in frozen])
        told[name] = mean_and_half(logs)
    mean, half = told["lambda_max_trained"]
    if math.isnan(mean):
        return []
    one = not math.isfinite(half)
    half = 0.0 if one else half
    interval = "(one seed)" if one else f"[{10 ** (mean - half):.3g}, {10 ** (mean + half):.3g}]"
    return [
        Statement(
            "frozen-flat",
            "λ_max with frozen attention is orders of magnitude (100 times) lower.",
            bool(mean - half >= 2),
            f"Of the weights that are trained it is lower by a factor of {10**mean:.3g} "
            f"{interval}, of all weights by {10 ** told['lambda_max'][0]:.3g}.",
            expected=False,
        )
    ]


def _replaced(found: ToyOutcomes, init: str) -> list[Statement]:
    """After training: does the excess vanish when A is replaced, no weight being touched?"""
    oracle = found.oracle()
    ends = {
        n: found.final("transformer", init, n) for n in ("loss", "loss_identity", "loss_uniform")
    }
    seeds = [s for s in ends["loss"] if s in oracle]
    if not seeds:
        return []
    loss, own, uniform, best = (
        np.array([values[s] for s in seeds]) for values in (*ends.values(), oracle)
    )
    excess, excess_half = mean_and_half(loss - best)
    beyond, half = mean_and_half((loss - own) - 0.5 * (loss - best))
    half, excess_half = (h if math.isfinite(h) else 0.0 for h in (half, excess_half))
    share = float(np.mean(loss - own)) / excess
    return [
        Statement(
            "replaced-by-identity",
            "Most of the transformer's excess vanishes when its attention is replaced by the "
            "identity after training.",
            bool(beyond - half > 0) if excess - excess_half > 0 else None,
            f"Loss {np.mean(loss):.4g}, with the identity {np.mean(own):.4g}"
            + (f": {100 * share:.0f} % of the excess" if excess - excess_half > 0 else "")
            + f"; with the mean of all channels {np.mean(uniform):.4g}"
            + ("." if len(seeds) > 1 else ", one seed."),
            expected=False,
        )
    ]


def _propositions(found: ToyOutcomes) -> list[Statement]:
    settings = found.settings
    dimension = (settings.context - settings.channels) * settings.horizon
    checks: tuple[tuple[str, str, Callable[[Mapping[str, Floats]], bool], tuple[str, ...]], ...] = (
        (
            "prop21-one",
            f"Prop. 2.1: one window has an exact W, in an affine space of dimension {dimension}.",
            lambda v: bool(
                (v["prop21_one_residual"] < 1e-10).all()
                and (v["prop21_dimension"] == dimension).all()
                and (v["prop21_rank"] == v["prop21_rank_joined"]).all()
            ),
            ("prop21_one_residual", "prop21_dimension"),
        ),
        (
            "prop21-all",
            "No single W serves all windows under frozen random attention.",
            lambda v: bool(
                (v["prop21_few_residual"] < 1e-10).all()
                and (v["prop21_more_residual"] > 1e-3).all()
                and (v["prop21_all_residual"] > 1e-3).all()
            ),
            ("prop21_few_residual", "prop21_more_residual", "prop21_all_residual"),
        ),
        (
            "identifiable",
            "W_toy is identifiable from the training windows, with the error of least squares.",
            lambda v: bool(
                (v["identifiable_rank"] == v["identifiable_context"]).all()
                and (np.abs(v["ols_error_ratio"] - 1) < 0.15).all()
            ),
            ("identifiable_rank", "ols_error_ratio"),
        ),
        (
            "prop22",
            "Prop. 2.2 holds without its assumption of positive semi-definite forms, and is tight.",
            lambda v: bool(
                (v["prop22_ratio"] <= 1).all()
                and (v["prop22_sharp_ratio"] <= 1).all()
                and (v["prop22_least_eigenvalue"] < 0).all()
                and (np.abs(v["prop22_tight"] - 1) < 1e-9).all()
            ),
            ("prop22_ratio", "prop22_sharp_ratio", "prop22_least_eigenvalue"),
        ),
        (
            "thm31",
            "Zhai et al., Thm 3.1 bounds every row's entropy, and is attained.",
            lambda v: bool(
                (v["thm31_least_slack"] >= -1e-12).all() and (v["thm31_tight_gap"] < 1e-10).all()
            ),
            ("thm31_spectral", "thm31_centred_row", "thm31_entropy"),
        ),
        (
            "sam-first-order",
            "SAM's first-order step attains the maximum on the sphere up to O(ρ²).",
            lambda v: bool(
                (v["sam_first_order_0.001"] < 1e-5).all()
                and (v["sam_first_order_0.01"] < 1e-3).all()
            ),
            ("sam_first_order_0.001", "sam_first_order_0.1"),
        ),
    )
    out = []
    for name, claim, test, shown in checks:
        first = next((o for n, o in found.outcomes.items() if n.startswith("propositions")), None)
        if first is None:
            out.append(Statement(name, claim, None, "Its cells are missing."))
            continue
        values = {r.name: found.proposition(r.name) for r in first.readings}
        numbers = ", ".join(f"{n.split('_', 1)[1]} {np.mean(values[n]):.3g}" for n in shown)
        out.append(Statement(name, claim, test(values), f"Means: {numbers}."))
    return out
