"""The published account of the toy problem's failure, held against interventions.

The account: the transformer fails because its attention's entropy collapses (and the loss surface
sharpens); SAM heals that. It foretells that a transformer whose entropy is kept generalises better,
that one whose entropy is taken away altogether does not, and that SAM's attention keeps its
entropy. Each intervention changes one thing; whether it did is checked before its effect counts.
Differences are within seeds, intervals Student's t, p-values Holm's over all that ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from levelhead.evaluation.significance import Comparison, holm, paired_seeds
from levelhead.studies.study import Statement
from levelhead.studies.toy_model import ARMS
from levelhead.studies.toy_outcomes import ToyOutcomes

__all__ = ["Intervention", "account", "interventions", "moved"]

_SIGNIFICANT = 0.05
_KEPT = 0.9


@dataclass(frozen=True)
class Intervention:
    """An arm against the transformer.

    Args:
        arm: its name.
        found: its validation loss minus the transformer's; None with fewer than two shared seeds.
        single: the same of one seed, if that is all there is.
        p: after Holm; nan if it was not tested.
        worked: whether the thing that it changes did change.
        check: the sentence that says so.
    """

    arm: str
    found: Comparison | None
    single: float
    p: float
    worked: bool
    check: str

    @property
    def direction(self) -> int:
        """-1 if validation loss clearly fell, 1 if it clearly rose, 0 if neither is shown."""
        if self.found is None or not self.worked or not self.p < _SIGNIFICANT:
            return 0
        return 1 if self.found.difference > 0 else -1

    def __str__(self) -> str:
        """The effect, and whether it counts."""
        if self.found is None:
            told = math.isfinite(self.single)
            return f"{self.single:+.3g} (one seed)" if told else "unknown (no shared seed)"
        c = self.found
        return f"{c.difference:+.3g} [{c.low:.3g}, {c.high:.3g}], p {self.p:.2g}" + (
            "" if self.worked else " (but the intervention did not take)"
        )


def interventions(found: ToyOutcomes) -> list[Intervention]:
    """All interventions that ran, first initialisation."""
    init = found.settings.inits[0]
    base = found.final("transformer", init, "loss")
    tested: dict[str, Comparison] = {}
    singles: dict[str, float] = {}
    for arm in (a for a in found.arms(init) if ARMS[a].intervention):
        losses = found.final(arm, init, "loss")
        shared = [s for s in losses if s in base and math.isfinite(losses[s] + base[s])]
        singles[arm] = math.nan
        if len(shared) > 1:
            tested[arm] = paired_seeds([losses[s] for s in shared], [base[s] for s in shared])
        elif shared:
            singles[arm] = losses[shared[0]] - base[shared[0]]
    adjusted = holm({a: c.p_value for a, c in tested.items() if math.isfinite(c.p_value)})
    return [
        Intervention(
            arm,
            tested.get(arm),
            singles.get(arm, math.nan),
            adjusted.get(arm, math.nan),
            *_took(found, init, arm),
        )
        for arm in singles
    ]


def _took(found: ToyOutcomes, init: str, arm: str) -> tuple[bool, str]:
    """Whether what the arm changes has changed at the end, and the numbers."""

    def mean(name: str, of: str = arm) -> float:
        """Over the seeds that both arms have."""
        values, other = (found.final(a, init, name) for a in (of, "transformer"))
        shared = [value for seed, value in values.items() if seed in other]
        return float(np.mean(shared)) if shared else math.nan

    def lower(name: str, said: str) -> tuple[bool, str]:
        shared = set(found.final(arm, init, name))
        plain = [v for s, v in found.final("transformer", init, name).items() if s in shared]
        theirs = float(np.mean(plain)) if plain else math.nan
        ours = mean(name)
        return ours < theirs, f"{said} ends at {ours:.3g}, the transformer's at {theirs:.3g}"

    floor = found.settings.floor
    checks: Mapping[str, Callable[[], tuple[bool, str]]] = {
        "entropy-none": lambda: (mean("entropy") == 0, f"entropy is {mean('entropy'):.3g} nat"),
        "entropy-full": lambda: (
            mean("rank") < 1 + 1e-6,
            f"entropy is {mean('entropy'):.3g} nat, the rank {mean('rank'):.3g}",
        ),
        "entropy-floor": lambda: (
            mean("entropy") >= _KEPT * floor and mean("entropy") > mean("entropy", "transformer"),
            f"entropy ends at {mean('entropy'):.3g} nat, {floor:g} was to be kept",
        ),
        "sharpness": lambda: lower("lambda_max", "λ_max"),
        "quiet": lambda: lower("path_norm", "‖W_V W_O W‖₂"),
    }
    return checks[arm]()


def moved(found: ToyOutcomes) -> list[Statement]:
    """One question for each intervention: does it move validation loss?"""
    out = []
    for one in interventions(found):
        judged = one.found is not None and math.isfinite(one.p) and one.worked
        out.append(
            Statement(
                f"moves-{one.arm}",
                "Validation loss is shown to move when one thing is changed "
                f"({ARMS[one.arm].says}).",
                one.direction != 0 if judged else None,
                f"Difference {one}; {one.check}.",
                expected=False,
            )
        )
    return out


def account(found: ToyOutcomes) -> str:
    """What the interventions say of the account, in one sentence; empty without any."""
    ran = {one.arm: one for one in interventions(found)}
    if not ran:
        return ""
    moves = "; ".join(f"{arm} {one}" for arm, one in ran.items())
    told = f"Validation loss of interventions minus the transformer's, p after Holm: {moves}."
    none, floor = ran.get("entropy-none"), ran.get("entropy-floor")
    if none is None or floor is None or none.found is None or floor.found is None:
        return f"{told} Whether entropy collapse explains the failure is not judged."
    excess = _excess(found)
    healed = none.found.high < -excess / 2
    if none.direction < 0 and healed:
        verdict = (
            "Taking entropy away altogether heals the failure, so that entropy collapse is not "
            "what causes it"
        )
        if floor.direction > 0:
            verdict += ", and keeping it does harm"
        if floor.direction < 0:
            verdict += ", though keeping it helps, too"
        return f"{told} {verdict}."
    if floor.direction < 0 and floor.found.high < -excess / 2:
        return f"{told} Keeping entropy heals the failure: that agrees with the published account."
    return f"{told} They neither bear out the account nor refute it."


def _excess(found: ToyOutcomes) -> float:
    """The transformer's mean loss above the oracle's; healed is who loses more than half of it."""
    oracle = found.oracle()
    losses = found.final("transformer", found.settings.inits[0], "loss")
    return float(np.mean([loss - oracle[s] for s, loss in losses.items() if s in oracle] or [0.0]))
