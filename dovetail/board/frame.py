"""Frames between this computer and a board; emit/runtime/board_main.c says what they look like.

What comes from a line is not trusted: a decoder holds at most one frame, and skips what is none.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass

MAXIMUM_PAYLOAD = 1024
"""Bytes of payload a frame may have."""
MAXIMUM_FRAME = 8 + MAXIMUM_PAYLOAD + 4
_MAGIC = b"\xd7\xe9"
_HEAD = struct.Struct("<2sBBH")
_HEADER_BYTES, _TRAILER_BYTES = 8, 4


class Kind(enum.IntEnum):
    """What a request asks for."""

    HELLO = 1
    WRITE = 2
    RUN = 3
    READ = 4
    CYCLES = 5
    RESET = 6


ANSWER = 0x80
"""Added to the kind of a request in its answer."""
REFUSED = 0xFF
"""Kind of the answer to a request that cannot be carried out."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: kind and sequence number of 0 to 255, and at most `MAXIMUM_PAYLOAD` bytes."""

    kind: int
    sequence: int
    payload: bytes = b""


def encode(frame: Frame) -> bytes:
    """The bytes of a frame.

    Raises:
        ValueError: its payload is too long.
    """
    if len(frame.payload) > MAXIMUM_PAYLOAD:
        raise ValueError(f"a payload of {len(frame.payload)} bytes; the limit is {MAXIMUM_PAYLOAD}")
    head = _HEAD.pack(_MAGIC, frame.kind, frame.sequence, len(frame.payload))
    content = head + struct.pack("<H", zlib.crc32(head) & 0xFFFF) + frame.payload
    return content + struct.pack("<I", zlib.crc32(content))


class Decoder:
    """Finds frames in a stream of bytes."""

    def __init__(self) -> None:
        self._held = bytearray()
        self.skipped = 0
        """Bytes that belonged to no frame."""

    def feed(self, content: bytes) -> list[Frame]:
        """Take more bytes; return the frames that end in them."""
        self._held += content
        found = []
        while (frame := self._next()) is not None:
            found.append(frame)
        return found

    def _next(self) -> Frame | None:
        """The first frame; None when more bytes are needed."""
        while True:
            start = self._held.find(_MAGIC)
            kept = len(self._held) - int(self._held.endswith(_MAGIC[:1]))
            self._skip(start if start >= 0 else kept)
            if len(self._held) < _HEADER_BYTES:
                return None
            _, kind, sequence, length = _HEAD.unpack_from(self._held)
            (check,) = struct.unpack_from("<H", self._held, _HEAD.size)
            if length <= MAXIMUM_PAYLOAD and check == zlib.crc32(self._held[: _HEAD.size]) & 0xFFFF:
                end = _HEADER_BYTES + length
                if len(self._held) < end + _TRAILER_BYTES:
                    return None
                if struct.unpack_from("<I", self._held, end)[0] == zlib.crc32(self._held[:end]):
                    payload = bytes(self._held[_HEADER_BYTES:end])
                    del self._held[: end + _TRAILER_BYTES]
                    return Frame(kind, sequence, payload)
            self._skip(1)

    def _skip(self, count: int) -> None:
        del self._held[:count]
        self.skipped += count
