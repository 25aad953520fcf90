"""Measures what quantisation costs: prints tables, and writes them to docs/figures with --write.

    python scripts/quantisation_tables.py [SECTION ...] [--write]

Needs scikit-learn (dovetail[zoo-training]), the simulator (dovetail[iss]) and, for resnet8, ../shared.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tables import Rows, Sections, run

from dovetail.compile import Options, compile_model
from dovetail.guests import zoo
from dovetail.guests.ptq import Method, QuantisedNetwork, Samples, Settings, prepare, quantise_network
from dovetail.guests.ptq.accuracy import Accuracy, compare, firmware_outputs
from dovetail.guests.ptq.search import decibel, frontier_svg, run_report
from dovetail.guests.ptq.settings import Budget
from dovetail.guests.zoo.networks import resnet8
from dovetail.guests.zoo.weights import synthetic_inputs
from dovetail.ir.graph import Graph
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array
from dovetail.legalize import adapt
from dovetail.quantize import quantize
from dovetail.read import load_model, own_rounding
from dovetail.target import Target
from dovetail.targets import load_target

REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = REPOSITORY.parent / "shared" / "models"
CALIBRATION = 512
"""Training images of the digits that are used."""
VALIDATION = 400
"""Other training images, on which the loss of mixed precision is measured."""
RESNET_SAMPLES = 200
RESNET_TEST = 24
WIDTHS = (8, 4, 2)


def digits_data() -> tuple[Samples, Samples, Samples]:
    """Calibration and validation from the training images, and the images held back."""
    spec = importlib.util.spec_from_file_location("train_digits", REPOSITORY / "scripts" / "train_digits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    data = module.split(seed=0)
    images, labels = data.images.astype(np.float32)[:, None], data.labels
    end = CALIBRATION + VALIDATION
    test, truth = zoo.held_back("digits").values()
    return (
        Samples({"input": images[:CALIBRATION]}, labels[:CALIBRATION]),
        Samples({"input": images[CALIBRATION:end]}, labels[CALIBRATION:end]),
        Samples({"input": test[:, None]}, truth),
    )


def measure(found: QuantisedNetwork, reference: Graph, test: Samples, target: Target) -> Accuracy:
    """Float network, integer graph and firmware on test data."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(found.model.SerializeToString(deterministic=True))
        qdq = simplify(load_model(path))
        integer = adapt(quantize(qdq, own_rounding(path), allow_float=True), target.policy(None))

        def firmware(inputs: Sequence[dict[str, Array]]) -> list[Array]:
            return firmware_outputs(path, target, "iss", inputs, lambda text: None)

        return compare(qdq, integer, reference, test.inputs, test.labels, {}, lambda text: None, firmware)


def digits_tables() -> dict[str, Rows]:
    """The digits network: top-1 of firmware on the images held back."""
    graph = _zoo_graph("digits")
    calibration, validation, test = digits_data()
    rows = []
    plans: list[tuple[str, Settings]] = [(f"int{bits}", Settings(bits=bits, integer_ends=True)) for bits in WIDTHS]
    plans.append(("int2 to int8, loss <= 1", Settings(budget=Budget("loss", 1.0), integer_ends=True)))
    for name, settings in plans:
        cells: list[object] = [name]
        for place in ("riscv", "ne16"):
            target = load_target(place)
            found = quantise_network(graph, calibration, target, settings, validation)
            result = measure(found, graph, test, target)
            exact, _, firmware = result.columns
            assert exact.top1 is not None and firmware.top1 is not None
            report = run_report(found.graph, target)
            cells += [f"{firmware.top1:.2f} %", f"{firmware.top1 - exact.top1:+.2f}", f"{report.cycles['total']:,}"]
        if found.search is not None:
            (REPOSITORY / "docs" / "frontier.svg").write_text(
                frontier_svg(found.search, "digits: weights against signal-to-noise ratio")
            )
        rows.append([*cells, f"{found.weight_bytes:,}"])
    header = ["weights", "riscv", "points", "cycles", "ne16", "points", "cycles", "bytes of weights"]
    print(f"Float: {exact.top1:.2f} % of {test.count} images.", file=sys.stderr)
    return {"quantised_digits": [header, *rows]}


def _zoo_graph(name: str) -> Graph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        path.write_bytes(zoo.build_float(name))
        return prepare(load_model(path), path.name)


def resnet_data(count: int, seed: int) -> Array:
    """Images [count, 1, 32, 32, 3] of 0 to 255: the CIFAR image and the varied inputs, then synthetic ones."""
    with np.load(MODELS / "samples" / "ic_taxi_s_001241.npz", allow_pickle=False) as file:
        real = [file["image_u8"].astype(np.float32)]
    with np.load(MODELS / "mlperf_tiny" / "ic_resnet8_int8.many.npz", allow_pickle=False) as file:
        real += [file[f"in_{index}"].astype(np.float32) + 128 for index in range(12)]
    drawn = synthetic_inputs(resnet8(), count, seed).transpose(0, 2, 3, 1)[:, None].astype(np.float32)
    return np.concatenate([np.stack(real), drawn])[:count]


def resnet_graph() -> Graph:
    """The float network of MLPerf Tiny, from its Keras file."""
    path = MODELS / "keras" / "ic_resnet8.h5"
    return prepare(load_model(path), path.name)


