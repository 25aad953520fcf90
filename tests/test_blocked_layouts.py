"""Networks on a made-up engine that takes values in blocks of channels: chosen layouts, programs, and emitted C."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.build.toolchain import find_compiler
from dovetail.codegen.emit import emit_project, make_unit, write_project
from dovetail.codegen.emit.manifest import manifest
from dovetail.codegen.emit.unit import addressed_operands
from dovetail.codegen.manifest import read_manifest
from dovetail.compile import Compiled, Options, compile_model, prepare, sample_inputs
from dovetail.errors import MissingExtraError, PlanError, ProgramError
from dovetail.guests import zoo
from dovetail.ir.graph import Graph, evaluate, verify
from dovetail.ir.operators.arithmetic import Add, Requantize
from dovetail.ir.operators.movement import Concat, Pad, Relayout, Reshape
from dovetail.legalize import adapt
from dovetail.program.interpret import ProgramInterpreter, check_program
from dovetail.program.ir import CORE, Copy, LaunchStatement, Role, Statement
from dovetail.program.loops import print_program
from dovetail.program.verify import verify as verify_program
from dovetail.run import ProjectBuild, run_build
from dovetail.schedule.assign import Assignment
from dovetail.schedule.layout import LayoutPlan, choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import Plan, plan
from dovetail.target import Target
from dovetail.targets import load_target
from fake_engine import IMAGES, MEMORY, emulate, machine, machine_with_near_memory
from networks import Net

NETWORKS = ("resnet8", "digits", "ds_cnn")


@dataclass(frozen=True)
class Found:
    """A planned network."""

    placed: LayoutPlan
    plan: Plan

    @property
    def copies(self) -> list[Copy]:
        """The program's copies."""
        return [statement for statement in self.plan.program.statements if isinstance(statement, Copy)]


class Emulator(ProgramInterpreter):
    """Launches are carried out by the engine's emulator, from task words and blob alone."""

    def __init__(self, found: Found, target: Target) -> None:
        super().__init__(found.plan.program, target)
        self.target = target
        self.regions = found.placed.regions

    def step(self, index: int, statement: Statement) -> None:
        """Carry out one statement."""
        if not isinstance(statement, LaunchStatement):
            super().step(index, statement)
            return
        offload = self.regions[statement.layer].offload
        assert offload is not None
        (command,) = offload.commands(statement.match, addressed_operands(self.program, statement))
        blob = self.program.constants[statement.operands["weights"].buffer]
        emulate(command.words, blob, self.memories[MEMORY.name])


def planned(graph: Graph, target: Target) -> Found:
    """The plan of a network, verified, interpreted, and on a target of one memory also emulated."""
    verify(graph)
    placed = choose_layouts(graph, partition(graph, target), target)
    verify(placed.graph)
    found = Found(placed, plan(placed, target, {}))
    verify_program(found.plan.program, target)
    inputs = sample_inputs(graph)
    check_program(found.plan.program, target, placed.graph, inputs)
    expected = evaluate(graph, inputs)
    for name, array in evaluate(placed.graph, inputs).items():
        np.testing.assert_array_equal(array, expected[name])
    if target.dma is None:
        machine = Emulator(found, target)
        machine.memories[MEMORY.name][:] = 0xA5
        for name, array in inputs.items():
            machine.write(found.plan.program.inputs[name], array)
        for index, statement in enumerate(found.plan.program.statements):
            machine.step(index, statement)
        for name, view in found.plan.program.outputs.items():
            np.testing.assert_array_equal(machine.read(view), expected[name])
    return found


def relayouts(placed: LayoutPlan) -> list[tuple[str, str]]:
    """Operand and result of every relayout."""
    found = [node for node in placed.graph.nodes if isinstance(node.operator, Relayout)]
    regions = [r for r in placed.regions if isinstance(r.graph.nodes[0].operator, Relayout)]
    assert sorted(r.output for r in regions) == sorted(node.output for node in found)
    return [(node.inputs[0], node.output) for node in found]


def compiled_network(name: str, folder: Path, target: Target) -> Compiled:
    """A network of the zoo, compiled."""
    model = folder / f"{name}.onnx"
    model.write_bytes(zoo.build(name))
    return compile_model(model, target, Options())


