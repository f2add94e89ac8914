"""The catalogue as rows, and its declarations on the layers of a source."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from levelhead.base.errors import InputError
from levelhead.inspection.verification import (
    Verification,
    catalogue_rows,
    catalogue_text,
    parse_assumptions,
    verify_checkpoint,
)
from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.entry import Verdict
from levelhead.invariants.symmetry import Check, Verdicts
from levelhead.weights.symmetry_group import GENERATORS

SOME = ["qk_spectrum", "ov_spectrum", "raw_head_spectrum", "qk_effective_heads"]


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(12, 3)


def test_declarations_hold_on_the_layers_own_group(model) -> None:
    found = verify_checkpoint(model, invariants=SOME)
    assert found.passed
    assert found.failures() == []
    table = {row["invariant"]: row for row in found.table()}
    assert list(table) == SOME
    assert (table["qk_spectrum"]["qk_gauge"], table["raw_head_spectrum"]["qk_gauge"]) == (
        "=",
        "moves",
    )
    assert "rotary_gauge" not in table["qk_spectrum"]
    rows = found.rows()
    moved = [
        r for r in rows if r["invariant"] == "raw_head_spectrum" and r["declared"] == "variant"
    ]
    assert moved
    assert all(r["change"] > r["tolerance"] for r in moved)


def test_a_wrong_declaration_is_found_and_named(model) -> None:
    found = verify_checkpoint(model, invariants=SOME, assume={"raw_head_spectrum": "gauge"})
    assert not found.passed
    table = {row["invariant"]: row for row in found.table()}
    assert table["raw_head_spectrum"]["qk_gauge"] == "WRONG"
    assert table["qk_spectrum"]["qk_gauge"] == "="
    said = found.failures()
    assert "raw_head_spectrum is declared invariant (assumed) under qk_gauge" in said[0]
    assert "it moves by" in said[0]


def test_the_catalogue_is_printed_whole() -> None:
    rows = catalogue_rows()
    assert [row["name"] for row in rows] == list(catalogue())
    for row in rows:
        assert {"formula", "unit", "kind", "degree", "source", *GENERATORS} <= row.keys()
        assert row["gradient"] == "tested" or len(row["gradient"]) > len("not tested: ")
    (row,) = catalogue_rows(["qk_spectrum"])
    assert (row["qk_gauge"], row["qk_scale"]) == ("invariant", "variant")
    text = catalogue_text()
    assert text.count("\n\n") == len(rows) - 1
    assert all(f"{name} = " in text for name in catalogue())


@pytest.mark.parametrize("text", ["raw_head_spectrum", "=gauge", "raw_head_spectrum="])
def test_assumptions_are_written_as_name_and_group(text: str) -> None:
    with pytest.raises(InputError, match="write NAME=GROUP"):
        parse_assumptions([text])


def test_unknown_names_are_told_before_anything_is_read() -> None:
    with pytest.raises(InputError, match="no invariant 'tail'"):
        verify_checkpoint("no such file", assume={"tail": "gauge"})
    with pytest.raises(InputError, match="no group 'gage'"):
        verify_checkpoint("no such file", assume={"qk_spectrum": "gage"})
    with pytest.raises(InputError, match="no invariant 'tail'"):
        catalogue_rows(["tail"])


def test_one_wrong_layer_among_right_ones_fails_the_checkpoint() -> None:
    check = Check("number", "qk_gauge", Verdict.INVARIANT, "", 0.0, None, 1e-8, True, "still")
    right = Verdicts("a", (check,))
    wrong = Verdicts("b", (replace(check, change=0.5, passed=False, found="moved"),))
    for verdicts in ((right, wrong), (wrong, right)):
        found = Verification("here", verdicts)
        assert not found.passed
        assert len(found.failures()) == 1
    assert Verification("here", (right, right)).passed
