"""Patches of an image put together in words: a few pixels at a time, by shifts that are known when the kernel is
written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

from dovetail.kernels.c import Lines, block, code
from dovetail.kernels.window import WindowGeometry

TYPE = "typedef uint32_t __attribute__((may_alias)) patch_word;"
"""The declaration that stands before the statements."""
_MOST_WORDS = 80
"""Words of the pixels put together at a time."""
_MOST_ROWS = 5
"""Rows of a kernel, each with a pointer."""
_LEAST_RUN = 8
"""Bytes side by side: fewer are moved one by one."""
_MOST_KINDS = 2
"""Ways in which rows of the image lie in words, each with statements of its own."""


@dataclass(frozen=True)
class PatchWords:
    """Patches of single bytes, without padding, in rows of whole words."""

    window: WindowGeometry
    pixels: int
    """Pixels put together at a time."""
    kinds: int
    """Ways in which the rows of a patch lie in words, in turns along the rows of the result."""

    @property
    def run(self) -> int:
        """Bytes side by side in the image: a row of the kernel."""
        return self.window.kernel[1] * self.window.channels

    @property
    def patch(self) -> int:
        """Bytes of a pixel of the result."""
        return self.window.kernel[0] * self.run

    @property
    def pitch(self) -> int:
        """Bytes of a row of the image."""
        return self.window.size[1] * self.window.channels

    def lines(self) -> Lines:
        """The statements for an image; `image` is its number, and both arrays begin with a word."""
        (height, _), (rows, columns) = self.window.size, self.window.outputs
        odd = block("} else", self._row(1)) if self.kinds > 1 else []
        even = block("if (row % 2 == 0)", self._row(0))[:-1] if odd else self._row(0)
        return code(
            f"""
            for (int32_t row = 0; row < {rows}; ++row) {{
                const int32_t top = image * {height} + row * {self.window.stride[0]};
                const uint8_t *from = (const uint8_t *)input + top * {self.pitch};
                uint8_t *to = (uint8_t *)output + (image * {rows} + row) * {columns * self.patch};
                @body
            }}
            """,
            body=[*even, *odd],
        )

    def _row(self, kind: int) -> Lines:
        """A row of the result whose number is a kind's: groups of pixels, then those left over byte by byte."""
        rows, step = self.window.kernel[0], self.window.stride[1] * self.window.channels
        groups, left = divmod(self.window.outputs[1], self.pixels)
        places = [kind * self.window.stride[0] * self.pitch + row * self.pitch for row in range(rows)]
        apart = [place % 4 for place in places]
        sources = [
            [(row, apart[row] + pixel * step + byte) for row in range(rows) for byte in range(self.run)]
            for pixel in range(self.pixels)
        ]
        flat = [one for pixel in sources for one in pixel]
        words = [_word(flat[place : place + 4]) for place in range(0, len(flat), 4)]
        pointers = [f"const uint8_t *from_{row} = from + {row * self.pitch - apart[row]};" for row in range(rows)]
        group = [
            *(
                f"const uint32_t {_name(row, word)} = {_at(f'from_{row}', word)};"
                for row, word in sorted({(row, byte // 4) for row, byte in flat})
            ),
            *(f"{_at('to', place)} = {word};" for place, word in enumerate(words)),
            f"to += {4 * len(words)};",
            *(f"from_{row} += {self.pixels * step};" for row in range(rows)),
        ]
        lines = [*pointers, *block(f"for (int32_t group = 0; group < {groups}; ++group)", group)]
        if left:
            lines += code(f"""
                from += {groups * self.pixels * step};
                for (int32_t place = 0; place < {left * self.patch}; ++place) {{
                    const int32_t pixel = place / {self.patch}, tap = place % {self.patch};
                    to[place] = from[pixel * {step} + tap / {self.run} * {self.pitch} + tap % {self.run}];
                }}
            """)
        return lines


def patch_words(window: WindowGeometry) -> PatchWords | None:
    """How patches of bytes are put together in words; None where they lie otherwise, or in too many ways."""
    (rows, columns), channels = window.kernel, window.channels
    step, patch = window.stride[1] * channels, rows * columns * channels
    pitch, result = window.size[1] * channels, window.outputs[1] * patch
    pixels = next(count for count in (1, 2, 4) if count * step % 4 == 0 and count * patch % 4 == 0)
    kinds = 4 // gcd(4, window.stride[0] * pitch)
    whole = result % 4 == 0 and window.size[0] * pitch % 4 == 0
    if window.any_padded or not window.contiguous_columns or window.dilation[0] != 1 or not whole:
        return None
    if columns * channels < _LEAST_RUN or rows > _MOST_ROWS or window.outputs[1] < pixels:
        return None
    if kinds > _MOST_KINDS or pixels * patch > 4 * _MOST_WORDS:
        return None
    return PatchWords(window, pixels, kinds)


def _at(pointer: str, word: int) -> str:
    return f"*(patch_word *)__builtin_assume_aligned({pointer} + {4 * word}, 4)"


def _name(row: int, word: int) -> str:
    return f"w{row}_{word}"


def _word(sources: Sequence[tuple[int, int]]) -> str:
    """A word of the result, of bytes of rows; those side by side in a word of the image move together."""
    parts = []
    for (row, word, _), same in groupby(
        enumerate(sources), lambda one: (one[1][0], one[1][1] // 4, one[1][1] - one[0])
    ):
        places = [(to, byte % 4) for to, (_, byte) in same]
        (to, first), (end, last) = places[0], places[-1]
        text, above = _name(row, word), 3 - last
        if end < 3 and above:  # what lies above goes out at the top
            text, first = f"({text} << {8 * above})", first + above
        text = f"({text} >> {8 * first})" if first else text
        parts.append(f"({text} << {8 * to})" if to else text)
    return " | ".join(parts)
