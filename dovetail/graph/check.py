"""Translation validation: does a stage mean what ONNX Runtime makes of it, and what the stage before it meant?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from dovetail.errors import DovetailError, MissingExtraError
from dovetail.graph.graph import Graph, evaluate
from dovetail.graph.onnx_file import to_model
from dovetail.graph.types import Array, DType

FLOAT_TOLERANCE = 1e-4
"""Difference allowed between float values, relative to the larger of 1 and the value's largest element."""


def run_onnx(graph: Graph, inputs: Mapping[str, Array], keep: Iterable[str] = ()) -> dict[str, Array]:
    """Run the graph's ONNX form in ONNX Runtime, unoptimised; returns the outputs and the kept values.

    Raises:
        MissingExtraError: onnxruntime is not installed.
    """
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "check", "running a graph as ONNX") from error
    computed = {node.output for node in graph.nodes}
    names = tuple(dict.fromkeys((*graph.outputs, *(name for name in keep if name in computed))))
    model = to_model(replace(graph, outputs=names))
    options = onnxruntime.SessionOptions()
    # Optimised 8-bit kernels saturate on CPUs without VNNI; both settings keep them exact.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(list(names), {name: inputs[name] for name in graph.inputs})
    return dict(zip(names, results, strict=True))


def check_graph(graph: Graph, inputs: Mapping[str, Array], keep: Iterable[str] = ()) -> int:
    """Compare the graph in numpy with its ONNX form in ONNX Runtime.

    Args:
        graph: any stage.
        inputs: an array per graph input.
        keep: values to compare beside the outputs; names that no node computes are passed over.

    Returns:
        How many values were compared: integers exactly, floats within `FLOAT_TOLERANCE`.

    Raises:
        DovetailError: a value differs; the first in the graph's order is named, with the largest difference.
        MissingExtraError: onnxruntime is not installed.
    """
    found = run_onnx(graph, inputs, keep)
    expected = evaluate(graph, inputs, [name for name in found if name not in graph.outputs])
    for node in graph.nodes:
        if node.output in found:
            _compare(node.output, expected[node.output], found[node.output], 0, "numpy and ONNX Runtime")
    return len(found)


def check_stages(before: Graph, after: Graph, inputs: Mapping[str, Array], lsb: int = 1) -> int:
    """Compare two stages of one network on every value that both compute under one name and type.

    Each such value of `after` is computed from the values of `before` above it, so that a difference is that of
    the nodes between, not one grown from layer to layer.

    Args:
        before: the earlier stage, for instance the QDQ graph.
        after: the later stage, for instance the integer graph.
        inputs: an array per input of both.
        lsb: largest difference allowed between integers; between floats it is `FLOAT_TOLERANCE`.

    Returns:
        How many values were compared.

    Raises:
        DovetailError: a value differs by more; it is named, with the difference and the bound.
    """
    computed = {node.output for node in before.nodes}
    shared = [
        node.output
        for node in after.nodes
        if node.output in computed and before.types[node.output] == after.types[node.output]
    ]
    expected = evaluate(before, inputs, shared)
    values: dict[str, Array] = {**after.constants, **{name: inputs[name] for name in after.inputs}}
    for node in after.nodes:
        result = node.operator.evaluate([values[name] for name in node.inputs])
        if node.output in expected and node.output in shared:
            _compare(node.output, expected[node.output], result, lsb, f"{before.name} before and after the stage")
            result = expected[node.output]
        values[node.output] = result
    return len(shared)


def _compare(name: str, expected: Array, found: Array, lsb: int, between: str) -> None:
    """Raise DovetailError unless two arrays agree."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        what = f"is {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}"
        raise DovetailError(f"the value {what} ({between})", where=name,
                            hint="report this: the two stages must compute the same; --save-stages keeps both for "
                                 "comparison")
    if not expected.size:
        return
    allowed: float = lsb
    if DType.of(expected.dtype) is DType.FLOAT32:
        allowed = FLOAT_TOLERANCE * max(1.0, float(np.abs(expected).max()))
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    largest = float(difference.max())
    if largest <= allowed:
        return
    place = [int(index) for index in np.unravel_index(int(difference.argmax()), difference.shape)]
    many = f"{int((difference > allowed).sum())} of {difference.size} elements differ"
    raise DovetailError(f"{many}, by up to {largest:g} at {place}; allowed is {allowed:g} ({between})", where=name,
                        hint="report this: the two stages must compute the same; --save-stages keeps both for "
                             "comparison")
