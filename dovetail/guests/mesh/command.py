"""`dovetail mesh`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dovetail.cli.console import progress, say, show_table
from dovetail.cli.options import Model, ReplaceFolder, Scheduler, TargetName, option
from dovetail.errors import DovetailError, TargetError

if TYPE_CHECKING:
    from dovetail.guests.mesh.layers import Ints
    from dovetail.guests.mesh.mapping import MeshMapping, Performance
    from dovetail.guests.mesh.topology import Topology
    from dovetail.ir.graph import Graph
    from dovetail.ir.types import Array
    from dovetail.target.description import Target


def mesh(
    model: Model,
    target: TargetName,
    boards: Annotated[int | None, option(help="Boards there are; the target's own number if not given.")] = None,
    chips: Annotated[int | None, option(help="Only so many chips of one board.")] = None,
    objective: Annotated[
        Literal["latency", "throughput"], typer.Option(help="Little time for one input, or many inputs of a stream.")
    ] = "throughput",
    whole: Annotated[
        bool, typer.Option("--whole", help="For latency: all of the network at once, not in sections.")
    ] = False,
    mapping: Annotated[
        Path | None,
        option(help="A YAML file of your own cuts, groups, elements and routes; what it leaves out is chosen."),
    ] = None,
    parts: Annotated[Path | None, option(help="A folder of ONNX models: what each element computes.")] = None,
    save_parts: Annotated[Path | None, option(help="Folder for such models of every element.")] = None,
    faults: Annotated[float, typer.Option(help="Share of elements and links taken to be dead, at random.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 0,
    inputs: Annotated[int, typer.Option(help="Inputs of the stream that is modelled.")] = 12,
    exact: Annotated[
        bool, typer.Option("--exact", help="Run every element's firmware in an emulated core of its own.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes that do so on this machine.")] = 2,
    scheduler: Scheduler = None,
    folder: Annotated[
        Path | None, option("--output", "-o", help="Folder for programs, images, mapping and picture.")
    ] = None,
    force: ReplaceFolder = False,
) -> None:
    """Cut a network into pieces for the elements of a mesh.

    Places, routes, models and emits them.

    Example: dovetail mesh net.tflite --target spinnaker2 --chips 1 -o build/mesh
    """
    from dovetail.codegen.emit.project import write_files
    from dovetail.compile import Options, prepare
    from dovetail.guests.mesh.building import manager_files
    from dovetail.guests.mesh.choice import Objective
    from dovetail.guests.mesh.compiled import with_compiler
    from dovetail.guests.mesh.emit import emit_mesh
    from dovetail.guests.mesh.files import mapping_json, mapping_yaml, sentence
    from dovetail.guests.mesh.manifest import mesh_manifest
    from dovetail.guests.mesh.mapping import map_network, measure
    from dovetail.guests.mesh.own import read_mapping
    from dovetail.guests.mesh.parts import part_graphs, read_parts
    from dovetail.guests.mesh.picture import picture
    from dovetail.ir.onnx_file import graph_bytes
    from dovetail.operators import known_operators
    from dovetail.schedule.partition import partition
    from dovetail.target.registry import advice, load_target

    with progress("starting") as show:
        known = with_compiler(load_target(target))
        if known.mesh is None:
            hint = advice(lambda one: one.mesh is not None)
            raise TargetError("this target is a machine alone, not a mesh", where=known.name, hint=hint)
        _require_numbers(faults, inputs, jobs)
        topology = _topology(known, boards, chips, faults, seed)
        graph = prepare(model, known, Options(), show)
        regions = partition(graph, known)
        show("cutting into pieces, placing, routing")
        if mapping is not None or parts is not None:
            given = read_parts(parts, known_operators(known.operators)) if parts else {}
            mapped = read_mapping(mapping, graph, regions, topology, Objective(objective), given)
        else:
            mapped = map_network(graph, regions, topology, Objective(objective), whole or save_parts is not None)
        show("computing every piece")
        _check_pieces(graph, mapped)
        show("running a stream through the model")
        performance = measure(mapped, inputs, links=folder is not None)
        _print_stages(mapped)
        say(sentence(mapped, performance))
        if save_parts is not None:
            named = {f"{name}.onnx": graph_bytes(part) for name, part in part_graphs(mapped)}
            write_files(named, save_parts, force)
            say(f"{save_parts}: {len(named)} models")
        if exact and len(mapped.parts.sections) > 1:
            show("running every element's firmware")
            _run_sections(known, graph, mapped, min(inputs, 3), performance)
        elif exact:
            show("running every element's firmware")
            turns = _run_exactly(known, graph, mapped, min(inputs, 3), jobs, scheduler, show)
            _print_executed(performance, measure(mapped, inputs, turns=turns))
        if folder is not None:
            files = {"mapping.json": mapping_json(mapped), "mesh.html": picture(mapped, performance)}
            if mapped.parts.resident:
                files["mapping.yaml"] = mapping_yaml(mapped)
                project = emit_mesh(mapped, known)
                files.update({**project.files, **mesh_manifest(mapped, project, known), **manager_files()})
            elif None not in mapped.placed:
                files.update(emit_mesh(mapped, known).files)
            else:
                say("layers are streamed, or on several chips one after the other: no programs are written")
            write_files(files, folder, force)
            say(f"{folder}: {', '.join(sorted({name.split('/')[0] for name in files}))}")


def _topology(target: Target, boards: int | None, chips: int | None, faults: float, seed: int) -> Topology:
    from dovetail.guests.mesh.topology import build_topology, random_faults

    assert target.mesh is not None, "was looked at before"
    try:
        found = target.mesh.resized(boards, chips)
    except ValueError as error:
        raise TargetError(str(error), where=target.name, hint="choose other --boards or --chips") from None
    return build_topology(random_faults(found, faults, seed) if faults else found)


def _require_numbers(faults: float, inputs: int, jobs: int) -> None:
    if not 0 <= faults < 1:
        raise TargetError(f"a share is from 0 to below 1, not {faults}", where="--faults", hint="such as --faults 0.01")
    if inputs < 1 or jobs < 1:
        hint = "give 1 or more, or leave them out"
        raise TargetError(f"the least is 1, were given {inputs} and {jobs}", where="--inputs, --jobs", hint=hint)


def _check_pieces(graph: Graph, mapped: MeshMapping) -> None:
    """The pieces together against the integer graph."""
    import numpy as np

    from dovetail.compile import sample_inputs
    from dovetail.guests.mesh.mapping import execute
    from dovetail.ir.graph import evaluate

    given = sample_inputs(graph)
    expected, found = evaluate(graph, given), execute(mapped.parts, given)
    for name in graph.outputs:
        if not np.array_equal(expected[name], found[name]):
            hint = "report this: the mapping is at fault, not the model"
            raise DovetailError("the pieces together give something else than the integer graph", where=name, hint=hint)
    say("computed piece by piece, the outputs equal the integer graph's in every byte")


def _run_exactly(
    target: Target,
    graph: Graph,
    mapped: MeshMapping,
    inputs: int,
    jobs: int,
    scheduler: str | None,
    show: Callable[[str], None],
) -> Ints:
    """Every element's firmware on several inputs, against the integer graph; returns `ExactRun.turns`."""
    from dovetail.compile import sample_inputs
    from dovetail.guests.mesh.emit import emit_mesh
    from dovetail.guests.mesh.exact import run_exact

    project = emit_mesh(mapped, target)
    given = [sample_inputs(graph, seed) for seed in range(inputs)]

    def told(done: int, count: int) -> None:
        show(f"running every element's firmware: {done} of {count}")

    run = run_exact(mapped, project, target, given, jobs, scheduler, told)
    _check_outputs(graph, given, run.outputs)
    say(
        f"{len(run.cycles)} elements ran {len(project.programs)} programs over {len(given)} inputs, {run.instructions} "
        f"instructions in all; every output equals the integer graph's. Most memory of an element {max(run.memory)} of "
        f"{mapped.parts.mesh.usable} bytes, most stack {run.stack}"
    )
    say(f"cycles for each input of the slowest element: {max(run.paces)}")
    return run.turns


