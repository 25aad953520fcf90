"""The outputs of a program whose statements are carried out one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dovetail.ir.types import Array
from dovetail.program.interpret import ProgramInterpreter
from dovetail.program.ir import Program
from dovetail.target.description import Target


def interpret(program: Program, target: Target, inputs: Iterable[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """The outputs of successive inferences, every statement carried out on placed memory.

    Raises:
        ProgramError: an engine finds other bytes than its packed constants.
    """
    machine, found = ProgramInterpreter(program, target), []
    for arrays in inputs:
        for name, array in arrays.items():
            machine.write(program.inputs[name], array)
        for index, statement in enumerate(program.statements):
            machine.step(index, statement)
        machine.bring(len(program.statements))
        found.append({name: machine.read(view) for name, view in program.outputs.items()})
    return found
