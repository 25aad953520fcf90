"""The header a user includes."""

from __future__ import annotations

from dovetail.emit.c_text import C_TYPES, guard, one_line
from dovetail.emit.source import Unit, arena_name, arenas, place


def header_source(unit: Unit, version: str) -> str:
    """The header a user includes: entry points, inputs and outputs with their sizes and types."""
    program = unit.program
    lines = [
        f"/* {one_line(program.name)}: inference with static memory, for {one_line(unit.target.name)}, made for "
        f"{unit.optimize.value}. */",
        "#include <stdint.h>",
        "",
        f'#define {unit.model.upper()}_DOVETAIL_VERSION "{version}"',
        "",
    ]
    for memory, size in arenas(unit).items():
        lines.append(f"extern uint8_t {arena_name(unit, memory)}[{size}]; /* buffers in {one_line(memory)} */")
    for kind, views in (("input", program.inputs), ("output", program.outputs)):
        for index, (name, view) in enumerate(views.items()):
            stem = f"{unit.model.upper()}_{kind.upper()}_{index}"
            c_type = C_TYPES[view.type.dtype]
            lines += ["", f"/* {kind} '{one_line(name)}': {view.type}, {view.layout or 'row-major'} */"]
            lines.append(f"#define {stem}_ELEMENTS {view.type.elements}")
            lines.append(f"#define {stem} (({c_type} *)(void *)({place(unit, view)}))")
    lines += [
        "",
        "/* Computes the outputs from the inputs. Not reentrant; inputs may be overwritten. */",
        f"void {unit.model}_run(void);",
        "",
    ]
    lines += _pipeline(unit) if unit.delay else _states(unit) if program.states else []
    return guard(f"{unit.model.upper()}_H", "\n".join(lines))


def _pipeline(unit: Unit) -> list[str]:
    calls = "call" if unit.delay == 1 else f"{unit.delay} calls"
    return [
        f"/* A pipeline: the outputs are those of the inputs of the {calls} before. Those of the first"
        f"{'' if unit.delay == 1 else f' {unit.delay}'}, after the start",
        "   or a reset, mean nothing. */",
        f"#define {unit.model.upper()}_DELAY {unit.delay}u",
        f"void {unit.model}_reset(void);",
        "",
    ]


def _states(unit: Unit) -> list[str]:
    nbytes = sum(kept.first.nbytes for kept in unit.program.states)
    return [
        f"/* Forgets what is kept between inferences ({nbytes} bytes), for the start of a new sequence.",
        "   Before the first inference it happens by itself. */",
        f"void {unit.model}_reset(void);",
        "",
    ]
