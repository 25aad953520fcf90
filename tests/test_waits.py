"""Memories whose reads wait: the simulator beside a model of its own, and what must hold of caches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dovetail.arrays import built, seeded_inputs
from dovetail.compile import compile_model
from dovetail.errors import TargetError
from dovetail.fields import changed, fields_of
from dovetail.options import Options
from dovetail.run import run_build
from dovetail.sim.device import MemoryRegion
from dovetail.sim.machine import Machine
from dovetail.sim.protocol import RunRequest
from dovetail.sim.worker import IssSession
from dovetail.target import Cache, Memory, Target
from dovetail.target.chip import BOTH, DATA, INSTRUCTIONS
from dovetail.target.registry import load_target
from firmware import MEMORIES, build, chip, require_chip
from test_iss import ASSEMBLER, WORK
from test_own_instructions import ADD, CORE_V, LOAD, LOOP
from test_small_flash import digits

Event = tuple[str, int, int]
"""A block that is begun, or a read of data: address and bytes."""
ART = (Cache(1024, holds=(INSTRUCTIONS,)), Cache(128, ways=2, holds=(DATA,)))
SLOW = {
    "one word": Memory("l2", 0x1C000000, 0x20000, waits=3),
    "a line": Memory("l2", 0x1C000000, 0x20000, waits=5, width=16),
    "two caches": Memory("l2", 0x1C000000, 0x20000, waits=5, width=8, caches=ART),
    "one cache": Memory("l2", 0x1C000000, 0x20000, waits=56, width=8, caches=(Cache(512, ways=2),)),
    "long lines": Memory("l2", 0x1C000000, 0x20000, waits=2, width=4, caches=(Cache(256, line=32, ways=4),)),
}


def ran(elf: Path, isa: str, memory: Memory | None, events: list[Event] | None = None) -> int:
    """Cycles of firmware from reset to exit; `events` takes what happens."""
    setup = replace(chip(elf, isa=isa), memories=(replace(MEMORIES[0], memory=memory), MEMORIES[1]))
    machine = Machine(setup)
    if events is not None:
        unicorn = pytest.importorskip("unicorn")
        emulator = machine._cpu.core.emulator
        emulator.hook_add(unicorn.UC_HOOK_BLOCK, lambda uc, at, size, _: events.append(("block", at, size)))
        emulator.hook_add(unicorn.UC_HOOK_MEM_READ, lambda uc, kind, at, size, *_: events.append(("read", at, size)))
    assert machine.run(RunRequest((), {})).exit_code is not None
    return machine.cycles


@dataclass
class Way:
    """A cache and the line at hand, as their description says."""

    memory: Memory
    kind: str
    held: dict[int, OrderedDict[int, None]]
    last: int = -1

    def cycles(self, address: int, size: int) -> int:
        """Cycles until the bytes are there."""
        line, wait = self.memory.line(self.kind)
        cache, total = self.memory.cache(self.kind), 0
        for number in range(address // line, (address + size - 1) // line + 1):
            if number == self.last:
                continue
            self.last = number
            if cache is not None:
                places = cache.size // line
                ways = cache.ways or places
                lines = self.held.setdefault(number % (places // ways), OrderedDict())
                if number in lines:
                    lines.move_to_end(number)
                    continue
                lines[number] = None
                if len(lines) > ways:
                    lines.popitem(last=False)
            total += wait
        return total


def modelled(events: list[Event], memory: Memory) -> int:
    """Cycles the core waits for a memory, without a line of the simulator's code."""
    one = len(memory.caches) == 1 and len(memory.caches[0].holds) == 2
    shared: dict[int, OrderedDict[int, None]] = {}
    ways = {kind: Way(memory, kind, shared if one else {}) for kind in BOTH}
    total = 0
    for kind, address, size in events:
        if memory.base <= address < memory.base + memory.size:
            total += ways[INSTRUCTIONS if kind == "block" else DATA].cycles(address - memory.base, size)
    return total


