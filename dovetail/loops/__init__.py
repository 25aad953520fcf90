"""Loop-level lowering for engines that take instructions: algorithm, schedule, instruction selection, trace, tokens."""

from dovetail.documented import document
from dovetail.loops.algorithm import (
    SHIFTS,
    Algorithm,
    Lanes,
    algorithm,
    bias_rows,
    digit_rows,
    digits,
    ones,
    shifts,
)
from dovetail.loops.matching import LoopMismatch, covered, replace_all, replace_first
from dovetail.loops.procedures import Procedure, memory, procedure, stored
from dovetail.loops.resources import Access, Demand, Pool, Span, Tokens, pools, tokens
from dovetail.loops.trace import Allocation, Event, Issue, Release, Window, trace

__all__ = [
    "SHIFTS",
    "Access",
    "Algorithm",
    "Allocation",
    "Demand",
    "Event",
    "Issue",
    "Lanes",
    "LoopMismatch",
    "Pool",
    "Procedure",
    "Release",
    "Span",
    "Tokens",
    "Window",
    "algorithm",
    "bias_rows",
    "covered",
    "digit_rows",
    "digits",
    "memory",
    "ones",
    "pools",
    "procedure",
    "replace_all",
    "replace_first",
    "shifts",
    "stored",
    "tokens",
    "trace",
]

document(__name__)
