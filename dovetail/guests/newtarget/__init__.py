"""`dovetail new-target`: a target file, and the C beside it, to start a port from."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

from dovetail import plugins
from dovetail.documented import document
from dovetail.errors import TargetError
from dovetail.records import Record
from dovetail.templates import Template

_REGISTERS = 23
"""Registers of a job in the target file, without those for kinds of jobs and for sums."""


class PortStyle(StrEnum):
    """Ways an engine gets its work."""

    REGISTERS = "registers"
    LIST = "list"
    INSTRUCTION = "instruction"
    IN_PLACE = "in-place"
    LOOPS = "loops"
    LIBRARY = "library"


class PortOperator(StrEnum):
    """A kind of layer an engine computes."""

    CONV = "conv"
    DEPTHWISE = "depthwise"
    DENSE = "dense"
    ADD = "add"


class PortRounding(StrEnum):
    """Ways an engine requantises: as TensorFlow Lite Micro, by one product rounded once, as float32, or by shifts."""

    DOUBLE = "double"
    SINGLE = "single"
    FLOAT32 = "float32"
    SHIFT = "shift"


class PortWish(Record):
    """Properties of a new port's hardware."""

    style: PortStyle = PortStyle.REGISTERS
    """Way the engine gets its work."""
    operators: Collection[PortOperator] = (PortOperator.CONV, PortOperator.DENSE)
    """Operators it computes."""
    rounding: PortRounding = PortRounding.DOUBLE
    """Way it requantises."""


_FILES = {
    PortStyle.REGISTERS: {".py": "target.py.txt", ".c": "driver.c.txt", ".h": "driver.h.txt"},
    PortStyle.LIST: {".py": "target.py.txt", ".c": "list.c.txt", ".h": "list.h.txt"},
    PortStyle.INSTRUCTION: {".py": "instruction.py.txt", ".c": "instruction.c.txt"},
    PortStyle.IN_PLACE: {one: f"in_place{one}.txt" for one in (".py", "_model.py", ".c", ".h")},
    PortStyle.LOOPS: {one: f"loops{one}.txt" for one in (".py", "_model.py", ".c", ".h")},
    PortStyle.LIBRARY: {one: f"library{one}.txt" for one in (".py", ".c", ".h")},
}
FIXED = {
    PortStyle.INSTRUCTION: "an instruction is used wherever its meaning occurs",
    PortStyle.IN_PLACE: "this one has convolutions and dense layers, 15 bits a channel and one shift a layer",
    PortStyle.LOOPS: "its instructions compute convolutions and dense layers, with a 15-bit scale",
    PortStyle.LIBRARY: "a library computes what its functions do",
}
"""Why operators and rounding are not asked for with a style."""
_LAYERS = {
    PortOperator.CONV: ("convolution", "Conv2d"),
    PortOperator.DEPTHWISE: ("depthwise", "DepthwiseConv2d"),
    PortOperator.DENSE: ("dense", "FullyConnected"),
}
_ROUNDINGS = {
    PortRounding.DOUBLE: ("", "DOUBLE", ""),
    PortRounding.SINGLE: ("half up", "SINGLE", ""),
    PortRounding.FLOAT32: ("float32", "FLOAT32", ", bits=24"),
    PortRounding.SHIFT: ("shifted", "SINGLE", ", bits=1"),
}


_SIMPLEST = PortWish()


