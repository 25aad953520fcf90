"""What `dovetail mesh` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.console import output, progress, say
from dovetail.errors import DovetailError, TargetError

if TYPE_CHECKING:
    from dovetail.graph.graph import Graph
    from dovetail.mesh.mapping import Mapped, Performance
    from dovetail.mesh.topology import Topology
    from dovetail.target.description import Target


@dataclass(frozen=True, slots=True)
class MeshOrder:
    """The arguments of the command; see `dovetail mesh --help`."""

    model: Path
    target: str
    boards: int | None
    chips: int | None
    objective: str
    mapping: Path | None
    faults: float
    seed: int
    inputs: int
    exact: bool
    jobs: int
    scheduler: str | None
    folder: Path | None
    force: bool


def mesh(order: MeshOrder) -> None:
    """Map a model to a mesh, print a table, write the files; raises DovetailError."""
    from dovetail.compile import Options, prepare
    from dovetail.mesh.choice import Objective
    from dovetail.mesh.mapping import map_network, measure
    from dovetail.mesh.mapping_file import read_mapping
    from dovetail.mesh.picture import sentence
    from dovetail.partition import partition
    from dovetail.targets import load_target

    with progress("starting") as show:
        target = load_target(order.target)
        topology = _topology(order, target)
        graph = prepare(order.model, target, Options(), show)
        regions = partition(graph, target)
        show("cutting into pieces, placing, routing")
        if order.mapping is not None:
            mapped = read_mapping(order.mapping, graph, regions, topology)
        else:
            mapped = map_network(graph, regions, topology, Objective(order.objective))
        show("computing every piece")
        _check(graph, mapped)
        show("running a stream through the model")
        performance = measure(mapped, order.inputs)
        _print(mapped)
        say(sentence(mapped, performance))
        if order.exact:
            show("running every element's firmware")
            _exact(order, target, graph, mapped)
        if order.folder is not None:
            _write(order, target, mapped, performance)


def _topology(order: MeshOrder, target: Target) -> Topology:
    from dovetail.mesh.topology import build_topology, random_faults
    from dovetail.targets import advice

    if target.mesh is None:
        raise TargetError("this target is a machine alone, not a mesh", where=target.name,
                          hint=advice(lambda one: one.mesh is not None))
    if not 0 <= order.faults < 1:
        raise TargetError(f"a share is from 0 to below 1, not {order.faults}", where="--faults",
                          hint="such as --faults 0.01")
    if order.inputs < 1 or order.jobs < 1:
        raise TargetError(f"the least is 1, were given {order.inputs} and {order.jobs}", where="--inputs, --jobs",
                          hint="give 1 or more, or leave them out")
    try:
        found = target.mesh.resized(order.boards, order.chips)
    except ValueError as error:
        raise TargetError(str(error), where=target.name, hint="choose other --boards or --chips") from None
    return build_topology(random_faults(found, order.faults, order.seed) if order.faults else found)


def _check(graph: Graph, mapped: Mapped) -> None:
    """The pieces together against the integer graph."""
    import numpy as np

    from dovetail.compile import sample_inputs
    from dovetail.graph.graph import evaluate
    from dovetail.mesh.execute import execute

    given = sample_inputs(graph)
    expected, found = evaluate(graph, given), execute(mapped.parts, given)
    for name in graph.outputs:
        if not np.array_equal(expected[name], found[name]):
            raise DovetailError("the pieces together give something else than the integer graph", where=name,
                                hint="report this: the mapping is at fault, not the model")
    say("computed piece by piece, the outputs equal the integer graph's in every byte")


def _exact(order: MeshOrder, target: Target, graph: Graph, mapped: Mapped) -> None:
    import numpy as np

    from dovetail.compile import sample_inputs
    from dovetail.graph.graph import evaluate
    from dovetail.mesh.emit import emit_mesh
    from dovetail.mesh.exact import run_exact

    _require_resident(mapped)
    placed, tables = mapped.whole
    project = emit_mesh(mapped.parts, placed, tables, target)
    given = [sample_inputs(graph, seed) for seed in range(min(order.inputs, 3))]
    run = run_exact(mapped.parts, placed, tables, project, target, given, order.jobs, order.scheduler)
    for arrays, outputs in zip(given, run.outputs, strict=True):
        expected = evaluate(graph, arrays)
        if any(not np.array_equal(expected[name], outputs[name]) for name in graph.outputs):
            raise DovetailError("the elements' firmware gives something else than the integer graph", where=graph.name,
                                hint="report this, or look at the target's element driver if it is yours")
    say(f"{len(run.cycles)} elements ran {run.programs} programs over {len(given)} inputs, {run.instructions} "
        f"instructions in all; every output equals the integer graph's. Most memory of an element {max(run.memory)} of "
        f"{mapped.parts.mesh.usable} bytes, most stack {run.stack}")  # fmt: skip


def _require_resident(mapped: Mapped) -> None:
    if not mapped.parts.resident:
        raise DovetailError("the network is not on the mesh as a whole, so that no programs are written",
                            where=mapped.parts.graph.name, hint="use more chips or boards")  # fmt: skip


def _write(order: MeshOrder, target: Target, mapped: Mapped, performance: Performance) -> None:
    from dovetail.emit.write import write_files
    from dovetail.mesh.emit import emit_mesh
    from dovetail.mesh.mapping_file import mapping_json
    from dovetail.mesh.picture import picture

    assert order.folder is not None
    files = {"mapping.json": mapping_json(mapped), "mesh.html": picture(mapped, performance)}
    if mapped.parts.resident:
        placed, tables = mapped.whole
        files.update(emit_mesh(mapped.parts, placed, tables, target).files)
    else:
        say("the network is not on the mesh as a whole: no programs are written")
    write_files(files, order.folder, order.force)
    say(f"{order.folder}: {', '.join(sorted({name.split('/')[0] for name in files}))}")


def _print(mapped: Mapped) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    headings = ("layer", "on", "rows", "columns", "channels", "sums", "pieces", "clocks", "bytes", "how")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("layer", "on", "how") else "right")
    for section in mapped.parts.sections:
        for stage in section.stages:
            cut = stage.cut
            where = "MAC array" if stage.layer.on_array else "core"
            how = "streamed" if section.streaming is not None else "resident"
            cells = (stage.layer.name, where, cut.rows, cut.columns, cut.channels, cut.sums, stage.pieces,
                     int(stage.costs.clocks.max()), int(stage.memory.max()), how)  # fmt: skip
            table.add_row(*(Text(str(cell)) for cell in cells))
    output().print(table, highlight=False)
