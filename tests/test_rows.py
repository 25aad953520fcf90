"""Dense layers of `[1, 1, K]` and `[1, N, K]`, as exporters of language models write them, are matrices to engines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.compile import Options, compile_graph
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip, Lookup, Offset, Requantize, Rounding
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.pattern import operators_of
from dovetail.ir.types import DType, Shape, TensorType
from dovetail.legalize import adapt
from dovetail.program.interpret import sample_inputs
from dovetail.program.ir import Begin
from dovetail.schedule.partition import initial_partition
from dovetail.target.description import Target
from dovetail.targets import BUILT_IN, load_target

DENSE = [
    target.name
    for target in map(load_target, BUILT_IN)
    if any(FullyConnected in operators_of(one.pattern) for engine in target.engines for one in engine.offloads)
]
"""The targets with an engine that has a dense layer."""


class Net:
    """A network of integers with one scale each, as every engine takes them."""

    def __init__(self, seed: int, rounding: Rounding) -> None:
        self.builder, self.generator, self.rounding = GraphBuilder("rows"), np.random.default_rng(seed), rounding

    def small(self, sums: str, shift: int = -6) -> str:
        """Sums as bytes."""
        factor = self.builder.constant("factor", np.array([1 << 30], np.int32))
        by = self.builder.constant("by", np.array([shift], np.int32))
        scaled = self.builder.add(Requantize(self.rounding), [sums, factor, by])
        return self.builder.add(Clip(-128, 127, DType.INT8), [scaled])

    def dense(self, x: str, outputs: int) -> str:
        """A dense layer of bytes."""
        depth = self.builder.type_of(x).shape[-1]
        weights = self.builder.constant("weights", self.generator.integers(-127, 128, (outputs, depth)).astype(np.int8))
        bias = self.builder.constant("bias", self.generator.integers(-999, 999, outputs).astype(np.int32))
        return self.small(self.builder.add(FullyConnected(), [x, weights, bias]))


def layer(shape: Shape, outputs: int, rounding: Rounding, seed: int = 0) -> Graph:
    """A network of one dense layer, its operand of a shape."""
    net = Net(seed, rounding)
    return net.builder.finish([net.dense(net.builder.input("x", TensorType(shape, DType.INT8)), outputs)])


def adapted(target: Target, graph: Graph) -> Graph:
    """As the target's first policy has it."""
    return adapt(graph, target.policy(None))


def rounding_of(target: Target) -> Rounding:
    """As its engines round."""
    return target.policy(None).rounding or Rounding.DOUBLE


def taken(target: Target, graph: Graph) -> list[str]:
    """What its engines compute of a network that was adapted to it, by their offloads."""
    return sorted(one.offload.name for one in initial_partition(graph, target) if one.offload is not None)


@pytest.mark.parametrize("name", DENSE)
@settings(max_examples=8, deadline=None)
@given(
    ones=st.integers(0, 3), rows=st.integers(1, 5), depth=st.sampled_from([16, 40, 64]), seed=st.integers(0, 1 << 20)
)
def test_an_engine_takes_rows_as_it_takes_a_matrix(name: str, ones: int, rows: int, depth: int, seed: int) -> None:
    """Whatever ones are before the rows, and also without an axis of rows. One row is taken by every engine."""
    target = load_target(name)
    matrix = layer((rows, depth), 32, rounding_of(target), seed)
    deep = layer((*(1,) * ones, *((rows,) if rows > 1 or ones else ()), depth), 32, rounding_of(target), seed)
    wanted, found = adapted(target, matrix), adapted(target, deep)
    assert taken(target, found) == taken(target, wanted)
    assert rows > 1 or taken(target, found)
    (given_,) = sample_inputs(matrix, seed).values()
    assert all(
        len(found.types[node.inputs[0]].shape) == 2 for node in found.nodes if isinstance(node.operator, FullyConnected)
    )
    results = evaluate(found, {"x": given_.reshape(deep.types["x"].shape)}), evaluate(wanted, {"x": given_})
    (one,), (other,) = (result.values() for result in results)
    np.testing.assert_array_equal(one.reshape(other.shape), other)


def block(target: Target, shape: Shape, state: bool) -> Graph:
    """Three dense layers with limits, a table, and a sum with an operand of the network, or with a state, whose next
    contents it is."""
    net = Net(1, rounding_of(target))
    x = net.builder.input("x", TensorType(shape, DType.INT8))
    table = net.builder.constant("table", net.generator.integers(-128, 128, 256).astype(np.int8))
    looked = net.builder.add(Lookup(), [net.dense(x, 48), table])
    held = net.builder.state("held", np.zeros(shape, np.int8)) if state else x
    wide = [net.builder.add(Offset(3, DType.INT32), [one]) for one in (held, net.dense(looked, shape[-1]))]
    total = net.small(net.builder.add(Add(), wide), -1)
    if state:
        net.builder.replace_state(held, total)
    return net.builder.finish([net.dense(total, 24)])


CORES = ("riscv", "cortex_m4")


@pytest.mark.parametrize(
    ("name", "state"),
    [*((name, False) for name in (*CORES, *DENSE)), *((name, True) for name in (*CORES, "gemmini", "macarray", "vta"))],
)
def test_views_between_cost_nothing(name: str, state: bool) -> None:
    """What a core or an engine computes together with a layer of a matrix, it computes together with one of
    `[1, 1, K]`, in as many bytes and statements. A kernel's offsets do not count: `ne16` reads unsigned bytes of what a
    view is of. Each program is interpreted and compared with the integer graph."""
    target = load_target(name)
    programs = []
    for shape in ((1, 32), (1, 1, 32)):
        compiled = compile_graph(adapted(target, block(target, shape, state)), target, Options())
        computed = [region for region in compiled.regions if not region.is_view]
        kinds = [[type(node.operator) for node in one.graph.nodes] for one in computed]
        kinds = [[kind for kind in of if kind not in (Offset, Reshape)] for of in kinds]
        peaks = {use.memory: use.peak for use in compiled.plan.placements}
        kept = [(one.place, of) for one, of in zip(computed, kinds, strict=True)]
        work = [one for one in compiled.plan.program.statements if not isinstance(one, Begin)]
        programs.append((kept, list(map(type, work)), peaks))
    assert programs[0] == programs[1]
