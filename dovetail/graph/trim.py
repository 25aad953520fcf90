"""Computes of every value only what is read: exact, by each operator's own cropping rule.

A value that several operators read in different parts is computed over the smallest box that holds them all. Where
an operator then finds more than it reads and would notice, it reads a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from dovetail.graph.graph import Graph, Node, prune
from dovetail.graph.stretch import is_stretch
from dovetail.graph.types import Array, Box, TensorType, box_shape, box_slices, full_box
from dovetail.operators.base import Operator
from dovetail.operators.movement import Slice

_STORED_BITS = 16
"""Bits of the widest activations networks store."""
_SLICED = 2
"""What slicing an element costs, in multiply-accumulates."""


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
    names = {name: name if name in kept or name in cut.inputs else name + suffix for name in cut.types}
    nodes = (replace(n, inputs=tuple(names[v] for v in n.inputs), output=names[n.output]) for n in cut.nodes)
    return replace(
        cut,
        outputs=tuple(names[name] for name in cut.outputs),
        nodes=tuple(nodes),
        types={names[name]: kind for name, kind in cut.types.items()},
        constants={names[name]: array for name, array in cut.constants.items()},
    )


def work(graph: Graph) -> int:
    """Multiply-accumulates, and elements written, of which those of slices count twice."""
    total = 0
    for node in graph.nodes:
        each = _SLICED if isinstance(node.operator, Slice) else 1
        total += macs(graph, node) + each * graph.types[node.output].elements
    return total


def macs(graph: Graph, node: Node) -> int:
    """Multiply-accumulates of a node, padded taps counted."""
    return node.operator.macs([graph.types[name] for name in node.inputs])


def total_macs(graph: Graph) -> int:
    """Multiply-accumulates of all nodes, padded taps counted."""
    return sum(macs(graph, node) for node in graph.nodes)


@dataclass(frozen=True)
class _Cropped:
    """A node cut to a box of its result."""

    operator: Operator
    box: Box
    reads: tuple[Box, ...]
    """What it needs of each operand."""


def _cut(graph: Graph, wanted: Mapping[str, Box], exact: bool) -> Graph:
    """The graph with every value shrunk to what is read of it; `exact` refuses an operator that must compute more."""
    boxes: dict[str, Box] = dict(wanted)
    cropped: dict[str, _Cropped] = {}
    fixed = {*graph.inputs, *graph.outputs}
    for node in reversed(graph.nodes):
        if node.output not in boxes:
            continue
        choices = [_crop(graph, node, boxes[node.output])] if exact else list(_choices(graph, node, boxes[node.output]))
        best = min(choices, key=lambda choice: _cost(graph, node, choice, fixed))
        cropped[node.output], boxes[node.output] = best, best.box
        for name, box in zip(node.inputs, best.reads, strict=True):
            if name not in wanted:
                boxes[name] = _hull(boxes.get(name, box), box)
    return _rebuild(graph, wanted, cropped)


def _crop(graph: Graph, node: Node, box: Box) -> _Cropped:
    """The node cut to a box of its result, but for a whole result of what cannot be cut; raises ValueError."""
    kinds = [graph.types[name] for name in node.inputs]
    try:
        operator, reads = node.operator.crop(box, kinds)
    except ValueError:
        if box != full_box(graph.types[node.output].shape):
            raise
        return _Cropped(node.operator, box, tuple(full_box(kind.shape) for kind in kinds))
    if any(start >= stop for span in reads for start, stop in span):
        raise ValueError(f"a part of '{node.output}' reads nothing of an operand")
    return _Cropped(operator, box, reads)


def _choices(graph: Graph, node: Node, box: Box) -> Iterator[_Cropped]:
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


def _cost(graph: Graph, node: Node, choice: _Cropped, fixed: set[str]) -> int:
    """Work of a node cut in some way, slices of operands that stay whole included."""
    reads = list(zip(node.inputs, choice.reads, strict=True))
    total = choice.operator.macs([TensorType(box_shape(box), graph.types[name].dtype) for name, box in reads])
    total += prod(box_shape(choice.box))
    for name, box in reads:
        shape = graph.types[name].shape
        if name in fixed and box != full_box(shape) and choice.box != full_box(graph.types[node.output].shape):
            total += 0 if is_stretch(box, shape) else _SLICED * prod(box_shape(box))
    return total


def _hull(a: Box, b: Box) -> Box:
    return tuple((min(x[0], y[0]), max(x[1], y[1])) for x, y in zip(a, b, strict=True))


@dataclass
class _New:
    """The graph that is made."""

    graph: Graph
    boxes: dict[str, Box]
    """What there is of each value."""
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
        """Add a node; returns its result."""
        self.types[output] = operator.infer([self.types[name] for name in inputs])
        self.nodes.append(Node(operator, tuple(inputs), output, origin))
        return output

    def rename(self, old: str, name: str) -> None:
        """Give a computed value another name."""

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
        near = _relative(box, self.boxes[name])
        found = Slice(tuple(a for a, _ in near), tuple(b for _, b in near), (1,) * len(near))
        for node in self.nodes:
            if node.operator == found and node.inputs == (self.names.get(name, name),):
                return node.output
        return self.add(found, [self.names.get(name, name)], self.fresh(name), origin)

    def _constant(self, name: str, box: Box) -> str:
        whole = full_box(self.graph.types[name].shape)
        new = name if box == whole else self.fresh(name)
        array = np.ascontiguousarray(self.graph.constants[name][box_slices(box)]).reshape(box_shape(box))
        array.setflags(write=False)
        self.types[new] = TensorType(box_shape(box), self.graph.types[name].dtype)
        self.constants[new] = array
        return new


def _relative(box: Box, within: Box) -> Box:
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, within, strict=True))


def _rebuild(graph: Graph, wanted: Mapping[str, Box], cropped: Mapping[str, _Cropped]) -> Graph:
    new = _New(graph, {name: full_box(graph.types[name].shape) for name in graph.inputs})
    new.types.update({name: graph.types[name] for name in graph.inputs})
    for node in graph.nodes:
        choice = cropped.get(node.output)
        if choice is None:
            continue
        new.boxes[node.output] = choice.box
        if isinstance(node.operator, Slice) and node.inputs[0] not in graph.constants:
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


def _all_whole(new: _New, node: Node, boxes: Sequence[Box]) -> bool:
    return all(box == full_box(new.graph.types[name].shape) for name, box in zip(node.inputs, boxes, strict=True))


def _as_they_are(new: _New, node: Node, choice: _Cropped) -> tuple[Box, ...] | None:
    """What there is of the operands, where the node computes the same from it as from what it needs; of the first one
    perhaps only along all axes but one, so that slices keep whole rows."""
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


def _same_from(new: _New, node: Node, choice: _Cropped, boxes: tuple[Box, ...]) -> bool:
    """True when the node computes the same from these boxes, which hold what it needs, as from what it needs."""
    kinds = [TensorType(box_shape(b), new.graph.types[n].dtype) for n, b in zip(node.inputs, boxes, strict=True)]
    shape = box_shape(choice.box)
    near = tuple(_relative(need, box) for need, box in zip(choice.reads, boxes, strict=True))
    try:
        again = choice.operator.crop(full_box(shape), kinds)
        return choice.operator.infer(kinds).shape == shape and again == (choice.operator, near)
    except ValueError:
        return False


def _slice(new: _New, node: Node, choice: _Cropped, is_output: bool) -> None:
    """A slice of what is left of its operand; nothing where that is all of it."""
    (source,), operator = node.inputs, node.operator
    assert isinstance(operator, Slice)
    near = _relative(choice.reads[0], new.boxes[source])
    name = new.names.get(source, source)
    if any(step > 1 for step in operator.step) or near != full_box(new.types[name].shape):
        found = Slice(tuple(a for a, _ in near), tuple(b for _, b in near), operator.step)
        new.add(found, [name], node.output, node.origin)
    elif not is_output:
        new.names[node.output] = name
    elif source in new.graph.inputs or name in new.graph.outputs:
        new.add(Slice(tuple(a for a, _ in near), tuple(b for _, b in near), operator.step), [name], node.output, "")
    else:
        new.rename(name, node.output)
