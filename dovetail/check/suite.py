"""The whole check: lint, cases, runs, shrinking, suspicions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dovetail.build.instruction_sets import instruction_set
from dovetail.check.cases import Case, Limits, Unasked, ask, base, cut_down, derive, nearest_failure
from dovetail.check.layers import Underivable, left_out
from dovetail.check.lint import lint_cost, lint_target
from dovetail.check.model import has_model
from dovetail.check.run import SECONDS, Outcome, run
from dovetail.check.shrink import shrink
from dovetail.check.suspect import suspicions
from dovetail.errors import TargetError
from dovetail.run import SIMULATORS, verilog_devices
from dovetail.target.description import Engine, Offload, Target

_TILED = 3
"""Cases of each offload that are computed in tiles too."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    title: str
    suspicions: tuple[str, ...]
    """The likeliest first."""
    simulator: str = ""
    """What it was found on; empty for declarations."""
    outcome: Outcome | None = None
    """In its smallest form; None for declarations."""
    needed: tuple[str, ...] = ()
    """Axes without whose settings all is well."""
    also: tuple[str, ...] = ()
    """Other offloads with the same suspicion."""


@dataclass(frozen=True)
class Tested:
    """An offload's cases on one simulator."""

    engine: str
    offload: str
    simulator: str = ""
    cases: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    remark: str = ""
    """Why there are no cases, if there are none; why the first of those not tried was not, if there are any."""
    left: int = 0
    """Settings worth trying that no case has, for there would be too many."""
    left_out: tuple[str, ...] = ()
    """Optional operators of the pattern that no layer is made with."""


@dataclass
class Checked:
    """What `dovetail check` found."""

    target: str
    findings: list[Finding] = field(default_factory=list)
    tested: list[Tested] = field(default_factory=list)


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


def check(target: Target, order: Order, progress: Callable[[str], None] = lambda text: None) -> Checked:
    """Check a target.

    Raises:
        TargetError: it has no engine, or a simulator that is asked for does not exist or does not fit.
        DovetailError: its Verilog is asked for and does not build.
    """
    if not target.engines:
        raise TargetError("it has no engine to check", where=target.name, hint="give a target with an engine")
    if "rtl" in order.simulators:
        verilog_devices(target)  # else each batch would say that it does not build
    found = Checked(target.name)
    found.findings += [Finding(sentence, (sentence,)) for sentence in lint_target(target)]
    for engine in target.engines:
        for offload in engine.offloads:
            if not order.offloads or offload.name in order.offloads:
                _offload(target, engine, offload, order, found, progress)
    if order.offloads and not found.tested:
        raise TargetError(f"there is no offload {' or '.join(order.offloads)}", where=target.name,
                          hint=f"there is {', '.join(o.name for e in target.engines for o in e.offloads)}")
    found.findings[:] = _merged(found.findings)
    return found


def simulators(target: Target, engine: Engine, order: Order) -> tuple[str, ...]:
    """What an engine's cases are carried out on; raises TargetError for what is not there."""
    host = engine.device is None or instruction_set(target.core.isa).is_host
    if not order.simulators:
        return ("host",) if host else ("model", "iss") if has_model(target, engine) else ("iss",)
    for name in order.simulators:
        if name not in ("model", *SIMULATORS):
            raise TargetError(f"there is no simulator '{name}'", where="check",
                              hint=f"use {', '.join(('model', *SIMULATORS))}")
        if name == "model" and not has_model(target, engine):
            raise TargetError(f"{engine.name} has no Python model that works by itself (dt.JobRegisters)",
                              where=target.name, hint="use --sim iss")
    return order.simulators


