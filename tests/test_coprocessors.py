"""Instructions of the core that lead to a device, as RoCC and custom function units are, and 64-bit operands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.errors import SimulationError
from dovetail.sim.device import Bus, Coprocessor, DeviceSpec, Taken
from dovetail.sim.protocol import SimulationResult
from dovetail.sim.riscv import Registers
from dovetail.sim.worker import simulate
from firmware import build, chip, require_chip


class Store(Coprocessor):
    """Funct 0: rs1 is written to the address rs2, 50 cycles later; funct 1: rd = rs1 + rs2 at once. One at a time."""

    name = "store"

    def __init__(self, bus: Bus, bits: int) -> None:
        self._bus, self._bits, self._ends, self._writes = bus, bits, 0, list[tuple[int, int]]()

    def instruct(self, word: int, first: int, second: int, now: int) -> Taken:
        assert max(first, second) < 1 << self._bits
        if word >> 25:
            return Taken(now, first + second)
        begin = max(now, self._ends)
        self._ends = begin + 50
        self._writes.append((first, second))
        return Taken(begin)

    def fence(self, now: int) -> int:
        for value, address in self._writes:
            self._bus.view(address, self._bits // 8)[:] = list(value.to_bytes(self._bits // 8, "little"))
        self._writes = []
        return max(now, self._ends)


class Refusing(Store):
    """Every fence fails."""

    def fence(self, now: int) -> int:
        raise SimulationError("no fence wanted", where="store", hint="leave it out")


FIRMWARE = """
static volatile unsigned long place = 7;
int main(void)
{
    const uint32_t before = dovetail_mmio_read(DOVETAIL_SIM_CONTROL + 12);
    unsigned long total;
    __asm__ volatile(".insn r 0x7b, 3, 0, x0, %0, %1" ::"r"(1ul << (8 * sizeof total - 1) | 5), "r"(&place) : "memory");
    __asm__ volatile(".insn r 0x7b, 3, 0, x0, %0, %1" ::"r"(1ul << (8 * sizeof total - 1) | 6), "r"(&place) : "memory");
    const unsigned long early = place;
    FENCE;
    __asm__ volatile(".insn r 0x7b, 7, 1, %0, %1, %2" : "=r"(total) : "r"(place), "r"(-1l));
    const uint32_t taken = dovetail_mmio_read(DOVETAIL_SIM_CONTROL + 12) - before;
    const int sum = total == (1ul << (8 * sizeof total - 1) | 5), time = taken >= 100 && taken < 140;
    exit_with((uint32_t)((early == 7) << 2 | sum << 1 | time));
    return 0;
}
"""


def executed(
    folder: Path, isa: str, device: str = "Store", fence: str = '__asm__ volatile("fence" ::: "memory")'
) -> int:
    """The exit code of the firmware with the device."""
    require_chip()
    bits = 64 if "64" in isa else 32
    elf = build(folder, FIRMWARE.replace("FENCE", fence), isa=isa)
    spec = DeviceSpec(f"{__file__}:{device}", 0, 0, {"bits": bits}, opcode=0x7B)
    return simulate(chip(elf, spec, isa=isa), [], {}).exit_code or 0


@pytest.mark.parametrize("isa", ["rv32imc", "rv64gc"])
def test_operands_results_stalls_and_fences(tmp_path: Path, isa: str) -> None:
    """Both registers come whole; the second is stalled, the fence waits, and nothing is written before."""
    assert executed(tmp_path, isa) == 7


def test_what_is_not_waited_for_is_not_there(tmp_path: Path) -> None:
    assert executed(tmp_path, "rv64gc", fence="(void)0") == 4


def test_what_a_device_raises_reaches_the_user(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="no fence wanted"):
        executed(tmp_path, "rv64gc", "Refusing")


OWN = """
int main(void)
{
    static unsigned long place = 0x8000000000000003;
    unsigned long product;
    __asm__ volatile(".insn r 0x0b, 0, 0, %0, %1, %2" : "=r"(product) : "r"(&place), "r"(0x100000001) : "memory");
    exit_with((uint32_t)((product == 0x8000000300000003) << 1 | (place == 0x7ffffffffffffffc)));
    return 0;
}
"""


def own(word: int, registers: Registers) -> bool:
    """A product of 64 bits; memory is not looked at."""
    registers.write(word >> 7 & 31, 0x8000000000000003 * registers.read(word >> 20 & 31))
    return True


@pytest.mark.parametrize(("extension", "code"), [("own64.c", 3), ("test_coprocessors.py:own", 2)], ids=["C", "Python"])
def test_instructions_of_64_bits(tmp_path: Path, extension: str, code: int) -> None:
    require_chip()
    setup = replace(
        chip(build(tmp_path, OWN, isa="rv64gc"), isa="rv64gc"),
        extension=str(Path(__file__).with_name("x").parent / extension),
    )
    result: SimulationResult = simulate(setup, [], {})
    assert result.exit_code == code
