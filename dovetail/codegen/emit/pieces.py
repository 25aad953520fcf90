"""Long lists of commands as loops: the firmware makes the words as it goes, and starts the engine piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from dovetail.codegen.emit.lists import CommandList
from dovetail.errors import ProgramError
from dovetail.kernels.c import Lines, code
from dovetail.records import Record
from dovetail.target.description import Target
from dovetail.target.engine import Engine

PIECE_WORDS = 2048
"""Words of a piece; an engine has room for two, one that it works through and one that is being made."""
_FIRST_WORDS = 256
"""Words of the first piece, for which the engine waits; each further one may have an eighth more, so that an engine
little slower than the loops does not wait for it either."""
_LEAST_BYTES = 64 * 1024
"""Bytes of an engine's lists that are made so: smaller ones stay tables."""
_LEAST_SAVED = 4
"""Times the bytes of the loops' code that the tables must have."""
_CODE_BYTES = 8
"""Bytes of a word in the loops' code."""
_MOST_PERIOD = 64
"""Commands, or loops of them, in a turn."""
_LEAST_TURNS = 3
"""Turns of a loop whose turn is short: two commands always follow some rule."""
_LONG_TURN = 4
"""Items in a turn that is worth a loop of two."""
_MODULUS = 1 << 32

Kind: TypeAlias = "int | _LoopKind"
"""All that turns of one loop have in common: for a command its number of words."""


class _LoopKind(Record):
    """Turns of the same items, in which each word grows by a step of its own."""

    count: int
    body: tuple[Kind, ...]
    steps: tuple[int, ...]
    """For each word of the body's commands, modulo 2**32."""
    words: int
    """Words of all its turns."""


class ListItem(Record):
    """A command, or a loop of commands."""

    kind: Kind
    first: tuple[int, ...]
    """The words of its commands in the first turns."""


def pieced(
    target: Target, lists: Sequence[CommandList], values: int, constants: int = 0
) -> dict[str, tuple[ListItem, ...]]:
    """The lists that the firmware makes as it goes, by name.

    Those of an engine are where `CommandStream.pieces` allows it, its tables are large, the loops' code is small, and
    two pieces have room beside the values. Making words takes the core longer than an engine that does little with
    each word, so tables smaller than the network's constants stay.

    Args:
        target: the machine.
        lists: of all engines.
        values: bytes of the planned values.
        constants: bytes of the network's constants.

    Raises:
        ProgramError: the loops found would not make the list's words.
    """
    found: dict[str, tuple[ListItem, ...]] = {}
    for engine in target.engines:
        own = [one for one in lists if one.engine == engine.name]
        held = 4 * sum(len(one.words) for one in own)
        if held < max(_LEAST_BYTES, constants) or not _may(engine, target, values):
            continue
        made = {one.name: folded(one.commands) for one in own}
        if held >= _LEAST_SAVED * _CODE_BYTES * sum(len(item.first) for items in made.values() for item in items):
            found |= made
    return found


def _may(engine: Engine, target: Target, values: int) -> bool:
    stream = engine.stream
    if stream is None or not stream.pieces or stream.end or engine.dma is not None or engine.success is not None:
        return False
    if engine.memory != target.values or engine.mirror is not None:
        return False
    own = _LEAST_BYTES if target.code == target.values else 0  # what the tables would take there
    return values + 3 * 4 * PIECE_WORDS - own <= target.memory(target.values).size  # the third is for the stack


