"""Rewriting: tables of rules, each a pattern, conditions and a replacement, applied to a graph until none fits.

    x, weights = operand("x"), constant("weights")
    layer = apply(Conv2d, x, weights)

    RULES = (
        Rule(
            layer,
            lambda at: at.add(replace(at[layer], stride=(1, 1)), at.add(Slice(...), x), weights),
            (("the window is larger than a pixel", lambda at: at.type(weights).shape[1:3] == (1, 1)),),
        ),
    )

Where a pattern is there and a condition with a sentence fails, the graph says so (`Graph.left`): `explain` and reports
print it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.ir.graph import Graph, Node, prune, renamed
from dovetail.ir.operators.base import Operator
from dovetail.ir.pattern import Apply, Occurrence, Pattern, occurrence
from dovetail.ir.types import Array, DType, TensorType, frozen
from dovetail.records import Record

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
        self.left: dict[str, str] = dict(graph.left)
        """See `Graph.left`."""
        self._producers: dict[str, Node] = {}
        self._alias: dict[str, str] = {}
        self._rename: dict[str, str] = {}
        self._readers = Counter(name for node in graph.nodes for name in dict.fromkeys(node.inputs))
        self._readers.update(graph.outputs)
        self._count = 0

    def producer(self, value: str) -> Node | None:
        """The node that computes a value, if it is before the node that is being rewritten."""
        return self._producers.get(value)

    def readers(self, value: str) -> int:
        """How many nodes and graph outputs read a value."""
        return self._readers[value]

    def made_by(self, value: str, *kinds: type[Operator]) -> Node | None:
        """The node that computes `value` if its operator is of one of these classes."""
        node = self._producers.get(value)
        return node if node is not None and isinstance(node.operator, kinds) else None

    def is_static(self, value: str) -> bool:
        """True for a constant and for a node of constants."""
        node = self._producers.get(value)
        return value in self.constants or (node is not None and all(name in self.constants for name in node.inputs))

    def add(self, operator: Operator, inputs: Sequence[str], like: Node, stem: str = "") -> str:
        """Add a node originating like another and named like it (or like the value `stem`); returns its value."""
        node = Node(operator, tuple(inputs), self._fresh(stem or like.output), like.origin)
        self.types[node.output] = operator.infer([self.types[name] for name in inputs])
        self._append(node)
        self._readers.update(set(node.inputs))
        return node.output

    def constant(self, array: Array, dtype: DType, like: str) -> str:
        """Add a constant named like another value."""
        name = self._fresh(like)
        self.types[name] = TensorType(tuple(array.shape), dtype)
        self.constants[name] = frozen(array)
        return name

    def leave(self, node: Node, why: str) -> str | None:
        """Note why a rewrite leaves a node as it is; always gives None, which the rewrite returns then."""
        self.left[node.output] = why
        return None

    def take(self, node: Node, rules: Sequence[Rewrite]) -> bool:
        """Process the next node of the old graph; True when a rewrite replaced it."""
        inputs = tuple(self._alias.get(name, name) for name in node.inputs)
        node = node if inputs == node.inputs else replace(node, inputs=inputs)
        for rule in rules:
            value = rule(self, node)
            if value is not None and self._substitute(node, value):
                return True
        self._append(node)
        return False

    def finish(self) -> Graph:
        """The rebuilt graph."""
        types = {name: kind for name, kind in self.types.items() if name not in self._alias}
        nodes, known = tuple(self.nodes), self.constants
        whole = replace(self.graph, nodes=nodes, types=types, constants=known, left=self.left)
        return prune(renamed(whole, self._rename))

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
        if self.types[value].shape != self.types[node.output].shape:
            shapes = f"{self.types[value].shape} in place of {self.types[node.output].shape}"
            raise RuntimeError(f"a rewrite of {node.output!r} gives the shape {shapes}")
        old, last = node.output, self.nodes[-1] if self.nodes else None
        if last is not None and last.output == value and MARK in value and not self._readers[value]:
            self.nodes.pop()
            del self._producers[value]
            self.types[old] = self.types.pop(value)
            self._append(replace(last, output=old))
        else:
            if old in self.graph.outputs:
                fixed = value in self.graph.inputs or value in self.constants or value in self.graph.outputs
                if fixed or value in self._rename:
                    return False
                self._rename[value] = old
            self._alias[old] = value
            self._readers[value] += self._readers[old]
        self._readers.subtract(set(node.inputs))
        return True


Rewrite = Callable[[Draft, Node], str | None]
"""Gives the value that replaces a node's result (adding nodes to the draft), or None where it does not apply."""


