"""Dead channels: what weights of zero read, and what is the same whatever the input is, is not computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import dovetail
from dovetail.compile import Options, prepare
from dovetail.ir import dead
from dovetail.ir.crop import total_macs
from dovetail.ir.dead import without_dead
from dovetail.ir.graph import Graph, GraphBuilder, verify
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, Linear
from dovetail.ir.operators.movement import Pad, Reshape
from dovetail.ir.types import DType, TensorType, frozen
from dovetail.targets import load_target
from drawn import Drawn, assert_same

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny"


class Deep(Drawn):
    """More convolutions behind each other."""

    def slice(self, x: str) -> str:
        return super().slice(x) if self.random.random() < 0.2 else self.convolution(x)

    def pool(self, x: str) -> str:
        return super().pool(x) if self.random.random() < 0.4 else self.convolution(x)


def pruned(graph: Graph, seed: int) -> Graph:
    """The graph with zeros for random rows and columns of its convolutions' weights."""
    numbers = np.random.default_rng(seed)
    constants = dict(graph.constants)
    for node in graph.nodes:
        if isinstance(node.operator, Conv2d):
            weights = constants[node.inputs[1]].copy()
            weights[..., numbers.random(weights.shape[-1]) < 0.5] = 0
            weights[numbers.random(len(weights)) < 0.3] = 0
            constants[node.inputs[1]] = frozen(weights)
    return replace(graph, constants=constants)


@pytest.mark.parametrize("group", range(4))
def test_random_graphs_stay_exact(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead, "_WORD", 1 + group % 2 * 3)
    smaller = 0
    for seed in range(group * 80, group * 80 + 80):
        graph = pruned(Deep(seed).graph(), seed)
        alive = without_dead(graph)
        verify(alive)
        assert_same(graph, alive)
        smaller += total_macs(alive) < total_macs(graph)
        assert total_macs(without_dead(alive)) == total_macs(alive)
    assert smaller >= (4 if group % 2 else 15)


class Chain:
    """A network written by hand: layers of 1x1 and 3x3 of given weights."""

    def __init__(self, channels: int) -> None:
        self.builder = GraphBuilder("chain")
        self.value = self.builder.input("x", TensorType((1, 6, 6, channels), DType.INT8))

    def layer(self, weights: np.ndarray, bias: list[int], padded: int | None = None, zero_point: int = 0) -> Chain:
        """A convolution, depthwise where the weights are [1, KH, KW, C], requantised to 1/8 and clamped."""
        b = self.builder
        if padded is not None:
            self.value = b.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), padded), [self.value])
        kind = DepthwiseConv2d if len(weights) == 1 and weights.shape[1] > 1 else Conv2d
        names = [b.constant("w", weights.astype(np.int8)), b.constant("b", np.array(bias, np.int32))]
        total = b.add(kind(input_zero_point=zero_point), [self.value, *names])
        parts = [b.constant("m", np.array([1 << 30], np.int32)), b.constant("s", np.array([-2], np.int32))]
        self.value = b.add(Clip(-128, 127, DType.INT8), [b.add(Requantize(), [total, *parts])])
        return self

    def graph(self) -> Graph:
        """All of it."""
        return self.builder.finish([self.value])


def widths(graph: Graph) -> list[int]:
    """Output channels of each layer."""
    return [graph.types[node.output].shape[-1] for node in graph.nodes if isinstance(node.operator, Linear)]


def random_weights(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Without zeros."""
    numbers = np.random.default_rng(seed)
    return numbers.integers(1, 60, shape) * numbers.choice([-1, 1], shape)


def test_channels_without_a_reader_go_through_depthwise_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead, "_WORD", 1)
    last = random_weights((3, 1, 1, 10))
    last[..., [1, 4, 5]] = 0
    chain = Chain(4).layer(random_weights((10, 1, 1, 4)), [5] * 10)
    chain.layer(random_weights((1, 3, 3, 10)), [7] * 10, padded=0).layer(last, [0] * 3)
    graph = chain.graph()
    alive = without_dead(graph)
    assert widths(alive) == [7, 7, 3]
    assert_same(graph, alive)
    monkeypatch.setattr(dead, "_WORD", 4)
    assert widths(without_dead(graph)) == [8, 8, 3]
    assert_same(graph, without_dead(graph))


@pytest.mark.parametrize(("padded", "wanted"), [(None, [5, 3]), (16, [5, 3]), (0, [8, 3])])
def test_constant_channels_join_the_bias(
    padded: int | None, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three channels are 128 * 1/8 = 16 everywhere: a border of another number keeps them."""
    monkeypatch.setattr(dead, "_WORD", 1)
    first = random_weights((8, 1, 1, 4))
    first[[0, 2, 7]] = 0
    chain = Chain(4).layer(first, [128] * 8).layer(random_weights((3, 3, 3, 8)), [9, 8, 7], padded=padded, zero_point=5)
    graph = chain.graph()
    alive = without_dead(graph)
    assert widths(alive) == wanted
    assert_same(graph, alive)


def test_channels_of_flattened_images() -> None:
    builder = GraphBuilder("flat")
    chain = Chain(3).layer(random_weights((8, 1, 1, 3)), [1] * 8)
    builder = chain.builder
    flat = builder.add(Reshape((1, 288)), [chain.value])
    weights = random_weights((4, 288)).reshape(4, 36, 8)
    weights[:, :, [0, 3, 4, 6]] = 0
    weights[:, :20, 5] = 0
    names = [builder.constant("w", weights.reshape(4, 288).astype(np.int8))]
    graph = builder.finish([builder.add(FullyConnected(), [flat, *names])])
    alive = without_dead(graph)
    assert widths(alive) == [4, 4] and total_macs(alive) * 2 == total_macs(graph)
    assert_same(graph, alive)


def test_what_is_needed_stays_itself() -> None:
    graph = Chain(4).layer(random_weights((8, 1, 1, 4)), [0] * 8).layer(random_weights((3, 1, 1, 8)), [0] * 3).graph()
    assert without_dead(graph) is graph


def test_a_layer_that_reads_nothing() -> None:
    graph = Chain(4).layer(random_weights((8, 1, 1, 4)), [0] * 8).layer(np.zeros((3, 1, 1, 8)), [9, 80, -3]).graph()
    alive = without_dead(graph)
    assert widths(alive) == [4, 3]
    assert_same(graph, alive)


@pytest.mark.skipif(not MODELS.is_dir(), reason="../shared is not there")
def test_half_of_vww_is_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """7,489,152 multiply-accumulates, of which 3,798,315 matter by a count of zero columns (../shared); whole words are
    kept."""
    model, riscv = MODELS / "vww_mobilenetv1_int8.tflite", load_target("riscv")
    whole = total_macs(prepare(model, riscv, Options(keep_dead=True)))
    alive = total_macs(prepare(model, riscv, Options()))
    assert (whole, alive) == (7_489_664, 3_840_804)
    assert dovetail("compile", model, "--target", "riscv", "-o", tmp_path / "net") == 0
    assert "3,648,860 dead MACs of the model left out" in capsys.readouterr().err
    assert dovetail("compile", model, "--target", "riscv", "-o", tmp_path / "all", "--keep-dead") == 0
    said = "".join(capsys.readouterr())
    assert "dead MACs" not in said and "7,489,664 MACs" in said
