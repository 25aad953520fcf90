"""The command `dovetail`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli import board_options as board
from dovetail.cli import compile_options as asked
from dovetail.cli import mesh_options as meshed
from dovetail.cli import placing_options as placed
from dovetail.cli import porting_options as port
from dovetail.cli import quantising_options as given
from dovetail.cli import report_options as shown
from dovetail.cli import schedule_options as ordered
from dovetail.cli import tuning_options as search
from dovetail.cli.common_options import (
    Model,
    ObjectiveChoice,
    OptimizeChoice,
    Requant,
    Rounding,
    RoundingChoice,
    Sim,
    Simulator,
    TargetName,
    Version,
)
from dovetail.cli.console import Commands, show_error
from dovetail.errors import DovetailError
from dovetail.user_file import blamed

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(
    epilog="Example: dovetail zoo digits -o digits.onnx, then dovetail compile digits.onnx --target ne16 -o build/net, "
    "then dovetail run build/net"
)
def every(version: Version = False) -> None:
    """Fits a quantised neural network to the accelerator you built: a model in, verified bare-metal C out."""


@app.command("compile")
def compile_command(
    model: Model,
    target: TargetName,
    build: asked.Folder,
    requant: Requant = None,
    rounding: Rounding = RoundingChoice.DOUBLE,
    save_stages: asked.SaveStages = None,
    check: asked.Check = False,
    allow_float: shown.AllowFloat = False,
    optimize: asked.Optimize = OptimizeChoice.SPEED,
    force: asked.Force = False,
    print_program: asked.PrintProgram = False,
    tuning: asked.Tuning = None,
    memory_budget: placed.Budget = None,
    dump: asked.Dump = None,
    cores: placed.Cores = None,
    pipeline: placed.InPipeline = False,
    pin: placed.Pin = None,
    pins: placed.Pins = None,
) -> None:
    """Compile a model to a C project, verified on the way.

    Example: dovetail compile net.tflite --target ne16 -o build/net --pin conv_4=core

    Example: dovetail compile net.tflite --target riscv --cores 4 -o build/net

    Example: dovetail compile net.tflite --target riscv_big_small --pipeline -o build/net
    """
    from dovetail.cli import compiling

    placement = compiling.Placement(cores, pipeline, tuple(pin or ()), pins, memory_budget)
    order = compiling.CompileOrder(
        model, target, build, requant, rounding.value, save_stages, check, allow_float, optimize.value, force,
        print_program, tuning, dump, placement,
    )  # fmt: skip
    compiling.compile_to(order)


@app.command()
def run(
    build: Annotated[Path, typer.Argument(help="A folder made by dovetail compile.", show_default=False)],
    sim: Sim = None,
    input_file: shown.Inputs = None,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", help="Write the outputs here, an .npz keyed by tensor names.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report here as JSON.", show_default=False)
    ] = None,
    target: shown.TargetFile = None,
    waves: Annotated[
        Path | None, typer.Option(help="With --sim rtl: write the engine's signals here, as VCD.", show_default=False)
    ] = None,
    wave_cycles: Annotated[int, typer.Option(min=1, help="Cycles of them, from the start.")] = 10_000,
    on: board.On = None,
    io: board.Io = None,
    load: board.Load = None,
    timeout: board.Timeout = 60.0,
) -> None:
    """Run a build on a simulated chip or on a board.

    Reports what it cost, layer by layer.

    Example: dovetail run build/net --input x.npz --output y.npz

    Example: dovetail run build/net --on serial:/dev/ttyUSB0:921600

    Example: dovetail run build/net --on gdb:localhost:3333 --board-io uart.c
    """
    from dovetail.cli import commands

    where = (sim.value if sim else None, board.board_of(on, io, load, timeout))
    order = commands.RunOrder(build, *where, input_file, output_file, json_file, target, waves, wave_cycles)
    commands.run_folder(order)


@app.command()
def report(
    build: shown.BuildFolder,
    page: shown.Page = Path("report.html"),
    json_file: shown.JsonFile = None,
    trace: shown.Trace = None,
    sim: Sim = None,
    input_file: shown.Inputs = None,
    target: shown.TargetFile = None,
) -> None:
    """Show where a build's time, memory and bytes go, as one HTML page.

    Runs the build; the page needs nothing else.

    Example: dovetail report build/net -o net.html --json net.json
    """
    from dovetail.cli import reporting

    reporting.report_of(build, page, json_file, trace, sim.value if sim else None, input_file, target)


@app.command()
def compare(
    first: shown.First,
    second: shown.Second,
    page: shown.MaybePage = None,
    json_file: shown.JsonFile = None,
    sim: Sim = None,
    input_file: shown.Inputs = None,
    target: shown.TargetFiles = None,
) -> None:
    """Show two builds side by side.

    What changed, the totals, and layer by layer.

    Example: dovetail compare build/engine build/exact -o compare.html
    """
    from dovetail.cli import reporting

    simulator = sim.value if sim else None
    reporting.compare_to((first, second), page, json_file, simulator, input_file, tuple(target or ()))


@app.command()
def sweep(
    model: Model,
    target: TargetName,
    settings: shown.Settings = None,
    requant: Requant = None,
    allow_float: shown.AllowFloat = False,
    optimize: Annotated[OptimizeChoice, typer.Option(help="As for dovetail compile.")] = OptimizeChoice.SPEED,
    jobs: shown.Jobs = None,
    page: shown.Page = Path("sweep.html"),
    json_file: shown.JsonFile = None,
) -> None:
    """Compile and run a model for many sizes of the hardware.

    What if the hardware were different? Points that were made before are not made again, so that a sweep that was
    stopped goes on.

    Example: dovetail sweep net.tflite --target ne16 --set l1.size=64K,128K --set dma.bytes_per_cycle=4,8
    """
    from dovetail.cli import sweeping

    chosen = (tuple(settings or ()), requant, allow_float, optimize.value, jobs, page, json_file)
    sweeping.sweep_to(sweeping.SweepOrder(model, target, *chosen))


@app.command()
def explain(
    model: Model,
    target: TargetName,
    requant: Requant = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    memory_budget: placed.Budget = None,
    cores: placed.Cores = None,
    pipeline: placed.InPipeline = False,
    pin: placed.Pin = None,
    pins: placed.Pins = None,
) -> None:
    """Show where every operator goes, and why.

    What each engine would cost, or what keeps it from taking it.

    Example: dovetail explain net.tflite --target ne16
    """
    from dovetail.cli import compiling, explaining

    placement = compiling.Placement(cores, pipeline, tuple(pin or ()), pins, memory_budget)
    explaining.explain(explaining.ExplainOrder(model, target, requant, as_json, placement))


@app.command()
def tune(
    model: Model,
    target: TargetName,
    trials: search.Trials = 64,
    output: search.File = None,
    log: search.Log = None,
    layers: search.Layers = None,
    measure: search.By = None,
    jobs: search.Jobs = 1,
    scheduler: search.Scheduler = None,
    seed: search.Seed = 0,
    requant: Requant = None,
    rounding: Rounding = RoundingChoice.DOUBLE,
    on: board.On = None,
    io: board.Io = None,
    load: board.Load = None,
    timeout: board.Timeout = 60.0,
) -> None:
    """Search for tiles, orders and places that take fewer cycles.

    Writes a file for dovetail compile --tuning.

    Example: dovetail tune net.tflite --target ne16 --trials 64 --jobs 2

    Example: dovetail tune net.tflite --target ne16 --on tcp:lab:4000 --board-io uart.c --load 'flash.sh {elf}'
    """
    from dovetail.cli import tuning

    names = tuple(name.strip() for name in layers.split(",") if name.strip()) if layers else ()
    by = measure.value if measure else None
    order = tuning.Order(
        model, target, requant, rounding.value, trials, by, names, seed, jobs, scheduler, output, log,
        board.board_of(on, io, load, timeout),
    )  # fmt: skip
    tuning.tune_to(order)


@app.command()
def schedule(
    model: Model,
    target: TargetName,
    multipliers: ordered.Multipliers = None,
    sizes: ordered.Sizes = None,
    rules: ordered.Rules = None,
    seconds: ordered.Seconds = 5.0,
    simulate: ordered.Simulate = True,
    folder: ordered.Folder = None,
    force: ordered.Force = False,
) -> None:
    """Order a whole network on a target's hardware.

    Which part works where, and when.

    Example: dovetail schedule net.h5 --target maeri --multipliers 64 -o build/order
    """
    from dovetail.cli import scheduling

    wish = scheduling.Wish(
        model, target, multipliers, tuple(sizes or ()), rules, seconds, simulate, folder, force
    )
    scheduling.schedule(wish)


@app.command()
def mesh(
    model: Model,
    target: TargetName,
    boards: meshed.Boards = None,
    chips: meshed.Chips = None,
    objective: meshed.Objective = ObjectiveChoice.THROUGHPUT,
    mapping: meshed.Mapping = None,
    faults: meshed.Faults = 0.0,
    seed: meshed.Seed = 0,
    inputs: meshed.Inputs = 12,
    exact: meshed.Exact = False,
    jobs: meshed.Jobs = 2,
    scheduler: meshed.Scheduler = None,
    folder: meshed.Folder = None,
    force: meshed.Force = False,
) -> None:
    """Cut a network into pieces for the elements of a mesh.

    Places, routes, models and emits them.

    Example: dovetail mesh net.tflite --target spinnaker2 --chips 1 -o build/mesh
    """
    from dovetail.cli import meshing

    order = meshing.MeshOrder(
        model, target, boards, chips, objective.value, mapping, faults, seed, inputs, exact, jobs, scheduler, folder,
        force,
    )  # fmt: skip
    meshing.mesh(order)


@app.command()
def quantize(
    model: given.FloatModel,
    data: given.Data,
    target: TargetName,
    result: given.Result,
    weights: given.Weights = given.WeightChoice.INT8,
    width: given.Width = None,
    budget: given.Budget = None,
    validation: given.Validation = None,
    method: given.Method = given.MethodChoice.MINMAX,
    equalise: given.Equalise = False,
    correct_bias: given.CorrectBias = True,
    adaptive: given.Adaptive = True,
    per_channel: given.PerChannel = True,
    symmetric: given.Symmetric = False,
    integer_ends: given.IntegerEnds = False,
    plot: given.Plot = None,
    samples: given.Samples = 512,
    scale: given.DataScale = 1.0,
    offset: given.DataOffset = 0.0,
    resize: given.Resize = False,
) -> None:
    """Quantise a float model with calibration data.

    To what the target takes; the result is plain ONNX.

    Example: dovetail quantize net.onnx --data calib.npz --target ne16 --weights int4 -o net_int4.onnx

    Example: dovetail quantize net.onnx --data calib.npz --target diana --width 'block2*=int2' -o net_ternary.onnx
    """
    from dovetail.cli import quantising

    order = quantising.QuantizeOrder(
        model, target, quantising.DataOrder(data, scale, offset, resize, samples), weights.value, budget, validation,
        method.value, equalise, correct_bias, adaptive, per_channel, symmetric, integer_ends, result, plot,
        tuple(width or ()),
    )  # fmt: skip
    quantising.quantize_to(order)


@app.command()
def accuracy(
    model: Model,
    data: given.Data,
    target: given.Firmware = None,
    float_model: given.Reference = None,
    sim: Annotated[
        Simulator | None,
        typer.Option(
            help="What firmware runs on: the simulated chip, or this machine; iss where there is such a chip.",
            show_default=False,
        ),
    ] = None,
    json_file: given.JsonFile = None,
    samples: given.Samples = 512,
    scale: given.DataScale = 1.0,
    offset: given.DataOffset = 0.0,
    resize: given.Resize = False,
) -> None:
    """Compare float model, integer graph and firmware on data.

    Top-1, signal-to-noise ratio per layer, the worst layers.

    Example: dovetail accuracy net_int4.onnx --data test.npz --target ne16 --float-model net.onnx
    """
    from dovetail.cli import quantising

    given_data = quantising.DataOrder(data, scale, offset, resize, samples)
    simulator = sim.value if sim else None
    order = quantising.AccuracyOrder(model, given_data, target, float_model, simulator, json_file)
    quantising.accuracy_of(order)


@app.command("new-target")
def new_target(name: port.Name, folder: port.Where = Path("."), force: port.Force = False) -> None:
    """Write a target file and a driver to start a port from.

    They compile and run as they are.

    Example: dovetail new-target mine -o port
    """
    from dovetail.cli import porting

    porting.new_target(name, folder, force)


@app.command()
def check(
    target: port.Target,
    sim: port.Sims = None,
    only: port.Only = None,
    full: port.Full = False,
    timeout: port.Seconds = 60.0,
    junit: port.Junit = None,
    markdown: port.Markdown = None,
) -> None:
    """Try a port at every limit it declares.

    Says what is likely wrong, in the smallest form. The status is 1 where there are findings.

    Example: dovetail check port/mine.py --junit check.xml
    """
    from dovetail.cli import porting

    chosen = (tuple(sim or ()), tuple(only or ()), full, timeout, junit, markdown)
    porting.check_target(porting.CheckOrder(target, *chosen))


@app.command()
def vectors(target: port.Target, output: port.Into, form: port.Format = "hex", force: port.Force = False) -> None:
    """Write test vectors for a Verilog test bench.

    What each kernel finds in memory, its register writes and the result.

    Example: dovetail vectors macarray --format hex -o vectors
    """
    from dovetail.cli import porting

    porting.vectors_to(target, form, output, force)


@app.command()
def targets() -> None:
    """List the targets and their requantisation policies.

    Example: dovetail targets
    """
    from dovetail.cli import commands

    commands.list_targets()


@app.command()
def zoo(
    name: Annotated[
        str | None, typer.Argument(help="A model; without it, the names are listed.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write; NAME.onnx if not given.", show_default=False),
    ] = None,
    real: Annotated[bool, typer.Option("--float", help="The float network it is quantised from.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="Write float samples for calibration here, as .npz.", show_default=False)
    ] = None,
    test: Annotated[
        Path | None, typer.Option(help="Of digits: write the images held back and labels here.", show_default=False)
    ] = None,
) -> None:
    """Write a model to try Dovetail with, or list them.

    Example: dovetail zoo digits -o digits.onnx
    """
    from dovetail.cli import commands

    commands.write_zoo(name, output, real, calibration, test)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: status 0, 1 after a message about a mistake, 2 for wrong usage, 130 after Ctrl-C.

    A bug shows its stack; what a function of the user's target file raises is told with its line there.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    try:
        app(arguments, prog_name="dovetail")
    except DovetailError as error:
        show_error(error)
        sys.exit(1)
    except Exception as error:
        told = blamed(error)
        if told is None:
            raise
        show_error(told)
        sys.exit(1)


if __name__ == "__main__":
    main()
