"""The emitted sources: the header a user includes, constants, kernels, and the network itself."""

from __future__ import annotations

from collections.abc import Collection

from dovetail import kernels
from dovetail.codegen.emit.firmware import FIXED
from dovetail.codegen.emit.unit import StackNeed, Unit, read_in_place
from dovetail.codegen.emit.weights import BinaryArray, weights_files
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.types import Array
from dovetail.kernels.c import (
    Lines,
    array_definition,
    c_type,
    code,
    elements,
    function,
    guard,
    hexadecimal,
    one_line,
    real,
)
from dovetail.kernels.kernel import declarations
from dovetail.program.ir import View
from dovetail.target.engine import IN_PLACE_ALIGNMENT

_ROUNDED = {
    Rounding.DOUBLE: "twice, as in TensorFlow Lite Micro",
    Rounding.SINGLE: "once, as in ONNX Runtime",
    Rounding.AWAY: "once, halves away from zero",
}


def header_source(unit: Unit, version: str) -> str:
    """The header a user includes: entry points, inputs and outputs with their sizes and types."""
    if unit.base is not None:
        return _prefill_header(unit, unit.base)
    program, target, aim = unit.program, one_line(unit.target.name), unit.optimize.value
    rounded = [f"/* The model's own requantisations round {_ROUNDED[unit.rounding]}. */"] if unit.rounding else []
    lines = [f"/* {one_line(program.name)}: inference with static memory, for {target}, made for {aim}. */", *rounded]
    lines += code(f"""
        #include <stdint.h>

        #ifdef __cplusplus
        extern "C" {{
        #endif

        #define {unit.model.upper()}_DOVETAIL_VERSION "{version}"
    """)
    lines.append("")
    for memory, size in unit.arenas().items():
        lines += _arena_declaration(unit, memory, size)
    for kind, views in (("input", program.inputs), ("output", program.outputs)):
        for index, (name, view) in enumerate(views.items()):
            lines += ["", *_port(unit, kind, index, name, view)]
    if unit.stack is not None:
        lines += ["", *_stack(unit, unit.stack)]
    lines += ["", "/* Computes the outputs from the inputs. Not reentrant; inputs may be overwritten. */"]
    lines += [f"void {unit.model}_run(void);", ""]
    if unit.delay:
        after = "after the start"
        calls, first = ("call", "") if unit.delay == 1 else (f"{unit.delay} calls", f" {unit.delay}")
        lines += code(f"""
            /* A pipeline: the outputs are those of the inputs of the {calls} before. Those of the first{first}, {after}
               or a reset, mean nothing. */
            #define {unit.model.upper()}_DELAY {unit.delay}u
        """)
    elif program.states:
        nbytes = sum(kept.first.nbytes for kept in program.states)
        lines.append(f"/* Forgets what is kept between inferences ({nbytes} bytes), for the start of a new sequence.")
        lines.append("   Before the first inference it happens by itself. */")
    lines += [f"void {unit.model}_reset(void);", ""] if unit.delay or program.states else []
    if program.states:
        lines += code(f"""
            /* Copies what is kept between inferences away, and back for the next inference. */
            #define {unit.model.upper()}_STATE_BYTES {sum(kept.first.nbytes for kept in program.states)}u
            void {unit.model}_save(uint8_t *to);
            void {unit.model}_restore(const uint8_t *from);
        """)
        lines.append("")
    lines += ["#ifdef __cplusplus", "}", "#endif", ""]
    return guard(f"{unit.model.upper()}_H", "\n".join(lines))


