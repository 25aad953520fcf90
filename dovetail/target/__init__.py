"""The public interface a target is written against."""

from dovetail.graph.crop import Tile, crop
from dovetail.graph.crop import Tile, crop
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
    "Match",
    "Memory",
    "Offload",
    "Operand",
    "Policy",
    "Rewrite",
    "Target",
    "Tile",
    "apply",
    "constant",
    "crop",
    "maybe",
    "operand",
]
