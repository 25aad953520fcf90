"""Cortex-M in the simulator: registers, exceptions, waiting, and how long Thumb-2 instructions take."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from dovetail.codegen.build.elf import code_ranges
from dovetail.errors import SimulationError
from dovetail.records import Record
from dovetail.sim.core import Architecture, BlockCost, CoreSetup, EmulatedCore, Pause
from dovetail.sim.device import Device, read_number
from dovetail.sim.dual_issue import IssueClock
from dovetail.sim.encodings import Instruction, decoder

_SYSTEM_CONTROL = 0xE000E000
_WFI, _WFI_WIDE = b"\x30\xbf", b"\xaf\xf3\x03\x80"
_INTERRUPT = 16  # exception number of interrupt 0, the line of all devices
_RETURN = 0xFFFFFFF9  # to thread mode, main stack, no floating-point frame (ARMv7-M ARM, "Exception return behavior")
_REALIGNED = 1 << 9  # in a stacked xPSR: the stack pointer was moved by 4 (ibid., "Stack alignment on exception entry")
_EXCEPTIONS = {
    1: "undefined instruction",
    2: "SVC",
    3: "instruction fetch",
    4: "data access",
    7: "BKPT",
    17: "no coprocessor",
    18: "invalid state",
    19: "stack limit passed",
    22: "unaligned access",
}
"""The emulator's numbers."""
_EXCEPTION_RETURN = 8
_MODELS = {"cortex-m0plus": "CORTEX_M0", "cortex-m23": "CORTEX_M33", "cortex-m55": "CORTEX_M33"}
"""The emulator's models of cores it has none of: each executes all that compilers use of the other one."""


class CortexMCosts(Record):
    """Cycles of each class of instruction.

    The defaults are those of a Cortex-M4 with memories without wait states: Cortex-M4 Technical Reference Manual
    (ARM DDI 0439), table "Cortex-M4 instruction set summary" and section "Load/store timings"; interrupt latency
    from section "Exceptions". Where the manual gives a range, this takes: a pipeline refill ("P", 1 to 3) of 2,
    `divide` 12 (the worst of 2..12). Not modelled: IT folded into its neighbour, the longer latency of an address
    computed by the instruction before, literals and instructions competing for the flash.

    Attributes:
        alu: arithmetic, logic, shifts, moves, packed (SIMD) additions, IT, hints.
        load: LDR of any size. store: STR with an immediate offset. store_register: STR with a register offset.
        pipelined: cycles less for a load, or a store with a register offset, right behind a load whose result is no
            part of its address.
        transfer: LDM, STM, PUSH, POP, LDRD, STRD before their words. transfer_word: for each of their words.
        multiply: all products and products with accumulation, long and packed (SMLAD) ones too, unless the following
            say otherwise: multiply_add for MLA and MLS, multiply_long for SMULL and UMULL, multiply_long_add for
            SMLAL and UMLAL; 0 for as `multiply`.
        divide: SDIV, UDIV.
        branch_not_taken: a conditional branch that falls through. branch_taken: one that does not.
        jump: B, BL, BX, BLX, moves to PC. call: BL; 0 for as `jump`.
        refill: what a load of PC, or TBB, adds to its cycles as a load.
        system: CPS, MRS, MSR, SVC, WFI. barrier: DMB, DSB, ISB.
        skipped: an instruction in an IT block whose condition is false.
        interrupt_entry: cycles between an interrupt being taken and the first instruction of its handler.
        interrupt_return: what a return from an exception takes beyond its jump.
        pairs: whether two instructions are issued at once where they can be (`sim/dual_issue.py`): then loads, stores
            and products occupy the core for a cycle, and `refill` is not used.
    """

    alu: int = 1
    load: int = 2
    store: int = 1
    store_register: int = 2
    pipelined: int = 1
    transfer: int = 1
    transfer_word: int = 1
    multiply: int = 1
    divide: int = 12
    branch_not_taken: int = 1
    branch_taken: int = 3
    jump: int = 3
    refill: int = 2
    system: int = 2
    barrier: int = 3
    skipped: int = 1
    interrupt_entry: int = 12
    interrupt_return: int = 9
    multiply_add: int = 0
    multiply_long: int = 0
    multiply_long_add: int = 0
    call: int = 0
    pairs: int = 0


def is_wide(half: int) -> bool:
    """Whether an instruction that begins with `half` has 4 bytes."""
    return half >> 11 in (0b11101, 0b11110, 0b11111)


