"""The public interface a target is written against."""

from dovetail.graph.crop import Tile, crop
from dovetail.graph.layout import Layout, blocked
from dovetail.target.description import (
    Command,
    Core,
    CoreInstruction,
    CValue,
    DeviceModel,
    Dma,
    Engine,
    LibraryCall,
    Memory,
    Offload,
    Operand,
    Pointer,
    Policy,
    Quantisation,
    Raw,
    RegisterMemory,
    Rewrite,
    Struct,
    Target,
)
from dovetail.target.knobs import Choice, Knob, Space
from dovetail.target.ordering import Ordered, Ordering, OrderRequest
from dovetail.target.pattern import Constraint, Match, apply, constant, maybe, operand
from dovetail.target.registers import JobRegisters
from dovetail.target.rtl import Rtl, RtlPort

__all__ = [
    "CValue",
    "Choice",
    "Command",
    "Constraint",
    "Core",
    "CoreInstruction",
    "DeviceModel",
    "Dma",
    "Engine",
    "JobRegisters",
    "Knob",
    "Layout",
    "LibraryCall",
    "Match",
    "Memory",
    "Offload",
    "Operand",
    "OrderRequest",
    "Ordered",
    "Ordering",
    "Pointer",
    "Policy",
    "Quantisation",
    "Raw",
    "RegisterMemory",
    "Rewrite",
    "Rtl",
    "RtlPort",
    "Space",
    "Struct",
    "Target",
    "Tile",
    "apply",
    "blocked",
    "constant",
    "crop",
    "maybe",
    "operand",
]
