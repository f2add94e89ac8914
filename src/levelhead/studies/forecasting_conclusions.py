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
    compared,
)
from levelhead.studies.forecasting_figures import figures
from levelhead.studies.forecasting_models import ARMS
from levelhead.studies.forecasting_outcomes import Losses, Place, named, the_set
from levelhead.studies.forecasting_tables import tables
from levelhead.studies.study import Findings, Outcome, Statement

__all__ = ["KNOWN", "conclude"]

_CONTEXT = 512
# Test errors at context 512 of a ridge without intercept on all windows from their last value,
# written out and solved by numpy, with these penalties; a test computes them again.
KNOWN: Mapping[Place, tuple[float, float]] = {
    ("ETTh1", 96): (10**-1.0, 0.36392),
    ("ETTh1", 192): (10**-0.5, 0.39590),
    ("ETTh1", 336): (10**-0.5, 0.41754),
    ("ETTh1", 720): (10**-0.5, 0.41825),
}
_KNOWN_WITHIN = 0.001
# Rounding of float32 products of 512 terms, in a mean over thousands of windows.
_EQUAL = 1e-4


def conclude(settings: Any, outcomes: Mapping[str, Outcome]) -> Findings:
    """Findings of the study; see the top of this file."""
    losses = Losses(settings, outcomes)
    claims = compared(losses)
    arrays, drawn = figures(losses)
    said = [*_windows(losses), *_starts(losses), *_known(losses)]
    said += [_answer(claim, name, claims) for name in settings.sets for claim in CLAIMS]
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
    if not runs and not _starts_from_lines(losses.settings):
        return []
    first = "Started from the line, the network forecasts as the line before its first step."
    kept = (
        "Started from the line, the weights that training keeps are never worse than the line on "
        "validation rows."
    )
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
    rises = end / line - 1
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
            bool((rises <= _EQUAL).all()),
            f"Validation error beside the line's, over {len(runs)} trainings: mean "
            f"{100 * rises.mean():+.2g} %, in the worst of them {100 * rises.max():+.2g} %.",
        ),
    ]


def _starts_from_lines(settings: Any) -> bool:
    """Whether the grid has a cell of the arm that starts from the line."""
    somewhere = set(settings.horizons) & set(settings.other_horizons)
    return "from-line" in settings.arms and bool(
        somewhere or set(settings.sets) & {*settings.brief}
    )


def _known(losses: Losses) -> list[Statement]:
    """The line's test error where another implementation measured it."""
    if losses.settings.context != _CONTEXT:
        return []
    found = {
        place: losses.mean(place, "line", "mse")
        for place in losses.places
        if place in KNOWN and losses.seeds(place, "line")
    }
    if not found:
        return []
    apart = {place: value / KNOWN[place][1] - 1 for place, value in found.items()}
    return [
        Statement(
            "known-line",
            "The line's test error is the one of a ridge written out, within .1 %.",
            all(abs(share) <= _KNOWN_WITHIN for share in apart.values()),
            ", ".join(
                f"{named(p)}: {v:.5f}, written out {KNOWN[p][1]:.5f}" for p, v in found.items()
            )
            + ".",
        )
    ]


# ── what is asked ──


def _answer(claim: Claim, name: str, claims: Sequence[Compared]) -> Statement:
    """A claim on a set: borne out at more than half of the horizons that can be judged, or not."""
    found = [c for c in claims if c.claim is claim and c.place[0] == name]
    label = f"{claim.name}-{name}"
    if not found:
        says = f"On {the_set(name)} {claim.says}."
        return Statement(label, says, None, "Its cells are missing.", expected=False)
    judged = [c for c in found if c.judged]
    holding = sum(c.holds for c in judged)
    evidence = f"{_counts(claim, judged)}: {'; '.join(map(_numbers, found))}."
    return Statement(
        label,
        f"On {the_set(name)} {claim.says} ({_where([c.place[1] for c in found])}).",
        2 * holding > len(judged) if judged else None,
        evidence[:1].upper() + evidence[1:],
        expected=False,
    )


def _where(horizons: Sequence[int]) -> str:
    """The horizons that were tried, and at how many of them a claim is to hold."""
    if len(horizons) == 1:
        return f"tried at horizon {horizons[0]} alone"
    tried = ", ".join(map(str, horizons[:-1]))
    return f"at more than half of what can be judged of horizons {tried} and {horizons[-1]}"


def _counts(claim: Claim, judged: Sequence[Compared]) -> str:
    """How often the claim, and how often its opposite, is borne out."""
    if not judged:
        return "nothing can be judged"
    holding, contrary = sum(c.holds for c in judged), sum(c.contrary for c in judged)
    claimed, opposite = claim.words
    against = f", {opposite} at {contrary} of {len(judged)}" if contrary else ""
    return f"{claimed} at {holding} of {len(judged)}{against}"


