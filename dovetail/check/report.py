"""Findings for people (one screen each), as Markdown, and as JUnit for CI."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

import numpy as np

from dovetail.check.layers import LEAST, NUMBERS, SIZES, TYPES, WEIGHTS
from dovetail.check.suite import Checked, Finding, Tested
from dovetail.graph.types import Array
from dovetail.operators.arithmetic import Rounding

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
        if axis in ("type", "weight_type", "rounding"):
            choices = {"type": TYPES, "weight_type": WEIGHTS, "rounding": tuple(Rounding)}[axis]
            if value:
                words.append(f"{axis} {getattr(choices[value], 'text', choices[value].value)}")
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
    yield (f"  first     [{', '.join(map(str, first))}] of [{', '.join(map(str, expected.shape))}]: expected "
           f"{expected[first]}, actual {actual[first]}; {len(wrong)} of {expected.size} elements differ")  # fmt: skip
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
    count, left = len(checked.findings), sum(t.left for t in checked.tested)
    more = f", {skipped} not tried" if skipped else ""
    more += next((f" (e.g. {t.offload}: {t.remark})" for t in checked.tested if t.skipped), "")
    more += f"; --full tries {left} settings more" if left else ""
    named = (("without cases", [f"{t.offload} ({t.remark})" for t in checked.tested if not t.cases]),
             ("no layer has", sorted({name for t in checked.tested for name in t.left_out})))  # fmt: skip
    more += "".join(f"; {what}: {', '.join(names)}" for what, names in named if names)
    return f"{checked.target}: {count or 'no'} finding{'' if count == 1 else 's'}, {cases} cases{more}"


def markdown(checked: Checked) -> str:
    """The whole report."""
    lines = [f"# Check of {checked.target}", "", summary(checked), "",
             "| engine | offload | on | cases | failed | not tried | why |",
             "|---|---|---|---:|---:|---:|---|"]  # fmt: skip
    lines += [f"| {t.engine} | {t.offload} | {t.simulator} | {t.cases} | {t.failed} | {t.skipped} | {t.remark} |"
              for t in checked.tested]  # fmt: skip
    for number, finding in enumerate(checked.findings, 1):
        lines += ["", f"## Finding {number}", "", "```text", finding_text(finding), "```"]
    return "\n".join(lines) + "\n"


def junit(checked: Checked) -> str:
    """A suite per target, a test per offload and simulator, and one for the declarations."""
    found = [(finding, _of(finding)) for finding in checked.findings]
    tests: list[tuple[str, str, float, str]] = [("declarations", "declarations", 0.0, "")]
    tests += [(t.engine, f"{t.offload} on {t.simulator}" if t.simulator else t.offload, t.seconds,
               "" if t.cases else t.remark) for t in checked.tested]  # fmt: skip
    suite = ElementTree.Element("testsuite", name=f"dovetail check {checked.target}", tests=str(len(tests)))
    failures = skipped = 0
    for engine, name, seconds, remark in tests:
        case = ElementTree.SubElement(suite, "testcase", classname=engine, name=name, time=f"{seconds:.3f}")
        texts = [finding for finding, places in found if name in places]
        if texts:
            failures += 1
            failure = ElementTree.SubElement(case, "failure", message=texts[0].suspicions[0])
            failure.text = _clean("\n\n".join(finding_text(finding) for finding in texts))
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


def _clean(text: str) -> str:
    """Without characters that XML does not have."""
    return "".join(c for c in text if c in "\t\n" or ord(c) >= 32)


def progress_line(tested: Tested) -> str:
    """One line about what was done."""
    return f"{tested.engine} {tested.offload}: {tested.remark or f'{tested.cases} cases, {tested.failed} failed'}"
