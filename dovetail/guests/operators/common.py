"""Words that the bundled operators share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dovetail.ir.types import Array, TensorType

Types = Sequence[TensorType]
Arrays = Sequence[Array]
Results = tuple[TensorType, ...]
Numbers = Sequence[int | float]


def text(name: str) -> str:
    """A file of the folder `runtime`: C of operators."""
    return (Path(__file__).parent / "runtime" / f"{name}.c").read_text(encoding="utf-8")
