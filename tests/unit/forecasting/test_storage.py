"""Stored forecasters: whole, or refused in one sentence; never another error, never nonsense."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from levelhead.base.errors import InputError, LevelheadError, StoredFileError
from levelhead.forecasting import storage
from levelhead.forecasting.candidates import Blend, Line, Network
from levelhead.forecasting.forecaster import SAMformer
from oracles import forecasting as oracle

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cannot support a coverage"),
    pytest.mark.filterwarnings("ignore:the model was fitted on other channels"),
]

H, L = 3, 8
ARRAYS, JSON = "model.safetensors", "model.json"


def make(model: str = "blend", **settings: Any) -> SAMformer:
    small = {"horizon": H, "context": L, "epochs": 2, "width": 2, "rho": 0.05}
    return SAMformer(model=model, **(small | {"learning_rate": 0.02} | settings))


@pytest.fixture(scope="module")
def forecaster() -> SAMformer:
    """A blend of a line and a network, with stamps that have a zone."""
    rows = oracle.hourly(200, 2, seed=1, tz="Europe/Berlin")
    fitted = make().fit(rows)
    chosen = fitted._fitted.chosen
    assert isinstance(chosen, Blend)
    assert {type(m) for m in chosen.members} == {Line, Network}
    return fitted


@pytest.fixture
def folder(forecaster: SAMformer, tmp_path: Path) -> Path:
    return forecaster.save(tmp_path / "model")


def refused(folder: Path) -> str:
    """The one sentence with which it is refused."""
    with pytest.raises(StoredFileError) as error:
        SAMformer.load(folder)
    text = str(error.value)
    assert str(folder) in text
    assert "\n" not in text.strip()
    return text


def rewrite(folder: Path, change: Any = None, arrays: Any = None) -> None:
    """Change the record or the arrays as another program could: with a digest that fits."""
    record = json.loads((folder / JSON).read_text())
    packed = (folder / ARRAYS).read_bytes()
    if change is not None:
        change(record)
    if arrays is not None:
        held = load_arrays(packed)
        arrays(held)
        packed = save_arrays(held)
    if isinstance(record.get("sha256"), str):
        record["sha256"] = storage._digest(record, packed)
    (folder / ARRAYS).write_bytes(packed)
    (folder / JSON).write_text(json.dumps(record))


def same(one: SAMformer, two: SAMformer) -> None:
    pd.testing.assert_frame_equal(one.predict(), two.predict(), check_exact=True)
    pd.testing.assert_frame_equal(one.predict_interval(), two.predict_interval(), check_exact=True)


# -- whole ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"freq": "ME"},
        {"freq": "W-WED"},
        {"freq": "15min", "tz": "America/New_York"},
        {"freq": "h", "tz": "UTC"},
        {"freq": "h", "tz": "Etc/GMT+3"},
        {"freq": "h", "tz": dt.timezone(dt.timedelta(hours=5, minutes=30))},
        {"freq": "B"},
    ],
    ids=str,
)
def test_steps_and_zones_come_back(given: dict[str, Any], tmp_path: Path) -> None:
    rows = oracle.hourly(120, 2, **given)
    fitted = make("linear").fit(rows)
    same(SAMformer.load(fitted.save(tmp_path)), fitted)


@pytest.mark.parametrize("form", ["numpy", "flat", "polars", "long", "index", "integers"])
def test_forms_of_tables_come_back(form: str, tmp_path: Path) -> None:
    rows = oracle.hourly(120, 2)
    forms: dict[str, Any] = {
        "numpy": rows[["load", "oil"]].to_numpy(),
        "flat": rows["load"].to_numpy(),
        "polars": pl.DataFrame(rows.to_dict("series")),
        "long": oracle.long_form(rows),
        "index": rows.set_index("date"),
        "integers": rows.drop(columns="date").set_axis(np.arange(7, 367, 3)),
    }
    fitted = make("linear").fit(forms[form])
    loaded = SAMformer.load(fitted.save(tmp_path))
    one, two = loaded.predict(), fitted.predict()
    assert type(one) is type(two)
    if form == "polars":
        assert one.equals(two)
        assert one.schema == two.schema
    elif form in ("numpy", "flat"):
        np.testing.assert_array_equal(one, two)
    else:
        pd.testing.assert_frame_equal(one, two, check_exact=True)
    pd.testing.assert_frame_equal(
        loaded.predict_interval(), fitted.predict_interval(), check_exact=True
    )


def test_labels_that_are_tuples_come_back(tmp_path: Path) -> None:
    rows = oracle.hourly(120, 2).set_index("date")
    rows.columns = pd.MultiIndex.from_tuples([("a", 1), ("a", 2)])
    fitted = make("linear").fit(rows)
    loaded = SAMformer.load(fitted.save(tmp_path))
    pd.testing.assert_frame_equal(loaded.predict(), fitted.predict(), check_exact=True)


def test_names_in_any_script(tmp_path: Path) -> None:
    rows = oracle.hourly(120, 2).rename(columns={"load": "气温 🌡️", "oil": 'µ"\\'})
    fitted = make("linear", targets=["气温 🌡️"]).fit(rows)
    loaded = SAMformer.load(fitted.save(tmp_path))
    same(loaded, fitted)
    assert loaded.channels_ == ("气温 🌡️", 'µ"\\')


def test_parameters_come_back(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "targets": ["load"],
        "freq": "h",
        "season": 6,
        "refit": False,
        "random_state": 7,
        "num_threads": None,
        "revin_affine": True,
    }
    fitted = make("linear", **given).fit(oracle.hourly(120, 2))
    assert SAMformer.load(fitted.save(tmp_path)).get_params() == fitted.get_params()


def test_saving_again_replaces_the_old_model(forecaster: SAMformer, folder: Path) -> None:
    other = make("linear").fit(oracle.hourly(120, 3))
    other.save(folder)
    same(SAMformer.load(folder), other)
    assert sorted(p.name for p in folder.iterdir()) == [JSON, ARRAYS]


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    rows = oracle.hourly(120, 2).set_index("date")
    rows.columns = [pd.Timestamp("2024-01-01"), pd.Timestamp("2024-01-02")]
    fitted = make("linear").fit(rows)
    with pytest.raises(InputError, match="a Timestamp among its parameters or column names"):
        fitted.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_zone_without_a_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    fitted = make("linear").fit(oracle.hourly(120, 2, tz="dateutil/Europe/Berlin"))
    with pytest.raises(InputError, match="has no name to store it by: convert the stamps"):
        fitted.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    fitted = make("linear").fit(oracle.hourly(120, 2))
    with pytest.raises(LevelheadError, match=r"file/model cannot be made a folder \(Not a dir"):
        fitted.save(tmp_path / "file" / "model")


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ARRAYS, JSON])
def test_truncated_files(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    lengths = [*range(0, len(whole) - 1, max(10, len(whole) // 300)), len(whole) - 1]
    for length in lengths:
        (folder / name).write_bytes(whole[:length])
        refused(folder)
    (folder / name).write_bytes(whole)
    SAMformer.load(folder)


@pytest.mark.parametrize("name", [ARRAYS, JSON])
def test_altered_bytes(folder: Path, name: str, forecaster: SAMformer) -> None:
    """Whatever byte is flipped: refused, or (white space in the JSON) the same model."""
    whole = (folder / name).read_bytes()
    draw = np.random.default_rng(0)
    heads = range(0, min(400, len(whole)), 3)
    for at in [*heads, *draw.integers(0, len(whole), 150)]:
        broken = bytearray(whole)
        broken[at] ^= 1 << int(draw.integers(0, 8))
        (folder / name).write_bytes(bytes(broken))
        try:
            loaded = SAMformer.load(folder)
        except StoredFileError:
            continue
        same(loaded, forecaster)


def test_garbage(folder: Path) -> None:
    draw = np.random.default_rng(1)
    for name in (ARRAYS, JSON):
        whole = (folder / name).read_bytes()
        for garbage in (b"", b"\x00" * 100, b"[]", b"{}", b"null", b"[" * 99_999, draw.bytes(500)):
            (folder / name).write_bytes(garbage)
            refused(folder)
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("name", [ARRAYS, JSON])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"({name} is missing)" in refused(folder)
    assert "(model.json is missing)" in refused(folder / "nowhere")
    (folder / name).mkdir()
    refused(folder)


def test_two_halves_of_different_models(folder: Path, tmp_path: Path) -> None:
    """As a process leaves them that is killed between the two files."""
    rows = oracle.hourly(200, 2, seed=1, tz="Europe/Berlin")
    other = make(random_state=1).fit(rows).save(tmp_path / "other")
    (folder / ARRAYS).write_bytes((other / ARRAYS).read_bytes())
    assert "not of one model" in refused(folder)


def test_a_newer_version_is_told_so(folder: Path) -> None:
    def newer(record: dict[str, Any]) -> None:
        record.clear()
        record.update({"schema": storage.SCHEMA + 1, "everything": "else"})

    rewrite(folder, newer)
    assert "newer version (schema 2, this one reads up to 1): upgrade levelhead" in refused(folder)


@pytest.mark.parametrize(
    "array",
    ["chosen.0.head", "scaler.mean", "tail.values", "conformal.grid", "conformal.pooled"],
)
def test_wrong_shapes(folder: Path, array: str) -> None:
    held = load_arrays((folder / ARRAYS).read_bytes())
    name = next((n for n in held if n == array or n.endswith(array)), None)
    if name is None:
        name = next(n for n in held if n.startswith("chosen") and n.endswith("head"))
    for change in (
        lambda a: a.update({name: a[name][:-1]}),
        lambda a: a.update({name: a[name][None]}),
        lambda a: a.pop(name),
    ):
        before = (folder / ARRAYS).read_bytes(), (folder / JSON).read_bytes()
        rewrite(folder, arrays=change)
        assert "does not fit together" in refused(folder)
        (folder / ARRAYS).write_bytes(before[0])
        (folder / JSON).write_bytes(before[1])


def leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value inside a record."""
    parts = value.items() if isinstance(value, dict) else enumerate(value[:2])
    found = [at] if at else []
    for key, part in parts if isinstance(value, dict | list) else ():
        found += leaves(part, (*at, key)) if isinstance(part, dict | list) else [(*at, key)]
    return found


def test_records_that_make_no_sense(folder: Path, forecaster: SAMformer) -> None:
    """Every field lost, or of another kind, with a digest that fits: refused or harmless."""
    whole = (folder / JSON).read_text()
    paths = [p for p in leaves(json.loads(whole)) if p[0] not in ("params", "sha256")]
    assert len(paths) > 40
    for path in paths:
        for wrong in (None, "text", -3, 1e300, [], {}, "lost"):

            def change(record: dict[str, Any], path=path, wrong=wrong) -> None:
                for key in path[:-1]:
                    record = record[key]
                if wrong == "lost":
                    del record[path[-1]]
                else:
                    record[path[-1]] = wrong

            (folder / JSON).write_text(whole)
            rewrite(folder, change)
            said = None
            try:
                SAMformer.load(folder)
            except StoredFileError as error:
                said = str(error)
            assert said is None or (str(folder) in said and "\n" not in said)
