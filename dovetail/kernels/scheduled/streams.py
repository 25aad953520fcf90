"""Blocks of sums as one stretch of assembly, for cores with loads that move their pointer and loops without a branch.

What is replaced stands in the C text as `write.py` has it: the start of each sum, then loops whose only statements are
calls of one product instruction. The loops stay beside it, for this computer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dovetail.kernels.c import indent
from dovetail.kernels.scheduled.knobs import operands_of
from dovetail.kernels.scheduled.printed import IN_ORDER, Linear, linear
from dovetail.target.description import CoreInstruction, Streams

_LOOP = re.compile(r" *for \(int32_t (\w+) = 0; \1 < (\d+); \1\+\+\) \{")
_SUMS = re.compile(r"( *)int32_t (\w+)\[([^\]]+)\];")
_START = re.compile(r" *(\w+)\[([^\[\]]+)\] = (\w+)\[([^\[\]]+)\];")
_PLACE = r"&(\w+)\[([^\[\]]+)\]"
_STEP = range(-2048, 2048)
"""What an instruction of 4 bytes adds to a pointer."""
_COPIES = 9
"""Most times the innermost loop is written out."""
_MOST_OPERANDS = 30
"""Of an asm statement in GCC, those both read and written counted twice."""
_SPARE = 2
"""Registers the streamed operand takes turns in, so that a product does not wait for its load."""


@dataclass(frozen=True)
class _Place:
    """An element: the array, and its index as a sum of multiples of variables."""

    array: str
    index: Linear


@dataclass(frozen=True)
class _Nest:
    """Sums, what each begins with, and the products added to them."""

    sums: str
    starts: Mapping[int, _Place]
    loops: tuple[tuple[str, int], ...]
    """Variables and turns, the outermost first."""
    products: tuple[tuple[int, _Place, _Place], ...]
    """Of a turn: number of the sum, held and streamed operand."""


def with_streams(lines: Sequence[str], instruction: CoreInstruction, streams: Streams) -> list[str]:
    """The lines of a function, blocks of sums of this instruction's products as assembly where that is possible.

    Args:
        lines: C text, a statement each.
        instruction: a product.
        streams: what the core has for it.
    """
    made: list[str] = []
    place = 0
    while place < len(lines):
        head = _SUMS.fullmatch(lines[place])
        end = _end(lines, place + 1) if head else place
        nest = _nest(head[2], lines[place + 1 : end], instruction) if head else None
        text = _assembly(nest, instruction, streams) if nest else []
        if head and text:
            plain = lines[place + 1 : end]
            made += [lines[place], "#if defined(__riscv) && !defined(DOVETAIL_HOST)"]
            made += [head[1] + line for line in text]
            made += ["#else", *plain, "#endif"]
            place = end
        else:
            made.append(lines[place])
            place += 1
    return made


def _end(lines: Sequence[str], first: int) -> int:
    """Behind the starts and the loops that follow them."""
    while first < len(lines) and _START.fullmatch(lines[first]):
        first += 1
    depth = 0
    for place in range(first, len(lines)):
        depth += lines[place].count("{") - lines[place].count("}")
        if depth == 0:
            return place + 1 if lines[place].strip() == "}" else place
    return first


def _nest(sums: str, lines: Sequence[str], instruction: CoreInstruction) -> _Nest | None:
    """Starts, loops and products, loops that walk on in one stride merged; None where anything else is there."""
    call = re.compile(re.sub(r"\\\{\w+\\\}", lambda _: _PLACE, re.escape(instruction.c)).replace(r"\ ", " "))
    names, starts, loops, products = re.findall(r"\{(\w+)\}", instruction.c), {}, [], []
    for line in lines:
        start, loop, product = _START.fullmatch(line), _LOOP.fullmatch(line), call.fullmatch(line.strip())
        if start and start[1] == sums and not loops:
            starts[_number(start[2])] = _Place(start[3], _index(start[4]))
        elif loop and not products:
            loops.append((loop[1], int(loop[2])))
        elif product and loops:
            found = {n: _Place(product[2 * i + 1], _index(product[2 * i + 2])) for i, n in enumerate(names)}
            target, held, streamed = (found[name] for name in operands_of(instruction))
            if target.array != sums or set(target.index) > {""}:
                return None
            products.append((target.index.get("", 0), held, streamed))
        elif line.strip() not in ("}", IN_ORDER):
            return None
    numbers = [number for number, *_ in products]
    if not products or sorted(numbers) != sorted(starts) or len(set(numbers)) < len(numbers):
        return None
    return _merged(_Nest(sums, starts, tuple(loops), tuple(products)))


def _merged(nest: _Nest) -> _Nest | None:
    """Loops of one turn dropped, and an inner loop taken into the one around it where every operand walks on evenly."""
    loops = [loop for loop in nest.loops if loop[1] > 1]
    places = [place for _, *two in nest.products for place in two]
    while len(loops) > 1:
        (outer, count), (inner, turns) = loops[-2:]
        if any(p.index.get(outer, 0) != turns * p.index.get(inner, 0) for p in places):
            break
        loops[-2:] = [(inner, count * turns)]
    gone = {name for name, _ in nest.loops} - {name for name, _ in loops}

    def left(place: _Place) -> _Place:
        return replace(place, index={n: factor for n, factor in place.index.items() if n not in gone})

    products = tuple((number, left(held), left(streamed)) for number, held, streamed in nest.products)
    return replace(nest, loops=tuple(loops), products=products) if _even(places) else None


def _even(places: Sequence[_Place]) -> bool:
    """True where all places of an array differ by constants only."""
    ways = {(place.array, str(sorted((n, f) for n, f in place.index.items() if n and f))) for place in places}
    return len(ways) == len({place.array for place in places})


def _index(text: str) -> Linear:
    return linear(ast.parse(text, mode="eval").body)


def _number(text: str) -> int:
    return _index(text).get("", 0)


@dataclass(frozen=True)
class _Walk:
    """How the pointer of an array goes through a turn, from loop to loop."""

    offsets: tuple[int, ...]
    """Of the elements of a turn, in the order they are loaded."""
    stride: int
    """Of the innermost loop."""

    @property
    def steps(self) -> tuple[int, ...]:
        """What each load adds to the pointer; the last goes on to the next turn."""
        last = self.stride + self.offsets[0] - self.offsets[-1]
        return (*(after - before for before, after in pairwise(self.offsets)), last)


def _assembly(nest: _Nest, instruction: CoreInstruction, streams: Streams) -> list[str]:
    """The C statements around the assembly; none where it does not fit."""
    held, streamed = ([*dict.fromkeys(p[at].index.get("", 0) for p in nest.products)] for at in (1, 2))
    arrays = [nest.products[0][at] for at in (1, 2)]
    variable, turns = nest.loops[-1] if nest.loops else ("", 1)
    walks = [
        _Walk(tuple(offsets), place.index.get(variable, 0) if variable else 0)
        for offsets, place in zip((held, streamed), arrays, strict=True)
    ]
    bias = {str(place): place for place in nest.starts.values()}
    copies = 1
    for _, count in nest.loops[:-1]:
        copies *= count
    spare = min(_SPARE, len(streamed))
    operands = len(nest.starts) + 2 * 2 + 1 + len(held) + spare
    fits = all(step in _STEP for walk in walks for step in walk.steps) and operands <= _MOST_OPERANDS
    if not fits or copies > _COPIES or arrays[0].array == arrays[1].array or len({p.array for p in bias.values()}) > 1:
        return []
    text = [*_starts(nest)]
    body = _body(nest, instruction, streams, walks, spare)
    for moves in _jumps(nest, arrays, walks, turns):
        text += moves
        if turns > 1:
            text += [f"li %[h0], {turns}", ".balign 4"]
            text.append(streams.repeat.format(turns="%[h0]", length=len(body) + 1))
        text += body
    return _statements(nest, arrays, walks, text, (len(held), spare))


def _starts(nest: _Nest) -> Iterator[str]:
    """Load what the sums begin with, once for all that begin with the same."""
    least = min(place.index.get("", 0) for place in nest.starts.values())
    loaded: dict[int, int] = {}
    for number, place in nest.starts.items():
        offset = place.index.get("", 0) - least
        if offset in loaded:
            yield f"mv %[s{number}], %[s{loaded[offset]}]"
        else:
            yield f"lw %[s{number}], {4 * offset}(%[start])"
            loaded[offset] = number


def _body(
    nest: _Nest, instruction: CoreInstruction, streams: Streams, walks: Sequence[_Walk], spare: int
) -> list[str]:
    """A turn: all of the held operand, then the streamed one a product ahead."""

    def load(register: str, pointer: str, step: int) -> str:
        return streams.load.format(to=f"%[{register}]", pointer=f"%[{pointer}]", step=step)

    target, first, second = operands_of(instruction)
    lines = [load(f"h{number}", "held", step) for number, step in enumerate(walks[0].steps)]
    loads = [load(f"t{number % spare}", "streamed", step) for number, step in enumerate(walks[1].steps)]
    lines += loads[: spare - 1]
    for number, offset in enumerate(walks[1].offsets):
        lines += loads[number + spare - 1 : number + spare]
        for total, held, streamed in nest.products:
            if streamed.index.get("", 0) == offset:
                at = walks[0].offsets.index(held.index.get("", 0))
                named = {target: f"%[s{total}]", first: f"%[h{at}]", second: f"%[t{number % spare}]"}
                lines.append(instruction.assembly.format(**named))
    return lines


def _jumps(nest: _Nest, arrays: Sequence[_Place], walks: Sequence[_Walk], turns: int) -> Iterator[list[str]]:
    """For each copy of the innermost loop, what goes before it: the pointers' way from the end of the copy before."""
    counts = [count for _, count in nest.loops[:-1]]
    before: list[int] | None = None
    for copy in range(_product(counts)):
        indices, rest = [], copy
        for count in reversed(counts):
            indices.insert(0, rest % count)
            rest //= count
        pairs = list(zip(nest.loops[:-1], indices, strict=True))
        at = [sum(place.index.get(name, 0) * index for (name, _), index in pairs) for place in arrays]
        lines: list[str] = []
        if before is not None:
            for pointer, now, then, walk in zip(("held", "streamed"), at, before, walks, strict=True):
                lines += _add(f"%[{pointer}]", now - then - turns * walk.stride)
        before = at
        yield lines


