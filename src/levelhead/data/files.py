"""CSV and Parquet files as pandas frames; what is wrong with a file becomes one sentence."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np
import pandas as pd

from levelhead.base.errors import DataError, InputError
from levelhead.data.labels import distinct_names
from levelhead.data.messages import count

__all__ = ["read_file"]

_NOT_A_TABLE = {
    b"PK\x03\x04": "a spreadsheet or zip archive",
    b"version https://git-lfs": "a Git LFS pointer",
    b"<": "an HTML or XML page",
    b"%PDF": "a PDF document",
}


def read_file(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read CSV or Parquet; whatever is wrong with the file becomes one `DataError`."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; give a CSV or Parquet file")
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if not start:
            raise DataError(f"{path} is empty (0 bytes); give a CSV or Parquet file")
        if start == b"PAR1" or path.suffix.lower() in (".parquet", ".pq"):
            return _read_parquet(path), []
        return _read_csv(path, start[:2] == b"\x1f\x8b")
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}; check the path") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); is it complete?") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, csv.Error) as error:
        what = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
        raise DataError(f"{path} is not a regular CSV table: {what}") from error


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        parquet, arrow = map(importlib.import_module, ("pyarrow.parquet", "pyarrow"))
    except ImportError as error:
        raise InputError(
            f"reading {path} needs pyarrow: pip install 'levelhead[parquet]'"
        ) from error
    try:
        return cast(pd.DataFrame, parquet.read_table(path).to_pandas())
    except (arrow.ArrowException, ValueError) as error:
        raise DataError(f"{path} is not a complete Parquet file; export it again") from error


def _open(path: Path, zipped: bool) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path) if zipped else path.open("rb"))


def _read_csv(path: Path, zipped: bool) -> tuple[pd.DataFrame, list[str]]:
    with _open(path, zipped) as file:
        head = file.read(1 << 16)
    for magic, what in _NOT_A_TABLE.items():
        if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(magic):
            raise DataError(f"{path} is {what}, not a table; give a CSV or Parquet file")
    wide_text = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    if not wide_text and any(code in head for code in (*range(9), *range(14, 32))):
        raise DataError(f"{path} holds binary data, not text; give a CSV or Parquet file")
    for encoding in ("utf-16",) if wide_text else ("utf-8-sig", "latin-1"):
        try:
            frame, notes = _parse_csv(path, zipped, encoding, head)
        except UnicodeError:
            continue
        return frame, notes + ([f"text was read as {encoding}"] if encoding == "latin-1" else [])
    raise DataError(f"{path} is not valid UTF-16 text; export it as UTF-8")


def _parse_csv(
    path: Path, zipped: bool, encoding: str, head: bytes
) -> tuple[pd.DataFrame, list[str]]:
    text = head.decode(encoding, errors="ignore")
    lines = [line for line in text.splitlines() if line.strip()][:20]
    if not lines:
        raise DataError(f"{path} holds no text but blanks; give a CSV or Parquet file")
    split = {
        mark: list(csv.reader(lines, delimiter=mark, skipinitialspace=True)) for mark in ",;\t|"
    }
    mark = max(split, key=lambda m: len(split[m][0]))
    header = [name.strip() for name in split[mark][0]]
    first = split[mark][1] if len(lines) > 1 else header
    if len(first) > len(header) and any(first[len(header) :]):
        raise DataError(
            f"{path} has {count(len(header), 'name')} in its header, {len(first)} fields in row 1"
        )
    headless = _is_data(header)
    names = [str(i) for i in range(len(header))] if headless else distinct_names(header)
    with _open(path, zipped) as file:
        frame = pd.read_csv(
            file,
            sep=mark,
            encoding=encoding,
            skipinitialspace=True,
            low_memory=False,
            header=None if headless else 0,
            names=names,
            index_col=False,
        )
    notes = ["there is no header line: columns are numbered from 0"] if headless else []
    if len(frame) and frame.iloc[:, -1].isna().any():
        _check_fields(path, zipped, encoding, mark, len(header))
        if not headless and not header[-1] and frame.iloc[:, -1].isna().all():
            frame = frame.iloc[:, :-1]  # every line ends with the delimiter
    if not headless and not header[0] and frame.iloc[:, 0].equals(pd.Series(np.arange(len(frame)))):
        notes.append("the first column, without a name, numbers the rows and was left out")
        frame = frame.iloc[:, 1:]
    return frame, notes


def _is_data(header: list[str]) -> bool:
    """Whether a first line holds data: numbers throughout, some with a point, but for a date."""
    numbers = [pd.to_numeric(pd.Series([name]), errors="coerce").notna().all() for name in header]
    return all(numbers[1:]) and any("." in name for name in header[1:] or header)


def _check_fields(path: Path, zipped: bool, encoding: str, mark: str, width: int) -> None:
    """Refuse rows with fewer fields than the header; pandas would make them missing values."""
    with io.TextIOWrapper(_open(path, zipped), encoding=encoding, newline="") as file:
        lengths = [len(line) for line in csv.reader(file, delimiter=mark) if line]
    short = [i for i, length in enumerate(lengths) if length < width]
    if short:
        raise DataError(
            f"{path} has {lengths[short[0]]} of {width} fields in row {short[0]} "
            f"({count(len(short), 'such row')}); is the file complete?"
        )
