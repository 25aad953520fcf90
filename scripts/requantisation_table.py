"""What each ready-made requantisation costs in accuracy: prints a table, and writes it to docs/figures with --write.

    python scripts/requantisation_table.py [--write]

ResNet8 and DS-CNN of MLPerf Tiny, int8 TFLite files, 12 inputs each (../shared/models/mlperf_tiny). Compared are the
values before the softmax, with those of a network that saturates as the quantised one does and does not round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from tables import Rows, run

from dovetail.guests.ptq import Samples, Settings, prepare, quantise_network
from dovetail.guests.ptq.preparation import input_steps, unquantised
from dovetail.ir.crop import trim
from dovetail.ir.graph import Graph, evaluate, prune
from dovetail.ir.operators.activation import Softmax
from dovetail.ir.operators.arithmetic import Dequantize
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array
from dovetail.legalize.ready import READY, TRUNCATED, Requantisation
from dovetail.quantize import quantize
from dovetail.read import load_model
from dovetail.target.description import Quantisation
from dovetail.targets import load_target

REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = REPOSITORY.parent / "shared" / "models" / "mlperf_tiny"
NAMES = {"ResNet8": "ic_resnet8_int8", "DS-CNN": "kws_dscnn_int8"}
FIRST = "as in the file"


def without_softmax(graph: Graph) -> Graph:
    """The network up to the values its softmax reads, quantised where these are."""
    makers = graph.producers()
    source = next(node.inputs[0] for node in graph.nodes if isinstance(node.operator, Softmax))
    if isinstance(makers[source].operator, Dequantize):
        source = makers[source].inputs[0]
    return prune(replace(graph, outputs=(source,)))


def real(graph: Graph, whole: Graph, array: Array) -> Array:
    """The numbers the integers of the only output stand for, by the Dequantize behind it in the whole network."""
    node = next(n for n in whole.nodes if isinstance(n.operator, Dequantize) and n.inputs[0] == graph.outputs[0])
    return np.asarray(node.operator.evaluate([array, *(whole.constants[name] for name in node.inputs[1:])]))


def anew(graph: Graph, data: list[Array], ready: Requantisation) -> Graph:
    """The network quantised again, to what the requantisation wants of scales."""
    wants = Quantisation(per_channel=ready.per_channel, shifts=ready.bits == 1)
    target = replace(load_target("riscv"), quantisation=wants)
    reals = prepare(graph, "model")
    steps = input_steps(graph)[graph.inputs[0]]
    samples = np.stack([(x.astype(np.float64) - steps.zero_point) * steps.scale for x in data]).astype(np.float32)
    settings = Settings(integer_ends=True, per_channel=ready.per_channel)
    return quantise_network(reals, Samples({reals.inputs[0]: samples}, None), target, settings).graph


def measured(model: str) -> Iterator[tuple[Requantisation, str, float, int]]:
    """Each requantisation: how the network got scales for it, decibels before the softmax, inputs of equal top-1."""
    file = np.load(MODELS / f"{model}.many.npz")
    data = [file[f"in_{index}"] for index in range(12)]
    graph = load_model(MODELS / f"{model}.tflite")
    steps = input_steps(graph)[graph.inputs[0]]
    inputs = [((x.astype(np.float64) - steps.zero_point) * steps.scale).astype(np.float32) for x in data]
    for ready in (*READY[:4], replace(TRUNCATED, half_in_bias=False, name="rounded down, bias as it is"), *READY[4:]):
        remade = ready.bits == 1 or not ready.per_channel
        source = anew(graph, data, ready) if remade else graph
        cut = without_softmax(source)
        reals = unquantised(cut, saturates=True)
        wanted = [evaluate(reals, {reals.inputs[0]: x})[reals.outputs[0]] for x in inputs]
        made = ready.rewrite().apply(trim(quantize(simplify(cut))))
        if made.left:
            raise RuntimeError(f"{model}, {ready.name}: {next(iter(made.left.values()))}")
        own = input_steps(source)[source.inputs[0]]
        given = [np.clip(np.rint(x / own.scale) + own.zero_point, -128, 127).astype(np.int8) for x in inputs]
        found = [real(cut, source, evaluate(made, {made.inputs[0]: x})[made.outputs[0]]) for x in given]
        noise = sum(float(((a - b) ** 2).sum()) for a, b in zip(found, wanted, strict=True))
        power = sum(float((b**2).sum()) for b in wanted)
        same = sum(int(a.argmax() == b.argmax()) for a, b in zip(found, wanted, strict=True))
        yield ready, "quantised anew" if remade else FIRST, 10 * np.log10(power / noise), same


def table() -> dict[str, Rows]:
    """The table."""
    rows: dict[str, list[str]] = {}
    for model in NAMES.values():
        for ready, how, ratio, same in measured(model):
            rows.setdefault(ready.name, [how]).append(f"{ratio:.1f} dB, {same}/12")
    head = ["requantisation", "scales", *NAMES]
    return {"requantisations": [head, *([name, *cells] for name, cells in rows.items())]}


if __name__ == "__main__":
    run((__doc__ or "").splitlines()[0], "scripts/requantisation_table.py", {"all": table}, [MODELS])
