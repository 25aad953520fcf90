"""How well a quantised model keeps what the float network computes: top-1, signal to noise, layer by layer; and ONNX
Runtime's own quantisers on the same network and data beside it."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.arrays import built
from dovetail.errors import DovetailError, MissingExtraError
from dovetail.files import TemporaryFolder
from dovetail.guests.ptq.data import Samples, check_labels, cut_off, read_samples
from dovetail.guests.ptq.execute import count_of, part_of, run
from dovetail.guests.ptq.preparation import prepare, unquantised
from dovetail.guests.ptq.search import Noise, top1
from dovetail.guests.ptq.sequences import bits_per_token, run_steps, tokens_of, with_tables
from dovetail.guests.ptq.settings import Preprocessing, Told
from dovetail.guests.ptq.steps import Data
from dovetail.ir.boundary import Steps, boundary, steps_of
from dovetail.ir.graph import Graph, Node, evaluate, evaluate_all
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType
from dovetail.legalize import adapt
from dovetail.notes import Note
from dovetail.operators import combined
from dovetail.quantize import quantize
from dovetail.read import load_model, own_rounding
from dovetail.records import Record, field
from dovetail.target.description import Target

FACTORS = "dovetail.equalisation"
"""Metadata of a model: the factors that equalisation has multiplied the channels of values with."""
_SUFFIXES = re.compile(r"(_quantized|_QuantizeLinear(_Output)?|_q|_real)$")


class LayerNoise(Record):
    """A quantised value against the float network's."""

    name: str
    origin: str
    sqnr: float
    """dB"""


class Column(Record):
    """One way the network was computed."""

    name: str
    samples: int
    top1: float | None
    """Percent of the labels; None without labels."""
    agreement: float | None
    """Percent of the samples on which its answer is the float network's; None where the network gives no classes."""
    sqnr: float
    """Signal-to-noise ratio of the network's outputs, dB."""
    bits: float | None = None
    """Bits per token of a language model: of the tokens that follow in the data; None for other networks."""


class Accuracy(Record):
    """The whole comparison."""

    columns: tuple[Column, ...]
    layers: tuple[LayerNoise, ...] = field(default=())
    """In the network's order."""
    notes: tuple[Note, ...] = ()
    """On data that are not as the network's."""

    @property
    def worst(self) -> tuple[LayerNoise, ...]:
        """Layers by rising signal-to-noise ratio."""
        return tuple(sorted(self.layers, key=lambda layer: layer.sqnr))


class ValueComparison(Record):
    """A quantised value of the integer graph and the float value it stands for."""

    integers: str
    """Its name in the integer graph."""
    real: str
    """Its name in the float graph."""
    steps: Steps
    origin: str
    factor: Array | float
    """Factors of its channels by equalisation."""

    def add_to(self, noise: Noise, real: Array, integers: Array) -> None:
        """Count one sample: the float value, and the integers."""
        noise.add(_aligned(real * self.factor, integers), self.steps.dequantize(integers))


def watched(graph: Graph, integer: Graph, reference: Graph, factors: Data) -> tuple[ValueComparison, ...]:
    """The quantised values of a QDQ graph that both other graphs have.

    Args:
        graph: the QDQ graph.
        integer: its integer graph; a rewrite to uint8 adds `_unsigned` to names and 128 to values.
        reference: the float graph.
        factors: by float value.
    """
    comparisons = []
    for node in graph.nodes:
        real, steps = _float_name(node, reference) if node.operator.quantises else None, steps_of(graph, node)
        if real is None or steps is None:
            continue
        for name, moved in ((node.output, 0), (f"{node.output}_unsigned", 128)):
            same = name in integer.types and integer.types[name].elements == reference.types[real].elements
            if same and name not in integer.constants:
                own = Steps(steps.scale, steps.zero_point + moved)
                comparisons.append(ValueComparison(name, real, own, node.origin, factors.get(real, 1.0)))
                break
    return tuple(comparisons)


