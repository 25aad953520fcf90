"""The block a scheduled kernel computes together, the one with the fewest instructions; where instructions want their
operands, which is read in the text of their meaning as Python (Exo is not needed to know it)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from dovetail.kernels.kernel import CoreTraits, UnsupportedRegion, summed_turns
from dovetail.kernels.scheduled.algorithms import Knobs, ScheduledLayer, Staging
from dovetail.records import Record
from dovetail.target.chip import CoreInstruction

_MOST_PIXELS = 5
_MOST_LANES = 16
_UNROLL = 8
_LOOP = 3
"""Instructions per turn of the innermost loop besides loads and products: two pointers and a branch."""
_WORD = 4
"""Elements gathered together where the channels of a pixel are a multiple of it."""
_GATHER = 3
"""Instructions per gathered word or element: load, store, and a share of the loop."""
_GUARD = 8
"""Instructions to find out whether a tap is in the image."""
_START = 3
"""Instructions to start a sum and to lay it down."""
_PARTIAL = 4
"""Further instructions per sum where its channel may not exist."""
_REGISTERS = 22
"""Sums and inputs of a block beyond which each takes a register, and so an instruction per turn, from the addresses."""
_CALL = 40
"""Instructions per block of pixels besides its sums."""


def blocks(layer: ScheduledLayer, core: CoreTraits) -> Iterator[tuple[Knobs, int]]:
    """The register block for each product that fits, the preferred product first: that with the fewest instructions,
    the smallest of equals; and the instructions that bring the product an operand.

    Raises:
        Unsupported: the taps of one pixel need more stack.
    """
    for instruction in filter(is_product, core.instructions):
        if lanes_of(instruction):
            continue
        (group, vector), fused = extents(instruction), block_of(instruction)
        staging = staging_of(instruction, core.instructions)
        if fused and (fused[0] > layer.window.outputs[1] or fused[1] > layer.outputs):
            continue
        vector, group = staging.vector if staging else vector, 1 if fused else group
        straight = core.streams is not None and bool(instruction.assembly) and not staging
        alone = fused is not None and staging is None and layer.window.kernel != (1, 1)
        gathered = alone or layer.window.channels % vector != 0
        needed = _bytes(layer, gathered or layer.window.any_padded, staging)
        unroll = 1 if straight else _unroll(layer, vector, gathered, staging)
        brought = 1 if staging else operand_instructions(instruction)
        most = core.accumulators if straight or brought > 1 else _sums(core.accumulators, staging)
        outputs = -(-layer.outputs // group) * group
        candidates = [
            Knobs(pixels, lanes, vector, group, gathered, unroll, staging, fused is not None, straight)
            for pixels in range(1, min(_MOST_PIXELS, layer.window.outputs[1]) + 1)
            for lanes in range(group, min(_MOST_LANES, outputs) + 1, group)
            if pixels * lanes <= most and pixels * needed <= core.room and fused in (None, (pixels, lanes))
        ]
        if not candidates:
            what = f"the {layer.taps} taps of a pixel need {needed} bytes of stack, there are {core.room}."
            raise UnsupportedRegion(what)
        yield min(candidates, key=lambda knobs: (_cost(knobs, layer, brought), knobs.pixels * knobs.lanes)), brought


def _unroll(layer: ScheduledLayer, vector: int, gathered: bool, staging: Staging | None) -> int:
    """The most turns up to `_UNROLL` that divide the loop; of staged operands, whose taps are one loop, two remain."""
    count = (layer.taps if gathered or staging else layer.window.channels) // vector
    most = min(_UNROLL, count // 2) if staging else _UNROLL
    return max(number for number in range(1, max(most, 1) + 1) if number == 1 or count % number == 0)


def _sums(accumulators: int, staging: Staging | None) -> int:
    """Most sums of a block: where operands are staged, they and the pointers need most of the registers (of DS-CNN's
    convolutions on Cortex-M4, 2 x 2 sums take 1.20 instructions per product, 4 x 1 1.36, 3 x 2 1.44, 4 x 2 1.75)."""
    return accumulators * 2 // 3 if staging else accumulators * 5 // 4


def _bytes(layer: ScheduledLayer, gathered: bool, staging: Staging | None) -> int:
    """Bytes of stack for the taps of a pixel: as they are, where some are gathered, and as registers hold them."""
    wide = -(-layer.taps // staging.vector) * staging.parts * _WORD if staging else 0
    return wide + (-(-layer.taps // 8) * 8 if gathered else 0)


_INSTRUCTIONS = {
    **{"product": 1, "load": 1, "spilled": 1, "turn": _LOOP, "sum": _START, "partial": _PARTIAL},
    **{"word": _GATHER, "element": _GATHER, "tap": _GUARD, "block": _CALL, "call": _CALL},
}
"""Instructions of each part in `turns_of`; others are not compared."""


def _cost(knobs: Knobs, layer: ScheduledLayer, brought: int) -> float:
    """Instructions of the whole image, without requantisation."""
    return sum(_INSTRUCTIONS.get(part, 0) * count for part, count in turns_of(knobs, layer, brought).items())


def turns_of(knobs: Knobs, layer: ScheduledLayer, brought: int = 1) -> dict[str, float]:
    """How often each part of the loops over an image runs, where so many instructions bring an operand."""
    window, (rows, columns) = layer.window, layer.window.outputs
    (top, bottom), (left, right) = window.inside(0), window.inside(1)
    whole, rest = divmod(columns, knobs.pixels)
    free = max(right // knobs.pixels - -(-left // knobs.pixels), 0) * max(bottom - top, 0)
    parts = (
        (free, knobs.pixels, knobs.gathered),
        (rows * whole - free, knobs.pixels, True),
        (rows if rest else 0, rest, knobs.gathered or window.any_padded),
    )
    return summed_turns(*(_block(times, knobs, layer, pixels, some, brought) for times, pixels, some in parts if times))


def _block(
    times: int, knobs: Knobs, layer: ScheduledLayer, pixels: int, gathered: bool, brought: int
) -> dict[str, float]:
    """How often each part runs for some blocks of pixels, all channels."""
    blocks = -(-layer.outputs // knobs.lanes)
    vectors = -(-layer.taps // knobs.vector) * blocks
    sums = pixels * knobs.lanes
    by_words, loops = layer.window.channels % _WORD == 0, not knobs.straight
    live = sums + pixels + (knobs.lanes // pixels if brought > 1 else 0)  # compilers put operands together early
    counts = {
        "product": vectors * sums,
        "load": vectors * (pixels + knobs.lanes) * brought,
        "spilled": vectors * max(live - _REGISTERS, 0) if loops else 0,
        "turn": vectors / knobs.unroll if loops else 0,
        "sum": blocks * sums,
        "partial": blocks * sums if layer.outputs % knobs.lanes else 0,
        "word": pixels * layer.taps / _WORD if gathered and by_words else 0,
        "element": pixels * layer.taps if gathered and not by_words else 0,
        "tap": pixels * layer.taps // layer.window.channels if gathered else 0,
        "wide": pixels * -(-layer.taps // _WORD) if knobs.staging else 0,
        "block": blocks,
        "call": 1,
    }
    return {part: times * count for part, count in counts.items()}


Linear = dict[str, int]
"""Variable -> factor; "" -> the number added."""


def linear(node: ast.expr) -> Linear:
    """An index as a sum of multiples of variables."""
    match node:
        case ast.Constant(value=number):
            return {"": int(str(number))}
        case ast.Name(id=name):
            return {name: 1}
        case ast.UnaryOp(operand=inner):
            return {name: -factor for name, factor in linear(inner).items()}
        case ast.BinOp(left=first, op=ast.Mult(), right=second):
            left, right = linear(first), linear(second)
            left, right = (left, right) if set(right) <= {""} else (right, left)
            return {name: factor * right.get("", 0) for name, factor in left.items()}
        case ast.BinOp(left=first, op=ast.Add() | ast.Sub() as op, right=second):
            left, right, sign = linear(first), linear(second), -1 if isinstance(op, ast.Sub) else 1
            return {name: left.get(name, 0) + sign * right.get(name, 0) for name in dict.fromkeys((*left, *right))}
    return {}


class _InstructionText(Record):
    """An instruction's meaning, read."""

    operands: Mapping[str, tuple[str, tuple[int, ...]]]
    """By name, in order: memory ("size" for a size) and the extents that are plain numbers."""
    lengths: tuple[int, ...]
    """Constant lengths of the loops, outermost first."""
    statement: ast.stmt
    """The last within them."""