@pytest.fixture(scope="module", params=["rv32imc", "cortex-m4"])
def worked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, int, list[Event]]:
    """Firmware, its core, its cycles without waits, and what happens in it."""
    require_chip()
    source = "void dovetail_halt(void);\n" + WORK.replace("exit_with(sum);", "exit_with(sum); dovetail_halt();")
    elf = build(tmp_path_factory.mktemp("work"), source, isa=request.param)
    events: list[Event] = []
    return elf, request.param, ran(elf, request.param, None, events), events


@pytest.mark.parametrize("name", SLOW)
def test_the_core_waits_as_a_model_of_its_own_says(worked: tuple[Path, str, int, list[Event]], name: str) -> None:
    elf, isa, without, events = worked
    waits = ran(elf, isa, SLOW[name]) - without
    assert waits == modelled(events, SLOW[name]) > 0


@pytest.mark.parametrize(
    "fault",
    [
        lambda m: replace(m, waits=m.waits + 1),
        lambda m: replace(m, width=2 * m.width),
        lambda m: replace(m, caches=m.caches[:1]),
        lambda m: replace(m, caches=(m.caches[0], replace(m.caches[1], ways=1))),
        lambda m: replace(m, caches=(replace(m.caches[0], size=32), m.caches[1])),
    ],
    ids=["waits", "width", "no data cache", "ways", "size"],
)
def test_another_memory_is_told_apart(
    worked: tuple[Path, str, int, list[Event]], fault: Callable[[Memory], Memory]
) -> None:
    """What the model says of a memory that is a little different is not what the simulator charges."""
    elf, isa, without, events = worked
    assert ran(elf, isa, SLOW["two caches"]) - without != modelled(events, fault(SLOW["two caches"]))


def test_no_waits_cost_nothing_and_reading_ahead_helps(worked: tuple[Path, str, int, list[Event]]) -> None:
    elf, isa, without, _ = worked
    assert ran(elf, isa, replace(SLOW["one cache"], waits=0)) == without
    plain, ahead = (ran(elf, isa, replace(SLOW["a line"], prefetch=on)) for on in (False, True))
    assert without < ahead < plain


def test_a_cache_of_everything_costs_its_cold_misses_once(tmp_path: Path) -> None:
    require_chip()
    elf = build(tmp_path, WORK.replace("int main(void)\n{", "int main(void)\n{ for (;;) { READY();").replace(
        "exit_with(sum);\n    return 0;", "table[0] = sum; DONE(); }"))  # fmt: skip
    slow = Memory("l2", 0x1C000000, 0x20000, waits=9, width=16, caches=(Cache(0x20000),))
    totals = []
    for memory in (None, slow):
        setup = replace(chip(elf), memories=(MemoryRegion("l2", 0x1C000000, 0x20000, True, memory), MEMORIES[1]))
        with IssSession(setup) as session:
            totals.append([one.total_cycles or 0 for one in session.run([{}] * 3, {}).inferences])
    first, second, third = (slow - fast for fast, slow in zip(*totals, strict=True))
    assert first > 0 == first % 9 and second < first / 2  # the way back to READY is new
    assert third == 0


@pytest.mark.parametrize("caches", [(), (Cache(1024, holds=(DATA,)),), (Cache(8192, holds=(DATA,)),)])
@pytest.mark.parametrize("times", [1, 5])
def test_wait_cycles_are_those_of_the_simulator(tmp_path: Path, caches: tuple[Cache, ...], times: int) -> None:
    """Of reading 4 KiB in words, over and over."""
    require_chip()
    source = f"""
    static volatile uint32_t words[1024] __attribute__((section(".l1"), aligned(64)));
    int main(void) {{
        for (uint32_t t = 0; t < {times}u; t++) {{ for (uint32_t i = 0; i < 1024u; i++) {{ (void)words[i]; }} }}
        exit_with(0);
        return 0;
    }}"""
    elf = build(tmp_path, source)
    near = Memory("l1", 0x10000000, 0x10000, waits=6, width=8, caches=caches)
    setup = chip(elf)
    machines = [
        Machine(replace(setup, memories=(MEMORIES[0], replace(MEMORIES[1], memory=own)))) for own in (None, near)
    ]
    for machine in machines:
        machine.run(RunRequest((), {}))
    waited = machines[1].cycles - machines[0].cycles
    stack = 4 * near.line(DATA)[1]  # main's own lines of stack
    assert 0 <= waited - near.wait_cycles(4096, times) <= stack


