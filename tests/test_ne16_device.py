"""The NE16 model against the public model's vectors and against a plain numpy convolution."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dovetail.errors import SimulationError
from dovetail.sim.launch_queue import MOST_FINISHED
from dovetail.targets.ne16.device import ACQUIRE, FINISHED, RUNNING_JOB, SOFT_CLEAR, STATUS, TASK, TRIGGER, Ne16Device
from dovetail.targets.ne16.image import parse, walk_cycles
from dovetail.targets.ne16.job import (
    Ne16Job,
    Ne16Padding,
    Register,
    Requantise,
    job_cycles,
    layer_cycles,
    problem,
    registers,
)
from dovetail.targets.ne16.packing import pack_linear_weights, pack_weights
from ne16_oracle import ideal_macs_per_cycle, launches

HARDWARE = Path(__file__).resolve().parents[1].parent / "shared" / "hardware"
VECTORS, RTL = HARDWARE / "ne16_vectors.npz", HARDWARE / "ne16_rtl_cycles.json"
has_facts = pytest.mark.skipif(not RTL.exists(), reason=f"the shared facts ({RTL.name}) are not beside the repository")
L1 = 0x10000000
L1_SIZE = 0x80000


class OneMemory:
    """A bus with a single memory, filled with noise."""

    def __init__(self, seed: int = 0) -> None:
        self.memory = np.random.default_rng(seed).integers(0, 256, L1_SIZE).astype(np.uint8)
        self.free = 64

    def view(self, address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        start = address - L1
        if start < 0 or start + nbytes > L1_SIZE:
            raise SimulationError(f"no memory at {address:#x}")
        return self.memory[start : start + nbytes]

    def reserve(self, nbytes: int) -> int:
        """The address of `nbytes` bytes nobody uses, 4-byte aligned, with some distance to the others."""
        address = L1 + self.free
        self.free += (nbytes + 3) // 4 * 4 + 32
        return address

    def place(self, values: np.ndarray[Any, Any]) -> int:
        """Put an array somewhere and say where."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        address = self.reserve(raw.size)
        self.view(address, raw.size)[:] = raw
        return address


def run(device: Ne16Device, job: Ne16Job, now: int = 0) -> tuple[int, int]:
    """Run all launches of a job as the driver would; returns (cycles, launches)."""
    start = now
    count = 0
    for image in launches(job):
        assert device.read(ACQUIRE, now) < 256
        for index, word in enumerate(image):
            device.write(TASK + 4 * index, word, now)
        device.write(TRIGGER, 0, now)
        event = device.next_event()
        assert event is not None
        device.advance(event - 1)
        assert device.interrupt() == (count > 0)
        now = event
        device.advance(now)
        count += 1
    assert device.read(FINISHED, now) == min(count, MOST_FINISHED)
    assert not device.interrupt()
    return now - start, count


