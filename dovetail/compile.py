"""The way through the house, top to bottom: a model file in, a verified C project out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.adapt import adapt
from dovetail.emit import Project, Unit, emit_project, make_unit
from dovetail.errors import ModelError, PlanError, TargetError
from dovetail.frontend import load_model
from dovetail.graph.graph import Graph
from dovetail.graph.simplify import simplify
from dovetail.graph.trim import trim
from dovetail.graph.types import Array
from dovetail.kernels import Optimize
from dovetail.layout import Placed, choose_layouts
from dovetail.operators.arithmetic import Rounding
from dovetail.partition import Region
from dovetail.pipeline import Pipeline, check_pipeline, pipelined
from dovetail.place import Placing, first, one_by_one, place
from dovetail.plan import Plan, plan
from dovetail.plan.knobs import choose
from dovetail.program.interpret import check_program
from dovetail.program.verify import verify
from dovetail.quantize import quantize
from dovetail.report.plan_file import PLAN, plan_text
from dovetail.stripe import Striped, Striping, refuse
from dovetail.target.cores import check_cores
from dovetail.target.description import Target
from dovetail.target.knobs import Choice

CODE_RESERVE = 24 * 1024
"""Bytes kept free for code beside the constants when memory is planned; the linker has the last word."""

_CLOSE = 4
"""Plans tried with a little less each, before less by half of what is missing."""

Progress = Callable[[str], None]
"""Told what is being done now."""


@dataclass(frozen=True)
class Options:
    """What a user may choose."""

    policy: str | None = None
    """Requantisation policy of the target; None for its default."""
    rounding: Rounding = Rounding.DOUBLE
    """Rounding of the model's own requantisations."""
    save_stages: Path | None = None
    """Folder for an ONNX model after every stage."""
    check: bool = False
    """Compare every stage with the one before in ONNX Runtime."""
    tuning: Path | None = None
    """A tuning file made for this model and target, used for the layers it names."""
    allow_float: bool = False
    """Compute in float32 on the core what the model does not quantise; without it such a model is refused."""
    optimize: Optimize = Optimize.SPEED
    """What the code of the core is made for."""
    memory_budget: int | None = None
    """Bytes the activations of a core alone may take, inputs and outputs counted; None for what there is."""
    pipeline: bool = False
    """Let each core work on an input of its own; without, the cores share every layer."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Layer, or operator of the model -> the engine that shall compute it, "core", or several engines joined by "+"."""


@dataclass(frozen=True)
class Compiled:
    """Everything known about a compiled network."""

    graph: Graph
    """The integer graph as the target computes it, relayouts included."""
    regions: tuple[Region, ...]
    plan: Plan
    unit: Unit
    project: Project
    striped: Striped | None = None
    """What is computed in stripes to fit the memory budget; None where none was needed."""
    pipeline: Pipeline | None = None
    """The stages, of which `graph` is one step; None without."""
    placing: Placing = field(default_factory=lambda: Placing(()))
    """What there was to choose from, and how good the placement is."""


def prepare(model: Path, target: Target, options: Options, progress: Progress = lambda text: None) -> Graph:
    """From the model file to the integer graph the target computes."""
    stages = _Stages(options)
    progress("reading the model")
    graph = simplify(load_model(model))
    stages.add("model", graph, lsb=0)
    progress("making every number an integer" if not options.allow_float else "making integers of what is quantised")
    graph = trim(quantize(graph, options.rounding, options.allow_float))
    stages.add("integer", graph, lsb=1)
    progress(f"adapting to {target.name}")
    return adapt(graph, _policy(target, options), stages.add)


def compile_model(model: Path, target: Target, options: Options, progress: Progress = lambda text: None) -> Compiled:
    """From the model file to the project, verified and interpreted on the way.

    Raises:
        DovetailError: the model, the target or the memories do not allow it; says what, where and what to do.
    """
    graph = prepare(model, target, options, progress)
    _refuse_idle_outputs(graph, model)
    choices: Mapping[str, Choice] = {}
    if options.tuning is not None:
        from dovetail.tune.file import choices_for, identity

        of = identity(
            graph.name, model.read_bytes(), target.name, _policy(target, options).name, options.rounding.value
        )
        choices = choices_for(options.tuning, of, first(graph, target), target)
    return compile_graph(graph, target, options, progress, model=model, choices=choices)


