"""Frames between this computer and a board: what is sent arrives, and what is damaged never does."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import BoardError
from dovetail.sim.frames import MAXIMUM_FRAME, MAXIMUM_PAYLOAD, Decoder, Frame, encode
from dovetail.sim.line import open_link

FRAMES = st.builds(
    Frame,
    st.integers(0, 255),
    st.integers(0, 255),
    st.binary(max_size=40) | st.lists(st.sampled_from([b"\xd7", b"\xe9", b"\xd7\xe9"])).map(b"".join),
)


def by_hand(kind: int, sequence: int, payload: bytes) -> bytes:
    """A frame as frames.h says it, whatever its length."""
    head = bytes([0xD7, 0xE9, kind, sequence, len(payload) & 0xFF, len(payload) >> 8])
    whole = head + (zlib.crc32(head) & 0xFFFF).to_bytes(2, "little") + payload
    return whole + zlib.crc32(whole).to_bytes(4, "little")


@given(st.lists(FRAMES, max_size=6), st.integers(1, 50))
def test_frames_arrive_however_the_stream_is_cut(frames: list[Frame], step: int) -> None:
    stream = b"".join(encode(frame) for frame in frames)
    assert stream == b"".join(by_hand(frame.kind, frame.sequence, frame.payload) for frame in frames)
    decoder = Decoder()
    found = [frame for at in range(0, len(stream), step) for frame in decoder.feed(stream[at : at + step])]
    assert found == frames and decoder.skipped == 0


@given(FRAMES, st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_is_found_and_the_next_frame_arrives(frame: Frame, place: int, bit: int) -> None:
    damaged = bytearray(encode(frame))
    damaged[place % len(damaged)] ^= 1 << bit
    following = Frame(3, 77, b"following")
    decoder = Decoder()
    assert following in (found := decoder.feed(bytes(damaged) + encode(following)))
    assert frame not in found or frame == following


@given(st.binary(max_size=300), st.integers(0, 2**32))
def test_garbage_gives_no_frames_and_is_not_kept(garbage: bytes, seed: int) -> None:
    decoder = Decoder()
    noise = random.Random(seed).randbytes(5000)
    assert decoder.feed(garbage + noise + b"\xd7\xe9" * 2000) == []
    assert decoder.skipped >= len(garbage) + len(noise) + 4000 - MAXIMUM_FRAME
    assert decoder.feed(b"\0" * MAXIMUM_FRAME + encode(Frame(1, 2))) == [Frame(1, 2)]


def test_lengths_beyond_the_limit_are_no_frames() -> None:
    most = Frame(4, 5, bytes(MAXIMUM_PAYLOAD))
    assert Decoder().feed(by_hand(4, 5, bytes(MAXIMUM_PAYLOAD))) == [most]
    assert Decoder().feed(by_hand(4, 5, bytes(MAXIMUM_PAYLOAD + 1)) + encode(most)) == [most]
    head = struct.pack("<2sBBH", b"\xd7\xe9", 1, 1, 0xFFFF)
    decoder = Decoder()
    assert decoder.feed(head + struct.pack("<H", zlib.crc32(head) & 0xFFFF) + bytes(10)) == []
    assert decoder.skipped == 18  # nothing is waited for
    with pytest.raises(ValueError, match="1025 bytes; the limit is 1024"):
        encode(Frame(1, 1, bytes(MAXIMUM_PAYLOAD + 1)))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("usb:1", "'usb:1': this names no board"),
        ("serial:", "names no board"),
        ("tcp:host", "names no board"),
        ("tcp:host:99999", "names no board"),
        ("serial:/dev/there_is_none", "cannot be opened"),
        ("serial:/dev/null", "cannot be opened"),
        ("serial:/dev/null:12345", "12345 is no speed"),
        ("tcp:127.0.0.1:1", "nobody answers"),
    ],
)
def test_lines_that_cannot_be_opened(where: str, message: str) -> None:
    with pytest.raises(BoardError, match=message) as raised:
        open_link(where)
    assert raised.value.hint
