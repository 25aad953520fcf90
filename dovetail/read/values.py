"""The readers' one vocabulary: the values of a graph being built, and words that compute new ones from them.

A reader makes a class of its own of `Values`, which knows the operator being read; its entry for an operator is then a
line or a few of these words. What is composed of several operators (Mish, softmax over any axes, an einsum) stands here
once. Every word adds nodes and returns the name of the value they compute. `suffix` is appended to the name of the last
node, which without one is called as the operator being read; nodes on the way have suffixes of their own.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partialmethod
from math import inf, prod
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.activation import Clamp, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add, Dequantize
from dovetail.ir.operators.base import Operator, Padding2d
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind, Convert
from dovetail.ir.operators.linear import FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Concat, Pad, Pick, Resample, Reshape, Slice, Transpose
from dovetail.ir.operators.recurrent import RecurrentKind
from dovetail.ir.operators.reduction import Normalise, Reduce, ReduceKind
from dovetail.ir.types import Array, DType, Shape, TensorType
from dovetail.records import Record

MAX_ELEMENTS = 2**31
"""A tensor must have fewer elements than this."""

MAX_PLACES = 1 << 16
"""Most places of one axis that elements are picked from."""

MOST_TURNS = 512
"""Most turns of a loop."""
MOST_STEPS = 20_000
"""Most operators of a model with loops, those of loops counted in every turn."""
MOST_DEEP = 8
"""Deepest nesting of loops and conditions."""
UNKNOWN_TURNS = "let the number of turns be known when the network is converted, or unroll the loop there"

GATE_ORDER = {RecurrentKind.LSTM: (0, 3, 1, 2), RecurrentKind.GRU: (0, 1, 2), RecurrentKind.RNN: (0,)}
"""Places of the gates of `Recurrent` (ONNX's order) in Keras's and TFLite's order. That is input, forget, candidate,
output of an LSTM, and update, reset, candidate of a GRU."""


def words(text: str) -> tuple[str, ...]:
    """The words of a text: names, as tables list them."""
    return tuple(text.split())


class Advice(enum.StrEnum):
    """Kinds of advice about a refusal; each reader has a sentence for each, in `Values.advice`."""

    OTHERWISE = "say it otherwise"
    AGAIN = "write the file again"
    FOLD = "make it a constant"
    ALIKE = "quantise alike"
    SMALLER = "make the network smaller"


OTHERWISE, AGAIN, FOLD, ALIKE, SMALLER = Advice


class Value(Record):
    """A value of the graph being built."""

    name: str
    type: TensorType

    def __str__(self) -> str:
        return self.name

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return self.type.dtype

    @property
    def shape(self) -> Shape:
        """Sizes of its axes."""
        return self.type.shape

    @property
    def rank(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.type.elements


T = TypeVar("T")


STAND_IN = "in place of "
"""How names of inputs begin that stand for results of refused operators."""


class Consequence(ModelError):
    """An operand is missing because the operator before is refused."""


class Refusing(ABC):
    """Something that a model file says, and the errors about it."""

    advice: ClassVar[Mapping[str, str]] = {}
    """The sentence for each `Advice` about files of this format."""

    @property
    @abstractmethod
    def where(self) -> str:
        """File and operator, as messages name them."""

    def refuse(self, what: str, hint: str = OTHERWISE) -> ModelError:
        """The error for something that cannot be honoured; `hint` is an `Advice`, or a sentence."""
        return ModelError(what, where=self.where, hint=self.advice.get(hint, hint))

    def refuse_if(self, fault: object, what: str, hint: str = OTHERWISE) -> None:
        """Raise that error where there is a fault."""
        if fault:
            raise self.refuse(what, hint)

    def wrong_if(self, fault: object, what: str) -> None:
        """Raise the error for a file that contradicts itself, where there is a fault."""
        self.refuse_if(fault, what, AGAIN)

    def check_steps(self, count: int) -> None:
        """Refuse more operators than loops may make."""
        what = f"makes more than {MOST_STEPS} operators of the loops"
        self.refuse_if(count > MOST_STEPS, what, UNKNOWN_TURNS)

    def entry(self, name: object, table: Mapping[str, T], what: str) -> T:
        """A table's entry; raises the error `what` it is, and what is supported, where there is none."""
        if not isinstance(name, str) or name not in table:
            raise self.refuse(what, f"supported are {', '.join(sorted(table))}")
        return table[name]


class Values(Refusing):
    """The graph being built, as one operator of the model sees it."""

    builder: GraphBuilder
    faults: list[ModelError] | None = None
    """All refusals so far, where reading goes on behind them; None where the first one ends it."""

    @property
    @abstractmethod
    def stem(self) -> str:
        """How the nodes of the operator being read are called."""

    @property
    @abstractmethod
    def origin(self) -> str:
        """The operator being read, as `Node.origin` names it."""

    def again(self, **changed: object) -> Self:
        """The same import with some of its attributes (mostly the operator being read) changed."""
        other = copy(self)
        vars(other).update(changed)
        return other

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Within it, a ValueError (mostly of an operator's type rule) is the fault of the operator being read. With a
        list of `faults`, refusals are noted there, and results of the declared types stand for the operator's."""
        try:
            yield
        except (ValueError, ModelError) as error:
            fault = error if isinstance(error, ModelError) else self.refuse(str(error))
            if self.faults is None:
                raise fault from error
            if not isinstance(fault, Consequence):
                self.faults.append(fault)
            self.stand_in()

    def stand_in(self) -> None:
        """Let inputs of the graph be the operator's results, where their types are declared."""

    def stood_in(self, name: str, kind: TensorType) -> Value:
        """An input of the graph in place of a result that is not computed."""
        return self.graph_input(self.builder.fresh(f"{STAND_IN}{name}"), kind)

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from either end as one counted from the front."""
        self.wrong_if(not -rank <= axis < rank, f"axis {axis} is outside the {rank} axes")
        return axis % rank

    def axes(self, listed: Iterable[int], rank: int) -> tuple[int, ...]:
        """Axes counted from either end, each once, in rising order from the front."""
        return tuple(sorted({self.axis(axis, rank) for axis in listed}))

    def full_shape(self, wanted: Sequence[object], elements: int) -> Shape:
        """A shape with at most one -1, which takes what is left of so many elements."""
        sizes = [n for n in wanted if type(n) is int and -1 <= n < MAX_ELEMENTS]
        rest = prod(size for size in sizes if size != -1)
        odd = len(sizes) != len(wanted) or sizes.count(-1) > 1 or 0 in sizes or (-1 in sizes and elements % rest)
        self.wrong_if(odd, f"{elements} elements have not the shape {list(wanted)!s:.80}")
        return tuple(elements // rest if size == -1 else size for size in sizes)

    def indexed(self, shape: Shape, key: Sequence[Any]) -> tuple[list[range], list[int]]:
        """The places of each axis that numpy's index (of slices, integers, None and ...) takes, and the shape of the
        result: without the axes of integers, with an axis for each None."""
        taken = sum(part is not None and part is not ... for part in key)
        odd = taken > len(shape) or key.count(...) > 1
        self.wrong_if(odd, f"{len(key)} indices do not fit the axes of {list(shape)}")
        place, sizes = key.index(...) if ... in key else len(key), iter(shape)
        places, result = list[range](), list[int]()
        for part in (*key[:place], *[slice(None)] * (len(shape) - taken), *key[place + 1 :]):
            if part is not None:
                cut = slice(part, part + 1 or None) if isinstance(part, int) else part
                places.append(range(next(sizes))[cut])
            result += [] if isinstance(part, int) else [1 if part is None else len(places[-1])]
        return places, result

    # The graph

    def named(self, suffix: str) -> str:
        """The name of the operator being read with a suffix, if any."""
        return f"{self.stem}_{suffix}" if suffix else self.stem

    def of_name(self, name: str) -> Value:
        """The value of a name in the graph."""
        return Value(name, self.builder.type_of(name))

    def add(self, operator: Operator, operands: Sequence[Value], suffix: str = "", name: str = "") -> Value:
        """Add a node, called after the operator being read or by a `name` of its own.

        Raises:
            ValueError: the operator does not accept operands of these types.
        """
        names = [x.name for x in operands]
        return self.of_name(self.builder.add(operator, names, name or self.named(suffix), self.origin))

    def graph_input(self, name: str, kind: TensorType) -> Value:
        """An input of the network."""
        return self.of_name(self.builder.input(name, kind))

    def state(self, stem: str, first: Array, dtype: DType | None = None) -> Value:
        """Values kept from one inference to the next, with its first contents."""
        return self.of_name(self.builder.state(stem, first, dtype))

    def replace_state(self, state: Value, value: Value) -> None:
        """Let a state be another value from the next inference on."""
        self.builder.replace_state(state.name, value.name)

    def finished(self, outputs: Iterable[Value]) -> Graph:
        """The graph of all that some values need."""
        return self.builder.finish([value.name for value in outputs])

    def placed(self, stem: str, array: Array, dtype: DType | None = None) -> Value:
        """A constant with a name of its own; `dtype` says so where it is narrower than the numpy type that holds it."""
        return self.of_name(self.builder.constant(stem, array, dtype))

    def constant(self, array: Array, suffix: str) -> Value:
        """A constant, called after the operator being read."""
        return self.placed(self.named(suffix), array)

    def number(self, value: float, suffix: str = "constant") -> Value:
        """A float constant of one element."""
        return self.constant(np.array(value, np.float32), suffix)

    def known(self, x: Value) -> Array | None:
        """The elements of a constant, None for a value computed at run time."""
        return self.builder.constant_of(x.name)

    def fixed(self, x: Value) -> bool:
        """True for a value that follows from constants alone."""
        return self.known(x) is not None

    # Arithmetic with broadcasting

    def binary(self, kind: BinaryKind, a: Value, b: Value, suffix: str = "") -> Value:
        """A function of two values; the addition that the quantize stage knows where it may be one."""
        plain = kind is BinaryKind.ADD and a.dtype in (DType.FLOAT32, DType.INT32)
        return self.add(Add() if plain else Binary(kind), [a, b], suffix)

    plus = partialmethod(binary, BinaryKind.ADD)
    """a + b"""
    minus = partialmethod(binary, BinaryKind.SUBTRACT)
    """a - b"""
    times = partialmethod(binary, BinaryKind.MULTIPLY)
    """a * b"""
    over = partialmethod(binary, BinaryKind.DIVIDE)
    """a / b"""

    def scaled(self, x: Value, factor: float, suffix: str = "scaled", number: str = "factor") -> Value:
        """x * factor; x itself where that is 1."""
        return x if factor == 1.0 else self.times(x, self.number(factor, number), suffix)

    def folded(self, kind: BinaryKind, values: Sequence[Value], mean: bool, suffix: str) -> Value:
        """A function of several values, taken from the left; `mean` divides by their number."""
        first, *others = values
        for other in others:
            first = self.binary(kind, first, other, suffix)
        return self.times(first, self.number(1.0 / len(values), "share"), "mean") if mean else first

    def equal(self, a: Value, b: Value, suffix: str = "") -> Value:
        """a == b, bool"""
        return self.add(Compare(CompareKind.EQUAL), [a, b], suffix)

    def negation(self, x: Value, suffix: str = "") -> Value:
        """not x"""
        return self.equal(x, self.constant(np.zeros((), np.bool_), "false"), suffix)

    def convert(self, x: Value, dtype: DType, suffix: str = "") -> Value:
        """The numbers of x in another type."""
        return self.add(Convert(dtype), [x], suffix)

    def as_number(self, x: Value, suffix: str = "") -> Value:
        """Integers as the float numbers they are."""
        unit, zero = self.constant(np.ones(1, np.float32), "unit"), self.constant(np.zeros(1, np.int32), "zero")
        return self.add(Dequantize(), [x, unit, zero], suffix)

    # Functions of one float

    def unary(self, kind: UnaryKind, x: Value, suffix: str = "", alpha: float = 0.0) -> Value:
        """A function of each element."""
        return self.add(Unary(kind, alpha), [x], suffix)

    def clamp(self, x: Value, low: float, high: float, suffix: str = "") -> Value:
        """x limited to [low, high]."""
        return self.add(Clamp(low, high), [x], suffix)

    square = partialmethod(unary, UnaryKind.SQUARE)
    """x * x, one operator for every reader."""

    def relu(self, x: Value, slope: float = 0.0, high: float = inf, threshold: float = 0.0, suffix: str = "") -> Value:
        """keras.activations.relu in its general form: 0, or a slope, below a threshold, and limited above."""
        if threshold == 0.0 and slope == 0.0:
            return self.clamp(x, 0.0, max(high, 0.0), suffix or "limited")
        if threshold != 0.0 and (slope != 0.0 or threshold < 0.0):
            raise self.refuse(f"a threshold of {threshold} with a slope of {slope} is not supported")
        kind, alpha = (UnaryKind.THRESHOLDED_RELU, threshold) if threshold else (UnaryKind.LEAKY_RELU, slope)
        bent = self.unary(kind, x, "kept" if threshold else "bent", alpha)
        return bent if high == inf else self.clamp(bent, -inf, high, suffix or "limited")

    def gelu(self, x: Value, by_tanh: bool, suffix: str = "") -> Value:
        """Gelu, exact or by tanh."""
        return self.unary(UnaryKind.GELU_TANH if by_tanh else UnaryKind.GELU, x, suffix)

    def selu(self, x: Value, alpha: float, gamma: float, suffix: str = "") -> Value:
        """gamma * Elu(x)"""
        return self.scaled(self.unary(UnaryKind.ELU, x, "elu", alpha), gamma, suffix)

    def hard_sigmoid(self, x: Value, slope: float, offset: float, suffix: str = "") -> Value:
        """slope * x + offset, limited to 0 and 1; one operator with the slope 1/6 and the offset 1/2."""
        if np.isclose(slope, 1 / 6, rtol=1e-6) and offset == 0.5:
            return self.unary(UnaryKind.HARD_SIGMOID, x, suffix)
        raised = self.plus(self.times(x, self.number(slope, "slope"), "sloped"), self.number(offset, "half"), "raised")
        return self.clamp(raised, 0.0, 1.0, suffix)

    def swish(self, x: Value, alpha: float = 1.0, suffix: str = "") -> Value:
        """x * Sigmoid(alpha * x)"""
        return self.times(x, self.unary(UnaryKind.SIGMOID, self.scaled(x, alpha), "gate"), suffix)

    def mish(self, x: Value, suffix: str = "") -> Value:
        """x * Tanh(Softplus(x))"""
        return self.times(x, self.unary(UnaryKind.TANH, self.unary(UnaryKind.SOFTPLUS, x, "soft"), "gate"), suffix)

    # Movement

    def chain(self, x: Value, steps: Mapping[str, Operator], suffix: str | None = None) -> Value:
        """Operators of one operand, one behind the other, by the suffixes of their nodes; those that would change
        nothing are left out. The last node has `suffix` where one is given."""
        needed, kind = [], x.type
        for name, operator in steps.items():
            if not operator.is_noop([kind]):
                needed.append((name, operator))
            kind = operator.infer([kind])
        for left, (name, operator) in zip(range(len(needed))[::-1], needed, strict=True):
            x = self.add(operator, [x], name if left or suffix is None else suffix)
        return x

    def reshape(self, x: Value, shape: Sequence[int], suffix: str = "", name: str = "") -> Value:
        """x under another shape, by a node of its own."""
        return self.add(Reshape(tuple(shape)), [x], suffix, name)

    def shaped(self, x: Value, shape: Sequence[int], suffix: str = "") -> Value:
        """x under another shape; itself where it has that shape."""
        return x if x.shape == tuple(shape) else self.reshape(x, shape, suffix)

    def transpose(self, x: Value, order: Sequence[int], suffix: str = "", name: str = "") -> Value:
        """x with its axes in another order, by a node of its own."""
        return self.add(Transpose(tuple(order)), [x], suffix, name)

    def ordered(self, x: Value, order: Sequence[int], suffix: str = "") -> Value:
        """x with its axes in another order; itself where they are in it."""
        return x if tuple(order) == tuple(range(len(order))) else self.transpose(x, order, suffix)

    def channels_last(self, x: Value, suffix: str = "last") -> Value:
        """NCHW as NHWC, with any number of image axes."""
        return self.ordered(x, (0, *range(2, x.rank), 1), suffix)

    def channels_first(self, x: Value, suffix: str = "first") -> Value:
        """NHWC as NCHW, with any number of image axes."""
        rank = x.rank
        return self.ordered(x, (0, rank - 1, *range(1, rank - 1)), suffix)

    def matrix_turned(self, x: Value, suffix: str = "turned") -> Value:
        """x with its last two axes exchanged."""
        rank = x.rank
        return self.ordered(x, (*range(rank - 2), rank - 1, rank - 2), suffix)

    def concat(self, values: Sequence[Value], axis: int, suffix: str = "", name: str = "") -> Value:
        """Values one behind the other, those with elements; one alone is itself."""
        parts = [value for value in values if value.type.elements] or values[:1]
        return self.add(Concat(axis), parts, suffix, name) if len(parts) > 1 else parts[0]

    def part(self, x: Value, axis: int, start: int, stop: int, suffix: str = "", name: str = "") -> Value:
        """The elements from `start` to `stop` of one axis."""
        places = [*map(range, x.shape)]
        places[axis] = range(start, stop)
        return self.add(slice_of(places), [x], suffix, name)

    def check_places(self, count: int) -> None:
        """Refuse to pick more places along one axis than may be."""
        self.refuse_if(count > MAX_PLACES, f"picks {count} places along one axis; the limit is {MAX_PLACES}", SMALLER)

    def pick(self, x: Value, places: Sequence[Sequence[int]], suffix: str = "") -> Value:
        """Elements by their places along each axis."""
        self.check_places(max(map(len, places), default=0))
        return self.add(Pick(tuple(tuple(int(place) for place in chosen) for chosen in places)), [x], suffix)

    def resampled(self, x: Value, taps: Mapping[int, tuple[Array, Array]], suffix: str = "") -> Value:
        """x with some axes resized, by the places and the weights that each element of the axis is a sum of."""
        constants = [
            self.constant(array, what)
            for pair in taps.values()
            for array, what in zip(pair, ("places", "weights"), strict=True)
        ]
        return self.add(Resample(tuple(taps)), [x, *constants], suffix) if taps else x

    def bordered(self, image: Value, border: Padding2d, filler: float = 0.0, suffix: str = "padded") -> Value:
        """An NHWC image with elements `filler` around it, cut where a border is negative."""
        before, after = ((0, *(pair[k] for pair in border), 0) for k in (0, 1))
        return self.surrounded(image, before, after, filler, suffix)

    def surrounded(self, x: Value, before: Shape, after: Shape, filler: float, suffix: str = "") -> Value:
        """x with so many elements `filler` before and after it along each axis, cut where there are fewer than 0."""
        if min(before + after, default=0) < 0:
            ends = zip(before, x.shape, after, strict=True)
            places = [range(size)[max(-first, 0) : size + min(last, 0)] for first, size, last in ends]
            if not all(places):
                shape = [sum(sizes) for sizes in zip(before, x.shape, after, strict=True)]
                self.wrong_if(min(shape) < 1, f"nothing is left of {x.type} with {before} and {after} around it")
                return self.constant(np.full(shape, filler, x.dtype.numpy), suffix or "filled")
            x = self.add(slice_of(places), [x], "cut")
        before, after = (tuple(max(count, 0) for count in counts) for counts in (before, after))
        return self.add(Pad(before, after, filler), [x], suffix) if any(before + after) else x

    def stretched(self, image: Value, stride: tuple[int, int]) -> Value:
        """Rows and columns (axes 1 and 2 of 4) with stride - 1 zeros between neighbours."""
        if stride == (1, 1):
            return image
        (count, height, width, depth), (down, right) = image.shape, stride
        steps = {
            "apart": Reshape((count, height, 1, width, 1, depth)),
            "zeros": Pad((0,) * 6, (0, 0, down - 1, 0, right - 1, 0), 0.0),
            "wide": Reshape((count, height * down, width * right, depth)),
            "stretched": Slice((0,) * 4, (count, (height - 1) * down + 1, (width - 1) * right + 1, depth), (1,) * 4),
        }
        return self.chain(image, steps, "stretched")

    # Sums and what is made of them

    def product(self, a: Value, b: Value, suffix: str = "") -> Value:
        """The product of matrices, or of batches of them."""
        return self.add(MatrixProduct(), [a, b], suffix)

    def dense(self, x: Value, weights: Value, *bias: Value, suffix: str = "") -> Value:
        """A dense layer; weights are [N, K]."""
        return self.add(FullyConnected(), [x, weights, *bias], suffix)

    def reduce(self, kind: ReduceKind, x: Value, axes: tuple[int, ...], keep: bool, suffix: str = "shaped") -> Value:
        """A reduction over some axes, which stay with size 1 where `keep` says so."""
        return self.shaped(self.add(Reduce(kind, axes), [x], "reduced"), kept_shape(x.shape, axes, keep), suffix)

    def along(
        self, x: Value, axes: Sequence[int], operator: Operator, suffix: str | None = "", flat: bool = False
    ) -> Value:
        """An operator over the last axis, applied to some axes together; `flat` makes one axis of all others."""
        shape = x.shape
        order = (*(place for place in range(len(shape)) if place not in axes), *axes)
        moved, count = tuple(shape[place] for place in order), prod(shape[place] for place in axes)
        outer = moved[: len(shape) - len(axes)]
        steps = {
            "last": Transpose(order),
            "rows": Reshape((*((prod(outer),) if flat else outer), count)),
            "normalised": operator,
            "whole": Reshape(moved),
            "restored": Transpose(tuple(order.index(place) for place in range(len(shape)))),
        }
        return self.chain(x, steps, suffix)

    def softmax(self, x: Value, axes: Sequence[int], suffix: str = "", logarithm: bool = False) -> Value:
        """Softmax over some axes together, or its logarithm."""
        return self.along(x, axes, LogSoftmax() if logarithm else Softmax(), suffix)

    def normalise(self, x: Value, axes: Sequence[int], operator: Normalise) -> Value:
        """x with mean 0 and deviation 1 (as the operator says) over some axes together."""
        return self.along(x, axes, operator, None, flat=True)


def slice_of(places: Sequence[range]) -> Slice:
    """The part of a value at these places of each axis, all of them rising."""
    return Slice(tuple(r.start for r in places), tuple(r.stop for r in places), tuple(r.step for r in places))


def unpacked(stored: Array, bits: int) -> Array:
    """Unsigned numbers of a few bits, the lowest bits of each byte first: uint8 [..., bytes] as [..., numbers]."""
    parts = stored[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & ((1 << bits) - 1)
    return parts.reshape(*stored.shape[:-1], -1)


def kept_shape(shape: Shape, axes: Sequence[int], keep: bool) -> Shape:
    """The shape after a reduction over `axes`, which stay with size 1 where `keep` says so."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes)


def unary(kind: UnaryKind, suffix: str = "") -> Callable[[Values, Value], Value]:
    """The word for a function of each element, as a table of functions holds it."""
    return lambda v, x: v.unary(kind, x, suffix)
