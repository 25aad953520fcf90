"""The C driver of the NE16, compiled for this machine, driving the model of the engine."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.codegen.emit.firmware import runtime_path
from dovetail.targets.ne16 import DRIVER as DRIVER_TEXT
from dovetail.targets.ne16.device import EVENT, Ne16Device
from dovetail.targets.ne16.job import Ne16Job, task_words
from test_ne16_device import OneMemory, jobs, load_output, place_operands, small_job

DRIVER = Path(__file__).resolve().parents[1] / "dovetail" / "targets" / "ne16" / "driver"
BASE = 0x00201000

SHIM = """
#include <stdint.h>
static uint32_t (*reader)(uint32_t);
static void (*writer)(uint32_t, uint32_t);
void dovetail_connect(uint32_t (*r)(uint32_t), void (*w)(uint32_t, uint32_t));
void dovetail_connect(uint32_t (*r)(uint32_t), void (*w)(uint32_t, uint32_t)) { reader = r; writer = w; }
uint32_t dovetail_mmio_read(uint32_t address);
uint32_t dovetail_mmio_read(uint32_t address) { return reader(address); }
void dovetail_mmio_write(uint32_t address, uint32_t value);
void dovetail_mmio_write(uint32_t address, uint32_t value) { writer(address, value); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C driver as a host library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    folder = tmp_path_factory.mktemp("ne16")
    (folder / "shim.c").write_text(SHIM)
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
        f"-I{runtime_path('dovetail_rt.h').parent}",
        f"-I{DRIVER}",
    ]
    target = folder / "libne16.so"
    (folder / "ne16.c").write_text(DRIVER_TEXT())
    sources = [str(folder / "ne16.c"), str(folder / "shim.c"), str(runtime_path("dma.c"))]
    subprocess.run([compiler, *flags, "-shared", "-o", str(target), *sources], check=True)
    return target


class Firmware:
    """The C driver connected to a device; every register access takes ten cycles."""

    def __init__(self, library: Path, device: Ne16Device) -> None:
        self.device, self.now, self.writes = device, 0, 0
        self.error: Exception | None = None
        reader = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32)
        writer = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32)
        self._callbacks = (reader(self._read), writer(self._write))
        self.c = ctypes.CDLL(str(library))
        self.c.dovetail_connect(*self._callbacks)
        for function in (self.c.ne16_start, self.c.ne16_finished):
            function.restype = ctypes.c_uint32
        self.c.ne16_init()

    def _access(self, action: Callable[[], int | None]) -> int:
        """Do an access; after the first fault all reads give 1, so that the driver's loops come to an end."""
        self.now += 10
        if self.error is None:
            try:
                self.device.advance(self.now)
                return action() or 0
            except Exception as error:
                self.error = error
        return 1

    def _read(self, address: int) -> int:
        return self._access(lambda: self.device.read(address - BASE, self.now))

    def _write(self, address: int, value: int) -> None:
        self.writes += address - BASE != EVENT
        self._access(lambda: self.device.write(address - BASE, value, self.now))

    def start(self, job: Ne16Job) -> int:
        words = task_words(job)
        return self._checked(self.c.ne16_start((ctypes.c_uint32 * len(words))(*words)))

    def wait(self, ticket: int) -> None:
        self._checked(self.c.ne16_wait(ticket))

    def finished(self, ticket: int) -> bool:
        return bool(self._checked(self.c.ne16_finished(ticket)))

    def _checked(self, result: int | None) -> int:
        if self.error is not None:
            raise self.error
        return result or 0


def test_driver_tickets_wait_for_their_own_launch(library: Path) -> None:
    bus = OneMemory()
    cases = [small_job(bus, seed, size=9) for seed in range(4)]
    firmware = Firmware(library, Ne16Device(bus))
    tickets = [firmware.start(job) for job, _ in cases[:2]]
    assert firmware.writes == 1 + 2 * 25 and firmware.now < 1000
    for index, (job, expected) in enumerate(cases):
        firmware.wait(tickets[index])
        assert np.array_equal(load_output(bus, job), expected.astype(np.uint8))
        assert len(firmware.device.activities()) == index + 1
        assert firmware.finished(tickets[index])
        if index < 3:
            assert not firmware.finished(tickets[index + 1])
        if index < 2:
            tickets.append(firmware.start(cases[index + 2][0]))
            assert len(firmware.device.activities()) == index + 1
    assert tickets == [1, 2, 3, 4]
    before = firmware.now
    firmware.wait(tickets[1])
    assert firmware.now == before


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(job=jobs(strides=(2,)), seed=st.integers(0, 2**32 - 1))
def test_driver_walks_the_grid_of_stride_two_jobs(library: Path, job: Ne16Job, seed: int) -> None:
    bus = OneMemory()
    job, expected = place_operands(bus, job, seed)
    plain, plain_expected = small_job(bus, seed)
    device = Ne16Device(bus)
    firmware = Firmware(library, device)
    first, second = firmware.start(job), firmware.start(plain)
    count = job.grid[0] * job.grid[1]
    assert (first, second) == (count, count + 1)
    grid_writes = 25 if count == 1 else 4 * count + 48
    assert firmware.writes == 1 + grid_writes + 25
    firmware.wait(second)
    mask = (1 << job.out_bits) - 1
    assert np.array_equal(load_output(bus, job).astype(np.int64) & mask, expected & mask)
    assert np.array_equal(load_output(bus, plain), plain_expected.astype(np.uint8))
    assert len(device.activities()) == count + 1
