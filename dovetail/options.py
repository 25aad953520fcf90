"""The options of a compilation, each said once: its meaning, its default, and how the command line asks for it.

The parameters of commands (dovetail/cli/options.py), the keywords of `dovetail.compile` and docs/reference/options.md
are made from the fields of `Options`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from dovetail.documented import document
from dovetail.errors import DovetailError, ModelError
from dovetail.notes import Tell, silent
from dovetail.records import Record

if TYPE_CHECKING:
    from dovetail.codegen.emit.weights import Weights
    from dovetail.ir.operators.arithmetic import Rounding
    from dovetail.ir.operators.user import UserOperator
    from dovetail.ir.types import Shape
    from dovetail.kernels import Optimize


class Flag(Record):
    """Form of a dataclass field on the command line."""

    help: str
    """Meaning of the option, in a sentence."""
    names: tuple[str, ...]
    """Names on the command line; empty for the name that typer makes of the field's."""
    kind: Any
    """Type of the value on the command line."""
    default: Any
    """The value on the command line where it is not given."""
    read: Callable[[Any], Any] | None
    """Function that makes the field's value; None if the command line's value is it."""
    more: Mapping[str, Any]
    """Further arguments of `typer.Option`."""


def flag(
    default: Any,
    help: str,
    *names: str,
    kind: Any = None,
    unset: Any = None,
    read: Callable[[Any], Any] | None = None,
    **more: Any,
) -> Any:
    """A field of a dataclass of options.

    Args:
        default: of the field; `dict` or `tuple` for an empty one.
        help: its meaning, in a sentence.
        names: on the command line; its own if not given.
        kind: type of the value there; None for that of the default, or a text.
        unset: the value there where it is not given; None for the default.
        read: makes the field's value of that on the command line.
        more: arguments of `typer.Option`.
    """
    empty = default in (dict, tuple)
    kind = kind or (str | None if default is None else type(default))
    about = Flag(help, names, kind, None if empty else default if unset is None else unset, read, more)
    default = {"default_factory": default} if empty else {"default": default}
    return field(**default, metadata={"flag": about})


def flags_of(kind: type) -> dict[str, Flag]:
    """The fields of a dataclass that are options of a command, by name."""
    return {own.name: own.metadata["flag"] for own in fields(kind) if "flag" in own.metadata}


def with_fields(options: Any, values: Mapping[str, Any]) -> Any:
    """Options with other values of some fields.

    Raises:
        DovetailError: there is no such option, or the value is not of its type.
    """
    if not is_dataclass(options) or isinstance(options, type):
        hint = "give Options(...), or the options as keywords"
        raise DovetailError(f"must be Options, not {type(options).__name__}", where="options", hint=hint)
    known = {own.name: own for own in fields(options)}
    for name in values.keys() - known.keys():
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise DovetailError("there is no such option", where=name[:60], hint=hint)
    return replace(options, **{name: _checked(known[name], value) for name, value in values.items()})


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "str": str,
    "bool": bool,
    "int": int,
    "Path": (str, Path),
    "Mapping": Mapping,
    "tuple": (tuple, list),
}
"""Types a field accepts, by the first word of its annotation."""


def _checked(own: Field[Any], value: Any) -> Any:
    """The value of a field, a text as a path where it is one; raises DovetailError where it is not of its type."""
    about, kind = own.metadata.get("flag"), re.split(r"[\[ ]", str(own.type))[0]
    parts = (about.kind, *get_args(about.kind)) if about and about.read is None else ()
    choices = [one for part in parts if get_origin(part) is Literal for one in get_args(part)]
    if choices and getattr(value, "value", value) not in choices:
        what = f"{value!r} is not one of {', '.join(map(repr, choices))}"
        raise DovetailError(what, where=own.name, hint="give one of them")
    types = _TYPES.get(kind, object)
    if not choices and (not isinstance(value, types) or (kind == "int" and isinstance(value, bool))):
        hint = about.help if about else "give a value of that type"
        raise DovetailError(f"must be {kind}, not {type(value).__name__}", where=own.name, hint=hint)
    return Path(value) if kind == "Path" else tuple(value) if kind == "tuple" else value


def parse_bytes(text: str) -> int:
    """A number of bytes: digits, and K for 1024 of them or M for 1024 K. Raises ModelError where it is not one."""
    match = re.fullmatch(r"(\d+)\s*([KkMm]?)(?:i?[Bb])?", text.strip())
    if match is None or int(match[1]) == 0:
        raise ModelError(f"'{text}' is not a number of bytes", where="--memory-budget", hint="such as 32768 or 32K")
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2].upper()]


def _shapes(texts: Sequence[str]) -> dict[str, Shape]:
    """The shapes of `--shape`, by input; raises ModelError."""
    shapes = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        parts = [size.strip() for size in sizes.split(",")]
        if not name or not all(size.isdecimal() and 0 < int(size) < 1 << 31 for size in parts):
            raise ModelError(f"'{text}' is not a shape", where="--shape", hint="such as --shape input=1,3,32,32")
        shapes[name] = tuple(map(int, parts))
    return shapes


def _states(texts: Sequence[str]) -> dict[str, str]:
    """The pairs of `--state`, input by output; raises ModelError."""
    pairs: dict[str, str] = {}
    for text in texts:
        output, _, read = text.partition("=")
        if not output or not read or output in pairs:
            hint = "such as --state present_key=past_key, once for each output"
            raise ModelError(f"'{text}' names no output and input", where="--state", hint=hint)
        pairs[output] = read
    return pairs


