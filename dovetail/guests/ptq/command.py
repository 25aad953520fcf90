"""`dovetail quantize` and `dovetail accuracy`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.cli.console import beside_json, note, progress, say, show_table, tell
from dovetail.cli.options import Model, Simulator, TargetName, argument, option
from dovetail.errors import DovetailError
from dovetail.guests.ptq.settings import Preprocessing, Settings, Told
from dovetail.notes import Note
from dovetail.options import Options, flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.guests.ptq import QuantisedNetwork, Samples
    from dovetail.guests.ptq.accuracy import Accuracy, Column
    from dovetail.guests.ptq.search import FrontierPoint, WidthSearchResult
    from dovetail.ir.graph import Graph
    from dovetail.target import Target

WORST = 5
"""Layers named as the worst."""
SHOWN = 12
"""Points of the frontier in the table."""


Data = Annotated[
    Path, option(help="An .npz with an array per input (and labels), a folder of .npy, or a folder of images.")
]


Width = Literal["int8", "int4", "int2", "mixed"]


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of `dovetail quantize`."""

    output: Path | None = flag(
        None, "The .onnx file to write; MODEL_WIDTH.onnx if not given.", "--output", "-o", kind=Path | None
    )
    weights: Width = flag("int8", "Width of the weights.", kind=Width)
    width: tuple[str, ...] = flag(
        tuple,
        "Width of the weights of layers, by name or pattern: 'conv2*=int2'. May be given several times; the last that "
        "fits a layer counts.",
        kind=list[str] | None,
        read=tuple,
    )
    activations: Width = flag("int8", "Width of the activations, for targets that take narrow ones.", kind=Width)
    activation_width: tuple[str, ...] = flag(
        tuple, "Width of single activations, as --width: 'conv2*=int2'.", kind=list[str] | None, read=tuple
    )
    validation: Path | None = flag(
        None, "For a budget of loss or sqnr: other data it is measured on.", kind=Path | None
    )
    plot: Path | None = flag(None, "For mixed: write the frontier here, as SVG.", kind=Path | None)
    compare: bool = flag(
        False, "Compare with ONNX Runtime's quantisers, on --validation or the same data.", "--compare"
    )

    def widths(self) -> dict[str, Any]:
        """The same for the quantiser's settings."""
        weights, activations = (0 if width == "mixed" else int(width[3:]) for width in (self.weights, self.activations))
        every = {"bits": weights or 8, "activation_bits": activations or 8}
        return {**every, "mixed_weights": not weights, "mixed_activations": not activations}


def quantize(
    model: Annotated[Path, argument(help="A .tflite, .onnx or Keras file: float, or quantised in another way.")],
    data: Data,
    target: TargetName,
    images: Preprocessing,
    own: Annotated[Options, "operators", "states"],
    settings: Settings,
    options: QuantizeOptions,
) -> None:
    """Quantise a float model, or a quantised one anew, with calibration data.

    To what the target takes; the result is plain ONNX.

    Example: dovetail quantize net.onnx --data calib.npz --target ne16 --weights int4

    Example: dovetail quantize net.onnx --data calib.npz --target diana --width 'block2*=int2' -o net_ternary.onnx

    Example: dovetail quantize net_int8.tflite --data calib.npz --target diana -o net_shifts.onnx
    """
    _check_together(options, settings)
    result = _result_of(options.output, model, options.weights)
    with progress("starting") as report:
        from dovetail.arrays import write_file
        from dovetail.guests import ptq
        from dovetail.guests.ptq.search import frontier_svg
        from dovetail.target.registry import load_target

        machine = load_target(target)
        report("reading the model")
        loaded, told = _loaded(model, machine, own)
        again, steps = ptq.is_quantised(loaded), ptq.input_steps(loaded)
        graph = ptq.prepare(loaded, model.name)
        settings = replace(
            settings,
            **options.widths(),
            integer_ends=settings.integer_ends or (again and bool(steps)),
            widths=ptq.named_widths(graph, options.width),
            activation_widths=ptq.named_activations(graph, options.activation_width),
        )
        report("reading the data")
        read = partial(ptq.read_samples, graph=graph, how=images, steps=steps)
        samples, other = read(data), read(options.validation) if options.validation is not None else None
        network = ptq.quantise_network(graph, samples, machine, settings, other, report)
        write_file(result, network.model.SerializeToString(deterministic=True))
        if network.search is not None and options.plot is not None:
            title = f"{graph.name} on {machine.name}: weights against signal-to-noise ratio"
            write_file(options.plot, frontier_svg(network.search, title).encode())
        rivals = _compared(model, network, samples, other or samples, report) if options.compare else None
    for one in (*told, *(() if again else ptq.unscaled(samples, graph, images))):
        tell(one)
    if again:
        note(f"{model.name} was quantised already: it is taken for the floats its integers stand for")
    _print_widths(network, machine)
    if rivals is not None:
        _print_columns(rivals[0])
        for sentence in rivals[1]:
            note(sentence)
    layers = f"{len(network.widths)} layers ({' and '.join(filter(None, (options.weights, ', '.join(options.width))))})"
    say(f"{result}: {network.weight_bytes:,} bytes of weights in {layers}, {samples.count} samples")


