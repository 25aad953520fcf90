"""Helpers of the emitted C as terms of an SMT solver: their own text, read again, with everything C leaves undefined.

Only what straight helpers are made of is known: declarations, `if`, `return`, conditional expressions, calls of other
helpers, casts and operators on integers of 32 and 64 bits. A product of an operand and a multiplier is a number of its
own with what is known of it (sign, bounds): solvers do not get far with products of 32 unknown bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import z3

from dovetail.ir.operators.arithmetic import FOLLOWED

RUNTIME = Path(__file__).resolve().parents[1] / "dovetail" / "kernels" / "runtime" / "integers.c"
TYPES = {"int32_t": (32, True), "uint32_t": (32, False), "int64_t": (64, True), "int16_t": (16, True)}
TYPES |= {"uint16_t": (16, False)}
TOKEN = re.compile(r"\s*(0x[0-9A-Fa-f]+[uUlL]*|\d+[uUlL]*|\w+|<<|>>|<=|>=|==|!=|&&|\|\||[-+*&|^~<>?:(){}=;,!])")
COMPARED = (("==", "!="), ("<", ">", "<=", ">="))
LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), *COMPARED, ("<<", ">>"), ("+", "-"), ("*",))


@dataclass(frozen=True)
class Number:
    """A C value: a term of as many bits, and its type."""

    term: Any
    bits: int = 32
    signed: bool = True

    def wide(self, bits: int = 64) -> Any:
        """The value in more bits, or its low bits."""
        if bits <= self.bits:
            return z3.Extract(bits - 1, 0, self.term) if bits < self.bits else self.term
        return (z3.SignExt if self.signed else z3.ZeroExt)(bits - self.bits, self.term)


@dataclass
class World:
    """What is known of unknowns, and what must hold so that nothing is undefined."""

    solver: z3.Solver = field(default_factory=z3.Solver)
    products: list[tuple[Any, Any]] = field(default_factory=list)
    """Operand and product with the multiplier, 64 bits each."""
    multiplier: Any = None
    """64 bits; None where there is none."""
    least: int = 1 << 30
    """What the multiplier is at least."""
    duties: list[tuple[Any, str]] = field(default_factory=list)
    path: list[Any] = field(default_factory=list)
    """Conditions under which the text that is read is executed."""

    def unknown(self, name: str, low: int, high: int, bits: int = 64) -> Any:
        """A number in [low, high]."""
        term = z3.BitVec(name, bits)
        self.solver.add(term >= low, term <= high)
        return term

    def product(self, operand: Any) -> Any:
        """operand * multiplier, for an operand of 32 bits in 64."""
        for known, product in self.products:
            for factor in (1, 2):
                if self.proves(known * factor == operand):
                    return product * factor
        made = z3.BitVec(f"product_{len(self.products)}", 64)
        most = (1 << 31) - 1
        self.solver.add(
            made >= -most << 31, made <= most * most, (made < 0) == z3.And(operand < 0, self.multiplier > 0)
        )
        self.solver.add(z3.Implies(operand >= 0, z3.And(made >= operand * self.least, made <= operand * most)))
        self.solver.add(z3.Implies(operand < 0, z3.And(made <= operand * self.least, made >= operand * most)))
        self.products.append((operand, made))
        return made

    def times(self, left: Any, right: Any) -> Any:
        """left * right of 64 bits; by `product` where one is the multiplier, or twice that."""
        for one, other in ((left, right), (right, left)):
            for factor in (1, 2):
                if self.multiplier is not None and self.proves(one == self.multiplier * factor):
                    return self.product(other) * factor
        return left * right

    def must(self, duty: Any, what: str) -> None:
        """Take down what must hold where this is executed."""
        self.duties.append((z3.Implies(z3.And(*self.path), duty) if self.path else duty, what))

    def proves(self, claim: Any) -> bool:
        """Whether the claim follows from what is known."""
        self.solver.push()
        self.solver.add(z3.Not(claim))
        result = bool(self.solver.check() == z3.unsat)
        self.solver.pop()
        return result

    def counter(self, claim: Any) -> str | None:
        """An example against a claim, or against that nothing is undefined; None where both are proven."""
        for duty, what in [*self.duties, (claim, "")]:
            self.solver.push()
            self.solver.add(z3.Not(duty))
            found = self.solver.check()
            text = None if found == z3.unsat else f"{what} {self._example()}" if found == z3.sat else "undecided"
            self.solver.pop()
            if text is not None:
                return " ".join(text.split())
        return None

    def _example(self) -> Any:
        """The values found; if the solver finds such, with products that are those of operand and multiplier."""
        found = self.solver.model()
        if not self.products:
            return found
        self.solver.set("timeout", 10_000)
        self.solver.add(*(product == operand * self.multiplier for operand, product in self.products))
        real = self.solver.check() == z3.sat
        self.solver.set("timeout", 0)
        return self.solver.model() if real else f"(of a bound on products) {found}"


def source_of(name: str, text: str, defined: frozenset[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Types and names of a helper's parameters, and the tokens of its body, as the preprocessor leaves them."""
    found = re.search(rf"static inline (\w+) {name}\(([^)]*)\)\n\{{\n(.*?)\n\}}\n", text, re.DOTALL)
    assert found, f"there is no helper {name}"
    lines, keep = [], [True]
    for line in found[3].splitlines():
        if line.startswith("#if"):
            keep.append(any(word in defined for word in re.findall(r"\w+", line)))
        elif line.startswith("#else"):
            keep[-1] = not keep[-1]
        elif line.startswith("#endif"):
            keep.pop()
        elif all(keep):
            lines.append(re.sub(r"__builtin_expect\((.*), 0\)\) \{", r"\1) {", line))
    parameters = [tuple(one.split()[-2:]) for one in found[2].split(",")]
    return [(kind, own) for kind, own in parameters], TOKEN.findall("\n".join(lines))


