"""Windows over an NHWC image: geometry, borders, the C text of loops over pixels and taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Shape
from dovetail.kernels.c import (
    Lines,
    block,
    c_type,
    defined,
    function,
    identifiers,
    loop,
    product,
    times,
    total,
    variable,
    without_unused,
    wrapped,
)
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import BLOCK, Expression, Index, UnsupportedRegion, declarations, refuse
from dovetail.kernels.scope import KernelScope
from dovetail.records import Record

Pair = tuple[int, int]
Number = int | str
"""A size: known, or C text of the member of a layer's block that holds it."""
ROW, COLUMN = 0, 1
_AXES = (("top", "row"), ("left", "column"))
Parts = Mapping[str, tuple[str, Lines]]
"""Ways to compute output pixels, each a C function of its own: a sentence that says which pixels, and the statements,
which read image, row and column where there are several."""
ONE_PIXEL = "One output pixel, from the taps inside the image."


class WindowGeometry(Record):
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

    def taps_inside(self, axis: int) -> list[int]:
        """How many taps are inside the image, for each output along an axis."""
        stride, dilation, before = self.stride[axis], self.dilation[axis], self.before[axis]
        starts = [place * stride - before for place in range(self.outputs[axis])]
        taps = range(self.kernel[axis])
        return [sum(0 <= start + tap * dilation < self.size[axis] for tap in taps) for start in starts]

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


