"""The core's copies, compiled for this computer, against numpy byte by byte."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.build.toolchain import compile_host
from dovetail.codegen.emit.firmware import COPY, runtime_path
from dovetail.errors import MissingExtraError

SIZE = 1 << 16


class Padding(ctypes.Structure):
    """copy_padding of copy.h."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("top", "bottom", "left", "right")] + [("fill", ctypes.c_uint8)]


@dataclass(frozen=True)
class Case:
    """A copy within two memories of `SIZE` bytes."""

    target: int
    source: int
    row_bytes: int
    rows: int
    planes: int
    gaps: tuple[int, int, int, int]
    """Bytes between rows and between planes, in the target and in the source."""
    pads: tuple[int, int, int, int]
    """Top, bottom, left, right."""

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of target rows, source rows, target planes, source planes."""
        top, bottom, left, right = self.pads
        to_row, from_row = left + self.row_bytes + right + self.gaps[0], self.row_bytes + self.gaps[1]
        return to_row, from_row, (top + self.rows + bottom) * to_row + self.gaps[2], self.rows * from_row + self.gaps[3]

    def expected(self, before: np.ndarray, source: np.ndarray, fill: int, border: bool) -> np.ndarray:
        """The target memory afterwards."""
        memory = before.copy()
        top, bottom, left, right = self.pads
        to_row, from_row, to_plane, from_plane = self.strides
        for plane in range(self.planes):
            for row in range(top + self.rows + bottom):
                start = self.target + plane * to_plane + row * to_row
                for byte in range(left + self.row_bytes + right):
                    inside = top <= row < top + self.rows and left <= byte < left + self.row_bytes
                    place = self.source + plane * from_plane + (row - top) * from_row + byte - left
                    if not inside:
                        memory[start + byte] = fill
                    elif not border:
                        memory[start + byte] = source[place]
        return memory

    def behind(self) -> np.ndarray:
        """Which bytes are behind rows, up to a multiple of four."""
        found = np.zeros(SIZE, bool)
        to_row, _, to_plane, _ = self.strides
        for plane, row in product(range(self.planes), range(self.rows)):
            start = self.target + plane * to_plane + row * to_row
            found[start + self.row_bytes : start + -(-self.row_bytes // 4) * 4] = True
        return found


def cases() -> list[Case]:
    """Random ones, many of the usual row of 16 bytes, aligned and not."""
    random, found = np.random.default_rng(0), []
    for number in range(300):
        step = 4 if number % 4 == 0 else 1
        small = [int(value) * step for value in random.integers(0, 9, 10)]
        row_bytes = (16, int(random.integers(0, 40)), int(random.integers(0, 4)))[number % 3]
        rows, planes = int(random.integers(0, 20)), int(random.integers(0, 6))
        found.append(Case(small[0], small[1], row_bytes, rows, planes, tuple(small[2:6]), tuple(small[6:10])))  # type: ignore[arg-type]
    for rows, gap, source, target in product(range(18), (1, 5, 13, 29), (0, 3, 4), (0, 1, 2, 4)):  # pixels
        found.append(Case(target, source, 3, rows, 1 + rows % 2, (gap, 0, 4, 3 * (source % 4)), (0, 0, 0, 0)))
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("copy")
    for name in COPY:
        (folder / name).write_bytes(runtime_path(name).read_bytes())
    flags = ("-std=c99", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
    try:
        made = compile_host(folder, [Path("copy.c")], defines={"DOVETAIL_HOST": None}, include=[Path(".")], flags=flags)
    except MissingExtraError as missing:
        pytest.skip(str(missing))
    return ctypes.CDLL(str(made))


def test_copies_and_fills(library: ctypes.CDLL) -> None:
    random = np.random.default_rng(1)
    for case in cases():
        source, before = (random.integers(0, 256, SIZE).astype(np.uint8) for _ in range(2))
        to_row, from_row, to_plane, from_plane = case.strides
        sizes = (case.row_bytes, case.rows, to_row)
        plain = Case(case.target, case.source, case.row_bytes, case.rows, case.planes, case.gaps, (0, 0, 0, 0))
        padding = Padding(*case.pads, 0xC3)
        calls = {
            "copy_pad": (case, (*sizes, from_row, case.planes, to_plane, from_plane, ctypes.byref(padding))),
            "copy_fill_border": (case, (*sizes, case.planes, to_plane, ctypes.byref(padding))),
        }
        to, back, far, near = plain.strides
        calls["copy_3d"] = (plain, (case.row_bytes, case.rows, to, back, case.planes, far, near))
        if to >= -(-case.row_bytes // 4) * 4:
            calls["copy_into_blocks"] = calls["copy_3d"]
        if case.planes == 1:
            calls["copy_2d"] = (plain, (case.row_bytes, case.rows, to, back))
            if case.rows == 1:
                calls["copy_1d"] = (plain, (case.row_bytes,))
        for name, (what, arguments) in calls.items():
            memory = before.copy()
            border = name == "copy_fill_border"
            start = [ctypes.c_void_p(memory.ctypes.data + case.target)]
            start += [] if border else [ctypes.c_void_p(source.ctypes.data + case.source)]
            getattr(library, name)(*start, *arguments)
            expected = what.expected(before, source, 0xC3, border)
            if name == "copy_into_blocks":
                expected = np.where(what.behind(), memory, expected)
            np.testing.assert_array_equal(memory, expected, err_msg=f"{name} {what}")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_planes_become_pixels(library: ctypes.CDLL, channels: int) -> None:
    """Dense pixels from a plane of each channel, as images of ONNX models come, however the loops are given."""
    random = np.random.default_rng(channels)
    for pixels, gap, to, back in product((*range(1, 14), 96, 97), (0, 1, 4, 33), (0, 1, 3), (0, 2)):
        source, before = (random.integers(0, 256, SIZE).astype(np.uint8) for _ in range(2))
        plane = pixels + gap
        expected = before.copy()
        planes = np.stack([source[back + plane * channel :][:pixels] for channel in range(channels)], axis=1)
        expected[to : to + pixels * channels] = planes.reshape(-1)
        for loops in ((channels, 1, plane, pixels, channels, 1), (pixels, channels, 1, channels, 1, plane)):
            memory = before.copy()
            ends = (memory.ctypes.data + to, source.ctypes.data + back)
            library.copy_3d(*map(ctypes.c_void_p, ends), 1, *loops)
            np.testing.assert_array_equal(memory, expected, err_msg=f"{pixels} pixels, planes {plane} apart, {loops}")