def _add(pointer: str, step: int) -> list[str]:
    if step == 0:
        return []
    if step in _STEP:
        return [f"addi {pointer}, {pointer}, {step}"]
    return [f"li %[h0], {step}", f"add {pointer}, {pointer}, %[h0]"]


def _product(counts: Sequence[int]) -> int:
    found = 1
    for count in counts:
        found *= count
    return found


def _statements(
    nest: _Nest, arrays: Sequence[_Place], walks: Sequence[_Walk], text: Sequence[str], registers: tuple[int, int]
) -> list[str]:
    """Pointers to the first elements, registers, and the asm statement."""
    variables = {name for name, _ in nest.loops}

    def pointer(name: str, kind: str, place: _Place, offset: int) -> str:
        terms = [f"{factor} * {n}" for n, factor in place.index.items() if n and n not in variables and factor]
        return f"const {kind} *{name} = &{place.array}[{' + '.join([str(offset), *terms])}];"

    least = min(nest.starts.values(), key=lambda place: place.index.get("", 0))
    lines = [pointer("start", "int32_t", least, least.index.get("", 0))]
    lines += [
        pointer(name, "int8_t", place, walk.offsets[0])
        for name, place, walk in zip(("held", "streamed"), arrays, walks, strict=True)
    ]
    temporary = [f"h{number}" for number in range(registers[0])] + [f"t{number}" for number in range(registers[1])]
    results = [f'[s{number}] "=&r"({nest.sums}[{number}])' for number in sorted(nest.starts)]
    results += [f'[{name}] "=&r"({name})' for name in temporary]
    results += [f'[{name}] "+&r"({name})' for name in ("held", "streamed")]
    asm = ["__asm__ volatile(", *indent(f'"{line}\\n"' for line in text)]
    asm += indent([f": {', '.join(results)}", ': [start] "r"(start)', ': "memory");'])
    return ["{", *indent([*lines, f"int32_t {', '.join(temporary)};", *asm]), "}"]