def _prefill_header(unit: Unit, base: Unit) -> str:
    """The header of a network that computes several steps of another one."""
    count = unit.steps_at_once
    lines = code(f"""
        /* {one_line(base.program.name)}: {count} steps in one call, with memory and weights of {base.model}.h.

           Each step is at the place behind that of the step before; all places are within the states. The outputs are
           those of the last step, the states are as {count} calls of {base.model}_run leave them. */
        #include "{base.model}.h"

        #ifdef __cplusplus
        extern "C" {{
        #endif

        #define {unit.model.upper()}_STEPS {count}u
    """)
    for kind, views in (("input", unit.program.inputs), ("output", unit.program.outputs)):
        for index, (name, view) in enumerate(views.items()):
            lines += ["", *_port(unit, kind, index, name, view)]
    if unit.stack is not None:
        lines += ["", *_stack(unit, unit.stack)]
    lines += code(
        f"""
        @blank
        /* Computes the outputs from the inputs. Not reentrant; inputs may be overwritten, those of a step too. */
        void {unit.model}_run(void);

        extern uint32_t {unit.model}_next; /* 1: the function below runs {unit.model}_run */
        void {unit.model}_or_step(void); /* for simulators */

        #ifdef __cplusplus
        }}
        #endif
    """,
        blank=[""],
    )
    return guard(f"{unit.model.upper()}_H", "\n".join([*lines, ""]))


def _stack(unit: Unit, need: StackNeed) -> Lines:
    """The header's lines about the stack."""
    if need.nbytes is None:
        return code(f"""
            /* No bound on the stack {unit.model}_run needs is known:
               {one_line(need.why)}. */
        """)
    return code(f"""
        /* Bytes of stack {unit.model}_run needs at most, with a main that only calls it, interrupts apart: by the
           frames of {one_line(need.compiler)} for code made for {unit.optimize.value}; other compilers have others. */
        #define {unit.model.upper()}_STACK_BYTES {need.nbytes}u
    """)


def _arena_declaration(unit: Unit, memory: str, size: int) -> Lines:
    """The array of a memory's buffers, and its bytes where the user has to bring it."""
    name = unit.arena_name(memory)
    if name != unit.shared_arena:
        return [f"extern uint8_t {name}[{size}]; /* buffers in {one_line(memory)} */"]
    bytes_of = f"{unit.model.upper()}_ARENA_BYTES"
    return code(f"""
        #define {bytes_of} {size}u
        /* Yours: uint8_t {name}[at least {bytes_of}], aligned to 16 bytes. Networks that share it may run in turns;
           each has its inputs, outputs and all between in it, so take outputs before the next one runs. */
        extern uint8_t {name}[];
    """)


def _port(unit: Unit, kind: str, index: int, name: str, view: View) -> Lines:
    """The header's lines about an input or output, and the function between its integers and real numbers."""
    stem, element, steps = f"{unit.model.upper()}_{kind.upper()}_{index}", c_type(view.type.dtype), unit.steps.get(name)
    shared = view.layout is not None and view.layout.packed
    lines = [
        f"/* {kind} '{one_line(name)}': {view.type}, {view.layout or 'row-major'} */",
        f"#define {stem}_ELEMENTS {view.type.elements}{' /* several in a byte */' if shared else ''}",
        f"#define {stem} (({'uint8_t' if shared else element} *)(void *)({unit.first_byte(view)}))",
    ]
    if steps is None:
        return lines
    low, high = (end - steps.zero_point for end in (view.type.dtype.low, view.type.dtype.high))
    lines += [
        f"#define {stem}_SCALE {real(steps.scale)} /* real number = scale * (integer - zero point) */",
        f"#define {stem}_ZERO_POINT ({steps.zero_point})",
        "",
    ]
    if kind == "output":
        head = f"static inline float {unit.model}_dequantize_output_{index}"
        body = [f"return (float)((int32_t)integer - {stem}_ZERO_POINT) * {stem}_SCALE;"]
        return [*lines, *function(head, [f"{element} integer"], body)]
    head = f"static inline {element} {unit.model}_quantize_input_{index}"
    body = code(f"""
        float steps = number / {stem}_SCALE;
        steps = steps > {real(low)} ? steps : {real(low)}; /* what is no number is the lowest too */
        steps = steps < {real(high)} ? steps : {real(high)};
        steps = (steps + 12582912.0f) - 12582912.0f; /* to the nearest integer, ties to even; not with -ffast-math */
        return ({element})((int32_t)steps + {stem}_ZERO_POINT);
    """)
    return [*lines, *function(head, ["float number"], body)]


def arena_source(unit: Unit) -> str:
    """The array a user brings, for simulators and tests that have none."""
    model = unit.model
    array = f"uint8_t {unit.shared_arena}[{model.upper()}_ARENA_BYTES] __attribute__((aligned(16)));"
    return f'/* In the place of yours; not for a program that has its own. */\n#include "{model}.h"\n\n{array}\n'


