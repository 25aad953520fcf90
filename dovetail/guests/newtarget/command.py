"""`dovetail new-target`."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from dovetail.cli.console import say
from dovetail.cli.options import ReplaceFiles, argument, option
from dovetail.errors import TargetError
from dovetail.guests.newtarget import FIXED, PortOperator, PortRounding, PortStyle, PortWish

Kind = TypeVar("Kind", bound=Enum)


def new_target(
    name: Annotated[str, argument(help="Name of the target, its engine and its driver's functions.")],
    folder: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path("."),
    style: Annotated[
        str | None,
        option(
            "--style",
            help="How the engine gets its work: registers, a list of commands in memory (list), an instruction "
            "of the core's own (instruction), registers of one that works in DRAM (in-place), instructions for parts "
            "of a layer (loops), calls (library).",
        ),
    ] = None,
    operators: Annotated[
        str | None, option("--operators", help="Operators of the engine, from conv, depthwise, dense, add.")
    ] = None,
    requant: Annotated[
        str | None,
        option(
            "--requant",
            help="How it rounds: double (as TensorFlow Lite Micro), single (once, halves up), float32, shift.",
        ),
    ] = None,
    force: ReplaceFiles = False,
) -> None:
    """Write a target file and a driver to start a port from.

    They compile and run as they are. On a terminal, what no option says is asked.

    Example: dovetail new-target mine -o port

    Example: dovetail new-target mine --style list --operators conv,dense,add --requant float32
    """
    from dovetail.guests.newtarget import write_new_target

    chosen = _one(PortStyle, "--style", style, "How is the engine told its work?", "registers")
    if chosen in FIXED:
        if operators or requant:
            hint = "leave out --operators and --requant, or choose another --style"
            raise TargetError(FIXED[chosen], where="--style", hint=hint)
        wish = PortWish(chosen)
    else:
        wanted = _said(operators, "What does it compute? (of conv, depthwise, dense, add)", "conv,dense")
        kinds = tuple(_of(PortOperator, "--operators", text.strip()) for text in wanted.split(","))
        rounding = _one(PortRounding, "--requant", requant, "How does it round to 8 bits?", "double")
        wish = PortWish(chosen, kinds, rounding)
    paths = write_new_target(name, folder, force, wish)
    say(f"{', '.join(str(path) for path in paths)}: try dovetail check {paths[0]}")


def _said(given: str | None, question: str, usual: str) -> str:
    """The text of an option, else the answer on a terminal, else the usual one."""
    if given is None and sys.stdin.isatty() and sys.stdout.isatty():
        return str(typer.prompt(question, default=usual))
    return usual if given is None else given


def _one(kinds: type[Kind], name: str, given: str | None, question: str, usual: str) -> Kind:
    choices = ", ".join(str(kind.value) for kind in kinds)
    return _of(kinds, name, _said(given, f"{question} ({choices})", usual))


def _of(kinds: type[Kind], name: str, text: str) -> Kind:
    try:
        return kinds(text)
    except ValueError:
        hint = f"use {', '.join(str(kind.value) for kind in kinds)}"
        raise TargetError(f"there is no '{text}'", where=name, hint=hint) from None