def compile_graph(
    graph: Graph,
    target: Target,
    options: Options,
    progress: Progress = lambda text: None,
    *,
    model: Path | None = None,
    choices: Mapping[str, Choice] | None = None,
    near: Collection[str] = (),
    interpret: bool = True,
) -> Compiled:
    """From the integer graph a target computes to the project.

    Args:
        graph: what `prepare` gives, or a part of it as a network of its own.
        target: the machine.
        options: its policy and rounding are only noted down; its tuning file is not read.
        progress: told what is being done. choices: what is chosen for the knobs of regions, by region name.
        model: the file the graph comes from, for the description of the build; None where there is none.
        near: inputs and outputs that shall lie in the engines' memory, as the engines have them.
        interpret: whether the program is compared with the graph in numpy; without, only its rules are verified.

    Raises:
        DovetailError: as `compile_model`.
    """
    graph, pipeline = _step(graph, target, options, interpret)

    def attempt(chosen: Graph) -> _Attempt:
        """The stages from the graph to the program."""
        cores = pipeline.cores if pipeline else None
        return _attempted(chosen, target, options.pins, choices or {}, near, cores, progress)

    made, striped = _within(graph, target, options.memory_budget, attempt, progress)
    placed, planned = made.placed, made.plan
    progress("verifying the program")
    verify(planned.program, target)
    if interpret:
        check_program(planned.program, target, graph if striped else placed.graph, sample_inputs(graph))
    progress("writing C")
    unit = make_unit(planned.program, placed.regions, target, options.optimize, pipeline.delay if pipeline else 0)
    project = emit_project(unit, _manifest(model, target, options, made, striped, pipeline))
    project = project.with_file(PLAN, plan_text(placed.graph, placed.regions, planned, target))
    return Compiled(placed.graph, placed.regions, planned, unit, project, striped, pipeline, made.placing)


@dataclass(frozen=True)
class _Attempt:
    """What the stages from a graph to its program give."""

    placing: Placing
    placed: Placed
    plan: Plan


def _attempted(
    graph: Graph,
    target: Target,
    pins: Mapping[str, str],
    choices: Mapping[str, Choice],
    near: Collection[str],
    cores: Mapping[str, int] | None,
    progress: Progress,
) -> _Attempt:
    """Partition to plan; one layer after the other where memory does not hold what is to be computed at once."""
    progress("partitioning")
    regions = choose(first(graph, target), choices, target)
    progress("placing")
    placing = place(graph, regions, target, pins, choices.keys())
    try:
        return _planned(graph, target, placing, near, cores, progress)
    except PlanError:
        if all(region.slot is None for region in placing.regions):
            raise
    return _planned(graph, target, one_by_one(placing), near, cores, progress)


def _planned(
    graph: Graph,
    target: Target,
    placing: Placing,
    near: Collection[str],
    cores: Mapping[str, int] | None,
    progress: Progress,
) -> _Attempt:
    """The stages behind placement."""
    progress("choosing layouts")
    placed = choose_layouts(graph, placing.regions, target, near)
    progress("planning tiles, order and addresses")
    return _Attempt(placing, placed, plan(placed, target, reserved(graph, target), near, cores))


def _step(graph: Graph, target: Target, options: Options, check: bool) -> tuple[Graph, Pipeline | None]:
    """One step of a pipeline and its stages, compared with the network if `check`; the network where there is to be
    none."""
    check_cores(target)
    if not options.pipeline:
        return graph, None
    if options.memory_budget is not None:
        raise TargetError("a pipeline cannot be computed in stripes", where="--memory-budget, --pipeline",
                          hint="leave one of them out")
    found = pipelined(graph, target)
    if check:
        check_pipeline(graph, found, [sample_inputs(graph, seed) for seed in range(found.delay + 2)])
    return found.graph, found


