"""The ways from a core to the memories whose reads wait, or whose bytes are counted, as block_hook.c walks them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from dovetail.target.chip import BOTH, INSTRUCTIONS, Cache, Memory


class _CachePlace(ctypes.Structure):
    """Mirrors `struct line` of block_hook.c."""

    _fields_ = (("number", ctypes.c_uint64), ("used", ctypes.c_uint64))


class _CacheState(ctypes.Structure):
    """Mirrors `struct cache` of block_hook.c."""

    _fields_ = (
        ("time", ctypes.c_uint64),
        ("lines", ctypes.c_void_p),
        ("sets", ctypes.c_uint32),
        ("ways", ctypes.c_uint32),
    )


class _WaitPort(ctypes.Structure):
    """Mirrors `struct port` of block_hook.c."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("base", "size")),
        *((name, ctypes.c_void_p) for name in ("cache", "state")),
        *((name, ctypes.c_uint64) for name in ("last", "bytes")),
        *((name, ctypes.c_uint32) for name in ("shift", "cycles", "prefetch")),
    )


class WaitPorts:
    """The ports of such memories: of instructions, then of data; `state` is the address of the core's
    counters."""

    def __init__(self, memories: Sequence[Memory], state: int) -> None:
        self._held: list[Any] = []
        self._names = [memory.name for memory in memories]
        found: dict[tuple[str, int], int | None] = {}
        for number, memory in enumerate(memories):
            for cache in memory.caches:
                found |= dict.fromkeys(((kind, number) for kind in cache.holds), self._cache(memory, cache))
        self.ports = (_WaitPort * (2 * len(memories)))()
        for place, kind in enumerate(BOTH):
            for number, memory in enumerate(memories):
                line, cycles = memory.line(kind)
                ahead = memory.prefetch and kind == INSTRUCTIONS
                at = (memory.base, memory.size, found.get((kind, number)), state, 0, 0)
                self.ports[place * len(memories) + number] = _WaitPort(*at, line.bit_length() - 1, cycles, ahead)

    def traffic(self) -> dict[str, int]:
        """Bytes of each memory read or written so far: whole lines where reads wait."""
        ports = zip(self.ports, self.ports[len(self._names) :], self._names, strict=False)
        return {name: int(code.bytes + data.bytes) for code, data, name in ports}

    def _cache(self, memory: Memory, cache: Cache) -> int:
        """The address of an empty cache."""
        line, _ = memory.line(cache.holds[0])
        places = cache.size // line
        ways = cache.ways or places
        lines = (_CachePlace * places)()
        state = _CacheState(0, ctypes.addressof(lines), places // ways, ways)
        self._held += [lines, state]
        return ctypes.addressof(state)
