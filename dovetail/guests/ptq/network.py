"""All steps of a quantisation: a float network and data in, a network in QDQ form, which a target takes, out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.guests.ptq.accuracy import FACTORS
from dovetail.guests.ptq.calibration import (
    CalibratedNetwork,
    calibrate,
    choose_layers,
    held_bits,
    weight_widths,
)
from dovetail.guests.ptq.data import Samples
from dovetail.guests.ptq.onnx_writer import plain_onnx
from dovetail.guests.ptq.qdq import qdq_graph
from dovetail.guests.ptq.search import LayerCost, WidthSearchResult, activation_costs, search, weight_bytes
from dovetail.guests.ptq.sequences import steps_as_samples
from dovetail.guests.ptq.settings import Settings, Told
from dovetail.guests.ptq.steps import Data
from dovetail.ir.graph import Graph
from dovetail.notes import silent
from dovetail.records import Record
from dovetail.target.description import Target

if TYPE_CHECKING:
    import onnx


class QuantisedNetwork(Record):
    """A quantised network."""

    graph: Graph
    """In QDQ form."""
    model: onnx.ModelProto
    """The same as plain ONNX."""
    widths: Mapping[str, int]
    """Bits of the weights by result of the layer."""
    weight_bytes: int
    """Bytes of all weights, as the target holds them."""
    search: WidthSearchResult | None
    """How the widths were found, where a budget was given."""
    activations: tuple[LayerCost, ...] = ()
    """Activations of fewer than 8 bits, each at its own width alone: bytes and noise. Empty where none is."""


def quantise_network(
    graph: Graph,
    samples: Samples,
    target: Target,
    settings: Settings,
    validation: Samples | None = None,
    report: Told = silent,
) -> QuantisedNetwork:
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
    samples = steps_as_samples(graph, samples, report)
    validation = steps_as_samples(graph, validation, report) if validation is not None else None
    data, measured = samples.inputs, validation or samples
    widths: Mapping[str, int] = weight_widths(graph, settings, target)
    calibrated = calibrate(graph, data, target.quantisation, settings, report)
    outcome = None
    if settings.budget is not None:
        outcome = search(calibrated, data, measured, target, settings.budget, report)
        widths = outcome.widths
        calibrated = calibrated.at_widths(outcome.activation_widths) if outcome.values else calibrated
    scheme = choose_layers(calibrated, data, widths, report)
    report("writing the model")
    quantised = qdq_graph(calibrated.graph, scheme)
    rows = {name: [round(float(value), 9) for value in row] for name, row in calibrated.factors.items()}
    notes = {FACTORS: json.dumps(rows, sort_keys=True)} if rows else {}
    held = {name: held_bits(target, bits) for name, bits in widths.items()}
    model, narrow = plain_onnx(quantised, notes), _narrow_activations(calibrated, data, report)
    return QuantisedNetwork(quantised, model, widths, weight_bytes(graph, held), outcome, narrow)


def _narrow_activations(calibrated: CalibratedNetwork, data: Data, report: Told) -> tuple[LayerCost, ...]:
    """Bytes of the activations of fewer than 8 bits, and the noise of each alone, in the network's order."""
    bits = {name: steps.dtype.bits for name, steps in calibrated.activations.items()}
    groups = {name: (name,) for name in bits if bits[name] < 8}
    widths = sorted({bits[name] for name in groups}, reverse=True)
    costs = activation_costs(calibrated, data, groups, widths, report)
    return tuple(
        LayerCost(one.name, {bits[one.name]: one.noise[bits[one.name]]}, {bits[one.name]: one.cost[bits[one.name]]})
        for one in costs
    )