@dataclass(frozen=True)
class RuleMatch(Occurrence):
    """A rule's pattern found in a draft, to which a replacement adds nodes."""

    draft: Draft
    root: Node
    """The outermost node of the pattern, which is not in the draft yet."""

    def add(
        self, operator: Operator, *operands: Pattern | str, like: Apply[Any] | Node | None = None, stem: str = ""
    ) -> str:
        """Add a node and return the name of its result.

        Args:
            operator: of the node.
            operands: parts of the pattern, or names of values.
            like: the node it comes from, by default the outermost one.
            stem: what the result is named like; by default as the result of `like`.
        """
        origin = self.nodes[like] if isinstance(like, Apply) else like or self.root
        return self.draft.add(operator, [self.value(one) for one in operands], origin, stem)

    def knows(self, part: Apply[Any]) -> bool:
        """Whether all operands of an operator but the first are constants."""
        return all(value in self.draft.constants for value in self.nodes[part].inputs[1:])

    def constant(self, array: Array, dtype: DType, like: Pattern | str = "") -> str:
        """Add a constant, named like the value of a part or like the result of the rule."""
        return self.draft.constant(array, dtype, self.value(like) if like else self.root.output)


class Left(Record):
    """A replacement's answer where a place stays as it is."""

    sentence: str
    """Why."""


Predicate = Callable[[RuleMatch], bool]
Condition = Predicate | tuple[str | Callable[[RuleMatch], str], Predicate]
"""Condition on a match; with a sentence in front, or what gives one, if a user is told where it does not."""


class Rule(Record):
    """A rewrite as data."""

    pattern: Apply[Any]
    replacement: Callable[[RuleMatch], str | Left | None]
    """Adds nodes and gives the value that replaces the pattern's; None where it stays as it is."""
    conditions: tuple[Condition, ...] = ()

    def __call__(self, draft: Draft, node: Node) -> str | None:
        """The value that replaces a node's result; None where the rule does not apply."""
        found = occurrence(self.pattern, draft, node)
        if found is None:
            return None
        match = RuleMatch(**vars(found), draft=draft, root=node)
        for condition in self.conditions:
            sentence, holds = condition if isinstance(condition, tuple) else ("", condition)
            if not holds(match):
                why = sentence if isinstance(sentence, str) else sentence(match)
                return draft.leave(node, why) if why else None
        answer = self.replacement(match)
        return draft.leave(node, answer.sentence) if isinstance(answer, Left) else answer


def rewriting(*rules: Rewrite) -> Callable[[Graph], Graph]:
    """The function that applies rules wherever they fit."""
    return lambda graph: run(graph, rules)


def run(graph: Graph, rules: Sequence[Rewrite]) -> Graph:
    """Apply the rules wherever they fit until none does.

    Raises:
        RuntimeError: they do not come to an end, which is a bug of the rules.
    """
    before = graph.left
    for _ in range(MAX_SWEEPS):
        draft = Draft(replace(graph, left=before))
        changed = [draft.take(node, rules) for node in graph.nodes]
        graph = draft.finish()
        if not any(changed):
            return tidy_names(graph)
    raise RuntimeError(f"the rewrites of {graph.name!r} did not end after {MAX_SWEEPS} sweeps")


def tidy_names(graph: Graph) -> Graph:
    """Values made by rewrites under the model's own name where it is free, else with a number."""
    taken = {name for name in graph.types if MARK not in name}
    names: dict[str, str] = {}
    counts: dict[str, int] = {}  # the last number taken behind each name
    marked = [name for name in (*graph.constants, *(node.output for node in graph.nodes)) if MARK in name]
    for name in marked:
        base = free = name.split(MARK)[0]
        count = counts.get(base, 0)
        while free in taken:
            count += 1
            free = f"{base}_{count}"
        counts[base] = count
        taken.add(free)
        names[name] = free
    return renamed(graph, names)
