"""Studies on Dask: a pool for `levelhead.studies.running.run_study`; extra `[dask]`.

Dask starts a lost worker again by itself and gives its cell to another one; a cell that takes
several workers down is given up with `KilledWorker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, KilledWorker, LocalCluster
from distributed.comm.core import CommClosedError
from joblib import parallel_config

from levelhead.base.errors import InputError

__all__ = ["DaskPool"]


def _refuse_threads(client: Any) -> None:
    """Cells set threads and draw from torch's own state: two of them need two processes."""
    workers = client.scheduler_info()["workers"].values()
    if any(worker["nthreads"] > 1 for worker in workers):
        raise InputError(
            "the Dask cluster has workers of several threads: start them with --nthreads 1 and as "
            "many processes (--nworkers) as cores"
        )


@dataclass(frozen=True)
class DaskPool:
    """Runs on the cluster at `address` (tcp://host:port), or on one of local processes.

    The folder of the study must be reachable from all its machines.
    """

    address: str | None = None
    name: str = field(default="dask", init=False)
    broken: tuple[type[BaseException], ...] = field(
        default=(KilledWorker, CommClosedError, TimeoutError), init=False
    )

    @contextmanager
    def start(self, jobs: int, threads: int) -> Iterator[None]:
        """A context in which joblib runs on the cluster; a local one has `jobs` workers."""
        if self.address is not None:
            try:
                client: Any = Client(self.address)  # type: ignore[no-untyped-call]
            except (ValueError, OSError) as error:
                raise InputError(
                    f"no Dask cluster answers at {self.address!r} ({error}): give the address of "
                    "its scheduler, such as tcp://host:8786"
                ) from error
            with client, parallel_config(backend="dask"):
                _refuse_threads(client)
                yield
            return
        cluster: Any = LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=jobs, threads_per_worker=1, processes=True, dashboard_address=None
        )
        with cluster:
            client = Client(cluster)  # type: ignore[no-untyped-call]
            with client, parallel_config(backend="dask", n_jobs=jobs):
                yield
