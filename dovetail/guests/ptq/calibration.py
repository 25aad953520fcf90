"""Calibration: what a user chooses, the steps of every activation from data, and layers of given widths."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from dovetail.errors import DovetailError, TargetError
from dovetail.guests.ptq import steps as stepping
from dovetail.guests.ptq.attention import wide_values
from dovetail.guests.ptq.execute import observe
from dovetail.guests.ptq.layers import LayerSettings, WeightLimits, fit_layers, weighted_layers
from dovetail.guests.ptq.preparation import equalise
from dovetail.guests.ptq.qdq import Scheme
from dovetail.guests.ptq.settings import Method, Settings, Told
from dovetail.guests.ptq.steps import Data, Histogram, StepsByValue, TensorQuantisation
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import adapt
from dovetail.notes import silent
from dovetail.records import Record, field
from dovetail.target.description import Quantisation, Target

_Q15 = TensorQuantisation(DType.INT16, 2.0**-15, 0)
"""Steps of the shares that a softmax of 16 bits gives."""


class CalibratedNetwork(Record):
    """A float graph with the steps of its activations; weights can be chosen for it again and again."""

    graph: Graph
    """Float, perhaps equalised."""
    activations: StepsByValue
    factors: Data
    """float32 [C] by value: what equalisation has multiplied its channels with."""
    wanted: Quantisation
    """Quantisations that the target takes."""
    settings: Settings
    seen: Mapping[str, Histogram] = field(default_factory=dict)
    """Elements of each quantised value on the data."""

    def at_widths(self, bits: Mapping[str, int]) -> CalibratedNetwork:
        """The same with activations of other widths, by value."""
        return replace(self, activations=_steps(self.graph, self.seen, self.wanted, self.settings, bits))

    @property
    def layer_settings(self) -> LayerSettings:
        """How weights are chosen: as the settings say, within what the target takes."""
        wanted, settings = self.wanted, self.settings
        limits = WeightLimits(ternary=wanted.ternary, powers_of_two=wanted.shifts)
        per_channel = wanted.per_channel and settings.per_channel
        return LayerSettings(per_channel, settings.adaptive, settings.correct_bias, limits=limits)


def calibrate(
    graph: Graph, data: Data, wanted: Quantisation, settings: Settings, report: Told = silent
) -> CalibratedNetwork:
    """Equalise a graph of `prepare`, and choose the steps of every activation, as the settings say within what the
    target takes, from data, float32 [N, *shape] by input."""
    factors: Data = {}
    if settings.equalise:
        report("equalising layers")
        graph, factors = equalise(graph)
    points = stepping.quantised_values(graph)
    seen = observe(graph, data, points, settings.method is not Method.MINMAX, report)
    report("choosing ranges")
    bits = {} if settings.mixed_activations else activation_widths(graph, settings, wanted)
    steps = _steps(graph, seen, wanted, settings, bits)
    _check_narrowed(graph, steps, settings)
    return CalibratedNetwork(graph, steps, factors, wanted, settings, seen)


def shared_widths(graph: Graph) -> dict[str, tuple[str, ...]]:
    """The activations that may have fewer than 8 bits, in groups of those that share their steps, by one of them."""
    owner = stepping.shared(graph)
    groups: dict[str, tuple[str, ...]] = {}
    for name in narrowable(graph):
        groups[owner[name]] = (*groups.get(owner[name], ()), name)
    return groups


def activation_widths(graph: Graph, settings: Settings, wanted: Quantisation) -> dict[str, int]:
    """Bits of every activation that may be narrow. Activations that share their steps have one width, the widest.

    Raises:
        TargetError: the target does not take a width.
    """
    widths = {
        name: max(settings.activation_widths.get(member, settings.activation_bits) for member in group)
        for group in shared_widths(graph).values()
        for name in group
    }
    _check_widths({*widths.values()} - {8}, wanted.activation_bits, "activation", "the target")
    return widths


def _check_widths(widths: Collection[int], taken: Sequence[int], noun: str, where: str) -> None:
    """Raise TargetError unless a target takes all widths."""
    for width in sorted(set(widths) - set(taken)):
        texts = ", ".join(map(str, taken))
        option = f"--{noun}-width" if noun == "activation" else "--width"
        hint = f"choose one of {texts} with --{noun}s or {option}"
        raise TargetError(f"it takes {noun}s of {texts} bits, not of {width}", where=where, hint=hint)


def _check_narrowed(graph: Graph, steps: Mapping[str, TensorQuantisation], settings: Settings) -> None:
    """Raise DovetailError where an activation has another width than the user gave it, or than all, for an input."""
    groups = {name: group for group in shared_widths(graph).values() for name in group}
    ends = [name for name in graph.inputs if name in groups and settings.integer_ends and settings.activation_bits < 8]
    asked = dict.fromkeys(ends, settings.activation_bits)  # of 8 bits, one that is part of a sum may keep 16
    for name, bits in {**asked, **settings.activation_widths}.items():
        built, others = steps[name].dtype.bits, [one for one in groups.get(name, ()) if one != name]
        if built == bits or settings.mixed_activations:
            continue
        why, hint = "it is a sum that keeps 16 bits", "leave it out of --activation-width"
        if name in graph.inputs and settings.integer_ends and built < 16:
            why, hint = f"ONNX has no inputs of {bits} bits", f"give --activation-width '{name}=int4'"
        elif others:
            why, hint = f"it shares its steps with {', '.join(others)}", f"name these int{bits}, too"
        raise DovetailError(f"it has {built} bits, not {bits}: {why}", where=f"activation '{name}'", hint=hint)


def narrowable(graph: Graph) -> tuple[str, ...]:
    """The activations that may have fewer than 8 bits: not the network's outputs, nor the operands of softmaxes."""
    fixed = {*graph.outputs, *stepping.shares(graph)}
    fixed |= {node.inputs[0] for node in graph.nodes if node.operator.reads_scores}
    owner = stepping.shared(graph)
    whole = {owner.get(stepping.source_of(graph, name, owner)) for name in fixed}
    return tuple(name for name in owner if owner[name] not in whole)


