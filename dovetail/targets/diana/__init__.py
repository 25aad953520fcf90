"""DIANA: a RISC-V core, a digital 16x16 engine for 8 bits and an analog array for ternary weights, one L1 for both.

Sources: pulp-platform/dory Hardware_targets/Diana/Diana_TVM/HW_description.json (sizes, bandwidths), eml-eda/match
target/diana (70 cycles per transfer), Ueyoshi et al., DIANA (JSSC 2023). The base addresses are ours. The published
copies are of whole rows; the DMA here also swaps and reorders bytes, at one row per cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from dovetail.adapt import (
    ConverterLimits,
    RequantisationLimits,
    addition_by_shift,
    convolution_as_patches,
    dense_results_of,
    engine_requantisation,
    even_borders,
    through_converter,
)
from dovetail.graph.graph import Node
from dovetail.graph.types import DType, TensorType
from dovetail.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.target import Core, DeviceModel, Dma, Engine, Memory, Policy, Quantisation, Rewrite, Target
from dovetail.targets.diana import costs, packing
from dovetail.targets.diana.layers import CODES, KERNELS, SEVEN_BITS, analog_offloads, digital_offloads

L1 = Memory("L1", base=0x10000000, size=256000)
WEIGHTS = Memory("WEIGHTS", base=0x10080000, size=64000, alignment=16)
ARRAY = Memory("ARRAY", base=0x100C0000, size=costs.ROWS * costs.COLUMNS * 2 // 8 + 4 * costs.COLUMNS, alignment=16)
"""The array, and behind it scales and offsets."""
L2 = Memory("L2", base=0x1C000000, size=512000)
DMA = Dma("dma", bytes_per_cycle=8, setup_cycles=70, base=0x1A100000)
BASES = {"digital": 0x10201000, "analog": 0x10202000}
DRIVER = ("dovetail.targets.diana:driver/diana.h", "dovetail.targets.diana:driver/diana.c")
LIMITS = RequantisationLimits(scale_bits=1, most_shift=31, activations=DType.INT8)
CONVERTER = ConverterLimits(operand=SEVEN_BITS, code=CODES, most_shift=31, scaled_bits=16)


def digital_takes(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the digital engine has the window of a layer (before patterns are matched)."""
    operator = node.operator
    if not isinstance(operator, Conv2d | DepthwiseConv2d):
        return True
    window = types[node.inputs[1]].shape[1:3]
    return set(window) <= set(KERNELS) and operator.stride in ((1, 1), (2, 2)) and operator.dilation == (1, 1)


def patches_pay(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a convolution is only possible as a 1x1 convolution of patches."""
    return types[node.inputs[0]].dtype is DType.INT8 and not digital_takes(types, node)


def analog_takes(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the array has room for the window of a layer."""
    weights = types[node.inputs[1]].shape
    rows = packing.array_rows(prod(weights[1:-1]), weights[-1])
    full = weights[-1] == types[node.inputs[0]].shape[-1]
    return full and weights[-1] <= 128 and rows <= costs.ROWS and digital_takes(types, node)


def _engine(name: str, memory: Memory, peak: float, model: str) -> Engine:
    return Engine(
        name=name,
        memory=L1.name,
        offloads=digital_offloads(model) if name == "digital" else analog_offloads(),
        ideal_macs_per_cycle=peak,
        driver=DRIVER,
        device=DeviceModel("dovetail.targets.diana.device:DianaDevice", BASES[name], 0x100,
                           {"engine": name, "costs": model}),
        wait=f"diana_{name}_wait",
        prepare=f"diana_{name}_init",
        defines={f"DIANA_{name.upper()}_BASE": BASES[name]},
        constants=memory.name,
    )  # fmt: skip


def diana(model: str = "plinio") -> Target:
    """The chip, the digital engine's cycles by one of the public models: "plinio" or "match"."""
    return Target(
        name="diana",
        sentence="RISC-V RV32IMC, 512 kB L2, 256 kB L1, digital 16x16 engine (int8), analog array (ternary weights)",
        core=Core("rv32imc"),
        memories=(L2, L1, WEIGHTS, ARRAY),
        code=L2.name,
        values=L2.name,
        dma=DMA,
        engines=(
            _engine("digital", WEIGHTS, 256.0, model),
            _engine("analog", ARRAY, round(costs.ROWS * costs.COLUMNS / costs.ARRAY_CYCLES, 1), model),
        ),
        quantisation=Quantisation(
            weight_bits=(8, 2),
            packed=True,
            per_channel=False,
            symmetric=True,
            shifts=True,
            ternary=True,
            operand_bits=7,
        ),
        policies=(DIGITAL, replace(ANALOG, rewrites=(*DIGITAL.rewrites, *ANALOG.rewrites))),
    )


DIGITAL = Policy(
    "digital",
    "the digital engine requantises by shifting, where scales are powers of two; else the core computes",
    (
        Rewrite("patches", convolution_as_patches(patches_pay), lsb=0),
        Rewrite("borders", even_borders(max(KERNELS)), lsb=0),
        Rewrite("requantisation", engine_requantisation(digital_takes, LIMITS), lsb=1),
        Rewrite("sums", addition_by_shift(31), lsb=1),
        Rewrite("whole words", dense_results_of(4), lsb=0),
    ),
)
ANALOG = Policy(
    "analog",
    "layers with weights of -1, 0 and 1 go to the analog array, the rest as in `digital`",
    (Rewrite("converter", through_converter(analog_takes, CONVERTER), lsb=255),),
)
TARGET = diana()
