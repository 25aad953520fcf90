"""`dovetail check` finds planted port bugs and says the right thing about each; it finds nothing in a right port."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from dovetail.guests.check import run, suite
from dovetail.guests.check.cases import _WEAK, QUICK, Limits, ask, base, choices, derive
from dovetail.guests.check.findings import Checked, finding_text, junit, markdown, summary
from dovetail.guests.check.instead import instead
from dovetail.guests.check.layers import SIZES, TYPES, single
from dovetail.guests.check.suite import check
from dovetail.ir.graph import evaluate
from dovetail.ir.operators.activation import Unary
from dovetail.ir.types import DType
from dovetail.target import Constraint, Memory, Target
from dovetail.target.pattern import apply, operand
from dovetail.targets import load_target
from porting import order, port

PLANTS = (
    (
        "padding swapped",
        "top=layer.before[0], left=layer.before[1]",
        "top=layer.before[1], left=layer.before[0]",
        "padding swapped: rows and columns",
    ),
    ("halo off by one", "before = [lead for", "before = [lead + 1 for", "halo off by one"),
    (
        "last row of the kernel",
        "for row in range(kernel[0]):",
        "for row in range(max(kernel[0] - 1, 1)):",
        "the last row of the kernel is not read",
    ),
    ("weight order", "layer.weights, np.int8)", "layer.weights.transpose(0, 2, 1, 3), np.int8)", "weight order"),
    (
        "output channels",
        "layer.weights, np.int8)",
        "layer.weights[::-1], np.int8)",
        "output channels permuted: weight order",
    ),
    ("operand's zero point", "astype(np.int64) - x_zero", "astype(np.int64)", "forgotten zero point: .*operand's"),
    ("result's zero point", "Rounding.DOUBLE) + y_zero", "Rounding.DOUBLE)", "forgotten zero point of the result"),
    ("bias", "np.int64) + bias", "np.int64)", "the bias is forgotten"),
    (
        "rounding",
        "fixed_point(sums, multiplier, shift, Rounding.DOUBLE)",
        "((sums * multiplier) >> (31 - shift))",
        "wrong rounding",
    ),
    ("single rounding", "shift, Rounding.DOUBLE", "shift, Rounding.SINGLE", "off by one in rounding"),
    (
        "limits",
        "np.clip(fixed_point(sums, multiplier, shift, Rounding.DOUBLE) + y_zero, low, high)",
        "np.clip(fixed_point(sums, multiplier, shift, Rounding.DOUBLE) + y_zero, -128, 127)",
        "limits? of the activation",
    ),
    ("padding of zeros", "constant_values=x_zero", "constant_values=0", "filled with 0 in place of the zero point"),
    ("alignment", 'bus.view(job["parameters"]', 'bus.view(job["parameters"] & ~63', "bad alignment"),
    ("strides between rows", "x_row=x.row", "x_row=x.columns * x.pixel", "strides: all is well where rows"),
    ("stride", "stride=layer.stride[0]", "stride=1", "the stride is forgotten"),
    (
        "parameters",
        "[layer.bias, layer.multiplier,",
        "[layer.bias, np.roll(layer.multiplier, 1),",
        "parameters per channel",
    ),
    ("too wide: dilation", "layers.NO_DILATION, *layers.zero", "*layers.zero", "dilation"),
    ("too wide: groups", "layers.NO_GROUPS, ", "", "groups"),
    ("too wide: rounding", ",\n          layers.DOUBLE_ROUNDING)", ")", "rounding"),
    ("too wide: types", "(*layers.INT8,", "(", "type|code"),
    (
        "last columns",
        'columns = slice(column, column + (job["y_columns"] - 1)',
        'columns = slice(column, column + (job["y_columns"] // 4 * 4 - 1)',
        "port's own code",
    ),
)


DENSE = (
    "output channels",
    "operand's zero point",
    "result's zero point",
    "bias",
    "rounding",
    "single rounding",
    "limits",
    "alignment",
    "parameters",
    "too wide: rounding",
    "too wide: types",
)
"""Bugs that a dense layer shows as well, more cheaply than a convolution."""


@pytest.mark.parametrize(("name", "old", "new", "suspicion"), PLANTS, ids=[plant[0] for plant in PLANTS])
def test_a_planted_bug_is_found_and_suspected(tmp_path: Path, name: str, old: str, new: str, suspicion: str) -> None:
    found = check(port(tmp_path, old, new), order("dense" if name in DENSE else "convolution"))
    assert found.findings
    text = finding_text(found.findings[0])
    assert re.search(suspicion, "\n".join(found.findings[0].suspicions[:2])), text
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 240, text


def test_an_offload_without_a_case_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tried is not nothing found: neither where no layer can be made, nor where none of them could be run."""
    right = port(tmp_path)
    engine = right.engines[0]
    odd = replace(engine.offloads[-1], name="odd", pattern=apply(Unary, operand("x"), name="unary"), constraints=())
    found = check(replace(right, engines=(replace(engine, offloads=(odd,)),)), order())
    assert [finding.title for finding in found.findings if "no case was tried" in finding.title], found
    assert summary(found).startswith("small: 1 finding, 0 cases")
    assert 'failures="1"' in junit(found)
    tiny = tuple(replace(m, size=m.size if m.name == right.code else 4) for m in right.memories)
    monkeypatch.setattr(suite, "_tiled", lambda *given: [])  # which brings memory of its own
    nowhere = check(replace(right, memories=tiny), order("dense", simulators=("iss",)))
    assert any("no case was tried on iss" in finding.title for finding in nowhere.findings), nowhere


