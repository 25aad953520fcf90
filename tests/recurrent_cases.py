"""Random recurrent layers for the tests of core kernels, and recurrent TFLite models for TensorFlow Lite Micro."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from core_kernel_cases import Case, Maker
from dovetail.ir.operators.recurrent import Curve, FixedLstm, Recurrent, RecurrentKind, RowProducts, Scaling
from dovetail.ir.types import Array, DType
from tflite_writer import ModelWriter


def fixed_lstm(maker: Maker) -> Case:
    steps, batch, depth, hidden = (maker.number(1, most) for most in (5, 3, 9, 7))

    def scaling(low: int, high: int) -> Scaling:
        return maker.number(1 << 30, (1 << 31) - 1), maker.number(low, high)

    bits = maker.number(9, 15)
    operator = FixedLstm(
        maker.number(-128, 127),
        maker.number(-128, 127),
        tuple(scaling(-6, 3) for _ in range(4)),
        tuple(scaling(-6, 3) for _ in range(4)),
        scaling(-16, -13),
        scaling(-18, -13),
        scaling(-25, -20),
        bits,
        maker.one_of(1 << 15, 32767, maker.number(0, 20000)),
    )
    operands = (
        maker.input((steps, batch, depth), DType.INT8),
        maker.constant((4 * hidden, depth), DType.INT8),
        maker.constant((4 * hidden, hidden), DType.INT8),
        maker.constant((4 * hidden,), DType.INT32, 1 << 16),
        maker.input((2, batch, hidden), DType.INT16),
    )
    case = maker.case(maker.add(operator, *operands))
    inputs = dict(case.inputs)
    inputs[operands[4]] = inputs[operands[4]].copy()
    inputs[operands[4]][0] >>= 8  # hidden values are of int8 range
    return Case(case.graph, inputs)


def row_products(maker: Maker) -> Case:
    rows, depth, dtype = maker.number(1, 6), maker.number(1, 40), maker.one_of(DType.INT8, DType.INT16)
    operands = [maker.input((maker.number(1, 3), rows, depth), dtype), maker.constant((rows, depth), dtype)]
    if maker.one_of(True, False):
        operands.append(maker.constant((rows,), DType.INT32))
    total = maker.add(RowProducts(maker.number(-128, 127) if dtype is DType.INT8 else 0), *operands)
    return maker.case(maker.clip(maker.requantize(total)) if maker.one_of(True, False) else total)


def float_rows(maker: Maker) -> Case:
    rows, depth = maker.number(1, 6), maker.number(1, 40)
    x = maker.input((maker.number(1, 3), rows, depth), DType.FLOAT32)
    operands = [x, maker.constant((rows, depth), DType.FLOAT32)]
    operands += [maker.constant((rows,), DType.FLOAT32)] if maker.one_of(True, False) else []
    return maker.case(maker.add(RowProducts(), *operands))


def recurrent(maker: Maker) -> Case:
    kind = maker.one_of(*RecurrentKind)
    steps, batch, depth, hidden = (maker.number(1, most) for most in (4, 3, 5, 6))
    curves = tuple(maker.one_of(*Curve) for _ in range({"LSTM": 3, "GRU": 2, "RNN": 1}[kind.value]))
    reset_after = kind is RecurrentKind.GRU and maker.one_of(True, False)
    lines = tuple((maker.one_of(0.2, 1 / 6, -1.5), maker.one_of(0.5, 0.0)) for _ in curves)
    limits = maker.one_of((0.0, 0.0), (0.5, 0.0), (0.0, 0.25) if kind is RecurrentKind.LSTM else (2.0, 0.0))
    operator = Recurrent(kind, maker.one_of(True, False), reset_after, maker.one_of((), curves), lines, *limits)
    shapes = [(kind.gates * hidden, depth), (kind.gates * hidden, hidden), (2 * kind.gates * hidden,)]
    operands = [maker.input((steps, batch, depth), DType.FLOAT32), *(_small(maker, shape) for shape in shapes)]
    operands.append(maker.input((kind.kept, batch, hidden), DType.FLOAT32))
    if kind is RecurrentKind.LSTM and maker.one_of(True, False):
        operands.append(_small(maker, (3 * hidden,)))
    case = maker.case(maker.add(operator, *operands))
    return Case(case.graph, {name: (array / 50).astype(np.float32) for name, array in case.inputs.items()})


def _small(maker: Maker, shape: tuple[int, ...]) -> str:
    values = np.random.default_rng(maker.number(0, 1 << 30)).normal(0, 0.5, shape)
    return maker.builder.constant("k", values.astype(np.float32))


EXACT: Mapping[str, Callable[[Maker], Case]] = {"fixed_lstm": fixed_lstm, "row_products": row_products}


@dataclass(frozen=True)
class Streamed:
    """A model and its inputs, call after call."""

    model: bytes
    inputs: tuple[Array, ...]


def _scale(random: Any, low: float, high: float) -> float:
    return float(np.float32(np.exp(random.uniform(np.log(low), np.log(high)))))


def _calls(random: Any, shape: tuple[int, ...], count: int = 4) -> tuple[Array, ...]:
    return tuple(random.integers(-128, 128, shape).astype(np.int8) for _ in range(count))


def svdf_model(seed: int, state: str) -> Streamed:
    """One SVDF with a state of INT16 or INT8."""
    random = np.random.default_rng(seed)
    batch, depth, rank, steps = (int(random.integers(1, most)) for most in (4, 20, 4, 10))
    filters = rank * int(random.integers(1, 8))
    writer, wide = ModelWriter(), state == "INT16"
    x_scale, w_scale = _scale(random, 0.01, 0.1), _scale(random, 0.002, 0.02)
    step, time_scale = _scale(random, 0.0005, 0.003) * (1 if wide else 60), 0.00003 if wide else 0.008
    weights = random.integers(-127, 128, (filters, depth)).astype(np.int8)
    times = random.integers(-32767 if wide else -127, 32768 if wide else 128, (filters, steps))
    bias = random.integers(-20000, 20000, filters // rank).astype(np.int32)
    x = writer.tensor("x", (batch, depth), "INT8", None, (x_scale, int(random.integers(-128, 128))))
    operands = [
        x,
        writer.tensor("weights", weights.shape, "INT8", weights, (w_scale, 0)),
        writer.tensor("times", times.shape, state, times.astype(np.int16 if wide else np.int8), (time_scale, 0)),
        writer.tensor("bias", bias.shape, "INT32", bias, (float(np.float32(step) * np.float32(time_scale)), 0)),
        writer.tensor(
            "state",
            (batch, filters * steps),
            state,
            None,
            (step, 0 if wide else int(random.integers(-20, 20))),
            variable=True,
        ),
    ]
    y = writer.tensor(
        "y", (batch, filters // rank), "INT8", None, (_scale(random, 0.05, 0.3), int(random.integers(-128, 128)))
    )
    writer.operator("SVDF", operands, [y], "SVDFOptions", rank=rank, fusedActivationFunction=int(random.integers(2)))
    writer.ends([x], [y])
    return Streamed(writer.finish(), _calls(random, (batch, depth), steps + 2))


def lstm_model(seed: int, most: tuple[int, int, int, int] = (6, 4, 14, 10), weight_scale: float = 0.004) -> Streamed:
    """One UNIDIRECTIONAL_SEQUENCE_LSTM; `most` limits steps, batch, inputs and hidden values."""
    random = np.random.default_rng(seed)
    steps, batch, depth, hidden = (int(random.integers(1, size)) for size in most)
    time_major, bits = bool(random.integers(2)), int(random.integers(9, 16))
    writer = ModelWriter()
    scale, shown = (_scale(random, 0.005, 0.03), _scale(random, 0.004, 0.012))
    zero_points = [int(value) for value in random.integers(-100, 100, 2)]
    shape = (steps, batch) if time_major else (batch, steps)
    x = writer.tensor("x", (*shape, depth), "INT8", None, (scale, zero_points[0]))
    scales = [weight_scale * _scale(random, 0.5, 2.0) for _ in range(8)]
    weights = []
    for gate, of in enumerate(scales):
        array = random.integers(-127, 128, (hidden, depth if gate < 4 else hidden)).astype(np.int8)
        weights.append(writer.tensor(f"w{gate}", array.shape, "INT8", array, (of, 0)))
    biases = []
    for of in scales[:4]:
        array = random.integers(-9000, 9000, hidden).astype(np.int32)
        product = float(np.float32(scale) * np.float32(of))
        biases.append(writer.tensor("bias", (hidden,), "INT32", array, (product, 0)))
    kept = [
        writer.tensor("hidden", (batch, hidden), "INT8", None, (shown, zero_points[1]), variable=True),
        writer.tensor("cell", (batch, hidden), "INT16", None, (2.0**-bits, 0), variable=True),
    ]
    y = writer.tensor("y", (*shape, hidden), "INT8", None, (shown, zero_points[1]))
    inputs = [x, *weights, -1, -1, -1, *biases, -1, -1, *kept, -1, -1, -1, -1]
    writer.operator(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        inputs,
        [y],
        "UnidirectionalSequenceLSTMOptions",
        fusedActivationFunction=4,
        cellClip=float(random.choice([0.0, 0.05])),
        projClip=0.0,
        timeMajor=time_major,
    )
    writer.ends([x], [y])
    return Streamed(writer.finish(), _calls(random, (*shape, depth)))


def variable_model(first: Array | None, zero_point: int = 5) -> Streamed:
    """y = x + what y was before, kept in a resource variable; `first` is what CALL_ONCE assigns, None without one."""
    writer, step = ModelWriter(), (0.1, zero_point)
    x, handle = writer.tensor("x", (1, 4), "INT8", None, step), writer.tensor("handle", (), "RESOURCE")
    before, y = (writer.tensor(name, (1, 4), "INT8", None, step) for name in ("before", "y"))
    if first is not None:
        writer.operator("CALL_ONCE", [], [], "CallOnceOptions", initSubgraphIndex=1)
    writer.operator("VAR_HANDLE", [], [handle], "VarHandleOptions", container="", sharedName="kept")
    writer.operator("READ_VARIABLE", [handle], [before], "ReadVariableOptions")
    writer.operator("ADD", [before, x], [y], "AddOptions", potScaleInt16=False)
    writer.operator("ASSIGN_VARIABLE", [handle, y], [], "AssignVariableOptions")
    writer.ends([x], [y])
    if first is not None:
        writer.subgraph()
        there = writer.tensor("there", (), "RESOURCE")
        constant = writer.tensor("first", (1, 4), "INT8", first, step)
        writer.operator("VAR_HANDLE", [], [there], "VarHandleOptions", container="", sharedName="kept")
        writer.operator("ASSIGN_VARIABLE", [there, constant], [], "AssignVariableOptions")
        writer.ends([], [], 1)
    return Streamed(writer.finish(), _calls(np.random.default_rng(3), (1, 4), 6))


def streaming_model(seed: int = 0) -> Streamed:
    """Frames of 8 values: a ring of the last 5 in a variable, a convolution over it, and an SVDF behind."""
    random = np.random.default_rng(seed)
    writer, step = ModelWriter(), (0.05, -3)
    x, handle = writer.tensor("frame", (1, 1, 8, 1), "INT8", None, step), writer.tensor("handle", (), "RESOURCE")
    old, kept = (
        writer.tensor(name, shape, "INT8", None, step)
        for name, shape in (("old", (1, 5, 8, 1)), ("kept", (1, 4, 8, 1)))
    )
    ring = writer.tensor("ring", (1, 5, 8, 1), "INT8", None, step)
    numbers = [
        writer.tensor(name, (4,), "INT32", np.array(values, np.int32))
        for name, values in (("begin", (0, 1, 0, 0)), ("size", (1, 4, 8, 1)))
    ]
    filters = random.integers(-127, 128, (4, 5, 3, 1)).astype(np.int8)
    weights = writer.tensor("filters", filters.shape, "INT8", filters, (0.01, 0))
    bias = writer.tensor("bias", (4,), "INT32", random.integers(-400, 400, 4).astype(np.int32), (0.0005, 0))
    maps = writer.tensor("maps", (1, 1, 6, 4), "INT8", None, (0.04, -128))
    flat = writer.tensor("flat", (1, 24), "INT8", None, (0.04, -128))
    shape = writer.tensor("shape", (2,), "INT32", np.array([1, 24], np.int32))
    feature = random.integers(-127, 128, (6, 24)).astype(np.int8)
    times = random.integers(-32767, 32768, (6, 4)).astype(np.int16)
    operands = [
        flat,
        writer.tensor("feature", feature.shape, "INT8", feature, (0.01, 0)),
        writer.tensor("times", times.shape, "INT16", times, (0.00003, 0)),
        writer.tensor("more", (3,), "INT32", random.integers(-9000, 9000, 3).astype(np.int32), (3e-8, 0)),
        writer.tensor("state", (1, 24), "INT16", None, (0.001, 0), variable=True),
    ]
    y = writer.tensor("y", (1, 3), "INT8", None, (0.1, 4))
    writer.operator("VAR_HANDLE", [], [handle], "VarHandleOptions", container="", sharedName="ring")
    writer.operator("READ_VARIABLE", [handle], [old], "ReadVariableOptions")
    writer.operator("SLICE", [old, *numbers], [kept], "SliceOptions")
    writer.operator("CONCATENATION", [kept, x], [ring], "ConcatenationOptions", axis=1)
    writer.operator("ASSIGN_VARIABLE", [handle, ring], [], "AssignVariableOptions")
    writer.operator(
        "CONV_2D",
        [ring, weights, bias],
        [maps],
        "Conv2DOptions",
        padding=1,
        strideW=1,
        strideH=1,
        dilationWFactor=1,
        dilationHFactor=1,
        fusedActivationFunction=1,
    )
    writer.operator("RESHAPE", [maps, shape], [flat], "ReshapeOptions", newShape=[1, 24])
    writer.operator("SVDF", operands, [y], "SVDFOptions", rank=2, fusedActivationFunction=0)
    writer.ends([x], [y])
    return Streamed(writer.finish(), _calls(random, (1, 1, 8, 1), 9))


def float_model(seed: int, opcode: str) -> Streamed:
    """One float SVDF or UNIDIRECTIONAL_SEQUENCE_LSTM."""
    random = np.random.default_rng(seed)
    writer = ModelWriter()
    batch, depth, hidden, steps = (int(random.integers(1, most)) for most in (3, 9, 8, 6))

    def real(*shape: int) -> Array:
        return np.asarray(random.normal(0, 0.5, shape).astype(np.float32))

    def constant(*shape: int) -> int:
        return writer.tensor("constant", shape, "FLOAT32", real(*shape))

    if opcode == "SVDF":
        rank, shape = int(random.integers(1, 4)), (batch, depth)
        filters, result = hidden * rank, (batch, hidden)
        state = writer.tensor("state", (batch, filters * steps), "FLOAT32", variable=True)
        inputs = [-1, constant(filters, depth), constant(filters, steps), constant(hidden), state]
        options = {"rank": rank, "fusedActivationFunction": int(random.choice([0, 1, 3]))}
        kind = "SVDFOptions"
    else:
        time_major = bool(random.integers(2))
        lead = (steps, batch) if time_major else (batch, steps)
        shape, result = (*lead, depth), (*lead, hidden)
        weights = [constant(hidden, depth) for _ in range(4)] + [constant(hidden, hidden) for _ in range(4)]
        kept = [writer.tensor(name, (batch, hidden), "FLOAT32", variable=True) for name in ("hidden", "cell")]
        biases = [constant(hidden) for _ in range(4)]
        inputs = [-1, *weights, -1, -1, -1, *biases, -1, -1, *kept, -1, -1, -1, -1]
        options = {"fusedActivationFunction": 4, "timeMajor": time_major}
        kind = "UnidirectionalSequenceLSTMOptions"
    inputs[0] = writer.tensor("x", shape, "FLOAT32")
    y = writer.tensor("y", result, "FLOAT32")
    writer.operator(opcode, inputs, [y], kind, **options)
    writer.ends([inputs[0]], [y])
    return Streamed(writer.finish(), tuple(real(*shape) * 3 for _ in range(steps + 2)))
