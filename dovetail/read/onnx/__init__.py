"""ONNX models as graphs in QDQ form: the table of operators, most of them a line of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import inf
from pathlib import Path

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph
from dovetail.ir.onnx_file import USER_DOMAIN, from_written
from dovetail.ir.operators.activation import UnaryKind
from dovetail.ir.operators.arithmetic import Clip
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind, Select
from dovetail.ir.operators.movement import Gather
from dovetail.ir.operators.recurrent import RecurrentKind
from dovetail.ir.operators.reduction import CumSum, ReduceKind
from dovetail.ir.operators.user import Said, SaidOperand, UserOperator
from dovetail.ir.types import DType, Shape, TensorType
from dovetail.notes import Kind, Note, Tell, silent
from dovetail.read.attention import with_attention
from dovetail.read.einsum import einsum
from dovetail.read.onnx import control, linear, movement, quantised, sequence, windows
from dovetail.read.onnx.file import Constant, OnnxNode, element_type, read_onnx, wrap
from dovetail.read.onnx.values import QONNX_DOMAINS, Importer, OnnxValues, fold
from dovetail.read.user import ADVICE, add_user, by_onnx_name
from dovetail.read.values import Value, words


def load_onnx(
    file_name: str,
    data: bytes,
    name: str,
    folder: Path,
    shapes: Mapping[str, Shape] | None = None,
    tell: Tell = silent,
    operators: Iterable[type[UserOperator]] = (),
    faults: list[ModelError] | None = None,
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
        v.values[entry] = v.graph_input(entry, kind)
    v.faults, v.tell, v.own = faults, tell, by_onnx_name(operators)
    _walk(v, v.file.nodes)
    if faults:
        return v.finished([v.values[name] for name, _ in v.file.outputs if name in v.values])
    return with_attention(v.finished([_output(v, position, tell) for position in range(len(v.file.outputs))]))


def _walk(v: OnnxValues, nodes: Iterable[OnnxNode]) -> None:
    """Import operators."""
    for op in nodes:
        found = v.again(op=op, read=set(), called=set())
        v.steps.append(op)
        if v.depth:
            found.check_steps(len(v.steps))
        with found.refusing():
            if (op.domain, op.op_type) in v.own:
                _import_user(found, v.own[op.domain, op.op_type])
            else:
                _import(found)


def _output(v: OnnxValues, position: int, tell: Tell) -> Value:
    """The graph value of an output, checked against its declaration."""
    name, declared = v.file.outputs[position]
    if name not in v.values and name not in v.constants:
        hint = "take this output out of the model, or export it again"
        raise ModelError(f"output {name!r} is never computed", where=v.file.name, hint=hint)
    value = v.named_value(name)
    found = value.type
    if not found.elements:
        raise ModelError(f"output {name!r} has no elements: {found}", where=v.file.name, hint="leave this output out")
    if declared is not None and declared.shape == found.shape and declared.dtype is not found.dtype:
        what = f"{v.file.name}: output {name!r} is {found}, the model declares {declared.dtype.text}"
        tell(Note(Kind.ASSUMED, what))
    elif declared is not None and declared != found:
        what = f"output {name!r} is {value.type}, the model declares {declared}"
        hint = "correct the declared type, for instance with onnx.shape_inference, or export the model again"
        raise ModelError(what, where=v.file.name, hint=hint)
    return value


def _import(v: OnnxValues) -> None:
    """Import one operator."""
    op = v.op
    v.wrong_if(not any(op.outputs) or (not op.outputs[0] and op.op_type not in LATER_RESULTS), "has no first result")
    if fold(v):
        return
    importer = IMPORTERS.get((op.domain, op.op_type))
    if importer is None:
        what = f"the operator {op.op_type} of the domain {op.domain or 'ai.onnx'} is not supported"
        raise v.refuse(what, f"{ADVICE}; docs/support.md lists those that are known")
    value = importer(v)
    if value is not None:
        v.bind(value)
    for name in sorted(set(op.attributes) - v.read):
        raise v.refuse(f"the attribute {name} = {op.attributes[name]} is not supported")


def _import_user(v: OnnxValues, kind: type[UserOperator]) -> None:
    """Import an operator of the user's own, or a bundled one."""
    op = v.op
    v.wrong_if(not op.outputs or not all(op.outputs), "leaves out one of its results")
    if op.domain == USER_DOMAIN:
        v.values[op.outputs[0]] = v.add(from_written(kind, op.attributes), v.operands)
        return
    count = len(op.inputs) if kind.taken is None else kind.taken
    attributes = {name: value.array if isinstance(value, Constant) else value for name, value in op.attributes.items()}
    operands = [v.value(position) for position in range(count)]
    facts = tuple(_said(v, position) for position in range(len(op.inputs)))
    said = Said(attributes, facts, (SaidOperand(None),) * len(op.outputs))
    v.values.update(zip(op.outputs, add_user(v, kind, said, operands, op.outputs), strict=True))


