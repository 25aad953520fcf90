"""An engine of deep commands, made up: a residual block (two convolutions and the block's input added) in one launch,
and a convolution that gives its image and its pool at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import dovetail.target as dt
from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array
from dovetail.legalize import results_together
from dovetail.target import layers
from networks import Net

HERE = Path(__file__).resolve().parent
REGISTERS = dt.JobRegisters((
    "pooled", "x", "row", "pixel", "y", "y_row", "y_pixel", "largest", "rows", "columns", "channels", "outputs",
    "weights", "parameters"))  # fmt: skip


def convolution(x: dt.Pattern, n: int) -> dt.Pattern:
    """A padded 3x3 convolution, requantised; its parts numbered."""
    padded = dt.apply(Pad, x, name=f"pad_{n}")
    sums = dt.apply(Conv2d, padded, dt.constant(f"weights_{n}"), dt.constant(f"bias_{n}"), name=f"layer_{n}")
    scaled = dt.apply(Requantize, sums, dt.constant(f"multiplier_{n}"), dt.constant(f"shift_{n}"), name=f"scaled_{n}")
    return dt.apply(Clip, scaled, name=f"clip_{n}")


def scaled(x: dt.Pattern, name: str) -> dt.Pattern:
    return dt.apply(Requantize, x, dt.constant(f"{name}_multiplier"), dt.constant(f"{name}_shift"), name=name)


X = dt.operand("x")
SUM = dt.apply(Add, scaled(convolution(convolution(X, 1), 2), "left"), scaled(X, "right"))
RESIDUAL = dt.apply(Clip, scaled(SUM, "sum"))
IMAGE = convolution(X, 1)
BOTH = dt.together(IMAGE, dt.apply(MaxPool2d, IMAGE, name="pool"))


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights of the convolutions in turn; for each zero points, limits, and arrays of the channels; then the sum's."""
    weights, words = [], list[Array]()
    for n in (n for n in (1, 2) if match.has(f"layer_{n}")):
        clip, scaling = match.operator(f"clip_{n}", Clip), match.operator(f"scaled_{n}", Requantize)
        zero = match.operator(f"layer_{n}", Conv2d).input_zero_point
        weights.append(match.array(f"weights_{n}").astype(np.int8).reshape(-1))
        outputs = match.type(f"weights_{n}").shape[0]
        words.append(np.array([zero, scaling.output_zero_point, clip.low, clip.high]))
        words += [np.broadcast_to(match.array(f"{each}_{n}"), outputs) for each in ("bias", "multiplier", "shift")]
    for name in (name for name in ("left", "right", "sum") if match.has(name)):
        own = match.operator(name, Requantize)
        constants = [match.array(f"{name}_{each}").reshape(-1)[0] for each in ("multiplier", "shift")]
        words.append(np.array([*constants, own.input_zero_point, own.output_zero_point, own.left_shift]))
    if match.has("clip"):
        words.append(np.array([match.operator("clip", Clip).low, match.operator("clip", Clip).high]))
    parameters = np.concatenate(words).astype("<i4")
    return {"weights": np.concatenate(weights).view(np.uint8), "parameters": parameters.view(np.uint8)}


def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """One job."""
    pooled = match.has("together")
    x = layers.image_of(match.type("x"), operands[match.values["x"]])
    places = dt.results_of(match, operands) if pooled else (operands["result"],) * 2
    outputs = match.type("weights_1").shape[0]
    row, pixel = places[0].strides[1:3]
    return (REGISTERS.command(
        "deep_start", pooled=int(pooled), x=x.address, row=x.row, pixel=x.pixel, y=places[0].address, y_row=row,
        y_pixel=pixel, largest=places[1].address, rows=x.rows, columns=x.columns, channels=x.channels, outputs=outputs,
        weights=operands["weights"].address, parameters=operands["parameters"].address),)  # fmt: skip


def cycles(match: dt.Match) -> int:
    """16 products a cycle."""
    return 40 + match.work // 16


