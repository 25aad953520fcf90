"""`dovetail mesh`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dovetail.cli.console import progress, say
from dovetail.cli.options import Model, ReplaceFolder, TargetName, option
from dovetail.errors import TargetError
from dovetail.options import flag


@dataclass(frozen=True)
class MeshOptions:
    """Options of `dovetail mesh`."""

    boards: int | None = flag(None, "Boards there are; the target's own number if not given.", kind=int | None)
    chips: int | None = flag(None, "Only so many chips of one board.", kind=int | None)
    objective: Literal["latency", "throughput"] = flag(
        "throughput",
        "Little time for one input, or many inputs of a stream.",
        kind=Literal["latency", "throughput"],
    )
    whole: bool = flag(False, "For latency: all of the network at once, not in sections.", "--whole")
    mapping: Path | None = flag(
        None,
        "A YAML file of your own cuts, groups, elements and routes; Dovetail chooses the rest.",
        kind=Path | None,
    )
    parts: Path | None = flag(None, "A folder of ONNX models: what each element computes.", kind=Path | None)
    save_parts: Path | None = flag(None, "Folder for such models of every element.", kind=Path | None)
    faults: float = flag(0.0, "Share of elements and links taken to be dead, at random.", min=0.0, max=0.99)
    seed: int = flag(0, "Seed of the faults.")
    inputs: int = flag(12, "Inputs of the stream that is modelled.", min=1)
    exact: bool = flag(False, "Run every element's firmware in an emulated core of its own.", "--exact")
    jobs: int = flag(2, "Processes that do so on this machine.", min=1)
    scheduler: str | None = flag(None, "Address of a Dask scheduler to use instead.")


def mesh(
    model: Model,
    target: TargetName,
    options: MeshOptions,
    folder: Annotated[
        Path | None, option("--output", "-o", help="Folder for programs, images, mapping and picture.")
    ] = None,
    force: ReplaceFolder = False,
) -> None:
    """Cut a network into pieces for the elements of a mesh.

    Places, routes, models and emits them.

    Example: dovetail mesh net.tflite --target spinnaker2 --chips 1 -o build/mesh
    """
    from dovetail.compile import Options, prepare
    from dovetail.folders import write_files
    from dovetail.guests.mesh import reporting
    from dovetail.guests.mesh.compiled import with_compiler
    from dovetail.guests.mesh.mapping import map_network, measure
    from dovetail.guests.mesh.own import read_mapping
    from dovetail.guests.mesh.partition import Objective
    from dovetail.guests.mesh.parts import part_graphs, read_parts
    from dovetail.guests.mesh.topology import build_topology, random_faults
    from dovetail.ir.onnx_file import graph_bytes
    from dovetail.operators import known_operators
    from dovetail.schedule.partition import partition
    from dovetail.target.registry import advice, load_target

    with progress("starting") as show:
        element = with_compiler(load_target(target))
        if element.mesh is None:
            hint = advice(lambda one: one.mesh is not None)
            raise TargetError("this target is a machine alone, not a mesh", where=element.name, hint=hint)
        mesh = element.mesh.resized(options.boards, options.chips)
        topology = build_topology(random_faults(mesh, options.faults, options.seed) if options.faults else mesh)
        graph = prepare(model, element, Options(), show)
        regions, aim = partition(graph, element), Objective(options.objective)
        show("cutting into pieces, placing, routing")
        if options.mapping is not None or options.parts is not None:
            models = read_parts(options.parts, known_operators(element.operators)) if options.parts else {}
            mapped = read_mapping(options.mapping, graph, regions, topology, aim, models)
        else:
            mapped = map_network(graph, regions, topology, aim, bool(options.whole or options.save_parts), show)
        reporting.check_pieces(mapped, show)
        show("running a stream through the model")
        performance = measure(mapped, options.inputs)
        reporting.print_stages(mapped, aim)
        say(reporting.sentence(mapped, performance))
        if options.save_parts is not None:
            files = {f"{name}.onnx": graph_bytes(part) for name, part in part_graphs(mapped)}
            write_files(files, options.save_parts, force)
            say(f"{options.save_parts}: {len(files)} models")
        if options.exact:
            reporting.run_exactly(element, mapped, options.inputs, performance, options.jobs, options.scheduler, show)
        if folder is not None:
            show("writing programs")
            files = reporting.files_of(mapped, performance, element)
            write_files(files, folder, force)
            say(f"{folder}: {', '.join(sorted({name.split('/')[0] for name in files}))}")
