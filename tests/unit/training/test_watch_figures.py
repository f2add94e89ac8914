"""Figures of watched runs: what is drawn is what was read, and so is what is said."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from levelhead.base.errors import StoredFileError
from levelhead.base.records import Figure, Reading, Run
from levelhead.report.document import write_report
from levelhead.training.alarm_rates import NOT_MEASURED, Rates, shipped_rates
from levelhead.training.alarm_rules import ALARMS
from levelhead.training.alarms import Alarm, Detector
from levelhead.training.watch_course import RESUMED, Course, current, thinned
from levelhead.training.watch_figures import figures, redraw
from unit.training.watched_runs import Values, batches


def explodes(step: int, values: Values) -> None:
    if step > 600:
        values["largest_logit", "layers.1", 0] = 500.0


@pytest.fixture
def watched(tmp_path: Path) -> Run:
    run = Run.create(tmp_path / "run", title="Watched", command="watch", settings={"every": 20})
    detector = Detector()
    for batch in batches(explodes, steps=1000):
        run.add_readings([*batch, *(alarm.reading() for alarm in detector.update(batch))])
    return run


def named(drawn: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in drawn}


def test_what_is_drawn_is_what_was_read(watched: Run) -> None:
    arrays, drawn = figures(watched, Rates())
    found = named(drawn)
    read = watched.readings()
    losses = [r.value for r in read if r.name == "loss"]
    # 1,000 losses in 400 stretches: of the first three the median and the largest.
    y = arrays[found["watch.loss"].arrays["y"]]
    assert y.shape == (2, 400)
    assert (y[0, 0], y[1, 0]) == (sorted(losses[:3])[1], max(losses[:3]))
    assert f"From {losses[0]:.4g} to {losses[-1]:.4g} in 1,000 steps" in found["watch.loss"].says
    logits = arrays[found["watch.logits"].arrays["y"]]
    want = [
        [
            max(r.value for r in read
                if r.name == "largest_logit" and r.where["layer"] == layer and r.step == step)
            for step in range(20, 1001, 20)
        ]
        for layer in ("layers.0", "layers.1")
    ]  # fmt: skip
    assert logits.tolist() == want
    assert found["watch.logits"].labels["series"] == ("layers.0", "layers.1")
    shares = arrays[found["watch.entropy"].arrays["y"]]
    heads = arrays[found["watch.entropy_heads"].arrays["values"]]
    np.testing.assert_allclose(shares[0], heads[:3].mean(axis=0), rtol=1e-12)


def test_alarms_are_marked_counted_and_told(watched: Run) -> None:
    arrays, drawn = figures(watched, Rates())
    found = named(drawn)
    assert arrays[found["watch.loss"].arrays["mark"]].tolist() == [620.0]
    table = arrays[found["watch.verdict"].arrays["values"]]
    row = table[ALARMS.index("exploding_logits")]
    assert row.tolist() == [1, 0, 620]
    assert np.nansum(table) == row.sum()
    assert "Exploding logits in layers.1, head 0, since step 620" in found["watch.verdict"].says
    assert NOT_MEASURED in found["watch.verdict"].says
    assert found["watch.alarms"].labels["rows"] == (
        "exploding logits, layers.1 head 0; harmful: no",
    )
    assert arrays["watch.alarms"][0, :3].tolist() == [620.0, 660.0, 500.0]


def test_a_run_can_be_drawn_again_while_it_grows_and_after_it_was_killed(watched: Run) -> None:
    redraw(watched)
    names = [figure.name for figure in watched.figures()]
    path = next(watched.folder.glob("readings-*.jsonl"))
    watched.add_readings([Reading("loss", 0.125, step=1001)])
    path.write_bytes(path.read_bytes() + b'{"name": "loss", "val')
    again = Run.open(watched.folder)
    redraw(again)
    assert [figure.name for figure in again.figures()] == names
    assert "to 0.125 in 1,001 steps" in named(again.figures())["watch.loss"].says
    page = write_report(again).read_text(encoding="utf-8")
    assert page.count('class="border"') == 2  # the mark, in the wide and the narrow drawing
    assert "Exploding logits in layers.1" in page


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    run = Run.create(tmp_path, title="Empty", command="watch", settings={})
    (figure,) = figures(run, Rates())[1]
    assert figure.says.startswith("Nothing was sampled yet.")
    redraw(run)
    assert "Nothing was sampled yet." in write_report(run).read_text(encoding="utf-8")


def test_a_run_without_alarms_and_with_sharp_attention_says_both(tmp_path: Path) -> None:
    def sharp(step: int, values: Values) -> None:
        values["attention_entropy_share", "layers.0", 1] = 0.02

    run = Run.create(tmp_path, title="Sharp", command="watch", settings={})
    for batch in batches(sharp, steps=200):
        run.add_readings(batch)
    says = figures(run, Rates())[1][0].says
    assert says.startswith("No alarm in 200 steps.")
    assert "Attention is sharp in layers.0 head 1: an observation" in says


def test_of_many_layers_heads_and_steps_some_are_drawn_and_it_says_so(tmp_path: Path) -> None:
    run = Run.create(tmp_path, title="Many", command="watch", settings={})
    for step in range(1, 4):
        run.add_readings(
            Reading("attention_entropy_share", 0.5 + layer / 1000 + head / 1e5,
                    where={"layer": f"h.{layer}", "head": head}, step=step)
            for layer in range(100) for head in range(32)
        )  # fmt: skip
    run.add_readings(Reading("loss", 1.0 / s, step=s) for s in range(1, 5001))
    arrays, drawn = figures(run, Rates())
    found = named(drawn)
    assert found["watch.entropy"].labels["series"] == (
        *(f"h.{n}" for n in thinned(100, 12).tolist()),
    )
    assert "Shown are 12 of 100 layers" in found["watch.entropy"].says
    assert arrays["watch.entropy_heads"].shape == (48, 3)
    assert "Shown are 48 of 3200 heads" in found["watch.entropy_heads"].says
    assert found["watch.entropy_heads"].labels["rows"][0] == "h.0 head 0"
    assert arrays["watch.loss.x"].size == 400
    assert arrays["watch.loss.x"][-1] == 5000


def test_cka_is_that_of_the_last_probe(tmp_path: Path) -> None:
    run = Run.create(tmp_path, title="CKA", command="watch", settings={})
    for step, value in ((10, 0.25), (20, 0.75)):
        run.add_readings([
            Reading("layer_cka", value, where={"layer": "a", "other": "b"}, step=step),
            Reading("head_cka", value / 2, where={"layer": "a", "head": 0, "other": 1}, step=step),
            Reading("head_cka", value, where={"layer": "b", "head": 0, "other": 1}, step=step),
        ])  # fmt: skip
    arrays, drawn = figures(run, Rates())
    assert arrays["watch.layer_cka"].tolist() == [[1, 0.75], [0.75, 1]]
    assert named(drawn)["watch.layer_cka"].says.endswith("a and b with 0.75.")
    assert named(drawn)["watch.head_cka"].title == "CKA of heads in b"


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    run = Run.create(tmp_path, title="Gaps", command="watch", settings={})
    run.add_readings(
        Reading(name, value, where=where, step=step)
        for step, value in enumerate([1.0, math.nan, math.inf, 4.0])
        for name, where in (("loss", {}), ("largest_logit", {"layer": "a", "head": 0}))
    )
    arrays, drawn = figures(run, Rates())
    assert "2 values are not finite" in named(drawn)["watch.loss"].says
    assert np.isnan(arrays["watch.logits.y"]).tolist() == [[False, True, True, False]]
    redraw(run)
    assert write_report(run).is_file()


def test_a_run_taken_up_again_shows_what_came_of_it() -> None:
    first = [Reading("loss", 1.0, step=step) for step in (1, 2, 3)]
    grid = Course([*first, Reading("loss", 7.0, step=2)]).grid("loss")
    assert grid.steps.tolist() == [1, 2, 3]
    assert grid.values.tolist() == [[1, 7, 1]]


# ── rates ──

RATE = {"planted": 20, "recall": 1.0, "recall_low": 0.83, "null_steps": 75000,
        "false_per_1000": 0.0, "false_high": 0.05}  # fmt: skip


def test_measured_rates_stand_beside_the_alarms(watched: Run) -> None:
    rates = shipped_rates(json.dumps({"alarms": {"dead_head": RATE}, "command": "x"}))
    arrays, drawn = figures(watched, rates)
    assert drawn[0].labels["columns"][-4:] == (
        "recall", "at least", "false per 1,000 steps", "at most"
    )  # fmt: skip
    assert arrays["watch.verdict"][ALARMS.index("dead_head"), 3:].tolist() == [1.0, 0.83, 0.0, 0.05]
    assert "(95 % bound 83%, 20 runs)" in drawn[0].says
    assert "(bound 0.05, 75,000 steps)" in drawn[0].says


@pytest.mark.parametrize("text", ["{", "[]", '{"alarms": {"dead_head": {}}}', "{}"])
def test_altered_rates_are_refused(text: str) -> None:
    with pytest.raises(StoredFileError, match="install it again"):
        shipped_rates(text)


def test_rates_of_this_version_can_be_read() -> None:
    rates = shipped_rates()
    assert set(rates.alarms) <= set(ALARMS)
    assert rates.says()


def test_no_torch_is_needed(watched: Run) -> None:
    script = (
        "import sys; from levelhead.base.records import Run; "
        "from levelhead.training.watch_figures import redraw; "
        f"redraw(Run.open({str(watched.folder)!r})); print('torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "False\n"


def test_heads_of_one_layer_are_one_row_and_harm_is_a_word(tmp_path: Path) -> None:
    run = Run.create(tmp_path, title="Many heads", command="watch", settings={})
    run.add_readings([Reading("loss", 1.0, step=step) for step in (1, 2, 3)])
    for head, harm in ((4, ""), (0, ""), (2, "the loss rose")):
        alarm = Alarm(
            name="dead_head", step=3, since=2, layer="enc", head=head, value=0.01, threshold=0.05,
            evidence="x", harmful=bool(harm), harm=harm,
        )  # fmt: skip
        run.add_readings([alarm.reading()])
    arrays, drawn = figures(run, Rates())
    found = named(drawn)["watch.alarms"]
    assert found.labels["rows"] == (
        "dead head, enc head 2; harmful: yes",
        "dead head, enc heads 0, 4; harmful: no",
    )
    assert arrays["watch.alarms"].tolist() == [[2, 3, 0.01, 0.05]] * 2
    assert found.says.startswith("3 alarms, 1 of them harmful: the loss rose.")


def test_axes_are_capitalised_alike(watched: Run) -> None:
    for figure in figures(watched, Rates())[1]:
        for axis in ("x", "y", "rows", "columns"):
            assert figure.axes.get(axis, "X")[0].isupper(), (figure.name, axis)


def test_what_a_resumed_run_superseded_is_not_drawn() -> None:
    """A mark of the other process's Readings drops those alone."""
    found = [
        Reading("loss", 1.0, step=30),
        Reading("qk_tucker_error", 0.5, step=30, source="snapshot"),
        Reading(RESUMED, 20, step=20, source="loop"),
        Reading("loss", 2.0, step=21),
        Reading("loss", 0.0, step=20),
    ]
    assert [(r.name, r.value) for r in current(found)] == [
        ("qk_tucker_error", 0.5),
        ("loss", 2.0),
        ("loss", 0.0),
    ]
    mark = Reading(RESUMED, 20, step=20, source="snapshot")
    assert [r.name for r in current([*found, mark])] == ["loss", "loss"]
