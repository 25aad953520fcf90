"""What a build keeps for its report beside the manifest: the graph, where every buffer lies and when, what is moved.

`dovetail compile` writes it as `dovetail-plan.json`; nothing but the report reads it. The fields are those of the
report's JSON (docs/report.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.plan.allocate import Order, pieces, touches
from dovetail.program.ir import Begin, Call, Copy, Launch, Role, reads, writes
from dovetail.program.transfers import strips, transfers

if TYPE_CHECKING:
    from dovetail.graph.graph import Graph
    from dovetail.graph.types import TensorType
    from dovetail.partition import Region
    from dovetail.plan import Plan
    from dovetail.program.ir import Program
    from dovetail.target.description import Target

PLAN = "dovetail-plan.json"
"""Name of the file in a build."""
SCHEMA = 1
"""Version of the file. It grows when a field is removed or changes its meaning."""


def plan_text(graph: Graph, regions: Sequence[Region], planned: Plan, target: Target) -> str:
    """The file: the same text for the same network and target.

    Args:
        graph: the integer graph as the target computes it.
        regions: its layers.
        planned: where and when.
        target: the machine.
    """
    program = planned.program
    found = {
        "schema": SCHEMA,
        "statements": len(program.statements),
        "begins": _begins(program),
        "graph": _graph(graph, regions),
        "layers": [_layer(region, program, number) for number, region in enumerate(regions)],
        "memories": _memories(program, planned, target),
        "moves": _moves(program),
        "transfers": _transfers(program) if target.dma else [],
    }
    return json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n"


def _begins(program: Program) -> list[list[int]]:
    """Statement and layer of every stretch in which the core works for one layer and does something."""
    found: list[list[int]] = []
    for index, statement in enumerate(program.statements):
        following = program.statements[index + 1] if index + 1 < len(program.statements) else Begin(-1)
        if isinstance(statement, Begin) and not isinstance(following, Begin):
            found.append([index, statement.layer])
    return found


def _graph(graph: Graph, regions: Sequence[Region]) -> dict[str, Any]:
    """Values and which layer makes and reads them."""
    named = (name for region in regions for name in (*region.graph.inputs, region.output))
    values = dict.fromkeys((*graph.inputs, *named))
    return {
        "inputs": list(graph.given),
        "outputs": list(graph.results),
        "states": [[read, written] for read, written, _ in graph.kept],
        "values": {name: _type(graph.types[name]) for name in values},
        "edges": [{"reads": list(region.graph.inputs), "makes": region.output} for region in regions],
    }


def _type(kind: TensorType) -> dict[str, Any]:
    return {"shape": list(kind.shape), "dtype": kind.dtype.text, "bytes": kind.nbytes}


def _layer(region: Region, program: Program, number: int) -> dict[str, Any]:
    types, constants = region.graph.types, region.graph.constants
    nodes, own = region.graph.nodes, [statement for statement in program.statements if statement.layer == number]
    products, read = least_work(region.graph)
    return {
        "kinds": list(dict.fromkeys(type(node.operator).__name__ for node in nodes)),
        "offload": region.offload.name if region.offload else "",
        "reason": why_not_offloaded(region),
        "nothing": region.is_view or region.still,
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
                "weights": any(_weighs(region.graph, node.inputs, name) for node in nodes),
            }
            for name in constants
        ],
        "launches": sum(isinstance(s, Launch) for s in own),
        "modelled": sum(_modelled(region, s) for s in own if isinstance(s, Launch)),
        "calls": sum(isinstance(s, Call) for s in own),
    }


def _modelled(region: Region, launch: Launch) -> int:
    """Cycles of a launch as the offload's cost model has them."""
    mine = region.offload is not None and region.engine is not None and region.engine.name == launch.engine
    return region.offload.cycles(launch.match) if mine and region.offload is not None else 0


def _weighs(graph: Graph, inputs: Sequence[str], name: str) -> bool:
    """True for a constant that a node multiplies its operand with: the second operand of one that has MACs."""
    makes = next(node for node in graph.nodes if node.inputs == tuple(inputs))
    return len(inputs) > 1 and inputs[1] == name and makes.operator.macs([graph.types[value] for value in inputs]) > 0


