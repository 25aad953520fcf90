"""Post-training quantisation, top to bottom: a float graph and data in, a plain ONNX model out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.calibrate.accuracy import FACTORS
from dovetail.calibrate.budget import weight_bytes
from dovetail.calibrate.calibration import Report, Settings, calibrate, choose_layers, weight_widths
from dovetail.calibrate.data import Samples
from dovetail.calibrate.mixed import Search, search
from dovetail.calibrate.onnx_writer import plain_onnx
from dovetail.calibrate.qdq import Scheme, qdq_graph
from dovetail.graph.graph import Graph
from dovetail.target.description import Target

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Quantised:
    """A quantised network."""

    graph: Graph
    """In QDQ form."""
    model: onnx.ModelProto
    """The same as plain ONNX."""
    widths: Mapping[str, int]
    """Bits of the weights by result of the layer."""
    weight_bytes: int
    """Of all weights, packed."""
    search: Search | None
    """How the widths were found, where a budget was given."""


def quantise_network(
    graph: Graph,
    samples: Samples,
    target: Target,
    settings: Settings,
    validation: Samples | None = None,
    report: Report = lambda text: None,
) -> Quantised:
    """Quantise a network to what a target takes.

    Args:
        graph: what `prepare` gave.
        samples: what ranges, rounding and biases are fitted to.
        target: the machine.
        settings: the user's choices.
        validation: other samples, perhaps with labels, that a budget of accuracy is measured on; None for the same.
        report: told the progress.

    Raises:
        TargetError: the target does not take weights of a width.
        DovetailError: the network computes NaN or infinity on the data, or no choice keeps the budget.
    """
    data, measured = samples.inputs, validation or samples
    widths: Mapping[str, int] = weight_widths(graph, settings, target)
    calibrated = calibrate(graph, data, target.quantisation, settings, report)
    found = None
    if settings.budget is not None:
        found = search(calibrated, data, measured, target, settings, settings.budget, report)
        widths = found.widths
    layers = choose_layers(calibrated, data, widths, target.quantisation, settings, report)
    report("writing the model")
    scheme = Scheme(calibrated.activations, layers.weights, layers.biases, settings.integer_ends)
    quantised = qdq_graph(calibrated.graph, scheme)
    rows = {name: [round(float(value), 9) for value in row] for name, row in calibrated.factors.items()}
    notes = {FACTORS: json.dumps(rows, sort_keys=True)} if rows else {}
    return Quantised(quantised, plain_onnx(quantised, notes), widths, weight_bytes(graph, widths), found)