_NARROW = decoder(
    """
    00.. .... .... ....  alu
    0100 0011 01.. ....  multiply
    0100 00.. .... ....  alu
    0100 0111 .... ....  jump
    0100 01.0 1... .111  jump
    0100 01.. .... ....  alu
    0100 1ddd .... ....  load +15
    0101 00.m mmnn n...  store_register
    0101 010m mmnn n...  store_register
    0101 ...m mmnn nddd  load
    1000 1... ..nn nddd  load
    1000 0... ..nn n...  store
    1001 1ddd .... ....  load +13
    1001 0... .... ....  store +13
    01.. 1... ..nn nddd  load
    01.. 0... ..nn n...  store
    1011 .0.1 .... ....  branch_not_taken
    1011 1101 rrrr rrrr  transfer pc
    1011 .10r rrrr rrrr  transfer
    1011 0110 011. 0...  system
    1011 1110 .... ....  system ends
    1011 1111 0011 0000  system ends
    1011 1111 .... 0000  alu
    1011 1111 .... iiii  alu
    101. .... .... ....  alu
    1100 .... rrrr rrrr  transfer
    1101 111. .... ....  system ends
    1101 .... .... ....  branch_not_taken
    1110 .... .... ....  jump
    1111 .... .... ....  alu
    """,
    16,
)
_WIDE = decoder(
    """
    1110 100. .0.1 ....  1rrr rrrr rrrr rrrr  transfer pc
    1110 100. .0.. ....  rrrr rrrr rrrr rrrr  transfer
    1110 1000 1101 nnnn  .... .... 000. mmmm  load pc
    1110 1000 .101 nnnn  dddd .... .... ....  load
    1110 1000 .100 nnnn  .... .... .... ....  store
    1110 100. .1.. ....  .... .... .... ....  transfer *2
    1110 1... .... ....  .... .... .... ....  alu
    1111 0... .... ....  11.. .... .... ....  call
    1111 0... .... ....  10.1 .... .... ....  jump
    1111 0011 1010 1111  1000 0000 0000 0011  system ends
    1111 0011 1010 1111  1... .... .... ....  alu
    1111 0011 1011 1111  1... .... .... ....  barrier
    1111 0.11 1... ....  1... .... .... ....  system
    1111 0... .... ....  1... .... .... ....  branch_not_taken
    1111 0... .... ....  0... .... .... ....  alu
    1111 100. 1..0 nnnn  .... .... .... ....  store
    1111 100. ...0 nnnn  .... 1... .... ....  store
    1111 100. ...0 1111  .... .... .... ....  store +15
    1111 100. ...0 nnnn  .... .... .... mmmm  store_register
    1111 100. 1101 nnnn  1111 .... .... ....  load pc
    1111 100. .101 nnnn  1111 1... .... ....  load pc
    1111 100. .101 1111  1111 .... .... ....  load pc +15
    1111 100. .101 nnnn  1111 .... .... mmmm  load pc
    1111 100. ...1 ....  1111 .... .... ....  alu
    1111 100. 1..1 nnnn  dddd .... .... ....  load
    1111 100. ...1 nnnn  dddd 1... .... ....  load
    1111 100. ...1 1111  dddd .... .... ....  load +15
    1111 100. ...1 nnnn  dddd .... .... mmmm  load
    1111 1011 10.1 ....  .... .... 1111 ....  divide
    1111 1011 10.0 ....  .... .... .... ....  multiply_long
    1111 1011 1... ....  .... .... .... ....  multiply_long_add
    1111 1011 0000 ....  1111 .... .... ....  multiply
    1111 1011 0000 ....  .... .... .... ....  multiply_add
    1111 1011 0... ....  .... .... .... ....  multiply
    1111 1... .... ....  .... .... .... ....  alu
    """,
    32,
)
"""Encodings: ARMv7-M Architecture Reference Manual (ARM DDI 0403), chapter "The Thumb Instruction Set Encoding"."""


def decode(half: int, second: int = 0) -> Instruction:
    """Decode the Thumb-2 instruction of `half` and, where that begins a wide one, `second`."""
    return _WIDE(half << 16 | second) if is_wide(half) else _NARROW(half)


_LIKE = {"multiply_add": "multiply", "multiply_long": "multiply", "multiply_long_add": "multiply", "call": "jump"}
"""The class whose cycles another one has where it has none of its own."""


