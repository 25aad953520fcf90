"""ONNX models as graphs in QDQ form: the table of operators, most of them a line of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph
from dovetail.ir.onnx_file import USER_DOMAIN, from_written
from dovetail.ir.operators.activation import UnaryKind
from dovetail.ir.operators.arithmetic import Clip
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind, Convert, Select
from dovetail.ir.operators.recurrent import RecurrentKind
from dovetail.ir.operators.reduction import CumSum, ReduceKind
from dovetail.ir.operators.user import Said, SaidOperand, UserOperator
from dovetail.ir.types import DType, Shape, TensorType
from dovetail.read.onnx import linear, movement, quantised, windows
from dovetail.read.onnx.file import Constant, OnnxNode, Tell, element_type, read_onnx, wrap
from dovetail.read.onnx.values import AGAIN, Importer, OnnxValues, fold
from dovetail.read.user import ADVICE, add_user, by_onnx_name


def load_onnx(
    file_name: str,
    data: bytes,
    name: str,
    folder: Path,
    shapes: Mapping[str, Shape] | None = None,
    tell: Tell = lambda sentence: None,
    operators: Iterable[type[UserOperator]] = (),
) -> Graph:
    """Import an ONNX model as the graph `name`; external data is read from inside `folder`, the model's, only.
    `shapes` are those of inputs whose sizes are open; `tell` is told what was taken for granted; `operators` are known
    beside those of ONNX and ONNX Runtime.

    Returns:
        The graph in QDQ form. Values keep ONNX's axis order (images NCHW); image operators work in NHWC between
        Transpose nodes, which `dovetail.ir.simplify` cancels.

    Raises:
        ModelError: the file is damaged, or says something Dovetail cannot honour.
    """
    v = OnnxValues(read_onnx(file_name, data, folder, shapes or {}, tell), name)
    if not v.file.inputs or not v.file.outputs:
        hint = "export the model again, with its inputs and outputs"
        raise ModelError("the model has no inputs or no outputs", where=file_name, hint=hint)
    for entry, kind in v.file.inputs:
        v.values[entry] = v.builder.input(entry, kind)
    own = by_onnx_name(operators)
    for op in v.file.nodes:
        found = v.again(op=op, read=set(), called=set())
        if (op.domain, op.op_type) in own:
            _import_user(found, own[op.domain, op.op_type])
        else:
            _import(found, op)
    return v.builder.finish([_output(v, position, tell) for position in range(len(v.file.outputs))])


def _output(v: OnnxValues, position: int, tell: Tell) -> str:
    """The graph value of an output, checked against its declaration."""
    name, declared = v.file.outputs[position]
    value = v.values.get(name)
    if value is None or v.fixed(value):
        hint = "take this output out of the model, or export it again"
        raise ModelError(f"output {name!r} is a constant or never computed", where=v.file.name, hint=hint)
    found = v.type_of(value)
    if declared is not None and declared.shape == found.shape and declared.dtype is not found.dtype:
        tell(f"{v.file.name}: output {name!r} is {found}, the model declares {declared.dtype.text}")
    elif declared is not None and declared != found:
        what = f"output {name!r} is {v.type_of(value)}, the model declares {declared}"
        hint = "correct the declared type, for instance with onnx.shape_inference, or export the model again"
        raise ModelError(what, where=v.file.name, hint=hint)
    return value


def _import(v: OnnxValues, op: OnnxNode) -> None:
    """Import one operator; what its type rule rejects is the model's fault."""
    if not any(op.outputs) or (not op.outputs[0] and op.op_type not in LATER_RESULTS):
        raise v.refuse("has no first result", AGAIN)
    if fold(v):
        return
    importer = IMPORTERS.get((op.domain, op.op_type))
    if importer is None:
        known = ", ".join(sorted(name for domain, name in IMPORTERS if domain == op.domain)) or "none"
        domain = op.domain or "ai.onnx"
        what = f"the operator {op.op_type} of the domain {domain} is not supported"
        raise v.refuse(f"{what}; supported there are {known}", ADVICE)
    try:
        value = importer(v)
        if value is not None:
            v.bind(value)
    except ValueError as error:
        raise v.refuse(str(error)) from error
    ignored = sorted(set(op.attributes) - v.read)
    if ignored:
        raise v.refuse(f"the attribute {ignored[0]} = {op.attributes[ignored[0]]} is not supported")