def _offload(
    target: Target, engine: Engine, offload: Offload, order: Order, found: Checked, progress: Callable[[str], None]
) -> None:
    """Everything about one offload."""
    where = f"{engine.name} {offload.name}"
    progress(f"{where}: looking for layers it takes")
    cases, left, remark = _cases(engine, offload, order, found)
    if remark:
        found.tested.append(Tested(engine.name, offload.name, remark=remark))
        return
    right: list[str] = []
    for simulator in simulators(target, engine, order):
        began = time.monotonic()
        progress(f"{where}: {len(cases)} cases on {simulator}")

        def told(done: int, name: str = simulator) -> None:
            """Passes on how far it is."""
            progress(f"{where}: {done} of {len(cases)} cases on {name}")

        outcomes = run(target, cases, simulator, order.seconds, told)
        if not any(outcome.failed for outcome in outcomes):
            tiled = run(target, _tiled(target, engine, offload, cases), simulator, order.seconds)
            outcomes += [outcome for outcome in tiled if not outcome.skipped]  # else no tile is as small
        found.findings += _explained(target, offload, simulator, outcomes, order, right, progress)
        failed, skipped = sum(one.failed for one in outcomes), [one.skipped for one in outcomes if one.skipped]
        reason = skipped[0].splitlines()[0] if skipped else ""
        seconds = time.monotonic() - began
        found.tested.append(Tested(engine.name, offload.name, simulator, len(outcomes), failed, len(skipped), seconds,
                                   reason, left, left_out(offload.pattern)))  # fmt: skip
        if failed:
            break  # what is wrong on the model is wrong everywhere
        right.append(simulator)


def _cases(
    engine: Engine, offload: Offload, order: Order, found: Checked
) -> tuple[list[Case], int, str]:
    """The cases, how many settings are in none of them, and why there are no cases, if there are none; lints."""
    where = f"{engine.name} {offload.name}"
    try:
        start = base(offload)
        if start is None:
            sentence = f"{where}: no layer reaches it; of the usual one: {nearest_failure(offload)}"
            found.findings.append(Finding(sentence, (sentence,)))
            return [], 0, "no layer reaches it"
        found.findings += [Finding(sentence, (sentence,)) for sentence in lint_cost(engine, offload, start)]
        cases, left = derive(engine, offload, start, order.limits)
        return cases, left, ""
    except Underivable as error:
        return [], 0, str(error)
    except Unasked as error:
        found.findings.append(Finding(f"{where}: {error}", (str(error),)))
        return [], 0, "its declarations raise"


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
    return [cut_down(cases[number], room) for *_, number in largest]


def _explained(
    target: Target, offload: Offload, simulator: str, outcomes: Sequence[Outcome], order: Order,
    right: Sequence[str], progress: Callable[[str], None],
) -> Iterator[Finding]:
    """One finding for wrong results, one for errors, each in its smallest form."""
    for kind, word in ((False, "wrong results"), (True, "errors")):
        failed = [outcome for outcome in outcomes if outcome.failed and bool(outcome.error) == kind]
        if not failed:
            continue
        failed.sort(key=lambda outcome: (bool(outcome.case.room), _size(offload, outcome)))
        first = failed[0]
        where = f"{first.case.engine} {first.case.offload}"
        progress(f"{where}: looking for the smallest case that fails")
        dear = simulator != "model"
        small = shrink(first, offload, lambda cases: run(target, cases, simulator, order.seconds), dear)
        tried = sum(not outcome.skipped for outcome in outcomes)
        title = f"{where}, {simulator}: {word} in {len(failed)} of {tried} cases, e.g. {first.case.why}"
        found = suspicions(small, failed, offload)
        if simulator == "model" and not kind:
            found[:0] = _where_it_lies(target, small.outcome, order)
        if right:
            found.insert(kind, _elsewhere(simulator, right))
        if first.case.room:
            found.insert(0, "only in tiles: strides or addresses of parts, padding at inner edges")
        yield Finding(title, tuple(found), simulator, small.outcome, small.needed)


def _elsewhere(simulator: str, right: Sequence[str]) -> str:
    """What is left where something else computes all cases rightly."""
    parts = ["the driver"] if "iss" not in right else []
    parts += ["the Verilog"] if simulator == "rtl" else []
    return f"{' or '.join(parts) or 'its C'}: all cases are right on {' and '.join(right)}"


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
