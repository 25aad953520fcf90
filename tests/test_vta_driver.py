"""The C driver of the VTA, compiled for this machine, driving the model of the engine."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.emit.firmware import runtime_path
from dovetail.targets.vta import TARGET
from dovetail.targets.vta.device import VtaDevice
from dovetail.targets.vta.stream import assemble, assemble_uops
from test_vta_device import BASE, CONFIG, INPUT, PIPELINE_UOPS, RESULT, WEIGHTS, Ram, but, pipeline, pipeline_result

SHIM = """
#include <stdint.h>
static uint32_t (*reader)(uint32_t);
static void (*writer)(uint32_t, uint32_t);
void dovetail_connect(uint32_t (*r)(uint32_t), void (*w)(uint32_t, uint32_t));
void dovetail_connect(uint32_t (*r)(uint32_t), void (*w)(uint32_t, uint32_t)) { reader = r; writer = w; }
uint32_t dovetail_mmio_read(uint32_t address) { return reader(address); }
void dovetail_mmio_write(uint32_t address, uint32_t value) { writer(address, value); }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The C driver compiled for this machine."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    folder, header = tmp_path_factory.mktemp("vta"), Path(__file__).resolve().parents[1] / "dovetail/targets/vta/driver"
    (text,) = TARGET.engines[0].files.values()
    assert not isinstance(text, Path)
    (folder / "vta.c").write_text(text())
    (folder / "shim.c").write_text('#include "dovetail_rt.h"\n#include "vta.h"\n' + SHIM)
    flags = [
        "-std=c99",
        "-Wall",
        "-Wextra",
        "-Wconversion",
        "-Wshadow",
        "-Werror",
        "-O2",
        "-fPIC",
        "-DDOVETAIL_HOST",
        f"-DVTA_MEMORY={BASE}u",
        f"-I{header}",
        f"-I{runtime_path('dovetail_rt.h').parent}",
        "-shared",
    ]
    sources = [str(folder / "vta.c"), str(folder / "shim.c")]
    subprocess.run([compiler, *flags, *sources, "-o", str(folder / "libvta.so")], check=True)
    return ctypes.CDLL(str(folder / "libvta.so"))


class HostRam(Ram):
    """The simulated memory, and the low 32 bits of this process's addresses for what the driver is given."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.shared: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def share(self, raw: bytes) -> int:
        self.shared.append(np.frombuffer(bytearray(raw), np.uint8))
        return self.shared[-1].ctypes.data

    def view(self, address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        for array in self.shared:
            start = address - (array.ctypes.data & 0xFFFFFFFF)
            if start >= 0 and start + nbytes <= array.size:
                return array[start : start + nbytes]
        return super().view(address, nbytes)


def test_driver_tickets_wait_for_their_own_task(driver: ctypes.CDLL) -> None:
    ram, now = HostRam(8), 0
    device = VtaDevice(ram)

    def access(action: Callable[[], int | None]) -> int:
        nonlocal now
        now += 10
        device.advance(now)
        return action() or 0

    read = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32)(
        lambda address: access(lambda: device.read(address - 0x43C00000, now))
    )
    write = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32)(
        lambda address, value: access(lambda: device.write(address - 0x43C00000, value, now)) and None
    )
    driver.dovetail_connect(read, write)
    driver.vta_start.argtypes, driver.vta_start.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_uint32
    constants = ram.share(ram.view(WEIGHTS, 256).tobytes())
    inputs, results = (INPUT - BASE) // 16, (RESULT - BASE) // 16
    for inference in range(2):
        driver.vta_init()
        tickets = []
        for task in range(4):
            stream = pipeline()
            for place in (2, 3):
                dram = inputs + 16 * (place - 2) + 32 * task
                stream[place] = but(stream[place], dram=dram)
            for place, half in ((6, 0), (9, 16)):
                stream[place] = but(stream[place], dram=results + half + 32 * task)
            counts = np.array([len(stream), 2], "<u4").tobytes()
            words = counts + assemble(stream, CONFIG) + assemble_uops(PIPELINE_UOPS, CONFIG)
            tickets.append(driver.vta_start(ram.share(words), constants))
            assert len(device.activities()) == 4 * inference + max(0, task - 1)
        assert tickets == [4 * inference + task + 1 for task in range(4)]
        if inference == 0:  # the other time the last one is two launches away
            driver.vta_wait(tickets[2])
            assert len(device.activities()) == 3
        driver.vta_wait(tickets[3])
        before = now
        driver.vta_wait(tickets[0])
        assert now == before and len(device.activities()) == 4 * inference + 4
        for task in range(4):
            found = ram.read(RESULT + 512 * task, (32, 16), "i1")
            assert np.array_equal(found, pipeline_result(ram, INPUT + 512 * task))
        ram.bytes[RESULT - BASE : RESULT - BASE + 2048] = 0
