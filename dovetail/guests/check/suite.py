"""The whole check: lint, cases, runs, shrinking, suspicions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from dovetail.claims import OF_LAYER, OF_NETWORK, is_off
from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.documented import document
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
    taken,
)
from dovetail.guests.check.core_layers import check_core_layers
from dovetail.guests.check.findings import Checked, Finding, Tested
from dovetail.guests.check.instructions import check_instructions
from dovetail.guests.check.launches import launch_findings, only_last_is_wrong
from dovetail.guests.check.layers import NoLayerError, left_out
from dovetail.guests.check.networks import through_policies
from dovetail.guests.check.run import SECONDS, STOPPED, Outcome, has_model, in_no_time, run, run_until_stopped
from dovetail.guests.check.suspect import MinimalCase, alike, explained, shrink, suspicions
from dovetail.records import Record
from dovetail.run import SIMULATORS, verilog_devices
from dovetail.target.description import Target
from dovetail.target.engine import Engine
from dovetail.target.offload import Offload
from dovetail.target.registry import load_target

_MANY, _FEW = 9, 2
"""Rounds in which a failing case is made simpler, and where a usual mistake explains it on a chip."""
_ADDRESS = "not inside one memory"
"""Part of the error of a wrong address, which may be one of a launch before."""
_TIMED = 6
"""Cases of software whose cycles are compared with those it declares."""
_FAR = 0.25
"""Cycles of a case that differ by more than this share are a fault by themselves: at limits formulas are coarser."""
_TILED = 3
"""Cases of each offload that are computed in tiles too."""


class Order(Record):
    """Settings of a check."""

    limits: Limits
    """Numbers of cases and the time for each."""
    simulators: tuple[str, ...] = ()
    """Names in `SIMULATORS`, or "model"; empty for the quickest that shows the engine, then the simulated chip."""
    offloads: tuple[str, ...] = ()
    """Names of the offloads that are checked; empty for all."""
    seconds: float = SECONDS
    """The most a batch of cases may take."""
    first: bool = False
    """Whether to stop after the first offload with a failing case."""


def check(
    target: Target,
    order: Order,
    progress: Callable[[str], None] = lambda text: None,
    *,
    name: str = "",
    jobs: int = 1,
    scheduler: str | None = None,
) -> Checked:
    """Check the engines of a target with generated layers.

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
    checker = _Checker(through_policies(target), order, progress)
    target = checker.target
    own = target.core.instructions or target.core.functions or target.core.pairs or target.core.vectors
    if not target.engines and not own:
        hint = "give a target with an engine, or with instructions of its core's own"
        raise TargetError("it has no engine to check", where=target.name, hint=hint)
    if "rtl" in order.simulators:
        verilog_devices(target)  # else each batch would say that it does not build
    checked = Checked(target.name, [_of_declarations(sentence) for sentence in lint_target(target)])
    if own:
        _check_core(target, order, checked, progress)
    every = [(engine.name, offload.name) for engine in target.engines for offload in engine.offloads]
    wanted = [(engine, offload) for engine, offload in every if not order.offloads or offload in order.offloads]
    if order.offloads and not wanted and not checked.tested:
        hint = f"there is {', '.join(offload for _, offload in every)}"
        raise TargetError(f"there is no offload {' or '.join(order.offloads)}", where=target.name, hint=hint)
    for engine in target.engines:
        simulators(target, engine, order)  # else each offload would say that one is not there
    alone = jobs == 1 and scheduler is None
    try:
        with farm(jobs, scheduler, here=True) as spread:
            ended = spread(checker.tried if alone else partial(_tried_elsewhere, name, order), wanted)
            for place, outcome in zip(wanted, _in_order(ended), strict=False):
                if not alone:
                    progress(f"{' '.join(place)}: its cases have ended")
                checker.judge(place, outcome, checked)
                if order.first and any(finding.outcome is not None for finding in checked.findings):
                    break
    except KeyboardInterrupt:
        known = {(one.engine, one.offload) for one in checked.tested}
        checked.tested += [Tested(*place, remark=STOPPED) for place in wanted if place not in known]
        checked.stopped = True
    return _concluded(checked)


