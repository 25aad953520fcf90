"""Cases from declarations: a layer every limit takes, then each axis at and on both sides of where that ends.

Settings inside the limits are tried several at a time (`_packed`): each case has as many as the limits take at once, as
long as they hide nothing of each other. Settings outside are tried one axis at a time. Declarations that cannot be
right are found without computing anything.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, pairwise, product, zip_longest
from math import inf
from pathlib import Path

from dovetail import names
from dovetail.documented import document
from dovetail.guests.check.layers import (
    LEAST,
    MADE,
    NUMBERS,
    OWN,
    PADS,
    SIZES,
    TYPES,
    MadeLayer,
    NoLayerError,
    Point,
    setting,
    single,
)
from dovetail.guests.check.networks import NETWORKS, FromNetworks
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.records import Record
from dovetail.sim.worker import BUG
from dovetail.target.description import Target
from dovetail.target.engine import Engine
from dovetail.target.offload import Cases, Offload
from dovetail.target.pattern import Constraint, Match, Pattern, Scope, match_pattern


def raised(error: Exception) -> str:
    """Type, message, file and line of an exception; of one in a simulator's process the same from its traceback."""
    text = str(error)
    if isinstance(error, RuntimeError) and text.startswith(BUG):
        message = text.strip().splitlines()[-1]
        places = re.findall(r'^ *File "(.*?)", line (\d+)', text, re.MULTILINE)
    else:
        message = f"{type(error).__name__}: {text}"
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    places = [place for place in places if place[0] != names.__file__]  # where old names are looked up
    return message + "".join(f" ({Path(file).name}:{line})" for file, line in places[-1:])


_LADDER = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 4096, 32768, 65536)
"""Sizes that are tried; between two that the limits judge differently, the edge is searched."""
_WINDOW = tuple((f"{what}_rows", f"{what}_columns") for what in ("stride", "kernel", "dilation"))
_TOGETHER: tuple[tuple[str, ...], ...] = (*_WINDOW, ("rows", "columns"), PADS)
"""Axes that limits often want to be equal."""
_IMAGE = {f"{what}_{name}": name for what in ("kernel", "stride") for name in ("rows", "columns")}
_SYMMETRIC = {"per_channel": 0, "multiplier": 1, "rounding": [*Rounding].index(Rounding.FLOAT32),
              "input_zero": 0, "output_zero": 0}  # fmt: skip
"""One scale for all channels, by which sums are multiplied as floats, and no zero points."""
_BASES: tuple[dict[str, int], ...]
_BASES = ({}, {"channels": 1}, dict.fromkeys(PADS, 0), {"kernel_rows": 1, "kernel_columns": 1}, {"type": 1},
          {**dict.fromkeys(PADS, 0), **dict.fromkeys(_IMAGE, 2), "rows": 8, "columns": 8},
          _SYMMETRIC, {**_SYMMETRIC, **dict.fromkeys(PADS, 0), "weights": 0, "rows": 3, "columns": 3})  # fmt: skip
"""Points at which the search for a layer that an engine takes begins: the last is the mean of a whole image."""


class Limits(Record):
    """Limits on the number of cases that are tried."""

    work: int
    """Most multiply-accumulates of a case."""
    nbytes: int
    """Most bytes of the operands, constants and result of a case."""
    alone: bool = False
    """Whether each setting is also tried alone, with all other settings as in the first layer."""


QUICK, FULL = Limits(150_000, 12_000), Limits(2_000_000, 100_000, alone=True)
_WEAK = {("x", 0), ("weights", 0)}
"""Settings with which little can be wrong: for smallest forms only."""
_BESIDE: tuple[dict[str, int], ...]
_BESIDE = ({"bottom": 0, "right": 0}, {"rows": 6, "columns": 6}, {"kernel_rows": 1, "kernel_columns": 1}, {"groups": 2})
"""Other changes with which a setting is tried that is refused alone."""
_ODD = (3, 13)
"""Sizes that do not fill bytes of 2 or 4 elements."""
_NAMED = 3
"""Settings of a case that are named."""
_BINS = 4
"""Cases a setting is tried to be put into before it gets one of its own."""


