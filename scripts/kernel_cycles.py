"""Cycles of the parts of core kernels' loops, measured in `iss`, and how near to `iss` they come.

`measure [CORE]...` runs networks on each core, fits cycles to the parts of their layers (`dovetail.kernels.turns`) and
writes dovetail/target/kernel_cycles.json; `compare [TARGET]...` prints model and `iss` of the four MLPerf Tiny networks
layer by layer (`--layers`) or in a table. Layers that are made small, at most 1/512 of a network's work, are left out.

Both need the models in ../shared; measuring all takes about half an hour.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from dovetail.codegen.emit.project import write_project
from dovetail.codegen.emit.unit import with_little_work
from dovetail.compile import Options, compile_model
from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph
from dovetail.kernels import core_traits, turns
from dovetail.run import open_build, run_build
from dovetail.schedule.assign.costs import core_cycles
from dovetail.target import Target
from dovetail.targets import load_target
from dovetail.tools.arrays import seeded_inputs
from dovetail.tools.report import make_report

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
CORES_ALONE = ("riscv", "riscv_dot4", "riscv_xpulp", "riscv64", "cortex_m0plus", "cortex_m3", "cortex_m4")
LEGALISED = {"rv32imc": ("ne16", "macarray", "diana", "vta"), "cortex-m4": ("kestrel", "spinnaker2")}
"""Targets with engines beside such a core."""
MORE_MEMORY = 16 << 20
"""Bytes of every memory while kernels are measured, so that all networks fit."""


@dataclass(frozen=True)
class Layer:
    """A layer on a core, and what it took in `iss`."""

    network: str
    name: str
    graph: Graph
    cycles: int


def cores() -> dict[str, Target]:
    """Name of a set of kernel cycles -> a target with a core it is for."""
    found = {
        **{"rv32imc": "riscv", "rv64gc": "riscv64", "rv32imc+dot4": "riscv_dot4", "xpulp": "riscv_xpulp"},
        **{"cortex-m0plus": "cortex_m0plus", "cortex-m3": "cortex_m3", "cortex-m4+dsp": "cortex_m4"},
    }
    targets = {name: load_target(target) for name, target in found.items()}
    plain = replace(targets["cortex-m4+dsp"].core, instructions=(), functions={})
    return {**targets, "cortex-m4": replace(targets["cortex-m4+dsp"], core=plain)}


def layers_on(target: Target, models: Sequence[Path]) -> Iterator[Layer]:
    """The layers of networks that the core computes, but those that are made small; what is refused is said."""
    for model in models:
        try:
            made = compile_model(model, target, Options())
            with tempfile.TemporaryDirectory() as folder:
                write_project(made.project, Path(folder) / "build")
                build = open_build(Path(folder) / "build", target)
                inputs = [seeded_inputs(build.manifest["inputs"])]
                report = make_report(run_build(build, None, inputs)).to_json()
        except DovetailError as error:
            print(f"{model.name}: {error.what[:100]}")
            continue
        measured = {layer["name"]: layer["cycles"] for layer in report["layers"]}
        own = [region for region in made.regions if region.engine is None and not region.is_view and not region.mover]
        little = set(with_little_work([region.graph for region in own]))
        for number, region in enumerate(own):
            if number not in little and measured.get(region.name):
                yield Layer(model.stem, region.name, region.graph, measured[region.name])


def fitted(layers: Sequence[Layer], target: Target) -> dict[str, float]:
    """Cycles of every part, none negative: relative errors are made small, the median before the worst."""
    core = core_traits(target.core)
    counts = [turns(layer.graph, core) for layer in layers]
    parts = sorted({part for count in counts for part in count})
    table = np.array(
        [[one.get(part, 0) / layer.cycles for part in parts] for one, layer in zip(counts, layers, strict=True)]
    )
    weights: npt.NDArray[np.float64] = np.ones(len(layers))
    for _ in range(12):
        found, _ = nnls(table * weights[:, None], weights, maxiter=100_000)
        weights = np.maximum(abs(table @ found - 1), 0.01) ** -0.5
    kept = {part: round(float(value), 3) for part, value in zip(parts, found, strict=True)}
    return {part: value for part, value in kept.items() if value or part.startswith("end.")}


def spread(ratios: Sequence[float]) -> str:
    """The median and the largest distance from 1."""
    off = abs(np.array(ratios) - 1)
    return f"median {np.median(off):.1%}, worst {off.max():.1%}, {int((off > 0.1).sum())} of {len(off)} above 10 %"


def measure(names: Sequence[str]) -> None:
    """Fit the cycles of some cores, and write them beside those of the others."""
    models = [
        *(MODELS / "mlperf_tiny" / f"{name}_int8.tflite" for name in TINY),
        *(MODELS / "field" / n for n in FIELD),
    ]
    known = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    for name in names or list(cores()):
        target = cores()[name]
        memories = tuple(replace(memory, size=max(memory.size, MORE_MEMORY)) for memory in target.memories)
        target = replace(target, memories=memories)
        layers = list(layers_on(target, models))
        for other in LEGALISED.get(name, ()):  # what engines want of a network, all of it on the core
            layers += layers_on(replace(load_target(other), engines=()), models[: len(TINY)])
        known[name] = fitted(layers, target)
        target = replace(target, core=replace(target.core, kernels=known[name]))
        print(f"{name}: {spread([core_cycles(one.graph, target) / one.cycles for one in layers])}", flush=True)
        TABLE.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


def compare(names: Sequence[str], show: bool) -> None:
    """Print how near to `iss` the model is, for the layers that run on each target's core."""
    models = [MODELS / "mlperf_tiny" / f"{name}_int8.tflite" for name in TINY]
    print("| target | layers on the core | model against `iss` |\n| --- | ---: | --- |")
    for name in names:
        target = load_target(name)
        layers = list(layers_on(target, models))
        ratios = [core_cycles(layer.graph, target) / layer.cycles for layer in layers]
        print(f"| `{name}` | {len(layers)} | {spread(ratios)} |", flush=True)
        for layer, ratio in zip(layers, ratios, strict=True) if show else ():
            print(f"{layer.network:20} {layer.name:20} {layer.cycles:>12,} {ratio:.3f}")


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "compare"))
    parser.add_argument("names", nargs="*", help="cores of `measure`, targets of `compare`")
    parser.add_argument("--layers", action="store_true", help="print every layer")
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.names)
    else:
        compare(asked.names or CORES_ALONE, asked.layers)


if __name__ == "__main__":
    main()