@cache
def _read(instruction: CoreInstruction) -> _InstructionText:
    try:
        (function,) = (
            node for node in ast.parse(instruction.meaning.strip()).body if isinstance(node, ast.FunctionDef)
        )
    except (SyntaxError, ValueError):
        from dovetail.kernels.scheduled.select import meaning

        meaning(instruction)  # says what is wrong with it
        raise
    lengths, statement = tuple[int, ...](), function.body[-1]
    while isinstance(statement, ast.For):
        assert isinstance(statement.iter, ast.Call)
        lengths += _numbers(statement.iter.args[1:2])
        statement = statement.body[-1]
    return _InstructionText({one.arg: _home(one.annotation) for one in function.args.args}, lengths, statement)


def _home(kind: ast.expr | None) -> tuple[str, tuple[int, ...]]:
    """Memory and extents of an operand's annotation; the memory stands behind @."""
    memory = "DRAM"
    if isinstance(kind, ast.BinOp):
        memory, kind = ast.unparse(kind.right), kind.left
    if isinstance(kind, ast.Subscript):
        return memory, _numbers(_indices(kind))
    return (ast.unparse(kind) if kind else memory), ()


def _numbers(nodes: Iterable[ast.expr]) -> tuple[int, ...]:
    return tuple(one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, int))


