"""The description of a build, `dovetail.json`, as a record that is checked when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dovetail.documents import read_document
from dovetail.errors import BuildError
from dovetail.folders import MANIFEST
from dovetail.ir.types import DType
from dovetail.kernels import Optimize
from dovetail.notes import Note
from dovetail.records import Record
from dovetail.schedule.layout import Conversion
from dovetail.target.engine import Macs

SCHEMA = 1
"""Version of the file. It grows when a field is removed or changes its meaning."""
_MOST_BYTES = 64 << 20
_TYPES = {kind.text: kind for kind in DType}

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class TensorPort(msgspec.Struct, frozen=True, kw_only=True):
    """An input or output of a network."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    """Text of its element type."""

    def __post_init__(self) -> None:
        if self.dtype not in _TYPES:
            raise ValueError(f"there is no element type '{self.dtype[:20]}'; known are {', '.join(_TYPES)}")

    @property
    def kind(self) -> DType:
        """Its element type."""
        return _TYPES[self.dtype]


class BuildPort(TensorPort, kw_only=True, frozen=True):
    """An input or output of a build, and where its bytes lie."""

    symbol: str
    """C name of the array it lies in."""
    offset: Count
    """Bytes from the beginning of that array."""
    bytes: Count
    layout: str = ""
    """Notation of a layout that is not row-major."""
    scale: float | None = None
    zero_point: int | None = None

    @property
    def place(self) -> str:
        """Symbol and offset, by which simulators address it."""
        return f"{self.symbol}+{self.offset}"


class LayerEntry(msgspec.Struct, frozen=True):
    """A layer as the planner made it: operators that are computed together."""

    name: str
    operators: tuple[str, ...]
    """Operators of the user's model it computes."""
    engine: str
    """Name of the engine (of several, joined by "+"), of the DMA, or "core"."""
    macs: Count
    reason_not_offloaded: str
    beside: tuple[str, ...] = ()
    """Layers the engine computes at the same time."""
    candidates: dict[str, Count] = {}
    """Cycles by place, of those that were compared."""
    kernels: dict[str, Count] = {}
    """Cycles of the core's kernel with its `own_instructions` and of the `plain` one, where there are both."""
    estimated: Count | None = None
    """Cycles from its beginning on the core to the next layer's, by the clock."""


class LayerWork(msgspec.Struct, frozen=True):
    """Work done for a layer; bytes with padding, MACs with those tiles compute twice."""

    transfers: Count
    bytes: Count
    launches: Count
    macs: Count
    engines: dict[str, Count]
    """MACs by engine."""
    cores: tuple[Count, ...] | None = None
    """Numbers of the cores that compute it, on a target of several cores."""
    declared: dict[str, Count] = {}
    """Cycles by engine, DMA and core, as the planner has them."""
    instead: Count = 0
    """Cycles of the core for a layer on an engine, by estimate."""


class MemoryUse(Record):
    """Bytes of one memory that activations and tiles need."""

    size: Count
    peak: Count
    lower_bound: Count
    """The most bytes live at any one moment: no placement needs less."""


class OperatorWork(msgspec.Struct, frozen=True):
    """The least work of an operator of a model without dead parts: bytes, each of a value counted once."""

    name: str
    products: tuple[Macs, ...] = ()
    weights: Count = 0
    """In as many bits as their values need."""
    read: Count = 0
    """Bytes of the network's inputs, by the first that reads them."""
    written: Count = 0
    """Bytes of the network's outputs."""

    @property
    def moved(self) -> int:
        """All bytes."""
        return self.weights + self.read + self.written


class Sources(msgspec.Struct, frozen=True):
    """Paths in the build of what is compiled for the target, the host and a board, and of data that is linked."""

    target: tuple[str, ...]
    host: tuple[str, ...]
    board: tuple[str, ...] = ()
    data: tuple[str, ...] = ()


class Stretch(msgspec.Struct, frozen=True):
    """Statements in a row for one layer."""

    layer: Count
    """Number of the layer."""
    core: bool
    """Whether the core marks the beginning of the stretch."""
    commands: dict[str, Count]
    """Queue -> commands it is given."""


class StackEntry(msgspec.Struct, frozen=True):
    """Stack and flash of the program, as the compiler of its firmware makes it."""

    nbytes: Count | None = None
    """Bytes of stack at most; None where there is no bound."""
    compiler: str = ""
    why: str = ""
    """Why there is no bound."""
    flash: Count = 0
    """Bytes of code and constants; 0 where no compiler was found."""


class PrefillEntry(msgspec.Struct, frozen=True):
    """A network that computes several steps in one call."""

    steps: Annotated[int, Meta(ge=2)]
    """Steps of a call."""
    place: str
    """Input that says at which place of the states a step writes."""
    places: Annotated[int, Meta(ge=2)]
    """Places of the states."""


class BuildManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A build's description of itself. A file may say more, which only people read."""

    dovetail: str
    """Version that made the build."""
    model: str
    """Name of the network."""
    target: str
    policy: str
    entry: str
    """C function of an inference."""
    model_prefix: str
    """Begins the names of the network's C functions and files."""
    uses_float: bool
    inputs: tuple[BuildPort, ...]
    outputs: tuple[BuildPort, ...]
    layers: tuple[LayerEntry, ...]
    work: tuple[LayerWork, ...]
    """By layer."""
    memory: dict[str, MemoryUse]
    sources: Sources
    stack: StackEntry = StackEntry()
    digest: str = ""
    """SHA-256 of the sources, shortened; empty for a build that cannot run on a board."""
    rounding: str | None = None
    optimize: Optimize = Optimize.SPEED
    memory_budget: Count | None = None
    settings: dict[str, Count | Annotated[float, Meta(ge=0)]] = {}
    """Fields of the target that were changed from what its file says."""
    arena: str | None = None
    """C name of the memory a caller may give; None where the build has its own."""
    cores: Annotated[int, Meta(ge=1)] | None = None
    prefill: PrefillEntry | None = None
    """Its network of several steps in one call."""
    delay: Count = 0
    """In a pipeline: calls between an input and its outputs."""
    conversions: tuple[Conversion, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    estimated: Count | None = None
    """Cycles of an inference by the clock; None where nobody counts them."""
    notes: tuple[Note, ...] = ()
    """Told to the user when it was compiled."""
    operators: tuple[OperatorWork, ...] = ()
    """The least work of the model (`codegen.emit.plan_file.model_work`)."""

    def __post_init__(self) -> None:
        if len(self.work) != len(self.layers):
            raise ValueError(f"there is work for {len(self.work)} layers, and there are {len(self.layers)}")
        if any(stretch.layer >= len(self.layers) for stretch in self.stretches):
            raise ValueError(f"a stretch is of a layer that is not there; there are {len(self.layers)}")


def read_manifest(folder: Path) -> BuildManifest:
    """The description of a build; raises BuildError where there is none, or one that is damaged."""
    path, hint = folder / MANIFEST, "compile the model again"
    if not path.is_file():
        what = f"this is not a build: it has no {MANIFEST}"
        raise BuildError(what, where=str(folder), hint="make one with dovetail compile")
    return read_document(
        path, "json", BuildManifest, schema=SCHEMA, most_bytes=_MOST_BYTES, error=BuildError, hint=hint
    ).value
