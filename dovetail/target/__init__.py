"""The public interface a target is written against."""

from dovetail.graph.crop import Tile, crop
from dovetail.graph.crop import Tile, crop
from dovetail.graph.layout import Layout, blocked
from dovetail.target.description import (
    Command,
    Core,
    DeviceModel,
    Dma,
    Engine,
    Memory,
    Offload,
    Operand,
    Policy,
    Rewrite,
    Target,
)
from dovetail.target.pattern import Constraint, Match, apply, constant, maybe, operand

__all__ = [
    "Command",
    "Constraint",
    "Core",
    "DeviceModel",
    "Dma",
    "Engine",
    "Layout",
    "Match",
    "Memory",
    "Offload",
    "Operand",
    "Policy",
    "Rewrite",
    "Target",
    "Tile",
    "apply",
    "blocked",
    "constant",
    "crop",
    "maybe",
    "operand",
]
