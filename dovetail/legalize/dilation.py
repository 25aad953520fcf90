"""Dilated convolutions for engines that have none: interleaved undilated ones, computed as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.linear import Convolution
from dovetail.ir.operators.movement import Pad, Reshape, Slice, Transpose
from dovetail.ir.rewrite import Draft, run
from dovetail.legalize.matrices import requantised_first
from dovetail.legalize.requantisation import Accepts


def without_dilation(chooses: Accepts) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen convolution of stride 1 with taps `d` apart reads every d-th row and column only. The images
    of all such rows and columns, one below the other, go through one convolution without dilation; what its windows
    over two of them give is left out, and the rest put back where it belongs, behind the requantisation. Exact.

    Args:
        chooses: of types and layer.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        operator = node.operator
        if not isinstance(operator, Convolution) or operator.dilation == (1, 1) or operator.stride != (1, 1):
            return None
        image, result = draft.types[node.inputs[0]].shape, draft.types[node.output].shape
        if image[0] != 1 or node.inputs[1] not in draft.constants or not chooses(draft.types, node):
            return None
        (down, right), (_, height, width, depth) = operator.dilation, image
        kernel = draft.types[node.inputs[1]].shape[1:3]
        rows, columns = -(-height // down), -(-width // right)
        given = _grown(draft, node, (rows * down - height, columns * right - width), operator.input_zero_point)
        apart = draft.add(Reshape((rows, down, columns, right, depth)), [given], node, node.inputs[0])
        turned = draft.add(Transpose((1, 3, 0, 2, 4)), [apart], node, node.inputs[0])
        tall = draft.add(Reshape((1, down * right * rows, columns, depth)), [turned], node, node.inputs[0])
        if kernel[0] > 1:  # so that each image gives as many rows as it has; what they hold is left out
            tall = draft.add(Pad((0,) * 4, (0, kernel[0] - 1, 0, 0), 0), [tall], node, node.inputs[0])
        made = draft.add(replace(operator, dilation=(1, 1)), [tall, *node.inputs[1:]], node)
        found = (rows - kernel[0] + 1, columns - kernel[1] + 1)
        whole = (down, right, rows, found[1], result[3])
        parts = draft.add(Reshape(whole), [made], node)
        kept = draft.add(Slice((0,) * 5, (down, right, found[0], *whole[3:]), (1,) * 5), [parts], node)
        back = draft.add(Transpose((2, 0, 3, 1, 4)), [kept], node)
        joined = draft.add(Reshape((1, found[0] * down, found[1] * right, result[3])), [back], node)
        exact = draft.types[joined].shape == result
        return joined if exact else draft.add(Slice((0,) * 4, result, (1,) * 4), [joined], node)

    return lambda graph: run(graph, [rule, requantised_first])


def _grown(draft: Draft, node: Node, more: tuple[int, int], filler: int) -> str:
    """The layer's image with more rows below and columns to the right, which no result that is kept reads."""
    pad = draft.made_by(node.inputs[0], Pad)
    if not any(more):
        return node.inputs[0]
    if pad is None or not isinstance(pad.operator, Pad) or draft.users(pad.output) > 1:
        return draft.add(Pad((0,) * 4, (0, *more, 0), filler), node.inputs[:1], node, node.inputs[0])
    after = pad.operator.after
    grown = Pad(pad.operator.before, (after[0], after[1] + more[0], after[2] + more[1], after[3]), pad.operator.value)
    return draft.add(grown, pad.inputs, pad)
