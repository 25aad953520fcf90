"""Rows of bytes put together in words, by shifts and narrow stores that are known when the kernel is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, product
from math import gcd, lcm
from typing import NamedTuple

from dovetail.kernels.c import Lines, block, indent, loop
from dovetail.kernels.window import Pair, WindowGeometry
from dovetail.records import Record

TYPES = {"moved_word": "uint32_t", "moved_half": "uint16_t"}
"""Names that the statements give to types, which alias any other."""
_WORD = 4
_GROUP = 64
"""Bytes of a line that a turn moves."""
_MOST_WORDS = 320
"""Words put together by statements of their own, in all the ways in which rows lie."""
_LEAST_WORDS = 16
"""Words that a turn puts together, as far as there are so many."""
_LEAST_RUN = 2
"""Bytes side by side: single ones are moved one by one."""
_MOST_AT_HAND = 40
"""Words of the source up to which all are loaded first, though a compiler keeps some on the stack."""
_REGISTERS = 16
"""Words that are loaded together where there are more."""


class _WordPart(NamedTuple):
    """Bytes side by side in a word of the source and in one of the result."""

    to: int
    """The first byte in the word of the result."""
    word: int
    first: int
    """The first byte in the word of the source."""
    length: int

    @property
    def stores(self) -> Iterator[tuple[int, int, str]]:
        """Narrow stores: the byte of the word, how many bytes, and C text of what is stored."""
        place, end = self.to, self.to + self.length
        while place < end:
            size = 2 if place % 2 == 0 and end - place >= 2 else 1
            yield place, size, _shifted(self.word, self.to - self.first - place)
            place += size

    def combined(self, loose: set[int]) -> tuple[int, str]:
        """Shifts, and C text of a word with these bytes in their places, and zeros or what stands in `loose`."""
        apart, inside = self.to - self.first, range(self.first, self.first + self.length)
        if {byte + apart for byte in range(_WORD) if byte not in inside} & set(range(_WORD)) <= loose:
            return int(apart != 0), _shifted(self.word, apart)
        above, text = _WORD - inside.stop, f"w{self.word}"
        shifts = ("<<", above), (">>", above + self.first), ("<<", self.to)
        for sign, count in shifts:
            text = f"({text} {sign} {8 * count})" if count else text
        return sum(count != 0 for _, count in shifts), text


def _shifted(word: int, up: int) -> str:
    """C text of a word moved up by so many bytes."""
    return f"w{word}" if up == 0 else f"(w{word} {'<<' if up > 0 else '>>'} {8 * abs(up)})"


class ByteRow(Record):
    """A row of bytes that come from elsewhere in groups, which lie alike in words."""

    group: tuple[int, ...]
    """Places of the first bytes in the source, in bytes behind the start of a word."""
    step: int
    """From what one group reads to what the next does: whole words."""
    size: int
    ahead: int
    """Bytes before the row in its first word."""
    store: int
    """Cycles of a store."""

    @property
    def _head(self) -> int:
        return min(-self.ahead % _WORD, self.size)

    @property
    def _turns(self) -> tuple[int, int]:
        """Groups behind the head, and bytes behind them."""
        return divmod(self.size - self._head, len(self.group))

    @property
    def words(self) -> int:
        """Words that statements are written for."""
        return (self.size if self._turns[0] < 2 else len(self.group)) // _WORD

    @property
    def end(self) -> int:
        """The end of the last word that is read."""
        return max(self._place(byte) for byte in range(self.size)) // _WORD * _WORD + _WORD

    @property
    def cycles(self) -> float:
        """Cycles of the row, about: a load waits a little for its word, and some shifts are free (`iss`, RV32IMC)."""
        length = self.size if self._turns[0] < 2 else self._head + len(self.group)
        lines = self._moved(0, length, set())
        stores, text = sum(not line.startswith("const") for line in lines), "".join(lines)
        count = 1.35 * (len(lines) - stores) + self.store * stores + 0.9 * sum(map(text.count, ("<<", ">>", " | ")))
        return count / length * self.size

    def _place(self, byte: int) -> int:
        turns, rest = divmod(byte, len(self.group))
        return self.group[rest] + turns * self.step

    def lines(self) -> Lines:
        """The statements; `from` and `to` begin the words in which the row's source and result do."""
        group, head, read = len(self.group), self._head, set[int]()
        turns, left = self._turns
        if turns < 2:
            return self._moved(0, self.size, read)
        first = self._moved(head, head + left, read)
        rest = self._moved(head + left, head + group, read)
        rest += [f"to += {group};", f"from += {self.step};"]
        return [*_braced(self._moved(0, head, set())), *_in_turns("turn", first, rest, turns)]

    def _moved(self, start: int, stop: int, read: set[int]) -> Lines:
        """Bytes from one place of the row up to another; `read` are the words that are at hand."""
        places = [(self.ahead + byte, self._place(byte)) for byte in range(start, stop)]
        words = [list(same) for _, same in groupby(places, lambda one: one[0] // _WORD)]
        if len({place // _WORD for _, place in places}) <= _MOST_AT_HAND:
            return self._at_once(words, read)
        lines, some = Lines(), list[list[Pair]]()
        for word in words:
            if len({place // _WORD for part in (*some, word) for _, place in part}) > _REGISTERS:
                lines, some = [*lines, *_braced(self._at_once(some, set()))], []
            some.append(word)
        return [*lines, *_braced(self._at_once(some, set()))]

    def _at_once(self, words: Sequence[Sequence[Pair]], read: set[int]) -> Lines:
        """Words of the result, from the places of their bytes in both; all that they need is loaded first."""
        wanted = sorted({place // _WORD for word in words for _, place in word} - read)
        read.update(wanted)
        lines = [f"const uint32_t w{word} = *({_pointer('moved_word', 'from', _WORD * word)};" for word in wanted]
        for word in words:
            parts = [
                _WordPart((run := list(alike))[0][0] % _WORD, run[0][1] // _WORD, run[0][1] % _WORD, len(run))
                for _, alike in groupby(word, lambda one: (one[1] // _WORD, one[1] - one[0]))
            ]
            lines += _stored(word[0][0] // _WORD * _WORD, parts, self.store)
        return lines


def _pointer(kind: str, base: str, place: int, size: int = _WORD) -> str:
    return f"{kind} *)__builtin_assume_aligned({base} + {place}, {size})"


def _stored(to: int, parts: Sequence[_WordPart], cycles: int) -> Lines:
    """The cheapest statements that store the parts of a word: some in one store, the others over it."""
    whole = sum(part.length for part in parts) == _WORD
    ways = []
    for over in product((False, True), repeat=len(parts)) if whole else [(True,) * len(parts)]:
        narrow = [store for part, apart in zip(parts, over, strict=True) if apart for store in part.stores]
        loose = {byte for place, size, _ in narrow for byte in range(place, place + size)}
        together = [part.combined(loose) for part, apart in zip(parts, over, strict=True) if not apart]
        stores, combined = len(narrow) + bool(together), sum(shifts + 1 for shifts, _ in together) - bool(together)
        cost = cycles * stores + combined + sum(">>" in text for *_, text in narrow)
        ways.append((cost, len(narrow), together, narrow))
    _, _, together, narrow = min(ways, key=lambda way: way[:2])
    lines = []
    if together:
        lines.append(f"*({_pointer('moved_word', 'to', to)} = {' | '.join(text for _, text in together)};")
    for place, size, text in narrow:
        if size == 2:
            lines.append(f"*({_pointer('moved_half', 'to', to + place, 2)} = (uint16_t){text};")
        else:
            lines.append(f"to[{to + place}] = (uint8_t){text};")
    return lines


def _in_turns(variable: str, first: Lines, rest: Lines, turns: int) -> Lines:
    """Statements in turns: `first` and `rest`, and at the end `first` once more."""
    if not first or not turns:
        return [*first, *loop(variable, turns, rest)]
    stop = block(f"if ({variable} == {turns})", ["break;"])
    return block(f"for (int32_t {variable} = 0;; ++{variable})", [*first, *stop, *rest])


class MovedRows(Record):
    """Rows of bytes from an array that begins with a word to another, of which every few lie alike in words."""

    kinds: tuple[ByteRow, ...]
    count: int
    pitches: tuple[int, int]
    """Bytes from a row to the next, in the source and in the result."""

    def within(self, size: int) -> int:
        """How many rows read no word that ends behind the source's `size` bytes."""

        def end(row: int) -> int:
            return row * self.pitches[0] // _WORD * _WORD + self.kinds[row % len(self.kinds)].end

        return next((row for row in range(self.count, 0, -1) if end(row - 1) <= size), 0)

    def lines(self, count: int, behind: Sequence[Lines] = ()) -> Lines:
        """The statements for the first `count` rows, each with those `behind` a row of its kind. `source` and `target`
        begin the first row, and afterwards the next."""
        rows = list[Lines]()
        for number, kind in enumerate(self.kinds):
            ends = [f"source += {self.pitches[0]};", f"target += {self.pitches[1]};"]
            rows.append([*self._row(number, kind), *(behind[number] if behind else ()), *ends])
        turns, left = divmod(count, len(rows))
        first, rest = (list(chain.from_iterable(part)) for part in (rows[:left], rows[left:]))
        return _in_turns("row", first, rest, turns)

    def _row(self, number: int, kind: ByteRow) -> Lines:
        source = f"const uint8_t *from = source - {number * self.pitches[0] % _WORD};"
        return _braced([source, f"uint8_t *to = target - {kind.ahead};", *kind.lines()])

    def begun(self, size: int, step: int) -> tuple[int, Lines]:
        """How many steps of so many bytes of the last row read no word that ends behind the source's `size` bytes, and
        the statements that move them."""
        last = self.count - 1
        kind, start = self.kinds[last % len(self.kinds)], last * self.pitches[0] // _WORD * _WORD
        parts = (replace(kind, size=steps * step) for steps in range(kind.size // step, 0, -1))
        found = next((part for part in parts if start + part.end <= size), None)
        return (found.size // step, self._row(last, found)) if found and self.within(size) == last else (0, Lines())


def filled(ahead: int, start: int, count: int, value: int) -> Lines:
    """Stores of a byte from `target + start` on; `target` is so many bytes `ahead` of the start of its word."""
    lines, place = Lines(), start
    while place < start + count:
        size = next(size for size in (4, 2, 1) if (ahead + place) % size == 0 and place + size <= start + count)
        number = int.from_bytes(bytes([value]) * size, "little")
        if size == 1:
            lines.append(f"target[{place}] = {number};")
        else:
            kind = "moved_word" if size == _WORD else "moved_half"
            lines.append(f"*({_pointer(kind, 'target', place, size)} = {number}u;")
        place += size
    return lines


def bytes_moved(target: str, source: str, size: int) -> Lines:
    """Statements that move bytes one by one, eight of them loaded before they are stored: a load's byte is there a
    cycle later. `target` and `source` are C text of pointers."""

    def some(start: int, stop: int) -> Lines:
        loaded = [f"const uint8_t b{at} = from[{at}];" for at in range(start, stop)]
        return _braced([*loaded, *(f"to[{at}] = b{at};" for at in range(start, stop))])

    pointers = [f"uint8_t *to = (uint8_t *)({target});", f"const uint8_t *from = (const uint8_t *)({source});"]
    turns, left = divmod(size, 16)
    whole = [*some(0, 8), *some(8, 16), "from += 16;", "to += 16;"]
    return [*pointers, *loop("turn", turns, whole), *some(0, min(left, 8)), *some(8, left)]


def pad_rows(start: int, count: int, size: int, pitch: int, store: int) -> MovedRows:
    """Rows of `size` bytes one behind the other, moved to places `pitch` apart, the first at `start`; a store takes
    `store` cycles."""
    kinds = range(min(count, lcm(_WORD // gcd(_WORD, size), _WORD // gcd(_WORD, pitch))))
    made = tuple(
        ByteRow(
            tuple(range(first := kind * size % _WORD, first + _GROUP)),
            _GROUP,
            size,
            (start + kind * pitch) % _WORD,
            store,
        )
        for kind in kinds
    )
    return MovedRows(made, count, (size, pitch))


def patch_rows(window: WindowGeometry, store: int) -> MovedRows | None:
    """Rows of patches of single bytes; None where there is padding or other distance between taps, or too much C.
    A store takes `store` cycles."""
    (rows, columns), channels = window.kernel, window.channels
    run, pitch, step = columns * channels, window.size[1] * channels, window.stride[1] * channels
    size, down = window.outputs[1] * rows * run, window.stride[0] * pitch
    pixels = next(count for count in (1, 2, 4) if count * step % _WORD == 0 and count * rows * run % _WORD == 0)
    while pixels * rows * run < _LEAST_WORDS * _WORD and 2 * pixels <= window.outputs[1]:
        pixels *= 2
    kinds = range(min(window.outputs[0], lcm(_WORD // gcd(_WORD, down), _WORD // gcd(_WORD, size))))
    images = window.batch == 1 or (window.size[0] * pitch % _WORD == 0 and window.outputs[0] * size % _WORD == 0)
    if window.any_padded or not window.contiguous_columns or window.dilation[0] != 1 or not images:
        return None
    taps = [pixel * step + row * pitch + byte for pixel in range(pixels) for row in range(rows) for byte in range(run)]
    made = tuple(
        ByteRow(tuple(kind * down % _WORD + tap for tap in taps), pixels * step, size, kind * size % _WORD, store)
        for kind in kinds
    )
    fits = run >= _LEAST_RUN and sum(row.words for row in made) <= _MOST_WORDS
    return MovedRows(made, window.outputs[0], (down, size)) if fits else None


def _braced(lines: Lines) -> Lines:
    return ["{", *indent(lines), "}"] if lines else []