class Case(Record):
    """A layer that is tried."""

    engine: str
    """Name of the engine."""
    offload: str
    """Name of the offload."""
    point: Point
    """Sizes and numbers of the layer."""
    why: str
    """Description of its settings, for people."""
    taken: bool = True
    """Whether the limits let the engine take it."""
    failure: str = ""
    """The limit that keeps it out, if one does."""
    aligned: bool = False
    """On a model alone: everything lies at multiples of 256 bytes, also if the declarations allow less."""
    dense: bool = False
    """On a model alone: rows and pixels lie side by side, although operands may have strides."""
    room: int = 0
    """Bytes the engine's memory is cut down to, so that the layer is computed in tiles; 0 for all there is."""


class PointCheck(Record):
    """The layer of a point, and every limit it breaks."""

    layer: MadeLayer
    """Layer made for the point."""
    match: Match
    """Match of the pattern in the layer."""
    failures: tuple[str, ...]
    """Sentences of the constraints it breaks."""
    nbytes: int
    """Bytes of its operands, constants and result."""


class UserCodeError(Exception):
    """A limit or the cycles raised an exception: the text says which."""


def ask(offload: Offload, point: Point) -> PointCheck | None:
    """The layer of a point, checked by every limit; None if no layer has the point's settings.

    Raises:
        NoLayerError: no layer can be made from the pattern.
        UserCodeError: a limit raises.
    """
    settings = tuple(sorted(point.items()))
    return _asked(offload.pattern, offload.cases, offload.constraints, settings)


def taken(offload: Offload, point: Point) -> PointCheck | None:
    """The layer of a point if there is one and every limit takes it."""
    checked = ask(offload, point)
    return checked if checked is not None and not checked.failures else None


@lru_cache(maxsize=2048)
def _asked(
    pattern: Pattern, cases: Cases | None, limits: tuple[Constraint, ...], settings: tuple[tuple[str, int], ...]
) -> PointCheck | None:
    try:
        graph, layer = single(pattern, cases, dict(settings))
    except ValueError:
        return None
    match = match_pattern(pattern, graph, layer.root)
    if not isinstance(match, Match):
        return None
    failures: list[str] = []
    for limit in limits:
        if limit.scope is Scope.TILES:
            continue
        try:
            failure = limit.failure(match)
        except Exception as error:  # a limit may rely on the limits before it
            if not failures:
                what = f"the limit '{limit.sentence}' raises {raised(error)}; it is asked of all the pattern matches"
                raise UserCodeError(what) from error
            failure = f"{limit.sentence}; here: {type(error).__name__}"
        failures += [failure] if failure else []
    arrays = (*layer.inputs.values(), *graph.constants.values(), layer.expected)
    return PointCheck(layer, match, tuple(failures), sum(array.nbytes for array in arrays))


def choices(axis: str) -> tuple[int, ...]:
    """Every setting of an axis worth trying, the simplest last for numbers and first for sizes."""
    if axis in MADE:
        return ()
    if axis in SIZES:
        return tuple(size for size in (0, *_LADDER, 7) if LEAST[axis] <= size <= 64)
    return NUMBERS[axis] if axis in NUMBERS else OWN[axis.split(":")[0]]


_PATTERN: Point = {}
"""The origin of layers made from the pattern."""


def bases(offload: Offload) -> list[Point]:
    """Layers to begin with that every limit takes: one made from the pattern and one of the port's own networks, or if
    there are neither, one of each usual network with such a layer. Empty if there is none.

    Raises:
        NoLayerError: no layer can be made from the pattern, and there is no other.
        UserCodeError: a limit raises.
    """
    networks = offload.cases if isinstance(offload.cases, FromNetworks) else None
    own: list[Point] = [{"made": 1}] if networks is not None and networks.own is not None else []
    usual: list[Point] = [{"made": 1, "model": number + 1} for number in range(len(NETWORKS) if networks else 0)]
    missing: NoLayerError | None = None
    for origins in ([_PATTERN, *own], usual):
        points: list[Point] = []
        for origin in origins:
            try:
                point = _within_limits(offload, origin)
            except NoLayerError as error:
                missing = error
            else:
                points += [point] if point is not None else []
        if points:
            return points
    if missing is not None:
        raise missing
    return []


def base(offload: Offload) -> Point | None:
    """The first possible one of `bases`; None if no base is possible."""
    return next(iter(bases(offload)), None)


def _within_limits(offload: Offload, origin: Point) -> Point | None:
    """A layer of one origin that every limit takes, as near to the defaults as can be; None where there is none."""
    for pairs in (False, True):  # two axes at a time only where one at a time leads nowhere
        for start in _BASES:
            point: Point | None = {**origin, **start}
            while point is not None and (misses := _misses(offload, point)):
                point = _better(offload, point, pairs) if misses < inf else None
            if point is not None:
                return point
    return None


