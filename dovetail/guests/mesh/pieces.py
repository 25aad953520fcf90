"""The computation of pieces: as graphs, executed in numpy, and whether each is sent all it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dovetail.errors import ProgramError
from dovetail.guests.mesh.layers import Show, unseen
from dovetail.guests.mesh.partition import MeshStage, Section, read_span
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.guests.mesh.traffic import Traffic
from dovetail.ir.crop import crop
from dovetail.ir.graph import Graph, Node, evaluate
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.types import Array, Box, DType, TensorType, box_slices, full_box

PARTIAL = "partial_sums"
"""Name of the operand through which sums go from piece to piece."""


def piece_graph(stage: MeshStage, piece: int) -> tuple[Graph, dict[str, Box]]:
    """The computation of a piece, and the part it reads of each operand.

    Of pieces that sum for each other, all but the first read `PARTIAL`, and all but the last give 32-bit sums.
    """
    graph, box = stage.layer.graph, stage.result_box(piece)
    reads = {name: full_box(graph.types[name].shape) for name in graph.inputs}
    if box != full_box(stage.result.shape):
        tile = crop(graph, box)
        graph, reads = tile.graph, tile.reads
    return (graph, reads) if stage.cut.sums == 1 else _partial(stage, piece, graph, reads)


def _partial(stage: MeshStage, piece: int, whole: Graph, reads: dict[str, Box]) -> tuple[Graph, dict[str, Box]]:
    """A piece cut along what it sums over: the last adds the bias and computes everything behind the sums."""
    parts = stage.layer.parts
    assert parts is not None and parts.anchor is not None
    span = stage.spans(piece)[3]
    is_first, is_last = piece % stage.cut.sums == 0, bool(stage.last[piece])
    source, weights, *_ = parts.anchor.inputs
    types, constants = dict(whole.types), dict(whole.constants)
    narrowed = [source] if parts.pad is None else [parts.pad.inputs[0], source]
    for name in (*narrowed, weights):
        types[name] = TensorType((*types[name].shape[:-1], span[1] - span[0]), types[name].dtype)
    constants[weights] = constants[weights][..., span[0] : span[1]]
    reads = {**reads, narrowed[0]: (*reads[narrowed[0]][:-1], span)}
    nodes: list[Node] = []
    for node in whole.nodes:
        if node.output == parts.anchor.output:
            own = node.output if is_first else f"{node.output}_own"
            nodes.append(replace(node, inputs=node.inputs if is_last else node.inputs[:2], output=own))
            if not is_first:
                types[own], types[PARTIAL] = types[node.output], TensorType(types[node.output].shape, DType.INT32)
                nodes.append(Node(Add(), (own, PARTIAL), node.output, node.origin))
        elif is_last or (parts.pad is not None and node.output == parts.pad.output):
            nodes.append(node)
    outputs = whole.outputs if is_last else (nodes[-1].output,)
    read = [name for node in nodes for name in node.inputs]
    inputs = tuple(name for name in (*whole.inputs, PARTIAL) if name in read)
    constants = {name: array for name, array in constants.items() if name in read}
    graph = replace(whole, inputs=inputs, outputs=outputs, nodes=tuple(nodes), types=types, constants=constants)
    return graph, {name: box for name, box in reads.items() if name in inputs}


def execute(mapped: MeshMapping, inputs: Mapping[str, Array], show: Show = unseen) -> dict[str, Array]:
    """Compute a network piece by piece, each from the part it reads.

    Returns:
        An array per output.

    Raises:
        ProgramError: pieces overlap or leave something of a result out.
    """
    values: dict[str, Array] = dict(inputs)
    times = {layer.index: np.zeros(layer.result.shape, np.int8) for layer in mapped.network.layers}
    count, done = sum(section.pieces for section in mapped.sections), 0
    for section in mapped.sections:
        result: Array | None = None
        for stage, piece in section.owners:
            done += 1
            show(f"computing every piece: {done} of {count}")
            graph, reads = piece_graph(stage, piece)
            operands = {PARTIAL: result} if PARTIAL in graph.inputs and result is not None else {}
            for reading in stage.layer.readings:
                if reading.name in graph.inputs:
                    whole = values[reading.value].reshape(stage.layer.graph.types[reading.name].shape)
                    operands[reading.name] = np.ascontiguousarray(whole[box_slices(reads[reading.name])])
            result = evaluate(graph, operands)[graph.outputs[0]]
            if stage.last[piece]:
                stage.put(values, piece, result)
                times[stage.layer.index][box_slices(stage.result_box(piece))] += 1
    for layer in mapped.network.layers:
        if (times[layer.index] != 1).any():
            what = "pieces overlap or leave something out"
            raise ProgramError(what, where=layer.name, hint="report this with the mapping file")
    network, types = mapped.network, mapped.graph.types
    names = {name: network.layers[index].graph.outputs[0] for name, index in network.outputs.items()}
    return {name: values[value].reshape(types[name].shape) for name, value in names.items()}


def check_covered(section: Section, traffic: Traffic) -> int:
    """Check that every piece is sent all it reads: the boxes of its senders' messages, which do not overlap, hold as
    many of the elements it reads as there are.

    Returns:
        How many messages pieces receive for one input.

    Raises:
        ProgramError: a piece lacks part of an operand.
    """
    sender, receiver = traffic.pairs()
    boxes = np.concatenate([stage.boxes[:, :6] for stage in section.stages])
    layer = np.repeat([stage.layer.index for stage in section.stages], [stage.pieces for stage in section.stages])
    for stage in section.stages:
        for reading in stage.layer.readings:
            if reading.producer not in layer:
                continue
            here = (layer[receiver] == stage.layer.index) & (layer[sender] == reading.producer)
            piece, sent = receiver[here] - stage.first, boxes[sender[here]]
            read, there = np.ones(stage.pieces), np.ones(len(piece))
            for axis in range(3):
                low, high = read_span(reading, stage.layer, axis, stage.boxes)
                read *= high - low
                ends = np.minimum(high[piece], sent[:, 2 * axis + 1]) - np.maximum(low[piece], sent[:, 2 * axis])
                there *= np.clip(ends, 0, None)
            total = np.bincount(piece, weights=there, minlength=stage.pieces)
            for short in [one for one in stage.readers(reading).tolist() if total[one] != read[one]][:1]:
                what = f"piece {short} is sent {int(total[short])} of the {int(read[short])} elements it reads"
                hint = "report this with the mapping file"
                raise ProgramError(f"{what} of '{reading.value}'", where=stage.layer.name, hint=hint)
    return len(sender)
