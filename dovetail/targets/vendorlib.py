"""Targets made from a vendor's C library: which pattern each of its functions computes, and what it is given.

    library = Library("vl", root, header="vl.h", sources=("vl.c",))
    conv = function(library, "vl_conv", pattern, [struct("vl_conv_params", parameters), pointer("x"),
                    pointer("weights"), pointer("result", "int8_t")], constants={"weights": reordered})
    TARGET = with_library(riscv.TARGET, library, [conv])

The library's own C is compiled with the project, for the chip and for the host. A function is a plain call on the
core, or, where the library can start work and wait for it, a start.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

import dovetail.target as dt
from dovetail.documented import document
from dovetail.errors import TargetError
from dovetail.files import TemporaryFolder
from dovetail.ir.layout import Layout
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.types import Array
from dovetail.records import Record, field
from dovetail.target.calibration import work_of
from dovetail.target.pattern import leaves

Argument = dt.CValue | Callable[[dt.Match], dt.CValue]
"""An argument of a function: the same for every layer, or made from the match."""

_COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


class Library(Record, dict=True):
    """A C library as files on disk.

    Raises:
        TargetError: a file is missing.
    """

    name: str
    """Name of the engine in reports and messages."""
    root: Path
    """Folder of the library's sources."""
    header: str
    """The file that declares the functions, below the folder `include`."""
    sources: tuple[str, ...]
    """C files, relative to `root`."""
    include: str = "."
    """Folder of all headers, relative to `root`."""
    wait: str = ""
    """C function that waits for the work with a given ticket; empty if functions finish before they return."""
    prepare: str = ""
    """C function called once before the first call of an inference; empty for none."""
    defines: Mapping[str, int] = field(default_factory=dict)
    """Macros for compiling the library."""
    holds: int = 0
    """Bytes that it keeps for itself between calls, such as a static pool: the planner leaves them free."""
    success: int | None = None
    """Return value of success of `wait`, or of every function without one: any other value ends the
    inference with a message. None to leave what they return alone."""

    def __post_init__(self) -> None:
        """Look for the files, and for the functions named here."""
        for path in (self.root / self.include / self.header, *(self.root / source for source in self.sources)):
            if not path.is_file():
                hint = f"look at root=, header= and sources=; looked for {path}"
                raise TargetError(f"there is no file {path.name}", where=f"library {self.name}", hint=hint)
        for name in (self.wait, self.prepare):
            if name:
                self.parameters(name)
        if self.wait and self.success is not None:
            self.status(self.wait)

    @cached_property
    def files(self) -> dict[str, Path]:
        """Headers and sources: place of each file, by its path below the project's `driver`."""
        folder = self.root / self.include
        headers = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.h"))}
        return {**headers, **{source: self.root / source for source in self.sources}}

    @cached_property
    def text(self) -> str:
        """Text of all headers, without comments."""
        return "\n".join(
            _COMMENTS.sub(" ", path.read_text("utf-8")) for name, path in self.files.items() if name[-2:] == ".h"
        )

    def parameters(self, function: str) -> int:
        """Number of parameters of a function, as a header declares it.

        Raises:
            TargetError: no header declares it; names the nearest that is declared.
        """
        listed = self._declared(function)[1].strip()
        return 0 if listed in ("", "void") else listed.count(",") + 1

    def status(self, function: str) -> None:
        """Make sure that a function returns something to look at; raises TargetError."""
        if re.search(r"\bvoid\s*$", self._declared(function)[0]):
            what = f"{function} returns nothing that could be {self.success}"
            raise TargetError(what, where=f"library {self.name}", hint="leave out success=")

    def _declared(self, function: str) -> tuple[str, str]:
        """A declaration's text before the function's name, and its parameters."""
        found = re.search(rf"([\w\s*]*)\b{re.escape(function)}\s*\(([^()]*)\)\s*;", self.text)
        if found is None:
            declared = re.findall(r"\b(\w+)\s*\([^()]*\)\s*;", self.text)
            near = difflib.get_close_matches(function, declared, 1)
            hint = f"use {near[0]}, the nearest" if near else f"use one of the {len(declared)} functions it declares"
            raise TargetError(f"{self.header} declares no function {function}", where=f"library {self.name}", hint=hint)
        return found[1], found[2]


def defining(root: Path, folder: str, names: Iterable[str]) -> tuple[str, ...]:
    """The C files that define some functions of a library, and all that those files mention. Files for other types
    or processors are left out, because nothing mentions them.

    Args:
        root: of the library. folder: relative to it.
        names: functions that are called, such as those of `function` and of queries; what is not defined there is
            passed over, for `function` says which functions the header lacks.

    Returns:
        Paths relative to `root`, sorted.
    """
    texts = {path: _COMMENTS.sub(" ", path.read_text("utf-8")) for path in sorted((root / folder).rglob("*.c"))}
    places = {name: path for path, text in texts.items() for name in _DEFINED.findall(text)}
    found: set[Path] = set()
    waiting = [*names]
    while waiting:
        path = places.get(waiting.pop())
        if path is not None and path not in found:
            found.add(path)
            waiting += sorted(set(re.findall(r"\b[A-Za-z_]\w*", texts[path])) & places.keys())
    return tuple(sorted(path.relative_to(root).as_posix() for path in found))


