"""Operators, and the traits by which stages ask them.

An operator is a frozen dataclass of its attributes. Its type rule, its exact meaning in numpy, its meaning in standard
ONNX and its traits stand in one class, so adding an operator touches one place. Stages ask these and never list types:

| trait | says |
|---|---|
| `moves_only` | it only moves elements, from places known at compile time |
| `is_view` | the result is the operand's bytes under another shape |
| `pointwise` | how many operands give an element for each element of the result; 0 where it is not computed so |
| `is_elementwise(types)` | pointwise, and nothing differs from place to place: any order of elements will do |
| `is_rowwise` | each row along the last axis is computed by itself, as a whole |
| `weight_axis` | of a layer with weights: along which of their axes the output channels run |
| `slope_of(constants)` | by how much the result grows with its operands, where rounding aside it is a line |
| `c_template` | of a pointwise operator of floats: its C |
| `line_of(constants)` | factor and offset, where the result is factor * x + offset of the operand that is no constant |
| `sums` | it sums elements; `summing(zero_point, x)` says how integers are summed in their place |
| `limited_to` | the least and the greatest value that it limits integers to; `clamped_to` floats |
| `window(types)` | the `Window` of a convolution, a pool or im2col: kernel, stride, dilation, padding |
| `crop(box, types)` | the box of each operand read for a box of the result; `dovetail.ir.crop.parts` follows it |
| `as_given` | it computes on the element types it has, floats too: quantize leaves it |
| `chosen_from(operands)` | the operands whose elements the result consists of: quantised alike, it has their integers |
| `is_noop(types)` | it gives back its operand |
| `raised(by)` | the operator for operands that are so much higher |
| `reordered(order, types)` | the operator for operands with their axes in another order |
| `axis_after(axis, types)` | the axis of the result that an axis of the operand becomes |
| `pieces(types)` | the strided copies that compute it, as `Piece`s |
| `joins` | its operands lie side by side in the result; `pieces` says where |
| `pads` | the result is the operand with other elements around it |
| `box_read` | of a slice: the box of the operand that its elements come from; `skips` says whether it takes all of it |
| `changes_layout` | the result is the operand in another layout |
| `is_channelwise` | each channel of the result is a sum over one channel of the operand |
| `quantises`, `dequantises` | it goes from floats to the integers that stand for them, or back |
| `reads_scores`, `gives_shares` | rows of scores become shares of 1 or their logarithms; the result are shares |

Traits of a family are inherited: `Pointwise`, `Rowwise`, `Mover`. So `kernels` asks `operator.pointwise`, the partition
whether `pieces(types)` is None (and not `is_view`), the planner makes one copy of each piece, `ptq` gives a value steps
of its own unless `chosen_from(node.inputs)` is one name, and shared steps where it is several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from dovetail.documented import document
from dovetail.ir.types import Array, Box, DType, Shape, TensorType
from dovetail.names import names
from dovetail.records import Record

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody

T = TypeVar("T")
"""Whatever stands for an operand: a name, a type, ..."""

Types = Sequence[TensorType]
"""Types of an operator's operands."""
Arrays = Sequence[Array]
"""Elements of an operator's operands."""
Known = Sequence[Array | None]
"""Operands, None for those that are no constants."""
Names = Sequence[str]
"""Names of an operator's operands."""
Padding2d = tuple[tuple[int, int], tuple[int, int]]
"""Rows before and after, columns before and after."""


