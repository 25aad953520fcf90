"""Cases from declarations: a layer every limit takes, then each axis at and on both sides of where that ends.

What is inside is tried several axes at a time (`_packed`): each layer has as many settings worth trying as the limits
take at once, as long as they hide nothing of each other. What is outside is asked one axis at a time. Declarations that
cannot be right are found without computing anything.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, product
from pathlib import Path

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
from dovetail.sim.worker import BUG
from dovetail.target.description import Target
from dovetail.target.engine import Engine
from dovetail.target.offload import Cases, Offload
from dovetail.target.pattern import Constraint, Match, Pattern, Scope, match_pattern


def raised(error: Exception) -> str:
    """Type, message, file and line of an exception; of one in a simulator's process what that process said."""
    text = str(error)
    if isinstance(error, RuntimeError) and text.startswith(BUG):
        lines = text.strip().splitlines()
        places = [line.strip().split('"') for line in lines if line.strip().startswith('File "')]
        if not places:
            return lines[-1]
        _, file, rest = places[-1][:3]
        return f"{lines[-1]} ({Path(file).name}:{rest.split(',')[1].removeprefix(' line ')})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


_LADDER = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 4096, 32768, 65536)
"""Sizes that are asked; between two that the limits judge differently, the place where they change is searched."""
_WINDOW = tuple((f"{what}_rows", f"{what}_columns") for what in ("stride", "kernel", "dilation"))
_TOGETHER: tuple[tuple[str, ...], ...] = (*_WINDOW, ("rows", "columns"), PADS)
"""Axes that limits often want to be equal."""
_IMAGE = {f"{what}_{name}": name for what in ("kernel", "stride") for name in ("rows", "columns")}
_BASES: tuple[dict[str, int], ...]
_BASES = ({}, {"channels": 1}, dict.fromkeys(PADS, 0), {"kernel_rows": 1, "kernel_columns": 1}, {"type": 1},
          {**dict.fromkeys(PADS, 0), **dict.fromkeys(_IMAGE, 2), "rows": 8, "columns": 8})  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """How much is tried."""

    work: int
    """Most multiply-accumulates of a case."""
    nbytes: int
    """Most bytes of the operands, constants and result of a case."""
    alone: bool = False
    """Whether each setting is also tried with all others as they are in the layer cases start from."""


QUICK, FULL = Limits(150_000, 12_000), Limits(2_000_000, 100_000, alone=True)
_WEAK = {("x", 0), ("weights", 0)}
"""Settings with which little can be wrong: for smallest forms only."""
_BESIDE: tuple[dict[str, int], ...]
_BESIDE = ({"bottom": 0, "right": 0}, {"rows": 6, "columns": 6}, {"kernel_rows": 1, "kernel_columns": 1}, {"groups": 2})
"""What else is changed for a number that is refused otherwise."""
_ODD = (3, 13)
"""Sizes that do not fill bytes of 2 or 4 elements."""
_TOLD = 3
"""Settings of a case that are named."""
_BINS = 4
"""Cases a setting is tried to be put into before it gets one of its own."""


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
class PointCheck:
    """What the limits say of a point."""

    layer: MadeLayer
    match: Match
    failures: tuple[str, ...]
    nbytes: int


class UserCodeError(Exception):
    """A limit or the cycles raised an exception: the text says which."""


def ask(offload: Offload, point: Point) -> PointCheck | None:
    """Make the layer of a point and ask every limit; None where there is no such layer.
    Raises Underivable where no layer can be made from the pattern, Unasked where a limit raises."""
    settings = tuple(sorted(point.items()))
    return _asked(offload.pattern, offload.cases, offload.constraints, settings)


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
        except Exception as error:  # a limit may rely on those before it, which are asked first
            if failures:
                failures.append(f"{limit.sentence}; here: {type(error).__name__}")
                continue
            what = f"the limit '{limit.sentence}' raises {raised(error)}; it is asked of all the pattern matches"
            raise UserCodeError(what) from error
        if failure:
            failures.append(failure)
    held = (*layer.inputs.values(), *graph.constants.values(), layer.expected)
    return PointCheck(layer, match, tuple(failures), sum(array.nbytes for array in held))


def choices(axis: str) -> tuple[int, ...]:
    """Every setting of an axis worth trying, the simplest last for numbers and first for sizes."""
    if axis in MADE:
        return ()
    if axis in SIZES:
        return tuple(size for size in (0, *_LADDER, 7) if LEAST[axis] <= size <= 64)
    return NUMBERS[axis] if axis in NUMBERS else OWN[axis.split(":")[0]]


