"""This computer with an OpenCL device: layers become OpenCL C kernels, the rest of the network runs on the host.

Values stay on the device from one kernel to the next; what host and device need of each other is brought over once
(`dovetail.program.synchronise`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import dovetail.target as dt
from dovetail.ir.operators.arithmetic import Add, Clip, Lookup, Offset, Requantize
from dovetail.ir.operators.elementwise import Binary
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.movement import Concat, Pad
from dovetail.ir.types import Array
from dovetail.kernels.kernel import UnsupportedRegion
from dovetail.kernels.scope import split
from dovetail.targets.opencl.bodies import items, widths
from dovetail.targets.opencl.project import HEADER, LAYERS, MOVES, POOLS, Kernel, environment, made, write_kernel
from dovetail.targets.opencl.vendor import BinaryKernel

MOST_PARTS = 8
"""Operands a concatenation on the device may have."""


def patterns() -> Iterator[tuple[str, dt.Pattern]]:
    """Names and patterns, those with more operators first."""
    layers = list(_layers())
    for name, layer in layers:
        yield f"{name}_add", _sum(_rescaled(layer), dt.operand("other"))
        yield f"add_{name}", _sum(dt.operand("other"), _rescaled(layer))
    for name, layer in layers:
        yield name, dt.maybe(Lookup, _rescaled(layer), dt.constant("table"), name="lookup")
    for name, kind in POOLS.items():
        pooled = _rescaled(dt.apply(kind, dt.operand("x"), name="layer"))
        yield name, dt.maybe(Lookup, pooled, dt.constant("table"), name="lookup")
    for name, kind in MOVES.items():
        yield name, dt.apply(kind, dt.operand("x"), name="layer")
    for count in range(2, MOST_PARTS + 1):
        yield (
            f"concat_{count}",
            dt.apply(Concat, *(dt.operand(f"part_{number}") for number in range(count)), name="layer"),
        )
    yield "add", _sum(dt.operand("a"), dt.operand("b"))
    shifted = [dt.maybe(Offset, dt.operand(name), name=f"{name}_offset") for name in "ab"]
    yield "binary", _rescaled(dt.apply(Binary, *shifted, name="binary"))
    yield "lookup", dt.apply(Lookup, dt.operand("x"), dt.constant("table"))
    parameters = (dt.constant("multiplier"), dt.constant("shift"))
    yield "requantize", dt.maybe(Clip, dt.apply(Requantize, dt.operand("x"), *parameters), name="clip")


def _layers() -> Iterator[tuple[str, dt.Pattern]]:
    """Sums of products, with a bias or without, over a padded image or not."""
    for name, kind in LAYERS.items():
        image = dt.operand("x") if kind is FullyConnected else dt.maybe(Pad, dt.operand("x"), name="pad")
        for stem, more in ((name, (dt.constant("bias"),)), (f"{name}_no_bias", ())):
            yield stem, dt.apply(kind, image, dt.constant("weights"), *more, name="layer")


def _rescaled(inner: dt.Pattern) -> dt.Pattern:
    """Requantised and clipped, each if it is."""
    scaled = dt.maybe(Requantize, inner, dt.constant("multiplier"), dt.constant("shift"), name="requantize")
    return dt.maybe(Clip, scaled, name="clip")


def _sum(left: dt.Pattern, right: dt.Pattern) -> dt.Pattern:
    """A residual addition: both sides brought to one scale (constants have been), and their sum to the result's."""

    def scale(name: str) -> tuple[dt.Pattern, dt.Pattern]:
        return dt.constant(f"{name}_multiplier"), dt.constant(f"{name}_shift")

    sides = ((left, "left"), (right, "right"))
    scaled = (dt.maybe(Requantize, side, *scale(name), name=f"{name}_scaled") for side, name in sides)
    added = dt.apply(Add, *scaled, name="sum")
    return dt.maybe(Clip, dt.apply(Requantize, added, *scale("sum"), name="sum_scaled"), name="sum_clip")


LAUNCH = 4000
"""Cycles a kernel costs beyond its work, for the cost model: some microseconds."""
LANES = 8
"""Products a device makes per cycle, for the cost model; another device has other numbers."""
MOST_GROUP = 256
"""Work-items of a group that every device in use takes."""
ALIGNMENT = 128
"""Bytes values are aligned to on the device: at least its CL_DEVICE_MEM_BASE_ADDR_ALIGN / 8 where vendors' kernels,
which take parts of the memory as buffers, are used."""

_GROUPS = (0, 1, 2, 4, 8, 16, 32, 64)


def default(match: dt.Match) -> dt.Choice:
    """The widest vectors; groups as the device chooses."""
    return {"vector": max(widths(split(match.graph))), "group_channels": 0, "group_columns": 0}


