"""Looks at a model file before there is a target: what is in it, what is unusual, what Dovetail will do with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import DType
from dovetail.notes import Note
from dovetail.operators import combined
from dovetail.options import Options
from dovetail.quantize import quantize
from dovetail.read import load_model, own_rounding
from dovetail.read.values import STAND_IN
from dovetail.records import Record


class ModelSurvey(Record):
    """A model file, looked at."""

    name: str
    inputs: Sequence[str]
    """Name, element type and shape of each."""
    outputs: Sequence[str]
    states: int
    """Values kept from one inference to the next."""
    operators: Mapping[str, int]
    """How many operators of each name the model has; of one that is refused only those that are the reason."""
    constants: int
    """Bytes of weights and other constants."""
    kinds: Mapping[str, int]
    """How many computed values of each element type there are once everything that may be is integers."""
    notes: Sequence[Note]
    """Facts taken for granted, approximations, and parts left out, in sentences."""
    faults: Sequence[ModelError]
    """Everything it is refused for; empty where it is read."""
    outlook: str
    """The way a compilation goes, in a sentence."""

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        faults = [{"where": fault.where, "what": fault.what, "hint": fault.hint} for fault in self.faults]
        plain = {"schema": 1, "model": self.name, "inputs": list(self.inputs), "outputs": list(self.outputs)}
        plain |= {"states": self.states, "operators": dict(self.operators), "constant_bytes": self.constants}
        plain |= {"values": dict(self.kinds), "notes": [note.to_json() for note in self.notes]}
        return {**plain, "refused": faults, "outlook": self.outlook}

    def reasons(self) -> list[str]:
        """Everything it is refused for, each once, with the number of operators."""
        grouped: dict[tuple[str, str], list[str]] = {}
        for fault in self.faults:
            grouped.setdefault((fault.what, fault.hint), []).append(fault.where)
        return [
            f"{where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {what}\n{hint}"
            for (what, hint), where in grouped.items()
        ]


def survey(model: Path, options: Options) -> ModelSurvey:
    """Look at a model file; `options` give shapes, states and operators of one's own.

    Raises:
        ModelError: the file cannot be decoded, or it is a Keras file with a layer Dovetail does not read.
    """
    notes, faults = list[Note](), list[ModelError]()
    operators = combined(options.operators)
    graph = load_model(model, options.shapes, notes.append, operators, options.states, faults)
    integers, outlook = _outlook(model, graph, faults)
    kinds = Counter(integers.types[node.output].dtype.text for node in integers.nodes)
    inputs, outputs = (
        [f"{name} {graph.types[name]}" for name in names if not name.startswith(STAND_IN)]
        for names in (graph.given, graph.results)
    )
    origins = dict.fromkeys(node.origin for node in graph.nodes if node.origin)
    counts = Counter(origin.split()[0] for origin in origins)
    if faults:  # operators before a refused one are not in the graph
        counts = Counter(fault.where.rpartition(", ")[2].split()[0] for fault in faults)
    nbytes = sum(kind.elements * kind.dtype.bits // 8 for kind in map(graph.types.__getitem__, graph.constants))
    names = dict(counts.most_common())
    return ModelSurvey(model.name, inputs, outputs, len(graph.states), names, nbytes, kinds, notes, faults, outlook)


def _outlook(model: Path, graph: Graph, faults: Sequence[ModelError]) -> tuple[Graph, str]:
    """The graph with integers where there can be some, and what a compilation does, in a sentence."""
    if faults:
        count = len(faults)
        return graph, f"it is refused, for {count} reason{'s' if count > 1 else ''}"
    graph, rounding = simplify(graph), own_rounding(model)
    try:
        return quantize(graph, rounding), "it computes on integers, as the model says"
    except ModelError as error:
        mixed = quantize(graph, rounding, allow_float=True)
        real = sum(mixed.types[node.output].dtype is DType.FLOAT32 for node in mixed.nodes)
        share = f"{real} of {len(mixed.nodes)} operators in float32 on the core"
        return mixed, f"it needs --float, which computes {share}, or dovetail quantize: {error.where}: {error.what}"
