"""The files of an OpenCL project that are made for a network: its kernels, and a C function that starts each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.emit.c_text import array_definition, guard
from dovetail.errors import TargetError
from dovetail.kernels import helper_source
from dovetail.kernels.text import function
from dovetail.target import Deployed
from dovetail.targets.opencl.bodies import Sizes
from dovetail.targets.opencl.kernels import PREAMBLE, Kernel


@dataclass(frozen=True)
class Binary:
    """A kernel of a vendor's, compiled for the device."""

    file: Path
    name: str
    """The kernel's own."""
    function: str
    """C function that starts it."""
    arguments: tuple[str, ...]
    """What it takes: "part" of the network's memory, "constants" or "number"."""


HEADER = "opencl_kernels.h"


def made(network: Deployed, kernels: Sequence[Kernel], binaries: Sequence[Binary]) -> Mapping[str, str]:
    """The files, by path below the project's `driver`.

    Args:
        network: what they are for.
        kernels: those to generate, without repetition.
        binaries: those that are used and given.

    Raises:
        TargetError: a binary cannot be read.
    """
    source = _source(kernels)
    prototypes = [_prototype(kernel) for kernel in kernels] + [_binary_prototype(binary) for binary in binaries]
    header = ['#include "opencl.h"', "", "/* Makes the device ready. */", "void opencl_prepare(void);", ""]
    declared = [f"{line};" if line.endswith(")") else line for lines in prototypes for line in lines]
    head = [f'#include "{HEADER}"', "", f'#include "{network.prefix}.h"', ""]
    arrays = max((binary.arguments.count("constants") for binary in binaries), default=0)
    text = [*head, *_listing(source), *_opening(network, source, max(1, arrays) * len(network.launches)), ""]
    for kernel in kernels:
        text += _starter(kernel)
    for binary in binaries:
        text += _binary_starter(binary)
    return {
        HEADER: guard("OPENCL_KERNELS_H", "\n".join([*header, *declared]) + "\n"),
        "opencl_kernels.c": "\n".join(text),
        f"{network.prefix}.cl": source,
    }


def _source(kernels: Sequence[Kernel]) -> str:
    """OpenCL C of all kernels; empty for none."""
    if not kernels:
        return ""
    helpers = helper_source([name for kernel in kernels for name in kernel.helpers])
    return "\n".join([PREAMBLE, *([helpers] if helpers else []), *(kernel.source for kernel in kernels)])


def _listing(source: str) -> Iterator[str]:
    """The source as C, line by line, for programs without files."""
    if source:
        yield "/* The .cl file beside this one. */"
        yield "static const char *source[] = {"
        for line in source.splitlines():
            yield '    "' + line.replace("\\", "\\\\").replace('"', '\\"') + '\\n",'
        yield "};"
        yield ""


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
    """Operands as parameters: the result, then the others."""
    return ["output", *(f"input_{place}" for place in range(len(kernel.operands) - 1))]


def _prototype(kernel: Kernel) -> list[str]:
    result, *others = _names(kernel)
    others += ["constants"] if kernel.constants.size else []
    parameters = [f"uint8_t *{result}", *(f"const uint8_t *{name}" for name in others)]
    return function(f"void {kernel.name}", parameters, [])[:-2]


def _sizes(name: str, sizes: Sizes) -> str:
    return f"const size_t {name}[3] = {{{', '.join(map(str, sizes))}}};"


def _starter(kernel: Kernel) -> list[str]:
    """The C function that starts a kernel."""
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


def _binary_prototype(binary: Binary) -> list[str]:
    listed = [text.format(place) for place, kind in enumerate(binary.arguments) for text in _PARAMETERS[kind]]
    sizes = [f"uint32_t items_{axis}" for axis in range(3)]
    return function(f"void {binary.function}", [*listed, *sizes], [])[:-2]


def _binary_starter(binary: Binary) -> list[str]:
    """The bytes of a vendor's program, and the C function that starts a kernel of it."""
    try:
        content = binary.file.read_bytes()
    except OSError as error:
        raise TargetError(f"the OpenCL program cannot be read: {error.strerror}", where=str(binary.file),
                          hint="check the path given to Binary and the permission to read") from None
    name = f"{binary.function}_program"
    numbers = tuple(f"{byte}" for byte in content)
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
