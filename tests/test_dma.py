"""The DMA: device model and driver against numpy, and its timing."""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.codegen.build.toolchain import compile_host
from dovetail.codegen.emit.firmware import DMA_DRIVER, RUNTIME, runtime_path
from dovetail.errors import BuildError, SimulationError
from dovetail.sim.device import Activity, MemoryBus, MemoryRegion
from dovetail.sim.dma import QUEUE, DmaDevice, DmaJob, DmaRegister, transfer_cycles
from dovetail.sim.worker import simulate, simulate_host
from firmware import DMA, build, chip

FAR, NEAR = 0x1000, 0x9000
REGIONS = (MemoryRegion("far", FAR, 4096), MemoryRegion("near", NEAR, 4096))


def expected(before: bytes, source: bytes, t: DmaJob) -> bytes:
    """The destination memory afterwards, a byte at a time; addresses of `t` count from the memories' starts."""
    memory = bytearray(before)
    for plane in range(t.planes):
        for row in range(t.top + t.rows + t.bottom):
            for byte in range(t.left + t.row_bytes + t.right):
                at = t.destination + plane * t.destination_plane_stride + row * t.destination_row_stride + byte
                inside = t.top <= row < t.top + t.rows and t.left <= byte < t.left + t.row_bytes
                start = t.source + plane * t.source_plane_stride + (row - t.top) * t.source_row_stride
                memory[at] = source[start + byte - t.left] if inside else t.fill
    return bytes(memory)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[int, DmaJob]:
    """A mode and a transfer it can express, with addresses from the memories' starts; destinations do not overlap."""
    small = st.integers(0, 5)
    mode = draw(st.integers(1, 4))
    rows, planes = (draw(small) if mode > 1 else 1), (draw(small) if mode > 2 else 1)
    padding = [draw(small) if mode == 4 else 0 for _ in range(4)]
    top, bottom, left, right = padding
    row_bytes = draw(st.integers(0, 20))
    width, height = left + row_bytes + right, top + rows + bottom
    row_stride = width + draw(small)
    plane_stride = height * row_stride + draw(small)
    if draw(st.booleans()) and width:  # planes interleaved inside a row
        plane_stride = width + draw(small)
        row_stride = max(1, planes) * plane_stride + draw(small)
    strides = (row_stride if mode > 1 else 0, plane_stride if mode > 2 else 0)
    sources = (draw(st.integers(0, 40)) if mode > 1 else 0, draw(st.integers(0, 90)) if mode > 2 else 0)
    fill = draw(st.integers(0, 255)) if mode == 4 else 0
    return mode, DmaJob(
        draw(st.integers(0, 99)),
        draw(st.integers(0, 99)),
        row_bytes,
        rows,
        sources[0],
        strides[0],
        planes,
        sources[1],
        strides[1],
        fill,
        top,
        bottom,
        left,
        right,
    )


def program(device: DmaDevice, mode: int, t: DmaJob, now: int) -> None:
    """Write the registers and start."""
    words = {
        DmaRegister.SRC: FAR + t.source,
        DmaRegister.DST: NEAR + t.destination,
        DmaRegister.ROW_BYTES: t.row_bytes,
        DmaRegister.ROWS: t.rows,
        DmaRegister.SRC_ROW_STRIDE: t.source_row_stride,
        DmaRegister.DST_ROW_STRIDE: t.destination_row_stride,
        DmaRegister.PLANES: t.planes,
        DmaRegister.SRC_PLANE_STRIDE: t.source_plane_stride,
        DmaRegister.DST_PLANE_STRIDE: t.destination_plane_stride,
        DmaRegister.FILL: t.fill,
        DmaRegister.PAD_ROWS: t.top << 16 | t.bottom,
        DmaRegister.PAD_BYTES: t.left << 16 | t.right,
    }
    used = {1: 3, 2: 6, 3: 9, 4: 12}[mode]
    for index, (register, word) in enumerate(words.items()):
        device.write(register, word if index < used else 0xDEAD_BEEF, now)  # the others must not matter
    device.write(DmaRegister.START, mode, now)


