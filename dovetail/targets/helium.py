"""Helium, the vector extension of Arm's M profile (MVE), for integers: bodies of the functions of `VectorUnit`.

Loads, multiplications and other instructions are written in turn: those of different kinds overlap (sim/helium.py).
VMLADAV adds 16 products of bytes to a register with an even number. Of a channel's sum VQRDMULH is the upper half of
the doubled product, rounded halves up, and VRSHL rounds halves up: TFLite rounds halves away from zero, which is the
same of what is not negative, and of negative numbers of one less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.target import VECTOR_BYTES, VECTOR_CHANNELS, VectorColumns, VectorEnd, VectorProducts, VectorUnit

_REACH = 127
"""Bytes before and behind a pointer that a load of bytes reaches."""
_UNROLLED = 4
"""Vectors of a row up to which all are written out."""


def _asm(lines: Sequence[str], outputs: str, inputs: str = "") -> str:
    """An asm statement that may change all vectors."""
    text = "".join(f'        "{line}\\n\\t"\n' for line in lines)
    clobbers = ", ".join(f'"q{number}"' for number in range(8))
    return f"""\
    __asm__ volatile(
{text}        : {outputs} : {inputs} : "lr", "cc", "memory", {clobbers});
"""


def products(block: VectorProducts) -> str:
    """Vectors of pixels in q0 to q2, of weights in q3 and q4."""
    pixels, channels = block.pixels, block.channels
    sums = [f"sum_{pixel}_{channel}" for pixel in range(pixels) for channel in range(channels)]
    pointers = ["from", *(f"from_{pixel}" for pixel in range(1, pixels))]
    tail = block.taps % VECTOR_BYTES if block.exact else 0
    rolled = block.rows > 1
    lines = [f"mov lr, #{tail}", "vctp.8 lr"] if tail else []
    row = list(_row(block, bool(tail), not rolled))
    if rolled:
        gap = block.row - block.steps * VECTOR_BYTES
        moves = [f"add{'w' if gap > 0 else ''} %[{name}], %[{name}], #{gap}" for name in pointers] if gap > 0 else []
        moves += [f"subw %[{name}], %[{name}], #{-gap}" for name in pointers] if gap < 0 else []
        row = ["2:", *row, *moves, "subs %[rows], %[rows], #1", "bne 2b"]
    outputs = [*(f'[{name}] "{"+" if rolled else "=&"}Te"({name})' for name in sums)]
    outputs += [f'[{name}] "+&r"({name})' for name in [*pointers, "weights", *(["rows"] if rolled else [])]]
    begin = "".join(
        f"    const int8_t *{name} = from + {n * block.distance};\n" for n, name in enumerate(pointers) if n
    )
    begin += f"    int32_t {', '.join(f'{name} = 0' if rolled else name for name in sums)};\n"
    begin += f"    int32_t rows = {block.rows};\n" if rolled else ""
    places = (pixel * block.sums + channel for pixel in range(pixels) for channel in range(channels))
    stores = "".join(f"    sums[{place}] = {name};\n" for place, name in zip(places, sums, strict=True))
    return begin + _asm([*lines, *row], ", ".join(outputs)) + stores


def _row(block: VectorProducts, tail: bool, fresh: bool) -> Iterator[str]:
    """The vectors of a row; `fresh` where sums begin with it."""
    steps = block.steps
    if steps == 1:
        yield from _step(block, tail, fresh, False, True)
        return
    yield from _loads(block, False)
    if steps <= _UNROLLED:
        for step in range(steps):
            last = step == steps - 1
            yield from _step(block, tail and last, fresh and step == 0, not last, False, tail and step == steps - 2)
        return
    begun = 1 if fresh else 0
    yield from _step(block, False, True, True, False) if fresh else ()
    ahead = 1 if tail else 0
    turns = steps - begun - 1 - ahead
    yield from (f"mov lr, #{turns}", "dls lr, lr", "1:")
    yield from _step(block, False, False, True, False)
    yield "le lr, 1b"
    yield from _step(block, False, False, True, False, True) if tail else ()
    yield from _step(block, tail, False, False, False)


def _loads(block: VectorProducts, tail: bool) -> Iterator[str]:
    """The vectors a step begins with."""
    yield from _pixel(0, tail)
    yield "vldrb.8 q3, [%[weights]], #16"


def _pixel(number: int, tail: bool) -> Iterator[str]:
    yield from ["vpst"] if tail else []
    yield f"vldrb{'t' if tail else ''}.8 q{number}, [%[from{f'_{number}' if number else ''}]], #16"


def _step(
    block: VectorProducts, tail: bool, fresh: bool, ahead: bool, begins: bool, next_tail: bool = False
) -> Iterator[str]:
    """One vector of each pixel and channel. `begins` where nothing is loaded yet; `ahead` where the next step's first
    vectors are loaded here."""
    pixels, channels = block.pixels, block.channels
    if begins:
        yield from _loads(block, tail)
    for channel in range(channels):
        here = 3 + channel % 2
        for pixel in range(pixels):
            yield f"vmladav{'' if fresh else 'a'}.s8 %[sum_{pixel}_{channel}], q{pixel}, q{here}"
            if channel == 0 and pixel + 1 < pixels:
                yield from _pixel(pixel + 1, tail)
            elif pixel == (pixels - 1 if channel == 0 else 0) and channel + 1 < channels:
                yield f"vldrb.8 q{3 + (channel + 1) % 2}, [%[weights]], #16"
            elif ahead and channel == channels - 1 and pixel == 0:
                yield from _pixel(0, next_tail)
    if ahead:
        yield "vldrb.8 q3, [%[weights]], #16"


def columns(block: VectorColumns) -> str:
    """Weights in q0, channels of both pixels in q1 and q2; even channels' sums in q4 and q6, odd ones' in q5 and q7."""
    rows, taps = block.kernel
    places = [(row * block.row + tap * block.column) for row in range(rows) for tap in range(taps)]
    base, lines = 0, list[str]()

    def load(register: int, offset: int) -> str:
        return f"vldrb.s16 q{register}, [%[from], #{offset - base}]"

    weights = [f"vldrb.s16 q0, [%[weights], #{VECTOR_CHANNELS * n - _REACH}]" for n in range(len(places))]
    for number, place in enumerate(places):
        if number == 0 or place + block.distance - base > _REACH:
            move = place + _REACH - base
            lines += [f"addw %[from], %[from], #{move}"] if move else []
            base += move
        if number == 0:
            lines += [weights[0], load(1, place), "vmullb.s16 q4, q1, q0", load(2, place + block.distance)]
            lines += ["vmullt.s16 q5, q1, q0", "vmullb.s16 q6, q2, q0", "vmullt.s16 q7, q2, q0"]
            continue
        lines += [weights[number], load(1, place), "vmullb.s16 q3, q1, q0", load(2, place + block.distance)]
        lines += ["vmullt.s16 q1, q1, q0", "vadd.i32 q4, q4, q3", "vmullb.s16 q3, q2, q0", "vadd.i32 q5, q5, q1"]
        lines += ["vmullt.s16 q2, q2, q0", "vadd.i32 q6, q6, q3", "vadd.i32 q7, q7, q2"]
    lines += [f"vstrw.32 q{4 + number}, [%[sums], #{VECTOR_BYTES * number}]" for number in range(4)]
    inputs = f'[weights] "l"(weights + {_REACH}), [sums] "r"(sums)'
    return _asm(lines, '[from] "+&l"(from)', inputs)


def end(block: VectorEnd) -> str:
    """Four sums at a time; eight are put together by narrowing, which limits them."""
    whole, rest = divmod(block.channels, VECTOR_CHANNELS)
    rounded = [] if block.rectified else ["vand q2, q0, q1", "vshr.s32 q2, q2, #31", "vqadd.s32 q0, q0, q2"]
    one = ["vldrw.32 q0, [%[sums]], #16", "vldrw.32 q1, [%[numbers]], #16", "vadd.i32 q0, q0, q1"]
    one += ["vldrw.32 q1, [%[numbers]], #16", "vqrdmulh.s32 q0, q0, q1", "vldrw.32 q1, [%[numbers]], #16"]
    one += [*rounded, "vrshl.s32 q0, q0, q1"]
    held = '[to] "+&l"(at), [sums] "+&r"(sums), [numbers] "+&r"(here)'
    given = f'[zero] "r"({block.zero_point}), [low] "r"({block.low}), [high] "r"({block.high})'
    limits = block.low > -128 or block.high < 127
    body = ""
    if whole:
        lines = [line for half in "bt" for line in (*one, f"vqmovn{half}.s32 q4, q0")]
        lines += ["vqadd.s16 q4, q4, %[zero]"]
        lines += ["vmax.s16 q4, q4, q5", "vmin.s16 q4, q4, q6"] if limits else ["vqmovnb.s16 q4, q4"]
        lines += ["vstrb.16 q4, [%[to]], #8"]
        begin = ["vdup.16 q5, %[low]", "vdup.16 q6, %[high]"] if limits else []
        begin += ["dls lr, %[turns]", "1:"] if whole > 1 else []
        lines = [*begin, *lines, *(["le lr, 1b"] if whole > 1 else [])]
        body += _asm(lines, held, f'{given}, [turns] "r"({whole})')
    if rest:
        lines = ["vdup.32 q4, %[zero]", "vdup.32 q5, %[low]", "vdup.32 q6, %[high]", "dlstp.32 lr, %[rest]", "1:", *one]
        lines += ["vadd.i32 q0, q0, q4", "vmax.s32 q0, q0, q5", "vmin.s32 q0, q0, q6", "vstrb.32 q0, [%[to]], #4"]
        body += _asm([*lines, "letp lr, 1b"], held, f'{given}, [rest] "r"({rest})')
    body = "".join(f"    {line}\n" for line in body.splitlines())
    return f"""\
    for (int32_t row = rows; row > 0; --row) {{
        const int32_t *here = numbers;
        int8_t *at = to;
{body}        to += step;
    }}
