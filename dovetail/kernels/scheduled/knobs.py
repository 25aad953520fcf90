"""The block a scheduled kernel computes together, the one with the fewest instructions; where instructions want their
operands, which is read in the text of their meaning as Python (Exo is not needed to know it)."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from dovetail.kernels.kernel import UnsupportedRegion
from dovetail.kernels.scheduled.algorithms import ConvolutionSizes, InteriorPixels, Knobs, Staging
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


def choose_knobs(
    sizes: ConvolutionSizes,
    inside: InteriorPixels,
    vector: int,
    group: int,
    accumulators: int,
    staging: Staging | None,
    room: int,
    straight: bool = False,
    block: tuple[int, int] | None = None,
) -> Knobs:
    """The register block with the fewest instructions, the smallest of equals.

    Args:
        sizes: of the layer.
        inside: its pixels without padding.
        vector: taps one instruction multiplies.
        group: channels one instruction computes.
        accumulators: sums there are registers for.
        staging: how the instruction's operands come into its registers.
        room: bytes of stack for the taps of a block.
        straight: as `Knobs.straight`.
        block: pixels and channels of one instruction that is all taps of a block; None for others.

    Raises:
        Unsupported: the taps of one pixel need more stack.
    """
    gathered = sizes.image[2] % vector != 0
    outputs = -(-sizes.result[2] // group) * group
    needed = _bytes(sizes, gathered or not _all_inside(sizes, inside), staging)
    unroll = 1 if straight else _unroll(sizes, vector, gathered, staging)
    most = accumulators if straight else _sums(accumulators, staging)
    candidates = [
        Knobs(pixels, lanes, vector, group, gathered, unroll, staging, block is not None, straight)
        for pixels in range(1, _MOST_PIXELS + 1)
        for lanes in range(group, min(_MOST_LANES, outputs) + 1, group)
        if pixels * lanes <= most and pixels <= sizes.result[1]
        if pixels * needed <= room and block in (None, (pixels, lanes))
    ]
    if not candidates:
        raise UnsupportedRegion(f"the {sizes.taps} taps of a pixel need {needed} bytes of stack, there are {room}.")
    return min(candidates, key=lambda knobs: (_cost(knobs, sizes, inside), knobs.pixels * knobs.lanes))


def _unroll(sizes: ConvolutionSizes, vector: int, gathered: bool, staging: Staging | None) -> int:
    """The most turns up to `_UNROLL` that divide the loop; of staged operands, whose taps are one loop, two remain."""
    count = (sizes.taps if gathered or staging else sizes.image[2]) // vector
    most = min(_UNROLL, count // 2) if staging else _UNROLL
    return max(number for number in range(1, max(most, 1) + 1) if number == 1 or count % number == 0)


def _sums(accumulators: int, staging: Staging | None) -> int:
    """Most sums of a block: where operands are staged, they and the pointers need most of the registers (of DS-CNN's
    convolutions on Cortex-M4, 2 x 2 sums take 1.20 instructions per product, 4 x 1 1.36, 3 x 2 1.44, 4 x 2 1.75)."""
    return accumulators * 2 // 3 if staging else accumulators * 5 // 4


def _all_inside(sizes: ConvolutionSizes, inside: InteriorPixels) -> bool:
    return (inside.rows, inside.columns) == ((0, sizes.result[0]), (0, sizes.result[1]))


def _bytes(sizes: ConvolutionSizes, gathered: bool, staging: Staging | None) -> int:
    """Bytes of stack for the taps of a pixel: as they are, where some are gathered, and as registers hold them."""
    wide = -(-sizes.taps // staging.vector) * staging.parts * _WORD if staging else 0
    return wide + (-(-sizes.taps // 8) * 8 if gathered else 0)


_INSTRUCTIONS = {
    **{"product": 1, "load": 1, "spilled": 1, "turn": _LOOP, "sum": _START, "partial": _PARTIAL},
    **{"word": _GATHER, "element": _GATHER, "tap": _GUARD, "block": _CALL, "call": _CALL},
}
"""Instructions of each part in `turns_of`; others are not compared."""


def _cost(knobs: Knobs, sizes: ConvolutionSizes, inside: InteriorPixels) -> float:
    """Instructions of the whole image, without requantisation."""
    return sum(_INSTRUCTIONS.get(part, 0) * count for part, count in turns_of(knobs, sizes, inside).items())


def turns_of(knobs: Knobs, sizes: ConvolutionSizes, inside: InteriorPixels) -> dict[str, float]:
    """How often each part of the loops over an image runs."""
    (top, bottom), (left, right) = inside.rows, inside.columns
    rows, columns = sizes.result[:2]
    whole = _all_inside(sizes, inside)
    blocks, rest = divmod(columns, knobs.pixels)
    free = max(right // knobs.pixels - -(-left // knobs.pixels), 0) * max(bottom - top, 0)
    counts: dict[str, float] = {}
    for times, pixels, gathered in (
        (free, knobs.pixels, knobs.gathered),
        (rows * blocks - free, knobs.pixels, True),
        (rows if rest else 0, rest, knobs.gathered or not whole),
    ):
        for part, count in _block(knobs, sizes, pixels, gathered).items() if times else ():
            counts[part] = counts.get(part, 0) + times * count
    return counts


def _block(knobs: Knobs, sizes: ConvolutionSizes, pixels: int, gathered: bool) -> dict[str, float]:
    """How often each part runs for one block of pixels, all channels."""
    blocks = -(-sizes.result[2] // knobs.lanes)
    vectors = -(-sizes.taps // knobs.vector) * blocks
    sums = pixels * knobs.lanes
    by_words, loops = sizes.image[2] % _WORD == 0, not knobs.straight
    return {
        "product": vectors * sums,
        "load": vectors * (pixels + knobs.lanes),
        "spilled": vectors * max(sums + pixels - _REGISTERS, 0) if loops else 0,
        "turn": vectors / knobs.unroll if loops else 0,
        "sum": blocks * sums,
        "partial": blocks * sums if sizes.result[2] % knobs.lanes else 0,
        "word": pixels * sizes.taps / _WORD if gathered and by_words else 0,
        "element": pixels * sizes.taps if gathered and not by_words else 0,
        "tap": pixels * sizes.kernel[0] * sizes.kernel[1] if gathered else 0,
        "wide": pixels * -(-sizes.taps // _WORD) if knobs.staging else 0,
        "block": blocks,
        "call": 1,
    }


def is_product(instruction: CoreInstruction) -> bool:
    """True for an instruction that adds products up; the others bring operands where it wants them.

    Raises:
        TargetError: its meaning is no procedure.
    """
    return isinstance(_innermost(_function(instruction)), ast.AugAssign)


def same_kind(instruction: CoreInstruction, instructions: Sequence[CoreInstruction]) -> list[CoreInstruction]:
    """The instruction and those that do the same with registers of the same memories: copy into them, or multiply."""
    others = [i for i in instructions if i.memories and i.memories == instruction.memories]
    return [instruction, *(i for i in others if is_product(i) == is_product(instruction))]


def block_of(product: CoreInstruction) -> tuple[int, int] | None:
    """Pixels and channels of a product that is all taps of a block, as its sums say; None for other products."""
    shape = _shape(_function(product).args.args[1]) if _sized(product) else []
    return (shape[0], shape[1]) if len(shape) == 2 else None


def _sized(product: CoreInstruction) -> bool:
    """Whether the first operand says how many turns the outermost loop has."""
    kind = _function(product).args.args[0].annotation
    return kind is not None and ast.unparse(kind) == "size"


def operands(instruction: CoreInstruction) -> tuple[str, ...]:
    """The names of an instruction's operands, in the order of its meaning."""
    return tuple(operand.arg for operand in _function(instruction).args.args)


