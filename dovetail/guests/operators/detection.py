"""The last operators of detectors: TFLite's TFLite_Detection_PostProcess and ONNX's NonMaxSuppression, on floats.

Facts from tensorflow/lite/micro/kernels/detection_postprocess.cc and onnxruntime's
core/providers/cpu/object_detection/non_max_suppression.cc. Of equal scores the box that comes first is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from dovetail.guests.operators.common import Arrays, Numbers, Results, Types, text
from dovetail.ir.operators.base import require
from dovetail.ir.operators.user import Said, UserOperator
from dovetail.ir.types import Array, DType, TensorType

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody

_SORTED = text("sorted")


def _best(scores: Array, likely: Array, most: int, boxes: Array, shares: Callable[[Array, Array], Array]) -> list[int]:
    """The best boxes by their scores, of the likely ones, none of which shares too much with a better one."""
    kept: list[int] = []
    candidates = np.flatnonzero(likely)
    for place in candidates[np.argsort(-scores[candidates], kind="stable")]:
        if len(kept) >= most:
            break
        if not shares(boxes[kept], boxes[place]).any():
            kept.append(int(place))
    return kept


@dataclass(frozen=True)
class DetectionPostProcess(UserOperator):
    """Boxes relative to anchors, scores of classes and anchors as the best boxes, in corners, with class and score.

    Operands: boxes [1, N, 4 or more], scores [1, N, classes, and one for the background in front if there is one],
    anchors [N, 4]: all (y, x, height, width). Results: corners [1, D, 4], classes [1, D], scores [1, D], their number
    [1]; what is behind that is 0.
    """

    real = True
    custom_code = "TFLite_Detection_PostProcess"
    c = (_SORTED, text("detection"))
    function = "detect"

    max_detections: int
    max_classes_per_detection: int
    nms_score_threshold: float
    nms_iou_threshold: float
    num_classes: int
    y_scale: float
    x_scale: float
    h_scale: float
    w_scale: float
    detections_per_class: int = 100
    use_regular_nms: bool = False
    """Each class by itself; otherwise each box has its best class only."""

    def results(self, inputs: Types) -> Results:
        require(len(inputs) == 3, f"expects 3 operands, got {len(inputs)}")
        boxes, scores, anchors = (kind.shape for kind in inputs)
        require(all(kind.dtype is DType.FLOAT32 for kind in inputs), "expects floats or quantised values")
        require(len(boxes) == len(scores) == 3 and len(anchors) == 2, "expects operands of 3, 3 and 2 axes")
        require(boxes[0] == 1 and scores[:2] == boxes[:2] and boxes[2] >= 4, "expects one image, 4 numbers to a box")
        require(anchors == (boxes[1], 4), f"expects {boxes[1]} anchors of 4 numbers, got {list(anchors)}")
        require(
            scores[2] - self.num_classes in (0, 1), f"{scores[2]} scores are not those of {self.num_classes} classes"
        )
        require(0.0 < self.nms_iou_threshold <= 1.0, f"nms_iou_threshold is {self.nms_iou_threshold}")
        require(
            0 < self.max_detections <= 1 << 16 and self.num_classes > 0, "a number of boxes or classes is not positive"
        )
        require(self.detections_per_class > 0, "detections_per_class is not positive")
        require(all(scale != 0 for scale in self._scales), "a scale is 0")
        require(
            self.use_regular_nms or self.max_classes_per_detection == 1 or self.num_classes == 1,
            f"max_classes_per_detection is {self.max_classes_per_detection}; without use_regular_nms it may be 1 only: "
            "for more, TFLite writes behind the ends of its results",
        )
        return tuple(TensorType(shape, DType.FLOAT32) for shape in self._shapes)

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        most = self.max_detections
        return (1, most, 4), (1, most), (1, most), (1,)

    @property
    def _scales(self) -> tuple[float, ...]:
        return self.y_scale, self.x_scale, self.h_scale, self.w_scale

    def compute(self, inputs: Arrays) -> Arrays:
        with np.errstate(all="ignore"):  # sizes may be without end
            return self._detected(inputs[0][0], inputs[1][0, :, -self.num_classes :], inputs[2])

    def _detected(self, boxes: Array, scores: Array, anchors: Array) -> Sequence[Array]:
        corners, most, least = self._corners(boxes, anchors), self.max_detections, np.float32(self.nms_score_threshold)

        def best(values: Array, most: int) -> list[int]:
            return _best(values, values >= least, most, corners, self._share)

        if self.use_regular_nms:
            rows = [
                (scores[at, k], k, at)
                for k in range(self.num_classes)
                for at in best(scores[:, k], self.detections_per_class)
            ]
            rows = sorted(rows, key=lambda row: -row[0])[:most]
        else:
            values = scores.max(axis=1)
            rows = [(values[at], int(scores[at].argmax()), at) for at in best(values, most)]
        results = [np.zeros(shape, np.float32) for shape in self._shapes]
        for place, (score, label, at) in enumerate(rows):
            results[0][0, place], results[1][0, place], results[2][0, place] = corners[at], label, score
        results[3][0] = len(rows)
        return results

    def _corners(self, boxes: Array, anchors: Array) -> Array:
        """(top, left, bottom, right) float32 of every box; centre and half a size are rounded to float32 first."""
        wide, size = boxes[:, :4].astype(np.float64), anchors[:, 2:].astype(np.float64)
        scales = np.array(self._scales, np.float32).astype(np.float64)
        centre = (wide[:, :2] / scales[:2] * size + anchors[:, :2].astype(np.float64)).astype(np.float32)
        half = (0.5 * np.exp(wide[:, 2:] / scales[2:]) * size).astype(np.float32)
        return np.concatenate([centre - half, centre + half], axis=1)

    def _share(self, a: Array, b: Array) -> Array:
        """Which of the boxes [K, 4] share more with the box [4] than they may."""
        area_a, area_b = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1]), (b[2] - b[0]) * (b[3] - b[1])
        sides = np.maximum(np.minimum(a[:, 2:], b[2:]) - np.maximum(a[:, :2], b[:2]), np.float32(0))
        shared = sides[:, 0] * sides[:, 1]
        over = shared / (area_a + area_b - shared) > np.float32(self.nms_iou_threshold)
        return np.asarray(over & ~(area_a <= 0) & ~(area_b <= 0))

    def numbers(self, inputs: Types) -> Numbers:
        boxes, scores, _ = (kind.shape for kind in inputs)
        sizes = (boxes[1], boxes[2], scores[2], self.num_classes)
        limits = (float(self.nms_score_threshold), float(self.nms_iou_threshold))
        most = self.max_detections
        return (*sizes, *limits, most, most, int(self.use_regular_nms), self.detections_per_class)

    def tables(self, inputs: Types) -> Arrays:
        return (np.array(self._scales, np.float32),)

    def scratch(self, inputs: Types) -> Types:
        count = inputs[0].shape[1]
        most = min(self.detections_per_class if self.use_regular_nms else self.max_detections, count)
        kinds = ((count, DType.FLOAT32), (count, DType.INT32), (most, DType.INT32), (4 * most, DType.FLOAT32))
        return tuple(TensorType((size,), kind) for size, kind in kinds)


def _type(array: Array) -> TensorType:
    return TensorType(tuple(array.shape), DType.of(array.dtype))


@dataclass(frozen=True)
class NonMaxSuppression(UserOperator):
    """The best boxes of every class of every image, none of which shares too much with a better one.

    Operands: boxes float32 [images, N, 4], scores float32 [images, classes, N]. The result is int64 [M, 3], rows of
    image, class and box. ONNX gives as many rows as there are; here M is the most there can be, images * classes *
    min(N, most per class), and the rows behind the last are -1.
    """

    opaque = False
    op_type = "NonMaxSuppression"
    taken = 2
    c = (_SORTED, text("suppression"))
    function = "suppress"

    center_point_box: int = 0
    """1: boxes are (x, y, width, height) of their centres; 0: two opposite corners."""
    most: int = 0
    """Boxes of a class, at most."""
    most_shared: float = 0.0
    """Area two boxes may share, as a part of the area they cover."""
    least: float | None = None
    """Scores must be above this; None: any will do."""

    @classmethod
    def read(cls, said: Said) -> Self:
        centred = said.get("center_point_box", int, 0)
        require(centred in (0, 1), f"center_point_box is {centred}")
        most, shared = said.constant(2, np.zeros(1)), said.constant(3, np.zeros(1))
        least = said.constant(4, np.full(1, np.nan))
        require(most.size == shared.size == least.size == 1, "a limit has several elements")
        limits = (float(shared.reshape(-1)[0]), float(least.reshape(-1)[0]))
        require(0.0 <= limits[0] <= 1.0, f"iou_threshold is {limits[0]}, it must be from 0 to 1")
        count = int(most.reshape(-1)[0])
        require(count > 0, "max_output_boxes_per_class is 0: nothing is ever selected")
        return cls(centred, min(count, 1 << 30), limits[0], None if np.isnan(limits[1]) else limits[1])

    def results(self, inputs: Types) -> Results:
        boxes, scores = (kind.shape for kind in inputs)
        require(all(kind.dtype is DType.FLOAT32 for kind in inputs), "expects floats")
        require(len(boxes) == len(scores) == 3 and boxes[2] == 4, "expects boxes [B, N, 4] and scores [B, C, N]")
        require(boxes[0] == scores[0] and boxes[1] == scores[2], f"{inputs[0]} and {inputs[1]} do not fit")
        return (TensorType((scores[0] * scores[1] * min(self.most, scores[2]), 3), DType.INT64),)

    def compute(self, inputs: Arrays) -> Arrays:
        boxes, scores = inputs
        edges, rows = self._edges(boxes), list[tuple[int, int, int]]()
        for image, label in np.ndindex(*scores.shape[:2]):
            values, own = scores[image, label], edges[image]
            least = np.ones(len(values), bool) if self.least is None else values > np.float32(self.least)
            with np.errstate(all="ignore"):
                kept = _best(values, least, self.most, own, self._share)
            rows += [(image, label, at) for at in kept]
        (kind,) = self.results([_type(array) for array in inputs])
        chosen = np.full(kind.shape, -1, np.int64)
        chosen[: len(rows)] = np.array(rows, np.int64).reshape(-1, 3)
        return [chosen]

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Types) -> str:
        limits = [body.integers([self.most]), body.tensor(np.array([self.most_shared], np.float32))]
        limits += [body.tensor(np.array([self.least], np.float32))] if self.least is not None else []
        chosen = body.add("NonMaxSuppression", [*inputs, *limits], center_point_box=self.center_point_box)
        (kind,) = self.results(types)
        sizes = body.tensor(np.array(kind.shape, np.int64))
        behind = body.add(
            "Concat", [body.integers([0, 0]), body.add("Sub", [sizes, body.add("Shape", [chosen])])], axis=0
        )
        return body.add("Pad", [chosen, behind, body.number(-1)])

    def _edges(self, boxes: Array) -> Array:
        """Lowest and highest along both axes, [images, N, 2 axes, 2]."""
        first, second = boxes[..., :2], boxes[..., 2:]
        if self.center_point_box:
            half = second / np.float32(2)
            return np.stack([first - half, first + half], axis=-1)
        return np.stack([np.minimum(first, second), np.maximum(first, second)], axis=-1)

    def _share(self, a: Array, b: Array) -> Array:
        """Which of the boxes [K, 2, 2] share more with the box [2, 2] than they may."""
        sides = np.minimum(a[..., 1], b[:, 1]) - np.maximum(a[..., 0], b[:, 0])
        shared = sides[:, 0] * sides[:, 1]
        area_a, area_b = np.prod(a[..., 1] - a[..., 0], axis=1), np.prod(b[:, 1] - b[:, 0])
        covered = area_a + area_b - shared
        some = (sides > 0).all(axis=1) & (shared > 0) & (area_a > 0) & (area_b > 0) & (covered > 0)
        return np.asarray(some & (shared / covered > np.float32(self.most_shared)))

    def numbers(self, inputs: Types) -> Numbers:
        images, classes, count = inputs[1].shape
        (kind,) = self.results(inputs)
        limits = (float(self.most_shared), int(self.least is not None), float(self.least or 0.0))
        return (images, classes, count, self.most, self.center_point_box, *limits, kind.shape[0])

    def scratch(self, inputs: Types) -> Types:
        return (TensorType((inputs[1].shape[2],), DType.INT32),)
