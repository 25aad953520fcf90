"""Operators of the user's own and bundled ones in a model: found by their names, put into the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dovetail.ir.onnx_file import USER_DOMAIN
from dovetail.ir.operators.user import Said, UserOperator
from dovetail.read.values import Value, Values

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


def add_user(v: Values, kind: Kind, said: Said, operands: Sequence[Value], names: Sequence[str]) -> list[Value]:
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
    kinds = [x.type for x in operands]
    states = [v.state(f"{names[0]}_state", array) for array in operator.states(kinds)]
    operands, kinds = [*operands, *states], [*kinds, *(state.type for state in states)]
    results, count = operator.results(kinds), len(names)
    if len(results) != count + len(states):
        raise ValueError(f"gives {len(results) - len(states)} results, the model has {count}")
    names = [*names, *(f"{state}_next" for state in states)]
    found: dict[int, Value] = {}
    for dtype in dict.fromkeys(result.dtype for result in results):
        places = [place for place, result in enumerate(results) if result.dtype is dtype]
        own = replace(operator, given=dtype if len(places) < len(results) else None)
        if len(places) == 1:
            found[places[0]] = v.add(own, operands, name=names[places[0]])
            continue
        vector = v.add(own, operands, name=f"{names[places[0]]}_all")
        for place, start in operator.starts(results, places).items():
            part = v.part(vector, 0, start, start + results[place].elements, name=f"{names[place]}_flat")
            found[place] = v.reshape(part, results[place].shape, name=names[place])
    for place, state in enumerate(states, count):
        v.replace_state(state, found[place])
    return [found[place] for place in range(count)]