def bases(offload: Offload) -> list[Point]:
    """Layers the limits take, to begin with: one made from the pattern, one of the port's own networks if it has any,
    and where neither is to be had one of each usual network that comes to it. Empty if there is none.

    Raises: as `ask`; Underivable only where there is nothing else.
    """
    networks = offload.cases if isinstance(offload.cases, FromNetworks) else None
    own: list[Point] = [{"made": 1}] if networks is not None and networks.own is not None else []
    usual: list[Point] = [{"made": 1, "model": number + 1} for number in range(len(NETWORKS) if networks else 0)]
    missing: NoLayerError | None = None
    found: list[Point] = []
    for made in (_FROM_PATTERN, *own, *usual):
        if found and made in usual and made.get("model", 0) == 1:
            break
        try:
            point = _within_limits(offload, made)
        except NoLayerError as error:
            missing = error
            continue
        found += [point] if point is not None else []
    if not found and missing is not None:
        raise missing
    return found


_FROM_PATTERN: Point = {}


def base(offload: Offload) -> Point | None:
    """The first of `bases`; None where there is none."""
    return next(iter(bases(offload)), None)


def _within_limits(offload: Offload, made: Point) -> Point | None:
    """A layer made in one way that the limits take, as near to the defaults as can be found; None where none is."""
    for pairs in (False, True):  # two axes at a time only where one at a time leads nowhere
        for start in ({**made, **one} for one in _BASES):
            misses = _misses(offload, start)
            found: tuple[int, Point] | None = None if misses is None else (misses, start)
            while found is not None and found[0]:
                found = _better(offload, found[1], found[0], pairs)
            if found is not None:
                return found[1]
    return None


def nearest_failure(offload: Offload) -> str:
    """The limits that the default layer breaks."""
    tried = ask(offload, {})
    return "; ".join(tried.failures) if tried else "the pattern matches no layer of it"


def _misses(offload: Offload, point: Point) -> int | None:
    tried = ask(offload, point)
    return None if tried is None else len(tried.failures)


def _better(offload: Offload, point: Point, count: int, pairs: bool) -> tuple[int, Point] | None:
    """The first change that breaks fewer limits than `count`: of one axis, with `pairs` else of any two of those that
    change what a broken limit says or whether there is a layer, if every broken limit looks at some axis."""
    others, broken = _others(offload, point), ask(offload, point)
    assert broken is not None
    said, looked_at = set(broken.failures), list[str]()
    for axis, values in others.items():
        for changed in ({**point, axis: value} for value in values):
            tried = ask(offload, changed)
            if tried is not None and len(tried.failures) < count:
                return len(tried.failures), changed
            if tried is None or tried.failures != broken.failures:
                looked_at.append(axis)
            said &= said if tried is None else set(tried.failures)
    for axes in combinations(dict.fromkeys(looked_at), 2) if pairs and not said else ():
        for values_of_both in product(*(others[axis] for axis in axes)):
            changed = {**point, **dict(zip(axes, values_of_both, strict=True))}
            fewer = _misses(offload, changed)
            if fewer is not None and fewer < count:
                return fewer, changed
    return None


def _others(offload: Offload, point: Point) -> dict[str, list[int]]:
    """Other settings of each axis that matters; axes of one operator first, sizes last."""
    tried = ask(offload, point)
    assert tried is not None
    axes = sorted(tried.layer.used, key=lambda axis: (axis in SIZES, axis in NUMBERS))
    return {axis: [s for s in choices(axis) if s <= 33 and s != setting(point, axis)] for axis in axes}


def derive(engine: Engine, offload: Offload, start: Point, limits: Limits) -> list[Case]:
    """The cases of an offload around a layer it takes: every setting worth trying is in one of them."""
    wishes = _Variations(engine.name, offload, start, limits)
    wishes.both_ways()
    for axis in wishes.used:
        wishes.axis(axis)
    wishes.steps()
    wishes.narrow()
    points = [(start, "a layer within every limit"), *_packed(wishes)]
    points += [({**start, **wish.changes}, wish.why) for wish in wishes.inside if limits.alone]
    found: dict[tuple[tuple[str, int], ...], Case] = {}
    for point, why in points:
        asked = ask(offload, point)
        assert asked is not None
        whole = asked.layer.settings(point)
        found.setdefault(tuple(whole.items()), Case(engine.name, offload.name, whole, why))
    return [*found.values(), *wishes.outside.values()]