def nearest_failure(offload: Offload) -> str:
    """The limits that the default layer breaks."""
    default = ask(offload, {})
    return "; ".join(default.failures) if default else "the pattern matches no layer of it"


def _misses(offload: Offload, point: Point) -> float:
    """How many limits the layer of a point breaks; infinite where there is no such layer."""
    checked = ask(offload, point)
    return inf if checked is None else len(checked.failures)


def _better(offload: Offload, point: Point, pairs: bool) -> Point | None:
    """The first change that breaks fewer limits: of one axis, with `pairs` else of any two of the axes that change what
    a broken limit says or whether there is a layer, if every broken limit looks at some axis."""
    others, broken = _others(offload, point), ask(offload, point)
    assert broken is not None
    unmoved, axes = set(broken.failures), list[str]()
    for axis, values in others.items():
        for changed in ({**point, axis: value} for value in values):
            checked = ask(offload, changed)
            if checked is not None and len(checked.failures) < len(broken.failures):
                return changed
            if checked is None or checked.failures != broken.failures:
                axes.append(axis)
            unmoved &= unmoved if checked is None else set(checked.failures)
    for pair in combinations(dict.fromkeys(axes), 2) if pairs and not unmoved else ():
        for values_of_both in product(*(others[axis] for axis in pair)):
            changed = {**point, **dict(zip(pair, values_of_both, strict=True))}
            if _misses(offload, changed) < len(broken.failures):
                return changed
    return None


def _others(offload: Offload, point: Point) -> dict[str, list[int]]:
    """Other settings of each axis that matters; axes of one operator first, sizes last."""
    checked = ask(offload, point)
    assert checked is not None
    axes = sorted(checked.layer.used, key=lambda axis: (axis in SIZES, axis in NUMBERS))
    return {axis: [s for s in choices(axis) if s <= 33 and s != setting(point, axis)] for axis in axes}


def derive(engine: Engine, offload: Offload, start: Point, limits: Limits) -> list[Case]:
    """The cases of an offload around a layer it takes: every setting worth trying is in one of them."""
    variations = _Variations(engine.name, offload, start, limits)
    variations.both_ways()
    for axis in variations.used:
        variations.axis(axis)
    variations.steps()
    variations.narrow()
    points = [(start, "a layer within every limit"), *_packed(variations)]
    points += [({**start, **changes}, why) for changes, why in variations.inside if limits.alone]
    cases: dict[tuple[tuple[str, int], ...], Case] = {}
    for point, why in points:
        checked = ask(offload, point)
        assert checked is not None
        whole = checked.layer.settings(point)
        cases.setdefault(tuple(whole.items()), Case(engine.name, offload.name, whole, why))
    return [*cases.values(), *variations.outside.values()]