@pytest.mark.parametrize("name", ["macarray", "ne16", "opencl"])
def test_ends_are_tried_however_many_offloads_there_are(name: str) -> None:
    """The largest sizes, both sides of a tile's block, and every setting of other numbers the limits take alone."""
    for engine in load_target(name).engines:
        for offload in engine.offloads[:2]:
            start = base(offload)
            assert start is not None
            usual = ask(offload, start)
            assert usual is not None
            taken = [case.point for case in derive(engine, offload, start, QUICK) if case.taken]
            for axis in usual.layer.used:
                for value in choices(axis):
                    alone = ask(offload, {**start, axis: value})
                    if alone is None or alone.failures or alone.nbytes > QUICK.nbytes or (axis, value) in _WEAK:
                        continue
                    tried = {point[axis] for point in taken if axis in point}
                    assert value in tried or (axis in SIZES and max(tried) >= value), (offload.name, axis, value)
            step = offload.channel_step
            if "outputs" in start and step > 1:
                assert {point["outputs"] % step for point in taken} >= {0, 1, step - 1}, offload.name


def test_a_right_port_has_no_findings(tmp_path: Path) -> None:
    target = port(tmp_path)
    found = check(target, order("dense", simulators=("model", "iss")))
    assert found.findings == []
    assert [(one.simulator, one.failed) for one in found.tested] == [("model", 0), ("iss", 0)]
    assert found.tested[0].cases > 15


def lints(target: Target) -> str:
    """Sentences about declarations alone."""
    found = check(target, replace(order("dense"), limits=Limits(1, 1)))  # no case is as small: lint alone
    return "\n".join(finding.title for finding in found.findings if finding.outcome is None)


