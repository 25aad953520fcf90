"""Cycles of the parts of core kernels' loops, measured in `iss`, and how near to `iss` they come.

`measure [CORE]...` runs networks on each core, layers of theirs with other register blocks, and copies of all sizes;
fits cycles to the parts of their loops (`dovetail.kernels.turns`), and writes dovetail/target/kernel_cycles.json.
`renew [CORE]...` measures only what `small`, `narrow` and `language_layers` have, and fits their parts anew: minutes;
with `--language` only the last.
`compare [TARGET]...` prints model and `iss` of the four MLPerf Tiny networks layer by layer (`--layers`) or in a table.
Layers that are made small, at most 1/512 of a network's work, are left out.

Both need the models in ../shared; measuring all takes about two hours.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from language_layers import PARTS as LANGUAGE
from language_layers import language_layers
from scipy.optimize import lsq_linear
from tables import show, write

from dovetail.arrays import seeded_inputs
from dovetail.codegen.emit.project import write_project
from dovetail.codegen.emit.unit import with_little_work
from dovetail.compile import Options, compile_model
from dovetail.errors import DovetailError
from dovetail.guests.tune.measure import measured
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Add, Lookup, Quantize, Requantize, Rounding
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Concat, Pad, Slice, Transpose
from dovetail.ir.operators.reduction import MaxPool2d, SumPool2d
from dovetail.ir.types import DType, Shape, TensorType
from dovetail.kernels import BYTES, WEIGHTS, core_traits, offered, turns
from dovetail.report import make_report
from dovetail.run import open_build, run_build
from dovetail.schedule.partition import partition
from dovetail.target import Target
from dovetail.target.pattern import Choice
from dovetail.targets import load_target
from dovetail.timing.kernels import core_cycles

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT.parent / "shared/models"
TABLE = ROOT / "dovetail/target/kernel_cycles.json"
TINY = ("ad_autoencoder", "ic_resnet8", "kws_dscnn", "vww_mobilenetv1")
FIELD = (
    *("tinymaix_mbnet96_0.25_q.tflite", "mobilenet_v1_0.25_128_quant.tflite", "ssd_slim_120x160x1_v1_int8.tflite"),
    *("person_detect.tflite", "hps_model_2022_01_05_74ops.tflite", "sww_streaming_int8.tflite", "mww_vad.tflite"),
    *("match_keyword_spotting_int.onnx", "mnist_lstm_int8.tflite", "keyword_svdf_16x8.tflite", "qdq_mlp.onnx"),
    *("model_mobilenetv2_160_035.tflite", "mcunetv2_person_det.tflite"),
)
CORES_ALONE = ("riscv", "riscv_dot4", "riscv_xpulp", "riscv64", "cortex_m0plus", "cortex_m3", "cortex_m4", "cortex_m7")
LEGALISED = {"rv32imc": ("ne16", "macarray", "diana", "vta"), "cortex-m4": ("kestrel", "spinnaker2")}
"""Targets with engines beside such a core."""
MORE_MEMORY = 16 << 20
"""Bytes of every memory while kernels are measured, so that all networks fit."""
MOST_CYCLES = 6_000_000
"""Of a layer whose choices are measured."""
DRAWN = 24
"""Choices of each."""
FAR = 0.08
"""A relative error that is too large."""
MOST_CALL = 300.0
"""Cycles of a kernel's beginning and end at most; what else a fit finds there belongs to its loops."""
RENEWED = ("MaxPool2d.", "end.Lookup", "end.Quantize_few", "wide.", *LANGUAGE)
"""Beginnings of the names of parts that `small` and `language_layers` have layers of."""


@dataclass(frozen=True)
class Layer:
    """A layer on a core, and what it took in `iss`."""

    network: str
    name: str
    graph: Graph
    cycles: int
    weight: float = 1.0
    """Of its error among those of others."""
    choice: Choice = field(default_factory=dict)
    """Of its kernel's knobs."""


def cores() -> dict[str, Target]:
    """Name of a set of kernel cycles -> a target with a core it is for."""
    found = {
        **{"rv32imc": "riscv", "rv64gc": "riscv64", "rv32imc+dot4": "riscv_dot4", "xpulp": "riscv_xpulp"},
        **{"cortex-m0plus+halves": "cortex_m0plus", "cortex-m3": "cortex_m3", "cortex-m4+dsp": "cortex_m4"},
        "cortex-m7+dsp": "cortex_m7",
    }
    targets = {name: load_target(target) for name, target in found.items()}
    plain = replace(targets["cortex-m4+dsp"].core, instructions=(), functions={})
    simple = replace(targets["cortex-m0plus+halves"].core, pairs=None)
    targets["cortex-m0plus"] = replace(targets["cortex-m0plus+halves"], core=simple)
    return {**targets, "cortex-m4": replace(targets["cortex-m4+dsp"], core=plain)}