def built(compiled: Compiled, folder: Path, target: Target) -> ProjectBuild:
    """The written project, its target the one at hand."""
    write_project(compiled.project, folder)
    return ProjectBuild(folder, read_manifest(folder), target)


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_zoo_on_the_host(name: str, pads: bool, tmp_path: Path) -> None:
    """The emitted C, copies and elementwise kernels on blocks included, gives what the graph gives."""
    target = machine(pads)
    compiled = compiled_network(name, tmp_path, target)
    build = built(compiled, tmp_path / "build", target)
    inputs = [sample_inputs(compiled.graph, seed) for seed in range(3)]
    result = run_build(build, "host", inputs)
    plain = prepare(tmp_path / f"{name}.onnx", target, Options())
    for given, outputs in zip(inputs, result.outputs, strict=True):
        expected = evaluate(plain, given)
        for value in plain.outputs:
            np.testing.assert_array_equal(outputs[value], expected[value])
    project = compiled.project.files
    assert "runtime/copy.c" in project and "runtime/dma.c" not in project
    launches = [s for s in compiled.plan.program.statements if isinstance(s, LaunchStatement)]
    assert len(launches) == sum(region.engine is not None for region in compiled.regions), "one launch per region"
    assert not [b for b in compiled.plan.program.buffers.values() if b.role is Role.TILE]


@pytest.mark.parametrize("name", NETWORKS)
def test_zoo_emulated(name: str, tmp_path: Path) -> None:
    """The task words and the packed constants say the same as the graph."""
    model = tmp_path / "model.onnx"
    model.write_bytes(zoo.build(name))
    for pads in (True, False):
        planned(prepare(model, machine(pads), Options()), machine(pads))


def test_a_view_between_engine_regions_keeps_their_layout() -> None:
    """Rows and columns as one row lie as before, so nothing is converted to row-major and back; channels as pixels do
    not."""
    counts = []
    for shape in ((1, 1, 64, 32), (1, 8, 16, 16)):
        net = Net("view", (8, 8, 16))
        x = net.convolution(net.x, 32, stem="first", pad=0, kernel=1)
        x = net.builder.add(Reshape(shape), [x])
        found = planned(net.finish(net.convolution(x, 16, stem="second", pad=0, kernel=1)), machine())
        assert sum(region.engine is not None for region in found.placed.regions) == 2
        counts.append(len(relayouts(found.placed)))
    assert counts == [0, 1]


def test_no_relayout_between_engine_regions(tmp_path: Path) -> None:
    """ResNet8: into blocks once, out of them once before pooling and once behind the dense layer."""
    compiled = compiled_network("resnet8", tmp_path, machine())
    producers = {region.output: region for region in compiled.regions}
    moved = [region for region in compiled.regions if isinstance(region.graph.nodes[0].operator, Relayout)]
    assert len(moved) == 3
    assert producers[moved[0].graph.inputs[0]].graph.inputs == compiled.graph.inputs, "behind the transposed input"
    for region in moved:
        maker = producers.get(region.graph.inputs[0])
        readers = [reader for reader in compiled.regions if region.output in reader.graph.inputs]
        assert not (maker and maker.engine and any(reader.engine for reader in readers))
        assert region.place == CORE and region.copied_by == CORE
    adds = [r for r in compiled.regions if r.engine is None and any(isinstance(n.operator, Add) for n in r.graph.nodes)]
    assert len(adds) == 3 and all(set(region.layouts.values()) == {IMAGES} for region in adds)
    assert '"relayout_0"' in compiled.project.files["dovetail.json"]


def test_an_addition_keeps_the_blocks() -> None:
    """Between engine regions the core adds blocks as they lie, also where the last one is only partly used."""
    for channels in (32, 40):
        net = Net("small", (6, 5, channels), zero_point=5)
        a = net.convolution(net.x, channels, 1, "a")
        b = net.convolution(a, channels, 1, "b")
        last = net.convolution(net.addition(a, b, "sum"), channels, 1, "last")
        found = planned(net.finish(last), machine())
        assert [pair[0] for pair in relayouts(found.placed)] == ["x", f"last as {IMAGES}"]
        assert found.placed.layouts["sum"] == IMAGES
        assert "last" not in found.placed.layouts and f"x as {IMAGES}" in found.placed.layouts


def test_parameters_per_channel_need_row_major() -> None:
    net = Net("small", (6, 5, 32), zero_point=5)
    a = net.convolution(net.x, 32, 1, "a")
    b = net.convolution(a, 32, 1, "b")
    last = net.convolution(net.addition(a, b, "sum", parameters=32), 32, 1, "last")
    found = planned(net.finish(last), machine())
    assert [pair[0] for pair in relayouts(found.placed)] == ["x", "a", "b", "sum", f"last as {IMAGES}"]


