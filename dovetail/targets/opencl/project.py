"""A region as an OpenCL kernel, and the files of a project: the source of all, and a C function that starts each."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dovetail.errors import TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Slice, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.ir.types import Array, DType
from dovetail.kernels import helper_source
from dovetail.kernels.c import array_definition, function, guard, identifiers, without_unused
from dovetail.kernels.helpers import HELPERS, needed_helpers
from dovetail.kernels.kernel import Parameter, UnsupportedRegion
from dovetail.kernels.scope import split
from dovetail.records import Record
from dovetail.target import Choice, Deployed
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

Names = Mapping[str, type[Operator]]
LAYERS: Names = {"conv": Conv2d, "depthwise": DepthwiseConv2d, "dense": FullyConnected}
POOLS: Names = {"max_pool": MaxPool2d, "average_pool": AveragePool2d, "sum_pool": SumPool2d}
MOVES: Names = {"transpose": Transpose, "slice": Slice, "pad": Pad}
_SHORT = {kind: name for name, kind in {**LAYERS, **POOLS, **MOVES, "concat": Concat}.items()}


class Kernel(Record):
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
    """Contents of the last argument, uint8; empty for none."""
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
    scope = split(graph)
    if any(graph.types[name].dtype is DType.FLOAT32 for name in (*graph.inputs, *graph.outputs)):
        raise UnsupportedRegion("kernels compute on integers.")
    body = writer_of(scope)(scope, int(choice["vector"]))
    lines = without_unused(body.lines)
    scope.keep(identifiers(lines))
    helpers = needed_helpers(lines)
    pointed = [name for name in helpers if "*" in HELPERS[name].rpartition("*/")[2].split("{")[0]]
    if pointed:
        raise UnsupportedRegion(f"{pointed[0]} takes a pointer, which names no address space of OpenCL's.")
    group = (int(choice["group_channels"]), int(choice["group_columns"]), 1)
    group = group if all(group) else (0, 0, 0)
    stem = _SHORT.get(type(scope.anchor.operator), "other") if scope.anchor else "pointwise"
    parameters, constants = scope.parameters(), scope.constants
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


class DeviceBinary(Record):
    """A kernel of a vendor's, compiled for the device."""

    file: Path
    name: str
    """The kernel's own."""
    function: str
    """C function that starts it."""
    arguments: tuple[str, ...]
    """Kinds of its arguments: "part" of the network's memory, "constants" or "number"."""


HEADER = "opencl_kernels.h"


def made(network: Deployed, kernels: Sequence[Kernel], binaries: Sequence[DeviceBinary]) -> Mapping[str, str]:
    """The files, by path below the project's `driver`.

    Args:
        network: what they are for.
        kernels: those to generate, without repetition.
        binaries: those that are used and given.

    Raises:
        TargetError: a binary cannot be read.
    """
    source = _source(kernels)
    prototypes = [*map(_prototype, kernels), *map(_binary_prototype, binaries)]
    header = ['#include "opencl.h"', "", "/* Makes the device ready. */", "void opencl_prepare(void);", ""]
    declared = [f"{line};" if line.endswith(")") else line for lines in prototypes for line in lines]
    head = [f'#include "{HEADER}"', "", f'#include "{network.prefix}.h"', ""]
    arrays = max((binary.arguments.count("constants") for binary in binaries), default=0)
    starters = [*map(_starter, kernels), *map(_binary_starter, binaries)]
    opening = _opening(network, source, max(1, arrays) * len(network.launches))
    text = [*head, *_listing(source), *opening, "", *(line for lines in starters for line in lines)]
    return {
        HEADER: guard("OPENCL_KERNELS_H", "\n".join([*header, *declared]) + "\n"),
        "opencl_kernels.c": "\n".join(text),
        f"{network.prefix}.cl": source,
    }


def _source(kernels: Sequence[Kernel]) -> str:
    if not kernels:
        return ""
    helpers = helper_source([name for kernel in kernels for name in kernel.helpers])
    return "\n".join([PREAMBLE, *([helpers] if helpers else []), *(kernel.source for kernel in kernels)])


def _listing(source: str) -> list[str]:
    """The source as C, line by line, for programs without files."""
    quoted = ('    "' + line.replace("\\", "\\\\").replace('"', '\\"') + '\\n",' for line in source.splitlines())
    head = ["/* The .cl file beside this one. */", "static const char *source[] = {"]
    return [*head, *quoted, "};", ""] if source else []


def _opening(network: Deployed, source: str, most: int) -> list[str]:
    """The function that makes the device ready, if anything runs on it; `most` arrays of constants are given to it."""
    if not network.launches:
        return ["void opencl_prepare(void)", "{", "    /* nothing runs on the device */", "}"]
    lines = ["source", "sizeof source / sizeof source[0]"] if source else ["NULL", "0"]
    return [
        f"static opencl_constants constants_of_layers[{most}];",
        f"static const opencl_network network = {{{network.arena}, {network.nbytes}, {', '.join(lines)},",
        "                                       constants_of_layers};",
        "",
        *function("void opencl_prepare", ["void"], ["opencl_open(&network);"]),
    ]


