"""The variables of a TFLite model while it is imported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dovetail.frontend.tflite_file import OperatorEntry, TfliteFile
from dovetail.graph.types import Array

Key = tuple[object, object]
"""What names a resource variable: its container and its name there, as VAR_HANDLE has them."""


@dataclass
class Variables:
    """What the model keeps from one inference to the next."""

    handles: dict[int, Key] = field(default_factory=dict)
    """The variable each resource tensor stands for."""
    first: dict[Key, Array] = field(default_factory=dict)
    """Contents before the first inference, where CALL_ONCE sets them."""
    current: dict[Key, str] = field(default_factory=dict)
    """The graph value of each variable read or written so far, as of the operator being imported."""
    states: dict[Key, str] = field(default_factory=dict)
    """The graph's state of each variable that is read before it is written."""
    taken: set[int] = field(default_factory=set)
    """Variable tensors an operator keeps already."""


def key_of(op: OperatorEntry) -> Key:
    """What a VAR_HANDLE names."""
    return op.options.get("Container"), op.options.get("SharedName")


def assigned(file: TfliteFile) -> set[Key]:
    """The variables a subgraph writes."""
    handles = {op.outputs[0]: key_of(op) for op in _named(file, "VAR_HANDLE") if op.outputs}
    written = {op.inputs[0] for op in _named(file, "ASSIGN_VARIABLE") if op.inputs}
    return {key for tensor, key in handles.items() if tensor in written}


def _named(file: TfliteFile, opcode: str) -> Iterable[OperatorEntry]:
    return (op for op in file.operators if op.opcode == opcode)