def cycles_of(instruction: Instruction, before: Instruction | None, costs: CortexMCosts) -> int:
    """Cycles of an instruction that is executed, a conditional branch as not taken."""
    own = int(getattr(costs, instruction.kind)) or int(getattr(costs, _LIKE.get(instruction.kind, instruction.kind)))
    cycles = own + costs.transfer_word * instruction.words
    if instruction.loads_pc:
        return cycles + costs.refill
    follows = before is not None and before.written >= 0 and before.written not in instruction.used
    return cycles - costs.pipelined if follows and instruction.kind in ("load", "store_register") else cycles


def occupied(instruction: Instruction, costs: CortexMCosts) -> int:
    """Cycles that an instruction keeps a core that issues pairs from the next one."""
    if instruction.kind in ("load", "store", "store_register") or instruction.kind.startswith("multiply"):
        return costs.jump if instruction.loads_pc else 1
    own = int(getattr(costs, instruction.kind)) or costs.jump
    return max(own - 1, 0) + costs.transfer_word * instruction.words if instruction.words else own


class SystemControl(Device):
    """The registers of the System Control Space start-up code and drivers need; a `Device` without time.

    Offsets from 0xE000E000: 0x100 and 0x180 enable and disable interrupts 0 to 31, 0xD08 is VTOR. Interrupt 0 is the
    only one that comes, at priority 0, which BASEPRI never masks.
    """

    name = "system control space"
    enabled = vectors = 0

    def reset(self) -> None:
        self.enabled = self.vectors = 0

    def read(self, offset: int, now: int) -> int:
        if offset in (0x100, 0x180):
            return self.enabled
        if offset == 0xD08:
            return self.vectors
        raise self._unknown(offset)

    def write(self, offset: int, value: int, now: int) -> None:
        if offset == 0x100:
            self.enabled |= value
        elif offset == 0x180:
            self.enabled &= ~value
        elif offset == 0xD08:
            self.vectors = value & ~0x7F
        else:
            raise self._unknown(offset)

    def _unknown(self, offset: int) -> SimulationError:
        hint = "look at the driver: of the system's registers only ISER, ICER and VTOR are simulated"
        return SimulationError(f"there is no register at offset {offset:#x}", where=self.name, hint=hint)


