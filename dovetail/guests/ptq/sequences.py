"""Networks with states: samples are successive steps, floats of a position alone are tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dovetail.errors import DovetailError
from dovetail.guests.ptq.data import Samples
from dovetail.guests.ptq.execute import run
from dovetail.guests.ptq.settings import Told
from dovetail.guests.ptq.steps import Data
from dovetail.ir.graph import Graph, GraphBuilder, Node, evaluate, prune
from dovetail.ir.operators.movement import Gather, Reshape
from dovetail.ir.types import Array, DType
from dovetail.notes import Kind, Note, Tell


def with_tables(graph: Graph, tell: Tell) -> Graph:
    """The graph with floats that follow from one integer input alone, such as angles of a position, as rows of tables.

    The tables have as many rows as the largest state of the network along an axis; a larger position is taken for the
    last one, which `tell` is told.
    """
    places = max((max(array.shape, default=1) for array in graph.states), default=0)
    for source in graph.given:
        kind = graph.types[source]
        if places and kind.dtype in (DType.INT32, DType.INT64) and kind.elements == 1:
            graph = _tabled(graph, source, places, tell)
    return graph


def _tabled(graph: Graph, source: str, places: int, tell: Tell) -> Graph:
    own: dict[str, Node] = {}
    for node in graph.nodes:
        read = [name for name in node.inputs if name not in graph.constants]
        if read and all(name == source or name in own for name in read):
            own[node.output] = node
    outside = {name for node in graph.nodes if node.output not in own for name in node.inputs} | {*graph.outputs}
    ends = [name for name in own if name in outside and graph.types[name].dtype is DType.FLOAT32]
    if not any(node.operator.dequantises for node in own.values()):
        return graph
    kind = graph.types[source]
    part = prune(replace(graph, inputs=(source,), outputs=tuple(ends), nodes=tuple(own.values()), states=()))
    rows = [evaluate(part, {source: np.full(kind.shape, at, kind.dtype.numpy)}) for at in range(places)]
    builder = GraphBuilder(graph.name)
    for name in graph.inputs:
        builder.input(name, graph.types[name])
    for name, array in graph.constants.items():
        builder.constant(name, array, graph.types[name].dtype)
    for node in graph.nodes:
        if node.output not in ends:
            builder.add(node.operator, node.inputs, node.output, node.origin)
            continue
        table = builder.constant(
            builder.fresh(f"{node.output}_table", graph.types), np.stack([row[node.output] for row in rows])
        )
        place = builder.add(Reshape((1,)), [source], builder.fresh(f"{node.output}_place", graph.types), node.origin)
        row = builder.add(Gather(0), [table, place], builder.fresh(f"{node.output}_row", graph.types), node.origin)
        builder.add(Reshape(graph.types[node.output].shape), [row], node.output, node.origin)
    what = f"{len(ends)} values of the input {source} become tables: places from 0 to {places - 1} are told apart"
    tell(Note(Kind.ASSUMED, what))
    return builder.finish(graph.outputs, graph.states)


MOST_STATES = 1 << 30
"""Bytes of states kept as samples."""


def _walk(graph: Graph, samples: Samples, report: Told) -> Iterator[tuple[Data, Data]]:
    """The inputs, states included, and the outputs of each step of all sequences together, [sequences, *shape]."""
    count = samples.count // samples.steps
    given = {name: array.reshape(count, samples.steps, *array.shape[1:]) for name, array in samples.inputs.items()}
    held = {read: np.repeat(first[None], count, axis=0) for read, _, first in graph.kept}
    for step in range(samples.steps):
        report(f"running through the sequences: step {step + 1} of {samples.steps}")
        inputs = {**{name: array[:, step] for name, array in given.items()}, **held}
        found = run(graph, inputs)
        held = {read: found[written] for read, written, _ in graph.kept}
        if not all(np.isfinite(array).all() for array in held.values() if array.dtype.kind == "f"):
            what = f"the states are NaN or infinite after step {step + 1}"
            hint = "look for sequences that the model is not made for, or a damaged weight"
            raise DovetailError(what, where="data", hint=hint)
        yield inputs, found


def run_steps(graph: Graph, samples: Samples, report: Told) -> list[Array]:
    """The first output of each step, [sequences, *shape], of a float graph with states.
    Raises DovetailError where states become NaN or infinite."""
    return [found[graph.results[0]] for _, found in _walk(graph, samples, report)]


def steps_as_samples(graph: Graph, samples: Samples, report: Told) -> Samples:
    """Samples of successive steps, of a float graph with states, as samples that each have the contents of the states
    before that step; where these are many bytes, of some steps only, evenly and of all sequences.
    Raises DovetailError where states become NaN or infinite."""
    if not graph.states:
        return samples
    count = samples.count // samples.steps
    every = max(1, -(-samples.count * sum(array.nbytes for array in graph.states) // MOST_STATES))
    kept: dict[str, list[Array]] = {name: [] for name in graph.inputs}
    for step, (inputs, _) in enumerate(_walk(graph, samples, report)):
        chosen = [at for at in range(count) if (step + at) % every == 0]
        for name, array in inputs.items():
            kept[name].append(array[chosen])
    return Samples({name: np.concatenate(arrays) for name, arrays in kept.items()}, None)


def bits_per_token(logits: Array, following: Array) -> tuple[float, float]:
    """Bits per token, and the share of tokens that are the most likely one in percent.

    Args:
        logits: [steps, classes]
        following: the token after each step, int [steps]
    """
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    nats = np.log(np.exp(wide - top).sum(axis=-1)) + top[:, 0] - wide[np.arange(len(wide)), following]
    return float(nats.mean() / np.log(2)), float((wide.argmax(axis=-1) == following).mean() * 100)


def tokens_of(graph: Graph, samples: Data, steps: int, classes: int) -> Array | None:
    """The tokens of sequences, int [sequences, steps]: the one integer input of one element that holds what follows
    from no counting; None where there is no such input."""
    for name in graph.given:
        kind, array = graph.types[name], samples[name]
        if kind.dtype.is_integer and kind.elements == 1 and steps > 1:
            rows = array.reshape(-1, steps)
            counted = (np.diff(rows, axis=1) == 1).all()
            if not counted and rows.min() >= 0 and rows.max() < classes:
                return rows
    return None
