"""Tables of docs/figures about the story model of ../shared/models/lm in int8: cycles a token, and where they go."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tables import Rows

from dovetail.cli.main import main
from dovetail.codegen.emit import write_project
from dovetail.codegen.plan_file import PlanLayer, read_plan
from dovetail.compile import Options, compile_model
from dovetail.ir.graph import evaluate_all
from dovetail.ir.types import Array
from dovetail.report import windows
from dovetail.run import open_build, run_build
from dovetail.targets import load_target

TARGETS = ("riscv", "cortex_m4", "riscv_xpulp", "ne16")
PLACES = 256
KINDS = {
    "attention": {"FixedAttention", "AttentionWeights", "BitProduct", "ToBitPlanes", "AttentionEnd"},
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
        model = _quantised(models / "stories260K_torch.onnx", stories, Path(folder))
        for target in TARGETS:
            cycles, parts[target], busy = _measured(model, target, stories["story_8"], Path(folder) / target)
            rows.append([target, round(np.mean(cycles)), cycles[1], cycles[-1], busy or ""])
    names = (*KINDS, REST)
    shares = [[name, *(round(parts[target].get(name, 0)) for target in TARGETS)] for name in names]
    head = ["target", "mean of all places", "place 1", f"place {PLACES - 1}", "engine busy, mean"]
    return {"language": [head, *rows], "language_parts": [["part", *TARGETS], *shares]}


def _steps(story: Array) -> dict[str, Array]:
    """The inputs of the steps of a story, [steps, 1]."""
    return {"token": story[:PLACES, None].astype(np.int64), "position": np.arange(PLACES)[:, None]}


def _quantised(export: Path, stories: Mapping[str, Array], folder: Path) -> Path:
    """The export, quantised with stories 0 to 7."""
    steps = [_steps(stories[f"story_{number}"]) for number in range(8)]
    np.savez(folder / "data.npz", **{name: np.stack([one[name] for one in steps]) for name in steps[0]})
    made = folder / "story.onnx"
    try:
        main(["quantize", str(export), "--data", str(folder / "data.npz"), "--target", "riscv", "-o", str(made)])
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{export.name} was not quantised") from None
    return made


def _measured(model: Path, name: str, story: Array, folder: Path) -> tuple[list[int], dict[str, float], int]:
    """Cycles of each step, the mean of each part of the network, and the mean in which an engine is busy."""
    target = load_target(name)
    compiled = compile_model(model, target, Options())
    write_project(compiled.project, folder)
    columns = _steps(story)
    steps = [{name: column[at] for name, column in columns.items()} for at in range(PLACES)]
    result = run_build(open_build(folder, target), "iss", steps)
    for outputs, wanted in zip(result.outputs, evaluate_all(compiled.graph, steps), strict=True):
        if not np.array_equal(outputs["logits"], wanted["logits"]):
            raise RuntimeError(f"{model.name} on {name}: the firmware differs from the integer graph")
    layers = read_plan(folder, len(result.build.manifest.layers))["layers"]
    inferences, found = result.simulation.inferences, Counter[str]()
    for inference in inferences:
        for layer, start, end in windows(inference):
            found[_part(layers[layer])] += end - start
    engines = [engine.name for engine in target.engines]
    jobs = [job for one in inferences for engine in engines for job in one.activities.get(engine, ())]
    busy = sum(job.end - job.start for job in jobs) // PLACES
    return [one.total_cycles or 0 for one in inferences], {part: n / PLACES for part, n in found.items()}, busy


def _part(layer: PlanLayer) -> str:
    """The part of the network that a layer belongs to."""
    return next((part for part, kinds in KINDS.items() if kinds & set(layer["kinds"])), REST)
