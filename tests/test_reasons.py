"""Why no engine takes a layer: what a rewrite met and what a limit says, of the pattern that is about such layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.reduction import AveragePool2d
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import adapt
from dovetail.schedule.partition import explain_mismatch
from dovetail.targets import load_target


def layer(operator: Conv2d | AveragePool2d, multipliers: list[int]) -> Graph:
    """Such an operator, requantised with one multiplier or one for each of four channels."""
    builder = GraphBuilder("layer")
    x = builder.input("x", TensorType((1, 6, 6, 4), DType.INT8))
    weights = [builder.constant("w", np.ones((4, 1, 1, 4), np.int8))] if isinstance(operator, Conv2d) else []
    total = builder.add(operator, [x, *weights], "total")
    numbers = [multipliers, [-3] * len(multipliers)]
    constants = [builder.constant(name, np.array(n, np.int32)) for name, n in zip("ms", numbers, strict=True)]
    scaled = builder.add(Requantize(Rounding.DOUBLE, 0, 0), [total, *constants], "scaled")
    return builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled], "y")])


def test_a_rewrites_reason_stands_before_that_of_a_limit() -> None:
    target = load_target("gemmini")
    graph = adapt(layer(Conv2d(), [1 << 30, 3 << 29, 1 << 30, 1 << 30]), target.policies[0])
    why = explain_mismatch(graph, target, graph.nodes[-1])
    cause, limit = why.index("the multipliers of channels differ"), why.index("requantisation must round as `float32`")
    assert cause < why.index("dovetail quantize can make it one") < limit
    one = adapt(layer(Conv2d(), [1 << 30]), target.policies[0])
    assert explain_mismatch(one, target, one.nodes[-1]) == ""


def test_the_pattern_is_of_an_engine_that_has_such_layers() -> None:
    """A convolution's pattern goes two operators further with this pool than a pool's own."""
    kestrel, macarray = load_target("kestrel"), load_target("macarray")
    both = replace(kestrel, engines=(*macarray.engines, *kestrel.engines))
    graph = layer(AveragePool2d((2, 2), (2, 2)), [1 << 30])
    assert explain_mismatch(graph, both, graph.nodes[-1]).startswith("kestrel average pool: ")
    assert explain_mismatch(graph, macarray, graph.nodes[-1]).startswith("macarray convolution: ")
