"""The numbers: what the multipliers of a layer compute, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.targets.maeri.work import Work

Reals = npt.NDArray[np.float64]


def products(work: Work, operands: Sequence[Array], taps: tuple[int, int]) -> Reals:
    """Sums of the products [first, end) of every sum of a layer, by [position, output channel].

    Integers stay exact: float64 holds them up to 2^53.
    """
    operator, layer = work.node.operator, work.layer
    assert isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected)
    x = operands[0].astype(np.float64) - operator.input_zero_point
    w = operands[1].astype(np.float64) - operator.weight_zero_point
    if isinstance(operator, FullyConnected):
        windows = x.reshape(1, -1, layer.channels)
        weights = w.reshape(1, layer.filters, layer.channels)
    else:
        windows = _windows(x[0], work)
        depthwise = isinstance(operator, DepthwiseConv2d)  # [1, R, S, C * M], else [O, R, S, C]
        kernels = np.moveaxis(w[0], -1, 0)[:, None] if depthwise else np.moveaxis(w, -1, 1)
        weights = kernels.reshape(layer.groups, layer.filters, layer.taps)
    part = slice(*taps)
    sums = windows[..., part] @ weights[..., part].transpose(0, 2, 1)
    return np.ascontiguousarray(sums.transpose(1, 0, 2)).reshape(work.positions, work.outputs)


def _windows(image: Reals, work: Work) -> Reals:
    """[group, position, channel x row x column of the kernel]."""
    layer = work.layer
    view = np.lib.stride_tricks.sliding_window_view(image, (layer.rows, layer.columns), axis=(0, 1))
    view = view[:: layer.stride, :: layer.stride]
    shape = (layer.out_rows, layer.out_columns, layer.groups, layer.channels, layer.rows, layer.columns)
    return view.reshape(shape).transpose(2, 0, 1, 3, 4, 5).reshape(layer.groups, work.positions, layer.taps)


def accumulated(work: Work, operands: Sequence[Array], total: Reals) -> Array:
    """Sums as the layer gives them: with the bias, in the type and shape of its result."""
    operator = work.node.operator
    kind = operator.infer([TensorType(array.shape, DType.of(array.dtype)) for array in operands])
    exact = total + operands[2].astype(np.float64) if len(operands) > 2 else total
    if kind.dtype.is_integer:
        exact = np.rint(exact).astype(np.int64)
    return exact.astype(kind.dtype.numpy).reshape(kind.shape)
