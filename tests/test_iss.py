"""The instruction-set simulator: counts, time, interrupts, faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.errors import SimulationError
from dovetail.sim.riscv_costs import decode
from dovetail.sim.worker import IssSession, simulate
from firmware import DMA, TIMER, build, chip, counted_by_instruction

WORK = """
static uint32_t table[256];
static uint32_t mix(uint32_t x) { x ^= x >> 7; x *= 2654435761u; return x / 3u + x % 7u; }
int main(void)
{
    uint32_t sum = 1;
    for (uint32_t round = 0; round < 40u; round++) {
        for (uint32_t i = 0; i < 256u; i++) {
            if ((sum & 1u) != 0u) { table[i] = mix(sum + i); } else { table[255u - i] ^= sum; }
            sum += table[i] + (uint32_t)(((uint64_t)sum * table[i]) >> 33);
        }
    }
    exit_with(sum);
    return 0;
}
"""


def test_instruction_count_equals_a_hook_on_every_instruction(tmp_path: Path) -> None:
    elf = build(tmp_path, WORK)
    result = simulate(chip(elf), [], {})
    count, code = counted_by_instruction(elf)
    # The simulator stops where the block of the exit ends: at most the way back from main() to the halt loop.
    assert result.executed_instructions is not None
    assert 0 <= count - result.executed_instructions <= 3
    assert count > 100_000
    assert result.exit_code == code


@pytest.mark.parametrize("isa", ["rv32imc", "rv64gc", "cortex-m0plus"])
def test_count_is_exact_when_the_exit_ends_the_block(isa: str, tmp_path: Path) -> None:
    source = WORK.replace("exit_with(sum);\n    return 0;", "exit_with(sum);\n    dovetail_halt(); return 0;")
    elf = build(tmp_path, "void dovetail_halt(void);\n" + source, isa=isa)
    result = simulate(chip(elf, isa=isa), [], {})
    assert (result.executed_instructions, result.exit_code) == counted_by_instruction(elf, isa)


def test_inferences_are_alike_and_layers_adjoin(tmp_path: Path) -> None:
    elf = build(
        tmp_path,
        """
    uint8_t out[64]; static uint8_t near_[64] __attribute__((section(".l1")));
    int main(void) {
        for (;;) {
            READY(); DOVETAIL_MARK(4);
            dma_wait(dma_copy_1d(near_, (const void *)main, 64u));
            DOVETAIL_MARK(5);
            for (uint32_t i = 0; i < 64u; i++) { out[i] = (uint8_t)(near_[i] * 3u / (i + 1u)); }
            DOVETAIL_MARK_END(); DONE();
        }
    }""",
    )
    run = simulate(chip(elf, DMA), [{}] * 3, {"out": 64})
    first, last = run.inferences[0], run.inferences[2]
    assert [marker.layer for marker in first.markers] == [4, 5]
    assert first.markers[0].end_cycle == first.markers[1].start_cycle
    assert first == last
    assert first.total_cycles == (first.core_cycles or 0) + (first.idle_cycles or 0)
    assert [a.moved for a in first.activities["dma"]] == [64]


ASSEMBLER = """
    .globl main
main:
    li   s0, 0x1a000000
    lw   s1, 12(s0)
    nop
    j    1f
1:
{body}
    j    2f
2:  lw   s2, 12(s0)
    j    3f
3:  sub  a0, s2, s1
    sw   a0, 4(s0)
    li   t0, 3
    sw   t0, 0(s0)
    ret
