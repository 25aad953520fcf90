"""Cases from declarations: a layer every limit takes, then each axis at and on both sides of where that ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from dovetail.check.layers import LEAST, NUMBERS, OWN, PADS, SIZES, Layer, Point, setting, single
from dovetail.target.description import Engine, Offload
from dovetail.target.pattern import Match, Scope, match_pattern

_LADDER = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 255, 256,
           257, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 32767, 32768, 65535, 65536)  # fmt: skip
_TOGETHER = (("stride_rows", "stride_columns"), ("kernel_rows", "kernel_columns"),
             ("dilation_rows", "dilation_columns"), ("rows", "columns"), PADS)  # fmt: skip
"""Axes that limits often want to be equal."""
_BASES: tuple[dict[str, int], ...] = (
    {}, {"channels": 1}, {"top": 0, "bottom": 0, "left": 0, "right": 0}, {"kernel_rows": 1, "kernel_columns": 1},
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """How much is tried."""

    work: int
    """Most multiply-accumulates of a case."""
    nbytes: int
    """Most bytes of the operands, constants and result of a case."""
    mixed: int
    """Cases that mix settings of all axes."""


QUICK, FULL = Limits(150_000, 12_000, 4), Limits(2_000_000, 100_000, 24)


@dataclass(frozen=True)
class Case:
    """One layer to try."""

    engine: str
    offload: str
    point: Point
    why: str
    """What it is about, for people."""
    taken: bool = True
    """Whether the limits let the engine take it."""
    failure: str = ""
    """The limit that keeps it out, where they do not."""
    aligned: bool = False
    """On a model alone: everything lies at multiples of 256 bytes, whatever the declarations say."""
    dense: bool = False
    """On a model alone: rows and pixels lie side by side, although operands may have strides."""
    room: int = 0
    """Bytes the engine's memory is cut down to, so that the layer is computed in tiles; 0 for all there is."""


@dataclass(frozen=True)
class Tried:
    """What the limits say of a point."""

    layer: Layer
    match: Match
    failures: tuple[str, ...]
    nbytes: int


class Unasked(Exception):
    """A limit's measure or test raised an exception: its text says which."""


def ask(offload: Offload, point: Point) -> Tried | None:
    """Make the layer of a point and ask every limit; None where there is no such layer.

    Raises:
        Underivable: no layer can be made from the pattern.
        Unasked: a limit raises.
    """
    try:
        graph, layer = single(offload.pattern, point)
    except ValueError:
        return None
    match = match_pattern(offload.pattern, graph, layer.root)
    if not isinstance(match, Match):
        return None
    failures: list[str] = []
    for limit in offload.constraints:
        if limit.scope is Scope.TILES:
            continue
        try:
            failure = limit.failure(match)
        except Exception as error:  # a limit may rely on those before it, which are asked first
            if failures:
                failures.append(f"{limit.sentence}; here: {type(error).__name__}")
                continue
            what = f"the limit '{limit.sentence}' raises {type(error).__name__}: {error}"
            raise Unasked(what) from error
        if failure:
            failures.append(failure)
    held = (*layer.inputs.values(), *graph.constants.values(), layer.expected)
    return Tried(layer, match, tuple(failures), sum(array.nbytes for array in held))


def choices(axis: str) -> tuple[int, ...]:
    """Every setting of an axis worth trying, the simplest last for numbers and first for sizes."""
    if axis in SIZES:
        return tuple(size for size in (0, *_LADDER) if LEAST[axis] <= size <= 64)
    return NUMBERS[axis] if axis in NUMBERS else OWN[axis.split(":")[0]]


def base(offload: Offload) -> Point | None:
    """A layer the limits take, as near to the defaults as can be found; None where none is.

    Raises: as `ask`.
    """
    nearest: tuple[int, Point] | None = None
    for start in _BASES:
        point, count = dict(start), _misses(offload, start)
        while count:
            found = _better(offload, point, count)
            if found is None:
                break
            count, point = found
        if count == 0:
            return point
        if nearest is None or (count or 99) < nearest[0]:
            nearest = (count if count is not None else 99, point)
    return None


def nearest_failure(offload: Offload) -> str:
    """The limits that the default layer breaks."""
    tried = ask(offload, {})
    return "; ".join(tried.failures) if tried else "the pattern matches no layer of it"


def _misses(offload: Offload, point: Point) -> int | None:
    tried = ask(offload, point)
    return None if tried is None else len(tried.failures)


def _better(offload: Offload, point: Point, count: int | None) -> tuple[int, dict[str, int]] | None:
    """A change of one axis, else of two, that breaks fewer limits."""
    tried = ask(offload, point)
    axes = tried.layer.used if tried else (*SIZES,)
    small = {axis: [s for s in choices(axis) if s <= 33 and s != setting(point, axis)] for axis in axes}
    single_changes = [{axis: value} for axis in axes for value in small[axis]]
    for changes in (single_changes, _pairs(small)):
        best: tuple[int, dict[str, int]] | None = None
        for change in changes:
            fewer = _misses(offload, {**point, **change})
            if fewer is not None and (count is None or fewer < count) and (best is None or fewer < best[0]):
                best = (fewer, {**point, **change})
                if fewer == 0:
                    return best
        if best:
            return best
    return None