def load_output(bus: OneMemory, job: Ne16Job) -> np.ndarray[Any, Any]:
    """The outputs of a job, read pixel by pixel."""
    dtype = "<i4" if job.out_bits == 32 else ("u1" if job.requantise and job.requantise.relu else "i1")
    result = np.zeros((job.out_height, job.out_width, job.out_channels), dtype)
    for row in range(job.out_height):
        for column in range(job.out_width):
            address = job.outfeat + row * job.out_row_stride + column * job.out_pixel_stride
            raw = bus.view(address, job.out_channels * job.out_bits // 8)
            result[row, column] = np.frombuffer(raw.tobytes(), dtype)
    return result


def store_pixels(bus: OneMemory, pixels: np.ndarray[Any, Any], address: int, pixel: int, row: int) -> None:
    """Write an HWC image with the given strides in bytes."""
    for i in range(pixels.shape[0]):
        for j in range(pixels.shape[1]):
            raw = np.ascontiguousarray(pixels[i, j]).view(np.uint8)
            bus.view(address + i * row + j * pixel, raw.size)[:] = raw


def reference(
    job: Ne16Job,
    image: np.ndarray[Any, Any],
    weights: np.ndarray[Any, Any],
    before: np.ndarray[Any, Any] | None,
    scale: np.ndarray[Any, Any],
    bias: np.ndarray[Any, Any],
    shift: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """The definition, output by output, in Python integers; `weights` are (C_out, kh, kw, C_in or 1)."""
    result = np.zeros((job.out_height, job.out_width, job.out_channels), np.int64)
    edges = ((job.padding.top, job.padding.bottom), (job.padding.left, job.padding.right), (0, 0))
    padded = np.pad(image.astype(np.int64), edges, constant_values=job.padding_value)
    wide = weights.astype(np.int64)
    if job.weight_offset is not None:
        wide = wide + (1 << (job.weight_bits - 1)) + job.weight_offset
    for row, column, channel in np.ndindex(result.shape):
        top, left = row * job.stride, column * job.stride
        patch = padded[top : top + job.kernel, left : left + job.kernel]
        patch = patch[..., channel : channel + 1] if job.depthwise else patch
        value = int((patch * wide[channel]).sum())
        value += 0 if before is None else int(before[row, column, channel])
        value = (value + 2**31) % 2**32 - 2**31
        if job.requantise is not None:
            value *= int(scale[channel])
            width = 32 if job.requantise.bias else 48
            value += int(bias[channel]) if job.requantise.bias else 0
            value = (value + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
            value >>= int(shift[channel])
            low = 0 if job.requantise.relu else -(1 << (job.out_bits - 1))
            value = max(low, min(value, low + (1 << job.out_bits) - 1))
        result[row, column, channel] = value
    return result


@has_facts
def test_the_thirty_public_jobs_are_exact() -> None:
    """Outputs are the public model's, cycles the RTL's."""
    table = ["job  kernel dw stride bits  RTL     device  closed  outputs"]
    good, measured = True, json.loads(RTL.read_text())["vectors"]["rtl_cycles"]
    with np.load(VECTORS) as vectors:
        for index, config in enumerate(json.loads(str(vectors["configs"]))):
            bus = OneMemory(index)
            job, expected = vector_job(bus, vectors, index, config)
            cycles, count = run(Ne16Device(bus), job)
            exact = np.array_equal(load_output(bus, job), expected)
            good &= exact and measured[str(index)] == cycles == job_cycles(job) and count == config["jobs"]
            table.append(
                f"{index:3}  {job.kernel:6} {job.depthwise:2} {job.stride:6} {job.weight_bits:4}  "
                f"{measured[str(index)]:6}  {cycles:6}  {job_cycles(job):6}  {'exact' if exact else 'WRONG'}"
            )
    assert good and len(table) == 31, "\n".join(table)


def measured_job(found: dict[str, Any]) -> Ne16Job:
    """A job of the file of cycles."""
    quant = found["requantise"]
    given = {"padding": Ne16Padding(*found["padding"]), "requantise": quant and Requantise(**quant)}
    return Ne16Job(**{**found, **given})


@has_facts
def test_cycles_are_those_of_the_rtl() -> None:
    """Both formulas equal what was measured, on every job; printed with -s."""
    jobs = json.loads(RTL.read_text())["jobs"]
    wrong = []
    for index, found in enumerate(jobs):
        closed = job_cycles(measured_job(found["job"]))
        walked = sum(walk_cycles(parse(tuple(words))) for words in found["launches"])
        if not closed == walked == found["rtl_cycles"]:
            wrong.append(f"job {index} ({found['kind']}): RTL {found['rtl_cycles']}, {closed} closed, {walked} walked")
    print(f"{len(jobs) - len(wrong)} of {len(jobs)} jobs take the RTL's cycles")
    assert len(jobs) == 339 and not wrong, "\n".join(wrong)


@has_facts
def test_a_cycle_more_in_any_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every constant of the formula matters to some job that was measured, but for stream-in, which none has."""
    jobs = [(measured_job(found["job"]), found["rtl_cycles"]) for found in json.loads(RTL.read_text())["jobs"]]
    formula = sys.modules["dovetail.targets.ne16.job"]
    names = [name for name in vars(formula) if name.isupper() and name.startswith("_") and "MASK" not in name]
    assert len(names) == 13
    for name in set(names) - {"_STREAMED_IN", "_STREAMIN"}:
        with monkeypatch.context() as changed:
            changed.setattr(formula, name, getattr(formula, name) + 1)
            assert any(job_cycles(job) != cycles for job, cycles in jobs), name


def vector_job(
    bus: OneMemory, vectors: Any, index: int, config: dict[str, Any]
) -> tuple[Ne16Job, np.ndarray[Any, Any]]:
    """One job of the vectors with its operands in memory, and its outputs."""
    image, expected = vectors[f"{index}/x"], vectors[f"{index}/y"]
    scales = vectors[f"{index}/scale"].astype(np.uint8 if config["scale_bits"] == 8 else "<u4")
    height, width, channels = image.shape
    out_height, out_width, out_channels = expected.shape
    job = Ne16Job(
        height,
        width,
        channels,
        out_height,
        out_width,
        out_channels,
        channels,
        width * channels,
        out_channels,
        out_width * out_channels,
        kernel=config["kernel"],
        depthwise=config["depthwise"],
        stride=config["stride"],
        padding=Ne16Padding(*config["pad_tblr"]),
        weight_bits=config["weight_bits"],
        out_bits=8,
        requantise=Requantise(config["scale_bits"], config["bias"], config["relu"], config["shift"]),
        infeat=bus.place(image),
        weights=bus.place(vectors[f"{index}/w_packed"]),
        outfeat=bus.reserve(expected.nbytes),
        scale=bus.place(scales),
        scale_bias=bus.place(vectors[f"{index}/bias"].astype("<i4")) if config["bias"] else 0,
    )
    return job, expected


@st.composite
def jobs(draw: st.DrawFn, strides: tuple[int, ...] = (1, 1, 2)) -> Ne16Job:
    """A job the engine can do, pointers left at zero."""
    stride = draw(st.sampled_from(strides))
    kinds = ("3x3", "1x1", "depthwise") if stride == 2 else ("3x3", "3x3", "1x1", "depthwise", "linear")
    kind = draw(st.sampled_from(kinds))
    kernel, sides, sizes = (3 if kind in ("3x3", "depthwise") else 1), st.sampled_from((0, 1, 1, 2)), st.integers(1, 9)
    padding = Ne16Padding(draw(sides), draw(sides), draw(sides), draw(sides)) if kernel == 3 else Ne16Padding()
    out_height, out_width, out_channels = draw(sizes), draw(sizes), draw(st.integers(1, 40))
    in_channels = out_channels if kind == "depthwise" else draw(st.integers(1, 40))
    if kind == "linear":
        out_height, out_width, in_channels = 1, 1, 16 * draw(st.integers(1, 36))
    spare = draw(st.integers(0, 1))
    height = max(1, (out_height - 1) * stride + kernel - padding.top - padding.bottom + spare)
    width = max(1, (out_width - 1) * stride + kernel - padding.left - padding.right + spare)
    shifts = st.none() | st.integers(0, 31)
    quant = draw(st.none() | st.builds(Requantise, st.sampled_from((8, 32)), st.booleans(), st.booleans(), shifts))
    out_bits = 32 if quant is None else draw(st.sampled_from((8, 8, 32)))
    pixel_in = in_channels + draw(st.integers(0, 3))
    pixel_out = out_channels * out_bits // 8 + draw(st.integers(0, 3))
    pixel_out += pixel_out % stride
    job = Ne16Job(
        height,
        width,
        in_channels,
        out_height,
        out_width,
        out_channels,
        pixel_in,
        width * pixel_in + draw(st.integers(0, 5)),
        pixel_out,
        out_width * pixel_out + 2 * draw(st.integers(0, 2)),
        kernel=kernel,
        depthwise=kind == "depthwise",
        linear=kind == "linear",
        stride=stride,
        padding=padding,
        padding_value=draw(st.sampled_from((0, 77, 255))),
        weight_bits=draw(st.integers(2, 8)),
        weight_offset=draw(st.none() | st.integers(-256, 255)),
        requantise=quant,
        out_bits=out_bits,
        stream_in=draw(st.booleans()),
    )
    for change in ({}, {"stream_in": False}, {"padding_value": 0}, {"stream_in": False, "padding_value": 0}):
        if problem(replace(job, **change)) == "":
            return replace(job, **change)
    assume(False)
    return job


def place_operands(bus: OneMemory, job: Ne16Job, seed: int) -> tuple[Ne16Job, np.ndarray[Any, Any]]:
    """The job with random operands in memory, and the outputs the definition gives."""
    random = np.random.default_rng(seed)
    image = random.integers(0, 256, (job.in_height, job.in_width, job.in_channels)).astype(np.uint8)
    half = 1 << (job.weight_bits - 1)
    inputs = 1 if job.depthwise else job.in_channels
    weights = random.integers(-half, half, (job.out_channels, job.kernel, job.kernel, inputs)).astype(np.int8)
    packed = (
        pack_linear_weights(weights.reshape(job.out_channels, -1), job.weight_bits)
        if job.linear
        else pack_weights(weights, job.weight_bits, job.depthwise)
    )
    scale_bits = job.requantise.scale_bits if job.requantise else 8
    scale = random.integers(0, 1 << int(random.integers(1, scale_bits + 1)), job.out_channels)
    bias = random.integers(-(2**31), 2**31, job.out_channels)
    shift = random.integers(0, 32, job.out_channels)
    before = random.integers(-(2**31), 2**31, (job.out_height, job.out_width, job.out_channels)).astype("<i4")
    placed = replace(
        job,
        infeat=bus.reserve(job.in_height * job.in_row_stride),
        weights=bus.place(packed),
        outfeat=bus.reserve(job.out_height * job.out_row_stride),
        scale=bus.place(scale.astype(np.uint8 if scale_bits == 8 else "<u4")),
        scale_shift=bus.place(shift.astype(np.uint8)),
        scale_bias=bus.place(bias.astype("<i4")),
    )
    store_pixels(bus, image, placed.infeat, job.in_pixel_stride, job.in_row_stride)
    if job.stream_in:
        store_pixels(bus, before, placed.outfeat, job.out_pixel_stride, job.out_row_stride)
    if job.requantise and job.requantise.shift is not None:
        shift = np.full(job.out_channels, job.requantise.shift)
    return placed, reference(job, image, weights, before if job.stream_in else None, scale, bias, shift)


def outputs_only_changed(before: np.ndarray[Any, Any], bus: OneMemory, job: Ne16Job) -> bool:
    """Whether nothing but the bytes of the outputs differs from `before`."""
    mask = np.ones(L1_SIZE, bool)
    for row in range(job.out_height):
        for column in range(job.out_width):
            start = job.outfeat - L1 + row * job.out_row_stride + column * job.out_pixel_stride
            mask[start : start + job.out_channels * job.out_bits // 8] = False
    return bool((before == bus.memory)[mask].all())


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(jobs(), st.integers(0, 2**32 - 1))
def test_random_jobs_match_the_definition_and_the_closed_form(job: Ne16Job, seed: int) -> None:
    bus = OneMemory(1)
    job, expected = place_operands(bus, job, seed)
    before = bus.memory.copy()
    device = Ne16Device(bus)
    cycles, count = run(device, job, now=1000)
    bits = 32 if job.out_bits == 32 else 8
    assert np.array_equal(load_output(bus, job).astype(np.int64) & ((1 << bits) - 1), expected & ((1 << bits) - 1))
    assert outputs_only_changed(before, bus, job)
    assert cycles == job_cycles(job)
    assert len(device.activities()) == count
    macs = sum(activity.macs for activity in device.activities())
    assert macs >= job.macs and (macs == job.macs or job.stride == 2)
    assert job.macs / cycles < ideal_macs_per_cycle(job)


def test_closed_form_takes_arrays() -> None:
    heights, channels = np.arange(1, 20)[:, None], np.array([3, 16, 17, 64])
    for stride, kernel, bits in ((1, 3, 8), (2, 3, 8), (1, 1, 32), (2, 1, 8)):
        table = layer_cycles(heights, heights, channels, channels, stride=stride, kernel=kernel, out_bits=bits)
        for i, j in ((0, 0), (1, 1), (6, 2), (18, 3)):
            out, depth = int(heights[i, 0]), int(channels[j])
            size = (out - 1) * stride + kernel
            job = Ne16Job(
                size,
                size,
                depth,
                out,
                out,
                depth,
                depth,
                depth * size,
                8 * depth,
                8 * depth * out,
                kernel=kernel,
                stride=stride,
                requantise=Requantise(),
                out_bits=bits,
            )
            assert table[i, j] == job_cycles(job)


def small_job(bus: OneMemory, seed: int = 0, size: int = 3) -> tuple[Ne16Job, np.ndarray[Any, Any]]:
    """A one-subtile-high 3x3 convolution with operands in memory."""
    job = Ne16Job(
        size + 2,
        size + 2,
        16,
        size,
        size,
        32,
        16,
        16 * (size + 2),
        32,
        32 * size,
        kernel=3,
        requantise=Requantise(shift=12),
        out_bits=8,
    )
    return place_operands(bus, job, seed)


def submit(device: Ne16Device, job: Ne16Job, now: int) -> int:
    """Acquire, program and trigger one launch; its id."""
    identity = device.read(ACQUIRE, now)
    for index, word in enumerate(registers(job)):
        device.write(TASK + 4 * index, word, now)
        assert device.read(TASK + 4 * index, now) == word
    device.write(TRIGGER, 0, now)
    return identity


def test_two_contexts_queue_and_interrupt() -> None:
    bus = OneMemory()
    (first, first_out), (second, second_out), (third, third_out) = (small_job(bus, seed) for seed in range(3))
    device = Ne16Device(bus)
    assert device.next_event() is None and device.read(STATUS, 0) == 0
    assert submit(device, first, 100) == 0
    assert (device.read(STATUS, 100), device.read(RUNNING_JOB, 100)) == (0x001, 0)
    assert submit(device, second, 110) == 1
    assert device.read(STATUS, 110) == 0x101
    assert device.read(ACQUIRE, 120) == 0xFFFFFFFF
    ends = [100 + count * job_cycles(first) for count in range(4)]
    assert device.next_event() == ends[1]
    device.advance(ends[1] - 1)
    assert not device.interrupt() and not np.array_equal(load_output(bus, first), first_out.astype(np.uint8))
    device.advance(ends[1])
    assert device.interrupt() and np.array_equal(load_output(bus, first), first_out.astype(np.uint8))
    assert (device.read(STATUS, ends[1]), device.read(RUNNING_JOB, ends[1])) == (0x100, 0)
    assert device.read(RUNNING_JOB, ends[1] + 2) == 1 and device.next_event() == ends[2]
    assert submit(device, third, ends[1] + 9) == 2
    assert device.interrupt()
    assert device.read(FINISHED, ends[1] + 9) == 1 and not device.interrupt() and not device.read(FINISHED, ends[1] + 9)
    assert device.read(STATUS, ends[1] + 9) == 0x101
    device.advance(10_000)
    assert device.read(FINISHED, 10_000) == 2
    assert np.array_equal(load_output(bus, second), second_out.astype(np.uint8))
    assert np.array_equal(load_output(bus, third), third_out.astype(np.uint8))
    assert [(bar.start, bar.end) for bar in device.activities()] == list(pairwise(ends))
    assert submit(device, first, 20_000) == 3
    assert device.next_event() == 20_000 + job_cycles(first)
    assert device.read(ACQUIRE, 20_000) == 4 and device.read(ACQUIRE, 20_000) == 0xFFFFFFFE
    device.write(SOFT_CLEAR, 0, 20_001)
    assert device.next_event() is None and device.read(STATUS, 20_001) == 0 and device.read(ACQUIRE, 20_001) == 0
    device.reset()
    assert device.activities() == []


def patched(job: Ne16Job, changes: dict[int, Callable[[int], int]]) -> list[int]:
    """The registers of a job with some changed."""
    return [changes[index](word) if index in changes else word for index, word in enumerate(registers(job))]


@pytest.mark.parametrize(
    ("register", "change", "message"),
    [
        (23, lambda word: word | 3 << 5, "reserved"),
        (23, lambda word: word | 1 << 3, "16-bit inputs"),
        (23, lambda word: word | 1 << 11, "rounding"),
        (23, lambda word: word | 1 << 21, "16 bits"),
        (23, lambda word: word & ~(1 << 4), "written as 32 bits"),
        (23, lambda word: word | 1 << 14, "stream-in"),
        (23, lambda word: word | 1 << 8, "stride 2"),
        (23, lambda word: word & ~7, "1 bit"),
        (22, lambda word: 1, "masking"),
        (20, lambda word: 3 << 28, "padding is above 2"),
        (20, lambda word: 2 << 20 | 7, "last subtile but one"),
        (19, lambda word: 0, "zero"),
        (16, lambda word: 4 << 16 | 1, "above 3"),
        (15, lambda word: 32 << 16 | 17, "above 16"),
        (12, lambda word: word + 1, "weight strides"),
        (21, lambda word: 256, "offset 256 is outside -256..255"),
        (21, lambda word: -257 & 0xFFFFFFFF, "offset -257 is outside"),
    ],
)
def test_illegal_configurations_are_named(register: int, change: Callable[[int], int], message: str) -> None:
    bus = OneMemory()
    job, _ = small_job(bus, size=4)
    changes = {register: change}
    if "last subtile" in message:
        changes[17] = lambda word: 1 << 16 | 3
    device = Ne16Device(bus)
    device.read(ACQUIRE, 0)
    for index, word in enumerate(patched(job, changes)):
        device.write(TASK + 4 * index, word, 0)
    with pytest.raises(SimulationError, match=message):
        device.write(TRIGGER, 0, 0)


def test_a_context_that_was_never_written_is_named() -> None:
    """The second job takes the second context, whose registers are not those of the first."""
    bus = OneMemory()
    job, _ = small_job(bus, size=4)
    device = Ne16Device(bus)
    submit(device, job, 0)
    device.read(ACQUIRE, 0)
    device.write(TASK, 0, 0)
    with pytest.raises(SimulationError, match="23 of the 24 job registers of context 1 were never written"):
        device.write(TRIGGER, 0, 0)


def test_misuse_and_bad_addresses_are_named() -> None:
    bus = OneMemory()
    job, _ = small_job(bus)
    device = Ne16Device(bus)
    with pytest.raises(SimulationError, match="before a job is acquired"):
        device.write(TRIGGER, 0, 0)
    with pytest.raises(SimulationError, match="before a job is acquired"):
        device.write(TASK, 0, 0)
    for offset in (0x18, 0x80, 0x21, 0x100):
        with pytest.raises(SimulationError, match="no register at offset"):
            device.read(offset, 0)
    submit(device, replace(job, outfeat=L1 + L1_SIZE - 8), 0)
    with pytest.raises(SimulationError, match="no memory"):
        device.advance(1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": 5}, "kernel is 5"),
        ({"stride": 3}, "stride is 3"),
        ({"weight_bits": 1}, "1 bits"),
        ({"out_bits": 16}, "16 bits"),
        ({"depthwise": True}, "as many output"),
        ({"padding": Ne16Padding(3, 0, 0, 0)}, "0 to 2"),
        ({"out_height": 4}, "more input pixels"),
        ({"stream_in": True}, "32-bit outputs"),
        ({"requantise": None}, "32 bits"),
        ({"requantise": Requantise(shift=32)}, "0 to 31"),
        ({"out_height": 4, "padding": Ne16Padding(0, 1, 0, 0), "padding_value": 9}, "multiple of 3"),
        ({"out_height": 4, "in_height": 4, "padding": Ne16Padding(0, 2, 0, 0)}, "beyond the last subtile"),
        ({"stride": 2, "out_height": 1, "out_width": 1, "out_pixel_stride": 33}, "even output pixel stride"),
        ({"weight_offset": -257}, "offset -257 is outside -256..255"),
        ({"weight_offset": 256}, "offset 256 is outside"),
    ],
)
def test_jobs_the_engine_cannot_do_are_named(change: dict[str, Any], message: str) -> None:
    job, _ = small_job(OneMemory())
    assert problem(job) == ""
    assert message in problem(replace(job, **change))
    with pytest.raises(ValueError, match=message):
        registers(replace(job, **change))


def test_linear_mode_has_no_padding_value() -> None:
    """The RTL's idle columns give the padding value instead of 0, and linear mode adds four columns."""
    bus = OneMemory()
    job, _ = place_operands(bus, Ne16Job(1, 1, 64, 1, 1, 8, 64, 64, 32, 32, kernel=1, linear=True), 0)
    assert problem(job) == "" and "padding value of 0" in problem(replace(job, padding_value=3))
    device = Ne16Device(bus)
    device.read(ACQUIRE, 0)
    for index, word in enumerate(patched(job, {Register.PADDING: lambda word: word | 3})):
        device.write(TASK + 4 * index, word, 0)
    with pytest.raises(SimulationError, match="idle columns"):
        device.write(TRIGGER, 0, 0)