def _import_user(v: OnnxValues, kind: type[UserOperator]) -> None:
    """Import an operator of the user's own, or a bundled one."""
    op = v.op
    if not op.outputs or not all(op.outputs):
        raise v.refuse("leaves out one of its results", AGAIN)
    if op.domain == USER_DOMAIN:
        try:
            v.values[op.outputs[0]] = v.add(from_written(kind, op.attributes), v.operands)
        except ValueError as error:
            raise v.refuse(str(error)) from error
        return
    count = len(op.inputs) if kind.taken is None else kind.taken
    attributes = {name: v.attribute(name, None) for name in op.attributes}
    attributes = {name: value.array if isinstance(value, Constant) else value for name, value in attributes.items()}
    try:
        operands = [v.value(position) for position in range(count)]
        facts = [_said(v, position) for position in range(len(op.inputs))]
        said = Said(attributes, tuple(facts), tuple(SaidOperand(None) for _ in op.outputs))
        v.values.update(zip(op.outputs, add_user(v, kind, said, operands, op.outputs), strict=True))
    except ValueError as error:
        raise v.refuse(str(error)) from error


def _said(v: OnnxValues, position: int) -> SaidOperand | None:
    """The file's facts about an operand; None if it is left out."""
    name = v.op.inputs[position]
    if not name:
        return None
    if (held := v.constants.get(name)) is not None:
        dtype = held.dtype
        return SaidOperand(TensorType(tuple(held.array.shape), dtype) if dtype else None, array=held.array)
    return SaidOperand(v.type_of(v.value(position)))


def unary(kind: UnaryKind, alpha: float | None = None) -> Importer:
    """The importer of a float function; `alpha` is the default of its attribute, None where it has none."""
    return lambda v: v.unary(kind, v.real(), alpha=0.0 if alpha is None else float(v.attribute("alpha", alpha)))


def whole_already(kind: UnaryKind) -> Importer:
    """The importer of a function that leaves whole numbers as they are; some exporters apply it to integers."""
    return lambda v: v.value(0) if v.type_of(v.value(0)).dtype.is_integer else v.unary(kind, v.real())


def binary(kind: BinaryKind) -> Importer:
    """The importer of an operator of two values."""

    def build(v: OnnxValues) -> str:
        if len(v.op.inputs) != 2:
            raise v.refuse(f"has {len(v.op.inputs)} operands, expected 2", AGAIN)
        return v.binary(kind, v.value(0), v.value(1))

    return build


def several(kind: BinaryKind, mean: bool = False) -> Importer:
    """The importer of an operator of any number of values, taken from the left; `mean` divides by their number."""
    return lambda v: v.folded(kind, v.operands, mean, "part")


def power(v: OnnxValues) -> str:
    """Pow; the exponent may be of another type, in which a float one computes. A square is one product."""
    x, exponent = v.value(0), v.value(1)
    result, other, known = v.type_of(x).dtype, v.type_of(exponent).dtype, v.known(exponent)
    if result is DType.FLOAT32 and known is not None and known.size == 1 and float(known.reshape(-1)[0]) == 2.0:
        return v.square(x)
    held = DType.FLOAT32 if DType.FLOAT32 in (result, other) else result
    x = x if held is result else v.add(Convert(held), [x], "base")
    exponent = exponent if held is other else v.add(Convert(held), [exponent], "exponent")
    raised = v.binary(BinaryKind.POWER, x, exponent, "" if held is result else "raised")
    return raised if held is result else v.add(Convert(result), [raised])


def clip(v: OnnxValues) -> str:
    """Clip: attributes before opset 11, operands since; of integers too. The upper limit wins where they cross."""
    old = v.op.attributes
    low = float(v.attribute("min", -inf)) if "min" in old else v.one_number(1, -inf, "lower limit")
    high = float(v.attribute("max", inf)) if "max" in old else v.one_number(2, inf, "upper limit")
    x = v.value(0)
    kind = v.type_of(x).dtype
    low = min(low, high)
    if kind is DType.FLOAT32:
        return v.clamp(x, low, high)
    return v.add(Clip(int(max(low, kind.low)), int(min(high, kind.high)), kind), [x])


def celu(v: OnnxValues) -> str:
    """Celu: alpha * Elu(x / alpha)."""
    alpha = v.number(float(v.attribute("alpha", 1.0)))
    inner = v.over(v.real(), alpha, "scaled")
    return v.times(v.unary(UnaryKind.ELU, inner, "elu", 1.0), alpha)


def shrink(v: OnnxValues) -> str:
    """Shrink: 0 between -lambd and lambd, else nearer to 0 by the bias."""
    bias = float(v.attribute("bias", 0.0))
    kept = v.unary(UnaryKind.HARD_SHRINK, v.real(), "kept" if bias else "", float(v.attribute("lambd", 0.5)))
    return v.minus(kept, v.scaled(v.unary(UnaryKind.SIGN, kept, "sign"), bias)) if bias else kept


def relation(kind: CompareKind, exchanged: bool = False, negative: bool = False) -> Importer:
    """The importer of a comparison: of the operands in turn or exchanged, or its opposite."""

    def build(v: OnnxValues) -> str:
        operands = [v.value(place) for place in ((1, 0) if exchanged else (0, 1))]
        held = v.add(Compare(kind), operands, "holds" if negative else "")
        return v.negation(held) if negative else held

    return build


