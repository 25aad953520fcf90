"""PULP's controller as its RTL behaves, and drivers that wait behind it whenever a job ends."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.errors import SimulationError
from dovetail.ir.graph import evaluate
from dovetail.run import RunResult, open_build, run_build
from dovetail.sim.device import Activity, MemoryBus
from dovetail.sim.launch_queue import AddressLines, Control, HwpeDevice, JobDevice, Launch, QueueDevice
from dovetail.target import DeviceModel, Target
from dovetail.targets import diana, load_target, macarray, ne16
from test_end_to_end import NETWORKS, network_file, require_chip

HERE = Path(__file__).resolve()
TASK = 0x20
QUICK = 51  # cycles of a job, as the shortest of the RTL's


class Clockwork(HwpeDevice[int]):
    """A controller whose jobs do nothing, for the cycles it is told one after the other."""

    def __init__(self, cycles: Sequence[int], registers: Sequence[int], contexts: int, lines: AddressLines) -> None:
        self.cycles = list(cycles)
        super().__init__(MemoryBus(()), "engine", registers, contexts, lines)

    def begin(self, identity: int, registers: dict[int, int]) -> tuple[int, int]:
        return identity, self.cycles.pop(0)

    def complete(self, launch: Launch[int]) -> Activity:
        return Activity(launch.start, launch.end, "")


def engine(lines: AddressLines = AddressLines.QUIET, jobs: int = 1) -> Clockwork:
    """Two contexts and so many jobs handed over at cycle 0, one after the other."""
    device = Clockwork([QUICK] * 999, (TASK,), 2, lines)
    for _ in range(jobs):
        hand_over(device, 0)
    return device


def hand_over(device: Clockwork, now: int) -> None:
    assert device.read(Control.ACQUIRE, now) < 256
    device.write(Control.TRIGGER, 0, now)


def test_what_the_rtl_shows_around_an_end() -> None:
    """Measured on hwpe-ctrl v1.7.1 behind NE16: what a read so many cycles after the end of the first of two jobs
    gives, and what is left of FINISHED after it."""
    expected = {
        Control.STATUS: {-2: (0x101, 1), -1: (0x101, 1), 0: (0x100, 1), 1: (0x100, 1)},
        Control.RUNNING_JOB: {-1: (0, 1), 0: (0, 1), 1: (0, 1), 2: (1, 1), 3: (1, 1)},
        Control.FINISHED: {-2: (0, 1), -1: (0, 0), 0: (1, 0), 1: (1, 0)},
    }
    for register, cases in expected.items():
        for delta, (seen, left) in cases.items():
            device = engine(jobs=2)
            device.advance(QUICK + delta)
            value = device.read(register, QUICK + delta)
            device.advance(QUICK + 10)
            assert (value, device.read(Control.FINISHED, QUICK + 10)) == (seen, left), (register.name, delta)


def test_finished_stops_at_two_and_reading_clears_it() -> None:
    device = engine()
    for job in range(1, 6):
        device.advance(job * 1000)
        hand_over(device, job * 1000)
    device.advance(9000)
    assert device.read(Control.RUNNING_JOB, 9000) == 6
    assert (device.read(Control.FINISHED, 9000), device.read(Control.FINISHED, 9001)) == (2, 0)


@pytest.mark.parametrize("lines", AddressLines)
def test_address_lines_that_keep_showing_finished_lose_every_end(lines: AddressLines) -> None:
    device = engine(lines)
    assert device.read(Control.FINISHED, 1) == 0
    device.advance(QUICK)
    assert device.read(Control.FINISHED, QUICK) == (lines is AddressLines.QUIET)
    assert device.interrupt() is False and device.read(Control.STATUS, QUICK) == 0


def test_ids_contexts_and_the_latch() -> None:
    device = engine(jobs=0)
    assert device.read(Control.ACQUIRE, 0) == 0 and device.read(Control.ACQUIRE, 0) == 0xFFFFFFFE
    assert device.read(Control.STATUS, 0) == 0, "a job that is acquired is not in STATUS"
    device.write(TASK, 7, 0)
    device.write(Control.TRIGGER, 0, 0)
    assert device.read(Control.ACQUIRE, 0) == 1 and device.read(TASK, 0) == 0
    device.write(Control.TRIGGER, 0, 0)
    assert device.read(Control.ACQUIRE, 0) == 0xFFFFFFFF and device.read(Control.STATUS, 0) == 0x101
    device.advance(QUICK)
    assert device.read(Control.ACQUIRE, QUICK) == 2 and device.read(TASK, QUICK) == 7
    assert device.interrupt() and device.read(Control.EVENT, QUICK) == 1
    device.write(Control.EVENT, 0, QUICK)
    device.advance(2 * QUICK)
    assert not device.interrupt() and device.read(Control.EVENT, 2 * QUICK) == 1
    device.write(Control.EVENT, 1, 2 * QUICK)
    assert not device.interrupt()
    device.write(Control.SOFT_CLEAR, 0, 2 * QUICK)
    assert device.read(Control.ACQUIRE, 200) == 0 and device.read(Control.RUNNING_JOB, 200) == 0


SHIM = """
#ifndef DOVETAIL_RT_H
#define DOVETAIL_RT_H
#include <stdint.h>
uint32_t dovetail_mmio_read(uint32_t address);
void dovetail_mmio_write(uint32_t address, uint32_t value);
void dovetail_wait_for_interrupt(void);
static inline void dovetail_compiler_barrier(void) { __asm__ volatile("" ::: "memory"); }
#endif
"""
CONNECT = """
#include "dovetail_rt.h"
static uint32_t (*reader)(uint32_t);
static void (*writer)(uint32_t, uint32_t);
static void (*sleeper)(void);
void connect_to(uint32_t (*r)(uint32_t), void (*w)(uint32_t, uint32_t), void (*s)(void))
{ reader = r; writer = w; sleeper = s; }
uint32_t dovetail_mmio_read(uint32_t address) { return reader(address); }
void dovetail_mmio_write(uint32_t address, uint32_t value) { writer(address, value); }
void dovetail_wait_for_interrupt(void) { sleeper(); }
void dma_acknowledge(void) {}
"""


@dataclass(frozen=True)
class Driver:
    """A bundled driver: its text, the names of its functions, its registers, and a device for it."""

    text: Callable[[], str]
    header: Path
    name: str
    base: int
    device: Callable[[Sequence[int], AddressLines], QueueDevice[int] | JobDevice]
    places: int


class Macarray(JobDevice):
    """The port kit's registers, with jobs that do nothing."""

    def __init__(self, cycles: Sequence[int]) -> None:
        names = macarray.REGISTERS.names
        super().__init__(MemoryBus(()), "engine", "dovetail.targets.macarray.model", names)
        rest = list(cycles)
        self._cycles = lambda job: rest.pop(0)

    def complete(self, launch: Launch[dict[str, int]]) -> Activity:
        return Activity(launch.start, launch.end, "")


