"""ONNX operators of networks that read a sequence: tables by position, rotation of positions, attention, scattering."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.ir.operators.elementwise import BinaryKind, Compare, CompareKind, Select
from dovetail.ir.operators.movement import Gather
from dovetail.ir.operators.sequence import WriteRow
from dovetail.ir.types import Array, DType, Shape
from dovetail.read.onnx.values import OnnxValues
from dovetail.read.values import SMALLER, Value

LOWEST = float(np.finfo(np.float32).min)
"""The score of a place that is not attended to."""


def _flat_places(v: OnnxValues, indices: Array, shape: Shape) -> Array:
    """The row-major places of constant index tuples [..., K] in the first K axes of a shape."""
    depth = indices.shape[-1] if indices.ndim else 0
    v.wrong_if(not 0 < depth <= len(shape), f"the indices name {depth} of {len(shape)} axes")
    sizes = np.array(shape[:depth])
    odd = (indices < -sizes) | (indices >= sizes)
    v.wrong_if(odd.any(), f"an index is outside {list(shape[:depth])}")
    return np.asarray(np.ravel_multi_index(tuple(np.moveaxis(indices % sizes, -1, 0)), shape[:depth]))


def gather_nd(v: OnnxValues) -> Value:
    """GatherND by constant indices, or by computed ones along the first axis."""
    v.only("batch_dims", 0)
    x, name = v.x, v.name_of(1)
    if name not in v.constants:
        indices = v.value(1)
        v.refuse_if(indices.shape[-1:] != (1,), "computes indices of several axes; of the first one only is supported")
        return v.add(Gather(0), [x, v.reshape(indices, indices.shape[:-1], "places")])
    tuples = v.constants[name].array
    depth = tuples.shape[-1] if tuples.ndim else 0
    places, rest = _flat_places(v, tuples, x.shape), x.shape[depth:]
    rows = v.reshape(x, (int(np.prod(x.shape[:depth])), *rest), "rows")
    return v.reshape(v.pick(rows, [places.reshape(-1).tolist(), *map(range, rest)], "taken"), (*places.shape, *rest))


def scatter_nd(v: OnnxValues) -> Value:
    """ScatterND by constant indices, or of one row along the first axis at a computed place."""
    v.only("reduction", "none")
    x, name, updates = v.x, v.name_of(1), v.value(2)
    if name not in v.constants:
        indices = v.value(1)
        v.refuse_if(
            indices.elements != 1, "computes several indices; one computed place along the first axis is supported"
        )
        return v.add(WriteRow(0), [x, v.shaped(updates, (1, *x.shape[1:]), "row"), v.shaped(indices, (1,), "place")])
    tuples = v.constants[name].array
    depth = tuples.shape[-1] if tuples.ndim else 0
    places, rest = _flat_places(v, tuples, x.shape).reshape(-1), x.shape[depth:]
    count = int(np.prod(x.shape[:depth]))
    v.check_places(count + len(places))
    source = np.arange(count)
    source[places] = count + np.arange(len(places))
    rows = [v.shaped(x, (count, *rest), "rows"), v.shaped(updates, (len(places), *rest), "updates")]
    chosen = v.pick(v.concat(rows, 0, "both"), [source.tolist(), *map(range, rest)], "chosen")
    return v.reshape(chosen, x.shape)


def _rotated(v: OnnxValues, x: Value, angles: Sequence[Value], interleaved: bool) -> Value:
    """x [..., D] with pairs of elements rotated by angles, whose cosine and sine broadcast to [..., D / 2]."""
    cosine, sine = angles
    half, last = x.shape[-1] // 2, x.rank - 1
    if interleaved:
        pairs = v.reshape(x, (*x.shape[:-1], half, 2), "pairs")
        parts = [
            v.shaped(v.part(pairs, x.rank, at, at + 1, f"part_{at}"), (*x.shape[:-1], half), f"half_{at}")
            for at in (0, 1)
        ]
    else:
        parts = [v.part(x, last, at * half, (at + 1) * half, f"half_{at}") for at in (0, 1)]
    real = v.minus(v.times(parts[0], cosine, "rc"), v.times(parts[1], sine, "is"), "real")
    imaginary = v.plus(v.times(parts[0], sine, "rs"), v.times(parts[1], cosine, "ic"), "imaginary")
    if not interleaved:
        return v.concat([real, imaginary], last, "rotated")
    columns = [v.reshape(part, (*part.shape, 1), f"column_{at}") for at, part in enumerate((real, imaginary))]
    return v.reshape(v.concat(columns, x.rank, "stacked"), x.shape, "rotated")


def _in_heads(v: OnnxValues, x: Value, heads: int, suffix: str) -> Value:
    """[B, S, H * D] as [B, H, S, D]; with four axes as it is."""
    if x.rank == 4:
        return x
    v.wrong_if(x.rank != 3 or heads < 1 or x.shape[2] % heads, f"{x.type} has not {heads} heads")
    parts = v.reshape(x, (x.shape[0], x.shape[1], heads, x.shape[2] // heads), f"{suffix}_split")
    return v.transpose(parts, (0, 2, 1, 3), f"{suffix}_heads")


def _out_of_heads(v: OnnxValues, x: Value, shape: Shape) -> Value:
    """[B, H, S, D] as the shape an operand came in."""
    return v.reshape(x if len(shape) == 4 else v.transpose(x, (0, 2, 1, 3), "rows"), shape)


def rotary_embedding(v: OnnxValues, position: int = 3, tables: int = 1) -> Value:
    """RotaryEmbedding: pairs of elements rotated by tables, which positions choose rows of; operands `position` and,
    from `tables` on, cosines and sines."""
    x = v.real()
    for name in ("is_packed_batching", "scale"):  # com.microsoft's
        v.only(name, {"scale": 1.0}.get(name, 0))
    heads = _in_heads(v, x, v.attribute("num_heads", 0), "x")
    size = heads.shape[3]
    turned = v.attribute("rotary_embedding_dim", 0) or size
    v.wrong_if(turned % 2 or turned > size, f"rotates {turned} of {size} elements")
    angles = [v.real(tables), v.real(tables + 1)]
    if v.has(position):
        rows = v.value(position)
        if rows.elements == 1 and heads.shape[2] > 1:
            raise v.refuse("one position stands for several rows", "give a position for each row")
        angles = [v.add(Gather(0), [table, rows], f"row_{at}") for at, table in enumerate(angles)]
    shape = (heads.shape[0], 1, heads.shape[2], turned // 2)
    angles = [v.shaped(angle, shape, f"angle_{at}") for at, angle in enumerate(angles)]
    whole = heads if turned == size else v.part(heads, 3, 0, turned, "turning")
    result = _rotated(v, whole, angles, v.attribute("interleaved", False))
    rest = [] if turned == size else [v.part(heads, 3, turned, size, "still")]
    return _out_of_heads(v, v.concat([result, *rest], 3, "whole"), x.shape)


def _attended(v: OnnxValues, q: Value, k: Value, v_: Value, scale: float, mask: Value | None) -> Value:
    """Attention of [B, H, T, D] to [B, K, S, D]; the mask is bool, or float and added."""
    heads, groups = q.shape[1], k.shape[1]
    v.wrong_if(groups < 1 or heads % groups, f"{heads} heads do not share {groups} of keys")
    if heads != groups:
        share = [head // (heads // groups) for head in range(heads)]
        k, v_ = (
            v.pick(one, [range(one.shape[0]), share, *map(range, one.shape[2:])], f"{name}_shared")
            for one, name in ((k, "keys"), (v_, "values"))
        )
    scores = v.scaled(v.product(q, v.matrix_turned(k), "products"), scale, "scores")
    if mask is not None and mask.dtype is DType.BOOL:
        scores = v.add(Select(), [mask, scores, v.number(LOWEST)], "masked")
    elif mask is not None:
        scores = v.plus(scores, mask, "masked")
    return v.product(v.softmax(scores, (3,), "shares"), v_, "attended")


def attention(v: OnnxValues) -> Value:
    """Attention (opset 23), with keys and values of the past, if any, before the present ones."""
    v.only("softcap", 0.0)
    v.only("softmax_precision", 1)
    v.only("qk_matmul_output_mode", 0)
    for side in ("left_window_size", "right_window_size"):
        v.only(side, -1)
    v.refuse_if(any(v.op.outputs[3:4]), "gives the scores, which is not supported")
    v.refuse_if(v.has(6), "counts places that are no padding, which is not supported", "say it with the mask")
    q, k, values = (v.real(at) for at in range(3))
    shape, heads, groups = q.shape, v.attribute("q_num_heads", 0), v.attribute("kv_num_heads", 0)
    q, k, values = (
        _in_heads(v, one, count, name)
        for one, count, name in ((q, heads, "q"), (k, groups, "k"), (values, groups, "v"))
    )
    before = 0
    if v.has(4) and v.has(5):
        before = v.value(4).shape[2]
        k, values = v.concat([v.real(4), k], 2, "all_keys"), v.concat([v.real(5), values], 2, "all_values")
    for place, present in ((1, k), (2, values)):
        if place < len(v.op.outputs) and v.op.outputs[place]:
            v.values[v.op.outputs[place]] = v.reshape(present, present.shape, name=v.op.outputs[place])
    mask, rows, places = (v.value(3) if v.has(3) else None), q.shape[2], k.shape[2]
    if v.attribute("is_causal", False):
        causal = np.tril(np.ones((rows, places), np.bool_), before)
        if mask is None:
            mask = v.constant(causal, "causal")
        elif mask.dtype is DType.BOOL:
            mask = v.binary(BinaryKind.MINIMUM, mask, v.constant(causal, "causal"), "both_masks")
        else:
            mask = v.add(Select(), [v.constant(causal, "causal"), mask, v.number(LOWEST)], "both_masks")
    scale = v.attribute("scale", 0.0) or float(q.shape[3]) ** -0.5
    result = _attended(v, q, k, values, scale, mask)
    if len(shape) == 4:
        return v.shaped(result, result.shape)
    return v.reshape(v.transpose(result, (0, 2, 1, 3), "rows"), (*shape[:2], heads * values.shape[3]))


def group_query_attention(v: OnnxValues) -> Value:
    """GroupQueryAttention of one row of one sequence: keys and values are written into buffers at the place that
    seqlens_k says, and the places up to there are attended to."""
    for name, wanted in (("local_window_size", -1), ("softcap", 0.0), ("smooth_softmax", 0), ("k_quant_type", "NONE"),
                         ("v_quant_type", "NONE"), ("kv_cache_bit_width", 0), ("qk_output", 0)):  # fmt: skip
        v.only(name, wanted)
    v.refuse_if(not all(v.has(at) for at in (1, 2, 3, 4)), "packs queries, keys and values, or has no past", SMALLER)
    v.refuse_if(any(v.has(at) for at in range(9, len(v.op.inputs))), "has operands behind the sines")
    q, buffers = v.real(), [v.real(3), v.real(4)]
    v.refuse_if(q.shape[:2] != (1, 1), f"is supported for one row of one sequence, the query is {q.type}")
    heads, groups = v.attribute("num_heads", 0), v.attribute("kv_num_heads", 0)
    place = v.shaped(v.value(5), (1,), "place")
    rows = [
        _in_heads(v, v.real(at), count, name)
        for at, count, name in ((0, heads, "q"), (1, groups, "k"), (2, groups, "v"))
    ]
    if v.attribute("do_rotary", False):
        angles = [v.add(Gather(0), [v.real(at), place], f"row_{at}") for at in (7, 8)]
        turned = v.attribute("rotary_interleaved", False)
        rows[:2] = [_rotated(v, one, angles, turned) for one in rows[:2]]
    else:
        v.given("rotary_interleaved")
    whole = [
        v.add(WriteRow(2), [buffer, row, place], name)
        for buffer, row, name in zip(buffers, rows[1:], ("all_keys", "all_values"), strict=True)
    ]
    for at, present in enumerate(whole, 1):
        if at < len(v.op.outputs) and v.op.outputs[at]:
            v.values[v.op.outputs[at]] = v.reshape(present, present.shape, name=v.op.outputs[at])
    count = whole[0].shape[2]
    places = v.constant(np.arange(count, dtype=place.dtype.numpy), "places")
    mask = v.add(Compare(CompareKind.LESS_OR_EQUAL), [places, place], "live")
    scale = v.attribute("scale", 0.0) or float(rows[0].shape[3]) ** -0.5
    result = _attended(v, rows[0], whole[0], whole[1], scale, mask)
    return v.reshape(v.transpose(result, (0, 2, 1, 3), "rows"), q.shape)
