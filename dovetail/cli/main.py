"""The command `dovetail`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from dovetail.cli.agent import agent
from dovetail.cli.compile import compile_model, explain, tune
from dovetail.cli.console import Commands, show_error
from dovetail.cli.export import export
from dovetail.cli.mesh import mesh, schedule
from dovetail.cli.port import check, new_target, targets, vectors, zoo
from dovetail.cli.quantize import accuracy, quantize
from dovetail.cli.report import compare, report, run, sweep
from dovetail.errors import DovetailError
from dovetail.user_file import blamed


def _show_version(wanted: bool) -> None:
    if wanted:
        from dovetail.version import __version__

        typer.echo(f"dovetail {__version__}")
        raise typer.Exit


def every(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fits a quantised neural network to the accelerator you built: a model in, verified bare-metal C out."""


COMMANDS: dict[str, Callable[..., None]] = {
    **{"compile": compile_model, "run": run, "report": report, "export": export},
    **{"compare": compare, "sweep": sweep, "explain": explain},
    **{"tune": tune, "schedule": schedule, "mesh": mesh, "quantize": quantize, "accuracy": accuracy},
    **{"new-target": new_target, "check": check, "vectors": vectors, "targets": targets, "zoo": zoo},
    **{"agent": agent},
}
"""In the order in which they are listed."""


def _with(names: Iterable[str]) -> typer.Typer:
    """The command line with some of the commands."""
    made = typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(
        epilog="Example: dovetail zoo digits -o digits.onnx, then dovetail compile digits.onnx --target ne16 "
        "-o build/net, then dovetail run build/net"
    )(every)
    for name in names:
        made.command(name)(COMMANDS[name])
    return made


app = _with(COMMANDS)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: status 0, 1 after a message about a mistake, 2 for wrong usage, 130 after Ctrl-C.

    A bug shows its stack; what a function of the user's target file raises is told with its line there.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    asked = (sys.argv[1:] if arguments is None else arguments)[:1]
    try:  # the options of commands nobody asked for need not be looked at
        (_with(asked) if asked and asked[0] in COMMANDS else app)(arguments, prog_name="dovetail")
    except Exception as error:
        told = error if isinstance(error, DovetailError) else blamed(error)
        if told is None:
            raise
        show_error(told)
        sys.exit(1)


if __name__ == "__main__":
    main()
