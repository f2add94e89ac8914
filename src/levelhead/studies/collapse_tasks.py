"""Tasks of the collapse study: made on the spot, from scikit-learn, or read from the user's files.

Axes. Examples come first: token numbers [N, n] (int64) or patches [N, n, p] (float32); targets are
classes [N], or [N, n] where every token has one. Every task has three parts that share no example.

Two examples. "copy" asks for the tokens in another, fixed order, "recall" for the value that stood
behind a key. Texts are cut at `tokens` words; words seen once in training are one unknown word.
"""

from __future__ import annotations

import gzip
import importlib
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from levelhead.base.errors import InputError, StoredFileError
from levelhead.nn.encoder import Readout, image_patches

__all__ = ["MADE", "Part", "Task", "Vocabulary", "make_task", "missing_task"]

MADE = ("copy", "sort", "recall", "digits")
_SYMBOLS = 10
_SHARE = Path("/usr/share")
_FASHION = ("*fashion*mnist*", "*/*fashion*mnist*")
_SST2 = tuple(f"stsa.binary.{part}" for part in ("train", "dev", "test"))
_IMAGES = (".png", ".jpg", ".jpeg", ".pgm", ".ppm", ".bmp")


@dataclass(frozen=True, eq=False)
class Part:
    """Inputs x and targets y of some examples."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def first(self, count: int) -> Part:
        """At most `count` examples."""
        return Part(self.x[:count], self.y[:count])


@dataclass(frozen=True, eq=False)
class Task:
    """Parts for training, validation and test, and what a model of them must be like.

    vocabulary or patch: how many tokens there are, or numbers in a patch; padding: the token that
    does not count; limits: least and largest number of a patch, what an attack keeps to.
    """

    name: str
    training: Part
    validation: Part
    test: Part
    classes: int
    tokens: int
    readout: Readout
    vocabulary: int | None = None
    patch: int | None = None
    padding: int | None = None
    limits: tuple[float, float] | None = None


def make_task(
    name: str,
    sizes: tuple[int, int, int],
    seed: int,
    *,
    text: str = "",
    data: str = "",
    tokens: int = 40,
) -> Task:
    """The task of that name with at most `sizes` examples for training, validation and test.

    Made tasks draw their examples from `seed`; of stored ones the parts are the same for every
    seed. Raises InputError for an unknown name, and where files that it needs are not there.

    >>> make_task("copy", (8, 4, 4), 0).training.x.shape
    torch.Size([8, 8])
    """
    reason = missing_task(name, text=text, data=data)
    if reason is not None:
        raise InputError(reason)
    if name == "digits":
        return _digits(sizes)
    if name == "sst2":
        return _sst2(Path(text), sizes, tokens)
    if name == "fashion":
        return _fashion(sizes)
    if name == "own":
        return _own(Path(data), sizes, tokens)
    return _drawn(name, sizes, seed)


def missing_task(name: str, *, text: str = "", data: str = "") -> str | None:
    """Why the task cannot be made, in a sentence; None if it can.

    >>> missing_task("sst2")
    'sst2 needs stsa.binary.train, .dev and .test: give --set text=DIR'
    """
    if name in MADE:
        return None
    if name == "sst2":
        if text and all((Path(text) / file).is_file() for file in _SST2):
            return None
        here = f" ({text!r} holds none of them, or not all)" if text else ""
        return f"sst2 needs stsa.binary.train, .dev and .test: give --set text=DIR{here}"
    if name == "fashion":
        if _fashion_folder() is not None:
            return None
        return "fashion needs Debian's package dataset-fashion-mnist, which is not installed"
    if name == "own":
        if data and Path(data).exists():
            return None
        return f"own needs a TSV or an image folder: --set data=PATH ({data!r} was given)"
    return f"there is no task {name!r}: choose from {', '.join(MADE)}, sst2, fashion, own"


# ── made on the spot ──


def _drawn(name: str, sizes: tuple[int, int, int], seed: int) -> Task:
    draw = torch.Generator().manual_seed(977 * seed + 31)
    order = torch.randperm(8, generator=draw)
    make: Callable[[int], Part] = {
        "copy": lambda n: _copied(n, draw, order),
        "sort": lambda n: _sorted(n, draw),
        "recall": lambda n: _recalled(n, draw),
    }[name]
    training, validation, test = (make(size) for size in sizes)
    readout: Readout = "last" if name == "recall" else "each"
    return Task(
        name, training, validation, test, _SYMBOLS, training.x.shape[1], readout,
        vocabulary=_SYMBOLS**2 + _SYMBOLS if name == "recall" else _SYMBOLS,
    )  # fmt: skip


def _copied(count: int, draw: torch.Generator, order: Tensor) -> Part:
    x = torch.randint(0, _SYMBOLS, (count, len(order)), generator=draw)
    return Part(x, x[:, order])


def _sorted(count: int, draw: torch.Generator) -> Part:
    x = torch.randint(0, _SYMBOLS, (count, 8), generator=draw)
    return Part(x, x.sort(dim=1).values)


def _recalled(count: int, draw: torch.Generator) -> Part:
    """Eight pairs of a key and a value, each pair one token, then a key: which value was its?"""
    keys = torch.rand(count, _SYMBOLS, generator=draw).argsort(1)[:, :8]
    values = torch.randint(0, _SYMBOLS, keys.shape, generator=draw)
    asked = torch.randint(0, 8, (count, 1), generator=draw)
    query = _SYMBOLS**2 + keys.gather(1, asked)
    return Part(torch.cat([keys * _SYMBOLS + values, query], dim=1), values.gather(1, asked)[:, 0])


# ── images ──


@lru_cache(maxsize=2)
def _digits(sizes: tuple[int, int, int]) -> Task:
    found = load_digits()
    images = torch.as_tensor(found.images, dtype=torch.float32) / 8 - 1
    return _image_task("digits", images, torch.as_tensor(found.target), 2, sizes)


def _image_task(
    name: str, images: Tensor, classes: Tensor, patch: int, sizes: tuple[int, int, int]
) -> Task:
    """Parts in a fixed random order, test rows first, so that smaller sizes share them."""
    x = image_patches(images, patch)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    training, validation, test = _cut(order.tolist(), sizes)
    first, second, third = (Part(x[i], classes.long()[i]) for i in (training, validation, test))
    return Task(
        name, first, second, third, int(classes.max()) + 1, x.shape[1], "mean",
        patch=x.shape[2], limits=(-1.0, 1.0),
    )  # fmt: skip


def _cut(order: Sequence[int], sizes: tuple[int, int, int]) -> tuple[list[int], ...]:
    """Positions for training, validation and test; where there are too few, in proportion."""
    short = min(1.0, len(order) / sum(sizes))
    training, validation, test = (max(1, int(size * short)) for size in sizes)
    held = test + validation
    if len(order) < 3:
        raise InputError(f"{len(order)} examples were given; at least three are needed")
    places = list(order)
    return places[held : held + training], places[test:held], places[:test]


def _fashion_folder() -> Path | None:
    """Where the package has put its files."""
    places = [place for pattern in _FASHION for place in sorted(_SHARE.glob(pattern))]
    return next((p for p in places if p.is_dir() and any(p.glob("t10k-images*"))), None)


def _fashion(sizes: tuple[int, int, int]) -> Task:
    folder = _fashion_folder()
    assert folder is not None
    x, y = _idx(folder, "train-images"), _idx(folder, "train-labels")
    x_test, y_test = _idx(folder, "t10k-images"), _idx(folder, "t10k-labels")
    images = torch.as_tensor(np.concatenate([x_test, x]), dtype=torch.float32) / 127.5 - 1
    classes = torch.as_tensor(np.concatenate([y_test, y])).long()
    patches = image_patches(images, 7)
    held = min(sizes[2], len(x_test)), len(x_test), len(x_test) + sizes[1]
    return Task(
        "fashion",
        Part(patches[held[2] :][: sizes[0]], classes[held[2] :][: sizes[0]]),
        Part(patches[held[1] : held[2]], classes[held[1] : held[2]]),
        Part(patches[: held[0]], classes[: held[0]]),
        10, patches.shape[1], "mean", patch=patches.shape[2], limits=(-1.0, 1.0),
    )  # fmt: skip


def _idx(folder: Path, start: str) -> np.ndarray[Any, Any]:
    """An idx file (LeCun) of unsigned bytes, plain or gzipped."""
    path = next(iter(sorted(folder.glob(f"{start}*"))), None)
    if path is None:
        raise StoredFileError(f"{folder} has no file {start}-idx*-ubyte")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise StoredFileError(f"{path} is no idx file of unsigned bytes")
    axes = raw[3]
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    values = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * axes)
    if len(values) != int(np.prod(shape)):
        raise StoredFileError(f"{path} holds {len(values)} numbers, its head says {list(shape)}")
    return values.reshape(shape)


# ── texts ──


@dataclass(frozen=True)
class Vocabulary:
    """Words and their numbers: 0 is padding, 1 any word that is not known.

    >>> Vocabulary.of([["a", "b", "a"]], least=1).encode(["b", "c"], 4)
    [3, 1, 0, 0]
    """

    words: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[Sequence[str]], least: int = 2) -> Vocabulary:
        """The words that occur `least` times or more, the most frequent first."""
        counts = Counter(word for text in texts for word in text)
        kept = [w for w, count in counts.items() if count >= least]
        return cls(tuple(sorted(kept, key=lambda word: (-counts[word], word))))

    def __len__(self) -> int:
        return len(self.words) + 2

    def encode(self, text: Sequence[str], tokens: int) -> list[int]:
        """Numbers of the first `tokens` words, filled up with padding."""
        numbers = {word: i for i, word in enumerate(self.words, 2)}
        found = [numbers.get(word, 1) for word in text[:tokens]] or [1]
        return found + [0] * (tokens - len(found))

    def encode_all(self, texts: Sequence[Sequence[str]], tokens: int) -> Tensor:
        """[N, tokens]."""
        numbers = {word: i for i, word in enumerate(self.words, 2)}
        found = torch.zeros(len(texts), tokens, dtype=torch.long)
        for row, text in zip(found, texts, strict=True):
            cut = [numbers.get(word, 1) for word in text[:tokens]] or [1]
            row[: len(cut)] = torch.tensor(cut)
        return found


Labelled = tuple[list[str], list[list[str]]]


def _sst2(folder: Path, sizes: tuple[int, int, int], tokens: int) -> Task:
    # One worker trains many models on the same texts; files that were changed are read anew.
    states = ((folder / name).stat() for name in _SST2)
    return _sst2_as_of(folder, sizes, tokens, tuple((s.st_mtime_ns, s.st_size) for s in states))


@lru_cache(maxsize=2)
def _sst2_as_of(
    folder: Path, sizes: tuple[int, int, int], tokens: int, states: tuple[tuple[int, int], ...]
) -> Task:
    files = [_labelled(folder / name, " ") for name in _SST2]
    cut = [(labels[:n], texts[:n]) for (labels, texts), n in zip(files, sizes, strict=True)]
    return _text_task("sst2", cut, tokens)


def _text_task(name: str, parts: Sequence[Labelled], tokens: int) -> Task:
    known = sorted({label for labels, _ in parts for label in labels})
    words = Vocabulary.of(parts[0][1])
    first, second, third = (
        Part(words.encode_all(texts, tokens), torch.tensor([known.index(v) for v in labels]))
        for labels, texts in parts
    )
    return Task(
        name, first, second, third, len(known), tokens, "mean", vocabulary=len(words), padding=0,
    )  # fmt: skip


def _labelled(path: Path, separator: str) -> Labelled:
    labels, texts = [], []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StoredFileError(f"{path} is no text that can be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        label, found, text = line.partition(separator)
        if not found:
            kind = "a tab" if separator == "\t" else "a blank"
            raise InputError(f"{path}, line {number}: expected a label, {kind} and a text")
        labels.append(label.strip())
        texts.append(text.lower().split())
    return labels, texts


# ── the user's own ──


def _own(path: Path, sizes: tuple[int, int, int], tokens: int) -> Task:
    if path.is_dir():
        return _own_images(path, sizes)
    labels, texts = _labelled(path, "\t")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5)).tolist()
    parts = [([labels[i] for i in p], [texts[i] for i in p]) for p in _cut(order, sizes)]
    return _text_task("own", parts, tokens)


def _own_images(folder: Path, sizes: tuple[int, int, int]) -> Task:
    """One folder for each class; all images are made grey and 28 × 28."""
    classes = sorted(p for p in folder.iterdir() if p.is_dir())
    files = [(i, f) for i, c in enumerate(classes) for f in sorted(c.iterdir())]
    files = [(i, f) for i, f in files if f.suffix.lower() in _IMAGES]
    if len(classes) < 2 or len(files) < 3:
        raise InputError(
            f"{folder} has {len(classes)} folders with {len(files)} images; expected a folder for "
            f"each of two classes or more ({', '.join(_IMAGES)}), or a TSV file instead of a folder"
        )
    images = torch.stack([_image(file) for _, file in files])
    return _image_task("own", images, torch.tensor([i for i, _ in files]), 7, sizes)


def _image(path: Path) -> Tensor:
    try:
        pillow = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise InputError("image folders are read by Pillow: pip install pillow") from error
    try:
        with pillow.open(path) as image:
            grey = np.array(image.convert("L").resize((28, 28)), dtype=np.float32)
    except OSError as error:
        raise StoredFileError(f"{path} is no image that can be read ({error})") from error
    return torch.as_tensor(grey) / 127.5 - 1