def is_nan(v: OnnxValues) -> str:
    """IsNaN: not equal to itself."""
    return v.negation(v.equal(v.real(), v.real(), "same"))


def is_inf(v: OnnxValues) -> str:
    """IsInf, of either sign or of both."""
    x = v.real()
    signs = [sign for sign in (1, -1) if v.attribute("detect_positive" if sign > 0 else "detect_negative", 1)]
    if not signs:
        raise v.refuse("finds infinities of neither sign")
    return v.folded(BinaryKind.MAXIMUM, [v.equal(x, v.number(sign * inf), "one") for sign in signs], False, "any")


def cast(v: OnnxValues) -> str:
    """Cast: of an integer to float32 its value with the scale 1, else a conversion."""
    v.attribute("saturate", 1)  # concerns float8 only
    v.attribute("round_mode", "up")  # concerns float8 only
    x = v.value(0)
    source, target = v.type_of(x).dtype, element_type(int(v.attribute("to", 0)))
    if target is source:
        return x
    if target is None or min(target.bits, source.bits) < 8:
        raise v.refuse(f"from {source.text} to {target.text if target else 'that type'} is not supported")
    if target is not DType.FLOAT32 or not source.is_integer:
        return v.add(Convert(target), [x])
    unit = v.scaling_of(v.stem, np.ones(1, np.float32), np.zeros(1, np.int32), -1, source)
    return v.dequantized(x, unit, v.stem)


def running_sums(v: OnnxValues) -> str:
    """CumSum along an axis that is constant."""
    (axis,), options = v.integers(1, "axis"), [bool(v.attribute(name, 0)) for name in ("exclusive", "reverse")]
    return v.add(CumSum(v.axis(axis, len(v.shape(v.value(0)))), *options), [v.value(0)])


def modulo(v: OnnxValues) -> str:
    """Mod with the sign of the divisor, or (`fmod`) with that of the dividend."""
    a, b = v.value(0), v.value(1)
    if not v.attribute("fmod", 0):
        return v.add(Binary(BinaryKind.MODULO), [a, b])
    if v.type_of(a).dtype is DType.FLOAT32:  # of the sizes, and the sign put back
        size, divisor = (v.unary(UnaryKind.ABSOLUTE, value, "size") for value in (a, b))
        rest = v.binary(BinaryKind.MODULO, size, divisor, "rest")
        return v.times(rest, v.unary(UnaryKind.SIGN, a, "sign"))
    return v.minus(a, v.times(v.over(a, b, "quotient"), b, "whole"))


def dropout(v: OnnxValues) -> str:
    """Dropout at inference: nothing."""
    v.attribute("ratio", 0.5)  # no meaning at inference
    v.attribute("seed", 0)
    if v.has(2) and v.constant_operand(2, "training mode").array.any():
        raise v.refuse("training_mode is set", "export the model for inference")
    v.one_result("the result with the mask is not supported")
    return v.value(0)


def shape(v: OnnxValues) -> None:
    """Shape: known, since every size is fixed."""
    part = v.shape(v.value(0))[int(v.attribute("start", 0)) : v.attribute("end", None)]
    v.constants[v.op.outputs[0]] = wrap(np.array(part, np.int64), DType.INT64)


_ARITHMETIC = (BinaryKind.ADD, BinaryKind.SUBTRACT, BinaryKind.MULTIPLY, BinaryKind.DIVIDE)