class Nest(Record):
    """A window's loops as C text (or OpenCL's): pixels, taps inside the image, addresses and the end of a pixel.

    Sizes are numbers; where the scope is compact they are members of the layer's block, and names stand for all that
    is 0 or 1 in some layers only.
    """

    scope: KernelScope
    window: WindowGeometry

    def number(self, stem: str, value: int) -> Number:
        """A number of the window."""
        return self.scope.number("window", stem, value)

    def pair(self, stem: str) -> tuple[Number, Number]:
        """The numbers for rows and columns of one of the window's pairs."""
        rows, columns = getattr(self.window, stem)
        return self.number(f"{stem}_rows", rows), self.number(f"{stem}_columns", columns)

    def at(self, name: str) -> str:
        """The loop variable, or the argument, over images, rows or columns; 0 where there is one."""
        rows, columns = self.pair("outputs")
        turns = {"image": self.number("batch", self.window.batch), "row": rows, "column": columns}[name]
        if self.scope.single:
            turns = self.window.batch if name == "image" else name
        return "0" if turns == 1 else name

    def _by(self, text: str, number: Number) -> str:
        return times(text, number) if self.scope.compact else product(wrapped(text), int(number))

    def place(self, channels: Number) -> str:
        """The statement that names the first element of the result's pixel."""
        return f"const int32_t place = {self.output_index(channels)};"

    def output_index(self, channels: Number) -> str:
        """The flat index of the first element of the result's pixel."""
        rows, columns = self.pair("outputs")
        image, row, column = map(self.at, ("image", "row", "column"))
        return self._by(total(self._by(total(self._by(image, rows), row), columns), column), channels)

    def origin(self, axis: int, stride: Number, before: Number) -> str:
        """The input row or column under the first tap; negative in the padding."""
        start = self._by(self.at(_AXES[axis][1]), stride)
        return total(start, -before) if isinstance(before, int) else f"{total(start)} - {before}"

    def origins(self) -> Lines:
        """Statements that name the window's origin (top, left)."""
        pairs = zip(self.window.stride, self.window.before, strict=True)
        return [f"const int32_t {_AXES[axis][0]} = {self.origin(axis, *pair)};" for axis, pair in enumerate(pairs)]

    def clamps(self) -> Lines:
        """Statements that name the window's origin (top, left) and its taps inside the image."""
        lines = []
        pairs = zip(*map(self.pair, ("stride", "before", "dilation", "kernel", "size")), strict=True)
        padded = self.number("padded", int(self.window.any_padded))
        for axis, (stride, before, dilation, taps, size) in enumerate(pairs):
            origin, name = _AXES[axis]
            lines.append(f"const int32_t {origin} = {self.origin(axis, stride, before)};")
            first, end = "0", str(taps)
            if padded != 0 and (self.scope.compact or self.window.padded(axis)):
                first = f"first_tap({origin}, {dilation})"
                end = f"end_tap({origin}, {dilation}, {taps}, {size})"
            elif not self.scope.compact:
                continue
            lines += [f"const int32_t first_{name} = {first};", f"const int32_t end_{name} = {end};"]
        return lines

    def input_index(self, top: str, left: str, channel: str = "0") -> str:
        """The flat index of the input element (image, top, left, channel)."""
        height, width = self.pair("size")
        rows = total(self._by(self.at("image"), height), top)
        columns = total(self._by(rows, width), left)
        return total(self._by(columns, self.number("channels", self.window.channels)), channel)

    def pointer(self, top: str, left: str, channel: str, space: str = "") -> str:
        """The statement that points at an input element, in an address space of OpenCL's."""
        image, place = self.scope.input(self.scope.source(), "input"), self.input_index(top, left, channel)
        if self.scope.shares(self.scope.source()):
            return f"int32_t from = {place};"
        start = total(image, place)
        return f"{space}const {c_type(self.scope.source_dtype)} *from = {start};"

    def taken(self, offset: int) -> str:
        """C text of the element `offset` after the one pointed at."""
        if not self.scope.shares(self.scope.source()):
            return f"from[{offset}]"
        image = self.scope.input(self.scope.source(), "input")
        return self.scope.loaded(self.scope.source(), image, total("from", offset))

    def tap(self, axis: int) -> str:
        """The loop variable over kernel rows or columns, or 0 where there is one."""
        name = ("kernel_row", "kernel_column")[axis]
        return name if self.scope.compact else variable(name, self.window.kernel[axis])

    def below(self, axis: int, tap: str) -> str:
        """The input row or column under a tap."""
        return total(_AXES[axis][0], self._by(tap, self.pair("dilation")[axis]))

    def first(self, axis: int, clamped: bool = True) -> str:
        """The first tap to visit along an axis."""
        named = clamped and (self.scope.compact or self.window.padded(axis))
        return f"first_{_AXES[axis][1]}" if named else "0"

    def end(self, axis: int, clamped: bool = True) -> str:
        """One past the last tap to visit along an axis."""
        named = clamped and (self.scope.compact or self.window.padded(axis))
        return f"end_{_AXES[axis][1]}" if named else str(self.window.kernel[axis])

    def count(self) -> str:
        """The statement that counts the taps inside the image."""
        sides = (f"({self.end(axis)} - {self.first(axis)})" for axis in (ROW, COLUMN))
        return f"const int32_t count = {' * '.join(sides)};"

    def columns(self, lines: Lines, clamped: bool = True) -> Lines:
        """The loop over kernel columns inside the image."""
        return _tap_loop("kernel_column", self.first(COLUMN, clamped), self.end(COLUMN, clamped), lines)

    def rows(self, lines: Lines, clamped: bool = True) -> Lines:
        """The loop over kernel rows inside the image."""
        return _tap_loop("kernel_row", self.first(ROW, clamped), self.end(ROW, clamped), lines)

    def finish(self, value: Expression, channel: str, pixel: str = "0") -> Lines:
        """The pointwise tree on one result at a channel of a pixel counted from the present place."""
        shape, self.scope.channel = self.scope.output_shape, channel
        place = total("place", product(pixel, shape[-1]), channel)
        return finish(self.scope, anchored(shape, place, channel), value)

    def store(
        self,
        kind: str,
        names: Sequence[str],
        value: Callable[[str], Expression],
        channel: str = "channel",
        pixels: int = 1,
        outputs: Number | None = None,
    ) -> Lines:
        """The pointwise tree on several sums, as loops over them.

        Args:
            kind: C type of a sum.
            names: the variables, the lanes of the first pixel first.
            value: the anchor's result from one of them.
            channel: the first lane's.
            pixels: how many pixels they belong to.
            outputs: how many channels there are, where the last lanes may be beyond them.
        """

        def one(text: str, pixel: str, lane: str) -> Lines:
            return self.finish(value(text), total(channel, lane), pixel)

        lanes = len(names) // pixels
        stop: int | str = lanes
        head: Lines = []
        if outputs is not None:
            rest, stop = f"{outputs} - channel", "lanes"
            head = [f"const int32_t lanes = {rest} < {lanes} ? {rest} : {lanes};"]
        if len(names) == 1:
            return [*head, *one(names[0], "0", "0")]
        pixel, lane = variable("pixel", pixels), variable("lane", lanes)
        lines = one(f"sums[{total(product(pixel, lanes), lane)}]", pixel, lane)
        lines = loop("lane", stop, lines) if lanes > 1 else lines
        lines = loop("pixel", pixels, lines) if pixels > 1 else lines
        return [*head, f"const {kind} sums[{len(names)}] = {{{', '.join(names)}}};", *lines]

    def over_channels(
        self, kind: str, starts: Mapping[str, str], taps: Lines, value: Callable[[str], Expression]
    ) -> Lines:
        """The statements of a pixel each of whose results is of the input channel of its number, some at a time.

        Args:
            kind: C type of the variables in which the taps are collected.
            starts: their first values.
            taps: statements that collect.
            value: the anchor's result from a variable.
        """
        channels = self.number("channels", self.window.channels)
        lines = [f"{kind} {name} = {start};" for name, start in starts.items()]
        lines += [*taps, *self.store(kind, list(starts), value, self.channel)]
        head = [*self.clamps(), self.place(channels), self.count()]
        return [*head, *loop("channel", channels, lines, step=len(starts))]

    @property
    def channel(self) -> str:
        """The loop variable over channels, or 0 where there is one."""
        return "channel" if self.scope.compact else variable("channel", self.scope.output_shape[-1])

    def functions(self, name: str, parts: Parts, loops_over: Callable[[Mapping[str, str]], Lines]) -> Lines:
        """A kernel as one function per way to compute output pixels, and the function that calls them.

        Args:
            name: the kernel's name.
            parts: each way, by the suffix of its function.
            loops_over: writes the loops over all pixels from the statement that calls each way.
        """
        scope, window = self.scope, self.window
        names = (("image", window.batch), ("row", window.outputs[ROW]), ("column", window.outputs[COLUMN]))
        place = [name for name, size in names if size > 1]
        bodies = {suffix: without_unused(lines) for suffix, (_, lines) in parts.items()}
        if not place and len(parts) == 1:
            (lines,) = bodies.values()
            scope.keep(identifiers(lines))
            return function(f"static void {name}", declarations(scope.parameters()), lines)
        calls: dict[str, str] = {}
        if scope.border is not None:
            arguments = [parameter.name for parameter in scope.parameters() if not parameter.is_constant]
            arguments += [*([BLOCK] if scope.border.block else []), *(["image"] if window.batch > 1 else [])]
            arguments += map(variable, ("row", "column"), window.outputs)
            calls["pixel"] = f"{scope.border.name}({', '.join(arguments)});"
        words = {suffix: identifiers(lines) for suffix, lines in bodies.items()}
        used = {suffix: words[suffix] - defined(lines) for suffix, lines in bodies.items()}
        for suffix, own in used.items():
            arguments = [parameter.name for parameter in scope.parameters()] + place
            calls[suffix] = f"{name}_{suffix}({', '.join(argument for argument in arguments if argument in own)});"
        loops = loops_over(calls)
        called = [suffix for suffix in bodies if any(f"{name}_{suffix}(" in line for line in loops)]
        scope.keep({word for suffix in called for word in words[suffix]})
        text = Lines()
        for suffix in called:
            inner = declarations([parameter for parameter in scope.parameters() if parameter.name in used[suffix]])
            inner += [f"int32_t {variable}" for variable in place if variable in used[suffix]]
            header = f"static void {name}_{suffix}"
            text += [f"/* {parts[suffix][0]} */", *function(header, inner, bodies[suffix]), ""]
        return [*text, *function(f"static void {name}", declarations(scope.parameters()), loops)]

    def shared_function(self, name: str, lines: Lines) -> Lines:
        """A kernel of layers alike around the statements of one output pixel; its constants come through the block, the
        pixel it computes in arguments or loops."""
        scope, (rows, columns) = self.scope, self.pair("outputs")
        lines = without_unused(lines)
        pixel = [*(["image"] if self.at("image") != "0" else []), "row", "column"] if scope.single else []
        if not scope.single:
            lines = loop("row", rows, loop("column", columns, lines))
            lines = loop("image", self.number("batch", self.window.batch), lines)
        comment = ONE_PIXEL if pixel else "Every output pixel, from the taps inside the image."
        scope.keep(identifiers(lines))
        plain = [parameter for parameter in scope.parameters() if not parameter.is_constant]
        uses_block = any(f"{BLOCK}->" in line for line in lines)
        block = [f"const struct {name}_{BLOCK} *restrict {BLOCK}"] if uses_block else []
        arguments = [*declarations(plain), *block, *(f"int32_t {coordinate}" for coordinate in pixel)]
        return [f"/* {comment} */", *function(f"static void {name}", arguments, lines)]


