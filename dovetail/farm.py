"""Work spread over processes of this machine or the workers of a Dask cluster: the results are the same.

What ends the process that computes it is tried once more, alone, and then given up (`LOST`), so that one bad piece of
work takes no other along.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from enum import Enum
from importlib.util import find_spec
from multiprocessing import connection, get_context, parent_process
from typing import Any, Protocol, TypeVar

from dovetail.errors import DovetailError, MissingExtraError

Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result")
_CONNECT_SECONDS = 30


class LostResult(Enum):
    """Stands for the result of work that ended the process it was done in."""

    LOST = "the process that made it died, perhaps of memory"


LOST = LostResult.LOST


def processors() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Farm(Protocol):
    """Applies a function of a module to items: the number of each and its result, as they end."""

    def __call__(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[tuple[int, Result | LostResult]]: ...


@contextmanager
def farm(jobs: int, scheduler: str | None = None, *, here: bool = False) -> Iterator[Farm]:
    """A function that does the work, while the body runs; functions, items and results are sent to other processes.

    Args:
        jobs: processes on this machine.
        scheduler: address of a Dask scheduler, whose workers are used in place of processes here; None for none.
        here: do it in this very process where it would be one on this machine.

    Raises:
        DovetailError: `jobs` is below 1, or the scheduler does not answer.
        MissingExtraError: Dask is asked for and not installed.
    """
    if jobs < 1:
        raise DovetailError(f"{jobs} jobs are too few: the least is 1", where="--jobs", hint="give 1 or more")
    if scheduler is not None:
        with _cluster(scheduler) as dask:
            yield _RetryRunner(dask)
    elif here and jobs == 1:
        yield _in_order
    else:
        processes = _Processes(jobs)
        try:
            yield _RetryRunner(processes)
        finally:
            processes.close()


def _in_order(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result | LostResult]]:
    return ((number, function(item)) for number, item in enumerate(items))


class _RetryRunner:
    """Makes what was lost once more, each alone."""

    def __init__(self, once: Farm) -> None:
        self._once = once

    def __call__(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[tuple[int, Result | LostResult]]:
        again = []
        for number, result in self._once(function, items):
            if result is LOST:
                again.append(number)
            else:
                yield number, result
        for number in sorted(again):
            for _, result in self._once(function, [items[number]]):
                yield number, result


class _Processes:
    """Processes of this machine, started when there is work."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: Executor | None = None

    def __call__(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[tuple[int, Result | LostResult]]:
        if self._pool is None and items:
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn"), initializer=begin_worker)
        pool = self._pool
        try:
            futures = {pool.submit(function, item): number for number, item in enumerate(items)} if pool else {}
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except BrokenProcessPool:
                    self.close()
                    yield futures[future], LOST
        except BaseException:  # whoever asked does not wait for the rest
            self.close()
            raise

    def close(self) -> None:
        """End the processes, without what has not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None


def begin_worker() -> None:
    """In a worker process: leave Ctrl-C to the parent, and end when the parent has been killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _cluster(address: str) -> Iterator[Farm]:
    if find_spec("distributed") is None:
        raise MissingExtraError("distributed", "tune", "--scheduler")
    import distributed

    dask: Any = distributed  # it has no types
    try:
        client = dask.Client(address, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise DovetailError(
            f"there is no Dask scheduler: {error}", where=address, hint="start one with dask scheduler"
        ) from None

    def run(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result | LostResult]]:
        futures = [client.submit(function, item, pure=False) for item in items]
        numbers = {future.key: number for number, future in enumerate(futures)}
        try:
            for future in dask.as_completed(futures):
                try:
                    yield numbers[future.key], future.result()
                except dask.KilledWorker:  # the scheduler has tried it on others
                    yield numbers[future.key], LOST
        finally:
            client.cancel(futures)

    with client:
        yield run
