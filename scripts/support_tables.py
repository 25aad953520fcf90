"""Writes docs/support.md: what each target's engines take and what Dovetail reads, from the code's own declarations."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "support.md"
sys.path.insert(0, str(REPOSITORY))

from dovetail.ir.operators.base import Pointwise  # noqa: E402
from dovetail.kernels.registry import FAMILIES, RULES  # noqa: E402
from dovetail.operators import installed_operators  # noqa: E402
from dovetail.read import keras, onnx, tflite  # noqa: E402
from dovetail.read.keras import operations  # noqa: E402
from dovetail.target import Engine, Target  # noqa: E402
from dovetail.target.parts import PARTS, Microcontroller  # noqa: E402
from dovetail.target.pattern import Apply, Leaf, Pattern  # noqa: E402
from dovetail.targets import BUILT_IN, load_target  # noqa: E402


def pattern_text(pattern: Pattern) -> str:
    """A pattern as nested text; an optional operator in square brackets, constants in lower case with an asterisk."""
    if isinstance(pattern, Leaf):
        return f"{pattern.name}*" if pattern.constant else pattern.name
    assert isinstance(pattern, Apply)
    name = f"[{pattern.operator.__name__}]" if pattern.optional else pattern.operator.__name__
    return f"{name}({', '.join(pattern_text(part) for part in pattern.inputs)})"


def ranges(numbers: list[int]) -> str:
    """Rising numbers as text, e.g. "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def engine_lines(target: Target, engine: Engine) -> list[str]:
    """The patterns of an engine, those with equal limits in one row, and each limit once with its number."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for offload in engine.offloads:
        sentences = tuple(dict.fromkeys(constraint.sentence for constraint in offload.constraints))
        rows.setdefault(sentences, []).append(f"{offload.name}: `{pattern_text(offload.pattern)}`")
    count = Counter(sentence for sentences in rows for sentence in sentences)
    known = {sentence: number for number, sentence in enumerate(sorted(count, key=lambda one: -count[one]), 1)}
    title = f"## Engine `{engine.name}`" + (f" of `{target.name}`" if engine.name != target.name else "")
    lines = [title, "", "| patterns | limits |", "|---|---|"]
    lines += [
        f"| {'<br>'.join(patterns)} | {ranges(sorted(known[sentence] for sentence in sentences))} |"
        for sentences, patterns in rows.items()
    ]
    return [*lines, "", *(f"{number}. {sentence}" for sentence, number in known.items()), ""]


def policies(target: Target) -> str:
    """What `--requant` may be for a target; nothing where the core's way is the only one."""
    only = len(target.policies) == 1 and not target.engines
    return "" if only else "<br>".join(f"`{policy.name}`: {policy.sentence}" for policy in target.policies)


def target_lines(targets: Sequence[Target]) -> list[str]:
    """A table of targets with their memories and policies, and then the engines."""
    lines = ["## Targets", "", "| target | what it is | `--requant`, the default first |", "|---|---|---|"]
    lines += [f"| `{target.name}` | {target.sentence} | {policies(target)} |" for target in targets]
    lines += ["", "Every core requantises as TensorFlow Lite Micro does.", ""]
    return [*lines, *(line for target in targets for engine in target.engines for line in engine_lines(target, engine))]


