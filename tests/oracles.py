"""Oracles of the exact semantics: TFLite models of one operator run by TensorFlow Lite Micro, and stored references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.graph.types import Array


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the model; constants carry their data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scale: tuple[float, ...] = ()
    zero_point: int = 0
    data: Array | None = None
    axis: int = 0


@dataclass(frozen=True)
class SingleOperator:
    """An operator of the TFLite schema with its options and tensors; the last tensors are the results."""

    opcode: str
    tensors: Sequence[TensorEntry]
    options: Mapping[str, Any]
    options_type: str = ""
    version: int = 1
    results: int = 1


def _schema() -> Any:
    pytest.importorskip("tflite_micro", reason="TensorFlow Lite Micro's Python package is the oracle")
    from tflite_micro.python.tflite_micro import runtime  # type: ignore[import-untyped]

    return runtime.schema_fb


def tflite_bytes(single: SingleOperator) -> bytes:
    """The model as a file."""
    import flatbuffers  # type: ignore[import-untyped]

    schema = _schema()
    model = schema.ModelT()
    model.version = 3
    model.buffers = [schema.BufferT()]
    graph = schema.SubGraphT()
    graph.tensors, graph.inputs = [], []
    for index, entry in enumerate(single.tensors):
        graph.tensors.append(_tensor(schema, model, entry))
        if entry.data is None and index < len(single.tensors) - single.results:
            graph.inputs.append(index)
    graph.outputs = list(range(len(single.tensors) - single.results, len(single.tensors)))
    graph.operators = [_operator(schema, single)]
    model.subgraphs = [graph]
    code = schema.OperatorCodeT()
    code.builtinCode = getattr(schema.BuiltinOperator, single.opcode)
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    code.version = single.version
    model.operatorCodes = [code]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _tensor(schema: Any, model: Any, entry: TensorEntry) -> Any:
    tensor = schema.TensorT()
    tensor.name, tensor.shape = entry.name, list(entry.shape)
    tensor.type = getattr(schema.TensorType, entry.dtype.upper())
    if entry.scale:
        tensor.quantization = schema.QuantizationParametersT()
        tensor.quantization.scale = [float(np.float32(scale)) for scale in entry.scale]
        tensor.quantization.zeroPoint = [entry.zero_point] * len(entry.scale)
        tensor.quantization.quantizedDimension = entry.axis
    tensor.buffer = 0
    if entry.data is not None:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer((_nibbles(entry.data) if entry.dtype == "int4" else entry.data).tobytes(), np.uint8)
        tensor.buffer = len(model.buffers)
        model.buffers.append(buffer)
    return tensor


def _nibbles(values: Array) -> Array:
    """int4 values two to a byte, the first in the low half."""
    flat = np.append(values.reshape(-1), np.zeros(values.size % 2, np.int8)).astype(np.uint8) & 15
    return flat[0::2] | flat[1::2] << 4


def _operator(schema: Any, single: SingleOperator) -> Any:
    operator = schema.OperatorT()
    operator.opcodeIndex = 0
    operator.inputs = list(range(len(single.tensors) - single.results))
    operator.outputs = list(range(len(single.tensors) - single.results, len(single.tensors)))
    if single.options_type:
        options = getattr(schema, f"{single.options_type}T")()
        for name, value in single.options.items():
            setattr(options, name, value)
        operator.builtinOptions = options
        operator.builtinOptionsType = getattr(schema.BuiltinOptions, single.options_type)
    return operator


def run_micro(model: bytes, inputs: Sequence[Array]) -> Array:
    """The result TensorFlow Lite Micro computes."""
    return run_micro_all(model, inputs, 1)[0]


def run_micro_all(model: bytes, inputs: Sequence[Array], results: int) -> list[Array]:
    """The results TensorFlow Lite Micro computes."""
    _schema()
    from tflite_micro.python.tflite_micro import runtime

    interpreter = runtime.Interpreter.from_bytes(model, arena_size=1 << 20)
    for index, array in enumerate(inputs):
        interpreter.set_input(array, index)
    interpreter.invoke()
    return [np.array(interpreter.get_output(index)) for index in range(results)]


def run_lite(model: bytes, inputs: Sequence[Array], results: int) -> list[Array]:
    """The results LiteRT's reference kernels compute: for operators TensorFlow Lite Micro does not have."""
    interpreters = pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is the oracle")
    kind = interpreters.OpResolverType.BUILTIN_REF
    interpreter = interpreters.Interpreter(model_content=model, experimental_op_resolver_type=kind)
    interpreter.allocate_tensors()
    for detail, array in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(detail["index"], array)
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()[:results]]


NETWORKS = ("ad_autoencoder", "ic_resnet8", "kws_dscnn", "vww_mobilenetv1")
"""The MLPerf Tiny networks whose int8 files and references lie in ../shared."""


def network_bytes(name: str) -> bytes:
    """The int8 TFLite file of a network; skips the test where ../shared is absent."""
    return _network_file(name, "tflite").read_bytes()


def references(name: str) -> dict[str, Array]:
    """Inputs and outputs of many runs, under the keys of ../shared/models/README.md."""
    with np.load(_network_file(name, "many.npz")) as archive:
        found = {key: archive[key] for key in archive.files}
    with np.load(_network_file(name, "tflite.ref.npz")) as archive:
        last = sum(key.startswith("in_") for key in found)
        for key in archive.files:
            if "_0" in key:
                found[key.replace("_0", f"_{last}", 1)] = archive[key]
    return found


def _network_file(name: str, ending: str) -> Path:
    folder = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny"
    if not folder.is_dir():
        pytest.skip("the reference models of ../shared are not here")
    return folder / f"{name}_int8.{ending}"


def derived_file(name: str) -> Path:
    """A derived model or its reference; skips the test where ../shared is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "models" / "derived"
    if not folder.is_dir():
        pytest.skip("the reference models of ../shared are not here")
    return folder / name
