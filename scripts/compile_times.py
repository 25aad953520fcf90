"""How long `dovetail compile` takes, in CPU seconds of a new process, start-up and all it starts included.

    python scripts/compile_times.py table [TARGET ...]     # MLPerf Tiny on bundled targets: empty cache / filled cache;
                                                           # with --write: docs/figures/compile_times.csv
    python scripts/compile_times.py large [NAME ...]       # MobileNetV1 1.0/224, deep chains, 100 million weights
    python scripts/compile_times.py images [TARGET ...]    # networks at 224x224 on engines: CPU s / MiB / MACs there
    python scripts/compile_times.py vela [TARGET ...]      # MLPerf Tiny and Vela (package ethos-u-vela) in turn, the
                                                           # medians of five: filled cache / another name / empty cache

Python finds the bytecode it would find of an installed package: it is made first, in a folder of its own. Networks of
`large` and `images` have random weights and are made by this script:
`python scripts/compile_times.py make NAME FILE` writes one and prints the bytes of its weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from tables import show, write

from dovetail.targets import BUILT_IN, load_target

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny"
NETWORKS = {
    "AD": "ad_autoencoder_int8",
    "DS-CNN": "kws_dscnn_int8",
    "ResNet8": "ic_resnet8_int8",
    "VWW": "vww_mobilenetv1_int8",
}
"""Name in the table -> model file."""
STEP = 0.0625
"""Scale of every activation of a made network."""


@dataclass
class Chain:
    """A network of one layer after the other, quantised, in ONNX's QDQ form."""

    image: tuple[int, ...]
    """Shape of the input, (1, channels, rows, columns) or (1, features)."""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    shifts: ClassVar[bool] = False
    """Whether every scale is a power of two, so that layers are requantised by shifts."""

    def __post_init__(self) -> None:
        self.channels, self.size = self.image[1], self.image[2:]
        self.constant("step", np.float32(STEP))
        self.constant("zero", np.int8(0))
        self.last = self._stored("image")

    def constant(self, name: str, value: npt.NDArray[np.generic] | np.generic) -> str:
        """Add an initializer; gives its name."""
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def layer(self, outputs: int, kernel: int, stride: int = 1, depthwise: bool = False, relu: bool = True) -> None:
        """A convolution with "same" padding and, as a rule, a ReLU."""
        fan = kernel * kernel * (1 if depthwise else self.channels)
        weights = self._weights((outputs, 1 if depthwise else self.channels, kernel, kernel), fan)
        pads = [kernel // 2, kernel // 2, (kernel - 1) // 2, (kernel - 1) // 2]
        group = self.channels if depthwise else 1
        self._add("Conv", weights, relu=relu, strides=[stride, stride], pads=pads, group=group)
        self.channels, self.size = outputs, tuple(-(-size // stride) for size in self.size)

    def dense(self, outputs: int) -> None:
        """A fully connected layer."""
        self._add("Gemm", self._weights((outputs, self.channels), self.channels), transB=1)
        self.channels = outputs

    def pooled(self) -> None:
        """The mean of every channel, as features."""
        self.nodes.append(helper.make_node("GlobalAveragePool", [self.last], ["mean"]))
        self.nodes.append(helper.make_node("Flatten", ["mean"], ["features"]))
        self.last, self.size = self._stored("features"), ()

    def largest(self, kernel: int = 2, stride: int = 2) -> None:
        """The largest of each window, padded to "same"."""
        pads = [(kernel - stride + 1) // 2, (kernel - stride + 1) // 2, (kernel - stride) // 2, (kernel - stride) // 2]
        self._plain("MaxPool", [self.last], kernel_shape=[kernel, kernel], strides=[stride, stride], pads=pads)
        self.size = tuple(-(-size // stride) for size in self.size)

    def added(self, other: str, relu: bool = False) -> None:
        """The sum with another value of the same shape."""
        name = self._plain("Add", [self.last, other], stored=not relu)
        if relu:
            self._plain("Relu", [name])

    def joined(self, other: str, channels: int) -> None:
        """The channels of the last value, then those of another."""
        self._plain("Concat", [self.last, other], axis=1)
        self.channels += channels

    def doubled(self) -> None:
        """Every row and column twice."""
        self.constant("twice", np.array([1, 1, 2, 2], np.float32))
        self.nodes.append(
            helper.make_node(
                "Resize",
                [self.last, "", "twice"],
                [f"y{len(self.nodes)}"],
                mode="nearest",
                coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
            )
        )
        self.last, self.size = self._stored(self.nodes[-1].output[0]), tuple(2 * size for size in self.size)

    def model(self) -> onnx.ModelProto:
        """The network so far."""
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in (("image", self.image), (self.last, (1, self.channels, *self.size)))
        ]
        graph = helper.make_graph(self.nodes, "chain", ends[:1], ends[1:], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)

    def _weights(self, shape: tuple[int, ...], fan: int) -> list[str]:
        """Weights and bias of a layer whose result keeps the range of its operand."""
        name, scale = f"w{len(self.nodes)}", np.float32(0.02 / fan**0.5)
        power = np.float32(2.0 ** np.ceil(np.log2(scale))) if self.shifts else scale
        most = round(127 * scale / power)
        integers, scale = self.random.integers(-most, most + 1, shape, np.int8), power
        weights = self.constant(name, integers), self.constant(f"{name}_scale", scale)
        bias = self.constant(f"{name}_bias", self.random.integers(-500, 500, shape[0], np.int32))
        wide = self.constant(f"{name}_bias_scale", np.float32(scale * np.float32(STEP)))
        none = self.constant(f"{name}_bias_zero", np.int32(0))
        self.nodes.append(helper.make_node("DequantizeLinear", [*weights, "zero"], [f"{name}_f"]))
        self.nodes.append(helper.make_node("DequantizeLinear", [bias, wide, none], [f"{name}_bias_f"]))
        return [f"{name}_f", f"{name}_bias_f"]

    def _add(self, kind: str, constants: list[str], relu: bool = True, **attributes: object) -> None:
        name = self._plain(kind, [self.last, *constants], stored=not relu, **attributes)
        if relu:
            self._plain("Relu", [name])

    def _plain(self, kind: str, operands: list[str], stored: bool = True, **attributes: object) -> str:
        """A node; its name, which is its result's. The result is stored and the last value, as a rule."""
        name = f"y{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, operands, [name], name=name, **attributes))
        if stored:
            self.last = self._stored(name)
        return name

    def _stored(self, value: str) -> str:
        for kind, end in (("QuantizeLinear", "q"), ("DequantizeLinear", "f")):
            source = value if end == "q" else f"{value}_q"
            self.nodes.append(helper.make_node(kind, [source, "step", "zero"], [f"{value}_{end}"]))
        return f"{value}_f"


def mobilenet() -> Chain:
    """MobileNetV1 1.0/224 (Howard et al. 2017, table 1)."""
    chain = Chain((1, 3, 224, 224))
    chain.layer(32, 3, 2)
    sizes = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for outputs, stride in sizes:
        chain.layer(chain.channels, 3, stride, depthwise=True)
        chain.layer(outputs, 1)
    chain.pooled()
    chain.dense(1000)
    return chain


def inverted(chain: Chain, outputs: int, stride: int, kernel: int = 3, wider: int = 6) -> None:
    """An inverted residual (Sandler et al. 2018)."""
    before, channels = chain.last, chain.channels
    if wider > 1:
        chain.layer(wider * channels, 1)
    chain.layer(chain.channels, kernel, stride, depthwise=True)
    chain.layer(outputs, 1, relu=False)
    if stride == 1 and outputs == channels:
        chain.added(before)


def of_inverted(rows: Sequence[tuple[int, int, int, int, int]]) -> Chain:
    """Inverted residuals at 224 by rows of (wider, outputs, blocks, stride, kernel), a head of 1,280 channels."""
    chain = Chain((1, 3, 224, 224))
    chain.layer(32, 3, 2)
    for wider, outputs, blocks, first, kernel in rows:
        for block in range(blocks):
            inverted(chain, outputs, 1 if block else first, kernel, wider)
    chain.layer(1280, 1)
    chain.pooled()
    chain.dense(1000)
    return chain


def mobilenet_v2() -> Chain:
    """MobileNetV2 1.0/224 (Sandler et al. 2018, table 2)."""
    sizes = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    return of_inverted([(*row, 3) for row in sizes])


def efficientnet() -> Chain:
    """EfficientNet-Lite0: EfficientNet-B0 (Tan and Le 2019, table 1) without squeeze and excitation."""
    kernels = (3, 3, 5, 3, 5, 5, 3)
    outputs, blocks, strides = (16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1), (1, 2, 2, 2, 1, 2, 1)
    widths = (1, 6, 6, 6, 6, 6, 6)
    return of_inverted(list(zip(widths, outputs, blocks, strides, kernels, strict=True)))


def resnet(blocks: Sequence[int], deep: bool) -> Chain:
    """A residual network (He et al. 2015, table 1) at 224, of blocks of three layers where it is deep, else of two."""
    chain = Chain((1, 3, 224, 224))
    chain.layer(64, 7, 2)
    chain.largest(3)
    for stage, count in enumerate(blocks):
        narrow = 64 << stage
        for block in range(count):
            stride, outputs = 2 if stage and not block else 1, 4 * narrow if deep else narrow
            before, channels = chain.last, chain.channels
            for inner, kernel, step in ((narrow, 1, 1), (narrow, 3, stride)) if deep else ((narrow, 3, stride),):
                chain.layer(inner, kernel, step)
            chain.layer(outputs, 1 if deep else 3, relu=False)
            last, size = chain.last, chain.size
            if channels != outputs or stride != 1:
                chain.last, chain.channels = before, channels
                chain.layer(outputs, 1, stride, relu=False)
                chain.size, before = size, chain.last
            chain.last = last
            chain.added(before, relu=True)
    chain.pooled()
    chain.dense(1000)
    return chain


def yolo_tiny() -> Chain:
    """The layers of YOLOv3-tiny (Redmon and Farhadi 2018) at 224, its finer head the output."""
    chain = Chain((1, 3, 224, 224))
    for outputs in (16, 32, 64, 128):
        chain.layer(outputs, 3)
        chain.largest()
    chain.layer(256, 3)
    finer = chain.last
    chain.largest()
    chain.layer(512, 3)
    chain.largest(2, 1)
    chain.layer(1024, 3)
    chain.layer(256, 1)
    chain.layer(128, 1)
    chain.doubled()
    chain.joined(finer, 256)
    chain.layer(256, 3)
    chain.layer(255, 1, relu=False)
    return chain


def deep(layers: int) -> Chain:
    """So many small convolutions."""
    chain = Chain((1, 8, 8, 8))
    for _ in range(layers):
        chain.layer(8, 3)
    return chain


def heavy(millions: int) -> Chain:
    """Dense layers of 2,500 x 4,000 and back, 10 million weights each."""
    chain = Chain((1, 2500))
    for number in range(millions // 10):
        chain.dense(2500 if number % 2 else 4000)
    return chain


IMAGES: Mapping[str, Callable[[], Chain]] = {
    "MobileNetV1": mobilenet,
    "MobileNetV2": mobilenet_v2,
    "EfficientNet-Lite0": efficientnet,
    "ResNet-18": lambda: resnet((2, 2, 2, 2), deep=False),
    "ResNet-50": lambda: resnet((3, 4, 6, 3), deep=True),
    "YOLOv3-tiny": yolo_tiny,
}
"""Networks at 224x224, by name."""


@dataclass(frozen=True)
class Large:
    """A made network, and how it is compiled."""

    made: Callable[[], Chain]
    target: str
    options: tuple[str, ...]


LARGE: Mapping[str, Large] = {
    "mobilenet_224": Large(mobilenet, "ne16", ("--set", "L2.size=64M")),
    "deep_1000": Large(lambda: deep(1000), "riscv", ("--set", "flash.size=64M")),
    "deep_5000": Large(lambda: deep(5000), "riscv", ("--set", "flash.size=64M")),
    "deep_1000_ne16": Large(lambda: deep(1000), "ne16", ("--set", "L2.size=64M")),
    "deep_5000_ne16": Large(lambda: deep(5000), "ne16", ("--set", "L2.size=64M")),
    "heavy_100": Large(lambda: heavy(100), "riscv", ("--set", "flash.size=512M")),
    "heavy_100_ne16": Large(lambda: heavy(100), "ne16", ("--set", "L2.size=512M")),
}
"""By name; memories are as large as the network needs."""


@dataclass(frozen=True)
class Cost:
    """What a process took."""

    seconds: float
    """Of CPU time, its children's included."""
    nbytes: int
    """Of memory at its peak."""


@cache
def _environment() -> Mapping[str, str]:
    """Variables of a process that finds bytecode and has made all it needs once."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": tempfile.mkdtemp(prefix="bytecode")}


class Refused(Exception):
    """The message of a model that a target has no room for."""


def spent(words: Sequence[str | Path], **variables: str) -> Cost:
    """What a command takes; raises Refused with its message where it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**_environment(), **variables}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise Refused(f"{' '.join(map(str, words))}: {said.decode()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, usage.ru_maxrss * 1024)


def measured(model: Path, target: str, cache: Path, options: Sequence[str] = (), build: Path | None = None) -> Cost:
    """Compile a model in a new process, to a folder if one is given; raises Refused with its message where that
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "dovetail", "compile", model, "--target", target, *options]
        return spent([*words, "-o", build or f"{folder}/build"], DOVETAIL_CACHE=str(cache))


def table(targets: Sequence[str]) -> Iterator[list[str]]:
    """The rows of the table of the four networks: cold / warm for each; a dash where there is no room for it."""
    yield ["target", *NETWORKS]
    for target in targets:
        with tempfile.TemporaryDirectory() as folder, suppress(Refused):  # for the bytecode
            measured(MODELS / f"{NETWORKS['DS-CNN']}.tflite", target, Path(folder))
        cells = []
        for model in NETWORKS.values():
            pair: list[float] = []
            with tempfile.TemporaryDirectory() as folder, suppress(Refused):
                pair += [measured(MODELS / f"{model}.tflite", target, Path(folder)).seconds for _ in range(2)]
            cells.append(" / ".join(f"{seconds:.1f}" for seconds in pair) or "-")
        yield [target, *cells]


def vela(targets: Sequence[str]) -> Iterator[list[str]]:
    """A row for each of the four networks and target: CPU seconds of Vela, and of compiles with their ratio to it."""
    yield ["network", "target", "Vela", "filled cache", "another name", "empty cache"]
    for name, stem in NETWORKS.items():
        for target in targets:
            runs = list[tuple[float, ...]]()
            with tempfile.TemporaryDirectory() as folder:
                model, kept = MODELS / f"{stem}.tflite", Path(folder) / "kept"
                measured(model, target, kept)
                for turn in range(5):
                    other = spent(["vela", model, "--output-dir", f"{folder}/vela"])
                    renamed = ["--name", f"net_{turn}"]
                    ours = [measured(model, target, kept), measured(model, target, kept, renamed)]
                    ours.append(measured(model, target, Path(folder) / f"{turn}"))
                    runs.append(tuple(cost.seconds for cost in (other, *ours)))
            theirs, *medians = map(median, zip(*runs, strict=True))
            yield [name, target, f"{theirs:.2f}", *(f"{own:.2f} ({own / theirs:.2f})" for own in medians)]


def large(names: Sequence[str]) -> Iterator[list[str]]:
    """A row for each large network."""
    yield ["network", "target", "CPU s", "MiB at the peak", "MiB of weights"]
    for name in names:
        case = LARGE[name]
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / f"{name}.onnx"
            onnx.save(deep(1).model(), model)
            measured(model, case.target, Path(folder) / "cache")  # for the bytecode
            # In a process of its own: what this one needs at most would count as memory of those it starts.
            made = subprocess.run([sys.executable, __file__, "make", name, model], check=True, stdout=subprocess.PIPE)
            cost, nbytes = measured(model, case.target, Path(folder) / "cache", case.options), int(made.stdout)
        yield [name, case.target, f"{cost.seconds:.1f}", cost.nbytes >> 20, f"{nbytes / (1 << 20):.1f}"]


def images(targets: Sequence[str]) -> Iterator[list[str]]:
    """A row for each target: CPU seconds, MiB at the peak and the engine's share of the MACs for each network, in
    memories as large as it needs; "differs" where the outputs on this computer are not those of the integer graph."""
    yield ["target", "memories", *IMAGES]
    for name in targets:
        target = load_target(name)
        sizes = {memory: target.memory(memory).size for memory in (target.code, target.values)}
        enlarged = [f"{memory}.size=128M" for memory, size in sizes.items() if size < 128 << 20]
        options = ["--check", *(word for one in enlarged for word in ("--set", one))]
        yield [name, " ".join(enlarged), *(image(network, name, options) for network in IMAGES)]


def image(network: str, target: str, options: Sequence[str]) -> str:
    """The cell of a network at 224x224: it is compiled, checked, and run on this computer."""
    with tempfile.TemporaryDirectory() as folder:
        model, report, build = (Path(folder) / one for one in ("network.onnx", "report.json", "build"))
        shifts = ["--shifts"] if load_target(target).quantisation.shifts else []
        words = [sys.executable, __file__, "make", network, model, *shifts]
        subprocess.run(words, check=True, stdout=subprocess.PIPE)
        try:
            cost = measured(model, target, Path(folder) / "cache", options, build)
        except Refused as error:
            print(error, file=sys.stderr)
            return "refused"
        words = [sys.executable, "-m", "dovetail", "run", build, "--sim", "host", "--json", report]
        if subprocess.run(words, stdout=subprocess.DEVNULL).returncode:
            return "differs"
        macs = json.loads(report.read_text())["macs"]
    share = 100 * (1 - macs["core"] / macs["total"])
    return f"{cost.seconds:.1f} / {cost.nbytes / (1 << 20):.0f} / {share:.0f} %"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "large", "images", "vela", "make"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="write the table to docs/figures")
    parser.add_argument("--shifts", action="store_true", help="with make: all scales are powers of two")
    given = parser.parse_args()
    if given.what == "make":
        name, file = given.names
        Chain.shifts = given.shifts
        chain = IMAGES[name]() if name in IMAGES else LARGE[name].made()
        onnx.save(chain.model(), file)
        print(sum(len(one.raw_data) for one in chain.constants))
        return
    tables = {
        "table": ("compile_times", table, tuple(BUILT_IN)),
        "large": ("compile_times_large", large, tuple(LARGE)),
        "vela": ("compile_times_vela", vela, ("riscv", "cortex_m4", "ne16", "kestrel", "macarray")),
        "images": ("compile_times_images", images, tuple(name for name in BUILT_IN if load_target(name).engines)),
    }
    name, rows_of, every = tables[given.what]
    rows = list(rows_of(given.names or every))
    show({name: rows})
    if given.write:
        write({name: rows}, f"python scripts/compile_times.py {' '.join([given.what, *given.names])}")


if __name__ == "__main__":
    main()