def staging_of(product: CoreInstruction, instructions: Sequence[CoreInstruction]) -> Staging | None:
    """How a product's operands are staged: by the first instruction that copies into their registers; None for DRAM."""
    by_name = {memory.name: memory for memory in product.memories}
    wanted = {_memory(operand) for operand in _function(product).args.args} & by_name.keys()
    for instruction in instructions:
        load = _function(instruction)
        copy, home = _innermost(load), load.args.args[0]
        shape = _shape(home)
        if not isinstance(copy, ast.Assign) or _memory(home) not in wanted or len(shape) != 2:
            continue
        (target,), read = copy.targets, copy.value
        assert isinstance(target, ast.Subscript) and isinstance(read, ast.Subscript)
        loops = {ast.unparse(name): int(place == 0) for place, name in enumerate(_indices(target))}
        return Staging(by_name[_memory(home)], shape[0], _value(_indices(read)[0], loops) == 1)
    return None


def operands_of(product: CoreInstruction) -> tuple[str, str, str]:
    """The names of a product's operands: what it adds to, then the two it multiplies."""
    function = _function(product)
    statement = _innermost(function)
    assert isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Subscript)
    target = ast.unparse(statement.target.value)
    first, second = (operand.arg for operand in function.args.args if operand.arg != target)
    return target, first, second


