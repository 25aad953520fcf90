"""`dovetail export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dovetail.cli.console import say
from dovetail.cli.options import BuildFolder, TargetFile, option


def export(
    build: BuildFolder,
    to: Annotated[
        Literal["cmake", "make", "arduino", "platformio", "zephyr", "esp-idf", "cmsis-pack"],
        option(help="Build system of the library's user."),
    ],
    folder: Annotated[Path, option("--output", "-o", help="Folder for the library.")],
    rtos: Annotated[
        Literal["freertos"] | None,
        option(help="Wait by semaphores of this system; zephyr and esp-idf have their own without being asked."),
    ] = None,
    target: TargetFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the export that is already there.")] = False,
) -> None:
    """Write a build as a library for another build system, with an example program.

    Example: dovetail export build/net --to cmake -o libraries/net

    Example: dovetail export build/net --to make --rtos freertos -o libraries/net

    Example: dovetail export build/net --to arduino -o ~/Arduino/libraries/net
    """
    from dovetail.guests.export.write import export as write
    from dovetail.run import open_build
    from dovetail.target.registry import load_target

    files = write(open_build(build, load_target(target) if target else None), to, folder, force, rtos is not None)
    say(f"{folder}: {len(files)} files; README.md says how to use them")
