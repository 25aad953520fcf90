"""Every operator there is, by name: what a saved graph may hold."""

from __future__ import annotations

from dovetail.operators.activation import Clamp, FixedSoftmax, LogSoftmax, Softmax, Unary
from dovetail.operators.arithmetic import Add, Clip, Lookup, Offset, Requantize, ScaleShift
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.operators.movement import Concat, Pad, Patches, Relayout, Reshape, Slice, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.operators.quantization import Dequantize, Quantize
from dovetail.operators.recurrent import FixedLstm, RowProducts
from dovetail.operators.recurrent_float import Recurrent
from dovetail.operators.reduction import ArgExtreme, Normalise, Reduce
from dovetail.operators.selection import Gather, Pick, Resample

OPERATORS: dict[str, type[Operator]] = {
    kind.__name__: kind
    for kind in (
        *(Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct),
        *(Reshape, Transpose, Pad, Concat, Slice, Patches, Relayout),
        *(Requantize, ScaleShift, Clip, Offset, Add, Lookup, Binary),
        *(Quantize, Dequantize),
        *(MaxPool2d, AveragePool2d, SumPool2d),
        *(Clamp, Unary, Softmax, LogSoftmax, FixedSoftmax),
        *(Reduce, ArgExtreme, Normalise),
        *(Pick, Gather, Resample),
        *(FixedLstm, RowProducts, Recurrent),
    )
}
"""The operator classes by their names."""
