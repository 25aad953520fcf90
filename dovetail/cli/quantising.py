"""What `dovetail quantize` and `dovetail accuracy` do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.console import note, output, progress, say
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.calibrate import Settings
    from dovetail.calibrate.accuracy import Accuracy
    from dovetail.calibrate.budget import Point
    from dovetail.calibrate.data import Preprocessing
    from dovetail.calibrate.mixed import Search

    Report = Callable[[str], None]

WORST = 5
"""Layers named as the worst."""
SHOWN = 12
"""Points of the frontier in the table."""


@dataclass(frozen=True, slots=True)
class DataOrder:
    """Where data are and what is done to them; see `dovetail quantize --help`."""

    path: Path
    scale: float
    offset: float
    resize: bool
    samples: int

    @property
    def preprocessing(self) -> Preprocessing:
        """As the reader takes it."""
        from dovetail.calibrate.data import Preprocessing

        return Preprocessing(self.scale, self.offset, self.resize, self.samples)


@dataclass(frozen=True, slots=True)
class QuantizeOrder:
    """The arguments of `dovetail quantize`."""

    model: Path
    target: str
    data: DataOrder
    weights: str
    """"int8", "int4", "int2" or "mixed"."""
    budget: str | None
    validation: Path | None
    method: str
    equalise: bool
    correct_bias: bool
    adaptive: bool
    per_channel: bool
    symmetric: bool
    integer_ends: bool
    output: Path
    plot: Path | None
    widths: tuple[str, ...] = ()
    """Of single layers: "pattern=int2"."""


def quantize_to(order: QuantizeOrder) -> None:
    """Quantise a float model and write it as ONNX; raises DovetailError."""
    mixed = order.weights == "mixed"
    if mixed != (order.budget is not None):
        what = "--weights mixed needs a --budget" if mixed else "--budget is for --weights mixed only"
        raise DovetailError(what, where="--weights, --budget", hint="for instance: --weights mixed --budget bytes=20k")
    for option, given in (("--plot", order.plot), ("--validation", order.validation)):
        if given is not None and not mixed:
            raise DovetailError("this option is for --weights mixed only", where=option,
                                hint=f"leave {option} out, or give --weights mixed with a --budget")
    if order.output.suffix.lower() != ".onnx":
        raise DovetailError(f"the model is written as ONNX, not as '{order.output.name}'", where="-o",
                            hint="end -o with .onnx")
    with progress("starting") as report:
        from dovetail.calibrate import named_widths, prepare, quantise_network, read_samples
        from dovetail.cli.arrays import write_file
        from dovetail.frontend import load_model
        from dovetail.targets import load_target

        settings, target = _settings(order), load_target(order.target)
        report("reading the model")
        graph = prepare(load_model(order.model), order.model.name)
        settings = replace(settings, widths=named_widths(graph, order.widths))
        report("reading the data")
        samples = read_samples(order.data.path, graph, order.data.preprocessing)
        how = order.data.preprocessing
        validation = read_samples(order.validation, graph, how) if order.validation is not None else None
        found = quantise_network(graph, samples, target, settings, validation, report)
        write_file(order.output, found.model.SerializeToString(deterministic=True))
        if found.search is not None and order.plot is not None:
            from dovetail.calibrate.plot import frontier_svg

            title = f"{graph.name} on {target.name}: weights against signal-to-noise ratio"
            write_file(order.plot, frontier_svg(found.search, title).encode())
    if found.search is not None:
        _print_search(found.search)
    if min(found.widths.values(), default=8) < 8 and not target.quantisation.packed:
        note(f"{target.name} holds narrow weights one to a byte: they cost there what 8-bit weights cost")
    narrower = f" and {', '.join(order.widths)}" if order.widths else ""
    layers = f"{len(found.widths)} layers ({order.weights}{narrower})"
    say(f"{order.output}: {found.weight_bytes:,} bytes of weights in {layers}, {samples.count} samples")


def _settings(order: QuantizeOrder) -> Settings:
    """The choices; raises DovetailError for a budget that is none."""
    from dovetail.calibrate import Method, Settings
    from dovetail.calibrate.budget import parse_budget

    return Settings(
        method=Method(order.method),
        bits=8 if order.weights == "mixed" else int(order.weights.removeprefix("int")),
        budget=parse_budget(order.budget) if order.budget is not None else None,
        equalise=order.equalise,
        correct_bias=order.correct_bias,
        adaptive=order.adaptive,
        per_channel=order.per_channel,
        symmetric=order.symmetric,
        integer_ends=order.integer_ends,
    )


def _print_search(found: Search) -> None:
    """Tables of the layers and of the frontier."""
    from rich.table import Table

    from dovetail.calibrate.budget import decibel
    from dovetail.calibrate.plot import thinned

    widths = list(found.layers[0].cost) if found.layers else []
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("layer", overflow="fold")
    for bits in widths:
        table.add_column(f"int{bits}: {found.unit}", justify="right")
        table.add_column("dB", justify="right")
    table.add_column("chosen", justify="right")
    for layer in found.layers:
        cells = [text for b in widths for text in (f"{layer.cost[b]:,.0f}", f"{decibel(layer.noise[b]):.1f}")]
        table.add_row(layer.name, *cells, f"int{found.widths[layer.name]}")
    output().print(table, highlight=False, markup=False)
    table = Table(show_edge=False, pad_edge=False)
    for heading in (found.unit, "predicted dB", "layers at " + "/".join(str(bits) for bits in widths), ""):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for point in sorted({*thinned(found.points, SHOWN), found.chosen}, key=lambda point: point.cost):
        table.add_row(*_point(point, found, widths))
    output().print(table, highlight=False, markup=False)


def _point(point: Point, found: Search, widths: list[int]) -> tuple[str, ...]:
    counts = "/".join(str(point.widths.count(bits)) for bits in widths)
    low, high = found.points[0].sqnr, found.points[-1].sqnr
    bar = "#" * round(40 * (point.sqnr - low) / max(high - low, 1e-9))
    mark = " <- chosen" if point == found.chosen else ""
    return f"{point.cost + found.base:,.0f}", f"{point.sqnr:.1f}", counts, f"{bar}{mark}"


@dataclass(frozen=True, slots=True)
class AccuracyOrder:
    """The arguments of `dovetail accuracy`."""

    model: Path
    data: DataOrder
    target: str | None
    float_model: Path | None
    simulator: str | None
    json_file: Path | None


def accuracy_of(order: AccuracyOrder) -> None:
    """Compare float, integer graph and firmware; raises DovetailError."""
    with progress("starting") as report:
        found = _accuracy(order, report)
    if order.json_file is not None:
        import json
        from dataclasses import asdict

        from dovetail.cli.arrays import write_file

        write_file(order.json_file, (json.dumps({"schema": 1, **asdict(found)}, indent=2) + "\n").encode())
    if order.float_model is None:
        note("no --float-model: float is this model with float activations, its weights as they are quantised")
    _print_accuracy(found)


def _accuracy(order: AccuracyOrder, report: Report) -> Accuracy:
    from functools import partial

    from dovetail.adapt import adapt
    from dovetail.calibrate.accuracy import compare, firmware_outputs, read_factors, without_activations
    from dovetail.calibrate.data import read_samples
    from dovetail.calibrate.mixed import check_labels
    from dovetail.calibrate.prepare import prepare
    from dovetail.frontend import load_model
    from dovetail.graph.simplify import simplify
    from dovetail.quantize import quantize
    from dovetail.run import default_simulator
    from dovetail.targets import load_target

    report("reading the model")
    qdq = simplify(load_model(order.model))
    integer = quantize(qdq, allow_float=True)
    target = load_target(order.target) if order.target is not None else None
    integer = adapt(integer, target.policy(None)) if target is not None else integer
    if order.float_model is not None:
        reference = prepare(load_model(order.float_model), order.float_model.name)
    else:
        reference = without_activations(qdq)
    if set(reference.inputs) != set(qdq.inputs):
        raise DovetailError(f"the inputs {sorted(qdq.inputs)} are not those of the float model, "
                            f"{sorted(reference.inputs)}", where=order.model.name,
                            hint="compare with the float model that was quantised")
    samples = read_samples(order.data.path, reference, order.data.preprocessing)
    if samples.labels is not None:
        check_labels(samples.labels, reference.types[reference.outputs[0]].elements)
    firmware = None
    if target is not None:
        simulator = order.simulator or default_simulator(target)
        firmware = partial(firmware_outputs, order.model, target, simulator, report=report)
    factors = read_factors(order.model)
    return compare(qdq, integer, reference, samples.inputs, samples.labels, factors, report, firmware)


def _print_accuracy(found: Accuracy) -> None:
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for heading in ("computed by", "samples", "top-1", "as float", "SQNR"):
        table.add_column(heading, justify="left" if heading == "computed by" else "right")
    for column in found.columns:
        cells = ["" if value is None else f"{value:.2f} %" for value in (column.top1, column.agreement)]
        ratio = "exact" if column.sqnr >= 200 else f"{column.sqnr:.1f} dB"
        table.add_row(column.name, str(column.samples), *cells, ratio)
    output().print(table, highlight=False, markup=False)
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("layer", "SQNR", ""):
        table.add_column(heading, justify="right" if heading == "SQNR" else "left", overflow="fold")
    worst = found.worst[:WORST]
    for layer in found.layers:
        place = f"worst {worst.index(layer) + 1}" if layer in worst else ""
        table.add_row(layer.name, f"{layer.sqnr:.1f} dB", place)
    if found.layers:
        output().print(table, highlight=False, markup=False)
