"""`dovetail schedule` and `dovetail targets`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dovetail import plugins
from dovetail.cli.console import note, progress, say, show_table
from dovetail.cli.options import Model, ReplaceFolder, TargetName, option
from dovetail.errors import TargetError


def schedule(
    model: Model,
    target: TargetName,
    multipliers: Annotated[
        int | None, option(help="Multipliers of the hardware; the target's own number if not given.")
    ] = None,
    sizes: Annotated[
        list[str] | None, option("--set", help="NAME=NUMBER: another size of the hardware. May be repeated.")
    ] = None,
    rules: Annotated[Path | None, option(help="A YAML file of your own rules for the order.")] = None,
    seconds: Annotated[float, typer.Option(help="To spend on better orders than the first.")] = 5.0,
    check: Annotated[
        Path | None, option(help="An order of your own, as schedule.json has it: check it instead of finding one.")
    ] = None,
    simulate: Annotated[bool, typer.Option(help="Execute the order cycle by cycle and compare.")] = True,
    folder: Annotated[
        Path | None, option("--output", "-o", help="Folder for the order, its picture and programs.")
    ] = None,
    force: ReplaceFolder = False,
) -> None:
    """Order a whole network on a target's hardware.

    Which part works where, and when.

    Example: dovetail schedule net.h5 --target maeri --multipliers 64 -o build/order
    """
    from dovetail.compile import Options, prepare, sample_inputs
    from dovetail.folders import write_files
    from dovetail.target import OrderRequest
    from dovetail.target.registry import advice, load_target

    with progress("starting") as show:
        known = load_target(target)
        if known.ordering is None:
            hint = advice(lambda one: one.ordering is not None)
            raise TargetError("this target does not order whole networks", where=known.name, hint=hint)
        plain = (replace(one, rewrites=tuple(r for r in one.rewrites if not r.orders)) for one in known.policies)
        graph = prepare(model, replace(known, policies=tuple(plain)), Options(allow_float=True), show)

        def told(text: str) -> None:
            show(text)
            note(text)

        inputs = sample_inputs(graph) if simulate else None
        request = OrderRequest(_settings(multipliers, sizes or ()), rules, seconds, inputs, told, check)
        ordered = known.ordering(graph, request)
    show_table(ordered.headings, ordered.rows, left=ordered.headings[:1], fold=ordered.headings)
    for sentence in ordered.notes:
        say(sentence)
    if folder is not None:
        write_files(ordered.files, folder, force)
        say(f"{folder}: {', '.join(sorted({name.split('/')[0] for name in ordered.files}))}")


def _settings(multipliers: int | None, sizes: Sequence[str]) -> dict[str, int]:
    """The sizes to change, from --multipliers and --set."""
    found = {} if multipliers is None else {"multipliers": multipliers}
    for text in sizes:
        name, _, value = text.partition("=")
        if not value.lstrip("-").isdigit():
            raise TargetError(f"'{text}' is not NAME=NUMBER", where="--set", hint="for example --set distribution=16")
        found[name] = int(value)
    return found


def targets(
    parts: Annotated[bool, typer.Option("--parts", help="The microcontrollers whose memories are known.")] = False,
) -> None:
    """List the targets and their requantisation policies, or known microcontrollers.

    Example: dovetail targets --parts
    """
    from dovetail.target.parts import PARTS
    from dovetail.target.registry import installed_targets, load_target

    if parts:
        width = max(map(len, PARTS))
        for name, part in PARTS.items():
            say(f"{name:{width}} {load_target(name).sentence} ({part.source}, {part.clock} MHz)")
        return
    width = max(map(len, plugins.names(plugins.TARGETS)))
    for name, target in installed_targets(note):
        say(f"{name:{width}} {target.sentence}")
        for index, policy in enumerate(target.policies):
            say(f"{'':{width}} --requant {policy.name}{' (default)' if index == 0 else ''}: {policy.sentence}")
