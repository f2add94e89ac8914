"""The collapse study as a whole: cells that follow from cells, its smallest run, its grid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from levelhead.base.errors import InputError
from levelhead.base.records import Run
from levelhead.report.document import write_report
from levelhead.studies.collapse import STUDY, CollapseSettings
from levelhead.studies.collapse_arms import PENALTIES
from levelhead.studies.collapse_outcomes import FRESH
from levelhead.studies.running import run_study, study_settings
from levelhead.studies.study import Cell, Findings, Outcome, Study, StudySettings
from unit.studies.study_work import doubled


class Chain(StudySettings):
    folder: str = ""


def _link(settings: Chain, number: int, **more: int) -> Cell:
    return Cell(f"link-{number}", {"number": number, "folder": settings.folder, **more})


def _first(settings: Chain) -> list[Cell]:
    return [_link(settings, 1)]


def _next(settings: Chain, outcomes: Mapping[str, Outcome]) -> list[Cell]:
    """Every number that was found is asked for as well, up to eight; five fails and ends there."""
    doubles = sorted(int(o.value("double")) for o in outcomes.values())
    found = [_link(settings, n) for n in doubles if n <= 8]
    return [*found, _link(settings, 5, diverges=1)] if 4 in doubles else found


def _sum(settings: Chain, outcomes: Mapping[str, Outcome]) -> Findings:
    return Findings(conclusion=[" ".join(sorted(outcomes))])


CHAIN = Study("chain", "Chain", "How far?", Chain, {}, _first, doubled, _sum, follow=_next)


def starts(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text()) for path in folder.glob("starts-*")}


def test_cells_follow_from_cells_until_nothing_new_comes(tmp_path: Path) -> None:
    told = {"folder": str(tmp_path)}
    result = run_study(CHAIN, tmp_path / "out", overrides=told, show_progress=False)
    assert result.conclusion == ("link-1 link-2 link-4 link-8",)
    assert [failure.cell for failure in result.left_out] == ["link-5"]
    timed = (tmp_path / "out" / "timings.csv").read_text()
    assert all(f"link-{n},whole," in timed for n in (1, 2, 4, 5, 8))
    again = run_study(CHAIN, tmp_path / "out", overrides=told, resume=True, show_progress=False)
    assert again.conclusion == result.conclusion
    assert starts(tmp_path) == {f"starts-{n}": 1 for n in (1, 2, 4, 5, 8)}


def test_a_study_without_a_second_list_ends_with_the_first(tmp_path: Path) -> None:
    alone = Study("chain", "Chain", "How far?", Chain, {}, _first, doubled, _sum)
    told = {"folder": str(tmp_path)}
    result = run_study(alone, tmp_path / "out", overrides=told, show_progress=False)
    assert result.conclusion == ("link-1",)


# ── the study ──

TINY = {
    "epochs": 2,
    "epoch_steps": 3,
    "training": 32,
    "batch": 8,
    "validation": 16,
    "test": 32,
    "width": 8,
    "scales": (0.003,),
    "weights": (0.1, 1.0),
    "shares": (0.5, 1.0),
    "tasks": ("copy",),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collapse") / "out"
    run_study(STUDY, folder, preset="quick", overrides=TINY, show_progress=False)
    return folder


def test_the_smallest_run_goes_through_all_its_steps(tiny: Path) -> None:
    names = {path.name for path in (tiny / "cells").iterdir()}
    counted = {kind: sum(n.startswith(f"{kind}-") for n in names) for kind in ("search", "select")}
    # One setting; B, C and D at two weights each.
    assert counted == {"search": 1, "select": 6}
    judged = sorted(n for n in names if n.startswith("verdict-"))
    assert len(judged) == 2 * 6
    assert {n.split("-")[2] for n in judged} == {
        "A", "O", "E.naive", "B.coherence", "C.coherence", "D.core",
    }  # fmt: skip
    assert {int(n.split("-")[-1]) for n in judged} == {FRESH, FRESH + 1}
    statements = {s["name"]: s for s in json.loads((tiny / "statements.json").read_text())}
    assert statements["naive-copy"]["holds"]
    assert statements["naive-copy"]["expected"]
    assert not statements["alarm-copy"]["expected"]
    # Two seeds are too few to judge by.
    for name in ("beats-copy-coherence", "core-copy", "ordinary-start-copy"):
        assert statements[name]["holds"] is None
        assert "ot judged (2 pairs, 5 are needed)" in statements[name]["evidence"]


def test_weight_decay_is_told_the_ratio_of_pulls_of_its_penalty(tiny: Path) -> None:
    for weight in ("0.1", "1"):
        pulls = Run.open(tiny / "cells" / f"select-copy-B.coherence-{weight}-0").readings()
        found = {r.name: r.value for r in pulls}
        settings = json.loads(
            (tiny / "cells" / f"select-copy-C.coherence-{weight}-0" / "settings.json").read_text()
        )
        told = settings["cell"]["strength"] if "cell" in settings else None
        told = settings["settings"]["cell"]["strength"] if told is None else told
        assert told == pytest.approx(found["pull_mean"] / found["decay_pull_mean"], rel=1e-12)


def test_the_naive_arm_ends_where_the_baseline_does(tiny: Path) -> None:
    errors = {}
    for arm in ("A-0", "E.naive-1", "O-0"):
        run = Run.open(tiny / "cells" / f"verdict-copy-{arm}-{FRESH}")
        errors[arm] = next(r.value for r in run.readings() if r.name == "test_loss")
    assert errors["E.naive-1"] == pytest.approx(errors["A-0"], rel=1e-6)
    assert errors["O-0"] != pytest.approx(errors["A-0"], rel=1e-6)


def test_its_report_draws_maps_side_by_side_and_tables(tiny: Path) -> None:
    page = write_report(Run.open(tiny)).read_text(encoding="utf-8")
    assert "Attention side by side, copy, layer 1" in page
    assert "Primary comparisons of test errors" in page
    assert "Validation loss by epoch, copy" in page
    assert "Test error under PGD of 0.2, copy" in page
    maps = Run.open(tiny).array("maps-copy-layer-0.values")
    assert maps.shape[0] == 8
    np.testing.assert_allclose(maps.reshape(8, -1, 8).sum(2), 1.0, rtol=1e-5)


def test_a_second_run_gives_the_same_tables(tiny: Path, tmp_path: Path) -> None:
    # Half of the cells are there already, as if the run had been stopped.
    out = tmp_path / "b"
    shutil.copytree(tiny, out)
    for cell in sorted((out / "cells").iterdir())[::2]:
        (cell / "done.json").unlink()
    run_study(STUDY, out, preset="quick", overrides=TINY, resume=True, show_progress=False)
    for path in (tiny / "tables").iterdir():
        assert (tmp_path / "b" / "tables" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_standard_grid_searches_depths_and_leaves_out_what_has_no_files() -> None:
    settings = study_settings(STUDY)
    assert isinstance(settings, CollapseSettings)
    assert settings.seeds >= 10
    assert len(settings.shares) == len(settings.weights)
    assert set(settings.penalties) == set(PENALTIES)
    cells = STUDY.cells(settings)
    # Optimisers × depths × (scales and one further spread) × seeds × tasks.
    assert len(cells) == 4 * 2 * 5 * settings.search_seeds * 2
    assert {cell.given["task"] for cell in cells} == {"copy", "digits"}
    [said] = [s for s in STUDY.limits(settings) if "sst2" in s]
    assert said.startswith("Left out: all cells of sst2. Sst2 needs stsa.binary.train")


def test_the_users_own_data_are_confirmed_as_soon_as_they_are_given(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text("a\tb\n")
    settings = study_settings(STUDY, overrides={"data": str(path)})
    assert not any("all cells of own" in said for said in STUDY.limits(settings))
    settings = study_settings(STUDY, overrides={"data": str(tmp_path / "none")})
    assert any("Own needs a TSV" in said for said in STUDY.limits(settings))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tasks": "copy,paint"}, "the setting tasks.1 = 'paint' does not fit"),
        ({"penalties": "ridge"}, "the setting penalties.0 = 'ridge' does not fit"),
        ({"optimisers": "adam"}, "the setting optimisers.0 = 'adam' does not fit"),
        ({"weights": "0.1,1"}, "shares and weights must be equally many"),
    ],
)
def test_settings_that_no_cell_could_run_are_refused(
    overrides: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        study_settings(STUDY, overrides=overrides)
    assert message in str(caught.value)


def test_presets_name_the_same_number_of_shares_as_of_weights() -> None:
    for preset in ("quick", "standard", "full"):
        settings = study_settings(STUDY, preset)
        assert isinstance(settings, CollapseSettings)
        assert len(settings.shares) == len(settings.weights), preset
