"""Engines that take lists of commands: random networks on the device of kestrel, missing waits, memories out of reach,
and what published networks take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Compiled, Options, compile_graph, compile_model, sample_inputs
from dovetail.errors import PlanError, ProgramError, SimulationError, TargetError
from dovetail.guests.check.vectors import read_vectors, write_vectors
from dovetail.guests.report.detail import detail, trace_text
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.operators.arithmetic import Lookup
from dovetail.ir.types import Array
from dovetail.legalize import adapt
from dovetail.program.interpret import ProgramInterpreter
from dovetail.program.ir import Begin, Call, Copy, LaunchStatement, Role, Wait, lists, stream_of
from dovetail.program.verify import verify
from dovetail.report import make_report
from dovetail.run import open_build, run_build
from dovetail.schedule.tiles import tiling
from dovetail.sim.command_list import LIST, WORDS
from dovetail.sim.device import DeviceSpec, MemoryBus, MemoryRegion, make_device
from dovetail.sim.launch_queue import QueueDevice
from dovetail.target import CommandSet, Dma, Match, Offload, Target
from dovetail.target.registry import _check_names
from dovetail.targets import load_target
from test_plan import Network, random_network

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny"


def machine(kib: int = 64) -> Target:
    """kestrel with another size of its own memory."""
    target = load_target("kestrel")
    memories = tuple(replace(m, size=kib * 1024) if m.name == "sram" else m for m in target.memories)
    return replace(target, memories=memories)


def compiled(graph: Graph, kib: int) -> Compiled:
    """The network on kestrel: adapted, planned, verified and interpreted."""
    target = machine(kib)
    return compile_graph(adapt(graph, target.policies[0]), target, Options())


def on_device(made: Compiled, inputs: dict[str, Array], words: Sequence[Sequence[int]] | None = None) -> list[Array]:
    """The outputs when the device carries out the lists, or others of these words, and numpy what the core does."""
    program, unit, target = made.plan.program, made.unit, made.unit.target
    numbers = ProgramInterpreter(program, target)
    for memory in numbers.memories.values():
        memory[:] = 0xA5
    bus = MemoryBus([MemoryRegion(m.name, m.base, m.size) for m in target.memories])
    for name in bus.arrays:
        bus.arrays[name][:] = numbers.memories[name]
        numbers.memories[name] = bus.arrays[name]
    base, held = unit.fixed_constants
    if held.size:
        bus.view(base, held.size)[:] = held
    model = target.engines[0].device
    assert model is not None
    device = make_device(DeviceSpec(model.factory, model.base, model.size, model.arguments), bus)
    for name, view in program.inputs.items():
        numbers.write(view, inputs[name])
    now = 0
    for index, statement in enumerate(program.statements):
        if stream_of(statement):
            for number, one in enumerate(unit.lists):
                if one.statements[0] == index:
                    own = np.array(words[number] if words else one.words, "<u4")
                    start = target.memory("flash").base
                    bus.view(start, own.nbytes)[:] = own.view(np.uint8)
                    for offset, value in ((LIST, start), (WORDS, own.size), (QueueDevice.START, 1)):
                        device.write(offset, value, now)
                    now = device.next_event() or now
                    device.advance(now)
            continue
        numbers.step(index, statement)
    return [numbers.read(view) for view in program.outputs.values()]


@pytest.mark.parametrize("kib", [6, 12, 64])
@pytest.mark.parametrize("seed", range(12))
def test_random_networks_on_the_device(seed: int, kib: int) -> None:
    graph = random_network(seed)
    try:
        made = compiled(graph, kib)
    except PlanError as error:
        assert kib < 64
        pytest.skip(f"does not fit: {error.what}")
    inputs = sample_inputs(made.graph, seed)
    expected = evaluate(made.graph, inputs)
    names = list(made.plan.program.outputs)
    for name, actual in zip(names, on_device(made, inputs), strict=True):
        assert np.array_equal(actual, expected[name])


def variant(name: str) -> Target:
    """Other machines with lists: constants copied into the engine's memory, or into RAM; operands in RAM and no DMA; a
    DMA of the target's in place of the engine's own."""
    target = machine(24)
    engine, open_to_all = target.engines[0], tuple(replace(m, reach=()) for m in target.memories)
    if name == "constants in its memory":
        return replace(target, engines=(replace(engine, constants="sram"),))
    if name == "constants in RAM":
        return replace(target, engines=(replace(engine, constants="ram"),), memories=open_to_all)
    if name == "operands in RAM":
        return replace(target, engines=(replace(engine, memory="ram", dma=None),), memories=open_to_all)
    dma = Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000)
    return replace(target, engines=(replace(engine, dma=None),), memories=open_to_all, dma=dma)


@pytest.mark.parametrize(
    "name", ["constants in its memory", "constants in RAM", "operands in RAM", "a DMA for everybody"]
)
@pytest.mark.parametrize("seed", [0, 2, 5, 9])
def test_other_machines_with_lists(seed: int, name: str) -> None:
    target = variant(name)
    _check_names(target, name)
    try:
        made = compile_graph(adapt(random_network(seed), target.policies[0]), target, Options())
    except PlanError as error:
        pytest.skip(f"does not fit: {error.what}")
    inputs = sample_inputs(made.graph, seed)
    expected = evaluate(made.graph, inputs)
    for output, actual in zip(made.plan.program.outputs, on_device(made, inputs), strict=True):
        assert np.array_equal(actual, expected[output])
    assert "kestrel_start" in made.project.files[f"src/{made.unit.model}.c"]


def with_a_table() -> Graph:
    """Two convolutions with a look-up between them, which only the core has."""
    network = Network(3)
    network.convolution(3, 1, depthwise=False)
    table = network.builder.constant("table", np.arange(-128, 128).astype(np.int8)[::-1].copy())
    network.value = network.builder.add(Lookup(), [network.value, table])
    network.convolution(1, 1, depthwise=False)
    return network.finish()


def test_the_core_comes_in_between_two_lists() -> None:
    made = compiled(with_a_table(), 64)
    program = made.plan.program
    assert len(made.unit.lists) == 2
    inputs = sample_inputs(made.graph)
    expected = evaluate(made.graph, inputs)
    for name, actual in zip(program.outputs, on_device(made, inputs), strict=True):
        assert np.array_equal(actual, expected[name])
    core = [index for index, one in enumerate(program.statements) if isinstance(one, Call)]
    waits = [i for i, one in enumerate(program.statements) if isinstance(one, Wait) and not one.stream]
    assert waits[0] < core[0] and len(waits) == 2
    without = [*program.statements]
    without[waits[0]] = Begin(without[waits[0]].layer)
    with pytest.raises(ProgramError, match="a wait is missing"):
        verify(replace(program, statements=tuple(without)), made.unit.target)


@pytest.mark.parametrize("name", ["tiles", "table"])
def test_this_computer_carries_lists_out_too(name: str, tmp_path: Path) -> None:
    made = compiled(random_network(4), 12) if name == "tiles" else compiled(with_a_table(), 64)
    write_project(made.project, tmp_path / "build")
    inputs = sample_inputs(made.graph, 7)
    result = run_build(open_build(tmp_path / "build", made.unit.target), "host", [inputs])
    expected = evaluate(made.graph, inputs)
    assert all(np.array_equal(array, expected[output]) for output, array in result.outputs[0].items())


def test_slow_functions_are_asked_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each shape once, none of which the copies alone take too long; at most so many, and that is told."""
    target = machine(12)
    asked: list[tuple[str, tuple[int, ...]]] = []

    def counted(offload: Offload) -> Offload:
        def cycles(match: Match) -> int:
            asked.append((match.root, match.result.shape))
            return offload.cycles(match)

        return replace(offload, cycles=cycles)

    engine = replace(target.engines[0], offloads=tuple(map(counted, target.engines[0].offloads)))
    slow = replace(target, engines=(engine,))
    graph = adapt(random_network(4), target.policies[0])
    compile_graph(graph, slow, Options(), interpret=False)
    assert len(set(asked)) > len(asked) / 2, "beside each shape once, the report asks for each launch"
    monkeypatch.setattr(tiling, "MOST_ASKED", 3)
    told: list[str] = []
    compile_graph(graph, slow, Options(), told.append, interpret=False)
    assert any("3 sizes tried, the best of them is taken" in text for text in told)


