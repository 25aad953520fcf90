"""Windows over an NHWC image: geometry, borders, and the C text that finds the taps inside the image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dovetail.graph.types import Shape
from dovetail.kernels.epilogue import Index, Scope
from dovetail.kernels.kernel import Unsupported, declarations
from dovetail.kernels.region import Region
from dovetail.kernels.text import block, function, loop, product, total, without_unused, words
from dovetail.operators.movement import Pad

Pair = tuple[int, int]
ROW, COLUMN = 0, 1


@dataclass(frozen=True)
class Window:
    """How the outputs of a convolution or pool lie over their input."""

    batch: int
    size: Pair
    """Rows and columns of the input."""
    channels: int
    """Channels of the input: elements from one column to the next."""
    outputs: Pair
    """Rows and columns of the result."""
    kernel: Pair
    stride: Pair
    dilation: Pair
    before: Pair
    """Rows above and columns left of the image that the windows cover as padding."""

    def inside(self, axis: int) -> Pair:
        """The outputs [first, end) along an axis whose windows lie wholly inside the image."""
        stride, lead = self.stride[axis], self.before[axis]
        span = (self.kernel[axis] - 1) * self.dilation[axis] + 1
        first = min(-(-lead // stride), self.outputs[axis])
        end = min((self.size[axis] + lead - span) // stride + 1, self.outputs[axis])
        return first, max(end, first)

    def padded(self, axis: int) -> bool:
        """True when some window leaves the image along an axis."""
        return self.inside(axis) != (0, self.outputs[axis])

    @property
    def any_padded(self) -> bool:
        """True when some window leaves the image."""
        return self.padded(ROW) or self.padded(COLUMN)

    @property
    def contiguous_columns(self) -> bool:
        """True when the taps of one kernel row are neighbours in memory."""
        return self.dilation[COLUMN] == 1 or self.kernel[COLUMN] == 1

    def output_index(self, channels: int) -> str:
        """C text of the first element of the output pixel at (image, row, column)."""
        rows = total(product(variable("image", self.batch), self.outputs[ROW]), variable("row", self.outputs[ROW]))
        return flat([(rows, self.outputs[COLUMN]), (variable("column", self.outputs[COLUMN]), channels)])

    def origin(self, axis: int) -> str:
        """C text of the input row or column under the first tap; negative in the padding."""
        name = variable(("row", "column")[axis], self.outputs[axis])
        return total(product(name, self.stride[axis]), -self.before[axis])

    def input_index(self, top: str, left: str, channel: str = "0") -> str:
        """C text of the flat index of input element (image, top, left, channel)."""
        rows = total(product(variable("image", self.batch), self.size[ROW]), top)
        return total(product(wrapped(total(product(wrapped(rows), self.size[COLUMN]), left)), self.channels), channel)

    def clamps(self) -> list[str]:
        """Statements that name the window's origin (top, left) and its taps inside the image."""
        lines = []
        for axis, (origin, name) in enumerate((("top", "row"), ("left", "column"))):
            lines.append(f"const int32_t {origin} = {self.origin(axis)};")
            if self.padded(axis):
                dilation, taps, size = self.dilation[axis], self.kernel[axis], self.size[axis]
                lines.append(f"const int32_t first_{name} = first_tap({origin}, {dilation});")
                lines.append(f"const int32_t end_{name} = end_tap({origin}, {dilation}, {taps}, {size});")
        return lines

    def first(self, axis: int, clamped: bool) -> str:
        """C text of the first tap to visit along an axis."""
        return ("first_row", "first_column")[axis] if clamped and self.padded(axis) else "0"

    def end(self, axis: int, clamped: bool) -> str:
        """C text of one past the last tap to visit along an axis."""
        return ("end_row", "end_column")[axis] if clamped and self.padded(axis) else str(self.kernel[axis])


def variable(name: str, size: int) -> str:
    """The loop variable, or 0 where the loop has one turn."""
    return name if size > 1 else "0"


