"""The whole check: lint, cases, runs, shrinking, suspicions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.errors import TargetError
from dovetail.farm import LostResult, farm
from dovetail.guests.check.cases import (
    Case,
    Limits,
    UserCodeError,
    ask,
    bases,
    derive,
    lint_cost,
    lint_target,
    nearest_failure,
)
from dovetail.guests.check.findings import Checked, Finding, Tested
from dovetail.guests.check.layers import NoLayerError, left_out
from dovetail.guests.check.networks import through_policies
from dovetail.guests.check.run import SECONDS, Outcome, has_model, in_no_time, run
from dovetail.guests.check.suspect import MinimalCase, alike, explained, shrink, suspicions
from dovetail.run import SIMULATORS, verilog_devices
from dovetail.target.description import Target
from dovetail.target.engine import Engine
from dovetail.target.offload import Offload
from dovetail.target.registry import load_target

_MANY, _FEW = 9, 2
"""Rounds in which a failing case is made simpler, and where a usual mistake explains it on a chip."""
_TILED = 3
"""Cases of each offload that are computed in tiles too."""


@dataclass(frozen=True)
class Order:
    """How a target is checked."""

    limits: Limits
    simulators: tuple[str, ...] = ()
    """Of `SIMULATORS` and "model"; empty for the quickest that shows the engine, then the simulated chip."""
    offloads: tuple[str, ...] = ()
    """Only those of these names; empty for all."""
    seconds: float = SECONDS
    """That a batch of cases may take."""
    first: bool = False
    """Whether to stop behind the first offload that something is wrong with."""


def check(
    target: Target,
    order: Order,
    progress: Callable[[str], None] = lambda text: None,
    *,
    name: str = "",
    jobs: int = 1,
    scheduler: str | None = None,
) -> Checked:
    """Check a target.

    Args:
        target: what is checked.
        order: how.
        progress: told what is being done.
        name: what other processes load the target by, a name or a path; needed for them only.
        jobs: processes that carry out the cases of an offload each; what is found is the same.
        scheduler: address of a Dask scheduler whose workers do so instead.

    Raises:
        TargetError: it has no engine, or a simulator that is asked for does not exist or does not fit.
        DovetailError: its Verilog is asked for and does not build.
    """
    target = through_policies(target)
    if not target.engines:
        raise TargetError("it has no engine to check", where=target.name, hint="give a target with an engine")
    if "rtl" in order.simulators:
        verilog_devices(target)  # else each batch would say that it does not build
    found = Checked(target.name)
    found.findings += [Finding(sentence, (sentence,)) for sentence in lint_target(target)]
    lints = len(found.findings)
    every = [(engine, offload) for engine in target.engines for offload in engine.offloads]
    wanted = [(e, o) for e, o in every if not order.offloads or o.name in order.offloads]
    if order.offloads and not wanted:
        hint = f"there is {', '.join(offload.name for _, offload in every)}"
        raise TargetError(f"there is no offload {' or '.join(order.offloads)}", where=target.name, hint=hint)
    for engine in target.engines:
        simulators(target, engine, order)  # else each offload would say that one is not there
    alone = jobs == 1 and scheduler is None
    with farm(jobs, scheduler, here=True) as spread:
        try_one = partial(_tried, target, order, progress) if alone else partial(_tried_elsewhere, name, order)
        ended = spread(try_one, [(engine.name, offload.name) for engine, offload in wanted])
        for (engine, offload), tried in zip(wanted, _in_order(ended), strict=False):
            if not alone:
                progress(f"{engine.name} {offload.name}: its cases have ended")
            _judged(target, engine, offload, order, tried, found, progress)
            if order.first and len(found.findings) > lints:
                break
    found.findings[:] = _merged(found.findings)
    return found


@dataclass(frozen=True)
class _SimulatorRun:
    """An offload's cases on a simulator."""

    simulator: str
    outcomes: tuple[Outcome, ...]
    seconds: float


@dataclass(frozen=True)
class _OffloadOutcome:
    """What became of an offload's cases; may come from another process."""

    lints: tuple[Finding, ...] = ()
    remark: str = ""
    """Why there are no cases, if there are none."""
    runs: tuple[_SimulatorRun, ...] = ()
    """Up to the first simulator something failed on: what is wrong on the model is wrong everywhere."""


def _in_order(ended: Iterator[tuple[int, _OffloadOutcome | LostResult]]) -> Iterator[_OffloadOutcome]:
    """By their numbers, each as soon as all before it have ended."""
    early: dict[int, _OffloadOutcome] = {}
    wanted = 0
    for number, tried in ended:
        early[number] = (
            _OffloadOutcome((Finding(tried.value, (tried.value,)),), tried.value)
            if isinstance(tried, LostResult)
            else tried
        )
        while wanted in early:
            yield early.pop(wanted)
            wanted += 1


@lru_cache(maxsize=2)
def _target(name: str) -> Target:
    return through_policies(load_target(name))


