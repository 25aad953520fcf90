"""The public interface a target is written against."""

from dovetail.graph.crop import Tile, crop
from dovetail.graph.layout import Layout, blocked
from dovetail.target.description import (
    Command,
    Core,
    CoreInstruction,
    DeviceModel,
    Dma,
    Engine,
    Memory,
    Offload,
    Operand,
    Policy,
    Quantisation,
    Raw,
    RegisterMemory,
    Rewrite,
    Target,
)
from dovetail.target.knobs import Choice, Knob, Space
from dovetail.target.ordering import Ordered, Ordering, OrderRequest
from dovetail.target.pattern import Constraint, Match, apply, constant, maybe, operand

__all__ = [
    "Choice",
    "Command",
    "Constraint",
    "Core",
    "CoreInstruction",
    "DeviceModel",
    "Dma",
    "Engine",
    "Knob",
    "Layout",
    "Match",
    "Memory",
    "Offload",
    "Operand",
    "OrderRequest",
    "Ordered",
    "Ordering",
    "Policy",
    "Quantisation",
    "Raw",
    "RegisterMemory",
    "Rewrite",
    "Space",
    "Target",
    "Tile",
    "apply",
    "blocked",
    "constant",
    "crop",
    "maybe",
    "operand",
]
