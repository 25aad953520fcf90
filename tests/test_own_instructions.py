"""Instructions of a core that the simulator does not know: a target's C file or Python function executes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from struct import unpack

import numpy as np
import pytest

from dovetail.errors import SimulationError
from dovetail.sim.protocol import SimulationResult
from dovetail.sim.riscv import Registers
from dovetail.sim.worker import simulate
from dovetail.targets import load_target
from firmware import build, chip, require_chip

FIRMWARE = """
int main(void)
{
    int32_t total = -7;
    for (int32_t turn = 0; turn < 10; ++turn) {
        __asm__ volatile(".insn r OPCODE %0, %1, %2" : "+r"(total) : "r"(0x80ff017f), "r"(0x80ff027f));
    }
    exit_with((uint32_t)total);
    return 0;
}
"""
OWN, XPULP = "0x0b, 0, 0,", "0x7b, 1, 0x54,"
C, CORE_V = (load_target(name).core.extension for name in ("riscv_dot4", "riscv_xpulp"))


def dot4(word: int, registers: Registers) -> bool:
    """The same in Python."""
    if (word & 0x7F, word >> 12 & 7, word >> 25) != (0x0B, 0, 0):
        return False
    left, right = (unpack("<4b", registers.read(word >> at & 31).to_bytes(4, "little")) for at in (15, 20))
    total = registers.read(word >> 7 & 31) + sum(a * b for a, b in zip(left, right, strict=True))
    registers.write(word >> 7 & 31, total)
    return True


PYTHON = f"{Path(__file__).resolve()}:dot4"


def executed(folder: Path, opcode: str, extension: str = C) -> SimulationResult:
    """Run ten instructions of an opcode."""
    require_chip()
    folder.mkdir(exist_ok=True)
    setup = chip(build(folder, FIRMWARE.replace("OPCODE", opcode)))
    return simulate(replace(setup, extension=extension), [], {})


@pytest.mark.parametrize(
    ("opcode", "extension"), [(OWN, C), (XPULP, CORE_V), (OWN, PYTHON)], ids=["C", "XPULP", "Python"]
)
def test_it_counts_as_one_instruction(tmp_path: Path, opcode: str, extension: str) -> None:
    """As many as with a multiplication in its place, from both block hooks, and the sum the meaning has."""
    plain = executed(tmp_path / "plain", "0x33, 0, 1,").executed_instructions
    left, right = (np.array([127, third, -1, -128]) for third in (1, 2))
    result = executed(tmp_path / "own", opcode, extension)
    assert result.exit_code == -7 + 10 * int(left @ right)
    assert result.executed_instructions == plain


@pytest.mark.parametrize("extension", [C, PYTHON], ids=["C", "Python"])
def test_an_instruction_nobody_knows(tmp_path: Path, extension: str) -> None:
    with pytest.raises(SimulationError, match="does not know the instruction 0x00a6158b") as caught:
        executed(tmp_path / "other", "0x0b, 1, 0,", extension)
    assert "main" in caught.value.where


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    broken = tmp_path / "broken.c"
    with pytest.raises(SimulationError, match="no such file") as missing:
        executed(tmp_path, OWN, str(broken))
    broken.write_text("uint32_t dovetail_execute(int word) { return word }\n")
    with pytest.raises(SimulationError, match="cannot be compiled") as refused:
        executed(tmp_path, OWN, str(broken))
    for caught in (missing, refused):
        assert str(broken) in caught.value.where and "Core.extension" in caught.value.hint


LOOP = """
int main(void)
{
    static int32_t from[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const int32_t *at = from;
    int32_t total = 0, read;
    __asm__ volatile(".balign 4\\n"
                     "li %1, TURNS\\n"
                     ".balign 4\\n"
                     ".insn i 0x2b, 4, x14, %1, 4\\n"
                     "BODY"
                     : "+r"(total), "=&r"(read), "+&r"(at)
                     :
                     : "memory");
    exit_with((uint32_t)total);
    return 0;
}
"""
LOAD, ADD = ".insn i 0x0b, 2, %1, %2, 4\\n", ".insn r 0x2b, 3, 0x48, %0, %1, %1\\n"
"""cv.lw with post-increment; cv.mac."""


def looped(folder: Path, turns: int, body: str) -> SimulationResult:
    """Run a hardware loop of three instructions."""
    require_chip()
    source = LOOP.replace("TURNS", str(turns)).replace("BODY", body)
    return simulate(replace(chip(build(folder, source)), extension=CORE_V), [], {})


def test_every_turn_of_a_hardware_loop_counts(tmp_path: Path) -> None:
    """Three instructions a turn, the pointer moves on."""
    one, eight = (looped(tmp_path, turns, LOAD + ADD + ADD) for turns in (1, 8))
    assert (one.exit_code, eight.exit_code) == (2, 2 * sum(n * n for n in range(1, 9)))
    assert eight.executed_instructions - one.executed_instructions == 3 * 7


@pytest.mark.parametrize(
    ("turns", "body", "words"),
    [
        (3, LOAD + ADD + "xor %0, %0, %1\\n", "hardware loop"),
        (0, LOAD + ADD + ADD, "hardware loop"),
        (3, LOAD.replace("0x0b, 2, %1, %2", "0x0b, 2, %1, x0") + ADD + ADD, "nothing is mapped at 0x0"),
    ],
    ids=["an instruction not its own", "no turn", "no memory"],
)
def test_what_a_hardware_loop_cannot_be(tmp_path: Path, turns: int, body: str, words: str) -> None:
    with pytest.raises(SimulationError, match=words) as caught:
        looped(tmp_path, turns, body)
    assert "main" in caught.value.where
