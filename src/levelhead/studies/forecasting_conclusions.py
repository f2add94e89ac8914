"""What follows from the cells of the forecasting study: statements and computed sentences.

Expected is only what holds by construction, or was measured before on the very files; what the
literature claims is a question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from levelhead.studies.forecasting_comparisons import (
    CLAIMS,
    LEVEL,
    Claim,
    Compared,
    Losses,
    Place,
    compared,
)
from levelhead.studies.forecasting_figures import figures
from levelhead.studies.forecasting_tables import named, tables
from levelhead.studies.study import Findings, Outcome, Statement

__all__ = ["conclude"]

_CONTEXT = 512
# Test errors of the line at context 512, measured once by an implementation of its own.
_KNOWN: Mapping[Place, float] = {
    ("ETTh1", 96): 0.3639,
    ("ETTh1", 192): 0.3961,
    ("ETTh1", 336): 0.4185,
    ("ETTh1", 720): 0.4369,
}
_KNOWN_WITHIN = 0.01
# Rounding of float32 products of 512 terms, in a mean over thousands of windows.
_EQUAL = 1e-4


def conclude(settings: Any, outcomes: Mapping[str, Outcome]) -> Findings:
    """Findings of the study; see the top of this file."""
    losses = Losses(settings, outcomes)
    claims = compared(losses)
    arrays, drawn = figures(losses)
    said = [*_windows(losses), *_starts(losses), *_known(losses)]
    said += [_answer(claim, name, claims) for name in settings.sets for claim in CLAIMS]
    said += _explained(losses)
    return Findings(tables(losses, claims), arrays, drawn, said, _sentences(losses, claims))


# ── what must hold ──


def _windows(losses: Losses) -> list[Statement]:
    claim = "At every set and horizon all arms are judged on the same test windows."
    counts = {
        named(place): {
            len(o.arrays["squared"])
            for arm in losses.arms(place)
            for o in losses.seeds(place, arm).values()
        }
        for place in losses.places
    }
    if not counts:
        return [Statement("same-windows", claim, None, "No cell was finished.")]
    shown = ", ".join(f"{name}: {' or '.join(map(str, sorted(n)))}" for name, n in counts.items())
    holds = all(len(found) == 1 for found in counts.values())
    return [Statement("same-windows", claim, holds, f"Windows of {shown}.")]


def _starts(losses: Losses) -> list[Statement]:
    """The arm that starts from the line: equal to it before the first step, never worse after."""
    runs = [run for place in losses.places for run in losses.seeds(place, "from-line").values()]
    if "from-line" not in losses.settings.arms:
        return []
    first = "Started from the line, the network forecasts as the line before its first step."
    kept = "What is kept of it is never worse than the line on validation rows."
    if not runs:
        missing = "Its cells are missing."
        return [
            Statement("starts-equal", first, None, missing),
            Statement("never-worse", kept, None, missing),
        ]
    line, start, end = (
        np.array([run.value(name) for run in runs])
        for name in ("line_validation", "first_validation", "validation")
    )
    apart = float(np.max(np.abs(start - line) / line))
    rise = float(np.max(end / line - 1))
    # A comparison with nan, of a training that diverged, is false.
    return [
        Statement(
            "starts-equal",
            first,
            bool(apart <= _EQUAL),
            f"Largest relative difference of the validation error {apart:.1g}.",
        ),
        Statement(
            "never-worse",
            kept,
            bool(rise <= _EQUAL),
            f"Largest relative change of the validation error {100 * rise:+.2g} %, over "
            f"{len(runs)} trainings.",
        ),
    ]


def _known(losses: Losses) -> list[Statement]:
    """The line's test error where it was measured before."""
    if losses.settings.context != _CONTEXT:
        return []
    found = {
        place: losses.mean(place, "line", "mse")
        for place in losses.places
        if place in _KNOWN and losses.seeds(place, "line")
    }
    if not found:
        return []
    apart = {place: value / _KNOWN[place] - 1 for place, value in found.items()}
    return [
        Statement(
            "known-line",
            "The line's test error is the one measured before, within 1 %.",
            all(abs(share) <= _KNOWN_WITHIN for share in apart.values()),
            ", ".join(f"{named(p)}: {v:.4f}, before {_KNOWN[p]:.4f}" for p, v in found.items())
            + ".",
        )
    ]


# ── what is asked ──


