"""Gemmini: the model against what its authors' model leaves in memory, networks on it, and fences left out."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dovetail
from dovetail.compile import Options, compile_graph
from dovetail.errors import SimulationError
from dovetail.guests.ptq import Samples, Settings, prepare, quantise_network
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.arithmetic import Requantize, Rounding, fixed_point, multiplier_arrays
from dovetail.ir.types import Array, DType, TensorType
from dovetail.kernels import core_traits, turns
from dovetail.read import load_model
from dovetail.sim.device import MemoryBus, MemoryRegion, Taken
from dovetail.targets import load_target
from dovetail.targets.gemmini import lower
from dovetail.targets.gemmini.device import GemminiDevice
from dovetail.targets.gemmini.loops import expanded
from dovetail.targets.gemmini.machine import COMPUTE, CONFIG, MVIN, MVOUT, PRELOAD, GemminiMachine
from dovetail.targets.gemmini.nests import ADDED, local
from dovetail.targets.gemmini.rewrites import finer_sums
from firmware import require_chip, require_cross_compiler
from opencl_networks import run_equals_graph
from ptq_networks import digits
from test_matrices import TOKENS, WIDTH, block

SHARED = Path(__file__).resolve().parents[2] / "shared"
VECTORS = SHARED / "hardware" / "gemmini_vectors"
MODELS = SHARED / "models" / "mlperf_tiny"
DRAM = 0x80000000
INSTRUCTION = 0x7B


def test_the_authors_model_leaves_the_same_in_memory() -> None:
    """192 programs: moves, sums, products, pools and loops, arrays of 8, 16 and 32."""
    if not VECTORS.with_suffix(".npz").is_file():
        pytest.skip("the programs that were run through the authors' model are not here")
    rows, held = json.loads(VECTORS.with_suffix(".json").read_text()), np.load(VECTORS.with_suffix(".npz"))
    assert len(rows) == 192
    for number, row in enumerate(rows):
        bus = MemoryBus([MemoryRegion("dram", DRAM, 65536)])
        memory = bus.view(DRAM, 65536)
        memory[:] = held[f"memory_{row['memory']}"]
        expected = memory.copy()
        expected[held[f"places_{number}"]] = held[f"bytes_{number}"]
        dim = row["dim"]
        machine = GemminiMachine(bus, dim, (256 << 10) // dim, (64 << 10) // (4 * dim))
        for code in held[f"code_{number}"].tolist():
            for step in expanded(machine, *map(int, code)):
                machine.execute(*step)
        assert np.array_equal(memory, expected), (number, row)


def device() -> GemminiDevice:
    """A device over 4 KiB, told settings: rows of 16 bytes both ways."""
    made = GemminiDevice(MemoryBus([MemoryRegion("dram", DRAM, 4096)]))
    one = 0x3F800000
    ways = ((one << 32 | 1 << 16 | 4, 1 << 48), (one << 32 | 1 << 8 | 1, 16), (2, one << 32 | 16))
    for first, second in ways:
        made.instruct(CONFIG << 25 | INSTRUCTION, first, second, 0)
    return made


def told(made: GemminiDevice, funct: int, first: int, second: int, now: int = 0) -> int:
    """Give an instruction; the cycle the core goes on at."""
    return made.instruct(funct << 25 | INSTRUCTION, first, second, now).resumed


@pytest.mark.parametrize("fenced", [True, False])
def test_a_fence_that_is_missing(fenced: bool) -> None:
    """What was moved out is read behind a fence only; nor is it written over what is still read."""
    for order in ((MVOUT, MVIN), (MVIN, MVOUT)):
        made = device()
        told(made, order[0], DRAM, local(0, 16, 16))
        if fenced:
            made.fence(0)
            told(made, order[1], DRAM + 128, local(16, 16, 16))
            continue
        with pytest.raises(SimulationError, match="a move") as caught:
            told(made, order[1], DRAM + 128, local(16, 16, 16))
        assert "fence is missing" in caught.value.hint


def test_the_core_must_not_change_what_is_read() -> None:
    made = device()
    told(made, MVIN, DRAM, local(0, 4, 16))
    made.bus.view(DRAM + 20, 1)[:] += 1
    with pytest.raises(SimulationError, match="the core changed bytes"):
        made.fence(0)


def test_results_are_there_behind_the_fence() -> None:
    """And not before: a core that reads early reads what was there."""
    made = device()
    memory = made.bus.view(DRAM, 4096)
    memory[:256] = 1
    told(made, MVIN, DRAM, local(0, 16, 16))
    told(made, PRELOAD, local(0, 16, 16), local(1 << 31, 16, 16))
    told(made, COMPUTE, local(0, 16, 16), local(0xFFFFFFFF, 16, 16))
    told(made, MVOUT, DRAM + 1024, local(ADDED, 16, 16))
    assert set(memory[1024:1280].tolist()) == {0xA5}
    assert made.fence(0) > 16 + 16 + 16 + 3 * 40 - 40
    assert set(memory[1024:1280].tolist()) == {16}
    (job,) = made.activities()
    assert job.macs == 4096


def test_the_core_waits_for_room() -> None:
    """Eight moves in are held; the ninth stalls the core until the first has ended."""
    made = device()
    resumed = [told(made, MVIN, DRAM, local(16 * turn, 16, 16)) for turn in range(9)]
    assert resumed[:8] == [0] * 8 and resumed[8] == 16 + 40


@pytest.mark.parametrize(
    ("funct", "first", "second", "message"),
    [
        (CONFIG, 0, 0, "output-stationary"),
        (CONFIG, 3, 0, "normalisation"),
        (90, 0, 0, "no instruction with funct 90"),
        (MVIN, DRAM, local(16384, 4, 4), "rows up to 16387 of the scratchpad, which has 16384"),
    ],
)
def test_what_is_not_there_is_refused(funct: int, first: int, second: int, message: str) -> None:
    made = device()
    with pytest.raises(SimulationError, match=message):
        told(made, funct, first, second)


def quantised(path: Path, data: Array, folder: Path) -> Path:
    """A model with one scale for each layer, no zero points and integer ends."""
    graph = prepare(load_model(path), path.name)
    (name,) = graph.inputs
    kind = Samples({name: data}, None)
    made = quantise_network(graph, kind, load_target("gemmini"), Settings(integer_ends=True))
    out = folder / "one_scale.onnx"
    out.write_bytes(made.model.SerializeToString())
    return out


@pytest.mark.parametrize("dim", [4, 8, 16, 32])
def test_digits(dim: int, tmp_path: Path) -> None:
    """Arrays of all sizes, both policies: all multiply-accumulates on it, the integer graph's outputs."""
    require_chip()
    path, graph = digits(tmp_path)
    shape = graph.types[graph.inputs[0]].shape
    data = np.random.default_rng(3).normal(size=(16, *shape)).astype(np.float32)
    model = quantised(path, data, tmp_path)
    for policy in ("one scale", "exact"):
        build = dovetail.compile(model, "gemmini", policy=policy, settings={"gemmini.dim": dim})
        run = build.run()
        assert run.proof
        print(f"{dim}, {policy}: {run.cycles:,} cycles")


