"""What is measured of one finished training, on rows that nothing was chosen on.

Axes. L layers, h heads, n tokens; attention maps [L, h, n, n], CKA of heads [L·h, L·h], layer
after layer, and of layers [L, L]. Disturbances act on pixels, or on the embeddings of tokens; then
their size is a share of the embeddings' root mean square, so that it means the same for every arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from levelhead.base.records import Reading
from levelhead.diagnostics.probe import probe
from levelhead.diagnostics.similarity import cka_matrix
from levelhead.evaluation.robustness import accuracy, fgsm, macro_f1, noise_accuracy, pgd
from levelhead.nn.encoder import Encoder
from levelhead.studies.collapse_arms import readable
from levelhead.studies.collapse_tasks import Part, Task
from levelhead.studies.collapse_training import Course
from levelhead.training.alarms import Alarm, detect
from levelhead.training.watchers import roughness

__all__ = [
    "ALARMED",
    "CURVES",
    "course_values",
    "curves",
    "held_out_values",
    "mean_off_diagonal",
    "pictures",
    "readings",
]

# Alarms that count: what attention itself can suffer.
ALARMED = ("head_collapse", "entropy_collapse", "rank_collapse", "dead_head", "exploding_logits")
CURVES = {
    "coherence": "largest coherence of a layer, the smaller one of QK and OV",
    "effective_heads": "smallest number of effective heads of a layer",
    "entropy_share": "mean entropy of attention over the largest possible",
    "largest_logit": "largest |logit|",
    "map_residual": "smallest distance of maps to rank one",
}
_WINDOW = 20
_ATTACKED = 200


def course_values(course: Course, level: float) -> dict[str, float]:
    """Numbers of the way there.

    best_validation; curve: mean validation loss over the epochs; steps_to_level: steps until the
    mean of 20 losses is below `level`, nan if it never is, and reached: whether it is; roughness of
    the loss; peak_coherence and last_coherence; alarms by name with their first steps; pulls, as
    far as they are finite (a training that diverges ends with some that are not).
    """
    losses = course.losses
    alarms = detect(course.readings_with_losses())
    found = {
        "best_validation": min(course.judged),
        "curve": float(np.mean(course.judged)),
        "steps_to_level": _reached(losses, level),
        "reached": float(math.isfinite(_reached(losses, level))),
        "roughness": roughness(losses),
        "alarms": float(len({a.name for a in alarms if a.name in ALARMED})),
        "harmful": float(any(a.harmful for a in alarms)),
    }
    for name in ALARMED:
        own = [a for a in alarms if a.name == name]
        found[f"alarm_{name}"] = float(bool(own))
        found[f"alarm_{name}_since"] = float(_first(own))
    shown = curves(course)
    found["peak_coherence"] = float(np.nanmax(shown["coherence"]))
    found["last_coherence"] = float(shown["coherence"][-1])
    for name in ("pull", "decay_pull", "naive", "naive_share"):
        # Evenly spaced steps: the early ones that lie closer together would count too much.
        values = [
            r.value
            for r in course.readings
            if r.name == name and course.plan.even(r.step or 0) and math.isfinite(r.value)
        ]
        if values:
            found[f"{name}_mean"] = float(np.mean(values))
            found[f"{name}_largest"] = float(np.max(values))
    return found


def _first(alarms: Sequence[Alarm]) -> float:
    return min((a.since for a in alarms), default=math.nan)


def _reached(losses: Sequence[float], level: float) -> float:
    for step in range(_WINDOW, len(losses) + 1):
        if sum(losses[step - _WINDOW : step]) / _WINDOW < level:
            return float(step)
    return math.nan


def curves(course: Course) -> dict[str, NDArray[np.float64]]:
    """`CURVES` at the sampled steps, which are "at", all [k].

    Also "loss" of every step, and "judged": the validation losses, before the first epoch and after
    each.
    """
    by_step: dict[int, dict[str, dict[str, list[float]]]] = {}
    for r in course.readings:
        layer = str(r.where.get("layer", ""))
        by_step.setdefault(r.step or 0, {}).setdefault(r.name, {}).setdefault(layer, []).append(
            r.value
        )
    steps = sorted(step for step, values in by_step.items() if "qk_coherence" in values)
    rows = [_row(by_step[step]) for step in steps]
    found = {name: np.array([row[name] for row in rows]) for name in CURVES}
    found |= {"loss": np.array(course.losses), "judged": np.array(course.judged)}
    return {"at": np.array(steps, float), **found}


def _row(values: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    def each(name: str) -> list[float]:
        return [v for layer in values.get(name, {}).values() for v in layer] or [math.nan]

    layers = values["qk_coherence"]
    alike = [min(*layers[n], *values["ov_coherence"][n]) for n in layers]
    return {
        "coherence": max(alike),
        "effective_heads": min(each("qk_effective_heads") + each("ov_effective_heads")),
        "entropy_share": float(np.mean(each("attention_entropy_share"))),
        "largest_logit": max(each("largest_logit")),
        "map_residual": min(each("map_residual")),
    }


def held_out_values(
    model: Encoder, task: Task, noises: Sequence[float], radii: Sequence[float], steps: int
) -> dict[str, float]:
    """error, loss and macro_f1 on the test rows; on 200 of them errors under noise and attacks.

    Undisturbed these have the error noise_0.
    """
    test = task.test
    with torch.no_grad():
        logits = model(test.x)
        predicted = logits.argmax(-1)
        loss = functional.cross_entropy(logits.flatten(0, -2), test.y.flatten())
    found = {
        "error": float((predicted != test.y).double().mean()),
        "test_loss": float(loss),
        "macro_f1": macro_f1(predicted, test.y, task.classes),
        "parameters": float(sum(p.numel() for p in model.parameters())),
    }
    few = test.first(_ATTACKED)
    function, x, unit = _space(model, few)
    for level in (0.0, *noises):
        right = noise_accuracy(function, x, few.y, level * unit, limits=task.limits)
        found[f"noise_{level:g}"] = 1 - right
    for radius in radii:
        one = fgsm(function, x, few.y, radius * unit, limits=task.limits)
        found[f"fgsm_{radius:g}"] = 1 - accuracy(function, one, few.y)
        many = pgd(function, x, few.y, radius * unit, steps=steps, limits=task.limits)
        found[f"pgd_{radius:g}"] = 1 - accuracy(function, many, few.y)
    return found


def _space(model: Encoder, part: Part) -> tuple[Callable[[Tensor], Tensor], Tensor, float]:
    """What an attack may move, the function of it, and the unit of sizes."""
    if part.x.is_floating_point():
        return model, part.x, 1.0
    hidden = model.hidden(part.x)
    with torch.no_grad():
        embedded = model.embed(part.x)
    unit = float(embedded.square().mean().sqrt())
    return (lambda e: model.from_embedded(e, hidden)), embedded, unit


def pictures(model: Encoder, task: Task, arm: str, whole: bool) -> dict[str, NDArray[Any]]:
    """head_cka [L·h, L·h], layer_cka [L, L] and, if `whole`, maps [L, h, n, n] of one example.

    Rows of features are test examples, averaged over their tokens.
    """
    plain = readable(model, arm)
    assert isinstance(plain, Encoder)
    x = task.test.x[:_ATTACKED]
    features = probe(plain, x, rows="sequences")
    heads = [head for layer in features.heads.values() for head in layer.unbind(0)]
    found = {
        "head_cka": cka_matrix(heads).numpy(),
        "layer_cka": cka_matrix(list(features.layers.values())).numpy(),
    }
    if whole:
        with torch.no_grad():
            found["maps"] = torch.stack(plain.maps(x[:1]))[:, 0].double().numpy()
    return found


def readings(values: Mapping[str, float], where: Mapping[str, str]) -> list[Reading]:
    """Values as Readings of one cell."""
    return [Reading(n, v, where=dict(where), source="collapse") for n, v in values.items()]


def mean_off_diagonal(matrix: NDArray[Any]) -> float:
    """The mean of what is not on the diagonal; nan for one number."""
    off = ~np.eye(len(matrix), dtype=bool)
    return float(np.nanmean(matrix[off])) if len(matrix) > 1 else math.nan
