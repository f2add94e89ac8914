"""The house rules that a machine can check: who imports whom, sizes, docstrings, light start."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import levelhead

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "levelhead"
MODULES = sorted(SOURCE.rglob("*.py"))
MODULE_LINES, FUNCTION_LINES = 500, 80
LINT = "from importlinter.cli import lint_imports_command as run; run()"
HEAVY = ("torch", "pandas", "scipy", "sklearn")

# The table of folders: what a folder may import. `report` takes three modules of base only.
MAY_IMPORT = {
    "base": "",
    "tensors": "base",
    "data": "base",
    "weights": "base tensors",
    "nn": "base tensors weights",
    "invariants": "base tensors weights",
    "diagnostics": "base tensors weights",
    "inspection": "base tensors weights invariants diagnostics",
    "training": "base tensors weights invariants diagnostics",
    "evaluation": "base data",
    "forecasting": "base data nn training diagnostics evaluation",
    "studies": "base tensors weights invariants diagnostics inspection data nn training "
    "evaluation forecasting",
    "report": "base.errors base.files base.records",
    "adapters": "base weights invariants diagnostics training",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)


# ── who imports whom ──


def lint_imports(root: Path) -> tuple[int, str]:
    """Exit code and output of import-linter on the package below `root`."""
    ran = subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_imports_keep_every_contract() -> None:
    code, said = lint_imports(ROOT)
    assert code == 0, said


def test_every_folder_has_its_contract_and_it_is_that_of_the_table() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {}
    for contract in config["tool"]["importlinter"]["contracts"]:
        if contract.get("forbidden_modules") == ["levelhead.*"]:
            (source,) = contract["source_modules"]
            folder = source.removeprefix("levelhead.").removesuffix(".**")
            assert source.endswith(".**") or folder == "report"
            allowed = [line.split(" -> ") for line in contract.get("ignore_imports", [])]
            own = (f"levelhead.{folder}", f"levelhead.{folder}.**")
            assert all(importer in own for importer, _ in allowed)
            imported = (name for _, name in allowed)
            found[folder] = {n.removeprefix("levelhead.").removesuffix(".**") for n in imported}
    assert found == {folder: set(others.split()) for folder, others in MAY_IMPORT.items()}
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert folders <= found.keys()


# What may not be, and the contract that must notice it.
PLANTED = [
    ("base/progress.py", "import levelhead.data.windows", "base imports no other folder"),
    ("data/windows.py", "import levelhead.nn.linear", "data imports base"),
    ("nn/linear.py", "import levelhead.training.sam", "nn imports base, tensors, weights"),
    ("training/sam.py", "import levelhead.data.windows", "training imports base, tensors"),
    ("evaluation/new.py", "import levelhead.training.sam", "evaluation imports base, data"),
    ("forecasting/lines.py", "import levelhead.report.svg", "forecasting imports base, data"),
    ("forecasting/new.py", "import levelhead.cli", "forecasting imports base, data"),
    ("report/svg.py", "import levelhead.base.numerics", "report imports records, files"),
    ("report/svg.py", "import levelhead.base.numerics", "report never reaches torch"),
    ("base/files.py", "import pandas", "records and data sets never reach"),
    ("data/new.py", "import levelhead", "nothing imports the front page"),
    ("nn/reversible_norm.py", "import levelhead.nn.samformer", "no cycles"),
    ("tensors/tucker.py", "import levelhead.nn.linear", "tensors imports base"),
    ("adapters/ray.py", "import levelhead.adapters.dask", "adapters do not know each other"),
    ("adapters/dask.py", "import levelhead.forecasting.lines", "adapters imports base, weights"),
]


def test_contracts_notice_what_may_not_be(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "src" / "levelhead")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for place, line, _ in PLANTED:
        path = tmp_path / "src" / "levelhead" / place
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    code, said = lint_imports(tmp_path)
    broken = re.findall(r"^(.*) BROKEN", said, re.MULTILINE)
    assert code == 1, said
    for _, line, contract in PLANTED:
        assert any(name.startswith(contract) for name in broken), (line, contract, said)


@pytest.mark.parametrize("path", sorted(SOURCE.glob("*/__init__.py")), ids=name_of)
def test_folders_themselves_import_nothing(path: Path) -> None:
    if path.parent.name != "report":
        found = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not found


@every_module
def test_own_code_is_imported_at_the_top(path: Path) -> None:
    """The front page, the callable folder `report` and the commands are lazy on purpose."""
    if path.name == "__init__.py" or (path.parent == SOURCE and path.name.startswith("cli")):
        return
    for function in functions(tree(path)):
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = ["levelhead" if node.level else node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                found = [str(getattr(given, "value", "")) for given in node.args]
            else:
                continue
            ours = [name for name in found if name.split(".")[0] == "levelhead"]
            assert not ours, f"{path}:{node.lineno} imports {ours[0]} inside {function.name}"


# ── sizes, prints, docstrings ──


@every_module
def test_sizes(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MODULE_LINES
    for function in functions(tree(path)):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= FUNCTION_LINES, f"{function.name} in line {function.lineno}: {length}"


@every_module
def test_nothing_prints(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path}:{node.lineno}"


@every_module
def test_public_names_exist_and_are_documented(path: Path) -> None:
    assert ast.get_docstring(tree(path)), f"{path} does not say what it is for"
    module = importlib.import_module(name_of(path))
    if path.name == "__init__.py":
        return
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            own = value.__doc__ or ""
            generated = dataclasses.is_dataclass(value) and own.startswith(f"{name}(")
            assert own, f"{path}: {name} has no docstring"
            assert not generated, f"{path}: {name} has no docstring of its own"


def test_methods_on_the_front_page_are_documented() -> None:
    for cls in (
        value for name in levelhead.__all__ if inspect.isclass(value := getattr(levelhead, name))
    ):
        for name, member in vars(cls).items():
            if not name.startswith("_") and inspect.isroutine(member):
                assert inspect.getdoc(getattr(cls, name)), f"{cls.__name__}.{name} has no docstring"


# ── a light start ──


@pytest.mark.parametrize(
    "code",
    [
        "import levelhead",
        "import levelhead.cli",
        "from levelhead import report, Run, LevelheadError",
        "run(['--help'])",
        "run(['forecast', '--help'])",
        "run(['data', 'list'])",
        "run(['bench', 't.csv', '--models', ''])",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str) -> None:
    script = f"""
