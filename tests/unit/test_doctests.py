"""Every example in a docstring of the package runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "levelhead"
MODULES = sorted(
    ".".join(("levelhead", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in PACKAGE.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0, capsys.readouterr().out


def test_the_modules_are_found_and_have_examples() -> None:
    assert {"levelhead.nn.samformer", "levelhead.data.windows"} < set(MODULES)
    finder = doctest.DocTestFinder(exclude_empty=True)
    module = importlib.import_module("levelhead.nn.linear")
    assert sum(len(test.examples) for test in finder.find(module)) >= 2
