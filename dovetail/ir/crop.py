"""Parts of a graph: cropped to a tile, trimmed to what is read, and parts of values that may stay where they lie.

Halo, edge padding and slices of constants follow from operators' own rules, along one propagation (`parts`). `trim` is
exact: a value that several operators read in different parts is computed over the smallest box that holds them all, and
where an operator then finds more than it reads and would notice, it reads a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from dovetail.ir.graph import Graph, Node, prune, renamed
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Slice
from dovetail.ir.types import Array, Box, Shape, TensorType, box_shape, box_slices, frozen, full_box
from dovetail.records import Record


class NodeCrop(Record):
    """A node cut to a box of its result."""

    node: Node
    """As it is in the whole graph."""
    operator: Operator
    """Computes the box."""
    box: Box
    reads: tuple[Box, ...]
    """The box it needs of each operand."""

    def macs(self, graph: Graph) -> int:
        """Multiply-accumulates of this part of a node of `graph`, padded taps counted."""
        reads = zip(self.node.inputs, self.reads, strict=True)
        return self.operator.macs([TensorType(box_shape(box), graph.types[name].dtype) for name, box in reads])


def cut_node(graph: Graph, node: Node, box: Box) -> NodeCrop:
    """The part of a node that computes a box of its result; raises ValueError where its rule does."""
    operator, reads = node.operator.crop(box, [graph.types[name] for name in node.inputs])
    return NodeCrop(node, operator, box, reads)


def hull(_: str, a: Box, b: Box) -> Box:
    """The smallest box that holds two."""
    return tuple((min(x[0], y[0]), max(x[1], y[1])) for x, y in zip(a, b, strict=True))


def parts(
    graph: Graph,
    wanted: Mapping[str, Box],
    cut: Callable[[Graph, Node, Box], NodeCrop] = cut_node,
    join: Callable[[str, Box, Box], Box] = hull,
) -> tuple[dict[str, NodeCrop], dict[str, Box]]:
    """Follow boxes of values up to everything they are computed from: the one propagation of what is read.

    Args:
        graph: the whole.
        wanted: the box of each value that is wanted, an output of the graph as a rule.
        cut: how a node is cut to a box of its result; what it gives may compute more.
        join: name, box, box -> the box for a value that is read in two.

    Returns:
        The part of each node by its result, the last node first, and the box of each value that is needed, constants
        included.

    Raises:
        ValueError: an operator cannot be computed in such a part.
    """
    boxes, found = dict(wanted), {}
    for node in reversed(graph.nodes):
        if node.output not in boxes:
            continue
        part = found[node.output] = cut(graph, node, boxes[node.output])
        boxes[node.output] = part.box
        for name, box in zip(node.inputs, part.reads, strict=True):
            boxes[name] = join(name, boxes[name], box) if name in boxes else box
    return found, boxes


class Tile(Record):
    """A region cut to part of its result."""

    graph: Graph
    """The computation, with the tile's shapes, pads and constants, and the region's value names."""
    box: Box
    """The part of the result."""
    reads: dict[str, Box]
    """The part of each runtime operand."""


def crop(graph: Graph, box: Box) -> Tile:
    """The part of a one-output graph that computes `box` of its output.

    Raises:
        ValueError: an operator cannot be computed in parts, or one value is read in two different parts.
    """
    found, boxes = parts(graph, {graph.outputs[0]: box}, join=_same)
    nodes = tuple(replace(node, operator=found[node.output].operator) for node in graph.nodes)
    types = {name: TensorType(box_shape(part), graph.types[name].dtype) for name, part in boxes.items()}
    constants: dict[str, Array] = {name: array[box_slices(boxes[name])] for name, array in graph.constants.items()}
    cropped = replace(graph, nodes=nodes, types=types, constants=constants)
    return Tile(cropped, box, {name: boxes[name] for name in graph.inputs})


def _same(name: str, a: Box, b: Box) -> Box:
    if a != b:
        raise ValueError(f"'{name}' is read in two different parts")
    return a


ALIGNMENT = 8
"""Bytes: where the kernels of the core take their operands and results to begin."""


def is_stretch(box: Box, shape: Shape) -> bool:
    """True when the elements of a box lie side by side in a row-major value."""
    cut = [axis for axis, (span, size) in enumerate(zip(box, shape, strict=True)) if span != (0, size)]
    return not cut or all(size == 1 for size in box_shape(box)[: cut[-1]])


def joined_boxes(graph: Graph, node: Node) -> list[Box]:
    """The part of the result each operand of a concatenation becomes."""
    pieces = node.operator.pieces([graph.types[value] for value in node.inputs])
    assert pieces is not None
    return [piece.box for piece in pieces]


def sliced_box(node: Node) -> Box:
    """The part of its operand a slice is, every step left out of account."""
    box = node.operator.box_read
    assert box is not None
    return box


def moves_nothing(graph: Graph, node: Node) -> bool:
    """True for a slice that can be where it lies in its operand, and for a concatenation whose operands can be computed
    where they lie in its result, on a core alone with every value row-major. A slice of which such a concatenation is
    made is copied there."""
    if node.output in graph.outputs or any(value in graph.constants for value in node.inputs):
        return False
    if node.operator.box_read is not None:
        if node.operator.skips or not lie_apart(graph, node.inputs[0], [sliced_box(node)]):
            return False
        return not any(_is_joint(graph, user) for user in graph.nodes if node.output in user.inputs)
    return _is_joint(graph, node)


def _is_joint(graph: Graph, node: Node) -> bool:
    """True for a concatenation whose operands can be computed, or copied by slices, where they lie in its result."""
    return (
        node.operator.joins
        and node.output not in graph.outputs
        and all(_is_computed_for(graph, value, node) for value in node.inputs)
        and lie_apart(graph, node.output, joined_boxes(graph, node))
    )


def lie_apart(graph: Graph, value: str, parts: Sequence[Box]) -> bool:
    """Every part of a value is a stretch that begins at a place kernels take."""
    kind = graph.types[value]
    size = kind.dtype.numpy.itemsize
    for box in parts:
        start = 0
        for (first, _), length in zip(box, kind.shape, strict=True):
            start = start * length + first
        if kind.dtype.bits < 8 or not is_stretch(box, kind.shape) or start * size % ALIGNMENT:
            return False
    return True


def _is_computed_for(graph: Graph, value: str, node: Node) -> bool:
    """A kernel writes the value, and only this node reads it, once."""
    maker = next((other for other in graph.nodes if other.output == value), None)
    users = [other for other in graph.nodes if value in other.inputs]
    made = maker is not None and not (maker.operator.is_view or maker.operator.joins)
    return made and users == [node] and node.inputs.count(value) == 1 and value not in graph.outputs


def reads_in_place(graph: Graph, value: str) -> bool:
    """True when a region reads an operand, of the result's own shape and width, only at the place of the element it
    computes.

    So it is where everything that is made from the operand is pointwise: what is read at a place is then not needed
    for any element but the one that is written there.
    """
    old, new = graph.types[value], graph.types[graph.outputs[0]]
    if old.shape != new.shape or old.dtype.bits != new.dtype.bits or old.dtype.is_integer != new.dtype.is_integer:
        return False
    reached = {value}
    for node in graph.nodes:
        if not reached.isdisjoint(node.inputs):
            replaces = node.operator.in_place and reached.isdisjoint(node.inputs[1:])
            if not node.operator.pointwise and not replaces:
                return False
            reached.add(node.output)
    return True


_STORED_BITS = 16
"""Bits of the widest activations networks store."""
_SLICED = 2
"""Cost of slicing an element, in multiply-accumulates."""


def trim(graph: Graph) -> Graph:
    """The graph, of the same inputs and outputs to the bit, without what nobody reads.

    A pool that leaves out the last row and column of a convolution, or a slice of its channels, makes the convolution
    smaller. The graph itself where that would not be less work in all.
    """
    wanted = {name: full_box(graph.types[name].shape) for name in graph.outputs}
    made = _cut(graph, wanted, exact=False)
    return made if work(made) < work(graph) else graph


def part(graph: Graph, wanted: Mapping[str, Box], suffix: str = "") -> Graph:
    """The graph that computes a box of each output from slices of the inputs.

    Args:
        graph: the whole.
        wanted: the box of each output.
        suffix: what the names of values get behind them; inputs and whole constants keep theirs.

    Raises:
        ValueError: an operator cannot be computed in such a part.
    """
    cut = _cut(graph, wanted, exact=True)
    kept = {name for name in graph.constants if name in cut.types and cut.types[name] == graph.types[name]}
    return renamed(cut, {name: name + suffix for name in cut.types if name not in kept and name not in cut.inputs})


def work(graph: Graph) -> int:
    """Multiply-accumulates, and elements written, of which those of slices count twice."""
    total = 0
    for node in graph.nodes:
        each = _SLICED if node.operator.box_read is not None else 1
        total += macs(graph, node) + each * graph.types[node.output].elements
    return total


def macs(graph: Graph, node: Node) -> int:
    """Multiply-accumulates of a node, padded taps counted."""
    return node.operator.macs([graph.types[name] for name in node.inputs])


def total_macs(graph: Graph) -> int:
    """Multiply-accumulates of all nodes, padded taps counted."""
    return sum(macs(graph, node) for node in graph.nodes)


def _cut(graph: Graph, wanted: Mapping[str, Box], exact: bool) -> Graph:
    """The graph with every value shrunk to what is read of it; `exact` refuses an operator that must compute more."""
    fixed = {*graph.inputs, *graph.outputs}

    def cheapest(graph: Graph, node: Node, box: Box) -> NodeCrop:
        choices = [_crop(graph, node, box)] if exact else list(_choices(graph, node, box))
        return min(choices, key=lambda choice: _cost(graph, choice, fixed))

    def join(name: str, a: Box, b: Box) -> Box:
        return wanted[name] if name in wanted else hull(name, a, b)

    return _rebuild(graph, wanted, parts(graph, wanted, cheapest, join)[0])


def _crop(graph: Graph, node: Node, box: Box) -> NodeCrop:
    """The node cut to a box of its result, but for a whole result of what cannot be cut; raises ValueError."""
    try:
        found = cut_node(graph, node, box)
    except ValueError:
        if box != full_box(graph.types[node.output].shape):
            raise
        return NodeCrop(node, node.operator, box, tuple(full_box(graph.types[name].shape) for name in node.inputs))
    if any(start >= stop for span in found.reads for start, stop in span):
        raise ValueError(f"a part of '{node.output}' reads nothing of an operand")
    return found


def _choices(graph: Graph, node: Node, box: Box) -> Iterator[NodeCrop]:
    """The node cut along the axes of a box, along some of them, and not at all. A result wider than a stored activation
    is cut along all, if it can be: it is part of a larger kernel, where nothing is sliced in between."""
    whole = full_box(graph.types[node.output].shape)
    if graph.types[node.output].dtype.bits > _STORED_BITS:
        try:
            yield _crop(graph, node, box)
            return
        except ValueError:
            pass
    axes = [axis for axis, span in enumerate(box) if span != whole[axis]]
    for chosen in range(1 << len(axes)):
        kept = [axis for place, axis in enumerate(axes) if chosen >> place & 1]
        try:
            yield _crop(graph, node, tuple(whole[i] if i in kept else span for i, span in enumerate(box)))
        except ValueError:
            continue


def _cost(graph: Graph, choice: NodeCrop, fixed: set[str]) -> int:
    """Work of a node cut in some way, slices of operands that stay whole included."""
    total = choice.macs(graph) + prod(box_shape(choice.box))
    for name, box in zip(choice.node.inputs, choice.reads, strict=True):
        shape = graph.types[name].shape
        if name in fixed and box != full_box(shape) and choice.box != full_box(graph.types[choice.node.output].shape):
            total += 0 if is_stretch(box, shape) else _SLICED * prod(box_shape(box))
    return total


@dataclass
class _CropBuilder:
    """The graph that is made."""

    graph: Graph
    boxes: dict[str, Box]
    """The box of each value that is there."""
    names: dict[str, str] = field(default_factory=dict)
    """Values that have another name now."""
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)

    def fresh(self, stem: str) -> str:
        """A name not used before or after."""
        count = 1
        while f"{stem}_part_{count}" in self.types or f"{stem}_part_{count}" in self.graph.types:
            count += 1
        return f"{stem}_part_{count}"

    def add(self, operator: Operator, inputs: Sequence[str], output: str, origin: str) -> str:
        self.types[output] = operator.infer([self.types[name] for name in inputs])
        self.nodes.append(Node(operator, tuple(inputs), output, origin))
        return output

    def rename(self, old: str, name: str) -> None:
        def renamed(value: str) -> str:
            return name if value == old else value

        self.nodes = [replace(n, inputs=tuple(map(renamed, n.inputs)), output=renamed(n.output)) for n in self.nodes]
        self.types[name] = self.types.pop(old)
        self.names.update({known: name for known, now in self.names.items() if now == old})
        self.names[old] = name

    def taken(self, name: str, box: Box, origin: str) -> str:
        """A value that is a box of another one."""
        if name in self.graph.constants:
            return self._constant(name, box)
        if box == self.boxes[name]:
            return self.names.get(name, name)
        found = _slice_to(_relative(box, self.boxes[name]), (1,) * len(box))
        for node in self.nodes:
            if node.operator == found and node.inputs == (self.names.get(name, name),):
                return node.output
        return self.add(found, [self.names.get(name, name)], self.fresh(name), origin)

    def _constant(self, name: str, box: Box) -> str:
        whole = full_box(self.graph.types[name].shape)
        new = name if box == whole else self.fresh(name)
        self.types[new] = TensorType(box_shape(box), self.graph.types[name].dtype)
        self.constants[new] = frozen(self.graph.constants[name][box_slices(box)])
        return new


def _relative(box: Box, within: Box) -> Box:
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, within, strict=True))


def _slice_to(box: Box, step: Shape) -> Slice:
    return Slice(tuple(start for start, _ in box), tuple(stop for _, stop in box), step)


def _rebuild(graph: Graph, wanted: Mapping[str, Box], cropped: Mapping[str, NodeCrop]) -> Graph:
    new = _CropBuilder(graph, {name: full_box(graph.types[name].shape) for name in graph.inputs})
    new.types.update({name: graph.types[name] for name in graph.inputs})
    for node in graph.nodes:
        choice = cropped.get(node.output)
        if choice is None:
            continue
        new.boxes[node.output] = choice.box
        if node.operator.box_read is not None and node.inputs[0] not in graph.constants:
            _slice(new, node, choice, node.output in wanted)
            continue
        operator, boxes = choice.operator, _as_they_are(new, node, choice)
        if boxes is None:
            boxes = choice.reads
        elif choice.box == full_box(graph.types[node.output].shape):
            operator = node.operator if _all_whole(new, node, boxes) else operator
        operands = [new.taken(name, box, node.origin) for name, box in zip(node.inputs, boxes, strict=True)]
        new.add(operator, operands, node.output, node.origin)
    return prune(replace(graph, nodes=tuple(new.nodes), types=new.types, constants=new.constants))


def _all_whole(new: _CropBuilder, node: Node, boxes: Sequence[Box]) -> bool:
    return all(box == full_box(new.graph.types[name].shape) for name, box in zip(node.inputs, boxes, strict=True))


def _as_they_are(new: _CropBuilder, node: Node, choice: NodeCrop) -> tuple[Box, ...] | None:
    """The boxes of the operands that are there, where the node computes the same from them as from those it needs; of
    the first one perhaps only along all axes but one, so that slices keep whole rows."""
    boxes = tuple(new.boxes.get(name, box) for name, box in zip(node.inputs, choice.reads, strict=True))
    whole = full_box(new.graph.types[node.output].shape)
    if boxes == choice.reads or (choice.box == whole and _all_whole(new, node, boxes)):
        return boxes
    needs = choice.reads[0]
    some = [(*boxes[0][:axis], needs[axis], *boxes[0][axis + 1 :]) for axis in range(len(needs))]
    for first in (boxes[0], *some):
        if _same_from(new, node, choice, (first, *boxes[1:])):
            return (first, *boxes[1:])
    return None


def _same_from(new: _CropBuilder, node: Node, choice: NodeCrop, boxes: tuple[Box, ...]) -> bool:
    """True when the node computes the same from these boxes, which hold what it needs, as from what it needs."""
    kinds = [TensorType(box_shape(b), new.graph.types[n].dtype) for n, b in zip(node.inputs, boxes, strict=True)]
    shape = box_shape(choice.box)
    near = tuple(_relative(need, box) for need, box in zip(choice.reads, boxes, strict=True))
    try:
        again = choice.operator.crop(full_box(shape), kinds)
        return choice.operator.infer(kinds).shape == shape and again == (choice.operator, near)
    except ValueError:
        return False


def _slice(new: _CropBuilder, node: Node, choice: NodeCrop, is_output: bool) -> None:
    """A slice of what is left of its operand; nothing where that is all of it."""
    (source,), operator = node.inputs, node.expect(Slice)
    near = _relative(choice.reads[0], new.boxes[source])
    name, found = new.names.get(source, source), _slice_to(near, operator.step)
    if any(step > 1 for step in operator.step) or near != full_box(new.types[name].shape):
        new.add(found, [name], node.output, node.origin)
    elif not is_output:
        new.names[node.output] = name
    elif source in new.graph.inputs or name in new.graph.outputs:
        new.add(found, [name], node.output, "")
    else:
        new.rename(name, node.output)