class SlidingWindow(Record):
    """A window that moves over rows and columns of an NHWC image; all pairs are (rows, columns)."""

    kernel: tuple[int, int]
    """Taps along rows and columns."""
    stride: tuple[int, int] = (1, 1)
    """Pixels from one window to the next."""
    dilation: tuple[int, int] = (1, 1)
    """Pixels from one tap to the next."""
    padding: Padding2d = ((0, 0), (0, 0))
    """Padding of the operator itself; a `Pad` before it is not counted."""

    @property
    def span(self) -> tuple[int, int]:
        """Pixels from the first tap to the last, both counted."""
        rows, columns = ((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        return rows, columns

    def places(self, x: TensorType) -> tuple[int, int]:
        """The number of windows in an image, along rows and columns; raises ValueError if the value is no image, or
        is smaller than the window."""
        require(len(x.shape) == 4, f"expects NHWC, got {x}")
        sizes = []
        for axis, span in enumerate(self.span):
            size = x.shape[1 + axis] + sum(self.padding[axis])
            require(size >= span, f"the window spans {span} of an axis of {size}")
            sizes.append((size - span) // self.stride[axis] + 1)
        return sizes[0], sizes[1]

    def reads(self, box: Box, shape: Shape) -> tuple[tuple[tuple[int, int], tuple[int, int]], Padding2d]:
        """The rows and the columns of an image that a box of the results reads, and the padding around these."""
        spans, padding = [], []
        for axis in (0, 1):
            lead, (first, last), stride = self.padding[axis][0], box[1 + axis], self.stride[axis]
            start, stop = first * stride - lead, (last - 1) * stride + self.span[axis] - lead
            spans.append((max(start, 0), min(stop, shape[1 + axis])))
            padding.append((max(-start, 0), max(stop - shape[1 + axis], 0)))
        return (spans[0], spans[1]), (padding[0], padding[1])

    def view(self, image: Array, filler: float = 0) -> Array:
        """Every window of an image, padded with `filler`: (N, OH, OW, C, KH, KW)."""
        if any(map(any, self.padding)):
            image = np.pad(image, ((0, 0), *self.padding, (0, 0)), constant_values=np.array(filler, image.dtype))
        (rows, columns), (down, right) = self.stride, self.dilation
        if self.span == (1, 1):
            return image[:, ::rows, ::columns, :, None, None]
        view = np.lib.stride_tricks.sliding_window_view(image, self.span, axis=(1, 2))
        return view[:, ::rows, ::columns, :, ::down, ::right]


class Piece(Record):
    """Elements of one operand and where they lie in the result: what one strided copy moves."""

    operand: int
    """Number of the operand."""
    box: Box
    """Part of the result."""
    start: Shape = ()
    """First element of the operand along each axis; empty for a box as large as the whole operand. With fill the
    operand is smaller than the box, by `before` and the rest."""
    walks: tuple[tuple[int, int], ...] = ()
    """Axis of the operand and step in elements, for each axis of the box. The last one may step into the elements
    that follow in a row-major operand."""
    before: Shape = ()
    """Elements of `fill` ahead of the operand along each axis; the box is what there is with them and those behind."""
    fill: int = 0
    """Integer of the elements ahead of and behind the operand."""


Cut = tuple["Operator", tuple[Box, ...]]
"""The operator that computes only a box of the result, and the box of each operand it then reads."""


class IntegerSum(Record):
    """A sum of floats on the integers that stand for them."""

    operator: Operator
    """Gives the sums of the integers, int32."""
    count: int = 1
    """The number sums are divided by as they are scaled."""
    headroom: int = 0
    """Bits sums are raised by before, so that scaling them rounds once."""


@dataclass(frozen=True)
class Operator:
    """A kind of computation, with its attributes.

    Arrays are NHWC; operands follow the order documented in each class.
    """

    moves_only: ClassVar[bool] = False
    """Every element of the result is an element of an operand, or a fixed value. Its place does not depend on the
    operands' elements."""
    is_view: ClassVar[bool] = False
    """The result is the operand, row-major, under another shape."""
    pointwise: ClassVar[int] = 0
    """Number of operands, the first ones, whose elements give the element of the result at the same place
    (broadcasting aside). The other operands are parameters. 0 for operators that do not compute element by element."""
    as_given: ClassVar[bool] = False
    """The operator computes on the element types it is given, floats too, and has no other form for integers."""
    exact: ClassVar[bool] = False
    """The floats it computes have the same bits in numpy and in C; operators that only move elements need not say
    it."""
    opaque: ClassVar[bool] = False
    """ONNX has no body for it: a reader of a saved graph must know its class."""
    is_rowwise: ClassVar[bool] = False
    """The result has the operand's shape, and each row along the last axis is made from the same row, all of it."""

    in_place: ClassVar[bool] = False
    """The result is the first operand with some elements replaced: where it may lie in that operand's place, nothing
    else moves."""
    joins: ClassVar[bool] = False
    """The result is its operands side by side: `pieces` says where each lies."""
    pads: ClassVar[bool] = False
    """The result is the operand with elements of one value around it."""
    changes_layout: ClassVar[bool] = False
    """The result is the operand, lying in another layout."""
    is_channelwise: ClassVar[bool] = False
    """Each channel of the result is a sum over one channel of the operand."""
    quantises: ClassVar[bool] = False
    """The result is integers for floats, by a scale and a zero point that are the second and third operand."""
    dequantises: ClassVar[bool] = False
    """The result is floats for integers, by a scale and a zero point that are the second and third operand."""
    reads_scores: ClassVar[bool] = False
    """Rows of scores become shares of 1, or the logarithms of these."""
    gives_shares: ClassVar[bool] = False
    """Each row of the result are shares, from 0 to 1, which add up to 1."""

    weight_axis: ClassVar[int | None] = None
    """Axis of a layer's weights along which output channels run; the weights are the second operand, and the third
    operand, if any, is a bias with one element per output channel. None for operators that are no layers."""

    @property
    def class_name(self) -> str:
        """Name in messages and saved graphs."""
        return type(self).__name__

    @property
    def c_template(self) -> str:
        """C of a float element for kernels of the core, with `{x}`, `{y}` and `{z}` for identifiers of the operands'
        elements and the names of the operator's floats; empty where a kernel writes it."""
        return ""

    @property
    def limited_to(self) -> tuple[int, int] | None:
        """The least and the greatest value that it limits integers to; None for other operators."""
        return None

    @property
    def clamped_to(self) -> tuple[float, float] | None:
        """The least and the greatest value that it limits floats to, either perhaps infinite; None for other
        operators."""
        return None

    @property
    def filler(self) -> float | None:
        """The number it puts beside elements that only move; None for most."""
        return None

    def with_filler(self, value: float) -> Operator:
        """The operator with another `filler`; an operator without a filler is returned as it is.

        Args:
            value: the new number.
        """
        return self

    def slope_of(self, constants: Known) -> float | None:
        """The growth of the result with each of its `pointwise` operands, without rounding; None if it is not one
        number known at compile time. `constants` are the operands, None for those computed at run time."""
        return None

    def line_of(self, constants: Known) -> tuple[Array, Array] | None:
        """Factor and offset, float64 and to be broadcast to the result, which is factor * x + offset of floats x.
        `constants` are the operands, None for x alone. None where the result is no such line."""
        return None

    @property
    def sums(self) -> bool:
        """Whether the result are sums or means of the operand's elements, which integers have with one scaling."""
        return False

    def summing(self, zero_point: int, x: TensorType) -> IntegerSum:
        """The sum for integers that stand for floats.

        Args:
            zero_point: subtracted from each integer.
            x: type of the operand.

        Raises:
            TypeError: the operator does not sum (`sums`).
        """
        raise TypeError(f"{type(self).__name__} does not sum")

    @property
    def box_read(self) -> Box | None:
        """The box of its operand that is the result, but for elements it `skips`; None for other operators."""
        return None

    @property
    def skips(self) -> bool:
        """True for a slice that takes some elements of `box_read` only."""
        return False

    def within(self, box: Box) -> Operator:
        """The slice that takes the same elements where only a box of the operand is there; others as they are."""
        return self

    def infer(self, inputs: Types) -> TensorType:
        """Type of the result; raises ValueError when the operands do not fit the operator."""
        raise TypeError(f"{type(self).__name__} has no type rule")

    def evaluate(self, inputs: Arrays) -> Array:
        """The exact result in numpy; raises TypeError for an operator without a meaning of its own."""
        raise TypeError(f"{type(self).__name__} has no meaning")

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        """Write the operator's meaning as standard ONNX nodes into `body`, and return the result's name; raises
        TypeError if the operator has no ONNX body."""
        raise TypeError(f"{type(self).__name__} has no ONNX body")

    def crop(self, box: Box, inputs: Types) -> Cut:
        """The operator that computes only `box` of the result, and the box of each operand it then reads.

        Raises:
            ValueError: the operator cannot be computed in parts along a cut axis.
        """
        raise ValueError(f"{type(self).__name__} cannot be tiled")

    def is_elementwise(self, inputs: Types) -> bool:
        """True when each element of the result is made from the elements at its own place and from nothing that
        differs from place to place: the operator may then be computed in whatever order the elements lie."""
        return False

    def window(self, inputs: Types) -> SlidingWindow | None:
        """The window that moves over the first operand; None for operators without a window."""
        return None

    def chosen_from(self, operands: Sequence[T]) -> Sequence[T]:
        """The operands (names, types, ... in the operator's order) whose elements make up the result. The choice is
        alike for floats and for integers that stand for them, so operands with equal scales need no arithmetic.

        Empty where the result is computed. With one, the result has its integers; several should share their steps.
        """
        return ()

    def pieces(self, inputs: Types) -> tuple[Piece, ...] | None:
        """The strided copies that compute the operator, operands being row-major unless pieces are whole; None where
        copying cannot."""
        return None

    def is_noop(self, inputs: Types) -> bool:
        """Whether the result is the first operand as it is."""
        return False

    def raised(self, by: Sequence[int]) -> Operator | None:
        """The operator for operands that are unsigned in place of signed, each higher by so much. It gives the same
        result, or where it chooses elements, one that is higher too. None where there is none."""
        return None

    def reordered(self, order: Shape, inputs: Types) -> Operator | None:
        """The operator for operands with their axes in another order, axis i being axis `order[i]`, whose result is
        this one's in the same order; parameters stay as they are. None where there is none."""
        return None

    def axis_after(self, axis: int, inputs: Types) -> int | None:
        """The axis of the result that an axis of the first operand becomes, index by index; None where it is torn."""
        return None

    def workspace(self, inputs: Types) -> int:
        """Bytes of static memory its kernel works in beside operands and result."""
        return 0

    def macs(self, inputs: Types) -> int:
        """Multiply-accumulates, padded taps counted."""
        return 0


@dataclass(frozen=True)
class Pointwise(Operator):
    """Computed element by element, operands and parameters being broadcast."""

    pointwise: ClassVar[int] = 1

    def crop(self, box: Box, inputs: Types) -> Cut:
        return self, ((box,) if len(inputs) == 1 else tuple(broadcast_box(box, kind.shape) for kind in inputs))

    def reordered(self, order: Shape, inputs: Types) -> Operator | None:
        return self if all(kind.elements == 1 for kind in inputs[self.pointwise :]) else None

    def is_elementwise(self, inputs: Types) -> bool:
        largest = max(inputs, key=lambda kind: kind.elements)
        return all(kind.shape == largest.shape or kind.elements == 1 for kind in inputs)


@dataclass(frozen=True)
class Rowwise(Operator):
    """Computed row by row along the last axis."""

    is_rowwise: ClassVar[bool] = True
    noun: ClassVar[str] = "a softmax"
    """Name for messages."""

    def crop(self, box: Box, inputs: Types) -> Cut:
        require(box[-1] == (0, inputs[0].shape[-1]), f"{self.noun} is not tiled over its last axis")
        return self, (box,)

    def reordered(self, order: Shape, inputs: Types) -> Operator | None:
        return self if order[-1] == len(order) - 1 else None


@dataclass(frozen=True)
class Mover(Operator):
    """Only moves the elements of its operands."""

    moves_only: ClassVar[bool] = True

    def is_noop(self, inputs: Types) -> bool:
        return self.infer(inputs) == inputs[0]

    def raised(self, by: Sequence[int]) -> Operator | None:
        return self

    def chosen_from(self, operands: Sequence[T]) -> Sequence[T]:
        return operands


@dataclass(frozen=True)
class Int64Operator(Operator):
    """An operator whose meaning is one function of int64 arrays; it is followed for the ONNX form."""

    result: ClassVar[DType] = DType.INT8
    """Element type of the result."""

    def meaning(self, *arrays: Any) -> Any:
        """The result from int64 operands, by the functions of numpy that `dovetail.ir.onnx_body` can follow."""
        raise NotImplementedError

    def evaluate(self, inputs: Arrays) -> Array:
        return np.asarray(self.meaning(*(array.astype(np.int64) for array in inputs)), dtype=self.result.numpy)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        return body.traced(self.meaning, inputs, types, self.result)


def broadcast_box(box: Box, shape: Shape) -> Box:
    """The part of an operand of `shape` that `box` of the broadcast result reads."""
    lead = len(box) - len(shape)
    spans = zip(box[lead:], shape, strict=True)
    return tuple((0, 1) if size == 1 else span for span, size in spans)


def broadcast_shape(types: Types) -> Shape:
    """The shape operands broadcast to; raises ValueError where they do not."""
    try:
        return tuple(int(size) for size in np.broadcast_shapes(*(kind.shape for kind in types)))
    except ValueError:
        raise ValueError(f"{' and '.join(map(str, types))} cannot be broadcast to one shape") from None


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless the condition holds: the type rules' one check."""
    if not condition:
        raise ValueError(sentence)


if not TYPE_CHECKING:
    __getattr__ = names(__name__, Window="SlidingWindow")

document(__name__)
