"""The readers' one vocabulary: the values of a graph being built, and words that compute new ones from them.

A reader makes a class of its own of `Values`, which knows the operator being read; its entry for an operator is then a
line or a few of these words. What is composed of several operators (Mish, softmax over any axes, an einsum) stands here
once. Every word adds nodes and returns the name of the value they compute. `suffix` is appended to the name of the last
node, which without one is called as the operator being read; nodes on the way have suffixes of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from math import inf, prod
from typing import Self

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.activation import Clamp, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.base import Operator, Padding2d
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind
from dovetail.ir.operators.linear import FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Concat, Pad, Pick, Reshape, Slice, Transpose
from dovetail.ir.operators.recurrent import RecurrentKind
from dovetail.ir.operators.reduction import Normalise, Reduce, ReduceKind
from dovetail.ir.types import Array, DType, Shape, TensorType

MAX_ELEMENTS = 2**31
"""A tensor must have fewer elements than this."""

MAX_PLACES = 1 << 16
"""Most places of one axis that elements are picked from."""

GATE_ORDER = {RecurrentKind.LSTM: (0, 3, 1, 2), RecurrentKind.GRU: (0, 1, 2), RecurrentKind.RNN: (0,)}
"""Places of the gates of `Recurrent` (ONNX's order) in Keras's and TFLite's order. That is input, forget, candidate,
output of an LSTM, and update, reset, candidate of a GRU."""


class Values(ABC):
    """The graph being built, as one operator of the model sees it."""

    builder: GraphBuilder

    @property
    @abstractmethod
    def stem(self) -> str:
        """How the nodes of the operator being read are called."""

    @property
    @abstractmethod
    def origin(self) -> str:
        """The operator being read, as `Node.origin` names it."""

    @abstractmethod
    def refuse(self, what: str) -> ModelError:
        """The error for something about the operator being read that cannot be honoured."""

    def again(self, **changed: object) -> Self:
        """The same import with some of its attributes (mostly the operator being read) changed."""
        other = copy(self)
        vars(other).update(changed)
        return other

    # The graph

    def named(self, suffix: str) -> str:
        """The name of the operator being read with a suffix, if any."""
        return f"{self.stem}_{suffix}" if suffix else self.stem

    def add(self, operator: Operator, operands: Sequence[str], suffix: str = "", name: str = "") -> str:
        """Add a node, called after the operator being read or by a `name` of its own.

        Raises:
            ValueError: the operator does not accept operands of these types.
        """
        return self.builder.add(operator, operands, name or self.named(suffix), self.origin)

    def constant(self, array: Array, suffix: str) -> str:
        """A constant."""
        return self.builder.constant(self.named(suffix), array)

    def number(self, value: float, suffix: str = "constant") -> str:
        """A float constant of one element."""
        return self.constant(np.array(value, np.float32), suffix)

    def known(self, x: str) -> Array | None:
        """The elements of a constant, None for a value computed at run time."""
        return self.builder.constant_of(x)

    def fixed(self, x: str) -> bool:
        """True for a value that follows from constants alone."""
        return self.known(x) is not None

    def type_of(self, x: str) -> TensorType:
        """Type of a value."""
        return self.builder.type_of(x)

    def shape(self, x: str) -> Shape:
        """Shape of a value."""
        return self.builder.type_of(x).shape

    # Arithmetic with broadcasting

    def binary(self, kind: BinaryKind, a: str, b: str, suffix: str = "") -> str:
        """A function of two values; the addition that the quantize stage knows where it may be one."""
        plain = kind is BinaryKind.ADD and self.type_of(a).dtype in (DType.FLOAT32, DType.INT32)
        return self.add(Add() if plain else Binary(kind), [a, b], suffix)

    def plus(self, a: str, b: str, suffix: str = "") -> str:
        """a + b"""
        return self.binary(BinaryKind.ADD, a, b, suffix)

    def minus(self, a: str, b: str, suffix: str = "") -> str:
        """a - b"""
        return self.binary(BinaryKind.SUBTRACT, a, b, suffix)

    def times(self, a: str, b: str, suffix: str = "") -> str:
        """a * b"""
        return self.binary(BinaryKind.MULTIPLY, a, b, suffix)

    def over(self, a: str, b: str, suffix: str = "") -> str:
        """a / b"""
        return self.binary(BinaryKind.DIVIDE, a, b, suffix)

    def scaled(self, x: str, factor: float, suffix: str = "scaled", number: str = "factor") -> str:
        """x * factor; x itself where that is 1."""
        return x if factor == 1.0 else self.times(x, self.number(factor, number), suffix)

    def folded(self, kind: BinaryKind, values: Sequence[str], mean: bool, suffix: str) -> str:
        """A function of several values, taken from the left; `mean` divides by their number."""
        first, *others = values
        for other in others:
            first = self.binary(kind, first, other, suffix)
        return self.times(first, self.number(1.0 / len(values), "share"), "mean") if mean else first

    def equal(self, a: str, b: str, suffix: str = "") -> str:
        """a == b, bool"""
        return self.add(Compare(CompareKind.EQUAL), [a, b], suffix)

    def negation(self, x: str, suffix: str = "") -> str:
        """not x"""
        return self.equal(x, self.constant(np.zeros((), np.bool_), "false"), suffix)

    # Functions of one float

    def unary(self, kind: UnaryKind, x: str, suffix: str = "", alpha: float = 0.0) -> str:
        """A function of each element."""
        return self.add(Unary(kind, alpha), [x], suffix)

    def clamp(self, x: str, low: float, high: float, suffix: str = "") -> str:
        """x limited to [low, high]."""
        return self.add(Clamp(low, high), [x], suffix)

    def square(self, x: str, suffix: str = "") -> str:
        """x * x, one operator for every reader."""
        return self.unary(UnaryKind.SQUARE, x, suffix)

    def relu(self, x: str, slope: float = 0.0, high: float = inf, threshold: float = 0.0, suffix: str = "") -> str:
        """keras.activations.relu in its general form: 0, or a slope, below a threshold, and limited above."""
        if threshold == 0.0 and slope == 0.0:
            return self.clamp(x, 0.0, max(high, 0.0), suffix or "limited")
        if threshold != 0.0 and (slope != 0.0 or threshold < 0.0):
            raise self.refuse(f"a threshold of {threshold} with a slope of {slope} is not supported")
        kind, alpha = (UnaryKind.THRESHOLDED_RELU, threshold) if threshold else (UnaryKind.LEAKY_RELU, slope)
        bent = self.unary(kind, x, "kept" if threshold else "bent", alpha)
        return bent if high == inf else self.clamp(bent, -inf, high, suffix or "limited")

    def gelu(self, x: str, by_tanh: bool, suffix: str = "") -> str:
        """Gelu, exact or by tanh."""
        return self.unary(UnaryKind.GELU_TANH if by_tanh else UnaryKind.GELU, x, suffix)

    def selu(self, x: str, alpha: float, gamma: float, suffix: str = "") -> str:
        """gamma * Elu(x)"""
        return self.scaled(self.unary(UnaryKind.ELU, x, "elu", alpha), gamma, suffix)

    def hard_sigmoid(self, x: str, slope: float, offset: float, suffix: str = "") -> str:
        """slope * x + offset, limited to 0 and 1; one operator with the slope 1/6 and the offset 1/2."""
        if np.isclose(slope, 1 / 6, rtol=1e-6) and offset == 0.5:
            return self.unary(UnaryKind.HARD_SIGMOID, x, suffix)
        raised = self.plus(self.times(x, self.number(slope, "slope"), "sloped"), self.number(offset, "half"), "raised")
        return self.clamp(raised, 0.0, 1.0, suffix)

    def swish(self, x: str, alpha: float = 1.0, suffix: str = "") -> str:
        """x * Sigmoid(alpha * x)"""
        return self.times(x, self.unary(UnaryKind.SIGMOID, self.scaled(x, alpha), "gate"), suffix)

    def mish(self, x: str, suffix: str = "") -> str:
        """x * Tanh(Softplus(x))"""
        return self.times(x, self.unary(UnaryKind.TANH, self.unary(UnaryKind.SOFTPLUS, x, "soft"), "gate"), suffix)

    # Movement

    def chain(
        self, x: str, operators: Sequence[Operator], suffix: str | None = "", inner: Sequence[str] = ("moved",)
    ) -> str:
        """Operators of one operand, one behind the other; those that would change nothing are left out.

        The last node has `suffix`, or is called as on the way where that is None; the nodes on the way have those of
        `inner`, by the places of their operators, and the last one of these for all further.
        """
        needed, kind = [], self.type_of(x)
        for place, operator in enumerate(operators):
            after = operator.infer([kind])
            still = isinstance(operator, Transpose) and operator.permutation == tuple(range(len(kind.shape)))
            if not still and not (isinstance(operator, Reshape) and after == kind):
                needed.append((operator, inner[min(place, len(inner) - 1)]))
            kind = after
        for place, (operator, on_the_way) in enumerate(needed):
            x = self.add(operator, [x], on_the_way if suffix is None or place < len(needed) - 1 else suffix)
        return x

    def reshape(self, x: str, shape: Sequence[int], suffix: str = "") -> str:
        """x under another shape; itself where it has that shape."""
        return x if self.shape(x) == tuple(shape) else self.add(Reshape(tuple(shape)), [x], suffix)

    def transpose(self, x: str, order: Sequence[int], suffix: str = "") -> str:
        """x with its axes in another order; itself where they are in it."""
        order = tuple(order)
        return x if order == tuple(range(len(order))) else self.add(Transpose(order), [x], suffix)

    def channels_last(self, x: str, suffix: str = "last") -> str:
        """NCHW as NHWC, with any number of image axes."""
        return self.transpose(x, (0, *range(2, len(self.shape(x))), 1), suffix)

    def channels_first(self, x: str, suffix: str = "first") -> str:
        """NHWC as NCHW, with any number of image axes."""
        rank = len(self.shape(x))
        return self.transpose(x, (0, rank - 1, *range(1, rank - 1)), suffix)

    def concat(self, values: Sequence[str], axis: int, suffix: str = "") -> str:
        """Values one behind the other; one alone is itself."""
        return self.add(Concat(axis), values, suffix) if len(values) > 1 else values[0]

    def part(self, x: str, axis: int, start: int, stop: int, suffix: str = "", name: str = "") -> str:
        """The elements from `start` to `stop` of one axis."""
        shape = self.shape(x)
        begin, end = [0] * len(shape), list(shape)
        begin[axis], end[axis] = start, stop
        return self.add(Slice(tuple(begin), tuple(end), (1,) * len(shape)), [x], suffix, name)

    def pick(self, x: str, places: Sequence[Sequence[int]], suffix: str = "") -> str:
        """Elements by their places along each axis."""
        return self.add(Pick(tuple(tuple(int(place) for place in chosen) for chosen in places)), [x], suffix)

    def bordered(self, image: str, border: Padding2d, filler: float = 0.0, suffix: str = "padded") -> str:
        """An NHWC image with elements `filler` around it, cut where a border is negative."""
        shape = self.shape(image)
        cut = [(max(-lead, 0), max(-trail, 0)) for lead, trail in border]
        if any(any(sides) for sides in cut):
            start = (0, cut[0][0], cut[1][0], 0)
            stop = (shape[0], shape[1] - cut[0][1], shape[2] - cut[1][1], shape[3])
            image = self.add(Slice(start, stop, (1,) * 4), [image], "cut")
        (top, bottom), (left, right) = ((max(lead, 0), max(trail, 0)) for lead, trail in border)
        if not any((top, bottom, left, right)):
            return image
        return self.add(Pad((0, top, left, 0), (0, bottom, right, 0), filler), [image], suffix)

    def stretched(self, image: str, stride: tuple[int, int]) -> str:
        """Rows and columns (axes 1 and 2 of 4) with stride - 1 zeros between neighbours."""
        if stride == (1, 1):
            return image
        count, height, width, depth = self.shape(image)
        zeros = Pad((0,) * 6, (0, 0, stride[0] - 1, 0, stride[1] - 1, 0), 0.0)
        stop = (count, (height - 1) * stride[0] + 1, (width - 1) * stride[1] + 1, depth)
        apart, wide = (count, height, 1, width, 1, depth), (count, height * stride[0], width * stride[1], depth)
        cut = Slice((0,) * 4, stop, (1,) * 4)
        return self.chain(image, (Reshape(apart), zeros, Reshape(wide), cut), "stretched", ("apart", "zeros", "wide"))

    # Sums and what is made of them

    def reduce(self, kind: ReduceKind, x: str, axes: tuple[int, ...], keep: bool, suffix: str = "shaped") -> str:
        """A reduction over some axes, which stay with size 1 where `keep` says so."""
        return self.reshape(self.add(Reduce(kind, axes), [x], "reduced"), kept_shape(self.shape(x), axes, keep), suffix)

    def along(
        self, x: str, axes: Sequence[int], operator: Operator, suffix: str | None = "", flat: bool = False
    ) -> str:
        """An operator over the last axis, applied to some axes together; `flat` makes one axis of all others."""
        shape = self.shape(x)
        order = (*(place for place in range(len(shape)) if place not in axes), *axes)
        moved, count = tuple(shape[place] for place in order), prod(shape[place] for place in axes)
        outer = moved[: len(shape) - len(axes)]
        rows = (*((prod(outer),) if flat else outer), count)
        back = Transpose(tuple(order.index(place) for place in range(len(shape))))
        steps = (Transpose(order), Reshape(rows), operator, Reshape(moved), back)
        return self.chain(x, steps, suffix, ("last", "rows", "normalised", "whole", "restored"))

    def softmax(self, x: str, axes: Sequence[int], suffix: str = "", logarithm: bool = False) -> str:
        """Softmax over some axes together, or its logarithm."""
        return self.along(x, axes, LogSoftmax() if logarithm else Softmax(), suffix)

    def normalise(self, x: str, axes: Sequence[int], operator: Normalise) -> str:
        """x with mean 0 and deviation 1 (as the operator says) over some axes together."""
        return self.along(x, axes, operator, None, flat=True)

    def matrix_turned(self, x: str, suffix: str = "turned") -> str:
        """x with its last two axes exchanged."""
        rank = len(self.shape(x))
        return self.transpose(x, (*range(rank - 2), rank - 1, rank - 2), suffix)

    def einsum(self, equation: str, operands: Sequence[str], suffix: str = "ordered") -> str:
        """numpy.einsum of floats: two operands after the other, a dense layer where one is constant, else a product of
        matrices, between transposes.

        Raises:
            ValueError: the equation does not fit the operands.
        """
        terms, wanted = _einsum_terms(equation, [len(self.shape(x)) for x in operands])
        pairs = [self._without_repeats(x, term) for x, term in zip(operands, terms, strict=True)]
        x, labels = pairs[0]
        for place, (other, term) in enumerate(pairs[1:], 2):
            x, labels = self._contracted((x, labels), (other, term), {*wanted, *"".join(terms[place:])})
        x, labels = self._summed(x, labels, set(wanted))
        return self.transpose(x, [labels.index(label) for label in wanted], suffix)

    def _without_repeats(self, x: str, labels: str) -> tuple[str, str]:
        """An operand of an einsum with the diagonal of axes that have the same label."""
        for label in sorted(set(labels)):
            while labels.count(label) > 1:
                one, two = labels.index(label), labels.rindex(label)
                rest = [axis for axis in range(len(labels)) if axis not in (one, two)]
                shape = self.shape(x)
                kept, size = [shape[axis] for axis in rest], shape[one]
                rows = self.reshape(self.transpose(x, [*rest, one, two], "moved"), [*kept, size * shape[two]], "rows")
                x = self.pick(rows, [*map(range, kept), range(0, size * shape[two], size + 1)], "diagonal")
                labels = "".join(labels[axis] for axis in rest) + label
        return x, labels

    def _summed(self, x: str, labels: str, wanted: set[str]) -> tuple[str, str]:
        """An operand of an einsum, summed over what nothing else wants."""
        axes = tuple(axis for axis, label in enumerate(labels) if label not in wanted)
        x = self.reduce(ReduceKind.SUM, x, axes, keep=False) if axes else x
        return x, "".join(label for label in labels if label in wanted)

    def _contracted(self, left: tuple[str, str], right: tuple[str, str], later: set[str]) -> tuple[str, str]:
        """The einsum of two operands, given with their labels, whose result keeps the labels in `later`."""
        x, one = self._summed(*left, {*later, *right[1]})
        y, two = self._summed(*right, {*later, *left[1]})
        sizes = dict(zip(one, self.shape(x), strict=True))
        for label, size in zip(two, self.shape(y), strict=True):
            if size not in (1, sizes.get(label, size)) and sizes[label] != 1:
                raise ValueError(f"the label {label} of the equation stands for {sizes[label]} and {size} elements")
            sizes[label] = max(size, sizes.get(label, size))
        x, one = self._without_ones(x, one, two, sizes)
        y, two = self._without_ones(y, two, one, sizes)
        if self.fixed(x) and not self.fixed(y):
            x, one, y, two = y, two, x, one
        summed = [label for label in one if label in two and label not in later]
        batch = [label for label in one if label in two and label in later]
        kept, made = [label for label in one if label not in two], [label for label in two if label not in one]

        def laid(value: str, labels: str, order: list[str], shape: Sequence[int], suffix: str) -> str:
            """A value with its axes in an order, under a shape."""
            moved = self.transpose(value, [labels.index(label) for label in order], "moved")
            return self.reshape(moved, shape, suffix)

        def of(labels: list[str]) -> list[int]:
            return [sizes[label] for label in labels]

        order = [*batch, *kept, *made]
        depth, count = prod(of(summed)), prod(of(made))
        if not summed:
            rows = laid(x, one, [*batch, *kept], [*of(batch), *of(kept), *(1 for _ in made)], "rows")
            columns = laid(y, two, [*batch, *made], [*of(batch), *(1 for _ in kept), *of(made)], "columns")
            return self.times(rows, columns, "product"), "".join(order)
        if self.fixed(y) and not batch:
            rows = laid(x, one, [*kept, *summed], [*(of(kept) or [1]), depth], "rows")
            array, turned = self.known(y), [two.index(label) for label in (*made, *summed)]
            if array is not None:
                matrix = self.constant(array.transpose(turned).reshape(count, depth), "matrix")
            else:
                matrix = laid(y, two, [*made, *summed], (count, depth), "matrix")
            result = self.add(FullyConnected(), [rows, matrix], "product")
        else:
            rows = laid(x, one, [*batch, *kept, *summed], [*of(batch), prod(of(kept)), depth], "rows")
            columns = laid(y, two, [*batch, *summed, *made], [*of(batch), depth, count], "columns")
            result = self.add(MatrixProduct(), [rows, columns], "product")
        return self.reshape(result, of(order), "whole"), "".join(order)

    def _without_ones(self, x: str, labels: str, others: str, sizes: Mapping[str, int]) -> tuple[str, str]:
        """An operand of an einsum without the axes of size 1 that broadcast to the other operand's."""
        spread = {a for a, size in zip(labels, self.shape(x), strict=True) if a in others and size < sizes[a]}
        shape = [size for a, size in zip(labels, self.shape(x), strict=True) if a not in spread]
        return self.reshape(x, shape, "spread"), "".join(a for a in labels if a not in spread)


def _einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each operand's axes and of the result's; those of an ellipsis are digits.

    Raises:
        ValueError: the equation does not fit operands of these ranks.
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    pairs = zip(terms, ranks, strict=False)
    free = [rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in pairs]
    most = max(free, default=0)
    digits = "0123456789"[: max(most, 0)]
    terms = [term.replace("...", digits[most - extra :]) for term, extra in zip(terms, free, strict=False)]
    if not arrow:
        every = "".join(terms)
        result = "..." * bool(digits) + "".join(a for a in sorted(set(every)) if a.isalpha() and every.count(a) == 1)
    result = result.replace("...", digits)
    fits = [len(term) for term in terms] == list(ranks) and min(free, default=0) >= 0 and most <= len("0123456789")
    if not fits or not all((term + result).isalnum() for term in terms if term + result):
        raise ValueError(f"the equation {equation[:80]!r} does not fit operands of {', '.join(map(str, ranks))} axes")
    if len(set(result)) != len(result) or not set(result) <= set("".join(terms)):
        raise ValueError(f"the result of the equation {equation[:80]!r} repeats a label, or has one no operand has")
    return terms, result


def kept_shape(shape: Shape, axes: Sequence[int], keep: bool) -> Shape:
    """The shape after a reduction over `axes`, which stay with size 1 where `keep` says so."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes)


def unary(kind: UnaryKind, suffix: str = "") -> Callable[[Values, str], str]:
    """The word for a function of each element, as a table of functions holds it."""
    return lambda v, x: v.unary(kind, x, suffix)
