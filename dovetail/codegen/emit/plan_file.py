"""Writes `dovetail-plan.json`: the graph of a build, where every buffer lies and when, and moves.

`dovetail.codegen.plan_file` reads it, and says what each field is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from dovetail.codegen.emit.manifest import engine_moves
from dovetail.codegen.manifest import OperatorWork
from dovetail.codegen.plan_file import SCHEMA, PlanBuffer, PlanGraph, PlanLayer, PlanMemory, PlanMove
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array
from dovetail.program.ir import (
    CORE,
    Begin,
    Call,
    Copy,
    LaunchStatement,
    Program,
    Role,
    Statement,
    View,
    byte_places,
    queue_of,
    reads,
    stream_of,
    writes,
)
from dovetail.program.transfers import relative_transfers, transfer_count
from dovetail.schedule.plan import Plan
from dovetail.schedule.plan.lifetimes import StatementOrder, pieces, touches
from dovetail.schedule.plan.timed import launch_cycles
from dovetail.schedule.region import Region
from dovetail.target.description import Target
from dovetail.target.engine import Macs


def plan_text(graph: Graph, regions: Sequence[Region], planned: Plan, target: Target) -> str:
    """The file, of the integer graph as the target computes it: the same text for the same network and target."""
    program = planned.program
    copies = [statement for statement in program.statements if isinstance(statement, Copy)] if target.dmas else []
    own: list[list[Statement]] = [[] for _ in regions]
    for statement in program.statements:
        own[statement.layer].append(statement)
    plan = {
        "schema": SCHEMA,
        "statements": len(program.statements),
        "begins": _begins(program),
        "graph": _graph(graph, regions),
        "layers": [_layer(region, mine, planned, regions, target) for region, mine in zip(regions, own, strict=True)],
        "memories": _memories(program, planned, target),
        "moves": _moves(program),
        "results": {engine.name: _results(program, engine.name) for engine in target.engines if engine.device},
        "transfers": [
            [copy.layer, transfer_count(copy), *([copy.queue] if copy.queue else [])]
            for copy in copies
            if queue_of(copy, program.dma) != CORE
        ],
    }
    return json.dumps(plan, separators=(",", ":"), sort_keys=True) + "\n"


def _begins(program: Program) -> list[tuple[int, int]]:
    """Statement and layer of every stretch in which the core works for one layer and does something."""
    pairs = enumerate(pairwise((*program.statements, Begin(-1))))
    return [(index, a.layer) for index, (a, b) in pairs if isinstance(a, Begin) and not isinstance(b, Begin)]


def _graph(graph: Graph, regions: Sequence[Region]) -> PlanGraph:
    """Values and which layer makes and reads them."""
    named = (name for region in regions for name in (*region.graph.inputs, region.output))
    values = {name: graph.types[name] for name in (*graph.inputs, *named)}
    return {
        "inputs": list(graph.given),
        "outputs": list(graph.results),
        "states": [(read, written) for read, written, _ in graph.kept],
        "values": {
            name: {"shape": list(kind.shape), "dtype": kind.dtype.text, "bytes": kind.nbytes}
            for name, kind in values.items()
        },
        "edges": [{"reads": list(region.graph.inputs), "makes": region.output} for region in regions],
    }


def _layer(
    region: Region, own: Sequence[Statement], planned: Plan, regions: Sequence[Region], target: Target
) -> PlanLayer:
    types, constants, nodes = region.graph.types, region.graph.constants, region.graph.nodes
    products, read = least_work(region.graph)
    return {
        "kinds": list(dict.fromkeys(type(node.operator).__name__ for node in nodes)),
        "offload": region.offload.name if region.offload else "",
        "reason": why_not_offloaded(region),
        "nothing": region.is_idle,
        "idle": all(isinstance(s, Begin) for s in own),
        "products": products,
        "read": read,
        "written": types[region.output].nbytes,
        "constants": [
            {
                "name": name,
                "dtype": types[name].dtype.text,
                "bits": types[name].dtype.bits,
                "elements": types[name].elements,
                "bytes": types[name].nbytes,
                "weights": any(_weighs(region.graph, node, name) for node in nodes),
            }
            for name in constants
        ],
        "launches": sum(isinstance(s, LaunchStatement) for s in own),
        "modelled": sum(
            launch_cycles([s], planned.program, regions, target)[0] for s in own if isinstance(s, LaunchStatement)
        ),
        "calls": sum(isinstance(s, Call) for s in own),
    }


def _weighs(graph: Graph, node: Node, name: str) -> bool:
    """True for a constant that a node multiplies its operand with: the second operand of one that has MACs."""
    return node.inputs[1:2] == (name,) and node.operator.macs([graph.types[value] for value in node.inputs]) > 0


def why_not_offloaded(region: Region) -> str:
    """Why no engine computes a layer, as a sentence; empty where one does."""
    if region.is_view:
        return "nothing is computed: the same bytes under another shape"
    if region.is_noop:
        return "nothing is copied: rows lie where they belong"
    if region.copied_by:
        return f"{'the core copies' if region.copied_by == 'core' else 'the DMA does it'}: elements only move"
    if region.engine is None and not region.reason:
        return "the target has no engine"
    return region.reason


def least_work(graph: Graph) -> tuple[int, int]:
    """Least work of a layer: products, without those with its own padding, and bytes of
    operands read, pixels that a stride passes over left out."""
    producers = graph.producers()
    return sum(_inside(graph, node, producers)[0] for node in graph.nodes), sum(_read(graph, graph.inputs).values())


def _read(graph: Graph, values: Sequence[str]) -> dict[str, int]:
    """Bytes that are read of some values: pixels that the one layer with a stride passes over are left out."""
    read, producers = {name: graph.types[name].nbytes for name in values}, graph.producers()
    readers = Counter(name for node in graph.nodes for name in node.inputs)
    for node in graph.nodes:
        _, value, share = _inside(graph, node, producers)
        if value in read and readers[value] == 1:
            read[value] = int(read[value] * share)
    return read


def _inside(graph: Graph, node: Node, producers: Mapping[str, Node]) -> tuple[int, str, Fraction]:
    """Macs of a node, without those with padding; the image it reads, and the share of its pixels that it reads."""
    types, share = [graph.types[name] for name in node.inputs], Fraction(1)
    macs, value, before = node.operator.macs(types), "", [0] * 4
    if not isinstance(node.operator, Conv2d | DepthwiseConv2d):
        return macs, value, share
    value = node.inputs[0]
    pad = producers.get(value)
    if pad is not None and isinstance(pad.operator, Pad):
        value, before = pad.inputs[0], [*pad.operator.before]
    for axis in (1, 2):
        size, step = graph.types[value].shape[axis], node.operator.stride[axis - 1]
        spread, outputs = node.operator.dilation[axis - 1], graph.types[node.output].shape[axis]
        taps = [
            output * step + tap * spread - before[axis]
            for output in range(outputs)
            for tap in range(types[1].shape[axis])
        ]
        inside = [place for place in taps if 0 <= place < size]
        macs = macs * len(inside) // len(taps)
        share *= Fraction(len(set(inside)), size)
    return macs, value, share


def model_work(graph: Graph) -> tuple[OperatorWork, ...]:
    """The least work of a model whose dead parts are left out, by its operators: products, bytes of weights in as many
    bits as their values need, each array once, and bytes of the network's inputs and outputs."""
    producers, read, arrays = graph.producers(), _read(graph, graph.given), set[bytes]()
    written = {name: graph.types[name].nbytes for name in graph.results}
    work: dict[str, OperatorWork] = {}
    for node in graph.nodes:
        one, products = work.get(node.origin, OperatorWork(node.origin)), products_of(graph, node, producers)
        kept = (name for name in node.inputs[1:2] if name in graph.constants and _weighs(graph, node, name))
        weights = [graph.constants[name] for name in kept]
        new = [array for array in weights if array.size and array.tobytes() not in arrays]
        arrays |= {array.tobytes() for array in new}
        work[node.origin] = OperatorWork(
            node.origin,
            (*one.products, *([products] if products else [])),
            one.weights + sum(array.size * _bits(array) // 8 for array in new),
            one.read + sum(read.pop(name, 0) for name in node.inputs),
            one.written + written.pop(node.output, 0),
        )
    return tuple(one for one in work.values() if one.products or one.moved)


def products_of(graph: Graph, node: Node, producers: Mapping[str, Node]) -> Macs | None:
    """The products of a node, those with padding left out; None where it has none. `producers` are the graph's."""
    macs = node.operator.macs([graph.types[name] for name in node.inputs])
    if not macs:
        return None
    shape, result = graph.types[node.inputs[1]].shape, graph.types[node.output]
    count, image, _ = _inside(graph, node, producers)
    kernel = (shape[1], shape[2]) if image else (1, 1)
    outputs = result.shape[-1] if result.shape else 1
    bits = _bits(graph.constants[node.inputs[1]]) if node.inputs[1] in graph.constants else 8
    inputs = macs // max(1, result.elements * kernel[0] * kernel[1])
    return Macs(count, type(node.operator).__name__, kernel, result.elements // outputs, inputs, outputs, bits)


def _bits(array: Array) -> int:
    """Bits that tell some integers from the least to the largest apart; of floats those they have."""
    return 8 * array.itemsize if array.dtype.kind == "f" else (int(array.max()) - int(array.min())).bit_length()


def _memories(program: Program, planned: Plan, target: Target) -> dict[str, PlanMemory]:
    """Buffers of every memory: where their parts lie, and from which statement to which."""
    touched, users = touches(program.statements, program.buffers, program.dma), _users(program)
    end = len(program.statements)
    order = StatementOrder(program.statements, program.dma)
    memories: dict[str, PlanMemory] = {}
    for placement in planned.placements:
        memory = target.memory(placement.memory)
        buffers: list[PlanBuffer] = []
        for name, address in placement.addresses.items():
            buffer, parts = program.buffers[name], []
            for part in pieces([(buffer, touched[name])], end, memory.alignment):
                first, last = part.span.first, part.span.last + 1
                done = max(order.finished_at(queue, use, queue) for queue, use in part.span.last_by_queue.items())
                times = max(first, 0), min(last, end), min(max(done, last), end)
                parts.append((part.start, min(part.stop, buffer.nbytes), *times))
            buffers.append(
                {
                    "name": name,
                    "role": buffer.role.value,
                    "address": address - memory.base,
                    "bytes": buffer.nbytes,
                    "layers": users.get(name, (0, 0)),
                    "parts": parts,
                }
            )
        busiest = placement.busiest if buffers else None
        memories[memory.name] = {"base": memory.base, "size": memory.size, "busiest": busiest, "buffers": buffers}
    return memories


def _results(program: Program, engine: str) -> list[tuple[int, int, int]]:
    """Bytes that launches of an engine and its own DMA may write: first address, one past the last, and the layer."""
    spans: dict[int, set[tuple[int, int]]] = {}
    for statement in program.statements:
        if engine in (stream_of(statement), getattr(statement, "engine", "")):
            parts = (part for view in writes(statement) for part in _stretches(view, program))
            spans.setdefault(statement.layer, set()).update(parts)
    found: list[tuple[int, int, int]] = []
    for layer, own in spans.items():
        before = len(found)
        for first, stop in sorted(own):
            if len(found) > before and first <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], stop), layer)
            else:
                found.append((first, stop, layer))
    return found


