"""`dovetail mesh`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dovetail.cli.console import progress, say
from dovetail.cli.options import Model, ReplaceFolder, Scheduler, TargetName, option
from dovetail.errors import TargetError


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
    from dovetail.guests.mesh import reporting
    from dovetail.guests.mesh.choice import Objective
    from dovetail.guests.mesh.compiled import with_compiler
    from dovetail.guests.mesh.mapping import map_network, measure
    from dovetail.guests.mesh.own import read_mapping
    from dovetail.guests.mesh.parts import part_files, read_parts
    from dovetail.guests.mesh.topology import resized_topology
    from dovetail.operators import known_operators
    from dovetail.schedule.partition import partition
    from dovetail.target.registry import advice, load_target

    with progress("starting") as show:
        element = with_compiler(load_target(target))
        if element.mesh is None:
            hint = advice(lambda one: one.mesh is not None)
            raise TargetError("this target is a machine alone, not a mesh", where=element.name, hint=hint)
        if not 0 <= faults < 1:
            hint = "such as --faults 0.01"
            raise TargetError(f"a share is from 0 to below 1, not {faults}", where="--faults", hint=hint)
        if inputs < 1 or jobs < 1:
            hint = "give 1 or more, or leave them out"
            raise TargetError(f"the least is 1, were given {inputs} and {jobs}", where="--inputs, --jobs", hint=hint)
        topology = resized_topology(element, boards, chips, faults, seed)
        graph = prepare(model, element, Options(), show)
        regions, aim = partition(graph, element), Objective(objective)
        show("cutting into pieces, placing, routing")
        if mapping is not None or parts is not None:
            models = read_parts(parts, known_operators(element.operators)) if parts else {}
            mapped = read_mapping(mapping, graph, regions, topology, aim, models)
        else:
            mapped = map_network(graph, regions, topology, aim, whole or save_parts is not None)
        show("computing every piece")
        reporting.check_pieces(mapped)
        show("running a stream through the model")
        performance = measure(mapped, inputs, links=folder is not None)
        reporting.print_stages(mapped)
        say(reporting.sentence(mapped, performance))
        if save_parts is not None:
            files = part_files(mapped)
            write_files(files, save_parts, force)
            say(f"{save_parts}: {len(files)} models")
        if exact:
            show("running every element's firmware")
            reporting.run_exactly(element, mapped, inputs, performance, jobs, scheduler, show)
        if folder is not None:
            files = reporting.files_of(mapped, performance, element)
            write_files(files, folder, force)
            say(f"{folder}: {', '.join(sorted({name.split('/')[0] for name in files}))}")
