"""Pieces for elements that are targets: each goes through partition, planning and emission like a network of its own.

What comes out stands in one C text: the element's message loop (`emit.py`) is put around it. Its constants are part of
the element's data, so that elements whose pieces differ in nothing else share a program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.emit.firmware import COPY, DMA_DRIVER, runtime_path
from dovetail.codegen.emit.project import defines, driver_texts
from dovetail.codegen.emit.source import constants_source
from dovetail.codegen.emit.unit import CODE_RESERVE, Unit, read_in_place
from dovetail.codegen.emit.weights import Weights
from dovetail.compile import Compiled, Options, compile_graph
from dovetail.errors import ModelError, PlanError, TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.onnx_file import graph_bytes
from dovetail.records import Record, field
from dovetail.schedule.assign.costs import RegionCosts
from dovetail.schedule.partition import initial_partition
from dovetail.target.description import Target
from dovetail.target.engine import IN_PLACE_ALIGNMENT
from dovetail.target.mesh import CoreClocks
from dovetail.timing.transfers import dma_cycles

MODEL = "piece"
"""Beginning of the C names of a compiled piece."""
NEVER = 1 << 40
"""Clocks of a piece the element cannot compute."""
MESSAGES, AFTER = 132, 54
"""Clocks of the message loop for an input, beside what it copies, and how many of them come behind the message, as
`iss` shows them of RV32IMC."""
STARTING = 64
"""Clocks of these in which an engine is started and its end is seen, which plans count too."""
COPYING = 45
"""Clocks in which that loop starts a copy by the DMA, and sees its end, as `iss` shows them of RV32IMC."""
CORE_COPIES = 1
"""Clocks of the core for each byte it copies, a word at a time, as `iss` shows them of RV32IMC."""
_OWN = re.compile(rf'^#include "{MODEL}[a-z_]*\.h"\n', re.M)


class PieceProgram(Record):
    """A compiled piece as C."""

    source: str
    """Ends with the function `piece_run`."""
    constants: bytes
    """The element's data so far, with the piece's constants behind them."""
    inputs: tuple[str, ...]
    """C of where each operand lies while the piece is computed, in the order asked for."""
    output: str
    alignment: int
    """Alignment of the element's data."""


class CompiledPieces(Record, eq=False):
    """The compiler of an element's target; equal pieces are compiled once."""

    target: Target
    """The element."""
    prices: dict[str, int] = field(default_factory=dict)
    compilations: dict[str, Compiled] = field(default_factory=dict)

    def grain(self, graph: Graph) -> tuple[int, int, int]:
        """Rows, columns and channels at multiples of which a layer is cut: the steps of what takes it."""
        taking = [region.offload for region in initial_partition(graph, self.target) if region.offload is not None]
        rows = max((offload.row_step for offload in taking), default=1)
        return rows, rows, max((offload.channel_step for offload in taking), default=4)

    def price(self, graph: Graph) -> int:
        """Clocks of a piece by the costs its layers are placed by; `NEVER` where an engine's memory is too small."""
        key = digest(graph)
        if key not in self.prices:
            try:
                costs = RegionCosts(graph, self.target)
                alone = (costs.step(region).alone for region in initial_partition(graph, self.target))
                self.prices[key] = sum(alone) + messages(graph, self.target, graph.inputs)
            except (PlanError, ModelError):
                self.prices[key] = NEVER
        return self.prices[key]

    def planned(self, graph: Graph, copied: Sequence[str]) -> int:
        """Clocks of a piece by its plan; of `copied` operands, which are received elsewhere than they are read, too.
        Raises DovetailError where it does not fit the element."""
        piece = self.compiled(graph)
        total = messages(graph, self.target, copied)
        for region in piece.regions:
            if region.engine is not None:
                total += max(piece.plan.tilings[part.name].estimate.cycles for part in region.parts) - STARTING
            else:
                total += RegionCosts(piece.graph, self.target).step(region).cycles
        return total

    def compiled(self, graph: Graph, taken: int = 0) -> Compiled:
        """A piece compiled and verified, where the element's messages take some bytes of the memory of values; raises
        as `compile_graph`."""
        key = f"{digest(graph)} {taken}"
        if key not in self.compilations:
            mesh, values = self.target.mesh, self.target.memory(self.target.values)
            assert mesh is not None
            # what the planner keeps for code is the mesh's to say
            room = min(values.size, mesh.usable) - taken + (CODE_RESERVE - mesh.code)
            memories = tuple(replace(m, size=room) if m is values else m for m in self.target.memories)
            target = replace(self.target, memories=memories)
            self.compilations[key] = compile_graph(
                replace(graph, name=MODEL), target, Options(weights=Weights.TEXT), interpret=False
            )
        return self.compilations[key]

    def program(self, graph: Graph, names: Sequence[str], before: bytes, taken: int) -> PieceProgram:
        """The C of a piece with some operands; `before` stands first in the element's data, `taken` is as of
        `compiled`. Raises DovetailError where it does not fit the element, or has what elements of a mesh cannot
        have."""
        unit = self.compiled(graph, taken).unit
        _check(unit)
        header, text, data = _constants(unit, before)
        files = self.compiled(graph, taken).project.files
        parts = [files[f"src/{MODEL}.h"], files[f"src/{MODEL}_kernels.h"], header, text]
        parts += [files[f"src/{MODEL}_kernels.c"], files[f"src/{MODEL}.c"]]
        order = list(unit.program.inputs)
        places = tuple(f"((uint8_t *)(void *){MODEL.upper()}_INPUT_{order.index(name)})" for name in names)
        alignment = IN_PLACE_ALIGNMENT if read_in_place(unit.program) else 16
        source = "\n".join(_OWN.sub("", part) for part in parts)
        return PieceProgram(source, data, places, f"{MODEL.upper()}_OUTPUT_0", alignment)


