"""Studies on local Dask and Ray clusters: the same code, the same bytes, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from levelhead.base.errors import InputError
from levelhead.studies.engine import Pool, execute, load_outcome
from levelhead.studies.study import Cell, StudySettings
from unit.studies.study_work import doubled

pytestmark = [
    pytest.mark.slow,
    # what these libraries warn of while their processes come and go is theirs
    pytest.mark.filterwarnings("ignore"),
]
TESTS = Path(__file__).parents[2]


@pytest.fixture(params=["dask", "ray"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    made: Any
    if request.param == "dask":
        made = pytest.importorskip("levelhead.adapters.dask").DaskPool()
    else:
        made = pytest.importorskip("levelhead.adapters.ray").RayPool()
    return made


def test_a_killed_worker_costs_only_what_was_in_flight(pool: Pool, tmp_path: Path) -> None:
    asked = [
        Cell(f"cell-{n}", {"number": n, "folder": str(tmp_path), "dies": int(n == 2)})
        for n in range(6)
    ]
    failures = execute(
        doubled, StudySettings(), asked, tmp_path, jobs=2, pool=pool, show_progress=False
    )
    assert failures == []
    for n, cell in enumerate(asked):
        found = load_outcome(tmp_path, cell)
        assert found is not None
        assert found.value("double") == 2 * n
    starts = [len((tmp_path / f"starts-{n}").read_text()) for n in range(6)]
    assert starts[2] == 2
    assert sum(starts) <= 6 + 2


def test_dask_workers_of_several_threads_are_refused() -> None:
    distributed = pytest.importorskip("distributed")
    dask = pytest.importorskip("levelhead.adapters.dask")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None
    ) as cluster:
        pool = dask.DaskPool(cluster.scheduler_address)
        with pytest.raises(InputError, match="start them with --nthreads 1"), pool.start(2, 1):
            pass


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_an_address_where_nothing_answers_is_one_sentence(name: str) -> None:
    made: Any
    if name == "dask":
        made = pytest.importorskip("levelhead.adapters.dask").DaskPool("nonsense")
    else:
        made = pytest.importorskip("levelhead.adapters.ray").RayPool("nonsense")
    said = f"no {name.capitalize()} cluster answers at 'nonsense'"
    with pytest.raises(InputError, match=said), made.start(1, 1):
        pass
