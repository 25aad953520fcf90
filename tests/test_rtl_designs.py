"""Published designs as engines: SystemVerilog with packages, interfaces, included files and macros behind `dt.Rtl`."""

from __future__ import annotations

import importlib.util
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import BuildError, TargetError
from dovetail.sim.device import MemoryBus, MemoryRegion
from dovetail.sim.rtl import VerilatedDevice, build_rtl
from dovetail.target import Rtl, RtlPort
from dovetail.target.devices import read_rtl
from test_rtl import needs_verilator

pytestmark = [pytest.mark.rtl, needs_verilator]

HERE = Path(__file__).parent / "rtl"
MEMORY = MemoryRegion("L1", 0x10000000, 0x4000)
DATA = 0x10001000
PROGRAM = struct.pack(
    "<12I",
    0x10001537,  # lui a0, 0x10001
    0x00800593,  # li a1, 8
    0x00000613,  # li a2, 0
    0x00052683,  # 1: lw a3, 0(a0)
    0x00D60633,  # add a2, a2, a3
    0x00450513,  # addi a0, a0, 4
    0xFFF58593,  # addi a1, a1, -1
    0xFE0598E3,  # bnez a1, 1b
    0x00C52023,  # sw a2, 0(a0)
    0x00C503A3,  # sb a2, 7(a0)
    0x00C02023,  # sw a2, 0(zero): the end
    0x0000006F,  # 2: j 2b
)
"""Adds eight words and stores the sum, and its low byte."""
DESIGNS = {
    "CV32E40P": (
        "pythondata_cpu_cv32e40p",
        *("rtl/include/cv32e40p_apu_core_pkg.sv", "rtl/include/cv32e40p_fpu_pkg.sv", "rtl/include/cv32e40p_pkg.sv"),
        *("rtl/cv32e40p_register_file_ff.sv", "rtl/cv32e40p_core.sv", "bhv/cv32e40p_sim_clock_gate.sv"),
    ),
    "SERV": ("pythondata_cpu_serv", "rtl/serv_rf_top.v"),
    "PICORV32": ("pythondata_cpu_picorv32", "picorv32.v"),
}


def engine(name: str) -> Rtl:
    """core_engine.sv around a core of a package, or a skipped test."""
    package, *sources = DESIGNS[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed: pip install 'dovetail[rtl-cores]'")
    folder = next(Path(found.origin).parent.glob("*verilog"))
    fetch = {"req": "f_req", "gnt": "f_gnt", "addr": "f_addr", "rdata": "f_rdata", "we": "", "be": "", "wdata": ""}
    return Rtl(
        top="core_engine",
        sources=(*(folder / source for source in sources), HERE / "core_engine.sv"),
        registers=RtlPort("apb", names={"pready": "", "pslverr": ""}),
        memory=(RtlPort("tcdm"), RtlPort("tcdm", names=fetch)),
        include=(HERE / "include", folder / "rtl") if (folder / "rtl").is_dir() else (HERE / "include",),
        defines={name: 1, "SYNTHESIS": 1},
        options=("--no-assert",),
        watchdog=100_000,
    )


def sums(rtl: Rtl) -> tuple[int, int]:
    """Two runs of the program on random data; the cycles of each."""
    bus = MemoryBus([MEMORY])
    device = VerilatedDevice(bus, **rtl.device(0, 0x100).arguments)
    bus.view(MEMORY.base, len(PROGRAM))[:] = memoryview(PROGRAM)
    rng, taken, now = np.random.default_rng(5), [], 10
    for _ in range(2):
        device.reset()
        numbers = rng.integers(0, 1 << 28, 8, dtype=np.uint32)
        bus.view(DATA, 32).view("<u4")[:] = numbers
        bus.view(DATA + 32, 8)[:] = 0xEE
        device.write(0, 1, now)
        end = now
        while not device.interrupt():
            end = device.clock(end + 10_000)
        total = int(numbers.sum()) & 0xFFFFFFFF
        assert bus.view(DATA + 32, 8).tobytes() == struct.pack("<I3xB", total, total & 0xFF).replace(
            b"\0\0\0", b"\xee\xee\xee", 1
        )
        taken.append(end - now)
        device.read(4, end)
        assert not device.interrupt()
    return taken[0], taken[1]


@pytest.mark.parametrize("name", DESIGNS)
def test_a_published_core_is_an_engine(name: str) -> None:
    """With memories that always grant, with memories that often do not, and from zeros or anything."""
    rtl = engine(name)
    first, second = sums(rtl)
    assert first == second
    print(f"{name}: {first} cycles for the program")
    assert sums(replace(rtl, stall=128))[0] > first, "grants that are withheld take time"
    assert sums(replace(rtl, initial="zero"))[0] == first


def test_what_was_built_is_found_by_every_file_that_was_read(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    text = (HERE / "include" / "control.svh").read_text()
    (tmp_path / "include" / "control.svh").write_text(text)
    rtl = engine("SERV")
    rtl = replace(rtl, include=(tmp_path / "include", *rtl.include[1:]))
    first = build_rtl(rtl, cache=tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert build_rtl(rtl, cache=tmp_path / "cache") == first and first.stat().st_mtime_ns == stamp
    (tmp_path / "include" / "control.svh").write_text(text.replace("[7:2]", "[6:2]"))
    changed = build_rtl(rtl, cache=tmp_path / "cache")
    assert changed != first
    (tmp_path / "include" / "control.svh").write_text(text)
    assert build_rtl(rtl, cache=tmp_path / "cache") == first, "kept"
    assert build_rtl(replace(rtl, defines={**rtl.defines, "MORE": 1}), cache=tmp_path / "cache") not in (first, changed)


def test_what_a_design_begins_with(tmp_path: Path) -> None:
    """A register nobody initialises and no reset reaches: zero, or anything but the same in every run."""
    (tmp_path / "idle.sv").write_text(
        "module idle(input clk, input psel, penable, pwrite, input [7:0] paddr, input [31:0] pwdata,\n"
        "            output [31:0] prdata, output busy, irq);\n"
        "  reg [31:0] kept;\n  always @(posedge clk) if (psel && pwrite && penable) kept <= pwdata;\n"
        "  assign prdata = kept; assign {busy, irq} = 2'b00;\nendmodule\n"
    )
    port = RtlPort("apb", names={"pready": "", "pslverr": ""})
    rtl = Rtl(top="idle", sources=(tmp_path / "idle.sv",), registers=port, reset="")
    found = {}
    for initial in ("random", "zero"):
        arguments = replace(rtl, initial=initial).device(0, 0x100).arguments
        assert read_rtl(arguments["rtl"]) == replace(rtl, initial=initial)
        device = VerilatedDevice(MemoryBus([MEMORY]), **arguments)
        found[initial] = device.read(0, 5)
        device.reset()
        assert device.read(0, 5) == found[initial]
        device.write(0, 1234, 20)
        assert device.read(0, 40) == 1234
    assert found["zero"] == 0 != found["random"]
    with pytest.raises(TargetError, match="registers cannot begin with 'ones'"):
        replace(rtl, initial="ones").device(0, 0x100)
    with pytest.raises(BuildError, match="there is no folder"):
        build_rtl(replace(rtl, include=(tmp_path / "nowhere",)))
