"""Plant known faults in a copy of the package and check that the tests notice each.

    python tests/mutants.py [--only NAME]... [--root FOLDER] [--timeout SECONDS]

FOLDER holds `src/levelhead` and `tests/mutants.toml`, a list of tables

    [[mutant]]
    name = "reversed ascent"
    file = "training/sam.py"      # below src/levelhead
    find = "…"                    # exact text, occurring once in the file
    replace = "…"
    tests = ["tests/unit/…"]      # pytest arguments, of which at least one test must fail

Nothing in FOLDER is changed. A mutant is caught when its tests fail or run out of time; tests that
cannot even be collected are no catch, for such a mutant says nothing about the tests. Exit code 0:
all caught · 1: a survivor, a `find` that does not occur exactly once, a run that could not be
judged, or tests that fail without a mutant · 2: a list that cannot be read, or an unknown name.
"""
# ruff: noqa: T201 - a command: its table is its result

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

PACKAGE = "levelhead"
ALL_PASSED, SOME_FAILED = 0, 1  # pytest's exit codes; any other means that it judged nothing

# Loaded into every pytest run: the tests must see the copy, not an installed package.
GUARD = f"""
import pathlib, pytest, {PACKAGE}

def pytest_configure(config):
    found, here = pathlib.Path({PACKAGE}.__file__).resolve(), pathlib.Path(__file__).resolve()
    if here.parent not in found.parents:
        raise pytest.UsageError(f"the tests import {{found}}, not the copy beside {{here}}")
"""


@dataclass(frozen=True)
class Mutant:
    """One fault: `find` becomes `replace` in `file`; some of `tests` must fail."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of one run: caught, survived, or broken (nothing can be said)."""

    verdict: str
    detail: str
    seconds: float = 0.0


def read_list(path: Path) -> list[Mutant]:
    """The mutants of a TOML list; ValueError with the entry's number if it is not as described."""
    names = {field.name for field in fields(Mutant)}
    mutants = []
    for i, entry in enumerate(tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []), 1):
        if set(entry) != names or not entry["tests"] or not isinstance(entry["tests"], list):
            raise ValueError(f"{path}: mutant {i} needs exactly {sorted(names)}, tests not empty")
        mutants.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    if not mutants or len({m.name for m in mutants}) != len(mutants):
        raise ValueError(f"{path}: at least one mutant is needed, and every name only once")
    return mutants


def copy_package(root: Path, folder: Path) -> Path:
    """Copy the package and the guard into `folder`; return the copy."""
    copy = folder / PACKAGE
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "src" / PACKAGE, copy, ignore=ignored)
    (folder / "mutants_guard.py").write_text(GUARD, encoding="utf-8")
    return copy


def run_tests(root: Path, folder: Path, tests: list[str], timeout: float) -> tuple[int | None, str]:
    """pytest's exit code (None: out of time) with the copy in `folder`, and its last lines."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    # No byte code: a mutant written within the same second could be taken for the original.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    options = ["-x", "-q", "-p", "mutants_guard", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill_session(process)
        output, _ = process.communicate()
        return None, output
    except BaseException:
        _kill_session(process)
        raise
    return process.returncode, output


def _kill_session(process: subprocess.Popen[str]) -> None:
    """End the run and whatever its tests have started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def try_mutant(root: Path, mutant: Mutant, timeout: float) -> Outcome:
    """Plant one mutant in a fresh copy and run its tests."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        file = copy_package(root, Path(name)) / mutant.file
        if not file.is_file():
            return Outcome("broken", f"no file {mutant.file}")
        text = file.read_text(encoding="utf-8")
        if (count := text.count(mutant.find)) != 1:
            return Outcome("broken", f"`find` occurs {count} times in {mutant.file}")
        if mutant.find == mutant.replace:
            return Outcome("broken", "`replace` changes nothing")
        file.write_text(text.replace(mutant.find, mutant.replace), encoding="utf-8")
        code, output = run_tests(root, Path(name), list(mutant.tests), timeout)
    seconds = time.monotonic() - start
    if code is None:
        return Outcome("caught", "out of time", seconds)
    if code == SOME_FAILED:
        return Outcome("caught", _first_failure(output), seconds)
    if code == ALL_PASSED:
        return Outcome("survived", "no test failed", seconds)
    return Outcome("broken", f"pytest exit code {code}: {_last_line(output)}", seconds)


def _first_failure(output: str) -> str:
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].split("::", 1)[-1] if failed else _last_line(output)


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def unmutated_failure(root: Path, mutants: list[Mutant], timeout: float) -> str | None:
    """Run all tests named by `mutants` on an unchanged copy; the output if they do not pass."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy_package(root, Path(name))
        code, output = run_tests(root, Path(name), tests, timeout * len(tests))
    return None if code == ALL_PASSED else output


def run(root: Path, mutants: list[Mutant], timeout: float) -> int:
    """Print a line per mutant and the sum; return the exit code."""
    failure = unmutated_failure(root, mutants, timeout)
    if failure is not None:
        print(failure)
        print("The tests do not pass without a mutant; nothing can be said about the mutants.")
        return 1
    width = max(len(mutant.name) for mutant in mutants)
    outcomes = []
    for mutant in mutants:
        outcome = try_mutant(root, mutant, timeout)
        outcomes.append(outcome)
        print(
            f"{mutant.name:<{width}}  {outcome.verdict:<8}  {outcome.seconds:5.1f} s  "
            f"{outcome.detail}",
            flush=True,
        )
    counts = {v: sum(o.verdict == v for o in outcomes) for v in ("caught", "survived", "broken")}
    broken = f", {counts['broken']} broken" if counts["broken"] else ""
    print(f"{counts['caught']} caught, {counts['survived']} survived{broken}")
    return 0 if counts["caught"] == len(mutants) else 1


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="check that the tests notice planted faults")
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant; repeatable")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds per mutant")
    options = parser.parse_args(arguments)
    try:
        mutants = read_list(options.root / "tests" / "mutants.toml")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.only:
        known = {mutant.name for mutant in mutants}
        unknown = [name for name in options.only if name not in known]
        if unknown:
            print(f"no mutant {unknown[0]!r}; there are {sorted(known)}", file=sys.stderr)
            return 2
        mutants = [mutant for mutant in mutants if mutant.name in options.only]
    return run(options.root.resolve(), mutants, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