def _said(v: OnnxValues, position: int) -> SaidOperand | None:
    """The file's facts about an operand; None if it is left out."""
    name = v.op.inputs[position]
    if not name:
        return None
    if (held := v.constants.get(name)) is not None:
        return SaidOperand(TensorType(tuple(held.array.shape), held.dtype) if held.dtype else None, array=held.array)
    return SaidOperand(v.value(position).type)


def unary(kind: UnaryKind, alpha: float = 0.0) -> Importer:
    """The importer of a float function; `alpha` is the default of its attribute, 0 where it has none."""
    return lambda v: v.unary(kind, v.real(), alpha=v.attribute("alpha", alpha) if alpha else 0.0)


def gelu(v: OnnxValues) -> Value:
    """Gelu, exact or by tanh."""
    return v.gelu(v.real(), v.choice("approximate", "none", "none", "tanh") == "tanh")


def whole_already(v: OnnxValues, kind: UnaryKind) -> Value:
    """A function that leaves whole numbers as they are; some exporters apply it to integers."""
    return v.x if v.x.dtype.is_integer else v.unary(kind, v.real())


def binary(kind: BinaryKind) -> Importer:
    """The importer of an operator of two values."""
    return lambda v: v.binary(kind, v.x, v.value(1))


def several(kind: BinaryKind, mean: bool = False) -> Importer:
    """The importer of an operator of any number of values, taken from the left; `mean` divides by their number."""
    return lambda v: v.folded(kind, v.operands, mean, "part")


def biased(v: OnnxValues, kind: UnaryKind) -> Value:
    """A function of a sum whose second term may be absent."""
    return v.unary(kind, v.plus(v.real(), v.real(1), "biased") if v.has(1) else v.real())


def power(v: OnnxValues) -> Value:
    """Pow; the exponent may be of another type, in which a float one computes. A square is one product."""
    x, exponent = v.x, v.value(1)
    result, other, known = x.dtype, exponent.dtype, v.known(exponent)
    if result is DType.FLOAT32 and known is not None and known.size == 1 and float(known.reshape(-1)[0]) == 2.0:
        return v.square(x)
    held = DType.FLOAT32 if DType.FLOAT32 in (result, other) else result
    exponent = exponent if held is other else v.convert(exponent, held, "exponent")
    if held is result:
        return v.binary(BinaryKind.POWER, x, exponent)
    return v.convert(v.binary(BinaryKind.POWER, v.convert(x, held, "base"), exponent, "raised"), result)


def clip(v: OnnxValues) -> Value:
    """Clip: attributes before opset 11, operands since; of integers too. The upper limit wins where they cross."""
    low = v.attribute("min", v.one_number(1, -inf, "lower limit"))
    high = v.attribute("max", v.one_number(2, inf, "upper limit"))
    x, low = v.x, min(low, high)
    kind = x.dtype
    if kind is DType.FLOAT32:
        return v.clamp(x, low, high)
    return v.add(Clip(int(max(low, kind.low)), int(min(high, kind.high)), kind), [x])


