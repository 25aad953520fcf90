"""Exo procedures: from text, as text, their statements, and kept between runs.

Printing is Exo's own without the formatter behind it, which takes minutes; Exo has no public way to leave it out.
Making a scheduled procedure takes seconds, reading its text back a hundredth of one.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from dovetail.errors import MissingExtraError
from dovetail.files import keep_file, text_digest

Procedure: TypeAlias = Any
"""An `exo.API.Procedure`; Exo has no types of its own to name here."""


def exo() -> Any:
    """The Exo package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import exo
    except ImportError:
        raise MissingExtraError("exo", "loops", "scheduling the loops of an instruction-stream engine") from None
    return exo


def procedure(text: str, scope: Mapping[str, Any], instruction: str = "") -> Procedure:
    """The procedure a text defines, type- and bounds-checked by Exo.

    Args:
        text: one function as Exo reads it, without a decorator.
        scope: names the text uses beside the scalar functions: memories and instructions.
        instruction: for an instruction, its name; such a procedure is a meaning that `replace` can find.

    Raises:
        Exception: the text is no correct procedure; a bug of whoever wrote it.
    """
    package = exo()
    decorator = f"@instr({instruction!r})\n" if instruction else "@proc\n"
    source = f"from __future__ import annotations\n{decorator}{text.strip()}\n"
    name = f"<loops {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"proc": package.proc, "instr": package.instr, "DRAM": package.DRAM}
    names.update(functions())
    names.update(scope)
    known = set(names)
    exec(compile(source, name, "exec"), names)  # our own text, never a user's file
    (made,) = (value for key, value in names.items() if key not in known and key not in ("annotations", "__builtins__"))
    return made


@cache
def functions() -> Mapping[str, Any]:
    """Scalar functions of int32 values: `shift_right(x, n)` (arithmetic), `shift_up(x, n)` (left by -n), `least(a, b)`,
    `most(a, b)`."""
    return {
        "shift_right": scalar_function("shift_right", "({0} >> {1})", 2),
        "shift_up": scalar_function("shift_up", "((int32_t)((uint32_t){0} << -{1}))", 2),
        "least": scalar_function("least", "({0} < {1} ? {0} : {1})", 2),
        "most": scalar_function("most", "({0} > {1} ? {0} : {1})", 2),
    }


def scalar_function(name: str, c: str, count: int | None = None) -> Any:
    """A function of scalars as Exo knows it.

    Args:
        name: in texts.
        c: a call of it in C, with {0}, {1}, ... for the arguments and {all} for all.
        count: how many arguments it takes; None for any number.
    """
    exo()
    from exo.core.extern import Extern, Extern_Typecheck_Error

    class Function(Extern):  # type: ignore[misc]  # Exo is untyped
        def typecheck(self, args: list[Any]) -> Any:
            if count not in (None, len(args)):
                raise Extern_Typecheck_Error(f"{name} takes {count} arguments, got {len(args)}")
            return args[0].type

        def globl(self, prim_type: str) -> str:
            return ""

        def compile(self, args: list[str], prim_type: str) -> str:
            return c.format(*args, all=", ".join(args))

    return Function(name)


@cache
def memory(name: str) -> Any:
    """A memory for Exo to tell apart by name; where it lies and how it is filled is the target's affair."""
    return type(name, (exo().DRAM,), {})


def procedure_text(procedure: Procedure) -> str:
    """A procedure as `dovetail.loops.procedure` reads it, a name per line that binds one."""
    from exo.core.LoopIR_pprint import PrintEnv, _print_proc

    return "\n".join(_print_proc(procedure.INTERNAL_proc(), PrintEnv(), "")) + "\n"


def statement_text(statement: Any) -> str:
    """The first line of the statement at a cursor."""
    from exo.core.LoopIR_pprint import PrintEnv, _print_stmt

    return str(_print_stmt(statement._impl._node, PrintEnv(), "")[0])


def expression_text(expression: Any) -> str:
    """The expression at a cursor."""
    from exo.core.LoopIR_pprint import PrintEnv, _print_expr

    return str(_print_expr(expression._impl._node, PrintEnv()))


_REFUSED = (ast.Attribute, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.JoinedStr)
"""Syntax that no procedure needs; a tampered file might use it, since Exo evaluates the names of memories."""


def stored(key: str, folder: Path, make: Callable[[], Procedure], scope: Mapping[str, Any]) -> Procedure:
    """The procedure that `make` gives, from the folder if an earlier run has left it there.

    Whether it was there or not, the procedure has been through its text, so that nothing depends on it; what it is
    derived from is forgotten. A file that is damaged is ignored and written anew; a folder that cannot be written is
    no error, the next run only takes longer.

    Args:
        key: everything the result depends on beside Exo and this package, e.g. the algorithm and the schedule's text.
        folder: where procedures are kept, made when it is missing.
        make: the schedule.
        scope: memories and instructions the result uses, by name.
    """
    code = text_digest(Path(__file__).parent, code_only=True)
    path = folder / f"{_digest(' '.join((version('exo-lang'), code, key)))}.loops"
    found = _read(path, scope)
    if found is not None:
        return found
    made = make()
    text = procedure_text(made)
    try:
        again = parsed(text, scope)
    except Exception:  # a name of the procedure hides one of the scope, say; then it is not kept
        return made
    if procedure_text(again) != text:  # Exo has a construct that it does not print as it reads it
        return made
    keep_file(path, f"{_digest(text)}\n{text}".encode())
    return again


def parsed(text: str, scope: Mapping[str, Any]) -> Procedure:
    """A procedure that was printed before, type-checked; what was proven of it then is not proven again.

    Raises:
        Exception: the text is no procedure, or uses a name that is not in the scope.
    """
    package = exo()
    from exo.API import Procedure as Made
    from exo.core.prelude import SrcInfo
    from exo.frontend.pyparser import Parser
    from exo.frontend.typecheck import TypeChecker

    (function,) = ast.parse(text).body
    for node in ast.walk(function):
        if isinstance(node, _REFUSED) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            raise ValueError(f"line {getattr(node, 'lineno', 1)} is not of a procedure")
    names = {"__builtins__": {}, "DRAM": package.DRAM, **functions(), **scope}
    place = SrcInfo("<stored loops>", 1, 1, 1, 1)
    parser = Parser(function, lambda node: place, func_globals=names, srclocals=ChainMap(), as_func=True)
    return Made(TypeChecker(parser.result()).get_loopir())


def _read(path: Path, scope: Mapping[str, Any]) -> Procedure | None:
    """The procedure in a file; None when it is not there or not as it was written."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if digest != _digest(text):
        return None
    try:
        return parsed(text, scope)
    except Exception:  # whatever Exo finds wrong with it, it is made anew
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def statements(body: Any) -> Iterator[Any]:
    """All statements of a body, inner ones included, in reading order."""
    for statement in body:
        yield statement
        if is_a(statement, "For", "If"):
            yield from statements(statement.body())
            if is_a(statement, "If"):
                yield from statements(statement.orelse() or ())


def is_a(cursor: Any, *kinds: str) -> bool:
    """Whether a cursor is at one of Exo's statements or expressions, by name: "For", "Assign", "BinaryOp" and so on."""
    return type(cursor).__name__.removesuffix("Cursor") in kinds
