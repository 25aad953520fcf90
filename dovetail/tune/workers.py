"""Who makes the trials: this process, processes beside it, or a Dask cluster. The outcomes are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from dovetail.errors import DovetailError, MissingExtraError
from dovetail.target.knobs import Choice
from dovetail.tune.measure import Outcome, Task, measure

Choices = Mapping[str, Choice]
Runner = Callable[[Task, Sequence[Choices]], Iterator[tuple[int, Outcome]]]
"""Makes a batch of trials of one task; gives the number in the batch and the outcome of each as it ends."""

_CONNECT_SECONDS = 30


@contextmanager
def runner(jobs: int, scheduler: str | None) -> Iterator[Runner]:
    """What makes trials.

    Args:
        jobs: processes on this machine; 1 for this one alone.
        scheduler: address of a Dask scheduler, used in place of processes here; None for none.

    Raises:
        DovetailError: `jobs` is below 1, or the scheduler does not answer.
        MissingExtraError: Dask is asked for and not installed.
    """
    if jobs < 1:
        raise DovetailError(f"{jobs} jobs are too few: the least is 1", where="--jobs", hint="give 1 or more")
    if scheduler is not None:
        with _dask(scheduler) as run:
            yield run
    elif jobs == 1:
        yield _here
    else:
        with _processes(jobs) as run:
            yield run


def _here(task: Task, batch: Sequence[Choices]) -> Iterator[tuple[int, Outcome]]:
    for number, choices in enumerate(batch):
        yield number, measure(task, choices)


@contextmanager
def _processes(jobs: int) -> Iterator[Runner]:
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=begin_worker)

    def run(task: Task, batch: Sequence[Choices]) -> Iterator[tuple[int, Outcome]]:
        """Measure a batch on the processes; each outcome as it comes."""
        numbers = {pool.submit(measure, task, choices): number for number, choices in enumerate(batch)}
        try:
            for future in as_completed(numbers):
                yield numbers[future], future.result()
        except BrokenProcessPool:
            raise DovetailError(
                "a worker process died",
                where="--jobs",
                hint="the finished trials are in the log: run the command again, with fewer --jobs",
            ) from None

    try:
        yield run
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def begin_worker() -> None:
    """In a worker process: leave Ctrl-C to the parent, and end when the parent has been killed."""
    import os
    import signal
    import threading
    from multiprocessing import connection, parent_process

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _dask(address: str) -> Iterator[Runner]:
    if find_spec("distributed") is None:
        raise MissingExtraError("distributed", "tune", "--scheduler")
    import distributed

    dask: Any = distributed  # it has no types
    try:
        client = dask.Client(address, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise DovetailError(f"there is no Dask scheduler: {error}", where=address,
                            hint="start one with dask scheduler") from None

    def run(task: Task, batch: Sequence[Choices]) -> Iterator[tuple[int, Outcome]]:
        """Measure a batch on the scheduler's workers; each outcome as it comes."""
        futures = [client.submit(measure, task, choices, pure=False) for choices in batch]
        numbers = {future.key: number for number, future in enumerate(futures)}
        try:
            for future in dask.as_completed(futures):
                yield numbers[future.key], future.result()
        finally:
            client.cancel(futures)

    with client:
        yield run