def test_a_network_without_fences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of no turns in place of each: the second layer reads what the first has not written yet."""
    require_chip()
    monkeypatch.setattr(lower, "FENCE", (7 << 16 | MVIN << 8 | 4, *(0,) * 6))
    path, graph = digits(tmp_path)
    data = np.random.default_rng(3).normal(size=(16, *graph.types[graph.inputs[0]].shape)).astype(np.float32)
    build = dovetail.compile(quantised(path, data, tmp_path), "gemmini")
    with pytest.raises(SimulationError, match="that a move out before it writes"):
        build.run()


def test_a_transformer_block(tmp_path: Path) -> None:
    """Its dense layers are the array's."""
    require_chip()
    (tmp_path / "block.onnx").write_bytes(block())
    data = np.random.default_rng(2).normal(size=(16, 1, TOKENS, WIDTH)).astype(np.float32)
    run = dovetail.compile(quantised(tmp_path / "block.onnx", data, tmp_path), "gemmini").run()
    assert run.proof
    print(f"{run.cycles:,} cycles")


def inputs_of(name: str) -> tuple[list[Array], list[Array]]:
    """Twelve inputs of a published network, and what TensorFlow Lite Micro makes of them."""
    path = MODELS / f"{name}_int8.many.npz"
    if not path.is_file():
        pytest.skip("the published networks are not here")
    held = np.load(path)
    return tuple([held[place.format(number)] for number in range(12)] for place in ("in_{}", "out_{}__tflm"))  # type: ignore[return-value]


