"""Puts nodes into stages, and a state wherever a stage reads what an earlier one has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dovetail.graph.graph import Graph, Node, prune
from dovetail.graph.trim import part
from dovetail.graph.types import Array, Box
from dovetail.operators.movement import Concat, Reshape
from dovetail.plan.cores import stretch_axis


class Builder:
    """Collects the nodes of each stage, in the order of the network, and gives one step of the pipeline.

    Args:
        graph: the network, without states.
        count: of stages.
    """

    def __init__(self, graph: Graph, count: int) -> None:
        self._graph, self._last = graph, count - 1
        self._nodes: list[list[Node]] = [[] for _ in range(count)]
        self._types, self._constants = dict(graph.types), dict(graph.constants)
        self._stage = dict.fromkeys(graph.inputs, 0)
        """The stage that has each value first."""
        self._names: dict[str, str] = {}
        """Values that have another name there."""
        self._states: dict[tuple[str, int], tuple[str, str]] = {}
        """Value and stage -> the state it is read from there, and what the state becomes."""

    def kept_bytes(self, stage: int) -> int:
        """Bytes that a stage leaves for the next one."""
        return sum(self._types[read].nbytes for (_, to), (read, _) in self._states.items() if to == stage + 1)

    def add(self, nodes: Sequence[Node], stage: int) -> None:
        """Add nodes to a stage."""
        for node in nodes:
            ahead = node.output in self._graph.outputs and stage != self._last
            self._names[node.output] = f"{node.output} ahead" if ahead else node.output
            self._stage[node.output] = stage
            self._append(replace(node, output=self._names[node.output]), stage)

    def add_parts(self, region: Graph, parts: Sequence[tuple[int, Box]]) -> None:
        """Add a region of which each of several stages, in their order, computes a box.

        Raises:
            ValueError: it cannot be computed in such parts; nothing has been added.
        """
        (output,) = region.outputs
        made = [part(region, {output: box}, f" for {output} in stage {stage}") for stage, box in parts]
        for cut, (stage, _) in zip(made, parts, strict=True):
            self._types.update(cut.types)
            self._constants.update(cut.constants)
            self.add(cut.nodes, stage)
        joined = Concat(stretch_axis(self._graph.types[output])[0])
        self.add([Node(joined, tuple(cut.outputs[0] for cut in made), output, region.nodes[-1].origin)], parts[-1][0])

    def finish(self) -> tuple[Graph, dict[str, int]]:
        """One step, and the stage of every computed value."""
        for name in self._graph.outputs:
            if self._stage[name] != self._last:
                copy = Node(Reshape(self._graph.types[name].shape), (self._at(name, self._last),), name)
                self._nodes[self._last].append(copy)
        stages = {node.output: stage for stage, nodes in enumerate(self._nodes) for node in nodes}
        reads = tuple(read for read, _ in self._states.values())
        step = replace(
            self._graph,
            inputs=(*self._graph.inputs, *reads),
            outputs=(*self._graph.outputs, *(written for _, written in self._states.values())),
            nodes=tuple(node for nodes in self._nodes for node in nodes),
            types={**self._types, **{self._names.get(n, n): kind for n, kind in self._types.items()}},
            constants=self._constants,
            states=tuple(self._zeros(read) for read in reads),
        )
        return prune(step), stages

    def _append(self, node: Node, stage: int) -> None:
        inputs = tuple(self._at(value, stage) for value in node.inputs)
        self._nodes[stage].append(replace(node, inputs=inputs))

    def _at(self, value: str, stage: int) -> str:
        """The name under which a stage finds a value."""
        if value in self._constants:
            return value
        name = self._names.get(value, value)
        for later in range(self._stage[value] + 1, stage + 1):
            if (value, later) not in self._states:
                self._states[value, later] = self._state(value, later, name)
            name = self._states[value, later][0]
        return name

    def _state(self, value: str, stage: int, before: str) -> tuple[str, str]:
        """A state of a stage that becomes what the stage before has under a name: a computed value, or a copy."""
        read, kind = f"{value} of stage {stage}", self._types[value]
        self._types[read] = kind
        if any(node.output == before for node in self._nodes[stage - 1]):
            return read, before
        copy = f"{value} for stage {stage}"
        self._types[copy] = kind
        self._nodes[stage - 1].append(Node(Reshape(kind.shape), (before,), copy))
        return read, copy

    def _zeros(self, read: str) -> Array:
        kind = self._types[read]
        found = np.zeros(kind.shape, kind.dtype.numpy)
        found.setflags(write=False)
        return found