def _names(kernel: Kernel) -> list[str]:
    return ["output", *(f"input_{place}" for place in range(len(kernel.operands) - 1))]


def _prototype(kernel: Kernel) -> list[str]:
    result, *others = _names(kernel)
    others += ["constants"] if kernel.constants.size else []
    parameters = [f"uint8_t *{result}", *(f"const uint8_t *{name}" for name in others)]
    return function(f"void {kernel.name}", parameters, [])[:-2]


def _sizes(name: str, sizes: Sizes) -> str:
    return f"const size_t {name}[3] = {{{', '.join(map(str, sizes))}}};"


def _starter(kernel: Kernel) -> list[str]:
    given = "opencl_given(&kernel, constants, {});"
    lines = [
        f'static opencl_kernel kernel = {{.name = "{kernel.name}"}};',
        _sizes("items", kernel.items),
        *([_sizes("group", kernel.group)] if all(kernel.group) else []),
        "opencl_begin(&kernel);",
        "opencl_memory(&kernel);",
        *(f"opencl_offset(&kernel, {name});" for name in _names(kernel)),
        *([given.format(kernel.constants.size)] if kernel.constants.size else []),
        f"opencl_run(&kernel, items, {'group' if all(kernel.group) else 'NULL'});",
    ]
    return [*_prototype(kernel), "{", *(f"    {line}" for line in lines), "}", ""]


_PARAMETERS = {
    "part": ("const uint8_t *part_{0}", "uint32_t bytes_{0}"),
    "constants": ("const uint8_t *constants_{0}", "uint32_t bytes_{0}"),
    "number": ("int32_t number_{0}",),
}
_SET = {
    "part": "opencl_part(&kernel, part_{0}, bytes_{0});",
    "constants": "opencl_given(&kernel, constants_{0}, bytes_{0});",
    "number": "opencl_number(&kernel, number_{0});",
}


def _binary_prototype(binary: DeviceBinary) -> list[str]:
    listed = [text.format(place) for place, kind in enumerate(binary.arguments) for text in _PARAMETERS[kind]]
    sizes = [f"uint32_t items_{axis}" for axis in range(3)]
    return function(f"void {binary.function}", [*listed, *sizes], [])[:-2]


def _binary_starter(binary: DeviceBinary) -> list[str]:
    """The bytes of a vendor's program, and the C function that starts a kernel of it."""
    try:
        content = binary.file.read_bytes()
    except OSError as error:
        what = f"the OpenCL program cannot be read: {error.strerror}"
        hint = "check the path given to Binary and the permission to read"
        raise TargetError(what, where=str(binary.file), hint=hint) from None
    name = f"{binary.function}_program"
    numbers = ", ".join(map(str, content))
    stored = array_definition(f"static const unsigned char {name}_bytes[{len(content)}]", numbers)
    lines = [
        f'static opencl_binary {name} = {{.file = "{binary.file.name}", .bytes = {name}_bytes, '
        f".size = {len(content)}}};",
        f'static opencl_kernel kernel = {{.name = "{binary.name}", .binary = &{name}}};',
        "const size_t items[3] = {items_0, items_1, items_2};",
        "opencl_begin(&kernel);",
        *(_SET[kind].format(place) for place, kind in enumerate(binary.arguments)),
        "opencl_run(&kernel, items, NULL);",
    ]
    return [stored, *_binary_prototype(binary), "{", *(f"    {line}" for line in lines), "}", ""]


VARIABLE = "DOVETAIL_OPENCL"
"""Environment variable: the library the emitted program loads."""


def environment() -> dict[str, str]:
    """Environment variables with which the emitted C finds the library of the packages pyopencl and
    pocl-binary-distribution (the extra `opencl`), if they are installed; nothing otherwise, for that of the system.
    What `VARIABLE` says stays.

    Their library looks for devices in the folder PYOPENCL_HOME names, where the system says, and finds PoCL through the
    search path.
    """
    found = importlib.util.find_spec("pyopencl")
    for folder in map(Path, (found.submodule_search_locations or ()) if found else ()):
        for place in (folder / ".libs", folder.parent / "pyopencl.libs"):
            for library in sorted(place.glob("libOpenCL*.so*")):
                paths = [str(place), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
                joined = os.pathsep.join(paths)
                chosen = os.environ.get(VARIABLE) or str(library)
                return {VARIABLE: chosen, "PYOPENCL_HOME": str(folder), "LD_LIBRARY_PATH": joined}
    return {}
