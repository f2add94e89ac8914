"""The usual benchmark sets: what they are, where they lie, and a careful download to a user cache.

Nothing is ever used unverified. A file is downloaded to `<file>.part`, which a later call takes up
where it stopped, then its size and SHA-256 are compared, then it is renamed to its own name; a file
that lies in the cache is compared again before it is returned.

Checksums. Those of ETTh1, weather and exchange_rate were measured on a copy. The others are the
ones that at least three independent public projects recorded for the very addresses below; they
were not measured by us (`Dataset.pedigree` says which). A wrong one could only stop a download,
with a sentence that names both sums. For a set of your own without a checksum, give `sha256=…`, or
`trust_on_first_use=True`: what arrives first is then measured and remembered beside the file.

The table of a set is [rows, channels] plus one date column; `split` counts rows of train,
validation and test as the literature does (ETT: 12, 4 and 4 months of 30 days; else 70/10/20 %).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from levelhead.base.errors import InputError, LevelheadError, StoredFileError
from levelhead.base.files import sha256_of, write_atomically
from levelhead.data.download import Progress, claim, fetch, forget

__all__ = ["Dataset", "cache_folder", "catalogue", "get", "remembered_checksum"]

_ETT = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/"
_THUML = "https://huggingface.co/datasets/thuml/Time-Series-Library/resolve/main/"
_MEASURED = "measured"
_RECORDED = "recorded alike by at least three public projects, not measured by us"


@dataclass(frozen=True)
class Dataset:
    """One set of the catalogue, or one of your own for `get`.

    `bytes` and `sha256` are None where they are not known; `other_sha256` are sums of copies with
    the same cells and other line ends, accepted for a file that was put into the cache by hand.
    `url` is None where there is no address for a download; `source` then says where to look.
    """

    name: str
    file: str
    url: str | None
    bytes: int | None
    sha256: str | None
    rows: int
    channels: int
    step: str
    licence: str
    source: str
    split: tuple[int, int, int]
    pedigree: str = ""
    other_sha256: tuple[str, ...] = ()


def _ett(name: str, size: int | None, sha256: str, **more: Any) -> Dataset:
    hourly = name.startswith("ETTh")
    months = tuple(30 * count * 24 * (1 if hourly else 4) for count in (12, 4, 4))
    return Dataset(
        name=name,
        file=f"{name}.csv",
        url=f"{_ETT}{name}.csv",
        bytes=size,
        sha256=sha256,
        rows=17420 if hourly else 69680,
        channels=7,
        step="1 h" if hourly else "15 min",
        licence="CC BY-ND 4.0",
        source="oil temperature and six loads of a power transformer (Zhou et al. 2021, Informer), "
        "verbatim from the authors' repository ETDataset",
        split=(months[0], months[1], months[2]),
        **{"pedigree": _RECORDED, **more},
    )


def _thuml(name: str, place: str, table: tuple[int, int, str], source: str, **more: Any) -> Dataset:
    rows, channels, step = table
    train, test = int(rows * 0.7), int(rows * 0.2)
    return Dataset(
        name=name,
        file=place.rpartition("/")[2],
        url=_THUML + place,
        rows=rows,
        channels=channels,
        step=step,
        licence="none stated",
        source=f"{source}; the csv file of the Autoformer authors (Wu et al. 2021), from the "
        "Hugging Face repository thuml/Time-Series-Library",
        split=(train, rows - train - test, test),
        **{"pedigree": _RECORDED, **more},
    )


_LAI = "collection of Lai et al. 2018 (LSTNet), which has no dates: those in the file were added"
_CATALOGUE = (
    _ett(
        "ETTh1",
        2589657,
        "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066",
        pedigree=_MEASURED,
        other_sha256=("aaf53becad03ad8a7e93cf96452244f423480df960d769e12d66d4a5c570ddb0",),
    ),
    _ett("ETTh2", 2417960, "a3dc2c597b9218c7ce1cd55eb77b283fd459a1d09d753063f944967dd6b9218b"),
    _ett("ETTm1", None, "6ce1759b1a18e3328421d5d75fadcb316c449fcd7cec32820c8dafda71986c9e"),
    _ett("ETTm2", None, "db973ca252c6410a30d0469b13d696cf919648d0f3fd588c60f03fdbdbadd1fd"),
    _thuml(
        "exchange_rate",
        "exchange_rate/exchange_rate.csv",
        (7588, 8, "1 day"),
        f"exchange rates of eight countries, {_LAI}",
        bytes=637800,
        sha256="48b4d9d3d508f5104162e85b9a6042e3557fde11aa9f2944eba8c0d0efc89842",
        other_sha256=("d55e7aa2641009814a18ba3279431b13f6d413b0eab195b9ff21988d8cf94e97",),
        pedigree=_MEASURED,
    ),
    _thuml(
        "weather",
        "weather/weather.csv",
        (52696, 21, "10 min"),
        "weather station of the Max Planck Institute for Biogeochemistry in Jena, 2020; "
        "Latin-1, holds the sentinel -9999",
        bytes=7235425,
        sha256="34ee981d07313e51da2a50bb600072c8ae4a69cb4b0651f4cb93a069d7a2ba63",
        other_sha256=("9b2b19b13e342d9c9b9c51620d42b4be232df7fba30e7f5c4968b7c79ab138ad",),
        pedigree=_MEASURED,
    ),
    _thuml(
        "electricity",
        "electricity/electricity.csv",
        (26304, 321, "1 h"),
        f"consumption of 321 clients (UCI ElectricityLoadDiagrams20112014), {_LAI}",
        bytes=95581762,
        sha256="7e45845d54c5219bad0ae6bc1b5316cf8ff9cead5d33fa998a5a51c2e4a497ad",
    ),
    _thuml(
        "traffic",
        "traffic/traffic.csv",
        (17544, 862, "1 h"),
        f"occupancy of 862 road sensors in the San Francisco Bay Area, {_LAI}",
        bytes=136478119,
        sha256="cb06463d56fa17d87f47027cd9389ceae82a69eddee51cdb61480e120dab0b16",
    ),
    _thuml(
        "illness",
        "illness/national_illness.csv",
        (966, 7, "7 days"),
        "weekly influenza-like illness in the United States (CDC), 2002 to 2020",
        bytes=None,
        sha256="93601f64d2566dc796ca4305adad8b8560c2db1a1ff04543c3bd813a7263570a",
    ),
)


def catalogue() -> tuple[Dataset, ...]:
    """The benchmark sets that `get` knows by name.

    >>> [dataset.name for dataset in catalogue()][:4]
    ['ETTh1', 'ETTh2', 'ETTm1', 'ETTm2']
    >>> catalogue()[0].split
    (8640, 2880, 2880)
    """
    return _CATALOGUE


def cache_folder() -> Path:
    """Where `get` keeps files: $LEVELHEAD_CACHE, or levelhead in the platform's cache folder.

    That is $XDG_CACHE_HOME or ~/.cache, ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows.
    """
    if own := os.environ.get("LEVELHEAD_CACHE"):
        return Path(own)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "levelhead"


def get(
    name: str | Dataset,
    *,
    cache: str | os.PathLike[str] | None = None,
    base_url: str | None = None,
    progress: Progress | None = None,
    sha256: str | None = None,
    trust_on_first_use: bool = False,
    timeout: float = 30.0,
) -> Path:
    """Path of a verified file of the set, downloaded if it is not in the cache yet.

    `cache` is the folder of the files (default: `cache_folder()`); `base_url` replaces all of the
    address but the file name; `progress(done, total)` is called with bytes (total may be None);
    `timeout` counts seconds without a sign of life. `sha256` overrides the known checksum.
    Without any checksum, `trust_on_first_use` accepts what comes and remembers its sum in
    `<file>.sha256` (`remembered_checksum` reads it); without that it is refused. An interrupted
    download goes on where it stopped. Several processes may ask for the same set at once.

    Raises `InputError` for an unknown name, an address that is not http(s), or a missing
    checksum; `StoredFileError` for a file that is truncated or not the expected one;
    `LevelheadError` for a network, server or disk that does not do its part.
    """
    dataset = name if isinstance(name, Dataset) else _named(name)
    folder = cache_folder() if cache is None else Path(cache)
    path = folder / dataset.file
    wanted = _wanted(dataset, path, sha256)
    if not wanted and not trust_on_first_use:
        raise InputError(
            f"No checksum of {dataset.name} is known: give sha256=…, or trust_on_first_use=True "
            "to accept what comes first and remember its checksum."
        )
    if not path.exists():
        url = _address(dataset, base_url)
        size = None if sha256 else dataset.bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with claim(path) as part:
                # Another process may have finished while this one was on its way here.
                if not path.exists():
                    sure = bool(wanted)
                    fetch(url, part, size=size, verified=sure, timeout=timeout, progress=progress)
                    _accept(dataset, path, part, wanted[:1])
                    return path
        except OSError as error:
            raise LevelheadError(
                f"{path} could not be written ({error.strerror or error}): free some space or "
                "choose another cache folder, then ask again."
            ) from error
    found = sha256_of(path)
    if wanted and found not in wanted:
        raise StoredFileError(
            f"{path} is not the expected file (sha256 {found}, expected {wanted[0]}): "
            "delete it and ask again."
        )
    if not wanted:
        _remember(path, found)
    return path


def remembered_checksum(
    name: str | Dataset, *, cache: str | os.PathLike[str] | None = None
) -> str | None:
    """SHA-256 that was accepted on first use and is remembered beside the cached file, or None."""
    dataset = name if isinstance(name, Dataset) else _named(name)
    beside = _beside((cache_folder() if cache is None else Path(cache)) / dataset.file)
    return beside.read_text(encoding="ascii").split()[0] if beside.exists() else None


def _named(name: str) -> Dataset:
    for dataset in _CATALOGUE:
        if dataset.name.lower() == name.lower():
            return dataset
    raise InputError(
        f"There is no data set named {name!r}: "
        f"one of {', '.join(dataset.name for dataset in _CATALOGUE)} is expected."
    )


def _wanted(dataset: Dataset, path: Path, given: str | None) -> tuple[str, ...]:
    """Checksums that are accepted, the first for a download; none if there is none."""
    if given is not None:
        given = given.lower()
        if len(given) != 64 or set(given) - set("0123456789abcdef"):
            raise InputError(f"sha256 is {given!r}: 64 hexadecimal digits are expected.")
        return (given,)
    if dataset.sha256:
        return (dataset.sha256, *dataset.other_sha256)
    remembered = remembered_checksum(dataset, cache=path.parent)
    return (remembered,) if remembered else ()


def _address(dataset: Dataset, base_url: str | None) -> str:
    if base_url is None and dataset.url is None:
        raise InputError(
            f"{dataset.name} has no address to download from: obtain {dataset.file} "
            f"({dataset.source}) and put it into the cache folder."
        )
    url = f"{base_url.rstrip('/')}/{dataset.file}" if base_url else str(dataset.url)
    if urlsplit(url).scheme not in ("http", "https"):
        raise InputError(f"The address {url!r} cannot be used: http or https is expected.")
    return url


def _accept(dataset: Dataset, path: Path, part: Path, wanted: tuple[str, ...]) -> None:
    """Give a complete download its own name, if it is what was asked for."""
    found = sha256_of(part)
    if wanted and found != wanted[0]:
        forget(part)
        raise StoredFileError(
            f"The download of {dataset.name} is not the expected file (sha256 {found}, expected "
            f"{wanted[0]}): it was deleted; ask again, or check whether the source has changed."
        )
    if not dataset.sha256:
        # Before the renaming: a file without its remembered sum would be trusted a second time.
        _remember(path, found)
    os.replace(part, path)
    forget(part)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _remember(path: Path, sha256: str) -> None:
    write_atomically(_beside(path), f"{sha256}  {path.name}\n".encode())
