"""Oracles of the exact semantics: TFLite models of one operator run by TensorFlow Lite Micro, and stored references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.ir.types import Array


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


@dataclass(frozen=True)
class OperatorCall:
    """An operator of a network: places of its operands (-1 where one is left out) and of its results."""

    opcode: str
    inputs: Sequence[int]
    outputs: Sequence[int]
    options: Mapping[str, Any]
    options_type: str = ""
    version: int = 1


@dataclass(frozen=True)
class OperatorNetwork:
    """Operators of the TFLite schema on tensors; what no operator computes and has no data is an input."""

    tensors: Sequence[TensorEntry]
    operators: Sequence[OperatorCall]
    outputs: Sequence[int]

    @property
    def inputs(self) -> list[int]:
        """Places of the inputs."""
        computed = {place for call in self.operators for place in call.outputs}
        return [at for at, entry in enumerate(self.tensors) if entry.data is None and at not in computed]


def tflite_bytes(single: SingleOperator) -> bytes:
    """The model as a file."""
    last = len(single.tensors) - single.results
    outputs = range(last, len(single.tensors))
    call = OperatorCall(single.opcode, range(last), outputs, single.options, single.options_type, single.version)
    return network_file(OperatorNetwork(single.tensors, [call], outputs))


def network_file(network: OperatorNetwork) -> bytes:
    """The network as a file."""
    import flatbuffers  # type: ignore[import-untyped]

    schema = _schema()
    model = schema.ModelT()
    model.version = 3
    model.buffers, model.operatorCodes = [schema.BufferT()], []
    graph = schema.SubGraphT()
    graph.tensors = [_tensor(schema, model, entry) for entry in network.tensors]
    graph.inputs, graph.outputs = network.inputs, list(network.outputs)
    graph.operators = [_operator(schema, model, call) for call in network.operators]
    model.subgraphs = [graph]
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


def _operator(schema: Any, model: Any, call: OperatorCall) -> Any:
    code = schema.OperatorCodeT()
    code.builtinCode = getattr(schema.BuiltinOperator, call.opcode)
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    code.version = call.version
    operator = schema.OperatorT()
    operator.opcodeIndex = len(model.operatorCodes)
    model.operatorCodes.append(code)
    operator.inputs, operator.outputs = list(call.inputs), list(call.outputs)
    if call.options_type:
        options = getattr(schema, f"{call.options_type}T")()
        for name, value in call.options.items():
            setattr(options, name, value)
        operator.builtinOptions = options
        operator.builtinOptionsType = getattr(schema.BuiltinOptions, call.options_type)
    return operator


def run_micro(model: bytes, inputs: Sequence[Array]) -> Array:
    """The result TensorFlow Lite Micro computes."""
    return run_micro_often(model, [inputs])[0][0]


def run_micro_often(model: bytes, feeds: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """The results TensorFlow Lite Micro computes from each set of inputs."""
    _schema()
    from tflite_micro.python.tflite_micro import runtime

    interpreter = runtime.Interpreter.from_bytes(model, arena_size=1 << 20)
    results, count = [], _output_count(model)
    for inputs in feeds:
        for index, array in enumerate(inputs):
            interpreter.set_input(array, index)
        interpreter.invoke()
        results.append([np.array(interpreter.get_output(index)) for index in range(count)])
    return results


def _output_count(model: bytes) -> int:
    return int(_schema().Model.GetRootAs(model, 0).Subgraphs(0).OutputsLength())


def run_litert_often(model: bytes, feeds: Sequence[Sequence[Array]], reference: bool) -> list[list[Array]]:
    """The results LiteRT computes from each set of inputs, with its reference kernels or with its default ones."""
    interpreter_module = pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is the oracle")
    resolvers = interpreter_module.OpResolverType
    kind = resolvers.BUILTIN_REF if reference else resolvers.AUTO
    interpreter = interpreter_module.Interpreter(model_content=model, experimental_op_resolver_type=kind, num_threads=1)
    interpreter.allocate_tensors()
    results = []
    for inputs in feeds:
        for entry, array in zip(interpreter.get_input_details(), inputs, strict=True):
            interpreter.set_tensor(entry["index"], array)
        interpreter.invoke()
        results.append([interpreter.get_tensor(entry["index"]) for entry in interpreter.get_output_details()])
    return results


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
