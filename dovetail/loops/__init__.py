"""Loop-level lowering for engines that take instructions: algorithm, schedule, instruction selection, trace, tokens."""

from dovetail.loops.algorithm import Algorithm, Lanes, algorithm
from dovetail.loops.digits import digit_rows, digits, ones
from dovetail.loops.mismatch import LoopMismatch
from dovetail.loops.replace import covered, replace_all, replace_first
from dovetail.loops.staging import Demand, Pool, pools
from dovetail.loops.store import stored
from dovetail.loops.text import Procedure, memory, procedure
from dovetail.loops.tokens import Access, Span, Tokens, tokens
from dovetail.loops.trace import Allocation, Event, Issue, Release, Window, trace

__all__ = [
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
    "covered",
    "digit_rows",
    "digits",
    "memory",
    "ones",
    "pools",
    "procedure",
    "replace_all",
    "replace_first",
    "stored",
    "tokens",
    "trace",
]
