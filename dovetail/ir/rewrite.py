"""Small rewrites run to a fixed point, and those that keep a graph's meaning: movement cancelled, folded or moved.

`simplify` has two rounds. The first sinks transposes and reshapes towards the outputs, through everything that does not
care about the order of elements, until they cancel or are absorbed by weights. The second lifts what is left above
Dequantize, so that movement acts on integers and a float operator stands directly between Dequantize and Quantize.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, prod

import numpy as np

from dovetail.ir.graph import Graph, Node, prune, renamed
from dovetail.ir.operators.activation import Clamp, Softmax, Unary
from dovetail.ir.operators.arithmetic import Add, Clip, Dequantize, Offset, Quantize
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Pick, Reshape, Slice, Transpose
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array, DType, Shape, TensorType, frozen

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
        self.types[name] = TensorType(tuple(array.shape), dtype)
        self.constants[name] = frozen(array)
        return name

    def leave(self, node: Node, why: str) -> str | None:
        """Say in a sentence why a rewrite leaves a node alone that is of its kind; always gives None, which the rewrite
        returns then."""
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
        base = found = name.split(MARK)[0]
        count = counts.get(base, 0)
        while found in taken:
            count += 1
            found = f"{base}_{count}"
        counts[base] = count
        taken.add(found)
        names[name] = found
    return renamed(graph, names)


POINTWISE = (Quantize, Dequantize, Clamp, Unary, Clip, Offset)
"""Operators of one value (and parameters) that treat every element alike, or every element of one axis."""

MAX_FOLDED = 1 << 26
"""Most elements of a constant computed at compile time."""

FOLDED_INTEGERS = 16
"""Most bits for which an integer survives Dequantize and Quantize with the same parameters exactly."""


def simplify(graph: Graph) -> Graph:
    """The same network with less movement.

    Returns:
        A graph with the same inputs, outputs and results: to the bit, except where a bias joins the layer before it
        (one float rounding less).
    """
    return run(run(graph, SINK), LIFT)


def inverse(permutation: Shape) -> Shape:
    """The permutation that undoes another."""
    return tuple(permutation.index(axis) for axis in range(len(permutation)))


def fold_constant(draft: Draft, node: Node) -> str | None:
    """Movement and quantisation of constants is done at compile time."""
    folds = node.operator.moves_only or isinstance(node.operator, Quantize)
    if not folds or any(name not in draft.constants for name in node.inputs):
        return None
    if draft.types[node.output].elements > MAX_FOLDED:
        return None
    array = node.operator.evaluate([draft.constants[name] for name in node.inputs])
    return draft.constant(array, draft.types[node.output].dtype, node.output)


def lift_above_constant(draft: Draft, node: Node) -> str | None:
    """Movement of a dequantised constant moves the constant; its scales follow."""
    if not node.inputs or draft.made_by(node.inputs[0], Dequantize) is None or not draft.is_static(node.inputs[0]):
        return None
    return lift_above_dequantize(draft, node)


def lift_above_dequantize(draft: Draft, node: Node) -> str | None:
    """Transpose or reshape after Dequantize: before it, on the integers."""
    if not isinstance(node.operator, Transpose | Reshape):
        return None
    source = draft.made_by(node.inputs[0], Dequantize)
    if source is None or not isinstance(source.operator, Dequantize):
        return None
    axis = moved_axis(draft, node, source.operator.axis, source.inputs[1], draft.types[source.inputs[0]].shape)
    if axis is None:
        return None
    moved = draft.add(node.operator, [source.inputs[0]], node, source.inputs[0])
    return draft.add(Dequantize(axis), [moved, *source.inputs[1:]], node)


def lift_above_border(draft: Draft, node: Node) -> str | None:
    """A transpose after a pad or a slice: before it; the border follows its axes."""
    border = draft.made_by(node.inputs[0], Pad, Slice, Pick)
    if border is None or not isinstance(node.operator, Transpose) or draft.users(border.output) != 1:
        return None
    moved = draft.add(node.operator, [border.inputs[0]], node, border.inputs[0])
    return draft.add(_follow(border.operator, node.operator.permutation), [moved], border, node.output)


def _follow(border: Operator, order: Shape) -> Operator:
    """The pad or slice of a value whose axis i is axis order[i] of the one `border` is written for."""

    def follow(values: Shape) -> Shape:
        return tuple(values[axis] for axis in order)

    if isinstance(border, Pad):
        return Pad(follow(border.before), follow(border.after), border.value)
    if isinstance(border, Slice):
        return Slice(follow(border.start), follow(border.stop), follow(border.step))
    if isinstance(border, Pick):
        return Pick(tuple(border.places[axis] for axis in order))
    raise TypeError(f"{type(border).__name__} has no border")


def moved_axis(draft: Draft, node: Node, axis: int, scale: str, shape: Shape) -> int | None:
    """The axis a quantisation along `axis` of a value of `shape` runs along after the movement; None if it is torn."""
    if draft.types[scale].shape == (1,):
        return -1
    place = axis % len(shape)
    if isinstance(node.operator, Transpose):
        return node.operator.permutation.index(place)
    before, size = prod(shape[:place]), shape[place]
    result = draft.types[node.output].shape
    matching = [i for i, n in enumerate(result) if n == size and prod(result[:i]) == before]
    return matching[-1] if matching else None


def drop_identity(draft: Draft, node: Node) -> str | None:
    """Movement that leaves everything in place, and a clamp without limits, are removed."""
    source, operator = node.inputs[0], node.operator
    if isinstance(operator, Clamp):
        return source if (operator.low, operator.high) == (-inf, inf) else None
    if isinstance(operator, Concat):
        return source if len(node.inputs) == 1 else None
    if isinstance(operator, Transpose):
        return source if operator.permutation == tuple(range(len(operator.permutation))) else None
    if isinstance(operator, Pick):
        sizes = draft.types[source].shape
        return source if all(p == tuple(range(n)) for p, n in zip(operator.places, sizes, strict=True)) else None
    still = isinstance(operator, Reshape | Pad | Slice) and draft.types[source] == draft.types[node.output]
    return source if still else None


def drop_parting(draft: Draft, node: Node) -> str | None:
    """The parts of a value put together again."""
    if not isinstance(node.operator, Concat) or len(node.inputs) < 2:
        return None
    axis, parts, place = node.operator.axis, [draft.made_by(name, Slice) for name in node.inputs], 0
    whole = parts[0].inputs[0] if parts[0] is not None else ""
    for part in parts:
        if part is None or part.inputs[0] != whole or not isinstance(part.operator, Slice):
            return None
        spans, sizes = list(zip(part.operator.start, part.operator.stop, strict=True)), draft.types[whole].shape
        begin, place = spans[axis][0] - place, spans[axis][1]
        rest = (span == (0, size) for at, (span, size) in enumerate(zip(spans, sizes, strict=True)) if at != axis)
        if begin or set(part.operator.step) != {1} or not all(rest):
            return None
    return whole if draft.types[whole] == draft.types[node.output] else None


def merge_movement(draft: Draft, node: Node) -> str | None:
    """Two transposes, or two reshapes, one behind the other: one."""
    first = draft.made_by(node.inputs[0], type(node.operator))
    if first is None:
        return None
    if isinstance(node.operator, Reshape):
        return draft.add(node.operator, first.inputs, node)
    if isinstance(node.operator, Transpose) and isinstance(first.operator, Transpose):
        order = tuple(first.operator.permutation[axis] for axis in node.operator.permutation)
        return draft.add(Transpose(order), first.inputs, node)
    return None


def transpose_as_reshape(draft: Draft, node: Node) -> str | None:
    """A transpose that only moves axes of size 1 is a reshape."""
    if not isinstance(node.operator, Transpose):
        return None
    shape = draft.types[node.inputs[0]].shape
    real = [axis for axis in node.operator.permutation if shape[axis] != 1]
    if real != sorted(real):
        return None
    return draft.add(Reshape(draft.types[node.output].shape), node.inputs, node)


def sink_through_pointwise(draft: Draft, node: Node) -> str | None:
    """Movement before an operator that treats every element alike: after it."""
    if not isinstance(node.operator, POINTWISE):
        return None
    move = draft.made_by(node.inputs[0], Transpose, Reshape)
    if move is None:
        return None
    operator: Operator = node.operator
    if isinstance(operator, Quantize | Dequantize) and draft.types[node.inputs[1]].shape != (1,):
        if not isinstance(move.operator, Transpose):
            return None
        axis = operator.axis % len(move.operator.permutation)
        operator = replace(operator, axis=move.operator.permutation[axis])
    result = draft.add(operator, [move.inputs[0], *node.inputs[1:]], node)
    return draft.add(move.operator, [result], node)


def sink_through_one(draft: Draft, node: Node) -> str | None:
    """A transpose before a pad or a slice goes after it, the border following its axes; before a softmax, one that
    leaves the last axis in place."""
    move, operator = draft.made_by(node.inputs[0], Transpose), node.operator
    if move is None or not isinstance(move.operator, Transpose):
        return None
    order = move.operator.permutation
    if isinstance(operator, Pad | Slice | Pick):
        operator = _follow(operator, inverse(order))
    elif not isinstance(operator, Softmax) or order[-1] != len(order) - 1:
        return None
    return draft.add(move.operator, [draft.add(operator, move.inputs, node)], node)


def _unmoved(draft: Draft, node: Node) -> tuple[Shape, list[str]] | None:
    """The operands of a node before a transpose all of them share; constants are transposed back."""
    moves = [draft.made_by(value, Transpose) for value in node.inputs]
    orders = {move.operator.permutation for move in moves if move and isinstance(move.operator, Transpose)}
    if len(orders) != 1:
        return None
    (order,) = orders
    operands = []
    for value, move in zip(node.inputs, moves, strict=True):
        if move is not None:
            operands.append(move.inputs[0])
        elif draft.is_static(value) and len(draft.types[value].shape) <= len(order):
            shape = draft.types[value].shape
            whole = draft.add(Reshape((1,) * (len(order) - len(shape)) + shape), [value], node)
            operands.append(draft.add(Transpose(inverse(order)), [whole], node))
        else:
            return None
    return order, operands


def sink_through_add(draft: Draft, node: Node) -> str | None:
    """A transpose (or reshape) of both operands of an addition (or other function of two values), or of one with a
    constant other: of the sum."""
    if not isinstance(node.operator, Add | Binary):
        return None
    found = _unmoved(draft, node)
    if found is not None:
        total = draft.add(node.operator, found[1], node)
        return draft.add(Transpose(found[0]), [total], node)
    moves = [draft.made_by(value, Reshape) for value in node.inputs]
    sources = [move.inputs[0] for move in moves if move is not None]
    shapes = {draft.types[name].shape for name in (*sources, *node.inputs)} if len(sources) == 2 else set()
    same = len({draft.types[name].shape for name in sources}) == 1
    if len(sources) != 2 or not same or len(shapes) > 2 or draft.types[node.inputs[0]] != draft.types[node.inputs[1]]:
        return None
    total = draft.add(node.operator, sources, node)
    return draft.add(Reshape(draft.types[node.output].shape), [total], node)


def sink_through_concat(draft: Draft, node: Node) -> str | None:
    """One transpose of all operands of a concatenation: of the result."""
    if not isinstance(node.operator, Concat):
        return None
    if any(len(draft.types[name].shape) != len(draft.types[node.output].shape) for name in node.inputs):
        return None
    found = _unmoved(draft, node)
    if found is None:
        return None
    joined = draft.add(Concat(found[0][node.operator.axis]), found[1], node)
    return draft.add(Transpose(found[0]), [joined], node)


def fold_into_columns(draft: Draft, node: Node) -> str | None:
    """Transpose and flatten before a fully connected layer: its weight columns are put in the stored order."""
    if not isinstance(node.operator, FullyConnected):
        return None
    flat = draft.made_by(node.inputs[0], Reshape)
    move = draft.made_by(flat.inputs[0], Transpose) if flat else None
    if flat is None or move is None or not isinstance(move.operator, Transpose):
        return None
    shape, rows = draft.types[move.output].shape, draft.types[flat.output].shape
    order = move.operator.permutation
    kept = [axis for axis in range(len(order)) if order[:axis] == tuple(range(axis)) and prod(shape[axis:]) == rows[-1]]
    if not kept or len(rows) < 2:
        return None
    start = kept[-1]
    weights = _columns(draft, node.inputs[1], shape[start:], tuple(axis - start for axis in order[start:]))
    if weights is None:
        return None
    straight = draft.add(flat.operator, move.inputs, flat)
    return draft.add(node.operator, [straight, weights, *node.inputs[2:]], node)


def _columns(draft: Draft, weights: str, shape: Shape, order: Shape) -> str | None:
    """Constant weights [N, K] with the columns, which are a tensor of `shape`, transposed back by `order`."""
    source = draft.made_by(weights, Dequantize)
    stored = source.inputs[0] if source else weights
    if stored not in draft.constants:
        return None
    along_rows = source is None or draft.types[source.inputs[1]].shape == (1,)
    if source and isinstance(source.operator, Dequantize):
        along_rows = along_rows or source.operator.axis % 2 == 0
    if not along_rows:
        return None
    array = draft.constants[stored]
    back = (0, *(1 + axis for axis in inverse(order)))
    permuted = array.reshape(array.shape[0], *shape).transpose(back).reshape(array.shape)
    moved = draft.constant(permuted, draft.types[stored].dtype, stored)
    return draft.add(source.operator, [moved, *source.inputs[1:]], source) if source else moved


def join_bias(draft: Draft, node: Node) -> str | None:
    """A constant per output channel added to a convolution or fully connected layer becomes its bias."""
    if not isinstance(node.operator, Add):
        return None
    for layer_value, bias in (node.inputs, node.inputs[::-1]):
        layer = draft.made_by(layer_value, Conv2d, DepthwiseConv2d, FullyConnected)
        if layer is None or len(layer.inputs) != 2 or draft.users(layer_value) != 1 or not _is_bias(draft, bias):
            continue
        kind, channels = draft.types[bias], draft.types[layer_value].shape[-1]
        if kind.elements == channels == kind.shape[-1] and draft.types[layer_value] == draft.types[node.output]:
            row = draft.add(Reshape((channels,)), [bias], node) if len(kind.shape) != 1 else bias
            return draft.add(layer.operator, [*layer.inputs, row], node)
    return None


def _is_bias(draft: Draft, value: str) -> bool:
    """A float constant, or a dequantised int32 one: a coarser quantisation is left to an addition of its own."""
    source = draft.made_by(value, Dequantize)
    if source is None:
        return value in draft.constants and len(draft.types[value].shape) > 0
    return source.inputs[0] in draft.constants and draft.types[source.inputs[0]].dtype is DType.INT32


def drop_requantize(draft: Draft, node: Node) -> str | None:
    """Quantize after Dequantize with the same parameters gives the integers back."""
    if not isinstance(node.operator, Quantize):
        return None
    source = draft.made_by(node.inputs[0], Dequantize)
    if source is None or not _same_parameters(draft, node, source):
        return None
    return source.inputs[0] if draft.types[source.inputs[0]].dtype is node.operator.dtype else None


def _same_parameters(draft: Draft, a: Node, b: Node) -> bool:
    """Both quantise per tensor with equal constants, and the integers are narrow enough to survive exactly."""
    pairs = list(zip(a.inputs[1:], b.inputs[1:], strict=True))
    if any(name not in draft.constants or draft.types[name].shape != (1,) for pair in pairs for name in pair):
        return False
    narrow = draft.types[b.inputs[0]].dtype.bits <= FOLDED_INTEGERS
    return narrow and all(np.array_equal(draft.constants[x], draft.constants[y]) for x, y in pairs)


def integer_selection(draft: Draft, node: Node) -> str | None:
    """Dequantize, a maximum pool or concatenation, Quantize, all with the same parameters: of the integers."""
    if not isinstance(node.operator, Quantize):
        return None
    middle = draft.made_by(node.inputs[0], MaxPool2d, Concat)
    if middle is None:
        return None
    sources = [draft.made_by(value, Dequantize) for value in middle.inputs]
    found = [source for source in sources if source is not None and _same_parameters(draft, node, source)]
    if len(found) != len(sources) or any(draft.types[s.inputs[0]].dtype is not node.operator.dtype for s in found):
        return None
    return draft.add(middle.operator, [source.inputs[0] for source in found], node)


CLEAN: tuple[Rewrite, ...] = (
    fold_constant,
    drop_identity,
    drop_parting,
    merge_movement,
    transpose_as_reshape,
    lift_above_constant,
)
"""Rewrites of both rounds."""

SINK: tuple[Rewrite, ...] = (
    *CLEAN,
    drop_requantize,
    sink_through_pointwise,
    sink_through_one,
    sink_through_add,
    sink_through_concat,
    fold_into_columns,
    join_bias,
)
"""The first round: movement goes down."""

LIFT: tuple[Rewrite, ...] = (*CLEAN, drop_requantize, lift_above_dequantize, lift_above_border, integer_selection)
"""The second round: what is left of it goes up to the integers."""
