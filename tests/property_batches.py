"""Many compiled models in one C file, so that a test of thousands pays for few compilations.

Each model goes the whole way by itself, from its file to emitted C under its own prefix. Only then the texts are put
one after another, the shared helper functions once, behind an entry point that runs them all: a project `run_build`
takes.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.emit.network import model_source
from dovetail.codegen.emit.source import constants_source, header_source
from dovetail.codegen.manifest import MANIFEST
from dovetail.compile import Compiled, Options, compile_graph, prepare
from dovetail.errors import DovetailError
from dovetail.folders import write_files
from dovetail.ir.types import Array
from dovetail.kernels import helper_source
from dovetail.run import open_build, run_build
from dovetail.target.description import Target

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no host C compiler `cc`")

ENTRY = "batch"
"""Prefix of the joined project's names."""


Choose = Callable[[int, int], int]
"""Chooses an integer, the bounds included."""


class Draw:
    """Random choices, the same ones for the same name; integers may be chosen by another, which can shrink them."""

    def __init__(self, name: str, integers: Choose | None = None) -> None:
        self.rng = np.random.default_rng(list(name.encode()))
        self._integers = integers

    def number(self, low: int, high: int) -> int:
        """An integer, the bounds included."""
        return self._integers(low, high) if self._integers else int(self.rng.integers(low, high + 1))

    def one_of(self, *options: Any) -> Any:
        """One of the options."""
        return options[self.number(0, len(options) - 1)]

    def often(self, chance: float) -> bool:
        """True with this chance."""
        return self.number(0, 99) < 100 * chance


@dataclass(frozen=True)
class Case:
    """A model file, sets of inputs, and what an oracle computes from them."""

    name: str
    """Family and seed, from which the case can be made again."""
    file: bytes
    suffix: str
    """Ending of the file's name."""
    text: str
    """The model in words."""
    feeds: Sequence[Sequence[Array]]
    """Sets of inputs, in the model's order."""
    wanted: Sequence[Sequence[Array]]
    """For each set the outputs, in the model's order."""
    doubtful: Sequence[Sequence[Array]] = ()
    """For each set and output the elements (bool) that may be off, by one or `near`, where the oracle is not exact."""
    options: Options = field(default_factory=Options)
    near: int = 1
    """How far the doubtful ones may be off."""


@dataclass(frozen=True)
class Outcome:
    """What became of a batch."""

    compared: int
    """Models compiled, run and compared."""
    elements: int
    """Elements compared."""
    doubtful: int
    """Elements that may be off by one."""
    off: int
    """Elements that are."""
    saturated: float
    """Share of the elements at the bounds of their type: of these a wrong one would often not show."""
    refused: Mapping[str, int]
    """How many models were refused, by sentence."""


def compiled(case: Case, prefix: str, target: Target, folder: Path) -> Compiled:
    """The case through every stage, its file in `folder`; raises DovetailError where it is refused."""
    path = folder / f"{prefix}{case.suffix}"
    path.write_bytes(case.file)
    graph = prepare(path, target, case.options)
    return compile_graph(graph, target, case.options, interpret=False)


def run_batch(cases: Sequence[Case], target: Target, simulator: str, folder: Path) -> Outcome:
    """Compile, run and compare; raises AssertionError that names every case that differs.

    Args:
        cases: with equally many sets of inputs each.
        folder: an empty folder to work in, made where it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept: list[tuple[Case, Compiled]] = []
    refused: Counter[str] = Counter()
    for number, case in enumerate(cases):
        try:
            kept.append((case, compiled(case, f"c{number}", target, folder)))
        except DovetailError as error:
            refused[str(error.what)] += 1
        except Exception as error:
            raise AssertionError(f"{case.name} breaks the compiler: {error!r}\n{case.text}") from error
    results = run_joined(kept, target, simulator, folder)
    failures = [text for (case, _), found in zip(kept, results, strict=True) if (text := difference(case, found))]
    wanted = [array for case, _ in kept for outputs in case.wanted for array in outputs]
    got = [array for found in results for outputs in found for array in outputs]
    elements = sum(array.size for array in wanted)
    doubtful = sum(int(array.sum()) for case, _ in kept for outputs in case.doubtful for array in outputs)
    off = 0 if failures else sum(int((a != b).sum()) for a, b in zip(got, wanted, strict=True))
    assert not failures, f"{len(failures)} of {len(kept)} models differ:\n" + "\n".join(failures[:8])
    limits = [(array, np.iinfo(array.dtype)) for array in wanted if array.dtype != np.bool_]
    bounds = sum(int(np.isin(array, (limit.min, limit.max)).sum()) for array, limit in limits)
    return Outcome(len(kept), elements, doubtful, off, bounds / max(elements, 1), refused)


def difference(case: Case, found: Sequence[Sequence[Array]]) -> str | None:
    """What differs from the oracle first, in words; None where nothing does."""
    for at, (outputs, wanted) in enumerate(zip(found, case.wanted, strict=True)):
        for place, (array, expected) in enumerate(zip(outputs, wanted, strict=True)):
            kinds = [f"{one.dtype}{one.shape}" for one in (array, expected)]
            if kinds[0] != kinds[1]:
                return f"{case.name}: output {place} is {kinds[0]}, expected {kinds[1]}\n    {case.text}"
            wrong = array != expected
            if case.doubtful:
                near = np.abs(array.astype(np.int64) - expected) <= case.near
                wrong &= ~(case.doubtful[at][place] & near)
            if wrong.any():
                first = tuple(int(index) for index in np.argwhere(wrong)[0])
                return (
                    f"{case.name}: output {place} of set {at} differs in {int(wrong.sum())} of {wrong.size} elements, "
                    f"first at {first}: expected {expected[first]}, got {array[first]}\n    {case.text}"
                )
    return None


def run_joined(
    kept: Sequence[tuple[Case, Compiled]], target: Target, simulator: str, folder: Path
) -> list[list[list[Array]]]:
    """For each case and set of inputs the outputs, from one project with all the cases' C."""
    if not kept:
        return []
    projects = [made for _, made in kept]
    manifests = [json.loads(made.project.files[MANIFEST]) for made in projects]
    write_files({name: text.encode() for name, text in joined(projects, manifests).items()}, folder / "project")
    build = open_build(folder / "project", target)
    feeds = []
    for at in range(len(kept[0][0].feeds)):
        feeds.append(
            {
                _port(number, port["name"]): array
                for number, ((case, _), manifest) in enumerate(zip(kept, manifests, strict=True))
                for port, array in zip(manifest["inputs"], case.feeds[at], strict=True)
            }
        )
    runs = run_build(build, simulator, feeds, folder / "cache").outputs
    return [
        [[outputs[_port(number, port["name"])] for port in manifest["outputs"]] for outputs in runs]
        for number, manifest in enumerate(manifests)
    ]


