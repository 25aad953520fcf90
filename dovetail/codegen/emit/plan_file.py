"""Writes `dovetail-plan.json`: the graph of a build, where every buffer lies and when, and moves.

`dovetail.codegen.plan_file` reads it, and says what each field is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from dovetail.codegen.emit.manifest import engine_moves
from dovetail.codegen.plan_file import SCHEMA, PlanBuffer, PlanGraph, PlanLayer, PlanMemory, PlanMove
from dovetail.ir.graph import Graph, Node
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
    queue_of,
    reads,
    writes,
)
from dovetail.program.transfers import transfer_count, transfers
from dovetail.schedule.plan import Plan
from dovetail.schedule.plan.lifetimes import StatementOrder, pieces, touches
from dovetail.schedule.plan.timed import launch_cycles
from dovetail.schedule.region import Region
from dovetail.target.description import Target


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
    from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
    from dovetail.ir.operators.movement import Pad

    producers, products = graph.producers(), 0
    read = {name: graph.types[name].nbytes for name in graph.inputs}
    for node in graph.nodes:
        types = [graph.types[name] for name in node.inputs]
        macs = node.operator.macs(types)
        if isinstance(node.operator, Conv2d | DepthwiseConv2d):
            pad = producers.get(node.inputs[0])
            padded = pad is not None and isinstance(pad.operator, Pad)
            value = pad.inputs[0] if pad is not None and padded else node.inputs[0]
            for axis in (1, 2):
                before = pad.operator.before[axis] if pad is not None and isinstance(pad.operator, Pad) else 0
                size, step = graph.types[value].shape[axis], node.operator.stride[axis - 1]
                spread = node.operator.dilation[axis - 1]
                taps = [
                    output * step + tap * spread - before
                    for output in range(graph.types[node.output].shape[axis])
                    for tap in range(types[1].shape[axis])
                ]
                inside = [place for place in taps if 0 <= place < size]
                macs = macs * len(inside) // len(taps)
                if value in read:
                    read[value] = read[value] * len(set(inside)) // size
        products += macs
    return products, sum(read.values())


def model_work(graph: Graph) -> dict[str, int]:
    """The least work of a model whose dead parts are left out: products, bytes of its weights in as many bits as their
    values need, each array once, and bytes of what it reads and gives."""
    products, read = least_work(graph)
    weights = {name for node in graph.nodes for name in node.inputs[1:2] if _weighs(graph, node, name)}
    arrays = {array.tobytes(): array for name, array in graph.constants.items() if name in weights and array.size}
    nbytes = sum(array.size * _bits(array) // 8 for array in arrays.values())
    written = sum(graph.types[name].nbytes for name in graph.results)
    return {"products": products, "weights": nbytes, "read": read, "written": written}


def _bits(array: Array) -> int:
    """Bits that the largest of some integers needs, without a sign; of floats those they have."""
    if array.dtype.kind == "f":
        return 8 * array.itemsize
    return max(int(array.max()).bit_length(), int(array.min()).bit_length())


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
            moved[key] += sum(transfer.nbytes for transfer in transfers(statement))
    for layer, move in engine_moves(program):
        memory = program.buffers[move.view.buffer].memory
        ends = (memory, move.engine) if move.to_engine else (move.engine, memory)
        moved[layer, *ends, False] += move.view.type.nbytes
    return [
        {"layer": layer, "from": source, "to": destination, "constants": constants, "bytes": count}
        for (layer, source, destination, constants), count in sorted(moved.items())
    ]