def folded(commands: Sequence[tuple[int, ...]]) -> tuple[ListItem, ...]:
    """Commands as loops, within one another: the shortest turns first.

    Raises:
        ProgramError: the loops do not make these commands.
    """
    items = [ListItem(len(words), words) for words in commands]
    period = 1
    while period <= min(_MOST_PERIOD, len(items) // 2):
        found = list(_rolled(items, period))
        period = period + 1 if len(found) == len(items) else 1
        items = found
    made = [word for item in items for word in _words(item.kind, item.first)]
    if made != [word % _MODULUS for words in commands for word in words]:
        hint = "report this with the model and the target"
        raise ProgramError("loops of commands do not make the list", where="a list of commands", hint=hint)
    return tuple(items)


def _rolled(items: Sequence[ListItem], period: int) -> Iterator[ListItem]:
    """The items with loops of so many in a turn in place of those that are their turns."""
    place = 0
    while place < len(items):
        count, steps = _turns(items, place, period)
        if count < 2 or (count < _LEAST_TURNS and period < _LONG_TURN):
            yield items[place]
            place += 1
            continue
        body = items[place : place + period]
        kinds = tuple(one.kind for one in body)
        size = count * sum(_size(kind) for kind in kinds)
        yield ListItem(_LoopKind(count, kinds, steps, size), _first(body))
        place += count * period


def _turns(items: Sequence[ListItem], place: int, period: int) -> tuple[int, tuple[int, ...]]:
    """How many turns begin at a place, and what each word grows by."""
    kinds = [one.kind for one in items[place : place + period]]
    before, count = _first(items[place : place + period]), 1
    steps: tuple[int, ...] = ()
    while (at := place + count * period) + period <= len(items):
        if items[at].kind != kinds[0] or [one.kind for one in items[at : at + period]] != kinds:
            break
        now = _first(items[at : at + period])
        grown = tuple((new - old) % _MODULUS for old, new in zip(before, now, strict=True))
        if count > 1 and grown != steps:
            break
        before, steps, count = now, grown, count + 1
    return count, steps


def _first(items: Sequence[ListItem]) -> tuple[int, ...]:
    return tuple(word for one in items for word in one.first)


def _size(kind: Kind) -> int:
    """Words of an item."""
    return kind if isinstance(kind, int) else kind.words


def _held(kind: Kind) -> int:
    """Words of an item in its first turns."""
    return kind if isinstance(kind, int) else len(kind.steps)


def _words(kind: Kind, first: Sequence[int]) -> Iterator[int]:
    """The words of an item."""
    if isinstance(kind, int):
        yield from (word % _MODULUS for word in first)
        return
    for turn in range(kind.count):
        own, at = [word + turn * step for word, step in zip(first, kind.steps, strict=True)], 0
        for inner in kind.body:
            yield from _words(inner, own[at : at + _held(inner)])
            at += _held(inner)


def pieces_source(
    model: str, engines: Sequence[Engine], lists: Sequence[CommandList], made: Mapping[str, tuple[ListItem, ...]]
) -> str:
    """The C file of the lists that are made as it goes: a function for each, which gives the ticket of its last
    piece."""
    listed = [
        (engine, [one.name for one in lists if one.engine == engine.name and one.name in made]) for engine in engines
    ]
    used = [(engine, names) for engine, names in listed if names]
    headers = dict.fromkeys(header for engine, _ in used for header in engine.headers)
    lines = code(
        """
        @headers

        /* Makes the words of lists in two pieces of memory in turn, and starts each piece when it is full. An engine
           works through one while the other is made. */
        """,
        headers=[f'#include "{name}"' for name in (f"{model}_constants.h", *headers)],
    )
    for engine, names in used:
        lines += ["", *_starting(engine)]
        for name in names:
            first = [f"{engine.name}_used = 0u;"] if name == names[0] else []
            lines += ["", *_function(engine, name, made[name], first)]
    return "\n".join([*lines, ""])


def _starting(engine: Engine) -> Lines:
    name = engine.name
    assert engine.stream is not None
    return code(f"""
        static uint32_t {name}_pieces[2][{PIECE_WORDS}];
        static uint32_t {name}_tickets[2];
        static uint32_t {name}_used; /* pieces started in this inference */
        static uint32_t {name}_limit; /* words of the piece that is being made */

        /* Starts the words up to `to`; returns the other piece, when the engine has read it. */
        static uint32_t *{name}_piece(const uint32_t *to)
        {{
            const uint32_t turn = {name}_used % 2u;
            const uint32_t *first = {name}_pieces[turn];
            {name}_tickets[turn] = {engine.stream.start}(first, (uint32_t)(to - first));
            {name}_used++;
            {name}_limit = {name}_limit < {PIECE_WORDS * 8 // 9}u ? {name}_limit + {name}_limit / 8u : {PIECE_WORDS}u;
            if ({name}_used > 1u) {{
                {engine.wait}({name}_tickets[1u - turn]);
            }}
            return {name}_pieces[1u - turn];
        }}

        /* The place of the next words: in the other piece where they are too many for this one. */
        static inline uint32_t *{name}_room(uint32_t *to, uint32_t words)
        {{
            const uint32_t held = (uint32_t)(to - {name}_pieces[{name}_used % 2u]);
            return held > 0u && held + words > {name}_limit ? {name}_piece(to) : to;
        }}
    """)


def _function(engine: Engine, name: str, items: Sequence[ListItem], first: Sequence[str]) -> Lines:
    body = [line for item in items for line in _item(engine.name, item.kind, [(w, ()) for w in item.first], 0, True)]
    return code(
        f"""
        uint32_t {name}(void)
        {{
            @first
            uint32_t *to = {engine.name}_pieces[{engine.name}_used % 2u];
            {engine.name}_limit = {_FIRST_WORDS}u;
            @body
            {engine.name}_piece(to);
            return {engine.name}_tickets[1u - {engine.name}_used % 2u];
        }}
        """,
        first=first,
        body=body,
    )


_Word: TypeAlias = "tuple[int, tuple[int, ...]]"
"""A word: in the first turns, and what it grows by with each loop around, the outermost first."""


def _item(engine: str, kind: Kind, words: Sequence[_Word], depth: int, asks: bool) -> Iterator[str]:
    """An item as C; `asks` where nothing around has asked for room."""
    if asks and (isinstance(kind, int) or kind.words <= _FIRST_WORDS):
        yield f"to = {engine}_room(to, {_size(kind)}u);"
        asks = False
    if isinstance(kind, int):
        yield from (f"to[{place}] = {_word_text(word)};" for place, word in enumerate(words))
        yield f"to += {kind};"
        return
    inside = [(first, (*steps, step)) for (first, steps), step in zip(words, kind.steps, strict=True)]
    yield f"for (uint32_t i{depth} = 0; i{depth} < {kind.count}u; ++i{depth}) {{"
    at = 0
    for inner in kind.body:
        own = inside[at : at + _held(inner)]
        yield from (f"    {line}" for line in _item(engine, inner, own, depth + 1, asks))
        at += _held(inner)
    yield "}"


def _word_text(word: _Word) -> str:
    """A word as C: unsigned, so that what falls wraps."""
    first, steps = word
    text = f"{first % _MODULUS:#x}u"
    for depth, step in enumerate(steps):
        size, sign = min((step, "+"), (_MODULUS - step, "-"))
        text += "" if not step else f" {sign} i{depth}" if size == 1 else f" {sign} {size}u * i{depth}"
    return text
