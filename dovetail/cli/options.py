"""Parameters that commands share, and commands whose parameters are the fields of dataclasses.

A command is a function with typer's annotations. A parameter whose type is a dataclass stands for an option per field
that `dovetail.options.flag` made:

    def mine(model: Model, options: Options, few: Annotated[BoardOptions, "on", "timeout"]) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from dovetail.documented import document
from dovetail.errors import DovetailError
from dovetail.options import Flag, flag, flags_of

if TYPE_CHECKING:
    from dovetail.sim.line import Board

argument = functools.partial(typer.Argument, show_default=False)
"""An argument without a default."""
option = functools.partial(typer.Option, show_default=False)
"""An option without a default worth showing."""

Simulator = Literal["iss", "rtl", "qemu", "host"]

Model = Annotated[Path, argument(help="A .tflite, .onnx, .keras or .h5 file.")]
TargetName = Annotated[
    str,
    option(
        "--target",
        "--part",
        "-t",
        help="A target's or part's name (see dovetail targets), or the path of a target file.",
    ),
]
OptionalTarget = Annotated[str | None, option("--target", "--part", "-t", help="As for compile.")]
TargetArgument = Annotated[str, argument(metavar="TARGET", help="A target's name, or the path of a target file.")]
TargetFile = Annotated[
    str | None, option("--target", "-t", help="The target file of the build; not needed for a built-in target.")
]
BuildFolder = Annotated[Path, argument(help="A folder made by dovetail compile.")]
Page = Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")]
Json = Annotated[Path | None, option("--json", help="Write the same here as JSON; - for stdout.")]
LocalJobs = Annotated[int, typer.Option(help="Processes on this machine.")]
Scheduler = Annotated[str | None, option(help="Address of a Dask scheduler to use instead.")]
ReplaceFolder = Annotated[bool, typer.Option("--force", help="Replace the folder that is already there.")]
ReplaceFiles = Annotated[bool, typer.Option("--force", help="Replace what is already there.")]


@dataclass(frozen=True)
class BoardOptions:
    """The board a command runs on."""

    on: str | None = flag(
        None,
        "Run on a board: serial:/dev/ttyX[:BAUD], tcp:HOST:PORT, gdb[:HOST:PORT], agent:HOST[:PORT]/BOARD.",
        "--on",
        metavar="BOARD",
    )
    io: Path | None = flag(
        None,
        "With --on: make its firmware with this C file (see runtime/board.h).",
        "--board-io",
        kind=Path | None,
    )
    load: str | None = flag(None, "With --on: load the firmware, {elf}, by this command.", "--load", metavar="COMMAND")
    timeout: float = flag(60.0, "With --on: seconds an inference may take.", "--timeout")
    secret: Path | None = flag(
        None, "With --on agent: the file of its secret.", "--secret", kind=Path | None, envvar="DOVETAIL_SECRET"
    )

    def board(self) -> Board | None:
        """The board; None without --on. Raises DovetailError where an option has no board."""
        from dovetail.sim.line import Board

        if self.on is not None:
            return Board(self.on, self.io, self.load or "", self.timeout, self.secret)
        if self.io is not None or self.load is not None:
            what = "these options are about a board, and none is given"
            raise DovetailError(what, where="--board-io, --load", hint="add --on BOARD")
        return None


def changed_options(options: Any, fields: Collection[str]) -> list[str]:
    """Names of the options of some fields that are not at their defaults, such as --check-layers."""
    return [
        own.names[0] if own.names else f"--{name.replace('_', '-')}"
        for name, own in flags_of(type(options)).items()
        if name in fields and getattr(options, name) != own.default
    ]


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a parameter for each option of the dataclasses among its parameters."""
    groups: dict[str, tuple[type, dict[str, Flag]]] = {}
    parameters = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *chosen = get_args(parameter.annotation) or (parameter.annotation,)
        if is_dataclass(kind) and isinstance(kind, type):
            flags = {name: own for name, own in flags_of(kind).items() if not chosen or name in chosen}
            groups[parameter.name] = kind, flags
            parameters += [_parameter(name, own) for name, own in flags.items()]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for group, (kind, flags) in groups.items():
            values[group] = kind(**_fields(flags, {name: values.pop(name) for name in flags}))
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(name: str, own: Flag) -> Parameter:
    asked = typer.Option(*own.names, help=own.help, show_default=own.default is not None, **own.more)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=own.default, annotation=Annotated[own.kind, asked])


def _fields(flags: Mapping[str, Flag], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a dataclass's fields, of those on the command line; what is not given there keeps its default."""
    given = {name: value for name, value in values.items() if value is not None}
    return {name: own.read(given[name]) if own.read else given[name] for name, own in flags.items() if name in given}


document(__name__)