def _loaded(model: Path, machine: Target, own: Options) -> tuple[Graph, list[Note]]:
    """The network of a file, and notes on what was taken for granted."""
    from dovetail.guests import ptq
    from dovetail.operators import combined
    from dovetail.read import load_model

    told: list[Note] = []
    operators = combined(machine.operators, own.operators)
    graph = load_model(model, tell=told.append, operators=operators, states=own.states)
    return ptq.with_tables(graph, told.append), told


def _result_of(output: Path | None, model: Path, weights: str) -> Path:
    """The file to write; raises DovetailError where it is not one of ONNX."""
    result = output or Path(f"{model.stem}_{weights}.onnx")
    if result.suffix.lower() != ".onnx":
        raise DovetailError(
            f"the model is written as ONNX, not as '{result.name}'", where="-o", hint="end -o with .onnx"
        )
    return result


def _print_widths(network: QuantisedNetwork, target: Target) -> None:
    """Print the result of a search, narrow activations, and the cost of narrow weights on the target."""
    from dovetail.guests import ptq
    from dovetail.guests.ptq.search import decibel

    wants = target.quantisation
    if network.search is not None:
        _print_search(network.search)
    if min(network.widths.values(), default=8) < 8 and not wants.packed:
        note(f"{target.name} holds narrow weights one to a byte: they cost there what 8-bit weights cost")
    if network.activations:
        rows = [(one.name, f"{bits}", f"{one.cost[bits]:,.0f}", f"{decibel(one.noise[bits]):.1f}")
                for one in network.activations for bits in one.noise]  # fmt: skip
        show_table(("activation", "bits", "bytes", "dB alone"), rows, left=("activation",), fold=("activation",))
    if 2 in network.widths.values() and wants.packed and not (wants.ternary or ptq.finds_two_bits(target)):
        what = "files hold 2-bit weights in 4 bits, and there they stay: no policy of"
        note(f"{what} {target.name} has the rewrite dovetail.legalize.narrow_weights()")


def _compared(
    model: Path, found: QuantisedNetwork, given: Samples, measured: Samples, report: Told
) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """Accuracy beside that of ONNX Runtime's quantisers, and remarks; raises DovetailError for integer ends."""
    from dovetail.guests.ptq.accuracy import compare_with_runtime

    if any(found.graph.types[name].dtype.is_integer for name in (*found.graph.inputs, *found.graph.outputs)):
        hint = "leave --integer-ends out for the comparison"
        raise DovetailError("only networks with float ends are compared", where="--compare", hint=hint)
    content = found.model.SerializeToString(deterministic=True)
    return compare_with_runtime(model, content, given, measured, measured.labels is not None, report)


def _check_together(options: QuantizeOptions, settings: Settings) -> None:
    """Raise DovetailError for options that do not go with each other."""
    mixed = "mixed" in (options.weights, options.activations)
    if mixed != (settings.budget is not None):
        what = "mixed widths need a --budget" if mixed else "--budget is for mixed widths only"
        raise DovetailError(
            what, where="--weights, --activations, --budget", hint="for instance: --weights mixed --budget bytes=20k"
        )
    validation = None if options.compare else options.validation
    for name, file in {"--plot": options.plot, "--validation": validation}.items():
        if file is not None and not mixed:
            hint = f"leave {name} out, or give --weights mixed with a --budget"
            raise DovetailError("this option is for mixed widths only", where=name, hint=hint)


