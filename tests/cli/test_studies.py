"""`levelhead study` as a command; every study runs here in its quick form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from levelhead.cli import app
from levelhead.studies.catalogue import STUDIES


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", list(STUDIES))
def test_every_study_runs_quickly_and_its_statements_hold(name: str, tmp_path: Path) -> None:
    result = call("study", name, "--quick", "--jobs", 1, "--json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    statements = json.loads(result.stdout)
    assert statements == json.loads((tmp_path / "out" / "statements.json").read_text())
    assert all(statement["holds"] for statement in statements if statement["expected"])
    assert any(statement["expected"] for statement in statements)
    assert "report.html" in result.stderr
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert STUDIES[name].question.split(",")[0] in page
    assert list((tmp_path / "out" / "tables").glob("*.csv"))


def test_without_a_name_the_studies_are_listed() -> None:
    result = call("study", "--json")
    assert result.exit_code == 0
    assert [row["study"] for row in json.loads(result.stdout)] == list(STUDIES)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "there is no study 'nothing': choose from toy"),
        (["toy", "--quick", "--full"], "--quick and --full were both given"),
        (["toy", "--resume"], "--resume needs --out"),
        (["toy", "--set", "epochs"], "--set epochs was given: write a setting and its value"),
        (["toy", "--set", "epoch=3"], "the study toy has no setting 'epoch'"),
        (["toy", "--set", "epochs=0"], "the setting epochs = '0' does not fit"),
        (["toy", "--engine", "ray", "--jobs", "1"], "--jobs 1 runs everything here"),
        (["--quick"], "which study? Name one of toy,"),
        (["toy", "--address", "tcp://x:1"], "--address is of a Dask or Ray cluster"),
        (["toy", "--settings", "none.toml"], "none.toml is no file: name a settings.toml"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("study", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_statement_that_fails_makes_the_exit_code_1(tmp_path: Path) -> None:
    # So few examples that least squares cannot find W_toy: it is not identifiable.
    result = call(
        "study", "toy", "--quick", "--jobs", 1, "--out", tmp_path / "out",
        "--set", "training=32", "--set", "context=200", "--set", "arms=linear",
        "--set", "optimisers=", "--set", "epochs=2",
    )  # fmt: skip
    assert result.exit_code == 1, result.stderr
    assert "identifiable" in result.stderr.splitlines()[-1]
