"""The engine kestrel, from its manual: what its commands cost and do. It shares nothing with the target file."""

import numpy as np
from numpy.lib.stride_tricks import as_strided


def signed(value):
    """A field as a signed number."""
    return value - (1 << 32) if value >= 1 << 31 else value


def blocks(channels, size):
    """Blocks of so many channels."""
    return -(-channels // size)


def constants_bytes(name, job):
    """Bytes of weights and parameters a command reads."""
    taps = job["kernel_rows"] * job["kernel_columns"]
    each = 128 * blocks(job["outputs"], 8) * blocks(job["channels"], 16)
    return taps * (each if name == "CONV" else 16 * blocks(job["outputs"], 16)) + 12 * job["outputs"]


def cycles(name, job):
    """What a command takes."""
    if name.startswith("DMA"):
        return 32 + job["rows"] * -(-job["row_bytes"] // 8)
    pixels, groups = job["y_rows"] * job["y_columns"], blocks(job["outputs"], 8)
    if name == "ADD":
        return pixels * groups
    taps = pixels * groups * job["kernel_rows"] * job["kernel_columns"]
    if name == "POOL":
        return taps
    products = taps * blocks(job["channels"], 16) if name == "CONV" else taps
    return max(products, -(-constants_bytes(name, job) // 8))


def macs(name, job):
    """Multiply-accumulates that are wanted of a command."""
    if name not in ("CONV", "DEPTHWISE"):
        return 0
    products = job["kernel_rows"] * job["kernel_columns"] * (job["channels"] if name == "CONV" else 1)
    return job["y_rows"] * job["y_columns"] * job["outputs"] * products


def moved(name, job):
    """Bytes a transfer writes."""
    return job["rows"] * job["row_bytes"] if name.startswith("DMA") else 0


def image(bus, job, stem, size):
    """An image in blocks of 16 channels, as blocks, rows, columns, 16."""
    rows, columns, channels = size
    shape, strides = (blocks(channels, 16), rows, columns, 16), (job[f"{stem}_block"], job[f"{stem}_row"], 16, 1)
    extent = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    return as_strided(bus.view(job[stem], extent).view(np.int8), shape, strides)


def pixels_of(bus, job, stem="x"):
    """The operand as rows, columns, channels (whole blocks)."""
    held = image(bus, job, stem, (job["x_rows"], job["x_columns"], job["channels"]))
    return held.transpose(1, 2, 0, 3).reshape(job["x_rows"], job["x_columns"], -1)


def store(bus, job, values):
    """Write rows, columns, channels, limited, where the result lies."""
    size = (job["y_rows"], job["y_columns"], job["outputs"])
    target = image(bus, job, "y", size)
    limited = np.clip(values, signed(job["low"]), signed(job["high"])).astype(np.int8)
    for channel in range(0, size[2], 16):
        part = limited[:, :, channel : channel + 16]
        target[channel // 16, :, :, : part.shape[2]] = part


def scaled(values, multiplier, shift):
    """One product, rounded once, halves upwards."""
    return (values * multiplier + (1 << (shift - 1))) >> shift


def windows(x, job, outside):
    """For each tap of the window, the elements it meets: rows, columns, channels of the result's size."""
    steps, top, left = (job["stride_rows"], job["stride_columns"]), job["top"], job["left"]
    reach = [(job[f"y_{axis}"] - 1) * step + job[f"kernel_{axis}"] for axis, step in zip(("rows", "columns"), steps)]
    padded = np.full((*reach, x.shape[2]), outside, np.int64)
    held = x[: reach[0] - top, : reach[1] - left]
    padded[top : top + held.shape[0], left : left + held.shape[1]] = held
    for row in range(job["kernel_rows"]):
        for column in range(job["kernel_columns"]):
            yield row, column, padded[row : reach[0] : steps[0], column : reach[1] : steps[1]][
                : job["y_rows"], : job["y_columns"]
            ]


def weighted(name, job, bus):
    """The sums of products of a layer."""
    x, zero = pixels_of(bus, job).astype(np.int64), signed(job["x_zero"])
    kernel, outputs = (job["kernel_rows"], job["kernel_columns"]), job["outputs"]
    nbytes = constants_bytes(name, job) - 12 * outputs
    raw = bus.view(job["weights"], nbytes).view(np.int8).astype(np.float64)
    sums = np.zeros((job["y_rows"], job["y_columns"], x.shape[2] if name == "DEPTHWISE" else outputs))
    if name == "DEPTHWISE":
        weights = raw.reshape(-1, *kernel, 16).transpose(1, 2, 0, 3).reshape(*kernel, -1)
        for row, column, met in windows(x, job, zero):
            sums += (met - zero) * weights[row, column]
        return sums[:, :, :outputs].astype(np.int64)
    weights = raw.reshape(-1, *kernel, x.shape[2] // 16, 8, 16).transpose(1, 2, 3, 5, 0, 4)
    weights = weights.reshape(*kernel, x.shape[2], -1)[..., :outputs]
    for row, column, met in windows(x, job, zero):
        sums += (met - zero).astype(np.float64) @ weights[row, column]
    return sums.astype(np.int64)


def pooled(job, bus):
    """The largest of each window, or its mean, rounded to the nearest, halves away from zero; no padding counts."""
    x = pixels_of(bus, job).astype(np.int64)
    if not job["average"]:
        return np.stack([met for _, _, met in windows(x, job, -128)]).max(axis=0)[:, :, : job["outputs"]]
    total = sum(met for _, _, met in windows(x, job, 0))
    count = sum(met for _, _, met in windows(np.ones_like(x), job, 0))
    return (np.sign(total) * ((np.abs(total) + count // 2) // count))[:, :, : job["outputs"]]


def added(job, bus):
    """The sum of two images."""
    total = 0
    for stem in ("x", "other"):
        raised = (pixels_of(bus, job, stem).astype(np.int64) - signed(job[f"{stem}_zero"])) << job["left_shift"]
        total = total + scaled(raised, job[f"{stem}_multiplier"], job[f"{stem}_shift"])
    return (scaled(total, job["y_multiplier"], job["y_shift"]) + signed(job["y_zero"]))[:, :, : job["outputs"]]


def compute(name, job, bus):
    """Carry a command out."""
    if name.startswith("DMA"):
        shape = (job["rows"], job["row_bytes"])
        ends = {}
        for end in ("source", "target"):
            stride = signed(job[f"{end}_stride"])
            span = bus.view(job[end], (shape[0] - 1) * stride + shape[1])
            ends[end] = as_strided(span, shape, (stride, 1))
        ends["target"][...] = ends["source"].copy()
    elif name in ("CONV", "DEPTHWISE"):
        sums = weighted(name, job, bus)
        bias, multiplier, shift = bus.view(job["parameters"], 12 * job["outputs"]).view("<i4").reshape(-1, 3).T
        total = scaled(sums + bias, multiplier.astype(np.int64), shift.astype(np.int64))
        store(bus, job, total + signed(job["y_zero"]))
    else:
        store(bus, job, pooled(job, bus) if name == "POOL" else added(job, bus))