@dataclass
class Helpers:
    """Helpers that can be called, by the text of the runtime."""

    world: World
    text: str = field(default_factory=RUNTIME.read_text)
    defined: frozenset[str] = frozenset()

    def call(self, name: str, *arguments: Number | int) -> Number:
        """The result of a helper."""
        kind = re.search(rf"static inline (\w+) {name}\(", self.text)
        assert kind, name
        parameters, tokens = source_of(name, self.text, self.defined)
        given = zip(parameters, arguments, strict=True)
        scope = {own: self.cast(TYPES[c_type], number(value)) for (c_type, own), value in given}
        found = _Body(self, scope, tokens).block()
        assert found is not None, f"{name} returns nothing"
        return self.cast(TYPES[kind[1]], found)

    def cast(self, kind: tuple[int, bool], value: Number) -> Number:
        """The value as another type."""
        return Number(value.wide(kind[0]), *kind)


def number(value: Number | int) -> Number:
    """A literal as C has it, or a value."""
    if isinstance(value, Number):
        return value
    bits = 32 if -(1 << 31) <= value < 1 << 31 else 64
    return Number(z3.BitVecVal(value, bits), bits)


class _Body:
    """Reads the tokens of a body."""

    def __init__(self, helpers: Helpers, scope: dict[str, Number], tokens: list[str]) -> None:
        self.helpers, self.scope, self.tokens, self.at = helpers, scope, tokens, 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.peek()
        assert not wanted or token == wanted, (wanted, self.tokens[self.at - 5 : self.at + 5])
        self.at += 1
        return token

    def block(self) -> Number | None:
        """What is returned; of an `if`, one value or the other."""
        while self.peek() not in ("", "}"):
            if self.peek() == "return":
                self.take()
                value = self.expression()
                self.take(";")
                return value
            if self.peek() == "if":
                self.take(), self.take("(")
                condition = self.expression()
                self.take(")"), self.take("{")
                inside = self.under(condition.term != 0, self.block)
                self.take("}")
                behind = self.under(condition.term == 0, self.block)
                assert inside is not None and behind is not None
                return self.chosen(condition, inside, behind)
            self.declaration()
        return None

    def declaration(self) -> None:
        if self.peek() == "const":
            self.take()
        kind = TYPES[self.take()]
        while True:
            name = self.take()
            self.take("=")
            self.scope[name] = self.helpers.cast(kind, self.expression())
            if self.take() == ";":
                return

    def chosen(self, condition: Number, left: Number, right: Number) -> Number:
        left, right = self.same(left, right)
        return Number(z3.If(condition.term != 0, left.term, right.term), left.bits, left.signed)

    def same(self, left: Number, right: Number) -> tuple[Number, Number]:
        bits = max(left.bits, right.bits, 32)
        signed = all(one.signed or one.bits < bits for one in (left, right))
        return Number(left.wide(bits), bits, signed), Number(right.wide(bits), bits, signed)

    def expression(self) -> Number:
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take()
        left = self.under(condition.term != 0, self.expression)
        self.take(":")
        return self.chosen(condition, left, self.under(condition.term == 0, self.expression))

    def under(self, condition: Any, read: Callable[[], Any]) -> Any:
        """Read what is executed under a condition only."""
        self.helpers.world.path.append(condition)
        found = read()
        self.helpers.world.path.pop()
        return found

    def binary(self, level: int) -> Number:
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in LEVELS[level]:
            sign = self.take()
            left = self.applied(sign, left, self.binary(level + 1))
        return left

    def applied(self, sign: str, left: Number, right: Number) -> Number:
        world = self.helpers.world
        if sign in ("<<", ">>"):
            left = left if left.bits >= 32 else Number(left.wide(32))
            places = right.wide(left.bits)
            world.must(z3.And(places >= 0, places < left.bits), "a shift by")
            if sign == "<<":
                return Number(left.term << places, left.bits, left.signed)
            return Number(left.term >> places if left.signed else z3.LShR(left.term, places), left.bits, left.signed)
        left, right = self.same(left, right)
        a, b, signed = left.term, right.term, left.signed
        compared = {
            "<": a < b if signed else z3.ULT(a, b),
            ">": a > b if signed else z3.UGT(a, b),
            "<=": a <= b if signed else z3.ULE(a, b),
            ">=": a >= b if signed else z3.UGE(a, b),
            "==": a == b,
            "!=": a != b,
        }
        if sign in compared:
            return Number(z3.If(compared[sign], z3.BitVecVal(1, 32), z3.BitVecVal(0, 32)))
        if sign == "*":
            return Number(world.times(a, b) if left.bits == 64 else a * b, left.bits, signed)
        made = {"+": a + b, "-": a - b, "&": a & b, "|": a | b, "^": a ^ b}[sign]
        if signed and sign in "+-":
            over = (z3.BVAddNoOverflow(a, b, True), z3.BVAddNoUnderflow(a, b))
            under = (z3.BVSubNoOverflow(a, b), z3.BVSubNoUnderflow(a, b, True))
            world.must(z3.And(*(over if sign == "+" else under)), f"{sign} overflows:")
        return Number(made, left.bits, signed)

    def unary(self) -> Number:
        token = self.take()
        if token in ("-", "~"):
            value = self.unary()
            return Number(-value.term if token == "-" else ~value.term, value.bits, value.signed)
        if token == "(" and self.peek() in TYPES and self.peek(1) == ")":
            kind = TYPES[self.take()]
            self.take(")")
            return self.helpers.cast(kind, self.unary())
        if token == "(":
            value = self.expression()
            self.take(")")
            return value
        if token[0].isdigit():
            return self.literal(token)
        if self.peek() == "(":
            self.take()
            arguments = []
            while self.peek() != ")":
                arguments.append(self.expression())
                if self.peek() == ",":
                    self.take()
            self.take(")")
            return self.helpers.call(token, *arguments)
        return self.scope[token]

    def literal(self, token: str) -> Number:
        digits, suffix = re.fullmatch(r"(0x[0-9A-Fa-f]+|\d+)([uUlL]*)", token).groups()  # type: ignore[union-attr]
        value = int(digits, 0)
        bits = 64 if "l" in suffix.lower() or value >= 1 << 32 else 32
        signed = "u" not in suffix.lower() and (bits == 64 or value < 1 << 31)
        return Number(z3.BitVecVal(value, bits), bits, signed)


