"""Layers no pattern gives by itself: constants that belong together, a port's own requantisation, its networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

import dovetail.target as dt
from dovetail.guests.check.cases import QUICK, _asked, ask, bases, derive
from dovetail.guests.check.layers import Point
from dovetail.guests.check.networks import NETWORKS, through_policies
from dovetail.guests.check.suite import check
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, ScaleShift
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.rewrite import Draft, run
from dovetail.ir.types import DType, TensorType
from dovetail.targets import load_target
from porting import order


def with_offload(pattern: dt.Pattern, *limits: dt.Constraint, **changes: object) -> dt.Target:
    """The MAC array with one offload, of another pattern."""
    target = load_target("macarray")
    policies = changes.pop("policies", target.policies)
    offload = replace(target.engines[0].offloads[0], name="own", pattern=pattern, constraints=limits, **changes)  # type: ignore[arg-type]
    engine = replace(target.engines[0], offloads=(offload,))
    return through_policies(replace(target, engines=(engine,), policies=policies))  # type: ignore[arg-type]


def starts(target: dt.Target) -> list[Point]:
    """Where cases of its only offload begin."""
    return bases(target.engines[0].offloads[0])


def side(name: str) -> dt.Pattern:
    """One operand of a sum, brought to the scale of both."""
    scaled = (dt.operand(name), dt.constant(f"multiplier_{name}"), dt.constant(f"shift_{name}"))
    return dt.apply(Requantize, *scaled, name=f"scale_{name}")


SUM = dt.apply(Clip, dt.apply(Requantize, dt.apply(Add, side("a"), side("b")), dt.constant("m"), dt.constant("s")))
HALF = dt.Constraint(
    "the larger operand must be halved",
    lambda m: [int(m.array(f"multiplier_{name}")[0]) for name in "ab"],
    lambda found: 1 << 30 in found,
)
RAISED = dt.one_of("both must be raised by 20 bits", lambda m: m.operator("scale_a", Requantize).left_shift, 20)


def test_a_sum_with_two_multipliers_that_belong_together() -> None:
    target = with_offload(SUM, HALF, RAISED)
    offload = target.engines[0].offloads[0]
    found = starts(target)
    assert NETWORKS[found[0]["model"] - 1][0] == "an addition"
    cases = derive(target.engines[0], offload, found[0], QUICK)
    assert len(cases) > 10 and max(case.point["channels"] for case in cases) == 256
    for case in cases:
        asked = ask(offload, case.point)
        assert asked is not None and not asked.failures and len(asked.layer.inputs) == 2


@dataclass(frozen=True)
class Truncate(ScaleShift):
    """A requantisation of a port's own."""


def truncated(graph: Graph) -> Graph:
    """A port's rewrite: a sum's requantisation by its own arithmetic."""

    def rule(draft: Draft, node: Node) -> str | None:
        if not isinstance(node.operator, Requantize) or draft.made_by(node.inputs[0], Conv2d) is None:
            return None
        names = [draft.constant(np.array([n], np.int32), DType.INT32, node.output) for n in (3, 0, 9)]
        return draft.add(Truncate(), [node.inputs[0], *names], node)

    return run(graph, [rule])


def test_a_requantisation_of_the_ports_own() -> None:
    conv = dt.apply(Conv2d, dt.operand("x"), dt.constant("w"), dt.constant("b"), name="layer")
    pattern = dt.apply(Clip, dt.apply(Truncate, conv, *map(dt.constant, ("k", "o", "s"))))
    policies = (dt.Policy("own", "truncates", (dt.Rewrite("truncate", truncated, 4),)),)
    found = starts(with_offload(pattern, policies=policies))
    assert NETWORKS[found[0]["model"] - 1][0] == "a convolution"


def twice(settings: Mapping[str, int]) -> Graph:
    """A port's own network: an image added to itself."""
    if settings["rows"] > 9:
        raise ValueError("no such image")
    builder = GraphBuilder("own")
    x = builder.input("x", TensorType((1, settings["rows"], 2, 4 + settings["variant"]), DType.INT32))
    return builder.finish([builder.add(Add(), [x, builder.input("y", builder.type_of(x))])])


def test_a_port_gives_networks_of_its_own() -> None:
    pattern = dt.apply(Add, dt.operand("x"), dt.operand("y"))
    few = dt.Constraint("at most 7 channels", lambda m: m.result.shape[-1], lambda count: count <= 7)
    target = with_offload(pattern, few, cases=twice)
    point = next(point for point in starts(target) if point.get("made"))
    cases = derive(target.engines[0], target.engines[0].offloads[0], point, QUICK)
    assert {case.point["rows"] for case in cases} == {1, 2, 3, 4, 5, 6, 7, 9}
    assert {case.point["variant"] for case in cases if case.taken} == {0, 1, 2, 3}
    assert {case.point["variant"] for case in cases if not case.taken} == {4, 5, 6, 7}


def test_a_wrong_model_of_such_an_offload_is_found() -> None:
    """The MAC array's device computes convolutions: called a sum, every case raises."""
    found = check(with_offload(SUM, HALF, RAISED, cycles=lambda match: 100), order(simulators=("model",)))
    assert found.findings and found.tested[0].cases > 5


def test_two_settings_that_are_right_together_are_found_and_no_more_is_tried_than_helps() -> None:
    """Two axes at a time: only while every limit that fails looks at what is changed."""
    offload = load_target("macarray").engines[0].offloads[0]
    both = dt.Constraint(
        "rows and columns must be 9", lambda m: m.result.shape[1:3], lambda v: tuple(v) == (9, 9), dt.Scope.LAYERS
    )
    never = dt.Constraint("the moon must be full", lambda m: "new", lambda v: v == "full")
    _asked.cache_clear()
    (found,) = bases(with_offload(offload.pattern, *offload.constraints, both).engines[0].offloads[0])
    asked = ask(replace(offload, constraints=(both,)), found)
    assert asked is not None and asked.failures == ()
    _asked.cache_clear()
    assert bases(replace(offload, constraints=(*offload.constraints, both, never))) == []
    assert _asked.cache_info().misses < 2000, "another ten thousand would help no more"


def test_a_pool_of_two_by_two_is_found_at_once() -> None:
    """Eight settings that are right together only."""
    pattern = dt.apply(MaxPool2d, dt.operand("x"), name="pool")
    even = dt.Constraint(
        "2x2 with stride 2, without padding, of an even image",
        lambda m: (m.operator("pool", MaxPool2d), m.type("x").shape[1:3]),
        lambda v: v[0] == MaxPool2d((2, 2), (2, 2)) and not any(size % 2 for size in v[1]),
    )
    _asked.cache_clear()
    (found,) = bases(replace(load_target("macarray").engines[0].offloads[0], pattern=pattern, constraints=(even,)))
    assert "made" not in found and _asked.cache_info().misses < 2000
