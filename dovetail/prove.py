"""Whether a build computes what its network means: a run's outputs beside those of the integer graph in the build.

`layers` finds where the two part: the network is built once more with the result of every layer as an output, in as
many parts as the memory of values has room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dovetail.arrays import built, seeded_inputs
from dovetail.codegen.emit.project import GRAPH
from dovetail.compile import Options, compile_graph
from dovetail.documented import document
from dovetail.errors import BuildError, DovetailError, PlanError
from dovetail.ir.graph import Graph, Node, evaluate_all, prune
from dovetail.ir.onnx_file import load_graph
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import Array, DType, TensorType
from dovetail.operators import combined, known_operators
from dovetail.records import Record
from dovetail.run import (
    ProjectBuild,
    RunResult,
    default_simulator,
    one_version,
    run_build,
    runs_several,
    several_steps,
)
from dovetail.schedule.partition import initial_partition
from dovetail.schedule.region import Region

_NEAR = 1e-4
"""How far float32 results may lie apart, as a part of the largest one: no two runtimes add in the same order."""
_NOTHING = 1e-6
"""How far they may lie apart where all are near 0."""
_NUDGE = 0.0005
"""Part of a step by which a float may be off before it is rounded to integers: the sums before it are float32."""
_NUDGES = 10
"""In how many ways floats are moved by so much to see which results hang on it."""


class Difference(Record):
    """The first difference between values of a run and of the graph."""

    value: str
    """Name of the value that differs."""
    inference: int
    """Number of the inference, from 0."""
    index: tuple[int, ...]
    """Index of the first element that differs."""
    found: float
    """Element that the run computed."""
    expected: float
    """Element of the integer graph."""
    count: int
    """Number of elements that differ."""
    elements: int
    """Number of elements of the value."""
    largest: float
    """The largest distance of two elements."""

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return (
            f"{self.count:,} of {self.elements:,} elements of '{self.value}' differ in inference {self.inference}, by "
            f"up to {self.largest:g}; the first is [{at}]: {self.found:g}, expected {self.expected:g}"
        )


def read_graph(build: ProjectBuild, operators: Sequence[type[UserOperator]] = ()) -> Graph:
    """The integer graph of a build, as the target computes it.

    Raises:
        BuildError: the build has none, or one that is damaged.
        ModelError: it has operators that are not given.
    """
    path = build.folder / GRAPH
    with one_version(build):
        if not path.is_file():
            what = f"the build has no {GRAPH}, so there is nothing to compare its outputs with"
            raise BuildError(what, where=str(build.folder), hint="compile the model again, or run with --no-check")
        graph = load_graph(path, known_operators(combined(build.target.operators, operators)))
    wanted = [{port.name for port in ports} for ports in (build.manifest.inputs, build.manifest.outputs)]
    if [set(graph.given), set(graph.results)] != wanted:
        what = f"the graph in {GRAPH} is not that of this build: it has other inputs or outputs"
        raise BuildError(what, where=str(build.folder), hint="compile the model again")
    return graph


def is_approximate(graph: Graph) -> bool:
    """Whether something is computed in float32, which is not the same bits everywhere."""
    computing = (node for node in graph.nodes if not (node.operator.exact or node.operator.moves_only))
    return any(graph.types[name].dtype is DType.FLOAT32 for node in computing for name in (*node.inputs, node.output))


def difference(
    graph: Graph, inputs: Sequence[Mapping[str, Array]], outputs: Sequence[Mapping[str, Array]]
) -> Difference | None:
    """The first value, in the graph's order, that a run has otherwise than the graph, None where all are equal.

    Args:
        graph: what is meant; its results are compared.
        inputs: of successive inferences. outputs: of the same.
    """
    found, _ = _compared(graph, inputs, outputs)
    return found


def _compared(
    graph: Graph, inputs: Sequence[Mapping[str, Array]], outputs: Sequence[Mapping[str, Array]]
) -> tuple[Difference | None, int]:
    """The first difference that float32 does not explain, and how many elements hang on a rounding that it decides."""
    close, meant, stepped = is_approximate(graph), evaluate_all(graph, inputs), 0
    nudged: list[Sequence[Mapping[str, Array]]] = []
    for name in graph.results:
        for number, (found, expected) in enumerate(zip(outputs, meant, strict=True)):
            if (wrong := _parted(found[name], expected[name], close)) is None:
                continue
            if close and not nudged:
                nudged = [evaluate_all(_nudged(graph, seed), inputs) for seed in range(_NUDGES)]
            unsure = _unsure(found[name], expected[name], [each[number][name] for each in nudged])
            if np.any(wrong & ~unsure):
                return _described(name, number, found[name], expected[name], wrong & ~unsure), stepped
            stepped += int(np.sum(wrong))
    return None, stepped


def _nudged(graph: Graph, seed: int) -> Graph:
    """The graph with computed floats moved by a part of a step before they become integers: all up, all down, or each
    either way."""
    nodes, types, constants = list[Node](), dict(graph.types), dict(graph.constants)
    random = np.random.default_rng(seed)
    for node in graph.nodes:
        source = node.inputs[0] if node.inputs else ""
        scale = graph.constants.get(node.inputs[1]) if node.operator.quantises else None
        if scale is not None and source in graph.producers():
            moved, step = f"{node.output} nudged", f"{node.output} nudge"
            signs = random.choice([-1, 1], graph.types[source].shape) if seed > 1 else np.array([1 - 2 * seed])
            constants[step] = (_NUDGE * float(scale.mean()) * signs).astype(np.float32)
            types |= {step: TensorType(signs.shape, DType.FLOAT32), moved: graph.types[source]}
            nodes.append(Node(Add(), (source, step), moved))
            node = replace(node, inputs=(moved, *node.inputs[1:]))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), types=types, constants=constants)


def _unsure(found: Array, expected: Array, nudged: Sequence[Array]) -> Array:
    """Elements that change where the floats before roundings do, and lie no farther off than such a change goes."""
    if not nudged:
        return np.zeros(expected.shape, np.bool_)
    changes = [np.abs(each.astype(np.float64) - expected) for each in nudged]
    farthest = 1.5 * max(float(change.max()) for change in changes)
    moved = np.any([change > 0 for change in changes], axis=0)
    return np.asarray(moved & (np.abs(found.astype(np.float64) - expected) <= farthest))


def _parted(found: Array, expected: Array, close: bool) -> Array | None:
    """Which elements differ, None where none does; with `close`, by more than rounding explains."""
    wrong = found != expected
    if close:
        both = (found.astype(np.float64), expected.astype(np.float64))
        reach = float(np.max(np.abs(both[1][np.isfinite(both[1])]), initial=0))
        least = 1 if np.issubdtype(expected.dtype, np.integer) else max(_NEAR * reach, _NOTHING)
        wrong = ~np.isclose(*both, rtol=0, atol=least, equal_nan=True)
    return wrong if np.any(wrong) else None


def _described(name: str, number: int, found: Array, expected: Array, wrong: Array) -> Difference:
    index = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(wrong)))
    one, other = np.atleast_1d(found), np.atleast_1d(expected)
    largest = float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64))))
    return Difference(
        name, number, index, float(one[index]), float(other[index]), int(np.sum(wrong)), found.size, largest
    )


def prove(result: RunResult, graph: Graph, inputs: Sequence[Mapping[str, Array]]) -> str:
    """Compare a run with the integer graph, and return a sentence.

    Raises:
        DovetailError: it did not; says which output, where, and by how much.
    """
    found, stepped = _compared(graph, inputs, result.outputs)
    if found is not None:
        what = f"the outputs are not those of the integer graph: {found}"
        hint = "dovetail run --check-layers says which layer is the first; dovetail check tries an engine alone"
        raise DovetailError(what, where=f"{result.build.folder} on {result.simulator}", hint=hint)
    times = f" in {len(inputs)} inferences" if len(inputs) > 1 else ""
    close = (
        f", but for float32's rounding: 1 in integers, {_NEAR:g} of the largest value" if is_approximate(graph) else ""
    )
    rounded = f"; {stepped:,} elements are a step off, where float32 decides a rounding to integers" if stepped else ""
    return f"outputs equal the integer graph{times}{close}{rounded}"


def several_at_once(build: ProjectBuild, graph: Graph, simulator: str | None) -> str:
    """Compare a call of several steps with the integer graph.

    Inputs are seeded, and a single step follows. Returns a sentence, which is empty where the build has no network of
    several steps.

    Raises:
        DovetailError: an output differs, or as `run_build`.
    """
    several, entry = several_steps(build), build.manifest.prefill
    if several is None or entry is None:
        return ""
    if not runs_several(build, simulator or default_simulator(build.target)):
        return f"the network of {entry.steps} steps in one call was not run: this needs the simulated chip"
    whole = seeded_inputs(several.manifest.inputs)
    places = whole[entry.place]
    whole[entry.place] = np.arange(entry.steps, dtype=places.dtype).reshape(places.shape)
    each = [{name: array[number : number + 1] for name, array in whole.items()} for number in range(entry.steps)]
    steps = [{name: array.reshape(graph.types[name].shape) for name, array in one.items()} for one in each]
    last = min(entry.steps, entry.places - 1)  # of a full state it is written again
    steps.append({**steps[0], entry.place: np.full_like(steps[0][entry.place], last)})
    result, meant = run_build(build, simulator, [whole, steps[-1]]), evaluate_all(graph, steps)[-2:]
    for name in graph.results:
        for found, expected in zip(result.outputs, meant, strict=True):
            wrong = _parted(found[name], expected[name], is_approximate(graph))
            if wrong is not None:
                difference = _described(name, 0, found[name], expected[name], wrong)
                what = f"{entry.steps} steps in one call are not those of the integer graph: {difference}"
                hint = "report this with the model and the target, and compile without --prefill"
                raise DovetailError(what, where=f"{build.folder} on {result.simulator}", hint=hint)
    cycles = result.simulation.inferences[0].total_cycles
    cost = "" if cycles is None else f", in {cycles:,} cycles"
    return f"{entry.steps} steps in one call, and one behind them, equal the integer graph{cost}"


def every_layer(
    build: ProjectBuild, graph: Graph, simulator: str | None, inputs: Sequence[Mapping[str, Array]], core: str = ""
) -> str:
    """Compare every layer with the integer graph, and return a sentence; errors as `layers`."""
    count, wrong = layers(build, graph, simulator, inputs, core)
    if not count:
        return "there is no layer to compare: nothing is computed"
    if wrong is None:
        return f"each of {count} layers equals the integer graph"
    region, found = wrong
    place = f"{region.name} ({region.place}; {', '.join(region.origins)})"
    return f"the first layer that differs is {place}, after {count - 1} that are equal: {found}"


def layers(
    build: ProjectBuild, graph: Graph, simulator: str | None, inputs: Sequence[Mapping[str, Array]], core: str = ""
) -> tuple[int, tuple[Region, Difference] | None]:
    """Compare every layer with the integer graph. Returns the number of layers, and the first difference or None.

    The network is compiled again with the layers' results as outputs, untuned and without stripes or pipeline, so a
    fault that needs the build's own tiles or addresses may not show. `simulator` and `core` are those of `run_build`.

    Raises:
        PlanError: not even the result of one layer has room beside the network.
        DovetailError: as `run_build`.
    """
    target, options = build.target, Options(build.manifest.policy, optimize=build.manifest.optimize)
    regions = {region.output: region for region in initial_partition(graph, target) if not region.is_view}
    parts = [list(regions)]
    count = 0
    while parts:
        part = parts.pop(0)
        shown = _with_results(graph, part)
        try:
            with built(compile_graph(shown, target, options, interpret=False), target) as made:
                found = run_build(made, simulator, inputs, core=core)
        except PlanError:
            if len(part) == 1:
                raise
            parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
            continue
        if (wrong := difference(shown, inputs, found.outputs)) is not None:
            return count + part.index(wrong.value) + 1, (regions[wrong.value], wrong)
        count += len(part)
    return count, None


def _with_results(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph with these values as its results, and its states."""
    states = graph.outputs[len(graph.results) :]
    return prune(replace(graph, outputs=(*names, *states)))


document(__name__)
