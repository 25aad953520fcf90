"""This computer with an OpenCL device: layers become OpenCL C kernels, the rest of the network runs on the host.

Values stay on the device from one kernel to the next; what host and device need of each other is brought over once
(`dovetail.program.mirror`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dovetail.graph.types import Array
from dovetail.kernels.kernel import Unsupported
from dovetail.kernels.region import split
from dovetail.target import (
    Choice,
    Constraint,
    Core,
    Deployed,
    Engine,
    Knob,
    LibraryCall,
    Match,
    Memory,
    Mirror,
    Offload,
    Pointer,
    Policy,
    Space,
    Target,
)
from dovetail.target.pattern import Pattern
from dovetail.targets.opencl.bodies import items, widths
from dovetail.targets.opencl.kernels import Kernel, write_kernel
from dovetail.targets.opencl.loader import environment
from dovetail.targets.opencl.patterns import patterns
from dovetail.targets.opencl.project import HEADER, made
from dovetail.targets.opencl.vendor import BinaryKernel

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



def default(match: Match) -> Choice:
    """The widest vectors; groups as the device chooses."""
    return {"vector": max(widths(split(match.graph))), "group_channels": 0, "group_columns": 0}


def knobs(match: Match) -> Space:
    """Width of vectors and size of work-groups."""
    region, given = split(match.graph), default(match)

    def problem(choice: Choice) -> str | None:
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
        Knob("vector", tuple(first), "lanes of a vector: channels, or elements, a work-item computes"),
        Knob("group_channels", _GROUPS, "work-items of a group along the channels; 0 as the device chooses"),
        Knob("group_columns", _GROUPS, "work-items of a group along the columns; 0 as the device chooses"),
    )
    return Space(knob, problem)


def kernel_of(match: Match) -> Kernel:
    """The kernel of a match with what is chosen for it; raises Unsupported where there is none."""
    return write_kernel(match.graph, {**default(match), **match.choice})


def _refusal(match: Match) -> str | None:
    try:
        kernel_of(match)
    except Unsupported as error:
        return str(error)
    return None


KERNEL = Constraint("there must be an OpenCL kernel for it", _refusal, lambda refusal: refusal is None)
NARROW = Constraint(
    "values must be at most 16 bits wide: sums stay with what makes them",
    lambda match: max((match.graph.types[name].dtype.bits for name in match.graph.inputs), default=0),
    lambda bits: bits <= 16,
)


def _pack(match: Match) -> dict[str, Array]:
    constants = kernel_of(match).constants
    return {"constants": constants} if constants.size else {}


def _command(match: Match) -> LibraryCall:
    """The call of the C function that starts the kernel."""
    kernel = kernel_of(match)
    leaves = {value: leaf for leaf, value in match.values.items()}
    result = Pointer("result", "uint8_t")
    others = [leaves[value] for value in kernel.operands[1:]] + (["constants"] if kernel.constants.size else [])
    return LibraryCall(kernel.name, (result, *(Pointer(name, "const uint8_t") for name in others)))


def work(match: Match) -> int:
    """Multiply-accumulates of a region, or elements where there are none."""
    types = match.graph.types
    macs = sum(node.operator.macs([types[name] for name in node.inputs]) for node in match.graph.nodes)
    return macs or match.result.elements


def cycles(match: Match) -> int:
    """A guess that ranks widths of vectors: one vector of products per cycle, but never more than `LANES` products."""
    lanes = int({**default(match), **match.choice}["vector"])
    return LAUNCH + -(-work(match) // min(lanes, LANES))


def _offload(name: str, pattern: Pattern) -> Offload:
    return Offload(
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


def _files(network: Deployed, vendors: Sequence[BinaryKernel]) -> Mapping[str, str]:
    """The files made for a network."""
    names = {vendor.name for vendor in vendors}
    own = [kernel_of(launch.match) for launch in network.launches if launch.offload not in names]
    used = {launch.offload for launch in network.launches}
    unique = {kernel.name: kernel for kernel in own}
    return made(network, list(unique.values()), [vendor.binary() for vendor in vendors if vendor.name in used])


_DRIVER = tuple(f"dovetail.targets.opencl:driver/{name}" for name in ("opencl_api.h", "opencl.h", "opencl.c"))

ENGINE = Engine(
    name="opencl",
    memory="values",
    offloads=tuple(_offload(name, pattern) for name, pattern in patterns()),
    ideal_macs_per_cycle=float(LANES),
    driver=_DRIVER,
    headers=(HEADER,),
    prepare="opencl_prepare",
    mirror=Mirror("opencl_to_device", "opencl_from_device"),
    made=lambda network: _files(network, ()),
    libraries=("-ldl",),
    environment=environment,
)

TARGET = Target(
    name="opencl",
    sentence="this computer with an OpenCL device",
    core=Core(isa="host"),
    memories=(
        Memory("constants", base=0x10000000, size=256 << 20),
        Memory("values", base=0x40000000, size=256 << 20, alignment=ALIGNMENT),
    ),
    code="constants",
    values="values",
    policies=(Policy("exact", "kernels requantise as TFLite Micro does", ()),),
    engines=(ENGINE,),
)


def with_kernels(base: Target, kernels: Sequence[BinaryKernel]) -> Target:
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
