"""Networks for the tests of the OpenCL target: random regions side by side in one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from core_kernel_cases import Case
from dovetail.graph.graph import Graph
from dovetail.graph.types import Array


def side_by_side(cases: Sequence[Case], name: str = "regions") -> tuple[Graph, dict[str, Array]]:
    """One network that computes every case by itself, and the operands of all of them."""
    parts = [_renamed(case.graph, f"r{number}_") for number, case in enumerate(cases)]
    graph = Graph(
        name,
        tuple(value for part in parts for value in part.inputs),
        tuple(value for part in parts for value in part.outputs),
        tuple(node for part in parts for node in part.nodes),
        {value: kind for part in parts for value, kind in part.types.items()},
        {value: array for part in parts for value, array in part.constants.items()},
    )
    inputs = {f"r{number}_{value}": array for number, case in enumerate(cases) for value, array in case.inputs.items()}
    return graph, inputs


def _renamed(graph: Graph, prefix: str) -> Graph:
    def of(names: Sequence[str]) -> tuple[str, ...]:
        """The names with the prefix."""
        return tuple(prefix + name for name in names)

    def keyed(values: Mapping[str, object]) -> dict[str, object]:
        """A mapping with such names as keys."""
        return {prefix + name: value for name, value in values.items()}

    nodes = tuple(replace(n, inputs=of(n.inputs), output=prefix + n.output) for n in graph.nodes)
    types, constants = keyed(graph.types), keyed(graph.constants)
    return replace(graph, inputs=of(graph.inputs), outputs=of(graph.outputs), nodes=nodes, types=types,
                   constants=constants)  # fmt: skip