FOLDER = Path(ne16.__file__).parents[1]
DIGITAL = tuple(diana.registers.Digital)
DRIVERS = {
    "ne16": Driver(
        ne16.DRIVER,
        FOLDER / "ne16/driver",
        "ne16",
        0x00201000,
        lambda cycles, lines: Clockwork(cycles, range(TASK, 0x80, 4), 2, lines),
        2,
    ),
    "diana": Driver(
        diana.DRIVER,
        FOLDER / "diana/driver",
        "diana_digital",
        diana.BASES["digital"],
        lambda cycles, lines: Clockwork(cycles, DIGITAL, 1, lines),
        1,
    ),
    "macarray": Driver(
        lambda: (FOLDER / "macarray/driver/macarray.c").read_text(),
        FOLDER / "macarray/driver",
        "macarray",
        macarray.BASE,
        lambda cycles, lines: Macarray(cycles),
        1,
    ),
}


class Chip:
    """A driver built for this computer, and its device; a register access takes so many cycles, sleeping until there is
    an interrupt. Where that never comes it is noted, and everything has ended, so that the driver's loops do too."""

    def __init__(self, library: Path, driver: Driver, device: QueueDevice[int] | JobDevice, access: int) -> None:
        self.driver, self.device, self.access, self.now, self.hangs = driver, device, access, 0, False
        reader = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32)
        writer = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32)
        self._calls = (reader(self._read), writer(self._write), ctypes.CFUNCTYPE(None)(self._sleep))
        self._c = ctypes.CDLL(str(library))
        self._c.connect_to(*self._calls)
        getattr(self._c, f"{driver.name}_init")()

    def start(self) -> int:
        words = (ctypes.c_uint32 * 64)()
        return int(getattr(self._c, f"{self.driver.name}_start")(words))

    def wait(self, ticket: int) -> None:
        getattr(self._c, f"{self.driver.name}_wait")(ticket)

    def _read(self, address: int) -> int:
        self._pass(self.access)
        offset = address - self.driver.base
        if self.hangs:
            return 1 if offset in (Control.FINISHED, 0x08) else 0
        return self.device.read(offset, self.now)

    def _write(self, address: int, value: int) -> None:
        self._pass(self.access)
        if not self.hangs:
            self.device.write(address - self.driver.base, value, self.now)

    def _sleep(self) -> None:
        self._pass(1)
        while not self.hangs and not self.device.interrupt():
            event = self.device.next_event()
            self.hangs = event is None
            self._pass(max(0, (event or self.now) - self.now))

    def _pass(self, cycles: int) -> None:
        self.now += cycles
        self.device.advance(self.now)