def why_not_offloaded(region: Region) -> str:
    """Why no engine computes a layer, as a sentence; empty where one does."""
    if region.is_view:
        return "nothing is computed: the same bytes under another shape"
    if region.still:
        return "nothing is copied: rows lie where they belong"
    if region.mover:
        return f"{'the core copies' if region.mover == 'core' else 'the DMA does it'}: elements only move"
    if region.engine is None and not region.reason:
        return "the target has no engine"
    return region.reason


def least_work(graph: Graph) -> tuple[int, int]:
    """What no way to compute a layer can do without: products, those with padding of its own left out, and bytes of
    operands read, pixels that a stride passes over left out."""
    from dovetail.operators.linear import Conv2d, DepthwiseConv2d
    from dovetail.operators.movement import Pad

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


def _memories(program: Program, planned: Plan, target: Target) -> dict[str, Any]:
    """Per memory what lies where, and when: of each part of a buffer the first byte and one past the last, the first
    statement that touches it and one past the last, and the one by which the core knows that all have finished."""
    touched, users, end = touches(program.statements, program.dma), _users(program), len(program.statements)
    order = Order(program.statements, program.dma)
    found: dict[str, Any] = {}
    for placement in planned.placements:
        memory = target.memory(placement.memory)
        buffers = []
        for name in placement.addresses:
            buffer = program.buffers[name]
            cut = pieces([(buffer, touched[name])], end, memory.alignment)
            parts = []
            for part in cut:
                known = max(order.finished_at(queue, last) for queue, last in part.span.last_by_queue.items())
                times = max(part.span.first, 0), min(part.span.last + 1, end), min(max(known, part.span.last + 1), end)
                parts.append([part.start, min(part.stop, buffer.nbytes), *times])
            buffers.append(
                {
                    "name": name,
                    "role": buffer.role.value,
                    "address": placement.addresses[name] - memory.base,
                    "bytes": buffer.nbytes,
                    "layers": users[name],
                    "parts": parts,
                }
            )
        fullest = {"busiest": placement.busiest} if buffers else {"busiest": None}
        found[memory.name] = {"base": memory.base, "size": memory.size, **fullest, "buffers": buffers}
    return found


def _users(program: Program) -> dict[str, list[int]]:
    """The first and the last layer that touch each buffer."""
    found: dict[str, list[int]] = {}
    for statement in program.statements:
        for view in (*reads(statement), *writes(statement)):
            first, last = found.get(view.buffer, (statement.layer, statement.layer))
            found[view.buffer] = [min(first, statement.layer), max(last, statement.layer)]
    return found


def _moves(program: Program) -> list[dict[str, Any]]:
    """Bytes copies write (padding too), by layer, the memories they go from and to, and whether they are constants."""
    found: dict[tuple[int, str, str, bool], int] = {}
    for statement in program.statements:
        if isinstance(statement, Copy):
            source, destination = (program.buffers[v.buffer] for v in (statement.source, statement.destination))
            key = (statement.layer, source.memory, destination.memory, source.role is Role.CONSTANT)
            found[key] = found.get(key, 0) + sum(transfer.nbytes for transfer in transfers(statement))
    last = len(program.statements) - 1
    for index, moves in program.moves.items():
        for move in moves:
            memory = program.buffers[move.view.buffer].memory
            ways = (memory, move.engine) if move.to_engine else (move.engine, memory)
            key = (program.statements[min(index, last)].layer, *ways, False)
            found[key] = found.get(key, 0) + move.view.type.nbytes
    return [
        {"layer": layer, "from": source, "to": destination, "constants": constants, "bytes": count}
        for (layer, source, destination, constants), count in sorted(found.items())
    ]


def _transfers(program: Program) -> list[list[int]]:
    """Layer and number of DMA transfers of each copy, in the order in which they are started."""
    found = []
    for statement in program.statements:
        if isinstance(statement, Copy):
            moves = transfers(statement)
            found.append([statement.layer, sum(len(strips(move)) if move.border else 1 for move in moves)])
    return found


def constants_of(layers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every constant of the network once, as the layers name them."""
    return list({constant["name"]: constant for layer in layers for constant in layer["constants"]}.values())
