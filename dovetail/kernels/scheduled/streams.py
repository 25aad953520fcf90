"""Blocks of sums as one stretch of assembly, for cores with loads that move their pointer and loops without a branch.

What is replaced stands in the C text of the scheduled loops: the start of each sum, then loops whose only statements
are calls of one product instruction. Of its two operands the one `held` is loaded once a turn, the one `streamed` just
before its products. The C stays beside the assembly, for this computer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise, product, takewhile
from math import prod

from dovetail.kernels.c import Lines, indent
from dovetail.kernels.scheduled.knobs import Linear, linear, operands_of
from dovetail.kernels.scheduled.printed import IN_ORDER, CBlock, CBody
from dovetail.records import Record
from dovetail.target.chip import CoreInstruction, Streams

_SUMS = re.compile(r"int32_t (\w+)\[[^\]]+\];")
_START = re.compile(r"(\w+)\[([^\[\]]+)\] = (\w+)\[([^\[\]]+)\];")
_PLACE = r"&(\w+)\[([^\[\]]+)\]"
_STEP = range(-2048, 2048)
"""Numbers that an instruction of 4 bytes can add to a pointer."""
_COPIES = 9
"""Most times the innermost loop is written out."""
_MOST_OPERANDS = 30
"""Operands of an asm statement in GCC; those both read and written count twice."""
_SPARE = 2
"""Registers the streamed operand takes turns in, so that no product waits for its load."""
_FIRMWARE = "#if defined(__riscv) && !defined(DOVETAIL_HOST)"


class _ArrayElement(Record):
    """An element: the array, and its index as a sum of multiples of variables."""

    array: str
    index: Linear

    @property
    def offset(self) -> int:
        """The constant part of the index."""
        return self.index.get("", 0)

    @property
    def way(self) -> tuple[str, Set[tuple[str, int]]]:
        """The array, and the variables with their factors: equal for all places of one pointer."""
        return self.array, frozenset((name, factor) for name, factor in self.index.items() if name and factor)

    def factor(self, name: str) -> int:
        """By how much the index grows with a variable."""
        return self.index.get(name, 0)

    def pointer(self, name: str, kind: str, gone: Set[str]) -> str:
        """The statement that points here, where the variables that are gone are 0."""
        terms = [f"{factor} * {n}" for n, factor in self.index.items() if n and n not in gone and factor]
        return f"const {kind} *{name} = &{self.array}[{' + '.join([str(self.offset), *terms])}];"


class _Product(Record):
    """One call of the product instruction."""

    number: int
    """Number of the sum it adds to."""
    held: _ArrayElement
    streamed: _ArrayElement


class _SumLoops(Record):
    """Sums, what each begins with, and the products added to them."""

    sums: str
    starts: Mapping[int, _ArrayElement]
    loops: tuple[tuple[str, int], ...]
    """Variables and turns, the outermost first."""
    products: tuple[_Product, ...]
    """The products of one turn."""

    @property
    def copies(self) -> int:
        """How often the innermost loop is written out."""
        return prod(count for _, count in self.loops[:-1])


class _PointerPath(Record):
    """The way of a pointer through a turn."""

    offsets: tuple[int, ...]
    """Offsets of the elements of a turn, in the order they are loaded."""
    stride: int
    """From one turn to the next."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Step of the pointer behind each load; the last goes on to the next turn."""
        last = self.stride + self.offsets[0] - self.offsets[-1]
        return (*(after - before for before, after in pairwise(self.offsets)), last)


class _CStatements(Record):
    """C statements."""

    before: Lines
    """Before the loop around the block: pointers that go on from block to block."""
    lines: Lines


def with_streams(body: CBody, instruction: CoreInstruction, streams: Streams) -> CBody:
    """The statements of a function, blocks of sums of this instruction's products as assembly where that is possible.

    Args:
        body: of the function.
        instruction: a product, with `assembly`.
        streams: what the core has for it.
    """
    before, inner = _with_streams(body, instruction, streams, "")
    return *before, *inner


