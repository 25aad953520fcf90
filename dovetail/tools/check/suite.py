"""The whole check: lint, cases, runs, shrinking, suspicions; findings for people, as Markdown, and as JUnit for CI."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from xml.etree import ElementTree

import numpy as np

from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.errors import TargetError
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.types import Array
from dovetail.run import SIMULATORS, verilog_devices
from dovetail.target.description import Engine, Offload, Target
from dovetail.tools.check.cases import (
    Case,
    Limits,
    Unasked,
    ask,
    bases,
    derive,
    lint_cost,
    lint_target,
    nearest_failure,
)
from dovetail.tools.check.layers import LEAST, NUMBERS, SIZES, TYPES, WEIGHTS, Underivable, left_out
from dovetail.tools.check.networks import NETWORKS, through_policies
from dovetail.tools.check.run import SECONDS, Outcome, has_model, in_no_time, run
from dovetail.tools.check.suspect import Shrunk, alike, explained, shrink, suspicions

_MANY, _FEW = 9, 2
"""Rounds in which a failing case is made simpler, and where a usual mistake explains it on a chip."""
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
    first: bool = False
    """Whether to stop behind the first offload that something is wrong with."""


def check(target: Target, order: Order, progress: Callable[[str], None] = lambda text: None) -> Checked:
    """Check a target.

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
    for engine in target.engines:
        for offload in engine.offloads:
            enough = order.first and len(found.findings) > lints
            if not enough and (not order.offloads or offload.name in order.offloads):
                _offload(target, engine, offload, order, found, progress)
    if order.offloads and not found.tested:
        hint = f"there is {', '.join(o.name for e in target.engines for o in e.offloads)}"
        raise TargetError(f"there is no offload {' or '.join(order.offloads)}", where=target.name, hint=hint)
    found.findings[:] = _merged(found.findings)
    return found


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


def _offload(
    target: Target, engine: Engine, offload: Offload, order: Order, found: Checked, progress: Callable[[str], None]
) -> None:
    where = f"{engine.name} {offload.name}"
    progress(f"{where}: looking for layers it takes")
    cases, remark = _cases(engine, offload, order, found)
    if remark:
        found.tested.append(Tested(engine.name, offload.name, remark=remark))
        return
    right: list[str] = []
    for simulator in simulators(target, engine, order):
        began = time.monotonic()
        progress(f"{where}: {len(cases)} cases on {simulator}")

        def told(done: int, name: str = simulator) -> None:
            progress(f"{where}: {done} of {len(cases)} cases on {name}")

        outcomes = run(target, cases, simulator, order.seconds, told)
        if not any(outcome.failed for outcome in outcomes):
            tiled = run(target, _tiled(target, engine, offload, cases), simulator, order.seconds)
            outcomes += [outcome for outcome in tiled if not outcome.skipped]  # else no tile is as small
        before = tuple(found.findings)
        found.findings += _explained(target, offload, simulator, outcomes, order, right, before, progress)
        failed, skipped = sum(one.failed for one in outcomes), [one.skipped for one in outcomes if one.skipped]
        reason = skipped[0].splitlines()[0] if skipped else ""
        counted = (len(outcomes), failed, len(skipped), time.monotonic() - began, reason)
        unmade = () if any("made" in case.point for case in cases) else left_out(offload.pattern)
        found.tested.append(Tested(engine.name, offload.name, simulator, *counted, unmade))
        if all(one.skipped for one in outcomes if one.case.taken):
            sentence = f"{where}: no case was tried on {simulator}: {reason or 'there is none'}"
            found.findings.append(Finding(sentence, (f"nothing is known of it on {simulator}",), simulator))
        if failed:
            break  # what is wrong on the model is wrong everywhere
        right.append(simulator)


def _cases(engine: Engine, offload: Offload, order: Order, found: Checked) -> tuple[list[Case], str]:
    """The cases, and why there are none, if there are none; lints."""
    where = f"{engine.name} {offload.name}"
    try:
        starts = bases(offload)
        if not starts:
            sentence = f"{where}: no layer reaches it; of the usual one: {nearest_failure(offload)}"
            found.findings.append(Finding(sentence, (sentence,)))
            return [], "no layer reaches it"
        cases: list[Case] = []
        for start in starts:
            found.findings += [Finding(sentence, (sentence,)) for sentence in lint_cost(engine, offload, start)]
            cases += derive(engine, offload, start, order.limits)
        return cases, ""
    except Underivable as error:
        sentence = f"{where}: no case was tried: {error}"
        found.findings.append(Finding(sentence, (f"nothing is known of it: {error}",)))
        return [], str(error)
    except Unasked as error:
        found.findings.append(Finding(f"{where}: {error}", (str(error),)))
        return [], "its declarations raise"


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
        small = Shrunk(first, ())
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


_SUSPICIONS = 4
_AROUND = 3
"""Elements shown on either side of the first wrong one, along the last two axes."""
_MOST = 600
"""Characters shown of an error."""


def finding_text(finding: Finding) -> str:
    """A finding on one screen: title, suspicions, the smallest case, expected and actual."""
    outcome = finding.outcome
    lines = [finding.title]
    if outcome is None:
        return finding.title
    if finding.also:
        lines.append(f"  also      {', '.join(finding.also)}")
    for number, sentence in enumerate(finding.suspicions[:_SUSPICIONS]):
        lines.append(f"  {'suspicion' if number == 0 else '       or'} {sentence}")
    lines.append(f"  smallest  {_described(finding)}")
    if finding.needed:
        lines.append(f"  needs     {', '.join(axis.split(':')[0] for axis in finding.needed)}")
    if outcome.error:
        return "\n".join([*lines, f"  error     {outcome.error[:_MOST]}"])
    assert outcome.actual is not None and outcome.expected is not None
    return "\n".join([*lines, *_around(outcome.actual, outcome.expected)])