@settings(max_examples=300, deadline=None)
@given(case=transfers(), now=st.integers(0, 1000))
def test_copies_equal_a_byte_by_byte_copy(case: tuple[int, DmaJob], now: int) -> None:
    mode, t = case
    bus = MemoryBus(REGIONS)
    device = DmaDevice(bus)
    source = np.random.default_rng(3).integers(0, 256, 4096, dtype=np.uint8)
    bus.view(FAR, 4096)[:] = source
    before = bus.view(NEAR, 4096).tobytes()
    program(device, mode, t, now)
    beats = t.planes * t.height * -(-t.width // 8)
    assert device.next_event() == now + 16 + beats
    device.advance(now + 16 + beats - 1)
    assert bus.view(NEAR, 4096).tobytes() == before  # nothing before the completion
    assert not device.interrupt()
    device.advance(now + 16 + beats)
    assert bus.view(NEAR, 4096).tobytes() == expected(before, source.tobytes(), t)
    assert bus.view(FAR, 4096).tobytes() == source.tobytes()
    (activity,) = device.activities()
    assert (activity.start, activity.end) == (now, now + 16 + beats)
    assert activity.moved == t.planes * t.height * t.width


def test_the_queue_runs_in_order_and_counts() -> None:
    bus = MemoryBus(REGIONS)
    device = DmaDevice(bus, bytes_per_cycle=4, setup_cycles=10)
    for index in range(QUEUE):
        assert device.read(DmaRegister.STATUS, 0) == QUEUE - index
        program(device, 1, DmaJob(index, 100 + index, 8), now=5)
        assert device.read(DmaRegister.START, 5) == index + 1
    with pytest.raises(SimulationError, match="transfer 17 was started with all 16 places"):
        program(device, 1, DmaJob(0, 0, 8), now=5)
    device.advance(5 + 12 * 3)
    assert device.interrupt() and device.read(DmaRegister.DONE, 41) == 3 and not device.interrupt()
    device.advance(5 + 12 * 4 - 1)
    assert not device.interrupt()
    device.advance(5 + 12 * 4)
    assert device.interrupt() and device.read(DmaRegister.DONE, 53) == 4
    assert [(a.start, a.end) for a in device.activities()] == [(5 + 12 * i, 17 + 12 * i) for i in range(4)]
    device.reset()
    assert (device.next_event(), device.activities(), device.read(DmaRegister.START, 0)) == (None, [], 0)


def test_cycles_of_arrays_are_those_of_their_elements() -> None:
    row, rows, planes = np.meshgrid(np.arange(0, 40), np.arange(0, 4), np.arange(1, 4))
    table = transfer_cycles(row.astype(np.int64), rows.astype(np.int64), planes.astype(np.int64), bytes_per_cycle=8)
    for index in np.ndindex(table.shape):
        assert table[index] == transfer_cycles(int(row[index]), int(rows[index]), int(planes[index]))
    assert transfer_cycles(9, 2, 3, bytes_per_cycle=8, setup_cycles=16) == 16 + 6 * 2


@pytest.mark.parametrize(
    ("mode", "transfer", "words"),
    [
        (1, DmaJob(4000, 0, 97), "97 bytes at 0x1fa0 are not inside one memory"),
        (1, DmaJob(0, 4090, 7), "7 bytes at 0x9ffa are not inside one memory"),
        (2, DmaJob(0, 0, 8, 3, 8, 7), "DST_ROW_STRIDE is 7, a row or plane has 8"),
        (3, DmaJob(0, 0, 8, 3, 8, 8, 2, 24, 23), "DST_PLANE_STRIDE is 23, a row or plane has 24"),
        (2, DmaJob(0, 0, 8, 600, 0, 8), "not inside one memory"),
        (5, DmaJob(0, 0, 8), "START was written 5"),
    ],
)
def test_impossible_transfers_are_refused_when_started(mode: int, transfer: DmaJob, words: str) -> None:
    device = DmaDevice(MemoryBus(REGIONS), name="copier")
    with pytest.raises(SimulationError) as caught:
        program(device, mode, transfer, 0) if mode < 5 else device.write(DmaRegister.START, mode, 0)
    assert words in caught.value.what and caught.value.where == "copier"


DRIVER_TEST = """
uint32_t in[13]; uint8_t far_[2048], near_[2048];
void run(void);
void run(void)
{
    const uint8_t *s = far_ + in[1]; uint8_t *d = near_ + in[2];
    const dma_padding padding = {(uint16_t)in[9], (uint16_t)in[10], (uint16_t)in[11], (uint16_t)(in[12] & 0xFFu),
                                 (uint8_t)(in[12] >> 8)};
    uint32_t ticket = 0;
    for (uint32_t i = 0; i < sizeof near_; i++) { near_[i] = 0; }
    switch (in[0]) {
    case 1: ticket = dma_copy_1d(d, s, in[3]); break;
    case 2: ticket = dma_copy_2d(d, s, in[3], in[4], in[6], in[5]); break;
    case 3: ticket = dma_copy_3d(d, s, in[3], in[4], in[6], in[5], in[7], in[8] >> 16, in[8] & 0xFFFFu); break;
    default: ticket = dma_copy_pad(d, s, in[3], in[4], in[6], in[5], in[7], in[8] >> 16, in[8] & 0xFFFFu, &padding);
    }
    dma_wait(ticket);
}
"""


def driver_cases() -> list[tuple[int, DmaJob]]:
    """Forty random transfers of every mode."""
    generator = random.Random(11)
    cases = []
    for index in range(40):
        mode = index % 4 + 1
        top, bottom, left, right = (generator.randrange(4) if mode == 4 else 0 for _ in range(4))
        row_bytes, rows, planes = generator.randrange(1, 20), generator.randrange(1, 5), generator.randrange(1, 4)
        rows, planes = (rows if mode > 1 else 1), (planes if mode > 2 else 1)
        row_stride = left + row_bytes + right + generator.randrange(3)
        plane_stride = (top + rows + bottom) * row_stride + generator.randrange(5)
        cases.append(
            (
                mode,
                DmaJob(
                    generator.randrange(64),
                    generator.randrange(64),
                    row_bytes,
                    rows,
                    generator.randrange(24),
                    row_stride,
                    planes,
                    generator.randrange(64),
                    plane_stride,
                    generator.randrange(256) if mode == 4 else 0,
                    top,
                    bottom,
                    left,
                    right,
                ),
            )
        )
    return cases


def driver_inputs(cases: list[tuple[int, DmaJob]], far: bytes) -> list[dict[str, bytes]]:
    """What DRIVER_TEST reads for each case."""
    words = [
        (
            mode,
            t.source,
            t.destination,
            t.row_bytes,
            t.rows,
            t.source_row_stride,
            t.destination_row_stride,
            t.planes,
            t.destination_plane_stride << 16 | t.source_plane_stride,
            t.top,
            t.bottom,
            t.left,
            t.right | t.fill << 8,
        )
        for mode, t in cases
    ]
    return [{"in": struct.pack("<13I", *line), "far_": far} for line in words]


def test_the_driver_on_the_simulated_core(tmp_path: Path) -> None:
    elf = build(tmp_path, DRIVER_TEST + "int main(void) { for (;;) { READY(); run(); DONE(); } }")
    cases, far = driver_cases(), random.Random(1).randbytes(2048)
    runs = simulate(chip(elf, DMA), driver_inputs(cases, far), {"near_": 2048}).inferences
    for (_, t), run in zip(cases, runs, strict=True):
        assert run.outputs["near_"] == expected(bytes(2048), far, t)
        (activity,) = run.activities["dma"]
        assert activity.end - activity.start == transfer_cycles(t.width, t.height, t.planes)


def test_the_driver_on_the_host_does_the_same(tmp_path: Path) -> None:
    for name in (*RUNTIME, *DMA_DRIVER):
        (tmp_path / name).write_bytes(runtime_path(name).read_bytes())
    (tmp_path / "main.c").write_text('#include "dma.h"\n' + DRIVER_TEST)
    warnings = ("-O2", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
    try:
        library = compile_host(
            tmp_path,
            [Path("main.c"), Path("dma.c"), Path("dovetail_rt.c")],
            flags=warnings,
            defines={"DOVETAIL_HOST": None},
        )
    except BuildError as error:
        if "no C compiler" in error.what:
            pytest.skip(error.what)
        raise
    cases, far = driver_cases(), random.Random(2).randbytes(2048)
    result = simulate_host(library, "run", driver_inputs(cases, far), {"near_": 2048})
    for (_, t), run in zip(cases, result.inferences, strict=True):
        assert run.outputs["near_"] == expected(bytes(2048), far, t)
        assert run.instructions is None and run.total_cycles is None


def test_more_transfers_than_places_wait_their_turn(tmp_path: Path) -> None:
    elf = build(
        tmp_path,
        """
    uint8_t far_[10240], near_[10240];
    int main(void) {
        for (;;) {
            READY();
            uint32_t first = 0, last = 0;
            for (uint32_t i = 0; i < 40u; i++) {
                last = dma_copy_1d(near_ + 256u * i, far_ + 256u * i, 256u);
                if (i == 0u) { first = last; }
            }
            dma_wait(first);
            dma_wait(last);
            dma_wait(first);
            DONE();
        }
    }""",
    )
    far = random.Random(4).randbytes(10240)
    run = simulate(chip(elf, DMA), [{"far_": far}] * 2, {"near_": 10240}).inferences[1]
    assert run.outputs["near_"] == far
    bars: tuple[Activity, ...] = run.activities["dma"]
    assert len(bars) == 40
    assert all(late.start >= early.end for early, late in pairwise(bars))
