"""Checks a core's own instructions: what they compute in firmware against their meaning, on the simulators.

Each instruction, and each function in the place of one of Dovetail's, is a loop of a small firmware over many operands:
extremes and random numbers. The C for other cores is tried in the same firmware. So a difference has a place: meaning
and C, the simulator's extension, or the Verilog.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.build.toolchain import compile_firmware
from dovetail.codegen.emit.firmware import RUNTIME, SIMULATION_MAIN, linker_script, runtime_path
from dovetail.errors import MissingExtraError, SimulationError
from dovetail.files import TemporaryFolder
from dovetail.guests.check.findings import Checked, Finding, Tested
from dovetail.ir.types import Array
from dovetail.kernels.helpers import helper_source
from dovetail.records import Record
from dovetail.sim.core_rtl import build_core
from dovetail.sim.device import regions_of
from dovetail.sim.protocol import SimulationSetup
from dovetail.sim.worker import simulate
from dovetail.target.chip import Core, CoreInstruction
from dovetail.target.description import Target

CASES = 64
"""Rows of operands of an instruction; functions, of single numbers, have 16 times as many."""
_SIZES = (1, 2, 3, 5, 9)
"""Values of a size in a meaning, in turn."""
_FAR = 1 << 30
RANGES: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "multiply_add": {"sum": (-_FAR, _FAR), "left": (-32768, 32767), "right": (-32768, 32767)},
    "saturate": {"value": (-2 * _FAR, 2 * _FAR - 1)},
    "requantize_near": {"value": (-_FAR, _FAR - 1), "multiplier": (2 * _FAR, 4 * _FAR - 1), "shift": (1, 30)},
}
"""Arguments, in their order, that functions of Dovetail's are for."""
FORMS = ("own", "plain")
"""The core's form, and that of any core."""


class InstructionTrial(Record):
    """An instruction or a function, and operands for it."""

    name: str
    size: int
    declarations: str
    """C text before it, in which DOVETAIL_HOST chooses the plain form."""
    call: str
    """A C statement, `{operand}` standing for a pointer to an operand's first element."""
    operands: Mapping[str, Array]
    """[cases, elements]."""
    expected: Mapping[str, Array]
    """The operands that it changes, afterwards; empty for as the plain form has them."""

    @property
    def cases(self) -> int:
        """Rows of operands."""
        return len(next(iter(self.operands.values())))

    def array(self, form: str, operand: str) -> str:
        """The name of an operand's C array."""
        return f"try_{form}_{self.name}_{self.size}_{operand}"

    def source(self, form: str) -> str:
        """C of the operands and of the function that goes through them."""
        lines = []
        for name, values in self.operands.items():
            rows = ", ".join("{" + ", ".join(f"({values.dtype}_t){value}LL" for value in row) + "}" for row in values)
            shape = f"[{values.shape[0]}][{values.shape[1]}]"
            lines.append(f"__attribute__((aligned(8))) {values.dtype}_t {self.array(form, name)}{shape} = {{{rows}}};")
        call = self.call.format(n=self.size, **{name: f"{self.array(form, name)}[i]" for name in self.operands})
        lines += [f"static void {self.array(form, 'all')}(void)", "{"]
        return "\n".join(
            [*lines, f"    for (int32_t i = 0; i < {self.cases}; ++i) {{", f"        {call}", "    }", "}", ""]
        )


def _drawn(random: np.random.Generator, low: int, high: int, shape: tuple[int, int], kind: str) -> Array:
    """Rows of random numbers, a quarter of them at the ends or small; the first rows are of one extreme each."""
    values = random.integers(low, high, shape, endpoint=True, dtype=np.int64)
    ends = (low, high, low + 1, high - 1, max(low, -1), max(low, 0), max(low, 1), max(low, 3))
    values = np.where(random.random(shape) < 0.25, random.choice(ends, shape), values)
    for row, value in enumerate(ends):
        values[row] = value
    return values.astype(kind)


