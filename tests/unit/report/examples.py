"""A run with every kind of Figure and with the worst names a table can have."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from levelhead.base.records import Figure, Run

HOSTILE = (
    "HUFL",
    '<script>window.hostile = "yes"</script>',
    "<img src=x onerror=\"window.hostile='yes'\">",
    "</title></svg></style><b>",
    "\"double\" & 'single' {{ 7 * 7 }}",
    "max. PAR (µmol/m²/s) " + "with a very long name " * 6,
    "rain_" + "n" * 90,
    "气温（摄氏度）🌡️",
    "\u202eright-to-left override",
    "control\x00\x1b[31m and lone surrogate \ud800",
)


def hostile_run(folder: Path) -> Run:
    """Fans of one and of many channels, lines, log lines, heatmaps, a table and bars."""
    rng = np.random.default_rng(7)
    run = Run.create(
        folder,
        title=f"All kinds of figures, and {HOSTILE[1]}",
        command=f"levelhead try --title '{HOSTILE[2]}' --out /{'long/' * 40}",
        settings={
            "horizon": 24,
            "nested": {HOSTILE[3]: HOSTILE[4]},
            "list": [1, "<i>"],
            "no": None,
        },
    )
    run.add_notes([f"The channel {HOSTILE[2]} was found.", "It changes nothing."])
    _add_fans(run, rng)
    _add_lines(run, rng)
    _add_matrices(run, rng)
    values = np.array([0.3645, 0.41, np.nan, -0.02, 12.0, 0.0])
    run.add_arrays({"bars": values, "errors": np.array([0.01, 0.2, np.nan, 0.01, 0.0, 0.0])})
    arrays = {"values": "bars", "error": "errors"}
    labels = {"names": HOSTILE[:6]}
    run.add_figures([_figure("bars", "bars", arrays, labels, axes={"x": HOSTILE[5]})])
    return run


def _figure(name, kind, arrays, labels, **parts) -> Figure:
    return Figure(
        name,
        kind,
        f"The {name} of {HOSTILE[1]}",
        f"See {HOSTILE[3]}.",
        arrays,
        labels=labels,
        **parts,
    )


def _add_fans(run: Run, rng: np.random.Generator) -> None:
    past, ahead, count = 72, 24, len(HOSTILE)
    scale = 10.0 ** np.arange(-4, count - 4)
    walk = rng.normal(size=(past + ahead, count)).cumsum(0) * scale + 100 * scale
    walk[10:15, 2], walk[:, 3], walk[:, 4] = np.nan, 5.0, np.nan
    half = np.sqrt(np.arange(1, ahead + 1))[:, None] * scale
    middle = walk[past:]
    begin = datetime(2023, 12, 30, 5)
    dates = [(begin + timedelta(hours=step)).isoformat() for step in range(past + ahead)]
    names = [f"the long name of step {step}" for step in range(past + ahead)]
    for name, keep, time in (("fan", slice(None), dates), ("single fan", slice(1), names)):
        parts = {
            "history": walk[:past],
            "forecast": middle + half / 3,
            "lower": np.stack([middle - half, middle - 2 * half]),
            "upper": np.stack([middle + half, middle + 2 * half]),
            "actual": middle,
        }
        run.add_arrays({f"{name} {role}": array[..., keep] for role, array in parts.items()})
        labels = {"channels": HOSTILE[keep], "coverage": ["80%", "95%"], "time": time}
        arrays = {role: f"{name} {role}" for role in parts}
        run.add_figures([_figure(name, "fan", arrays, labels, units={"y": "<°C>"})])


def _add_lines(run: Run, rng: np.random.Generator) -> None:
    x = np.arange(1.0, 201.0)
    y = 1e-3 + np.exp(-x / 30) * (1 + rng.random((len(HOSTILE), 200)))
    y[1, 50:60], y[2, 100:], y[3, ::2] = np.nan, np.inf, np.nan
    run.add_arrays({"x": x, "y": y, "mark": np.array([120.0]), "offset": y * 1e-3 + 1e6})
    names = {"x": HOSTILE[5], "y": HOSTILE[6]}
    arrays, labels = {"x": "x", "y": "y", "mark": "mark"}, {"series": HOSTILE}
    run.add_figures(
        [
            _figure("lines", "lines", arrays, labels, axes=names, units={"y": HOSTILE[1]}),
            _figure(
                "log lines",
                "lines",
                arrays,
                labels,
                axes={"y_scale": "log", "x": "step", "fold": HOSTILE[1]},
            ),
            _figure("offset", "lines", {"x": "x", "y": "offset"}, {}),
        ]
    )


def _add_matrices(run: Run, rng: np.random.Generator) -> None:
    attention = rng.dirichlet(np.ones(len(HOSTILE)), len(HOSTILE))
    attention[0, 0] = np.nan
    signed = rng.normal(size=(12, 12)) * 1e-5
    errors = rng.random((4, 5)) * 10.0 ** np.arange(-6, 9, 3)
    errors[1, 2], errors[2, 3] = np.nan, np.inf
    run.add_arrays({"broad": rng.random((3, 12))})
    matrices = {"attention": attention, "signed": signed, "big": rng.random((30, 300))}
    run.add_arrays({**matrices, "errors table": errors})
    both = {"rows": HOSTILE, "columns": HOSTILE}
    run.add_figures(
        [
            _figure("attention", "heatmap", {"values": "attention"}, both, axes={"rows": "<r>"}),
            _figure("signed", "heatmap", {"values": "signed"}, {}),
            _figure("big", "heatmap", {"values": "big"}, {}),
            _figure(
                "table",
                "table",
                {"values": "errors table"},
                {"rows": HOSTILE[3:7], "columns": HOSTILE[:5], "notes": HOSTILE[:4]},
                axes={"best": "min", "rows": HOSTILE[6]},
                units={HOSTILE[1]: "<s>"},
            ),
            _figure(
                "broad table",
                "table",
                {"values": "broad"},
                {
                    "rows": [f"model.layers.{n}.self_attn" for n in range(3)],
                    "columns": [
                        "heads",
                        "groups",
                        "d_k",
                        "QK rank",
                        "OV rank",
                        "logit gain",
                        "QK coh.",
                        "OV coh.",
                        "QK heads",
                        "OV heads",
                        "near dup.",
                        "dead",
                    ],
                    "notes": ["", "dead: heads 3 and 7", "near-duplicates: heads 1 and 2"],
                },
                units={"logit gain": "logit per x²"},
            ),
        ]
    )
