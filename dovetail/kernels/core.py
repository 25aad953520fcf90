"""Core kernels: which regions there is C for, and the C."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dovetail.errors import DovetailError
from dovetail.graph.graph import Graph
from dovetail.kernels.convolution import write_convolution
from dovetail.kernels.depthwise import write_depthwise
from dovetail.kernels.epilogue import Scope
from dovetail.kernels.fully_connected import write_fully_connected
from dovetail.kernels.helpers import needed_helpers
from dovetail.kernels.kernel import CoreKernel, Unsupported
from dovetail.kernels.movement import write_movement
from dovetail.kernels.pointwise import write_pointwise
from dovetail.kernels.pooling import write_pooling
from dovetail.kernels.region import Region, split
from dovetail.kernels.softmax import write_softmax
from dovetail.operators.activation import FixedSoftmax
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Concat, Pad, Patches, Reshape, Slice, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d

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
}
"""What writes the kernel of each anchor: a new anchor needs its writer and a line here."""


def _write(graph: Graph, name: str, accumulators: int) -> CoreKernel:
    region = split(graph)
    family: Callable[[Region, Scope], Writer] = write_pointwise
    if region.anchor is not None:
        kind = type(region.anchor.operator)
        if kind not in FAMILIES:
            raise Unsupported(f"there is no core kernel for {kind.__name__}.")
        family = FAMILIES[kind]
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
