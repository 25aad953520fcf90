"""Processes of a farm from one that has imported already what they need, as tests/warm_workers.py does for simulators.

Each is still a process of its own, forked, with the environment, folder and path of the test that wants it.
tests/test_farm.py starts one as users do.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext

import pytest

from dovetail import farm
from warm_workers import sensitive

IMPORTED = ("dovetail.guests.mesh.rack", "dovetail.run", "dovetail.fields", "dovetail.report")
"""What tasks of farms import."""
POOL = farm.ProcessPoolExecutor
"""As users' processes are started."""


def begin(variables: Mapping[str, str]) -> None:
    """In a process: take over an environment, then begin."""
    os.environ.clear()
    os.environ.update(variables)
    farm.begin_worker()


def warm(patch: pytest.MonkeyPatch) -> None:
    """Let farms start their processes so, but where an environment must be there when they begin."""
    forked, variables = multiprocessing.get_context("forkserver"), sensitive(os.environ)
    forked.set_forkserver_preload([*IMPORTED])

    def pool(jobs: int, mp_context: BaseContext, initializer: Callable[[], None]) -> ProcessPoolExecutor:
        if sensitive(os.environ) != variables:
            return POOL(jobs, mp_context, initializer)
        return POOL(jobs, forked, begin, (dict(os.environ),))

    patch.setenv("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")
    patch.setattr(farm, "ProcessPoolExecutor", pool)
