"""This computer with oneDNN, Intel's library of neural network primitives: int8 convolutions and dense layers.

    pip install onednn-devel-cpu-gomp onednn-cpu-gomp          # headers and library, without a runtime of SYCL
    dovetail compile net.tflite --target dovetail/targets/onednn.py -o build/net

DOVETAIL_ONEDNN names another installation, with `include` and `lib`; the library itself is never part of a project.

Rounding: oneDNN gives sums, in int32, and `onednn_calls.c` requantises them as TensorFlow Lite Micro does, so every
byte is that of the integer graph. Two things are between its sums and exactness. They pass through float32 on their
way out, so they must stay within 24 bits, which a limit makes sure of from the weights (the bias is added afterwards).
And processors without VNNI instructions add pairs of products in 16 bits: there the first call fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

import dovetail.target as dt
from dovetail.errors import TargetError
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.target import layers
from dovetail.targets.vendorlib import Argument, Library, function, pointer, struct, with_library

VARIABLE = "DOVETAIL_ONEDNN"
"""Environment variable that holds the folder oneDNN is installed in; without it, Python's own."""
_HEADERS = ("dnnl", "dnnl_common", "dnnl_types", "dnnl_common_types", "dnnl_config", "dnnl_version")
_LIBRARY = "libdnnl.so.3"
_EXACT = 1 << 24
"""Integers up to here are exact in float32."""

HOST = dt.Target(
    name="host",
    sentence="this computer",
    core=dt.Core(isa="host"),
    memories=(
        dt.Memory("constants", base=0x10000000, size=256 << 20),
        dt.Memory("values", base=0x40000000, size=256 << 20, alignment=64),
    ),
    code="constants",
    values="values",
    policies=(dt.Policy("exact", "requantised as TFLite Micro does", ()),),
)


def _largest_sum(match: dt.Match) -> int:
    """The most a sum can be without its bias, over all operands."""
    weights, zero = match.array("weights").astype(np.int64), layers.linear_of(match).input_zero_point
    axis = weights.ndim - 1 if layers.linear_of(match).is_channelwise else 0
    each = np.abs(weights).sum(axis=tuple(at for at in range(weights.ndim) if at != axis))
    return int(each.max(initial=0)) * max(zero + 128, 127 - zero)


LIMITS = (
    layers.ALL_INT8,
    layers.INT8_WEIGHTS,
    layers.ALL_DOUBLE_ROUNDING,
    layers.PADDING_OF_ZERO_POINT,
    dt.Constraint(
        f"sums without their bias must stay within {_EXACT} in magnitude, where float32 is exact",
        _largest_sum,
        lambda most: most <= _EXACT,
    ),
)


def _geometry(match: dt.Match) -> Mapping[str, dt.CValue]:
    """`onednn_layer` of onednn_calls.h."""
    layer, linear = layers.layer_of(match), layers.linear_of(match)
    x, y = match.type("x").shape, match.result.shape
    if isinstance(linear, FullyConnected):
        x, y = ((match.type("x").elements // x[-1], 1, 1, x[-1]), (match.result.elements // y[-1], 1, 1, y[-1]))
    _, rows, columns, inputs = layer.weights.shape
    groups, strides = x[-1] // inputs, (rows * columns * inputs, 1, columns * inputs, inputs)
    if linear.is_channelwise:
        groups, strides = x[-1], (1, 1, columns * y[-1], y[-1])
    names = ("weights_output", "weights_input", "weights_row", "weights_column")
    sides = {"top": layer.before[0], "left": layer.before[1], "bottom": layer.after[0], "right": layer.after[1]}
    walk = {"kernel": ("rows", "columns"), "stride": ("down", "right"), "dilation": ("down", "right")}
    numbers = asdict(layer)
    return {
        **dict(zip(("images", "height", "width", "channels"), x, strict=True)),
        **dict(zip(("rows", "columns", "outputs"), y[1:], strict=True)),
        **{f"{name}_{way}": numbers[name][at] for name, ways in walk.items() for at, way in enumerate(ways)},
        **dict(zip(names, strides, strict=True)),
        **sides,
        "groups": groups,
        "weights_group": y[-1] // groups * strides[0],
        "zero_in": layer.input_zero_point,
        "zero_out": layer.output_zero_point,
        "low": layer.low,
        "high": layer.high,
    }


def _offloads(library: Library) -> tuple[dt.Offload, ...]:
    words = ("bias", "multiplier", "shift")
    constants = {name: lambda m, name=name: np.ascontiguousarray(vars(layers.layer_of(m))[name]) for name in words}
    numbers: list[Argument] = [pointer(name, "const int32_t") for name in words]
    given = [struct("onednn_layer", _geometry), pointer("x"), pointer("weights"), *numbers]
    ends: list[Argument] = [pointer("scratch", "int32_t"), pointer("result", "int8_t")]
    patterns = {
        name: pattern
        for stem, kind in (("convolution", Conv2d), ("depthwise", DepthwiseConv2d), ("dense", FullyConnected))
        for name, pattern in layers.requantised(stem, kind).items()
    }
    return tuple(
        replace(
            function(
                library,
                "onednn_convolution",
                pattern,
                [*given, *ends],
                constraints=LIMITS,
                constants=constants,
                scratch=lambda match: 4 * match.result.elements,
            ),
            name=name,
            prefer=True,
        )
        for name, pattern in patterns.items()
    )


def target(root: Path | None = None) -> dt.Target:
    """This computer with the oneDNN installed in a folder, by default `VARIABLE` or Python's own.

    Raises:
        TargetError: it is not there.
    """
    folder = root or Path(os.environ.get(VARIABLE) or sys.prefix)
    headers = {f"oneapi/dnnl/{name}.h": folder / "include" / "oneapi" / "dnnl" / f"{name}.h" for name in _HEADERS}
    shared = folder / "lib" / _LIBRARY
    for path in (*headers.values(), shared):
        if not path.is_file():
            hint = f"pip install onednn-devel-cpu-gomp, or set {VARIABLE} to the folder that has include and lib"
            raise TargetError(f"there is no {path.name}", where=f"oneDNN in {folder}", hint=hint)
    calls = Path(__file__).with_name("onednn_calls")
    library = Library("onednn", calls, "onednn_calls.h", ("onednn_calls.c",), success=0)
    made = with_library(HOST, library, _offloads(library), name="onednn")
    engine = replace(
        made.engines[0],
        files={**made.engines[0].files, **headers},
        libraries=(str(shared), f"-Wl,-rpath,{shared.parent}"),
        environment=lambda: {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    return replace(made, sentence="this computer with oneDNN", engines=(engine,))


def __getattr__(name: str) -> dt.Target:
    """`TARGET`: this computer with the installed library."""
    if name != "TARGET":
        raise AttributeError(name)
    return target()
