"""Tables of docs/figures about language models in int8, cycles a token and where they go: the story model of
../shared/models/lm, and a decoder of the shape for which Deeploy's authors publish figures.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from decoder import write_decoder
from tables import Rows, run

from dovetail.cli.main import main
from dovetail.codegen.emit import write_project
from dovetail.codegen.plan_file import read_plan
from dovetail.compile import Options, compile_model
from dovetail.ir.graph import evaluate_all
from dovetail.ir.types import Array
from dovetail.report import make_report, windows
from dovetail.run import open_build, run_build
from dovetail.target.description import Target, with_cores
from dovetail.targets import load_target

TARGETS = ("riscv", "cortex_m4", "riscv_xpulp", "ne16")
PLACES = 256
KINDS = {
    "attention": {"FixedAttention", "AttentionWeights", "BitProduct", "SpreadBits", "AttentionEnd"},
    "rows of caches": {"WriteRow", "WriteBits"},
    "dense layers": {"FullyConnected", "Conv2d"},
    "normalisation": {"FixedStandard"},
    "tables of tokens and places, mask": {"Gather", "Compare"},
}
"""Part of the network -> operators that make a layer one of it; an earlier part goes before a later one."""
REST = "rotations, products and sums beside layers"


def language_tables(models: Path) -> dict[str, Rows]:
    """Cycles a token of one story by target, and by part of the network.

    Args:
        models: folder of the export and its stories.

    Raises:
        RuntimeError: the firmware differs from the integer graph.
    """
    stories = np.load(models / "stories260K.ref.npz")
    rows: list[list[object]] = []
    parts: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        calibration = [_steps(stories[f"story_{number}"]) for number in range(8)]
        model = _quantised(models / "stories260K_torch.onnx", calibration, Path(folder))
        for name in TARGETS:
            steps = _measured(model, load_target(name), _steps(stories["story_8"]), Path(folder) / name)
            cycles, found = [step.cycles for step in steps], Counter[str]()
            for step in steps:
                for (_, kinds), spent in step.layers.items():
                    found[_part(kinds)] += spent
            parts[name] = {part: spent / PLACES for part, spent in found.items()}
            busy = sum(step.busy["ne16"] for step in steps) // PLACES
            rows.append([name, round(np.mean(cycles)), cycles[1], cycles[-1], busy or ""])
    names = (*KINDS, REST)
    shares = [[name, *(round(parts[target].get(name, 0)) for target in TARGETS)] for name in names]
    head = ["target", "mean of all places", "place 1", f"place {PLACES - 1}", "engine busy, mean"]
    return {"language": [head, *rows], "language_parts": [["part", *TARGETS], *shares]}


def _steps(story: Array) -> dict[str, Array]:
    """The inputs of the steps of a story, [steps, 1]."""
    return {"token": story[:PLACES, None].astype(np.int64), "position": np.arange(PLACES)[:, None]}


DECODER = {"layers": 8, "width": 64, "heads": 16, "hidden": 256, "places": 128, "tokens": 512}
"""The published shape; how many places and tokens is ours."""


def decoder_table() -> dict[str, Rows]:
    """Cycles of the last place by operator, on NE16 with its core, with eight, and with eight of more instructions.

    Raises:
        RuntimeError: the firmware differs from the integer graph.
    """
    target, places = load_target("ne16"), DECODER["places"]
    memories = tuple(replace(memory, size=2 << 20) if memory.name == "L2" else memory for memory in target.memories)
    target = replace(target, memories=memories)
    several = replace(target, core=load_target("riscv_xpulp").core)
    machines = (target, with_cores(target, 8), with_cores(several, 8))
    tokens = np.random.default_rng(1).integers(DECODER["tokens"], size=(3, places, 1, 1))
    texts = [{"token": one, "position": np.arange(places, dtype=np.int32).reshape(-1, 1, 1)} for one in tokens]
    steps = {name: column[[0, -1]] for name, column in texts[2].items()}
    with tempfile.TemporaryDirectory() as folder:
        write_decoder(Path(folder) / "decoder.onnx", **DECODER)
        model = _quantised(Path(folder) / "decoder.onnx", texts[:2], Path(folder))
        runs = [_measured(model, one, steps, Path(folder) / str(at))[-1] for at, one in enumerate(machines)]
    rows = [["all", "", *(run.cycles for run in runs)]]
    rows += [["busy", name, *(run.busy[name] for run in runs)] for name in ("core", "ne16", "dma")]
    layers = sorted({key for run in runs for key in run.layers}, key=lambda key: -runs[0].layers[key])
    rows += [[unit, ", ".join(kinds), *(run.layers[unit, kinds] for run in runs)] for unit, kinds in layers]
    return {"decoder": [["unit", "operators", "one RV32IMC core", "eight RV32IMC cores", "eight xpulp cores"], *rows]}


def _quantised(export: Path, steps: Sequence[Mapping[str, Array]], folder: Path) -> Path:
    """The export, quantised with the inputs of sequences."""
    np.savez(folder / "data.npz", **{name: np.stack([one[name] for one in steps]) for name in steps[0]})
    made = folder / "story.onnx"
    try:
        main(["quantize", str(export), "--data", str(folder / "data.npz"), "--target", "riscv", "-o", str(made)])
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{export.name} was not quantised") from None
    return made


@dataclass(frozen=True)
class _Step:
    """Cycles of a step: all, those of layers by unit and operators, and those in which a unit is busy."""

    cycles: int
    layers: Counter[tuple[str, tuple[str, ...]]]
    busy: Counter[str]


def _measured(model: Path, target: Target, columns: Mapping[str, Array], folder: Path) -> list[_Step]:
    """The cycles of each step of a sequence."""
    compiled = compile_model(model, target, Options())
    write_project(compiled.project, folder)
    count = min(map(len, columns.values()))
    steps = [{name: column[at] for name, column in columns.items()} for at in range(count)]
    result = run_build(open_build(folder, target), "iss", steps)
    for outputs, wanted in zip(result.outputs, evaluate_all(compiled.graph, steps), strict=True):
        if not np.array_equal(outputs["logits"], wanted["logits"]):
            raise RuntimeError(f"{model.name} on {target.name}: the firmware differs from the integer graph")
    plan = read_plan(folder, len(result.build.manifest.layers))["layers"]
    units, found = [layer.engine for layer in make_report(result).layers], list[_Step]()
    for one in result.simulation.inferences:
        busy = Counter({unit: sum(job.end - job.start for job in jobs) for unit, jobs in one.activities.items()})
        layers = Counter[tuple[str, tuple[str, ...]]]()
        for layer, start, end in windows(one):
            layers[units[layer], tuple(plan[layer]["kinds"])] += end - start
        found.append(_Step(one.total_cycles or 0, layers, busy + Counter({"core": one.core_cycles or 0})))
    return found


def _part(kinds: Sequence[str]) -> str:
    """The part of the network that a layer of such operators belongs to."""
    return next((part for part, names in KINDS.items() if names & set(kinds)), REST)


if __name__ == "__main__":
    run("Cycles of a decoder with random weights.", "scripts/language_tables.py", {"decoder": decoder_table})
