"""Writes docs/support.md and its tables in docs/figures, from the code's own declarations: what engines take, and what
Dovetail reads."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "support.md"
sys.path.insert(0, str(REPOSITORY))

from tables import FIGURES, Rows, read, write  # noqa: E402

from dovetail.ir.operators.base import Pointwise  # noqa: E402
from dovetail.kernels.registry import FAMILIES, RULES  # noqa: E402
from dovetail.operators import installed_operators  # noqa: E402
from dovetail.read import keras, onnx, tflite  # noqa: E402
from dovetail.read.keras import operations  # noqa: E402
from dovetail.target import Target  # noqa: E402
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


def numbered(target: Target) -> dict[str, int]:
    """The limits of a target's engines with their numbers, the most frequent first."""
    offloads = (offload for engine in target.engines for offload in engine.offloads)
    sentences = ({constraint.sentence: None for constraint in offload.constraints} for offload in offloads)
    count = Counter(sentence for some in sentences for sentence in some)
    return {sentence: number for number, sentence in enumerate(sorted(count, key=lambda one: -count[one]), 1)}


def engine_lines(target: Target) -> list[str]:
    """The names of a target's patterns, those with equal limits together, and the table of its limits."""
    rows: dict[str, list[str]] = {}
    known = numbered(target)
    for engine in target.engines:
        of = f"`{engine.name}` " if len(target.engines) > 1 else ""
        for offload in engine.offloads:
            limits = ranges(sorted({known[constraint.sentence] for constraint in offload.constraints}))
            rows.setdefault(limits, []).append(of + offload.name)
    taken = (f"- {'; '.join(names)}: {limits}" for limits, names in rows.items())
    return [f"### `{target.name}`", "", *taken, "", *included(f"limits_{target.name}")]


def limits(target: Target) -> Rows:
    """The table of a target's limits."""
    return [["number", "limit"], *([number, sentence] for sentence, number in numbered(target).items())]


def patterns() -> Rows:
    """The table of every pattern."""
    found = [
        [target.name, engine.name, offload.name, f"`{pattern_text(offload.pattern)}`"]
        for target in map(load_target, BUILT_IN)
        for engine in target.engines
        for offload in engine.offloads
    ]
    return [["target", "engine", "pattern", "operators"], *found]


def policies(target: Target) -> str:
    """What `--requant` may be for a target; nothing where the core's way is the only one."""
    only = len(target.policies) == 1 and not target.engines
    return "" if only else "".join(f"; `{policy.name}`: {policy.sentence}" for policy in target.policies)


def target_lines(targets: Sequence[Target]) -> list[str]:
    """A list of targets with their memories and policies, and then the engines."""
    lines = ["## Targets", "", "Each with its `--requant` policies, the default first:", ""]
    lines += [f"- `{target.name}`: {target.sentence}{policies(target)}" for target in targets]
    lines += ["", "Every core requantises as TensorFlow Lite Micro does.", ""]
    return [
        *lines,
        "## Engines",
        "",
        ENGINES_TEXT,
        "",
        *(line for one in targets if one.engines for line in engine_lines(one)),
    ]


def listed(names: Iterable[str]) -> str:
    """Names in alphabetical order, as code."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def operators() -> Rows:
    """The table of operators: kernels of the core, and what the frontends read."""
    pointwise = {*RULES, *(kind for kind in Pointwise.__subclasses__() if "c_template" in vars(kind))}
    versions = ", ".join(f"`{name}` {importer.version}" for name, importer in sorted(tflite.IMPORTERS.items()))
    custom = [kind.custom_code for kind in installed_operators() if kind.custom_code]
    standard = [name for domain, name in onnx.IMPORTERS if domain == ""]
    standard += [kind.op_type for kind in installed_operators() if kind.op_type and not kind.domain]
    layers = {*keras.LAYERS, "InputLayer", "Sequential", "Functional", "TimeDistributed"} - {"TFOpLambda"}
    rows = [
        ["kernels of the core, each with any pointwise operators after it", listed(k.__name__ for k in FAMILIES)],
        ["pointwise operators, alone or after a kernel", listed(kind.__name__ for kind in pointwise)],
        ["TFLite, each with its newest version", versions],
        ["TFLite, `CUSTOM`", listed(custom)],
        ["ONNX", listed(standard)],
    ]
    for domain in sorted({domain for domain, _ in onnx.IMPORTERS} - {""}):
        rows.append([f"ONNX, domain `{domain}`", listed(name for d, name in onnx.IMPORTERS if d == domain)])
    rows += [
        ["Keras layers (`.keras`, and `.h5` of Keras 2 and 3)", listed(layers)],
        ["Keras activations", listed(operations.ACTIVATIONS)],
        ["`keras.ops`", listed(operations.OPERATIONS)],
        ["TensorFlow's functions in models of Keras 2", listed(operations.TENSORFLOW)],
    ]
    return [["form", "operators"], *rows]


def parts() -> Rows:
    """The table of microcontrollers, and where what is said of their memories is from."""
    head = ["--part", "part", "target with its core", "flash", "RAM", "reads of the flash", "documents, clock"]
    found = [
        [name, part.name, part.core, _memory(*part.flash), _memory(*part.ram), _reads(part), documents(part)]
        for name, part in PARTS.items()
    ]
    return [head, *found]


def documents(part: Microcontroller) -> str:
    """Sources of a part, and its clock."""
    return f"{part.source}, {part.clock} MHz"


def _memory(base: int, size: int) -> str:
    return f"{size >> 10:,} KiB at {base:#x}"


def _reads(part: Microcontroller) -> str:
    """How long reads of a part's flash take."""
    if not part.reads.get("waits"):
        return ""
    caches = (f"{' and '.join(c.holds)}: {c.size:,} bytes, {c.ways or 'all'} ways" for c in part.reads["caches"])
    ahead = ("reads ahead",) if part.reads.get("prefetch") else ()
    return "; ".join((f"{part.reads['waits']}, {part.reads['width']} bytes", *ahead, *caches))


