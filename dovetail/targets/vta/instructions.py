"""What VTA's instructions mean, as loops. One entry per way an instruction is used; several are one GEMM or LOAD.

Arrays end in the lanes of one element: [batch, block], of weights [block, block]. Memories are VTA's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from dovetail.loops import Procedure, memory, procedure

_EXTENTS = {
    "b": "OCB", "h": "OH", "w": "OW", "n": "BATCH", "o": "BLOCK", "i": "BLOCK", "d": "D", "kh": "KH", "kw": "KW"
}  # fmt: skip
_LANES = "BATCH, BLOCK"
_MATRIX = "BLOCK, BLOCK"
_SUMS = f"[OCB, OH, OW, {_LANES}]"
_TOTAL = f"total: [i32]{_SUMS} @ ACC"
_HERE = "total[b, h, w, n, o]"
_RESULT = "OCB: size, OH: size, OW: size"
_KERNEL = "KH: size, KW: size"
_WINDOW = f"[DOWN * OH - DOWN + KH, ACROSS * OW - ACROSS + KW, {_LANES}]"
_PIXEL = "DOWN * h + kh, ACROSS * w + kw"


def _meaning(signature: str, loops: str, statement: str) -> str:
    """A procedure of one nest; `loops` are its variables, outermost first."""
    lines = [f"def {signature}:"]
    for depth, name in enumerate(loops.split()):
        lines.append(f"{'    ' * (depth + 1)}for {name} in seq(0, {_EXTENTS[name]}):")
    return "\n".join([*lines, "    " * (len(lines)) + statement])


def _of_every(name: str, value: str, operand: str) -> str:
    """An ALU instruction on every element of the result."""
    return _meaning(f"{name}({_RESULT}, {_TOTAL}, {operand})", "b h w n o", f"{_HERE} = {value}")


_NUMBER = "number: i32 @ DRAM"
_PARAMETER = f"parameter: [i32][OCB, {_LANES}] @ ACC"

MEANINGS: Mapping[str, str] = {
    "load_padded": f"""
def load_padded(H: size, W: size, T: index, B: index, L: index, R: index, source: [i8][H, W, {_LANES}] @ DRAM,
                image: [i8][T + H + B, L + W + R, {_LANES}] @ INP):
    assert T >= 0
    assert B >= 0
    assert L >= 0
    assert R >= 0
    for h in seq(0, T + H + B):
        for w in seq(0, L + W + R):
            for n in seq(0, BATCH):
                for o in seq(0, BLOCK):
                    if h >= T and h < T + H and w >= L and w < L + W:
                        image[h, w, n, o] = source[h - T, w - L, n, o]
                    else:
                        image[h, w, n, o] = 0.0