def extents(instruction: CoreInstruction) -> tuple[int, int]:
    """Output channels and taps of an instruction's meaning: the constant lengths of its last two loops, 1 where it has
    fewer."""
    lengths, statement = [1, 1], _function(instruction).body[-1]
    while isinstance(statement, ast.For):
        assert isinstance(statement.iter, ast.Call)
        end = statement.iter.args[1]
        lengths += [end.value] if isinstance(end, ast.Constant) and isinstance(end.value, int) else []
        statement = statement.body[-1]
    return lengths[-2], lengths[-1]


@cache
def _function(instruction: CoreInstruction) -> ast.FunctionDef:
    try:
        (function,) = (
            node for node in ast.parse(instruction.meaning.strip()).body if isinstance(node, ast.FunctionDef)
        )
    except (SyntaxError, ValueError):
        from dovetail.kernels.scheduled.select import meaning

        meaning(instruction)  # says what is wrong with it
        raise
    return function


def _innermost(function: ast.FunctionDef) -> ast.stmt:
    """The last statement of a nest."""
    statement = function.body[-1]
    while isinstance(statement, ast.For):
        statement = statement.body[-1]
    return statement


def _memory(operand: ast.arg) -> str:
    """The name of the memory an operand lies in: what stands behind @ in its annotation."""
    kind = operand.annotation
    return ast.unparse(kind.right) if isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.MatMult) else "DRAM"


def _shape(operand: ast.arg) -> list[int]:
    """The extents of an operand that are plain numbers."""
    kind = operand.annotation
    kind = kind.left if isinstance(kind, ast.BinOp) else kind
    extents = _indices(kind) if isinstance(kind, ast.Subscript) else []
    return [extent.value for extent in extents if isinstance(extent, ast.Constant) and isinstance(extent.value, int)]


def _indices(read: ast.Subscript) -> list[ast.expr]:
    return list(read.slice.elts) if isinstance(read.slice, ast.Tuple) else [read.slice]


_INDEX: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
"""The operations of an index; a quotient of Exo's is rounded down."""


def _value(index: ast.expr, loops: Mapping[str, int]) -> int | None:
    """An index for the values of its loops; None where it reads anything else."""
    match index:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return loops.get(name)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _value(ast.BinOp(ast.Constant(0), ast.Sub(), inner), loops)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _INDEX:
            one, two = _value(left, loops), _value(right, loops)
            by_nothing = two == 0 and isinstance(op, ast.Div | ast.Mod)
            return None if one is None or two is None or by_nothing else _INDEX[type(op)](one, two)
    return None
