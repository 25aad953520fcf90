"""What all tests share: the folder of facts and models, and that every error is complete."""

from __future__ import annotations

import os

# Before numpy comes: several threads for small products wait for each other busily, ten times as long as they compute.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ.get("OPENBLAS_NUM_THREADS", "1")

import gc
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import warm_pools
from dovetail.codegen.build import toolchain
from dovetail.errors import DovetailError
from dovetail.files import default_cache, keep_file
from dovetail.kernels.scheduled.store import _maker
from dovetail.sim import worker
from quicker import RUN, hastily, quicken, run_once
from warm_workers import Nursery, sensitive

# A busy machine makes no case wrong: neither the time to make examples nor that to try one is a failure.
settings.register_profile("dovetail", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dovetail")


KEPT_LOOPS = Path(__file__).with_name("loops.zip")
"""Loops of the tests' layers that were scheduled before, by the names they have in the cache: scripts/keep_loops.py."""


# What was imported and collected stays: to look through it for garbage took a quarter of the tests' own time.
gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish() -> None:
    """What is there now is no garbage."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Nor is what is there at the end: pytest looks ten times through all of it for what was not closed."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What files of results are written anew with."""
    text = "write tests/golden, tests/cycles.csv and the figures that pages show anew, from what is found today"
    parser.addoption("--update", action="store_true", help=text)


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Whether golden texts, budgets and figures are written instead of compared."""
    return bool(request.config.getoption("--update"))


LONG = ("docs", "rtl", "oracles")
"""Marks of tests that take long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first, so that processes which share all tests end together."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in LONG))


@pytest.fixture(autouse=True, scope="session")
def loops_are_there() -> None:
    """Scheduling takes seconds a layer, so the cache begins with what earlier runs scheduled. A name holds a digest of
    the schedules' own text: what they would give otherwise today is not found there and scheduled anew."""
    if not KEPT_LOOPS.exists():
        return
    with zipfile.ZipFile(KEPT_LOOPS) as archive:
        if not any(name.endswith(f"-{_maker()}.json") for name in archive.namelist()):
            warnings.warn(
                "tests/loops.zip is of other schedules, tests take longer: scripts/keep_loops.py", stacklevel=1
            )
        for name in archive.namelist():
            place = default_cache() / "loops" / Path(name).name
            if not place.exists():
                keep_file(place, archive.read(name))


@pytest.fixture(autouse=True, scope="session")
def what_is_made_is_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests with empty caches of their own, which are many, take equal objects and libraries from one another."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain._CompileContext, "_run", run_once(folder / "made", default_cache().resolve() / "zig"))
        patch.setattr(toolchain, "compile_host", hastily)
        yield


@pytest.fixture
def compiler_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the cache: an empty one has nothing from elsewhere."""
    monkeypatch.setattr(toolchain._CompileContext, "_run", RUN)


@pytest.fixture(autouse=True, scope="session")
def exo_is_quick() -> Iterator[None]:
    """Exo's schedules took an eighth of all tests' time, two thirds of it for what nobody asks for."""
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def workers_are_warm() -> Iterator[None]:
    """Hundreds of tests simulate, dozens start farms; a fifth of the time of all went into starting Python for it."""
    if os.name != "posix":
        yield
        return
    nursery, variables = Nursery(), sensitive(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "start_worker", nursery.start)
        warm_pools.warm(patch)
        yield
    nursery.close()
    left = set(sensitive(os.environ).items()) ^ set(variables.items())
    assert not left, f"a test changed these and left them so: since then no worker was forked: {sorted(left)}"


def shared_dir() -> Path:
    """The folder `shared` beside the repository; skips the test (or, at import, the module) where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("the shared facts and models (../shared) are not here", allow_module_level=True)
    return folder


@pytest.fixture
def shared() -> Path:
    """`shared_dir()` as a fixture."""
    return shared_dir()


def lacks(error: BaseException | None) -> list[str]:
    """What an error of Dovetail's does not say; of one that ends the command line, the error behind it."""
    told = error.__context__ if isinstance(error, SystemExit) else error
    return [part for part in ("what", "where", "hint") if isinstance(told, DovetailError) and not getattr(told, part)]


@pytest.fixture(autouse=True, scope="session")
def errors_are_complete() -> Iterator[None]:
    """Whatever a test expects with `pytest.raises` says what is wrong, where, and what to do about it."""
    fill = pytest.ExceptionInfo.fill_unfilled

    def checked(self: pytest.ExceptionInfo[BaseException], found: Any) -> None:
        """As pytest's own, which its `raises` calls with what was raised."""
        fill(self, found)
        assert not lacks(found[1]), f"the message does not say {' and '.join(lacks(found[1]))}: {found[1]!r}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.ExceptionInfo, "fill_unfilled", checked)
        yield
