"""Measures choices here, in processes beside this one, or on a Dask cluster: the outcomes are the same.

A layer is measured as a network of its own on the simulated chip, on this computer or a board, or by the clock.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from dovetail.arrays import built
from dovetail.compile import Options, compile_graph, sample_inputs
from dovetail.errors import BoardError, DovetailError, MissingExtraError, SimulationError
from dovetail.farm import LOST, begin_worker, farm
from dovetail.guests.tune.layers import LayerModel, tunable_layers
from dovetail.guests.tune.search import TrialOutcome
from dovetail.ir.graph import Graph
from dovetail.records import Record
from dovetail.schedule.partition import partition
from dovetail.schedule.plan.timed import timed
from dovetail.target.pattern import Choice

if TYPE_CHECKING:
    from dovetail.sim.line import Board
    from dovetail.target.description import Target


MEASURES = ("iss", "qemu", "host", "model", "board")
"""Ways to measure a trial: cycles of the simulated chip, in one of two simulators, nanoseconds on this computer, the
cost model's own estimate, or cycles of a board."""

_REPEATED = 8
"""Inferences of which the shortest counts, on this computer; one before them warms up."""


class MeasureTask(Record):
    """Everything a worker needs for the trials of one network; may be sent to another process or machine."""

    payload: bytes
    """The graph and its ends near the engine, pickled by `make_task`."""
    target: str
    """Name of a target, or the path of a target file."""
    policy: str | None
    measure: str
    """One of `MEASURES`."""
    board: Board | None = None


def make_task(graph: Graph, near: Collection[str], target: str, policy: str | None, measure: str) -> MeasureTask:
    """The task of measuring a graph; arguments as the fields of `MeasureTask`."""
    return MeasureTask(pickle.dumps((graph, tuple(sorted(near))), protocol=5), target, policy, measure)


def measure(task: MeasureTask, choices: Choices) -> TrialOutcome:
    """One trial: the task's network with these choices by region name.

    A choice that cannot be compiled, or computes something else than the graph, is an outcome, not an error.

    Raises:
        DovetailError: the compiler or the simulator is not installed, or the board does not answer.
        OSError: the disk is full, or the like.
    """
    try:
        if task.measure == "model":
            return TrialOutcome(_estimated(task, choices))
        graph, near = _opened(task.payload)
        where = (None, task.board) if task.board else (task.measure, None)
        return TrialOutcome(measured(graph, _target(task.target), task.policy, choices, near, *where))
    except MissingExtraError as error:  # of a form that can be sent back from another process
        raise DovetailError(error.what, where=error.where, hint=error.hint) from None
    except (OSError, MemoryError, BoardError):  # a board that is gone is no fault of the choice
        raise
    except DovetailError as error:
        return TrialOutcome(None, f"{error.where}: {error.what}" if error.where else error.what)
    except Exception as error:  # a bug met by one choice must not end a night of tuning
        return TrialOutcome(None, f"{type(error).__name__}: {error}")


def measured(
    graph: Graph,
    target: Target,
    policy: str | None,
    choices: Choices,
    near: Collection[str] = (),
    simulator: str | None = "iss",
    board: Board | None = None,
) -> int:
    """Cycles of one inference on the simulator `iss` or on a board, with seeded inputs, after its outputs were
    compared; on `host` the nanoseconds of the fastest of some.
    Raises DovetailError where it cannot be compiled or run, or an output differs from the graph's."""
    from dovetail.prove import difference
    from dovetail.run import chip_simulator, run_build

    compiled = compile_graph(graph, target, Options(policy), choices=choices, near=near, interpret=False)
    inputs = sample_inputs(graph)
    with built(compiled, target) as build:
        count = 1 + _REPEATED if simulator == "host" else 1
        named = chip_simulator(target) if simulator == "iss" else simulator
        result = run_build(build, named, [inputs] * count, build.folder.parent / "cache", board=board)
    if wrong := difference(graph, [inputs], result.outputs[:1]):
        hint = "the driver or the device model is wrong for this choice: dovetail check finds where"
        raise SimulationError(str(wrong), where="the integer graph", hint=hint)
    if simulator == "host":
        return min(inference.nanoseconds or 0 for inference in result.simulation.inferences[1:])
    cycles = result.simulation.inferences[0].total_cycles
    if cycles is None:
        hint = "let board_cycles of its C file read a counter"
        raise BoardError("the board counts no cycles", where=board.where if board else "board", hint=hint)
    return cycles