def _check_core(target: Target, order: Order, checked: Checked, progress: Callable[[str], None]) -> None:
    """Try a core's own instructions, by themselves and, where kernels alone can use them, in layers."""
    check_instructions(target, order.simulators, order.offloads, checked, progress)
    blocks = target.core.pairs or target.core.vectors
    if blocks or any(one.remark and not one.simulator for one in checked.tested):
        check_core_layers(target, checked, progress, order.offloads)


def _concluded(checked: Checked) -> Checked:
    """The result with its findings in order; a check that tried nothing is a finding too."""
    if not (checked.findings or checked.stopped or any(one.cases for one in checked.tested)):
        checked.findings.append(_of_declarations(f"{checked.target}: no case was tried: this check says nothing"))
    # what is wrong comes before cycles that are not as declared, whichever offload was tried first
    checked.findings[:] = sorted(_merged(checked.findings), key=lambda one: one.outcome is None and one.simulator != "")
    return checked


def _of_declarations(sentence: str, suspicion: str = "") -> Finding:
    return Finding(sentence, (suspicion or sentence,))


class _SimulatorRun(Record):
    """An offload's cases on a simulator."""

    simulator: str
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def is_stopped(self) -> bool:
        """Whether Ctrl-C ended it."""
        return any(one.skipped == STOPPED for one in self.outcomes)

    @property
    def failed(self) -> bool:
        """Whether a case went wrong."""
        return any(one.failed for one in self.outcomes)


class _OffloadOutcome(Record):
    """The runs of an offload's cases; may come from another process."""

    lints: tuple[Finding, ...] = ()
    remark: str = ""
    """Why there are no cases; empty if there are some."""
    runs: tuple[_SimulatorRun, ...] = ()
    """Runs up to the first simulator with a failure: a case that fails on the model fails everywhere."""
    launches: tuple[Finding, ...] = ()
    """Faults of several launches in a row."""
    timed: tuple[Outcome, ...] = ()
    """Cases whose cycles on a simulated chip are known."""


def _in_order(ended: Iterator[tuple[int, _OffloadOutcome | LostResult]]) -> Iterator[_OffloadOutcome]:
    """Outcomes by their numbers, each as soon as all before it have ended."""
    early: dict[int, _OffloadOutcome] = {}
    place = 0
    for number, outcome in ended:
        if isinstance(outcome, LostResult):
            outcome = _OffloadOutcome((_of_declarations(outcome.value),), outcome.value)
        early[number] = outcome
        while place in early:
            yield early.pop(place)
            place += 1


@lru_cache(maxsize=2)
def _target(name: str) -> Target:
    return through_policies(load_target(name))


def _tried_elsewhere(name: str, order: Order, place: tuple[str, str]) -> _OffloadOutcome:
    return _Checker(_target(name), order).tried(place)


def simulators(target: Target, engine: Engine, order: Order) -> tuple[str, ...]:
    """The simulators an engine's cases run on; raises TargetError for one that is not there or does not fit."""
    host = engine.device is None or instruction_set(target.core.isa).is_host
    if not order.simulators:
        return ("host",) if host else ("model", "iss") if has_model(target, engine) else ("iss",)
    for name in order.simulators:
        if name not in ("model", *SIMULATORS):
            raise TargetError(
                f"there is no simulator '{name}'", where="check", hint=f"use {', '.join(('model', *SIMULATORS))}"
            )
        if name == "model" and not has_model(target, engine):
            what = f"{engine.name} has no Python model that works by itself: only its driver knows how to talk to it"
            hint = (
                "use --sim iss, which runs driver and device; or give its class carry_out(words), which does a command "
                "without the driver; or describe its registers as dt.JobRegisters(names)"
            )
            raise TargetError(what, where=target.name, hint=hint)
    return order.simulators


