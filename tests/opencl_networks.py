"""What the tests of the OpenCL target share: a device to run on, and random regions side by side in one network."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from core_kernel_cases import Case, drawn
from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_graph
from dovetail.errors import BuildError, SimulationError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array
from dovetail.program.ir import LaunchStatement, Move
from dovetail.run import open_build, run_build
from dovetail.target import Target
from dovetail.targets.opencl import TARGET
from dovetail.targets.opencl.project import VARIABLE, environment

ValueT = TypeVar("ValueT")


SYSTEM = "libOpenCL.so.1"
"""The system's library, taken where that of the package does not know the processor."""


def library() -> str:
    """What a C program is linked with."""
    found = os.environ.get(VARIABLE) or environment().get(VARIABLE) or SYSTEM
    return found if "/" in found else f"-l:{found}"


def require_device() -> None:
    """Skips the test where there is no OpenCL device, with the reason."""
    reason = _no_device()
    if reason:
        pytest.skip(f"no OpenCL device to run on ({reason}); pip install 'dovetail[opencl]' brings PoCL")


@cache
def _no_device() -> str:
    """Why the smallest network does not run; empty if it does. Any other failure is one of the tests themselves."""
    graph, inputs = side_by_side(drawn("pooling", 1))
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_equals_graph(compile_graph(graph, TARGET, Options()), [inputs], Path(folder) / "build")
        except (SimulationError, BuildError) as error:
            expected = ("OpenCL library cannot be loaded", "there is no OpenCL device", "no C compiler")
            if any(text in error.what for text in expected):
                return error.what
            if "unknown target CPU" in (error.hint or ""):  # PoCL issue 1049: its LLVM is older than the processor
                if VARIABLE in os.environ:
                    return "the library's compiler does not know this processor"
                os.environ[VARIABLE] = SYSTEM
                return _no_device.__wrapped__()
            raise
    return ""


def run_equals_graph(
    compiled: Compiled, feeds: Sequence[Mapping[str, Array]], folder: Path, target: Target = TARGET
) -> None:
    """Every output byte equals the integer graph's."""
    write_project(compiled.project, folder)
    result = run_build(open_build(folder, target), None, feeds, folder.parent / "cache")
    for inputs, outputs in zip(feeds, result.outputs, strict=True):
        expected = evaluate(compiled.graph, inputs)
        for value in compiled.graph.outputs:
            np.testing.assert_array_equal(outputs[value], expected[value], err_msg=value)


def random_inputs(graph: Graph, count: int) -> list[dict[str, Array]]:
    """Sets of inputs over the whole range of their types."""
    generator = np.random.default_rng(1)
    kinds = {name: graph.types[name] for name in graph.inputs}
    return [
        {
            name: generator.integers(kind.dtype.low, kind.dtype.high, kind.shape, kind.dtype.numpy, endpoint=True)
            for name, kind in kinds.items()
        }
        for _ in range(count)
    ]


def moves(compiled: Compiled) -> list[Move]:
    """All that is brought to the device and back in one inference."""
    program = compiled.plan.program
    return [move for index in sorted(program.moves) for move in program.moves[index]]


def launches(compiled: Compiled) -> int:
    """Kernels started in one inference."""
    return sum(isinstance(statement, LaunchStatement) for statement in compiled.plan.program.statements)


def side_by_side(cases: Sequence[Case]) -> tuple[Graph, dict[str, Array]]:
    """One network that computes every case by itself, and the operands of all of them."""
    parts = [_renamed(case.graph, f"r{number}_") for number, case in enumerate(cases)]
    graph = Graph(
        "regions",
        tuple(value for part in parts for value in part.inputs),
        tuple(value for part in parts for value in part.outputs),
        tuple(node for part in parts for node in part.nodes),
        {value: kind for part in parts for value, kind in part.types.items()},
        {value: array for part in parts for value, array in part.constants.items()},
    )
    inputs = {f"r{number}_{value}": array for number, case in enumerate(cases) for value, array in case.inputs.items()}
    return graph, inputs


def _renamed(graph: Graph, prefix: str) -> Graph:
    def of(names: Sequence[str]) -> tuple[str, ...]:
        """The names with the prefix."""
        return tuple(prefix + name for name in names)

    def keyed(values: Mapping[str, ValueT]) -> dict[str, ValueT]:
        """A mapping with such names as keys."""
        return {prefix + name: value for name, value in values.items()}

    nodes = tuple(replace(n, inputs=of(n.inputs), output=prefix + n.output) for n in graph.nodes)
    types, constants = keyed(graph.types), keyed(graph.constants)
    return replace(
        graph, inputs=of(graph.inputs), outputs=of(graph.outputs), nodes=nodes, types=types, constants=constants
    )


def reads_all(case: Case) -> bool:
    """True when every input of a case is read."""
    return set(case.graph.inputs) <= {name for node in case.graph.nodes for name in node.inputs}
