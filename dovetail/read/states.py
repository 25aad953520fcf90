"""States of networks that give them as inputs and outputs: pairs tied by name, shifted buffers as rings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, GraphBuilder, Node, prune
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.movement import Concat, Gather, Slice
from dovetail.ir.operators.sequence import Attention, WriteRow
from dovetail.ir.pattern import apply, occurrence, operand
from dovetail.notes import Kind, Note, Tell
from dovetail.records import Record

_PAST = re.compile(r"past(_key_values)?")
_PRESENT = re.compile(r"present(_key_values)?")


def paired(graph: Graph, asked: Mapping[str, str]) -> dict[str, str]:
    """The input that each output of the last inference becomes in the next one: those asked for, and all that are
    called alike but for "past" and "present".

    Args:
        graph: the network.
        asked: input by output.

    Raises:
        ModelError: there is no such output or input, or it is named twice.
    """
    for noun, names, known in (("output", asked.keys(), graph.results), ("input", asked.values(), graph.given)):
        if missing := [name for name in names if name not in known]:
            hint = f"the {noun}s are {', '.join(known)}"
            raise ModelError(f"there is no {noun} {missing[0]!r}", where="--state", hint=hint)
    if len({*asked.values()}) < len(asked):
        raise ModelError("an input is replaced by two outputs", where="--state", hint="name each input once")
    inputs = {_PAST.sub("", name, count=1): name for name in graph.given if _PAST.search(name)}
    found = dict(asked)
    for name in graph.results:
        past = inputs.get(_PRESENT.sub("", name, count=1)) if _PRESENT.search(name) else None
        if past and name not in found and past not in found.values():
            found[name] = past
    return found


def tied(graph: Graph, pairs: Mapping[str, str], tell: Tell, asked: Mapping[str, str]) -> Graph:
    """The graph with pairs of an output and an input as states, which are zeros before the first inference.

    An output may be longer than its input along one axis: the input is then its last part. Pairs that were not asked
    for are told as assumed.

    Raises:
        ModelError: types do not fit.
    """
    if not pairs:
        return graph
    nodes, types, written = list(graph.nodes), dict(graph.types), []
    for output, read in pairs.items():
        new, old = types[output], types[read]
        longer = [axis for axis, (a, b) in enumerate(zip(new.shape, old.shape, strict=False)) if a != b]
        fits = new.dtype is old.dtype and len(new.shape) == len(old.shape) and len(longer) < 2
        if not fits or any(new.shape[axis] < old.shape[axis] for axis in longer):
            hint = "tie values of one type with --state OUTPUT=INPUT"
            raise ModelError(
                f"the output {output!r} is {new}, the input {read!r} that it becomes {old}", where=graph.name, hint=hint
            )
        if output not in graph.producers():
            hint = "leave the pair out of --state, or export the model again"
            raise ModelError(f"the output {output!r} is not computed", where=graph.name, hint=hint)
        name = output
        if longer:
            start = tuple(a - b for a, b in zip(new.shape, old.shape, strict=True))
            name = f"{output}_kept"
            nodes.append(Node(Slice(start, new.shape, (1,) * len(start)), (output,), name))
            types[name] = old
        written.append(name)
    if assumed := [f"{read} (from {output})" for output, read in pairs.items() if output not in asked]:
        what = f"{len(assumed)} values are kept from one inference to the next, zeros before the first one"
        tell(Note(Kind.ASSUMED, f"{what}: {', '.join(assumed)}"))
    return _with_rings(
        replace(
            graph,
            inputs=(*(name for name in graph.inputs if name not in pairs.values()), *pairs.values()),
            outputs=(*(name for name in graph.outputs if name not in pairs), *written),
            nodes=tuple(nodes),
            types=types,
            states=(*graph.states, *(np.zeros(types[name].shape, types[name].dtype.numpy) for name in pairs.values())),
        )
    )


class _Shifted(Record):
    """A state whose oldest rows leave it as new ones come."""

    read: str
    written: str
    joined: str
    """The old rows and the new one."""
    row: str
    axis: int
    readers: tuple[Node, ...]
    """The nodes of attention that read `joined`."""


_JOINT = apply(Concat, operand("old"), operand("row"))
_CUT = apply(Slice, _JOINT)
_ATTENTION, _GROWN = apply(Attention), (apply(WriteRow), apply(Concat))


def _shifted(graph: Graph, read: str, written: str) -> _Shifted | None:
    found = occurrence(_CUT, graph, graph.producers()[written])
    if found is None or graph.readers(read) > 1:
        return None
    cut, joint = found.nodes[_CUT], found.nodes[_JOINT]
    axis, whole = found[_JOINT].axis, graph.types[joint.output].shape
    start = tuple(1 if place == axis else 0 for place in range(len(whole)))
    odd = joint.inputs[0] != read or cut.operator != Slice(start, whole, (1,) * len(whole))
    if odd or joint.output in graph.outputs:
        return None
    readers = _readers(graph, joint.output, cut)
    if readers is None or not all(graph.types[node.inputs[3]].elements == whole[axis] for node in readers):
        return None
    return _Shifted(read, written, joint.output, joint.inputs[1], axis, readers)


def _readers(graph: Graph, value: str, but: Node) -> tuple[Node, ...] | None:
    """The nodes that read a value, perhaps reshaped, as keys or values of attention; None where others read it too."""
    found: list[Node] = []
    for node in graph.users()[value]:
        if node == but:
            continue
        inner = _readers(graph, node.output, but) if node.operator.is_view else None
        keys = _ATTENTION.fits(node) and value in node.inputs[1:3] and value not in node.inputs[::3]
        if inner is None and not keys:
            return None
        found += inner or [node]
    return tuple(found)


def _with_rings(graph: Graph) -> Graph:
    """The graph with shifted states as rings: a row is written over the oldest one at a place that is counted, and
    attention reads its mask in the ring's order. Nothing else depends on the order of keys and values."""
    shifted = [one for one in (_shifted(graph, read, written) for read, written, _ in graph.kept) if one]
    both = {node: [one for one in shifted if node in one.readers] for one in shifted for node in one.readers}
    whole = [one for one in shifted if all(len(both[node]) == 2 for node in one.readers)]
    sizes = {graph.types[one.joined].shape[one.axis] for one in whole}
    if len(sizes) != 1:
        return graph
    (size,), rings = sizes, {one.joined: one for one in whole}
    readers = {node.output for one in whole for node in one.readers}
    builder, names = GraphBuilder(graph.name), dict[str, str]()
    for name in graph.given:
        builder.input(name, graph.types[name])
    for name, array in graph.constants.items():
        builder.constant(name, array, graph.types[name].dtype)
    ends = {one.read: one for one in whole}
    for read, _, first in graph.kept:
        kind = graph.types[ends[read].joined] if read in ends else graph.types[read]
        builder.state(read, np.zeros(kind.shape, kind.dtype.numpy) if read in ends else first, kind.dtype)
    place = builder.state("past_place", np.zeros(1, np.int32))
    one = builder.constant("place_step", np.ones(1, np.int32))
    following = builder.add(Binary(BinaryKind.ADD), [place, one], "place_after")
    size_of = builder.constant("place_count", np.full(1, size, np.int32))
    builder.replace_state(place, builder.add(Binary(BinaryKind.MODULO), [following, size_of], "present_place"))
    age = builder.constant("places", np.arange(size, dtype=np.int32))
    order = builder.add(Binary(BinaryKind.SUBTRACT), [age, following], "place_order")
    masks: dict[str, str] = {}
    for node in graph.nodes:
        inputs, operator = [names.get(name, name) for name in node.inputs], node.operator
        if node.output in rings:
            ring = rings[node.output]
            operator, inputs = WriteRow(ring.axis), [ring.read, names.get(ring.row, ring.row), place]
        if node.output in readers:
            if inputs[3] not in masks:
                masks[inputs[3]] = builder.add(Gather(1), [inputs[3], order], f"{inputs[3]}_in_ring")
            inputs[3] = masks[inputs[3]]
        names[node.output] = builder.add(operator, inputs, node.output, node.origin)
    for read, written, _ in graph.kept:
        builder.replace_state(read, ends[read].joined if read in ends else names[written])
    return prune(builder.finish([names.get(name, name) for name in graph.results]))


def untied(graph: Graph, tell: Tell) -> None:
    """Warn of outputs that look like the next contents of an input and are not tied to it."""
    for output in graph.results:
        node = graph.producer(output)
        while node is not None and (node.operator.is_view or node.operator.quantises or node.operator.dequantises):
            node = graph.producer(node.inputs[0])
        source = _buffer(graph, node) if node is not None else None
        if source is not None:
            what = f"the output {output} is the input {source} with a row more, and no state: whoever runs the network"
            hint = f"(and integers of both need one scale); tie them with --state {output}={source}"
            tell(Note(Kind.SLOWER, f"{what} copies it each time {hint}"))


def _buffer(graph: Graph, node: Node) -> str | None:
    """The input that a node puts a row into; None where it is no such node."""
    if not any(kind.fits(node) for kind in _GROWN):
        return None
    name, kind = node.inputs[0], graph.types[node.output]
    while (inner := graph.producer(name)) is not None and (
        inner.operator.is_view or inner.operator.quantises or inner.operator.dequantises
    ):
        name = inner.inputs[0]
    grown = graph.types[name].elements * 2 > kind.elements if name in graph.given else False
    return name if grown and len(node.inputs) > 1 else None
