"""ONNX's backend node tests through the emitted C on this computer.

Every test of an operator Dovetail reads is compiled as `dovetail compile --float` does it and compared with the
expected outputs at the test's own tolerance, or stands in `EXCLUDED` with the reason.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from dovetail.ir.onnx_runtime import runtime_session
from onnx_nodes import Prepared, collect, prepare, roomy, run_joined

GROUPS = 24
"""Projects the tests are shared out to."""

EXCLUDED: tuple[tuple[str, str, str], ...] = (
    # name pattern, part of the refusal, reason
    (
        "*",
        "has an element type that is not supported",
        "float8, float4, float64, uint64, strings: no core of Dovetail has such a type",
    ),
    (
        "*",
        "16-bit floats",
        "float16 and bfloat16 are computed as float32, other than expected (test_onnx_microsoft.py)",
    ),
    ("test_quantizelinear_[ef]*", "does not fit the scale", "as above: quantises to float8 or float4"),
    ("test_cast_*", "is not supported", "as above, or to and from integers narrower than a byte"),
    ("test_quantizelinear_*int[24]", "is not supported", "results of 2 bits"),
    ("test_quantizelinear_blocked*", "block_size", "quantising in blocks is not supported"),
    ("test_dequantizelinear_blocked", "must be constant", "what is quantised in blocks are constants: weights"),
    ("test_*", "which is not fixed", "tensors of no fixed size (the input `like`) or without elements"),
    ("test_rotary_embedding_*expanded", "do not make up", "as above: splits off a part without elements"),
    ("test_slice_start_out_of_bounds", "is empty", "as above"),
    ("test_shape*", "has no elements", "as above: of no axes"),
    (
        "test_[isl]*",
        "of the domain ai.onnx is not supported",
        "sequences and optional values, which loops and conditions carry there, are not tensors",
    ),
    ("test_*_expanded", "must be constant", "shapes, borders or indices are inputs there, or computed from inputs"),
    ("test_causal_conv_*expanded", "is empty", "splits off a part without elements"),
    ("test_scatter_elements_*", "the attribute reduction", "updates that are combined are not supported"),
    ("test_scan_sum", "opset 8", "it had batches then, and was another one year later"),
    ("test_[lr]*", "the number of turns", "it is an input there, or computed from inputs"),
    ("test_[il]*", "not a tensor", "sequences and optional values are not tensors"),
    ("test_*dropout*", "training_mode", "training is not supported"),
    ("test_dropout_*_mask*", "the result with the mask", "a result of training, which is not supported"),
    ("test_batchnorm_*_training_mode", "training_mode", "training is not supported"),
    ("test_maxpool_with_argmax_*", "with indices", "MaxPool's indices, for unpooling, are not computed"),
    ("test_not_*", "version 1 is not supported", "the test is of an operator set from before 2017"),
    (
        "test_*_expanded*",
        "of the domain ai.onnx is not supported",
        "written out with operators that are folded where they are constant, and here are not",
    ),
    ("test_cumsum_*", "must be constant", "the axis of a running sum is fixed, and these tests hand it in as an input"),
    ("test_convinteger_*", "zero point is computed, or", "a weight zero point per channel is not supported"),
    ("test_attention_*", "softcap", "scores limited by a tangent are not supported"),
    ("test_attention_*", "qk_matmul_output_mode", "the scores are no result of Attention in Dovetail"),
    ("test_attention_*", "gives the scores", "as above"),
    ("test_attention_*", "window_size", "windows of places beside the mask are not supported"),
    ("test_attention_*", "counts places", "places that are no padding are said by the mask"),
    ("test_scatternd_*", "reduction", "rows are replaced, not added to"),
    ("test_gathernd_*", "batch_dims", "indices of several batches are not supported"),
    ("test_convtranspose_3d", "only one or two image axes", "three-dimensional convolutions are not supported"),
)
"""Tests of operators Dovetail reads that it refuses, and why."""

DIFFERENT: dict[str, str] = {
    "test_resize_downsample_scales_linear_align_corners": "expects the unrounded length in align_corners' formula; "
    "the specification and ONNX Runtime take the result's",
    "test_resize_downsample_scales_cubic_align_corners": "as above",
}
"""Tests whose expected output Dovetail does not give, and why."""


@cache
def prepared() -> tuple[tuple[Prepared, ...], tuple[tuple[str, str], ...]]:
    """What compiles, and what is refused with its message."""
    target = roomy()
    good, refused = [], []
    for test in collect():
        found = prepare(test, target)
        if isinstance(found, str):
            refused.append((test.name, found))
        else:
            good.append(found)
    return tuple(good), tuple(refused)


@pytest.fixture(autouse=True)
def greedy_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search for the fewest bytes: tests side by side make it long, and have nothing to share."""

    def as_found(sizes: Mapping[str, int], _clashes: object, start: Mapping[str, int], *_: object) -> object:
        return dict(start), max(start[name] + sizes[name] for name in start)

    monkeypatch.setattr(import_module("dovetail.schedule.plan.allocate"), "improve", as_found)


@pytest.mark.parametrize("group", range(GROUPS))
def test_expected_outputs(group: int, tmp_path: Path) -> None:
    tests = [test for test in prepared()[0] if test.test.name not in DIFFERENT][group::GROUPS]
    wrong = []
    for test, outputs in zip(tests, run_joined(tests, tmp_path / "build"), strict=True):
        for found, expected in zip(outputs, test.test.outputs, strict=True):
            try:
                assert found.shape == np.shape(expected) and found.dtype == np.asarray(expected).dtype
                np.testing.assert_allclose(found, expected, rtol=test.test.rtol, atol=test.test.atol)
            except AssertionError as error:
                wrong.append(f"{test.test.name}: {error}")
    assert not wrong, "\n".join(wrong)


def test_every_refusal_has_a_written_reason() -> None:
    used = set()
    for name, message in prepared()[1]:
        matching = [n for n, (glob, part, _) in enumerate(EXCLUDED) if fnmatch.fnmatch(name, glob) and part in message]
        assert matching, f"{name} is refused without a reason: {message}"
        used.add(matching[0])
    idle = [entry for number, entry in enumerate(EXCLUDED) if number not in used]
    assert not idle, f"nothing is refused for {idle}"
    assert set(DIFFERENT) <= {test.test.name for test in prepared()[0]}


@pytest.mark.parametrize("name", DIFFERENT)
def test_where_the_expected_output_is_not_given_onnx_runtime_is_followed(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (test,) = (test for test in prepared()[0] if test.test.name == name)
    session = runtime_session(test.test.model)
    feeds = {entry.name: array for entry, array in zip(test.test.model.graph.input, test.test.inputs, strict=True)}
    ((found,),) = run_joined([test], tmp_path / "build")
    np.testing.assert_allclose(found, session.run(None, feeds)[0], rtol=1e-5)


def test_most_tests_are_run() -> None:
    good, refused = prepared()
    assert len(good) >= 600, f"{len(good)} compile, {len(refused)} do not"