def constants_source(unit: Unit) -> tuple[str, str]:
    """Header and source of the constants: weights, parameters and the engines' tasks."""
    declarations, definitions, blobs = [], [f'#include "{unit.model}_constants.h"\n'], _blobs(unit)
    for name, (element, array) in unit.constants.items():
        declaration = f"const {element} {name}[{array.size}]"
        declarations.append(f"extern {declaration};")
        if name not in unit.as_bytes:
            aligned = f"{declaration} __attribute__((aligned({_alignment(name, blobs)})))"
            definitions.append(array_definition(aligned, elements(array)))
    for name, (block, members) in unit.blocks.items():
        declarations.append(f"extern const {block} {name};")
        definitions.append(array_definition(f"const {block} {name}", members))
    tables = ((one.name, one.words) for one in unit.lists if one.name not in unit.pieced)
    for name, content in (*unit.task_words.items(), *tables):
        declaration = f"const uint32_t {name}[{len(content)}]"
        declarations.append(f"extern {declaration};")
        definitions.append(array_definition(declaration, hexadecimal(content)))
    declarations += [f"uint32_t {name}(void); /* starts a list; its ticket */" for name in unit.pieced]
    for name, (element, fixed) in unit.fixed_array().items():
        declaration = f"const {element} {name}[{fixed.size}]"
        declarations.append(f"extern {declaration};")
        attribute = f'__attribute__((aligned({IN_PLACE_ALIGNMENT}), section("{FIXED}")))'
        if name not in unit.as_bytes:
            definitions.append(array_definition(f"{declaration} {attribute}", elements(fixed)))
    included = f'"{unit.model}_kernels.h"' if unit.blocks else "<stdint.h>"  # which has the types of blocks
    included = f'"{unit.base.model}_constants.h"\n#include {included}' if unit.base else included
    text = f"#include {included}\n\n" + "\n".join(declarations) + "\n"
    return guard(f"{unit.model.upper()}_CONSTANTS_H", text), "\n".join(definitions)


def _blobs(unit: Unit) -> frozenset[str]:
    """C names of the constants an engine reads where they lie."""
    return frozenset(f"{unit.model}_{name}" for name in read_in_place(unit.program))


def _alignment(name: str, blobs: Collection[str]) -> int:
    """Bytes: of a constant's address."""
    return IN_PLACE_ALIGNMENT if name in blobs else 16


def weights_source(unit: Unit) -> tuple[str, list[Array]] | None:
    """Assembler source of the constants that are written as bytes, and the arrays of their file; None without any."""
    blobs = _blobs(unit)
    held = {
        name: BinaryArray(array, _alignment(name, blobs), f".rodata.{name}")
        for name, (_, array) in unit.constants.items()
        if name in unit.as_bytes
    }
    for name, (_, array) in unit.fixed_array().items():
        held |= {name: BinaryArray(array, IN_PLACE_ALIGNMENT, FIXED)} if name in unit.as_bytes else {}
    return weights_files(unit.model, held) if held else None


def kernels_source(unit: Unit) -> tuple[str, str]:
    """Header and source of the kernels the core runs."""
    needed = [name for kernel in unit.kernels for name in kernel.helpers]
    parts = [f'#include "{unit.model}_kernels.h"\n']
    parts.append(kernels.helper_source(needed, unit.target.core.functions))
    parts += dict.fromkeys(text for kernel in unit.kernels for text in kernel.declarations)
    parts += dict.fromkeys(kernel.shared for kernel in unit.kernels if kernel.shared)
    parts += [kernel.source.replace(f"static void {kernel.name}(", f"void {kernel.name}(") for kernel in unit.kernels]
    prototypes = list(dict.fromkeys(kernel.block.definition() for kernel in unit.kernels if kernel.block))
    prototypes += [f"void {kernel.name}({', '.join(declarations(kernel.parameters))});" for kernel in unit.kernels]
    header = guard(f"{unit.model.upper()}_KERNELS_H", "#include <stdint.h>\n\n" + "\n".join(prototypes) + "\n")
    return header, "\n".join(parts)