STANDARD: Mapping[str, Importer] = {
    # Our kinds are called as ONNX's operators; those that are not plain functions stand below.
    **{kind.value: unary(kind) for kind in UnaryKind if kind.value not in ("GeluTanh", "Rsqrt", "Square")},
    **{kind.value: binary(kind) for kind in _ARITHMETIC},
    **{kind.value: relation(kind) for kind in CompareKind},
    **{kind.value: windows.reduction(kind) for kind in ReduceKind},
    **{kind.name: linear.recurrent(kind) for kind in RecurrentKind},
    "And": lambda v: v.binary(BinaryKind.MINIMUM, v.value(0), v.value(1)),
    "ArgMax": windows.arg_extreme(largest=True),
    "ArgMin": windows.arg_extreme(largest=False),
    "AveragePool": windows.average_pool,
    "BatchNormalization": windows.batch_normalization,
    "Cast": cast,
    "Celu": celu,
    "Clip": clip,
    "Concat": movement.concat,
    "Conv": linear.conv,
    "ConvInteger": linear.conv_integer,
    "ConvTranspose": linear.conv_transpose,
    "CumSum": running_sums,
    "DepthToSpace": movement.depth_to_space,
    "DequantizeLinear": quantised.dequantize_linear,
    "Dropout": dropout,
    "DynamicQuantizeLinear": quantised.dynamic_quantize,
    "Einsum": lambda v: v.einsum(str(v.attribute("equation", "")), [v.real(at) for at in range(len(v.op.inputs))]),
    **{name: whole_already(UnaryKind(name)) for name in ("Ceil", "Floor", "Round")},
    "Elu": unary(UnaryKind.ELU, alpha=1.0),
    "Expand": movement.expand,
    "Flatten": movement.flatten,
    "Gather": movement.gather,
    "Gelu": quantised.MICROSOFT["Gelu"],
    "Gemm": linear.gemm,
    "GlobalAveragePool": windows.global_average_pool,
    "GlobalMaxPool": windows.global_pool(ReduceKind.MAXIMUM),
    "Greater": relation(CompareKind.LESS, exchanged=True),
    "GreaterOrEqual": relation(CompareKind.LESS_OR_EQUAL, exchanged=True),
    "GroupNormalization": windows.group_normalisation,
    "HardSigmoid": lambda v: v.hard_sigmoid(
        v.real(), float(v.attribute("alpha", 0.2)), float(v.attribute("beta", 0.5))
    ),
    "Identity": lambda v: v.value(0),
    "InstanceNormalization": windows.instance_normalisation,
    "IsInf": is_inf,
    "IsNaN": is_nan,
    "LayerNormalization": windows.layer_normalisation(centred=True),
    "LeakyRelu": unary(UnaryKind.LEAKY_RELU, alpha=0.01),
    "LogSoftmax": lambda v: windows.softmax_of(v, v.real(), v.opset, logarithm=True),
    "MatMul": linear.matmul,
    "MatMulInteger": linear.matmul_integer,
    "Max": several(BinaryKind.MAXIMUM),
    "MaxPool": windows.max_pool,
    "Mean": several(BinaryKind.ADD, mean=True),
    "Min": several(BinaryKind.MINIMUM),
    "Mish": lambda v: v.mish(v.real()),
    "Mod": modulo,
    "Not": lambda v: v.negation(v.value(0)),
    "Or": lambda v: v.binary(BinaryKind.MAXIMUM, v.value(0), v.value(1)),
    "PRelu": lambda v: v.binary(BinaryKind.PRELU, v.real(0), v.real(1)),
    "Pad": movement.pad,
    "Pow": power,
    "QLinearConv": quantised.qlinear_conv,
    "QLinearMatMul": quantised.qlinear_matmul,
    "QuantizeLinear": quantised.quantize_linear,
    "RMSNormalization": windows.layer_normalisation(centred=False),
    "ReduceL1": windows.reduction(ReduceKind.SUM, before=UnaryKind.ABSOLUTE),
    "ReduceL2": windows.reduction(ReduceKind.SUM, UnaryKind.SQUARE, UnaryKind.SQUARE_ROOT),
    "ReduceLogSum": windows.reduction(ReduceKind.SUM, after=UnaryKind.LOGARITHM),
    "ReduceLogSumExp": windows.log_sum_exp,
    "ReduceMean": windows.reduce_mean,
    "ReduceSumSquare": windows.reduction(ReduceKind.SUM, before=UnaryKind.SQUARE),
    "Relu": lambda v: v.clamp(v.real(), 0.0, inf),
    "Reshape": movement.reshape,
    "Resize": movement.resize,
    "Selu": lambda v: v.selu(
        v.real(), float(v.attribute("alpha", 1.6732631921768188)), float(v.attribute("gamma", 1.0507010221481323))
    ),
    "Shape": shape,
    "Shrink": shrink,
    "Slice": movement.slice_,
    "Softmax": lambda v: windows.softmax_of(v, v.real(), v.opset),
    "SpaceToDepth": movement.space_to_depth,
    "Split": movement.split,
    "Squeeze": movement.squeeze,
    "Sum": several(BinaryKind.ADD),
    "Swish": lambda v: v.swish(v.real(), float(v.attribute("alpha", 1.0))),
    "ThresholdedRelu": unary(UnaryKind.THRESHOLDED_RELU, alpha=1.0),
    "Tile": movement.tile,
    "Transpose": movement.transpose,
    "Unsqueeze": movement.unsqueeze,
    "Where": lambda v: v.add(Select(), v.operands),
    "Xor": relation(CompareKind.EQUAL, negative=True),
}
"""Operators of the domain ai.onnx."""

LATER_RESULTS = ("GRU", "LSTM", "RNN")
"""Operators whose first result may be left out."""

IMPORTERS: Mapping[tuple[str, str], Importer] = {
    **{("", name): build for name, build in STANDARD.items()},
    **{("com.microsoft", name): build for name, build in quantised.MICROSOFT.items()},
    **{(domain, name): build for domain in quantised.DOMAINS for name, build in quantised.QONNX.items()},
}
"""Every ONNX operator Dovetail reads."""