def _with_streams(
    body: CBody, instruction: CoreInstruction, streams: Streams, around: str
) -> tuple[Lines, list[str | CBlock]]:
    """The lines before the loop around a body, whose variable is given, and the statements in it."""
    before, made, place = Lines(), list[str | CBlock](), 0
    while place < len(body):
        one = body[place]
        place += 1
        if isinstance(one, CBlock):
            first, inner = _with_streams(one.body, instruction, streams, one.loop[0] if one.loop else "")
            made += [*first, replace(one, body=tuple(inner))]
            continue
        made.append(one)
        starts = list(takewhile(lambda start: isinstance(start, str) and _START.fullmatch(start), body[place:]))
        end = place + len(starts) + 1
        sums = _SUMS.fullmatch(one)
        nest = _nest(sums[1], body[place:end], instruction) if sums else None
        if text := _text(nest, instruction, streams, around) if nest else None:
            before += [_FIRMWARE, *indent(text.before), "#endif"]
            made += [_FIRMWARE, *text.lines, "#else", *body[place:end], "#endif"]
            place = end
    return before, made


def _nest(sums: str, body: CBody, instruction: CoreInstruction) -> _SumLoops | None:
    """Starts, loops and products; None where anything else is there, or a sum has no start or several products."""
    call = re.compile(re.sub(r"\\\{\w+\\\}", lambda _: _PLACE, re.escape(instruction.c)).replace(r"\ ", " "))
    names = re.findall(r"\{(\w+)\}", instruction.c)
    starts: dict[int, _ArrayElement] = {}
    loops: list[tuple[str, int]] = []
    products: list[_Product] = []
    *before, rest = body
    for found in (_START.fullmatch(str(one)) for one in before):
        if found is None or found[1] != sums:
            return None
        starts[_index(found[2]).get("", 0)] = _ArrayElement(found[3], _index(found[4]))
    while isinstance(rest, CBlock) and rest.loop:
        loops.append(rest.loop)
        turn = [one for one in rest.body if one != IN_ORDER]
        rest = turn[0] if len(turn) == 1 and isinstance(turn[0], CBlock) else ""
    for found in (call.fullmatch(str(one)) for one in turn) if loops else ():
        if found is None:
            return None
        parts = zip(names, found.groups()[::2], found.groups()[1::2], strict=True)
        places = {name: _ArrayElement(array, _index(index)) for name, array, index in parts}
        total, held, streamed = (places[name] for name in operands_of(instruction))
        if total.array != sums or set(total.index) > {""}:
            return None
        products.append(_Product(total.offset, held, streamed))
    if not products or sorted(p.number for p in products) != sorted(starts):
        return None
    return _merged(_SumLoops(sums, starts, tuple(loops), tuple(products)))


def _index(text: str) -> Linear:
    return linear(ast.parse(text, mode="eval").body)


def _merged(nest: _SumLoops) -> _SumLoops | None:
    """Loops of one turn dropped, and an inner loop taken into the one around it where every operand walks on evenly;
    None where the places of an operand differ by more than constants."""
    loops = [loop for loop in nest.loops if loop[1] > 1]
    places = [place for one in nest.products for place in (one.held, one.streamed)]
    while len(loops) > 1:
        (outer, count), (inner, turns) = loops[-2:]
        if any(place.factor(outer) != turns * place.factor(inner) for place in places):
            break
        loops[-2:] = [(inner, count * turns)]
    gone = {name for name, _ in nest.loops} - {name for name, _ in loops}

    def left(place: _ArrayElement) -> _ArrayElement:
        return replace(place, index={n: factor for n, factor in place.index.items() if n not in gone})

    products = tuple(_Product(one.number, left(one.held), left(one.streamed)) for one in nest.products)
    even = len({(one.held.way, one.streamed.way) for one in products}) == 1
    return replace(nest, loops=tuple(loops), products=products) if even else None


def _text(nest: _SumLoops, instruction: CoreInstruction, streams: Streams, around: str) -> _CStatements | None:
    """The C with the assembly; None where it does not fit. `around` is the variable of the loop around the block."""
    held, streamed = nest.products[0].held, nest.products[0].streamed
    start = min(nest.starts.values(), key=lambda place: place.offset)
    name = nest.loops[-1][0] if nest.loops else ""
    walks = (
        _PointerPath(tuple(dict.fromkeys(one.held.offset for one in nest.products)), held.factor(name)),
        _PointerPath(tuple(dict.fromkeys(one.streamed.offset for one in nest.products)), streamed.factor(name)),
    )
    spare = min(_SPARE, len(walks[1].offsets))
    registers = [*(f"h{n}" for n in range(len(walks[0].offsets))), *(f"t{n}" for n in range(spare))]
    fits = all(step in _STEP for walk in walks for step in walk.steps) and nest.copies <= _COPIES
    fits &= len(nest.starts) + len(registers) + 2 * 3 <= _MOST_OPERANDS and held.array != streamed.array
    if not fits or {place.array for place in nest.starts.values()} != {start.array}:
        return None
    text = [*_starts(nest, start.offset), *_loops(nest, streams, _body(nest, instruction, streams, walks), walks)]
    ends = sum(streamed.factor(name) * (count - 1) for name, count in nest.loops[:-1])
    ends += walks[1].stride * (nest.loops[-1][1] if nest.loops else 1)
    text += [*_add("streamed", streamed.factor(around) - ends), *_add("start", 4 * start.factor(around))]
    inner = {name for name, _ in nest.loops}
    gone = {around, *inner}
    before = [start.pointer("start", "int32_t", gone), streamed.pointer("streamed", "int8_t", gone)]
    return _CStatements(before, _statements(nest, held.pointer("held", "int8_t", inner), registers, text))