def _float_name(node: Node, reference: Graph) -> str | None:
    """The float value a Quantize node stands behind: by the name of its result, of its operand, or in its origin."""
    named = re.search(r"\((.*)\)$", node.origin)
    for name in (named[1] if named else "", node.output, node.inputs[0]):
        longer = ""
        while name != longer:
            if name in reference.types and name not in reference.constants:
                return name
            longer, name = name, _SUFFIXES.sub("", name)
    return None


def column(name: str, wanted: Sequence[Array], got: Sequence[Array], labels: Array | None, classifies: bool) -> Column:
    """The figures of one way: first outputs against the float network's; agreement only where it gives classes."""
    right, answers = (np.array([array.reshape(-1) for array in arrays]) for arrays in (wanted, got))
    noise = Noise()
    noise.add(right, answers)
    agreement = top1(answers, right.argmax(axis=1)) if classifies else None
    return Column(name, len(answers), None if labels is None else top1(answers, labels), agreement, noise.sqnr)


def real_output(qdq: Graph, array: Array, dtype: DType) -> Array:
    """The first output as floats: integers as the QDQ graph's Quantize node says."""
    steps = boundary(qdq).get(qdq.outputs[0]) if dtype.is_integer else None
    return steps.dequantize(array) if steps is not None else array.astype(np.float32)


def coded_inputs(qdq: Graph, sample: Data) -> dict[str, Array]:
    """One sample as the model takes it: floats become integers where it dequantises its inputs first."""
    inputs, steps = {name: sample[name] for name in qdq.given}, boundary(qdq)
    for name, array in inputs.items():
        if name in steps and array.dtype == np.float32:
            inputs[name] = steps[name].quantize(array, qdq.types[name].dtype)
    return inputs


def firmware_outputs(model: Path, target: Target, simulator: str, samples: Sequence[Data], report: Told) -> list[Array]:
    """The first output of each sample, computed by the compiled program on a simulator.
    Raises DovetailError where it does not compile or run."""
    from dovetail.compile import Options, compile_model
    from dovetail.run import run_build

    compiled = compile_model(model, target, Options(allow_float=True), report)
    with built(compiled, target) as build:
        report(f"running {len(samples)} inferences on the {simulator}")
        result = run_build(build, simulator, samples)
    return [outputs[compiled.graph.outputs[0]] for outputs in result.outputs]


def read_factors(model: Path) -> dict[str, Array]:
    """The equalisation factors noted in an ONNX model; none for any other file."""
    if model.suffix.lower() != ".onnx":
        return {}
    import onnx

    notes = {entry.key: entry.value for entry in onnx.load(model, load_external_data=False).metadata_props}
    return {name: np.asarray(row, np.float32) for name, row in json.loads(notes.get(FACTORS, "{}")).items()}


def accuracy_of(
    model: Path,
    data: Path,
    how: Preprocessing,
    target_name: str | None,
    float_model: Path | None,
    simulator: str | None,
    report: Told,
    operators: Sequence[type[UserOperator]] = (),
    states: Mapping[str, str] | None = None,
) -> Accuracy:
    """A quantised model beside its float network on data, and on a target's firmware.

    Args:
        model: quantised, in a file.
        data: samples, perhaps with labels; see `read_samples`.
        how: what is done to them.
        target_name: whose firmware is run too; None for none.
        float_model: what it was quantised from; None for the model itself with float activations.
        simulator: of the firmware; None for the target's default.
        report: told the progress.
        operators: the user's own.
        states: inputs by the output that each becomes, beside those called past and present.

    Raises:
        DovetailError: a file is at fault, or they do not fit each other.
    """
    from dovetail.compile import Options, rounding_of
    from dovetail.run import default_simulator
    from dovetail.target.registry import load_target

    report("reading the model")
    target = load_target(target_name) if target_name is not None else None
    operators = combined(target.operators if target is not None else (), operators)
    target = replace(target, operators=operators) if target is not None else None
    qdq = simplify(load_model(model, operators=operators, states=states))
    rounding = rounding_of(model, target, Options()) if target is not None else own_rounding(model)
    integer = quantize(qdq, rounding, allow_float=True)
    if float_model is not None:
        loaded = load_model(float_model, operators=operators, states=states)
        loaded = with_tables(loaded, lambda note: report(note.text))
        reference = prepare(loaded, float_model.name)
    else:
        reference = unquantised(qdq)
    if set(reference.given) != set(qdq.given):
        what = f"the inputs {sorted(qdq.given)} are not those of the float model, {sorted(reference.given)}"
        raise DovetailError(what, where=model.name, hint="compare with the float model that was quantised")
    samples = read_samples(data, reference, how)
    if samples.labels is not None:
        check_labels(samples.labels, reference.types[reference.outputs[0]].elements)
    firmware = None
    if target is not None:
        integer = adapt(integer, target.policy(None))
        firmware = partial(firmware_outputs, model, target, simulator or default_simulator(target), report=report)
    if reference.states:
        found = compare_sequences(qdq, integer, reference, samples, report, firmware)
    else:
        found = compare(qdq, integer, reference, samples.inputs, samples.labels, read_factors(model), report, firmware)
    return replace(found, notes=tuple(cut_off(samples, qdq)))


