"""Values of 4 and 2 bits: activations whose range is known to be that small get a type that says so. Exact."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace

from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.arithmetic import Clip, Lookup, Offset
from dovetail.ir.operators.base import Operator
from dovetail.ir.pattern import Occurrence, apply, constant, occurrence, operand
from dovetail.ir.types import DType

_BYTES = (DType.INT8, DType.UINT8)
_NARROW = (DType.INT2, DType.UINT2, DType.INT4, DType.UINT4)
_TABLE = constant("table")
_CLIP, _LOOKUP = apply(Clip), apply(Lookup, operand("x"), _TABLE)


def narrow_activations(widths: Collection[int] = (4, 2)) -> Callable[[Graph], Graph]:
    """A rewrite that gives 8-bit values computed at run time the narrowest type of these widths that holds them.

    A value's range is what limits it (a `Clip`, a table) or what it is moved from. What does not read narrow values
    gets it in its own type again, by an `Offset` of 0; inputs and outputs of the network keep their types.
    """

    def rewrite(graph: Graph) -> Graph:
        draft = _GraphNarrower(graph, GraphBuilder(graph.name), [kind for kind in _NARROW if kind.bits in widths])
        for name in graph.inputs:
            draft.builder.input(name, graph.types[name])
            draft.same[name] = name
        for node in graph.nodes:
            draft.take(node)
        return draft.builder.finish(graph.outputs, graph.states)

    return rewrite


@dataclass
class _GraphNarrower:
    """The graph that is made."""

    graph: Graph
    builder: GraphBuilder
    kinds: list[DType]
    """The narrow types there are, the narrowest first."""
    same: dict[str, str] = field(default_factory=dict)
    """Old value -> new value of the same type."""
    slim: dict[str, str] = field(default_factory=dict)
    """Old value -> new value of a narrow type."""

    def take(self, node: Node) -> None:
        """Add a node, its result narrow where that can be."""
        graph, own = self.graph, self.graph.types[node.output].dtype
        may = own in _BYTES and node.output not in graph.outputs
        if may and (clip := occurrence(_CLIP, graph, node)) and (dtype := self._holding(clip[_CLIP].limited_to, own)):
            self.slim[node.output] = self._add(replace(clip[_CLIP], dtype=dtype), self._operands(node), node)
        elif may and (lookup := occurrence(_LOOKUP, graph, node)) and (dtype := self._of_table(lookup, own)):
            table = self.builder.fresh(f"{lookup[_TABLE]}_{dtype.text}")
            name = self.builder.constant(table, lookup.array(_TABLE), dtype)
            self.slim[node.output] = self._add(node.operator, [*self._operands(node)[:1], name], node)
        elif may and self._moves_narrow(node):
            self.slim[node.output] = self._add(node.operator, [self.slim[name] for name in node.inputs], node)
        else:
            self.same[node.output] = self._add(node.operator, self._operands(node), node)

    def _add(self, operator: Operator, operands: list[str], node: Node) -> str:
        return self.builder.add(operator, operands, node.output, node.origin)

    def _of_table(self, lookup: Occurrence, own: DType) -> DType | None:
        table = lookup.array(_TABLE)
        return self._holding((int(table.min()), int(table.max())), own)

    def _moves_narrow(self, node: Node) -> bool:
        """Whether all elements of a result are elements of narrow values of one type, or a number this type has."""
        chosen = node.operator.chosen_from(node.inputs)
        if chosen != node.inputs or any(name not in self.slim for name in chosen):
            return False
        kinds = {self.builder.type_of(self.slim[name]).dtype for name in chosen}
        fill = node.operator.filler or 0
        return len(kinds) == 1 and all(kind.low <= fill <= kind.high for kind in kinds)

    def _holding(self, reach: tuple[int, int], own: DType) -> DType | None:
        """The narrowest type for a range; of two the one that is signed as the value is."""
        fitting = [kind for kind in self.kinds if kind.low <= reach[0] and reach[1] <= kind.high]
        return min(fitting, key=lambda kind: (kind.bits, kind.signed != own.signed), default=None)

    def _operands(self, node: Node) -> list[str]:
        """The new operands of a node whose result keeps its type."""
        count = 0 if node.operator.as_given else max(node.operator.pointwise, 1)
        narrow = [self.slim.get(name) if place < count else None for place, name in enumerate(node.inputs)]
        if any(narrow):
            names = [name or self._wide(old) for name, old in zip(narrow, node.inputs, strict=True)]
            with suppress(ValueError):
                if node.operator.infer([self.builder.type_of(n) for n in names]) == self.graph.types[node.output]:
                    return names
        return [self._wide(name) for name in node.inputs]

    def _wide(self, name: str) -> str:
        """The new value of the type an old one has."""
        if name not in self.same:
            kind = self.graph.types[name]
            if name in self.graph.constants:
                self.same[name] = self.builder.constant(name, self.graph.constants[name], kind.dtype)
            else:
                self.same[name] = self.builder.add(
                    Offset(0, kind.dtype), [self.slim[name]], f"{name}_{kind.dtype.text}"
                )
        return self.same[name]
