"""The engine kestrel, from its manual: what its commands cost and do. It shares nothing with the target file."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dovetail.ir.types import Array
from dovetail.sim.device import Bus

Job = Mapping[str, int]


def signed(value: int) -> int:
    """A field as a signed number."""
    return value - (1 << 32) if value >= 1 << 31 else value


def blocks(channels: int, size: int) -> int:
    """Blocks of so many channels."""
    return -(-channels // size)


def weight_bytes(name: str, job: Job) -> int:
    """Bytes of the weights a command reads."""
    groups, inputs = blocks(job["outputs"], 8), blocks(job["channels"], 16)
    each = 128 * groups * inputs if name == "CONV" else 16 * blocks(job["outputs"], 16)
    return job["kernel_rows"] * job["kernel_columns"] * each


def cycles(name: str, job: Job) -> int:
    """Cycles of a command."""
    if name.startswith("DMA"):
        return 32 + job["rows"] * blocks(job["row_bytes"], 8)
    steps = job["y_rows"] * job["y_columns"] * blocks(job["outputs"], 8)
    if name != "ADD":
        steps *= job["kernel_rows"] * job["kernel_columns"]
    if name not in ("CONV", "DEPTHWISE"):
        return steps
    steps *= blocks(job["channels"], 16) if name == "CONV" else 1
    return max(steps, blocks(weight_bytes(name, job) + 12 * job["outputs"], 8))


def macs(name: str, job: Job) -> int:
    """Multiply-accumulates that are wanted of a command."""
    if name not in ("CONV", "DEPTHWISE"):
        return 0
    products = job["kernel_rows"] * job["kernel_columns"] * (job["channels"] if name == "CONV" else 1)
    return job["y_rows"] * job["y_columns"] * job["outputs"] * products


def moved(name: str, job: Job) -> int:
    """Bytes a transfer writes."""
    return job["rows"] * job["row_bytes"] if name.startswith("DMA") else 0


def image(bus: Bus, job: Job, stem: str, rows: int, columns: int, channels: int) -> Array:
    """An image in memory: blocks of channels, rows, columns, 16 channels."""
    shape, strides = (blocks(channels, 16), rows, columns, 16), (job[f"{stem}_block"], job[f"{stem}_row"], 16, 1)
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return as_strided(bus.view(job[stem], extent).view(np.int8), shape, strides)


def operand(bus: Bus, job: Job, stem: str = "x") -> Array:
    """An operand: rows, columns, channels of whole blocks; int64."""
    held = image(bus, job, stem, job["x_rows"], job["x_columns"], job["channels"])
    return held.transpose(1, 2, 0, 3).reshape(*held.shape[1:3], -1).astype(np.int64)


def store(bus: Bus, job: Job, values: Array) -> None:
    """Write rows, columns, channels, limited, where the result lies."""
    target = image(bus, job, "y", job["y_rows"], job["y_columns"], job["outputs"])
    limited = np.clip(values, signed(job["low"]), signed(job["high"])).astype(np.int8)
    for channel in range(0, job["outputs"], 16):
        part = limited[:, :, channel : min(channel + 16, job["outputs"])]
        target[channel // 16, :, :, : part.shape[2]] = part


def scaled(values: Array, multiplier: Array | int, shift: Array | int) -> Array:
    """One product, rounded once, halves upwards."""
    return (values * multiplier + (np.int64(1) << (shift - 1))) >> shift


def windows(x: Array, job: Job, outside: int) -> Iterator[tuple[int, int, Array]]:
    """For each tap, its row and column and the elements it meets, as many rows and columns as the result has."""
    down, right, rows, columns = (job[n] for n in ("stride_rows", "stride_columns", "y_rows", "y_columns"))
    high, wide = ((rows - 1) * down + job["kernel_rows"], (columns - 1) * right + job["kernel_columns"])
    padded = np.full((high, wide, x.shape[2]), outside, np.int64)
    held = x[: high - job["top"], : wide - job["left"]]
    padded[job["top"] : job["top"] + held.shape[0], job["left"] : job["left"] + held.shape[1]] = held
    for row in range(job["kernel_rows"]):
        for column in range(job["kernel_columns"]):
            yield row, column, padded[row::down, column::right][:rows, :columns]


def products(name: str, job: Job, bus: Bus) -> Array:
    """The sums of products of a layer: rows, columns, outputs."""
    x, zero, outputs = operand(bus, job), signed(job["x_zero"]), job["outputs"]
    kernel = (job["kernel_rows"], job["kernel_columns"])
    raw = bus.view(job["weights"], weight_bytes(name, job)).view(np.int8).astype(np.float64)
    sums = np.zeros((job["y_rows"], job["y_columns"], x.shape[2] if name == "DEPTHWISE" else outputs))
    if name == "DEPTHWISE":
        weights = raw.reshape(-1, *kernel, 16).transpose(1, 2, 0, 3).reshape(*kernel, -1)
        for row, column, met in windows(x, job, zero):
            sums += (met - zero) * weights[row, column]
    else:
        weights = raw.reshape(-1, *kernel, x.shape[2] // 16, 8, 16).transpose(1, 2, 3, 5, 0, 4)
        weights = weights.reshape(*kernel, x.shape[2], -1)[..., :outputs]
        for row, column, met in windows(x, job, zero):
            sums += (met - zero).astype(np.float64) @ weights[row, column]
    return sums[:, :, :outputs].astype(np.int64)


def pooled(job: Job, bus: Bus) -> Array:
    """The largest of each window, or its mean to the nearest, halves away from zero; padding does not count."""
    x = operand(bus, job)
    if not job["average"]:
        return np.asarray(np.stack([met for _, _, met in windows(x, job, -128)]).max(axis=0))
    total = np.sum([met for _, _, met in windows(x, job, 0)], axis=0)
    count = np.sum([met for _, _, met in windows(np.ones_like(x), job, 0)], axis=0)
    return np.asarray(np.sign(total) * ((np.abs(total) + count // 2) // count))


def added(job: Job, bus: Bus) -> Array:
    """The sum of two images."""
    total = np.zeros(1, np.int64)
    for stem in ("x", "other"):
        raised = (operand(bus, job, stem) - signed(job[f"{stem}_zero"])) << job["left_shift"]
        total = total + scaled(raised, job[f"{stem}_multiplier"], job[f"{stem}_shift"])
    return scaled(total, job["y_multiplier"], job["y_shift"]) + signed(job["y_zero"])


def compute(name: str, job: Job, bus: Bus) -> None:
    """Carry a command out."""
    if name.startswith("DMA"):
        rows = []
        for end in ("source", "target"):
            extent = (job["rows"] - 1) * job[f"{end}_stride"] + job["row_bytes"]
            shape, strides = (job["rows"], job["row_bytes"]), (job[f"{end}_stride"], 1)
            rows.append(as_strided(bus.view(job[end], extent), shape, strides))
        rows[1][...] = rows[0].copy()
    elif name in ("CONV", "DEPTHWISE"):
        words = bus.view(job["parameters"], 12 * job["outputs"]).view("<i4").astype(np.int64)
        bias, multiplier, shift = words.reshape(-1, 3).T
        total = scaled(products(name, job, bus) + bias, multiplier, shift)
        store(bus, job, total + signed(job["y_zero"]))
    else:
        store(bus, job, pooled(job, bus) if name == "POOL" else added(job, bus))