def test_a_hardware_loop_waits_in_every_turn(tmp_path: Path) -> None:
    """Three instructions and a load of a new word a turn, from a memory that reads a word at a time."""
    require_chip()
    taken = {}
    for turns in (1, 8):
        source = LOOP.replace("TURNS", str(turns)).replace("BODY", LOAD + ADD + ADD)
        elf = build(tmp_path, source)
        for waits in (0, 7):
            memory = Memory("l2", 0x1C000000, 0x20000, waits=waits) if waits else None
            memories = (replace(MEMORIES[0], memory=memory), MEMORIES[1])
            machine = Machine(replace(chip(elf), extension=CORE_V, memories=memories))
            machine.run(RunRequest((), {}))
            taken[turns, waits] = machine.cycles
    assert taken[8, 7] - taken[8, 0] - (taken[1, 7] - taken[1, 0]) == 7 * 7 * (3 + 1)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"waits": -1}, "reads wait -1 cycles"),
        ({"width": 12}, "powers of two, not 12 bytes"),
        ({"caches": (Cache(100),)}, "whole numbers of lines for each way, not 100 bytes in any ways"),
        ({"caches": (Cache(64), Cache(64, holds=(DATA,)))}, "each once at most, not instructions, data, data"),
    ],
)
def test_a_memory_that_cannot_be_is_refused(wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        replace(SLOW["a line"], **wrong)  # type: ignore[arg-type]


def test_a_part_waits_for_its_flash_and_without_waits_is_its_core(tmp_path: Path) -> None:
    require_chip()
    model = digits(tmp_path)

    def cycles(target: Target) -> int:
        compiled = compile_model(model, target, Options())
        with built(compiled, target) as made:
            result = run_build(made, "iss", [seeded_inputs(made.manifest.inputs)])
        return result.simulation.inferences[0].total_cycles or 0

    part, core = load_target("stm32l4r5"), load_target("cortex_m4")
    assert {"flash.waits", "flash.instructions_cache.size", "flash.data_cache.ways"} <= set(fields_of(part))
    plain, alike = cycles(core), replace(part, core=core.core)
    assert cycles(changed(alike, {"flash.waits": 0})) == plain < cycles(part) < 2 * plain
    assert cycles(part) < cycles(alike), "loops stay in the instruction cache"
    large = changed(alike, {"flash.instructions_cache.size": 1 << 16, "flash.data_cache.size": 1 << 16})
    assert plain < cycles(large) < cycles(part)


def test_reading_ahead_hides_what_the_core_executes_meanwhile(tmp_path: Path) -> None:
    """Lines of four instructions of a cycle: each is waited for four cycles less."""
    require_chip()
    hidden = {}
    for lines in (100, 200):
        folder = tmp_path / str(lines)
        folder.mkdir()
        body = f".option norvc\n .balign 16\n .rept {4 * lines}\n addi a1, a1, 1\n .endr"
        elf = build(folder, ASSEMBLER.format(body=body), assembler=True)
        plain, ahead = (ran(elf, "rv32imc", replace(SLOW["a line"], waits=20, prefetch=on)) for on in (False, True))
        hidden[lines] = plain - ahead
    assert abs(hidden[200] - hidden[100] - 4 * 100) <= 8  # a jump or two in the lines around