def test_declarations_are_linted(tmp_path: Path) -> None:
    right = port(tmp_path)
    engine = right.engines[0]
    dense = next(offload for offload in engine.offloads if offload.name == "dense")

    def with_dense(**changes: object) -> Target:
        """The target with another declaration of its dense layer, and that alone."""
        return replace(right, engines=(replace(engine, offloads=(replace(dense, **changes),)),))  # type: ignore[arg-type]

    assert lints(right) == ""
    never = Constraint("the moon must be full", lambda m: "new", lambda v: v == "full")
    assert "no layer reaches it" in lints(with_dense(constraints=(never,)))
    silent = Constraint(" ", lambda m: 0, lambda v: True)
    assert "limit 1 has no sentence" in lints(with_dense(constraints=(silent, *dense.constraints)))
    raising = Constraint("it must be", lambda m: m.nodes["nothing"], lambda v: True)
    assert "'it must be' raises KeyError" in lints(with_dense(constraints=(raising,)))
    assert "its cycles are 0" in lints(with_dense(cycles=lambda m: 0))
    assert "its cycles are -4" in lints(with_dense(cycles=lambda m: -4))
    assert "cycles fall from" in lints(with_dense(cycles=lambda m: 100_000 // m.result.elements))
    assert "nothing can reach it" in lints(replace(right, engines=(replace(engine, offloads=(dense, dense)),)))
    assert "ideal_macs_per_cycle is 0" in lints(replace(right, engines=(replace(engine, ideal_macs_per_cycle=0.0),)))
    spare = Memory("SPARE", 0x20000000, 4096)
    assert "nobody can fill the memory SPARE" in lints(replace(right, memories=(*right.memories, spare)))
    over = Memory("OVER", 0x10000100, 4096)
    assert "overlap" in lints(replace(right, memories=(*right.memories, over)))


def test_both_sides_of_every_limit_are_tried(tmp_path: Path) -> None:
    target = port(tmp_path)
    offload = target.engines[0].offloads[0]
    start = base(offload)
    assert start is not None
    cases = derive(target.engines[0], offload, start, Limits(300_000, 20_000))
    kernels = {(case.point["kernel_rows"], case.taken) for case in cases}
    assert {(7, True), (8, False)} <= kernels and (8, True) not in kernels, "the kernel must be at most 7x7"
    strides = {case.point["stride_rows"] for case in cases if not case.taken}
    assert 3 in strides or 2 in strides
    broken = {case.failure.split(";")[0] for case in cases if not case.taken}
    known = {limit.sentence for limit in offload.constraints}
    assert broken <= known and len(broken) >= 8, sorted(known - broken)
    assert all(not asked.failures for case in cases if case.taken if (asked := ask(offload, case.point)))


def test_it_may_stop_behind_the_first_offload_with_findings(tmp_path: Path) -> None:
    target = port(tmp_path, "np.int64) + bias", "np.int64)")
    every, first = (check(target, replace(order("dense", "convolution"), first=stop)) for stop in (False, True))
    assert (len(every.tested), len(first.tested)) == (2, 1)
    assert finding_text(first.findings[0]) == finding_text(replace(every.findings[0], also=()))


def test_reports_for_ci(tmp_path: Path) -> None:
    found = check(port(tmp_path, "np.int64) + bias", "np.int64)"), order("dense"))
    suite = ElementTree.fromstring(junit(found))
    assert suite.get("failures") == "1" and "bias" in suite.findall(".//failure")[0].get("message", "")
    assert "## Finding 1" in markdown(found) and "| small | dense | model |" in markdown(found)
    assert summary(found).startswith("small: 1 finding, ")
    assert summary(Checked("x")) == "x: no findings, 0 cases"


def test_mistakes_of_a_border_of_unsigned_bytes() -> None:
    """A zero point that is none of them stands in a register as a byte does: it wraps."""
    offload = next(one for one in load_target("macarray").engines[0].offloads if one.name == "convolution")
    point = {"type": TYPES.index(DType.UINT8), "output_zero": -9, "input_zero": 5}
    graph, layer = single(offload.pattern, None, point)
    sentences = {mutant.sentence for mutant in instead(graph, layer)}
    assert "the zero points of operand and result are in each other's place" in sentences


def test_padding_swapped_where_two_pixels_are_one() -> None:
    """Two rows above and a pair of columns on the left, in each other's place: one row, and four columns."""
    offload = next(one for one in load_target("macarray").engines[0].offloads if one.name == "convolution")
    point = {"rows": 6, "columns": 6, "channels": 3, "outputs": 3, "kernel_rows": 3, "kernel_columns": 3, "x": 1}
    graph, layer = single(offload.pattern, None, {**point, "top": 2, "left": 2, "bottom": 2, "right": 2, "weights": 1})
    pad = next(node for node in graph.nodes if node.operator.pads)
    image = np.pad(layer.inputs[pad.inputs[0]], ((0, 0), (1, 3), (4, 0), (0, 0)))
    moved = replace(pad.operator, before=(0, 0, 0, 0), after=(0, 0, 0, 0))
    nodes = tuple(replace(node, operator=moved) if node == pad else node for node in graph.nodes)
    types = {**graph.types, pad.inputs[0]: graph.types[pad.output]}
    actual = evaluate(replace(graph, nodes=nodes, types=types), {**layer.inputs, pad.inputs[0]: image[:, :, :10]})
    found = {mutant.sentence for mutant in instead(graph, layer) if mutant.gives(actual[layer.root])}
    assert found == {"padding swapped: rows and columns, where several pixels are taken as one"}
    graph, layer = single(offload.pattern, None, {**point, "top": 0, "left": 2, "stride_columns": 1})
    shapes = {mutant.result.shape for mutant in instead(graph, layer) if mutant.sentence.endswith("taken as one")}
    assert shapes == {layer.expected.shape}


def test_what_was_found_before_an_interrupt_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind some cases: they count, their findings stand, and the reports name what was not tried."""
    tried, real = [], run._directly

    def interrupted(*given: Any) -> Any:
        tried.append(given[1])
        if len(tried) == 9:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(run, "_directly", interrupted)
    found = check(port(tmp_path, "np.int64) + bias", "np.int64)"), order())
    first, *others = found.tested
    assert found.stopped and len(found.findings) == 1 and first.cases - first.skipped >= 8
    assert summary(found).startswith(f"small: stopped after {first.cases - first.skipped} cases: 1 finding")
    assert others and all(one.remark == run.STOPPED and not one.cases for one in others)
    assert run.STOPPED in junit(found) and run.STOPPED in markdown(found)


@pytest.mark.parametrize("at", ["derive", "shrink"])
def test_an_interrupt_between_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, at, interrupted)
    found = check(port(tmp_path, "np.int64) + bias", "np.int64)"), order())
    assert found.stopped and len(found.findings) == (at == "shrink")
