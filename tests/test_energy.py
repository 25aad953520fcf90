"""Energy: it adds up to its parts, and bytes are those that are read and written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.arrays import built, seeded_inputs
from dovetail.compile import compile_model
from dovetail.fields import changed
from dovetail.options import Options
from dovetail.report import Report, make_report, totals
from dovetail.run import run_build
from dovetail.sim.machine import Machine
from dovetail.sim.protocol import RunRequest
from dovetail.target import Memory
from dovetail.target.registry import load_target
from firmware import MEMORIES, build, chip, require_chip
from test_iss import WORK
from test_small_flash import digits

TAKES = {"core.pj_per_cycle": 20.0, "ne16.pj_per_mac": 0.5, "ne16.pj_per_cycle": 8.0, "L1.pj_per_byte": 1.0}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the report of the digits on `ne16` with settings."""
    require_chip()
    model, reports = digits(tmp_path_factory.mktemp("model")), dict[str, Report]()

    def report(**settings: float) -> Report:
        target = changed(load_target("ne16"), settings)
        if str(settings) not in reports:
            with built(compile_model(model, target, Options()), target) as made:
                reports[str(settings)] = make_report(run_build(made, "iss", [seeded_inputs(made.manifest.inputs)]))
        return reports[str(settings)]

    return report


def test_nothing_said_is_nothing_printed(ran: Any) -> None:
    report = ran()
    assert report.energy == {} and not any(line.startswith("energy") for line in totals(report))


def test_energy_adds_up_to_its_parts(ran: Any) -> None:
    report, plain = ran(**TAKES), ran()
    assert report.cycles == plain.cycles, "asking changes nothing"
    assert set(report.energy) == {"core", "ne16", "L1"}
    assert report.energy["core"] == pytest.approx(20e-6 * report.cycles["core"])
    engine = 0.5 * report.macs["ne16"] + 8.0 * report.cycles["ne16"]
    assert report.energy["ne16"] == pytest.approx(engine * 1e-6)
    alone = [ran(**{name: value}).energy for name, value in TAKES.items()]
    assert sum(sum(one.values()) for one in alone) == pytest.approx(sum(report.energy.values()))
    (line,) = (line for line in totals(report) if line.startswith("energy"))
    assert f"{sum(report.energy.values()):,.4g} uJ" in line


def test_a_memory_takes_what_copies_and_engines_bring(ran: Any) -> None:
    """Everything the DMA writes for a layer of the digits goes to L1 or comes from it; the engine reads it there."""
    once, twice = (ran(**{"L1.pj_per_byte": value}).energy["L1"] for value in (1.0, 2.0))
    assert twice == pytest.approx(2 * once)
    assert once * 1e6 > 2 * sum(layer.bytes_moved for layer in ran().layers if layer.engine == "ne16")


@pytest.mark.parametrize("isa", ["rv32imc", "cortex-m4"])
def test_bytes_of_a_core_are_those_it_fetches_reads_and_writes(isa: str, tmp_path: Path) -> None:
    require_chip()
    unicorn = pytest.importorskip("unicorn")
    memory = Memory("l2", 0x1C000000, 0x20000, pj_per_byte=1.0)
    setup = replace(
        chip(build(tmp_path, WORK, isa=isa), isa=isa), memories=(replace(MEMORIES[0], memory=memory), MEMORIES[1])
    )
    machine, seen = Machine(setup), []
    emulator, end = machine._cpu.core.emulator, memory.base + memory.size - 1
    emulator.hook_add(unicorn.UC_HOOK_BLOCK, lambda uc, at, size, _: seen.append(size), None, memory.base, end)
    accesses = unicorn.UC_HOOK_MEM_READ | unicorn.UC_HOOK_MEM_WRITE
    emulator.hook_add(accesses, lambda uc, kind, at, size, *_: seen.append(size), None, memory.base, end)
    machine.run(RunRequest((), {}))
    assert machine._cpu.traffic() == {"l2": sum(seen)} and sum(seen) > 100_000
