"""The networks of the zoo: the four of MLPerf Tiny v1 (github.com/mlcommons/tiny) and a small one for 8x8 digits.

A network is written down as a tuple of layers, each naming the layers it reads.
"""

from __future__ import annotations

from enum import Enum

from dovetail.records import Record


class ZooLayerKind(Enum):
    """Kinds of layers."""

    CONVOLUTION = "convolution"
    DEPTHWISE = "depthwise convolution"
    """One window per channel."""
    DENSE = "dense"
    ADD = "add"
    POOL = "pool"
    """Mean over the whole image, [N, C, 1, 1]."""
    FLATTEN = "flatten"
    SOFTMAX = "softmax"


WITH_WEIGHTS = (ZooLayerKind.CONVOLUTION, ZooLayerKind.DEPTHWISE, ZooLayerKind.DENSE)
INPUT = "input"
"""Name of a network's input."""


class ZooLayer(Record):
    """One layer, its bias and activation included. Images are NCHW, flat values NC."""

    kind: ZooLayerKind
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

    def borders(self, rows: int, columns: int) -> list[tuple[int, int]]:
        """Zeros before and after the axes of an image, by TensorFlow's SAME rule, which the four MLPerf Tiny networks
        use."""
        from dovetail.read.geometry import same_border  # the names alone come without numpy

        return [same_border(size, span, self.stride) for size, span in zip((rows, columns), self.kernel, strict=True)]


class ZooNetwork(Record):
    """A network without weights."""

    name: str
    input_shape: tuple[int, ...]
    """(C, H, W) of an image or (C,) of a flat input; the batch is not part of it."""
    input_range: tuple[float, float]
    """Lowest and highest value an input element takes."""
    layers: tuple[ZooLayer, ...]
    """In an order in which each layer follows those it reads; the last one is the output."""


def _convolution(name: str, source: str, channels: int, kernel: int, stride: int = 1, relu: bool = True) -> ZooLayer:
    return ZooLayer(ZooLayerKind.CONVOLUTION, name, (source,), channels, (kernel, kernel), stride, relu)


def _separable(name: str, source: str, channels: int, stride: int = 1) -> tuple[ZooLayer, ZooLayer]:
    """A 3x3 depthwise convolution and the 1x1 convolution after it."""
    depthwise = ZooLayer(ZooLayerKind.DEPTHWISE, f"{name}/depthwise", (source,), 0, (3, 3), stride, True)
    return depthwise, _convolution(f"{name}/pointwise", depthwise.name, channels, 1)


def _classifier(source: str, classes: int) -> tuple[ZooLayer, ...]:
    """Mean over the image, one dense layer, softmax."""
    return (
        ZooLayer(ZooLayerKind.POOL, "head/pool", (source,)),
        ZooLayer(ZooLayerKind.FLATTEN, "head/flatten", ("head/pool",)),
        ZooLayer(ZooLayerKind.DENSE, "head/fc", ("head/flatten",), classes, gain=2.0),
        ZooLayer(ZooLayerKind.SOFTMAX, "head/softmax", ("head/fc",)),
    )


def _residual(name: str, source: str, channels: int, stride: int) -> tuple[ZooLayer, ...]:
    """Two 3x3 convolutions added to their input, which a 1x1 convolution fits where the stride is not 1."""
    first = _convolution(f"{name}/conv1", source, channels, 3, stride)
    second = _convolution(f"{name}/conv2", first.name, channels, 3, relu=False)
    shortcut = () if stride == 1 else (_convolution(f"{name}/shortcut", source, channels, 1, stride, relu=False),)
    kept = shortcut[0].name if shortcut else source
    return first, second, *shortcut, ZooLayer(ZooLayerKind.ADD, f"{name}/add", (kept, second.name), relu=True)


def resnet8() -> ZooNetwork:
    """ResNet8 on 32x32 RGB images, 10 classes (CIFAR-10)."""
    layers = [_convolution("stem/conv", "input", 16, 3)]
    for stage, (channels, stride) in enumerate(((16, 1), (32, 2), (64, 2)), start=1):
        layers += _residual(f"stage{stage}", layers[-1].name, channels, stride)
    return ZooNetwork("resnet8", (3, 32, 32), (0.0, 255.0), (*layers, *_classifier(layers[-1].name, 10)))


def ds_cnn() -> ZooNetwork:
    """DS-CNN on 49 frames of 10 mel-frequency coefficients, 12 keywords."""
    layers = [ZooLayer(ZooLayerKind.CONVOLUTION, "stem/conv", ("input",), 64, (10, 4), 2, True)]
    for block in range(1, 5):
        layers += _separable(f"block{block}", layers[-1].name, 64)
    # The range of the original's input: scale 0.5847, zero point 83.
    return ZooNetwork("ds_cnn", (1, 49, 10), (-123.4, 25.7), (*layers, *_classifier(layers[-1].name, 12)))


def mobilenet_v1() -> ZooNetwork:
    """MobileNetV1, a quarter of its width, on 96x96 RGB images, 2 classes (a person or none)."""
    blocks = ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *((128, 1),) * 5, (256, 2), (256, 1))
    layers = [_convolution("stem/conv", "input", 8, 3, 2)]
    for block, (channels, stride) in enumerate(blocks, start=1):
        layers += _separable(f"block{block}", layers[-1].name, channels, stride)
    return ZooNetwork("mobilenet_v1", (3, 96, 96), (0.0, 1.0), (*layers, *_classifier(layers[-1].name, 2)))


def autoencoder() -> ZooNetwork:
    """Dense autoencoder of 5 frames of 128 mel energies in dB, through 8 values in its middle."""
    layers: list[ZooLayer] = []
    for depth, channels in enumerate((128, 128, 128, 128, 8, 128, 128, 128, 128), start=1):
        source = layers[-1].name if layers else "input"
        layers.append(ZooLayer(ZooLayerKind.DENSE, f"fc{depth}", (source,), channels, relu=True))
    output = ZooLayer(ZooLayerKind.DENSE, "fc10", (layers[-1].name,), 640, gain=15.0)
    # The range of the original's input: scale 0.3910, zero point 89.
    return ZooNetwork("autoencoder", (640,), (-84.8, 14.9), (*layers, output))


def digits() -> ZooNetwork:
    """A small CNN for the 8x8 grey images of scikit-learn's digits, 10 classes; 54,848 multiply-accumulates."""
    layers = [_convolution("conv1", "input", 8, 3), _convolution("conv2", "conv1", 16, 3, 2)]
    for block in (1, 2):
        layers += _separable(f"block{block}", layers[-1].name, 32)
    return ZooNetwork("digits", (1, 8, 8), (0.0, 1.0), (*layers, *_classifier(layers[-1].name, 10)))