def resnet_tables() -> dict[str, Rows]:
    """ResNet8 on the NE16 at 8, 4 and 2 bits, and mixed."""
    graph, target = resnet_graph(), load_target("ne16")
    name = graph.inputs[0]
    calibration = Samples({name: resnet_data(RESNET_SAMPLES, seed=1)}, None)
    test = Samples({name: resnet_data(RESNET_TEST, seed=2)}, None)
    plans: list[tuple[str, Settings]] = [(f"int{bits}", Settings(bits=bits, integer_ends=True)) for bits in WIDTHS]
    plans.append(("mixed, bytes=24k", Settings(budget=Budget("bytes", 24e3), integer_ends=True)))
    rows = []
    for text, settings in plans:
        found = quantise_network(graph, calibration, target, settings)
        result = measure(found, graph, test, target)
        report = run_report(found.graph, target)
        firmware = result.columns[-1]
        logits = next(layer.sqnr for layer in reversed(result.layers) if layer.name != graph.outputs[0])
        rows.append(
            [
                text,
                f"{found.weight_bytes:,}",
                f"{report.cycles['total']:,}",
                f"{report.cycles['ne16']:,}",
                f"{logits:.1f} dB",
                f"{firmware.agreement:.1f} %",
            ]
        )
    header = ["weights", "bytes", "cycles", "NE16 busy", "SQNR of the logits", "class as float"]
    return {"quantised_resnet8": [header, *rows]}


def activation_tables() -> dict[str, Rows]:
    """ResNet8 on the tests' port of an engine like RBE: widths of activations, what they cost and what they save."""
    graph, target = resnet_graph(), load_target(str(REPOSITORY / "tests" / "rbe_port" / "rbe.py"))
    name = graph.inputs[0]
    calibration = Samples({name: resnet_data(RESNET_SAMPLES // 2, seed=1)}, None)
    test = Samples({name: resnet_data(RESNET_TEST // 3, seed=2)}, None)
    common = Settings(method=Method.MSE, integer_ends=True)
    plans = [
        ("int8", "int8", common),
        ("int4", "int8", replace(common, bits=4)),
        ("int4", "int4", replace(common, bits=4, activation_bits=4)),
        ("int2", "int2", replace(common, bits=2, activation_bits=2)),
    ]
    rows = []
    for weights, activations, settings in plans:
        found = quantise_network(graph, calibration, target, settings)
        result, report = measure(found, graph, test, target), run_report(found.graph, target)
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "resnet8.onnx"
            model.write_bytes(found.model.SerializeToString(deterministic=True))
            placed = compile_model(model, target, Options()).plan.placements
        peaks = {placement.memory: placement.peak for placement in placed}
        logits = next(layer.sqnr for layer in reversed(result.layers) if layer.name != graph.outputs[0])
        cells = [found.weight_bytes, peaks["L1"], peaks["L2"], report.cycles["total"], report.cycles["rbe"]]
        rows.append([weights, activations, *(f"{cell:,}" for cell in cells), f"{logits:.1f} dB"])
        print(rows[-1], file=sys.stderr, flush=True)
    header = ["weights", "activations", "bytes of weights", "L1 peak", "L2 peak", "cycles", "engine busy"]
    return {"quantised_activations": [[*header, "SQNR of the logits"], *rows]}


def method_tables() -> dict[str, Rows]:
    """The ways to choose ranges, and the steps that can be left out."""
    graph, target = resnet_graph(), load_target("ne16")
    name = graph.inputs[0]
    calibration = Samples({name: resnet_data(RESNET_SAMPLES // 2, seed=1)}, None)
    data = resnet_data(64, seed=2)
    rows = []
    plans: list[tuple[str, dict[str, object]]] = [(method.value, {"method": method}) for method in Method]
    plans += [
        ("min-max, symmetric", {"symmetric": True}),
        ("min-max, biases kept", {"correct_bias": False}),
        ("min-max, nearest rounding", {"adaptive": False}),
        ("min-max, a scale per layer", {"per_channel": False}),
        ("the same, equalised", {"per_channel": False, "equalise": True}),
        ("the same, nearest", {"per_channel": False, "adaptive": False}),
        ("the same, nearest, equalised", {"per_channel": False, "adaptive": False, "equalise": True}),
    ]
    for text, choices in plans:
        cells: list[object] = [text]
        for bits in WIDTHS[:2]:
            settings = Settings(bits=bits, **choices)  # type: ignore[arg-type]
            found = quantise_network(graph, calibration, target, settings)
            cells.append(f"{logit_ratio(graph, found.graph, {name: data}):.1f} dB")
        print(cells, file=sys.stderr, flush=True)
        rows.append(cells)
    return {"quantised_methods": [["ranges", *(f"int{bits}" for bits in WIDTHS[:2])], *rows]}


def logit_ratio(graph: Graph, quantised: Graph, data: dict[str, Array]) -> float:
    """Signal to noise of what the last softmax is computed of, in dB."""
    from dovetail.guests.ptq.search import outputs_on, result_values

    (value,) = result_values(graph)
    wanted, got = (outputs_on(g, data, value).astype(np.float64) for g in (graph, quantised))
    return decibel(float(((got - wanted) ** 2).sum() / (wanted**2).sum()))


SECTIONS: Sections = {
    "digits": digits_tables,
    "resnet8": resnet_tables,
    "activations": activation_tables,
    "methods": method_tables,
}


if __name__ == "__main__":
    run(__doc__.splitlines()[0], "scripts/quantisation_tables.py", SECTIONS)
