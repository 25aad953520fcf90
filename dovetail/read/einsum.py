"""numpy.einsum, as all readers have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from dovetail.ir.operators.reduction import ReduceKind
from dovetail.read.values import Value, Values


def einsum(v: Values, equation: str, operands: Sequence[Value], suffix: str = "ordered") -> Value:
    """numpy.einsum of floats: two operands after the other, a dense layer where one is constant, else a product of
    matrices, between transposes.

    Raises:
        ValueError: the equation does not fit the operands.
    """
    terms, wanted = _einsum_terms(equation, [x.rank for x in operands])
    pairs = [_without_repeats(v, x, term) for x, term in zip(operands, terms, strict=True)]
    x, labels = pairs[0]
    for place, pair in enumerate(pairs[1:], 2):
        x, labels = _contracted(v, (x, labels), pair, {*wanted, *"".join(terms[place:])})
    x, labels = _summed(v, x, labels, set(wanted))
    return v.ordered(x, [labels.index(label) for label in wanted], suffix)


def _without_repeats(v: Values, x: Value, labels: str) -> tuple[Value, str]:
    """An operand of an einsum with the diagonal of axes that have the same label."""
    for label in sorted(set(labels)):
        while labels.count(label) > 1:
            one, two = labels.index(label), labels.rindex(label)
            rest = [axis for axis in range(len(labels)) if axis not in (one, two)]
            kept, size = [x.shape[axis] for axis in rest], x.shape[one]
            count = size * x.shape[two]
            rows = v.shaped(v.ordered(x, [*rest, one, two], "moved"), [*kept, count], "rows")
            x = v.pick(rows, [*map(range, kept), range(0, count, size + 1)], "diagonal")
            labels = "".join(labels[axis] for axis in rest) + label
    return x, labels


def _summed(v: Values, x: Value, labels: str, wanted: set[str]) -> tuple[Value, str]:
    """An operand of an einsum, summed over what nothing else wants."""
    axes = tuple(axis for axis, label in enumerate(labels) if label not in wanted)
    x = v.reduce(ReduceKind.SUM, x, axes, keep=False) if axes else x
    return x, "".join(label for label in labels if label in wanted)


def _contracted(v: Values, left: tuple[Value, str], right: tuple[Value, str], later: set[str]) -> tuple[Value, str]:
    """The einsum of two operands, given with their labels, whose result keeps the labels in `later`."""
    x, one = _summed(v, *left, {*later, *right[1]})
    y, two = _summed(v, *right, {*later, *left[1]})
    sizes = dict(zip(one, x.shape, strict=True))
    for label, size in zip(two, y.shape, strict=True):
        if size not in (1, sizes.get(label, size)) and sizes[label] != 1:
            raise ValueError(f"the label {label} of the equation stands for {sizes[label]} and {size} elements")
        sizes[label] = max(size, sizes.get(label, size))
    x, one = _without_ones(v, x, one, two, sizes)
    y, two = _without_ones(v, y, two, one, sizes)
    if v.fixed(x) and not v.fixed(y):
        x, one, y, two = y, two, x, one
    shared = [label for label in one if label in two]
    batch, summed = [a for a in shared if a in later], "".join(a for a in shared if a not in later)
    kept, made = ("".join(a for a in each if a not in shared) for each in (one, two))

    def laid(value: Value, labels: str, suffix: str, *axes: str) -> Value:
        """A value whose axes are those of some labels each, in this order."""
        moved = v.ordered(value, [labels.index(label) for label in "".join(axes)], "moved")
        return v.shaped(moved, [prod(sizes[label] for label in axis) for axis in axes], suffix)

    if not summed:
        rows = laid(x, one, "rows", *batch, *kept, *([""] * len(made)))
        product = v.times(rows, laid(y, two, "columns", *batch, *([""] * len(kept)), *made), "product")
    elif v.fixed(y) and not batch:
        rows, array = laid(x, one, "rows", *(kept or [""]), summed), v.known(y)
        if array is None:
            matrix = laid(y, two, "matrix", made, summed)
        else:
            turned = array.transpose([two.index(label) for label in made + summed])
            matrix = v.constant(turned.reshape(-1, prod(sizes[label] for label in summed)), "matrix")
        product = v.dense(rows, matrix, suffix="product")
    else:
        rows = laid(x, one, "rows", *batch, kept, summed)
        product = v.product(rows, laid(y, two, "columns", *batch, summed, made), "product")
    labels = "".join(batch) + kept + made
    return v.shaped(product, [sizes[label] for label in labels], "whole"), labels


def _without_ones(v: Values, x: Value, labels: str, others: str, sizes: Mapping[str, int]) -> tuple[Value, str]:
    """An operand of an einsum without the axes of size 1 that broadcast to the other operand's."""
    pairs = [(a, n) for a, n in zip(labels, x.shape, strict=True) if a not in others or n == sizes[a]]
    return v.shaped(x, [size for _, size in pairs], "spread"), "".join(label for label, _ in pairs)


def _einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each operand's axes and of the result's; those of an ellipsis are digits.

    Raises:
        ValueError: the equation does not fit operands of these ranks.
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    pairs = zip(terms, ranks, strict=False)
    free = [rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in pairs]
    most = max(free, default=0)
    digits = "0123456789"[: max(most, 0)]
    terms = [term.replace("...", digits[most - extra :]) for term, extra in zip(terms, free, strict=False)]
    if not arrow:
        every = "".join(terms)
        result = "..." * bool(digits) + "".join(a for a in sorted(set(every)) if a.isalpha() and every.count(a) == 1)
    result = result.replace("...", digits)
    fits = [len(term) for term in terms] == list(ranks) and min(free, default=0) >= 0 and most <= len("0123456789")
    if not fits or not all((term + result).isalnum() for term in terms if term + result):
        raise ValueError(f"the equation {equation[:80]!r} does not fit operands of {', '.join(map(str, ranks))} axes")
    if len(set(result)) != len(result) or not set(result) <= set("".join(terms)):
        raise ValueError(f"the result of the equation {equation[:80]!r} repeats a label, or has one no operand has")
    return terms, result