""",
    "load_image": _meaning(
        f"load_image(OH: size, OW: size, source: [i8][OH, OW, {_LANES}] @ DRAM, image: [i8][OH, OW, {_LANES}] @ INP)",
        "h w n o",
        "image[h, w, n, o] = source[h, w, n, o]",
    ),
    "load_ones": _meaning(
        f"load_ones(D: size, source: [i8][D, {_LANES}] @ DRAM, ones: [i8][D, {_LANES}] @ INP)",
        "d n o",
        "ones[d, n, o] = source[d, n, o]",
    ),
    "load_weights": _meaning(
        f"load_weights(OCB: size, {_KERNEL}, source: [i8][OCB, KH, KW, {_MATRIX}] @ DRAM, "
        f"weights: [i8][OCB, KH, KW, {_MATRIX}] @ WGT)",
        "b kh kw o i",
        "weights[b, kh, kw, o, i] = source[b, kh, kw, o, i]",
    ),
    "load_matrices": _meaning(
        f"load_matrices({_KERNEL}, source: [i8][KH, KW, {_MATRIX}] @ DRAM, weights: [i8][KH, KW, {_MATRIX}] @ WGT)",
        "kh kw o i",
        "weights[kh, kw, o, i] = source[kh, kw, o, i]",
    ),
    "load_parameter": _meaning(
        f"load_parameter(OCB: size, source: [i32][OCB, {_LANES}] @ DRAM, {_PARAMETER})",
        "b n o",
        "parameter[b, n, o] = source[b, n, o]",
    ),
    "load_wide": _meaning(
        f"load_wide({_RESULT}, source: [i8]{_SUMS} @ DRAM, {_TOTAL})", "b h w n o", f"{_HERE} = source[b, h, w, n, o]"
    ),
    "zero": _meaning(f"zero({_RESULT}, {_TOTAL})", "b h w n o", f"{_HERE} = 0.0"),
    "product": _meaning(
        f"product({_RESULT}, {_KERNEL}, {_TOTAL}, image: [i8]{_WINDOW} @ INP, "
        f"weights: [i8][OCB, KH, KW, {_MATRIX}] @ WGT)",
        "b kh kw h w n o i",
        f"{_HERE} += image[{_PIXEL}, n, i] * weights[b, kh, kw, o, i]",
    ),
    "product_of_block": _meaning(
        f"product_of_block(OH: size, OW: size, {_KERNEL}, total: [i32][OH, OW, {_LANES}] @ ACC, "
        f"image: [i8]{_WINDOW} @ INP, weights: [i8][KH, KW, {_MATRIX}] @ WGT)",
        "kh kw h w n o i",
        f"total[h, w, n, o] += image[{_PIXEL}, n, i] * weights[kh, kw, o, i]",
    ),
    "add_bias": _meaning(
        f"add_bias({_RESULT}, D: size, {_TOTAL}, ones: [i8][D, {_LANES}] @ INP, "
        f"digits: [i8][OCB, D, {_MATRIX}] @ WGT)",
        "d b h w n o i",
        f"{_HERE} += ones[d, n, i] * digits[b, d, o, i]",
    ),
    "largest": _meaning(
        f"largest({_RESULT}, {_KERNEL}, {_TOTAL}, "
        f"wide: [i32][OCB, DOWN * OH - DOWN + KH, ACROSS * OW - ACROSS + KW, {_LANES}] @ ACC)",
        "kh kw b h w n o",
        f"{_HERE} = most({_HERE}, wide[b, {_PIXEL}, n, o])",
    ),
    "store": _meaning(
        f"store({_RESULT}, {_TOTAL}, result: [i8]{_SUMS} @ DRAM)", "b h w n o", f"result[b, h, w, n, o] = {_HERE}"
    ),
    "multiply_by": _of_every("multiply_by", f"{_HERE} * number", _NUMBER),
    "add_number": _of_every("add_number", f"{_HERE} + number", _NUMBER),
    "shift_by": _of_every("shift_by", f"shift_right({_HERE}, number)", _NUMBER),
    "at_least": _of_every("at_least", f"most({_HERE}, number)", _NUMBER),
    "at_most": _of_every("at_most", f"least({_HERE}, number)", _NUMBER),
    "multiply_each": _of_every("multiply_each", f"{_HERE} * parameter[b, n, o]", _PARAMETER),
    "shift_each": _of_every("shift_each", f"shift_right({_HERE}, parameter[b, n, o])", _PARAMETER),
}
"""Name -> text, with BATCH, BLOCK, and DOWN and ACROSS, the strides of a window, to be filled in."""


def instruction(name: str, batch: int, block: int, stride: tuple[int, int] = (1, 1)) -> Procedure:
    """The instruction of that name for a configuration's lanes and the strides of a window."""
    text = MEANINGS[name]
    for word, number in (("BATCH", batch), ("BLOCK", block), ("DOWN", stride[0]), ("ACROSS", stride[1])):
        text = text.replace(word, str(number))
    return _made(name, text)


@cache
def _made(name: str, text: str) -> Procedure:
    """An instruction of this text: most do not depend on the strides."""
    scope = {memory_name: memory(memory_name) for memory_name in ("INP", "WGT", "ACC")}
    return procedure(text, scope, instruction=name)