def _check_outputs(graph: Graph, given: Sequence[Mapping[str, Array]], found: Sequence[Mapping[str, Array]]) -> None:
    """Raise DovetailError where elements gave something else than the integer graph."""
    import numpy as np

    from dovetail.ir.graph import evaluate

    for arrays, outputs in zip(given, found, strict=True):
        expected = evaluate(graph, arrays)
        if any(not np.array_equal(expected[name], outputs[name]) for name in graph.outputs):
            what = "the elements' firmware gives something else than the integer graph"
            hint = "report this, or look at the target's element driver if it is yours"
            raise DovetailError(what, where=graph.name, hint=hint)


def _run_sections(target: Target, graph: Graph, mapped: MeshMapping, inputs: int, modelled: Performance) -> None:
    """Every element's firmware, section after section, on several inputs, against the integer graph."""
    from dovetail.compile import sample_inputs
    from dovetail.guests.mesh.emit import emit_mesh
    from dovetail.guests.mesh.exact import run_sections

    project = emit_mesh(mapped, target)
    given = [sample_inputs(graph, seed) for seed in range(inputs)]
    run = run_sections(mapped, project, target, given)
    _check_outputs(graph, given, run.outputs)
    say(
        f"{len(project.elements)} elements ran {len(mapped.placed)} sections one after the other over {len(given)} "
        f"inputs; every output equals the integer graph's. Memory of an element {run.memory} of "
        f"{mapped.parts.mesh.usable} bytes"
    )
    say(f"executed: {run.latency:.0f} clocks for one input, modelled {modelled.latency:.0f}")