"""

# The cycle counter is read with its whole block counted, so what lies between the two reads is the body, its jump
# (2), and the second block: one load (1) and one jump (2).
AROUND = 2 + 1 + 2


@pytest.mark.parametrize(
    ("body", "cycles"),
    [
        ("nop\n nop\n nop", 3),
        ("li a1, 10\n 4: addi a1, a1, -1\n bnez a1, 4b", 1 + 10 * 1 + 9 * 3 + 1),
        ("mul a1, a2, a3\n mulhu a1, a2, a3\n divu a1, a2, a3\n rem a1, a2, a3", 1 + 5 + 35 + 35),
        ("lw a1, 0(sp)\n nop\n add a1, a1, a1", 3),
        ("lw a1, 0(sp)\n add a1, a1, a1", 3),
        ("lw a1, 0(sp)\n add a2, a2, a2", 2),
        ("lw s0, 0(sp)\n sw s0, -4(sp)\n li s0, 0x1a000000", 1 + 2 + 1),
        ("csrr a1, mie\n csrr a1, mie", 8),
        ("beqz sp, 4f\n 4: bnez sp, 5f\n nop\n 5:", 1 + 3),
        ("jal t1, 4f\n nop\n 4: nop", 2 + 1),
    ],
)
def test_cycles_follow_the_table(tmp_path: Path, body: str, cycles: int) -> None:
    if "(sp)" in body:
        body, cycles = f"addi sp, sp, -16\n {body}\n addi sp, sp, 16", cycles + 2
    elf = build(tmp_path, ASSEMBLER.format(body=body), assembler=True)
    assert simulate(chip(elf), [], {}).exit_code == cycles + AROUND


HANDLER = """
static volatile uint32_t rings, seen_cause, calls;
__attribute__((interrupt("machine"), aligned(4))) static void handler(void)
{
    uint32_t cause;
    __asm__ volatile("csrr %0, mcause" : "=r"(cause));
    seen_cause = cause;
    rings = dovetail_mmio_read(0x1A200000u);
    calls++;
    if (calls < 3u) { dovetail_mmio_write(0x1A200000u, 300u); }
}
static void enable(void)
{
    __asm__ volatile("csrw mtvec, %0" ::"r"(handler));
    __asm__ volatile("csrsi mstatus, 8" ::: "memory");
}
"""


def test_interrupts_reach_the_handler_and_return(tmp_path: Path) -> None:
    elf = build(
        tmp_path,
        HANDLER
        + """
    int main(void) {
        enable();
        dovetail_mmio_write(0x1A200000u, 300u);
        uint32_t turns = 0;
        while (calls < 3u) { turns++; }
        exit_with(seen_cause == 0x8000000Bu && rings == 3u && turns > 100u ? 1u : 2u);
        for (;;) { }
    }""",
    )
    assert simulate(chip(elf, TIMER), [], {}, instruction_limit=100_000).exit_code == 1


def test_an_interrupt_waits_until_it_is_enabled(tmp_path: Path) -> None:
    elf = build(
        tmp_path,
        HANDLER
        + """
    int main(void) {
        dovetail_mmio_write(0x1A200000u, 10u);
        for (volatile uint32_t i = 0; i < 50u; i++) { }
        const uint32_t before = calls;
        enable();
        const uint32_t after = calls;
        exit_with(before * 10u + after);
        for (;;) { }
    }""",
    )
    assert simulate(chip(elf, TIMER), [], {}, instruction_limit=100_000).exit_code == 1


def test_an_interrupt_that_comes_during_a_register_access_is_not_lost(tmp_path: Path) -> None:
    elf = build(
        tmp_path,
        HANDLER
        + """
    int main(void) {
        enable();
        dovetail_mmio_write(0x1A200000u, 5u);
        __asm__ volatile("j 1f\\n 1: .rept 10\\n nop\\n .endr");
        (void)dovetail_mmio_read(0x1A100038u); /* the same block: the timer rings while it runs */
        for (uint32_t turns = 0; turns < 20u && calls == 0u; turns++) { __asm__ volatile(""); }
        exit_with(calls);
        for (;;) { }
    }""",
    )
    assert simulate(chip(elf, TIMER, DMA), [], {}, instruction_limit=100_000).exit_code == 1


def test_what_follows_wfi_in_a_straight_line_is_counted_once(tmp_path: Path) -> None:
    counts = []
    for sleep in ("wfi", "nop; .option push; .option norvc; nop; .option pop"):
        elf = build(
            tmp_path,
            f"""
        .globl main
        main: li s0, 0x1a200000
        li s1, 100
        sw s1, 0(s0)
        {sleep}
        .rept 30
        nop
        .endr
        li s0, 0x1a000000
        li s1, 3
        sw s1, 0(s0)
        ret""",
            assembler=True,
        )
        counts.append(simulate(chip(elf, TIMER), [], {}, instruction_limit=100_000).executed_instructions)
    assert counts[1] == (counts[0] or 0) + 1  # two instructions in the place of wfi


def test_a_session_keeps_the_firmware_running(tmp_path: Path) -> None:
    elf = build(
        tmp_path,
        """
    uint8_t in[4]; uint8_t out[8]; static uint32_t runs;
    int main(void) {
        for (;;) {
            READY();
            runs++;
            for (uint32_t i = 0; i < 4u; i++) { out[i] = (uint8_t)(in[i] + 1u); out[i + 4u] = (uint8_t)runs; }
            DONE();
        }
    }""",
    )
    with IssSession(chip(elf)) as session:
        first = session.run([{"in": bytes([1, 2, 3, 4])}, {"in": b"\0\0\0\xff"}], {"out": 8})
        assert first.inferences[0].outputs["out"] == bytes([2, 3, 4, 5, 1, 1, 1, 1])
        assert first.inferences[1].outputs["out"] == bytes([1, 1, 1, 0, 2, 2, 2, 2])
        second = session.run([{"in": bytes(4)}], {"out": 8})
        assert second.inferences[0].outputs["out"] == bytes([1, 1, 1, 1, 3, 3, 3, 3])
        assert second.inferences[0].instructions == first.inferences[1].instructions
        assert second.inferences[0].total_cycles == first.inferences[1].total_cycles
        for inputs, words in (({"inn": b""}, "no symbol 'inn'"), ({"in": bytes(5)}, "5 bytes")):
            with pytest.raises(SimulationError, match=words):
                session.run([inputs], {})


@pytest.mark.parametrize(
    ("word", "kind", "wide"),
    [
        (0x2505, "alu", True),  # c.addiw a0, 1
        (0x2505, "jump", False),  # c.jal
        (0x02B5053B, "multiply", True),  # mulw a0, a0, a1
        (0x02B5453B, "divide", True),  # divw a0, a0, a1
        (0x00B5053B, "alu", True),  # addw a0, a0, a1
        (0x0015051B, "alu", True),  # addiw a0, a0, 1
        (0x00053503, "load", True),  # ld a0, 0(a0)
        (0x6108, "load", True),  # c.ld a0, 0(a0)
        (0xE108, "store", True),  # c.sd a0, 0(a0)
    ],
)
def test_instructions_of_64_bit_cores_are_of_their_class(word: int, kind: str, wide: bool) -> None:
    """Encodings as riscv64-unknown-elf-as gives them."""
    assert decode(word, wide).kind == kind