def _described(finding: Finding) -> str:
    """The settings of a case that are not as simple as can be, and all sizes."""
    assert finding.outcome is not None
    case, words = finding.outcome.case, []
    for axis, value in case.point.items():
        name = axis.split(":")[0]
        if name in ("type", "result", "weight_type", "rounding"):
            choices = {"type": TYPES, "result": TYPES, "weight_type": WEIGHTS, "rounding": tuple(Rounding)}[name]
            if value:
                words.append(f"{name} {getattr(choices[value], 'text', choices[value].value)}")
        elif axis == "model":
            words.append(f"from {NETWORKS[value - 1][0]}")
        elif axis == "made" and "model" not in case.point:
            words.append("from the port's own networks")
        elif axis in SIZES and (value != LEAST[axis] or axis in ("rows", "columns", "channels", "outputs")):
            words.append(f"{axis} {value}")
        elif axis in NUMBERS and value and axis not in ("per_channel", "bias"):
            words.append({"weights": "random weights", "x": "random x"}.get(axis, f"{name} {value}"))
    room = f", with {case.room} bytes of memory" if case.room else ""
    return ", ".join(words) + room


def _around(actual: Array, expected: Array) -> Iterator[str]:
    """Expected and actual elements around the first wrong one."""
    wrong = np.argwhere(actual != expected)
    first = tuple(int(index) for index in wrong[0])
    yield (
        f"  first     [{', '.join(map(str, first))}] of [{', '.join(map(str, expected.shape))}]: expected "
        f"{expected[first]}, actual {actual[first]}; {len(wrong)} of {expected.size} elements differ"
    )
    window = [slice(index, index + 1) for index in first]
    for axis in range(max(0, len(first) - 2), len(first)):
        window[axis] = slice(max(0, first[axis] - _AROUND), first[axis] + _AROUND + 1)
    for name, array in (("expected", expected), ("actual", actual)):
        part = array[tuple(window)].reshape(-1, window[-1].stop and array[tuple(window)].shape[-1])
        for number, row in enumerate(part):
            yield f"  {name if number == 0 else '':9} {' '.join(f'{value:5}' for value in row.tolist())}"


def summary(checked: Checked) -> str:
    """The last line."""
    cases, skipped = sum(t.cases for t in checked.tested), sum(t.skipped for t in checked.tested)
    count = len(checked.findings)
    more = f", {skipped} not tried" if skipped else ""
    more += next((f" (e.g. {t.offload}: {t.remark})" for t in checked.tested if t.skipped), "")
    named = (
        ("without cases", [f"{t.offload} ({t.remark})" for t in checked.tested if not t.cases]),
        ("no layer has", sorted({name for t in checked.tested for name in t.left_out})),
    )
    more += "".join(f"; {what}: {', '.join(names)}" for what, names in named if names)
    return f"{checked.target}: {count or 'no'} finding{'' if count == 1 else 's'}, {cases} cases{more}"


def markdown(checked: Checked) -> str:
    """The whole report."""
    lines = [f"# Check of {checked.target}", "", summary(checked), ""]
    lines += ["| engine | offload | on | cases | failed | not tried | why |", "|---|---|---|---:|---:|---:|---|"]
    for t in checked.tested:
        cells = (t.engine, t.offload, t.simulator, t.cases, t.failed, t.skipped, t.remark)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for number, finding in enumerate(checked.findings, 1):
        lines += ["", f"## Finding {number}", "", "```text", finding_text(finding), "```"]
    return "\n".join(lines) + "\n"


def junit(checked: Checked) -> str:
    """A suite per target, a test per offload and simulator, and one for the declarations."""
    found = [(finding, _of(finding)) for finding in checked.findings]
    tests = [("declarations", "declarations", 0.0, "")]
    for t in checked.tested:
        name = f"{t.offload} on {t.simulator}" if t.simulator else t.offload
        tests.append((t.engine, name, t.seconds, "" if t.cases else t.remark))
    suite = ElementTree.Element("testsuite", name=f"dovetail check {checked.target}", tests=str(len(tests)))
    failures = skipped = 0
    for engine, name, seconds, remark in tests:
        case = ElementTree.SubElement(suite, "testcase", classname=engine, name=name, time=f"{seconds:.3f}")
        texts = [finding for finding, places in found if name in places]
        if texts:
            failures += 1
            failure = ElementTree.SubElement(case, "failure", message=texts[0].suspicions[0])
            text = "\n\n".join(finding_text(finding) for finding in texts)
            failure.text = "".join(c for c in text if c in "\t\n" or ord(c) >= 32)  # XML has no others
        elif remark:
            skipped += 1
            ElementTree.SubElement(case, "skipped", message=remark)
    suite.set("failures", str(failures))
    suite.set("skipped", str(skipped))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _of(finding: Finding) -> tuple[str, ...]:
    """The tests a finding belongs to."""
    if finding.outcome is None:
        return ("declarations",)
    return tuple(f"{offload} on {finding.simulator}" for offload in (finding.outcome.case.offload, *finding.also))