def compare(
    qdq: Graph,
    integer: Graph,
    reference: Graph,
    samples: Data,
    labels: Array | None,
    factors: Data,
    report: Told,
    firmware: Callable[[Sequence[Data]], list[Array]] | None = None,
) -> Accuracy:
    """Run the float, the integer network and perhaps firmware on samples.

    Args:
        qdq: the model, for scales and names.
        integer: the graph that is computed.
        reference: the float network, of the same inputs.
        samples: [N, *shape] by input, as the float network takes them.
        labels: int64 [N] or None.
        factors: equalisation by float value.
        report: told the progress.
        firmware: runs coded samples and gives the first output of each.
    """
    places = watched(qdq, integer, reference, factors)
    noise = {place.integers: Noise() for place in places}
    count, output = count_of(samples), integer.outputs[0]
    kind = integer.types[output].dtype
    inputs: list[Data] = []
    wanted: list[Array] = []
    coded: list[Array] = []
    for index in range(count):
        report(f"comparing: sample {index + 1} of {count}")
        sample = part_of(samples, index)
        values = run(reference, part_of(samples, slice(index, index + 1)), keep=[place.real for place in places])
        inputs.append(coded_inputs(qdq, sample))
        got = evaluate(integer, inputs[-1], keep=[place.integers for place in places])
        wanted.append(values[reference.outputs[0]][0])
        coded.append(real_output(qdq, got[output], kind))
        for place in places:
            place.add_to(noise[place.integers], values[place.real][0], got[place.integers])
    ways = {"float": wanted, "integer graph": coded}
    if firmware is not None:
        ways["firmware"] = [real_output(qdq, array, kind) for array in firmware(inputs)]
    last = reference.producers().get(reference.outputs[0])
    classifies = labels is not None or (last is not None and last.operator.gives_shares)
    columns = tuple(column(name, wanted, outputs, labels, classifies) for name, outputs in ways.items())
    return Accuracy(columns, tuple(LayerNoise(p.real, p.origin, noise[p.integers].sqnr) for p in places))


