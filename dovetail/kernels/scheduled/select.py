"""Use of a core's instructions in the loops of a kernel: where, with which operands, and why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import gcd
from typing import Any

from dovetail.errors import TargetError
from dovetail.kernels.c import Lines
from dovetail.loops.matching import LoopMismatch, replace_first
from dovetail.loops.procedures import Procedure, exo, is_a, procedure, scalar_function, statements
from dovetail.target.chip import CoreInstruction, RegisterMemory


@cache
def scope() -> Mapping[str, Any]:
    """Names the texts of algorithms and meanings use: `DRAM`, where everything lies, and `finish`."""
    exo()
    from exo.libs.memories import DRAM_STACK

    class Dram(DRAM_STACK):  # type: ignore[misc]  # Exo is untyped
        @classmethod
        def alloc(cls, new_name: str, prim_type: str, shape: Lines, srcinfo: Any) -> str:
            if not shape:
                return f"{prim_type} {new_name};"
            made = str(super().alloc(new_name, prim_type, shape, srcinfo))
            return made if prim_type != "int8_t" else made.replace(";", " __attribute__((aligned(8)));")

    Dram.__name__ = "DRAM"
    return {"DRAM": Dram, "finish": scalar_function("finish", "finish({all})")}


@cache
def register_memory(memory: RegisterMemory) -> Any:
    """Registers as a memory of Exo's: an array of them, as compilers keep in registers once indices are constant."""
    exo()
    from exo.core.memory import Memory

    def alloc(cls: Any, new_name: str, prim_type: str, shape: Lines, srcinfo: Any) -> str:
        extents = "".join(f"[{extent}]" for extent in shape[:-1] or ["1"])
        return f"{memory.c_type} {new_name}{extents};"

    def window(cls: Any, basetyp: Any, baseptr: str, indices: Lines, strides: Lines, srcinfo: Any) -> str:
        return baseptr + "".join(f"[{index}]" for index in indices[:-1] or ["0"])

    methods: dict[str, Callable[..., Any]] = {
        "alloc": alloc,
        "window": window,
        "free": lambda cls, *rest: "",
        "can_read": lambda cls: False,
    }
    return type(memory.name, (Memory,), {name: classmethod(method) for name, method in methods.items()})


@cache
def meaning(instruction: CoreInstruction) -> Procedure:
    """The instruction as Exo knows it; raises TargetError when its meaning is no procedure of its name."""
    sizes = re.findall(r"\b(\w+): size\b", instruction.meaning)
    call = re.sub(r"\{(\w+)\}", lambda m: m[0] if m[1] in sizes else f"&{{{m[1]}_data}}", instruction.c)
    call = call.rstrip().rstrip(";") + ";"
    where = f"core instruction '{instruction.name}'"
    try:
        names = {memory.name: register_memory(memory) for memory in instruction.memories}
        meant = procedure(instruction.meaning, {**scope(), **names}, instruction=call)
    except Exception as error:  # Exo has no common base for what is wrong with a text
        reason = str(error).strip().splitlines()
        what = f"its meaning is no Exo procedure: {reason[-1] if reason else type(error).__name__}"
        hint = "mend the text of meaning=: one @proc with windows as in the other core instructions"
        raise TargetError(what, where=where, hint=hint) from None
    if meant.name() != instruction.name:
        raise TargetError(f"its meaning defines '{meant.name()}'", where=where, hint="give both the same name")
    return meant


@dataclass
class Selection:
    """Replaces statements by instructions, and takes note of what was used and how near the others came."""

    instructions: Sequence[CoreInstruction]
    used: set[str] = field(default_factory=set)
    nearest: dict[str, LoopMismatch] = field(default_factory=dict)

    def __call__(self, p: Procedure) -> Procedure:
        """Use every instruction wherever its meaning is found and its operands are aligned."""
        for instruction in self.instructions:
            replaced = self._once(p, instruction)
            while replaced is not None:
                p = replaced
                replaced = self._once(p, instruction)
        return p

    def _once(self, p: Procedure, instruction: CoreInstruction) -> Procedure | None:
        replaced = replace_first(p, meaning(instruction))
        if not isinstance(replaced, LoopMismatch):
            refusal = _misaligned(replaced, instruction)
            if not refusal:
                self.used.add(instruction.name)
                return replaced
            replaced = LoopMismatch(f"{instruction.name}: {refusal}", 1 << 20)
        nearest = self.nearest.get(instruction.name)
        if nearest is None or replaced.depth > nearest.depth:
            self.nearest[instruction.name] = replaced
        return None

    def notes(self) -> tuple[str, ...]:
        """One sentence per instruction that was used nowhere."""
        return tuple(self.nearest[i.name].sentence for i in self.instructions if i.name not in self.used)


def _misaligned(p: Procedure, instruction: CoreInstruction) -> str:
    """The operand that begins at no multiple of the alignment, as a sentence; empty for none."""
    if instruction.alignment == 1:
        return ""
    allocated = (statement for statement in statements(p.body()) if is_a(statement, "Alloc"))
    homes = {home.name(): home for home in (*(a for a in p.args() if a.is_tensor()), *allocated)}
    for call in p.find(f"{instruction.name}(_)", many=True):
        for operand in call.args():
            if not hasattr(operand, "name"):
                continue  # a size
            home = homes[operand.name()]
            if home.mem() is not scope()["DRAM"]:
                continue
            extents = [int(extent.value()) for extent in home.shape()] if home.is_tensor() else []
            step = _granule(operand, extents) * {"I8": 1, "I32": 4}[home.type().name]
            if step % instruction.alignment:
                return (
                    f"an operand in {operand.name()} begins at multiples of {step} bytes, "
                    f"the instruction wants {instruction.alignment}"
                )
    return ""


def _granule(window: Any, extents: Sequence[int]) -> int:
    """The largest number of elements that divides every place a window begins at; 0 for the array's beginning alone."""
    stride, granule = 1, 0
    for index, extent in zip(reversed(window.idx()), reversed(extents), strict=True):
        low = index[0] if isinstance(index, tuple | list) else index
        granule = gcd(granule, _divisor(low) * stride)
        stride *= extent
    return granule


def _divisor(index: Any) -> int:
    """A number that divides an index whatever its variables are; 0 for the index 0."""
    if is_a(index, "Literal"):
        return int(index.value())
    if is_a(index, "UnaryMinus"):
        return _divisor(index.arg())
    if is_a(index, "BinaryOp"):
        left, right = _divisor(index.lhs()), _divisor(index.rhs())
        if index.op() in "+-":
            return gcd(left, right)
        if index.op() == "*":
            return left * right
    return 1