def library(driver: Driver, folder: Path, change: tuple[str, str] = ("", "")) -> Path:
    """The driver as a library, one text in it replaced."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    text = driver.text()
    assert change[0] in text
    folder.mkdir()
    for name, content in (
        ("driver.c", text.replace(*change) if change[0] else text),
        ("dovetail_rt.h", SHIM),
        ("connect.c", CONNECT),
        ("dma.h", "void dma_acknowledge(void);\n"),
    ):
        (folder / name).write_text(content)
    flags = ["-std=gnu99", "-O2", "-fPIC", "-shared", f"-D{driver.name.upper()}_BASE={driver.base}u", f"-I{folder}"]
    sources = [str(folder / "driver.c"), str(folder / "connect.c")]
    subprocess.run([compiler, *flags, f"-I{driver.header}", "-o", str(folder / "it.so"), *sources], check=True)
    return folder / "it.so"


def hanging(driver: Driver, built: Path, lines: AddressLines) -> list[tuple[int, int]]:
    """The (cycles of a job, cycles of an access) with which the driver waits for ever, or returns too early."""
    found = []
    for access in (1, 2, 3, 7):
        for cycles in range(1, 90 * access):
            durations = [cycles + 5 * (job % 3) for job in range(9)]
            chip = Chip(built, driver, driver.device(durations, lines), access)
            tickets = [chip.start() for _ in range(driver.places)]
            early = False
            for job in range(len(durations)):
                chip.wait(tickets[job])
                early |= len(chip.device.activities()) <= job
                if len(tickets) < len(durations):
                    tickets.append(chip.start())
            if chip.hangs or early:
                found.append((cycles, access))
    return found


@pytest.mark.parametrize("lines", AddressLines)
@pytest.mark.parametrize("name", DRIVERS)
def test_drivers_see_every_end_whenever_it_comes(name: str, lines: AddressLines, tmp_path: Path) -> None:
    """Jobs of every length, so that an end comes in every cycle around every access of the driver."""
    driver = DRIVERS[name]
    assert not hanging(driver, library(driver, tmp_path / "built"), lines)


COUNTING = ("ended = issued - in_flight();", "ended += read_register(2u);")
FAULTS = {
    "counts FINISHED": COUNTING,
    "listens after it has looked": (
        "dma_acknowledge();\n        dovetail_wait",
        "dma_acknowledge();\n        listen();\n        dovetail_wait",
    ),
    "does not look again": ("if (has_ended(ticket) != 0u) {\n            break;", "if (0) {\n            break;"),
    "does not listen": ("    do {\n        listen();", "    do {"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_driver_are_found(fault: str, tmp_path: Path) -> None:
    driver = DRIVERS["ne16"]
    assert hanging(driver, library(driver, tmp_path / "built", FAULTS[fault]), AddressLines.QUIET)


def test_the_driver_never_reads_finished() -> None:
    assert "FINISHED" not in ne16.DRIVER() and "FINISHED" not in diana.DRIVER()


def with_device(device: DeviceModel, text: Callable[[], str] = ne16.DRIVER) -> Target:
    """The chip with another device for its engine, and another driver."""
    engine = replace(ne16.ENGINE, device=device, files={"ne16.c": text})
    return replace(load_target("ne16"), engines=(engine,))


def adversary(first: int, most: int, lines: AddressLines) -> DeviceModel:
    """See `Adversary`."""
    assert ne16.ENGINE.device is not None
    arguments = {"first": first, "most": most, "lines": lines.value}
    return replace(ne16.ENGINE.device, factory=f"{HERE.with_name('ne16_adversary.py')}:Adversary", arguments=arguments)


def ran(model: Path, target: Target, policy: str, folder: Path) -> RunResult:
    """One inference; every byte must be that of the integer graph."""
    compiled = compile_model(model, target, Options(policy))
    write_project(compiled.project, folder)
    inputs = sample_inputs(compiled.graph)
    result = run_build(open_build(folder, target), "iss", [inputs])
    expected = evaluate(compiled.graph, inputs)
    for value in compiled.graph.outputs:
        np.testing.assert_array_equal(result.outputs[0][value], expected[value])
    return result


@pytest.mark.parametrize("policy", ["engine", "exact"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_end_when_every_look_comes_at_the_worst_cycle(name: str, policy: str, tmp_path: Path) -> None:
    """The end of a job comes in the cycle after each look, so that a read of FINISHED would lose it; then at every
    distance up to 61 cycles in turn."""
    require_chip()
    for most, lines in ((1, AddressLines.QUIET), (61, AddressLines.HELD)):
        target = with_device(adversary(0, most, lines))
        ran(network_file(name), target, policy, tmp_path / str(most))


def test_every_look_of_a_network_meets_every_distance(tmp_path: Path) -> None:
    require_chip()
    compiled = compile_model(network_file("ad_autoencoder"), load_target("ne16"), Options("engine"))
    write_project(compiled.project, tmp_path / "build")
    inputs = sample_inputs(compiled.graph)
    expected = evaluate(compiled.graph, inputs)[compiled.graph.outputs[0]]
    for first in range(24):
        build = open_build(tmp_path / "build", with_device(adversary(first, 24, AddressLines.QUIET)))
        found = run_build(build, "iss", [inputs]).outputs[0]
        np.testing.assert_array_equal(found[compiled.graph.outputs[0]], expected)


@pytest.mark.parametrize("name", ["ad_autoencoder", "ic_resnet8"])
def test_a_driver_that_counts_hangs_on_the_chip(name: str, tmp_path: Path) -> None:
    """As it does on the RTL: FINISHED stops at 2."""
    require_chip()
    assert ne16.ENGINE.device is not None
    target = with_device(ne16.ENGINE.device, lambda: ne16.DRIVER().replace(*COUNTING))
    with pytest.raises(SimulationError, match="deadlock: the core waits for an interrupt"):
        ran(network_file(name), target, "engine", tmp_path / "build")


@pytest.mark.parametrize(("name", "awake"), [("ic_resnet8", 35_000), ("vww_mobilenetv1", 85_000)])
def test_the_core_sleeps_while_others_work(name: str, awake: int, tmp_path: Path) -> None:
    require_chip()
    found = ran(network_file(name), load_target("ne16"), "engine", tmp_path / "build").simulation.inferences[0]
    assert found.core_cycles is not None and found.idle_cycles is not None
    print(f"{name}: {found.core_cycles} cycles awake, {found.idle_cycles} asleep")
    assert found.core_cycles <= awake