class Symbol(FOLLOWED):
    """An unknown int64 that goes through the project's own functions of numpy."""

    def __init__(self, world: World, term: Any) -> None:
        self.world, self.term = world, term

    def astype(self, kind: Any) -> Symbol:
        """Its low bits, with their sign."""
        bits = np.dtype(kind).itemsize * 8
        return self if bits == 64 else Symbol(self.world, z3.SignExt(64 - bits, z3.Extract(bits - 1, 0, self.term)))

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **_: Any) -> Symbol:
        terms = [one.term if isinstance(one, Symbol) else z3.BitVecVal(int(one), 64) for one in inputs]
        known: Mapping[str, Callable[..., Any]] = {
            "add": lambda a, b: a + b,
            "subtract": lambda a, b: a - b,
            "multiply": self.world.times,
            "left_shift": lambda a, b: a << b,
            "right_shift": lambda a, b: a >> b,
            "bitwise_and": lambda a, b: a & b,
            "greater": lambda a, b: z3.If(a > b, z3.BitVecVal(1, 64), z3.BitVecVal(0, 64)),
            "less": lambda a, b: z3.If(a < b, z3.BitVecVal(1, 64), z3.BitVecVal(0, 64)),
            "minimum": lambda a, b: z3.If(a < b, a, b),
            "maximum": lambda a, b: z3.If(a > b, a, b),
        }
        return Symbol(self.world, known[function.__name__](*terms))

    def __array_function__(self, function: Any, _types: Any, arguments: Any, _keywords: Any) -> Symbol:
        assert function is np.clip, function
        value, low, high = arguments
        return np.minimum(np.maximum(value, low), high)  # type: ignore[no-any-return]
