"""What a study is made of: grids, statements, tables."""

from __future__ import annotations

import numpy as np
import pytest

from levelhead.base.errors import InputError
from levelhead.base.records import Reading
from levelhead.studies.study import Cell, Outcome, Statement, Table, grid


def test_a_grid_is_every_combination_once_with_names_that_tell() -> None:
    cells = grid(arm=["a", "b"], rate=[0.1, 1e-3], seed=[0, 1])
    assert len({cell.name for cell in cells}) == len(cells) == 8
    assert cells[0].name == "a-0.1-0"
    assert cells[3].given == {"arm": "a", "rate": 1e-3, "seed": 1}


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", ".hidden", "x" * 200])
def test_a_cell_name_must_be_fit_for_a_folder(name: str) -> None:
    with pytest.raises(InputError, match="cannot be a folder"):
        Cell(name, {})


@pytest.mark.parametrize(
    ("holds", "expected", "failed", "word"),
    [
        (True, True, False, "Holds"),
        (False, True, True, "Fails"),
        (None, True, True, "Not judged"),
        (True, False, False, "Yes"),
        (False, False, False, "No"),
        (None, False, False, "Not judged"),
    ],
)
def test_only_an_expected_statement_can_fail(
    holds: bool | None, expected: bool, failed: bool, word: str
) -> None:
    statement = Statement("s", "It holds.", holds, "1 < 2.", expected)
    assert statement.failed is failed
    assert str(statement) == f"{word}: It holds. 1 < 2."


def test_a_table_as_text_keeps_nine_digits_and_quotes_commas() -> None:
    values = np.array([[1 / 3, np.nan], [2.0, -1e-12]])
    table = Table("t", "T", "says", ["a, b", "c"], ["x", "y, z"], values, row_axis="arm")
    assert table.csv() == 'arm,x,"y, z"\n"a, b",0.333333333,nan\nc,2,-1e-12\n'
    assert table.figure().arrays == {"values": "table.t"}


def test_the_value_of_an_outcome_is_looked_up_by_name_and_place() -> None:
    readings = [Reading("loss", 1.0, where={"arm": "a"}), Reading("loss", 2.0, where={"arm": "b"})]
    outcome = Outcome(readings)
    assert outcome.value("loss", arm="b") == 2.0
    assert np.isnan(outcome.value("loss", arm="c"))
    assert np.isnan(outcome.value("other"))
