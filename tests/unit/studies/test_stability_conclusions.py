"""What the stability study concludes, from readings that were planted."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from levelhead.base.records import Reading
from levelhead.studies.stability import STUDY, StabilitySettings
from levelhead.studies.stability_conclusions import MODELS, MOVES
from levelhead.studies.study import Findings, Outcome, Statement

# Of these the first two are declared invariant under turns and gauges, the last under turns only.
ENTRIES = ("qk_spectrum", "qk_rank", "raw_head_spectrum")
SEEDS = (0, 1, 2)
Changes = Mapping[tuple[str, str, int], float]


def adjusted(model: str, seed: int, *, wrong: float = 0.0, gap: float = 1e-15) -> Outcome:
    where: dict[str, str | int] = {"model": model, "seed": seed}
    readings = [Reading("declarations", 7.0, where=where), Reading("wrong", wrong, where=where)]
    for move in MOVES:
        readings.append(Reading("function", gap, where={**where, "move": move}))
        for entry in ENTRIES:
            moves = entry.startswith("raw") and move == "gauge"
            place = {**where, "move": move, "entry": entry}
            readings.append(Reading("moved", 0.5 if moves else 1e-14, where=place))
    return Outcome(readings)


def retrained(optimiser: str, seed: int, changes: Changes | None = None) -> Outcome:
    """All stays but what `changes` names by entry, move and seed."""
    where: dict[str, str | int] = {"optimiser": optimiser, "seed": seed}
    readings = [Reading("value", 1.0 + seed, where={**where, "entry": e}) for e in ENTRIES]
    for move in MOVES:
        for entry in ENTRIES:
            change = (changes or {}).get((entry, move, seed), 1e-13)
            place = {**where, "move": move, "entry": entry}
            readings.append(Reading("moved-again", change, where=place))
    return Outcome(readings)


def cells(sgd: Changes | None = None, adam: Changes | None = None) -> dict[str, Outcome]:
    made = {f"adjusted-{m}-{s}": adjusted(m, s) for m in MODELS for s in SEEDS}
    for seed in SEEDS:
        made[f"retrained-sgd-{seed}"] = retrained("sgd", seed, sgd)
        made[f"retrained-adam-{seed}"] = retrained("adam", seed, adam)
    return made


def found(outcomes: Mapping[str, Outcome]) -> Findings:
    return STUDY.conclude(StabilitySettings(seeds=3, heads=2, head_width=2, width=4), outcomes)


def answer(outcomes: Mapping[str, Outcome], name: str) -> Statement:
    return next(s for s in found(outcomes).statements if s.name == name)


def test_what_stays_everywhere_is_said_to_stay() -> None:
    said = {s.name: s.holds for s in found(cells()).statements}
    assert set(said.values()) == {True}
    said = found(cells()).conclusion
    assert (
        "gauge: 1 of 2 quantities stay with adjusted weights, beside 1 of 1 whole-valued ranks "
        "and counts."
    ) in said
    assert (
        "1 of 1 quantities of the raw head tensor, without ranks and counts, move under gauges, by "
        "up to 0.5."
    ) in said


def test_whole_numbers_are_counted_apart_and_do_not_make_the_median() -> None:
    turned = {(entry, "orthogonal", 1): 0.25 for entry in ("qk_spectrum", "raw_head_spectrum")}
    said = answer(cells(adam=turned), "adam-equivariant").evidence
    assert said.startswith(
        "0 of 2 quantities stay, beside 1 of 1 whole-valued ranks and counts; largest change "
        "over seeds 0.25 (qk_spectrum), median over quantities 0.25;"
    )
    ranks = answer(cells(adam={("qk_rank", "orthogonal", 1): 0.5}), "adam-equivariant")
    assert ranks.holds is False
    assert "2 of 2 quantities stay, beside 0 of 1 whole-valued ranks" in ranks.evidence


def test_what_is_too_small_is_named_and_neither_stays_nor_moves() -> None:
    small = {
        name: Outcome(
            [
                r
                for r in outcome.readings
                if (r.where.get("entry"), r.where.get("move")) != ("qk_spectrum", "orthogonal")
            ]
        )
        for name, outcome in cells().items()
    }
    said = answer(small, "sgd-equivariant")
    assert said.holds is True
    assert said.evidence.startswith(
        "1 of 1 quantities stay, beside 1 of 1 whole-valued ranks and counts (too small to be "
        "judged: qk_spectrum); "
    )
    assert (
        "orthogonal: 1 of 1 quantities stay with adjusted weights, beside 1 of 1 whole-valued "
        "ranks and counts (too small to be judged: qk_spectrum)."
    ) in found(small).conclusion


def test_every_table_says_how_changes_are_measured() -> None:
    says = {table.name: table.says for table in found(cells()).tables}
    assert set(says) == {"adjusted", "retrained-sgd", "retrained-adam"}
    for sentence in says.values():
        assert "difference of its values over their largest size before or after" in sentence
        assert "are not judged" in sentence


def test_changes_by_an_earlier_definition_are_left_out_and_it_is_said() -> None:
    older = {"moved": "change", "moved-again": "retrained"}
    made = {
        name: Outcome(
            [Reading(older.get(r.name, r.name), r.value, where=r.where) for r in outcome.readings]
        )
        for name, outcome in cells().items()
    }
    assert answer(made, "sgd-equivariant").holds is None
    assert [s for s in found(made).conclusion if "earlier version" in s]
    assert not [t for t in found(made).tables if t.name == "adjusted"]
    assert not [s for s in found(cells()).conclusion if "earlier version" in s]


def test_a_bound_of_no_nat_has_no_spread() -> None:
    made = cells()
    for seed, value in zip(SEEDS, (1e-29, 3e-29, 5e-29), strict=True):
        where = {"optimiser": "sgd", "seed": seed, "entry": "entropy_bound"}
        old = made[f"retrained-sgd-{seed}"]
        made[f"retrained-sgd-{seed}"] = Outcome(
            [*old.readings, Reading("value", value, where=where)]
        )
    [table] = [t for t in found(made).tables if t.name == "retrained-sgd"]
    spread = dict(zip(table.rows, table.values[:, -1].tolist(), strict=True))
    assert math.isnan(spread["entropy_bound"])
    assert spread["qk_spectrum"] == pytest.approx(1 / 3)  # of 1, 2 and 3


@pytest.mark.parametrize(
    ("name", "optimiser", "move", "kept"),
    [
        ("sgd-equivariant", "sgd", "orthogonal", "1 of 2"),
        ("adam-equivariant", "adam", "orthogonal", "1 of 2"),
        ("gauge-blind-training", "sgd", "gauge", "0 of 1"),
    ],
)
def test_one_quantity_of_one_seed_is_enough_to_fail(
    name: str, optimiser: str, move: str, kept: str
) -> None:
    # Medians over seeds, and over quantities, would not see it.
    moved = cells(**{optimiser: {("qk_spectrum", move, 1): 0.25}})
    said = answer(moved, name)
    assert said.holds is False
    assert said.evidence.startswith(
        f"{kept} quantities stay, beside 1 of 1 whole-valued ranks and counts; largest change "
        "over seeds 0.25 (qk_spectrum), "
    )
    assert [s.name for s in found(moved).statements if not s.holds] == [name]


def test_a_quantity_that_is_not_declared_is_not_asked() -> None:
    moved = cells(sgd={("raw_head_spectrum", "gauge", 0): 0.9})
    assert answer(moved, "gauge-blind-training").holds is True


@pytest.mark.parametrize("name", ["same-function", "declarations"])
def test_a_missing_model_is_named_and_nothing_holds_for_every_model(name: str) -> None:
    left = {k: o for k, o in cells().items() if "collapsed" not in k}
    said = answer(left, name)
    assert said.holds is None
    assert said.failed
    assert said.evidence.endswith("Missing: collapsed.")
    del left["adjusted-trained-1"]
    assert answer(left, name).evidence.endswith("Missing: trained (seed 1), collapsed.")
    assert "Not looked at with adjusted weights: trained (seed 1), collapsed." in (
        found(left).conclusion
    )
    # One that fails settles it, whatever is missing.
    left["adjusted-random-0"] = adjusted("random", 0, wrong=1.0, gap=1e-3)
    assert answer(left, name).holds is False


def test_a_missing_optimiser_is_not_judged() -> None:
    left = {k: o for k, o in cells().items() if "adam" not in k}
    said = answer(left, "adam-equivariant")
    assert said.holds is None
    assert said.evidence == "No cell is there."
    assert answer(left, "sgd-equivariant").holds is True
    other = {k: o for k, o in cells().items() if "sgd" not in k}
    assert answer(other, "sgd-equivariant").holds is None
    assert answer(other, "gauge-blind-training").holds is None
    assert answer(other, "adam-equivariant").holds is True


@pytest.mark.parametrize("kept", ["nothing", "adjusted", "retrained"])
def test_without_cells_nothing_is_judged(kept: str) -> None:
    left = {k: o for k, o in cells().items() if k.startswith(kept)}
    conclusions = found(left)
    for said in conclusions.statements:
        about_models = said.name in ("same-function", "declarations")
        assert said.holds is (True if about_models == (kept == "adjusted") and left else None)
    if kept == "nothing":
        assert conclusions.tables == []
        assert conclusions.conclusion == []
