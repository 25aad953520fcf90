"""How hardware is described: a chip, its engines, and how models are brought into a form it takes.

A target is one `Target` value. Everything that is particular to a machine is said here, once; no stage of the
compiler knows any target by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.errors import TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import Array, DType
from dovetail.records import Record, field, force_setattr
from dovetail.target.chip import Core, Dma, Memory
from dovetail.target.engine import Engine, StreamDma
from dovetail.target.mesh import Mesh


class OrderRequest(Record):
    """Arguments of `dovetail schedule`."""

    settings: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the hardware that differ from the target's own."""
    rules: Path | None = None
    """A file of the user's own rules, in the target's own form."""
    seconds: float = 5.0
    """Processor seconds for the search of orders better than the first."""
    inputs: Mapping[str, Array] | None = None
    """Inputs to execute the order on; None to leave that out."""
    progress: Callable[[str], None] = lambda text: None
    """Function that is called with a line of text about the progress of the search."""
    check: Path | None = None
    """A file with an order of the user's own, to be checked instead of one that is found; None for none."""


class Ordered(Record):
    """An order, ready to show."""

    headings: tuple[str, ...]
    """Names of the table's columns."""
    rows: tuple[tuple[str, ...], ...]
    """A table for people: one row per layer."""
    notes: tuple[str, ...]
    """Sentences below it: how long it takes, how near to the bound that is."""
    files: Mapping[str, bytes]
    """Contents of the files to write, by relative path."""


Ordering = Callable[[Graph, OrderRequest], Ordered]
"""Orders a graph, integer or float; raises DovetailError where it cannot."""


class Rewrite(Record):
    """A step that brings the integer graph into a form the target takes."""

    name: str
    """Name in `--save-stages` and messages."""
    apply: Callable[[Graph], Graph]
    """The graph in that form. Of what it leaves alone, the result may say why (`Graph.left`, `Draft.leave`): that is
    what `explain` and the report then print of a layer no engine takes."""
    lsb: int
    """How far each value of 8 or 16 bits that remains may move, computed from the same operands; 0 when every bit is
    kept. Sums of 32 bits may have another scale: they are compared in the values made of them."""
    sized: Callable[[Mapping[str, int]], Callable[[Graph], Graph]] | None = None
    """A variant of `apply` for given sizes of memories, bytes by name. A target passes its sizes, so that a
    sweep over them compiles for each size what pays there; it should give equal sizes the same function."""
    orders: bool = False
    """Whether it only puts nodes in order: `dovetail schedule`, which finds an order itself, goes without."""


class Policy(Record):
    """A named choice of rewrites, e.g. how requantisation is done."""

    name: str
    """Name for `--requant`."""
    sentence: str
    """One line about the policy, for `dovetail targets`."""
    rewrites: tuple[Rewrite, ...]
    """Rewrites in the order they are applied."""
    rounding: Rounding | None = None
    """Rounding of the model's requantisations that the engines take, unless an option names another; None for the
    rounding of the model's own runtime."""

    def within(self, sizes: Mapping[str, int]) -> Policy:
        """The policy for memories of given sizes.

        Args:
            sizes: bytes of each memory, by name.
        """
        if not any(rewrite.sized for rewrite in self.rewrites):
            return self
        made = (replace(one, apply=one.sized(sizes)) if one.sized else one for one in self.rewrites)
        return replace(self, rewrites=tuple(made))


class Quantisation(Record):
    """Limits of quantisation: the forms of a network that the target takes; `dovetail quantize` uses them.

    The defaults are what the core's kernels compute.
    """

    weight_bits: tuple[int, ...] = (8, 4, 2)
    """Widths of weights it takes, of 8, 4 and 2, the widest first."""
    packed: bool = False
    """Narrow weights take less room and time there; else they are held one to a byte."""
    per_channel: bool = True
    """A scale per output channel of the weights; else one per layer."""
    symmetric: bool = False
    """Activations must have the zero point 0."""
    activations: DType = DType.INT8
    """Element type of activations, INT8 or UINT8."""
    shifts: bool = False
    """Requantisation is a right shift: scales are powers of two, both operands of a sum have the same one, and its
    result none smaller. Shifts per channel where weights have scales per channel."""
    ternary: bool = False
    """Weights of 2 bits are -1, 0 or 1."""
    operand_bits: int = 8
    """Bits that operands of layers with 2-bit weights are to keep within."""
    activation_bits: tuple[int, ...] = (8,)
    """Widths of activations it takes, of 8, 4 and 2, the widest first; narrower ones are of the same signedness. (What
    gives them types of few bits is a rewrite of the policy, `dovetail.legalize.narrow_activations`.)"""
    wide_sums: bool = False
    """Layers keep their sums in 32 bits, so that in a transformer's residual stream their results may have 16 bits as
    what the core computes there has; else they have 8."""


class Derived(Record):
    """A number that follows from a configuration and that a sweep may set, such as MACs per cycle."""

    present: Callable[[Any], int]
    """The number a configuration has."""
    apply: Callable[[Any, int], Any]
    """The configuration with another number; raises TargetError if no configuration gives it."""
    sets: tuple[str, ...]
    """The fields it changes."""


class Recipe(Record):
    """A function that makes a target from a configuration, so that `dovetail sweep` can make others like it."""

    name: str
    """Name of the configured part, as a rule the engine: its fields are called `name.field`."""
    config: Any
    """A frozen dataclass whose numbers may be set."""
    make: Callable[[Any], Target]
    """The target with another configuration, its own recipe included."""
    derived: Mapping[str, Derived] = field(default_factory=dict)
    """Further settings, by name."""