def ran(build: dovetail.Build, inputs: Sequence[Array]) -> dovetail.Run:
    """A run of all inputs, compared with the integer graph."""
    (port,) = build.inputs
    run = build.run([{port.name: one.reshape(port.shape)} for one in inputs])
    assert run.proof
    return run


@pytest.mark.parametrize(
    ("name", "most"),
    [("ic_resnet8", 110_000), ("vww_mobilenetv1", 170_000), ("kws_dscnn", 90_000), ("ad_autoencoder", 110_000)],
)
def test_published_networks_with_one_scale(name: str, most: int, tmp_path: Path) -> None:
    """Quantised anew, all of it is the array's but the softmax."""
    require_chip()
    inputs, _ = inputs_of(name)
    build = dovetail.compile(quantised(MODELS / f"{name}_int8.tflite", np.stack(inputs), tmp_path), "gemmini")
    run = ran(build, inputs[:2])
    print(f"{name}: {run.cycles:,} cycles")
    assert run.cycles is not None and run.cycles <= most


@pytest.mark.parametrize(
    ("name", "most"),
    [("ic_resnet8", 1_000_000), ("vww_mobilenetv1", 1_300_000), ("kws_dscnn", 700_000), ("ad_autoencoder", 120_000)],
)
def test_published_networks_as_they_are(name: str, most: int) -> None:
    """With scales per channel the core multiplies, the array does the rest: TensorFlow Lite Micro's bits."""
    require_chip()
    inputs, expected = inputs_of(name)
    run = ran(dovetail.compile(MODELS / f"{name}_int8.tflite", "gemmini", policy="exact"), inputs)
    print(f"{name}: {run.cycles:,} cycles")
    assert run.cycles is not None and run.cycles <= most
    for found, wanted in zip(run.outputs, expected, strict=True):
        np.testing.assert_array_equal(next(iter(found.values())).reshape(-1), wanted.reshape(-1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1 << 30, (1 << 31) - 1), st.integers(-15, -1)), min_size=1, max_size=4),
    st.integers(-128, 126),
    st.integers(0, 1 << 32),
)
def test_two_steps_are_exact(numbers: list[tuple[int, int]], zero_point: int, seed: int) -> None:
    """Around every sum from which a result is one more, and elsewhere: both roundings of TensorFlow Lite."""
    multiplier, shift = (np.array(column, np.int64) for column in zip(*numbers, strict=True))
    first, offset, bits = finer_sums(shift, zero_point)
    steps = np.ldexp(np.arange(-300, 300)[:, None] - 0.5, 31 - shift) / multiplier
    sums = (np.floor(steps)[:, None] + np.arange(-2, 4)[:, None]).reshape(-1, len(shift)).astype(np.int64)
    sums = np.concatenate([sums, np.random.default_rng(seed).integers(-(1 << 20), 1 << 20, (200, len(shift)))])
    brought = np.clip(fixed_point(sums, multiplier, shift, Rounding.DOUBLE) + zero_point, zero_point, 127)
    fine = fixed_point(sums, multiplier, first, Rounding.DOWN)
    rounded = fixed_point(2 * fine + offset, *multiplier_arrays([2.0**-bits]), Rounding.FLOAT32)
    assert np.array_equal(np.clip(rounded, zero_point, 127), brought)