def _tried_elsewhere(name: str, order: Order, place: tuple[str, str]) -> _OffloadOutcome:
    return _tried(_target(name), order, lambda text: None, place)


def simulators(target: Target, engine: Engine, order: Order) -> tuple[str, ...]:
    """What an engine's cases are carried out on; raises TargetError for what is not there."""
    host = engine.device is None or instruction_set(target.core.isa).is_host
    if not order.simulators:
        return ("host",) if host else ("model", "iss") if has_model(target, engine) else ("iss",)
    for name in order.simulators:
        if name not in ("model", *SIMULATORS):
            raise TargetError(
                f"there is no simulator '{name}'", where="check", hint=f"use {', '.join(('model', *SIMULATORS))}"
            )
        if name == "model" and not has_model(target, engine):
            what = f"{engine.name} has no Python model that works by itself (dt.JobRegisters)"
            raise TargetError(what, where=target.name, hint="use --sim iss")
    return order.simulators


def _tried(target: Target, order: Order, progress: Callable[[str], None], place: tuple[str, str]) -> _OffloadOutcome:
    """Make the cases of an offload, by the names of engine and offload, and carry them out."""
    engine, where = target.engine(place[0]), " ".join(place)
    offload = next(one for one in engine.offloads if one.name == place[1])
    progress(f"{where}: looking for layers it takes")
    cases, remark, lints = _cases(engine, offload, order)
    runs: list[_SimulatorRun] = []
    for simulator in simulators(target, engine, order) if not remark else ():
        began = time.monotonic()
        progress(f"{where}: {len(cases)} cases on {simulator}")

        def told(done: int, name: str = simulator) -> None:
            progress(f"{where}: {done} of {len(cases)} cases on {name}")

        outcomes = run(target, cases, simulator, order.seconds, told)
        if not any(outcome.failed for outcome in outcomes):
            tiled = run(target, _tiled(target, engine, offload, cases), simulator, order.seconds)
            outcomes += [outcome for outcome in tiled if not outcome.skipped]  # else no tile is as small
        runs.append(_SimulatorRun(simulator, tuple(outcomes), time.monotonic() - began))
        if any(outcome.failed for outcome in outcomes):
            break
    return _OffloadOutcome(lints, remark, tuple(runs))


def _judged(
    target: Target,
    engine: Engine,
    offload: Offload,
    order: Order,
    tried: _OffloadOutcome,
    found: Checked,
    progress: Callable[[str], None],
) -> None:
    """Say what is wrong with an offload."""
    where = f"{engine.name} {offload.name}"
    found.findings += tried.lints
    if tried.remark:
        found.tested.append(Tested(engine.name, offload.name, remark=tried.remark))
    right: list[str] = []
    for one in tried.runs:
        simulator, outcomes = one.simulator, one.outcomes
        before = tuple(found.findings)
        found.findings += _explained(target, offload, simulator, outcomes, order, right, before, progress)
        failed, skipped = sum(each.failed for each in outcomes), [each.skipped for each in outcomes if each.skipped]
        reason = skipped[0].splitlines()[0] if skipped else ""
        counted = (len(outcomes), failed, len(skipped), one.seconds, reason)
        unmade = () if any("made" in each.case.point for each in outcomes) else left_out(offload.pattern)
        found.tested.append(Tested(engine.name, offload.name, simulator, *counted, unmade))
        if all(each.skipped for each in outcomes if each.case.taken):
            sentence = f"{where}: no case was tried on {simulator}: {reason or 'there is none'}"
            found.findings.append(Finding(sentence, (f"nothing is known of it on {simulator}",), simulator))
        right.append(simulator)


def _cases(engine: Engine, offload: Offload, order: Order) -> tuple[list[Case], str, tuple[Finding, ...]]:
    """The cases, why there are none, if there are none, and lints."""
    where, lints = f"{engine.name} {offload.name}", list[Finding]()
    try:
        starts = bases(offload)
        if not starts:
            sentence = f"{where}: no layer reaches it; of the usual one: {nearest_failure(offload)}"
            return [], "no layer reaches it", (Finding(sentence, (sentence,)),)
        cases: list[Case] = []
        for start in starts:
            lints += [Finding(sentence, (sentence,)) for sentence in lint_cost(engine, offload, start)]
            cases += derive(engine, offload, start, order.limits)
        return cases, "", tuple(lints)
    except NoLayerError as error:
        sentence = f"{where}: no case was tried: {error}"
        return [], str(error), (*lints, Finding(sentence, (f"nothing is known of it: {error}",)))
    except UserCodeError as error:
        return [], "its declarations raise", (*lints, Finding(f"{where}: {error}", (str(error),)))


