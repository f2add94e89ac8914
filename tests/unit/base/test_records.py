"""Run folders: what is written is read back bit for bit, and damage is told apart from records."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levelhead.base.errors import InputError, LevelheadError, StoredFileError
from levelhead.base.files import append_lines, sha256_of, write_atomically
from levelhead.base.records import Figure, Reading, Run


def _run(folder: Path, **settings: object) -> Run:
    return Run.create(folder, title="A try", command="levelhead try", settings=settings)


def _figure(name: str = "loss", **changes: object) -> Figure:
    parts = {"kind": "lines", "title": "Loss", "says": "It falls.", "arrays": {"x": "x", "y": "y"}}
    return Figure(name, **{**parts, **changes})


# ── creating and opening ──


def test_a_run_is_read_back_as_it_was_made(tmp_path):
    made = Run.create(
        tmp_path / "deep" / "run",
        title="Ünïcode <title>",
        command=None,
        settings={
            "horizon": np.int64(96),
            "rate": np.float32(0.5),
            "path": Path("a") / "b",
            "shape": (1, 2),
            "sam": {"rho": 0.7, "limit": math.inf},
            "none": None,
            "flag": True,
        },
    )
    run = Run.open(made.folder)
    assert (run.title, run.command) == ("Ünïcode <title>", None)
    assert run.settings == {
        "horizon": 96,
        "rate": 0.5,
        "path": str(Path("a") / "b"),
        "shape": [1, 2],
        "sam": {"rho": 0.7, "limit": "inf"},
        "none": None,
        "flag": True,
    }
    assert run.settings["flag"] is True
    assert run.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run.versions["numpy"] == np.__version__
    assert {"levelhead", "torch", "platform"} <= run.versions.keys()
    assert json.loads((run.folder / "settings.json").read_text())["schema"] == 1


def test_settings_that_cannot_be_stored_are_named(tmp_path):
    with pytest.raises(InputError, match=r"'sam\.fn\[1\]' is a function"):
        _run(tmp_path, sam={"fn": [1, _figure]})
    assert not list(tmp_path.iterdir())


def test_the_copy_of_settings_does_not_reach_the_run(tmp_path):
    run = _run(tmp_path, horizon=96)
    run.settings["horizon"] = 1
    assert run.settings == {"horizon": 96}


def test_an_empty_folder_and_foreign_files_are_fine_a_used_folder_is_not(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    _run(tmp_path)
    with pytest.raises(InputError, match=r"already holds a run \(settings\.json\)"):
        _run(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["readings-a.jsonl", "arrays-0.safetensors", "notes.json"])
def test_any_file_of_a_run_makes_a_folder_used(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(InputError, match="already holds a run"):
        _run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_in_the_place_of_the_folder_is_one_sentence(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(LevelheadError, match="cannot be made a folder"):
        _run(tmp_path / "run")


def test_resume_takes_up_the_run_and_refuses_other_settings(tmp_path):
    _run(tmp_path, horizon=96).add_readings([Reading("mse", 1.0)])
    arguments = {"title": "Other", "command": None, "resume": True}
    resumed = Run.create(tmp_path, settings={"horizon": 96}, **arguments)
    assert (resumed.title, len(resumed.readings())) == ("A try", 1)
    with pytest.raises(InputError, match="horizon = 96, not 192"):
        Run.create(tmp_path, settings={"horizon": 192}, **arguments)
    fresh = Run.create(tmp_path / "fresh", settings={}, **arguments)
    assert Run.open(fresh.folder).title == "Other"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a run folder"),
        (b"", "truncated or altered"),
        (b'{"schema": 1, "title": "a', "truncated or altered"),
        (b"[1]", "is not a run's"),
        (b'{"schema": "1"}', "is not a run's"),
        (b'{"schema": 2, "what": "comes"}', r"newer version \(schema 2, .* up to 1\): upgrade"),
        (b'{"schema": 1, "title": "a"}', "lacks settings, versions"),
        (b"\xff\xfe", "truncated or altered"),
    ],
)
def test_what_is_not_a_run_is_one_sentence(tmp_path, content, message):
    if content is not None:
        (tmp_path / "settings.json").write_bytes(content)
    with pytest.raises(StoredFileError, match=message) as caught:
        Run.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_truncating_any_stored_file_is_noticed_when_the_run_is_opened(tmp_path):
    run = _run(tmp_path, horizon=96)
    run.add_arrays({"x": np.arange(3.0), "y": np.ones((2, 3))})
    run.add_figures([_figure()])
    run.add_notes(["A sentence."])
    paths = [path for path in tmp_path.iterdir() if path.suffix in (".json", ".safetensors")]
    assert len(paths) == 4
    for path in paths:
        whole = path.read_bytes()
        for keep in (0, 5, len(whole) // 2, len(whole) - 2):
            path.write_bytes(whole[:keep])
            with pytest.raises(StoredFileError, match=f"{path.name} is truncated"):
                Run.open(tmp_path)
        path.write_bytes(whole)
    assert Run.open(tmp_path).notes() == ["A sentence."]


# ── readings ──

_READINGS = st.builds(
    Reading,
    name=st.text(max_size=20),
    value=st.floats(allow_nan=False),
    unit=st.text(max_size=3),
    where=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
    step=st.none() | st.integers(),
    source=st.text(max_size=5),
)


@given(readings=st.lists(_READINGS, max_size=5))
def test_readings_are_read_back_exactly(tmp_path_factory, readings):
    run = _run(tmp_path_factory.mktemp("run"))
    for reading in readings:
        run.add_readings([reading])
    assert Run.open(run.folder).readings() == readings


def test_nan_and_infinities_survive_in_files_that_are_strict_json(tmp_path):
    run = _run(tmp_path)
    values = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1]
    run.add_readings(Reading("v", value, step=0) for value in values)
    back = [reading.value for reading in run.readings()]
    assert np.array(back).tobytes() == np.array(values).tobytes()

    def refuse(token: str) -> float:
        raise AssertionError(f"{token} is not JSON")

    for line in (tmp_path / "readings-main.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_numpy_scalars_become_plain_numbers():
    reading = Reading("v", np.float32(0.5), where={"layer": np.int64(3)}, step=np.int32(7))
    assert [type(part) for part in (reading.value, reading.where["layer"], reading.step)] == [
        float,
        int,
        int,
    ]


@pytest.mark.parametrize(
    "parts", [{"value": "x"}, {"value": None}, {"step": 1.5}, {"where": {"layer": 0.5}}]
)
def test_what_is_not_a_reading_is_refused(parts):
    with pytest.raises(InputError, match="Reading 'v' was given"):
        Reading(**{"name": "v", "value": 1.0, **parts})


def test_records_can_be_sent_to_another_process(tmp_path):
    reading, figure = Reading("v", 1.0, where={"head": 1}), _figure(labels={"series": ["a"]})
    assert pickle.loads(pickle.dumps((reading, figure))) == (reading, figure)
    run = _run(tmp_path)
    assert pickle.loads(pickle.dumps(run)).folder == run.folder


def test_a_line_torn_anywhere_is_ignored_and_appending_goes_on_cleanly(tmp_path):
    run = _run(tmp_path)
    run.add_readings([Reading("first", 1.0), Reading("last", 2.0, where={"head": 1})])
    path = tmp_path / "readings-main.jsonl"
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for keep in range(start, len(whole)):
        path.write_bytes(whole[:keep])
        assert [r.name for r in run.readings()] == ["first"]
        run.add_readings([Reading("next", 3.0)])
        assert [r.name for r in run.readings()] == ["first", "next"]


def test_a_torn_line_longer_than_the_search_step_is_cut_off(tmp_path):
    path = tmp_path / "lines"
    for torn in (b"x" * 4095, b"x" * 4096, b"x" * 10_000):
        path.write_bytes(b"one\n" + torn)
        append_lines(path, b"two\n")
        assert path.read_bytes() == b"one\ntwo\n"
        path.write_bytes(torn)
        append_lines(path, b"two\n")
        assert path.read_bytes() == b"two\n"


@pytest.mark.parametrize("damage", [b'{"name": "a", "val', b"[]", b'{"name": "a"}', b"", b"\0\0"])
def test_a_damaged_middle_line_names_file_and_line(tmp_path, damage):
    run = _run(tmp_path)
    run.add_readings([Reading("a", 1.0), Reading("b", 2.0)])
    path = tmp_path / "readings-main.jsonl"
    first, second, rest = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, damage, second, rest]))
    with pytest.raises(StoredFileError, match=r"Line 2 of .*readings-main\.jsonl"):
        run.readings()


@pytest.mark.parametrize("writer", ["", "../x", "a/b", ".hidden", "a b"])
def test_a_writer_name_cannot_leave_the_folder(tmp_path, writer):
    with pytest.raises(InputError, match="writer name"):
        _run(tmp_path / "run").add_readings([Reading("v", 1.0)], writer=writer)


_WORKER = """
import sys, numpy as np
from levelhead.base.files import write_atomically
from levelhead.base.records import Reading, Run
run, me = Run.open(sys.argv[1]), sys.argv[2]
for step in range(40):
    run.add_readings([Reading("v", step, where={"writer": me})], writer=me)
    write_atomically(run.folder / "same.txt", (me * 5000).encode())
    if step % 10 == 0:
        run.add_arrays({f"{me}-{step}": np.full(3, step)})
