"""Loops of a program: they say what the statements say, the verifier finds faults in them, and the C that is written
from them calls the drivers as straight-line C does, call by call."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.codegen.emit.network import model_source
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Compiled, Options, compile_graph, prepare
from dovetail.errors import ProgramError
from dovetail.guests import zoo
from dovetail.kernels.kernel import declarations
from dovetail.program.ir import Begin, Copy, LaunchStatement, Program, Wait
from dovetail.program.loops import check_loops, numbers, rolled
from dovetail.program.series import ByteAddress, Loop, Number, Series, series
from dovetail.program.verify import verify
from dovetail.target import Target
from dovetail.targets import load_target

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no host C compiler `cc`")


def _small(target: Target, kibibytes: int) -> Target:
    """NE16 with less L1."""
    memories = tuple(replace(m, size=kibibytes * 1024) if m.name == "L1" else m for m in target.memories)
    return replace(target, memories=memories)


@pytest.fixture(scope="module")
def target() -> Target:
    return _small(load_target("ne16"), 32)


def _compiled(name: str, target: Target, folder: Path) -> Compiled:
    model = folder / f"{name}.onnx"
    model.write_bytes(zoo.build(name))
    return compile_graph(prepare(model, target, Options()), target, Options(), interpret=False)


@pytest.fixture(scope="module")
def tiled(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """MobileNetV1 in so little engine memory that most layers are cut."""
    return _compiled("mobilenet_v1", target, tmp_path_factory.mktemp("tiled"))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6) | st.builds(
    lambda first, step, swing, count: [first + step * turn + swing * (turn % 2) for turn in range(count)],
    st.integers(0, 99), st.integers(-9, 9), st.sampled_from([0, 0, 5]), st.integers(1, 9)), st.booleans())  # fmt: skip
def test_a_series_gives_back_its_numbers(values: list[int], places: bool) -> None:
    made: list[Number] = [ByteAddress("l1", value) if places else value for value in values]
    rule = series(made)
    assert [rule.at(turn) for turn in range(len(made))] == made
    steps = {after - before for before, after in pairwise(values)}
    assert not (len(steps) < 2 and rule.table), "a constant step needs no table"


def test_loops_say_what_the_statements_say(tiled: Compiled) -> None:
    program = tiled.plan.program
    assert len(program.loops) > 4
    covered = sum(loop.stop - loop.first for loop in program.loops)
    assert covered > len(program.statements) / 3
    for loop in program.loops:
        for index in range(loop.first, loop.stop):
            turn, number = loop.place(index)
            said = tuple(one.at(turn) for one in loop.numbers[number])
            assert said == numbers(program, program.statements[index]), index
    assert rolled(program).loops == program.loops


def test_a_wrong_step_is_found(tiled: Compiled) -> None:
    """In every loop, statement and number that has a rule."""
    program, found = tiled.plan.program, 0
    for place, loop in enumerate(program.loops):
        for number, own in enumerate(loop.numbers):
            for position, one in enumerate(own):
                if one.table:
                    continue
                changed = (*own[:position], replace(one, step=one.step + 1), *own[position + 1 :])
                broken = replace(loop, numbers=(*loop.numbers[:number], changed, *loop.numbers[number + 1 :]))
                with pytest.raises(ProgramError, match="turn 1 of a loop says"):
                    check_loops(replace(program, loops=(*program.loops[:place], broken, *program.loops[place + 1 :])))
                found += 1
    assert found > 100


def test_wrong_tables_turns_and_ends_are_found(tiled: Compiled, target: Target) -> None:
    program = tiled.plan.program
    loop = next(loop for loop in program.loops if any(one.table for own in loop.numbers for one in own))
    rows = tuple(tuple(_turned(one) for one in own) for own in loop.numbers)
    for broken in (replace(loop, numbers=rows), replace(loop, first=loop.first + 1)):
        with pytest.raises(ProgramError, match=r"of a loop says|repeats something else"):
            verify(replace(program, loops=(broken,)), target)
    with pytest.raises(ProgramError, match="over one another, or over the end"):
        verify(replace(program, loops=(replace(loop, count=10_000),)), target)
    with pytest.raises(ProgramError, match="over one another, or over the end"):
        verify(replace(program, loops=(loop, loop)), target)


def _turned(one: Series) -> Series:
    return replace(one, table=(*one.table[1:], *one.table[:1]))


def _without(program: Program, loop: Loop, number: int) -> Program:
    """The program without a statement of a loop in all its turns; loops are found anew."""
    found = list(program.statements)
    for index in range(loop.first + number, loop.stop, loop.period):
        found[index] = Begin(found[index].layer)
    return rolled(replace(program, statements=tuple(found), loops=()))


def test_a_missing_wait_in_a_loop_is_found(tiled: Compiled, target: Target) -> None:
    program = tiled.plan.program
    waits = [(loop, number) for loop in program.loops for number in loop.awaited]
    assert len(waits) > 10
    for loop, number in waits:
        with pytest.raises(ProgramError, match="a wait is missing"):
            verify(_without(program, loop, number), target)


def test_a_buffer_overwritten_too_early_is_found(tiled: Compiled, target: Target) -> None:
    """Every turn's load goes where that of the turn before went, which is still being read."""
    program, found = tiled.plan.program, 0
    for loop in program.loops:
        for number in range(loop.period):
            indices = range(loop.first + number, loop.stop, loop.period)
            loads = [program.statements[index] for index in indices]
            if not isinstance(loads[0], Copy) or program.buffers[loads[0].destination.buffer].memory != "L1":
                continue
            targets = {one.destination.buffer for one in loads if isinstance(one, Copy)}
            if len(targets) != 2 or len({one.layer for one in loads}) > 1:
                continue
            statements = list(program.statements)
            for index, before in zip(indices[1:], loads, strict=False):
                own = statements[index]
                if (
                    isinstance(own, Copy)
                    and isinstance(before, Copy)
                    and own.destination.type == before.destination.type
                ):
                    statements[index] = replace(own, destination=before.destination)
            broken = rolled(replace(program, statements=tuple(statements), loops=()))
            with pytest.raises(ProgramError, match=r"a wait is missing|lifetimes overlap"):
                verify(broken, target)
            found += 1
    assert found > 2