def celu(v: OnnxValues) -> Value:
    """Celu: alpha * Elu(x / alpha)."""
    alpha = v.number(v.attribute("alpha", 1.0))
    return v.times(v.unary(UnaryKind.ELU, v.over(v.real(), alpha, "scaled"), "elu", 1.0), alpha)


def shrink(v: OnnxValues) -> Value:
    """Shrink: 0 between -lambd and lambd, else nearer to 0 by the bias."""
    bias = v.attribute("bias", 0.0)
    kept = v.unary(UnaryKind.HARD_SHRINK, v.real(), "kept" if bias else "", v.attribute("lambd", 0.5))
    return v.minus(kept, v.scaled(v.unary(UnaryKind.SIGN, kept, "sign"), bias)) if bias else kept


def relation(kind: CompareKind, exchanged: bool = False, negative: bool = False) -> Importer:
    """The importer of a comparison: of the operands in turn or exchanged, or its opposite."""

    def build(v: OnnxValues) -> Value:
        held = v.add(Compare(kind), v.operands[::-1] if exchanged else v.operands, "holds" if negative else "")
        return v.negation(held) if negative else held

    return build


def is_inf(v: OnnxValues) -> Value:
    """IsInf, of either sign or of both."""
    x = v.real()
    signs = {inf: "detect_positive", -inf: "detect_negative"}
    found = [v.equal(x, v.number(sign), "one") for sign, name in signs.items() if v.attribute(name, 1)]
    v.refuse_if(not found, "finds infinities of neither sign")
    return v.folded(BinaryKind.MAXIMUM, found, False, "any")


def cast(v: OnnxValues) -> Value:
    """Cast: of an integer to float32 its value with the scale 1, else a conversion."""
    v.given("saturate")  # concerns float8 only
    v.given("round_mode")  # concerns float8 only
    return cast_to(v, element_type(v.attribute("to", 0)))


def cast_to(v: OnnxValues, target: DType | None) -> Value:
    """The operand's numbers in another type."""
    x = v.x
    source = x.dtype
    if target is source:
        return x
    if target is None or min(target.bits, source.bits) < 8:
        raise v.refuse(f"from {source.text} to {target.text if target else 'that type'} is not supported")
    if target is not DType.FLOAT32 or not source.is_integer:
        return v.convert(x, target)
    return v.dequantized(x, v.scaling_of(v.stem, np.ones(1, np.float32), np.zeros(1, np.int32), -1, source), v.stem)


def running_sums(v: OnnxValues) -> Value:
    """CumSum along an axis that is constant."""
    x, axis = v.x, int(v.one_number(1, 0.0, "axis"))
    return v.add(CumSum(v.axis(axis, x.rank), v.attribute("exclusive", False), v.attribute("reverse", False)), [x])


def modulo(v: OnnxValues) -> Value:
    """Mod with the sign of the divisor, or (`fmod`) with that of the dividend."""
    a, b = v.x, v.value(1)
    if not v.attribute("fmod", False):
        return v.add(Binary(BinaryKind.MODULO), [a, b])
    if a.dtype is DType.FLOAT32:  # of the sizes, and the sign put back
        size, divisor = (v.unary(UnaryKind.ABSOLUTE, value, "size") for value in (a, b))
        return v.times(v.binary(BinaryKind.MODULO, size, divisor, "rest"), v.unary(UnaryKind.SIGN, a, "sign"))
    return v.minus(a, v.times(v.over(a, b, "quotient"), b, "whole"))


def dropout(v: OnnxValues) -> Value:
    """Dropout at inference: nothing."""
    v.given("ratio")  # no meaning at inference
    v.given("seed")
    training = v.has(2) and v.array(2, "training mode").any()
    v.refuse_if(training, "training_mode is set", "export the model for inference")
    v.one_result("the result with the mask is not supported")
    return v.x