def _starts(nest: _SumLoops, first: int) -> Iterator[str]:
    """Load what the sums begin with, once for all that begin with the same."""
    loaded: dict[int, int] = {}
    for number, place in nest.starts.items():
        if place.offset in loaded:
            yield f"mv %[s{number}], %[s{loaded[place.offset]}]"
        else:
            yield f"lw %[s{number}], {4 * (place.offset - first)}(%[start])"
            loaded[place.offset] = number


def _body(
    nest: _SumLoops, instruction: CoreInstruction, streams: Streams, walks: tuple[_PointerPath, _PointerPath]
) -> Lines:
    """A turn: all of the held operand, then the streamed one a product ahead."""

    def load(register: str, pointer: str, step: int) -> str:
        return streams.load.format(to=f"%[{register}]", pointer=f"%[{pointer}]", step=step)

    held, streamed = walks
    total, first, second = operands_of(instruction)
    spare = min(_SPARE, len(streamed.offsets))
    loads = [load(f"t{number % spare}", "streamed", step) for number, step in enumerate(streamed.steps)]
    lines = [load(f"h{number}", "held", step) for number, step in enumerate(held.steps)] + loads[: spare - 1]
    for number, offset in enumerate(streamed.offsets):
        lines += loads[number + spare - 1 : number + spare]
        for one in nest.products:
            if one.streamed.offset == offset:
                factors = {first: f"%[h{held.offsets.index(one.held.offset)}]", second: f"%[t{number % spare}]"}
                lines.append(instruction.assembly.format(**{total: f"%[s{one.number}]"}, **factors))
    return lines


def _loops(
    nest: _SumLoops, streams: Streams, body: Sequence[str], walks: tuple[_PointerPath, _PointerPath]
) -> Iterator[str]:
    """The innermost loop, once for every turn of those around it, and between them what moves the pointers on."""
    turns = nest.loops[-1][1] if nest.loops else 1
    pointers = (("held", nest.products[0].held, walks[0]), ("streamed", nest.products[0].streamed, walks[1]))
    before: dict[str, int] = {}
    for indices in product(*(range(count) for _, count in nest.loops[:-1])):
        for pointer, place, walk in pointers:
            at = sum(place.factor(name) * index for (name, _), index in zip(nest.loops, indices, strict=False))
            yield from _add(pointer, at - before.get(pointer, at))
            before[pointer] = at + turns * walk.stride
        if turns > 1:
            yield from (f"li %[h0], {turns}", ".balign 4")
            yield streams.repeat.format(turns="%[h0]", length=len(body) + 1)
        yield from body


def _add(pointer: str, step: int) -> Lines:
    if step == 0:
        return []
    if step in _STEP:
        return [f"addi %[{pointer}], %[{pointer}], {step}"]
    return [f"li %[h0], {step}", f"add %[{pointer}], %[{pointer}], %[h0]"]


def _statements(nest: _SumLoops, pointer: str, registers: Sequence[str], text: Sequence[str]) -> Lines:
    """The asm statement, with the registers it uses besides those of the sums."""
    results = [f'[s{number}] "=&r"({nest.sums}[{number}])' for number in sorted(nest.starts)]
    results += [f'[{name}] "=&r"({name})' for name in registers]
    results += [f'[{name}] "+&r"({name})' for name in ("held", "streamed", "start")]
    asm = ["__asm__ volatile(", *indent(f'"{line}\\n"' for line in text)]
    asm += indent([f": {', '.join(results)}", ":", ': "memory");'])
    return ["{", *indent([pointer, f"int32_t {', '.join(registers)};", *asm]), "}"]
