"""OpenCL C of a region: one kernel, made of the pieces the core's kernels are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.graph.graph import Graph
from dovetail.graph.types import Array, DType
from dovetail.kernels.helpers import HELPERS, needed_helpers
from dovetail.kernels.kernel import Parameter, Unsupported
from dovetail.kernels.region import split
from dovetail.kernels.scope import Scope
from dovetail.kernels.text import function, without_unused, words
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Concat, Pad, Slice, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.target import Choice
from dovetail.targets.opencl.bodies import Sizes, writer_of

ALIGNMENT = 16
"""Bytes each constant array of a kernel is aligned to."""

PREAMBLE = """\
typedef char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
#define __builtin_expect(condition, usual) (condition)
"""
"""OpenCL C that gives C99's names to OpenCL's types, which have these sizes on every device."""

_SHORT: Mapping[type[Operator], str] = {
    Conv2d: "conv", DepthwiseConv2d: "depthwise", FullyConnected: "dense", MaxPool2d: "max_pool",
    AveragePool2d: "average_pool", SumPool2d: "sum_pool", Transpose: "transpose", Slice: "slice", Pad: "pad",
    Concat: "concat",
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A region as an OpenCL kernel.

    Its arguments: the device's copy of the network's memory; where in it, in bytes, the result and each run-time
    operand begin; and a pointer to the constants, if it has any.
    """

    name: str
    """A C identifier made from the content: equal kernels have equal names."""
    source: str
    """OpenCL C of the function; `PREAMBLE` and `helpers` stand before it."""
    helpers: tuple[str, ...]
    """Functions of `kernels.helpers` it calls."""
    operands: tuple[str, ...]
    """Graph values: the result, then the operands in the order of the arguments."""
    constants: Array
    """What the last argument points to, uint8; empty for none."""
    items: Sizes
    """Work-items along each dimension."""
    group: Sizes
    """Work-items of a work-group; zeros leave that to the device."""


def write_kernel(graph: Graph, choice: Choice) -> Kernel:
    """The kernel of a region.

    Args:
        graph: run-time inputs, constants and one result; an optional Pad, one anchor or none, and pointwise operators.
        choice: "vector", and the work-group's sizes "group_channels" and "group_columns".

    Raises:
        Unsupported: no kernel computes it; one sentence says why.
    """
    region, scope = split(graph), Scope(graph)
    if any(graph.types[name].dtype is DType.FLOAT32 for name in (*graph.inputs, *graph.outputs)):
        raise Unsupported("kernels compute on integers.")
    body = writer_of(region)(region, scope, int(choice["vector"]))
    lines = without_unused(body.lines)
    scope.keep(words(lines))
    helpers = needed_helpers("\n".join(lines))
    pointed = [name for name in helpers if "*" in HELPERS[name].rpartition("*/")[2].split("{")[0]]
    if pointed:
        raise Unsupported(f"{pointed[0]} takes a pointer, which names no address space of OpenCL's.")
    group = (int(choice["group_channels"]), int(choice["group_columns"]), 1)
    group = group if all(group) else (0, 0, 0)
    stem = _SHORT.get(type(region.anchor.operator), "other") if region.anchor else "pointwise"
    parameters, constants = scope.parameters(), scope.constants.arrays
    text, blob = "\n".join(_function(parameters, constants, lines)) + "\n", _blob(constants)
    key = hashlib.sha256(repr((text, body.items, group, blob.size)).encode()).hexdigest()[:8]
    operands = tuple(parameter.value for parameter in parameters if not parameter.is_constant)
    name = f"{stem}_{key}"
    return Kernel(name, text.replace("NAME", name, 1), helpers, operands, blob, body.items, group)


def _function(parameters: Sequence[Parameter], constants: Mapping[str, Array], lines: list[str]) -> list[str]:
    """The kernel, called NAME; each array of constants lies in its last argument."""
    declared, found, offset = ["__global uint8_t *memory"], [], 0
    for parameter in parameters:
        const = "" if parameter.name == "output" else "const "
        kind = f"__global {const}{parameter.c_type} *"
        if not parameter.is_constant:
            declared.append(f"int32_t {parameter.name}_at")
            found.append(f"{kind}{parameter.name} = ({kind})(memory + {parameter.name}_at);")
            continue
        found.append(f"{kind}{parameter.name} = ({kind})(constants + {offset});")
        offset += -(-constants[parameter.value].nbytes // ALIGNMENT) * ALIGNMENT
    declared += ["__global const uint8_t *constants"] if offset else []
    return function("__kernel void NAME", declared, [*found, *lines])


def _blob(constants: Mapping[str, Array]) -> Array:
    """Arrays one behind the other, uint8, each at a multiple of `ALIGNMENT`."""
    parts = [np.zeros(0, np.uint8)]
    for array in constants.values():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts.append(np.pad(flat, (0, -flat.size % ALIGNMENT)))
    return np.concatenate(parts)
