"""Scheduled kernels of regions: their loops, their epilogue, and the C text; kept on disk by content."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from dovetail.graph.types import Array, DType
from dovetail.kernels.convolution import Products, Sums, anchor_expression, sums_of
from dovetail.kernels.epilogue import Scope, finish
from dovetail.kernels.kernel import Unsupported, c_type
from dovetail.kernels.region import Region
from dovetail.kernels.scheduled.algorithms import ENTRY, Extra, Packing, Sizes, conv2d, fully_connected
from dovetail.kernels.scheduled.c_text import CFunction, c_functions, write_functions
from dovetail.kernels.scheduled.knobs import choose_knobs
from dovetail.kernels.scheduled.schedules import Inside, Knobs, schedule_conv2d, schedule_fully_connected
from dovetail.kernels.scheduled.staging import is_product, staging_of
from dovetail.kernels.text import function
from dovetail.kernels.window import COLUMN, ROW, Window, anchored
from dovetail.target.description import CoreInstruction

_POSITION, _CHANNEL = "at_position", "at_channel"
_READ = re.compile(rf"\b(\w+)\[({_POSITION}|{_CHANNEL}|0)\]")
_KINDS = {_POSITION: "position", _CHANNEL: "channel", "0": "one"}
_FORMAT = 1


@dataclass(frozen=True)
class Loops:
    """The C of a schedule, without the epilogue."""

    functions: tuple[CFunction, ...]
    used: tuple[str, ...]
    """Instructions in it."""
    notes: tuple[str, ...]
    """Why the others are not."""


@dataclass(frozen=True)
class Scheduled:
    """A kernel's text and what it rests on."""

    write: Callable[[str], list[str]] | None
    """None where no instruction applies."""
    declarations: tuple[str, ...]
    """C text the instructions need."""
    used: tuple[str, ...]
    """Names of the instructions in it."""
    notes: tuple[str, ...]
    """One sentence per instruction that is not used."""


def write_scheduled(
    region: Region, scope: Scope, products: Products, instructions: Sequence[CoreInstruction]
) -> Scheduled:
    """A kernel of sums of products with the core's own instructions.

    Args:
        region, scope, products: as `dovetail.kernels.convolution.write_sums` takes them.
        instructions: of the core.

    Raises:
        Unsupported: the loops are not described here: other types than int8, groups, several images, tables.
    """
    for name in region.anchor.inputs[2:] if region.anchor else ():
        scope.known(name)
    window, weights = products.window, products.weights
    sums = sums_of(region, weights, products.zero_points)
    _check(region, window, sums)
    sizes = Sizes(
        (*window.size, window.channels), (*window.outputs, len(weights)), window.kernel, window.stride,
        window.dilation, window.before, sums.pad_value,
    )  # fmt: skip
    scope.input(region.source(), "input")
    result, lines, extras = _epilogue(region, scope, sums)
    loops, knobs = _best(sizes, Inside(window.inside(ROW), window.inside(COLUMN)), extras, instructions, scope)
    if not loops.used:
        return Scheduled(None, (), (), loops.notes)
    arrays = {"weights": packed(sums.weights, Packing(knobs.lanes, knobs.vector)), "bias": sums.inside}
    arrays["bias"] = np.pad(arrays["bias"], (0, -len(sums.inside) % knobs.lanes))
    scope.constants.arrays = {**arrays, **scope.constants.arrays}
    types = {parameter.name: parameter.c_type for parameter in scope.parameters()}
    promoted = {wide: wide for wide in ("int64_t", "uint32_t")}

    def write(name: str) -> list[str]:
        """The kernel under this name: its end as a function of one sum, then the loops."""
        inputs = ["int32_t sum", *(f"{promoted.get(types[e.name], 'int32_t')} {e.name}" for e in extras)]
        head = function(f"static inline {result} {name}_finish", inputs, lines)
        ordered = [parameter.name for parameter in scope.parameters()]
        functions = [_in_order(made, ordered) for made in loops.functions]
        declared = {parameter.name: parameter.declaration for parameter in scope.parameters()}
        return [*head, "", *write_functions(functions, name, types, ENTRY, declared, knobs.staging is not None)]

    declared = tuple(i.declarations for i in instructions if i.name in loops.used and i.declarations)
    return Scheduled(write, declared, loops.used, loops.notes)


def _in_order(made: CFunction, ordered: Sequence[str]) -> CFunction:
    """The kernel itself takes its arrays in the order of the kernel's parameters."""
    return CFunction(made.name, tuple(ordered), made.lines) if made.name == ENTRY else made


def _check(region: Region, window: Window, sums: Sums) -> None:
    source = region.graph.types[region.source()]
    if source.dtype is not DType.INT8 or sums.weights.dtype != np.int8 or sums.kind != "int32_t":
        raise Unsupported(f"scheduled kernels multiply int8 by int8 into int32, found {source}.")
    if window.batch > 1 or window.channels != sums.weights.shape[3]:
        raise Unsupported("scheduled kernels compute one image without groups.")


