"""A region taken apart (an optional pad, an anchor, a tree of pointwise operators), and what writes each anchor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import DType, Shape, TensorType
from dovetail.kernels.kernel import (
    CoreTraits,
    KernelChoices,
    KernelScope,
    KernelWriter,
    UnsupportedRegion,
    is_pointwise,
)


@dataclass(frozen=True)
class RegionParts:
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
        return self.graph.types[self.source()].dtype

    @property
    def pad_value(self) -> float:
        """What the pad puts around the image; 0 without one."""
        return self.pad.operator.value if self.pad and isinstance(self.pad.operator, Pad) else 0

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


Write = Callable[[str], list[str]]
"""Writes a kernel's C under a function name."""
Family = Callable[[RegionParts, KernelScope, Any], KernelWriter]
"""From a region, its kernel's parameters and the anchor's operator; raises Unsupported where there is no kernel."""
Compact = Callable[[RegionParts, KernelScope, Any], Write]
"""As `Family`, for a function whose sizes are members of a layer's block."""
FAMILIES: dict[type[Operator], Family] = {}
"""What writes the kernel of each anchor."""
FLOAT_FAMILIES: dict[type[Operator], Family] = {}
"""What writes it where the first operand is float32, if that is not the writer in `FAMILIES`."""
COMPACT: dict[type[Operator], Compact] = {}
"""What writes it in little code; others are written as ever and left to the compiler to make small."""
WINDOWED: set[type[Operator]] = set()
"""Anchors whose kernels take in a Pad before them, or say themselves why not."""
PACKED: set[type[Operator]] = set()
"""Anchors whose kernels take operands that share bytes; those of pointwise operators alone do too."""
SHARING = (DType.INT4, DType.UINT4, DType.INT2, DType.UINT2)
"""Elements that may share bytes; without, kernels find each in a byte of its own."""
OFFERED: dict[type[Operator], Callable[[RegionParts, CoreTraits], KernelChoices | None]] = {}
"""What may be chosen about the kernel of an anchor that is written out; None or absent for nothing."""
BORDERS: dict[type[Operator], Compact] = {}
"""What writes the function of single pixels for an anchor whose other pixels are computed together."""
_Function = TypeVar("_Function")


def kernel(
    *operators: type[Operator],
    table: dict[type[Operator], Any] = FAMILIES,
    windowed: bool = False,
    packed: bool = False,
) -> Callable[[_Function], _Function]:
    """Registers what writes the kernels of anchors, in one of the tables above; `windowed` puts them in `WINDOWED`,
    `packed` in `PACKED`."""

    def register(function: _Function) -> _Function:
        table.update(dict.fromkeys(operators, function))
        WINDOWED.update(operators if windowed else ())
        PACKED.update(operators if packed else ())
        return function

    return register