def compare_sequences(
    qdq: Graph,
    integer: Graph,
    reference: Graph,
    samples: Samples,
    report: Told,
    firmware: Callable[[Sequence[Data]], list[Array]] | None = None,
) -> Accuracy:
    """The same for networks with states, which begin anew with each sequence; of a language model also bits per token.
    Arguments as of `compare`."""
    steps, output = samples.steps, integer.results[0]
    count, kind = samples.count // steps, integer.types[output].dtype
    floats = [found.reshape(count, -1) for found in run_steps(reference, samples, report)]
    wanted = [found[at] for at in range(count) for found in floats]
    ways: dict[str, list[Array]] = {"float": wanted, "integer graph": [], **({"firmware": []} if firmware else {})}
    for at in range(count):
        report(f"comparing: sequence {at + 1} of {count}")
        parts = [coded_inputs(qdq, part_of(samples.inputs, at * steps + step)) for step in range(steps)]
        results = evaluate_all(integer, parts)
        ways["integer graph"] += [real_output(qdq, one[output], kind) for one in results]
        if firmware is not None:
            ways["firmware"] += [real_output(qdq, array, kind) for array in firmware(parts)]
    tokens = tokens_of(reference, samples.inputs, steps, wanted[0].size)
    columns = []
    for name, arrays in ways.items():
        made = column(name, wanted, arrays, None, tokens is not None)
        if tokens is not None:
            logits = np.array([array.reshape(-1) for array in arrays]).reshape(count, steps, -1)[:, :-1]
            bits, right = bits_per_token(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
            made = replace(made, bits=bits, top1=right)
        columns.append(made)
    return Accuracy(tuple(columns))


def _aligned(real: Array, integers: Array) -> Array:
    """The float value in the order of axes the integers have: an image of ONNX's order turned where shapes say so."""
    if real.ndim != 4 or integers.ndim != 4:
        return real
    turned = [real, real.transpose(0, 2, 3, 1), real.transpose(0, 3, 1, 2)]
    return next((array for array in turned if array.shape == integers.shape), real)


def compare_with_runtime(
    model: Path, made: bytes, calibration: Samples, measured: Samples, classifies: bool, report: Told
) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """The figures of the model that was made, and of those ONNX Runtime's quantisers make with their defaults, all run
    by ONNX Runtime against the float model; and a sentence for each that they cannot make or run.

    Args:
        model: the float network, an ONNX file.
        made: the quantised one, with float ends.
        calibration: what the static quantisers are given.
        measured: what is compared, perhaps with labels.
        classifies: whether the answer is the greatest output.
        report: told the progress.

    Raises:
        DovetailError: the model is no ONNX file, ONNX Runtime does not run it, or onnxruntime is not installed.
    """
    if model.suffix.lower() != ".onnx":
        what = f"ONNX Runtime's quantisers take ONNX files, not '{model.name}'"
        raise DovetailError(what, where="--compare", hint="export the network as ONNX, or leave --compare out")
    try:
        from onnxruntime import quantization  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "check", "comparing with its quantisers") from error

    def static(target: Path, per_channel: bool) -> None:
        quantization.quantize_static(model, target, _reader(calibration.inputs), per_channel=per_channel)

    ways: dict[str, Callable[[Path], object]] = {
        "Dovetail": lambda target: target.write_bytes(made),
        "ONNX Runtime, static": lambda target: static(target, False),
        "ONNX Runtime, static, per channel": lambda target: static(target, True),
        "ONNX Runtime, dynamic": lambda target: quantization.quantize_dynamic(model, target),
    }
    columns, failures = list[Column](), list[str]()
    with TemporaryFolder() as folder, _quiet():
        try:
            wanted = _outputs(model, measured.inputs)
        except Exception as error:  # what the runtime raises has no common class
            what = f"ONNX Runtime does not run it: {_first_line(error)}"
            raise DovetailError(what, where=model.name, hint="leave --compare out") from error
        for number, (name, make) in enumerate(ways.items()):
            report(f"comparing: {name}")
            target = Path(folder) / f"{number}.onnx"
            try:
                make(target)
                got = _outputs(target, measured.inputs)
            except Exception as error:
                failures.append(f"{name}: {_first_line(error)}")
                continue
            columns.append(column(name, wanted, got, measured.labels, classifies))
    return tuple(columns), tuple(failures)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of the quantisers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _reader(inputs: Data) -> Any:
    """The samples one after another, as the static quantiser asks for them."""
    from onnxruntime.quantization import CalibrationDataReader  # type: ignore[import-untyped]

    class CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = iter(_feeds(inputs))

        def get_next(self) -> dict[str, Array] | None:
            return next(self.feeds, None)

    return CalibrationReader()


def _feeds(inputs: Data) -> list[dict[str, Array]]:
    return [part_of(inputs, at) for at in range(count_of(inputs))]


def _outputs(model: Path, inputs: Data) -> Sequence[Array]:
    """The first output of each sample, the network computed as it is written."""
    session = runtime_session(model, optimised=False)
    return [session.run(None, feed)[0] for feed in _feeds(inputs)]