def _within(
    graph: Graph,
    target: Target,
    budget: int | None,
    attempt: Callable[[Graph], _Attempt],
    progress: Progress,
) -> tuple[_Attempt, Striped | None]:
    """A plan whose activations take no more than a budget, if there is one, in stripes where they must.

    What the search takes to be enough may not be, where memory is in pieces: then it is asked for less.

    Raises:
        PlanError: there is none; says how far away it is.
    """
    if budget is None:
        return attempt(graph), None
    striping = Striping(graph, target)
    made = attempt(graph)
    best, found = (_peak(made.plan, target), striping.whole()), striping.within(budget)
    if best[0] <= budget:
        return made, None
    tries = 0
    while found is not None:
        progress(f"computing in stripes: {found.describe()}")
        made = attempt(found.graph)
        over = _peak(made.plan, target) - budget
        if over <= 0:
            return made, found
        best = min(best, (budget + over, found), key=lambda known: known[0])
        tries += 1
        found = striping.within(found.peak - (1 if tries < _CLOSE else max(1, over // 2)))
    smallest = striping.smallest()
    made = attempt(smallest.graph)
    peak = _peak(made.plan, target)
    if peak <= budget:
        return made, smallest
    raise refuse(budget, *min(best, (peak, smallest), key=lambda known: known[0]))


def _peak(planned: Plan, target: Target) -> int:
    return next(placement.peak for placement in planned.placements if placement.memory == target.values)


def sample_inputs(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Seeded inputs, contents of states too, that use the whole range of their types."""
    generator = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for name in graph.inputs:
        kind = graph.types[name]
        if kind.dtype.is_integer:
            found[name] = generator.integers(kind.dtype.low, kind.dtype.high + 1, kind.shape).astype(kind.dtype.numpy)
        else:
            found[name] = generator.random(kind.shape, dtype=np.float32)
    return found


def _refuse_idle_outputs(graph: Graph, model: Path) -> None:
    computed = {node.output for node in graph.nodes}
    idle = [name for name in graph.outputs if name not in computed]
    if idle:
        raise ModelError(f"the output '{idle[0]}' is not computed from the inputs", where=model.name,
                         hint="take this output out of the model, or export it again")


class _Stages:
    """Saves and checks each stage as it is made."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._count = 0
        self._before: Graph | None = None

    def add(self, name: str, graph: Graph, lsb: int) -> None:
        """Take note of a stage."""
        if self._options.save_stages is not None:
            from dovetail.graph.onnx_file import save_graph

            self._options.save_stages.mkdir(parents=True, exist_ok=True)
            save_graph(graph, self._options.save_stages / f"{self._count}_{name.replace(' ', '_')}.onnx")
        if self._options.check:
            from dovetail.graph.check import check_graph, check_stages

            inputs = sample_inputs(graph)
            if self._before is not None:  # the first stage computes in float, where no two runtimes round alike
                check_graph(graph, inputs)
                check_stages(self._before, graph, inputs, lsb=lsb)
        self._before = graph
        self._count += 1


def _policy(target: Target, options: Options) -> Any:
    try:
        return target.policy(options.policy)
    except KeyError:
        known = ", ".join(policy.name for policy in target.policies)
        raise TargetError(f"there is no requantisation policy '{options.policy}'", where=target.name,
                          hint=f"use one of {known}") from None


def reserved(graph: Graph, target: Target) -> dict[str, int]:
    """Bytes of each memory that constants, code, and the stacks of several cores take, by the name of the memory."""
    known = (*graph.constants.values(), *graph.states)
    found = {target.code: sum(array.nbytes for array in known) + CODE_RESERVE}
    if target.workers:
        stacks = sum(core.stack for core in target.cores)
        found[target.values] = found.get(target.values, 0) + stacks
    return found


def _manifest(
    model: Path | None,
    target: Target,
    options: Options,
    made: _Attempt,
    striped: Striped | None = None,
    pipeline: Pipeline | None = None,
) -> dict[str, Any]:
    placed, placing = made.placed, made.placing
    layers = [
        {
            "name": region.name,
            "operators": list(region.origins),
            "engine": region.place,
            "macs": region.macs,
            "reason_not_offloaded": region.reason,
        }
        for region in placed.regions
    ]
    memory = {
        placement.memory: {
            "size": target.memory(placement.memory).size,
            "peak": placement.peak,
            "lower_bound": placement.lower_bound,
        }
        for placement in made.plan.placements
    }
    conversions, schedule = placed.conversions(), placing.schedule
    placement = {"cycles": schedule.finish, "bound": placing.bound, "pins": dict(options.pins)} if schedule else {}
    return {
        "schema": 1,
        "model": placed.graph.name,
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest() if model else "",
        "target": target.name,
        "policy": target.policy(options.policy).name,
        "rounding": options.rounding.value,
        "layers": layers,
        "memory": memory,
        "memory_budget": options.memory_budget,
        "stripes": striped.to_json() if striped else [],
        **_several_cores(target, pipeline),
        **({"conversions": [asdict(found) for found in conversions]} if conversions else {}),
        **({"placement": placement} if placement else {}),
    }


def _several_cores(target: Target, pipeline: Pipeline | None) -> dict[str, Any]:
    """What the description of a build says of its cores; nothing where there is one."""
    if not target.workers:
        return {}
    speeds = [core.speed for core in target.cores]
    stages = {"delay": pipeline.delay, "pipeline": pipeline.to_json()} if pipeline else {}
    return {"cores": len(speeds), "core_speeds": speeds, **stages}
