"""What `dovetail schedule` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.console import note, output, progress, say
from dovetail.errors import TargetError

if TYPE_CHECKING:
    from dovetail.target import Ordered


@dataclass(frozen=True, slots=True)
class Wish:
    """The arguments of the command; see `dovetail schedule --help`."""

    model: Path
    target: str
    multipliers: int | None
    sizes: tuple[str, ...]
    rules: Path | None
    seconds: float
    simulate: bool
    folder: Path | None
    force: bool


def schedule(wish: Wish) -> None:
    """Order a model on a target, print a table, write the files; raises DovetailError."""
    from dovetail.compile import Options, prepare, sample_inputs
    from dovetail.emit.write import write_files
    from dovetail.target import OrderRequest
    from dovetail.targets import advice, load_target

    with progress("starting") as show:
        target = load_target(wish.target)
        if target.ordering is None:
            raise TargetError("this target does not order whole networks", where=target.name,
                              hint=advice(lambda one: one.ordering is not None))
        graph = prepare(wish.model, target, Options(allow_float=True), show)

        def told(text: str) -> None:
            """Show a line now, and keep it where the terminal does not."""
            show(text)
            note(text)

        request = OrderRequest(
            settings=_settings(wish),
            rules=wish.rules,
            seconds=wish.seconds,
            inputs=sample_inputs(graph) if wish.simulate else None,
            progress=told,
        )
        ordered = target.ordering(graph, request)
    _print(ordered)
    if wish.folder is not None:
        write_files(ordered.files, wish.folder, wish.force)
        say(f"{wish.folder}: {', '.join(sorted({name.split('/')[0] for name in ordered.files}))}")


def _settings(wish: Wish) -> dict[str, int]:
    """The sizes to change, from --multipliers and --set."""
    found = {} if wish.multipliers is None else {"multipliers": wish.multipliers}
    for text in wish.sizes:
        name, _, value = text.partition("=")
        if not value.lstrip("-").isdigit():
            raise TargetError(f"'{text}' is not NAME=NUMBER", where="--set", hint="for example --set distribution=16")
        found[name] = int(value)
    return found


def _print(ordered: Ordered) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for heading in ordered.headings:
        table.add_column(heading, overflow="fold", justify="left" if heading == ordered.headings[0] else "right")
    for row in ordered.rows:
        table.add_row(*(Text(cell) for cell in row))
    output().print(table, highlight=False)
    for sentence in ordered.notes:
        say(sentence)
