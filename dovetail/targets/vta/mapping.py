"""How a region's loops are mapped onto VTA: which loop goes outside, what is staged where, which instruction does what.

The schedules are made once per kind of region, for all sizes; every step is a rewrite that Exo checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dovetail.build.toolchain import default_cache
from dovetail.loops import Procedure, covered, memory, procedure, stored
from dovetail.targets.vta import instructions
from dovetail.targets.vta.instructions import instruction

_ORDER = (
    "load_padded", "load_weights", "load_matrices", "load_image", "load_ones", "load_parameter", "load_wide", "zero",
    "product", "product_of_block", "add_bias", "largest", "multiply_each", "multiply_by", "shift_each", "shift_by",
    "at_least", "at_most", "add_number", "store",
)  # fmt: skip


@cache
def scheduled(text: str, batch: int, block: int, stride: tuple[int, int]) -> Procedure:
    """A region's algorithm as VTA's instructions, kept in the user's cache folder between runs.

    Args:
        text: of `dovetail.loops.algorithm`.
        batch: image lanes.
        block: channel lanes.
        stride: of the window, rows and columns.

    Raises:
        TargetError: no instruction covers a statement.
    """
    known = {name: instruction(name, batch, block, stride) for name in _ORDER}
    scope = {**known, **{name: memory(name) for name in ("INP", "WGT", "ACC")}}
    key = "\n".join([text, str((batch, block, stride)), *_sources()])
    return stored(key, default_cache() / "loops", lambda: schedule(text, batch, block, list(known.values())), scope)


@cache
def _sources() -> tuple[str, ...]:
    """The text of what makes a schedule."""
    return tuple(Path(file).read_text(encoding="utf-8") for file in (__file__, instructions.__file__))


def schedule(text: str, batch: int, block: int, meanings: Sequence[Procedure]) -> Procedure:
    """A region's algorithm as these instructions, made anew.

    Raises:
        TargetError: no instruction covers a statement.
    """
    made = procedure(text, {})
    made = _pool(made) if "wide" in _allocations(made) else _sum(made, batch, block)
    for name in ("scale", "shift"):
        made = _stage_parameter(made, name, batch, block)
    if "one" in _tensors(made):
        made = _stage_bias(made, batch, block)
    made = _place(made, {"total": "ACC", "wide": "ACC"})
    return covered(made, meanings)


def _sum(made: Procedure, batch: int, block: int) -> Procedure:
    """Input blocks outermost; a block of the image and its weights are staged for each."""
    from exo.stdlib.scheduling import fuse, reorder_stmts, resize_dim, simplify, sink_alloc, stage_mem

    depthwise = "ib" not in _loops(made)
    if not depthwise:
        made = _outside(made, "ib", ("so", "sn", "sw", "sh", "sb"))
    for tap in ("kh", "kw"):
        made = _outside(made, tap, ("so", "sn", "sw", "sh"))
    step = "sb" if depthwise else "ib"
    lanes = f"0:{batch}, 0:{block}"
    if "padded" in _allocations(made):
        for _ in range(2):  # the sum's buffer and its zeros go before the padding
            made = reorder_stmts(made, made.find("for pb in _:_").expand(0, 1))
        made = fuse(made, made.find("for pb in _:_"), made.find(f"for {step} in _:_"))
        for _ in range(2):
            made = reorder_stmts(made, made.find("padded: _").expand(0, 1))
        made = sink_alloc(made, made.find("padded: _"))
        made = simplify(resize_dim(made, "padded", 0, 1, "pb"))
        step = "pb"
    else:
        window = f"x[{step}, 0:IH, 0:IW, {lanes}]"
        made = stage_mem(made, _first(made, "kh" if depthwise else "sb"), window, "padded")
    taps = f"0:KH, 0:KW, 0:{block}, 0:{block}"
    weights = f"w[{step}, {taps}]" if depthwise else f"w[0:OCB, {step}, {taps}]"
    made = simplify(stage_mem(made, _first(made, "kh" if depthwise else "sb"), weights, "weights"))
    return _place(made, {"padded": "INP", "weights": "WGT"})


def _pool(made: Procedure) -> Procedure:
    """Taps outermost: each is one instruction over the whole result."""
    for tap in ("kh", "kw"):
        made = _outside(made, tap, ("so", "sn", "sw", "sh", "sb"))
    return made


def _stage_bias(made: Procedure, batch: int, block: int) -> Procedure:
    from exo.stdlib.scheduling import simplify, stage_mem

    made = _outside(made, "bd", ("bo", "bn", "bw", "bh", "bb"))
    channels = _extent(made, "zb")
    made = stage_mem(made, _first(made, "bd"), f"one[0:D, 0:{batch}, 0:{block}]", "ones")
    made = stage_mem(made, _first(made, "bd"), f"digits[0:{channels}, 0:D, 0:{block}, 0:{block}]", "bias")
    return _place(simplify(made), {"ones": "INP", "bias": "WGT"})


def _stage_parameter(made: Procedure, name: str, batch: int, block: int) -> Procedure:
    from exo.stdlib.scheduling import simplify, stage_mem

    if name not in _tensors(made):
        return made
    loop = {"scale": "mb", "shift": "rb"}[name]
    window = f"{name}[0:{_extent(made, 'zb')}, 0:{batch}, 0:{block}]"
    made = stage_mem(made, _first(made, loop), window, f"{name}_here")
    return _place(simplify(made), {f"{name}_here": "ACC"})


def _outside(made: Procedure, loop: str, past: Sequence[str]) -> Procedure:
    """Move a loop outwards past others, innermost first."""
    from exo.stdlib.scheduling import reorder_loops

    for outer in past:
        made = reorder_loops(made, f"{outer} {loop}")
    return made


def _place(made: Procedure, memories: dict[str, str]) -> Procedure:
    from exo.stdlib.scheduling import set_memory

    for name, where in memories.items():
        if name in _allocations(made):
            made = set_memory(made, f"{name}: _", memory(where))
    return made


def _first(made: Procedure, loop: str) -> Any:
    return made.find(f"for {loop} in _:_")


def _extent(made: Procedure, loop: str) -> str:
    return str(_first(made, loop).hi().name())


def _tensors(made: Procedure) -> set[str]:
    """Names of the array arguments."""
    return {argument.name() for argument in made.args() if argument.is_tensor()}


def _allocations(made: Procedure) -> set[str]:
    return {cursor.name() for cursor in made.find("_: _", many=True)}


def _loops(made: Procedure) -> set[str]:
    return {cursor.name() for cursor in made.find("for _ in _: _", many=True)}
