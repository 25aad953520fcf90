"""TFLite models as graphs in QDQ form."""

from __future__ import annotations

from dovetail.errors import ModelError
from dovetail.frontend.tflite_context import ACTIVATION_TYPES, TfliteContext
from dovetail.frontend.tflite_file import OperatorEntry, TfliteFile, read_tflite
from dovetail.frontend.tflite_operators import IMPORTERS
from dovetail.graph.graph import Graph
from dovetail.graph.types import DType


def load_tflite(file_name: str, data: bytes, name: str) -> Graph:
    """Import a TFLite model.

    Args:
        file_name: for messages.
        data: the file's bytes.
        name: the graph's name.

    Returns:
        The graph in QDQ form: images NHWC, quantised values named after the model's tensors, each arithmetic
        operator in float between Dequantize and Quantize.

    Raises:
        ModelError: the file is damaged, or says something Dovetail cannot honour.
    """
    file = read_tflite(file_name, data)
    ctx = TfliteContext(file, name)
    _check_border(file)
    for index in file.inputs:
        ctx.add_input(index)
    for op in file.operators:
        _import(ctx, op)
    return ctx.builder.finish([ctx.value(None, file.tensors[index]) for index in file.outputs])


def _check_border(file: TfliteFile) -> None:
    """The model has inputs and outputs, of types a value may have."""
    for what, indices in (("inputs", file.inputs), ("outputs", file.outputs)):
        if not indices or min(indices) < 0:
            raise ModelError(f"the model has no {what} or leaves one out", where=file.name,
                             hint="convert the model again")
        if len(set(indices)) != len(indices):
            raise ModelError(f"the model lists one of its {what} twice", where=file.name,
                             hint="convert the model again")
        allowed = (*ACTIVATION_TYPES, DType.INT32, DType.INT64, DType.BOOL)
        for tensor in (file.tensors[index] for index in indices):
            if tensor.is_constant or tensor.dtype not in allowed:
                raise ModelError(f"{tensor} cannot be one of the model's {what}", where=file.name,
                                 hint=f"convert the model again, with {what} of one of "
                                      f"{', '.join(kind.text for kind in allowed)}")


def _import(ctx: TfliteContext, op: OperatorEntry) -> None:
    """Import one operator; what its type rule rejects is the model's fault."""
    importer = IMPORTERS.get(op.opcode)
    if importer is None:
        raise ctx.refuse(op, "this operator is not supported", f"supported are {', '.join(sorted(IMPORTERS))}")
    if op.version > importer.version:
        raise ctx.refuse(
            op,
            f"version {op.version} of this operator is not supported, only up to {importer.version}",
            "convert the model with an older converter, or without the newer feature",
        )
    try:
        importer.build(ctx, op)
    except ValueError as error:
        raise ctx.refuse(op, str(error)) from error
