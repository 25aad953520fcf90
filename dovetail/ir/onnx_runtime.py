"""Sessions of ONNX Runtime that compute exact integer products on every processor.

On x86 processors without VNNI, ONNX Runtime adds pairs of uint8 by int8 products in 16 bits, where they saturate. Two
things keep it exact: the option `session.x64quantprecision`, which only graph optimisations read, and weights of uint8
in place of int8, with 128 added to weights and zero points alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from dovetail.errors import MissingExtraError

_PRODUCTS = ("MatMulInteger", "ConvInteger")
_ERRORS_ONLY = 3


def runtime_session(model: ModelProto | bytes | Path, optimised: bool = True) -> Any:
    """An `onnxruntime.InferenceSession` on one thread of the processor, quiet below errors.

    Args:
        model: the model, its bytes, or its file.
        optimised: let ONNX Runtime optimise the graph; without, it computes each operator as it is written.

    Raises:
        MissingExtraError: onnxruntime is not installed.
    """
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "check", "running a graph as ONNX") from error
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.intra_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = _bytes_of(model) if isinstance(model, ModelProto | bytes) else str(model)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _bytes_of(model: ModelProto | bytes) -> bytes:
    proto = onnx.load_model_from_string(model) if isinstance(model, bytes) else model
    if any(node.op_type in _PRODUCTS for node in proto.graph.node):
        proto = with_unsigned_weights(proto)
        return bytes(proto.SerializeToString())
    return model if isinstance(model, bytes) else bytes(model.SerializeToString())


def with_unsigned_weights(model: ModelProto) -> ModelProto:
    """A copy in which MatMulInteger and ConvInteger have constant weights of uint8 where these were int8."""
    result = ModelProto()
    result.CopyFrom(model)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for number, node in enumerate(result.graph.node):
        if node.op_type not in _PRODUCTS or node.input[1] not in constants:
            continue
        weights = numpy_helper.to_array(constants[node.input[1]])
        zero = _zero_point(node, constants)
        if weights.dtype == np.int8 and zero is not None:
            names = [f"unsigned_{number}_{what}" for what in ("weights", "zero_point")]
            for name, array in zip(names, (weights, zero), strict=True):
                unsigned = (array.astype(np.int16) + 128).astype(np.uint8)
                result.graph.initializer.append(numpy_helper.from_array(unsigned, name))
            operands = [*node.input, "", "", ""]
            node.ClearField("input")
            node.input.extend([operands[0], names[0], operands[2], names[1]])
    return result


def _zero_point(node: NodeProto, constants: dict[str, Any]) -> Any:
    """The weights' zero points as an array; None where they are computed."""
    if len(node.input) < 4 or not node.input[3]:
        return np.zeros((), np.int8)
    return numpy_helper.to_array(constants[node.input[3]]) if node.input[3] in constants else None
