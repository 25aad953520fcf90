"""The bring-up driver (vta_board.c), compiled for this machine, on models of both published register maps: those of the
HLS source's four modules, and the control registers of the Chisel source. No board was at hand."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.sim.device import MemoryBus
from dovetail.targets.vta.checks import Pointers
from dovetail.targets.vta.config import PRESETS, VtaConfig
from dovetail.targets.vta.executor import execute
from dovetail.targets.vta.isa import Load, Store, element_bytes
from dovetail.targets.vta.stream import StreamError, disassemble
from vta_layers import Case, Layer, case_of, default_tiling, graph_of

DRIVER = Path(__file__).resolve().parents[1] / "dovetail" / "targets" / "vta" / "driver"
HOOKS = """
#include "vta_board.h"
static uint32_t (*reader)(uint32_t);
static void (*writer)(uint32_t, uint32_t);
static void (*flusher)(const void *, uint32_t);
void connect_board(uint32_t (*r)(uint32_t), void (*w)(uint32_t, uint32_t), void (*f)(const void *, uint32_t));
void connect_board(uint32_t (*r)(uint32_t), void (*w)(uint32_t, uint32_t), void (*f)(const void *, uint32_t))
{ reader = r; writer = w; flusher = f; }
uint32_t vta_board_read(uint32_t address) { return reader(address); }
void vta_board_write(uint32_t address, uint32_t value) { writer(address, value); }
uint32_t vta_board_address(const void *pointer) { return (uint32_t)(uintptr_t)pointer; }
void vta_board_flush(const void *pointer, uint32_t bytes) { flusher(pointer, bytes); }
void vta_board_invalidate(const void *pointer, uint32_t bytes) { (void)pointer; (void)bytes; }
void vta_board_settle(void) { writer(0xFFFFFFFCu, 0u); }
"""

HLS, VCR = 1, 2
BASES = {HLS: 0x43C00000, VCR: 0xFF220000}
SETTLE = 0xFFFFFFFC
"""Where the hook of `vta_board_settle` writes."""
POLLS = 5
"""Reads until a launch is done."""
DONE, TIMEOUT, MISALIGNED, TOO_LONG = range(4)


class Registers:
    """What both maps have: a window of registers, memory, and what the processor has written back from its cache."""

    def __init__(self, base: int, config: VtaConfig) -> None:
        self.base, self.config = base, config
        self.values: dict[int, int] = {}
        self.flushed: dict[int, bytes] = {}
        self.memory: MemoryBus | None = None
        self.left = -1
        """Polls until the launch that runs is done; -1 for none."""
        self.finishes = True

    def flush(self, pointer: int, count: int) -> None:
        """The bytes as they are now reach memory."""
        self.flushed[pointer & 0xFFFFFFFF] = ctypes.string_at(pointer, count)

    def poll(self) -> bool:
        """Whether the launch ends with this read; it computes then."""
        self.left -= self.left > 0 and self.finishes
        if self.left == 0:
            self.left = -1
            with suppress(StreamError, AssertionError):  # a wrong launch ends, too, its result unwritten
                self.compute()
            return True
        return False

    def launched(self, count: int, address: int, pointers: Pointers) -> None:
        """Begin a launch; instructions are read from memory, not from the cache."""
        stream = self.flushed.get(address, bytes(16 * count))[: 16 * count]
        self.work, self.left = (stream, pointers), POLLS

    def compute(self) -> None:
        """The effect of the launch on memory."""
        assert self.memory is not None
        execute(self.work[0], self.memory, self.work[1], self.config)


class HlsModules(Registers):
    """Registers of fetch, load, compute and store (hardware/xilinx, config/pkg_config.py)."""

    done = 0
    settled = True

    def write(self, address: int, value: int) -> None:
        if address == SETTLE:
            self.settled, self.done = True, 0
            return
        self.values[address - self.base] = value
        started = [self.values.get(0x1000 * module, 0) for module in range(4)]
        if started == [1, 0x81, 0x81, 0x81] and address - self.base == 0x3000:
            v = self.values
            data = (v[0x2020], v[0x1010], v[0x1018], v[0x2028], v[0x3010])
            assert all(pointer % 8 == 0 for pointer in data), "the bus moves 8 bytes"
            self.launched(v[0x10], v[0x18], Pointers(*data))
            self.values = {}  # everything is written again for the next launch
            self.settled = False

    def read(self, address: int) -> int:
        assert address == self.base + 0x2018
        if not self.settled:
            return self.done  # still that of the launch before
        self.done = self.done or int(self.poll())
        return self.done


class ChiselRegisters(Registers):
    """The VCR (hardware/chisel shell/VCR.scala): a pointer and an offset are joined by OR."""

    def write(self, address: int, value: int) -> None:
        assert address != SETTLE
        self.values[address - self.base] = value
        if address == self.base and value & 1:
            v = self.values
            self.launched(v[0x08], v[0x0C], Pointers(*(v[at] for at in (0x10, 0x14, 0x18, 0x1C, 0x20))))

    def compute(self) -> None:
        stream, pointers = self.work
        for i in disassemble(stream, self.config):
            if isinstance(i, Load | Store):
                base, offset = pointers.base(i.memory), i.dram * element_bytes(i.memory, self.config)
                assert base | offset == base + offset, "the design would join them to another address"
        super().compute()

    def read(self, address: int) -> int:
        assert address == self.base
        if self.poll():
            self.values[0] = 2
        return self.values.get(0, 0)


MODELS: dict[int, type[HlsModules | ChiselRegisters]] = {HLS: HlsModules, VCR: ChiselRegisters}


class Launch(ctypes.Structure):
    """vta_launch."""

    _fields_ = [
        ("instructions", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("count", "uop", "inp", "wgt", "acc", "out")),
    ]


class Board:
    """The driver and a model of the registers it drives."""

    def __init__(self, folder: Path, which: int, config: VtaConfig, change: tuple[str, str] = ("", "")) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler on this machine")
        self.model = MODELS[which](BASES[which], config)
        text = (DRIVER / "vta_board.c").read_text()
        assert change[0] in text
        (folder / "vta_board.c").write_text(text.replace(*change) if change[0] else text)
        (folder / "hooks.c").write_text(HOOKS)
        warnings = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wpedantic", "-Werror"]
        words = [
            f"-DVTA_MAP={which}",
            f"-DVTA_BLOCK={config.block}u",
            f"-DVTA_BATCH={config.batch}u",
            "-DVTA_BOARD_HOOKS",
        ]
        words += ["-DVTA_MOST_INSTRUCTIONS=256u", f"-I{DRIVER}", "-std=c99", "-O2", "-fPIC", "-shared"]
        sources = [str(folder / "vta_board.c"), str(folder / "hooks.c")]
        library = folder / "libboard.so"
        subprocess.run([compiler, *warnings, *words, *sources, "-o", str(library)], check=True)
        self.library = ctypes.CDLL(str(library))
        types = ctypes.c_uint32, ctypes.c_uint32
        self.hooks = (
            ctypes.CFUNCTYPE(*types)(self.model.read),
            ctypes.CFUNCTYPE(None, *types)(self.model.write),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)(self.model.flush),
        )
        self.library.connect_board(*self.hooks)

    def run(self, case: Case, **fields: Any) -> tuple[int, bool]:
        """The status of one launch, and whether the result is right."""
        self.model.memory = memory = case.memory()
        room = np.zeros(len(case.stream) + 16, np.uint8)
        first = -room.ctypes.data % 16
        room[first : first + len(case.stream)] = np.frombuffer(case.stream, np.uint8)
        p = case.pointers
        given = {"uop": p.uop, "inp": p.inp, "wgt": p.wgt, "acc": p.acc, "out": p.out, **fields}
        launch = Launch(instructions=room.ctypes.data + first, **{"count": len(case.instructions), **given})
        status = int(self.library.vta_board_run(ctypes.byref(launch), ctypes.c_uint32(100)))
        return status, bool(np.array_equal(case.found(memory), case.expected))


def layer(config: VtaConfig, seed: int = 0) -> Case:
    """A padded convolution with a bias."""
    graph = graph_of(Layer("conv", (6, 7), 24, 40, (3, 3), (1, 1), (1, 1, 1, 1), shift="channel", bias=900_000), seed)
    return case_of(graph, default_tiling(graph, config), config, seed)


CASES = [
    (HLS, VtaConfig()),
    (HLS, VtaConfig(block=8, inp_bytes=16384, wgt_bytes=65536, acc_bytes=65536)),
    (VCR, PRESETS["de10nano"]),
    (VCR, replace(PRESETS["de10nano"], batch=2)),
]


@pytest.mark.parametrize(("which", "config"), CASES)
def test_launches_one_after_the_other(which: int, config: VtaConfig, tmp_path: Path) -> None:
    board = Board(tmp_path, which, config)
    assert board.library.vta_alignment() == max(config.wgt_element, config.acc_element)
    for seed in range(3):
        assert board.run(layer(config, seed)) == (DONE, True)


@pytest.mark.parametrize("which", [HLS, VCR])
def test_what_cannot_be_run_is_said(which: int, tmp_path: Path) -> None:
    config = VtaConfig() if which == HLS else PRESETS["de10nano"]
    board, case = Board(tmp_path, which, config), layer(config)
    for name, least in (("uop", 16), ("inp", 16), ("wgt", 256), ("acc", 64), ("out", 16)):
        wrong = getattr(case.pointers, name) + least // 2
        assert board.run(case, **{name: wrong}) == (MISALIGNED, False), name
    board.model.finishes = False
    assert board.run(case) == (TIMEOUT, False)
    if which == VCR:
        assert board.run(case, count=257) == (TOO_LONG, False)


FAULTS = {
    "the old done is taken for the new one": (HLS, "    vta_board_settle();\n", ""),
    "instructions stay in the cache": (HLS, "    vta_board_flush(launch->instructions, 16u * launch->count);\n", ""),
    "addresses are not moved": (VCR, "+ first[memory]", "+ 0u * first[memory]"),
    "moved instructions stay in the cache": (VCR, "    vta_board_flush(relocated, 16u * launch->count);\n", ""),
    "pointers are left as they are": (VCR, "pointer, 0u);", "pointer, launch->inp);"),
    "stores are not moved": (VCR, "(low & 7u) <= 1u", "(low & 7u) == 0u"),
    "a module is not started": (HLS, "    put(LOAD, CONTROL, AUTORESTART);\n", ""),
    "a pointer is missing": (
        HLS,
        "    put(COMPUTE, FOURTH, launch->acc);\n",
        "    put(COMPUTE, FOURTH, launch->uop);\n",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_driver_are_seen(name: str, tmp_path: Path) -> None:
    """Two launches, the second of which must still be right."""
    which, text, other = FAULTS[name]
    config = VtaConfig() if which == HLS else PRESETS["de10nano"]
    board = Board(tmp_path, which, config, (text, other))
    assert [board.run(layer(config, seed)) for seed in range(2)] != [(DONE, True)] * 2


@pytest.mark.parametrize("which", [HLS, VCR])
def test_the_hooks_of_bare_metal_compile(which: int) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    warnings = [
        "-std=c99",
        "-Wall",
        "-Wextra",
        "-Wconversion",
        "-Wshadow",
        "-Wpedantic",
        "-Werror",
        "-Wno-int-to-pointer-cast",
    ]
    source = str(DRIVER / "vta_board.c")
    subprocess.run([compiler, *warnings, f"-DVTA_MAP={which}", "-fsyntax-only", source], check=True)