def shape(v: OnnxValues) -> None:
    """Shape: known, since every size is fixed."""
    part = v.x.shape[v.attribute("start", 0) : v.given("end")]
    v.constants[v.op.outputs[0]] = wrap(np.array(part, np.int64), DType.INT64)


def size(v: OnnxValues) -> None:
    """Size: known, since every size is fixed."""
    v.constants[v.op.outputs[0]] = wrap(np.array(v.x.elements, np.int64), DType.INT64)


def cast_like(v: OnnxValues) -> Value:
    """CastLike: Cast to the type of another value."""
    v.given("saturate")  # concerns float8 only
    v.given("round_mode")
    return cast_to(v, v.value(1).dtype)


_ARITHMETIC = (BinaryKind.ADD, BinaryKind.SUBTRACT, BinaryKind.MULTIPLY, BinaryKind.DIVIDE)

STANDARD: Mapping[str, Importer] = {
    # Our kinds are called as ONNX's operators; those that are not plain functions stand below.
    **{kind.value: unary(kind) for kind in UnaryKind if kind.value not in ("GeluTanh", "Rsqrt", "Square")},
    **{kind.value: binary(kind) for kind in _ARITHMETIC},
    **{kind.value: relation(kind) for kind in CompareKind},
    **{kind.value: windows.reduction(kind) for kind in ReduceKind},
    **{kind.name: partial(linear.recurrent, kind=kind) for kind in RecurrentKind},
    "And": binary(BinaryKind.MINIMUM),
    "ArgMax": partial(windows.arg_extreme, largest=True),
    "ArgMin": partial(windows.arg_extreme, largest=False),
    "Attention": sequence.attention,
    "AveragePool": lambda v: windows.pooled(v, windows.average),
    "BatchNormalization": windows.batch_normalization,
    "Cast": cast,
    "CastLike": cast_like,
    "Celu": celu,
    "Clip": clip,
    "Concat": lambda v: v.concat(v.operands, v.axis_of(v.operands[0], 1)),
    "Conv": linear.conv,
    "ConvInteger": linear.conv_integer,
    "ConvTranspose": linear.conv_transpose,
    "CumSum": running_sums,
    "DepthToSpace": partial(movement.in_blocks, apart=False),
    "DequantizeLinear": quantised.dequantize_linear,
    "Dropout": dropout,
    "DynamicQuantizeLinear": quantised.dynamic_quantize,
    "Einsum": lambda v: einsum(v, v.attribute("equation", ""), [v.real(at) for at in range(len(v.op.inputs))]),
    **{name: partial(whole_already, kind=UnaryKind(name)) for name in ("Ceil", "Floor", "Round")},
    "Elu": unary(UnaryKind.ELU, alpha=1.0),
    "Expand": movement.expand,
    "Flatten": movement.flatten,
    "Gather": movement.gather,
    "GatherND": sequence.gather_nd,
    "GatherElements": movement.gather_elements,
    "Gelu": gelu,
    "Gemm": linear.gemm,
    "GlobalAveragePool": partial(windows.global_pool, kind=ReduceKind.MEAN),
    "GlobalMaxPool": partial(windows.global_pool, kind=ReduceKind.MAXIMUM),
    "Greater": relation(CompareKind.LESS, exchanged=True),
    "GreaterOrEqual": relation(CompareKind.LESS_OR_EQUAL, exchanged=True),
    "GroupNormalization": windows.group_normalisation,
    "HardSigmoid": lambda v: v.hard_sigmoid(v.real(), v.attribute("alpha", 0.2), v.attribute("beta", 0.5)),
    "Identity": lambda v: v.x,
    "If": partial(control.branch, walk=_walk),
    "InstanceNormalization": windows.instance_normalisation,
    "IsInf": is_inf,
    "IsNaN": lambda v: v.negation(v.equal(v.real(), v.real(), "same")),
    "LayerNormalization": partial(windows.layer_normalisation, centred=True),
    "LeakyRelu": unary(UnaryKind.LEAKY_RELU, alpha=0.01),
    "LogSoftmax": lambda v: windows.softmax_of(v, v.real(), v.opset, logarithm=True),
    "Loop": partial(control.loop, walk=_walk),
    "LpNormalization": windows.unit_rows,
    "MatMul": linear.matmul,
    "MatMulInteger": linear.matmul_integer,
    "Max": several(BinaryKind.MAXIMUM),
    "MaxPool": windows.max_pool,
    "Mean": several(BinaryKind.ADD, mean=True),
    "MeanVarianceNormalization": windows.standardised,
    "Min": several(BinaryKind.MINIMUM),
    "Mish": lambda v: v.mish(v.real()),
    "Mod": modulo,
    "Not": lambda v: v.negation(v.x),
    "Or": binary(BinaryKind.MAXIMUM),
    "PRelu": lambda v: v.binary(BinaryKind.PRELU, v.real(0), v.real(1)),
    "Pad": movement.pad,
    "Pow": power,
    "QLinearConv": quantised.qlinear_conv,
    "QLinearMatMul": quantised.qlinear_matmul,
    "QuantizeLinear": quantised.quantize_linear,
    "RMSNormalization": partial(windows.layer_normalisation, centred=False),
    "ReduceL1": windows.reduction(ReduceKind.SUM, before=UnaryKind.ABSOLUTE),
    "ReduceL2": windows.reduction(ReduceKind.SUM, UnaryKind.SQUARE, UnaryKind.SQUARE_ROOT),
    "ReduceLogSum": windows.reduction(ReduceKind.SUM, after=UnaryKind.LOGARITHM),
    "ReduceLogSumExp": windows.log_sum_exp,
    "ReduceMean": windows.reduce_mean,
    "ReduceSumSquare": windows.reduction(ReduceKind.SUM, before=UnaryKind.SQUARE),
    "Relu": lambda v: v.clamp(v.real(), 0.0, inf),
    "Reshape": movement.reshape,
    "Resize": movement.resize,
    "RotaryEmbedding": sequence.rotary_embedding,
    "ScatterND": sequence.scatter_nd,
    "Scan": partial(control.scan, walk=_walk),
    "ScatterElements": movement.scatter_elements,
    "Selu": lambda v: v.selu(
        v.real(), v.attribute("alpha", 1.6732631921768188), v.attribute("gamma", 1.0507010221481323)
    ),
    "Shape": shape,
    "Shrink": shrink,
    "Size": size,
    "Slice": movement.slice_,
    "Softmax": lambda v: windows.softmax_of(v, v.real(), v.opset),
    "SpaceToDepth": partial(movement.in_blocks, apart=True),
    "Split": movement.split,
    "Squeeze": movement.squeeze,
    "Sum": several(BinaryKind.ADD),
    "Swish": lambda v: v.swish(v.real(), v.attribute("alpha", 1.0)),
    "ThresholdedRelu": unary(UnaryKind.THRESHOLDED_RELU, alpha=1.0),
    "Tile": movement.tile,
    "Transpose": lambda v: v.transpose(v.x, v.attribute("perm", tuple(range(v.x.rank))[::-1])),
    "Trilu": movement.triangle,
    "Unsqueeze": movement.unsqueeze,
    "Where": lambda v: v.add(Select(), v.operands),
    "Xor": relation(CompareKind.EQUAL, negative=True),
}
"""Operators of the domain ai.onnx."""