class _Variations:
    """Settings worth trying, each as its differences from a layer that every limit takes."""

    def __init__(self, engine: str, offload: Offload, start: Point, limits: Limits) -> None:
        self._engine, self._offload, self.start, self._limits = engine, offload, start, limits
        checked = ask(offload, start)
        assert checked is not None
        self.used = checked.layer.used
        self.inside: list[tuple[Point, str]] = []
        """Changes that every limit takes, and why they are tried."""
        self.outside: dict[tuple[tuple[str, int], ...], Case] = {}

    def checked(self, changes: Point) -> PointCheck | None:
        """The layer with these changes, if it is small enough."""
        checked = ask(self._offload, {**self.start, **changes})
        if checked is None or checked.layer.work > self._limits.work or checked.nbytes > self._limits.nbytes:
            return None
        return checked

    def takes(self, changes: Point) -> bool:
        """Whether every limit takes the layer with these changes, it is small enough, and all of them matter to it."""
        checked = self.checked(changes)
        return checked is not None and not checked.failures and set(changes) <= set(checked.layer.used)

    def kind(self, changes: Point) -> int:
        """Which changes go into one layer: a size of 1 may hide what a stride of 2 does, or parameters per channel, and
        a multiplier that is a power of two how other sums are rounded, and limits of a clip how any are."""
        if "rounding" in changes:
            return -1
        if "multiplier" in changes:
            return 3
        if not any(axis in SIZES for axis in changes):
            return 0
        return 2 if any(value > setting(self.start, axis) for axis, value in changes.items()) else 1

    def axis(self, axis: str) -> None:
        """Note every setting of an axis."""
        if axis in SIZES:
            self._edges(axis)
            return
        for value in choices(axis):
            if value != setting(self.start, axis) and (axis, value) not in _WEAK:
                why = f"{axis.replace(':', ' of ')} = {value}"
                self._keep({axis: value}, why)
                self._keep_beside({axis: value}, why)

    def _keep_beside(self, changes: Point, why: str) -> None:
        """Note a setting that is refused alone with other changes beside which it is taken."""
        if self.takes(changes):
            return
        for others in _BESIDE:
            more = {**{axis: value for axis, value in others.items() if axis in self.used}, **changes}
            if self.takes(more):
                self._keep(more, why)
                return

    def both_ways(self) -> None:
        """Note sizes of axes that limits often want to be equal."""
        for axes in (axes for axes in _TOGETHER if axes[0] in self.used):
            for size in (1, 2, 3, 4, 5, 7):
                text = f"{axes[0].split('_')[0]} = {size} both ways" if axes != PADS else f"padding of {size}"
                self._keep(dict.fromkeys(axes, size), text)

    def steps(self) -> None:
        """Note sizes around the steps tiles are cut at."""
        offload = self._offload
        for step, axes in ((offload.channel_step, ("outputs", "channels")), (offload.row_step, ("rows", "columns"))):
            for size in (step - 1, step, step + 1, 2 * step + 1) if step > 1 else ():
                for axis in (axis for axis in axes if axis in self.used):
                    self._keep({axis: size}, f"{axis} = {size}, around the tile step {step}")

    def narrow(self) -> None:
        """Note narrow types beside sizes that do not fill bytes."""
        sizes = [axis for axis in ("channels", "outputs", "columns") if axis in self.used]
        types = [axis for axis in self.used if axis.split(":")[0] in ("type", "result")]
        for axis, (number, dtype) in product(types, enumerate(TYPES)):
            if dtype.bits < 8 and (self.takes({axis: number}) or number == setting(self.start, axis)):
                for size, most in product(sizes, _ODD):
                    self._keep({axis: number, size: most}, f"{axis} = {number}, {size} = {most}: {dtype.text}")

    def _keep(self, changes: Point, why: str) -> None:
        checked = self.checked(changes)
        if checked is None or all(setting(self.start, axis) == value for axis, value in changes.items()):
            return
        if not checked.failures:
            self.inside.append((changes, why))
            return
        point = checked.layer.settings({**self.start, **changes})
        case = Case(self._engine, self._offload.name, point, why, False, checked.failures[0])
        self.outside.setdefault(tuple(point.items()), case)

    def _edges(self, axis: str) -> None:
        """Note every size at which the limits change their answer, and the ends of the sizes that are tried."""
        before: tuple[int, bool] | None = None
        for size in (LEAST[axis], *(size for size in _LADDER if size > LEAST[axis])):
            changes = self._thin(axis, size)
            if ask(self._offload, {**self.start, **changes}) is None:
                continue
            checked = self.checked(changes)
            if checked is None:  # too large, and so is what follows
                break
            is_taken = not checked.failures
            if before is None or size <= 3:
                self._keep(changes, f"{axis} = {size}")
            elif before[1] != is_taken:
                self._flip(axis, before[0], size, is_taken)
            before = (size, is_taken)
        if before is not None and before[1]:
            self._keep(self._thin(axis, before[0]), f"{axis} = {before[0]}, the largest tried")

    def _flip(self, axis: str, low: int, high: int, is_taken: bool) -> None:
        """Note both sides of the limit between two sizes, of which the larger is taken or is not."""
        while high - low > 1:
            middle = (low + high) // 2
            checked = self.checked(self._thin(axis, middle))
            if checked is not None and (not checked.failures) == is_taken:
                high = middle
            else:
                low = middle
        for size, side in ((high, "inside"), (low, "outside")) if is_taken else ((low, "inside"), (high, "outside")):
            self._keep(self._thin(axis, size), f"{axis} = {size}, just {side}")

    def _thin(self, axis: str, size: int) -> Point:
        """This size; the other ones small where it is large, so that it can be computed."""
        image = _IMAGE.get(axis)  # a kernel, or a step, wants an image around it
        if size <= 2 * max(SIZES[axis], setting(self.start, axis)):
            return {axis: size, image: max(setting(self.start, image), size)} if image else {axis: size}
        few: dict[str, int] = {other: 3 for other in ("channels", "outputs", "rows", "columns") if other in self.used}
        few |= ({image: size} if image else {}) | {axis: size}
        return few if self.takes(few) else {axis: size}


