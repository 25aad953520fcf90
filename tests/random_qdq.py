"""Random ONNX models of one operator between quantised values, with every attribute exporters write: borders of all
kinds, ceil_mode, count_include_pad, steps, broadcasting, 16 bits, a scale per channel, one to three image axes.

ONNX Runtime computes the float result from the real values of the operands. The distance of Dovetail's integers from
it, in steps, says how good they are: half a step is rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from dovetail.compile import Options
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.types import Array
from property_batches import Case, Draw

WIDE = ("uint8", "int8", "uint8", "int8", "uint16", "int16")
"""Element types, those of 8 bits more often."""


@dataclass
class QdqModel:
    """A model being drawn: the float graph between its DequantizeLinear and QuantizeLinear."""

    draw: Draw
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Element type and shape of each."""

    def add(self, op_type: str, operands: Sequence[str], domain: str = "", **attributes: Any) -> str:
        """An operator; the name of its result."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, operands, [name], domain=domain, **attributes))
        return name

    def constant(self, array: Any) -> str:
        """A constant; its name."""
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def scale(self) -> float:
        """A scale, now and then of a power of two."""
        return float(np.exp(self.draw.rng.uniform(-5, -1)))

    def zero_point(self, dtype: str) -> Array:
        """A zero point, the usual ones more often."""
        limits = np.iinfo(dtype)
        middle = (limits.min + limits.max + 1) // 2
        return np.array(self.draw.one_of(middle, middle, limits.min, self.draw.number(limits.min, limits.max)), dtype)

    def dequantised(self, name: str, dtype: str, scale: Any = None, **attributes: Any) -> str:
        """The real values of integers, with one scale."""
        zero = self.zero_point(dtype)
        step = self.scale() / (1 if zero.itemsize == 1 else 256)
        held = np.float32(step if scale is None else scale)
        return self.add("DequantizeLinear", [name, self.constant(held), self.constant(zero)], **attributes)

    def real(self, shape: Sequence[int], dtype: str | None = None) -> str:
        """The real values of another input."""
        name = f"x{len(self.inputs)}"
        kind = dtype or self.draw.one_of(*WIDE)
        self.inputs[name] = kind, tuple(shape)
        return self.dequantised(name, kind)

    def weights(self, shape: Sequence[int], axis: int, bits: int = 8) -> str:
        """Constant weights of int8 around 0, with one scale or one along an axis."""
        limit = (1 << bits - 1) - 1
        array = self.draw.rng.integers(-limit, limit + 1, shape).astype(np.int8)
        several = self.draw.often(0.6)
        scale = np.exp(self.draw.rng.uniform(-6, -4, shape[axis] if several else ())).astype(np.float32)
        zero = np.zeros(scale.shape, np.int8)
        operands = [self.constant(array), self.constant(scale), self.constant(zero)]
        return self.add("DequantizeLinear", operands, **({"axis": axis} if several else {}))

    def floats(self, shape: Sequence[int], low: float = -1.0, high: float = 1.0) -> str:
        """Constant floats."""
        return self.constant(self.draw.rng.uniform(low, high, shape).astype(np.float32))

    def some_shape(self, least: int = 1, most: int = 4) -> tuple[int, ...]:
        """A shape of a few axes."""
        return tuple(self.draw.one_of(1, 2, 3, 4, 5, 7) for _ in range(self.draw.number(least, most)))

    def some_axes(self, rank: int) -> list[int]:
        """Some axes, at least one, counted from either end."""
        chosen = [axis for axis in range(rank) if self.draw.often(0.5)] or [self.draw.number(0, rank - 1)]
        return [axis - rank * self.draw.number(0, 1) for axis in chosen]


Step = Callable[[QdqModel], str]
"""Draws an operator; gives the name of its float result."""


def _window(m: QdqModel, sizes: Sequence[int], pool: bool = True, ceil: bool = False) -> dict[str, Any]:
    """Attributes of a window over image axes, which fits."""
    draw, rank = m.draw, len(sizes)
    kernel = [min(draw.one_of(1, 2, 2, 3, 3, 5), size) for size in sizes]
    found: dict[str, Any] = {"kernel_shape": kernel, "strides": [draw.one_of(1, 1, 2, 3) for _ in sizes]}
    if not pool or draw.often(0.3):
        spans = [(size - 1) // max(k - 1, 1) for k, size in zip(kernel, sizes, strict=True)]
        found["dilations"] = [max(min(draw.one_of(1, 1, 2, 3), span), 1) for span in spans]
    mode = draw.one_of("NOTSET", "NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
    if mode != "NOTSET":
        if max(found.get("dilations", [1])) > 1 and mode.startswith("SAME"):
            mode = "VALID"
        found["auto_pad"] = mode
        if mode.startswith("SAME"):  # with longer steps ONNX Runtime's borders would be negative
            found["strides"] = [min(pair) for pair in zip(found["strides"], kernel, strict=True)]
    elif draw.often(0.7):
        found["pads"] = [draw.number(0, kernel[at % rank] - 1) for at in range(2 * rank)]
    if ceil and draw.often(0.4):
        found["ceil_mode"] = 1
    return found


def _image(m: QdqModel, least: int = 1, most: int = 3, channels: int = 0) -> tuple[int, ...]:
    """The shape of an image of one to three axes, NC..."""
    draw = m.draw
    rank = draw.one_of(*(rank for rank in (1, 2, 2, 2, 2, 3) if least <= rank <= most))
    return (draw.one_of(1, 1, 1, 2), channels or draw.number(1, 9), *(draw.number(2, 9) for _ in range(rank)))


def average_pool(m: QdqModel) -> str:
    shape = _image(m)
    attributes = _window(m, shape[2:], ceil=True)
    if m.draw.often(0.4):
        attributes["count_include_pad"] = 1
    return m.add("AveragePool", [m.real(shape)], **attributes)


def max_pool(m: QdqModel) -> str:
    shape = _image(m)
    return m.add("MaxPool", [m.real(shape)], **_window(m, shape[2:], ceil=True))


def global_pool(m: QdqModel) -> str:
    return m.add(m.draw.one_of("GlobalAveragePool", "GlobalAveragePool", "GlobalMaxPool"), [m.real(_image(m))])


def _bias(m: QdqModel, count: int) -> list[str]:
    """No bias, or one in steps of the operands' scales, now and then of floats."""
    if m.draw.often(0.4):
        return []
    held = [node for node in m.nodes if node.op_type == "DequantizeLinear"]
    scales = [m.constants[node.input[1]] for node in held]
    if m.draw.often(0.2) or scales[0].size not in (1, count):
        return [m.floats([count])]
    steps = np.broadcast_to(scales[0] * scales[1], (count,)).astype(np.float32)
    array = m.draw.rng.integers(-3000, 3000, count).astype(np.int32)
    return [m.add("DequantizeLinear", [m.constant(array), m.constant(steps)], axis=0)]


