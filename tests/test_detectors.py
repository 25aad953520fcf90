"""Detectors with what they end with: boxes, classes and scores are those of the models' own runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.compile import Options
from dovetail.errors import ModelError
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.types import Array
from dovetail.targets import load_target
from oracles import run_litert_often, run_micro_often
from tflite_writer import ModelWriter
from user_operators import compiled_from, run_everywhere

RISCV = load_target("riscv")
NAMES = ("boxes", "classes", "scores", "count")
SCALES = {"y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0}


def asked(most: int, classes: int, **more: Any) -> dict[str, Any]:
    """Custom options of a post-processing."""
    limits = {"nms_score_threshold": 0.3, "nms_iou_threshold": 0.5, "max_classes_per_detection": 1}
    return {"max_detections": most, "num_classes": classes, **limits, **SCALES, **more}


def run_onnx_runtime(file: bytes, feeds: Sequence[Sequence[Array]], names: Sequence[str]) -> list[list[Array]]:
    """What ONNX Runtime computes from each set of inputs, without saturating 16-bit sums."""
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle")
    session = runtime_session(file)
    return [list(session.run(None, dict(zip(names, feed, strict=True)))) for feed in feeds]


def anchors(rng: np.random.Generator, count: int) -> Array:
    """Random centres and sizes."""
    return np.concatenate([rng.uniform(0, 1, (count, 2)), rng.uniform(0.1, 0.6, (count, 2))], 1).astype(np.float32)


def ends(writer: ModelWriter, most: int) -> list[int]:
    """The four results."""
    return [writer.tensor(name, shape, "FLOAT32") for name, shape in zip(NAMES, shapes(most), strict=True)]


def shapes(most: int) -> tuple[tuple[int, ...], ...]:
    return (1, most, 4), (1, most), (1, most), (1,)


def same_detections(found: Mapping[str, Array], expected: Sequence[Array]) -> int:
    """Compares what was found with a runtime's, bit for bit; what is behind the last box means nothing there. How many
    there are."""
    count = int(expected[3][0])
    assert found["count"] == expected[3]
    for name, other in zip(NAMES, expected, strict=True):
        own = found[name]
        np.testing.assert_array_equal(
            own[:, :count] if own.ndim > 1 else own, other[:, :count] if own.ndim > 1 else other
        )
        assert own.ndim == 1 or not own[:, count:].any()
    return count


@pytest.mark.parametrize("seed", range(8))
def test_boxes_scores_and_ties_are_those_of_litert_and_micro(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    boxes, classes, background = int(rng.integers(5, 60)), int(rng.integers(1, 6)), int(rng.integers(0, 2))
    most, more = int(rng.integers(1, 12)), {"use_regular_nms": seed % 2 == 0}
    more |= {"detections_per_class": int(rng.choice([1, 3]))} if seed % 4 > 1 else {}
    more |= {
        "nms_score_threshold": float(rng.choice([0.0, 0.3, 0.5])),
        "nms_iou_threshold": float(rng.choice([0.3, 0.9])),
    }
    writer = ModelWriter()
    given = [writer.tensor("encoded", (1, boxes, 4), "FLOAT32")]
    given.append(writer.tensor("predictions", (1, boxes, classes + background), "FLOAT32"))
    held, results = writer.tensor("anchors", (boxes, 4), "FLOAT32", anchors(rng, boxes)), ends(writer, most)
    writer.custom("TFLite_Detection_PostProcess", [*given, held], results, asked(most, classes, **more))
    writer.ends(given, results)
    data, feeds = writer.finish(), []
    for number in range(8):
        scores = rng.uniform(0, 1, (1, boxes, classes + background))
        scores = np.round(scores * 8) / 8 if number % 2 else scores  # ties
        feeds.append([rng.normal(0, 2, (1, boxes, 4)).astype(np.float32), scores.astype(np.float32)])
    named = [dict(zip(("encoded", "predictions"), feed, strict=True)) for feed in feeds]
    found = run_everywhere(compiled_from(data, tmp_path, "end.tflite", RISCV), RISCV, named)
    for expected in (run_litert_often(data, feeds, reference=True), run_micro_often(data, feeds)):
        counts = [same_detections(*pair) for pair in zip(found, expected, strict=True)]
    assert max(counts) > 0


def quantised_ends(kind: str) -> tuple[bytes, int]:
    """A post-processing of quantised operands."""
    rng, boxes, low = np.random.default_rng(3), 30, 0 if kind == "UINT8" else -128
    writer = ModelWriter()
    given = [writer.tensor("encoded", (1, boxes, 4), kind, quantised=(0.05, low + 120))]
    given.append(writer.tensor("predictions", (1, boxes, 4), kind, quantised=(1 / 256, low)))
    stored = rng.integers(low + 30, low + 200, (boxes, 4)).astype(np.uint8 if kind == "UINT8" else np.int8)
    held, results = writer.tensor("anchors", (boxes, 4), kind, stored, (0.004, low)), ends(writer, 6)
    writer.custom("TFLite_Detection_PostProcess", [*given, held], results, asked(6, 3, _output_quantized=True))
    writer.ends(given, results)
    return writer.finish(), boxes


def test_quantised_operands_are_the_floats_they_stand_for(tmp_path: Path) -> None:
    data, boxes = quantised_ends("UINT8")
    rng = np.random.default_rng(4)
    feeds = [[rng.integers(0, 256, (1, boxes, 4)).astype(np.uint8) for _ in range(2)] for _ in range(8)]
    named = [dict(zip(("encoded", "predictions"), feed, strict=True)) for feed in feeds]
    found = run_everywhere(compiled_from(data, tmp_path, "end.tflite", RISCV), RISCV, named)
    for one, other in zip(found, run_litert_often(data, feeds, reference=True), strict=True):
        assert same_detections(one, other)


def convolution(
    writer: ModelWriter, x: tuple[int, int, int, float], outputs: int, kernel: int, stride: int, relu: bool, seed: int
) -> tuple[int, int, int, float]:
    """An int8 convolution of a square image (tensor, size, channels, scale), and its result as such."""
    rng = np.random.default_rng(seed)
    tensor, size, channels, scale = x
    weights = rng.integers(-127, 128, (outputs, kernel, kernel, channels)).astype(np.int8)
    bias = rng.integers(-2000, 2001, outputs).astype(np.int32)
    spread = 74 * 0.01 * scale * 70 * np.sqrt(kernel * kernel * channels)
    made = float(np.float32(3 * spread / 127))
    after = size // stride
    w = writer.tensor(f"w{seed}", weights.shape, "INT8", weights, (0.01, 0))
    b = writer.tensor(f"b{seed}", bias.shape, "INT32", bias, (0.01 * scale, 0))
    y = writer.tensor(f"y{seed}", (1, after, after, outputs), "INT8", quantised=(made, -128 if relu else 0))
    options = {"padding": 0, "strideW": stride, "strideH": stride, "dilationWFactor": 1, "dilationHFactor": 1}
    writer.operator("CONV_2D", [tensor, w, b], [y], "Conv2DOptions", **options, fusedActivationFunction=int(relu))
    return y, after, outputs, made


def ssd(regular: bool, classes: int = 3, most: int = 10, size: int = 24) -> bytes:
    """An int8 detector in the manner of SSD: two convolutions, heads at two sizes, joined, post-processed."""
    writer = ModelWriter()
    x = writer.tensor("image", (1, size, size, 3), "INT8", quantised=(1 / 128, 0))
    first = convolution(writer, (x, size, 3, 1 / 128), 8, 3, 2, True, 1)
    maps = [first, convolution(writer, first, 12, 3, 2, True, 2)]
    parts: dict[str, list[int]] = {"encoded": [], "predictions": []}
    count = sum(one[1] ** 2 for one in maps)
    for number, one in enumerate(maps):
        for name, width in (("encoded", 4), ("predictions", classes + 1)):
            head = convolution(writer, one, width, 1, 1, False, 10 * number + width)
            shape, own = (1, one[1] ** 2, width), (head[3], 0)
            flat = writer.tensor(f"{name}{number}_flat", shape, "INT8", quantised=own)
            sizes = writer.tensor(f"{name}{number}_shape", (3,), "INT32", np.array(shape, np.int32))
            writer.operator("RESHAPE", [head[0], sizes], [flat], "ReshapeOptions", newShape=list(shape))
            real = writer.tensor(f"{name}{number}", shape, "INT8", quantised=(0.06, 3))
            writer.operator("QUANTIZE", [flat], [real], "QuantizeOptions")
            parts[name].append(real)
    ready = []
    for name, tensors in parts.items():
        width = 4 if name == "encoded" else classes + 1
        joined = writer.tensor(f"{name}_all", (1, count, width), "INT8", quantised=(0.06, 3))
        writer.operator("CONCATENATION", tensors, [joined], "ConcatenationOptions", axis=1)
        if name == "predictions":
            active = writer.tensor("active", (1, count, width), "INT8", quantised=(1 / 256, -128))
            writer.operator("LOGISTIC", [joined], [active])
            joined = active
        ready.append(writer.tensor(f"{name}_real", (1, count, width), "FLOAT32"))
        writer.operator("DEQUANTIZE", [joined], [ready[-1]], "DequantizeOptions")
    own, results = anchors(np.random.default_rng(5), count), ends(writer, most)
    held = writer.tensor("anchors", own.shape, "FLOAT32", own)
    options = asked(most, classes, use_regular_nms=regular)
    writer.custom("TFLite_Detection_PostProcess", [*ready, held], results, options)
    writer.ends([x], results)
    return writer.finish()


def images(count: int, *shape: int) -> list[Array]:
    return [np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8) for seed in range(count)]


@pytest.mark.parametrize("regular", [False, True])
@pytest.mark.parametrize("target", ["riscv", "ne16", "cortex_m4"])
def test_a_detector_finds_the_boxes_its_runtime_finds(tmp_path: Path, regular: bool, target: str) -> None:
    data, known = ssd(regular), load_target(target)
    feeds = [[image] for image in images(8, 1, 24, 24, 3)]
    policy = "exact" if target == "ne16" else None
    compiled = compiled_from(data, tmp_path, "ssd.tflite", known, Options(policy=policy))
    found = run_everywhere(compiled, known, [{"image": feed[0]} for feed in feeds], ("iss",))
    expected = run_micro_often(data, feeds)
    assert sum(same_detections(*pair) for pair in zip(found, expected, strict=True)) >= 16


def test_every_stage_of_a_detector_means_the_same_in_onnx_runtime(tmp_path: Path) -> None:
    options = Options(check=True, save_stages=tmp_path / "stages")
    compiled_from(ssd(True), tmp_path, "ssd.tflite", RISCV, options)
    assert {"0_model.onnx", "1_integer.onnx"} <= {file.name for file in (tmp_path / "stages").iterdir()}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_classes_per_detection": 2}, "max_classes_per_detection is 2"),
        ({"num_classes": 7}, "are not those of 7 classes"),
        ({"nms_iou_threshold": 0.0}, "nms_iou_threshold is 0.0"),
        ({"x_scale": 0.0}, "a scale is 0"),
        ({"max_detections": "ten"}, "max_detections is 'ten'"),
    ],
)
def test_odd_options_are_refused(tmp_path: Path, more: Mapping[str, Any], said: str) -> None:
    writer = ModelWriter()
    given = [writer.tensor("encoded", (1, 9, 4), "FLOAT32"), writer.tensor("predictions", (1, 9, 3), "FLOAT32")]
    held, results = writer.tensor("anchors", (9, 4), "FLOAT32", np.ones((9, 4), np.float32)), ends(writer, 5)
    writer.custom("TFLite_Detection_PostProcess", [*given, held], results, {**asked(5, 3), **more})
    writer.ends(given, results)
    with pytest.raises(ModelError, match=said):
        compiled_from(writer.finish(), tmp_path, "end.tflite", RISCV)


def suppression(
    boxes: tuple[int, ...], scores: tuple[int, ...], limits: Sequence[Array | None], **attributes: int
) -> bytes:
    """An ONNX model of one NonMaxSuppression."""
    names = ["" if limit is None else f"limit{at}" for at, limit in enumerate(limits)]
    held = [
        numpy_helper.from_array(limit, name) for limit, name in zip(limits, names, strict=True) if limit is not None
    ]
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", *names], ["chosen"], **attributes)
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("boxes", boxes), ("scores", scores))]
    graph = helper.make_graph(
        [node], "nms", given, [helper.make_tensor_value_info("chosen", TensorProto.INT64, ["n", 3])], held
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def same_rows(found: Array, expected: Array) -> int:
    """Compares selected rows; those behind them are -1. How many there are."""
    np.testing.assert_array_equal(found[: len(expected)], expected)
    assert (found[len(expected) :] == -1).all()
    return len(expected)


@pytest.mark.parametrize("seed", range(8))
def test_selected_boxes_are_those_of_onnx_runtime(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    images, classes, count = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 40))
    limits: list[Array | None] = [
        np.array([int(rng.integers(1, 20))], np.int64),
        np.array([0.3 + 0.1 * seed / 8], np.float32),
    ]
    limits += [np.array([0.4], np.float32)] if seed % 2 else []
    limits[1] = None if seed == 6 else limits[1]
    centred = seed % 4 > 1
    data = suppression((images, count, 4), (images, classes, count), limits, center_point_box=int(centred))
    feeds = []
    for number in range(8):
        boxes = rng.uniform(0, 1, (images, count, 4))  # corners in any order, some without area
        boxes = np.round(boxes * 6) / 6 if number % 2 else boxes
        scores = rng.uniform(0, 1, (images, classes, count))
        scores = np.round(scores * 4) / 4 if number % 3 == 0 else scores
        feeds.append([boxes.astype(np.float32), scores.astype(np.float32)])
    named = [dict(zip(("boxes", "scores"), feed, strict=True)) for feed in feeds]
    compiled = compiled_from(data, tmp_path, "nms.onnx", RISCV, Options(check=True))
    found = run_everywhere(compiled, RISCV, named)
    expected = run_onnx_runtime(data, feeds, ("boxes", "scores"))
    assert sum(same_rows(one["chosen"], other[0]) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("limits", "said"),
    [([], "max_output_boxes_per_class is 0"), ([np.array([2], np.int64), np.array([1.5], np.float32)], "from 0 to 1")],
)
def test_odd_limits_are_refused(tmp_path: Path, limits: Sequence[Array], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        compiled_from(suppression((1, 9, 4), (1, 2, 9), limits), tmp_path, "nms.onnx", RISCV)


class Yolo:
    """A quantised detector in the manner of YOLO: convolutions, one head, sigmoids, a grid added, NonMaxSuppression."""

    def __init__(self, size: int = 16, classes: int = 3) -> None:
        self.nodes: list[Any] = []
        self.held: list[Any] = []
        self.rng = np.random.default_rng(12)
        cells = (size // 4) ** 2
        x = self.convolution(self.stored("image", 1 / 64), 3, 8, 3, 2)
        x = self.convolution(self.relu(x, 0.0301), 8, 12, 3, 2)
        x = self.convolution(self.relu(x, 0.0413), 12, 4 + classes, 1, 1)
        x = self.node("Reshape", x, self.constant("flat", np.array([1, 4 + classes, cells], np.int64)))
        first, rest = (self.constant(f"at{at}", np.array([at], np.int64)) for at in (0, 4))
        last, axis = (
            self.constant("last", np.array([4 + classes], np.int64)),
            self.constant("axis", np.array([1], np.int64)),
        )
        near = self.stored(self.node("Sigmoid", self.node("Slice", x, first, rest, axis)), 1 / 128)
        grid = self.constant("grid", self.rng.uniform(0, 0.5, (1, 4, cells)).astype(np.float32))
        boxes = self.stored(self.node("Add", near, self.stored(grid, 1 / 128)), 1 / 128, -128)
        boxes = self.node("Transpose", boxes, perm=[0, 2, 1], name="boxes")
        scores = self.stored(self.node("Sigmoid", self.node("Slice", x, rest, last, axis)), 1 / 256, -128)
        limits = [np.array([5], np.int64), np.array([0.4], np.float32), np.array([0.55], np.float32)]
        names = [self.constant(f"limit{at}", limit) for at, limit in enumerate(limits)]
        self.node("NonMaxSuppression", boxes, scores, *names, name="chosen", center_point_box=1)
        given = [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, size, size])]
        made = (("chosen", TensorProto.INT64, ["n", 3]), ("boxes", TensorProto.FLOAT, [1, cells, 4]))
        made = (*made, (scores, TensorProto.FLOAT, [1, classes, cells]))
        graph = helper.make_graph(
            self.nodes, "yolo", given, [helper.make_tensor_value_info(*one) for one in made], self.held
        )
        self.scores = scores
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        self.file = bytes(model.SerializeToString())

    def node(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        name = name or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, name: str, array: Array) -> str:
        self.held.append(numpy_helper.from_array(array, name))
        return name

    def parameters(self, scale: float, zero: int) -> list[str]:
        count = len(self.held)
        return [self.constant(f"s{count}", np.float32(scale)), self.constant(f"z{count}", np.int8(zero))]

    def stored(self, x: str, scale: float, zero: int = 0) -> str:
        """x, quantised and back."""
        own = self.parameters(scale, zero)
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, *own), *own)

    def relu(self, x: str, scale: float) -> str:
        """Of scales whose ratios are no powers of two: no sum lies half-way, where ONNX Runtime rounds to even."""
        return self.stored(self.node("Relu", x), scale, -128)

    def convolution(self, x: str, inputs: int, outputs: int, kernel: int, stride: int) -> str:
        """A convolution whose sums fill their bytes; without a quantisation of its own where a ReLU follows."""
        weights = self.rng.integers(-127, 128, (outputs, inputs, kernel, kernel)).astype(np.int8)
        scale = float(2.0 ** np.round(np.log2(1 / (70 * np.sqrt(inputs * kernel * kernel)))))
        parameters = self.parameters(scale, 0)
        w = self.node("DequantizeLinear", self.constant(f"w{len(self.held)}", weights), *parameters)
        pad = [(kernel - 1) // 2] * 4
        y = self.node("Conv", x, w, pads=pad, strides=[stride] * 2)
        return y if kernel == 3 else self.stored(y, 0.0603)


@pytest.mark.parametrize("target", ["riscv", "cortex_m4"])
def test_a_detector_selects_the_boxes_onnx_runtime_selects(tmp_path: Path, target: str) -> None:
    yolo, known = Yolo(), load_target(target)
    rng = np.random.default_rng(13)
    feeds = [[rng.uniform(-2, 2, (1, 3, 16, 16)).astype(np.float32)] for _ in range(8)]
    compiled = compiled_from(yolo.file, tmp_path, "yolo.onnx", known)
    found = run_everywhere(compiled, known, [{"image": feed[0]} for feed in feeds], ("iss",))
    expected = run_onnx_runtime(yolo.file, feeds, ("image",))
    total = 0
    for one, (chosen, boxes, scores) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one["boxes"], boxes)
        np.testing.assert_array_equal(one[yolo.scores], scores)
        total += same_rows(one["chosen"], chosen)
    assert total >= 16
