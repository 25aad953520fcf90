"""Runs small rewrites over a graph to a fixed point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dovetail.graph.graph import Graph, Node, prune
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.base import Operator

MARK = "\x00"
"""Separates a value's model name from a counter while rewrites run; never left in a result."""

MAX_SWEEPS = 1000
"""Sweeps after which the rules are known not to end."""


class Draft:
    """A graph being rebuilt from front to back; a rewrite sees the part before its node and adds to it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = dict(graph.types)
        self.constants: dict[str, Array] = dict(graph.constants)
        self._producers: dict[str, Node] = {}
        self._alias: dict[str, str] = {}
        self._rename: dict[str, str] = {}
        self._users = Counter(name for node in graph.nodes for name in dict.fromkeys(node.inputs))
        self._users.update(graph.outputs)
        self._count = 0

    def made_by(self, value: str, *kinds: type[Operator]) -> Node | None:
        """The node that computes `value` if its operator is of one of these classes."""
        node = self._producers.get(value)
        return node if node is not None and isinstance(node.operator, kinds) else None

    def users(self, value: str) -> int:
        """How many nodes and graph outputs read a value."""
        return self._users[value]

    def is_static(self, value: str) -> bool:
        """True for a constant and for a node of constants."""
        node = self._producers.get(value)
        return value in self.constants or (node is not None and all(name in self.constants for name in node.inputs))

    def add(self, operator: Operator, inputs: Sequence[str], like: Node, stem: str = "") -> str:
        """Add a node originating like another and named like it (or like the value `stem`); returns its value."""
        node = Node(operator, tuple(inputs), self._fresh(stem or like.output), like.origin)
        self.types[node.output] = operator.infer([self.types[name] for name in inputs])
        self._append(node)
        return node.output

    def constant(self, array: Array, dtype: DType, like: str) -> str:
        """Add a constant named like another value."""
        name = self._fresh(like)
        frozen = np.ascontiguousarray(array).reshape(array.shape)
        frozen.setflags(write=False)
        self.types[name] = TensorType(tuple(frozen.shape), dtype)
        self.constants[name] = frozen
        return name

    def take(self, node: Node, rules: Sequence[Rewrite]) -> bool:
        """Process the next node of the old graph; True when a rewrite replaced it."""
        node = replace(node, inputs=tuple(self._alias.get(name, name) for name in node.inputs))
        for rule in rules:
            value = rule(self, node)
            if value is not None and self._substitute(node, value):
                return True
        self._append(node)
        return False

    def finish(self) -> Graph:
        """The rebuilt graph."""
        name_of = self._rename.get
        nodes = (
            replace(node, output=name_of(node.output, node.output), inputs=tuple(name_of(n, n) for n in node.inputs))
            for node in self.nodes
        )
        types = {name_of(name, name): kind for name, kind in self.types.items() if name not in self._alias}
        return prune(replace(self.graph, nodes=tuple(nodes), types=types, constants=self.constants))

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        self._producers[node.output] = node

    def _fresh(self, like: str) -> str:
        base = like.split(MARK)[0]
        while True:
            self._count += 1
            name = f"{base}{MARK}{self._count}"
            if name not in self.types:
                return name

    def _substitute(self, node: Node, value: str) -> bool:
        """Let `value` stand for the node's result; False when the result's name must stay on a node."""
        old, last = node.output, self.nodes[-1] if self.nodes else None
        if last is not None and last.output == value and MARK in value and value not in self._users:
            self.nodes.pop()
            del self._producers[value]
            self.types.pop(value)
            self._append(replace(last, output=old))
            return True
        if old in self.graph.outputs:
            fixed = value in self.graph.inputs or value in self.constants or value in self.graph.outputs
            if fixed or value in self._rename:
                return False
            self._rename[value] = old
        self._alias[old] = value
        self._users[value] += self._users[old] - 1
        return True


Rewrite = Callable[[Draft, Node], str | None]
"""Gives the value that replaces a node's result (adding nodes to the draft), or None where it does not apply."""


def run(graph: Graph, rules: Sequence[Rewrite]) -> Graph:
    """Apply the rules wherever they fit until none does.

    Raises:
        RuntimeError: they do not come to an end, which is a bug of the rules.
    """
    for _ in range(MAX_SWEEPS):
        draft = Draft(graph)
        changed = [draft.take(node, rules) for node in graph.nodes]
        graph = draft.finish()
        if not any(changed):
            return tidy_names(graph)
    raise RuntimeError(f"the rewrites of {graph.name!r} did not end after {MAX_SWEEPS} sweeps")


def tidy_names(graph: Graph) -> Graph:
    """Values made by rewrites under the model's own name where it is free, else with a number."""
    taken = {name for name in graph.types if MARK not in name}
    names: dict[str, str] = {}
    marked = [name for name in (*graph.constants, *(node.output for node in graph.nodes)) if MARK in name]
    for name in marked:
        base, count = name.split(MARK)[0], 0
        found = base
        while found in taken:
            count += 1
            found = f"{base}_{count}"
        taken.add(found)
        names[name] = found

    def tidy(name: str) -> str:
        return names.get(name, name)

    nodes = (replace(n, output=tidy(n.output), inputs=tuple(map(tidy, n.inputs))) for n in graph.nodes)
    return replace(
        graph,
        nodes=tuple(nodes),
        types={tidy(name): kind for name, kind in graph.types.items()},
        constants={tidy(name): array for name, array in graph.constants.items()},
    )