def test_the_fewest_bytes_decide() -> None:
    """An addition read by the core alone comes out of the blocks once, behind it and not before it."""
    net = Net("small", (6, 5, 32), zero_point=5)
    a = net.convolution(net.x, 32, 1, "a")
    b = net.convolution(a, 32, 1, "b")
    total = net.addition(a, b, "sum")
    found = planned(net.finish(net.mean(total, "pool")), machine())
    assert [pair[0] for pair in relayouts(found.placed)] == ["x", "sum"]
    net = Net("small", (6, 5, 32), zero_point=5)
    one = net.addition(net.x, net.x, "one")
    found = planned(net.finish(net.convolution(one, 32, 1, "last")), machine())
    assert len(relayouts(found.placed)) == 2


def test_a_value_is_relaid_once_for_several_readers() -> None:
    net = Net("small", (6, 5, 3), zero_point=5)
    parts = [net.convolution(net.x, 16, 1, f"part{index}") for index in range(3)]
    pools = [net.mean(part, f"pool{index}") for index, part in enumerate(parts)]
    found = planned(net.finish(*pools), machine())
    assert [pair[0] for pair in relayouts(found.placed)] == ["x"], "16 channels lie the same in both layouts"


def test_the_same_bytes_are_not_moved() -> None:
    """One pixel of whole blocks: pooled by the core, reshaped, and into the dense layer without a relayout."""
    net = Net("small", (4, 4, 32), zero_point=5)
    pooled = net.mean(net.convolution(net.x, 48, 3, "a"), "pool")
    found = planned(net.finish(net.dense(pooled, 32, "classes")), machine())
    assert [pair[0] for pair in relayouts(found.placed)] == ["x", "a"]


def test_outputs_are_row_major_and_read_on() -> None:
    """A value that is an output and read by engines lies in blocks, and row-major under its own name."""
    net = Net("small", (5, 5, 24), zero_point=5)
    a = net.convolution(net.x, 24, 1, "a")
    b = net.convolution(a, 24, 1, "b")
    found = planned(net.finish(a, b), machine())
    assert relayouts(found.placed) == [("x", f"x as {IMAGES}"), (f"a as {IMAGES}", "a"), (f"b as {IMAGES}", "b")]
    reader = next(r for r in found.placed.regions if r.output == f"b as {IMAGES}")
    assert reader.match is not None and reader.match.values["x"] == f"a as {IMAGES}" == reader.graph.inputs[0]


@pytest.mark.parametrize(("sizes", "inside"), [((16, 32), 2), ((32, 24), 2), ((24, 16), 1)])
def test_concatenation_of_blocks(sizes: tuple[int, int], inside: int) -> None:
    """Parts of whole blocks lie inside the result; others are relaid out into it, or copied if they lie right."""
    net = Net("small", (6, 5, 16), zero_point=5)
    parts = [net.convolution(net.x, channels, 1, f"part{index}") for index, channels in enumerate(sizes)]
    joined = net.builder.add(Concat(3), parts, "joined")
    found = planned(net.finish(net.convolution(joined, 16, 1, "last")), machine())
    assert len(found.placed.inside) == inside
    assert ("joined" in found.placed.layouts) == (inside == 2)
    moved = sum(copy.destination.type.elements for copy in found.copies)
    if inside == 2:
        assert not any(copy.destination.type.shape[-1] > 16 for copy in found.copies)
    else:
        assert moved > 30 * sum(sizes)


@pytest.mark.parametrize("channels", [16, 40])
def test_a_pad_only_fills_its_border(channels: int) -> None:
    """Between engine regions that do not pad, the value lies inside the padded one."""
    net = Net("small", (6, 5, 16), zero_point=5)
    a = net.convolution(net.x, channels, 1, "a")
    b, c = net.convolution(a, 16, 3, "b"), net.convolution(a, 16, 1, "c")
    found = planned(net.finish(net.mean(b, "p"), net.mean(c, "q")), machine(pads=False))
    assert found.placed.inside["a"].outer == "b_pad"
    fills = [copy for copy in found.copies if copy.before]
    assert len(fills) == 1 and fills[0].fills_border
    assert "fill the border of joined_0" in print_program(found.plan.program)
    reader = next(
        s for s in found.plan.program.statements if isinstance(s, LaunchStatement) and s.graph.outputs[0] == "c"
    )
    assert not reader.operands["a"].is_dense, "the other reader takes strides"