class Target(Record):
    """A whole machine: core, memories, DMA, engines and policies."""

    name: str
    """Name for `--target`, and in the files of a build."""
    sentence: str
    """One line about the target, for `dovetail targets`."""
    core: Core
    """Core 0, which runs the program."""
    memories: tuple[Memory, ...]
    """All memories of the machine."""
    code: str
    """Memory of program and constants."""
    values: str
    """Memory of activations that lie nowhere closer."""
    policies: tuple[Policy, ...]
    """Policies, the default first."""
    engines: tuple[Engine, ...] = ()
    """Engines in the order they are asked for each layer."""
    dma: Dma | None = None
    """Copies between memories; None where the core does."""
    ordering: Ordering | None = None
    """Function that orders a whole network on the hardware, for `dovetail schedule`; None if the target has no such
    function."""
    quantisation: Quantisation = field(default_factory=Quantisation)
    """The forms of a network it takes."""
    mesh: Mesh | None = None
    """Connections between copies of this machine, for `dovetail mesh`; None for a machine alone."""
    recipe: Recipe | None = None
    """Function and configuration that made it; None for a target without a configuration."""
    workers: tuple[Core, ...] = ()
    """Further cores, numbered from 1, that run what `core` (number 0) starts on them. One firmware serves all: they
    have its instruction set and instructions, at least its stack, and costs and a speed of their own."""
    operators: tuple[type[UserOperator], ...] = ()
    """Operators of the port's own that models may have (docs/own_operators.md)."""
    mailbox: int = 0x1A010000
    """Address of the registers by which cores start one another (`emit/runtime/cores.h`), 4096 bytes; used only with
    workers."""

    def __post_init__(self) -> None:
        sizes = {memory.name: memory.size for memory in self.memories}
        force_setattr(self, "policies", tuple(policy.within(sizes) for policy in self.policies))
        buffers = {memory.name: memory for memory in self.memories}
        engines = (one.within(buffers[one.buffer]) if one.buffer in buffers else one for one in self.engines)
        force_setattr(self, "engines", tuple(engines))

    @property
    def cores(self) -> tuple[Core, ...]:
        """Every core, by its number."""
        return (self.core, *self.workers)

    def memory(self, name: str) -> Memory:
        """The memory of a name; raises KeyError for an unknown name."""
        return {memory.name: memory for memory in self.memories}[name]

    def reads_constants(self, engine: Engine) -> bool:
        """True when an engine reads packed constants where the linker puts them."""
        return engine.device is None or engine.constants_memory == self.code

    @property
    def dmas(self) -> tuple[Dma | StreamDma, ...]:
        """All DMAs: the target's own and those of engines."""
        own = tuple(engine.dma for engine in self.engines if engine.dma)
        return (*([self.dma] if self.dma else []), *own)

    @property
    def mover(self) -> str:
        """Unit that copies elements that only move: the first DMA's name, or "core"."""
        return self.dmas[0].name if self.dmas else "core"

    def dma_of(self, engine: Engine) -> Dma | StreamDma | None:
        """DMA that copies an engine's operands and results; None if the core does."""
        return engine.dma or self.dma

    def works_in_place(self, engine: Engine) -> bool:
        """True when an engine reaches constants and values where they lie: the planner cuts and copies nothing."""
        return self.reads_constants(engine) and engine.memory == self.values

    def engine(self, name: str) -> Engine:
        """The engine of a name; raises KeyError for an unknown name."""
        return {engine.name: engine for engine in self.engines}[name]

    def policy(self, name: str | None) -> Policy:
        """The policy of a name, the default for None; raises KeyError for an unknown name."""
        return self.policies[0] if name is None else {policy.name: policy for policy in self.policies}[name]


MOST_CORES = 64
"""Cores a target may have: what the mailbox of the simulated chip has registers for."""


def with_cores(target: Target, count: int | None) -> Target:
    """The target with so many cores like its own; as it is for None.

    Raises:
        TargetError: the number is not from 1 to `MOST_CORES`, or the target says itself which further cores it has.
    """
    if count is None or count == len(target.cores):
        return target
    if not 1 <= count <= MOST_CORES:
        hint = f"give a number from 1 to {MOST_CORES}"
        raise TargetError(f"{count} cores are asked for", where=target.name, hint=hint)
    if target.workers:
        what = f"it has {len(target.cores)} cores of its own, {count} are asked for"
        raise TargetError(what, where=target.name, hint="leave --cores out, or change the target file")
    return replace(target, workers=(target.core,) * (count - 1))


def _code(core: Core) -> tuple[object, ...]:
    """Settings of a core that its firmware depends on."""
    return core.isa, core.instructions, core.extension, core.streams, dict(core.functions)


def check_cores(target: Target) -> None:
    """Raise TargetError where a further core cannot run the firmware of core 0, or one has no speed."""
    first = target.core
    for number, core in enumerate(target.cores):
        where = f"core {number} of {target.name}"
        if core.speed <= 0:
            raise TargetError(f"its speed is {core.speed}", where=where, hint="give a speed above 0")
        if _code(core) != _code(first):
            what = f"it is of another kind ({core.isa}) than core 0 ({first.isa}), whose firmware it has to run"
            raise TargetError(what, where=where, hint="give all cores the same instruction set and instructions")
        if core.stack < first.stack:
            hint = "give it as many"
            raise TargetError(f"it has {core.stack} bytes of stack, core 0 has {first.stack}", where=where, hint=hint)
