"""`dovetail run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dovetail import plugins
from dovetail.cli.console import beside_json, note_seeded, output, progress, say
from dovetail.cli.options import BoardOptions, Simulator, argument
from dovetail.documented import document
from dovetail.errors import DovetailError
from dovetail.options import Options, flag

if TYPE_CHECKING:
    from dovetail.sim.line import Board


@dataclass(frozen=True)
class RunOptions:
    """Options of `dovetail run`."""

    sim: Simulator | None = flag(
        None,
        "The simulated chip with its cycles (iss), the same with engines in Verilog (rtl), or the C code on this "
        "machine (host); iss if the target has a simulated chip.",
        kind=Simulator | None,
    )
    input_file: Path | None = flag(
        None, "An .npz keyed by input tensor names; seeded inputs if not given.", "--input", kind=Path | None
    )
    output_file: Path | None = flag(
        None, "Write the outputs here, an .npz keyed by tensor names.", "--output", kind=Path | None
    )
    json_file: Path | None = flag(None, "Write the report here as JSON; - for stdout.", "--json", kind=Path | None)
    target: str | None = flag(None, "The target file of the build; not needed for a built-in target.", "--target", "-t")
    core: str = flag("", "With --sim rtl: run on this core's RTL (cv32e40p, cv32e40p-pulp, ibex, picorv32, vexriscv).")
    waves: Path | None = flag(None, "With --sim rtl: write the engine's signals here, as VCD.", kind=Path | None)
    wave_cycles: int = flag(10_000, "Cycles of them, from the start.", min=1)
    check: bool = flag(True, "Compare the outputs with the integer graph in the build.")
    parts: bool = flag(False, "Show each part of a layer that is cut.", "--parts")
    check_layers: bool = flag(
        False,
        "On a simulator: compare every layer, and name the first that differs.",
        "--check-layers",
    )


def run(
    build: Annotated[Path, argument(help="A folder made by dovetail compile, or by dovetail mesh.")],
    options: RunOptions,
    own: Annotated[Options, "operators"],
    on: BoardOptions,
) -> None:
    """Run a build on a simulated chip or on a board, and compare its outputs with the integer graph.

    Reports what it cost, layer by layer; ends with status 1 where an output differs.

    Example: dovetail run build/net --input x.npz --output y.npz

    Example: dovetail run build/net --check-layers

    Example: dovetail run build/net --on serial:/dev/ttyUSB0:921600

    Example: dovetail run build/net --on gdb:localhost:3333 --board-io uart.c

    Example: dovetail run build/net --on agent:lab/bench1 --secret lab.secret

    Example: dovetail run build/mesh --on agent:lab/rack --secret lab.secret
    """
    board = on.board()
    if options.check_layers and (board or not options.check):
        what = "layers are compared on a simulator, and only where outputs are"
        raise DovetailError(what, where="--check-layers", hint="leave out --on and --no-check")
    for name in plugins.names(plugins.BUILDS):
        if (build / name).is_file() and (runner := plugins.load(plugins.BUILDS, name, plugins.function)):
            runner(build, options, on, own)
            return
    _run(build, options, own, board)


def _run(folder: Path, options: RunOptions, own: Options, board: Board | None) -> None:
    with progress("starting") as show:
        from dovetail import prove
        from dovetail.arrays import inputs_of, write_outputs
        from dovetail.report import make_report, print_report
        from dovetail.run import Waves, default_simulator, open_build, run_build
        from dovetail.target.registry import load_target

        build = open_build(folder, load_target(options.target) if options.target else None)
        graph = prove.read_graph(build, own.operators) if options.check else None
        inputs, batched = inputs_of(options.input_file, build.manifest.inputs)
        where = board.where if board else f"the {options.sim or default_simulator(build.target)}"
        show(f"compiling and running {len(inputs)} inference{'s' if len(inputs) > 1 else ''} on {where}")
        waves = Waves(options.waves, options.wave_cycles) if options.waves else None
        result = run_build(build, options.sim, inputs, waves=waves, board=board, core=options.core)
        report, layers = make_report(result), ""
        if graph is not None and options.check_layers:
            show("comparing every layer")
            layers = prove.every_layer(build, graph, options.sim, inputs, options.core)
        several = prove.several_at_once(build, graph, options.sim) if graph is not None and board is None else ""
    note_seeded(options.input_file)
    if options.output_file is not None:
        write_outputs(options.output_file, result.outputs, batched)
    with beside_json(options.json_file, report.to_json()):
        print_report(report, output(), options.parts)
        if layers:
            say(layers)
        if graph is not None:
            say(prove.prove(result, graph, inputs))
        if several:
            say(several)


document(__name__)