def _print_search(search: WidthSearchResult) -> None:
    from dovetail.guests.ptq.search import decibel, thinned

    parts = {"layer": (search.layers, search.widths), "activation": (search.values, search.activation_widths)}
    for noun, (members, chosen) in parts.items():
        widths = sorted({bits for one in members for bits in one.cost}, reverse=True)
        rows = []
        for one in members:
            pairs = [
                (f"{one.cost[b]:,.0f}", f"{decibel(one.noise[b]):.1f}") if b in one.cost else ("", "") for b in widths
            ]
            rows.append([one.name, *(text for pair in pairs for text in pair), f"int{chosen[one.name]}"])
        each = [heading for bits in widths for heading in (f"int{bits}: {search.unit}", "dB")]
        if rows:
            show_table((noun, *each, "chosen"), rows, left=(noun,), fold=(noun,))
    widths = sorted({bits for one in (*search.layers, *search.values) for bits in one.cost}, reverse=True)
    kinds = "layers and activations" if search.values else "layers"
    headings = (search.unit, "predicted dB", f"{kinds} at " + "/".join(str(bits) for bits in widths), "")
    points = sorted({*thinned(search.points, SHOWN), search.chosen}, key=lambda point: point.cost)
    show_table(headings, [_point(point, search, widths) for point in points], left=("",))
    note(f"chosen: {search.decided}")


def _point(point: FrontierPoint, search: WidthSearchResult, widths: list[int]) -> tuple[str, ...]:
    counts = "/".join(str(point.widths.count(bits)) for bits in widths)
    low, high = search.points[0].sqnr, search.points[-1].sqnr
    bar = "#" * round(40 * (point.sqnr - low) / max(high - low, 1e-9))
    mark = " <- chosen" if point == search.chosen else ""
    return f"{point.cost + search.base:,.0f}", f"{point.sqnr:.1f}", counts, f"{bar}{mark}"


def accuracy(
    model: Model,
    data: Data,
    images: Preprocessing,
    own: Annotated[Options, "operators", "states"],
    target: Annotated[str | None, option("--target", "-t", help="Compare firmware for this target too.")] = None,
    float_model: Annotated[Path | None, option("--float-model", help="The float model before quantisation.")] = None,
    sim: Annotated[
        Simulator | None,
        option(help="Where the firmware runs: on the simulated chip (iss, if the target has one), or on this machine."),
    ] = None,
    json_file: Annotated[Path | None, option("--json", help="Write the figures here as JSON; - for stdout.")] = None,
) -> None:
    """Compare float model, integer graph and firmware on data.

    Top-1, signal-to-noise ratio per layer, the worst layers.

    Example: dovetail accuracy net_int4.onnx --data test.npz --target ne16 --float-model net.onnx
    """
    with progress("starting") as report:
        from dovetail.guests.ptq.accuracy import accuracy_of

        comparison = accuracy_of(model, data, images, target, float_model, sim, report, own.operators, own.states)
    if float_model is None:
        note("no --float-model: float is this model with float activations, its weights as they are quantised")
    for one in comparison.notes:
        tell(one)
    notes = [one.to_json() for one in comparison.notes]
    with beside_json(json_file, {"schema": 1, **asdict(comparison), "notes": notes}):
        _print_accuracy(comparison)


def _print_columns(columns: Sequence[Column]) -> None:
    rows = []
    for column in columns:
        shares = ["" if value is None else f"{value:.2f} %" for value in (column.top1, column.agreement)]
        ratio = "exact" if column.sqnr >= 200 else f"{column.sqnr:.1f} dB"
        bits = [f"{column.bits:.3f}"] if column.bits is not None else []
        rows.append([column.name, str(column.samples), *bits, *shares, ratio])
    own = ["bits per token"] if columns and columns[0].bits is not None else []
    show_table(("computed by", "samples", *own, "top-1", "as float", "SQNR"), rows, left=("computed by",))


def _print_accuracy(comparison: Accuracy) -> None:
    _print_columns(comparison.columns)
    worst = comparison.worst[:WORST]
    places = [f"worst {worst.index(layer) + 1}" if layer in worst else "" for layer in comparison.layers]
    rows = [[layer.name, f"{layer.sqnr:.1f} dB", place] for layer, place in zip(comparison.layers, places, strict=True)]
    headings = ("layer", "SQNR", "")
    if rows:
        show_table(headings, rows, left=("layer", ""), fold=headings)
