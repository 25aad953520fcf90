"""How each use of an instruction (instructions.py) becomes VTA instructions: one small function per use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from dovetail.loops import Issue, Span, Window
from dovetail.targets.vta.isa import AluOpcode, Load, Memory, Store
from dovetail.targets.vta.micro import Loop
from dovetail.targets.vta.writer import Make, Writer, row_major

Operands: TypeAlias = Mapping[str, Window | int | str]

_MEMORIES = {"INP": Memory.INP, "WGT": Memory.WGT, "ACC": Memory.ACC}


def write_issue(writer: Writer, issue: Issue) -> None:
    """Append what an issued instruction is made of."""
    _WRITE[issue.instruction](writer, issue.operands)


def _window(operands: Operands, name: str) -> Window:
    found = operands[name]
    assert isinstance(found, Window), name
    return found


def _whole(operands: Operands, *names: str) -> tuple[int, ...]:
    found = [operands[name] for name in names]
    assert all(isinstance(value, int) for value in found), names
    return tuple(int(value) for value in found if isinstance(value, int))


def _load(writer: Writer, operands: Operands, filled: str, narrow: bool = False) -> None:
    """A dense window into consecutive entries; nothing when it is there already."""
    target = _window(operands, filled)
    buffer = writer.buffer(target)
    if buffer.here:
        return
    first, dims = writer.dram(_window(operands, "source"))
    memory = Memory.ACC_8BIT if narrow else _MEMORIES[buffer.memory]
    entry = writer.entry(target)
    for offset, rows, width, stride in _rectangles(dims):
        load = Load(memory, entry, first + offset, rows, width, stride)
        writer.issue(load, writes=[Span(buffer.memory, entry, entry + rows * width)] if buffer.memory != "ACC" else [])
        entry += rows * width


def _load_padded(writer: Writer, operands: Operands) -> None:
    """One block of an image with zeros around it."""
    target = _window(operands, "image")
    buffer = writer.buffer(target)
    if buffer.here:
        return
    first, (_, (height, stride), (width, _)) = writer.dram(_window(operands, "source"))
    top, bottom, left, right = _whole(operands, "T", "B", "L", "R")
    load = Load(Memory.INP, writer.entry(target), first, height, width, stride, (top, bottom), (left, right))
    writer.issue(load, writes=[Span("INP", load.sram, load.sram + load.entries)])


def _store(writer: Writer, operands: Operands) -> None:
    total = _window(operands, "total")
    first, dims = writer.dram(_window(operands, "result"))
    entry = writer.entry(total)
    for offset, rows, width, stride in _rectangles(dims):
        store = Store(Memory.OUT, entry, first + offset, rows, width, stride)
        writer.issue(store, reads=[Span("OUT", entry, entry + rows * width)])
        entry += rows * width


def _rectangles(dims: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """(offset, rows, width, stride) of the fewest 2-D transfers of a strided array, dense on the other side."""
    merged: list[tuple[int, int]] = []
    for extent, step in dims:
        if extent == 1:
            continue
        if merged and merged[-1][1] == step * extent:
            merged[-1] = (merged[-1][0] * extent, step)
        else:
            merged.append((extent, step))
    if not merged or merged[-1][1] != 1:
        merged.append((1, 1))
    if len(merged) == 1:
        merged.insert(0, (1, merged[0][0]))
    *outer, (rows, stride), (width, _) = merged
    offsets = [0]
    for extent, step in outer:
        offsets = [offset + index * step for offset in offsets for index in range(extent)]
    for offset in offsets:
        yield offset, rows, width, stride


def _zero(writer: Writer, operands: Operands) -> None:
    buffer = writer.buffer(_window(operands, "total"))
    entries = buffer.span.stop - buffer.base
    writer.compute(Make(reset=True), [Loop(entries, (1, 0, 0))], (buffer.base, 0, 0), [], _out(writer, operands))


def _product(writer: Writer, operands: Operands, by_block: bool = False) -> None:
    """GEMM over the taps of a window; `by_block` of one output block."""
    total, image, weights = (_window(operands, name) for name in ("total", "image", "weights"))
    height, width, tall, wide = _whole(operands, "OH", "OW", "KH", "KW")
    blocks = 1 if by_block else _whole(operands, "OCB")[0]
    down, across = _strides(image, (tall, wide), (height, width))
    row = row_major(writer.buffer(image).shape)[-2]
    b, h, w = row_major(writer.buffer(total).shape)
    matrices = row_major(writer.buffer(weights).shape)
    per_block = matrices[0] if not by_block else 0
    nest = [
        Loop(blocks, (b, 0, per_block)),
        Loop(tall, (0, row, wide)),
        Loop(wide, (0, 1, 1)),
        Loop(height, (h, down * row, 0)),
        Loop(width, (w, across, 0)),
    ]
    first = (writer.entry(total), writer.entry(image), writer.entry(weights))
    reads = [writer.buffer(image).span, writer.buffer(weights).span]
    writer.compute(Make(), nest, first, reads, _out(writer, operands))


def _strides(window: Window, kernel: Sequence[int], out: Sequence[int]) -> tuple[int, int]:
    """Steps of a window of `(out - 1) * step + kernel` rows and columns; irrelevant along one of them."""
    spans = [high - low for low, high in window.box[-4:-2]]
    down, across = ((s - k) // (o - 1) if o > 1 else 1 for s, k, o in zip(spans, kernel, out, strict=True))
    return down, across


def _add_bias(writer: Writer, operands: Operands) -> None:
    """GEMM of the digits with the vector of ones at every pixel."""
    total, one, digits = (_window(operands, name) for name in ("total", "ones", "digits"))
    blocks, height, width, rows = _whole(operands, "OCB", "OH", "OW", "D")
    nest = [Loop(rows, (0, 1, 1)), Loop(blocks, (height * width, 0, rows)), Loop(height * width, (1, 0, 0))]
    first = (writer.entry(total), writer.entry(one), writer.entry(digits))
    reads = [writer.buffer(one).span, writer.buffer(digits).span]
    writer.compute(Make(), nest, first, reads, _out(writer, operands))


def _largest(writer: Writer, operands: Operands) -> None:
    """ALU MAX over the taps of a window."""
    total, image = _window(operands, "total"), _window(operands, "wide")
    blocks, height, width, tall, wide = _whole(operands, "OCB", "OH", "OW", "KH", "KW")
    down, across = _strides(image, (tall, wide), (height, width))
    plane, row, _ = row_major(writer.buffer(image).shape)
    nest = [
        Loop(tall, (0, row, 0)),
        Loop(wide, (0, 1, 0)),
        Loop(blocks, (height * width, plane, 0)),
        Loop(height, (width, down * row, 0)),
        Loop(width, (1, across, 0)),
    ]
    first = (writer.entry(total), writer.entry(image), 0)
    writer.compute(Make(AluOpcode.MAX), nest, first, [], _out(writer, operands))


def _number(writer: Writer, operands: Operands, opcode: AluOpcode) -> None:
    """ALU with an immediate operand on every entry of the result."""
    name = operands["number"]
    assert isinstance(name, str)
    buffer = writer.buffer(_window(operands, "total"))
    entries = buffer.span.stop - buffer.base
    make = Make(opcode, number=writer.constants.scalars[name])
    writer.compute(make, [Loop(entries, (1, 0, 0))], (buffer.base, 0, 0), [], _out(writer, operands))


def _parameter(writer: Writer, operands: Operands, opcode: AluOpcode) -> None:
    """ALU with one accumulator entry per channel block."""
    total, parameter = _window(operands, "total"), _window(operands, "parameter")
    blocks, height, width = _whole(operands, "OCB", "OH", "OW")
    nest = [Loop(blocks, (height * width, 1, 0)), Loop(height * width, (1, 0, 0))]
    first = (writer.entry(total), writer.entry(parameter), 0)
    writer.compute(Make(opcode), nest, first, [], _out(writer, operands))


def _out(writer: Writer, operands: Operands) -> Span:
    """The entries of OUT that change with the accumulators."""
    span = writer.buffer(_window(operands, "total")).span
    return Span("OUT", span.start, span.stop)


_WRITE: Mapping[str, Callable[[Writer, Operands], None]] = {
    "load_padded": _load_padded,
    "load_image": partial(_load, filled="image"),
    "load_ones": partial(_load, filled="ones"),
    "load_weights": partial(_load, filled="weights"),
    "load_matrices": partial(_load, filled="weights"),
    "load_parameter": partial(_load, filled="parameter"),
    "load_wide": partial(_load, filled="total", narrow=True),
    "zero": _zero,
    "product": _product,
    "product_of_block": partial(_product, by_block=True),
    "add_bias": _add_bias,
    "largest": _largest,
    "multiply_by": partial(_number, opcode=AluOpcode.MUL),
    "add_number": partial(_number, opcode=AluOpcode.ADD),
    "shift_by": partial(_number, opcode=AluOpcode.SHR),
    "at_least": partial(_number, opcode=AluOpcode.MAX),
    "at_most": partial(_number, opcode=AluOpcode.MIN),
    "multiply_each": partial(_parameter, opcode=AluOpcode.MUL),
    "shift_each": partial(_parameter, opcode=AluOpcode.SHR),
    "store": _store,
}
