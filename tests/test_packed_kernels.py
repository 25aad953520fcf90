"""Core kernels whose operands and results have several elements in a byte, against the operators' own meaning."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Case, Maker, drawn, random_array
from dovetail.errors import DovetailError
from dovetail.ir.graph import GraphBuilder, Node, evaluate
from dovetail.ir.layout import (
    FIELDS,
    Layout,
    blocked,
    from_bytes,
    from_notation,
    from_physical,
    packed,
    to_bytes,
    to_physical,
)
from dovetail.ir.operators.arithmetic import Add, Clip, Offset
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Pad, Relayout, Slice
from dovetail.ir.types import DType, TensorType
from dovetail.kernels import CoreTraits, core_traits, generate, supports, takes_packed
from dovetail.targets import load_target
from test_core_kernels import build, library_text, needs_compiler, run

NARROW = (DType.INT4, DType.UINT4, DType.INT2, DType.UINT2)
BYTES = (DType.INT8, DType.UINT8)


def manner(kind: TensorType, down: bool) -> Layout:
    """Neighbours along the last axis in a byte, the first in the lowest or in the highest bits."""
    layout = packed(None, len(kind.shape), kind.dtype.bits)
    return replace(layout, backwards=layout.dims[-1:]) if down else layout


def narrowed(case: Case, seed: int) -> tuple[Case, dict[str, Layout]] | None:
    """A case with operands and, if it is of integers, a result of few bits, some of them packed; None where none is."""
    chosen, graph = random.Random(seed), case.graph
    types = dict(graph.types)
    for name in graph.inputs:
        if types[name].dtype in BYTES:
            types[name] = TensorType(types[name].shape, chosen.choice(NARROW))
    try:
        for node in graph.nodes:
            if isinstance(node.operator, Pad) and not types[node.inputs[0]].dtype.low <= node.operator.value <= 3:
                return None
            types[node.output] = node.operator.infer([types[name] for name in node.inputs])
    except ValueError:
        return None
    nodes, output = list(graph.nodes), graph.outputs[0]
    if types[output].dtype.is_integer and types[output].dtype.bits < 64 and types[output].dtype not in NARROW:
        dtype = chosen.choice(NARROW)
        nodes.append(Node(Clip(dtype.low, dtype.high, dtype), (output,), "limited"))
        types["limited"] = TensorType(types[output].shape, dtype)
        output = "limited"
    graph = replace(graph, nodes=tuple(nodes), types=types, outputs=(output,))
    if supports(graph) is not None:
        return None
    layouts = {}
    for name in (*graph.inputs, output):
        kind = types[name]
        fits = kind.dtype.bits < 8 and kind.shape and kind.shape[-1] % FIELDS[kind.dtype.bits] == 0
        if fits and takes_packed(graph, [name]) is None and chosen.random() < 0.8:
            layouts[name] = manner(kind, chosen.random() < 0.3)
    if not layouts or takes_packed(graph, list(layouts)) is not None:
        return None
    inputs = {name: random_array(seed + place, types[name], 1 << 22) for place, name in enumerate(graph.inputs)}
    return Case(graph, inputs), layouts


def as_bytes(case: Case, layouts: Mapping[str, Layout]) -> Case:
    """The case as the kernel is given it: packed operands, and a result, of bytes."""
    inputs = {name: to_bytes(array, layouts[name]) if name in layouts else array for name, array in case.inputs.items()}
    types, output = dict(case.graph.types), case.graph.outputs[0]
    if output in layouts:
        types[output] = TensorType((types[output].elements // layouts[output].fields,), DType.UINT8)
    return Case(replace(case.graph, types=types), inputs)


@needs_compiler
@pytest.mark.parametrize("name", ["conv2d", "depthwise", "fully_connected", "pooling", "pointwise", "movement"])
def test_packed_kernels_equal_the_graph(name: str, tmp_path: Path) -> None:
    found = [pair for seed, case in enumerate(drawn(name, 150)) if (pair := narrowed(case, seed)) is not None][:40]
    assert len(found) >= 8, "some cases of every family share bytes"
    kernels = [
        generate(case.graph, f"kernel_{number}", layouts=layouts) for number, (case, layouts) in enumerate(found)
    ]
    sanitised = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
    path = build(tmp_path, library_text(kernels), "-O0", "-shared", "-fPIC", *sanitised)
    library = ctypes.CDLL(str(path))
    for (case, layouts), kernel in zip(found, kernels, strict=True):
        got = run(getattr(library, f"run_{kernel.name}"), kernel, as_bytes(case, layouts))
        output = case.graph.outputs[0]
        wanted = evaluate(case.graph, case.inputs)[output]
        if output in layouts:
            got = from_bytes(got, layouts[output], case.graph.types[output])
        assert np.array_equal(got, wanted), f"{layouts}\n{kernel.source}\n{got}\n{wanted}"


RELAYOUTS = (
    ("", "N H W C/2 [2c]"),
    ("N H W C/2 [2c]", ""),
    ("N H W C/2 [-2c]", "N H W C/2 [2c]"),
    ("N H W/2 C [2w]", "N H W C/2 [2c]"),
    ("N C/16 H W 16c", "N C/32 H W 16c/2 [2c]"),
    ("N C/32 H W 16c/2 [2c]", ""),
    ("N C/4 H/2 W 4c [2h]", "N H W/2 C [-2w]"),
)


@needs_compiler
@pytest.mark.parametrize("dtype", [DType.INT4, DType.UINT4])
def test_relayouts(dtype: DType, tmp_path: Path) -> None:
    """Bytes put together and taken apart, also where the last of an axis is not full."""
    made, kernels = [], []
    for number, (source, result) in enumerate(RELAYOUTS):
        for channels in (8, 5):
            builder = GraphBuilder("region")
            x = builder.input("x", TensorType((1, 3, 5, channels), dtype))
            graph = builder.finish([builder.add(Relayout(), [x], "y")])
            texts = {"x": source, "y": result}
            layouts = {name: from_notation(text) for name, text in texts.items() if text}
            made.append((graph, layouts))
            kernels.append(generate(graph, f"kernel_{number}_{channels}", layouts=layouts))
    library = ctypes.CDLL(str(build(tmp_path, library_text(kernels), "-O1", "-shared", "-fPIC")))
    for (graph, layouts), kernel in zip(made, kernels, strict=True):
        array = random_array(1, graph.types["x"])
        held = to_bytes(array, layouts.get("x"))
        size = to_bytes(array, layouts.get("y")).size
        given = replace(graph, types={**graph.types, "y": TensorType((size,), DType.UINT8)})
        got = run(getattr(library, f"run_{kernel.name}"), kernel, Case(given, {"x": held}))
        assert np.array_equal(from_bytes(got, layouts.get("y"), graph.types["y"]), array), f"{layouts}\n{kernel.source}"


WHOLE = ("", "N C/8 H W 8c", "N C/16 H W 16c", "N H C/4 W 4c", "N C H W", "W H N C")


@needs_compiler
@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT32])
def test_relayouts_in_runs(dtype: DType, tmp_path: Path) -> None:
    """Elements that lie side by side before and after are moved together, in words where the core wants these."""
    made, kernels = [], []
    for number, (source, result) in enumerate(product(WHOLE, WHOLE)):
        for channels in (32, 24, 10):
            builder = GraphBuilder("region")
            x = builder.input("x", TensorType((2, 3, 5, channels), dtype))
            graph = builder.finish([builder.add(Relayout(), [x], "y")])
            layouts = {name: from_notation(text) for name, text in (("x", source), ("y", result)) if text}
            made.append((graph, layouts))
            core = replace(CoreTraits(), aligned=number % 2)
            kernels.append(generate(graph, f"kernel_{number}_{channels}", core, layouts=layouts))
    assert sum("memcpy" in kernel.source for kernel in kernels) >= 20
    library = ctypes.CDLL(str(build(tmp_path, library_text(kernels), "-O1", "-shared", "-fPIC")))
    for (graph, layouts), kernel in zip(made, kernels, strict=True):
        array = random_array(1, graph.types["x"])
        held, meant = (to_physical(array, layouts[name]) if name in layouts else array for name in ("x", "y"))
        given = replace(graph, types={name: TensorType(one.shape, dtype) for name, one in (("x", held), ("y", meant))})
        got = run(getattr(library, f"run_{kernel.name}"), kernel, Case(given, {"x": held})).reshape(meant.shape)
        whole = from_physical(got, layouts["y"], graph.types["y"].shape) if "y" in layouts else got
        assert np.array_equal(whole, array), f"{layouts}\n{kernel.source}"


def test_what_takes_no_shared_bytes_says_so() -> None:
    builder = GraphBuilder("region")
    x = builder.input("x", TensorType((1, 4, 4, 8), DType.UINT4))
    graph = builder.finish([builder.add(Slice((0,) * 4, (1, 2, 4, 8), (1,) * 4), [x], "y")])
    assert takes_packed(graph, ["x"]) == "Slice takes no elements that share bytes."
    with pytest.raises(DovetailError, match="share bytes"):
        generate(graph, "kernel", layouts={"x": packed(None, 4, 4)})
    assert blocked((0, 3, 1, 2), 3, 16).fields == 1


@needs_compiler
def test_sums_of_any_two_widths_byte_by_byte(tmp_path: Path) -> None:
    """Whole bytes are computed at a time, whatever the widths and the order of elements; odd counts one by one."""
    made, kernels = [], []
    for number, (a, b, result) in enumerate(product((*NARROW, DType.INT8), NARROW, (*NARROW, DType.UINT8))):
        shape = (1, 3, 8) if number % 5 else (1, 3, 4)
        builder = GraphBuilder("region")
        x, y = builder.input("x", TensorType(shape, a)), builder.input("y", TensorType(shape, b))
        terms = [builder.add(Offset(offset, DType.INT32), [name]) for name, offset in ((x, 1), (y, -2))]
        total = builder.add(Add(), terms)
        graph = builder.finish([builder.add(Clip(result.low, result.high, result), [total], "z")])
        kinds = {name: graph.types[name] for name in ("x", "y", "z") if graph.types[name].dtype.bits < 8}
        layouts = {name: manner(kind, (number >> place) % 2 == 1) for place, (name, kind) in enumerate(kinds.items())}
        inputs = {name: random_array(number, graph.types[name]) for name in ("x", "y")}
        made.append((Case(graph, inputs), layouts))
        kernels.append(generate(graph, f"kernel_{number}", layouts=layouts))
    assert sum("byte_0 |=" in kernel.source for kernel in kernels) > 70
    library = ctypes.CDLL(str(build(tmp_path, library_text(kernels), "-O1", "-shared", "-fPIC")))
    for (case, layouts), kernel in zip(made, kernels, strict=True):
        got = run(getattr(library, f"run_{kernel.name}"), kernel, as_bytes(case, layouts))
        if "z" in layouts:
            got = from_bytes(got, layouts["z"], case.graph.types["z"])
        assert np.array_equal(got, evaluate(case.graph, case.inputs)["z"]), kernel.source


def test_instructions_of_a_core_leave_shared_bytes_to_the_plain_kernel() -> None:
    """They give every element a byte of its own, and a result of 4 bits has room for two in each."""
    maker = Maker("shared result")
    weights = maker.constant((8, 1, 1, 8), DType.INT8)
    sums = maker.add(Conv2d((1, 1), (1, 1), 0, 0), maker.input((1, 6, 6, 8), DType.INT8), weights)
    graph = maker.case(maker.add(Clip(-8, 7, DType.INT4), maker.requantize(sums))).graph
    core, layouts = core_traits(load_target("cortex_m4").core), {graph.outputs[0]: packed(None, 4, 4)}
    assert generate(graph, "kernel", core).instructions
    kernel = generate(graph, "kernel", core, layouts=layouts)
    assert kernel.instructions == () and "put_4(" in kernel.source and "share bytes" in kernel.notes[0]
    assert kernel.source == generate(graph, "kernel", replace(core, instructions=()), layouts=layouts).source