class _Checker(Record):
    """Tries the offloads of a target, and looks for what is wrong with them."""

    target: Target
    order: Order
    progress: Callable[[str], None] = lambda text: None

    def _run(self, cases: Sequence[Case], simulator: str) -> list[Outcome]:
        return run(self.target, cases, simulator, self.order.seconds)

    def _offload(self, place: tuple[str, str]) -> tuple[Engine, Offload]:
        engine = self.target.engine(place[0])
        return engine, next(offload for offload in engine.offloads if offload.name == place[1])

    def tried(self, place: tuple[str, str]) -> _OffloadOutcome:
        """Make the cases of an offload, by the names of engine and offload, and run them."""
        where, (engine, offload) = " ".join(place), self._offload(place)
        self.progress(f"{where}: looking for layers it takes")
        cases, remark, lints = _cases(engine, offload, self.order)
        runs: list[_SimulatorRun] = []
        for simulator in simulators(self.target, engine, self.order) if not remark else ():
            began = time.monotonic()
            self.progress(f"{where}: {len(cases)} cases on {simulator}")

            def report(count: int, name: str = simulator) -> None:
                self.progress(f"{where}: {count} of {len(cases)} cases on {name}")

            outcomes = run_until_stopped(self.target, cases, simulator, self.order.seconds, report)
            if not any(outcome.failed or outcome.skipped == STOPPED for outcome in outcomes):
                tiled = self._run(_tiled(self.target, engine, offload, cases), simulator)
                outcomes += [outcome for outcome in tiled if not outcome.skipped]  # else no tile is as small
            runs.append(_SimulatorRun(simulator, tuple(outcomes), time.monotonic() - began))
            if runs[-1].failed or runs[-1].is_stopped:
                break
        launches: tuple[Finding, ...] = ()
        if runs and runs[-1].simulator == "iss" and not (runs[-1].is_stopped or runs[-1].failed):
            self.progress(f"{where}: launches in a row on iss")
            launches = tuple(launch_findings(self.target, cases[0], self.order.seconds))
        timed = self._timed(engine, offload, cases, runs)
        return _OffloadOutcome(lints, remark, tuple(runs), launches, tuple(timed))

    def _timed(
        self, engine: Engine, offload: Offload, cases: Sequence[Case], runs: Sequence[_SimulatorRun]
    ) -> list[Outcome]:
        """The cases whose cycles are known; of software, if no simulator is asked for, the largest on the simulated
        chip."""
        known = [one for run in runs for one in run.outcomes if one.taken and not one.failed]
        failed = any(run.failed or run.is_stopped for run in runs)
        if known or failed or not runs or self.order.simulators or engine.device or self.target.core.is_host:
            return known
        self.progress(f"{engine.name} {offload.name}: cycles on iss")
        sized = [
            (checked.nbytes, number) for number, case in enumerate(cases) if (checked := taken(offload, case.point))
        ]
        largest = [cases[number] for _, number in sorted(sized, reverse=True)[:_TIMED]]
        return [one for one in self._run(largest, "iss") if one.taken]

    def judge(self, place: tuple[str, str], tried: _OffloadOutcome, checked: Checked) -> None:
        """Add the findings of an offload, and the count of its cases."""
        where, (_, offload) = " ".join(place), self._offload(place)
        checked.findings += tried.lints
        if tried.remark:
            checked.tested.append(Tested(*place, remark=tried.remark))
        for number, one in enumerate(tried.runs):
            simulator, outcomes = one.simulator, one.outcomes
            right = [before.simulator for before in tried.runs[:number]]
            failed, skipped = sum(each.failed for each in outcomes), [each.skipped for each in outcomes if each.skipped]
            reason = skipped[0].splitlines()[0] if skipped else ""
            unmade = () if any("made" in each.case.point for each in outcomes) else left_out(offload.pattern)
            counts = (len(outcomes), failed, len(skipped))
            checked.tested.append(Tested(*place, simulator, *counts, one.seconds, reason, unmade))
            for finding in self._explained(offload, one, right, checked.findings):
                checked.findings.append(finding)
            if one.is_stopped:
                raise KeyboardInterrupt
            if all(each.skipped for each in outcomes if each.case.taken):
                sentence = f"{where}: no case was tried on {simulator}: {reason or 'there is none'}"
                checked.findings.append(Finding(sentence, (f"nothing is known of it on {simulator}",), simulator))
        checked.findings += tried.launches
        checked.findings += [Finding(sentence, (sentence,), "iss") for sentence in _claims(where, tried.timed)]

    def _explained(
        self, offload: Offload, ended: _SimulatorRun, right: Sequence[str], before: Sequence[Finding]
    ) -> Iterator[Finding]:
        """One finding for wrong results, one for errors, each in its smallest form.

        On a chip, where runs take long, less is tried for a failure that a usual mistake explains, and nothing for one
        that a finding `before` of another offload explains. `right` are simulators on which all cases are right.
        """
        simulator, outcomes = ended.simulator, ended.outcomes
        suspected = {finding.suspicions[0] for finding in before}
        errors = [(finding, finding.outcome.error) for finding in before if finding.outcome and finding.outcome.error]
        for is_error, words in ((False, "wrong results"), (True, "errors")):
            failed = [outcome for outcome in outcomes if outcome.failed and bool(outcome.error) == is_error]
            if not failed:
                continue
            failed.sort(key=lambda outcome: (bool(outcome.case.room), _size(offload, outcome)))
            first, where = failed[0], f"{failed[0].case.engine} {failed[0].case.offload}"
            count = sum(not outcome.skipped for outcome in outcomes)
            title = f"{where}, {simulator}: {words} in {len(failed)} of {count} cases, e.g. {first.case.why}"
            same = next((finding for finding, error in errors if alike(error, first.error)), None) if is_error else None
            if same is not None:
                yield replace(same, title=title, simulator=simulator, outcome=first)
                continue
            self.progress(f"{where}: looking for the smallest case that fails")
            dear = simulator != "model"
            mistakes = explained(failed, outcomes, offload)[0] if dear and not is_error else []
            small, of_time, stopped = MinimalCase(first, ()), [], ended.is_stopped
            try:
                if simulator == "iss" and not (mistakes or stopped or (is_error and _ADDRESS not in first.error)):
                    of_time = list(self._of_time(outcomes, first))
                if not (of_time or stopped or set(mistakes[:1]) & suspected):
                    rounds = _FEW if mistakes else _MANY
                    small = shrink(first, offload, lambda cases: self._run(cases, simulator), dear, rounds)
            except KeyboardInterrupt:  # a finding is worth having as it is
                stopped = True
            sentences = suspicions(small, failed, outcomes, offload)
            if simulator == "model" and not (small.outcome.hangs or stopped):
                sentences[:0] = self._of_places(small.outcome)
            if right:  # only what differs between the simulators is left
                parts = ["the driver"] if "iss" not in right else []
                parts += ["the Verilog"] if simulator == "rtl" else []
                left = " or ".join(parts) or "its C"
                sentences.insert(is_error, f"{left}: all cases are right on {' and '.join(right)}")
            if first.case.room:
                sentences.insert(0, "only in tiles: strides or addresses of parts, padding at inner edges")
            yield Finding(title, (*of_time, *sentences), simulator, small.outcome, small.needed)
            if stopped:
                raise KeyboardInterrupt

    def _of_time(self, outcomes: Sequence[Outcome], first: Outcome) -> Iterator[str]:
        """Whether all is well on the chip if the engine takes no time, or if nothing was launched before."""
        same = [outcome.case for outcome in outcomes if outcome.case.taken and outcome.case.room == first.case.room]
        at_once = run(in_no_time(self.target), same, "iss", self.order.seconds)
        if not any(outcome.failed or outcome.skipped for outcome in at_once):
            yield (
                "results are read before they are there: all is well where the engine takes no time, so the driver "
                "does not wait, or the engine says too early that it has finished"
            )
        elif len(same) > 1 and not self._run([first.case], "iss")[0].failed:
            yield (
                "what a launch before left behind: all is well where there is none, so a register is not written, or a "
                "buffer, or a cache of the engine's keeps what is old"
            )
        elif only_last_is_wrong(self.target, first.case, self.order.seconds):
            yield (
                "results are read before they are there: of several launches in a row only the last is wrong, so the "
                "engine says too early that it has finished"
            )

    def _of_places(self, outcome: Outcome) -> Iterator[str]:
        """Whether all is well once operands lie more conveniently."""
        for case, sentence in (
            (
                replace(outcome.case, aligned=True),
                "bad alignment: all is well where everything is aligned to 256 bytes",
            ),
            (replace(outcome.case, dense=True), "strides: all is well where rows and pixels lie side by side"),
        ):
            if not self._run([case], "model")[0].failed:
                yield sentence


