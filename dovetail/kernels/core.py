"""Core kernels: which regions there is C for, and the C."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dovetail.errors import DovetailError
from dovetail.graph.graph import Graph
from dovetail.graph.types import DType
from dovetail.kernels.convolution import write_convolution
from dovetail.kernels.depthwise import write_depthwise
from dovetail.kernels.epilogue import Scope
from dovetail.kernels.float_linear import write_float_convolution, write_float_dense, write_matrix_product
from dovetail.kernels.float_pooling import write_float_pooling
from dovetail.kernels.fully_connected import write_fully_connected
from dovetail.kernels.helpers import needed_helpers
from dovetail.kernels.kernel import CoreKernel, Unsupported
from dovetail.kernels.movement import write_movement
from dovetail.kernels.pointwise import write_pointwise
from dovetail.kernels.pooling import write_pooling
from dovetail.kernels.reduction import write_arg_extreme, write_reduction, write_row_function
from dovetail.kernels.region import Region, split
from dovetail.kernels.selection import write_gather, write_pick, write_resample
from dovetail.kernels.softmax import write_softmax
from dovetail.operators.activation import FixedSoftmax, LogSoftmax, Softmax
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.operators.movement import Concat, Pad, Patches, Reshape, Slice, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.operators.reduction import ArgExtreme, Normalise, Reduce
from dovetail.operators.selection import Gather, Pick, Resample

Writer = Callable[[str], list[str]]
"""Writes a kernel's C under a function name; writing twice gives the same text."""

FAMILIES: Mapping[type[Operator], Callable[[Region, Scope], Writer]] = {
    Conv2d: write_convolution,
    DepthwiseConv2d: write_depthwise,
    FullyConnected: write_fully_connected,
    MaxPool2d: write_pooling,
    AveragePool2d: write_pooling,
    SumPool2d: write_pooling,
    FixedSoftmax: write_softmax,
    Transpose: write_movement,
    Reshape: write_movement,
    Slice: write_movement,
    Concat: write_movement,
    Pad: write_movement,
    Patches: write_movement,
    Pick: write_pick,
    Gather: write_gather,
    Reduce: write_reduction,
    ArgExtreme: write_arg_extreme,
    Resample: write_resample,
    Softmax: write_row_function,
    LogSoftmax: write_row_function,
    Normalise: write_row_function,
    MatrixProduct: write_matrix_product,
}
"""What writes the kernel of each anchor: a new anchor needs its writer and a line here."""

FLOAT_FAMILIES: Mapping[type[Operator], Callable[[Region, Scope], Writer]] = {
    Conv2d: write_float_convolution,
    DepthwiseConv2d: write_float_convolution,
    FullyConnected: write_float_dense,
    MaxPool2d: write_float_pooling,
    AveragePool2d: write_float_pooling,
}
"""What writes an anchor's kernel where its first operand is float32, if that is not the writer in `FAMILIES`."""


def _write(graph: Graph, name: str, accumulators: int) -> CoreKernel:
    region = split(graph)
    family: Callable[[Region, Scope], Writer] = write_pointwise
    if region.anchor is not None:
        kind = type(region.anchor.operator)
        if kind not in FAMILIES:
            raise Unsupported(f"there is no core kernel for {kind.__name__}.")
        real = graph.types[region.anchor.inputs[0]].dtype is DType.FLOAT32
        family = FLOAT_FAMILIES[kind] if real and kind in FLOAT_FAMILIES else FAMILIES[kind]
    scope = Scope(graph, accumulators)
    writer = family(region, scope)
    source = "\n".join(writer(name)) + "\n"
    key = "\n".join(writer("kernel")) + "\n"
    return CoreKernel(
        name, source, scope.parameters(), scope.constants.arrays, needed_helpers(source), scratch_bytes=0, key=key
    )


def supports(graph: Graph) -> str | None:
    """None when a core kernel computes the region, else one sentence that says why not."""
    try:
        _write(graph, "kernel", 1)
    except Unsupported as refusal:
        return str(refusal)
    return None


def generate(graph: Graph, name: str, accumulators: int = 16) -> CoreKernel:
    """The C of a region.

    Args:
        graph: the region: run-time inputs, constants and one result; an optional Pad, one anchor operator and a tree of
            pointwise operators behind it (`is_pointwise`).
        name: the C function's name.
        accumulators: sums the inner loops keep at once; 16 suits the 31 registers of RISC-V, 6 the 13 of Arm Thumb.

    Raises:
        DovetailError: no core kernel computes the region (`supports` says why).
    """
    try:
        return _write(graph, name, accumulators)
    except Unsupported as refusal:
        raise DovetailError(
            f"no core kernel computes this region: {refusal}",
            where=graph.name,
            hint="split the region, or write a kernel for its anchor in dovetail/kernels",
        ) from None
