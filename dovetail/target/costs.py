"""Cycles of instructions on published cores, for `Core.costs`: what each core's RTL takes with memories of one cycle.

Each set says where it comes from and how far from its source whole networks are (tests/test_rtl_cores.py prints that).
Of Arm's cores there are only the tables of their manuals; nothing says how far networks are from those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from dovetail.documented import document
from dovetail.records import Record

CV32E40P: Mapping[str, int] = dict(
    jump_use=1,
    jump_own=1,
    misaligned_target=1,
    divide_least=3,
    csr=1,
    interrupt_entry=2,
    wake=4,
)
"""CV32E40P by OpenHW Group, from its RTL (pythondata-cpu-cv32e40p 1.0.1.post1909). Cycles of digits, autoencoder,
DS-CNN and ResNet8 are equal."""

IBEX: Mapping[str, int] = dict(
    load=2,
    store=2,
    multiply=3,
    multiply_high=4,
    divide=37,
    divide_zero=2,
    branch_taken=3,
    jump=2,
    load_use=0,
    system=1,
    misaligned_target=1,
)
"""Ibex by lowRISC in its configuration "small", from its RTL (pythondata-cpu-ibex 0.0.post2937). Cycles of digits
and the autoencoder are equal."""

PICORV32: Mapping[str, int] = dict(
    alu=3,
    load=5,
    store=5,
    multiply=6,
    multiply_high=6,
    divide=40,
    branch_not_taken=3,
    branch_taken=5,
    jump=3,
    jump_register=6,
    load_use=0,
    system=4,
    misaligned=1,
)
"""PicoRV32 with compressed instructions, barrel shifter, a multiplier of one step and a divider, from its RTL
(pythondata-cpu-picorv32 1.0.post218). At most 0.06 % below on digits and autoencoder."""

VEXRISCV: Mapping[str, int] = dict(
    load_use=2,
    multiply_use=2,
    shift_use=1,
    own_use=1,
    own_behind=2,
    multiply_high=1,
    divide=34,
    jump=2,
    jump_register=3,
    system=3,
)
"""VexRiscv as LiteX's "full" and "full+cfu", from its RTL (pythondata-cpu-vexriscv 1.0.1.post407), with the caches of
the target `vexriscv_cfu`. AD, DS-CNN and ResNet8 are within 1 % of the RTL, with a function unit and without."""

CORTEX_M0PLUS: Mapping[str, int] = dict(
    store_register=2,
    store=2,
    pipelined=0,
    branch_taken=2,
    jump=2,
    call=3,
    system=3,
    interrupt_entry=15,
)
"""Arm's Cortex-M0+ with the multiplier of one cycle: Technical Reference Manual (ARM DDI 0484), table "Cortex-M0+
instruction summary", interrupt latency from "Exceptions"."""

CORTEX_M23: Mapping[str, int] = {**CORTEX_M0PLUS, "divide": 17}
"""Arm's Cortex-M23 with the multiplier of one cycle and the faster divider, which takes 17 (Technical Reference Manual,
ARM DDI 0550); the rest as the Cortex-M0+, whose pipeline of two stages it has."""

CORTEX_M3: Mapping[str, int] = dict(multiply_add=2, multiply_long=5, multiply_long_add=7)
"""Arm's Cortex-M3: Technical Reference Manual (ARM DDI 0337), table "Cortex-M3 instruction set summary"; long products
end early on small operands, of their 3 to 5 and 4 to 7 cycles this takes the most. All else is as in the Cortex-M4."""

CORTEX_M7: Mapping[str, int] = dict(pairs=1, branch_taken=2, jump=2, divide=8)
"""Arm's Cortex-M7, which issues up to two instructions at once, its branches predicted and its caches always hit: see
`sim/dual_issue.py`, also for how far from silicon it is (6 to 9 % above)."""


@cache
def _measured() -> Mapping[str, Mapping[str, float]]:
    found: Mapping[str, Mapping[str, float]] = json.loads(
        Path(__file__).with_name("kernel_cycles.json").read_text("utf-8")
    )
    return found


def kernel_cycles(core: str) -> Mapping[str, float]:
    """Cycles of each part of the loops of Dovetail's kernels on a core, for `Core.kernels`.

    They are what the simulator `iss` shows (`scripts/kernel_cycles.py` measures them); docs/benchmarks.md says how far
    layers are from them.

    Args:
        core: "rv32imc", "rv64gc", "cortex-m0plus", "cortex-m3", "cortex-m4"; "cortex-m4+dsp", "cortex-m7+dsp",
            "rv32imc+dot4", "xpulp" and "cortex-m0plus+halves" with what the bundled targets have besides. Another
            instruction set has those of the nearest.
    """
    known = _measured()
    near = {"cortex-m23": "cortex-m0plus"}.get(core, "cortex-m4" if core.startswith("cortex") else "rv32imc")
    return known[core if core in known else "rv64gc" if core.startswith("rv64") else near]


class StatementCycles(Record):
    """Core cycles of a program's statements beside its kernels, for `Core.statements`.

    The defaults are what the simulator `iss` shows of the bundled drivers on RV32IMC; other instruction sets take them
    too. What starting an engine takes is `Engine.launching`.
    """

    begin: int = 26
    """Cycles before the first statement of a network."""
    end: int = 20
    """Cycles after the last wait of a network."""
    copy: int = 29
    """Cycles to start a transfer of the DMA."""
    wait_launch: int = 19
    """Cycles of a wait for a launch that has ended already."""
    wait_copy: int = 40
    """Cycles of a wait for a copy that has ended already."""
    wake: int = 26
    """Cycles from an event until the waiting core goes on."""
    room: int = 8
    """Cycles from the end of a launch until a driver that waited for a place in the engine goes on."""
    worker: int = 100
    """Cycles to start another core, to wake it, and to wait for it."""

    @property
    def around(self) -> int:
        """Cycles at both ends of a network."""
        return self.begin + self.end


IN_LIST = StatementCycles(0, 0, 0, 0, 0, 0, 0, 0)
"""Statements that an engine issues itself, from a list."""

document(__name__)
