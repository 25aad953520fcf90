"""A MAC array that makes 32-bit sums row by row: what `mac_job_t` of mesh_hal.h asks of it, on a machine's memory.

Both the elements of a mesh and an array beside one core are this; how long it takes its description says.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dovetail.sim.device import Bus
from dovetail.target.mesh import Work

JOB = (
    *("image", "weights", "sums", "image_row", "columns", "outputs", "inputs", "kernel_rows", "kernel_columns"),
    *("stride", "kind", "is_unsigned", "row_stride"),
)
"""Fields of a job of one row, in order."""
ROWS_JOB = (*JOB, "rows")
"""Fields of mac_job_t, in order."""
KINDS = ("convolution", "depthwise", "dense")
"""Kinds of jobs, by their number in `kind`."""


def work_of(job: Mapping[str, int]) -> Work:
    """A job as the description of an array takes it."""
    rows, columns, outputs, inputs = (
        np.array(n) for n in (job.get("rows", 1), job["columns"], job["outputs"], job["inputs"])
    )
    kernel, stride = (job["kernel_rows"], job["kernel_columns"]), (job["row_stride"], job["stride"])
    return Work(KINDS[job["kind"]], rows, columns, outputs, inputs, kernel, stride)


def macs(job: Mapping[str, int]) -> int:
    """Multiply-accumulates of a job."""
    depth = 1 if KINDS[job["kind"]] == "depthwise" else job["inputs"]
    return job.get("rows", 1) * job["columns"] * job["outputs"] * job["kernel_rows"] * job["kernel_columns"] * depth


def compute(job: Mapping[str, int], bus: Bus) -> None:
    """Write the sums of a job, [rows][columns][outputs]."""
    step, size = job["row_stride"] * job["image_row"], 4 * job["columns"] * job["outputs"]
    for row in range(job.get("rows", 1)):
        _compute_row({**job, "image": job["image"] + row * step, "sums": job["sums"] + row * size}, bus)


def _compute_row(job: Mapping[str, int], bus: Bus) -> None:
    kind, outputs, inputs, columns = KINDS[job["kind"]], job["outputs"], job["inputs"], job["columns"]
    high, wide = job["kernel_rows"], job["kernel_columns"]
    span = ((columns - 1) * job["stride"] + wide) * inputs
    rows = [bus.view(job["image"] + row * job["image_row"], span) for row in range(high)]
    image = np.stack(rows).view(np.uint8 if job["is_unsigned"] else np.int8).astype(np.int64)
    image = image.reshape(high, -1, inputs)
    group = 16 if kind == "dense" else 4
    depth = 1 if kind == "depthwise" else inputs
    size = -(-outputs // group) * high * wide * depth * group
    weights = bus.view(job["weights"], size).view(np.int8).astype(np.int64)
    weights = weights.reshape(-1, high, wide, depth, group).transpose(1, 2, 3, 0, 4)
    weights = weights.reshape(high, wide, depth, -1)[..., :outputs]
    sums = np.zeros((columns, outputs), np.int64)
    for row in range(high):
        for column in range(wide):
            part = image[row, column : column + (columns - 1) * job["stride"] + 1 : job["stride"]]
            taps = weights[row, column]
            sums += part * taps[0] if kind == "depthwise" else part @ taps
    bus.view(job["sums"], sums.size * 4)[:] = sums.astype("<i4").reshape(-1).view(np.uint8)
