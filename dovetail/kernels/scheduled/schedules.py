"""How the loops are computed, for a core with many registers and perhaps instructions of its own.

A block is `pixels` neighbouring pixels times `lanes` output channels whose sums stay in registers. Every function here
maps a procedure to an equal one: Exo refuses a step that it cannot prove to change nothing.

Names of loops: oy, ox row and column of the result; xi pixel of a block; ob, lane block of channels and channel in it;
ky, kx, c tap; k tap of gathered ones; gx pixel being gathered; cb, ci vector of taps and tap in it; part, ti register
of a step's taps and element in it; px, pl pixel and channel being finished. Where operands lie in registers that hold
several elements, activations are staged once per block of pixels, for all its channels; weights where they are
multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from exo.stdlib.scheduling import (
    bind_expr,
    call_eqv,
    cut_loop,
    delete_buffer,
    divide_loop,
    eliminate_dead_code,
    expand_dim,
    extract_subproc,
    fission,
    inline,
    inline_assign,
    insert_noop_call,
    lift_alloc,
    lift_scope,
    mult_loops,
    remove_loop,
    reorder_loops,
    reorder_stmts,
    rewrite_expr,
    set_memory,
    shift_loop,
    simplify,
    unroll_loop,
)

from dovetail.kernels.c import Lines
from dovetail.kernels.scheduled.algorithms import Knobs, ScheduledLayer, Staging
from dovetail.kernels.scheduled.select import register_memory, scope
from dovetail.loops.matching import LoopMismatch, replace_first
from dovetail.loops.procedures import Procedure, is_a, procedure, statements

_WORD = 4
"""Bytes of a register; the channels of a pixel begin at a multiple of it where their number is one."""

Select = Callable[[Procedure], Procedure]
"""Replaces what the core has instructions for."""


def schedule_conv2d(p: Procedure, layer: ScheduledLayer, knobs: Knobs, select: Select) -> Procedure:
    """Blocks of neighbouring pixels: those that read padding from gathered taps, the others without a branch."""
    p = divide_loop(p, "oc", knobs.lanes, ["ob", "lane"], perfect=True)
    p, parts = _columns(p, p.find_loop("ox"), layer.window.outputs[1], knobs)
    p = simplify(p)
    (top, bottom), (left, right) = layer.window.inside(0), layer.window.inside(1)
    whole = not layer.window.any_padded
    made = []
    for part, _, name in parts:
        p, several = extract_subproc(p, p.forward(part).body()[0], name)
        made.append(several)
    for (part, pixels, name), several in zip(parts, made, strict=True):
        loop = p.forward(part)
        blocks = (-(-left // pixels), right // pixels) if name == "block" or whole else (0, 0)
        if (
            top < bottom and blocks[0] < blocks[1]
        ):  # on their own: where nothing is padding, Exo proves every guard true
            p, free = _inside_blocks(p, loop, (top, bottom), blocks, f"inside_{name}")
            free = block(free, layer, replace(knobs, pixels=pixels), True, select)
            p = call_eqv(p, p.find(f"inside_{name}(_)"), free)
        if _calls(p, name):
            calls = p.find(f"{name}(_)", many=True)
            several = block(several, layer, replace(knobs, pixels=pixels, gathered=True), False, select)
            for call in calls:
                p = call_eqv(p, p.forward(call), several)
    return simplify(p)


def _columns(p: Procedure, loop: Any, count: int, knobs: Knobs) -> tuple[Procedure, list[tuple[Any, int, str]]]:
    """Divide a loop over columns into blocks and what is left; loop, pixels and name of both."""
    whole = count // knobs.pixels * knobs.pixels
    parts = [(loop, knobs.pixels, "block")]
    if whole < count:
        p = cut_loop(p, loop, whole)
        p = shift_loop(p, p.forward(loop).next(), 0)
        parts.append((p.forward(loop).next(), count - whole, "rest"))
    for part, pixels, _ in parts:
        p = divide_loop(p, p.forward(part), pixels, ["ox", "xi"], perfect=True)
    return p, parts


def _inside_blocks(
    p: Procedure, loop: Any, rows: tuple[int, int], blocks: tuple[int, int], name: str
) -> tuple[Procedure, Procedure]:
    """Take the blocks that read no padding out as a procedure of their own."""
    row, place = loop.parent(), 0
    while loop.prev():  # both loops over columns have one name
        loop, place = loop.prev(), place + 1
    p, row = _cut(p, row, *rows)
    p, loop = _cut(p, row.body()[place], *blocks)
    p = simplify(inline(p, loop.body()[0]))
    p, several = extract_subproc(p, p.forward(loop).body()[0], name)
    return p, several


def schedule_fully_connected(p: Procedure, layer: ScheduledLayer, knobs: Knobs, select: Select) -> Procedure:
    """Blocks of pixels and channels."""
    p = divide_loop(p, "oc", knobs.lanes, ["ob", "lane"], perfect=True)
    p, parts = _columns(p, p.find_loop("ox"), layer.window.size[1], knobs)
    p = simplify(p)
    for part, pixels, name in parts:
        p, several = extract_subproc(p, p.forward(part).body()[0], name)
        scheduled = block(several, layer, replace(knobs, pixels=pixels), True, select)
        p = call_eqv(p, p.find(f"{name}(_)"), scheduled)
    return simplify(p)


def _cut(p: Procedure, loop: Any, first: int, end: int) -> tuple[Procedure, Any]:
    """Split a loop in up to three, and give the one over [first, end)."""
    low, high = loop.lo().value(), loop.hi().value()
    if first > low:
        p = cut_loop(p, loop, first)
        loop = p.forward(loop).next()
    if end < high:
        p = cut_loop(p, loop, end)
        loop = p.forward(loop)
    return p, loop


def block(q: Procedure, layer: ScheduledLayer, knobs: Knobs, inside: bool, select: Select) -> Procedure:
    """One block: start its sums, add up the products with as many instructions as there are, finish them.

    Args:
        q: loops xi, ob, lane and those over taps.
        inside: whether all taps are in the image.
    """
    taps = [name for name in ("ky", "kx", "c") if _has_loop(q, name)]
    if inside and len(taps) == 3:
        for _ in ("row", "column"):
            q = eliminate_dead_code(q, q.find_loop("c").body()[1])
    if knobs.gathered:
        q, taps = _gather(q, layer, taps, knobs)
    else:
        q = _read_in_place(q)
    q, taps, rest = _divide_taps(q, layer, taps, knobs)
    staged = knobs.staging is not None and taps[-1] == "cb"
    if staged:
        q, taps = _stage(q, taps, knobs)
    q = reorder_loops(q, "xi ob")
    q = _keep_sums(q, knobs, [taps[0], *rest])
    for nest in ([*taps], rest):
        for tap in nest:
            q = reorder_loops(reorder_loops(q, f"lane {tap}"), f"xi {tap}")
    if knobs.fused and taps == ["cb"]:
        whole = select(q)
        if not _has_products(whole):
            return _unroll(whole, "", knobs)
    if staged and knobs.staging:
        q = stage_weights(q, knobs.staging)
    if knobs.group > 1:
        products = next(loop for loop in _loops(_last(q, taps[-1]).body()) if loop.name() == "lane")
        q = divide_loop(q, products, knobs.group, ["lane", "li"], perfect=True)
    q = select(q)
    if taps[-1] == "cb":
        q = insert_noop_call(q, list(_last(q, "cb").body())[-1].after(), in_order(), [])
    return _unroll(q, taps[-1], knobs)


@cache
def in_order() -> Procedure:
    """Does nothing; in C it keeps the compiler from loading far ahead, for which there are no registers."""
    return procedure("def in_order():\n    pass", {}, instruction="in_order();")


def _read_in_place(q: Procedure) -> Procedure:
    return delete_buffer(inline_assign(q, q.find("value = _")), "value")


def _gather(q: Procedure, layer: ScheduledLayer, taps: Lines, knobs: Knobs) -> tuple[Procedure, Lines]:
    """Copy the taps of each pixel side by side, once for all channels; sum over them in one loop. Gives that loop."""
    room = -(-layer.taps // 8) * 8
    row = layer.window.kernel[1] * layer.window.channels
    place = f"{row} * ky + {layer.window.channels} * kx + c" if len(taps) == 3 else "c"
    q = lift_alloc(expand_dim(q, "value", room, place), "value", len(taps) + 2)
    q = lift_alloc(expand_dim(q, "value", knobs.pixels, "xi"), "value")
    q = fission(q, q.find_loop("c").body()[0].after(), len(taps))
    q = reorder_stmts(q, q.find("sum = _").expand(0, 1))
    q = reorder_stmts(q, q.find("sum: _").expand(0, 1))
    q = fission(q, q.find_loop(taps[0]).after(), 3)
    q = _renamed(remove_loop(remove_loop(q, "lane"), "ob"), "xi", "gx")
    q = _copy_channels(_guard_rows(simplify(q)), layer)
    if len(taps) == 1:
        return q, taps
    q = simplify(mult_loops(q, q.find_loop("kx", many=True)[-1], "kc"))
    q = simplify(mult_loops(q, q.find_loop("ky", many=True)[-1], "k"))
    weight = q.find("weights[_]")
    q = rewrite_expr(q, weight.idx()[1], f"k / {knobs.vector}")
    return rewrite_expr(q, q.find("weights[_]").idx()[3], f"k % {knobs.vector}"), ["k"]


def _guard_rows(q: Procedure) -> Procedure:
    """Ask whether a tap is in the image once per row and once per column of the kernel, not per channel."""
    guard = q.find_loop("c").body()[0]
    if not is_a(guard, "If"):
        return q
    q = lift_scope(q, guard)
    q = lift_scope(q, q.find_loop("kx").body()[0])
    return lift_scope(q, q.find_loop("c").body()[0])


def _copy_channels(q: Procedure, layer: ScheduledLayer) -> Procedure:
    """Copy the channels of a tap as words where they are some."""
    found = replace_first(q, copy(layer.window.channels)) if layer.window.channels % _WORD == 0 else q
    return q if isinstance(found, LoopMismatch) else found


@cache
def copy(count: int) -> Procedure:
    """A copy of whole words, which compilers do not find for bytes of unknown alignment."""
    ends = (f"__builtin_assume_aligned(&{{{name}_data}}, {_WORD})" for name in ("to", "of"))
    text = f"def copy_{count}(to: [i8][{count}] @ DRAM, of: [i8][{count}] @ DRAM):\n"
    text += "    assert stride(to, 0) == 1\n    assert stride(of, 0) == 1\n"
    text += f"    for i in seq(0, {count}):\n        to[i] = of[i]"
    return procedure(text, scope(), instruction=f"__builtin_memcpy({', '.join(ends)}, {count});")


def _divide_taps(q: Procedure, layer: ScheduledLayer, taps: Lines, knobs: Knobs) -> tuple[Procedure, Lines, Lines]:
    """Vectors of taps, and what fills none as a loop of its own; the loops of both."""
    inner = taps[-1]
    loop = q.find_loop(inner, many=True)[-1]
    count = layer.taps if inner == "k" else layer.window.channels
    whole = count // knobs.vector * knobs.vector
    if whole == 0:
        return q, taps, []
    rest = []
    if whole < count:
        q = cut_loop(q, loop, whole)
        last = q.forward(loop).next()
        q = _renamed(shift_loop(q, last, 0), last, "kr")
        rest = ["kr"]
    q = divide_loop(q, q.forward(loop), knobs.vector, ["cb", "ci"], perfect=True)
    return simplify(q), [*taps[:-1], "cb"], rest


def _stage(q: Procedure, taps: Lines, knobs: Knobs) -> tuple[Procedure, Lines]:
    """Bring the activations into the registers instructions want; then all taps are one loop."""
    assert knobs.staging is not None
    lengths = [(tap, int(q.find_loop(tap, many=True)[-1].hi().value())) for tap in taps]
    q = _renamed(stage_activations(q, knobs.staging, knobs.pixels, lengths), "xi", "gx")
    if len(taps) == 1:
        return q, taps
    q = simplify(mult_loops(q, q.find_loop("kx", many=True)[-1], "kc"))
    q = simplify(mult_loops(q, q.find_loop("ky", many=True)[-1], "cb"))
    q = rewrite_expr(q, q.find("weights[_]").idx()[1], "cb")
    return rewrite_expr(q, q.find("sum[_] += _").rhs().lhs().idx()[0], "cb"), ["cb"]


def _keep_sums(q: Procedure, knobs: Knobs, nests: Lines) -> Procedure:
    """The sums of a block side by side; starting, adding and finishing them become loops of their own."""
    q = lift_alloc(expand_dim(q, "sum", knobs.lanes, "lane"), "sum")
    q = lift_alloc(expand_dim(q, "sum", knobs.pixels, "xi"), "sum")
    q = fission(q, q.find("sum[_] = _").after(), 2)
    for nest in nests:
        q = fission(q, q.find_loop(nest, many=True)[-1].after(), 2)
    last = list(q.find_loop("ob").body())[-1]
    q = _renamed(q, last, "px")
    q = _renamed(q, q.find_loop("px").body()[0], "pl")
    return reorder_loops(q, "px pl") if knobs.straight else _lay_down_sums(q, knobs)


def _lay_down_sums(q: Procedure, knobs: Knobs) -> Procedure:
    """Write the finished sums to memory, where the loops that requantise them find them by number."""
    statement = q.find_loop("pl").body()[0]
    depth = 2 + is_a(statement, "If")
    store = statement.body()[0] if depth == 3 else statement
    q = bind_expr(q, [store.rhs().args()[0]], "total")
    q = set_memory(q, "total", q.find("sum: _").mem())
    q = lift_alloc(expand_dim(q, "total", knobs.lanes, "pl"), "total", depth - 1)
    q = lift_alloc(expand_dim(q, "total", knobs.pixels, "px"), "total")
    q = fission(q, q.find("total[_] = _").after(), depth)
    laid = q.find_loop("px")
    q = _renamed(_renamed(q, laid.body()[0], "lane"), laid, "xi")
    return reorder_loops(q, "px pl")


def _unroll(q: Procedure, vectors: str, knobs: Knobs) -> Procedure:
    """Write out the loops over registers, and some turns of the innermost loop over taps."""
    count = _last(q, vectors).hi().value() if vectors == "cb" else 1
    turns = max(number for number in range(1, knobs.unroll + 1) if count % number == 0)
    names = ["lane", "xi", "li", "part", *(["px", "pl"] if knobs.straight else [])]
    if turns > 1:
        q = divide_loop(q, _last(q, vectors), turns, [vectors, "cu"], perfect=True)
        names.append("cu")
    if _has_loop(q, "kr"):
        names.append("kr")
    outside = q.find_loop("ob")
    while loops := [loop for loop in _loops(q.forward(outside).body()) if loop.name() in names]:
        q = unroll_loop(q, loops[-1])
    return simplify(q)


def _renamed(q: Procedure, loop: Any, name: str) -> Procedure:
    """Give a loop another name; Exo has no step of its own for it."""
    loop = q.find_loop(loop) if isinstance(loop, str) else q.forward(loop)
    q = divide_loop(q, loop, 1, [name, "turn"], perfect=True)
    return unroll_loop(q, q.forward(loop).body()[0])


def _has_products(q: Procedure) -> bool:
    """Whether products of registers are left that no instruction took."""
    return any(is_a(s, "Reduce") and s.rhs().lhs().name() == "wide" for s in statements(q.body()))


def _loops(body: Any) -> list[Any]:
    return [statement for statement in statements(body) if is_a(statement, "For")]


def _last(q: Procedure, name: str) -> Any:
    """The last loop of that name: the one of products, behind those that stage operands."""
    return q.find_loop(name, many=True)[-1]


def _has_loop(q: Procedure, name: str) -> bool:
    return any(loop.name() == name for loop in _loops(q.body()))


def _calls(p: Procedure, name: str) -> bool:
    return any(is_a(s, "Call") and s.subproc().name() == name for s in statements(p.body()))


def stage_activations(q: Procedure, staging: Staging, pixels: int, taps: Sequence[tuple[str, int]]) -> Procedure:
    """Bring the taps of all pixels into registers (as many as it takes: memory, where compilers have no others), in
    front of the loops over channels.

    Args:
        q: loops xi, ob, lane, `taps`, ci, with the activation as the first factor of the product.
        staging: where to.
        pixels: of the block.
        taps: names and lengths of the loops over steps of taps.
    """
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
    q = reorder_loops(q, _around(q.find("sum[_] += wide[_] * _"), "xi"))
    q = lift_alloc(_bound(q, "tap", staging, left=False), "tap", 3)
    q = fission(q, q.find("tap[_] = _").after(), 3)
    return remove_loop(q, _around(q.find("tap[_] = _"), "xi"))


def _split_step(q: Procedure, staging: Staging) -> Procedure:
    """The taps of a step register by register."""
    if not staging.interleaved:
        return divide_loop(q, "ci", staging.memory.elements, ["part", "ti"], perfect=True)
    return reorder_loops(divide_loop(q, "ci", staging.parts, ["ti", "part"], perfect=True), "ti part")


def _bound(q: Procedure, name: str, staging: Staging, left: bool) -> Procedure:
    """A factor of the product as a register's element, by `part` and `ti`."""
    value = q.find_loop("ti", many=True)[-1].body()[0].rhs()
    q = bind_expr(q, [value.lhs() if left else value.rhs()], name)
    q = set_memory(q, name, register_memory(staging.memory))
    return expand_dim(expand_dim(q, name, staging.memory.elements, "ti"), name, staging.parts, "part")


def _around(cursor: Any, loop: str) -> Any:
    """The loop of that name around a statement."""
    while not (hasattr(cursor, "hi") and cursor.name() == loop):
        cursor = cursor.parent()
    return cursor