def listed(names: Iterable[str]) -> str:
    """Names in alphabetical order, as code."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def core_lines() -> list[str]:
    """What the core computes, and what the frontends read."""
    versions = sorted(tflite.IMPORTERS.items())
    standard = [name for domain, name in onnx.IMPORTERS if domain == ""]
    standard += [kind.op_type for kind in installed_operators() if kind.op_type and not kind.domain]
    others = sorted({domain for domain, _ in onnx.IMPORTERS} - {""})
    lines = [
        "## Core kernels",
        "",
        "One kernel computes one of these, with any pointwise operators after it:",
        "",
        listed(kind.__name__ for kind in FAMILIES),
        "",
        "Pointwise operators, alone or after one of the above:",
        "",
        listed(kind.__name__ for kind in {*RULES, *(k for k in Pointwise.__subclasses__() if "c_template" in vars(k))}),
        "",
        "## TFLite operators",
        "",
        "Each with its newest version:",
        "",
        ", ".join(f"`{name}` {importer.version}" for name, importer in versions),
    ]
    lines += ["", "`CUSTOM` operators ([and your own](own_operators.md)):", ""]
    lines += [listed(kind.custom_code for kind in installed_operators() if kind.custom_code)]
    lines += ["", "## ONNX operators", "", f"Standard domain: {listed(standard)}", ""]
    for domain in others:
        lines += [f"Domain `{domain}`: {listed(name for d, name in onnx.IMPORTERS if d == domain)}", ""]
    return lines


def keras_lines() -> list[str]:
    """What the Keras frontend reads."""
    layers = {*keras.LAYERS, "InputLayer", "Sequential", "Functional", "TimeDistributed"} - {"TFOpLambda"}
    return [
        "## Keras layers",
        "",
        "From `.keras` (Keras 3) and `.h5` (Keras 2 and 3):",
        "",
        listed(layers),
        "",
        f"Activations: {listed(operations.ACTIVATIONS)}",
        "",
        f"Operations of `keras.ops`: {listed(operations.OPERATIONS)}",
        "",
        f"TensorFlow's functions in models of Keras 2: {listed(operations.TENSORFLOW)}",
        "",
    ]


def part_lines() -> list[str]:
    """Microcontrollers, and where what is said of their memories is from."""
    rows = [
        f"| `{name}` | {part.name} | `{part.core}` | {part.flash[1] >> 10:,} KiB at {part.flash[0]:#x} "
        f"| {part.ram[1] >> 10:,} KiB at {part.ram[0]:#x} | {_reads(part)} | {part.source} |"
        for name, part in PARTS.items()
    ]
    head = ["| `--part` | part | target with its core | flash | RAM | reads of the flash | documents, clock |"]
    said = (
        "Reads of the flash: cycles a core waits, for so many bytes, and the caches before it; empty where they do not "
    )
    said += "wait, or no document says how long (`dovetail/target/parts.toml`)."
    return ["## Microcontrollers", "", said, "", *head, "|---|---|---|---|---|---|---|", *rows, ""]


def _reads(part: Microcontroller) -> str:
    """How long reads of a part's flash take."""
    if not part.reads.get("waits"):
        return ""
    caches = (f"{' and '.join(c.holds)}: {c.size:,} bytes, {c.ways or 'all'} ways" for c in part.reads["caches"])
    ahead = ("reads ahead",) if part.reads.get("prefetch") else ()
    return "; ".join((f"{part.reads['waits']}, {part.reads['width']} bytes", *ahead, *caches))


def exporter_lines() -> list[str]:
    """Files of today's exporters, and how near the graph of each is to its own runtime."""
    entries = json.loads((REPOSITORY / "tests" / "data" / "exporters" / "exporters.json").read_text())
    tools: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, entry in sorted(entries.items()):
        tools.setdefault((entry["tool"], entry["version"]), {}).setdefault(entry["bits"], []).append(name)
    said = (
        f"Small networks that {len(tools)} tools wrote (`scripts/exporters.py`), each compared with its own runtime "
        "over random inputs. All are read, and compile with `--float` where they are float."
    )
    rows = []
    for (tool, version), found in sorted(tools.items()):
        files = "; ".join(f"{listed(names)}: {bits}" for bits, names in found.items())
        rows.append(f"| {tool} | {version.rsplit(' ', 1)[-1]} | {files} |")
    return ["## Exporters", "", said, "", "| tool | version | files beside their runtime |", "|---|---|---|", *rows, ""]


def page() -> str:
    """The whole page."""
    lines = [
        "# What is supported",
        "",
        "Written by `python scripts/support_tables.py` from the declarations in the code. Do not edit.",
        "",
        "An engine takes a layer that matches one of its patterns, the first preferred, within the limits with the "
        "numbers beside it. `*` marks an operand known at compile time, `[...]` an operator that may be absent. "
        "`dovetail explain MODEL --target TARGET` prints the limits that a layer fails.",
        "",
        "An operator that is read runs in a quantised network, or in a float one with `--float`.",
        "",
    ]
    lines += target_lines([load_target(name) for name in BUILT_IN])
    lines += part_lines()
    return "\n".join([*lines, *core_lines(), *keras_lines(), *exporter_lines()]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
