"""Operands in registers that hold several elements: which instruction brings them there, and the steps that use it.

Activations are staged once per block of pixels, for all its channels; weights where they are multiplied. Names of
loops: `part` register of a step's taps, `ti` element in it, the others as in `schedules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.kernels.scheduled.select import meaning, register_memory
from dovetail.loops.index import index_value
from dovetail.loops.text import Procedure
from dovetail.target.description import CoreInstruction, RegisterMemory


@dataclass(frozen=True)
class Staging:
    """Where an instruction wants the taps of a step, and in which order."""

    memory: RegisterMemory
    parts: int
    """Registers one load fills."""
    interleaved: bool
    """Whether neighbouring taps go to different registers."""

    @property
    def vector(self) -> int:
        """Taps one load brings."""
        return self.parts * self.memory.elements


def is_product(instruction: CoreInstruction) -> bool:
    """True for an instruction that adds products up; the others bring operands where it wants them."""
    from exo.API_cursors import ReduceCursor

    return isinstance(_innermost(meaning(instruction)), ReduceCursor)


def staging_of(product: CoreInstruction, instructions: Sequence[CoreInstruction]) -> Staging | None:
    """How a product's operands are staged: by the first instruction that copies into their registers; None for DRAM."""
    by_name = {memory.name: memory for memory in product.memories}
    wanted = [a.mem().__name__ for a in meaning(product).args() if a.is_tensor() and a.mem().__name__ in by_name]
    for instruction in instructions:
        load = None if is_product(instruction) else meaning(instruction)
        home = load.args()[0] if load else None
        if home is None or home.mem().__name__ not in wanted or len(home.shape()) != 2:
            continue
        copy = _innermost(load)
        loops = {name.strip(): int(place == 0) for place, name in enumerate(map(str, _names(copy.idx())))}
        place = index_value(copy.rhs().idx()[0], loops)
        return Staging(by_name[home.mem().__name__], int(home.shape()[0].value()), place == 1)
    return None


def _names(indices: Sequence[Any]) -> list[str]:
    return [index.name() for index in indices]


def _innermost(p: Procedure) -> Any:
    """The last statement of a nest."""
    from exo.API_cursors import ForCursor

    statement = list(p.body())[-1]
    while isinstance(statement, ForCursor):
        statement = list(statement.body())[-1]
    return statement


def stage_activations(q: Procedure, staging: Staging, pixels: int, taps: Sequence[tuple[str, int]]) -> Procedure:
    """Bring the taps of all pixels into registers (as many as it takes: memory, where compilers have no others), in
    front of the loops over channels.

    Args:
        q: loops xi, ob, lane, `taps`, ci, with the activation as the first factor of the product.
        staging: where to.
        pixels: of the block.
        taps: names and lengths of the loops over steps of taps.
    """
    from exo.stdlib.scheduling import expand_dim, fission, lift_alloc, remove_loop, reorder_stmts, simplify

    q = _split_step(q, staging)
    q = _bound(q, "wide", staging, left=True)
    q = expand_dim(q, "wide", pixels, "xi")
    count, place = 1, "0"
    for name, length in reversed(taps):
        place, count = f"{count} * {name} + {place}", count * length
    q = lift_alloc(expand_dim(q, "wide", count, place), "wide", len(taps) + 5)
    q = fission(q, q.find("wide[_] = _").after(), len(taps) + 2)
    q = reorder_stmts(q, q.find("sum = _").expand(0, 1))
    q = reorder_stmts(q, q.find("sum: _").expand(0, 1))
    q = fission(q, q.find_loop(taps[0][0]).after(), 3)
    return simplify(remove_loop(remove_loop(q, "lane"), "ob"))


def stage_weights(q: Procedure, staging: Staging) -> Procedure:
    """Bring the weights of a channel and step into registers, for all pixels.

    Args:
        q: loops xi, lane, part, ti around the product.
        staging: where to.
    """
    from exo.stdlib.scheduling import fission, lift_alloc, remove_loop, reorder_loops

    q = reorder_loops(q, _around(q.find("sum[_] += wide[_] * _"), "xi"))
    q = lift_alloc(_bound(q, "tap", staging, left=False), "tap", 3)
    q = fission(q, q.find("tap[_] = _").after(), 3)
    return remove_loop(q, _around(q.find("tap[_] = _"), "xi"))


def _split_step(q: Procedure, staging: Staging) -> Procedure:
    """The taps of a step register by register."""
    from exo.stdlib.scheduling import divide_loop, reorder_loops

    if not staging.interleaved:
        return divide_loop(q, "ci", staging.memory.elements, ["part", "ti"], perfect=True)
    return reorder_loops(divide_loop(q, "ci", staging.parts, ["ti", "part"], perfect=True), "ti part")


def _bound(q: Procedure, name: str, staging: Staging, left: bool) -> Procedure:
    """A factor of the product as a register's element, by `part` and `ti`."""
    from exo.stdlib.scheduling import bind_expr, expand_dim, set_memory

    value = q.find_loop("ti", many=True)[-1].body()[0].rhs()
    q = bind_expr(q, [value.lhs() if left else value.rhs()], name)
    q = set_memory(q, name, register_memory(staging.memory))
    return expand_dim(expand_dim(q, name, staging.memory.elements, "ti"), name, staging.parts, "part")


def _around(cursor: Any, loop: str) -> Any:
    """The loop of that name around a statement."""
    while not (hasattr(cursor, "hi") and cursor.name() == loop):
        cursor = cursor.parent()
    return cursor
