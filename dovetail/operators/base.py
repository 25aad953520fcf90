"""What every operator of Dovetail can tell about itself.

An operator is a frozen dataclass of its attributes. Its type rule, its exact meaning in numpy, its meaning in
standard ONNX and its cropping rule stand in one class, so adding an operator touches one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.graph.types import Array, Box, TensorType

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


@dataclass(frozen=True)
class Operator:
    """One kind of computation, with its attributes.

    Arrays are NHWC; operands follow the order documented in each class.
    """

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        """Type of the result; raises ValueError when the operands do not fit the operator."""
        raise TypeError(f"{type(self).__name__} has no type rule")

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        """The exact result in numpy."""
        raise TypeError(f"{type(self).__name__} has no meaning")

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        """Write the operator's meaning as standard ONNX nodes into `body`; returns the result's name."""
        raise TypeError(f"{type(self).__name__} has no ONNX body")

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        """The operator that computes only `box` of the result, and the box of each operand it then reads.

        Raises:
            ValueError: the operator cannot be computed in parts along a cut axis.
        """
        raise ValueError(f"{type(self).__name__} cannot be tiled")

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        """True when each element of the result is made from the elements at its own place and from nothing that
        differs from place to place: the operator may then be computed in whatever order the elements lie."""
        return False

    def macs(self, inputs: Sequence[TensorType]) -> int:
        """Multiply-accumulates, padded taps counted."""
        return 0


def one_for_all(inputs: Sequence[TensorType]) -> bool:
    """True when every operand has the result's shape or is a single element: none runs along one axis only."""
    largest = max(inputs, key=lambda kind: kind.elements)
    return all(kind.shape == largest.shape or kind.elements == 1 for kind in inputs)


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless the condition holds: the type rules' one check."""
    if not condition:
        raise ValueError(sentence)
