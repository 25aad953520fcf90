"""Whether a build computes what its network means: a run's outputs beside those of the integer graph in the build.

`layers` finds where the two part: the network is built once more with the result of every layer as an output, in as
many parts as the memory of values has room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.arrays import built
from dovetail.codegen.emit.project import GRAPH
from dovetail.compile import Options, compile_graph
from dovetail.errors import BuildError, DovetailError, PlanError
from dovetail.ir.graph import Graph, evaluate_all, prune
from dovetail.ir.onnx_file import load_graph
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import Array, DType
from dovetail.operators import combined, known_operators
from dovetail.run import ProjectBuild, RunResult, one_version, run_build
from dovetail.schedule.partition import initial_partition
from dovetail.schedule.region import Region

_NEAR = 1e-4
"""How far float32 results may lie apart, as a part of the largest one: no two runtimes add in the same order."""


@dataclass(frozen=True)
class Difference:
    """The first difference between values of a run and of the graph."""

    value: str
    inference: int
    """Counted from 0."""
    index: tuple[int, ...]
    """Index of the first element that differs."""
    found: float
    expected: float
    count: int
    """Elements that differ."""
    elements: int
    largest: float
    """The largest distance of two elements."""

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return (
            f"{self.count:,} of {self.elements:,} elements of '{self.value}' differ in inference {self.inference}, by "
            f"up to {self.largest:g}; the first is [{at}]: {self.found:g}, expected {self.expected:g}"
        )


def read_graph(build: ProjectBuild, operators: Sequence[type[UserOperator]] = ()) -> Graph:
    """The integer graph a build was made from, as the target computes it. `operators` are the user's own.

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
    close, meant = is_approximate(graph), evaluate_all(graph, inputs)
    for name in graph.results:
        for number, (found, expected) in enumerate(zip(outputs, meant, strict=True)):
            if (wrong := _parted(found[name], expected[name], close)) is not None:
                return _described(name, number, found[name], expected[name], wrong)
    return None


def _parted(found: Array, expected: Array, close: bool) -> Array | None:
    """Which elements differ, None where none does; with `close`, by more than rounding explains."""
    wrong = found != expected
    if close:
        both = (found.astype(np.float64), expected.astype(np.float64))
        reach = float(np.max(np.abs(both[1][np.isfinite(both[1])]), initial=0))
        least = 1 if np.issubdtype(expected.dtype, np.integer) else _NEAR * reach
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
    """One sentence that says a run computed what the network means.

    Raises:
        DovetailError: it did not; says which output, where, and by how much.
    """
    found = difference(graph, inputs, result.outputs)
    if found is not None:
        what = f"the outputs are not those of the integer graph: {found}"
        hint = "dovetail run --check-layers says which layer is the first; dovetail check tries an engine alone"
        raise DovetailError(what, where=f"{result.build.folder} on {result.simulator}", hint=hint)
    times = f" in {len(inputs)} inferences" if len(inputs) > 1 else ""
    close = (
        f", but for float32's rounding: 1 in integers, {_NEAR:g} of the largest value" if is_approximate(graph) else ""
    )
    return f"outputs equal the integer graph{times}{close}"


def every_layer(
    build: ProjectBuild, graph: Graph, simulator: str | None, inputs: Sequence[Mapping[str, Array]], core: str = ""
) -> str:
    """One sentence on what `layers` found; errors as `layers`."""
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
    """How many layers were compared, and the first that computes something else than the graph; None where none does.

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
