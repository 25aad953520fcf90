"""Core kernels: which regions there is C for, and the C."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dovetail.errors import DovetailError
from dovetail.graph.graph import Graph
from dovetail.graph.types import DType
from dovetail.kernels.convolution import Products, convolution_products, write_convolution
from dovetail.kernels.depthwise import write_depthwise
from dovetail.kernels.epilogue import Scope
from dovetail.kernels.fixed_rows import write_log_softmax, write_normalisation, write_softmax_16
from dovetail.kernels.float_linear import write_float_convolution, write_float_dense, write_matrix_product
from dovetail.kernels.float_pooling import write_float_pooling
from dovetail.kernels.fully_connected import fully_connected_products, write_fully_connected
from dovetail.kernels.helpers import needed_helpers
from dovetail.kernels.kernel import CoreKernel, Unsupported
from dovetail.kernels.movement import write_movement
from dovetail.kernels.pointwise import write_pointwise
from dovetail.kernels.pooling import write_pooling
from dovetail.kernels.recurrent import write_fixed_lstm, write_row_products
from dovetail.kernels.recurrent_float import write_recurrent
from dovetail.kernels.reduction import write_arg_extreme, write_reduction, write_row_function
from dovetail.kernels.region import Region, split
from dovetail.kernels.scheduled.write import Scheduled, write_scheduled
from dovetail.kernels.scope import Border, CoreTraits
from dovetail.kernels.selection import write_gather, write_pick, write_resample
from dovetail.kernels.softmax import write_softmax
from dovetail.operators.activation import FixedSoftmax, LogSoftmax, Softmax
from dovetail.operators.base import Operator
from dovetail.operators.fixed import FixedLogSoftmax, FixedNormalise, FixedSoftmax16
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.operators.movement import Concat, Pad, Patches, Reshape, Slice, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.operators.recurrent import FixedLstm, RowProducts
from dovetail.operators.recurrent_float import Recurrent
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
    FixedLogSoftmax: write_log_softmax,
    FixedSoftmax16: write_softmax_16,
    FixedNormalise: write_normalisation,
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
    FixedLstm: write_fixed_lstm,
    RowProducts: write_row_products,
    Recurrent: write_recurrent,
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


PRODUCTS: Mapping[type[Operator], Callable[[Region, Scope], Products]] = {
    Conv2d: convolution_products,
    FullyConnected: fully_connected_products,
}
"""Anchors whose loops are also described for a core's own instructions (`dovetail.kernels.scheduled`)."""


ONCE: tuple[type[Operator], ...] = (Conv2d, FullyConnected)
"""Anchors whose kernels compute every element of the result once; of a depthwise one, columns may be computed twice."""


def _write(
    graph: Graph,
    name: str,
    core: CoreTraits,
    border: Border | None = None,
    overwritten: str | None = None,
    lanes: int | None = None,
) -> CoreKernel:
    """A region's kernel: of scheduled loops where an instruction of the core is selected in them, else written out."""
    region = split(graph)
    notes: tuple[str, ...] = ()
    real = region.anchor is not None and graph.types[region.anchor.inputs[0]].dtype is DType.FLOAT32
    if core.instructions and region.anchor is not None and not real and type(region.anchor.operator) in PRODUCTS:
        scope = Scope(graph, core.accumulators, overwritten, room=core.room)
        products = PRODUCTS[type(region.anchor.operator)](region, scope)
        try:
            if graph.types[region.anchor.inputs[1]].dtype.bits < 8:
                raise Unsupported("its operands are bytes, several of these weights share one.")
            found = write_scheduled(region, scope, products, core.instructions)
        except Unsupported as refusal:
            notes = tuple(f"{instruction.name}: {refusal}" for instruction in core.instructions)
        else:
            if found.write is not None:
                return _kernel(name, scope, found.write, found)
            notes = found.notes
    family: Callable[[Region, Scope], Writer] = write_pointwise
    if region.anchor is not None:
        kind = type(region.anchor.operator)
        if kind not in FAMILIES:
            raise Unsupported(f"there is no core kernel for {kind.__name__}.")
        family = FLOAT_FAMILIES[kind] if real and kind in FLOAT_FAMILIES else FAMILIES[kind]
    scope = Scope(graph, core.accumulators, overwritten, lanes, border=border)
    return _kernel(name, scope, family(region, scope), Scheduled(None, (), (), notes))


def _kernel(name: str, scope: Scope, writer: Writer, loops: Scheduled) -> CoreKernel:
    source = "\n".join(writer(name)) + "\n"
    key = source if name == "kernel" else "\n".join(writer("kernel")) + "\n"
    helpers = needed_helpers(source)
    constants = scope.constants.arrays
    return CoreKernel(
        name,
        source,
        scope.parameters(),
        constants,
        helpers,
        key=key,
        declarations=loops.declarations,
        instructions=loops.used,
        notes=loops.notes,
        block=scope.border.block if scope.border else None,
        lanes=None if loops.write is not None else scope.lanes,
    )


def supports(graph: Graph) -> str | None:
    """None when a core kernel computes the region, else one sentence that says why not."""
    try:
        _write(graph, "kernel", CoreTraits(accumulators=1))
    except Unsupported as refusal:
        return str(refusal)
    return None


def may_overwrite(graph: Graph) -> bool:
    """True when a region's kernel may be written over an operand that is read only at the place of each element: it
    computes no element twice, and reads what an element is made from before it writes it."""
    anchor = split(graph).anchor
    return anchor is None or isinstance(anchor.operator, ONCE)


def unused_instructions(graph: Graph, core: CoreTraits) -> tuple[str, ...]:
    """Why instructions of the core are not used in a region's kernel, one sentence each; empty where there is none to
    use them in. Arguments as of `generate`."""
    try:
        return _write(graph, "kernel", core).notes
    except Unsupported:
        return ()


def generate(
    graph: Graph,
    name: str,
    core: CoreTraits = CoreTraits(),  # noqa: B008
    border: Border | None = None,
    overwritten: str | None = None,
    lanes: int | None = None,
) -> CoreKernel:
    """The C of a region.

    Args:
        graph: the region: run-time inputs, constants and one result; an optional Pad, one anchor operator and a tree of
            pointwise operators behind it (`is_pointwise`).
        name: the C function's name.
        core: what the core offers.
        border: the function that computes single pixels where others are computed together; None: one of its own.
        overwritten: the operand whose place the result takes, where `may_overwrite` allows one.
        lanes: the `CoreKernel.lanes` of another kernel of the same weights, which are then in one order for both.

    Raises:
        DovetailError: no core kernel computes the region (`supports` says why).
    """
    try:
        return _write(graph, name, core, border, overwritten, lanes)
    except Unsupported as refusal:
        raise DovetailError(
            f"no core kernel computes this region: {refusal}",
            where=graph.name,
            hint="split the region, or write a kernel for its anchor in dovetail/kernels",
        ) from None