def _indices(read: ast.Subscript) -> list[ast.expr]:
    return list(read.slice.elts) if isinstance(read.slice, ast.Tuple) else [read.slice]


def is_product(instruction: CoreInstruction) -> bool:
    """True for an instruction that adds products up; the others bring operands where it wants them.

    Raises:
        TargetError: its meaning is no procedure.
    """
    return isinstance(_read(instruction).statement, ast.AugAssign)


def same_kind(instruction: CoreInstruction, instructions: Sequence[CoreInstruction]) -> list[CoreInstruction]:
    """The instruction and those that do the same with registers of the same memories: copy into them, or multiply."""
    others = [i for i in instructions if i.memories and i.memories == instruction.memories]
    return [instruction, *(i for i in others if is_product(i) == is_product(instruction))]


def block_of(product: CoreInstruction) -> tuple[int, int] | None:
    """Pixels and channels of a product that is all taps of a block, as its sums say; None for other products: the first
    operand says how many turns the outermost loop has."""
    (first, _), (_, shape), *_ = _read(product).operands.values()
    return (shape[0], shape[1]) if first == "size" and len(shape) == 2 else None


def operands(instruction: CoreInstruction) -> tuple[str, ...]:
    """The names of an instruction's operands, in the order of its meaning."""
    return tuple(_read(instruction).operands)


def call_of(instruction: CoreInstruction, values: Sequence[str]) -> str:
    """The statement that executes an instruction: C text of a size, or of a pointer, for each operand."""
    named = dict(zip(operands(instruction), values, strict=True))
    return instruction.c.format(**named).rstrip().rstrip(";") + ";"


def lanes_of(instruction: CoreInstruction) -> int:
    """Neighbouring channels that an instruction multiplies each by itself, over some taps: a meaning with a size, whose
    sums are [channels]; 0 for others."""
    (first, _), *others = _read(instruction).operands.values()
    return others[0][1][0] if first == "size" and others and len(others[0][1]) == 1 else 0


def staging_of(product: CoreInstruction, instructions: Sequence[CoreInstruction]) -> Staging | None:
    """How a product's operands are staged: by the first instruction that copies into their registers; None for DRAM."""
    by_name = {memory.name: memory for memory in product.memories}
    wanted = {memory for memory, _ in _read(product).operands.values()} & by_name.keys()
    for load in map(_read, instructions):
        copy, (memory, shape) = load.statement, next(iter(load.operands.values()))
        if not isinstance(copy, ast.Assign) or memory not in wanted or len(shape) != 2:
            continue
        (target,), read = copy.targets, copy.value
        assert isinstance(target, ast.Subscript) and isinstance(read, ast.Subscript)
        part = ast.unparse(_indices(target)[0])
        return Staging(by_name[memory], shape[0], linear(_indices(read)[0]).get(part) == 1)
    return None


def operands_of(product: CoreInstruction) -> tuple[str, str, str]:
    """The names of a product's operands: what it adds to, then the two it multiplies."""
    statement = _read(product).statement
    assert isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Subscript)
    target = ast.unparse(statement.target.value)
    first, second = (name for name in operands(product) if name != target)
    return target, first, second


_CHOSEN = re.compile(r"#if[^\n]*\n(.*?)#else\n(.*?)#endif", re.DOTALL)
_COPIED = re.compile(r"memcpy\(&\w+, (.*), (\d+)\);")
_OPERATORS = {r"\w\[": 1, r"<<|>>| [-+*&|^] ": 1, r"\(u?int16_t\)": 2, r"\(u?int8_t\)": 1}
"""In C, elements that are read, operators and casts: the instructions each takes."""


@cache
def operand_instructions(product: CoreInstruction) -> int:
    """Instructions that bring each of a product's two operands from memory to its register, as its C says: loads, and
    what puts bytes together or widens them; 1 at least."""
    text = re.sub(r"/\*.*?\*/", "", product.declarations, flags=re.DOTALL)
    text = _CHOSEN.sub(lambda found: found[1] if "asm" in found[1] else found[2], text).partition("{")[2]
    text = re.sub(r"__asm__.*?;\n", "", text, flags=re.DOTALL)
    copied = [(source, int(nbytes)) for source, nbytes in _COPIED.findall(text)]
    whole = [nbytes if product.alignment < nbytes and "aligned" not in source else 1 for source, nbytes in copied]
    count = sum(number * len(re.findall(pattern, _COPIED.sub("", text))) for pattern, number in _OPERATORS.items())
    return max(-(-(count + sum(3 * loads - 2 for loads in whole)) // 2), 1)


def extents(instruction: CoreInstruction) -> tuple[int, int]:
    """Output channels and taps of an instruction's meaning: the constant lengths of its last two loops, 1 where it has
    fewer."""
    *_, channels, taps = (1, 1, *_read(instruction).lengths)
    return channels, taps
