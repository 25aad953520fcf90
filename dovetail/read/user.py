"""Operators of the user's own and bundled ones in a model: found by their names, put into the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dovetail.ir.onnx_file import USER_DOMAIN
from dovetail.ir.operators.movement import Reshape, Slice
from dovetail.ir.operators.user import Said, UserOperator
from dovetail.ir.types import DType, TensorType
from dovetail.read.values import Values

ADVICE = "say in a Python file what it computes, and give that with --operators (docs/own_operators.md)"
"""Advice about an unknown operator."""

Kind = type[UserOperator]


def by_custom_code(operators: Iterable[Kind]) -> Mapping[str, Kind]:
    """Operators by their custom code in TFLite; the last definition of a name wins."""
    return {kind.custom_code: kind for kind in operators if kind.custom_code}


def by_onnx_name(operators: Iterable[Kind]) -> Mapping[tuple[str, str], Kind]:
    """Operators by domain and name, as ONNX and as `dovetail quantize` spell them; the last definition wins."""
    kinds = tuple(operators)
    own = {("" if kind.domain == "ai.onnx" else kind.domain, kind.op_type): kind for kind in kinds if kind.op_type}
    return {**own, **{(USER_DOMAIN, kind.__name__): kind for kind in kinds}}


def add_user(v: Values, kind: Kind, said: Said, operands: Sequence[str], names: Sequence[str]) -> list[str]:
    """Put an operator into the graph: a node for each element type of its results, and slices where there are several.

    Args:
        v: the import in progress.
        kind: the operator's class.
        said: what the file says of it. operands: of the node, by the names of their values.
        names: of the results that the file has.

    Returns:
        The value of each result, states left out.

    Raises:
        ValueError: the operator refuses its attributes or its operands, or has another number of results.
    """
    operator = kind.read(said)
    kinds = [v.type_of(x) for x in operands]
    states = [v.builder.state(f"{names[0]}_state", array) for array in operator.states(kinds)]
    operands, kinds = [*operands, *states], [*kinds, *(v.type_of(state) for state in states)]
    results = operator.results(kinds)
    if len(results) != len(names) + len(states):
        raise ValueError(f"gives {len(results) - len(states)} results, the model has {len(names)}")
    names = [*names, *(f"{state}_next" for state in states)]
    found: dict[int, str] = {}
    for dtype in dict.fromkeys(result.dtype for result in results):
        found |= _of_type(v, operator, operands, names, results, dtype)
    for place, state in enumerate(states, len(results) - len(states)):
        v.builder.replace_state(state, found[place])
    return [found[place] for place in range(len(results) - len(states))]


def _of_type(
    v: Values,
    operator: UserOperator,
    operands: Sequence[str],
    names: Sequence[str],
    results: Sequence[TensorType],
    dtype: DType,
) -> dict[int, str]:
    """The values of the results of one element type, by their places."""
    places = [place for place, result in enumerate(results) if result.dtype is dtype]
    given = dtype if len(places) < len(results) else None
    own = replace(operator, given=given)
    if len(places) == 1:
        return {places[0]: v.add(own, operands, name=names[places[0]])}
    vector = v.add(own, operands, name=f"{names[places[0]]}_all")
    found = {}
    for place, start in operator.starts(results, places).items():
        stop = start + results[place].elements
        part = v.add(Slice((start,), (stop,), (1,)), [vector], name=f"{names[place]}_flat")
        found[place] = v.add(Reshape(results[place].shape), [part], name=names[place])
    return found
