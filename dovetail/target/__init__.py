"""The public interface a target is written against."""

from dovetail.documented import document
from dovetail.ir.crop import Tile, crop
from dovetail.ir.layout import Layout, blocked, from_notation, packed
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.target import costs
from dovetail.target.calibration import calibrated
from dovetail.target.chip import (
    VECTOR_BYTES,
    VECTOR_CHANNELS,
    Cache,
    Core,
    CoreInstruction,
    Dma,
    FunctionUnit,
    Memory,
    PairBlock,
    PairBlocks,
    RegisterMemory,
    Streams,
    VectorColumns,
    VectorEnd,
    VectorProducts,
    VectorUnit,
)
from dovetail.target.description import (
    Derived,
    Ordered,
    Ordering,
    OrderRequest,
    Policy,
    Quantisation,
    Recipe,
    Rewrite,
    Target,
)
from dovetail.target.devices import CommandSet, JobRegisters, Rtl, RtlPort
from dovetail.target.engine import (
    Best,
    CommandStream,
    Deployed,
    DeviceModel,
    Engine,
    Joint,
    Launched,
    Macs,
    Mirror,
    Raw,
    Rows,
    StreamDma,
)
from dovetail.target.mesh import CoreClocks, Count, Grid, MacArray, Mesh, Rates, Work, pack_weights
from dovetail.target.offload import (
    Command,
    CValue,
    LibraryCall,
    Offload,
    Operand,
    Pointer,
    Struct,
    results_of,
)
from dovetail.target.pattern import (
    Choice,
    Constraint,
    Knob,
    Leaf,
    Match,
    Pattern,
    Scope,
    Space,
    apply,
    constant,
    maybe,
    one_of,
    operand,
    together,
)

__all__ = [
    "VECTOR_BYTES", "VECTOR_CHANNELS",
    "Best", "CValue", "Cache", "Choice", "Command", "CommandSet", "CommandStream", "Constraint", "Core", "CoreClocks",
    "CoreInstruction", "Count", "Deployed", "Derived", "DeviceModel", "Dma", "Engine", "FunctionUnit", "Grid",
    "JobRegisters", "Joint", "Knob",
    "Launched", "Layout", "Leaf", "LibraryCall", "MacArray", "Macs", "Match", "Memory", "Mesh", "Mirror",
    "Offload", "Operand", "OrderRequest", "Ordered", "Ordering", "PairBlock", "PairBlocks", "Pattern", "Pointer",
    "Policy", "Quantisation", "Rates", "Raw", "Recipe",
    "RegisterMemory", "Rewrite", "Rounding", "Rows", "Rtl", "RtlPort", "Scope", "Space", "StreamDma",
    "Streams",
    "Struct", "Target", "Tile", "VectorColumns", "VectorEnd", "VectorProducts",
    "VectorUnit", "Work", "apply", "blocked", "calibrated", "constant", "costs", "crop", "from_notation",
    "maybe",
    "one_of", "operand", "pack_weights", "packed", "results_of", "together",
]  # fmt: skip

document(__name__)
