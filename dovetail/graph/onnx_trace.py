"""Integer arithmetic written once in numpy, and followed here to give the same as standard ONNX nodes.

A `Traced` stands for an int64 array that only the ONNX graph will hold. numpy's functions, given one, come here
(numpy's __array_ufunc__ and __array_function__ protocols), and each becomes nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from dovetail.graph import onnx_fixed_point
from dovetail.graph.types import Array, DType

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


class Traced(NDArrayOperatorsMixin):
    """An int64 value of `body` that numpy functions may be applied to; a comparison gives 0 or 1."""

    def __init__(self, body: OnnxBody, name: str) -> None:
        self.body = body
        self.name = name

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **_: Any) -> Traced:
        if method != "__call__" or ufunc not in _UFUNCS:
            raise TypeError(f"{ufunc.__name__} has no ONNX form here")
        name = _UFUNCS[ufunc](self.body, [self._name(value) for value in inputs])
        return Traced(self.body, name if ufunc not in _RELATIONS else self.body.cast(name, DType.INT64))

    def __array_function__(
        self, function: Callable[..., Any], _: object, inputs: Sequence[Any], named: Mapping[str, Any]
    ) -> Traced:
        if function not in _FUNCTIONS:
            raise TypeError(f"{function.__name__} has no ONNX form here")
        return Traced(self.body, _FUNCTIONS[function](self.body, [self._name(value) for value in inputs], dict(named)))

    def taken_from(self, table: Array) -> Traced:
        """table[this value]."""
        return Traced(self.body, self.body.add("Gather", [self._name(table), self.name]))

    def _name(self, value: Any) -> str:
        if isinstance(value, Traced):
            return value.name
        return self.body.tensor(np.asarray(value).astype(np.int64))


def traced(body: OnnxBody, meaning: Callable[..., Any], inputs: Sequence[str], dtype: DType) -> str:
    """The ONNX nodes of a function of int64 arrays; the result is cast to `dtype`.

    Args:
        body: gets the nodes.
        meaning: the function; it may use the numpy functions listed in this module.
        inputs: names of its operands, of any integer type.
        dtype: of the result.
    """
    found = meaning(*(Traced(body, body.cast(name, DType.INT64)) for name in inputs))
    return body.cast(found.name, dtype)


def _simple(name: str) -> Callable[[OnnxBody, list[str]], str]:
    return lambda body, inputs: body.add(name, inputs)


def _shift_left(body: OnnxBody, inputs: list[str]) -> str:
    powers = body.tensor(np.int64(1) << np.arange(63, dtype=np.int64))
    return body.add("Mul", [inputs[0], body.add("Gather", [powers, inputs[1]])])


_UFUNCS: dict[np.ufunc, Callable[[OnnxBody, list[str]], str]] = {
    np.add: _simple("Add"),
    np.subtract: _simple("Sub"),
    np.multiply: _simple("Mul"),
    np.negative: _simple("Neg"),
    np.absolute: _simple("Abs"),
    np.maximum: _simple("Max"),
    np.minimum: _simple("Min"),
    np.bitwise_and: _simple("BitwiseAnd"),
    np.left_shift: _shift_left,
    np.right_shift: lambda body, inputs: onnx_fixed_point.shift_right(body, *inputs),
    np.greater: _simple("Greater"),
    np.greater_equal: _simple("GreaterOrEqual"),
    np.less: _simple("Less"),
    np.less_equal: _simple("LessOrEqual"),
    np.equal: _simple("Equal"),
}

_RELATIONS = (np.greater, np.greater_equal, np.less, np.less_equal, np.equal)


def _reduced(name: str) -> Callable[[OnnxBody, list[str], dict[str, Any]], str]:
    def build(body: OnnxBody, inputs: list[str], named: dict[str, Any]) -> str:
        keep = int(bool(named.get("keepdims", False)))
        return body.add(name, [inputs[0], body.integers((int(named["axis"]),))], keepdims=keep)

    return build


def _where(body: OnnxBody, inputs: list[str], _: dict[str, Any]) -> str:
    return body.add("Where", [body.cast(inputs[0], DType.BOOL), *inputs[1:]])


def _limited(body: OnnxBody, inputs: list[str], _: dict[str, Any]) -> str:
    return body.add("Min", [body.add("Max", inputs[:2]), inputs[2]])


_FUNCTIONS: dict[Callable[..., Any], Callable[[OnnxBody, list[str], dict[str, Any]], str]] = {
    np.sum: _reduced("ReduceSum"),
    np.max: _reduced("ReduceMax"),
    np.where: _where,
    np.clip: _limited,
}
