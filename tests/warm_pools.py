"""Processes of a farm from one that has imported already what they need, as tests/warm_workers.py does for simulators.

Each is still a process of its own, forked, with the environment, folder and path of the test that wants it.
tests/test_farm.py starts one as users do.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import pytest

from dovetail import farm
from warm_workers import sensitive

IMPORTED = ("dovetail.mesh.workers", "dovetail.run", "dovetail.targets.fields", "dovetail.tools.report")
"""What tasks of farms import."""
BEGIN, CONTEXT = farm.begin_worker, farm.get_context
"""As users' processes begin, and are started."""


class Begin:
    """What stands for `begin_worker`: pickled when a process is started, it brings that the environment of then."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (begin, dict(os.environ))

    def __call__(self) -> None:
        raise AssertionError("it is called where it was unpickled")


def begin(variables: Mapping[str, str]) -> None:
    """In a process: take over an environment, then begin."""
    os.environ.clear()
    os.environ.update(variables)
    BEGIN()


def warm(patch: pytest.MonkeyPatch) -> None:
    """Let farms start their processes so, but where an environment must be there when they begin."""
    forked, variables = multiprocessing.get_context("forkserver"), sensitive(os.environ)
    forked.set_forkserver_preload([*IMPORTED])

    def context(method: str) -> BaseContext:
        return forked if sensitive(os.environ) == variables else CONTEXT(method)

    patch.setenv("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")
    patch.setattr(farm, "get_context", context)
    patch.setattr(farm, "begin_worker", Begin())