def layers_on(target: Target, models: Sequence[Path]) -> Iterator[Layer]:
    """The layers of networks that the core computes, but those that are made small; what is refused is said."""
    for model in models:
        try:
            made = compile_model(model, target, Options())
            with tempfile.TemporaryDirectory() as folder:
                write_project(made.project, Path(folder) / "build")
                build = open_build(Path(folder) / "build", target)
                inputs = [seeded_inputs(build.manifest.inputs)]
                report = make_report(run_build(build, None, inputs)).to_json()
        except DovetailError as error:
            print(f"{model.name}: {error.what[:100]}")
            continue
        measured = {layer["name"]: layer["cycles"] for layer in report["layers"]}
        own = [region for region in made.regions if not (region.shares or region.is_view or region.copied_by)]
        little = set(with_little_work([region.graph for region in own]))
        for number, region in enumerate(own):
            if number not in little and measured.get(region.name):
                yield Layer(model.stem, region.name, region.graph, measured[region.name])


def chosen(layers: Sequence[Layer], target: Target) -> Iterator[Layer]:
    """Each kind of layer by itself, with settings of its knobs drawn at random."""
    seen, random = set[str](), np.random.default_rng(0)
    for layer in layers:
        space, regions = offered(layer.graph, core_traits(target.core)).space, partition(layer.graph, target)
        kind = " ".join(f"{one}" for one in layer.graph.types.values())
        if kind in seen or not space.knobs or len(regions) != 1 or layer.cycles > MOST_CYCLES:
            continue
        seen.add(kind)
        points = list(space.points())
        for choice in (points[index] for index in random.permutation(len(points))[:DRAWN]):
            yield Layer(layer.network, layer.name, layer.graph, alone(layer.graph, target, choice), 0.48, choice)


def moves() -> Iterator[Graph]:
    """Concatenations, slices, pads and transpositions with rows of a few bytes to many."""
    for rows, columns in ((6, 10), (12, 24)):
        for count in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 100):
            shape = (1, rows, columns, count)
            yield _move(Concat(3), shape, (1, rows, columns, 8))
            yield _move(Slice((0, 0, 0, 8), (1, rows, columns, 8 + count), (1,) * 4), (1, rows, columns, 16 + count))
            if count <= 32:
                yield _move(Pad((0, 1, 1, 0), (0, 1, 1, 0)), shape)
                yield _move(Slice((0, 1, 2, 0), (1, rows - 1, columns - 2, count), (1,) * 4), shape)
                yield _move(Slice((0,) * 4, shape, (1, 2, 2, 1)), shape)
                yield _move(Concat(2), shape, (1, rows, 3, count))
    for shape, order in (
        ((1, 12, 20, 8), (0, 3, 1, 2)),
        ((1, 8, 12, 20), (0, 2, 3, 1)),
        ((1, 16, 10, 12), (0, 2, 1, 3)),
    ):
        yield _move(Transpose(order), shape)


def pools() -> Iterator[Graph]:
    """Sums of images, by themselves and added to those of a band before."""
    for rows, columns in ((1, 8), (2, 8), (3, 3), (5, 5), (3, 12), (8, 8)):
        for channels in (16, 64, 128, 256):
            for added in (False, True):
                builder = GraphBuilder("pool")
                image = builder.input("x", TensorType((1, rows, columns, channels), DType.UINT8))
                made = builder.add(SumPool2d((rows, columns), (1, 1)), [image], "sum")
                if added:
                    before = builder.input("before", TensorType((1, 1, 1, channels), DType.INT32))
                    made = builder.add(Add(), [made, before], "y")
                yield builder.finish([made])