def _steps(
    graph: Graph, seen: Mapping[str, Histogram], wanted: Quantisation, settings: Settings, bits: Mapping[str, int]
) -> dict[str, TensorQuantisation]:
    """The steps of every quantised value, in few bits those that `bits` has."""
    symmetric = wanted.symmetric or settings.symmetric
    owner, shares = stepping.shared(graph), stepping.shares(graph)
    wide = frozenset() if wanted.shifts else wide_values(graph, wanted.wide_sums)
    own = {}
    for name in owner:
        dtype = DType.INT16 if name in wide else wanted.activations.narrowed(bits.get(name, 8))
        if name in graph.inputs and settings.integer_ends:  # ONNX has no inputs of 2 bits that others read
            dtype = dtype.narrowed(max(dtype.bits, 4))
        if name in wide:
            own[name] = _Q15 if name in shares else stepping.spanning(seen[name].low, seen[name].high, dtype, True)
        elif name not in shares:
            own[name] = stepping.choose(seen[name], settings.method, dtype, symmetric)
        else:  # without symmetry as TFLite has it
            tflite = TensorQuantisation(dtype, 2.0**-8, dtype.low)
            own[name] = stepping.spanning(0.0, 1.0, dtype, True) if symmetric else tflite
    steps = {name: own[group] for name, group in owner.items()}
    if not wanted.shifts:
        return stepping.even_streams(graph, steps)
    narrow = [name for name, width in settings.widths.items() if width == 2] if wanted.operand_bits < 8 else []
    spare = dict.fromkeys(stepping.operands_of(graph, narrow), 8 - wanted.operand_bits)
    return stepping.shiftable(graph, steps, spare)


