"""Cortex-M in the instruction-set simulator: instruction counts with IT blocks, cycles, interrupts in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.codegen.build.elf import code_ranges, load_image
from dovetail.sim.arm import decode, is_wide
from dovetail.sim.protocol import SimulationSetup
from dovetail.sim.worker import simulate
from dovetail.targets import load_target
from firmware import TIMER, build, chip, counted_by_instruction
from test_iss import WORK

PREDICATED = """
    .syntax unified
    .thumb
    .globl main
    .type main, %function
main:
    push    {{r4, r5, r6, lr}}
    movs    r0, #0
    ldr     r1, =12345
    movw    r2, #{turns}
    movs    r6, #0
    b       1f
    .balign 4096
    .skip   4096 - {before}
1:  movw    r3, #1103
    mul     r1, r1, r3
    adds    r1, r1, #77
    lsrs    r4, r1, #9
    and     r4, r4, #7
    cmp     r4, #3
    itete   lt
    addlt   r0, r0, r4
    subge   r0, r0, #1
    eorlt   r0, r0, r1
    addge.w r0, r0, r1, ror #3
    cmp     r4, #5
    it      eq
    addeq   r6, r6, #1
    lsls    r5, r1, #3
    itt     cs
    addscs  r0, r0, #5
    adcscs  r0, r0, r6
    tst     r4, #1
    it      ne
    blne    2f
    subs    r2, r2, #1
    bne     1b
    eor     r0, r0, r6
    bl      3f
    pop     {{r4, r5, r6, pc}}
    .ltorg
    .balign 4
2:  adds    r0, r0, #9
    bx      lr
3:  ldr     r1, =0x1A000004
    str     r0, [r1]
    movs    r0, #3
    ldr     r1, =0x1A000000
    str     r0, [r1]
    b       dovetail_halt
    .ltorg
"""


def test_count_equals_a_hook_on_every_instruction(tmp_path: Path) -> None:
    source = WORK.replace("exit_with(sum);\n    return 0;", "exit_with(sum);\n    dovetail_halt(); return 0;")
    elf = build(tmp_path, "void dovetail_halt(void);\n" + source, isa="cortex-m4")
    result = simulate(chip(elf, isa="cortex-m4"), [], {})
    assert (result.executed_instructions, result.exit_code) == counted_by_instruction(elf, "cortex-m4")
    assert (result.executed_instructions or 0) > 100_000


@pytest.mark.parametrize("before", [0, 20, 22, 28, 34, 60])
def test_skipped_instructions_are_not_counted(tmp_path: Path, before: int) -> None:
    """The code is shifted past a page's end, where the emulator's blocks end too, in the middle of IT blocks."""
    elf = build(tmp_path, PREDICATED.format(before=before, turns=500), assembler=True, isa="cortex-m4")
    count, code = counted_by_instruction(elf, "cortex-m4")
    result = simulate(chip(elf, isa="cortex-m4"), [], {})
    assert (result.executed_instructions, result.exit_code) == (count, code)


START_TIMER = """
    ldr     r3, =0x1A200000
    movs    r4, #50
    str     r4, [r3]
    cpsie   i
"""

TICK = """
    .globl dovetail_interrupt
    .type dovetail_interrupt, %function
dovetail_interrupt:
    ldr     r0, =0x1A200000
    ldr     r1, [r0]
    movs    r1, #{period}
    str     r1, [r0]
    mov     r2, #-1
    mov     r3, r2
    mov     r12, r3
    adds    r2, r2, #2
    bx      lr
    .ltorg
"""


@pytest.mark.parametrize(
    ("isa", "before", "period"),
    [
        ("cortex-m4", 0, 200),
        ("cortex-m4", 22, 41),
        ("cortex-m7", 28, 97),
        ("cortex-m33", 28, 41),
    ],
)
def test_interrupts_change_nothing_the_firmware_sees(tmp_path: Path, isa: str, before: int, period: int) -> None:
    """Flags, IT state and registers survive handlers that come at any block, also one that begins within IT."""
    source = PREDICATED.format(before=before, turns=500)
    expected = simulate(chip(build(tmp_path, source, assembler=True, isa=isa), isa=isa), [], {})
    begin = "    movs    r6, #0\n"
    elf = build(
        tmp_path, source.replace(begin, begin + START_TIMER) + TICK.format(period=period), assembler=True, isa=isa
    )
    result = simulate(chip(elf, TIMER, isa=isa), [], {}, instruction_limit=1_000_000)
    assert result.exit_code == expected.exit_code
    assert (result.executed_instructions or 0) > (expected.executed_instructions or 0) + 9 * 20


ASSEMBLER = """
    .syntax unified
    .thumb
    .globl main
    .type main, %function