def small() -> Iterator[Graph]:
    """Largest values, tables, few floats that are quantised, and int32 that is requantised, from a few elements on: in
    the smallest shows what a call takes."""
    for rows, columns, channels in ((2, 2, 4), (4, 4, 8), (6, 6, 12), (8, 8, 16), (16, 16, 16), (9, 7, 20)):
        shape = (1, rows, columns, channels)
        for window, stride in (((2, 2), (2, 2)), ((3, 3), (1, 1)), ((3, 2), (2, 1)), ((rows, columns), (1, 1))):
            if window[0] <= rows and window[1] <= columns:
                yield _move(MaxPool2d(window, stride), shape)
        builder = GraphBuilder("few")
        floats = builder.input("x", TensorType((1, 4, 4, 2 * rows), DType.FLOAT32))
        scale = builder.constant("scale", np.array([0.02], np.float32))
        zero = builder.constant("zero", np.array([3], np.int32))
        yield builder.finish([builder.add(Quantize(DType.INT8), [floats, scale, zero], "y")])
        builder = GraphBuilder("lookup")
        image = builder.input("x", TensorType(shape, DType.INT8))
        table = builder.constant("table", np.arange(-128, 128, dtype=np.int8)[::-1].copy())
        yield builder.finish([builder.add(Lookup(), [image, table], "y")])
        for rounding, shift in ((Rounding.DOWN, 2), (Rounding.DOUBLE, -9)):
            builder = GraphBuilder("requantised")
            sums = builder.input("x", TensorType((1, rows, 2 * columns, channels), DType.INT32))
            each = [np.full(channels, number, np.int32) for number in (3 << 29, shift)]
            numbers = [builder.constant(f"number_{place}", array) for place, array in enumerate(each)]
            yield builder.finish([builder.add(Requantize(rounding), [sums, *numbers], "y")])


def narrow(target: Target) -> list[Layer]:
    """Layers of the four networks whose weights stay bytes, on a core that multiplies pairs; none on others."""
    core = replace(target.core, pairs=None)
    models = [MODELS / "mlperf_tiny" / f"{name}_int8.tflite" for name in TINY] if target.core.pairs else []
    return [replace(one, choice={WEIGHTS: BYTES}) for one in layers_on(replace(target, core=core), models)]


def _move(operator: Operator, *shapes: Shape) -> Graph:
    builder = GraphBuilder("move")
    inputs = [builder.input(f"x{place}", TensorType(shape, DType.INT8)) for place, shape in enumerate(shapes)]
    return builder.finish([builder.add(operator, inputs, "y")])


def alone(graph: Graph, target: Target, choice: Choice) -> int:
    """Cycles of a layer that is a network by itself, without its beginning and end."""
    (region,) = partition(graph, target)
    return measured(graph, target, None, {region.name: choice} if choice else {}) - target.core.statements.around


def fitted(layers: Sequence[Layer], target: Target) -> dict[str, float]:
    """Cycles of every part, none negative: relative errors are made small, the median before the worst, but none of the
    heaviest layers' above `FAR`, if it can be."""
    core = core_traits(target.core)
    counts = [turns(layer.graph, core, layer.choice) for layer in layers]
    parts = sorted({part for count in counts for part in count})
    table = np.array(
        [[one.get(part, 0) / layer.cycles for part in parts] for one, layer in zip(counts, layers, strict=True)]
    )
    own = np.array([layer.weight for layer in layers])
    weights: npt.NDArray[np.float64] = own
    for _ in range(20):
        found = _bounded(table * weights[:, None], weights, parts)
        weights = own * np.maximum(abs(table @ found - 1), 0.01) ** -0.5
    most = 6 * weights  # what no rates explain shall not spoil the others
    for _ in range(15):
        found = _bounded(table * weights[:, None], weights, parts)
        far = (own == max(own)) & (abs(table @ found - 1) > FAR)
        weights = np.minimum(weights * np.where(far, 1.3, 1.0), most)
    kept = {part: round(float(value), 3) for part, value in zip(parts, found, strict=True)}
    return {part: value for part, value in kept.items() if value or part.startswith("end.")}


def _bounded(
    table: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64], parts: Sequence[str]
) -> npt.NDArray[np.float64]:
    """The least squares of `table @ cycles - wanted`: no part below 0, no call above `MOST_CALL`."""
    scales = np.maximum(np.linalg.norm(table, axis=0), 1e-12)  # of parts that run once and of those that run often
    most = np.array([MOST_CALL if part.endswith(".call") else np.inf for part in parts]) * scales
    found = lsq_linear(table / scales, wanted, (0, np.maximum(most, 1e-9)), method="bvls", max_iter=2000)
    return np.asarray(found.x / scales)


def renewed(
    rates: Mapping[str, float], layers: Sequence[Layer], target: Target, parts: tuple[str, ...] = RENEWED
) -> dict[str, float]:
    """The cycles with those of some parts, of calls above `MOST_CALL` and of parts that have none, fitted anew to some
    layers, and all others as they are."""
    others = {
        part: value
        for part, value in rates.items()
        if not part.startswith(parts) and not (part.endswith(".call") and value > MOST_CALL)
    }
    rows, left = [], []
    for layer in layers:
        counts = turns(layer.graph, core_traits(target.core), layer.choice)
        known = sum(others.get(part, 0.0) * count for part, count in counts.items())
        is_new = {part: part not in others for part in counts}
        rows.append({part: count / layer.cycles for part, count in counts.items() if is_new[part]})
        left.append(max(0.0, 1 - known / layer.cycles))
    new = sorted({part for row in rows for part in row})
    found = _bounded(np.array([[row.get(part, 0.0) for part in new] for row in rows]), np.array(left), new)
    return others | {part: round(float(value), 3) for part, value in zip(new, found, strict=True) if value > 5e-4}


