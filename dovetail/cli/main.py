"""The command `dovetail`: its commands are the entry points `dovetail.commands` of installed packages."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, TextIO

import typer

from dovetail import plugins
from dovetail.cli.console import CommandGroup, any_characters, note, show_error
from dovetail.cli.options import expanded
from dovetail.errors import DovetailError
from dovetail.files import CacheWarning
from dovetail.user_file import blamed

Command = Callable[..., None]


def _show_version(wanted: bool) -> None:
    if wanted:
        from dovetail.version import __version__

        typer.echo(f"dovetail {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fits a quantised neural network to the accelerator you built: a model in, verified bare-metal C out."""


def all_commands(tell: Callable[[str], None] = lambda sentence: None) -> Mapping[str, Command]:
    """Every command by name; `tell` hears of those that cannot be used."""
    commands, errors = plugins.load_all(plugins.COMMANDS, plugins.function)
    for error in errors:
        tell(str(error))
    return commands


def command_line(commands: Mapping[str, Command]) -> typer.Typer:
    """The command line with some of the commands."""
    app = typer.Typer(
        cls=CommandGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(
        epilog="Example: dovetail zoo digits -o digits.onnx, then dovetail compile digits.onnx --target ne16 "
        "-o build/net, then dovetail run build/net"
    )(root)
    for name, command in commands.items():
        app.command(name)(expanded(command))
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: status 0, 1 after a message about a mistake, 2 for wrong usage, 130 after Ctrl-C.

    A bug shows its stack; an exception of a function in the user's target file is shown with its line there.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    any_characters()
    warnings.showwarning = _note_warning
    name = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    try:  # the other commands need not be loaded
        command = None if name.startswith("-") else plugins.load(plugins.COMMANDS, name, plugins.function)
        app = command_line({name: command} if command else all_commands(note))
        app(arguments, prog_name="dovetail")
    except Exception as error:
        message = error if isinstance(error, DovetailError) else _of_system(error) or blamed(error)
        if message is None:
            raise
        show_error(message)
        sys.exit(1)


def _note_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning of Dovetail's own as a note; others as Python has them."""
    if issubclass(category, CacheWarning):
        note(str(message))
    else:
        _show_warning(message, category, filename, lineno, file, line)


_show_warning = warnings.showwarning


def _of_system(error: Exception) -> DovetailError | None:
    """The message of an error of a file or folder; None for other errors."""
    if not isinstance(error, OSError) or error.errno is None:
        return None
    hint = "see that the name is right, that there is room, and that you may read and write there"
    where = f"{os.fsdecode(error.filename)!s:.200}" if error.filename is not None else "this computer"
    return DovetailError(str(error.strerror).lower(), where=where, hint=hint)


if __name__ == "__main__":
    main()
