"""Layers that `dovetail check` would try, as the simulated chip takes them, and the rates that explain their cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

import dovetail.target as dt
from dovetail import kernels
from dovetail.arrays import built
from dovetail.claims import OF_LAYER
from dovetail.compile import Compiled, Options, compile_graph
from dovetail.errors import DovetailError, TargetError
from dovetail.guests.check.cases import Case, Limits, bases, derive
from dovetail.guests.check.layers import add_layer
from dovetail.guests.check.networks import through_policies
from dovetail.guests.check.run import compiled_cases
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Array
from dovetail.records import Record
from dovetail.report import make_report
from dovetail.run import chip_simulator, run_build
from dovetail.target import Target, layers
from dovetail.target.calibration import Calibration, CallRates, work_of
from dovetail.target.pattern import Pattern
from dovetail.timing.kernels import core_cycles

LIMITS = Limits(1_000_000, 60_000)
"""Limits of the cases of a library's functions."""
_BATCH = 8
_PRIOR = 0.05
"""Weight of what is known of a rate, beside the weight 1 of a measured layer."""

Work = Mapping[str, float]
"""How much there is of each part of a layer's work."""


class Fitted(Record):
    """Rates of a function or of a core's kernels."""

    name: str
    """Engine and function, or "core"."""
    rates: dict[str, float]
    layers: int
    left_out: int
    """Cases that the simulated chip did not carry out."""
    before: float
    """The median relative error of what the target declares."""
    after: float
    worst: float
    """The largest relative error with these rates."""

    @property
    def sentence(self) -> str:
        """The outcome, for people."""
        more = f", {self.left_out} cases did not run" if self.left_out else ""
        doubt = "; its calls depend on more than their sizes" if self.after > OF_LAYER else ""
        return (
            f"{self.name}: {self.layers} layers, declared cycles were off by {self.before:.0%} (median), "
            f"are by {self.after:.1%}, at most {self.worst:.0%}{more}{doubt}"
        )


def calibrate(target: Target, only: Sequence[str], show: Callable[[str], None]) -> tuple[Calibration, list[Fitted]]:
    """Measure a target's library calls, and its core's kernels where that has instructions of its own.

    Args:
        target: the machine.
        only: names of the functions to measure; empty for all, and the core's kernels.
        show: told what is being done.

    Raises:
        TargetError: there is nothing to measure, or the core is this computer.
    """
    software = [(engine, one) for engine in target.engines if engine.device is None for one in engine.offloads]
    wanted = [(engine, one) for engine, one in software if not only or one.name in only]
    of_core = bool(target.core.instructions) and not only
    if target.core.is_host or not (wanted or of_core):
        what = "there is nothing to measure: no function of a library on a simulated core, no instruction of the core's"
        known = ", ".join(one.name for _, one in software)
        raise TargetError(what, where=target.name, hint=f"there is {known}" if known else "cycles of engines are said")
    tried, calls, found = through_policies(target), list[CallRates](), list[Fitted]()
    for engine, offload in wanted:
        where = f"{engine.name} {offload.name}"
        show(f"{where}: looking for layers it takes")
        own = next(one for one in tried.engine(engine.name).offloads if one.name == offload.name)
        cases = [case for start in bases(own) for case in derive(engine, own, start, LIMITS) if case.taken]
        measured, lost = list[tuple[Work, int, int]](), 0
        for batch in (cases[start : start + _BATCH] for start in range(0, len(cases), _BATCH)):
            show(f"{where}: {len(measured)} of {len(cases)} cases on iss")
            for part in _halves(tried, batch):
                measured += part
        lost = len(cases) - len(measured)
        if not measured:
            raise TargetError(f"no case of {where} ran", where=target.name, hint="dovetail check says why")
        found.append(_fitted(where, measured, {}, lost))
        calls.append(CallRates(engine.name, offload.name, found[-1].rates))
    rates: dict[str, float] = {}
    if of_core:
        show("core: kernels with its own instructions on iss")
        prior = {**dt.costs.kernel_cycles(target.core.isa), **(target.core.kernels or {})}
        found.append(_fitted("core", list(_on_core(target)), prior, 0))
        rates = {**prior, **found[-1].rates}
    return Calibration(target.name, tuple(calls), rates), found


