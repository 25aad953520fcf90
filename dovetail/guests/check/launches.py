"""Launches one behind another: what a driver, a fence or a stride does wrong only there.

Single layers hide it where the engine is quick: it has finished before the core comes back. Here it takes many times as
long, several launches follow at once, and one reads what the one before gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from dovetail.compile import Options, compile_graph
from dovetail.errors import DovetailError
from dovetail.guests.check.cases import Case, raised, taken
from dovetail.guests.check.findings import Finding
from dovetail.guests.check.layers import PADS, NoLayerError, add_layer, setting
from dovetail.guests.check.run import INSTRUCTIONS, Outcome, alone, much_slower, offload_of, on_simulator
from dovetail.guests.check.suspect import REPORTED, cause_of
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Lookup
from dovetail.ir.operators.movement import Concat
from dovetail.ir.types import Array, DType, TensorType
from dovetail.records import Record
from dovetail.target.description import Target
from dovetail.target.offload import Offload

_IN_A_ROW = 4
"""Launches that do not depend on one another: more than the places of any queue of ping-pong registers."""
_TOGETHER = 2
"""The launch of these before which the core does nothing."""
_EARLY = (
    "results are read before they are there: on an engine that takes many times as long one launch alone is wrong, so "
    "the driver does not wait for its end"
)
_OVERRUN = (
    "a launch is started while the engine has no room: one at a time all is well, several in a row on an engine that "
    "takes many times as long are not, so the driver does not wait for a free place of the queue"
)
_ORDER = (
    "a fence or a wait is missing between two launches: each alone is right, and one that reads the result of the one "
    "before is not"
)
_INSIDE = (
    "strides: results that lie beside others in a larger image are wrong, so an outer stride (of rows, planes or "
    "blocks of channels) is ignored"
)


class _Network(Record):
    """Some layers of one offload."""

    graph: Graph
    inputs: Mapping[str, Array]
    point: Mapping[str, int]


def launch_findings(target: Target, case: Case, seconds: float) -> Iterator[Finding]:
    """The faults of several launches of an offload, of which single ones are right on the simulated chip.

    Args:
        target: the machine.
        case: a layer that the limits take.
        seconds: the most a run may take.
    """
    slow, offload = much_slower(target), offload_of(target, case)
    where = f"{case.engine} {case.offload}, iss"
    failed = _outcome(slow, case, _row(offload, case.point, _IN_A_ROW), seconds)
    if failed is not None and failed.failed:
        one = _outcome(slow, case, _row(offload, case.point, 1), seconds)
        first = _EARLY if one is not None and one.failed else _OVERRUN
        words = f"{where}: {_IN_A_ROW} launches in a row on a slower engine"
        yield Finding(words, _with_cause(failed, first), "iss", failed)
        return
    for axis, sentence, words in (
        (None, _ORDER, "a launch that reads the result of another"),
        (1, _INSIDE, "two results one below the other, and a launch that reads both"),
        (2, _INSIDE, "two results side by side, and a launch that reads both"),
    ):
        network = _chained(offload, case, axis)
        outcome = _outcome(slow, case, network, seconds) if network else None
        if outcome is not None and outcome.failed:
            yield Finding(f"{where}: {words}, on a slower engine", _with_cause(outcome, sentence), "iss", outcome)
            return


def only_last_is_wrong(target: Target, case: Case, seconds: float) -> bool:
    """Whether, of launches in a row that do not depend on one another, all but the last give what they should."""
    network = _row(offload_of(target, case), case.point, _IN_A_ROW)
    found = _outcomes(target, case, network, seconds)
    return len(found) > 1 and [one.failed for one in found] == [one is found[-1] for one in found]


def _with_cause(outcome: Outcome, sentence: str) -> tuple[str, ...]:
    """The cause an error points to, if one is known, then the sentence."""
    cause = cause_of(outcome.error) if outcome.error else REPORTED
    return (sentence,) if cause.startswith(REPORTED) else (cause, sentence)


def _outcome(target: Target, case: Case, network: _Network, seconds: float) -> Outcome | None:
    """The outcome of a network, of its first wrong result if there is one; None where the memories do not hold it."""
    found = _outcomes(target, case, network, seconds)
    return next((one for one in found if one.failed), found[0]) if found else None


def _outcomes(target: Target, case: Case, network: _Network, seconds: float) -> list[Outcome]:
    """The outcome of each result of a network, or of all in one; empty where the memories do not hold it."""
    expected, case = evaluate(network.graph, network.inputs), replace(case, point=dict(network.point))
    try:
        compiled = compile_graph(network.graph, alone(target, case), Options(), interpret=False)
    except DovetailError:  # the layers by themselves are compiled elsewhere
        return []
    try:
        outputs, _ = on_simulator(compiled, network.inputs, "iss", INSTRUCTIONS, seconds)
    except DovetailError as error:
        return [Outcome(case, error=str(error))]
    except Exception as error:  # the port's own code
        return [Outcome(case, error=raised(error))]
    return [Outcome(case, outputs[name], expected[name]) for name in network.graph.outputs]


def _row(offload: Offload, point: Mapping[str, int], count: int) -> _Network:
    """Layers that do not depend on one another. The core computes something between them, so that an engine that takes
    lists of commands gets several, one of which is longer."""
    builder, arrays, made = GraphBuilder("check"), dict[str, Array](), list[str]()
    table = builder.constant("table", (-1 - np.arange(-128, 128)).astype(np.int8))
    for number in range(count):
        if number != _TOGETHER:
            own = builder.input(f"own{number}", TensorType((1, 4, 4, 16), DType.INT8))
            arrays[own] = np.full((1, 4, 4, 16), number, np.int8)
            made.append(builder.add(Lookup(), [own, table]))
        layer = add_layer(builder, offload.pattern, offload.cases, point, f"c{number}_")
        arrays |= layer.inputs
        made.append(layer.root)
    return _Network(builder.finish(made), arrays, point)


def _chained(offload: Offload, case: Case, axis: int | None) -> _Network | None:
    """A layer that reads the result of another, or of two that are concatenated along an axis; None where no setting
    gives a result that the layer takes."""
    wide = {"channels": 2 * offload.channel_step} if axis is not None and offload.channel_step > 1 else {}
    for more in ({}, _SAME, {**_SAME, **_POINTWISE}):
        for channels in (wide, {}):
            point = {**case.point, **{name: size for name, size in {**channels, **more}.items() if name in case.point}}
            if "outputs" in point and (channels or more):
                point["outputs"] = point["channels"]
            network = _chain(offload, point, axis) if taken(offload, point) else None
            if network is not None:
                return network
    return None


_SAME: Mapping[str, int] = {"depth": 1, "stride_rows": 1, "stride_columns": 1}
_POINTWISE: Mapping[str, int] = {"kernel_rows": 1, "kernel_columns": 1, **dict.fromkeys(PADS, 0)}
"""Settings with which a result often has the shape of the operand."""


def _chain(offload: Offload, point: Mapping[str, int], axis: int | None) -> _Network | None:
    builder = GraphBuilder("check")
    try:
        names = ("c0_",) if axis is None else ("c0_", "c1_")
        before = [add_layer(builder, offload.pattern, offload.cases, point, name) for name in names]
        value = before[0].root
        if axis is not None and len(builder.type_of(value).shape) != 4:
            return None
        if axis is not None:
            value = builder.add(Concat(axis), [layer.root for layer in before])
            size = ("rows", "columns")[axis - 1]
            point = {**point, size: 2 * setting(point, size)}
        last = add_layer(builder, offload.pattern, offload.cases, point, "last_")
    except (ValueError, NoLayerError):
        return None
    kind = builder.type_of(value)
    name = next((name for name in last.inputs if builder.type_of(name) == kind), None)
    if name is None:
        return None
    graph = builder.finish([value, last.root])
    nodes = (replace(n, inputs=tuple(value if one == name else one for one in n.inputs)) for n in graph.nodes)
    types = {one: kind for one, kind in graph.types.items() if one != name}
    inputs = tuple(one for one in graph.inputs if one != name)
    graph = replace(graph, inputs=inputs, outputs=(last.root,), nodes=tuple(nodes), types=types)
    arrays = {one: array for layer in (*before, last) for one, array in layer.inputs.items() if one != name}
    return _Network(graph, arrays, point)
