"""How the command line talks: errors and progress on stderr, results on stdout."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperGroup

from dovetail.documented import document
from dovetail.errors import DovetailError, visible
from dovetail.notes import Note

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

INTERRUPTED = 130
"""Status after Ctrl-C, as shells have it: 128 + SIGINT."""


class CommandGroup(TyperGroup):
    """The commands; Ctrl-C in one of them ends the process with one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            note("stopped")
            sys.exit(INTERRUPTED)


def output() -> Console:
    """The console of results; as wide as its table needs where it is not a terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


def any_characters() -> None:
    """Let stdout and stderr escape what their encoding does not have, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print plain text on stdout."""
    print(visible(text), flush=True)  # a pipe that is closed is told here, not when the process ends


@contextmanager
def beside_json(path: Path | None, data: Any) -> Iterator[None]:
    """Write data as JSON, if a path is given; where it is "-", to stdout, and what the block prints goes to stderr."""
    text = json.dumps(data, indent=2) + "\n"
    if path is None or str(path) != "-":
        if path is not None:
            from dovetail.arrays import write_file

            write_file(path, text.encode())
        yield
        return
    sys.stdout.write(text)
    with redirect_stdout(sys.stderr):
        yield


_LONGEST = 40
"""Letters of an operator's name in a table."""


def short_name(operator: str) -> str:
    """An operator as tables show it: of the tensors a converter joined in its name, the first, and the end of that.

    >>> short_name("CONV_2D 0 (model/relu/Relu;model/bn/FusedBatchNormV3)")
    'CONV_2D 0 (model/relu/Relu; …)'
    """
    kind, found, names = operator.partition(" (")
    first, *others = names.removesuffix(")").split(";") if found else [kind]
    kept = first if len(first) <= _LONGEST else f"…{first[1 - _LONGEST :]}"
    return f"{kind} ({kept}{'; …' if others else ''})" if found else kept


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def tell(said: Note) -> None:
    """Print a note of a compilation on stderr."""
    note(str(said))


def note_seeded(file: Path | None) -> None:
    """Say where inputs are not from a file."""
    if file is None:
        note("no --input: the inputs are random numbers with seed 0")


def show_error(error: DovetailError) -> None:
    """Print one message on stderr: what is wrong, where, and what to do."""
    from rich.console import Console
    from rich.text import Text

    place = f"{error.where}: " if error.where else ""
    message = Text.assemble(("error: ", "bold red"), visible(f"{place}{error.what}"))
    if error.hint:
        message.append_text(Text.assemble("\n  ", ("what to do: ", "bold"), visible(error.hint)))
    Console(stderr=True).print(message, highlight=False, soft_wrap=True)


@contextmanager
def progress(first: str, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that shows what is being done now; where stderr is no terminal silent, or with `lines`, for
    commands that take minutes, a line at once and then one every few seconds."""
    if not sys.stderr.isatty():
        yield _now_and_then(first) if lines else lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(first)) as status:
        yield lambda text: status.update(Text(visible(text)))


_EVERY = 3.0
"""Seconds between two lines of progress."""


def _now_and_then(first: str) -> Callable[[str], None]:
    """Notes the first text, and later ones unless there was another a moment ago."""
    last = time.monotonic()
    note(first)

    def shown(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > _EVERY:
            last = time.monotonic()
            note(text)

    return shown


def show_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text] | None],
    left: Collection[str] = (),
    fold: Collection[str] = (),
    whole: Collection[str] = (),
    styles: Sequence[str] = (),
) -> None:
    """Print a table on stdout.

    Args:
        headings: of its columns; numbers stand to the right.
        rows: the cells, text that is shown as it is; None begins a section.
        left: headings of columns of words.
        fold: headings of columns whose text goes on in further lines where it is too long.
        whole: headings of columns that are never broken.
        styles: of the rows, as far as they are given.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(
            heading,
            justify="left" if heading in left else "right",
            overflow="fold" if heading in fold else "ellipsis",
            no_wrap=heading in whole,
        )
    for number, row in enumerate(rows):
        if row is None:
            table.add_section()
        else:
            cells = (Text(visible(cell)) if isinstance(cell, str) else cell for cell in row)
            table.add_row(*cells, style=styles[number] if number < len(styles) else "")
    output().print(table, highlight=False)


document(__name__)
