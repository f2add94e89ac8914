"""The mutants runner on a tiny package: what it reports, and that a survivor fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parents[1] / "mutants.py"

DOUBLE = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n"
TESTS = """
from levelhead.numbers import double, triple

def test_double():
    assert double(3) == 6

def test_triple_weakly():
    assert triple(0) == 0
"""
CAUGHT = ("caught", "2 * x", "5 * x")
SURVIVING = ("surviving", "3 * x", "4 * x")


def project(
    folder: Path, *mutants: tuple[str, str, str], tests: str = TESTS, file: str = "numbers.py"
) -> Path:
    package = folder / "src" / "levelhead"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "numbers.py").write_text(DOUBLE)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_numbers.py").write_text(tests)
    entries = [
        f'[[mutant]]\nname = "{name}"\nfile = "{file}"\nfind = "{find}"\nreplace = "{replace}"\n'
        f'tests = ["tests/test_numbers.py"]\n'
        for name, find, replace in mutants
    ]
    (folder / "tests" / "mutants.toml").write_text("\n".join(entries))
    return folder


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--root", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def line(output: str, name: str) -> str:
    return next(row for row in output.splitlines() if row.startswith(name))


def test_a_survivor_fails_and_the_source_is_left_alone(tmp_path: Path) -> None:
    folder = project(tmp_path, CAUGHT, SURVIVING)
    code, output = run(folder)
    assert code == 1
    assert re.search(r"^caught\s+caught .*test_double$", line(output, "caught"))
    assert re.search(r"^surviving\s+survived .*no test failed$", line(output, "surviving"))
    assert output.splitlines()[-1] == "1 caught, 1 survived"
    assert (folder / "src" / "levelhead" / "numbers.py").read_text() == DOUBLE
    assert not list(folder.rglob(".pytest_cache"))


def test_all_caught_is_success_and_only_picks(tmp_path: Path) -> None:
    folder = project(tmp_path, CAUGHT, SURVIVING)
    code, output = run(folder, "--only", "caught")
    assert code == 0
    assert output.splitlines()[-1] == "1 caught, 0 survived"
    assert "surviving" not in output
    code, output = run(folder, "--only", "unheard of")
    assert code == 2
    assert "no mutant 'unheard of'" in output


@pytest.mark.parametrize(
    ("mutant", "file", "reason"),
    [
        (("m", "7 * x", "8 * x"), "numbers.py", "`find` occurs 0 times in numbers.py"),
        (("m", "return", "yield"), "numbers.py", "`find` occurs 2 times in numbers.py"),
        (("m", "2 * x", "2 * x"), "numbers.py", "`replace` changes nothing"),
        (("m", "2 * x", "5 * x"), "absent.py", "no file absent.py"),
        (("m", "2 * x", "2 * x +"), "numbers.py", "pytest exit code"),  # does not even import
    ],
)
def test_a_mutant_that_says_nothing_is_no_catch(
    tmp_path: Path, mutant: tuple[str, str, str], file: str, reason: str
) -> None:
    code, output = run(project(tmp_path, mutant, file=file))
    assert code == 1
    assert reason in line(output, "m ")
    assert output.splitlines()[-1] == "0 caught, 0 survived, 1 broken"


def test_tests_that_fail_by_themselves_are_reported(tmp_path: Path) -> None:
    code, output = run(project(tmp_path, CAUGHT, tests=TESTS.replace("== 6", "== 7")))
    assert code == 1
    assert "do not pass without a mutant" in output.splitlines()[-1]
    assert "caught, " not in output


def test_an_endless_mutant_is_ended(tmp_path: Path) -> None:
    endless = ("endless", "return 2 * x", "while True: pass")
    code, output = run(project(tmp_path, endless), "--timeout", "10")
    assert code == 0
    assert line(output, "endless").endswith("out of time")


def test_tests_that_see_another_package_are_refused(tmp_path: Path) -> None:
    folder = project(tmp_path, CAUGHT)
    # Puts the source before the copy, as a badly installed package might.
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(folder / 'src')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--root", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 1
    assert "not the copy beside" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[[mutant]]\nname = "a"\n',
        "[[mutant",
        '[[mutant]]\nname="a"\nfile="f"\nfind="x"\nreplace="y"\ntests=[]\n',
    ],
)
def test_a_list_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    folder = project(tmp_path, CAUGHT)
    (folder / "tests" / "mutants.toml").write_text(text)
    code, output = run(folder)
    assert code == 2
    assert len(output.splitlines()) == 1


def test_every_mutant_of_the_list_can_be_planted() -> None:
    root = Path(__file__).resolve().parents[2]
    listed = tomllib.loads((root / "tests" / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    assert len({mutant["name"] for mutant in listed}) == len(listed)
    for mutant in listed:
        text = (root / "src" / "levelhead" / mutant["file"]).read_text(encoding="utf-8")
        assert text.count(mutant["find"]) == 1, mutant["name"]
        assert mutant["find"] != mutant["replace"], mutant["name"]
        for test in mutant["tests"]:
            assert (root / test.split("::")[0]).exists(), mutant["name"]