def exporters() -> Rows:
    """The table of files of today's exporters, and how near the graph of each is to its own runtime."""
    entries = json.loads((REPOSITORY / "tests" / "data" / "exporters" / "exporters.json").read_text())
    tools: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, entry in sorted(entries.items()):
        tools.setdefault((entry["tool"], entry["version"]), {}).setdefault(entry["bits"], []).append(name)
    rows = []
    for (tool, version), found in sorted(tools.items()):
        files = "; ".join(f"{', '.join(sorted(names))}: {bits}" for bits, names in found.items())
        rows.append([tool, version.rsplit(" ", 1)[-1], files])
    return [["tool", "version", "files beside their runtime"], *rows]


def included(name: str) -> list[str]:
    """Lines that include a table of docs/figures."""
    return [f"[figures/{name}.csv](figures/{name}.csv)", "", f"```{{figures}} {name}", "```", ""]


TABLES = {"operators": operators, "patterns": patterns, "parts": parts, "exporters": exporters}
"""Tables of docs/figures that the page includes."""
OPERATORS_TEXT = (
    "Every operator that is read runs in a quantised network, or in a float network with `--float`. "
    "[You can add others](own_operators.md)."
)
ENGINES_TEXT = (
    "An engine takes a layer that matches one of its patterns, the first preferred. Beside each are the numbers "
    "of their limits."
)
PARTS_TEXT = (
    "Reads of the flash: the cycles that a core waits for so many bytes, and the caches. It is empty if the core does "
    "not wait, or if no document says how long (`dovetail/target/parts.toml`)."
)
EXPORTERS_TEXT = (
    "Small networks by these tools (`scripts/exporters.py`), each compared with its own runtime over random inputs. "
    "Dovetail reads all of them; float networks compile with `--float`."
)


def page() -> str:
    """The whole page."""
    lines = [
        "# What is supported",
        "",
        "Written by `python scripts/support_tables.py` from the declarations in the code. Do not edit.",
        "",
        "Example: `dovetail explain MODEL --target ne16` names the engine of each layer, or the limits that it fails.",
        "",
    ]
    lines += ["## Operators", "", OPERATORS_TEXT, "", *included("operators")]
    lines += target_lines([load_target(name) for name in BUILT_IN])
    lines += ["### Patterns", "", "`*` marks an operand known at compile time, `[...]` an optional operator.", ""]
    lines += included("patterns")
    lines += ["## Microcontrollers", "", PARTS_TEXT, "", *included("parts")]
    lines += ["## Exporters", "", EXPORTERS_TEXT, "", *included("exporters")]
    return "\n".join(lines).rstrip() + "\n"


def outdated() -> dict[str, Rows]:
    """The tables whose files are not what the code says today."""
    tables = {name: make() for name, make in TABLES.items()}
    tables |= {f"limits_{one.name}": limits(one) for one in map(load_target, BUILT_IN) if one.engines}
    made = {name: [[str(cell) for cell in row] for row in rows] for name, rows in tables.items()}
    paths = {name: FIGURES / f"{name}.csv" for name in made}
    return {name: rows for name, rows in made.items() if not paths[name].is_file() or read(paths[name]) != rows}


if __name__ == "__main__":
    PAGE.write_text(page())
    write(outdated(), "python scripts/support_tables.py")
