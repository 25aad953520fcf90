"""`dovetail run` of a folder that `dovetail mesh` wrote: the entry point `mesh.json` of `dovetail.builds`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.console import beside_json, note_seeded, progress, say
from dovetail.cli.options import BoardOptions, changed_options
from dovetail.cli.run import RunOptions
from dovetail.errors import DovetailError
from dovetail.options import Options

if TYPE_CHECKING:
    from dovetail.guests.mesh.manifest import MeshRecord
    from dovetail.guests.mesh.remote import MeshRun
    from dovetail.sim.line import Board, Link
    from dovetail.target.description import Target

_UNSUITED = ("sim", "core", "waves", "io", "load", "check_layers")
"""Options of `dovetail run` that a rack does not have."""


def run_mesh(folder: Path, options: RunOptions, on: BoardOptions, own: Options) -> None:
    """Run a mapped network on a rack, or without one on emulated elements of this computer.

    Raises:
        DovetailError: an option is not for racks, the rack does not do its part, or an output differs.
    """
    unsuited = [*changed_options(options, _UNSUITED), *changed_options(on, _UNSUITED)]
    if unsuited:
        what = "a mapped network runs on a rack, and its programs are made by dovetail itself"
        raise DovetailError(what, where=", ".join(unsuited), hint="leave it out; name a rack with --on")
    board = on.board()
    if board is not None:
        board.check()
    with progress("starting") as show:
        from dovetail.arrays import inputs_of, write_outputs
        from dovetail.guests.mesh.compiled import with_compiler
        from dovetail.guests.mesh.manifest import GRAPH, read_mesh
        from dovetail.guests.mesh.remote import RackSession, mesh_images
        from dovetail.guests.mesh.reporting import require_equal
        from dovetail.ir.onnx_file import load_graph
        from dovetail.operators import combined, known_operators
        from dovetail.target.registry import load_target

        build = read_mesh(folder)
        element = with_compiler(load_target(options.target or build.target))
        inputs, batched = inputs_of(options.input_file, build.inputs)
        show("compiling the elements' programs")
        images = mesh_images(folder, build, element, show)
        with RackSession(build, images, _opener(element, board), board.timeout if board else 600.0, show) as session:
            run = session.run(inputs)
    note_seeded(options.input_file)
    if options.output_file is not None:
        write_outputs(options.output_file, run.outputs, batched)
    with beside_json(options.json_file, _as_json(folder, build, run)):
        _print_run(build, run)
    if options.check:
        graph = load_graph(folder / GRAPH, known_operators(combined(element.operators, own.operators)))
        require_equal(graph, inputs, run.outputs, "the elements give", "look at the rack, or report this")
        say("every output equals the integer graph's")


def _opener(target: Target, board: Board | None) -> Callable[[], Link]:
    """A function that opens the line to the rack."""
    from functools import partial

    from dovetail.guests.mesh.rack import EmulatedElements
    from dovetail.sim.board import opener
    from dovetail.sim.rack import Rack, rack_link

    return opener(board) if board else partial(rack_link, Rack(EmulatedElements(target)), "this process")


def _print_run(build: MeshRecord, run: MeshRun) -> None:
    taken = run.clocks[:, :, 3] - run.clocks[:, :, 0]
    names = [one.program for one in build.elements for _ in one.places]
    slowest = int(taken.max(axis=0).argmax())
    say(
        f"{len(build.elements)} elements, {len(run.outputs)} inputs; the slowest piece, of {names[slowest]}, "
        f"took {int(taken[:, slowest].max())} cycles; {run.asked} requests, {run.repeated} sent again, "
        f"the rack loaded anew {run.restarts} times"
    )


def _as_json(folder: Path, build: MeshRecord, run: MeshRun) -> dict[str, Any]:
    """The run with the clocks of every piece: began, gave its slots back, sent, was free."""
    return {
        "schema": 1,
        "network": str(folder),
        "elements": [[*one.on, one.program] for one in build.elements],
        "clocks": run.clocks.tolist(),
        "requests": run.asked,
        "sent_again": run.repeated,
        "loaded_anew": run.restarts,
    }
