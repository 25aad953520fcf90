"""Cases from declarations: a layer every limit takes, then each axis at and on both sides of where that ends.

What is inside is tried several axes at a time (`_packed`): each layer has as many settings worth trying as the limits
take at once, as long as they hide nothing of each other. What is outside is asked one axis at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from dovetail.check.layers import LEAST, NUMBERS, OWN, PADS, SIZES, Layer, Point, setting, single
from dovetail.check.raised import raised
from dovetail.target.description import Engine, Offload
from dovetail.target.pattern import Constraint, Match, Pattern, Scope, match_pattern

_LADDER = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 4096, 32768, 65536)
"""Sizes that are asked; between two that the limits judge differently, the place where they change is searched."""
_TOGETHER = (("stride_rows", "stride_columns"), ("kernel_rows", "kernel_columns"),
             ("dilation_rows", "dilation_columns"), ("rows", "columns"), PADS)  # fmt: skip
"""Axes that limits often want to be equal."""
_IMAGE = {f"{what}_{name}": name for what in ("kernel", "stride") for name in ("rows", "columns")}
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
    cases: int
    """Most cases of an engine, shared out among its offloads; each has at least `_FEWEST`."""
    alone: bool = False
    """Whether each setting is also tried with all others as they are in the layer cases start from."""


QUICK, FULL = Limits(150_000, 12_000, 120), Limits(2_000_000, 100_000, 4_000, alone=True)
_FEWEST = 4
_WEAK = {("x", 0), ("weights", 0)}
"""Settings with which little can be wrong: for smallest forms only."""
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
class Tried:
    """What the limits say of a point."""

    layer: Layer
    match: Match
    failures: tuple[str, ...]
    nbytes: int


class Unasked(Exception):
    """A limit or the cycles raised an exception: the text says which."""


def ask(offload: Offload, point: Point) -> Tried | None:
    """Make the layer of a point and ask every limit; None where there is no such layer.

    Raises:
        Underivable: no layer can be made from the pattern.
        Unasked: a limit raises.
    """
    return _asked(offload.pattern, offload.constraints, tuple(sorted(point.items())))


@lru_cache(maxsize=2048)
def _asked(pattern: Pattern, limits: tuple[Constraint, ...], settings: tuple[tuple[str, int], ...]) -> Tried | None:
    try:
        graph, layer = single(pattern, dict(settings))
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
            raise Unasked(what) from error
        if failure:
            failures.append(failure)
    held = (*layer.inputs.values(), *graph.constants.values(), layer.expected)
    return Tried(layer, match, tuple(failures), sum(array.nbytes for array in held))


def choices(axis: str) -> tuple[int, ...]:
    """Every setting of an axis worth trying, the simplest last for numbers and first for sizes."""
    if axis in SIZES:
        return tuple(size for size in (0, *_LADDER, 7) if LEAST[axis] <= size <= 64)
    return NUMBERS[axis] if axis in NUMBERS else OWN[axis.split(":")[0]]


def base(offload: Offload) -> Point | None:
    """A layer the limits take, as near to the defaults as can be found; None where none is.

    Raises: as `ask`.
    """
    for step in (_better, _better_pair):  # two axes at a time only where one at a time leads nowhere
        for start in _BASES:
            misses = _misses(offload, start)
            found: tuple[int, Point] | None = None if misses is None else (misses, start)
            while found is not None and found[0]:
                found = step(offload, found[1], found[0])
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


def _better(offload: Offload, point: Point, count: int) -> tuple[int, Point] | None:
    """The first change of one axis that breaks fewer limits than `count`."""
    for axis, values in _others(offload, point).items():
        for changed in ({**point, axis: value} for value in values):
            fewer = _misses(offload, changed)
            if fewer is not None and fewer < count:
                return fewer, changed
    return None


def _better_pair(offload: Offload, point: Point, count: int) -> tuple[int, Point] | None:
    """As `_better`; where one axis does not help, any two that do."""
    found = _better(offload, point, count)
    if found is not None:
        return found
    others = _others(offload, point)
    for one, two in combinations(others, 2):
        for changed in ({**point, one: a, two: b} for a in others[one] for b in others[two]):
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


def derive(engine: Engine, offload: Offload, start: Point, limits: Limits) -> tuple[list[Case], int]:
    """The cases of an offload around a layer it takes, and how many settings worth trying are in none of them."""
    wishes = _Wishes(engine.name, offload, start, limits)
    wishes.both_ways()
    for axis in wishes.used:
        wishes.axis(axis)
    wishes.steps()
    share = max(_FEWEST, limits.cases // len(engine.offloads))
    packed, left = _packed(wishes, share - 1)
    points = [(start, "a layer within every limit"), *packed]
    points += [({**start, **changes}, why) for changes, why in wishes.inside if limits.alone]
    found: dict[tuple[tuple[str, int], ...], Case] = {}
    for point, why in points:
        asked = ask(offload, point)
        assert asked is not None
        whole = _whole(point, asked)
        found.setdefault(tuple(whole.items()), Case(engine.name, offload.name, whole, why))
    return [*found.values(), *wishes.outside.values()], 0 if limits.alone else left


def _whole(point: Point, asked: Tried) -> dict[str, int]:
    """The settings of all axes that matter."""
    return {axis: setting(point, axis) for axis in asked.layer.used}


class _Wishes:
    """Settings worth trying, each as what differs from a layer that the limits take."""

    def __init__(self, engine: str, offload: Offload, start: Point, limits: Limits) -> None:
        self._engine, self._offload, self.start, self._limits = engine, offload, start, limits
        tried = ask(offload, start)
        assert tried is not None
        self.used = tried.layer.used
        self.inside: list[tuple[Point, str]] = []
        """Those the limits take, and what they are about."""
        self.outside: dict[tuple[tuple[str, int], ...], Case] = {}

    def asked(self, changes: Point) -> Tried | None:
        """The layer with these changes, if it is small enough."""
        found = ask(self._offload, {**self.start, **changes})
        small = found is not None and found.layer.work <= self._limits.work and found.nbytes <= self._limits.nbytes
        return found if small else None

    def takes(self, changes: Point) -> bool:
        """Whether every limit takes the layer with these changes, it is small enough, and all of them matter to it."""
        found = self.asked(changes)
        return found is not None and not found.failures and set(changes) <= set(found.layer.used)

    def kind(self, changes: Point) -> int:
        """Which changes go into one layer: a size of 1 may hide what a stride of 2 does, or a parameter per channel."""
        if not any(axis in SIZES for axis in changes):
            return 0
        return 2 if any(value > setting(self.start, axis) for axis, value in changes.items()) else 1

    def axis(self, axis: str) -> None:
        """Note what is worth trying of one axis."""
        if axis in SIZES:
            self._edges(axis)
            return
        for value in choices(axis):
            if value != setting(self.start, axis) and (axis, value) not in _WEAK:
                self._keep({axis: value}, f"{axis.replace(':', ' of ')} = {value}")

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

    def _keep(self, changes: Point, why: str) -> None:
        asked = self.asked(changes)
        if asked is None or all(setting(self.start, axis) == value for axis, value in changes.items()):
            return
        if not asked.failures:
            self.inside.append((changes, why))
            return
        point = _whole({**self.start, **changes}, asked)
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


def _packed(wishes: _Wishes, most: int) -> tuple[list[tuple[Point, str]], int]:
    """Few points, `most` at most, with every setting the limits take, and how many settings are in none of them."""
    found: list[tuple[dict[str, int], list[str], int]] = []
    left = 0
    for number, (changes, why) in enumerate(sorted(wishes.inside, key=lambda wish: wishes.kind(wish[0]))):
        kind = wishes.kind(changes)
        known = [one for one in found if one[2] == kind]
        turned = [known[(number + step) % len(known)] for step in range(len(known))]
        free = [one for one in turned if all(one[0].get(axis, value) == value for axis, value in changes.items())]
        joined = next((one for one in free[:_BINS] if wishes.takes({**one[0], **changes})), None)
        if joined is not None:
            joined[0].update(changes)
            joined[1].append(why)
        elif len(found) < most:
            found.append((dict(changes), [why], kind))
        else:
            left += 1
    return [({**wishes.start, **point}, _in_short(texts)) for point, texts, _ in found], left


def _in_short(texts: Sequence[str]) -> str:
    """The first settings, and how many more there are."""
    more = f" and {len(texts) - _TOLD} more settings" if len(texts) > _TOLD else ""
    return "; ".join(texts[:_TOLD]) + more


def cut_down(case: Case, nbytes: int) -> Case:
    """The same layer with less memory, to be computed in tiles."""
    return replace(case, why=f"{case.why}, in tiles", room=nbytes)
