"""Tasks of the collapse study: right answers by another route, parts that share nothing."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from levelhead.base.errors import InputError, StoredFileError
from levelhead.studies import collapse_tasks
from levelhead.studies.collapse_tasks import Task, Vocabulary, make_task, missing_task

SIZES = (40, 12, 20)


def parts(task: Task) -> list[collapse_tasks.Part]:
    return [task.training, task.validation, task.test]


def test_copy_asks_for_one_order_and_sort_for_the_sorted_tokens() -> None:
    copied, ordered = make_task("copy", SIZES, 3), make_task("sort", SIZES, 3)
    assert [len(part) for part in parts(copied)] == list(SIZES)
    columns = copied.training.x.numpy(), copied.training.y.numpy()
    order = [next(i for i in range(8) if (columns[0][:, i] == y).all()) for y in columns[1].T]
    assert sorted(order) == list(range(8))
    assert order != list(range(8))
    for part in parts(copied):
        assert torch.equal(part.y, part.x[:, order])
    for part in parts(ordered):
        np.testing.assert_array_equal(part.y.numpy(), np.sort(part.x.numpy(), axis=1))


def test_recall_asks_for_the_value_behind_a_key() -> None:
    task = make_task("recall", SIZES, 1)
    for part in parts(task):
        for row, answer in zip(part.x.tolist(), part.y.tolist(), strict=True):
            pairs = dict(divmod(token, 10) for token in row[:-1])
            assert len(pairs) == 8
            assert pairs[row[-1] - 100] == answer
    assert int(task.training.x.max()) < (task.vocabulary or 0)
    assert task.readout == "last"


def test_made_tasks_follow_their_seed() -> None:
    first, again, other = (make_task("copy", SIZES, s) for s in (0, 0, 1))
    assert torch.equal(first.training.x, again.training.x)
    assert not torch.equal(first.training.x, other.training.x)


def test_digits_are_cut_into_parts_that_share_no_image_and_test_rows_never_change() -> None:
    small, large = make_task("digits", SIZES, 0), make_task("digits", (1000, 300, 500), 9)
    assert sum(len(part) for part in parts(large)) <= 1797
    rows = torch.cat([part.x.flatten(1) for part in parts(large)])
    whole = torch.as_tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    assert len(rows.unique(dim=0)) == len(rows) or len(whole.unique(dim=0)) < len(whole)
    assert torch.equal(small.test.x, large.test.x[:20])
    assert (small.patch, small.tokens, small.classes) == (4, 16, 10)
    # One image, put together again, is one of scikit-learn's.
    image = large.test.x[0].view(4, 4, 2, 2).permute(0, 2, 1, 3).reshape(-1)
    found = (whole == image).all(dim=1).nonzero()
    assert len(found) >= 1
    assert int(load_digits().target[int(found[0])]) == int(large.test.y[0])


def sentences(folder: Path) -> None:
    for part, count in (("train", 30), ("dev", 6), ("test", 8)):
        lines = [f"{i % 2} {'good' if i % 2 else 'Bad'} film no{i}" for i in range(count)]
        (folder / f"stsa.binary.{part}").write_text("\n".join(lines) + "\n")


def test_sst2_is_read_from_its_files_with_the_words_of_the_training_part(tmp_path: Path) -> None:
    assert missing_task("sst2", text=str(tmp_path)) is not None
    sentences(tmp_path)
    task = make_task("sst2", (20, 100, 100), 0, text=str(tmp_path), tokens=5)
    assert [len(part) for part in parts(task)] == [20, 6, 8]
    # Padding, unknown, and the words seen twice: film, bad, good.
    assert task.vocabulary == 5
    assert task.training.x[:2].tolist() == [[3, 2, 1, 0, 0], [4, 2, 1, 0, 0]]
    assert task.test.y.tolist() == [0, 1] * 4


def test_sst2_is_read_once_and_anew_when_a_file_has_changed(tmp_path: Path) -> None:
    sentences(tmp_path)
    first, again = (make_task("sst2", SIZES, s, text=str(tmp_path), tokens=5) for s in (0, 1))
    assert first is again
    (tmp_path / "stsa.binary.dev").write_text("1 good\n0 bad\n")
    assert len(make_task("sst2", SIZES, 0, text=str(tmp_path), tokens=5).validation) == 2


def test_words_are_counted_and_rare_ones_are_one() -> None:
    words = Vocabulary.of([["b", "a", "b"], ["a", "c"]])
    assert words.words == ("a", "b")
    assert words.encode_all([["c", "b", "a", "a"], []], 3).tolist() == [[1, 3, 2], [1, 0, 0]]
    assert words.encode(["c", "b", "a", "a"], 3) == [1, 3, 2]


def test_the_users_own_tsv_is_cut_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    lines = [f"{'pos' if i % 3 else 'neg'}\ttext {'fine' if i % 3 else 'poor'}" for i in range(24)]
    path.write_text("\n".join(lines))
    task = make_task("own", SIZES, 0, data=str(path), tokens=4)
    assert [len(part) for part in parts(task)] == [13, 4, 6]
    fine = int(task.training.x[task.training.y == 1][0, 1])
    for part in parts(task):
        assert torch.equal(part.y, (part.x[:, 1] == fine).long())
    path.write_text("no tab here\n")
    with pytest.raises(InputError, match="line 1: expected a label, a tab and a text"):
        make_task("own", SIZES, 0, data=str(path))


def test_the_users_own_image_folder_has_a_folder_for_each_class(tmp_path: Path) -> None:
    for name, grey in (("dark", 0), ("light", 255)):
        (tmp_path / name).mkdir()
        for i in range(8):
            Image.new("L", (20, 30), grey).save(tmp_path / name / f"{i}.png")
    task = make_task("own", (8, 4, 4), 0, data=str(tmp_path))
    assert (task.tokens, task.patch) == (16, 49)
    for part in parts(task):
        assert torch.equal(part.x.mean((1, 2)), 2.0 * part.y - 1)
    (tmp_path / "dark" / "broken.png").write_bytes(b"no image")
    with pytest.raises(StoredFileError, match="is no image that can be read"):
        make_task("own", SIZES, 0, data=str(tmp_path))
    with pytest.raises(InputError, match="has 0 folders with 0 images"):
        make_task("own", SIZES, 0, data=str(tmp_path / "light"))


def idx(values: np.ndarray) -> bytes:
    head = b"\x00\x00\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(np.uint8).tobytes()


def test_fashion_is_read_from_debians_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collapse_tasks, "_SHARE", tmp_path)
    folder = tmp_path / "datasets" / "fashion-mnist"
    (tmp_path / "doc" / "dataset-fashion-mnist").mkdir(parents=True)
    assert "needs Debian's package dataset-fashion-mnist" in str(missing_task("fashion"))
    folder.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 6)):
        labels = np.arange(count) % 10
        images = np.broadcast_to(labels[:, None, None] * 20, (count, 28, 28))
        raw = gzip.compress(idx(images)) if part == "train" else idx(images)
        ending = ".gz" if part == "train" else ""
        (folder / f"{part}-images-idx3-ubyte{ending}").write_bytes(raw)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    task = make_task("fashion", (6, 4, 5), 0)
    assert [len(part) for part in parts(task)] == [6, 4, 5]
    assert task.test.y.tolist() == [0, 1, 2, 3, 4]
    assert task.validation.y.tolist() == [0, 1, 2, 3]
    assert task.training.y.tolist() == [4, 5, 6, 7, 8, 9]
    for part in parts(task):
        torch.testing.assert_close(part.x.mean((1, 2)), part.y * 20 / 127.5 - 1)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(labels)[:-1])
    with pytest.raises(StoredFileError, match="holds 5 numbers"):
        make_task("fashion", SIZES, 0)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("own", "", "own needs a TSV or an image folder"),
        ("own", "/nowhere/at/all", "'/nowhere/at/all' was given"),
        ("sst2", "", "sst2 needs stsa.binary.train, .dev and .test: give --set text=DIR"),
        ("paint", "", "there is no task 'paint': choose from copy"),
    ],
)
def test_a_task_that_cannot_be_made_says_why(name: str, data: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_task(name, SIZES, 0, data=data)
    assert message in str(caught.value)
