"""Between a user at a terminal and a function: lists in, tables, JSON and sentences out.

Everything here turns values into text or text into values; printing is the command line's.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

from levelhead.base.errors import InputError, Interrupted, LevelheadError, LevelheadWarning

__all__ = [
    "explained",
    "json_of_parts",
    "json_text",
    "names",
    "shares",
    "table_text",
    "warnings_as_sentences",
    "whole_numbers",
]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
Item = TypeVar("Item")


# ── errors and warnings ─────────────────────────────────────────────────────────────────────────


def explained(error: BaseException) -> tuple[str, int]:
    """The sentence and exit code of an error; one that is not ours to explain is raised again.

    >>> explained(InputError("horizon=0 must be at least 1 row"))
    ('Error: horizon=0 must be at least 1 row', 2)
    """
    if isinstance(error, LevelheadError):
        kind = "Interrupted" if isinstance(error, Interrupted) else "Error"
        return f"{kind}: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted.", 130
    if isinstance(error, OSError) and error.errno in (*_FULL, *_REFUSED):
        named = "" if error.filename is None else f"{error.filename}: "
        hint = "free some space" if error.errno in _FULL else "check the path and its rights"
        return f"Error: {named}{error.strerror}; {hint}, or choose another place.", 2
    raise error


@contextmanager
def warnings_as_sentences(say: Callable[[str], object]) -> Iterator[None]:
    """Within the block, hand our own warnings to `say`, each once; leave all others as they are.

    >>> said = []
    >>> with warnings_as_sentences(said.append):
    ...     warnings.warn("-9999 looks like a code", LevelheadWarning)
    >>> said
    ['Warning: -9999 looks like a code']
    """
    said: set[str] = set()
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, LevelheadWarning):
                others(message, category, filename, lineno, file, line)
            elif (sentence := f"Warning: {message}") not in said:
                said.add(sentence)
                say(sentence)

        warnings.simplefilter("always", LevelheadWarning)
        warnings.showwarning = show
        yield


# ── lists, as an option takes them ──────────────────────────────────────────────────────────────


def whole_numbers(text: str, option: str, example: str) -> list[int]:
    """The whole numbers of a list such as `96,192`; raises `InputError` naming the option.

    >>> whole_numbers("96, 192", "--horizons", "96,192")
    [96, 192]
    """
    return _listed(text, option, example, "whole numbers", int)


def shares(text: str, option: str, example: str) -> list[float]:
    """The numbers between 0 and 1 of a list such as `0.8,0.95`; raises `InputError`.

    >>> shares("80", "--coverage", "0.8,0.95")
    Traceback (most recent call last):
        ...
    levelhead.base.errors.InputError: --coverage '80' is no list of shares between 0 and 1 ...
    """
    return _listed(text, option, example, "shares between 0 and 1", _share)


def names(text: str, option: str, example: str) -> list[str]:
    """The names of a list such as `a,b`; one that holds a comma stands in double quotes.

    >>> names('a, "b, in kW"', "--targets", "a,b")
    ['a', 'b, in kW']
    """
    return _listed(text, option, example, "names", str)


def _listed(
    text: str, option: str, example: str, what: str, kind: Callable[[str], Item]
) -> list[Item]:
    items = [item.strip() for item in next(csv.reader([text], skipinitialspace=True), [])]
    try:
        if not items or not all(items):
            raise ValueError(text)
        return [kind(item) for item in items]
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} is no list of {what} with commas between: write it like {example}"
        ) from error


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise ValueError(text)
    return share


# ── rows as text ────────────────────────────────────────────────────────────────────────────────


def json_text(rows: Sequence[Mapping[Any, Any]]) -> str:
    """Rows as strict JSON: numbers of numpy as Python's, nan and infinity as null.

    >>> json_text([{"mse": float("nan")}]).split()
    ['[', '{', '"mse":', 'null', '}', ']']
    """
    return json.dumps(_plain_rows(rows), indent=1, allow_nan=False)


def json_of_parts(parts: Mapping[str, Sequence[Mapping[Any, Any]]]) -> str:
    """Several tables as one object of strict JSON, each under its name; as `json_text`.

    >>> json_of_parts({"heads": [{"head": 0}]}).split()
    ['{', '"heads":', '[', '{', '"head":', '0', '}', ']', '}']
    """
    plain = {name: _plain_rows(rows) for name, rows in parts.items()}
    return json.dumps(plain, indent=1, allow_nan=False)


def table_text(rows: Sequence[Mapping[Any, Any]]) -> str:
    """Rows (one at least) in aligned columns as wide as they need; numbers stand to the right.

    >>> print(table_text([{"model": "linear", "mse": 0.36451}, {"model": "auto", "mse": 0.36}]))
    model      mse
    linear  0.3645
    auto      0.36
    """
    lines = [""] * (len(rows) + 1)
    for name in rows[0]:
        values = [_plain(row.get(name)) for row in rows]
        cells = [str(name), *map(_cell, values)]
        width = max(map(len, cells))
        right = all(value is None or isinstance(value, (int, float)) for value in values)
        for at, cell in enumerate(cells):
            lines[at] += (cell.rjust(width) if right else cell.ljust(width)) + "  "
    return "\n".join(line.rstrip() for line in lines)


def _plain_rows(rows: Sequence[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    return [{str(name): _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return "–" if value is None else str(value)
