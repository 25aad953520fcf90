"""Writes docs/support.md: what each target's engines take and what Dovetail reads, from the code's own declarations."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
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


def engine_lines(engine: Engine) -> list[str]:
    """Every offload of an engine with its limits."""
    lines = [f"### Engine `{engine.name}`", "", "The preferred first.", ""]
    for offload in engine.offloads:
        lines += [f"#### {offload.name}", "", f"`{pattern_text(offload.pattern)}`", ""]
        lines += [f"- {constraint.sentence}" for constraint in offload.constraints]
        lines.append("")
    return lines


def target_lines(target: Target) -> list[str]:
    """A target with its memories, policies and engines."""
    lines = [f"## Target `{target.name}`", "", f"{target.sentence}.", "", "| memory | bytes |", "|---|---:|"]
    lines += [f"| {memory.name} | {memory.size:,} |" for memory in target.memories]
    lines += ["", "| `--requant` | meaning |", "|---|---|"]
    for position, policy in enumerate(target.policies):
        lines.append(f"| `{policy.name}`{' (default)' if position == 0 else ''} | {policy.sentence} |")
    lines.append("")
    for engine in target.engines:
        lines += engine_lines(engine)
    return lines if target.engines else [*lines, "No engine: the core computes everything.", ""]


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
        "One kernel computes one of these, with any pointwise operators behind it:",
        "",
        listed(kind.__name__ for kind in FAMILIES),
        "",
        "Pointwise operators, alone or behind one of the above:",
        "",
        listed(kind.__name__ for kind in {*RULES, *(k for k in Pointwise.__subclasses__() if "c_template" in vars(k))}),
        "",
        "## TFLite operators",
        "",
        "| operator | newest version |",
        "|---|---:|",
    ]
    lines += [f"| `{name}` | {importer.version} |" for name, importer in versions]
    lines += ["", "`CUSTOM` operators ([and those of one's own](own_operators.md)):", ""]
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
    rows = sorted((entry["tool"], entry["version"], name, entry["bits"]) for name, entry in entries.items())
    said = (
        f"Small networks that {len({row[0] for row in rows})} tools wrote (`scripts/exporters.py`), each compared with "
        "its own runtime over random inputs. All are read, and compile with `--float` where they are float."
    )
    head = ["| tool | version | file | beside its runtime |", "|---|---|---|---|"]
    return ["## Exporters", "", said, "", *head, *(f"| {a} | {b} | `{c}` | {d} |" for a, b, c, d in rows), ""]


def page() -> str:
    """The whole page."""
    lines = [
        "# What is supported",
        "",
        "Written by `python scripts/support_tables.py` from the declarations in the code. Do not edit.",
        "",
        "In a pattern, `*` marks an operand known at compile time and `[...]` an operator that may be absent. "
        "Each limit is the sentence `dovetail explain` prints when it fails. Reading an operator is not enough "
        "for a network to run: it must also be quantised, or compiled with `--float`.",
        "",
    ]
    for name in BUILT_IN:
        lines += target_lines(load_target(name))
    lines += part_lines()
    return "\n".join([*lines, *core_lines(), *keras_lines(), *exporter_lines()]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