def _pairs(small: dict[str, list[int]]) -> Iterator[dict[str, int]]:
    for one, two in combinations(small, 2):
        few = [v for v in small[one] if one not in SIZES or v in (0, 1, 2, 3, 4, 5, 7, 16, 32)]
        others = [v for v in small[two] if two not in SIZES or v in (0, 1, 2, 3, 4, 5, 7, 16, 32)]
        yield from ({one: a, two: b} for a in few for b in others)


def derive(engine: Engine, offload: Offload, start: Point, limits: Limits) -> list[Case]:
    """The cases of an offload around a layer it takes."""
    found: dict[tuple[tuple[str, int], ...], Case] = {}
    tried = ask(offload, start)
    assert tried is not None

    def keep(point: Point, why: str) -> bool:
        """Note a case; says whether the limits take it."""
        asked = ask(offload, point)
        if asked is None or asked.layer.work > limits.work or asked.nbytes > limits.nbytes:
            return False
        key = tuple((axis, setting(point, axis)) for axis in asked.layer.used)
        failure = asked.failures[0] if asked.failures else ""
        found.setdefault(key, Case(engine.name, offload.name, dict(key), why, not failure, failure))
        return not failure

    keep(start, "a layer within every limit")
    for axis in tried.layer.used:
        if axis in SIZES:
            _edges(offload, start, axis, limits, keep)
        else:
            for value in choices(axis):
                keep({**start, axis: value}, f"{axis} = {value}")
    for axes in _TOGETHER:
        for size in (1, 2, 3, 4, 5, 7):
            point = {**start, **dict.fromkeys(axes, size)}
            if axes[0] in tried.layer.used:
                keep(point, f"{axes[0].split('_')[0]} = {size} both ways" if axes != PADS else f"padding of {size}")
    for step, axes in ((offload.channel_step, ("outputs", "channels")), (offload.row_step, ("rows", "columns"))):
        for size in (step - 1, step, step + 1, 2 * step + 1) if step > 1 else ():
            for axis in (axis for axis in axes if axis in tried.layer.used and size > 0):
                keep({**start, axis: size}, f"{axis} = {size}, around the tile step {step}")
    _mixed(tried.layer.used, start, limits, keep)
    return list(found.values())


def _edges(offload: Offload, start: Point, axis: str, limits: Limits, keep: Callable[[Point, str], bool]) -> None:
    """Every place on an axis where the limits change their mind, and the ends of what is tried."""
    before: tuple[int, bool] | None = None
    largest: int | None = None
    for size in (LEAST[axis], *(size for size in _LADDER if size > LEAST[axis])):
        point = _thin(offload, start, axis, size)
        asked = ask(offload, point)
        if asked is None:
            continue
        if asked.layer.work > limits.work or asked.nbytes > limits.nbytes:
            break
        taken = not asked.failures
        if before is None or size <= 3:
            keep(point, f"{axis} = {size}")
        elif before[1] != taken:
            _flip(offload, start, axis, (before[0], size), taken, keep)
        before, largest = (size, taken), size if taken else largest
    if largest is not None:
        keep(_thin(offload, start, axis, largest), f"{axis} = {largest}, the largest tried")


def _flip(
    offload: Offload, start: Point, axis: str, span: tuple[int, int], taken: bool, keep: Callable[[Point, str], bool]
) -> None:
    """Both sides of the limit between two sizes."""
    low, high = span
    while high - low > 1:
        middle = (low + high) // 2
        asked = ask(offload, _thin(offload, start, axis, middle))
        if asked is not None and (not asked.failures) == taken:
            high = middle
        else:
            low = middle
    inside, outside = (high, low) if taken else (low, high)
    keep(_thin(offload, start, axis, inside), f"{axis} = {inside}, just inside")
    keep(_thin(offload, start, axis, outside), f"{axis} = {outside}, just outside")


def _thin(offload: Offload, start: Point, axis: str, size: int) -> Point:
    """A point with this size; the other ones small where it is large, so that it can be computed."""
    point = {**start, axis: size}
    if size <= 2 * max(SIZES[axis], setting(start, axis)):
        if axis.startswith("kernel"):  # a kernel wants an image around it
            image = {"kernel_rows": "rows", "kernel_columns": "columns"}[axis]
            return {**point, image: max(setting(start, image), size)}
        return point
    few = {"channels": 3, "outputs": 3, "rows": 3, "columns": 3}
    few |= {"kernel_rows": {"rows": size}, "kernel_columns": {"columns": size}}.get(axis, {})
    thin = {**point, **{name: value for name, value in few.items() if name != axis}}
    asked = ask(offload, thin)
    return thin if asked is not None and not asked.failures else point


def _mixed(used: tuple[str, ...], start: Point, limits: Limits, keep: Callable[[Point, str], bool]) -> None:
    """Layers with settings of every kind at once, taken by the limits."""
    generator = np.random.default_rng(1)
    count = tries = 0
    while count < limits.mixed and tries < 12 * limits.mixed:
        tries += 1
        point = dict(start)
        for axis in used:
            allowed = [value for value in choices(axis) if axis not in SIZES or value <= (3 if axis in PADS else 20)]
            if generator.random() < (0.5 if axis in SIZES else 0.15):
                point[axis] = int(generator.choice(allowed))
        count += keep(point, "settings of several axes at once")


def cut_down(case: Case, nbytes: int) -> Case:
    """The same layer with less memory, to be computed in tiles."""
    return Case(case.engine, case.offload, case.point, f"{case.why}, in tiles", room=nbytes)