"""


def test_four_processes_write_in_one_folder(tmp_path):
    run = _run(tmp_path)
    workers = [
        subprocess.Popen([sys.executable, "-c", _WORKER, str(tmp_path), me]) for me in "abcd"
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0] * 4
    seen = [(reading.where["writer"], reading.value) for reading in run.readings()]
    assert seen == [(me, float(step)) for me in "abcd" for step in range(40)]
    assert run.array_names() == sorted(f"{me}-{step}" for me in "abcd" for step in (0, 10, 20, 30))
    same = (tmp_path / "same.txt").read_text()
    assert same == same[0] * 5000
    assert not list(tmp_path.glob(".levelhead-*"))


# ── arrays ──


@pytest.mark.parametrize("kind", ["?", "i1", "u8", "i8", "f2", "f4", "f8", ">f8", ">i4"])
def test_arrays_are_read_back_exactly(tmp_path, kind):
    rng = np.random.default_rng(0)
    given = (rng.normal(size=(3, 4, 2)) * 9).astype(kind)
    run = _run(tmp_path)
    run.add_arrays({"whole": given, "fortran": np.asfortranarray(given), "view": given.T[::-1]})
    run.add_arrays({"point": given[0, 0, 0], "empty": given[:0]})
    back = Run.open(tmp_path)
    for name, expected in {
        "whole": given,
        "fortran": given,
        "view": given.T[::-1],
        "point": given[0, 0, 0],
        "empty": given[:0],
    }.items():
        array = back.array(name)
        np.testing.assert_array_equal(array, expected)
        assert array.shape == expected.shape
        assert array.dtype == np.dtype(kind).newbyteorder("=")


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.array([None])])
def test_arrays_that_cannot_be_stored_are_refused(tmp_path, array):
    with pytest.raises(InputError, match="Array 'a' has the type"):
        _run(tmp_path).add_arrays({"a": array})


def test_a_used_name_keeps_its_array(tmp_path):
    run = _run(tmp_path)
    run.add_arrays({"a": np.array([0.0, np.nan])})
    run.add_arrays({"a": np.array([0.0, np.nan]), "b": np.ones(1)})
    for other in (np.array([-0.0, np.nan]), np.array([0.0, np.nan], "f4"), np.zeros(3)):
        with pytest.raises(InputError, match="another array named 'a'"):
            run.add_arrays({"a": other})
    assert run.array_names() == ["a", "b"]
    with pytest.raises(InputError, match="no array named 'c': it holds a, b"):
        run.array("c")


def test_arrays_added_by_another_process_are_seen(tmp_path):
    run = _run(tmp_path)
    assert run.array_names() == []
    Run.open(tmp_path).add_arrays({"late": np.arange(2)})
    np.testing.assert_array_equal(run.array("late"), [0, 1])


# ── figures and notes ──


def test_figures_come_back_in_order_and_equal(tmp_path):
    run = _run(tmp_path)
    run.add_arrays({"x": np.arange(3.0), "y": np.ones((1, 3))})
    second = _figure("a", labels={"series": ["µ", "<b>"]}, axes={"y_scale": "log"})
    run.add_figures([_figure("b")])
    run.add_figures([second, _figure("b")])
    assert Run.open(tmp_path).figures() == [_figure("b"), second]
    with pytest.raises(InputError, match="another figure named 'a'"):
        run.add_figures([_figure("a")])
    with pytest.raises(InputError, match="names the array 'z'"):
        run.add_figures([_figure("c", arrays={"x": "z"})])
    assert len(run.figures()) == 2


def test_a_figure_of_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match="'pie': one of fan, lines, heatmap, table, bars"):
        _figure(kind="pie")


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"name": "a"}]', "3", '[{"nom": 1}]'])
def test_altered_figures_and_notes_are_noticed(tmp_path, content):
    _run(tmp_path)
    for name in ("figures.json", "notes.json"):
        (tmp_path / name).write_text(content)
        with pytest.raises(StoredFileError, match=name):
            Run.open(tmp_path)
        (tmp_path / name).unlink()


def test_notes_keep_their_order_and_are_not_repeated(tmp_path):
    run = _run(tmp_path)
    run.add_notes(["Second is “first”.", "First."])
    run.add_notes(["First.", "Third."])
    assert Run.open(tmp_path).notes() == ["Second is “first”.", "First.", "Third."]


# ── files ──


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_atomically(tmp_path / "a", b"old")

    def full(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def broken(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(LevelheadError, match=r"could not be written \(No space left on device\)"):
        write_atomically(path, full)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, broken)
    with pytest.raises(LevelheadError, match="there is no such folder"):
        write_atomically(tmp_path / "none" / "a", b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_while_appending_is_one_sentence(tmp_path):
    run = _run(tmp_path)
    (tmp_path / "readings-main.jsonl").symlink_to("/dev/full")
    with pytest.raises(LevelheadError, match="No space left on device"):
        run.add_readings([Reading("v", 1.0)])


def test_links_are_followed_long_names_work_and_permissions_are_the_usual_ones(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    assert write_atomically(link, b"new") == link
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    long = write_atomically(tmp_path / ("n" * 255), b"x")
    (tmp_path / "usual").touch()
    assert long.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_sha256_is_the_published_one(tmp_path):
    # FIPS 180-2, example B.3: one million letters a; more than one piece when read.
    path = write_atomically(tmp_path / "a", b"a" * 1_000_000)
    assert sha256_of(path) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
    with pytest.raises(StoredFileError, match="cannot be read"):
        sha256_of(tmp_path)


@pytest.mark.parametrize("module", ["levelhead.base.records", "levelhead.base.files"])
def test_records_need_nothing_heavy(module):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert module in done.stdout.split()
    assert not {"torch", "pandas", "scipy", "sklearn"} & set(done.stdout.split())


# ── figures that are drawn again ──


def test_figures_are_replaced_with_their_arrays(tmp_path):
    run = _run(tmp_path)
    run.add_arrays({"kept": np.arange(3.0), "note~book": np.ones(2)})
    run.add_figures([_figure("first", arrays={"x": "kept", "y": "kept"})])
    for size in (4, 5):
        arrays = {"x": np.arange(size), "y": np.zeros((1, size))}
        run.replace_figures(
            [_figure("loss"), _figure("more", arrays={"x": "kept", "y": "y"})], arrays
        )
    again = Run.open(tmp_path)
    assert [figure.name for figure in again.figures()] == ["first", "loss", "more"]
    loss, more = again.figures()[1:]
    np.testing.assert_array_equal(again.array(loss.arrays["x"]), np.arange(5))
    assert more.arrays["x"] == "kept"
    assert more.arrays["y"] == loss.arrays["y"]
    # The arrays of the first drawing are gone, those of others are not.
    assert len(again.array_names()) == 4
    assert {"kept", "note~book"} < set(again.array_names())
    assert run.array_names() == again.array_names()


def test_figures_that_stay_the_same_are_replaced_by_themselves(tmp_path):
    run = _run(tmp_path)
    for _ in range(2):
        run.replace_figures([_figure()], {"x": np.arange(3), "y": np.ones((1, 3))})
    assert len(list(tmp_path.glob("arrays-*"))) == 1
    with pytest.raises(InputError, match="names the array 'z'"):
        run.replace_figures([_figure(arrays={"x": "z"})])
    assert [figure.name for figure in run.figures()] == ["loss"]