def _print_executed(modelled: Performance, executed: Performance) -> None:
    interval, latency = f"{executed.interval:.0f} clocks between inputs", f"{executed.latency:.0f} for one"
    beside = f"modelled {modelled.interval:.0f} and {modelled.latency:.0f}"
    say(f"the stream with the cycles of the firmware: {interval}, {latency}; {beside}")


def _print_stages(mapped: MeshMapping) -> None:
    from dovetail.guests.mesh.compiled import CompiledPieces, share_on_engines, used_places
    from dovetail.guests.mesh.mapping import piece_graph

    pieces = mapped.parts.mesh.pieces
    shares: list[tuple[int, int]] = []
    words = ("layer", "on", "how")
    headings = ("layer", "on", "rows", "columns", "channels", "sums", "pieces", "clocks", "bytes", "how")
    rows = []
    for section in mapped.parts.sections:
        how = "streamed" if section.streaming is not None else "resident"
        for stage in section.stages:
            cut, where = stage.cut, "MAC array" if stage.layer.on_array else "core"
            if isinstance(pieces, CompiledPieces) and section.streaming is None:
                found = [pieces.compiled(piece_graph(stage, piece)[0]) for piece in range(stage.pieces)]
                shares += [share_on_engines(one) for one in found]
                where = ", ".join(sorted({name for one in found for name in used_places(one)}))
            counts = (cut.rows, cut.columns, cut.channels, cut.sums, stage.pieces)
            costs = (int(stage.costs.clocks.max()), int(stage.memory.max()))
            rows.append([stage.layer.name, where, *map(str, counts), *map(str, costs), how])
    show_table(headings, rows, left=words)
    if total := sum(macs for _, macs in shares):
        own = 100 * sum(macs for macs, _ in shares) / total
        say(f"{own:.1f} % of the multiply-accumulates are on the elements' engines")
