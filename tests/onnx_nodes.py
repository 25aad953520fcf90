"""ONNX's backend node tests as graphs of Dovetail, many of them joined into one network."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_graph
from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array
from dovetail.notes import Note
from dovetail.quantize import quantize
from dovetail.read.onnx import STANDARD, load_onnx
from dovetail.read.onnx.values import FOLDABLE
from dovetail.schedule.partition import partition
from dovetail.target.description import Target
from dovetail.targets import load_target

FROZEN: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4),
    "Clip": (1, 2),
    "Conv": (1, 2),
    "ConvInteger": (1, 2, 3),
    "ConvTranspose": (1, 2),
    "DequantizeLinear": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "GRU": (4,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "LSTM": (4,),
    "MatMulInteger": (1, 2, 3),
    "Pad": (1, 2, 3),
    "QLinearConv": (1, 2, 3, 4, 5, 6, 7, 8),
    "QLinearMatMul": (1, 2, 3, 4, 5, 6, 7),
    "QuantizeLinear": (1, 2),
    "RNN": (4,),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "ScatterND": (1,),
    "ScatterElements": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}
"""Operands that Dovetail needs at compile time; a test gives them as inputs, here they become constants."""


@dataclass(frozen=True)
class NodeTest:
    """One backend test."""

    name: str
    operator: str
    model: Any
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    rtol: float
    atol: float


@dataclass(frozen=True)
class Prepared:
    """A test Dovetail compiles."""

    test: NodeTest
    graph: Graph
    feeds: Mapping[str, Array]


def tested(name: str, model: Any) -> str:
    """The operator a test is of, where Dovetail reads it; for one written out in other operators (`_expanded`) those
    must all be read, or be of constants alone. Empty otherwise."""
    kinds = [node.op_type for node in model.graph.node]
    if any(node.domain for node in model.graph.node):
        return ""
    if len(kinds) == 1:
        return kinds[0] if kinds[0] in STANDARD and "_expanded" not in name else ""
    read = all(kind in STANDARD or kind in FOLDABLE or kind == "Constant" for kind in kinds)
    return "expanded" if read and "_expanded" in name else ""


def collect() -> list[NodeTest]:
    """Every backend test of an operator Dovetail reads, by name."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    found = []
    for case in cases:
        operator = tested(case.name, case.model)
        if operator:
            inputs, outputs = case.data_sets[0]
            results = tuple(map(_held, outputs))
            test = NodeTest(case.name, operator, case.model, tuple(inputs), results, case.rtol, case.atol)
            found.append(test)
    return sorted(found, key=lambda test: test.name)


def _held(value: Any) -> Any:
    """A test's operand or result; integers narrower than a byte come as tensors and are held one to a byte."""
    kinds = onnx.TensorProto
    if not isinstance(value, kinds):
        return value
    narrow = {kinds.INT4: np.int8, kinds.INT2: np.int8, kinds.UINT4: np.uint8, kinds.UINT2: np.uint8}
    if value.data_type not in narrow:
        return value
    return onnx.numpy_helper.to_array(value).astype(narrow[value.data_type])


def _frozen(test: NodeTest) -> tuple[Any, dict[str, Array]]:
    """The model with operands needed at compile time as constants, and what is fed to it."""
    model = onnx.ModelProto()
    model.CopyFrom(test.model)
    fed = {entry.name: array for entry, array in zip(model.graph.input, test.inputs, strict=True)}
    frozen = {
        node.input[place]
        for node in model.graph.node
        for place in FROZEN.get(node.op_type, ())
        if place < len(node.input)
    }
    kept = []
    for entry in model.graph.input:
        if entry.name in frozen:
            model.graph.initializer.append(_tensor(entry.name, fed.pop(entry.name)))
        else:
            kept.append(entry)
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model, fed


def _tensor(name: str, value: Any) -> Any:
    """A test's operand as an initialiser; types numpy lacks come as tensors already."""
    if isinstance(value, onnx.TensorProto):
        tensor = onnx.TensorProto()
        tensor.CopyFrom(value)
        tensor.name = name
        return tensor
    return onnx.numpy_helper.from_array(np.asarray(value), name)


def prepare(test: NodeTest, target: Target) -> Prepared | str:
    """The test's graph as `dovetail compile --float` makes it, or why it cannot."""
    try:
        model, feeds = _frozen(test)
        told = list[Note]()
        graph = load_onnx(test.name, model.SerializeToString(), test.name, Path(), None, told.append)
        if told:
            return told[0].text
        graph = quantize(simplify(graph), allow_float=True)
        if any(name not in graph.producers() for name in graph.outputs):
            return "the result is no computed value"
        partition(graph, target)
    except DovetailError as error:
        return str(error.what)
    held = {name: graph.types[name] for name in graph.inputs}
    return Prepared(test, graph, {name: np.asarray(_held(feeds[name])).astype(held[name].dtype.numpy) for name in held})


def roomy() -> Target:
    """The plain core with enough memory for what three-dimensional pools are tested with."""
    target = load_target("riscv")
    return replace(target, memories=tuple(replace(memory, size=memory.size << 5) for memory in target.memories))


def joined(tests: Sequence[Prepared]) -> Graph:
    """The tests' graphs beside each other in one network, every name with its test's number before it."""
    parts = [_renamed(test.graph, f"t{number}_") for number, test in enumerate(tests)]
    return Graph(
        "nodes",
        tuple(name for part in parts for name in part.inputs),
        tuple(name for part in parts for name in part.outputs),
        tuple(node for part in parts for node in part.nodes),
        {name: kind for part in parts for name, kind in part.types.items()},
        {name: array for part in parts for name, array in part.constants.items()},
    )


def _renamed(graph: Graph, prefix: str) -> Graph:
    def names(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + value for value in values)

    return replace(
        graph,
        inputs=names(graph.inputs),
        outputs=names(graph.outputs),
        nodes=tuple(Node(n.operator, names(n.inputs), prefix + n.output, n.origin) for n in graph.nodes),
        types={prefix + name: kind for name, kind in graph.types.items()},
        constants={prefix + name: array for name, array in graph.constants.items()},
    )


def run_joined(tests: Sequence[Prepared], folder: Path) -> list[tuple[Array, ...]]:
    """Compile the tests as one network, run its C on this computer, and give each test's outputs."""
    from dovetail.run import open_build, run_build

    target = roomy()
    compiled = compile_graph(joined(tests), target, Options(allow_float=True), interpret=False)
    write_project(compiled.project, folder)
    feeds = {f"t{number}_{name}": array for number, test in enumerate(tests) for name, array in test.feeds.items()}
    result = run_build(open_build(folder, target), "host", [feeds], folder / "cache").outputs[0]
    return [tuple(result[f"t{number}_{name}"] for name in test.graph.outputs) for number, test in enumerate(tests)]