def test_a_pad_of_what_the_core_reads_is_copied() -> None:
    net = Net("small", (6, 5, 32), zero_point=5)
    a = net.convolution(net.x, 32, 1, "a")
    b = net.convolution(a, 32, 3, "b")
    total = net.addition(a, b, "sum")
    found = planned(net.finish(net.convolution(total, 32, 1, "last")), machine(pads=False))
    assert not found.placed.inside
    pads = [copy for copy in found.copies if copy.before]
    assert len(pads) == 1 and not pads[0].fills_border and pads[0].source.layout == IMAGES


def test_random_networks() -> None:
    """Odd sizes, chains and forks: every program is sound and computes the graph."""
    for seed in range(12):
        net = Net("small", (7, 5, 3), zero_point=5, seed=seed)
        random, values = np.random.default_rng(seed), [net.x]
        for index in range(6):
            x = values[int(random.integers(len(values)))]
            kernel, channels = int(random.choice([1, 3])), int(random.choice([5, 16, 24, 32]))
            made = net.convolution(x, channels, kernel, f"v{index}")
            same = [value for value in values if net.builder.type_of(value) == net.builder.type_of(made)]
            if same and random.integers(2):
                made = net.addition(made, same[-1], f"sum{index}", parameters=int(random.choice([1, channels])))
            if random.integers(3) == 0:
                made = net.builder.add(Concat(3), [made, values[-1]], f"joined{index}")
            values.append(made)
        graph = net.finish(values[-1], net.mean(values[-2], "mean"))
        for target in (machine(), machine(pads=False), machine_with_near_memory(24 * 1024)):
            planned(graph, target)


@pytest.mark.parametrize("policy", ["engine", "exact"])
def test_a_border_filled_by_a_dma(policy: str, tmp_path: Path) -> None:
    """Wider than the engine pads: around a value that lies inside already, the DMA writes strips of fill alone."""
    target = load_target("ne16")
    net = Net("small", (9, 7, 16), zero_point=5)
    a = net.convolution(net.convolution(net.x, 16, 3, "first"), 24, 1, "a")  # the first layer comes in bands
    pads = (0, 3, 4, 0), (0, 4, 3, 0)
    wide = net.builder.add(Pad(*pads, 5), [a], "wide")
    graph = net.finish(net.convolution(wide, 16, 3, "b", pad=0))
    graph = adapt(graph, target.policy(policy))
    placed = choose_layouts(graph, partition(graph, target), target)
    found = plan(placed, target, {target.code: 100_000})
    verify_program(found.program, target)
    check_program(found.program, target, placed.graph, sample_inputs(graph))
    in_place = [s for s in found.program.statements if isinstance(s, Copy) and s.fills_border]
    inside = [one for one in placed.inside.values() if one.outer.startswith("wide")]
    assert len(in_place) == len(inside) == (1 if policy == "engine" else 0), "the core requantises if exact"
    said = manifest(None, target, {"policy": policy}, Assignment(placed.regions), placed, found, {})
    project = emit_project(make_unit(found.program, placed.regions, target), said)
    write_project(project, tmp_path / "build")
    build = ProjectBuild(tmp_path / "build", read_manifest(tmp_path / "build"), target)
    inputs = [sample_inputs(graph, seed) for seed in range(2)]
    for simulator in ("host", "iss") if find_spec("unicorn") else ("host",):
        for given, outputs in zip(inputs, run_build(build, simulator, inputs).outputs, strict=True):
            for value, expected in evaluate(graph, given).items():
                np.testing.assert_array_equal(outputs[value], expected)


def test_constants_of_every_element_need_row_major() -> None:
    """An addition of a whole constant image is not computed on blocks."""
    net = Net("small", (6, 5, 32), zero_point=5)
    a = net.convolution(net.x, 32, 1, "a")
    names = [net.builder.constant(n, np.array([v], np.int32)) for n, v in (("m", 1 << 30), ("s", 9))]
    raised = net.builder.add(Requantize(), [a, *names])
    image = net.builder.constant("image", np.random.default_rng(0).integers(-999, 999, (1, 6, 5, 32)).astype(np.int32))
    total = net.limited(net.builder.add(Add(), [raised, image]), "sum", (1, 999), relu=False)
    found = planned(net.finish(net.convolution(total, 32, 1, "last")), machine())
    assert [pair[0] for pair in relayouts(found.placed)] == ["x", "a", "sum", f"last as {IMAGES}"]


