"""Frames on a line, and a conversation in them that outlives the line: requests are sent again until they are answered.

emit/runtime/frames.h says what frames look like. What comes from a line is not trusted: a decoder holds at most one
frame, and skips what is none.
"""

from __future__ import annotations

import enum
import math
import secrets
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress

from dovetail.errors import BoardError
from dovetail.records import Record
from dovetail.sim.line import LineGone, Link, open_link

MAXIMUM_PAYLOAD = 1024
"""Bytes of payload a frame may have."""
MAXIMUM_FRAME = 8 + MAXIMUM_PAYLOAD + 4
_MAGIC = b"\xd7\xe9"
_HEAD = struct.Struct("<2sBBH")
_HEADER_BYTES, _TRAILER_BYTES = 8, 4
ATTEMPTS = 8
"""How often a request is sent at most, while none but an inference keeps the board busy."""
_ANSWER_SECONDS = 1.0
VERSION = 2
"""Version of the protocol."""
_GONE_SECONDS = 30.0
"""How long a line that is gone may take to come again."""
_PAUSE_SECONDS = 0.2
_MOST_CUTS = 50
"""How often a line may be cut during one request."""
_FIRST_TRIES = 8
"""How often a line is opened at first, where it is cut meanwhile."""


class FrameKind(enum.IntEnum):
    """Kind of a request."""

    HELLO = 1
    WRITE = 2
    RUN = 3
    READ = 4
    CYCLES = 5
    RESET = 6
    SESSION = 7
    LOAD = 8
    START = 9


ANSWER = 0x80
"""Added to the kind of a request in its answer."""
REFUSED = 0xFF
"""Kind of the answer to a request that cannot be carried out."""


class Frame(Record):
    """One frame: kind and sequence number of 0 to 255, and at most `MAXIMUM_PAYLOAD` bytes."""

    kind: int
    sequence: int
    payload: bytes = b""


def encode(frame: Frame) -> bytes:
    """The bytes of a frame; raises ValueError where its payload is too long."""
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


class BoardGreeting(Record):
    """A board's answer to HELLO."""

    payload: int
    """Most bytes of a payload it takes, and this computer sends."""
    count: int
    """Number of layers; for a rack, number of elements."""
    digest: str
    """Digest of the build on the board, 32 hexadecimal digits."""


class BoardRestart(BoardError):
    """The board began anew while its line was gone."""


def open_first(open_line: Callable[[], Link]) -> Link:
    """Open a line, once more where it is cut before it is open; raises BoardError."""
    for _ in range(_FIRST_TRIES - 1):
        with suppress(LineGone):
            return open_line()
        time.sleep(_PAUSE_SECONDS)
    return open_line()