def _halves(target: Target, cases: Sequence[Case]) -> Iterator[list[tuple[Work, int, int]]]:
    """Work, declared and taken cycles of cases; where they do not run together, of those that do by themselves."""
    try:
        compiled, inputs, _ = compiled_cases(target, cases)
        taken = _cycles(compiled, inputs)
        yield [
            (work_of(one.match), one.offload.cycles(one.match), taken[one.name])
            for one in compiled.regions
            if one.offload is not None and one.match is not None
        ]
    except DovetailError:
        for half in (cases[: len(cases) // 2], cases[len(cases) // 2 :]) if len(cases) > 1 else ():
            yield from _halves(target, half)


def _cycles(compiled: Compiled, inputs: Mapping[str, Array]) -> dict[str, int]:
    """Cycles of the core by layer."""
    with built(compiled, compiled.unit.target) as build:
        report = make_report(run_build(build, chip_simulator(build.target), [inputs]))
    return {layer.name: layer.core_cycles or 0 for layer in report.layers}


_SHAPES = tuple(
    {"rows": rows, "columns": rows, "channels": channels, "outputs": outputs, "kernel_rows": kernel,
     "kernel_columns": kernel, "stride_rows": stride, "stride_columns": stride}
    for rows, channels, outputs, kernel, stride in (
        (12, 3, 8, 3, 1), (12, 8, 16, 1, 1), (12, 16, 16, 3, 1), (12, 32, 24, 1, 1), (9, 24, 32, 3, 1),
        (11, 64, 64, 1, 1), (12, 5, 7, 3, 1), (8, 16, 16, 3, 1), (17, 16, 16, 3, 2), (20, 16, 16, 3, 1),
        (5, 16, 16, 3, 1), (9, 16, 16, 3, 2), (10, 128, 64, 1, 1), (7, 64, 48, 3, 1), (20, 32, 64, 1, 1),
        (8, 256, 16, 1, 1), (24, 1, 8, 5, 1))
)  # fmt: skip
"""Rows, channels, results, kernel and stride of the layers a core's instructions are measured on."""


def _on_core(target: Target) -> Iterator[tuple[Work, int, int]]:
    """Layers of all kinds that the core's instructions may be for, on the core alone: without these and with them."""
    always = replace(kernels.core_traits(target.core), plain=None)
    for name, operator in (("convolution", Conv2d), ("depthwise", DepthwiseConv2d), ("dense", FullyConnected)):
        pattern: Pattern = layers.requantised(name, operator)[name]
        builder, inputs, roots = GraphBuilder("calibrate"), dict[str, Array](), list[str]()
        for number, shape in enumerate(_SHAPES):
            made = add_layer(builder, pattern, None, shape, f"c{number}_")
            inputs |= made.inputs
            roots.append(made.root)
        graph, free = builder.finish(roots), dict[str, float]()
        for instructions in ((), target.core.instructions):
            core = replace(target.core, instructions=instructions, kernels=free or None)
            compiled = compile_graph(graph, replace(target, core=core, engines=()), Options(), interpret=False)
            taken, traits = _cycles(compiled, inputs), kernels.core_traits(core)
            for region in compiled.regions:
                free |= dict.fromkeys(kernels.turns(region.graph, always), 0.0)
                if region.is_kernel and taken[region.name]:
                    work = kernels.turns(region.graph, traits, region.choice)
                    yield work, core_cycles(region.graph, target), taken[region.name]


def _fitted(name: str, measured: Sequence[tuple[Work, int, int]], prior: Mapping[str, float], lost: int) -> Fitted:
    """The rates, none negative, with which relative errors are least; near those known before."""
    parts = sorted({part for work, _, _ in measured for part, count in work.items() if count})
    taken = np.array([cycles for _, _, cycles in measured], np.float64)
    table = np.array([[work.get(part, 0) for part in parts] for work, _, _ in measured]) / taken[:, None]
    known = [(place, prior[part]) for place, part in enumerate(parts) if prior.get(part)]
    rows = np.zeros((len(known), len(parts)))
    for row, (place, rate) in enumerate(known):
        rows[row, place] = _PRIOR / rate
    wanted = np.concatenate([np.ones(len(taken)), np.full(len(known), _PRIOR)])
    rates = non_negative(np.concatenate([table, rows]), wanted)
    off, declared = abs(table @ rates - 1), np.array([cycles for _, cycles, _ in measured])
    found = {part: round(float(rate), 4) for part, rate in zip(parts, rates, strict=True)}
    before = float(np.median(abs(declared / taken - 1)))
    return Fitted(name, found, len(taken), lost, before, float(np.median(off)), float(off.max()))


def non_negative(table: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The least squares solution without negative numbers (Lawson and Hanson, Solving Least Squares Problems, 1974)."""
    scale = np.maximum(np.linalg.norm(table, axis=0), 1e-30)
    table, found = table / scale, np.zeros(table.shape[1])
    active = np.zeros(table.shape[1], bool)
    for _ in range(10 * len(found)):
        slope = np.where(active, -np.inf, table.T @ (wanted - table @ found))
        if slope.max(initial=-np.inf) <= 1e-9:
            break
        active[int(slope.argmax())] = True
        while active.any():
            trial = np.zeros(len(found))
            trial[active] = np.linalg.lstsq(table[:, active], wanted, rcond=None)[0]
            low = active & (trial <= 0)
            if not low.any():
                found = trial
                break
            step = min(found[low] / np.maximum(found[low] - trial[low], 1e-30))
            found = found + step * (trial - found)
            active &= found > 1e-12
            found = np.where(active, found, 0.0)
    return np.asarray(found / scale)
