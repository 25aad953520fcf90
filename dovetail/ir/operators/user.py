"""Operators that a Python file of the user's defines, and those bundled the same way: one class says all of one.

A class has a name in model files (`custom_code` of TFLite, `domain` and `op_type` of ONNX), its attributes as fields,
its type rule (`results`), its meaning in numpy (`compute`), and its C: `c` is text with a `function`, which gets
pointers to results, operands, tables and scratch, in this order, then numbers. Arrays are dense and row-major.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from dovetail.errors import DovetailError
from dovetail.ir.operators.base import Operator, require
from dovetail.ir.types import Array, DType, TensorType
from dovetail.records import Record

_ABSENT: Any = object()


class SaidOperand(Record):
    """A model file's facts about an operand or a result."""

    type: TensorType | None
    """None for a result whose type the file leaves open."""
    scale: tuple[float, ...] = ()
    """Scales of a quantised tensor: one, or one for each index along an axis. Empty for none; ONNX has none here."""
    zero_point: tuple[int, ...] = ()
    """Zero points, as many as scales."""
    array: Array | None = None
    """The elements of a constant."""


class Said(Record):
    """Operator of a model file: attributes and operands, as the file declares them."""

    attributes: Mapping[str, Any]
    """Numbers, texts, tuples and dictionaries of them, by name: the flexbuffer of a TFLite operator's custom options,
    or ONNX attributes (tensors as arrays)."""
    operands: tuple[SaidOperand | None, ...] = ()
    """None for one that is left out."""
    results: tuple[SaidOperand, ...] = ()
    """Number of results in the file."""
    raw: bytes = b""
    """The custom options of a TFLite operator as they are; where they are no flexbuffer there are no attributes."""
    fault: str = ""
    """Reason why the file has no attributes; empty if they could be read."""

    def get(self, name: str, kind: Any, default: Any = _ABSENT) -> Any:
        """The attribute `name` as the type `kind`: int, float, bool, str or a tuple of these; else `default`.

        Raises:
            ValueError: it is none, or absent without a default.
        """
        if name not in self.attributes:
            require(default is not _ABSENT, f"the attribute {name} is missing{self.fault and f': {self.fault}'}")
            return default
        return _converted(self.attributes[name], kind, name)

    def constant(self, position: int, default: Array | None = None) -> Array:
        """The elements of the constant operand at a `position`, `default` where it is left out; raises ValueError for
        an operand computed at run time."""
        found = self.operands[position] if position < len(self.operands) else None
        if found is None and default is not None:
            return default
        if found is None or found.array is None:
            raise ValueError(f"operand {position} must be a constant")
        return found.array