def _tap_loop(name: str, first: str, end: str, lines: Lines) -> Lines:
    """A loop over kernel rows or columns [first, end), no loop when there is one."""
    if first == "0" and end == "1":
        return lines
    return loop(name, int(end) if end.isdigit() else end, lines, start=int(first) if first.isdigit() else first)


def anchored(shape: Shape, position: str, channel: str) -> Index:
    """The index of operands behind an anchor: at the result's flat `position`, along `channel`, or of one element."""

    def index(operand: Shape) -> str:
        if prod(operand) == 1:
            return "0"
        if prod(operand) == prod(shape):
            return position
        if operand[-1] == shape[-1] == prod(operand):
            return channel
        raise UnsupportedRegion(f"an operand {list(operand)} is broadcast over the result {list(shape)} of an anchor.")

    return index


def window_of(scope: KernelScope) -> WindowGeometry:
    """The window of the region's anchor over what stands before its Pad."""
    (batch, height, width, channels), shape = scope.graph.types[scope.source()].shape, scope.result.shape
    window = scope.node.operator.window(scope.types)
    assert window is not None
    before = (window.padding[0][0], window.padding[1][0])
    if scope.pad is not None:
        pad = scope.pad.expect(Pad)
        refuse(
            any(pad.before[axis] or pad.after[axis] for axis in (0, 3)),
            "the Pad before a window pads more than rows and columns.",
        )
        before = (pad.before[1], pad.before[2])
        most = [max(pad.before[1 + axis], pad.after[1 + axis]) for axis in (0, 1)]
        refuse(
            any(wide >= span for wide, span in zip(most, window.span, strict=True)),
            f"the padding {most} is wider than the window {list(window.kernel)} reaches.",
        )
    geometry = (window.kernel, window.stride, window.dilation, before)
    return WindowGeometry(batch, (height, width), channels, (shape[1], shape[2]), *geometry)


def pixel_loops(window: WindowGeometry, calls: Mapping[str, str], pixels: int) -> Lines:
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
    fast = _loop_on("column", stop, [calls["pixels"]], pixels)
    if first:
        fast = [*_loop_on("column", first, [calls["pixel"]], 1), *fast]
    if (top, bottom) != (0, rows):
        fast = block(f"if (row >= {top} && row < {bottom})", fast)
    rest = [] if stop == columns and (top, bottom) == (0, rows) else _loop_on("column", columns, [calls["pixel"]], 1)
    return loop("image", window.batch, loop("row", rows, ["int32_t column = 0;", *fast, *rest]))


def _loop_on(name: str, stop: int, body: Lines, step: int) -> Lines:
    """A loop that goes on from the variable's present value."""
    advance = f"++{name}" if step == 1 else f"{name} += {step}"
    return block(f"for (; {name} < {stop}; {advance})", body)