class FrameConversation:
    """A conversation with a board, of which every request is carried out once however often it is sent.

    Args:
        link: its line, which is closed with the conversation.
        timeout: seconds the longest request may take, which is RUN.
        again: opens the line once more; as the link's name says, if not given.
        hint: what to do where the board does not keep to the protocol.
    """

    def __init__(self, link: Link, timeout: float, again: Callable[[], Link] | None, hint: str) -> None:
        self.link = link
        self._again = again or (lambda: open_link(link.where))
        self._timeout, self._decoder, self._hint = timeout, Decoder(), hint
        self._sequence = self._heard = self._session = 0
        self.asked = 0
        """How many requests there were."""
        self.repeated = 0
        """How often one had to be sent again."""

    def open(self) -> None:
        """Open the line again, whatever became of the board, and end a half request there; raises BoardError."""
        self.link.close()
        self.link, self._decoder = self._again(), Decoder()
        self._clear()

    def _clear(self) -> None:
        """Fill up a frame the other end may have half of: with zeros it is none, and the next byte begins anew."""
        self.link.write(bytes(MAXIMUM_FRAME))

    def hello(self) -> BoardGreeting:
        """Begin a session. Raises BoardError where the board does not answer, or speaks otherwise."""
        name = secrets.randbelow((1 << 32) - 1) + 1
        self._session = 0
        try:
            self._clear()
        except LineGone as gone:
            self._open_again(gone)
        answer = self.ask(FrameKind.HELLO, struct.pack("<I", name), answer=24)
        if len(answer) != 24:
            raise self.wrong(f"it introduces itself with {len(answer)} bytes, not 24")
        version, payload, count = struct.unpack_from("<HHI", answer)
        if version != VERSION:
            raise self.wrong(f"it speaks version {version} of the protocol, this is version {VERSION}")
        self._session = name
        return BoardGreeting(min(payload, MAXIMUM_PAYLOAD), count, answer[8:].hex())

    def ask(self, kind: FrameKind, payload: bytes = b"", answer: int = 0) -> bytes:
        """The answer to a request, of so many bytes if all is well; the request is sent again when none comes. Raises
        BoardError where the board refuses, stays silent or is gone; BoardRestart where it began anew."""
        self.asked += 1
        self._sequence = (self._sequence + 1) % 256
        request = encode(Frame(kind, self._sequence, payload))
        patience = min(_ANSWER_SECONDS, self._timeout / ATTEMPTS)
        patience += (2 * len(request) + answer) * self.link.seconds_per_byte
        attempts = max(ATTEMPTS, math.ceil(self._timeout / patience)) if kind is FrameKind.RUN else ATTEMPTS
        silences = cuts = 0
        while silences < attempts:
            self.repeated += silences + cuts > 0
            try:
                frame = self._answer(request, patience)
            except LineGone as gone:
                cuts += 1
                if cuts > _MOST_CUTS:
                    raise
                self._open_again(gone)
                continue
            if frame is None:
                silences += 1
            elif frame.kind == kind | ANSWER:
                return frame.payload
            else:
                said = frame.payload.decode("ascii", "replace").strip()
                raise self.wrong(
                    f"it refuses the request {kind.name} of {len(payload)} bytes" + f": {said}" * bool(said)
                )
        raise self._silent(kind, attempts, attempts * patience)

    def _answer(self, request: bytes, seconds: float) -> Frame | None:
        """The answer to an encoded request that is sent once, or the board's refusal; None when neither comes in time.
        Raises BoardError, of it LineGone where the line is cut."""
        _, kind, sequence, _ = _HEAD.unpack_from(request)
        self.link.write(request)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            content = self.link.read(left)
            self._heard += len(content)
            for frame in self._decoder.feed(content):
                if frame.sequence == sequence and frame.kind in (kind | ANSWER, REFUSED):
                    return frame
        return None

    def _open_again(self, gone: LineGone) -> None:
        """Open the line again, and see that the board is where it was. Raises BoardRestart where it has begun anew;
        `gone` where the line does not come again."""
        request = encode(Frame(FrameKind.SESSION, (self._sequence + 128) % 256))
        deadline, is_open = time.monotonic() + max(_GONE_SECONDS, self._timeout), False
        while time.monotonic() < deadline:
            try:
                if not is_open:
                    self.open()
                is_open = True
                if not self._session:
                    return
                frame = self._answer(request, _ANSWER_SECONDS)
            except BoardError:  # not there yet, or gone again
                is_open = False
                time.sleep(_PAUSE_SECONDS)
                continue
            if frame is None:  # it may be busy with an inference
                continue
            if frame.kind == REFUSED or self.sized(frame.payload, 4) != struct.pack("<I", self._session):
                what = "the board began anew while the line was gone: what it was given and what it kept are lost"
                raise BoardRestart(what, where=self.link.where, hint="see whether it has lost power, and run again")
            return
        raise gone

    def _silent(self, kind: FrameKind, attempts: int, seconds: float) -> BoardError:
        """The error for a board that did not answer."""
        what = f"the board does not answer: {kind.name} was sent {attempts} times in {seconds:.1f} s"
        if self._heard:
            what += f"; of {self._heard} bytes that came, {self._decoder.skipped} belong to no frame"
            hint = "see that both ends have the same speed, and that nothing else writes to the line"
        else:
            hint = "see that it runs the firmware of make board, and that its line is this one at this speed"
        if kind is FrameKind.RUN:
            hint = "give a longer --timeout if the inference takes longer; else it may have stopped in a fault"
        return BoardError(what, where=self.link.where, hint=hint)

    def sized(self, answer: bytes, nbytes: int) -> bytes:
        """An answer, which must have so many bytes; raises BoardError."""
        if len(answer) != nbytes:
            raise self.wrong(f"an answer has {len(answer)} bytes instead of {nbytes}")
        return answer

    def wrong(self, what: str) -> BoardError:
        """The error for a board that does something else than it should."""
        return BoardError(
            f"the board does not do what the protocol says: {what}", where=self.link.where, hint=self._hint
        )


def write_all(talk: FrameConversation, port: int, content: bytes, most: int) -> None:
    """Set an input by its number, with payloads of at most so many bytes; raises BoardError, as all here do."""
    step = most - 8
    for offset in range(0, len(content), step):
        request = struct.pack("<HHI", port, 0, offset) + content[offset : offset + step]
        talk.sized(talk.ask(FrameKind.WRITE, request), 0)


def read_all(talk: FrameConversation, port: int, nbytes: int, most: int) -> bytes:
    """An output by its number, of so many bytes."""
    found = bytearray()
    while len(found) < nbytes:
        count = min(nbytes - len(found), most)
        found += talk.sized(talk.ask(FrameKind.READ, struct.pack("<HHI", port, count, len(found)), count), count)
    return bytes(found)


def read_cycles(talk: FrameConversation, count: int, most: int) -> list[int]:
    """So many counts of cycles, from the first."""
    found: list[int] = []
    while len(found) < count:
        part = min(count - len(found), most // 8)
        answer = talk.sized(talk.ask(FrameKind.CYCLES, struct.pack("<I", len(found)), 8 * part), 8 * part)
        found += struct.unpack(f"<{part}Q", answer)
    return found
