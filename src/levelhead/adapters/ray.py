"""Studies on Ray: a pool for `levelhead.studies.running.run_study`; extra `[ray]`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray
from joblib import parallel_config
from ray.exceptions import RayError
from ray.util.joblib import register_ray

from levelhead.base.errors import InputError

__all__ = ["RayPool"]


@dataclass(frozen=True)
class RayPool:
    """Runs on the cluster at `address` ("auto", ray://host:port), or on one of local processes.

    The folder of the study must be reachable from all its machines.
    """

    address: str | None = None
    name: str = field(default="ray", init=False)
    broken: tuple[type[BaseException], ...] = field(default=(RayError,), init=False)

    @contextmanager
    def start(self, jobs: int, threads: int) -> Iterator[None]:
        """A context in which joblib runs on Ray; a local cluster has `jobs` workers."""
        if self.address is None:
            ray.init(
                num_cpus=jobs * threads,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            try:
                ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
            except (ValueError, OSError, RuntimeError) as error:
                raise InputError(
                    f"no Ray cluster answers at {self.address!r} ({error}): give 'auto', or an "
                    "address such as ray://host:10001"
                ) from error
        try:
            register_ray()  # type: ignore[no-untyped-call]
            with parallel_config(backend="ray", n_jobs=jobs, ray_remote_args={"num_cpus": threads}):
                yield
        finally:
            ray.shutdown()
