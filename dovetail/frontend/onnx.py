"""ONNX models as graphs in QDQ form."""

from __future__ import annotations

from pathlib import Path

from dovetail.errors import ModelError
from dovetail.frontend.onnx_context import AGAIN, OnnxContext
from dovetail.frontend.onnx_file import OnnxFile, OnnxNode
from dovetail.frontend.onnx_folding import fold
from dovetail.frontend.onnx_operators import IMPORTERS, LATER_RESULTS
from dovetail.frontend.onnx_read import read_onnx
from dovetail.graph.graph import Graph, GraphBuilder


def load_onnx(file_name: str, data: bytes, name: str, folder: Path) -> Graph:
    """Import an ONNX model.

    Args:
        file_name: for messages.
        data: the file's bytes.
        name: the graph's name.
        folder: the model's directory; external data is read from inside it only.

    Returns:
        The graph in QDQ form. Values keep ONNX's axis order (images NCHW); image operators work in NHWC between
        Transpose nodes, which `dovetail.graph.simplify` cancels.

    Raises:
        ModelError: the file is damaged, or says something Dovetail cannot honour.
    """
    file = read_onnx(file_name, data, folder)
    ctx = OnnxContext(file, GraphBuilder(name), constants=dict(file.constants))
    if not file.inputs or not file.outputs:
        raise ModelError("the model has no inputs or no outputs", where=file_name,
                         hint="export the model again, with its inputs and outputs")
    for entry, kind in file.inputs:
        ctx.values[entry] = ctx.builder.input(entry, kind)
    for op in file.nodes:
        _import(ctx, op)
    return ctx.builder.finish([_output(ctx, file, position) for position in range(len(file.outputs))])


def _output(ctx: OnnxContext, file: OnnxFile, position: int) -> str:
    """The graph value of an output, checked against its declaration."""
    name, declared = file.outputs[position]
    value = ctx.values.get(name)
    if value is None or value in ctx.static:
        raise ModelError(f"output {name!r} is a constant or never computed", where=file.name,
                         hint="take this output out of the model, or export it again")
    if declared is not None and declared != ctx.type_of(value):
        raise ModelError(f"output {name!r} is {ctx.type_of(value)}, the model declares {declared}", where=file.name,
                         hint="correct the declared type, for instance with onnx.shape_inference, or export the "
                              "model again")
    return value


def _import(ctx: OnnxContext, op: OnnxNode) -> None:
    """Import one operator; what its type rule rejects is the model's fault."""
    if not any(op.outputs) or (not op.outputs[0] and op.op_type not in LATER_RESULTS):
        raise ctx.refuse(op, "has no first result", AGAIN)
    if fold(ctx, op):
        return
    importer = IMPORTERS.get((op.domain, op.op_type))
    if importer is None:
        known = sorted(name for domain, name in IMPORTERS if domain == op.domain)
        domain = op.domain or "ai.onnx"
        raise ctx.refuse(
            op,
            f"the operator {op.op_type} of the domain {domain} is not supported",
            f"supported in {domain} are {', '.join(known) if known else 'none'}",
        )
    ctx.read.clear()
    try:
        importer(ctx, op)
    except ValueError as error:
        raise ctx.refuse(op, str(error)) from error
    ignored = sorted(set(op.attributes) - ctx.read)
    if ignored:
        raise ctx.refuse(op, f"the attribute {ignored[0]} = {op.attributes[ignored[0]]} is not supported")
