"""Writes TFLite models of several operators and subgraphs, and runs them in TensorFlow Lite Micro call after call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from dovetail.ir.types import Array


class ModelWriter:
    """A model being written; subgraph 0 is the network."""

    def __init__(self) -> None:
        pytest.importorskip("tflite_micro", reason="TensorFlow Lite Micro's Python package is the oracle")
        from tflite_micro.python.tflite_micro import runtime  # type: ignore[import-untyped]

        self.schema = runtime.schema_fb
        self.model = self.schema.ModelT()
        self.model.version, self.model.subgraphs, self.model.operatorCodes = 3, [], []
        self.model.buffers = [self.schema.BufferT()]
        self.subgraph()

    def subgraph(self) -> int:
        """Begin another subgraph; what is added goes to the last one. Returns its index."""
        graph = self.schema.SubGraphT()
        graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [], [], []
        self.model.subgraphs.append(graph)
        return len(self.model.subgraphs) - 1

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        kind: str,
        data: Array | None = None,
        quantised: tuple[float, int] | None = None,
        variable: bool = False,
    ) -> int:
        """Add a tensor with (scale, zero point); returns its index."""
        tensor = self.schema.TensorT()
        tensor.name, tensor.shape, tensor.isVariable = name, list(shape), variable
        tensor.type, tensor.buffer = getattr(self.schema.TensorType, kind), 0
        if quantised is not None:
            tensor.quantization = self.schema.QuantizationParametersT()
            tensor.quantization.scale = [float(np.float32(quantised[0]))]
            tensor.quantization.zeroPoint = [quantised[1]]
        if data is not None:
            buffer = self.schema.BufferT()
            buffer.data = np.frombuffer(data.tobytes(), np.uint8)
            tensor.buffer = len(self.model.buffers)
            self.model.buffers.append(buffer)
        tensors = self.model.subgraphs[-1].tensors
        tensors.append(tensor)
        return len(tensors) - 1

    def operator(
        self, opcode: str, inputs: Sequence[int], outputs: Sequence[int], kind: str = "", **options: Any
    ) -> None:
        """Add an operator with options of a class."""
        code = self.schema.OperatorCodeT()
        code.builtinCode = getattr(self.schema.BuiltinOperator, opcode)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1
        operator = self.schema.OperatorT()
        operator.opcodeIndex, operator.inputs, operator.outputs = len(self.model.operatorCodes), inputs, outputs
        self.model.operatorCodes.append(code)
        if kind:
            table = getattr(self.schema, f"{kind}T")()
            for name, value in options.items():
                setattr(table, name, value)
            operator.builtinOptions, operator.builtinOptionsType = table, getattr(self.schema.BuiltinOptions, kind)
        self.model.subgraphs[-1].operators.append(operator)

    def custom(
        self, code: str, inputs: Sequence[int], outputs: Sequence[int], options: Mapping[str, Any] | bytes
    ) -> None:
        """Add a CUSTOM operator; options that are no bytes are written as a flexbuffer."""
        from flatbuffers import flexbuffers  # type: ignore[import-untyped]

        content = options if isinstance(options, bytes) else bytes(flexbuffers.Dumps(dict(options)))
        self.operator("CUSTOM", inputs, outputs)
        self.model.operatorCodes[-1].customCode = code
        self.model.subgraphs[-1].operators[-1].customOptions = np.frombuffer(content, np.uint8)

    def ends(self, inputs: Sequence[int], outputs: Sequence[int], subgraph: int = 0) -> None:
        """Say what a subgraph takes and gives."""
        self.model.subgraphs[subgraph].inputs, self.model.subgraphs[subgraph].outputs = list(inputs), list(outputs)

    def finish(self) -> bytes:
        """The file."""
        import flatbuffers  # type: ignore[import-untyped]

        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def run_calls(model: bytes, feeds: Sequence[Mapping[int, Array]], results: int = 1) -> list[list[Array]]:
    """What TensorFlow Lite Micro computes in successive calls: for each, its first results."""
    from tflite_micro.python.tflite_micro import runtime

    interpreter = runtime.Interpreter.from_bytes(model, arena_size=1 << 20)
    found = []
    for feed in feeds:
        for index, array in feed.items():
            interpreter.set_input(array, index)
        interpreter.invoke()
        found.append([np.array(interpreter.get_output(index)) for index in range(results)])
    return found