def _estimated(task: MeasureTask, choices: Choices) -> int:
    """The estimate of a layer by its tiles, or of a network by its program, on the clock."""
    models = _models(task.payload, task.target)
    (graph, near), target = _opened(task.payload), _target(task.target)
    for name, choice in choices.items():
        if refusal := models[name].space.refusal(choice) if name in models else "it has no knobs":
            hint = "let the knobs of the target allow what it takes, or choose another value"
            raise DovetailError(refusal, where=f"layer {name}", hint=hint)
    if len(partition(graph, target)) > 1:
        compiled = compile_graph(graph, target, Options(task.policy), choices=choices, near=near, interpret=False)
        return timed(compiled.plan.program, compiled.regions, target)[0]
    ((name, model),) = models.items()
    estimate = model.estimate(choices.get(name, {}))
    if estimate is None:
        what = "the tiles need more memory than there is"
        raise DovetailError(what, where=f"layer {name}", hint="choose smaller tiles")
    return estimate.cycles


@lru_cache(maxsize=4)
def _opened(payload: bytes) -> tuple[Graph, tuple[str, ...]]:
    graph, near = pickle.loads(payload)
    return graph, near


@lru_cache(maxsize=4)
def _target(name: str) -> Target:
    from dovetail.target.registry import load_target

    return load_target(name)


@lru_cache(maxsize=2)
def _models(payload: bytes, target_name: str) -> dict[str, LayerModel]:
    """The cost model of each region of a network that can be tuned."""
    (graph, near), target = _opened(payload), _target(target_name)
    layers = ((layer, LayerModel.of(layer, target)) for layer in tunable_layers(graph, target, near)[1])
    return {name: model for layer, model in layers for name in layer.names}


Choices = Mapping[str, Choice]
"""Choices by region name."""
Runner = Callable[[MeasureTask, Sequence[Choices]], Iterator[tuple[int, TrialOutcome]]]
"""Makes a batch of trials of one task; gives the number in the batch and the outcome of each as it ends."""


@contextmanager
def runner(jobs: int, scheduler: str | None, boards: Sequence[Board] = ()) -> Iterator[Runner]:
    """Make trials while the body runs.

    Args:
        jobs: processes on this machine; 1 for this one alone.
        scheduler: address of a Dask scheduler, used in place of processes here; None for none.
        boards: boards that trials are made on, one at a time on each; empty for simulators.

    Raises:
        DovetailError: `jobs` is below 1, or the scheduler does not answer.
        MissingExtraError: Dask is asked for and not installed.
    """
    if len(boards) > 1 and scheduler is None:
        with _on_boards(boards) as run:
            yield run
        return
    own = boards[0] if boards else None
    with farm(jobs, scheduler, here=True) as spread:

        def run(task: MeasureTask, batch: Sequence[Choices]) -> Iterator[tuple[int, TrialOutcome]]:
            for number, outcome in spread(partial(measure, replace(task, board=own)), batch):
                yield number, TrialOutcome(None, LOST.value) if outcome is LOST else outcome

        yield run


@contextmanager
def _on_boards(boards: Sequence[Board]) -> Iterator[Runner]:
    """A process for each board; a trial goes to the one that is free."""
    from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
    from multiprocessing import get_context

    pools = [ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=begin_worker) for _ in boards]

    def run(task: MeasureTask, batch: Sequence[Choices]) -> Iterator[tuple[int, TrialOutcome]]:
        waiting, idle = list(enumerate(batch)), list(range(len(boards)))
        busy: dict[Future[TrialOutcome], tuple[int, int]] = {}
        while waiting or busy:
            while waiting and idle:
                (number, choices), place = waiting.pop(0), idle.pop(0)
                own = replace(task, board=boards[place])
                busy[pools[place].submit(measure, own, choices)] = number, place
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                number, place = busy.pop(future)
                idle.append(place)
                yield number, future.result()

    try:
        yield run
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