_STUBS = """#include <stdio.h>
#include <stdint.h>
static uint32_t count;
static void mark(const char *name) { printf("%s", name); }
static void number(unsigned long value) { printf(" %lu", value); }
static void place(const void *at) { printf(" %p", at); }
"""


def _stubs(compiled: Compiled) -> str:
    """Drivers and kernels that print what they are called with; every start gives a new ticket."""
    copies = {"1d": 1, "2d": 4, "3d": 7, "pad": 7}
    text = [_STUBS, '#include "dma.h"', f'#include "{compiled.unit.model}_kernels.h"']
    for name, sizes in copies.items():
        given = "".join(f", uint32_t n{i}" for i in range(sizes)) + (", const dma_padding *p" if name == "pad" else "")
        body = "".join(f" number(n{i});" for i in range(sizes))
        body += " number(p->top); number(p->bottom); number(p->left); number(p->right);" if name == "pad" else ""
        head = f"uint32_t dma_copy_{name}(void *a, const void *b{given})"
        text.append(f'{head} {{ mark("{name}"); place(a); place(b);{body} puts(""); return ++count; }}')
    text.append('void dma_wait(uint32_t t) { mark("dma_wait"); number(t); puts(""); }')
    text.append('void ne16_wait(uint32_t t) { mark("ne16_wait"); number(t); puts(""); }')
    text.append("void ne16_init(void) { }")
    text.append('uint32_t ne16_start(const uint32_t *t) { mark("start"); place(t); puts(""); return ++count; }')
    for kernel in compiled.unit.kernels:
        places = " ".join(f"place({parameter.name});" for parameter in kernel.parameters)
        text.append(
            f'void {kernel.name}({", ".join(declarations(kernel.parameters))}) {{ mark("k"); {places} puts(""); }}'
        )
    text.append('void dovetail_mark(uint32_t layer) { mark("layer"); number(layer); puts(""); }')
    text += ["void straight_run(void);", f"void {compiled.unit.model}_run(void);", "int main(int n, char **v) {"]
    text += [
        f"    (void)v; if (n > 1) {{ straight_run(); }} else {{ {compiled.unit.model}_run(); }}",
        "    return 0;",
        "}",
    ]
    return "\n".join(text) + "\n"