_DEFINED = re.compile(
    r"^(?=[A-Za-z_])(?!typedef|return|else)[\w \t*\n]*?\b(\w+)\s*(?:\([^;{}()]*\)\s*\{|(?:\[[^\]]*\])+\s*=)", re.M
)
"""A function or an array defined at the beginning of a line."""

_STRING_H = """\
/* What a library may take of <string.h>, where there is no C library; the compiler does in place what it can. */
#ifndef DOVETAIL_STRING_H
#define DOVETAIL_STRING_H

#if __STDC_HOSTED__
#include_next <string.h>
#else
#include <stddef.h>

void *memcpy(void *restrict target, const void *restrict source, size_t bytes);
void *memmove(void *target, const void *source, size_t bytes);
void *memset(void *target, int value, size_t bytes);

#define memcpy(target, source, bytes) __builtin_memcpy(target, source, bytes)
#define memmove(target, source, bytes) __builtin_memmove(target, source, bytes)
#define memset(target, value, bytes) __builtin_memset(target, value, bytes)
#endif

#endif
"""


def pointer(operand: str, c_type: str = "const int8_t") -> dt.Pointer:
    """A pointer of the type `c_type` to an `operand`: a leaf of the pattern (constant or not), the "result" or the
    "scratch"."""
    return dt.Pointer(operand, c_type)


def struct(c_type: str, members: Callable[[dt.Match], Mapping[str, dt.CValue]]) -> Argument:
    """A constant structure that is filled at compile time, or a pointer to it.

    Args:
        c_type: type of the parameter, `t` or `const t *`.
        members: values of a match, by the names of the members.
    """
    return lambda match: dt.Struct(c_type, members(match))


class Query(Record):
    """A C function of the library that returns the bytes of scratch a call of another needs."""

    function: str
    """Name of the library's function."""
    arguments: Sequence[Argument]
    """Arguments of the function, in the order of its parameters."""

    def ask(self, library: Library, match: dt.Match) -> int:
        """Bytes for a `match`, as the library compiled for this computer says; raises TargetError where it fails."""
        call = dt.LibraryCall(self.function, tuple(_value(argument, match) for argument in self.arguments))
        given = (library.root, library.include, library.sources, tuple(library.defines.items()))
        answer = _ask(*given, _query_source(library.header, call))
        if answer < 0:
            what = f"{self.function} of {library.name} returns {answer}, which is no size"
            raise TargetError(what, where=match.root, hint="let its Constraints refuse what the library cannot do")
        return answer


def function(
    library: Library,
    name: str,
    pattern: dt.Pattern,
    arguments: Sequence[Argument],
    *,
    constraints: Sequence[dt.Constraint] = (),
    constants: Mapping[str, Callable[[dt.Match], Array]] | None = None,
    layouts: Mapping[str, Layout] | None = None,
    scratch: Callable[[dt.Match], int] | None = None,
    query: Query | None = None,
    cycles: Callable[[dt.Match], int] | None = None,
    knobs: Callable[[dt.Match], dt.Space] | None = None,
    default: Callable[[dt.Match], dt.Choice] | None = None,
) -> dt.Offload:
    """The offload that a function of a library computes.

    Args:
        library: where it is.
        name: the C function.
        pattern: what it computes.
        arguments: what it is given, in the order of its parameters.
        constraints: its limits.
        constants: layouts of constant operands, and further ones; a constant leaf that is absent is given as it is.
        layouts: layouts of run-time operands and of the result, as in `Offload`.
        scratch: bytes of working memory; None to take what the query says, or none.
        query: the library's own answer to that, asked when a network is compiled. The library runs for this computer
            then, so it must not depend on the instruction set.
        cycles: cycles of a call, which decide between this function, others and the core's own kernels; fit them to
            the simulator or the chip. By default one per multiply-accumulate or element, less than most take.
        knobs, default: tuning knobs, as in `Offload`; arguments find the choice in the match.

    Raises:
        TargetError: the header does not declare the function, or with other parameters.
    """
    _check_parameters(library, name, arguments)
    if query:
        _check_parameters(library, query.function, query.arguments)
    if library.success is not None and not library.wait:
        library.status(name)
    filled = [*arguments]

    def values(match: dt.Match) -> tuple[dt.CValue, ...]:
        return tuple(_value(argument, match) for argument in filled)

    return dt.Offload(
        name=name,
        pattern=pattern,
        constraints=tuple(constraints),
        pack=lambda match: packed(
            (n for value in values(match) for n in _pointers(value)), pattern, constants or {}, match
        ),
        commands=lambda match, operands: (dt.LibraryCall(name, values(match)),),
        cycles=cycles or (lambda match: match.work),
        scratch=lambda match: _scratch(library, name, match, scratch, query),
        layouts=layouts or {},
        strided=False,
        knobs=knobs,
        default=default,
    )