def with_compiler(target: Target) -> Target:
    """The target as an element: with the compiler of its pieces where its mesh describes no array, else with that
    array, which the element programs drive themselves, in place of engines.

    Raises:
        TargetError: it has several cores, or its core is this computer.
    """
    if target.mesh is None:
        return target
    if target.mesh.array is not None:
        return replace(target, engines=())
    if target.workers or instruction_set(target.core.isa).is_host:
        what = "an element has one core with firmware of its own"
        raise TargetError(what, where=target.name, hint="give the elements of the mesh one core of a chip")
    return replace(target, mesh=replace(target.mesh, array=CompiledPieces(target), core=CoreClocks(after=AFTER)))


def digest(graph: Graph) -> str:
    """Equal for pieces that are computed alike."""
    return hashlib.sha256(graph_bytes(replace(graph, name=MODEL))).hexdigest()


def copying(target: Target, to: str, source: str, nbytes: int) -> str:
    """C that copies bytes between a piece's buffers and those of messages: by the DMA where there is one."""
    if target.dma is None:
        return f"__builtin_memcpy({to}, {source}, {nbytes}u);"
    return f"dma_wait(dma_copy_1d({to}, {source}, {nbytes}u));"


def messages(graph: Graph, target: Target, copied: Sequence[str]) -> int:
    """Clocks of the message loop around a piece: it copies some operands and the result."""
    sizes = [graph.types[name].nbytes for name in (*copied, *graph.outputs)]
    if target.dma is None:
        return MESSAGES + CORE_COPIES * sum(sizes)
    moved = (COPYING + dma_cycles(target.dma, size) for size in sizes)
    return MESSAGES + sum(moved)


def share_on_engines(compiled: Compiled) -> tuple[int, int]:
    """Multiply-accumulates of a piece on engines, and all."""
    own = sum(region.macs for region in compiled.regions if region.engine is not None)
    return own, sum(region.macs for region in compiled.regions)


def shared_files(target: Target) -> dict[str, str]:
    """Files of all elements' programs besides start-up code: drivers, and code that copies."""
    if target.mesh is None or not isinstance(target.mesh.array, CompiledPieces):
        return {}
    files = {f"runtime/{name}": runtime_path(name).read_text("utf-8") for name in (DMA_DRIVER if target.dma else COPY)}
    for engine in target.engines:
        files |= driver_texts(engine)
    return files


def macros(target: Target) -> dict[str, str | None]:
    """Preprocessor definitions of the programs, for the simulator."""
    return {name: value for name, value in defines("", target).items() if not name.startswith("DOVETAIL_MODEL")}


def used_places(compiled: Compiled) -> frozenset[str]:
    """Engines that compute a piece, and "core"."""
    done = [region for region in compiled.regions if not region.is_idle]
    computing = [region for region in done if not region.copied_by] or done
    return frozenset(name for region in computing for name in region.place.split("+"))


def _check(unit: Unit) -> None:
    """Raise TargetError for what an element's program cannot have."""
    target = unit.target
    ports = (*unit.program.inputs.values(), *unit.program.outputs.values())
    if any(view.layout is not None and view.layout.packed for view in ports):
        what, hint = "values lie several in a byte", "give elements of a mesh values of 8 bits"
        raise TargetError(f"between elements {what}", where=target.name, hint=hint)
    used = {region.engine.name for region in unit.regions if region.engine}
    for engine in target.engines:
        if engine.name in used and (engine.made or engine.libraries or unit.fixed_constants[1].size):
            what = f"{engine.name} needs files or addresses made for a whole network"
            raise TargetError(what, where=target.name, hint="use it outside of a mesh")


def _constants(unit: Unit, before: bytes) -> tuple[str, str, bytes]:
    """Constants as places in the element's data, with what declares and defines those that stay in the program, and
    the data."""
    data, lines = bytearray(before), []
    blobs = {f"{unit.model}_{name}" for name in read_in_place(unit.program)}
    for name, (element, array) in unit.constants.items():
        data += bytes(-len(data) % (IN_PLACE_ALIGNMENT if name in blobs else 16))
        lines.append(f"#define {name} ((const {element} *)(const void *)(element_data + {len(data)}u))")
        data += np.ascontiguousarray(array).tobytes()
    declared, defined = constants_source(replace(unit, constants={}))
    return "\n".join([*lines, declared]), defined, bytes(data)
