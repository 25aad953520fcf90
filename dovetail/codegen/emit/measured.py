"""The stack and flash that a project needs, as the compiler of its firmware makes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dovetail.codegen.build.instruction_sets import EMITTED_C
from dovetail.codegen.build.toolchain import firmware_stack
from dovetail.codegen.emit.project import INCLUDED, OPTIMISATION, Project, defines, write_project
from dovetail.codegen.emit.unit import StackNeed, Unit
from dovetail.errors import MissingExtraError
from dovetail.files import TemporaryFolder


def stack_need(unit: Unit, project: Project, other: Unit | None = None) -> StackNeed:
    """The stack of the program, measured, and its flash without the constants of the `other` network in the project;
    raises BuildError where the emitted C does not compile."""
    data = set[str]()  # sources without functions
    for one in (unit, other):
        if one is not None:
            empty = ("constants.c", "weights.S", *(() if one.kernels else ("kernels.c",)))
            data |= {f"src/{one.model}_{name}" for name in empty}
    sources = [Path(name) for name in project.target_sources if name not in data]
    library = [one for one in sources if one.parts[0] == "runtime" and one.name != "sim_main.c"]
    with TemporaryFolder() as folder:
        write_project(replace(project, graph=None, data={}), Path(folder) / "build")
        try:
            need, compiler, code = firmware_stack(
                Path(folder) / "build",
                [one for one in sources if one not in library],
                "main",
                isa=unit.target.core.isa,
                library=library,
                defines=defines(unit.model, unit.target),
                include=INCLUDED,
                flags=(*EMITTED_C, OPTIMISATION[unit.optimize]),
                network=unit.model,
            )
        except MissingExtraError as error:
            return StackNeed(None, why=str(error.where) + ": " + error.what)
    flash = code + sum(array.nbytes for _, array in unit.constants.values())
    return StackNeed(need, compiler, "", flash) if isinstance(need, int) else StackNeed(None, compiler, need, flash)


def larger(one: StackNeed, other: StackNeed) -> StackNeed:
    """The stack of a program that calls two networks, by that of each."""
    unknown = next((need for need in (one, other) if need.nbytes is None), None)
    return unknown or max(one, other, key=lambda need: need.nbytes or 0)
