"""Values of 4 and 2 bits: activations whose range is known to be that small get a type that says so. Exact."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.arithmetic import Clip, Lookup, Offset
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Linear
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.ir.types import DType

_BYTES = (DType.INT8, DType.UINT8)
_NARROW = (DType.INT2, DType.UINT2, DType.INT4, DType.UINT4)


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
        operator, dtype = node.operator, None
        if self.graph.types[node.output].dtype in _BYTES and node.output not in self.graph.outputs:
            dtype = self._narrowest(node)
        if dtype is None:
            self.same[node.output] = self._add(operator, self._operands(node), node)
        elif isinstance(operator, Clip):
            self.slim[node.output] = self._add(replace(operator, dtype=dtype), self._operands(node), node)
        elif isinstance(operator, Lookup):
            table = self.graph.constants[node.inputs[1]]
            name = self.builder.constant(self.builder.fresh(f"{node.inputs[1]}_{dtype.text}"), table, dtype)
            self.slim[node.output] = self._add(operator, [*self._operands(node)[:1], name], node)
        else:
            self.slim[node.output] = self._add(operator, [self.slim[name] for name in node.inputs], node)

    def _add(self, operator: Operator, operands: list[str], node: Node) -> str:
        return self.builder.add(operator, operands, node.output, node.origin)

    def _narrowest(self, node: Node) -> DType | None:
        """The type the result of a node gets; None where it keeps its own."""
        operator = node.operator
        if isinstance(operator, Clip):
            return self._holding(operator.low, operator.high, operator.dtype)
        if isinstance(operator, Lookup):
            table = self.graph.constants.get(node.inputs[1])
            own = self.graph.types[node.output].dtype
            return None if table is None else self._holding(int(table.min()), int(table.max()), own)
        if not (operator.moves_only or isinstance(operator, MaxPool2d)) or any(v not in self.slim for v in node.inputs):
            return None
        kinds = {self.builder.type_of(self.slim[name]).dtype for name in node.inputs}
        (kind,) = kinds if len(kinds) == 1 else (None,)
        fill = operator.value if isinstance(operator, Pad) else 0
        return kind if kind is not None and kind.low <= fill <= kind.high else None

    def _holding(self, low: int, high: int, own: DType) -> DType | None:
        """The narrowest type for a range; of two the one that is signed as the value is."""
        fitting = [kind for kind in self.kinds if kind.low <= low and high <= kind.high]
        return min(fitting, key=lambda kind: (kind.bits, kind.signed != own.signed), default=None)

    def _operands(self, node: Node) -> list[str]:
        """The new operands of a node whose result keeps its type."""
        reads = isinstance(node.operator, Linear | AveragePool2d | SumPool2d) or node.operator.pointwise
        count = max(node.operator.pointwise, 1) if reads else 0
        narrow = [self.slim.get(name) if place < count else None for place, name in enumerate(node.inputs)]
        if any(narrow):
            found = [name or self._wide(old) for name, old in zip(narrow, node.inputs, strict=True)]
            try:
                if node.operator.infer([self.builder.type_of(n) for n in found]) == self.graph.types[node.output]:
                    return found
            except ValueError:
                pass
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