@dataclass(frozen=True)
class _Variation:
    """A setting worth trying that the limits take."""

    changes: Point
    why: str


class _Variations:
    """Settings worth trying, each as what differs from a layer that the limits take."""

    def __init__(self, engine: str, offload: Offload, start: Point, limits: Limits) -> None:
        self._engine, self._offload, self.start, self._limits = engine, offload, start, limits
        tried = ask(offload, start)
        assert tried is not None
        self.used = tried.layer.used
        self.inside: list[_Variation] = []
        self.outside: dict[tuple[tuple[str, int], ...], Case] = {}

    def asked(self, changes: Point) -> PointCheck | None:
        """The layer with these changes, if it is small enough."""
        found = ask(self._offload, {**self.start, **changes})
        small = found is not None and found.layer.work <= self._limits.work and found.nbytes <= self._limits.nbytes
        return found if small else None

    def takes(self, changes: Point) -> bool:
        """Whether every limit takes the layer with these changes, it is small enough, and all of them matter to it."""
        found = self.asked(changes)
        return found is not None and not found.failures and set(changes) <= set(found.layer.used)

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
        if axis in SIZES:
            self._edges(axis)
            return
        for value in choices(axis):
            if value != setting(self.start, axis) and (axis, value) not in _WEAK:
                why = f"{axis.replace(':', ' of ')} = {value}"
                self._keep({axis: value}, why)
                self._keep_beside({axis: value}, why)

    def _keep_beside(self, changes: Point, why: str) -> None:
        """Note a setting that is refused in the layer cases start from with what else it may be taken beside."""
        if self.takes(changes):
            return
        for others in _BESIDE:
            more = {axis: value for axis, value in others.items() if axis in self.used}
            if self.takes({**more, **changes}):
                self._keep({**more, **changes}, why)
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
                for axis in (axis for axis in axes if axis in self.used and size > 0):
                    self._keep({axis: size}, f"{axis} = {size}, around the tile step {step}")

    def narrow(self) -> None:
        """Note narrow types beside sizes that do not fill bytes."""
        axes = [axis for axis in ("channels", "outputs", "columns") if axis in self.used]
        for axis in (axis for axis in self.used if axis.split(":")[0] in ("type", "result")):
            for number, dtype in enumerate(TYPES):
                if dtype.bits < 8 and (self.takes({axis: number}) or number == setting(self.start, axis)):
                    for changes in ({axis: number, size: most} for size in axes for most in _ODD):
                        text = ", ".join(f"{name} = {value}" for name, value in changes.items())
                        self._keep(changes, f"{text}: {dtype.text}")

    def _keep(self, changes: Point, why: str) -> None:
        asked = self.asked(changes)
        if asked is None or all(setting(self.start, axis) == value for axis, value in changes.items()):
            return
        if not asked.failures:
            self.inside.append(_Variation(changes, why))
            return
        point = asked.layer.settings({**self.start, **changes})
        case = Case(self._engine, self._offload.name, point, why, False, asked.failures[0])
        self.outside.setdefault(tuple(point.items()), case)

    def _edges(self, axis: str) -> None:
        """Note every place where the limits change their mind, and the ends of what is tried."""
        before: tuple[int, bool] | None = None
        for size in (LEAST[axis], *(size for size in _LADDER if size > LEAST[axis])):
            changes = self._thin(axis, size)
            if ask(self._offload, {**self.start, **changes}) is None:
                continue
            asked = self.asked(changes)
            if asked is None:  # too large, and so is what follows
                break
            taken = not asked.failures
            if before is None or size <= 3:
                self._keep(changes, f"{axis} = {size}")
            elif before[1] != taken:
                self._flip(axis, before[0], size, taken)
            before = (size, taken)
        if before is not None and before[1]:
            self._keep(self._thin(axis, before[0]), f"{axis} = {before[0]}, the largest tried")

    def _flip(self, axis: str, low: int, high: int, taken: bool) -> None:
        """Note both sides of the limit between two sizes, of which the larger is taken or is not."""
        while high - low > 1:
            middle = (low + high) // 2
            asked = self.asked(self._thin(axis, middle))
            if asked is not None and (not asked.failures) == taken:
                high = middle
            else:
                low = middle
        inside, outside = (high, low) if taken else (low, high)
        self._keep(self._thin(axis, inside), f"{axis} = {inside}, just inside")
        self._keep(self._thin(axis, outside), f"{axis} = {outside}, just outside")

    def _thin(self, axis: str, size: int) -> Point:
        """This size; the other ones small where it is large, so that it can be computed."""
        image = _IMAGE.get(axis)  # a kernel, or a step, wants an image around it
        if size <= 2 * max(SIZES[axis], setting(self.start, axis)):
            return {axis: size, image: max(setting(self.start, image), size)} if image else {axis: size}
        few: dict[str, int] = {other: 3 for other in ("channels", "outputs", "rows", "columns") if other in self.used}
        few |= ({image: size} if image else {}) | {axis: size}
        return few if self.takes(few) else {axis: size}


