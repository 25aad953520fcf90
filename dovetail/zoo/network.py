"""How the zoo writes a network down: a tuple of layers, each naming the layers it reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a layer computes."""

    CONVOLUTION = "convolution"
    DEPTHWISE = "depthwise convolution"
    """One window per channel."""
    DENSE = "dense"
    ADD = "add"
    POOL = "pool"
    """Mean over the whole image, [N, C, 1, 1]."""
    FLATTEN = "flatten"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, its bias and activation included. Images are NCHW, flat values NC."""

    kind: Kind
    name: str
    """Unique in its network."""
    inputs: tuple[str, ...]
    """Names of the layers (or of the network's input) it reads."""
    channels: int = 0
    """Output channels of a convolution or dense layer; 0 where the input decides."""
    kernel: tuple[int, int] = (1, 1)
    """Window height and width in elements."""
    stride: int = 1
    """Step of the window in elements, the same along both axes."""
    relu: bool = False
    """Whether negative results become 0."""
    gain: float = 1.0
    """Standard deviation that random weights give the layer's sums (see `random_parameters`)."""


@dataclass(frozen=True, slots=True)
class Network:
    """A network without weights."""

    name: str
    input_shape: tuple[int, ...]
    """(C, H, W) of an image or (C,) of a flat input; the batch is not part of it."""
    input_range: tuple[float, float]
    """Lowest and highest value an input element takes."""
    layers: tuple[Layer, ...]
    """In an order in which each layer follows those it reads; the last one is the output."""
    input_name: str = "input"


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after an axis of `size` elements so that ceil(size / stride) windows fit.

    TensorFlow's SAME rule, which the four MLPerf Tiny networks use: an odd one goes after.
    """
    windows = -(-size // stride)
    total = max((windows - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2