def _cases(engine: Engine, offload: Offload, order: Order) -> tuple[list[Case], str, tuple[Finding, ...]]:
    """The cases; why there are none, or an empty text; and lints."""
    where, lints = f"{engine.name} {offload.name}", list[Finding]()
    try:
        starts = bases(offload)
        if not starts:
            sentence = f"{where}: no layer reaches it; of the usual one: {nearest_failure(offload)}"
            return [], "no layer reaches it", (_of_declarations(sentence),)
        cases: list[Case] = []
        for start in starts:
            lints += map(_of_declarations, lint_cost(engine, offload, start))
            cases += derive(engine, offload, start, order.limits)
        return cases, "", tuple(lints)
    except NoLayerError as error:
        finding = _of_declarations(f"{where}: no case was tried: {error}", f"nothing is known of it: {error}")
        return [], str(error), (*lints, finding)
    except UserCodeError as error:
        return [], "its declarations raise", (*lints, _of_declarations(f"{where}: {error}", str(error)))


def _tiled(target: Target, engine: Engine, offload: Offload, cases: Sequence[Case]) -> list[Case]:
    """Some of the largest cases in tiles, with one size of memory; none where nothing is cut."""
    if target.works_in_place(engine) or engine.memory == target.values or engine.device is None:
        return []
    sized = []
    for number, case in enumerate(cases):
        checked = ask(offload, case.point) if case.taken else None
        if checked is not None:
            images = sum(array.nbytes for array in (*checked.layer.inputs.values(), checked.layer.expected))
            sized.append((images, checked.nbytes - images, number))
    largest = sorted(sized, reverse=True)[:_TILED]
    room = max(512, max(constants + images // 2 for images, constants, _ in largest) // 64 * 64)
    return [replace(cases[number], why=f"{cases[number].why}, in tiles", room=room) for *_, number in largest]


def _claims(where: str, timed: Sequence[Outcome]) -> Iterator[str]:
    """A sentence where the cycles an offload declares are not those its cases take: of most, or by far of some."""
    total = sum(one.taken for one in timed)
    heavy = [one for one in timed if one.taken > OF_NETWORK * total]
    off = [one for one in heavy if is_off(one.declared, one.taken, total)]
    far = sum(one.taken for one in off if abs(one.declared - one.taken) > _FAR * one.taken)
    if 2 * len(off) > len(heavy) or far > OF_LAYER * total:
        worst = max(off, key=lambda one: abs(one.declared - one.taken))
        yield (
            f"{where}: cycles of {len(off)} of {len(heavy)} cases are not those declared: {worst.declared:,} declared, "
            f"{worst.taken:,} taken, e.g. {worst.case.why} (correct Offload.cycles; dovetail calibrate measures calls)"
        )


def _size(offload: Offload, outcome: Outcome) -> int:
    checked = ask(offload, outcome.case.point)
    return checked.nbytes if checked else 0


def _merged(findings: Sequence[Finding]) -> Iterator[Finding]:
    """One finding for all offloads with the same first suspicion."""
    groups: dict[tuple[str, bool], list[Finding]] = {}
    for finding in findings:
        error = finding.outcome is not None and bool(finding.outcome.error)
        groups.setdefault((finding.suspicions[0], error), []).append(finding)
    for first, *others in groups.values():
        also = [other.outcome.case.offload for other in others if other.outcome is not None]
        yield replace(first, also=tuple(dict.fromkeys(also)))


document(__name__)