def write_new_target(name: str, folder: Path, force: bool = False, wish: PortWish = _SIMPLEST) -> tuple[Path, ...]:
    """Write `name`.py, `name`.c and, of an engine, `name`.h; gives their paths.

    Args:
        name: of the target, its engine and the driver's functions: a lower-case C identifier.
        folder: made where it does not exist.
        force: whether files that are there give way.
        wish: what the hardware has.

    Raises:
        TargetError: the name will not do, a file exists, the folder cannot be written, or an engine computes nothing
            but sums.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name):
        hint = "use up to 40 lower-case letters, digits and underscores, a letter first"
        raise TargetError(f"'{name}' cannot name a target", where="new-target", hint=hint)
    if name in plugins.names(plugins.TARGETS):
        raise TargetError(f"there is a built-in target '{name}'", where="new-target", hint="choose another name")
    if not set(_LAYERS) & set(wish.operators):
        hint = f"add one of {', '.join(kind.value for kind in _LAYERS)}"
        raise TargetError("an engine that only adds is not written here", where="--operators", hint=hint)
    templates = {folder / f"{name}{suffix}": Template(__name__, file) for suffix, file in _FILES[wish.style].items()}
    if not force and (old := next((path for path in templates if path.exists()), None)):
        raise TargetError(f"{old} exists", where="new-target", hint="choose another name or folder, or --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in templates.items():
            path.write_text(template.fill(_shown(wish), NAME=name, MACRO=name.upper(), **_words(wish)))
    except OSError as error:
        hint = "choose another folder with --output"
        raise TargetError(f"cannot write to {folder}: {error.strerror}", where="new-target", hint=hint) from None
    return tuple(templates)


def _shown(wish: PortWish) -> set[str]:
    """The parts of the target file that a wish shows."""
    add, depthwise = PortOperator.ADD in wish.operators, PortOperator.DEPTHWISE in wish.operators
    shown = {"fields_registers", "command_registers", "device_registers", "chip_dma"}
    if wish.style is PortStyle.LIST:
        shown = {f"{name}_list" for name in ("fields", "command", "device")} | {
            "reach_values",
            "reach_engine",
            "moved",
            "any_import",
        }
        shown |= {f"list_{name}" for name in ("commands", "macs", "cycles", "compute")} | {"model_name", "pass_name"}
    if add:
        shown |= {f"add_{name}" for name in ("registers", "commands", "macs", "cycles", "compute", "model", "offload")}
        shown |= {"no_other", "sum_limits"}
    shown |= {"kind_registers", "kind_of_layer"} if add or depthwise else set()
    shown |= {"own_limits"} if depthwise else set()
    exact = wish.rounding is PortRounding.DOUBLE
    return shown | ({"policy_exact"} if exact else {"policy_engine", "requant", "requant_import"})


def _words(wish: PortWish) -> dict[str, object]:
    """The words of the target file and the driver."""
    kinds = [own for operator, own in _LAYERS.items() if operator in wish.operators]
    add, depthwise = PortOperator.ADD in wish.operators, PortOperator.DEPTHWISE in wish.operators
    is_list = wish.style is PortStyle.LIST
    name, rounding, bits = _ROUNDINGS[wish.rounding]
    channels = 'job["channels"]'
    products = "x[rows, columns] @ weights[:, row, column].T"
    apart = "x[rows, columns] * weights[0, row, column]"
    shape = f'job["outputs"], *kernel, {channels}'
    return {
        "WORDS": _REGISTERS + (add or depthwise) + 4 * add,
        "CLASSES": ", ".join(operator for _, operator in kinds),
        "PATTERNS": " | ".join(f'layers.requantised("{given}", {operator})' for given, operator in kinds),
        "KIND": "int(layers.linear_of(match).is_channelwise)" if depthwise else "0",
        "GROUPS": "" if depthwise else "layers.NO_GROUPS, ",
        "OWN": 'OWN["depthwise" in name]' if depthwise else "LIMITS",
        "TAPS": "weights.size // (weights.shape[-1] if layers.linear_of(match).is_channelwise else len(weights))"
        if depthwise
        else "weights[0].size",
        "DEPTH": f' * (1 if job["kind"] == 1 else {channels})' if depthwise else f" * {channels}",
        "SHAPE": f'(1, *kernel, {channels}) if job["kind"] == 1 else ({shape})' if depthwise else shape,
        "PRODUCTS": f'{apart} if job["kind"] == 1 else {products}' if depthwise else products,
        "OPEN": "(*(" if add else "tuple(",
        "END": ")" if is_list else "",
        "BEFORE": 20,
        "REQUANT": name,
        "ROUNDING": rounding,
        "BITS": bits,
        "LIMIT": "*REQUANT.limits" if name else "layers.DOUBLE_ROUNDING",
    }


document(__name__)