def wrapped(text: str) -> str:
    """The text in parentheses when it is a sum."""
    return f"({text})" if " + " in text or " - " in text else text


def flat(terms: list[tuple[str, int]]) -> str:
    """C text of ((t0 * s0 + t1) * s1 + t2) ... : an index from (part, size of what follows)."""
    text = "0"
    for part, size in terms:
        text = product(wrapped(total(text, part)), size)
    return text


def tap_loop(name: str, first: str, end: str, lines: list[str]) -> list[str]:
    """A loop over kernel rows or columns [first, end), no loop when there is one."""
    if first == "0" and end == "1":
        return lines
    return loop(name, int(end) if end.isdigit() else end, lines, start=int(first) if first.isdigit() else first)


def store_lanes(
    kind: str, names: Sequence[str], pixels: int, stop: int | str, epilogue: Callable[[str, str, str], list[str]]
) -> list[str]:
    """The epilogue of several sums, as loops over them.

    Args:
        kind: C type of a sum.
        names: the variables, the lanes of the first pixel first.
        pixels: how many pixels they belong to.
        stop: lanes in use, or the C variable that says so.
        epilogue: writes the statements for (sum, pixel, lane), all C texts.
    """
    if len(names) == 1:
        return epilogue(names[0], "0", "0")
    lanes = len(names) // pixels
    pixel, lane = variable("pixel", pixels), variable("lane", lanes)
    lines = epilogue(f"sums[{total(product(pixel, lanes), lane)}]", pixel, lane)
    lines = loop("lane", stop, lines) if lanes > 1 else lines
    lines = loop("pixel", pixels, lines) if pixels > 1 else lines
    return [f"const {kind} sums[{len(names)}] = {{{', '.join(names)}}};", *lines]


def place_of(window: Window) -> list[str]:
    """Parameters of a kernel's inner functions: which output pixel."""
    names = (("image", window.batch), ("row", window.outputs[ROW]), ("column", window.outputs[COLUMN]))
    return [name for name, size in names if size > 1]


def anchored(shape: Shape, position: str, channel: str) -> Index:
    """The index of operands behind an anchor: at the result's flat `position`, along `channel`, or of one element."""

    def index(operand: Shape) -> str:
        if prod(operand) == 1:
            return "0"
        if prod(operand) == prod(shape):
            return position
        if operand[-1] == shape[-1] == prod(operand):
            return channel
        raise Unsupported(f"an operand {list(operand)} is broadcast over the result {list(shape)} of an anchor.")

    return index


def window_of(
    region: Region, kernel: Pair, stride: Pair, dilation: Pair = (1, 1), own: tuple[Pair, Pair] = ((0, 0), (0, 0))
) -> Window:
    """The window of the region's anchor over what stands before its Pad; `own` is padding of the anchor itself."""
    types, source = region.graph.types, region.source()
    (batch, height, width, channels) = types[source].shape
    assert region.anchor is not None
    shape = types[region.anchor.output].shape
    before = (own[0][0], own[1][0])
    if region.pad is not None:
        pad = region.pad.operator
        assert isinstance(pad, Pad)
        if any(pad.before[axis] or pad.after[axis] for axis in (0, 3)):
            raise Unsupported("the Pad before a window pads more than rows and columns.")
        before = (pad.before[1], pad.before[2])
        spans = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        most = [max(pad.before[1 + axis], pad.after[1 + axis]) for axis in (0, 1)]
        if any(wide > span for wide, span in zip(most, spans, strict=True)):
            raise Unsupported(f"the padding {most} is wider than the window {list(kernel)} reaches.")
    return Window(batch, (height, width), channels, (shape[1], shape[2]), kernel, stride, dilation, before)


