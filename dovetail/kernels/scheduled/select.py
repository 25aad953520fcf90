"""Use of a core's instructions in the loops of a kernel: where, with which operands, and why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dovetail.errors import TargetError
from dovetail.loops.mismatch import LoopMismatch
from dovetail.loops.replace import replace_first
from dovetail.loops.text import Procedure, exo, procedure
from dovetail.target.description import CoreInstruction, RegisterMemory


@cache
def scope() -> Mapping[str, Any]:
    """Names the texts of algorithms and meanings use: `DRAM`, where everything lies, and `finish`."""
    exo()
    from exo.core.extern import Extern
    from exo.libs.memories import DRAM_STACK

    class Dram(DRAM_STACK):  # type: ignore[misc]  # Exo is untyped
        @classmethod
        def alloc(cls, new_name: str, prim_type: str, shape: list[str], srcinfo: Any) -> str:
            """The declaration of a buffer; vectors are loaded from it."""
            if not shape:
                return f"{prim_type} {new_name};"
            made = str(super().alloc(new_name, prim_type, shape, srcinfo))
            return made if prim_type != "int8_t" else made.replace(";", " __attribute__((aligned(8)));")

    class Finish(Extern):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("finish")

        def typecheck(self, args: list[Any]) -> Any:
            return args[0].type

        def globl(self, prim_type: str) -> str:
            return ""

        def compile(self, args: list[str], prim_type: str) -> str:
            return f"finish({', '.join(args)})"

    Dram.__name__ = "DRAM"
    return {"DRAM": Dram, "finish": Finish()}


@cache
def register_memory(memory: RegisterMemory) -> Any:
    """Registers as a memory of Exo's: an array of them, as compilers keep in registers once indices are constant."""
    exo()
    from exo.core.memory import Memory

    def alloc(cls: Any, new_name: str, prim_type: str, shape: list[str], srcinfo: Any) -> str:
        """The declaration of a buffer."""
        extents = "".join(f"[{extent}]" for extent in shape[:-1] or ["1"])
        return f"{memory.c_type} {new_name}{extents};"

    def window(cls: Any, basetyp: Any, baseptr: str, indices: list[str], strides: list[str], srcinfo: Any) -> str:
        """The first register of an operand."""
        return baseptr + "".join(f"[{index}]" for index in indices[:-1] or ["0"])

    methods: dict[str, Callable[..., Any]] = {
        "alloc": alloc, "window": window, "free": lambda cls, *rest: "", "can_read": lambda cls: False,
    }  # fmt: skip
    return type(memory.name, (Memory,), {name: classmethod(method) for name, method in methods.items()})


@cache
def meaning(instruction: CoreInstruction) -> Procedure:
    """The instruction as Exo knows it; raises TargetError when its meaning is no procedure of its name."""
    call = re.sub(r"\{(\w+)\}", r"&{\1_data}", instruction.c).rstrip().rstrip(";") + ";"
    where = f"core instruction '{instruction.name}'"
    try:
        names = {memory.name: register_memory(memory) for memory in instruction.memories}
        made = procedure(instruction.meaning, {**scope(), **names}, instruction=call)
    except Exception as error:  # Exo has no common base for what is wrong with a text
        reason = str(error).strip().splitlines()
        raise TargetError(
            f"its meaning is no Exo procedure: {reason[-1] if reason else type(error).__name__}",
            where=where,
            hint="mend the text of meaning=: one @proc with windows as in the other core instructions",
        ) from None
    if made.name() != instruction.name:
        raise TargetError(f"its meaning defines '{made.name()}'", where=where, hint="give both the same name")
    return made


@dataclass
class Selection:
    """Replaces statements by instructions, and takes note of what was used and how near the others came."""

    instructions: Sequence[CoreInstruction]
    used: set[str] = field(default_factory=set)
    nearest: dict[str, LoopMismatch] = field(default_factory=dict)

    def __call__(self, p: Procedure) -> Procedure:
        """Use every instruction wherever its meaning is found and its operands are aligned."""
        for instruction in self.instructions:
            found = self._once(p, instruction)
            while found is not None:
                p = found
                found = self._once(p, instruction)
        return p

    def _once(self, p: Procedure, instruction: CoreInstruction) -> Procedure | None:
        found = replace_first(p, meaning(instruction))
        if not isinstance(found, LoopMismatch):
            refusal = _misaligned(found, instruction)
            if not refusal:
                self.used.add(instruction.name)
                return found
            found = LoopMismatch(f"{instruction.name}: {refusal}", 1 << 20)
        known = self.nearest.get(instruction.name)
        if known is None or found.depth > known.depth:
            self.nearest[instruction.name] = found
        return None

    def notes(self) -> tuple[str, ...]:
        """One sentence per instruction that was used nowhere."""
        return tuple(self.nearest[i.name].sentence for i in self.instructions if i.name not in self.used)


def _misaligned(p: Procedure, instruction: CoreInstruction) -> str:
    """What is wrong with where an operand begins; empty for nothing."""
    if instruction.alignment == 1:
        return ""
    shapes = {a.name(): [_number(extent) for extent in a.shape()] for a in p.args() if a.is_tensor()}
    sizes = {"I8": 1, "I32": 4}
    types = {a.name(): sizes[a.type().name] for a in p.args() if a.is_tensor()}
    homes = {a.name(): a.mem() for a in p.args() if a.is_tensor()}
    for buffer in _buffers(p.body()):
        homes[buffer.name()] = buffer.mem()
        shapes[buffer.name()] = [_number(extent) for extent in buffer.shape()] if buffer.is_tensor() else []
        types[buffer.name()] = sizes[buffer.type().name]
    for call in p.find(f"{instruction.name}(_)", many=True):
        for operand in call.args():
            if homes[operand.name()] is not scope()["DRAM"]:
                continue
            step = _granule(operand, shapes) * types[operand.name()]
            if step % instruction.alignment:
                return (
                    f"an operand in {operand.name()} begins at multiples of {step} bytes, "
                    f"the instruction wants {instruction.alignment}"
                )
    return ""


def _granule(window: Any, shapes: Mapping[str, Sequence[int]]) -> int:
    """The largest number of elements that divides every place a window begins at; 0 for the array's beginning alone."""
    from math import gcd

    stride, found = 1, 0
    for index, extent in zip(reversed(window.idx()), reversed(shapes[window.name()]), strict=True):
        low = index[0] if isinstance(index, tuple | list) else index
        found = gcd(found, _divisor(low) * stride)
        stride *= extent
    return found


def _divisor(index: Any) -> int:
    """A number that divides an index whatever its variables are; 0 for the index 0."""
    from math import gcd

    from exo.API_cursors import BinaryOpCursor, LiteralCursor, UnaryMinusCursor

    if isinstance(index, LiteralCursor):
        return int(index.value())
    if isinstance(index, UnaryMinusCursor):
        return _divisor(index.arg())
    if isinstance(index, BinaryOpCursor):
        left, right = _divisor(index.lhs()), _divisor(index.rhs())
        if index.op() in "+-":
            return gcd(left, right)
        if index.op() == "*":
            return left * right
    return 1


def _number(extent: Any) -> int:
    return int(extent.value())


def _buffers(statements: Any) -> list[Any]:
    from exo.API_cursors import AllocCursor, ForCursor, IfCursor

    found = []
    for statement in statements:
        if isinstance(statement, AllocCursor):
            found.append(statement)
        elif isinstance(statement, ForCursor | IfCursor):
            found += _buffers(statement.body())
    return found