def _stretches(view: View, program: Program) -> Iterator[tuple[int, int]]:
    """The bytes of a view, side by side each; what pads its last blocks may hold any bytes."""
    address = program.buffers[view.buffer].address or 0
    if view.is_dense or (view.layout is not None and not view.layout.is_row_major):
        yield address + view.span[0], address + view.span[1]
        return
    taken = np.unique(byte_places(view.bytewise, address))
    ends = np.flatnonzero(np.diff(taken, append=taken[-1] + 2) > 1)
    yield from zip(taken[[0, *(ends[:-1] + 1)]].tolist(), (taken[ends] + 1).tolist(), strict=True)


def _users(program: Program) -> dict[str, tuple[int, int]]:
    """The first and the last layer that touch each buffer."""
    users: dict[str, tuple[int, int]] = {}
    for statement in program.statements:
        for view in (*reads(statement), *writes(statement)):
            first, last = users.get(view.buffer, (statement.layer, statement.layer))
            users[view.buffer] = (min(first, statement.layer), max(last, statement.layer))
    return users


def _moves(program: Program) -> list[PlanMove]:
    """Bytes moved by layer, memories they go from and to, and whether they are constants."""
    moved: Counter[tuple[int, str, str, bool]] = Counter()
    for statement in program.statements:
        if isinstance(statement, Copy):
            source, destination = (program.buffers[v.buffer] for v in (statement.source, statement.destination))
            key = (statement.layer, source.memory, destination.memory, source.role is Role.CONSTANT)
            moved[key] += sum(transfer.nbytes for transfer in relative_transfers(statement))
    for layer, move in engine_moves(program):
        memory = program.buffers[move.view.buffer].memory
        ends = (memory, move.engine) if move.to_engine else (move.engine, memory)
        moved[layer, *ends, False] += move.view.type.nbytes
    return [
        {"layer": layer, "from": source, "to": destination, "constants": constants, "bytes": count}
        for (layer, source, destination, constants), count in sorted(moved.items())
    ]