def finds_two_bits(target: Target) -> bool:
    """Whether a policy of the target finds out that weights a file holds in 4 bits have 2."""
    builder = GraphBuilder("narrow")
    x = builder.input("x", TensorType((1, 4), DType.INT8))
    weights = builder.constant("w", np.array([[-2, -1, 0, 1]] * 4, np.int8), DType.INT4)
    graph = builder.finish([builder.add(FullyConnected(), [x, weights])])
    adapted = (adapt(graph, policy) for policy in target.policies)
    return any(one.types[name].dtype is DType.INT2 for one in adapted for name in one.constants)


def held_bits(target: Target, bits: int) -> int:
    """Bits that weights of a width take on a target."""
    wants = target.quantisation
    narrow = 4 if bits == 2 and not (wants.ternary or finds_two_bits(target)) else bits
    return narrow if wants.packed else 8


def weight_widths(graph: Graph, settings: Settings, target: Target) -> dict[str, int]:
    """The width of every layer's weights.
    Raises TargetError if the target does not take a width, or must know it before ranges are chosen."""
    wanted = target.quantisation
    if wanted.operand_bits < 8 and 2 in wanted.weight_bits and (settings.budget is not None or settings.bits == 2):
        raise TargetError(
            f"layers with 2-bit weights want operands within {wanted.operand_bits} bits: they are "
            "named, not searched for",
            where=target.name,
            hint="for instance --width 'conv2*=int2'",
        )
    widths = {node.output: settings.widths.get(node.output, settings.bits) for node in weighted_layers(graph)}
    _check_widths(widths.values(), wanted.weight_bits, "weight", target.name)
    return widths


def named_widths(graph: Graph, texts: Sequence[str]) -> dict[str, int]:
    """The widths of the weights of single layers, from texts as `_named` takes them."""
    layers = [(node.output, node.origin) for node in weighted_layers(graph)]
    return _named(layers, texts, "--width", "layer with weights")


def named_activations(graph: Graph, texts: Sequence[str]) -> dict[str, int]:
    """The widths of single activations, from texts as `_named` takes them."""
    producers = graph.producers()
    points = [(name, producers[name].origin if name in producers else "") for name in narrowable(graph)]
    return _named(points, texts, "--activation-width", "activation")


def _named(names: Sequence[tuple[str, str]], texts: Sequence[str], option: str, noun: str) -> dict[str, int]:
    """The widths of layers or activations, by name.

    Args:
        names: of all there are, each with its operator in the model.
        texts: "pattern=int2" each; patterns are those of file names, for a name or an operator.
        option: and noun: of the message.

    Raises:
        DovetailError: a text has no width, or fits nothing; names what there is.
    """
    widths: dict[str, int] = {}
    for text in texts:
        pattern, _, width = text.rpartition("=")
        if not pattern or width not in ("int8", "int4", "int2"):
            hint = "for instance 'conv2*=int2'; int8, int4 or int2"
            raise DovetailError(f"'{text}' does not say a width", where=option, hint=hint)
        fitting = [name for name, origin in names if fnmatchcase(name, pattern) or fnmatchcase(origin, pattern)]
        if not fitting:
            hint = f"the {noun.partition(' ')[0]}s are {', '.join(name for name, _ in names)}"
            raise DovetailError(f"no {noun} is named '{pattern}'", where=option, hint=hint)
        widths |= dict.fromkeys(fitting, int(width.removeprefix("int")))
    return widths


def choose_layers(
    calibrated: CalibratedNetwork, data: Data, widths: Mapping[str, int], report: Told = silent
) -> Scheme:
    """Weights and biases of these widths, and with them all that is decided about the network."""
    activations, how = calibrated.activations, calibrated.layer_settings
    weights, biases = fit_layers(calibrated.graph, data, activations, widths, how, report)
    return Scheme(activations, weights, biases, calibrated.settings.integer_ends)