class ArmCore(EmulatedCore):
    """Thumb-2 of the M profile."""

    def __init__(self, setup: CoreSetup) -> None:
        unicorn: Any = importlib.import_module("unicorn")
        self._reg: Any = importlib.import_module("unicorn.arm_const")
        if setup.extension:
            what = f"a core of {setup.isa} takes no instructions of its own"
            hint = "leave Core.extension out: only RISC-V cores have them here"
            raise SimulationError(what, where=setup.extension, hint=hint)
        self._costs: CortexMCosts = setup.costs
        self._bus = setup.bus
        self._system = SystemControl()
        self._exception: int | None = None
        self._code = code_ranges(setup.elf)
        self.registers = (_SYSTEM_CONTROL, self._system)
        self.emulator: Any = unicorn.Uc(unicorn.UC_ARCH_ARM, unicorn.UC_MODE_THUMB | unicorn.UC_MODE_MCLASS)
        model = _MODELS.get(setup.isa, setup.isa.upper().replace("-", "_"))
        self.emulator.ctl_set_cpu_model(getattr(self._reg, f"UC_CPU_ARM_{model}"))
        self.emulator.hook_add(unicorn.UC_HOOK_INTR, self._trapped)

    def start(self, entry: int) -> None:
        """See `Core.start`. The IT blocks are looked for here, where the firmware is in memory."""
        self.predicated = dict(found for stretch in self._code for found in self._in_it_blocks(*stretch))
        self._write("PC", entry | 1)

    def pc(self) -> int:
        return self._read("PC") & ~1

    def resume_at(self) -> int:
        """See `Core.resume_at`: bit 0 says Thumb."""
        return self.pc() | 1

    def pause(self) -> Pause | None:
        exception, self._exception = self._exception, None
        if exception == _EXCEPTION_RETURN:
            at = self.pc()
            self._leave_interrupt()
            return Pause(at, False, self._costs.interrupt_return)
        pc = self.pc()
        if exception is not None:
            return Pause(pc, False, fault=f"exception {_EXCEPTIONS.get(exception, str(exception))}")
        for waiting in (_WFI, _WFI_WIDE):
            before = pc - len(waiting)
            if self._bus.view(before, len(waiting)).tobytes() == waiting:
                return Pause(before, True)
        return None

    def line_enabled(self) -> bool:
        return bool(self._system.enabled & 1)

    def enter_interrupt(self) -> int | None:
        """See `Core.enter_interrupt` (ARMv7-M Architecture Reference Manual, "Exception entry behavior")."""
        if self._read("PRIMASK") or self._read("FAULTMASK") or self._read("IPSR"):
            return None
        if self._read("CONTROL") & 3:
            what = "an interrupt came while the core used the process stack or was unprivileged, which is not simulated"
            hint = "stay on the main stack in privileged mode, as the start-up code does"
            raise SimulationError(what, where="core", hint=hint)
        stack, status = self._read("SP"), self._read("XPSR")
        frame = (stack - 32) & ~7
        status = status | _REALIGNED if stack & 4 else status & ~_REALIGNED
        saved = [self._read(name) for name in ("R0", "R1", "R2", "R3", "R12", "LR")]
        words = [*saved, self.pc(), status]
        self._bus.view(frame, 32)[:] = memoryview(b"".join(word.to_bytes(4, "little") for word in words))
        self._write("SP", frame)
        self._write("LR", _RETURN)
        self._write("XPSR", status & 0xF8000000 | 1 << 24 | _INTERRUPT)  # out of any IT block
        self._write("IPSR", _INTERRUPT)
        self._write("PC", read_number(self._bus, self._system.vectors + 4 * _INTERRUPT, 4) | 1)
        return self._costs.interrupt_entry

    def block_cost(self, address: int, size: int) -> BlockCost:
        """See `Core.block_cost`; neither IT blocks nor blocks see the load before them."""
        costs, position, instructions, cycles = self._costs, address, 0, 0
        before: Instruction | None = None
        clock = IssueClock() if costs.pairs else None
        system, taken_extra = False, 0
        while position < address + size:
            instruction = self._decoded(position)
            taken_extra = 0
            if position in self.predicated:
                cycles += costs.skipped
                before = None
            else:
                instructions += 1
                if clock is None:
                    cycles += cycles_of(instruction, before, costs)
                else:
                    code = bytes(self._bus.view(position, instruction.size))
                    clock.issue(instruction, code, occupied(instruction, costs))
                before = instruction
                if instruction.kind == "branch_not_taken":
                    taken_extra = costs.branch_taken - costs.branch_not_taken
            system = system or instruction.kind in ("system", "barrier")
            position += instruction.size
            if instruction.ends:
                break
        return BlockCost(position, instructions, cycles + (clock.cycle + 1 if clock else 0), taken_extra, system)

    def _in_it_blocks(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        """The instructions in IT blocks of a stretch of code (no data in it): each one's address, and the cycles it
        takes more when it is executed than when it is skipped."""
        position, left = start, 0
        while position < start + size:
            instruction = self._decoded(position)
            if left:
                yield position, cycles_of(instruction, None, self._costs) - self._costs.skipped
                left -= 1
            else:
                left = instruction.predicates
            position += instruction.size

    def _decoded(self, address: int) -> Instruction:
        half = read_number(self._bus, address, 2)
        return decode(half, read_number(self._bus, address + 2, 2) if is_wide(half) else 0)

    def _leave_interrupt(self) -> None:
        """Undo what `enter_interrupt` did (ibid., "Exception return behavior")."""
        frame = self._read("SP")
        words = [read_number(self._bus, frame + 4 * index, 4) for index in range(8)]
        for name, word in zip(("R0", "R1", "R2", "R3", "R12", "LR"), words, strict=False):
            self._write(name, word)
        status = words[7]
        self._write("IPSR", 0)
        self._write("XPSR", status & ~_REALIGNED & ~0x1FF)
        self._write("SP", frame + 32 + (4 if status & _REALIGNED else 0))
        self._write("PC", words[6] | 1)

    def _trapped(self, emulator: Any, number: int, data: object) -> None:
        self._exception = number
        emulator.emu_stop()

    def _read(self, name: str) -> int:
        return int(self.emulator.reg_read(getattr(self._reg, f"UC_ARM_REG_{name}")))

    def _write(self, name: str, value: int) -> None:
        self.emulator.reg_write(getattr(self._reg, f"UC_ARM_REG_{name}"), value)


ARM = Architecture(
    "EM_ARM", CortexMCosts, ArmCore, product=lambda c: c.multiply, word=lambda c: min(c.store, c.transfer_word)
)
"""Arm's M profile with Thumb-2."""
