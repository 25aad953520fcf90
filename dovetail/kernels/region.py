"""A region taken apart: an optional pad, an anchor, a tree of pointwise operators."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import DType, Shape, TensorType
from dovetail.kernels.kernel import UnsupportedRegion
from dovetail.target.pattern import Match, Pattern, apply, constant, match_pattern, operand

REQUANTISED = apply(Clip, apply(Requantize, operand("x"), constant("multiplier"), constant("shift")))
"""A value that is requantised and limited."""


@dataclass(frozen=True)
class RegionParts:
    """The parts of a region graph."""

    graph: Graph
    pad: Node | None
    """The `Pad` that is folded into the anchor's window."""
    anchor: Node | None
    """The one operator that is not pointwise; None for a region of pointwise operators alone."""
    tree: tuple[Node, ...]
    """The pointwise operators, in topological order."""

    @property
    def output_shape(self) -> Shape:
        """Shape of the region's only result."""
        return self.graph.types[self.graph.outputs[0]].shape

    @property
    def node(self) -> Node:
        """The anchor of a region that has one."""
        assert self.anchor is not None
        return self.anchor

    def type(self, position: int) -> TensorType:
        """Type of an operand of the anchor."""
        return self.graph.types[self.node.inputs[position]]

    @property
    def result(self) -> TensorType:
        """Type of the anchor's result."""
        return self.graph.types[self.node.output]

    def source(self) -> str:
        """The run-time value the pad, or the anchor without one, reads first."""
        return (self.pad or self.node).inputs[0]

    @property
    def source_dtype(self) -> DType:
        """Element type of `source`."""
        return self.graph.types[self.source()].dtype

    @property
    def pad_value(self) -> float:
        """The element the pad puts around the image; 0 without one."""
        return self.pad.expect(Pad).value if self.pad else 0

    @property
    def types(self) -> list[TensorType]:
        """Types of the anchor's operands."""
        return [self.graph.types[name] for name in self.node.inputs]

    def whole(self, pattern: Pattern) -> Match | None:
        """The region as a pattern of pointwise operators; None where it is another."""
        if self.anchor is not None:
            return None
        match = match_pattern(pattern, self.graph, self.graph.outputs[0])
        return match if isinstance(match, Match) and len(match.nodes) == len(self.tree) else None

    def without_pad(self) -> None:
        """Raise Unsupported for a Pad before the anchor."""
        if self.pad is not None:
            raise UnsupportedRegion(f"a Pad before {type(self.node.operator).__name__} is not fused.")

    def require(self, allowed: tuple[DType, ...]) -> DType:
        """The dtype of `source`, raising Unsupported when it is not one of `allowed`."""
        if self.source_dtype not in allowed:
            names, kind = ", ".join(dtype.text for dtype in allowed), self.graph.types[self.source()]
            raise UnsupportedRegion(f"{type(self.node.operator).__name__} reads {kind}, expected {names}.")
        return self.source_dtype


def _check_values(graph: Graph) -> None:
    """Raise Unsupported for region inputs or results a core cannot address."""
    if len(graph.outputs) != 1:
        raise UnsupportedRegion(f"a core kernel gives one result, the region {len(graph.outputs)}.")
    if not graph.nodes:
        raise UnsupportedRegion("the region has no operator.")
    for name in (*graph.inputs, *graph.outputs):
        kind = graph.types[name]
        if kind.elements == 0:
            raise UnsupportedRegion(f"{name!r} is {kind}: it has no elements.")
        if kind.elements * kind.dtype.bits // 8 >= 1 << 31:
            raise UnsupportedRegion(f"{name!r} is {kind}: larger than 2 GB.")


def _tree(graph: Graph) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The pointwise nodes that lead to the result, and all nodes before them."""
    producers = graph.producers()
    wanted, tree = {graph.outputs[0]}, []
    for node in reversed(graph.nodes):
        if node.output in wanted and node.operator.pointwise:
            tree.append(node)
            wanted.update(name for name in node.inputs if name in producers)
    inside = {node.output for node in tree}
    return tuple(reversed(tree)), tuple(node for node in graph.nodes if node.output not in inside)


def _anchor(graph: Graph, before: tuple[Node, ...]) -> tuple[Node | None, Node | None]:
    """(pad, anchor) among the nodes that are not in the tree."""
    if not before:
        return None, None
    *rest, anchor = before
    if not rest:
        return None, anchor
    fused = len(rest) == 1 and isinstance(rest[0].operator, Pad) and anchor.inputs[0] == rest[0].output
    if not fused or rest[0].output in anchor.inputs[1:]:
        names = ", ".join(type(node.operator).__name__ for node in before)
        raise UnsupportedRegion(f"only a Pad may come before the one operator that is not pointwise; found {names}.")
    return rest[0], anchor


def split(graph: Graph) -> RegionParts:
    """Take a region apart; raises Unsupported when it is not of the one form core kernels have."""
    _check_values(graph)
    tree, before = _tree(graph)
    pad, anchor = _anchor(graph, before)
    region = RegionParts(graph, pad, anchor, tree)
    users = graph.users()
    if pad is not None and any(user is not anchor for user in users[pad.output]):
        raise UnsupportedRegion("the padded value is used outside the window.")
    if anchor is not None:
        first = {value for node in (pad, anchor) if node is not None for value in node.inputs}
        early = sorted(first.intersection(node.output for node in tree))
        if early:
            raise UnsupportedRegion(f"{early[0]!r} is read by {type(anchor.operator).__name__} and computed pointwise.")
        shape = graph.types[anchor.output].shape
        if shape != region.output_shape:
            raise UnsupportedRegion(f"the result {list(shape)} is broadcast to {list(region.output_shape)} afterwards.")
    return region