main:
    push    {{r4, r5, r6, lr}}
    mov     r6, #0x1a000000
    movs    r1, #1
    ldr     r4, [r6, #12]
    nop
    b       1f
1:
    {body}
    b       2f
2:  ldr     r5, [r6, #12]
    b       3f
3:  subs    r0, r5, r4
    str     r0, [r6, #4]
    movs    r0, #3
    str     r0, [r6]
    b       .
"""

# As in test_iss: the body, its jump (3), and the second block: one load (2) and one jump (3).
AROUND = 3 + 2 + 3


@pytest.mark.parametrize(
    ("body", "cycles"),
    [
        ("nop\n nop\n nop.w", 3),
        ("movs r1, #10\n 4: subs r1, #1\n bne 4b", 1 + 10 * 1 + 9 * 3 + 1),
        ("mov r1, #10\n 4: subs r1, #1\n bne.w 4b", 1 + 10 * 1 + 9 * 3 + 1),
        ("mul r1, r2, r3\n mla r1, r2, r3, r1\n smlad r1, r2, r3, r1\n smull r1, r2, r3, r3\n sxtb16 r1, r2", 5),
        ("udiv r1, r2, r6\n sdiv r1, r2, r6", 24),
        ("ldr r1, [sp]\n ldr r2, [sp, #4]\n ldrb.w r3, [sp, #8]", 2 + 1 + 1),
        ("ldr r1, [sp]\n nop\n ldrsh r2, [sp, r0]", 2 + 1 + 2),
        ("mov r1, sp\n ldr r2, =main\n ldr r2, [r2]\n b 4f\n .ltorg\n 4: nop", 1 + 2 + 2 + 3 + 1),
        ("str r0, [sp]\n strb.w r0, [sp, #1]\n strh r0, [sp, r0]", 1 + 1 + 2),
        ("ldr r1, [sp]\n str r1, [sp]\n ldr r1, [sp]\n str.w r1, [sp, r0]", 2 + 1 + 2 + 1),
        ("push {r0-r3}\n ldm sp, {r0, r1}\n ldrd r2, r3, [sp]\n strd r2, r3, [sp]\n pop {r0-r3}", 5 + 3 + 3 + 3 + 5),
        ("push {r0, lr}\n bl 5f\n pop {r0, lr}\n b 6f\n 5: bx lr\n 6: nop", 3 + 3 + 3 + 3 + 3 + 1),
        ("bl 5f\n b 6f\n 5: push {lr}\n pop {pc}\n 6: nop", 3 + 3 + 2 + 4 + 1),
        ("cbz r6, 4f\n 4: cbnz r6, 5f\n nop\n 5: cmp r6, #0", 1 + 3 + 1),
        ("tbb [pc, r0]\n 4: .byte (5f-4b)/2, 0\n 5: nop", 4 + 1),
        ("mrs r1, primask\n cpsid i\n b 4f\n 4: dmb", 2 + 2 + 3 + 3),
        ("cmp r6, #0\n ite eq\n addeq r1, #1\n addne r1, #1", 4),
        ("cmp r6, #0\n itt ne\n udivne r1, r1, r6\n bne 4f\n nop\n 4: nop", 2 + 12 + 3 + 1),
        ("cmp r6, #0\n itt eq\n udiveq r1, r1, r6\n beq 4f\n nop\n 4: nop", 2 + 1 + 1 + 1 + 1),
    ],
)
def test_cycles_follow_the_table(tmp_path: Path, body: str, cycles: int) -> None:
    body, cycles = f"movs r0, #0\n sub sp, #16\n {body}\n add sp, #16", cycles + 3
    elf = build(tmp_path, ASSEMBLER.format(body=body), assembler=True, isa="cortex-m4")
    assert simulate(chip(elf, isa="cortex-m4"), [], {}).exit_code == cycles + AROUND


SMALL = """
    .syntax unified
    .thumb
    .globl main
    .type main, %function
main:
    push    {{r4, r5, r6, lr}}
    ldr     r6, =0x1a000000
    movs    r0, #0
    movs    r2, #3
    b       0f
    .ltorg
    .balign 4
0:  ldr     r4, [r6, #12]
    b       1f
1:  {body}
    b       2f
2:  ldr     r5, [r6, #12]
    b       3f
3:  subs    r0, r5, r4
    str     r0, [r6, #4]
    movs    r0, #3
    str     r0, [r6]
    b       .
"""


@pytest.mark.parametrize(
    ("isa", "body", "cycles"),
    [
        ("cortex-m0plus", "nop\n muls r2, r2", 2),
        ("cortex-m0plus", "movs r1, #10\n 4: subs r1, #1\n bne 4b", 1 + 10 * 1 + 9 * 2 + 1),
        ("cortex-m0plus", "mov r3, sp\n ldr r1, [r3]\n ldrb r2, [r3, #1]\n str r1, [r3]", 1 + 2 + 2 + 2),
        ("cortex-m0plus", "push {r0-r3}\n pop {r0-r3}", 5 + 5),
        ("cortex-m0plus", "bl 5f\n b 6f\n 5: push {lr}\n pop {pc}\n 6: nop", 3 + 2 + 2 + 4 + 1),
        ("cortex-m0plus", "mrs r1, primask\n dmb", 3 + 3),
        ("cortex-m23", "movs r1, #9\n udiv r1, r2\n sdiv r1, r1, r2", 1 + 17 + 17),
        ("cortex-m23", "cbz r0, 4f\n nop\n 4: nop", 2 + 1),
        ("cortex-m3", "mul r1, r2, r3\n mla r1, r2, r3, r1\n mls r1, r2, r3, r1", 1 + 2 + 2),
        ("cortex-m3", "smull r1, r2, r3, r3\n umull r1, r2, r3, r3\n smlal r1, r2, r3, r3", 5 + 5 + 7),
        ("cortex-m3", "bl 5f\n b 6f\n 5: bx lr\n 6: nop", 3 + 3 + 3 + 1),
    ],
)
def test_cycles_follow_the_manuals_of_other_cores(tmp_path: Path, isa: str, body: str, cycles: int) -> None:
    """Those of the target with that core; behind the body a jump, a load and a jump."""
    core = load_target(isa.replace("-", "_")).core
    jump = 3 if isa == "cortex-m3" else 2
    elf = build(tmp_path, SMALL.format(body=body), assembler=True, isa=isa)
    setup = SimulationSetup(elf, chip(elf).memories, (), isa, core.costs)
    assert simulate(setup, [], {}).exit_code == cycles + jump + 2 + jump


@pytest.mark.parametrize("isa", ["cortex-m0plus", "cortex-m23"])
def test_firmware_keeps_to_the_smaller_instruction_sets(tmp_path: Path, isa: str) -> None:
    """The Cortex-M23 is emulated by a core that knows more: compiler, its library and start-up code are looked at.

    Wide instructions of Armv6-M are calls, accesses of special registers and barriers; Armv8-M Baseline has constants
    of 16 bits, divisions and jumps too (Armv8-M Architecture Reference Manual, "Baseline").
    """
    source = "volatile int64_t a; volatile int32_t b; int main(void) { a = a / b * a + b / (b + 1) + b % 7; return 0; }"
    elf = build(tmp_path, source, isa=isa)
    content, kinds = {}, set()
    for start, data in load_image(elf, "EM_ARM")[1]:
        content.update(
            {start + 2 * n: int.from_bytes(data[2 * n : 2 * n + 2], "little") for n in range(len(data) // 2)}
        )
    for start, size in code_ranges(elf):
        at = start
        while at < start + size:
            half, second = content[at], content.get(at + 2, 0)
            one = decode(half, second if is_wide(half) else 0)
            assert not one.predicates, "there is no IT"
            constant = half & 0xFB70 == 0xF240  # MOVW, MOVT
            kinds |= {"constant" if constant else one.kind} if is_wide(half) else set()
            at += one.size
    allowed = {"call", "system", "barrier"}
    assert kinds <= (allowed if isa == "cortex-m0plus" else allowed | {"constant", "divide", "jump"})
    assert "call" in kinds


def test_costs_may_be_overridden(tmp_path: Path) -> None:
    elf = build(tmp_path, ASSEMBLER.format(body="udiv r1, r2, r6"), assembler=True, isa="cortex-m4")
    setup = SimulationSetup(elf, chip(elf).memories, (), "cortex-m4", {"divide": 5, "jump": 4})
    assert simulate(setup, [], {}).exit_code == 5 + 4 + 2 + 4
