"""Pictures of the collapse study: errors as bars, attention maps side by side, CKA."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Figure
from levelhead.studies.collapse_outcomes import FRESH, CollapseOutcomes

__all__ = ["DISTURBED", "add_cka", "add_errors", "add_maps", "disturbances"]

Made = tuple[dict[str, NDArray[Any]], list[Figure]]

DISTURBED = 200
"""At most so many test rows are disturbed."""


def disturbances(settings: Any) -> list[str]:
    """Names of the errors on disturbed rows; the first is that of the same rows undisturbed."""
    names = [f"noise_{level:g}" for level in (0.0, *settings.noises)]
    return names + [f"{kind}_{r:g}" for kind in ("fgsm", "pgd") for r in settings.radii]


def add_errors(found: CollapseOutcomes, task: str, arms: list[str], made: Made) -> None:
    """Bars of test error and F1; bars of each arm's errors on disturbed rows."""
    _add_bars(
        found, task, [(arm, "error", arm) for arm in arms], "error", "Test error",
        "Means over seeds ± their standard error, all test rows.", made,
    )  # fmt: skip
    _add_bars(
        found, task, [(arm, "macro_f1", arm) for arm in arms], "macro-f1", "Macro F1 on test rows",
        "Means over seeds ± their standard error, all test rows; more is better.", made,
    )  # fmt: skip
    settings = found.settings
    for kind, sizes in (
        ("noise", settings.noises),
        ("fgsm", settings.radii),
        ("pgd", settings.radii),
    ):
        size = f"{max(sizes, default=0.0):g}"
        name = f"{kind}_{size}"
        title = f"Test error under {kind if kind == 'noise' else kind.upper()} of {size}"
        bars = [
            bar
            for arm in arms
            for bar in ((arm, "noise_0", f"{arm}, undisturbed"), (arm, name, f"{arm}, {name}"))
        ]
        says = (
            f"The first {DISTURBED} test rows (all, if there are fewer), undisturbed and disturbed;"
            " means over seeds ± their standard error. Smaller sizes stand in the table."
        )
        _add_bars(found, task, bars, f"error-{name.replace('_', '-')}", title, says, made)


def _add_bars(
    found: CollapseOutcomes,
    task: str,
    bars: list[tuple[str, str, str]],
    key: str,
    title: str,
    says: str,
    made: Made,
) -> None:
    """Bars (arm, number, label); none if no arm has the numbers."""
    values, error = np.full(len(bars), np.nan), np.full(len(bars), np.nan)
    for place, (arm, name, _) in enumerate(bars):
        numbers = list(found.values(task, arm, name).values())
        if numbers:
            values[place] = np.mean(numbers)
        if len(numbers) > 1:
            error[place] = np.std(numbers, ddof=1) / math.sqrt(len(numbers))
    if not np.isfinite(values).any():
        return
    key = f"{key}-{task}"
    made[0][f"{key}.values"], made[0][f"{key}.error"] = values, error
    roles = {"values": f"{key}.values", "error": f"{key}.error"}
    labels = {"names": [label for _, _, label in bars]}
    made[1].append(Figure(key, "bars", f"{title}, {task}", says, roles, labels=labels))


def add_maps(found: CollapseOutcomes, task: str, arms: list[str], made: Made) -> None:
    """Attention of one test example, all heads of all shown arms beside one another, by layer."""
    stacks = {
        arm: outcome.arrays["maps"]
        for arm in arms
        if (outcome := found.verdicts(task, arm).get(FRESH)) is not None
        and "maps" in outcome.arrays
    }
    if not stacks:
        return
    layers, heads, n, _ = next(iter(stacks.values())).shape
    for layer in range(layers):
        key = f"maps-{task}-layer-{layer}"
        made[0][f"{key}.values"] = np.concatenate(
            [head for maps in stacks.values() for head in maps[layer]], axis=1
        )
        made[1].append(
            Figure(
                key,
                "heatmap",
                f"Attention side by side, {task}, layer {layer}",
                "One test example, first fresh seed; a row is a token that asks. Heads that are "
                "copies show the same pattern twice.",
                {"values": f"{key}.values"},
                axes={"x": "arm, head: key", "y": "query"},
                labels={
                    "rows": [str(i) for i in range(n)],
                    "columns": [
                        f"{arm}, head {h}: {k}"
                        for arm in stacks
                        for h in range(heads)
                        for k in range(n)
                    ],
                },
            )
        )


def add_cka(found: CollapseOutcomes, task: str, arms: list[str], made: Made) -> None:
    """Debiased CKA, means over seeds: between the heads of each arm, then between its layers."""
    layers = {}
    for arm in arms:
        if (matrix := _mean_matrix(found, task, arm, "layer_cka")) is not None:
            layers[arm] = matrix
        matrix = _mean_matrix(found, task, arm, "head_cka")
        if matrix is None:
            continue
        heads = found.settings.heads
        names = [f"layer {i // heads}, head {i % heads}" for i in range(len(matrix))]
        title = f"How alike what heads write is, {task}, {arm}"
        says = f"Debiased CKA, mean over seeds; between different heads {_between(matrix)}."
        key = f"head-cka-{task}-{arm.replace('.', '-').lower()}"
        _add_heatmap(made, key, title, says, matrix, names, names, "head")
    if not layers:
        return
    size = len(next(iter(layers.values())))
    told = ", ".join(f"{arm} {_between(matrix)}" for arm, matrix in layers.items())
    _add_heatmap(
        made,
        f"layer-cka-{task}",
        f"How alike what layers write is, {task}, all arms side by side",
        f"Debiased CKA, mean over seeds; between different layers {told}.",
        np.concatenate(list(layers.values()), axis=1),
        [f"layer {i}" for i in range(size)],
        [f"{arm}, layer {i}" for arm in layers for i in range(size)],
        "layer",
    )


def _between(matrix: NDArray[np.float64]) -> str:
    """The mean off the diagonal, as far as it is known."""
    off = matrix[~np.eye(len(matrix), dtype=bool)]
    known = off[np.isfinite(off)]
    return f"{known.mean():.2f}" if known.size else "not known"


def _add_heatmap(
    made: Made, key: str, title: str, says: str, values: NDArray[np.float64], rows: list[str],
    columns: list[str], axis: str,
) -> None:  # fmt: skip
    made[0][f"{key}.values"] = values
    labels = {"rows": rows, "columns": columns}
    axes = {"x": axis, "y": axis}
    roles = {"values": f"{key}.values"}
    made[1].append(Figure(key, "heatmap", title, says, roles, axes=axes, labels=labels))


def _mean_matrix(
    found: CollapseOutcomes, task: str, arm: str, name: str
) -> NDArray[np.float64] | None:
    """The mean over seeds of a matrix [k, k], of each entry where it is known."""
    outcomes = found.verdicts(task, arm).values()
    stack = [o.arrays[name] for o in outcomes if name in o.arrays]
    if not stack:
        return None
    known = np.isfinite(stack)
    total = np.where(known, stack, 0.0).sum(axis=0)
    matrix: NDArray[np.float64] = np.full(total.shape, np.nan)
    np.divide(total, known.sum(axis=0), out=matrix, where=known.any(axis=0))
    return matrix
