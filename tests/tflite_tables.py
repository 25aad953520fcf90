"""Which models of one TFLite operator are compared with which runtime, and how closely."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from oracles import SingleOperator
from tflite_cases import (
    Draw,
    add_n,
    batch_matmul,
    batches,
    binary,
    blocks,
    comparison,
    concatenation,
    converted,
    division,
    function,
    gather,
    gather_nd,
    layer,
    log_softmax,
    logical,
    mirror_pad,
    normalised,
    pack,
    pad,
    pool,
    prelu,
    reduction,
    repeated,
    resize,
    reverse,
    select,
    softmax_16,
    split,
    squared_difference,
    transpose,
    transpose_conv,
)

MOVEMENT: Mapping[str, Callable[[np.random.Generator, str], SingleOperator]] = {
    **{name: partial(split, name) for name in ("SPLIT", "SPLIT_V", "UNPACK")},
    **{name: partial(blocks, name) for name in ("DEPTH_TO_SPACE", "SPACE_TO_DEPTH")},
    **{name: partial(batches, name) for name in ("SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND")},
    "BROADCAST_TO": partial(repeated, "BROADCAST_TO"),
    "GATHER": gather,
    "GATHER_ND": gather_nd,
    "MIRROR_PAD": mirror_pad,
    "PACK": pack,
    "RESIZE_NEAREST_NEIGHBOR": partial(resize, "RESIZE_NEAREST_NEIGHBOR"),
    "SELECT_V2": select,
}
"""Operators that copy elements."""

COMPARISONS = ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL")
FLOAT_FUNCTIONS = ("ABS", "CEIL", "COS", "EXP", "FLOOR", "LOG", "NEG", "ROUND", "RSQRT", "SIN", "SQRT", "SQUARE", "ELU")

EXACT: Mapping[str, tuple[Draw, ...]] = {
    **{name: (partial(draw, dtype="int8"), partial(draw, dtype="float32")) for name, draw in MOVEMENT.items()},
    **{
        name: (partial(comparison, name, dtype="int8"), partial(comparison, name, dtype="float32"))
        for name in COMPARISONS
    },
    **{name: (partial(logical, name),) for name in ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT")},
    **{name: (partial(reduction, name, dtype="int8"),) for name in ("REDUCE_MAX", "REDUCE_MIN")},
    **{name: tuple(partial(reduction, name, dtype=kind) for kind in ("int8", "int16")) for name in ("SUM", "MEAN")},
    **{name: (partial(layer, name, dtype="int8"),) for name in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")},
    "AVERAGE_POOL_2D": (partial(pool, "AVERAGE_POOL_2D", dtype="int16"),),
    "CONCATENATION": (partial(concatenation, dtype="int16"),),
    "MAX_POOL_2D": (partial(pool, "MAX_POOL_2D", dtype="int16"),),
    "PAD": (partial(pad, dtype="int16"),),
    "QUANTIZE": tuple(
        partial(converted, source=source, result=result)
        for source, result in (
            *(("int8", "int8"), ("int8", "int16"), ("int8", "uint8"), ("uint8", "int8"), ("int8", "int32")),
            *(("int16", "int8"), ("int16", "int16"), ("int16", "int32")),
        )
    ),
    "SOFTMAX": (softmax_16,),
    "TRANSPOSE": (partial(transpose, dtype="int16"),),
    "REVERSE_V2": (partial(reverse, dtype="float32"),),
    "ABS": (partial(function, "ABS", dtype="int8"), partial(function, "ABS", dtype="int16")),
    "ADD_N": (partial(add_n, dtype="int8"),),
    "BATCH_MATMUL": (partial(batch_matmul, dtype="int8"), partial(batch_matmul, dtype="int16")),
    "DIV": (partial(division, dtype="int8"),),
    "ELU": (partial(function, "ELU", dtype="int8"),),
    "L2_NORMALIZATION": (partial(normalised, dtype="int8"),),
    "LEAKY_RELU": tuple(
        partial(function, "LEAKY_RELU", dtype=kind, options="LeakyReluOptions", alpha=0.1) for kind in ("int8", "int16")
    ),
    "LOGISTIC": (partial(function, "LOGISTIC", dtype="int16"),),
    "LOG_SOFTMAX": (partial(log_softmax, dtype="int8"),),
    "PRELU": (partial(prelu, dtype="int8"), partial(prelu, dtype="int16")),
    "RESIZE_BILINEAR": (partial(resize, "RESIZE_BILINEAR", dtype="int8"),),
    "RSQRT": (partial(function, "RSQRT", dtype="int8"),),
    "TILE": (partial(repeated, "TILE", dtype="int8"),),
    "GELU": tuple(
        partial(function, "GELU", dtype="int8", options="GeluOptions", approximate=tanh) for tanh in (True, False)
    ),
    "EXP8": (partial(function, "EXP", dtype="int8"),),
    "SQUARED_DIFFERENCE": (partial(squared_difference, dtype="int8"), partial(squared_difference, dtype="int16")),
    "TANH": (partial(function, "TANH", dtype="int16"),),
    "TRANSPOSE_CONV": (partial(transpose_conv, dtype="int8"), partial(transpose_conv, dtype="int16")),
}
"""Models whose results are TensorFlow Lite Micro's, bit for bit."""

CLOSE: Mapping[str, tuple[Draw, ...]] = {
    **{name: (partial(function, name, dtype="float32"),) for name in FLOAT_FUNCTIONS},
    **{name: (partial(reduction, name, dtype="float32"),) for name in ("SUM", "MEAN", "REDUCE_MAX", "REDUCE_MIN")},
    "BATCH_MATMUL": (partial(batch_matmul, dtype="float32"),),
    "DIV": (partial(division, dtype="float32"),),
    "FLOOR_DIV": (partial(binary, "FLOOR_DIV", dtype="float32"),),
    "FLOOR_MOD": (partial(binary, "FLOOR_MOD", dtype="float32"),),
    "L2_NORMALIZATION": (partial(normalised, dtype="float32"),),
    "L2_POOL_2D": (partial(pool, "L2_POOL_2D", dtype="float32"),),
    "LOG_SOFTMAX": (partial(log_softmax, dtype="float32"),),
    "PRELU": (partial(prelu, dtype="float32"),),
    "RESIZE_BILINEAR": (partial(resize, "RESIZE_BILINEAR", dtype="float32"),),
    "ADD_N": (partial(add_n, dtype="float32"),),
    "GELU": (partial(function, "GELU", dtype="float32", options="GeluOptions"),),
    "POW": (partial(binary, "POW", dtype="float32"),),
    "REDUCE_PROD": (partial(reduction, "REDUCE_PROD", dtype="float32"),),
    "SQUARED_DIFFERENCE": (partial(squared_difference, dtype="float32"),),
    "TRANSPOSE_CONV": (partial(transpose_conv, dtype="float32"),),
}
"""Float models, whose results agree within rounding."""

LITE = ("SPACE_TO_BATCH_ND", "TILE", "GELU", "EXP8", "POW", "REDUCE_PROD", "SELECT", "SIGN")
"""Compared with LiteRT: TensorFlow Lite Micro lacks these, and pads SPACE_TO_BATCH_ND with what its memory holds."""
