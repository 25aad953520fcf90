"""Dovetail from a Python program: compile a model, run the build, look at its costs.

    import dovetail

    build = dovetail.compile("net.tflite", target="ne16")
    run = build.run({"input": image})
    print(run.outputs[0], run.cycles)

Every error is a `dovetail.DovetailError` that says what is wrong, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

import dovetail.run as running
from dovetail import plugins, prove
from dovetail.arrays import checked, seeded_inputs
from dovetail.codegen.emit.project import write_project
from dovetail.codegen.manifest import BuildPort
from dovetail.compile import compile_model
from dovetail.documented import document
from dovetail.errors import DovetailError
from dovetail.files import TemporaryFolder
from dovetail.ir.boundary import Steps
from dovetail.ir.types import Array, DType
from dovetail.notes import Note
from dovetail.operators import UserOperator, combined
from dovetail.options import Options, with_fields
from dovetail.records import Record
from dovetail.report import Report, make_report, print_report
from dovetail.sim.line import Board
from dovetail.target.description import Target
from dovetail.target.registry import load_target

if TYPE_CHECKING:
    from rich.console import Console

Simulator = Literal["iss", "rtl", "qemu", "host"]
"""The simulated chip; the same with engines in Verilog; the C code on this computer."""
Inputs = Mapping[str, ArrayLike]
"""An array for each input of one inference, by the model's tensor names."""


class Port(Record):
    """An input or an output of a network."""

    name: str
    """Name of the model's tensor."""
    shape: tuple[int, ...]
    """Size of each axis."""
    dtype: DType
    """Element type."""
    steps: Steps | None
    """Scale and zero point of its integers; None where they are no numbers with one scale."""


@dataclass(frozen=True)
class Run:
    """Outputs and costs of one run."""

    outputs: tuple[Mapping[str, Array], ...]
    """The outputs of each inference, by the model's tensor names."""
    report: Report
    """Cycles, bytes and MACs, in total and layer by layer; `report.to_json()` gives plain values."""
    proof: str
    """A sentence on how the outputs were compared; empty where they were not."""
    _result: running.RunResult = field(repr=False)

    @property
    def cycles(self) -> int | None:
        """Clock cycles of the first inference; None on the host."""
        return self.report.cycles["total"]

    def print(self, console: Console | None = None) -> None:
        """Print the table of `dovetail run`, as wide as it needs if no console is given."""
        from rich.console import Console

        print_report(self.report, console or Console(width=160))

    def page(self) -> str:
        """The HTML page of `dovetail report`: where time, memory and bytes go."""
        page = plugins.load(plugins.PAGES, "report", plugins.function)
        assert page is not None, "it is one of Dovetail's own"
        return str(page(self._result))