def _tiled(target: Target, engine: Engine, offload: Offload, cases: Sequence[Case]) -> list[Case]:
    """Some of the largest in tiles, with one size of memory; none where nothing is cut."""
    if target.works_in_place(engine) or engine.memory == target.values or engine.device is None:
        return []
    sized = []
    for number, case in enumerate(cases):
        asked = ask(offload, case.point) if case.taken else None
        if asked is not None:
            images = sum(array.nbytes for array in (*asked.layer.inputs.values(), asked.layer.expected))
            sized.append((images, asked.nbytes - images, number))
    largest = sorted(sized, reverse=True)[:_TILED]
    room = max(512, max(constants + images // 2 for images, constants, _ in largest) // 64 * 64)
    chosen = [cases[number] for *_, number in largest]
    return [replace(case, why=f"{case.why}, in tiles", room=room) for case in chosen]


def _explained(
    target: Target,
    offload: Offload,
    simulator: str,
    outcomes: Sequence[Outcome],
    order: Order,
    right: Sequence[str],
    before: Sequence[Finding],
    progress: Callable[[str], None],
) -> Iterator[Finding]:
    """One finding for wrong results, one for errors, each in its smallest form. On a chip, where tries are dear, less
    is tried of what a usual mistake explains, and nothing of what was found `before` of another offload."""
    said = {finding.suspicions[0] for finding in before}
    errors = [(finding, finding.outcome.error) for finding in before if finding.outcome and finding.outcome.error]
    for kind, word in ((False, "wrong results"), (True, "errors")):
        failed = [outcome for outcome in outcomes if outcome.failed and bool(outcome.error) == kind]
        if not failed:
            continue
        failed.sort(key=lambda outcome: (bool(outcome.case.room), _size(offload, outcome)))
        first = failed[0]
        where = f"{first.case.engine} {first.case.offload}"
        tried = sum(not outcome.skipped for outcome in outcomes)
        title = f"{where}, {simulator}: {word} in {len(failed)} of {tried} cases, e.g. {first.case.why}"
        same = next((finding for finding, error in errors if alike(error, first.error)), None) if kind else None
        if same is not None:
            yield replace(same, title=title, simulator=simulator, outcome=first)
            continue
        progress(f"{where}: looking for the smallest case that fails")
        dear = simulator != "model"
        known = explained(failed, outcomes, offload)[0] if dear and not kind else []
        of_time: list[str] = []
        if simulator == "iss" and not kind and not known:
            of_time = list(_of_time(target, outcomes, failed, simulator, order))
        small = MinimalCase(first, ())
        if not of_time and not set(known[:1]) & said:
            rounds = _FEW if known else _MANY
            small = shrink(first, offload, lambda cases: run(target, cases, simulator, order.seconds), dear, rounds)
        found = suspicions(small, failed, outcomes, offload)
        if simulator == "model" and not small.outcome.hangs:
            found[:0] = _where_it_lies(target, small.outcome, order)
        if right:  # what is left where something else computes all cases rightly
            parts = ["the driver"] if "iss" not in right else []
            parts += ["the Verilog"] if simulator == "rtl" else []
            left = " or ".join(parts) or "its C"
            found.insert(kind, f"{left}: all cases are right on {' and '.join(right)}")
        if first.case.room:
            found.insert(0, "only in tiles: strides or addresses of parts, padding at inner edges")
        found[:0] = of_time
        yield Finding(title, tuple(found), simulator, small.outcome, small.needed)


def _of_time(
    target: Target, outcomes: Sequence[Outcome], failed: Sequence[Outcome], simulator: str, order: Order
) -> Iterator[str]:
    """Whether all is well where the engine takes no time, or where nothing was launched before."""
    same = [outcome.case for outcome in outcomes if outcome.case.taken and outcome.case.room == failed[0].case.room]
    if not any(one.failed or one.skipped for one in run(in_no_time(target), same, simulator, order.seconds)):
        yield (
            "results are read before they are there: all is well where the engine takes no time, so the driver does "
            "not wait, or the engine says too early that it has finished"
        )
    elif len(same) > 1 and not run(target, [failed[0].case], simulator, order.seconds)[0].failed:
        yield (
            "what a launch before left behind: all is well where there is none, so a register is not written, or a "
            "buffer, or a cache of the engine's keeps what is old"
        )


def _where_it_lies(target: Target, outcome: Outcome, order: Order) -> Iterator[str]:
    """Whether all is well once operands lie more conveniently."""
    for case, sentence in (
        (replace(outcome.case, aligned=True), "bad alignment: all is well where everything is aligned to 256 bytes"),
        (replace(outcome.case, dense=True), "strides: all is well where rows and pixels lie side by side"),
    ):
        if not run(target, [case], "model", order.seconds)[0].failed:
            yield sentence


def _size(offload: Offload, outcome: Outcome) -> int:
    asked = ask(offload, outcome.case.point)
    return asked.nbytes if asked else 0


def _merged(findings: Sequence[Finding]) -> Iterator[Finding]:
    """One finding for all offloads with the same first suspicion."""
    groups: dict[tuple[str, bool], list[Finding]] = {}
    for finding in findings:
        error = finding.outcome is not None and bool(finding.outcome.error)
        groups.setdefault((finding.suspicions[0], error), []).append(finding)
    for first, *others in groups.values():
        also = [other.outcome.case.offload for other in others if other.outcome is not None]
        yield replace(first, also=tuple(dict.fromkeys(also)))