def test_commands_that_cannot_be_are_refused() -> None:
    commands = CommandSet({"COPY": ("source", "target"), "RUN": ()})
    words = [*commands.words("COPY", source=4, target=-8), *commands.words("RUN"), *commands.words("WAIT", **_WAIT)]
    assert words == [1, 4, 0xFFFFFFF8, 2, 3, 1, 0]
    decoded = list(commands.decode(words, "x"))
    assert decoded == [("COPY", {"source": 4, "target": 0xFFFFFFF8}), ("RUN", {}), ("WAIT", _WAIT)]
    for wrong, message in (([7], "which is no command"), ([1, 4], "ends within COPY")):
        with pytest.raises(SimulationError, match=message) as caught:
            list(commands.decode(wrong, "x"))
        assert caught.value.hint
    with pytest.raises(TargetError, match="no such command"):
        commands.words("JUMP")
    with pytest.raises(TargetError, match="other registers"):
        commands.words("COPY", source=1)


_WAIT = {"unit": 1, "unfinished": 0}


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_every_wait_is_needed_and_seen_when_it_is_missing(seed: int) -> None:
    """By `verify`, which knows nothing of how waits came there."""
    made = compiled(random_network(seed), 24)
    program = made.plan.program
    following = [*program.statements[1:], Begin(0)]
    pairs = enumerate(zip(program.statements, following, strict=True))
    # those between two layers may be there so that the layers share memory
    waits = [i for i, (one, after) in pairs if isinstance(one, Wait) and not isinstance(after, Begin | Wait)]
    assert len(waits) > 3
    for index in waits[:: max(1, len(waits) // 20)]:
        without = [*program.statements]
        without[index] = Begin(without[index].layer)
        with pytest.raises(ProgramError, match=r"a wait is missing|may still run"):
            verify(replace(program, statements=tuple(without)), made.unit.target)


def test_the_device_finds_missing_waits() -> None:
    """A list without one of its waits is refused by the device, gives another result, or is that wait not needed for
    want of time: most are."""
    made = compiled(random_network(4), 12)
    inputs = sample_inputs(made.graph)
    right = on_device(made, inputs)
    ending = list(load_target("kestrel").engines[0].stream.wait("kestrel", 0))[:1]  # type: ignore[union-attr]
    found = tried = 0
    (one,) = made.unit.lists
    for place in [i for i in range(len(one.words) - 2) if [one.words[i]] == ending and _is_command(one.words, i)]:
        words = (*one.words[:place], *one.words[place + 3 :])
        tried += 1
        try:
            found += any(not np.array_equal(a, b) for a, b in zip(on_device(made, inputs, [words]), right, strict=True))
        except SimulationError as error:
            assert "wait is missing" in error.hint
            found += 1
    assert tried >= 4 and found >= tried / 2, (found, tried)


def _is_command(words: Sequence[int], place: int) -> bool:
    """Whether a command begins at a place of a list."""
    from dovetail.targets.kestrel import COMMANDS

    sizes = [1 + len(fields) for fields in (*COMMANDS.names.values(), ("unit", "unfinished"))]
    at = 0
    while at < place:
        at += sizes[words[at] - 1]
    return at == place


@pytest.mark.parametrize("fault", ["weights", "window", "multiplier", "source_stride"])
def test_a_fault_in_the_words_changes_the_outputs(fault: str) -> None:
    """What the comparison above would not see would be worth nothing."""
    made = compiled(random_network(4), 12)
    inputs = sample_inputs(made.graph)
    right = on_device(made, inputs)
    from dovetail.targets.kestrel import COMMANDS

    names = {"weights": "weights", "window": "top", "multiplier": "parameters", "source_stride": "source_stride"}
    words, at = list(made.unit.lists[0].words), 0
    known = [*COMMANDS.names.values(), ("unit", "unfinished")]
    while at < len(words):
        fields = known[words[at] - 1]
        if names[fault] in fields:
            place = at + 1 + fields.index(names[fault])
            words[place] += 16 if fault != "window" else 1
        at += 1 + len(fields)
    try:
        actual = on_device(made, inputs, [words])
    except SimulationError:
        return
    assert any(not np.array_equal(a, b) for a, b in zip(actual, right, strict=True))


def test_core_and_engines_keep_to_the_memories_in_their_reach() -> None:
    target = machine()
    made = compiled(random_network(4), 64)
    for memory in ("sram", "ram", "flash"):
        less = tuple(replace(m, reach=("nobody",)) if m.name == memory else m for m in target.memories)
        with pytest.raises(ProgramError, match="does not reach"):
            verify(made.plan.program, replace(target, memories=less))
        with pytest.raises(TargetError, match="reached by 'nobody'"):
            _check_names(replace(target, memories=less), "here")
    for memory, who in (("sram", "kestrel_dma"), ("sram", "kestrel"), ("flash", "kestrel"), ("ram", "core")):
        less = tuple(
            replace(m, reach=tuple(n for n in m.reach if n != who)) if m.name == memory else m for m in target.memories
        )
        with pytest.raises(TargetError, match=f"{who} must reach {memory}") as caught:
            _check_names(replace(target, memories=less), "here")
        assert caught.value.hint
    engine = replace(target.engines[0], stream=None)
    with pytest.raises(TargetError, match="copies in lists"):
        _check_names(replace(target, engines=(engine,)), "here")


def test_constants_in_flash_are_read_in_place() -> None:
    made = compiled(random_network(4), 64)
    program = made.plan.program
    flash = load_target("kestrel").memory("flash")
    constants = [buffer for buffer in program.buffers.values() if buffer.role is Role.CONSTANT]
    assert constants and all(buffer.address is not None for buffer in constants)
    assert all(flash.base <= (b.address or 0) <= flash.base + flash.size - b.nbytes for b in constants)
    copied = {s.source.buffer for s in program.statements if isinstance(s, Copy)}
    assert not copied & {b.name for b in constants if not b.name.startswith("fill_")}
    launches = [s for s in program.statements if isinstance(s, LaunchStatement)]
    assert all(s.operands[name].buffer in {b.name for b in constants} for s in launches for name in s.packed)


def test_replayed_vectors(tmp_path: Path) -> None:
    """What `vectors` writes, on the device: memory, words, and the registers in order."""
    target = load_target("kestrel")
    count, without = write_vectors(target, "hex", tmp_path / "v")
    assert (count, without) == (9, ())
    index = json.loads((tmp_path / "v" / "index.json").read_text())
    read = read_vectors(tmp_path / "v")
    model = target.engines[0].device
    assert model is not None
    for entry in index["kernels"]:
        arrays, blocks = read[entry["kernel"]], dict(entry["blocks"])
        bus = MemoryBus([MemoryRegion(m.name, m.base, m.size) for m in target.memories])
        device = make_device(DeviceSpec(model.factory, model.base, model.size, model.arguments), bus)
        expected = blocks.pop("expected")
        for name, place in blocks.items():
            bus.view(place["address"], place["bytes"])[:] = arrays[name]
        registers = dict(arrays["registers"].tolist())
        words = arrays["list"].astype("<u4")
        assert registers[WORDS] == words.size == entry["words"]["list"]
        bus.view(registers[LIST], words.nbytes)[:] = words.view(np.uint8)
        for offset, value in arrays["registers"].tolist():
            device.write(offset, value, 0)
        device.advance(device.next_event() or 0)
        result = bus.view(expected["address"], expected["bytes"])
        counts = arrays["mask"] != 0
        assert np.array_equal(result[counts], arrays["expected"][counts]), entry["kernel"]


LIMITS = {
    "ic_resnet8": 130_000,
    "kws_dscnn": 80_000,
    "vww_mobilenetv1": 190_000,
    "ad_autoencoder": 42_000,
}
"""Cycles each network may take."""


@pytest.mark.parametrize("name", LIMITS)
def test_published_networks(name: str, tmp_path: Path) -> None:
    """Nearly all on the engine, in few lists, the engine hardly ever idle; and the report's figures add up."""
    path = MODELS / f"{name}_int8.tflite"
    if not path.is_file():
        pytest.skip("the reference models of ../shared are not here")
    target = load_target("kestrel")
    made = compile_model(path, target, Options(keep_dead=True))
    write_project(made.project, tmp_path / "build")
    inputs = sample_inputs(made.graph, 5)
    result = run_build(open_build(tmp_path / "build"), "iss", [inputs])
    expected = evaluate(made.graph, inputs)
    assert all(np.array_equal(array, expected[output]) for output, array in result.outputs[0].items())
    report = make_report(result)
    assert len(lists(made.plan.program.statements)) <= 3
    assert report.macs["kestrel"] >= 0.99 * report.macs["total"]
    total, busy = report.cycles["total"], [report.cycles[unit] or 0 for unit in ("kestrel", "kestrel_dma")]
    assert total is not None and total <= LIMITS[name] and total <= 1.15 * max(busy)
    assert sum(layer.cycles or 0 for layer in report.layers) == total
    assert sum(layer.engine_cycles or 0 for layer in report.layers) == busy[0]
    found = detail(result)
    assert sum(layer["dma_cycles"] for layer in found["layers"]) == busy[1]
    assert sum(found["summary"]["spent"].values()) == total
    moved = sum(activity.moved for activity in result.simulation.inferences[0].activities["kestrel_dma"])
    assert moved == found["summary"]["bytes_moved"]
    assert max(step[1] for step in found["memories"]["sram"]["live"]) == report.memory["sram"].lower_bound
    trace = json.loads(trace_text(found))["traceEvents"]
    lines = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert {"kestrel", "kestrel_dma", "core"} <= lines
    assert any(event["name"] == "bytes in use, sram" for event in trace)