def window(match: dt.Match) -> list[object]:
    """What the convolutions must be: kernel, stride, padding and what it holds."""
    found: list[object] = []
    for n in (n for n in (1, 2) if match.has(f"layer_{n}")):
        layer, pad = match.operator(f"layer_{n}", Conv2d), match.operator(f"pad_{n}", Pad)
        kernel, operand = match.type(f"weights_{n}").shape[1:], match.graph.types[match.nodes[f"layer_{n}"].inputs[0]]
        found.append((kernel[:2], layer.stride, layer.dilation, pad.before, pad.after))
        found += [pad.value == layer.input_zero_point, layer.weight_zero_point == 0, kernel[2] == operand.shape[3]]
    return found


EDGE = (0, 1, 1, 0)
LIMITS = (
    layers.ALL_INT8,
    dt.one_of("there must be one image", lambda m: m.type("x").shape[0], 1),
    dt.Constraint(
        "convolutions must be 3x3, padded by one zero point",
        window,
        lambda v: all(each in (True, ((3, 3), (1, 1), (1, 1), EDGE, EDGE)) for each in v),
    ),
    dt.one_of(
        "requantisations must be rounded twice",
        lambda m: {n.operator.rounding for n in m.nodes.values() if isinstance(n.operator, Requantize)},
        {Rounding.DOUBLE},
    ),
)
POOLED = (
    dt.one_of(
        "the pool must be 3x3, padded by one",
        lambda m: tuple(getattr(m.operator("pool", MaxPool2d), name) for name in ("kernel", "stride", "padding")),
        ((3, 3), (1, 1), ((1, 1), (1, 1))),
    ),
)
ADDED = (
    dt.one_of(
        "the sum must be scaled by one number each",
        lambda m: max(
            m.type(f"{name}_{each}").elements for name in ("left", "right", "sum") for each in ("multiplier", "shift")
        ),
        1,
    ),
    dt.one_of("the block must keep its shape", lambda m: m.type("x").shape[-1:] == m.type("weights_2").shape[:1], True),
)


def cases(pooled: bool) -> dt.Cases:
    """Networks for `check`."""

    def case(settings: Mapping[str, int]) -> Graph:
        shape = (settings["rows"], settings["columns"], settings["channels"])
        net = Net("case", shape, zero_point=settings["input_zero"], seed=settings["variant"])
        if pooled:
            image = net.convolution(net.x, settings["outputs"])
            return net.finish(image, net.pool(image, 3, 1, 1))
        inner = net.convolution(net.convolution(net.x, settings["outputs"], relu=True), shape[2])
        return net.finish(net.addition(inner, net.x))

    return case


OFFLOADS = (
    dt.Offload("residual block", RESIDUAL, (*LIMITS, *ADDED), pack, commands, cycles, cases=cases(False)),
    dt.Offload("image and pool", BOTH, (*LIMITS, *POOLED), pack, commands, cycles, cases=cases(True)),
)
DRIVER = {name: HERE / name for name in ("deep.c", "deep.h")}
TARGET = dt.Target(
    name="deep",
    sentence="a RISC-V core beside an engine of residual blocks",
    core=dt.Core("rv32imc"),
    memories=(dt.Memory("L2", 0x1C000000, 512 << 10), dt.Memory("L1", 0x10000000, 128 << 10)),
    code="L2",
    values="L2",
    dma=dt.Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000),
    engines=(
        dt.Engine(
            name="deep", memory="L1", offloads=OFFLOADS, ideal_macs_per_cycle=16.0, driver=(), files=DRIVER,
            headers=("deep.h",), prepare="deep_init", wait="deep_wait", defines={"DEEP_BASE": 0x1A200000},
            device=REGISTERS.device("deep", str(HERE / "model.py"), base=0x1A200000)),
    ),
    policies=(dt.Policy("exact", "the engine requantises as TFLite Micro does", (
        dt.Rewrite("results together", results_together(BOTH, (*LIMITS, *POOLED)), lsb=0),)),),
)  # fmt: skip