"""


_COPY = _asm(
    ["wlstp.8 lr, %[count], 2f", "1:", "vldrb.8 q0, [%[from]], #16", "vstrb.8 q0, [%[to]], #16", "letp lr, 1b", "2:"],
    '[to] "+&r"(to), [from] "+&r"(from)',
    '[count] "r"(count)',
)

HELIUM = VectorUnit(
    "Helium", "defined(__ARM_FEATURE_MVE)", 8.0, 8.0, ((3, 2), (2, 2), (1, 2), (1, 4)), products, columns, end, _COPY
)

_PARTS = dict(product=2.2, block=14.0, copied=0.5, sum=6.0, added=3.5, tap=11.0, pair=20.0, call=40.0)
CYCLES = {**{f"vectors.{part}": cycles for part, cycles in _PARTS.items()}, "end.vectors": 3.2}
"""Cycles of the parts of kernels with vectors, about, as `--sim qemu` states them: for `Core.kernels`."""


def _add_bytes() -> str:
    """C of Dovetail's `add_bytes`, four pairs a turn."""
    loop = [
        *("vdup.32 q4, %[low]", "vdup.32 q5, %[high]", "wlstp.32 lr, %[count], 2f", "1:"),
        *("vldrb.s32 q0, [%[left]], #4", "vldrb.s32 q1, [%[right]], #4", "vmul.i32 q0, q0, %[first]"),
        *("vmla.s32 q0, q1, %[second]", "vadd.i32 q0, q0, %[offset]", "vshr.s32 q0, q0, #21", "vmax.s32 q0, q0, q4"),
        *("vmin.s32 q0, q0, q5", "vstrb.32 q0, [%[to]], #4", "letp lr, 1b", "2:"),
    ]
    held = '[to] "+&l"(to), [left] "+&l"(left), [right] "+&l"(right)'
    given = '[first] "r"(first), [second] "r"(second), [offset] "r"(offset), [count] "r"(count)'
    return f"""\
/* (left * first + right * second + offset) / 2^21, rounded down and limited to int8, of so many pairs. */
static inline void add_bytes(int8_t *to, const int8_t *left, const int8_t *right, int32_t count, int32_t first,
                             int32_t second, int32_t offset)
{{
#if defined(__ARM_FEATURE_MVE)
{_asm(loop, held, f'{given}, [low] "r"(-128), [high] "r"(127)')}#else
    for (int32_t index = 0; index < count; ++index) {{
        to[index] = (int8_t)saturate((left[index] * first + right[index] * second + offset) >> 21);
    }}
#endif
}}
"""


FUNCTIONS = {"add_bytes": _add_bytes()}
"""Functions of Dovetail's that it computes its own way: for `Core.functions`."""