def test_products_in_wide_registers(tmp_path: Path) -> None:
    """What stays int32 on a 64-bit core: ties of either sign, and the ends of int32; shapes with rests."""
    require_cross_compiler("rv64gc")
    random = np.random.default_rng(8)
    for channels, rounding, least, most in ((5, Rounding.DOUBLE, -31, -1), (8, Rounding.DOWN, -31, 0)):
        builder, shape = GraphBuilder("sums"), (1, 9, 3, channels)
        numbers = random.integers(1 << 30, 1 << 31, channels), random.integers(least, most + 1, channels)
        names = [builder.constant(f"n{place}", one.astype(np.int32)) for place, one in enumerate(numbers)]
        x = builder.input("x", TensorType(shape, DType.INT32))
        graph = builder.finish([builder.add(Requantize(rounding), [x, *names], "y")])
        ties = np.ldexp(random.integers(-99, 99, shape) + 0.5, 31 - numbers[1]) / numbers[0]
        ends = random.choice([-(1 << 31), -1, 0, 1, (1 << 31) - 1], shape)
        inputs = [np.rint(np.clip(one, -(1 << 31), (1 << 31) - 1)).astype(np.int32) for one in (ties, ties + 1, ends)]
        target = load_target("riscv64")
        assert f"wide.requantize_{rounding.value}" in turns(graph, core_traits(target.core))
        made = compile_graph(graph, target, Options(), interpret=False)
        run_equals_graph(made, [{"x": one} for one in inputs], tmp_path / rounding.value, target)


class ReplayedDevice(GemminiDevice):
    """The device beside the authors' model, a shared library with `gemmini_reset(memory, base, size)` and
    `gemmini_instruction(funct, rs1, rs2)`, which prints nothing: every fence compares what both wrote."""

    def reset(self) -> None:
        super().reset()
        self._memory = self.bus.view(DRAM, self.bus.regions[0].size)
        self._shadow = np.empty_like(self._memory)
        self._library = ctypes.CDLL(os.environ["DOVETAIL_GEMMINI"])
        place = ctypes.c_void_p(self._shadow.ctypes.data)
        self._library.gemmini_reset(place, ctypes.c_uint64(DRAM), ctypes.c_uint64(self._memory.size))
        self._before = self._shadow
        self._fenced = True

    def instruct(self, word: int, first: int, second: int, now: int) -> Taken:
        if self._fenced:
            self._shadow[:] = self._memory
            self._before = self._memory.copy()
            self._fenced = False
        self._library.gemmini_instruction(ctypes.c_uint32(word >> 25), ctypes.c_uint64(first), ctypes.c_uint64(second))
        return super().instruct(word, first, second, now)

    def fence(self, now: int) -> int:
        if self._fenced:
            return super().fence(now)
        core = self._memory.copy()  # with what the core has written since
        over = super().fence(now)
        ours, theirs = (np.flatnonzero(a != b) for a, b in ((self._memory, core), (self._shadow, self._before)))
        same = np.array_equal(self._memory[theirs], self._shadow[theirs])
        if not same or not np.array_equal(self._memory[ours], self._shadow[ours]):
            hint = "one of the two models is wrong"
            raise SimulationError("memory is not as the authors' model leaves it", where="gemmini", hint=hint)
        self._fenced = True
        return over


@pytest.mark.parametrize("policy", ["one scale", "exact"])
@pytest.mark.parametrize("name", ["ic_resnet8", "vww_mobilenetv1", "kws_dscnn", "ad_autoencoder"])
def test_networks_replayed_on_the_authors_model(name: str, policy: str, tmp_path: Path) -> None:
    """Every byte of memory at every fence, as their functional model leaves it."""
    if not os.environ.get("DOVETAIL_GEMMINI"):
        pytest.skip("DOVETAIL_GEMMINI names no built copy of the authors' model")
    require_chip()
    inputs, _ = inputs_of(name)
    path = MODELS / f"{name}_int8.tflite"
    path = quantised(path, np.stack(inputs), tmp_path) if policy == "one scale" else path
    target = load_target("gemmini")
    (engine,) = target.engines
    assert engine.device is not None
    device = replace(engine.device, factory=f"{__file__}:ReplayedDevice")
    target = replace(target, engines=(replace(engine, device=device),))
    run = ran(dovetail.compile(path, target, policy=policy), inputs)
    taken = [one.activities["gemmini"] for one in run._result.simulation.inferences]
    issued = sum(int(job.label.split()[0]) for jobs in taken for job in jobs)
    print(f"{name}, {policy}: {len(inputs)} inputs, {issued:,} instructions equal")