def pixel_loops(window: Window, calls: Mapping[str, str], pixels: int) -> list[str]:
    """Loops over all output pixels.

    Args:
        window: the geometry.
        calls: the statement "pixel" that computes the pixel at (image, row, column), whatever its taps, and, where it
            pays, "pixels" that computes several columns from `column` on whose taps are all inside.
        pixels: how many columns those are.
    """
    rows, columns = window.outputs
    first, end = window.inside(COLUMN)
    top, bottom = window.inside(ROW)
    turns = (end - first) // pixels if "pixels" in calls else 0
    if turns == 0 or top == bottom:
        return loop("image", window.batch, loop("row", rows, loop("column", columns, [calls["pixel"]])))
    stop = first + turns * pixels
    fast = loop_on("column", stop, [calls["pixels"]], pixels)
    if first:
        fast = [*loop_on("column", first, [calls["pixel"]], 1), *fast]
    if (top, bottom) != (0, rows):
        fast = block(f"if (row >= {top} && row < {bottom})", fast)
    rest = [] if stop == columns and (top, bottom) == (0, rows) else loop_on("column", columns, [calls["pixel"]], 1)
    return loop("image", window.batch, loop("row", rows, ["int32_t column = 0;", *fast, *rest]))


def loop_on(name: str, stop: int, body: list[str], step: int) -> list[str]:
    """A loop that goes on from the variable's present value."""
    advance = f"++{name}" if step == 1 else f"{name} += {step}"
    return block(f"for (; {name} < {stop}; {advance})", body)


@dataclass(frozen=True)
class Part:
    """One way to compute output pixels, as a C function of its own."""

    comment: str
    """One sentence that says which pixels."""
    lines: list[str]
    """The statements; they read image, row and column where there are several."""


ONE_PIXEL = "One output pixel, from the taps inside the image."


def pixel_functions(
    name: str,
    scope: Scope,
    window: Window,
    parts: Mapping[str, Part],
    loops_over: Callable[[Mapping[str, str]], list[str]],
) -> list[str]:
    """A kernel as one function per way to compute output pixels, and the function that calls them.

    Args:
        name: the kernel's name.
        scope: its parameters, complete.
        window: the geometry.
        parts: each way, by the suffix of its function.
        loops_over: writes the loops over all pixels from the statement that calls each way.
    """
    place = place_of(window)
    bodies = {suffix: without_unused(part.lines) for suffix, part in parts.items()}
    if not place and len(parts) == 1:
        (lines,) = bodies.values()
        scope.keep(words(lines))
        return function(f"static void {name}", declarations(scope.parameters()), lines)
    calls: dict[str, str] = {}
    if scope.border is not None:
        plain = [parameter.name for parameter in scope.parameters() if not parameter.is_constant]
        images = ["image"] if window.batch > 1 else []
        calls["pixel"] = scope.border.call(plain, [*images, *map(variable, ("row", "column"), window.outputs)])
    for suffix, lines in bodies.items():
        arguments = [parameter.name for parameter in scope.parameters()] + place
        used = words(lines) - _defined(lines)
        calls[suffix] = f"{name}_{suffix}({', '.join(argument for argument in arguments if argument in used)});"
    loops = loops_over(calls)
    called = {suffix: lines for suffix, lines in bodies.items() if any(f"{name}_{suffix}(" in line for line in loops)}
    scope.keep(words([line for lines in called.values() for line in lines]))
    text: list[str] = []
    for suffix, lines in called.items():
        used = words(lines) - _defined(lines)
        inner = declarations([parameter for parameter in scope.parameters() if parameter.name in used])
        inner += [f"int32_t {variable}" for variable in place if variable in used]
        text += [f"/* {parts[suffix].comment} */", *function(f"static void {name}_{suffix}", inner, lines), ""]
    return [*text, *function(f"static void {name}", declarations(scope.parameters()), loops)]


def _defined(lines: list[str]) -> set[str]:
    """The constants the outermost lines define."""
    return {line.split()[2] for line in lines if line.startswith("const int32_t ")}
