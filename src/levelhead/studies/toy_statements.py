"""What the toy study checks: the order of the arms, the published account, the propositions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from levelhead.studies.study import Statement
from levelhead.studies.toy_outcomes import ToyOutcomes, mean_and_half

__all__ = ["statements"]

Floats = NDArray[np.float64]


def statements(found: ToyOutcomes) -> list[Statement]:
    """All statements of the study."""
    return [*_order(found), *_accounts(found), *_propositions(found)]


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
    return Statement(name, claim, holds, f"Difference {mean:.4g}, {interval}.", expected)


def _accounts(found: ToyOutcomes) -> list[Statement]:
    """The published account, held against interventions; answered, not expected."""
    init = found.settings.inits[0]
    out = []
    curves = found.trainings("transformer", init)
    if curves:
        firsts = [float(o.arrays["own"][1]) for o in curves.values()]
        out.append(
            Statement(
                "identity-early",
                "Attention is near the identity after the first epoch (own weight ≥ .9).",
                bool(min(firsts) >= 0.9),
                f"Least over seeds {min(firsts):.3f}.",
                found.paper_sized,
            )
        )
    sharp, soft = found.final("transformer", init, "entropy"), found.final("sam", init, "entropy")
    if sharp and soft:
        a, b = np.mean(list(sharp.values())), np.mean(list(soft.values()))
        limit = math.log(found.settings.channels)
        out.append(
            Statement(
                "entropy-separates",
                "Entropy collapse separates the failing arm from SAM (SAM keeps ten times more).",
                bool(b >= 10 * a),
                f"Entropy {a:.3f} without SAM and {b:.3f} with it, of at most {limit:.2f} nat.",
                expected=False,
            )
        )
    out += _replaced(found, init)
    frozen, trained = (found.final(a, init, "lambda_max") for a in ("random", "transformer"))
    if frozen and trained:
        ratio = float(np.mean(list(trained.values())) / np.mean(list(frozen.values())))
        out.append(
            Statement(
                "frozen-flat",
                "λ_max with frozen attention is orders of magnitude (100 times) lower.",
                bool(ratio >= 100),
                f"It is lower by a factor of {ratio:.3g} at the end.",
                expected=False,
            )
        )
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


def _replaced(found: ToyOutcomes, init: str) -> list[Statement]:
    """After training: does the excess vanish when A is replaced by the identity?"""
    oracle = found.oracle()
    shares = []
    for seed, outcome in found.trainings("transformer", init).items():
        if seed in oracle:
            excess = outcome.value("loss") - oracle[seed]
            shares.append((outcome.value("loss") - outcome.value("loss_identity")) / excess)
    if not shares:
        return []
    mean, half = mean_and_half(np.array(shares))
    return [
        Statement(
            "replaced-by-identity",
            "Most of the transformer's excess vanishes when its attention is replaced by the "
            "identity after training, so that too little collapse does the harm, not too much.",
            bool(mean - (half if math.isfinite(half) else 0.0) > 0.5),
            f"{100 * mean:.0f} % of the excess vanishes"
            + (f" (± {100 * half:.0f})." if math.isfinite(half) else ", one seed."),
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