def _packed(wishes: _Variations) -> list[tuple[Point, str]]:
    """Few points with every setting the limits take."""
    found: list[tuple[dict[str, int], list[str], int]] = []
    for number, wish in enumerate(sorted(wishes.inside, key=lambda wish: wishes.kind(wish.changes))):
        kind = wishes.kind(wish.changes)
        known = [one for one in found if one[2] == kind]
        turned = [known[(number + step) % len(known)] for step in range(len(known))]
        free = [one for one in turned if all(one[0].get(axis, value) == value for axis, value in wish.changes.items())]
        joined = next((one for one in free[:_BINS] if wishes.takes({**one[0], **wish.changes})), None)
        if joined is not None:
            joined[0].update(wish.changes)
            joined[1].append(wish.why)
        else:
            found.append((dict(wish.changes), [wish.why], kind))
    return [({**wishes.start, **point}, _in_short(texts)) for point, texts, _ in found]


def _in_short(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _TOLD} more settings" if len(texts) > _TOLD else ""
    return "; ".join(texts[:_TOLD]) + more


_GROWING = ("rows", "channels", "outputs")
_SLACK = 0.75
"""What a layer twice as large may cost at least, relative to the smaller: hardware has modes that fit some sizes."""


def lint_target(target: Target) -> Iterator[str]:
    """What is wrong with memories, and with limits that say nothing; a sentence each."""
    used = {target.code, target.values}
    for engine in target.engines:
        used |= {engine.memory, *engine.raw.contents, *engine.raw.pointers.values()}
        used |= {engine.constants} if engine.constants else set()
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
    known = {memory.name for memory in target.memories}
    for name in sorted(used - known - {"constants", "task"}):
        if any(engine.memory == name or engine.constants == name for engine in target.engines):
            yield f"the memory {name} is used and not declared"
    ordered = sorted(target.memories, key=lambda memory: memory.base)
    for memory, after in zip(ordered, [*ordered[1:], None], strict=True):
        if memory.size <= 0 or memory.alignment <= 0 or memory.base % max(memory.alignment, 1):
            yield f"the memory {memory.name} has {memory.size} bytes at {memory.base:#x}, aligned to {memory.alignment}"
        if after is not None and memory.base + memory.size > after.base:
            yield f"the memories {memory.name} and {after.name} overlap at {after.base:#x}"
        told = any(memory.base in engine.defines.values() for engine in target.engines)  # to a driver
        if memory.name not in used and not told:
            yield f"nobody can fill the memory {memory.name}: no engine, value, constant or code lies there"


def lint_cost(engine: Engine, offload: Offload, start: Point) -> Iterator[str]:
    """What is wrong with the cycles an offload says it takes, around a layer it takes.
    Raises Unasked where a limit or the cycles raise."""
    where = f"{engine.name} {offload.name}"
    for axis in ("", *_GROWING):
        costs: list[tuple[int, int]] = []
        for factor in (1, 2, 4) if axis else (1,):
            point = {**start, axis: setting(start, axis) * factor} if axis else dict(start)
            asked = ask(offload, point)
            if asked is None or asked.failures or (axis and axis not in asked.layer.used):
                continue
            try:
                cycles = offload.cycles(asked.match)
            except Exception as error:
                raise UserCodeError(f"its cycles raise {raised(error)}") from error
            if cycles <= 0:
                at = f"{axis} = {point[axis]}" if axis else "a usual layer"
                yield f"{where}: its cycles are {cycles} for {at}; they must be positive"
                return
            costs.append((max(setting(point, axis), LEAST[axis]) if axis else 0, cycles))
        for (small, few), (large, more) in pairwise(costs):
            if more < _SLACK * few:
                yield f"{where}: its cycles fall from {few} to {more} as {axis} grow from {small} to {large}"