def _check_parameters(library: Library, name: str, arguments: Sequence[Argument]) -> None:
    """Raise TargetError unless the header declares the function with as many parameters as are described."""
    expected = library.parameters(name)
    if expected != len(arguments):
        what = f"{name} has {expected} parameters; {len(arguments)} are described"
        hint = f"describe each parameter, in the order of {library.header}"
        raise TargetError(what, where=f"library {library.name}", hint=hint)


def _scratch(
    library: Library, name: str, match: dt.Match, scratch: Callable[[dt.Match], int] | None, query: Query | None
) -> int:
    """Bytes of working memory: the declared ones, which must be those of the query if there is one."""
    declared = scratch(match) if scratch else None
    if query is None:
        return declared or 0
    answer = query.ask(library, match)
    if declared not in (None, answer):
        what = f"{query.function} says {name} needs {answer} bytes of scratch, the declaration says {declared}"
        raise TargetError(what, where=match.root, hint="leave out scratch= to take what the library says")
    return answer


def measured(mac: float = 0, element: float = 0, window: float = 0) -> Callable[[dt.Match], int]:
    """The function `cycles` for a library function, from measured calls.

    Args:
        mac: cycles for each multiply-accumulate.
        element: for each element of the result.
        window: for each element a window brings to a place of the result: of all input channels in a convolution, of
            its own in a pool.
    """

    def cycles(match: dt.Match) -> int:
        work = work_of(match)
        found = mac * work["mac"] + element * work["element"] + window * work["window"]
        return max(round(found), 1)

    return cycles


def with_library(
    base: dt.Target,
    library: Library,
    functions: Sequence[dt.Offload],
    name: str = "",
    rounding: Rounding | None = None,
) -> dt.Target:
    """A target whose core may call a library.

    Args:
        base: core and memories; its policies and engines stay.
        library: the C files.
        functions: what they compute, the preferred first.
        name: of the new target; by default of both.
        rounding: the one rounding the functions take: models whose format has another are computed with it. None to
            leave it to models, whose layers then stay on the core where theirs is another.
    """
    engine = dt.Engine(
        name=library.name,
        memory=base.values,
        offloads=tuple(functions),
        ideal_macs_per_cycle=1.0,
        driver=(),
        wait=library.wait,
        prepare=library.prepare,
        files={"string.h": lambda: _STRING_H, **library.files},
        headers=(library.header,),
        defines=library.defines,
        success=library.success,
        holds=library.holds,
    )
    sentence = f"{base.sentence}; with the library {library.name}"
    policies = tuple(replace(one, rounding=rounding or one.rounding) for one in base.policies)
    made = replace(base, name=name or f"{base.name}_{library.name}", sentence=sentence, policies=policies)
    return replace(made, engines=(*base.engines, engine))


def _value(argument: Argument, match: dt.Match) -> dt.CValue:
    return argument if isinstance(argument, int | dt.Pointer | dt.Struct) else argument(match)


def _pointers(value: dt.CValue) -> list[str]:
    """The operands a value points to, in order."""
    if isinstance(value, dt.Struct):
        return [name for member in value.members.values() for name in _pointers(member)]
    return [value.operand] if isinstance(value, dt.Pointer) else []


def packed(
    names: Iterable[str], pattern: dt.Pattern, made: Mapping[str, Callable[[dt.Match], Array]], match: dt.Match
) -> dict[str, Array]:
    """The operands among `names` that are constants of a `pattern`, as bytes: what `made` gives for a match, or as they
    are."""
    known = {**leaves(pattern), **dict.fromkeys(made, True)}
    constants = (name for name in dict.fromkeys(names) if known.get(name))
    arrays = {name: made[name](match) if name in made else match.array(name) for name in constants}
    return {name: array.copy().reshape(-1).view("uint8") for name, array in arrays.items()}


def _query_source(header: str, call: dt.LibraryCall) -> str:
    """C that leaves a query's answer in a variable; pointers to operands are null."""
    from dovetail.codegen.emit.lines import library_call

    declared, text = library_call(call, "query", lambda operand: "0")
    lines = [f'#include "{header}"', "int32_t answer;", "void ask(void);", "void ask(void)", "{", *declared]
    return "\n".join([*lines, f"answer = (int32_t){text};", "}", ""])


@cache
def _ask(root: Path, include: str, sources: tuple[str, ...], defines: tuple[tuple[str, int], ...], text: str) -> int:
    """Run a query on this computer, in a process of its own."""
    from dovetail.codegen.build.toolchain import compile_host
    from dovetail.sim.worker import simulate_host

    with TemporaryFolder() as folder:
        asking = Path(folder) / "query.c"
        asking.write_text(text)
        files = [asking, *((root / source).resolve() for source in sources)]
        shared = compile_host(Path(folder), files, include=[(root / include).resolve()], defines=dict(defines))
        result = simulate_host(shared, "ask", [{}], {"answer": 4})
    return int.from_bytes(result.inferences[0].outputs["answer"], "little", signed=True)


document(__name__)