def _converted(value: Any, kind: Any, name: str) -> Any:
    """An attribute as the type a field declares."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and isinstance(value, tuple | list | np.ndarray):
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
        require(len(kinds) == len(value), f"the attribute {name} has {len(value)} entries, expected {len(kinds)}")
        return tuple(_converted(one, wanted, name) for one, wanted in zip(value, kinds, strict=True))
    number = isinstance(value, int | float | np.number)
    if kind is float and number:
        return float(value)
    if kind in (int, bool) and number and value == int(value):
        return kind(value)
    require(kind is str and isinstance(value, str), f"the attribute {name} is {value!r}, expected {kind}")
    return value


@dataclass(frozen=True)
class UserOperator(Operator):
    """An operator defined by one class: a frozen dataclass whose fields are its attributes.

    It computes on the very types it is given, floats too: the quantize stage leaves it as it is. On the core it is one
    call of its function; it is not cut in tiles unless `crop` is there.
    """

    as_given: ClassVar[bool] = True
    opaque: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    """Whether the C computes the bits of `compute`, floats too; else `dovetail run` allows for their rounding."""
    custom_code: ClassVar[str] = ""
    """Name as a TFLite CUSTOM operator."""
    domain: ClassVar[str] = ""
    """Domain of the operator in ONNX."""
    op_type: ClassVar[str] = ""
    """Name of the operator in ONNX."""
    taken: ClassVar[int | None] = None
    """Number of the file's operands that the node has as operands; the others are constants for `read`. None for
    all."""
    real: ClassVar[bool] = False
    """Whether quantised operands of TFLite are given as floats, in place of their integers."""
    passed_over: ClassVar[tuple[str, ...]] = ()
    """Attributes of files that say nothing."""
    c: ClassVar[str | tuple[str, ...]] = ""
    """C99 that is valid C++ too: static functions that keep nothing between calls; those of dovetail/kernels/runtime
    may be called. Of several texts each stands there once, whichever operators have it. Empty where only engines
    compute it."""
    function: ClassVar[str] = ""
    """The function in `c` that computes the operator."""

    given: DType | None = field(default=None, kw_only=True)
    """Element type of the results that the node gives, if the operator has results of several types; otherwise None.
    Readers set it."""

    @classmethod
    def read(cls, said: Said) -> Self:
        """The operator for an operator of a model file; its fields have the names and types of the file's
        attributes.

        Raises:
            ValueError: an attribute is missing, unknown or of another type.
        """
        hints = typing.get_type_hints(cls)
        own = {one.name: one.default for one in fields(cls) if one.name != "given"}
        unknown = sorted(name for name in said.attributes if name not in (*own, *cls.passed_over) and name[:1] != "_")
        require(not unknown, f"the attribute {', '.join(unknown)} is not known to {cls.__name__}")
        defaults = {name: _ABSENT if default is MISSING else default for name, default in own.items()}
        return cls(**{name: said.get(name, hints[name], default) for name, default in defaults.items()})

    def results(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """The types of all results; raises ValueError when the operands do not fit."""
        raise TypeError(f"{type(self).__name__} has no type rule")

    def compute(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """All results in numpy, exactly as the C computes them; raises TypeError if the class has no such method.

        Args:
            inputs: elements of the operands.
        """
        raise TypeError(f"{type(self).__name__} has no meaning")

    def numbers(self, inputs: Sequence[TensorType]) -> Sequence[int | float]:
        """The last arguments of the function: int32_t, or float for Python's floats."""
        return ()

    def tables(self, inputs: Sequence[TensorType]) -> Sequence[Array]:
        """Constants of its own the function gets."""
        return ()

    def scratch(self, inputs: Sequence[TensorType]) -> Sequence[TensorType]:
        """Working memory of the function, with arbitrary contents at its start."""
        return ()

    def states(self, inputs: Sequence[TensorType]) -> Sequence[Array]:
        """First contents of its states: these are its last operands, and its last results replace them."""
        return ()

    @classmethod
    def example(cls, sizes: Mapping[str, int]) -> tuple[Self, tuple[TensorType, ...]]:
        """An operator and its operands' types for `dovetail check`, from settings such as rows, columns, channels
        and batch; raises ValueError if the settings allow no example."""
        raise TypeError(f"{cls.__name__} has no example")

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of `c`."""
        return tuple(text.strip() + "\n" for text in ((self.c,) if isinstance(self.c, str) else self.c) if text)

    def parts(self, inputs: Sequence[TensorType]) -> tuple[tuple[int, ...], tuple[TensorType, ...]]:
        """The places of the results that the node gives, and the types of all."""
        kinds = tuple(self.results(inputs))
        places = tuple(at for at, kind in enumerate(kinds) if self.given is None or kind.dtype is self.given)
        require(len({kinds[at].dtype for at in places}) == 1, "has no result of one element type")
        return places, kinds

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        """The type of the result; if there are several results, the type of a vector that has them in a row."""
        places, kinds = self.parts(inputs)
        if len(places) == 1:
            return kinds[places[0]]
        return TensorType((sum(kinds[at].elements for at in places),), kinds[places[0]].dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        found = [np.asarray(array) for array in self.compute(inputs)]
        places, kinds = self.parts([TensorType(tuple(array.shape), DType.of(array.dtype)) for array in inputs])
        types = [f"{array.dtype}{list(array.shape)}" for array in found]
        wanted = [f"{kind.dtype.numpy}{list(kind.shape)}" for kind in kinds]
        if types != wanted:
            what = f"compute gives {', '.join(types)}, and results says {', '.join(wanted)}"
            raise DovetailError(what, where=f"operator {type(self).__name__}", hint="make the two agree")
        if len(places) == 1:
            return found[places[0]]
        return np.concatenate([found[at].reshape(-1) for at in places])

    def workspace(self, inputs: Sequence[TensorType]) -> int:
        places, kinds = self.parts(inputs)
        unused = (kind for at, kind in enumerate(kinds) if at not in places)
        return sum(kind.elements * kind.dtype.numpy.itemsize for kind in (*self.scratch(inputs), *unused))

    def starts(self, kinds: Sequence[TensorType], places: Sequence[int]) -> dict[int, int]:
        """First element of each result in the vector the node gives; `kinds` are all results, `places` those given."""
        sizes = [prod(kinds[at].shape) for at in places]
        return {at: sum(sizes[:number]) for number, at in enumerate(places)}