def _settings(texts: Sequence[str]) -> dict[str, str]:
    """The values of `--set` as texts, by field; raises DovetailError."""
    names = [text.partition("=")[0] for text in texts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise DovetailError("this is set twice", where=min(twice), hint="give it once")
    return {name: text.partition("=")[2] for name, text in zip(names, texts, strict=True)}


def _operators(file: Path) -> tuple[type[UserOperator], ...]:
    from dovetail.operators import load_operators

    return load_operators(file)


def _pins(texts: Sequence[str]) -> dict[str, str]:
    from dovetail.schedule.assign.pins import parse_pins

    return parse_pins(texts)


def _is_int8(ends: str) -> bool:
    return ends == "int8"


_ENDS = Literal["model", "int8"]


@dataclass(frozen=True)
class Options:
    """Options of one compilation."""

    policy: str | None = flag(None, "Requantisation policy; the target's default if not given.", "--requant")
    rounding: Rounding | Literal["double", "single"] | None = flag(
        None,
        "Rounding of the model's requantisations; single for ONNX, double for others if not given.",
        kind=Literal["double", "single"] | None,
    )
    shapes: Mapping[str, Shape] = flag(
        dict,
        "The shape of an input whose sizes the model leaves open.",
        "--shape",
        kind=list[str] | None,
        read=_shapes,
        metavar="NAME=1,3,32,32",
    )
    states: Mapping[str, str] = flag(
        dict,
        "An output that becomes an input of the next inference: a state, kept in one buffer. Inputs and outputs "
        "called past and present are tied by their names.",
        "--state",
        kind=list[str] | None,
        read=_states,
        metavar="OUTPUT=INPUT",
    )
    settings: Mapping[str, float | str] = flag(
        dict,
        "A number of the target, such as ram.size=16M. May be repeated.",
        "--set",
        kind=list[str] | None,
        read=_settings,
        metavar="NAME=VALUE",
    )
    operators: tuple[type[UserOperator], ...] = flag(
        tuple,
        "A Python file that defines operators of your own.",
        "--operators",
        kind=Path | None,
        read=_operators,
        metavar="FILE",
    )
    integer_inputs: bool = flag(
        False,
        "With int8, take float inputs as int8 if the network only quantises them; scales are in the header.",
        "--inputs",
        kind=_ENDS,
        unset="model",
        read=_is_int8,
    )
    integer_outputs: bool = flag(
        False,
        "With int8, give float outputs as int8 if the network only dequantises them; scales are in the header.",
        "--outputs",
        kind=_ENDS,
        unset="model",
        read=_is_int8,
    )
    save_stages: Path | None = flag(None, "Folder for an ONNX model after every stage.", kind=Path | None)
    check: bool = flag(False, "Compare every stage with the one before in ONNX Runtime.", "--check")
    allow_float: bool = flag(False, "Compute in float32 on the core what the model does not quantise.", "--float")
    optimize: Optimize | Literal["speed", "size"] = flag(
        "speed",
        "The core's code: few instructions executed, or one small function for layers of a kind.",
        kind=Literal["speed", "size"],
    )
    weights: Weights | Literal["auto", "text", "binary"] = flag(
        "auto",
        "Constants as C, or as bytes in a file the assembler takes; auto: bytes of large networks.",
        kind=Literal["auto", "text", "binary"],
    )
    tuning: Path | None = flag(None, "A tuning file made by dovetail tune for this model.", kind=Path | None)
    calibration: Path | None = flag(
        None,
        "Cycles of library calls and instructions, a file made by dovetail calibrate for this target.",
        kind=Path | None,
    )
    memory_budget: int | None = flag(
        None,
        "Most bytes of activations and stack on a core alone: layers are computed in stripes where that saves memory.",
        read=parse_bytes,
        metavar="BYTES|32K",
    )
    cores: int | None = flag(
        None,
        "Cores like the target's own that share every layer; the target's number if not given.",
        kind=int | None,
        min=1,
    )
    pipeline: bool = flag(
        False, "Let each core, or group of cores, work on an input of its own, in stages of equal length.", "--pipeline"
    )
    keep_dead: bool = flag(False, "Keep dead and duplicate operators.", "--keep-dead")
    prefill: int = flag(
        0,
        "Emit a second network that computes so many steps in one call, with the states and weights of the one that "
        "computes one step.",
        min=0,
        metavar="STEPS",
    )
    name: str | None = flag(None, "Prefix of the network's C names; the model's own name if not given.")
    arena: str | None = flag(
        None, "C name of an array of your own for the values, which several networks may share.", metavar="SYMBOL"
    )
    pins: Mapping[str, str] = flag(
        dict,
        "Compute a layer, an operator of the model, or all that a pattern names (conv_*), on an engine, core, one core "
        "of several (core1), or several engines or cores (core0+core1). May be repeated.",
        "--pin",
        kind=list[str] | None,
        read=_pins,
        metavar="NAME=ENGINE",
    )
    pins_file: Path | None = flag(
        None,
        'A file of pins: a table pins of NAME = "ENGINE" in TOML, or in .json.',
        "--pins",
        kind=Path | None,
    )
    strict: bool = flag(False, "Take no warnings: what is assumed, approximate or left out is an error.", "--strict")
    tell: Tell = silent
    """Function that gets each note: assumptions, approximations, parts left out, and slower choices because of
    memory."""


document(__name__)
