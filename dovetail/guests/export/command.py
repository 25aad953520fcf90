"""`dovetail export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dovetail.cli.console import say
from dovetail.cli.options import BuildFolder, TargetFile, option
from dovetail.errors import DovetailError


def export(
    build: BuildFolder,
    folder: Annotated[Path, option("--output", "-o", help="Folder for the library or program.")],
    to: Annotated[
        Literal["cmake", "make", "arduino", "platformio", "zephyr", "esp-idf", "cmsis-pack"] | None,
        option(help="A library for this build system."),
    ] = None,
    example: Annotated[
        Literal["pico", "stm32cube", "zephyr-app"] | None,
        option(help="A program to flash on this board: runs a test vector and prints the class and pass."),
    ] = None,
    input_file: Annotated[
        Path | None,
        option("--input", help="With --example: an .npz with the test vector; seeded inputs if not given."),
    ] = None,
    rtos: Annotated[
        Literal["freertos"] | None,
        option(help="Wait by semaphores of this system; zephyr and esp-idf have their own without being asked."),
    ] = None,
    target: TargetFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the export that is already there.")] = False,
) -> None:
    """Write a build as a library for another build system, or as a program for a board.

    Example: dovetail export build/net --to cmake -o libraries/net

    Example: dovetail export build/net --to make --rtos freertos -o libraries/net

    Example: dovetail export build/net --example pico -o pico_net
    """
    from dovetail.guests.export.example import export_example
    from dovetail.guests.export.write import export as write
    from dovetail.run import open_build
    from dovetail.target.registry import load_target

    if (to is None) == (example is None):
        raise DovetailError("an export is a library or a program", where="--to, --example", hint="give one of them")
    opened = open_build(build, load_target(target) if target else None)
    if example is not None:
        files = export_example(opened, example, folder, input_file, force)
    elif to is not None:
        files = write(opened, to, folder, force, rtos is not None)
    say(f"{folder}: {len(files)} files; README.md says how to use them")