def _epilogue(region: Region, scope: Scope, sums: Sums) -> tuple[str, list[str], list[Extra]]:
    """The pointwise tree as a function of a sum and single elements: type, statements, what it reads."""
    assert region.anchor is not None
    index = anchored(region.output_shape, _POSITION, _CHANNEL)
    value = anchor_expression(region, sums, "sum")
    *lines, last = finish(scope, region.tree, index, (region.anchor.output, value))
    lines.append(f"return {last.split(' = ', 1)[1]}")
    extras: dict[str, Extra] = {}

    def read(match: re.Match[str]) -> str:
        extra = Extra(match[1], _KINDS[match[2]])
        if extras.setdefault(extra.name, extra) != extra:
            raise Unsupported(f"{extra.name} is read in two ways.")
        return extra.name

    lines = [_READ.sub(read, line) for line in lines]
    if any("[" in line for line in lines):
        raise Unsupported("scheduled kernels look nothing up in tables.")
    return c_type(region.graph.types[region.graph.outputs[0]].dtype), lines, list(extras.values())


def packed(weights: Array, packing: Packing) -> Array:
    """[outputs, KH, KW, depth] as the loops read them, flat: [outputs / lanes, taps / vector, lanes, vector]."""
    outputs, taps = len(weights), int(np.prod(weights.shape[1:]))
    rows = -(-outputs // packing.lanes) * packing.lanes
    columns = -(-taps // packing.vector) * packing.vector
    whole = np.zeros((rows, columns), weights.dtype)
    whole[:outputs, :taps] = weights.reshape(outputs, taps)
    split = whole.reshape(rows // packing.lanes, packing.lanes, columns // packing.vector, packing.vector)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(-1)


def _best(
    sizes: Sizes, inside: Inside, extras: Sequence[Extra], instructions: Sequence[CoreInstruction], scope: Scope
) -> tuple[Loops, Knobs]:
    """The loops for the first instruction that applies; for the last one where none does."""
    assert instructions
    notes: dict[str, None] = {}
    for instruction in filter(is_product, instructions):
        group, vector = extents(instruction.meaning)
        staging = staging_of(instruction, instructions)
        vector = staging.vector if staging else vector
        knobs = choose_knobs(sizes, inside, vector, group, scope.accumulators, staging, scope.room)
        loops = _loops(sizes, inside, knobs, extras, instructions)
        if loops.used:
            return loops, knobs
        notes.update(dict.fromkeys(loops.notes))
    return Loops((), (), tuple(notes)), knobs


def extents(meaning: str) -> tuple[int, int]:
    """Output channels and taps of a meaning: the constant lengths of its last two loops, 1 where it has fewer."""
    lengths = [1, 1, *(int(length) for length in re.findall(r"in seq\(\s*0\s*,\s*(\d+)\s*\)", meaning))]
    return lengths[-2], lengths[-1]


def _loops(
    sizes: Sizes, inside: Inside, knobs: Knobs, extras: Sequence[Extra], instructions: Sequence[CoreInstruction]
) -> Loops:
    """The scheduled loops, from the disk where they have been made before."""
    from dovetail.build.toolchain import default_cache

    packing = Packing(knobs.lanes, knobs.vector)
    dense = sizes.kernel == (1, 1) and sizes.image[0] == sizes.stride[1] == 1 and not any(sizes.before)
    text = (fully_connected if dense else conv2d)(sizes, packing, extras)
    described = [text, sizes, inside, knobs, [(i.name, i.meaning, i.c, i.alignment, i.memories) for i in instructions]]
    key = hashlib.sha256(f"{_FORMAT} {_maker()} {described}".encode()).hexdigest()[:40]
    place = default_cache() / "loops" / f"{key}.json"
    try:
        return _from_json(place.read_text())
    except (OSError, ValueError, KeyError, TypeError):
        made = _schedule(text, dense, sizes, inside, knobs, instructions)
    _keep(place, made)
    return made


def _schedule(
    text: str, dense: bool, sizes: Sizes, inside: Inside, knobs: Knobs, instructions: Sequence[CoreInstruction]
) -> Loops:
    from exo.core.memory import MemGenError

    from dovetail.kernels.scheduled.select import Selection, scope
    from dovetail.loops.text import procedure

    selection = Selection(instructions)
    algorithm = procedure(text, scope())
    if dense:
        scheduled = schedule_fully_connected(algorithm, sizes, knobs, selection)
    else:
        scheduled = schedule_conv2d(algorithm, sizes, inside, knobs, selection)
    used = tuple(i.name for i in instructions if i.name in selection.used)
    if not any(is_product(i) for i in instructions if i.name in used):
        return Loops((), (), selection.notes())
    try:
        return Loops(c_functions(scheduled), used, selection.notes())
    except MemGenError:  # operands were staged in registers that only instructions fill, and one was not found
        return Loops((), (), selection.notes())


def _from_json(text: str) -> Loops:
    data = json.loads(text)
    functions = tuple(CFunction(f["name"], tuple(f["parameters"]), tuple(f["lines"])) for f in data["functions"])
    return Loops(functions, tuple(data["used"]), tuple(data["notes"]))


def _keep(place: Path, loops: Loops) -> None:
    """Write the cache; a folder that cannot be written costs time, nothing else."""
    import os
    import tempfile

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, suffix=".tmp", delete=False) as stream:
            json.dump(asdict(loops), stream)
        os.replace(stream.name, place)
    except OSError:
        return


@cache
def _maker() -> str:
    """What the result depends on beside the algorithm: the schedules' own text and Exo."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), *sorted((here.parents[1] / "loops").glob("*.py"))]
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    try:
        return f"{digest} {version('exo-lang')}"
    except PackageNotFoundError:
        return digest
