"""What a choice costs: a layer as a network of its own on the simulated chip, or what the cost model thinks."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dovetail.compile import Options, compile_graph, reserved, sample_inputs
from dovetail.emit import write_project
from dovetail.errors import BoardError, DovetailError, MissingExtraError, SimulationError
from dovetail.graph.graph import Graph, evaluate_all
from dovetail.layout import choose_layouts
from dovetail.partition import partition
from dovetail.plan import plan
from dovetail.plan.knobs import choose, region_space
from dovetail.target.knobs import Choice, Space
from dovetail.tune.default import resolved_default
from dovetail.tune.estimate import Estimator
from dovetail.tune.layer import distinct_layers, region_alone

if TYPE_CHECKING:
    from dovetail.board import Board
    from dovetail.target.description import Target

MEASURES = ("iss", "host", "model", "board")
"""What is measured: cycles of the simulated chip, nanoseconds on this computer, the cost model's own estimate, or
cycles of a board."""

_REPEATED = 8
"""Inferences of which the shortest counts, on this computer; one before them warms up."""


@dataclass(frozen=True, slots=True)
class Task:
    """Everything a worker needs for the trials of one network; may be sent to another process or machine."""

    payload: bytes
    """The graph and its ends near the engine, pickled by `make_task`."""
    target: str
    """Name of a target, or the path of a target file."""
    policy: str | None
    measure: str
    """One of `MEASURES`."""
    board: Board | None = None
    """What is measured on, if it is a board."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended."""

    cycles: int | None
    """Cycles (on this computer nanoseconds) of an inference; None when it failed."""
    error: str = ""
    """Why it failed."""


def make_task(
    graph: Graph, near: Collection[str], target: str, policy: str | None, measure: str, board: Board | None = None
) -> Task:
    """The task of measuring a graph; arguments as the fields of `Task`."""
    return Task(pickle.dumps((graph, tuple(sorted(near))), protocol=5), target, policy, measure, board)


def measure(task: Task, choices: Mapping[str, Choice]) -> Outcome:
    """One trial: the task's network with these choices by region name.

    A choice that cannot be compiled, or computes something else than the graph, is an outcome, not an error.

    Raises:
        DovetailError: the compiler or the simulator is not installed, or the board does not answer.
        OSError: the disk is full, or the like.
    """
    try:
        if task.measure == "model":
            return Outcome(_estimated(task, choices))
        graph, near = _opened(task.payload)
        where = (None, task.board) if task.board else (task.measure, None)
        return Outcome(measured(graph, _target(task.target), task.policy, choices, near, *where))
    except MissingExtraError as error:  # of a form that can be sent back from another process
        raise DovetailError(error.what, where=error.where, hint=error.hint) from None
    except (OSError, MemoryError, BoardError):  # a board that is gone is no fault of the choice
        raise
    except DovetailError as error:
        return Outcome(None, f"{error.where}: {error.what}" if error.where else error.what)
    except Exception as error:  # a bug met by one choice must not end a night of tuning
        return Outcome(None, f"{type(error).__name__}: {error}")


def measured(
    graph: Graph,
    target: Target,
    policy: str | None,
    choices: Mapping[str, Choice],
    near: Collection[str] = (),
    simulator: str | None = "iss",
    board: Board | None = None,
) -> int:
    """Cycles of one inference on the simulator `iss` or on a board, with seeded inputs, after its outputs were
    compared; on `host` the nanoseconds of the fastest of some.

    Raises:
        DovetailError: it cannot be compiled or run, or an output differs from the graph's.
    """
    from dovetail.run import open_build, run_build

    compiled = compile_graph(graph, target, Options(policy), choices=choices, near=near, interpret=False)
    inputs = sample_inputs(graph)
    with tempfile.TemporaryDirectory(prefix="dovetail-tune-") as folder:
        write_project(compiled.project, Path(folder) / "build")
        build = open_build(Path(folder) / "build", target)
        count = 1 + _REPEATED if simulator == "host" else 1
        result = run_build(build, simulator, [inputs] * count, Path(folder) / "cache", board=board)
    (expected,) = evaluate_all(graph, [{name: inputs[name] for name in graph.given}])
    for name, array in result.outputs[0].items():
        if not np.array_equal(array, expected[name]):
            count = int((array != expected[name]).sum())
            raise SimulationError(f"{count} of {array.size} elements differ from the graph", where=f"output '{name}'",
                                  hint="the driver or the device model is wrong for this choice: dovetail check "
                                       "finds where")
    if simulator == "host":
        return min(inference.nanoseconds or 0 for inference in result.simulation.inferences[1:])
    cycles = result.simulation.inferences[0].total_cycles
    if cycles is None:
        raise BoardError("the board counts no cycles", where=board.where if board else "board",
                         hint="let board_cycles of its C file read a counter")
    return cycles


def _estimated(task: Task, choices: Mapping[str, Choice]) -> int:
    """The estimate of a layer; of a network, the sum of those of its layers, if it can be planned at all."""
    models = _models(task.payload, task.target)
    (graph, near), target = _opened(task.payload), _target(task.target)
    for name, choice in choices.items():
        refusal = models[name].space.refusal(choice) if name in models else "it has no knobs"
        if refusal:
            raise DovetailError(refusal, where=f"layer {name}",
                                hint="let the knobs of the target allow what it takes, or choose another value")
    if len(models) > 1:
        regions = choose(partition(graph, target), choices, target)
        plan(choose_layouts(graph, regions, target, near), target, reserved(graph, target), near)
    total = 0
    for name, model in models.items():
        found = model.estimator.estimate({**model.default, **choices.get(name, {})})
        if found is None:
            raise DovetailError("the tiles need more memory than there is", where=f"layer {name}",
                                hint="choose smaller tiles")
        total += found.cycles
    return total


@lru_cache(maxsize=4)
def _opened(payload: bytes) -> tuple[Graph, tuple[str, ...]]:
    graph, near = pickle.loads(payload)
    return graph, near


@lru_cache(maxsize=4)
def _target(name: str) -> Target:
    from dovetail.targets import load_target

    return load_target(name)


@dataclass(frozen=True, slots=True)
class _Model:
    """What estimates one region."""

    estimator: Estimator
    space: Space
    default: Choice


@lru_cache(maxsize=2)
def _models(payload: bytes, target_name: str) -> dict[str, _Model]:
    """For each region of a network that can be tuned, its cost model, its space and the choice that stands for none."""
    (graph, near), target = _opened(payload), _target(target_name)
    regions = partition(graph, target)
    planned = plan(choose_layouts(graph, regions, target, near), target, reserved(graph, target), near)
    found: dict[str, _Model] = {}
    for layer in distinct_layers(regions, planned, target):
        alone = region_alone(layer.graph, target)
        default = resolved_default(alone, target, layer.near)
        model = _Model(Estimator(alone, target, layer.near), region_space(alone, target), default)
        found.update((name, model) for name in layer.names)
    return found
