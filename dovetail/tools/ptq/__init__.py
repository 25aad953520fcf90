"""Calibrate: from a float network, or what a quantised one stands for, and data to a quantised one that a target takes.

`quantise_network` is the table of contents. The result is in QDQ form, which the quantize stage takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.ir.graph import Graph
from dovetail.target.description import Target
from dovetail.tools.ptq.accuracy import FACTORS
from dovetail.tools.ptq.budget import weight_bytes
from dovetail.tools.ptq.calibration import (
    Settings,
    calibrate,
    choose_layers,
    finds_two_bits,
    named_widths,
    weight_widths,
)
from dovetail.tools.ptq.data import Preprocessing, Samples, read_samples
from dovetail.tools.ptq.execute import Told, silent
from dovetail.tools.ptq.onnx_writer import plain_onnx
from dovetail.tools.ptq.prepare import prepare
from dovetail.tools.ptq.qdq import qdq_graph
from dovetail.tools.ptq.search import Search, search
from dovetail.tools.ptq.steps import Method
from dovetail.tools.ptq.unquantise import input_steps, is_quantised

if TYPE_CHECKING:
    import onnx

__all__ = ["Method", "Preprocessing", "Quantised", "Samples", "Settings", "input_steps", "is_quantised"]
__all__ += ["finds_two_bits", "named_widths", "prepare", "quantise_network", "read_samples"]


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
    report: Told = silent,
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
        found = search(calibrated, data, measured, target, settings.budget, report)
        widths = found.widths
    scheme = choose_layers(calibrated, data, widths, report)
    report("writing the model")
    quantised = qdq_graph(calibrated.graph, scheme)
    rows = {name: [round(float(value), 9) for value in row] for name, row in calibrated.factors.items()}
    notes = {FACTORS: json.dumps(rows, sort_keys=True)} if rows else {}
    return Quantised(quantised, plain_onnx(quantised, notes), widths, weight_bytes(graph, widths), found)