@dataclass(frozen=True)
class Build:
    """A C project on disk, and its target."""

    folder: Path
    """Folder of the C project."""
    notes: tuple[Note, ...]
    """Notes: assumed, approximate, left out, widened, not used, or slower for want of memory."""
    _build: running.ProjectBuild = field(repr=False)
    _kept: TemporaryDirectory[str] | None = field(default=None, repr=False, compare=False)
    """The folder it lies in, where that goes with the build."""

    @property
    def target(self) -> Target:
        """The target, as a machine."""
        return self._build.target

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Inputs of the network, in the order of the header."""
        return _ports(self._build.manifest.inputs)

    @property
    def outputs(self) -> tuple[Port, ...]:
        """Outputs of the network, in the order of the header."""
        return _ports(self._build.manifest.outputs)

    def quantize(self, name: str, reals: ArrayLike) -> Array:
        """Real numbers as the integers of an input (or output), as the header's function rounds them.

        Args:
            name: the model's tensor.
            reals: of any shape, taken as float32.

        Raises:
            DovetailError: there is no such tensor, or its integers have no scale.
        """
        port, steps = self._scaled(name)
        return steps.quantize(_array(reals, name, np.float32), port.dtype)

    def dequantize(self, name: str, integers: ArrayLike) -> Array:
        """The real numbers, float32, of an output's or input's integers; errors as `quantize`.

        Args:
            name: name of the output or input.
            values: its integers.
        """
        port, steps = self._scaled(name)
        return steps.dequantize(_array(integers, name, port.dtype.numpy))

    def run(
        self,
        inputs: Inputs | Sequence[Inputs] | None = None,
        *,
        simulator: Simulator | None = None,
        board: Board | None = None,
        core: str = "",
        check: bool = True,
    ) -> Run:
        """Run inferences, one after the other, and compare their outputs with the integer graph.

        Args:
            inputs: of one inference or of several, of exactly the model's shapes and types; None for random numbers
                with seed 0.
            simulator: None for the simulated chip, or this computer where it is the core.
            board: what to run on instead.
            core: with the simulator "rtl", a core that is Verilog too.
            check: compare the outputs.

        Raises:
            DovetailError: an input is not what the model wants, an output is not what the network means, or the run
                fails.
        """
        ports = self._build.manifest.inputs
        one = isinstance(inputs, Mapping) or not isinstance(inputs, Iterable) or hasattr(inputs, "__array__")
        given: list[Any] = [seeded_inputs(ports)] if inputs is None else [inputs] if one else list(inputs)
        sets = [_checked(one, ports) for one in given]
        if not sets:
            raise DovetailError("there is no inference to run", where="inputs", hint="give at least one")
        result = running.run_build(self._build, simulator, sets, board=board, core=core)
        proof = prove.prove(result, prove.read_graph(self._build), sets) if check else ""
        return Run(result.outputs, make_report(result), proof, result)

    def _scaled(self, name: str) -> tuple[Port, Steps]:
        ports = {port.name: port for port in (*self.outputs, *self.inputs)}
        if name not in ports:
            hint = f"it has {', '.join(ports)}"
            raise DovetailError(f"there is no input or output '{name}'", where=str(self.folder), hint=hint)
        steps = ports[name].steps
        if steps is None:
            what = f"'{name}' is {ports[name].dtype}, without one scale for all its values"
            raise DovetailError(what, where=str(self.folder), hint="use the values as they are")
        return ports[name], steps


def compile(
    model: str | Path,
    target: str | Target = "riscv",
    folder: str | Path | None = None,
    *,
    options: Options | None = None,
    replace_folder: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    **keywords: Any,
) -> Build:
    """Compile a model to a C project, verified on the way.

    Args:
        model: a .tflite, .onnx, .keras or .h5 file.
        target: a name of `dovetail.targets.BUILT_IN`, the path of a target file, or a `Target`.
        folder: of the project; None for one that is there as long as the build is.
        options: those of `dovetail compile`; None for the defaults.
        replace_folder: replace the build that is already there.
        progress: told what is being done.
        keywords: fields of `Options`, in place of those of `options`, such as settings={"ram.size": "16M"} or cores=2.

    Raises:
        DovetailError: the model, the target or the memories do not allow it.
    """
    given = {name: value for name, value in keywords.items() if value is not None}
    options = with_fields(Options() if options is None else options, given)
    _check_kind("model", model, "give the path of a model file", str, Path)
    _check_kind("target", target, "give a name, the path of a target file, or a Target", str, Target)
    machine = target if isinstance(target, Target) else load_target(target)
    compiled = compile_model(Path(model), machine, options, progress)
    temporary = TemporaryFolder() if folder is None else None
    place = Path(temporary.name, "build") if temporary else Path(str(folder))
    write_project(compiled.project, place, replace=replace_folder)
    build = running.open_build(place, compiled.unit.target)
    return Build(place, compiled.notes, _with_operators(build, options.operators), temporary)


def _check_kind(name: str, value: object, hint: str, *kinds: type) -> None:
    """Raise DovetailError for an argument of another type."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise DovetailError(f"must be {wanted}, not {type(value).__name__}", where=name, hint=hint)


def _with_operators(build: running.ProjectBuild, operators: Sequence[type[UserOperator]]) -> running.ProjectBuild:
    """The build with operators that its target does not bring."""
    return replace(build, target=replace(build.target, operators=combined(build.target.operators, operators)))


def open_build(
    folder: str | Path, target: str | Target | None = None, operators: Sequence[type[UserOperator]] = ()
) -> Build:
    """An earlier build in a folder.

    Args:
        folder: made by `compile` or `dovetail compile`.
        target: needed where it was made for a target of a file of your own.
        operators: your own that the model has (`dovetail.operators.load_operators`).

    Raises:
        DovetailError: it is no build, or one for another target.
    """
    machine = load_target(target) if isinstance(target, str) else target
    return Build(Path(folder), (), _with_operators(running.open_build(Path(folder), machine), operators))


def _ports(ports: Sequence[BuildPort]) -> tuple[Port, ...]:
    found = []
    for port in ports:
        steps = None if port.scale is None or port.zero_point is None else Steps(port.scale, port.zero_point)
        found.append(Port(port.name, port.shape, port.kind, steps))
    return tuple(found)


def _checked(given: Inputs, ports: Sequence[BuildPort]) -> dict[str, Array]:
    """The arrays of one inference; raises DovetailError where they are not what the model wants."""
    names = [port.name for port in ports]
    _check_kind("inputs", given, f"give arrays by name, such as {{'{names[0]}': array}}", Mapping)
    if set(given) != set(names):
        what = f"expected the inputs {', '.join(names)}, got {', '.join(sorted(given)) or 'none'}"
        raise DovetailError(what, where="inputs", hint="name each array as the model does")
    return {name: checked(_array(given[name], name), port, "inputs") for name, port in zip(names, ports, strict=True)}


def _array(values: ArrayLike, name: str, dtype: Any = None) -> Array:
    """The values as an array; raises DovetailError where they are none."""
    try:
        return np.asarray(values, dtype)
    except (ValueError, TypeError) as error:
        hint = "give a numpy array of numbers"
        raise DovetailError(f"these values make no array: {error}", where=name, hint=hint) from None


document(__name__)
