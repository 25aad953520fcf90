"""Microcontrollers one can buy, from parts.toml: the target with their core, where flash and RAM lie, and how the flash
is read."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.records import Record, field
from dovetail.target.chip import BOTH, INSTRUCTIONS, Cache
from dovetail.target.description import Target

_K = 1024


class Microcontroller(Record):
    """A microcontroller."""

    core: str
    """The target whose core it has."""
    name: str
    """Maker's name of the variant."""
    source: str
    """The documents the rest is from."""
    clock: int
    """MHz of the core, the most it is made for."""
    flash: tuple[int, int]
    """First address and bytes of the memory of code and constants."""
    ram: tuple[int, int]
    """The same of the memory of values."""
    reads: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Memory` that say how long reads of the flash take; empty where they do not wait, or no document says
    how long."""


def _part(entry: dict[str, Any]) -> Microcontroller:
    """A part as its file has it, sizes in KiB."""
    places = {name: (entry[name][0], entry[name][1] * _K) for name in ("flash", "ram")}
    reads = dict(entry.get("reads", {}))
    caches = [{**own, "holds": tuple(own.get("holds", BOTH))} for own in reads.pop("caches", ())]
    return Microcontroller(**{**entry, **places, "reads": {**reads, "caches": tuple(Cache(**own) for own in caches)}})


PARTS = {
    name: _part(entry) for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
"""Name -> part. Software that shares the chip (a boot loader, a radio's stack) takes its share: `--set ram.size=`."""


def part_of(name: str, core: Target) -> Target:
    """The target of a part: that of its core, with the part's memories, and loops that its instruction cache keeps."""
    part = PARTS[name]
    kept = sum(cache.size for cache in part.reads.get("caches", ()) if INSTRUCTIONS in cache.holds) * 2 // 3
    pairs = core.core.pairs and replace(core.core.pairs, loop=kept)
    places = {core.code: (part.flash, part.reads), core.values: (part.ram, {})}
    memories = (
        replace(memory, base=at, size=size, **reads)
        for memory, ((at, size), reads) in ((memory, places[memory.name]) for memory in core.memories)
    )
    sentence = f"{part.name}: {part.core}, {_bytes(part.flash[1])} flash, {_bytes(part.ram[1])} RAM"
    own = replace(core.core, pairs=pairs)
    return replace(core, name=name, sentence=sentence, core=own, memories=tuple(memories))


def _bytes(size: int) -> str:
    return f"{size // _K // _K} MiB" if size % (_K * _K) == 0 else f"{size // _K} KiB"