def _answer(claim: Claim, name: str, claims: Sequence[Compared]) -> Statement:
    """A claim on a set: borne out at more than half of the horizons that can be judged, or not."""
    found = [c for c in claims if c.claim is claim and c.place[0] == name]
    says = f"On {name} {claim.says} (at more than half of the horizons)."
    judged = sum(c.judged for c in found)
    if not found:
        return Statement(
            f"{claim.name}-{name}", says, None, "Its cells are missing.", expected=False
        )
    holding = sum(c.holds for c in found)
    numbers = "; ".join(_numbers(c) for c in found)
    return Statement(
        f"{claim.name}-{name}",
        says,
        2 * holding > judged if judged else None,
        f"At {holding} of {judged}: {numbers}.",
        expected=False,
    )


def _numbers(c: Compared) -> str:
    over = c.windows
    size = f"H {c.place[1]} {over.difference:+.4f}"
    if not c.judged:
        return f"{size} ({c.blocks:.1f} blocks of H, not judged)"
    seeds = 1 if c.seeds is None else c.seeds.count
    sign = "" if c.alike else ", seeds of both signs"
    return (
        f"{size} [{over.low:+.4f}, {over.high:+.4f}], p {c.adjusted:.2g} after Holm, {seeds} "
        f"seed{'s' if seeds > 1 else ''}{sign}"
    )


def _gains(losses: Losses) -> dict[str, list[tuple[int, float, float]]]:
    """By set: (horizon, SAM's gain with a correct RevIN, with the released slip)."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for place in losses.places:
        plain, sam, slip, slip_sam = (
            losses.mean(place, arm, "mse")
            for arm in ("transformer", "samformer", "transformer-slip", "samformer-slip")
        )
        if np.isfinite([plain, sam, slip, slip_sam]).all():
            found.setdefault(place[0], []).append((place[1], plain - sam, slip - slip_sam))
    return found


def _explained(losses: Losses) -> list[Statement]:
    """Does the slip account for most of the gain that the released code shows?"""
    made = []
    for name, gains in _gains(losses).items():
        correct, released = (float(np.mean(side)) for side in list(zip(*gains, strict=True))[1:])
        numbers = ", ".join(f"H {h} {r:+.4f} instead of {g:+.4f}" for h, g, r in gains)
        share = (
            f"; {100 * (1 - correct / released):.0f} % of the mean gain is the slip's"
            if released > 0
            else "; there is no released gain to explain"
        )
        made.append(
            Statement(
                f"slip-explains-{name}",
                f"On {name} most of SAM's gain with the released code is the slip's.",
                bool(released > 0 and correct < released / 2),
                f"Gains with the slip, instead of with a correct RevIN: {numbers}{share}.",
                expected=False,
            )
        )
    return made


# ── sentences ──


def _sentences(losses: Losses, claims: Sequence[Compared]) -> list[str]:
    said = [_errors(losses, place) for place in losses.places]
    wins = {
        arm: sum(_best(losses, place) == arm for place in losses.places)
        for arm in losses.settings.arms
    }
    if losses.places:
        order = sorted((a for a in wins if wins[a]), key=lambda a: -wins[a])
        said.append(
            f"Lowest mean test error at {len(losses.places)} set-horizon pairs: "
            + ", ".join(f"{arm} at {wins[arm]}" for arm in order)
            + "."
        )
    judged = sum(c.judged for c in claims)
    if judged:
        held = [f"{c.claim.name} ({named(c.place)})" for c in claims if c.holds]
        said.append(
            f"Of {judged} primary comparisons that can be judged {len(held)} are borne out (Holm, "
            f"level {LEVEL:g}, all seeds of one sign)" + (f": {', '.join(held)}." if held else ".")
        )
        said.append(_apart(losses))
    return [sentence for sentence in said if sentence]


def _errors(losses: Losses, place: Place) -> str:
    best = _best(losses, place)
    beside = [arm for arm in ("line", "transformer", "samformer") if losses.seeds(place, arm)]
    numbers = ", ".join(f"{arm} {losses.mean(place, arm, 'mse'):.4f}" for arm in beside)
    return (
        f"Test mean squared error, {named(place)}: lowest {best} "
        f"({losses.mean(place, best, 'mse'):.4f})" + (f"; {numbers}." if numbers else ".")
    )


def _best(losses: Losses, place: Place) -> str:
    arms = losses.arms(place)
    return min(arms, key=lambda arm: losses.mean(place, arm, "mse"))


def _apart(losses: Losses) -> str:
    """Entropy and sharpness with SAM and without, in one sentence."""
    parts = []
    for place in losses.places[:1]:
        for arm in ("transformer", "samformer"):
            if losses.seeds(place, arm):
                parts.append(
                    f"{arm} λ_max {losses.mean(place, arm, 'lambda_max'):.3g}, entropy "
                    f"{losses.mean(place, arm, 'entropy_share'):.2f} of log n, effective rank "
                    f"{losses.mean(place, arm, 'rank'):.2f}"
                )
    return f"Kept weights at {named(losses.places[0])}: {'; '.join(parts)}." if parts else ""