def convolution(m: QdqModel) -> str:
    draw, share, depth = m.draw, m.draw.number(1, 5), m.draw.number(1, 5)
    groups = draw.one_of(1, 1, 2, 4)
    if draw.often(0.3):
        groups, share, depth = draw.one_of(2, 3, 8), draw.one_of(1, 1, 2), 1
    shape = _image(m, 1, 2, groups * depth)
    attributes = _window(m, shape[2:], pool=False)
    kernel = attributes["kernel_shape"]
    w = m.weights((groups * share, depth, *kernel), 0, draw.one_of(8, 8, 4))
    x = m.real(shape)
    return m.add("Conv", [x, w, *_bias(m, groups * share)], group=groups, **attributes)


def transposed(m: QdqModel) -> str:
    draw = m.draw
    groups, share, depth = draw.one_of(1, 1, 2), draw.number(1, 4), draw.number(1, 4)
    shape = _image(m, 1, 2, groups * depth)
    kernel = [draw.number(1, 4) for _ in shape[2:]]
    strides = [draw.one_of(1, 2, 2, 3) for _ in kernel]
    attributes: dict[str, Any] = {"strides": strides, "kernel_shape": kernel, "group": groups}
    if draw.often(0.2):
        attributes["auto_pad"] = draw.one_of("SAME_UPPER", "SAME_LOWER", "VALID")
    elif draw.often(0.5):
        attributes["pads"] = [draw.number(0, (kernel[at % len(kernel)] - 1) // 2) for at in range(2 * len(kernel))]
    if draw.often(0.3) and "auto_pad" not in attributes:
        attributes["output_padding"] = [draw.number(0, stride - 1) for stride in strides]
    w = m.weights((groups * depth, share, *kernel), 1 if groups == 1 else 0)
    x = m.real(shape)
    return m.add("ConvTranspose", [x, w, *_bias(m, groups * share)], **attributes)


def gemm(m: QdqModel) -> str:
    draw = m.draw
    rows, depth, columns = draw.number(1, 5), draw.number(1, 20), draw.number(1, 9)
    turned, turned_b = draw.often(0.3), draw.often(0.5)
    x = m.real((depth, rows) if turned else (rows, depth))
    shape = (columns, depth) if turned_b else (depth, columns)
    w = m.weights(shape, 0 if turned_b else 1) if draw.often(0.8) else m.real(shape)
    sizes = draw.one_of((columns,), (1, columns), (rows, columns), (rows, 1), (1,), ())
    bias = [m.floats(sizes)] if draw.often(0.7) else []
    numbers = {"alpha": draw.one_of(1.0, 1.0, 0.5, 2.0), "beta": draw.one_of(1.0, 1.0, 0.25)}
    return m.add("Gemm", [x, w, *bias], transA=int(turned), transB=int(turned_b), **numbers)


def product(m: QdqModel) -> str:
    draw = m.draw
    depth, lead = draw.number(1, 20), draw.one_of((), (2,), (1, 3), (2, 3))
    left = (*lead, draw.number(1, 5), depth) if draw.often(0.9) else (depth,)
    if draw.often(0.5):
        return m.add("MatMul", [m.real(left), m.weights((depth, draw.number(1, 9)), 1)])
    batch = tuple(draw.one_of(size, 1) for size in lead)[draw.number(0, len(lead)) :]
    right = (*batch, depth, draw.number(1, 6))
    return m.add("MatMul", [m.real(left), m.weights(right, len(right) - 1) if draw.often(0.3) else m.real(right)])


def _broadcast(m: QdqModel) -> list[tuple[int, ...]]:
    """Two shapes, one of which may broadcast."""
    shape = m.some_shape()
    other = tuple(m.draw.one_of(size, size, 1) for size in shape)[m.draw.number(0, len(shape)) :]
    if m.draw.often(0.5):
        other = shape
    return [shape, other] if m.draw.often(0.7) else [other, shape]


def binary(m: QdqModel) -> str:
    draw = m.draw
    kind = draw.one_of("Add", "Add", "Sub", "Mul", "Mul", "Div", "Max", "Min", "PRelu", "Pow")
    shapes = _broadcast(m)
    a = m.real(shapes[0])
    if kind == "PRelu":
        shapes = sorted(shapes, key=lambda shape: -prod(shape))
        return m.add(kind, [m.real(shapes[0]), m.floats(shapes[1])])
    if kind == "Pow":
        return m.add(kind, [m.add("Abs", [a]), m.constant(np.float32(draw.one_of(2, 3, 0.5)))])
    if kind == "Div":
        return m.add(kind, [a, m.floats(shapes[1], 0.5, 2.0)])
    if draw.often(0.3):
        array = draw.rng.integers(-127, 128, shapes[1]).astype(np.int8)
        held = [m.constant(array), m.constant(np.float32(m.scale())), m.constant(np.int8(0))]
        b = m.add("DequantizeLinear", held) if draw.often(0.7) else m.floats(shapes[1])
    else:
        b = m.real(shapes[1])
    return m.add(kind, [b, a] if draw.often(0.2) else [a, b])


def several(m: QdqModel) -> str:
    shape = m.some_shape()
    values = [m.real(shape) for _ in range(m.draw.number(2, 3))]
    return m.add(m.draw.one_of("Sum", "Mean", "Max", "Min"), values)


def joined(m: QdqModel) -> str:
    shape = list(m.some_shape())
    axis, values = m.draw.number(0, len(shape) - 1), []
    for _ in range(m.draw.number(2, 3)):
        shape[axis] = m.draw.number(1, 5)
        values.append(m.real(shape))
    return m.add("Concat", values, axis=axis - len(shape) * m.draw.number(0, 1))


FUNCTIONS = (
    *("Relu", "LeakyRelu", "Elu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Selu"),
    *("Abs", "Neg", "Exp", "Erf", "Floor", "Ceil", "Round", "Celu", "ThresholdedRelu", "Mish", "Gelu", "Sin", "Cos"),
    *("Clip", "Sign", "Sqrt", "Log", "Reciprocal"),
)


def function(m: QdqModel) -> str:
    draw = m.draw
    kind, x = draw.one_of(*FUNCTIONS), m.real(m.some_shape())
    if kind == "Clip":
        low, high = sorted(draw.rng.uniform(-3, 3, 2))
        limits = [m.constant(np.float32(low)), m.constant(np.float32(high))]
        return m.add("Clip", [x, *draw.one_of(limits, limits[:1], ["", limits[1]])])
    if kind in ("Sqrt", "Log", "Reciprocal"):
        x = m.add("Clip", [x, m.constant(np.float32(0.3))])
    numbers = {"alpha": 0.3} if kind in ("LeakyRelu", "Elu", "HardSigmoid") and draw.often(0.5) else {}
    return m.add(kind, [x], **numbers)


def softmax(m: QdqModel) -> str:
    shape = m.some_shape()
    kind = m.draw.one_of("Softmax", "Softmax", "LogSoftmax")
    return m.add(kind, [m.real(shape)], axis=m.draw.number(-len(shape), len(shape) - 1))


def normalised(m: QdqModel) -> str:
    draw = m.draw
    kind = draw.one_of(
        "LayerNormalization", "InstanceNormalization", "GroupNormalization", "BatchNormalization", "LpNormalization"
    )
    if kind == "LayerNormalization":
        shape = m.some_shape(2)
        axis = draw.number(1, len(shape) - 1)
        part = shape[axis:]
        return m.add(
            kind, [m.real(shape), m.floats(part, 0.5, 2), *([m.floats(part)] if draw.often(0.7) else [])], axis=axis
        )
    if kind == "LpNormalization":
        shape = m.some_shape()
        return m.add(kind, [m.real(shape)], axis=draw.number(-len(shape), len(shape) - 1), p=2)
    shape = _image(m, channels=draw.one_of(2, 4, 6))
    count = shape[1]
    row = [m.floats([count], 0.5, 2), m.floats([count])]
    if kind == "GroupNormalization":
        return m.add(kind, [m.real(shape), *row], num_groups=draw.one_of(1, 2, count))
    if kind == "BatchNormalization":
        row += [m.floats([count]), m.floats([count], 0.5, 2)]
    return m.add(kind, [m.real(shape), *row])


def reduced(m: QdqModel) -> str:
    draw, shape = m.draw, m.some_shape()
    kind = draw.one_of(
        *("ReduceMean", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"),
        *("ReduceSumSquare", "ReduceLogSumExp", "ReduceProd"),
    )
    operands = [m.real(shape), *([m.constant(np.array(m.some_axes(len(shape)), np.int64))] if draw.often(0.8) else [])]
    return m.add(kind, operands, keepdims=draw.number(0, 1))


def resized(m: QdqModel) -> str:
    draw, shape = m.draw, _image(m, 1, 2)
    mode = draw.one_of("nearest", "linear", "cubic")
    if len(shape) == 3 and mode == "cubic":
        mode = "linear"
    results = [draw.number(1, 12) for _ in shape[2:]]
    operands = [m.real(shape), "", "", m.constant(np.array([*shape[:2], *results], np.int64))]
    how = draw.one_of("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
    rounding = draw.one_of("round_prefer_floor", "floor", "ceil", "round_prefer_ceil")
    more = {"nearest_mode": rounding} if mode == "nearest" else {}
    return m.add("Resize", operands, mode=mode, coordinate_transformation_mode=how, **more)


def moved(m: QdqModel) -> str:
    """What only moves elements; the result may be in another quantisation."""
    draw, shape = m.draw, m.some_shape()
    rank, x = len(shape), m.real(shape)
    kind = draw.one_of(
        "Pad", "Pad", "Slice", "Slice", "Gather", "Tile", "Expand", "Transpose", "Reshape", "Flatten", "Split", "Blocks"
    )
    integers = lambda values: m.constant(np.array(values, np.int64))  # noqa: E731
    if kind == "Pad":
        mode = draw.one_of("constant", "constant", "edge", "reflect", "wrap")
        limits = [size - 1 if mode == "reflect" else size if mode == "wrap" else 3 for size in shape]
        pads = [draw.number(0, max(min(limits[at % rank], 3), 0)) for at in range(2 * rank)]
        if mode == "constant" and draw.often(0.4):
            at = draw.number(0, 2 * rank - 1)
            pads[at] = -draw.number(0, shape[at % rank] - 1)
        filler = [m.constant(np.float32(draw.one_of(0.0, -1.0, 0.7)))] if draw.often(0.5) else []
        return m.add("Pad", [x, integers(pads), *filler], mode=mode)
    if kind == "Slice":
        axes, starts, ends, steps = sorted({axis % rank for axis in m.some_axes(rank)}), [], [], []
        for axis in axes:
            back, size = draw.often(0.4), shape[axis]
            first, step = draw.number(0, size - 1), draw.number(1, 3)
            starts.append(first - size * draw.number(0, 1))
            ends.append(-(size + 1) if back else draw.one_of(size, 1 << 40))
            steps.append(-step if back else step)
        return m.add("Slice", [x, integers(starts), integers(ends), integers(axes), integers(steps)])
    if kind == "Gather":
        axis = draw.number(0, rank - 1)
        where = draw.rng.integers(-shape[axis], shape[axis], draw.one_of((), (2,), (2, 2)))
        return m.add("Gather", [x, m.constant(where.astype(np.int64))], axis=axis)
    if kind == "Tile":
        return m.add("Tile", [x, integers([draw.one_of(1, 2, 3) for _ in shape])])
    if kind == "Expand":
        wide = [size if size > 1 else draw.one_of(1, 3) for size in shape]
        return m.add("Expand", [x, integers([2, *wide] if draw.often(0.3) else wide)])
    if kind == "Transpose":
        return m.add("Transpose", [x], perm=[int(axis) for axis in draw.rng.permutation(rank)])
    if kind == "Reshape":
        return m.add("Reshape", [x, integers(draw.one_of([-1], [0, -1], [1, -1, 1]))])
    if kind == "Flatten":
        return m.add("Flatten", [x], axis=draw.number(-rank, rank))
    if kind == "Split":
        axis = draw.number(0, rank - 1)
        if shape[axis] < 2:
            return m.add("Identity", [x])
        first, name = draw.number(1, shape[axis] - 1), f"v{len(m.nodes)}"
        sizes = integers([first, shape[axis] - first])
        m.nodes.append(helper.make_node("Split", [x, sizes], [f"{name}_other", name], axis=axis))
        return name
    apart = draw.often(0.5)
    size = draw.one_of(2, 3)
    block = (1, draw.number(1, 3), 2 * size, size) if apart else (1, size * size * draw.number(1, 2), 2, 3)
    if apart:
        return m.add("SpaceToDepth", [m.real(block)], blocksize=size)
    return m.add("DepthToSpace", [m.real(block)], blocksize=size, mode=draw.one_of("DCR", "CRD"))


def chosen(m: QdqModel) -> str:
    """Where, of a comparison."""
    shapes = _broadcast(m)
    a, b = m.real(shapes[0]), m.real(shapes[1])
    kind = m.draw.one_of("Greater", "Less", "GreaterOrEqual", "LessOrEqual")
    return m.add("Where", [m.add(kind, [a, b]), a, b])


def einsum(m: QdqModel) -> str:
    draw = m.draw
    equation, left, right = draw.one_of(
        ("ij,jk->ik", (3, 5), (5, 4)),
        ("bij,bjk->bik", (2, 3, 5), (2, 5, 4)),
        ("bhid,bhjd->bhij", (1, 2, 3, 4), (1, 2, 5, 4)),
        ("nchw,ck->nkhw", (1, 3, 4, 2), (3, 5)),
        ("i,j->ij", (3,), (4,)),
    )
    other = m.weights(right, len(right) - 1) if draw.often(0.4) else m.real(right)
    return m.add("Einsum", [m.real(left), other], equation=equation)


def running(m: QdqModel) -> str:
    shape = m.some_shape()
    axis = m.constant(np.int64(m.draw.number(-len(shape), len(shape) - 1)))
    return m.add("CumSum", [m.real(shape), axis], exclusive=m.draw.number(0, 1), reverse=m.draw.number(0, 1))


STEPS: Mapping[str, Step] = {
    **{"average_pool": average_pool, "max_pool": max_pool, "global_pool": global_pool, "convolution": convolution},
    **{"transposed": transposed, "gemm": gemm, "product": product, "binary": binary, "several": several},
    **{"joined": joined, "function": function, "softmax": softmax, "normalised": normalised, "reduced": reduced},
    **{"resized": resized, "moved": moved, "chosen": chosen, "einsum": einsum, "running": running},
}
"""Families of operators."""


@dataclass(frozen=True)
class Drawn:
    """A model and what it means."""

    name: str
    file: bytes
    feeds: Sequence[Mapping[str, Array]]
    real: Sequence[Array]
    """For each feed the float result, by ONNX Runtime, before it is quantised."""
    scale: float
    zero_point: int
    dtype: str
    op_type: str

    def steps(self, found: Array, at: int) -> Array:
        """The distance of integers from the float result of a feed, in steps; within the type's limits."""
        limits = np.iinfo(self.dtype)
        exact = self.real[at].astype(np.float64) / self.scale + self.zero_point
        return np.abs(found.astype(np.float64) - np.clip(exact, limits.min, limits.max).reshape(found.shape))

    @property
    def case(self) -> Case:
        """The model with what is wanted: the float results, rounded, and how far from them integers may be."""
        limits, feeds = np.iinfo(self.dtype), [list(feed.values()) for feed in self.feeds]
        steps = [np.rint(real.astype(np.float64) / self.scale + self.zero_point) for real in self.real]
        wanted = [[np.clip(array, limits.min, limits.max).astype(self.dtype)] for array in steps]
        every = [[np.ones(array.shape, bool) for array in outputs] for outputs in wanted]
        near = 1 if limits.bits == 8 else 3
        options = Options(allow_float=True)
        return Case(self.name, self.file, ".onnx", self.op_type, feeds, wanted, every, options, near)


class NotRun(Exception):
    """ONNX Runtime does not take the model."""


def drawn(name: str, step: Step | None = None) -> Drawn:
    """The model of a family and a number, such as `average_pool 17`; of another step where one is given.

    Raises:
        NotRun: ONNX Runtime does not run it.
    """
    m = QdqModel(Draw(name))
    y = (step or STEPS[name.split()[0]])(m)
    opset = m.draw.one_of(21, 21, 22, 23)
    kinds = {
        "uint8": TensorProto.UINT8,
        "int8": TensorProto.INT8,
        "uint16": TensorProto.UINT16,
        "int16": TensorProto.INT16,
    }
    takes = [helper.make_tensor_value_info(x, kinds[kind], shape) for x, (kind, shape) in m.inputs.items()]

    def proto(result: str, kind: int, shape: Sequence[int] | None) -> Any:
        held = [numpy_helper.from_array(value, key) for key, value in m.constants.items()]
        graph = helper.make_graph(m.nodes, "g", takes, [helper.make_tensor_value_info(result, kind, shape)], held)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)

    feeds = []
    for extreme in (False, True):
        feed = {}
        for x, (kind, shape) in m.inputs.items():
            limits = np.iinfo(kind)
            free = m.draw.rng.integers(limits.min, limits.max + 1, shape)
            ends = np.where(m.draw.rng.random(shape) < 0.5, limits.min, limits.max)
            feed[x] = (ends if extreme else free).astype(kind)
        feeds.append(feed)
    try:
        session = runtime_session(proto(y, TensorProto.FLOAT, None), optimised=False)
        real = [session.run(None, feed)[0] for feed in feeds]
    except Exception as error:
        raise NotRun(str(error)) from error
    dtype = m.draw.one_of("int8", "uint8", "int8", "uint8", "uint16", "int16")
    limits = np.iinfo(dtype)
    spread = max(float(np.abs(real[0]).max()), 1e-3) if real[0].size else 1.0
    scale = np.float32(spread / (limits.max - limits.min) * float(np.exp(m.draw.rng.uniform(-0.5, 1))) * 2)
    zero = m.zero_point(dtype)
    first = next((kind for kind, _ in m.inputs.values()), "")
    if m.draw.often(0.25) and first == dtype:  # in the operand's own quantisation
        node = next(n for n in m.nodes if n.op_type == "DequantizeLinear" and n.input[0] in m.inputs)
        scale, zero = m.constants[node.input[1]], m.constants[node.input[2]]
    m.nodes.append(helper.make_node("QuantizeLinear", [y, m.constant(scale), m.constant(zero)], ["y"]))
    file = proto("y", kinds[dtype], real[0].shape).SerializeToString()
    op_type = next(n for n in m.nodes[::-1] if n.op_type != "QuantizeLinear").op_type
    return Drawn(name, file, feeds, real, float(scale), int(zero), dtype, op_type)


def save(name: str, folder: Path) -> Path:
    """A model as a file, to look at."""
    path = folder / f"{name.replace(' ', '_')}.onnx"
    path.write_bytes(drawn(name).file)
    return path