def _port(number: int, name: str) -> str:
    return f"{number}: {name}"


def joined(projects: Sequence[Compiled], manifests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The files of one project that runs all of them, one after another."""
    first = projects[0].project.files
    units = [made.unit for made in projects]
    functions = [kernel for unit in units for kernel in unit.kernels]
    parts = ['#include "batch.h"', '#include "dovetail_rt.h"', '#include "copy.h"' if _copies(projects) else ""]
    workers = units[0].target.workers
    parts += ['#include "cores.h"'] if workers else []
    needed = dict.fromkeys(name for kernel in functions for name in kernel.helpers)
    parts.append(helper_source(needed, units[0].target.core.functions))
    parts += dict.fromkeys(text for kernel in functions for text in kernel.declarations)
    for made in projects:
        blocks = [kernel.block.definition() for kernel in made.unit.kernels if kernel.block]
        parts += [*dict.fromkeys(blocks), _without_includes(constants_source(made.unit)[1])]
        parts += dict.fromkeys(kernel.shared for kernel in made.unit.kernels)
        parts += [kernel.source for kernel in made.unit.kernels]
        layers = list(dict.fromkeys(region.name for region in made.regions))
        layers += [f"{layer}_on_core{core}" for layer in layers for core in range(1, len(workers) + 1)]
        parts += [f"#define {layer} {made.unit.model}_{layer}_function" for layer in layers]
        parts.append(_without_includes(model_source(made.unit)))
        parts += [f"#undef {layer}" for layer in layers]
    calls = "\n".join(f"    {unit.model}_run();" for unit in units)
    parts.append(f"void {ENTRY}_run(void)\n{{\n{calls}\n}}\n")
    kept = {name: text for made in projects for name, text in made.project.files.items() if name.startswith("runtime/")}
    sources = {kind: _sources(manifests, kind) for kind in ("host", "target")}
    ports = {
        kind: [
            {**port, "name": _port(number, port["name"])}
            for number, manifest in enumerate(manifests)
            for port in manifest[kind]
        ]
        for kind in ("inputs", "outputs")
    }
    uses_float = any(manifest["uses_float"] for manifest in manifests)
    described = {
        **manifests[0],
        **ports,
        "sources": sources,
        "uses_float": uses_float,
        "entry": f"{ENTRY}_run",
        "model_prefix": ENTRY,
    }
    header = "\n".join(header_source(unit, "0") for unit in units)
    return {
        **kept,
        "link.ld": first["link.ld"],
        f"src/{ENTRY}.h": f"{header}\nvoid {ENTRY}_run(void);\n",
        f"src/{ENTRY}.c": "\n".join(parts),
        MANIFEST: json.dumps(described),
    }


def _copies(projects: Sequence[Compiled]) -> bool:
    return any("runtime/copy.h" in made.project.files for made in projects)


def _without_includes(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#include"))


def _sources(manifests: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """The joined file, and what of the runtime any of the projects needs."""
    runtime = [name for manifest in manifests for name in manifest["sources"][kind] if name.startswith("runtime/")]
    return [f"src/{ENTRY}.c", *dict.fromkeys(runtime)]