MICROSOFT: Mapping[str, Importer] = {
    "BiasGelu": partial(biased, kind=UnaryKind.GELU),
    "DequantizeLinear": quantised.dequantize_linear,
    "DynamicQuantizeLSTM": linear.dynamic_lstm,
    "FastGelu": partial(biased, kind=UnaryKind.GELU_TANH),
    "FusedMatMul": linear.fused_matmul,
    "Gelu": gelu,
    "GroupQueryAttention": sequence.group_query_attention,
    "MatMulNBits": quantised.few_bits,
    "QGemm": quantised.qgemm,
    "QLinearAdd": quantised.qlinear_two(BinaryKind.ADD, "sum"),
    "QLinearAveragePool": quantised.qlinear_pool(windows.average),
    "QLinearConcat": quantised.qlinear_concat,
    "QLinearGlobalAveragePool": quantised.qlinear_pool(lambda v, image: windows.whole(v, image, "mean")),
    "QLinearMul": quantised.qlinear_two(BinaryKind.MULTIPLY, "product"),
    "QLinearLeakyRelu": quantised.qlinear_one(
        lambda v, x: v.unary(UnaryKind.LEAKY_RELU, x, "real", v.attribute("alpha", 0.01))
    ),
    "QLinearSigmoid": quantised.qlinear_one(lambda v, x: v.unary(UnaryKind.SIGMOID, x, "real")),
    "QLinearSoftmax": quantised.qlinear_one(lambda v, x: windows.softmax_of(v, x, v.attribute("opset", 13), "real")),
    "QuantizeLinear": quantised.quantize_linear,
    "RotaryEmbedding": partial(sequence.rotary_embedding, position=1, tables=2),
    "SimplifiedLayerNormalization": partial(windows.layer_normalisation, centred=False),
    "QuickGelu": lambda v: v.swish(v.real(), v.attribute("alpha", 1.702)),
    "SkipLayerNormalization": partial(windows.skip_normalisation, centred=True),
    "SkipSimplifiedLayerNormalization": partial(windows.skip_normalisation, centred=False),
}
"""ONNX Runtime's own operators (domain com.microsoft)."""