def _packed(variations: _Variations) -> list[tuple[Point, str]]:
    """Few points with every setting the limits take."""
    bins: dict[int, list[tuple[dict[str, int], list[str]]]] = {}
    ordered = sorted(variations.inside, key=lambda variation: variations.kind(variation[0]))
    for number, (changes, why) in enumerate(ordered):
        own = bins.setdefault(variations.kind(changes), [])
        turned = [own[(number + step) % len(own)] for step in range(len(own))]
        free = [one for one in turned if all(one[0].get(axis, value) == value for axis, value in changes.items())]
        wider = next((one for one in free[:_BINS] if variations.takes({**one[0], **changes})), None)
        if wider is not None:
            wider[0].update(changes)
            wider[1].append(why)
        else:
            own.append((dict(changes), [why]))
    every = (one for own in bins.values() for one in own)
    return [({**variations.start, **changes}, _in_short(texts)) for changes, texts in every]


def _in_short(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _NAMED} more settings" if len(texts) > _NAMED else ""
    return "; ".join(texts[:_NAMED]) + more


_GROWING = ("rows", "channels", "outputs")
_SLACK = 0.75
"""Least cost of a layer twice as large, relative to the smaller: hardware has modes that fit some sizes."""


def lint_target(target: Target) -> Iterator[str]:
    """Mistakes in the declarations of memories, and limits that say nothing; a sentence each."""
    used = {target.code, target.values}
    for engine in target.engines:
        used |= {engine.memory, *engine.raw.contents, *engine.raw.pointers.values()}
        used |= {name for name in (engine.constants, engine.buffer) if name}
        if engine.device is not None and engine.ideal_macs_per_cycle <= 0:
            yield f"{engine.name}: its ideal_macs_per_cycle is {engine.ideal_macs_per_cycle:g}; it must be positive"
        seen: dict[object, str] = {}
        for offload in engine.offloads:
            for number, limit in enumerate(offload.constraints, 1):
                if not limit.sentence.strip():
                    yield f"{engine.name} {offload.name}: limit {number} has no sentence: what shall a user be told?"
            key = (offload.pattern, offload.constraints)
            if key in seen:
                yield f"{engine.name} {offload.name}: nothing can reach it, {seen[key]} takes the same and comes first"
            seen.setdefault(key, offload.name)
    of_engines = {name for engine in target.engines for name in (engine.memory, engine.constants) if name}
    for name in sorted((used & of_engines) - {memory.name for memory in target.memories} - {"constants", "task"}):
        yield f"the memory {name} is used and not declared"
    ordered = sorted(target.memories, key=lambda memory: memory.base)
    addresses = {address for engine in target.engines for address in engine.defines.values()}
    for memory, after in zip_longest(ordered, ordered[1:]):
        if memory.size <= 0 or memory.alignment <= 0 or memory.base % max(memory.alignment, 1):
            yield f"the memory {memory.name} has {memory.size} bytes at {memory.base:#x}, aligned to {memory.alignment}"
        if after is not None and memory.base + memory.size > after.base:
            yield f"the memories {memory.name} and {after.name} overlap at {after.base:#x}"
        if memory.name not in used and memory.base not in addresses:
            yield f"nobody can fill the memory {memory.name}: no engine, value, constant or code lies there"


def lint_cost(engine: Engine, offload: Offload, start: Point) -> Iterator[str]:
    """Mistakes in the cycles an offload declares, around a layer it takes.
    Raises UserCodeError if a limit or the cycles raise."""
    where = f"{engine.name} {offload.name}"
    for axis in ("", *_GROWING):
        costs: list[tuple[int, int]] = []
        for factor in (1, 2, 4) if axis else (1,):
            point = {**start, axis: setting(start, axis) * factor} if axis else dict(start)
            checked = taken(offload, point)
            if checked is None or (axis and axis not in checked.layer.used):
                continue
            try:
                cycles = offload.cycles(checked.match)
            except Exception as error:
                raise UserCodeError(f"its cycles raise {raised(error)}") from error
            if cycles <= 0:
                at = f"{axis} = {point[axis]}" if axis else "a usual layer"
                yield f"{where}: its cycles are {cycles} for {at}; they must be positive"
                return
            costs.append((max(point[axis], LEAST[axis]) if axis else 0, cycles))
        for (small, few), (large, more) in pairwise(costs):
            if more < _SLACK * few:
                yield f"{where}: its cycles fall from {few} to {more} as {axis} grow from {small} to {large}"


document(__name__)