def knobs(match: dt.Match) -> dt.Space:
    """Width of vectors and size of work-groups."""
    region, given = split(match.graph), default(match)

    def problem(choice: dt.Choice) -> str | None:
        """Groups have two sizes or none, and divide the items."""
        whole = {**given, **choice}
        sizes = [int(whole[name]) for name in ("group_channels", "group_columns")]
        if all(sizes) != any(sizes):
            return "group_channels and group_columns are both 0 or neither"
        counts = items(region, int(whole["vector"]))
        if any(size and count % size for size, count in zip(sizes, counts, strict=False)):
            return f"a group of {sizes[0]} by {sizes[1]} does not divide {counts[0]} by {counts[1]} work-items"
        if sizes[0] * sizes[1] > MOST_GROUP:
            return f"a group of {sizes[0] * sizes[1]} work-items is larger than {MOST_GROUP}"
        return None

    first = [int(given["vector"]), *(width for width in widths(region) if width != given["vector"])]
    knob = (
        dt.Knob("vector", tuple(first), "lanes of a vector: channels, or elements, a work-item computes"),
        dt.Knob("group_channels", _GROUPS, "work-items of a group along the channels; 0 as the device chooses"),
        dt.Knob("group_columns", _GROUPS, "work-items of a group along the columns; 0 as the device chooses"),
    )
    return dt.Space(knob, problem)


def kernel_of(match: dt.Match) -> Kernel:
    """The kernel of a match with what is chosen for it; raises Unsupported where there is none."""
    return write_kernel(match.graph, {**default(match), **match.choice})


def _refusal(match: dt.Match) -> str | None:
    try:
        kernel_of(match)
    except UnsupportedRegion as error:
        return str(error)
    return None


KERNEL = dt.Constraint("there must be an OpenCL kernel for it", _refusal, lambda refusal: refusal is None)
NARROW = dt.Constraint(
    "values must be at most 16 bits wide: a sum stays with its layer",
    lambda match: max((match.graph.types[name].dtype.bits for name in match.graph.inputs), default=0),
    lambda bits: bits <= 16,
)


def _pack(match: dt.Match) -> dict[str, Array]:
    constants = kernel_of(match).constants
    return {"constants": constants} if constants.size else {}


def _command(match: dt.Match) -> dt.LibraryCall:
    kernel = kernel_of(match)
    leaves = {value: leaf for leaf, value in match.values.items()}
    result = dt.Pointer("result", "uint8_t")
    others = [*(leaves[value] for value in kernel.operands[1:]), *_pack(match)]
    return dt.LibraryCall(kernel.name, (result, *(dt.Pointer(name, "const uint8_t") for name in others)))


def cycles(match: dt.Match) -> int:
    """A guess that ranks widths of vectors: one vector of products per cycle, but never more than `LANES` products."""
    lanes = int({**default(match), **match.choice}["vector"])
    return LAUNCH + -(-match.work // min(lanes, LANES))


def _offload(name: str, pattern: dt.Pattern) -> dt.Offload:
    return dt.Offload(
        name=name,
        pattern=pattern,
        constraints=(NARROW, KERNEL),
        pack=_pack,
        commands=lambda match, operands: (_command(match),),
        cycles=cycles,
        strided=False,
        knobs=knobs,
        default=default,
    )


def _files(network: dt.Deployed, vendors: Sequence[BinaryKernel]) -> Mapping[str, str]:
    names = {vendor.name for vendor in vendors}
    own = [kernel_of(launch.match) for launch in network.launches if launch.offload not in names]
    used = {launch.offload for launch in network.launches}
    unique = {kernel.name: kernel for kernel in own}
    return made(network, list(unique.values()), [vendor.binary() for vendor in vendors if vendor.name in used])


ENGINE = dt.Engine(
    name="opencl",
    memory="values",
    offloads=tuple(_offload(name, pattern) for name, pattern in patterns()),
    ideal_macs_per_cycle=float(LANES),
    driver=tuple(f"dovetail.targets.opencl:driver/{name}" for name in ("opencl_api.h", "opencl.h", "opencl.c")),
    headers=(HEADER,),
    prepare="opencl_prepare",
    mirror=dt.Mirror("opencl_to_device", "opencl_from_device"),
    made=lambda network: _files(network, ()),
    libraries=("-ldl",),
    environment=environment,
)

TARGET = dt.Target(
    name="opencl",
    sentence="this computer with an OpenCL device",
    core=dt.Core(isa="host"),
    memories=(
        dt.Memory("constants", base=0x10000000, size=256 << 20),
        dt.Memory("values", base=0x40000000, size=256 << 20, alignment=ALIGNMENT),
    ),
    code="constants",
    values="values",
    policies=(dt.Policy("exact", "kernels requantise as TFLite Micro does", ()),),
    engines=(ENGINE,),
)


def with_kernels(base: dt.Target, kernels: Sequence[BinaryKernel]) -> dt.Target:
    """An OpenCL target on which kernels of a vendor's come before those generated.

    Args:
        base: `TARGET`, or what is made from it.
        kernels: the preferred first.
    """
    engine = base.engine("opencl")
    offloads = (*(kernel.offload() for kernel in kernels), *engine.offloads)
    changed = replace(engine, offloads=offloads, made=lambda network: _files(network, kernels))
    return replace(base, engines=tuple(changed if one is engine else one for one in base.engines))


__all__ = ["ENGINE", "TARGET", "BinaryKernel", "with_kernels"]
