"""Calibration: what a user chooses, the steps of every activation from data, and layers of given widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from dovetail.errors import DovetailError, TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array, DType
from dovetail.target.description import Quantisation, Target
from dovetail.tools.ptq import steps as stepping
from dovetail.tools.ptq.budget import Budget
from dovetail.tools.ptq.execute import Told, observe, silent
from dovetail.tools.ptq.layers import LayerSettings, fit_layers, weighted_layers
from dovetail.tools.ptq.prepare import equalise
from dovetail.tools.ptq.qdq import Scheme
from dovetail.tools.ptq.steps import Histogram, Method, Steps


@dataclass(frozen=True)
class Settings:
    """Options of quantising a network."""

    method: Method = Method.MINMAX
    """How the ranges of activations are chosen."""
    bits: int = 8
    """Of weights, where `widths` does not say otherwise."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Bits of the weights by result of the layer."""
    equalise: bool = False
    """Even out the channels between neighbouring layers."""
    correct_bias: bool = True
    adaptive: bool = True
    """Fit the rounding of narrow weights to the data."""
    per_channel: bool | None = None
    """A scale per output channel; None for what the target takes."""
    symmetric: bool | None = None
    """Activations with zero point 0; None for what the target needs."""
    integer_ends: bool = False
    """Inputs and outputs become integers."""
    budget: Budget | None = None
    """Search for the width of each layer's weights under this budget; `bits` and `widths` are not used then."""


@dataclass(frozen=True)
class Calibrated:
    """A float graph with the steps of its activations; weights can be chosen for it again and again."""

    graph: Graph
    """Float, equalised where that was asked for."""
    activations: Mapping[str, Steps]
    factors: Mapping[str, Array]
    """float32 [C] by value: what equalisation has multiplied its channels with."""
    wanted: Quantisation
    """What the target takes."""
    settings: Settings

    @property
    def layer_settings(self) -> LayerSettings:
        """How weights are chosen: what the user wants, within what the target takes."""
        wanted, given = self.wanted, self.settings
        allowed = wanted.per_channel if given.per_channel is None else given.per_channel and wanted.per_channel
        return LayerSettings(
            allowed, given.adaptive, given.correct_bias, ternary=wanted.ternary, powers_of_two=wanted.shifts
        )


def calibrate(
    graph: Graph, data: Mapping[str, Array], wanted: Quantisation, settings: Settings, report: Told = silent
) -> Calibrated:
    """Equalise what `prepare` gave, and choose the steps of every activation from data, float32 [N, *shape] by input:
    what the user chose within what the target takes."""
    factors: Mapping[str, Array] = {}
    if settings.equalise:
        report("equalising layers")
        graph, factors = equalise(graph)
    points = stepping.quantised_values(graph)
    seen = observe(graph, data, points, settings.method is not Method.MINMAX, report)
    report("choosing ranges")
    symmetric = wanted.symmetric if settings.symmetric is None else settings.symmetric or wanted.symmetric
    steps = _steps(graph, points, seen, wanted.activations, settings.method, symmetric)
    if wanted.shifts:
        narrow = [name for name, bits in settings.widths.items() if bits == 2] if wanted.operand_bits < 8 else []
        spare = dict.fromkeys(stepping.operands_of(graph, narrow), 8 - wanted.operand_bits)
        steps = stepping.shiftable(graph, steps, spare)
    return Calibrated(graph, steps, factors, wanted, settings)


def _steps(
    graph: Graph, points: tuple[str, ...], seen: Mapping[str, Histogram], dtype: DType, method: Method, symmetric: bool
) -> dict[str, Steps]:
    known, owner = stepping.fixed_ranges(graph), stepping.shared(graph, points)
    found = {}
    for name in points:
        if name not in known:
            found[name] = stepping.choose(seen[name], method, dtype, symmetric)
        else:  # without symmetry what TFLite fixes for a softmax
            low, high = known[name]
            fixed = Steps(dtype, (high - low) * 2.0**-8, round(-low / (high - low) * 2**8) + dtype.low)
            found[name] = stepping.spanning(low, high, dtype, True) if symmetric else fixed
    return {name: found[owner[name]] for name in points}


def weight_widths(graph: Graph, settings: Settings, target: Target) -> dict[str, int]:
    """The width of every layer's weights.
    Raises TargetError where the target does not take a width, or asks for it before ranges are chosen."""
    wanted = target.quantisation
    if wanted.operand_bits < 8 and 2 in wanted.weight_bits and (settings.budget is not None or settings.bits == 2):
        raise TargetError(
            f"layers with 2-bit weights want operands within {wanted.operand_bits} bits: they are "
            "named, not searched for",
            where=target.name,
            hint="for instance --width 'conv2*=int2'",
        )
    found = {node.output: settings.widths.get(node.output, settings.bits) for node in weighted_layers(graph)}
    for width in sorted(set(found.values())):
        if width not in wanted.weight_bits:
            known = ", ".join(map(str, wanted.weight_bits))
            hint = f"choose one of {known} with --weights or --width"
            raise TargetError(f"it takes weights of {known} bits, not of {width}", where=target.name, hint=hint)
    return found


def named_widths(graph: Graph, texts: Sequence[str]) -> dict[str, int]:
    """The widths of single layers.

    Args:
        graph: what `prepare` gave.
        texts: "pattern=int2" each; patterns are those of file names, for a layer's name or operator in the model.

    Raises:
        DovetailError: one says no width, or fits no layer; names the layers.
    """
    layers = weighted_layers(graph)
    found: dict[str, int] = {}
    for text in texts:
        pattern, _, width = text.rpartition("=")
        if not pattern or width not in ("int8", "int4", "int2"):
            raise DovetailError(
                f"'{text}' does not say a width", where="--width", hint="for instance 'conv2*=int2'; int8, int4 or int2"
            )
        named = [n.output for n in layers if fnmatchcase(n.output, pattern) or fnmatchcase(n.origin, pattern)]
        if not named:
            known = ", ".join(node.output for node in layers)
            raise DovetailError(
                f"no layer with weights is named '{pattern}'", where="--width", hint=f"the layers are {known}"
            )
        found.update(dict.fromkeys(named, int(width.removeprefix("int"))))
    return found


def choose_layers(
    calibrated: Calibrated, data: Mapping[str, Array], widths: Mapping[str, int], report: Told = silent
) -> Scheme:
    """Weights and biases of these widths, and with them all that is decided about the network."""
    activations, how = calibrated.activations, calibrated.layer_settings
    weights, biases = fit_layers(calibrated.graph, data, activations, widths, how, report)
    return Scheme(activations, weights, biases, calibrated.settings.integer_ends)
