"""Findings of a check as text for people, as Markdown, and as JUnit for CI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree

import numpy as np

from dovetail.documented import document
from dovetail.guests.check.layers import LEAST, NUMBERS, SIZES, TYPES, WEIGHTS
from dovetail.guests.check.networks import NETWORKS
from dovetail.guests.check.run import Outcome
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.types import Array
from dovetail.records import Record


class Finding(Record):
    """Something that is wrong."""

    title: str
    """One line about the mistake."""
    suspicions: tuple[str, ...]
    """Likely causes, the likeliest first."""
    simulator: str = ""
    """The simulator with the failure; empty for declarations."""
    outcome: Outcome | None = None
    """The failure in its smallest form; None for declarations."""
    needed: tuple[str, ...] = ()
    """Axes without whose settings all is well."""
    also: tuple[str, ...] = ()
    """Other offloads with the same suspicion."""


class Tested(Record):
    """An offload's cases on one simulator."""

    engine: str
    """Name of the engine."""
    offload: str
    """Name of the offload."""
    simulator: str = ""
    """Simulator that ran the cases."""
    cases: int = 0
    """Number of cases."""
    failed: int = 0
    """Number of cases with a wrong result."""
    skipped: int = 0
    """Number of cases that were not tried."""
    seconds: float = 0.0
    """Seconds that the cases took."""
    remark: str = ""
    """The reason for the lack of cases, or for the first case that was not tried; empty without such cases."""
    left_out: tuple[str, ...] = ()
    """Optional operators of the pattern that no case has."""


@dataclass
class Checked:
    """The result of `dovetail check`."""

    target: str
    """Name of the target."""
    findings: list[Finding] = field(default_factory=list)
    """Mistakes that were found."""
    tested: list[Tested] = field(default_factory=list)
    """Offloads that were tried."""
    stopped: bool = False
    """Whether the check was interrupted; `tested` then says, with a remark, which offloads were not tried."""


_CHOICES = {
    "type": [dtype.text for dtype in TYPES],
    "result": [dtype.text for dtype in TYPES],
    "weight_type": [dtype.text for dtype in WEIGHTS],
    "rounding": [rounding.value for rounding in Rounding],
}
"""Texts of settings that are no numbers."""
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
        if name in _CHOICES:
            words += [f"{name} {_CHOICES[name][value]}"] if value else []
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
    """The last line of the report."""
    cases, skipped = sum(t.cases for t in checked.tested), sum(t.skipped for t in checked.tested)
    count = len(checked.findings)
    more = f", {skipped} not tried" if skipped else ""
    more += next((f" (e.g. {t.offload}: {t.remark})" for t in checked.tested if t.skipped), "")
    without: dict[str, list[str]] = {}
    for t in checked.tested:
        if not t.cases:
            without.setdefault(t.remark, []).append(t.offload)
    named = (
        ("without cases", [f"{', '.join(names)} ({remark})" for remark, names in without.items()]),
        ("no layer has", sorted({name for t in checked.tested for name in t.left_out})),
    )
    more += "".join(f"; {what}: {', '.join(names)}" for what, names in named if names)
    ended = f"stopped after {cases - skipped} cases: " if checked.stopped else ""
    return f"{checked.target}: {ended}{count or 'no'} finding{'' if count == 1 else 's'}, {cases} cases{more}"


def markdown(checked: Checked) -> str:
    """The report as Markdown."""
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
    findings = [(finding, _tests_of(finding)) for finding in checked.findings]
    tests = [("declarations", "declarations", 0.0, "")]
    for t in checked.tested:
        name = f"{t.offload} on {t.simulator}" if t.simulator else t.offload
        tests.append((t.engine, name, t.seconds, "" if t.cases else t.remark))
    suite = ElementTree.Element("testsuite", name=f"dovetail check {checked.target}", tests=str(len(tests)))
    failures = skipped = 0
    for engine, name, seconds, remark in tests:
        case = ElementTree.SubElement(suite, "testcase", classname=engine, name=name, time=f"{seconds:.3f}")
        texts = [finding for finding, names in findings if name in names]
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


def _tests_of(finding: Finding) -> tuple[str, ...]:
    """The tests a finding belongs to."""
    if finding.outcome is None:
        return ("declarations",)
    return tuple(f"{offload} on {finding.simulator}" for offload in (finding.outcome.case.offload, *finding.also))


document(__name__)
