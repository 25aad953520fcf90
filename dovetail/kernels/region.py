"""A region taken apart: an optional pad, an anchor, and the tree of pointwise operators behind it."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import DType, Shape
from dovetail.kernels.epilogue import is_pointwise
from dovetail.kernels.kernel import Unsupported
from dovetail.operators.movement import Pad


@dataclass(frozen=True)
class Region:
    """The parts of a region graph."""

    graph: Graph
    pad: Node | None
    """The pad that is folded into the anchor's window."""
    anchor: Node | None
    """The one operator that is not pointwise; None for a region of pointwise operators alone."""
    tree: tuple[Node, ...]
    """The pointwise operators, in topological order."""

    @property
    def output_shape(self) -> Shape:
        """Shape of the region's only result."""
        return self.graph.types[self.graph.outputs[0]].shape

    def source(self) -> str:
        """The run-time value the pad, or the anchor without one, reads first."""
        assert self.anchor is not None
        return (self.pad or self.anchor).inputs[0]


def _check_values(graph: Graph) -> None:
    """Raise Unsupported for region inputs or results a core cannot address."""
    if len(graph.outputs) != 1:
        raise Unsupported(f"a core kernel gives one result, the region {len(graph.outputs)}.")
    if not graph.nodes:
        raise Unsupported("the region has no operator.")
    for name in (*graph.inputs, *graph.outputs):
        kind = graph.types[name]
        if kind.dtype.bits < 8:
            raise Unsupported(f"{name!r} is {kind}: elements narrower than a byte are not unpacked on the core.")
        if kind.elements == 0:
            raise Unsupported(f"{name!r} is {kind}: it has no elements.")
        if kind.elements * kind.dtype.bits // 8 >= 1 << 31:
            raise Unsupported(f"{name!r} is {kind}: larger than 2 GB.")


def _tree(graph: Graph) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The pointwise nodes that lead to the result, and all nodes before them."""
    producers = graph.producers()
    wanted, tree = {graph.outputs[0]}, []
    for node in reversed(graph.nodes):
        if node.output in wanted and is_pointwise(node.operator):
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
        raise Unsupported(f"only a Pad may come before the one operator that is not pointwise; found {names}.")
    return rest[0], anchor


def split(graph: Graph) -> Region:
    """Take a region apart; raises Unsupported when it is not of the one form core kernels have."""
    _check_values(graph)
    tree, before = _tree(graph)
    pad, anchor = _anchor(graph, before)
    region = Region(graph, pad, anchor, tree)
    users = graph.users()
    if pad is not None and any(user is not anchor for user in users[pad.output]):
        raise Unsupported("the padded value is used outside the window.")
    if anchor is not None:
        first = {value for node in (pad, anchor) if node is not None for value in node.inputs}
        early = sorted(first.intersection(node.output for node in tree))
        if early:
            raise Unsupported(f"{early[0]!r} is read by {type(anchor.operator).__name__} and computed pointwise.")
        shape = graph.types[anchor.output].shape
        if shape != region.output_shape:
            raise Unsupported(f"the result {list(shape)} is broadcast to {list(region.output_shape)} afterwards.")
    return region


def require_dtype(region: Region, value: str, allowed: tuple[DType, ...]) -> DType:
    """The dtype of an operand, raising Unsupported when it is not one of `allowed`."""
    kind = region.graph.types[value]
    if kind.dtype not in allowed:
        names = ", ".join(dtype.text for dtype in allowed)
        assert region.anchor is not None
        raise Unsupported(f"{type(region.anchor.operator).__name__} reads {kind}, expected {names}.")
    return kind.dtype