def _numbers(c: Compared) -> str:
    """Difference, then interval and p over test windows, or why there is no p; then the seeds."""
    over = c.windows
    size = f"H {c.place[1]} {over.difference:+.4f}"
    if over.judged:
        size += f", over test windows [{over.low:+.4f}, {over.high:+.4f}]"
    if not c.reasons:
        size += f" and p {c.adjusted:.2g} after Holm" if c.judged else ""
        sign = "" if c.alike else ", of both signs"
        least, most = min(c.by_seed), max(c.by_seed)
        size += f", over {len(c.by_seed)} seeds {least:+.4f} to {most:+.4f}{sign}"
    else:
        size += f" ({', '.join(c.reasons)}: not judged)"
    return size + f" ({c.beside})" * bool(c.beside) + _part(c)


def _part(c: Compared) -> str:
    """For a question about a part of a gain: that gain, and the share if it is one."""
    if c.whole is None:
        return ""
    whole, said = c.whole, f"released gain {c.whole.difference:+.4f}"
    if not whole.judged:
        return f"; {said}"
    said += f" [{whole.low:+.4f}, {whole.high:+.4f}]"
    if not c.askable:
        return f"; {said}: with the slip SAM has no clear gain to explain, not judged"
    return f"; {said}" + ("" if c.share is None else f", {100 * c.share:.0f} % of it the slip's")


# ── sentences ──


def _sentences(losses: Losses, claims: Sequence[Compared]) -> list[str]:
    said = [_errors(losses, place) for place in losses.places]
    best = [found for place in losses.places if (found := _best(losses, place))]
    wins = {arm: sum(arm in found for found in best) for arm in losses.settings.arms}
    if best:
        order = [arm for arm in sorted(wins, key=lambda a: -wins[a]) if wins[arm]]
        said.append(
            f"Lowest mean test error at {len(best)} set-horizon pairs: "
            + ", ".join(f"{arm} at {wins[arm]}" for arm in order)
            + (" (equal ones count for each)." if sum(wins.values()) > len(best) else ".")
        )
    said += [_verdicts(claims), _stopped(losses), _unmoved(losses)]
    if losses.places:
        said.append(_apart(losses))
    return [sentence for sentence in said if sentence]


def _verdicts(claims: Sequence[Compared]) -> str:
    """How many primary comparisons are judged, and how they end."""
    if not claims:
        return ""
    judged = [c for c in claims if c.judged]
    said = f"{len(judged)} of {len(claims)} primary comparisons can be judged"
    if not judged:
        return said + "."
    holding, contrary = (
        [f"{c.claim.name} ({named(c.place)})" for c in judged if getattr(c, which)]
        for which in ("holds", "contrary")
    )
    said += f": {len(holding)} borne out" + f" ({', '.join(holding)})" * bool(holding)
    said += f", the opposite of {len(contrary)}" + f" ({', '.join(contrary)})" * bool(contrary)
    neither = len(judged) - len(holding) - len(contrary)
    return (
        f"{said}, {neither} neither way. For either, p over test windows after Holm must be at "
        f"most {LEVEL:g}, and the difference of every seed must have the same sign."
    )


def _stopped(losses: Losses) -> str:
    """Trainings that a limit of epochs ended."""
    found = [
        f"{arm} ({named(place)}) at {losses.limit(place, arm)}"
        for place in losses.places
        for arm in losses.arms(place)
        if losses.stopped(place, arm, list(losses.seeds(place, arm)))
    ]
    if not found:
        return ""
    return (
        f"Stopped before the {losses.settings.epochs} epochs of the others, so that nothing that "
        f"needs them is judged: {', '.join(found)}."
    )


def _unmoved(losses: Losses) -> str:
    """Trainings none of whose epochs was better than their start."""
    found = []
    for place in losses.places:
        for arm in losses.arms(place):
            runs = [] if ARMS[arm].line else list(losses.seeds(place, arm).values())
            same = [run for run in runs if run.value("best_epoch") == 0]
            if same:
                found.append(f"{arm} ({named(place)}) in {len(same)} of {len(runs)} seeds")
    if not found:
        return ""
    return (
        "Kept the weights they began with, for no epoch had a lower validation error (from-line: "
        f"those of the line): {', '.join(found)}."
    )


def _errors(losses: Losses, place: Place) -> str:
    best = _best(losses, place)
    if not best:
        return ""
    beside = [arm for arm in ("line", "transformer", "samformer") if losses.seeds(place, arm)]
    numbers = ", ".join(f"{arm} {losses.mean(place, arm, 'mse'):.4f}" for arm in beside)
    return (
        f"Test mean squared error, {named(place)}: lowest {' and '.join(best)} "
        f"({losses.mean(place, best[0], 'mse'):.4f})" + (f"; {numbers}." if numbers else ".")
    )


def _best(losses: Losses, place: Place) -> list[str]:
    """The arms with the lowest test error of those that are judged by one loss."""
    errors = {arm: losses.mean(place, arm, "mse") for arm in losses.ranked(place)}
    least = min((e for e in errors.values() if np.isfinite(e)), default=None)
    return [arm for arm, error in errors.items() if error == least]


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