def _traces(compiled: Compiled, source: str, folder: Path) -> list[str]:
    """What a network's C calls, and what it calls without loops, each in order: one line a call."""
    unit = compiled.unit
    straight = model_source(replace(unit, program=replace(unit.program, loops=())))
    straight = re.sub(r"^uint8_t \w+\[\d+\].*$", "", straight, flags=re.M).replace(f"{unit.model}_run", "straight_run")
    write_project(compiled.project, folder, replace=True)
    for name, text in {"loops.c": source, "straight.c": straight, "stubs.c": _stubs(compiled)}.items():
        (folder / name).write_text(text)
    sources = ["loops.c", "straight.c", "stubs.c", f"src/{unit.model}_constants.c"]
    flags = ["-std=c99", "-O1", "-no-pie", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wno-unused", "-Werror"]
    flags += ["-DDOVETAIL_MARK_HOOK", "-Isrc", "-Iruntime", "-Idriver"]
    subprocess.run(["cc", *flags, *sources, "-o", "trace"], cwd=folder, check=True)
    commands = (["./trace"], ["./trace", "straight"])
    return [subprocess.run(c, cwd=folder, check=True, capture_output=True, text=True).stdout for c in commands]


def _calls_alike(compiled: Compiled, folder: Path) -> None:
    source = compiled.project.files[f"src/{compiled.unit.model}.c"]
    assert "for (uint32_t i" in source and "static uint32_t" not in source
    looped, straight = _traces(compiled, source, folder)
    assert looped == straight
    statements = compiled.plan.program.statements
    kinds = [sum(isinstance(one, kind) for one in statements) for kind in (LaunchStatement, Wait)]
    assert [straight.count("start "), straight.count("_wait ")] == kinds


@needs_compiler
def test_loops_of_c_call_what_straight_line_c_calls(tiled: Compiled, tmp_path: Path) -> None:
    _calls_alike(tiled, tmp_path / "build")


@needs_compiler
@pytest.mark.parametrize(("name", "kibibytes"), [("autoencoder", 64), ("resnet8", 32)])
def test_other_loops_call_the_same(name: str, kibibytes: int, tmp_path: Path) -> None:
    _calls_alike(_compiled(name, _small(load_target("ne16"), kibibytes), tmp_path), tmp_path / "build")


@needs_compiler
def test_faults_in_the_loops_of_c_show(tiled: Compiled, tmp_path: Path) -> None:
    """The comparison of calls sees a wrong step, a turn too few, and the ticket of another turn."""
    source = tiled.project.files[f"src/{tiled.unit.model}.c"]
    faults = [
        re.sub(r"\+ (\d+) \* i\b", lambda found: f"+ {int(found[1]) + 1} * i", source, count=1),
        re.sub(r"i < (\d+); \+\+i", lambda found: f"i < {int(found[1]) - 1}; ++i", source, count=1),
        re.sub(r"_wait\((\w+)_before\)", r"_wait(\1)", source, count=1),
    ]
    for fault in faults:
        assert fault != source
        looped, straight = _traces(tiled, fault, tmp_path / "build")
        assert looped != straight