def renew(names: Sequence[str], of_language: bool) -> None:
    """Fit the parts of `RENEWED` anew for some cores, or those of language models alone."""
    known = json.loads(TABLE.read_text())
    for name in names or list(cores()):
        target = cores()[name]
        graphs = [*language_layers(), *(() if of_language else small())]
        layers = [Layer("small", graph.name, graph, alone(graph, target, {})) for graph in graphs]
        layers += [] if of_language else narrow(target)
        known[name] = renewed(known[name], layers, target, LANGUAGE if of_language else RENEWED)
        target = replace(target, core=replace(target.core, kernels=known[name]))
        print(
            f"{name}: {spread([core_cycles(one.graph, target, one.choice) / one.cycles for one in layers])}", flush=True
        )
        TABLE.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


def spread(ratios: Sequence[float]) -> str:
    """The median and the largest distance from 1."""
    off = abs(np.array(ratios) - 1)
    return f"median {np.median(off):.1%}, worst {off.max():.1%}, {int((off > 0.1).sum())} of {len(off)} above 10 %"


def measure(names: Sequence[str]) -> None:
    """Fit the cycles of some cores, and write them beside those of the others."""
    tiny = [MODELS / "mlperf_tiny" / f"{name}_int8.tflite" for name in TINY]
    known = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    for name in names or list(cores()):
        layers = samples(name, tiny)
        known[name] = fitted(layers, target := cores()[name])
        target = replace(target, core=replace(target.core, kernels=known[name]))
        ratios = [core_cycles(one.graph, target, one.choice) / one.cycles for one in layers]
        print(f"{name}: {spread(ratios)}", flush=True)
        TABLE.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


def samples(name: str, tiny: Sequence[Path]) -> list[Layer]:
    """What is measured of a core: those of the four networks count most, copies by themselves least."""
    target = cores()[name]
    memories = tuple(replace(memory, size=max(memory.size, MORE_MEMORY)) for memory in target.memories)
    target = replace(target, memories=memories)
    layers = [replace(layer, weight=2.0) for layer in layers_on(target, tiny)]
    made = list(chosen(layers, target))
    layers += [replace(layer, weight=0.7) for layer in layers_on(target, [MODELS / "field" / one for one in FIELD])]
    for other in LEGALISED.get(name, ()):  # what engines want of a network, all of it on the core
        layers += layers_on(replace(load_target(other), engines=()), tiny)
    moved = [Layer("moves", "move", graph, alone(graph, target, {}), 0.5) for graph in moves()]
    summed = [Layer("pools", "pool", graph, alone(graph, target, {}), 0.5) for graph in pools()]
    return [*layers, *made, *moved, *summed]


def compare(names: Sequence[str], every: bool, keep: bool) -> None:
    """Print how near to `iss` the model is, for the layers that run on each target's core: `every` layer too."""
    models = [MODELS / "mlperf_tiny" / f"{name}_int8.tflite" for name in TINY]
    rows: list[list[object]] = [["target", "layers on the core", "model against `iss`"]]
    for name in names:
        target = load_target(name)
        layers = list(layers_on(target, models))
        ratios = [core_cycles(layer.graph, target) / layer.cycles for layer in layers]
        rows.append([name, len(layers), spread(ratios)])
        for layer, ratio in zip(layers, ratios, strict=True) if every else ():
            print(f"{layer.network:20} {layer.name:20} {layer.cycles:>12,} {ratio:.3f}")
    show({"kernel_cycles": rows})
    if keep:
        write({"kernel_cycles": rows}, f"python scripts/kernel_cycles.py compare {' '.join(names)}")


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "renew", "compare"))
    parser.add_argument("names", nargs="*", help="cores of `measure`, targets of `compare`")
    parser.add_argument("--layers", action="store_true", help="print every layer")
    parser.add_argument("--language", action="store_true", help="`renew`: only parts of language models")
    parser.add_argument("--write", action="store_true", help="`compare`: write the table to docs/figures")
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.names)
    elif asked.what == "renew":
        renew(asked.names, asked.language)
    else:
        compare(asked.names or CORES_ALONE, asked.layers, asked.write)


if __name__ == "__main__":
    main()