def _of_instruction(one: CoreInstruction, size: int) -> InstructionTrial:
    """An instruction on random operands; its meaning, executed as Python, gives the expected results."""
    random, (function,) = np.random.default_rng(size), ast.parse(one.meaning.strip()).body
    assert isinstance(function, ast.FunctionDef)
    operands, shapes = dict[str, Array](), dict[str, tuple[int, ...]]()
    for argument in function.args.args:
        home = re.fullmatch(r"\[(i8|i32)\]\[(.*)\] @ DRAM", ast.unparse(argument.annotation or function))
        if home is None:
            continue
        shapes[argument.arg] = tuple(int(eval(extent, {"n": size})) for extent in home[2].split(","))
        low, high, kind = (-128, 127, "int8") if home[1] == "i8" else (-_FAR, _FAR, "int32")
        operands[argument.arg] = _drawn(random, low, high, (CASES, int(np.prod(shapes[argument.arg]))), kind)
    names: dict[str, object] = {"seq": range, "stride": lambda array, axis: array.strides[axis] // array.itemsize}
    exec("from __future__ import annotations\n" + one.meaning.strip(), names)
    meaning, after = names[one.name], {name: values.astype(np.int64) for name, values in operands.items()}
    assert callable(meaning)
    for case in range(CASES):
        views = [after[a.arg][case].reshape(shapes[a.arg]) if a.arg in shapes else size for a in function.args.args]
        meaning(*views)
    changed = {name: values for name, values in after.items() if (values != operands[name]).any()}
    expected = {name: values.astype(operands[name].dtype) for name, values in changed.items()}
    return InstructionTrial(one.name, size, one.declarations, one.c.rstrip("; ") + ";", operands, expected)


def _of_function(name: str, core: Core) -> InstructionTrial:
    """A function in the place of one of Dovetail's, on arguments that this is for."""
    random = np.random.default_rng(0)
    kinds = {argument: "uint32" if high >= 2 * _FAR else "int32" for argument, (_, high) in RANGES[name].items()}
    operands = {one: _drawn(random, *bounds, (16 * CASES, 1), kinds[one]) for one, bounds in RANGES[name].items()}
    operands["result"] = np.zeros((16 * CASES, 1), np.int32)
    call = f"{{result}}[0] = {name}({', '.join(f'{{{one}}}[0]' for one in RANGES[name])});"
    return InstructionTrial(name, 0, helper_source([name], core.functions), call, operands, {})


def trials(core: Core) -> tuple[list[InstructionTrial], dict[str, str]]:
    """Trials of a core's instructions and functions; for the others a reason, by name."""
    tried, left = list[InstructionTrial](), dict[str, str]()
    for one in core.instructions:
        if one.memories:
            left[one.name] = "its operands are in registers: it is tried in layers only"
            continue
        tried += [_of_instruction(one, size) for size in (_SIZES if ": size" in one.meaning else (0,))]
    for name in core.functions:
        if name in RANGES:
            tried.append(_of_function(name, core))
        else:
            left[name] = "no arguments are known for it: it is tried in layers only"
    return tried, left


def _built(target: Target, tried: Sequence[InstructionTrial], folder: Path) -> Path:
    """The firmware: every trial in both forms."""
    isa = target.core.isa
    start = instruction_set(isa).start
    for name in (start, *RUNTIME, SIMULATION_MAIN):
        (folder / name).write_bytes(runtime_path(name).read_bytes())
    script = linker_script(target.memories, text=target.code, data=target.values, isa=isa)
    (folder / "link.ld").write_text(script)
    for form in FORMS:
        head = ["#define DOVETAIL_HOST 1"] if form == "plain" else []
        declarations = dict.fromkeys(one.declarations for one in tried)
        calls = "".join(f"    {one.array(form, 'all')}();\n" for one in tried)
        text = [*head, "#include <stdint.h>", *declarations, *(one.source(form) for one in tried)]
        text.append(f"void try_{form}(void);\nvoid try_{form}(void)\n{{\n{calls}}}\n")
        (folder / f"{form}.c").write_text("\n".join(text))
    (folder / "try.h").write_text("void try_own(void);\nvoid try_plain(void);\n")
    (folder / "both.c").write_text(
        '#include "try.h"\nvoid try_both(void);\nvoid try_both(void)\n{\n    try_own();\n    try_plain();\n}\n'
    )
    (folder / "both.h").write_text("void try_both(void);\n")
    sources = [Path(name) for name in (start, RUNTIME[1], SIMULATION_MAIN, "both.c", "own.c", "plain.c")]
    macros: dict[str, str | int | None] = {
        "DOVETAIL_SIM": 1,
        "DOVETAIL_MODEL_HEADER": '"both.h"',
        "DOVETAIL_MODEL_RUN": "try_both",
    }
    return compile_firmware(folder, sources, linker_script=Path("link.ld"), defines=macros, isa=isa, flags=("-O2",))


_Operands = Mapping[tuple[str, int, str], Array]
"""Operands afterwards, by form, number of the trial and name."""


def _run(setup: SimulationSetup, tried: Sequence[InstructionTrial]) -> _Operands:
    places = [(form, number, name) for form in FORMS for number, one in enumerate(tried) for name in one.operands]
    arrays = {place: tried[place[1]].operands[place[2]] for place in places}
    symbols = {place: tried[place[1]].array(place[0], place[2]) for place in places}
    result = simulate(setup, [{}], {symbols[place]: arrays[place].nbytes for place in places}).inferences[0]
    return {
        place: np.frombuffer(result.outputs[symbols[place]], arrays[place].dtype).reshape(arrays[place].shape)
        for place in places
    }


def check_instructions(
    target: Target,
    simulators: Sequence[str],
    only: Sequence[str],
    checked: Checked,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Try a core's own instructions and functions, and add what is found.

    Args:
        target: whose core has some.
        simulators: those that are asked for; empty for `iss`, and `rtl` where there is Verilog (`Core.unit`).
        only: names of those that are tried; empty for all.
        checked: to which findings and counts are added.
        progress: told what is being done.

    Raises:
        DovetailError: the firmware does not build, or a simulator that is asked for is not there.
    """
    core = target.core
    tried, left = trials(core)
    tried = [one for one in tried if not only or one.name in only]
    checked.tested += [Tested("core", name, remark=why) for name, why in left.items() if not only or name in only]
    if not tried:
        return
    usual = ("iss", "rtl") if core.unit else ("iss",)
    before: _Operands = {}
    with TemporaryFolder() as folder:
        elf = _built(target, tried, Path(folder))
        for simulator in (one for one in usual if not simulators or one in simulators):
            progress(f"core: {len(tried)} loops of instructions on {simulator}")
            setup = SimulationSetup(elf, regions_of(target), (), core.isa, core.costs, extension=core.extension)
            try:
                before = _judged(setup, core, tried, simulator, before, checked)
            except MissingExtraError as missing:
                if simulators:
                    raise
                checked.tested.append(Tested("core", "instructions", simulator, remark=missing.what))
            except SimulationError as error:
                sentence = f"core, {simulator}: {error}"
                checked.findings.append(Finding(sentence, (sentence,), simulator))


def _judged(
    setup: SimulationSetup,
    core: Core,
    tried: Sequence[InstructionTrial],
    simulator: str,
    before: _Operands,
    checked: Checked,
) -> _Operands:
    """Run the firmware on a simulator, and add the findings; returns the operands afterwards."""
    began = time.monotonic()
    found = _run(_on_rtl(setup, core) if simulator == "rtl" else setup, tried)
    seconds = (time.monotonic() - began) / len(tried)
    for number, one in enumerate(tried):
        sentences = list(_differences(one, number, simulator, found, before))
        checked.tested.append(Tested("core", one.name, simulator, one.cases, len(sentences), 0, seconds))
        checked.findings += [Finding(sentence, (sentence,), simulator) for sentence in sentences]
    return found


def _on_rtl(setup: SimulationSetup, core: Core) -> SimulationSetup:
    assert core.unit is not None
    return replace(setup, core_rtl=core.unit.core, core_library=build_core(core.unit.core, unit=core.unit))


def _differences(
    one: InstructionTrial, number: int, simulator: str, found: _Operands, before: _Operands
) -> Iterator[str]:
    """A sentence for each form that computes something else; `before` is what another simulator found."""
    for form in FORMS:
        for name, given in one.operands.items():
            actual = found[form, number, name]
            expected = one.expected.get(name, given if one.expected else found["plain", number, name])
            wrong = (actual != expected).any(axis=1)
            if not wrong.any():
                continue
            same = before and np.array_equal(before[form, number, name], actual)
            cause = "the C for other cores (DOVETAIL_HOST), or the meaning"
            if form == "own":
                cause = "the assembly, or the meaning" if same else _CAUSES[simulator]
                cause = "the Verilog: the extension does what is meant" if before and not same else cause
            case = int(wrong.argmax())
            shown = ", ".join(f"{other} = {_shown(values[case])}" for other, values in one.operands.items())
            size = f" with {one.size} turns" if one.size else ""
            yield (
                f"core {one.name}{size}, {simulator}: wrong results in {int(wrong.sum())} of {one.cases} cases; "
                f"suspicion: {cause}; e.g. of {shown}: {name} is {_shown(actual[case])}, expected "
                f"{_shown(expected[case])}"
            )
            break


_CAUSES = {"iss": "Core.extension, or the assembly", "rtl": "the Verilog, or the assembly"}
_MOST = 8


def _shown(values: Array) -> str:
    """The first numbers of a row."""
    text = " ".join(map(str, values[:_MOST].tolist()))
    return f"[{text}{' ...' if len(values) > _MOST else ''}]" if len(values) > 1 else text