def chosen_features(v: OnnxValues) -> Value:
    """ai.onnx.ml ArrayFeatureExtractor: elements along the last axis."""
    x = v.x
    rows = v.reshape(x, (1, *x.shape), "rows") if x.rank == 1 else x
    places = v.value(1)
    return v.add(Gather(rows.rank - 1), [rows, v.reshape(places, (places.elements,), "places")])


def scaler(v: OnnxValues) -> Value:
    """ai.onnx.ml Scaler: (x - offset) * scale."""
    x = v.x if v.x.dtype is DType.FLOAT32 else v.convert(v.x, DType.FLOAT32, "real")
    offset, scale = (
        v.constant(np.array(v.attribute(name, (default,)), np.float32), name)
        for name, default in (("offset", 0.0), ("scale", 1.0))
    )
    return v.times(v.minus(x, offset, "centred"), scale)


LEARNING: Mapping[str, Importer] = {"ArrayFeatureExtractor": chosen_features, "Scaler": scaler}
"""Operators of classical learning (domain ai.onnx.ml)."""

QONNX: Mapping[str, Importer] = {
    **dict.fromkeys(("Quant", "IntQuant"), quantised.quant),
    "BipolarQuant": quantised.bipolar_quant,
}
"""QONNX's own operators."""

LATER_RESULTS = words("DynamicQuantizeLSTM GRU LSTM Loop RNN Scan")
"""Operators whose first result may be left out."""

IMPORTERS: Mapping[tuple[str, str], Importer] = {
    **{("", name): build for name, build in STANDARD.items()},
    **{("ai.onnx.ml", name): build for name, build in LEARNING.items()},
    **{("com.microsoft", name): build for name, build in MICROSOFT.items()},
    ("", "SimplifiedLayerNormalization"): MICROSOFT["SimplifiedLayerNormalization"],  # ONNX Runtime has it there
    **{(domain, name): build for domain in QONNX_DOMAINS for name, build in QONNX.items()},
}
"""Every ONNX operator Dovetail reads."""