import sys
def run(arguments):
    from levelhead.cli import app
    app(arguments, standalone_mode=False)
{code}
print("loaded", sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "loaded []"


# ── the front page ──


def test_front_page_names_are_what_their_modules_hold() -> None:
    for name in levelhead.__all__:
        value = getattr(levelhead, name)
        if name == "report":
            assert callable(value)
            assert value is sys.modules["levelhead.report"]
        else:
            assert value is getattr(sys.modules[value.__module__], name)
            assert value.__module__.startswith("levelhead.")
    assert set(levelhead.__all__) <= set(dir(levelhead))
    assert len(set(levelhead.__all__)) == len(levelhead.__all__) <= 25
    with pytest.raises(AttributeError, match="no attribute 'SAMFormer'"):
        levelhead.SAMFormer  # noqa: B018


def test_front_page_example_runs() -> None:
    assert doctest.testmod(levelhead) == (0, 2)


def test_front_page_and_its_types_agree() -> None:
    """The imports that type checkers read are the ones that happen."""
    (block,) = (node for node in tree(SOURCE / "__init__.py").body if isinstance(node, ast.If))
    typed = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed.pop("report") == ("levelhead.report.document", "write_report")
    homes = {name: f"levelhead.{home}" for name, home in levelhead._HOME.items()}
    assert {name: module for name, (module, _) in typed.items()} == homes
    assert {*typed, "report"} == set(levelhead.__all__)


def test_report_is_called_like_a_function(tmp_path: Path) -> None:
    run = levelhead.Run.create(tmp_path / "run", title="Called", command=None, settings={})
    path = levelhead.report(run, tmp_path / "page.html")
    assert path == tmp_path / "page.html"
    assert "Called" in path.read_text(encoding="utf-8")
    assert levelhead.report(run.folder) == run.folder / "report.html"


def test_version_is_the_one_installed() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", levelhead.__version__)
    assert importlib.metadata.version("levelhead") == levelhead.__version__