def test_tiles_of_blocked_values() -> None:
    """Behind a DMA, values are cut at whole blocks and copied as they lie."""
    net = Net("small", (16, 16, 48), zero_point=5)
    b = net.convolution(net.convolution(net.x, 96, 3, "a"), 64, 3, "b")
    target = machine_with_near_memory(40 * 1024)
    found = planned(net.finish(net.mean(b, "mean")), target)
    assert any(len(tiling.tiles) > 1 for tiling in found.plan.tilings.values())
    loads = [c for c in found.copies if found.plan.program.buffers[c.destination.buffer].role is Role.TILE]
    assert any(copy.source.layout == IMAGES == copy.destination.layout for copy in loads)


def test_what_does_not_fit_says_so() -> None:
    target = machine()
    small = replace(target, memories=(replace(MEMORY, size=2048),))
    net = Net("small", (16, 16, 32), zero_point=5)
    graph = net.finish(net.mean(net.convolution(net.x, 32, 1, "a"), "mean"))
    with pytest.raises(PlanError, match=r"dram needs \d+ bytes and has 2048"):
        plan(choose_layouts(graph, partition(graph, small), small), small, {})


def test_the_verifier_knows_layouts() -> None:
    """An engine that is given a value in another layout than it takes is refused."""
    net = Net("small", (6, 5, 32), zero_point=5)
    found = planned(net.finish(net.mean(net.convolution(net.x, 32, 1, "a"), "mean")), machine())
    program = found.plan.program
    index = next(i for i, s in enumerate(program.statements) if isinstance(s, LaunchStatement))
    launch = program.statements[index]
    assert isinstance(launch, LaunchStatement)
    name = launch.graph.inputs[0]
    operands = {**launch.operands, name: launch.operands[name].seen_as(None)}
    statements = list(program.statements)
    statements[index] = replace(launch, operands=operands)
    with pytest.raises(ProgramError, match="lies row-major, expected N C/16 H W 16c"):
        verify_program(replace(program, statements=tuple(statements)), machine())


def test_constants_lie_aligned_where_they_are_read(tmp_path: Path) -> None:
    compiled = compiled_network("digits", tmp_path, machine())
    model = compiled.unit.model
    source, code = (compiled.project.files[f"src/{model}{end}.c"] for end in ("_constants", ""))
    launches = [s for s in compiled.plan.program.statements if isinstance(s, LaunchStatement)]
    for launch in launches:
        blob = launch.operands["weights"].buffer
        assert f"{model}_{blob}[" in source and f", {model}_{blob});" in code
        assert all(launch.operands[name].offset % 64 == 0 for name in launch.packed)
        addresses = addressed_operands(compiled.plan.program, launch)
        assert addresses["weights"].address == 0 and addresses["bias"].address == launch.operands["bias"].offset > 0
    assert source.count("aligned(64)") == len({launch.operands["weights"].buffer for launch in launches})


def test_buffers_lie_where_the_engine_is_told(tmp_path: Path) -> None:
    """In the firmware the one memory begins with the buffers, whose addresses are in the task words."""
    try:
        find_compiler("rv32imc")
    except MissingExtraError as missing:
        pytest.skip(str(missing))
    from elftools.elf.elffile import ELFFile

    from dovetail.codegen.build.instruction_sets import EMITTED_C
    from dovetail.codegen.build.toolchain import compile_firmware
    from dovetail.codegen.emit.project import defines

    target = machine(pads=False)
    compiled = compiled_network("digits", tmp_path, target)
    build = built(compiled, tmp_path / "build", target)
    sources = [Path(name) for name in build.manifest.sources.target]
    elf = compile_firmware(
        build.folder,
        sources,
        linker_script=Path("link.ld"),
        isa=target.core.isa,
        defines=defines(build.manifest.model_prefix, target),
        flags=(*EMITTED_C, "-Werror"),
        include=[Path("src"), Path("runtime"), Path("driver")],
    )
    with elf.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".symtab")
        symbols = {symbol.name: symbol["st_value"] for symbol in table.iter_symbols()}
    assert symbols[f"{compiled.unit.model}_dram"] == MEMORY.base
    blobs = [name for name in symbols if name.startswith(f"{compiled.unit.model}_conv") and name.endswith("_constants")]
    assert blobs and all(symbols[name] % 64 == 0 for name in blobs)


def test_arrays_are_what_they_were(tmp_path: Path) -> None:
    """Compiling twice gives the same project."""
    files = [compiled_network("resnet8", tmp_path, machine()).project.files for _ in range(2)]
    assert files[0] == files[1]
