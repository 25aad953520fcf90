"""What a VTA stream should have left in its output buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dovetail.sim.device import Bus
from dovetail.targets.vta.checks import BufferRange, Pointers, rows_of
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.isa import Instruction, Store
from dovetail.targets.vta.stream import Fault, StreamError, disassemble, name


def check_output(
    stream: bytes,
    memory: Bus,
    pointers: Pointers,
    config: VtaConfig,
    expected: Mapping[str, bytes],
    buffers: Sequence[BufferRange],
) -> None:
    """Compare what a stream has left in its output buffers.

    Args:
        stream: the stream that ran. memory, pointers, config: what it ran with.
        expected: the bytes of each output, by the name of its buffer.
        buffers: where they lie.

    Raises:
        StreamError: WRONG_OUTPUT, naming the first wrong byte and the STORE that wrote it.
        KeyError: there is no buffer of a name.
        ValueError: a buffer has another number of bytes.
    """
    places = {buffer.name: buffer for buffer in buffers}
    instructions = disassemble(stream, config)
    for title, wanted in expected.items():
        buffer = places[title]
        if len(wanted) != buffer.nbytes:
            raise ValueError(f"buffer '{title}' has {buffer.nbytes} bytes, {len(wanted)} are expected")
        found, right = memory.view(buffer.address, buffer.nbytes), np.frombuffer(wanted, np.uint8)
        wrong = np.flatnonzero(found != right)
        if len(wrong):
            offset = int(wrong[0])
            writer = _writer(instructions, config, pointers, buffer.address + offset)
            place = f"byte {offset} of buffer '{title}' (address {buffer.address + offset:#x})"
            values = f"{int(found[offset])}, not {int(right[offset])}"
            count = f"{len(wrong)} of {buffer.nbytes} bytes differ"
            raise StreamError(
                Fault.WRONG_OUTPUT,
                f"{place} is {values}; {writer}; {count}",
                hint="look at the instruction that wrote the byte, and at what it read",
            )


def _writer(instructions: Sequence[Instruction], config: VtaConfig, pointers: Pointers, address: int) -> str:
    """The last STORE that covers an address, and from which entry and lane of OUT, in words."""
    for number in reversed(range(len(instructions))):
        instruction = instructions[number]
        if not isinstance(instruction, Store):
            continue
        rows = rows_of(instruction, config, pointers)
        distance = address - rows.starts()
        hit = np.flatnonzero((distance >= 0) & (distance < rows.nbytes))
        if len(hit):
            row = int(hit[-1])
            entry, lane = divmod(int(distance[row]), config.out_element)
            entry += instruction.sram + row * instruction.x_size
            return f"{name(instructions, number)} wrote it from OUT entry {entry}, lane {lane}"
    return "no instruction stored it"
