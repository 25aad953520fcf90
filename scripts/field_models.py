"""Compiles and runs networks as people have them, compares each with its reference outputs, and prints a table.

    python scripts/field_models.py ../shared/models/field

A folder of models (any depth), each with `<file>.ref.npz` beside it: inputs `in_<i>` and outputs `out_<i>__<runtime>`,
with a leading axis of samples before the network's own shape. Every model is compiled for `riscv` with larger memories
and run in `iss`, in a process of its own with a time limit; what is too slow there runs its other samples as C on this
computer. Results are kept (`--results`), so the command goes on where it was stopped; `--again` starts anew.

A model holds when integers are equal to those of the runtime that counts for its format (TFLite Micro, else TFLite's
reference kernels; ONNX Runtime with precise integer kernels, else what stands in its place), and floats differ by at
most 1e-4 of the largest in the output. Where ONNX Runtime computes quantised layers in float, so that steps may be
rounded otherwise, it is enough that every integer value of the network is at most 1 from what the model says as it is
written (ONNX Runtime without optimisations), computed from ONNX Runtime's own values before it; the table says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tables import Rows, show, write

RUNTIMES = (
    "tflm",
    "builtin_ref",
    "ort_precise",
    "exact",
    "exact_uint8w",
    "ort_all",
    "ort_noopt",
    "qonnx",
    "keras_torch",
)
"""Whose outputs count, the first that is there."""
SUFFIXES = (".tflite", ".onnx", ".keras", ".h5")
MOST_MACS = 200_000_000
"""Multiply-accumulates simulated in `iss` for one model; further samples run on this computer."""
CLOSE = 1e-4
MOST_INSTRUCTIONS, MOST_SECONDS = 400 * 10**9, 3600.0
"""Of a run in `iss`."""
MEMORIES = {"flash.size": 64 << 20, "ram.size": 64 << 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder of models, or one model")
    parser.add_argument("--results", type=Path, default=Path("build/field"), help="folder of a JSON per model")
    parser.add_argument("--only", default="*", help="names of models, as a pattern")
    parser.add_argument("--again", action="store_true", help="measure what is measured already")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one model")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the table to docs/figures")
    parser.add_argument("--one", type=Path, help="measure this model alone, and write its JSON here")
    given = parser.parse_args()
    if given.one:
        given.one.write_text(json.dumps(measure(given.models)))
        return
    given.results.mkdir(parents=True, exist_ok=True)
    models = [
        path for path in sorted(given.models.rglob("*")) if path.suffix in SUFFIXES and _reference(path).is_file()
    ]
    names = {path: path.relative_to(given.models).as_posix() for path in models}
    chosen = [path for path in models if fnmatch(names[path], given.only)]

    def one(path: Path) -> dict[str, Any]:
        kept = given.results / f"{names[path].replace('/', '_')}.json"
        if given.again or not kept.is_file():
            kept.write_text(json.dumps(in_a_process(path, given.timeout)))
            print(f"{names[path]}: {sentence(json.loads(kept.read_text()))}", file=sys.stderr, flush=True)
        return dict(json.loads(kept.read_text()))

    with ThreadPoolExecutor(given.jobs) as pool:
        found = dict(zip((names[path] for path in chosen), pool.map(one, chosen), strict=True))
    show({"field": table(found)})
    held = sum(result["holds"] for result in found.values())
    print(f"{held} of {len(found)} hold.")
    if given.write:
        write({"field": table(found)}, f"python scripts/field_models.py {given.models}")


def in_a_process(path: Path, timeout: float) -> dict[str, Any]:
    """What `measure` finds, or how its process ended instead."""
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, str(path), "--one", str(result)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return {"holds": False, "stage": "time", "message": f"not done after {timeout:g} s"}
        if ended.returncode != 0 or not result.is_file():
            last = ended.stderr.strip().splitlines()[-1:] or [f"status {ended.returncode}"]
            return {"holds": False, "stage": "crash", "message": last[0], "stack": ended.stderr[-3000:]}
        return dict(json.loads(result.read_text()))


def measure(path: Path) -> dict[str, Any]:
    """Compile, run and compare one model; a refusal is its message."""
    from dovetail.codegen.emit.project import write_project
    from dovetail.compile import Options, compile_model
    from dovetail.errors import DovetailError
    from dovetail.fields import changed
    from dovetail.targets import load_target

    reference = np.load(_reference(path))
    start, found = time.monotonic(), {"holds": False, "float": False}
    target = changed(load_target("riscv"), MEMORIES)
    try:
        try:
            compiled = compile_model(path, target, Options())
        except DovetailError as error:
            found |= {"float": True, "refused": f"{error.where}: {error.what}"}
            compiled = compile_model(path, target, Options(allow_float=True))
        found["seconds"] = round(time.monotonic() - start, 1)
        with TemporaryDirectory() as folder:
            write_project(compiled.project, Path(folder) / "build")
            found |= run(Path(folder) / "build", target, reference)
        if not found["holds"] and path.suffix == ".onnx":
            found["steps"] = steps(path, target, reference)
            found["holds"] = found["steps"]["lsb"] <= 1 and found["steps"]["relative"] <= CLOSE
        return found
    except DovetailError as error:
        return found | {"stage": "refused", "message": f"{error.where}: {error.what}", "hint": error.hint}


def run(folder: Path, target: Any, reference: Any) -> dict[str, Any]:
    """Run every sample, and compare."""
    from dovetail.run import Watchdog, open_build, run_build

    build = open_build(folder, target)
    ports = build.manifest.inputs
    samples = len(reference["in_0"])
    inputs = [
        {port.name: reference[f"in_{at}"][k].reshape(port.shape) for at, port in enumerate(ports)}
        for k in range(samples)
    ]
    macs = max(sum(layer.macs for layer in build.manifest.layers), 1)
    simulated = max(1, min(samples, MOST_MACS // macs))
    ran = run_build(build, "iss", inputs[:simulated], watchdog=Watchdog(MOST_INSTRUCTIONS, MOST_SECONDS, folder))
    outputs = list(ran.outputs)
    if simulated < samples:
        outputs += list(run_build(build, "host", inputs).outputs)[simulated:]
    cycles = ran.simulation.inferences[0].total_cycles
    compared = [compare(reference, at, [o[p.name] for o in outputs]) for at, p in enumerate(build.manifest.outputs)]
    holds = all(one["holds"] for one in compared)
    return {"holds": holds, "stage": "ran", "cycles": cycles, "simulated": simulated, "outputs": compared, "macs": macs}


def compare(reference: Any, place: int, outputs: list[Any]) -> dict[str, Any]:
    """An output of all samples against the runtime that counts."""
    runtime = next(name for name in RUNTIMES if f"out_{place}__{name}" in reference)
    wanted, got = reference[f"out_{place}__{runtime}"], np.stack(outputs)
    got = got.reshape(wanted.shape)
    if wanted.dtype.kind != "f":
        difference = int(np.abs(got.astype(np.int64) - wanted.astype(np.int64)).max())
        count = int((got != wanted).sum())
        return {"runtime": runtime, "lsb": difference, "different": count, "of": got.size, "holds": difference == 0}
    finite = np.isfinite(wanted)
    same = np.array_equal(np.where(finite, 0, got), np.where(finite, 0, wanted), equal_nan=True)
    largest = float(np.abs(wanted[finite]).max(initial=0.0)) or 1.0
    relative = float(np.abs(got[finite] - wanted[finite]).max(initial=0.0)) / largest
    return {"runtime": runtime, "relative": relative if same else None, "holds": same and relative <= CLOSE}


def steps(path: Path, target: Any, reference: Any) -> dict[str, Any]:
    """The largest difference of each integer value from ONNX Runtime without optimisations, and of the outputs, each
    computed from ONNX Runtime's values before it."""
    import onnx

    from dovetail.compile import Options, prepare
    from dovetail.ir.onnx_runtime import runtime_session

    graph = prepare(path, target, Options(allow_float=True))
    model = onnx.load(path)
    ends = [output.name for output in model.graph.output]
    inner = [name for node in model.graph.node for name in node.output if name and name not in ends]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in inner)
    session = runtime_session(model, optimised=False)
    names = [entry.name for entry in session.get_outputs()]
    lsb, relative, different, count = 0, 0.0, 0, 0
    for sample in range(len(reference["in_0"])):
        feeds = {name: reference[f"in_{at}"][sample] for at, name in enumerate(graph.given)}
        wanted = dict(zip(names, session.run(None, feeds), strict=True))
        values = {**graph.constants, **feeds}
        for node in graph.nodes:
            got = node.operator.evaluate([values[name] for name in node.inputs])
            values[node.output] = got
            known = wanted.get(node.output)
            if known is None or known.size != got.size:
                continue
            known = min(_arranged(known, got), key=lambda one: np.abs(one - got.astype(np.float64)).sum())
            if got.dtype.kind == "f":
                largest = float(np.abs(known).max()) or 1.0
                relative = max(relative, float(np.abs(got - known).max()) / largest)
            elif known.dtype == got.dtype:
                apart = np.abs(got.astype(np.int64) - known.astype(np.int64))
                lsb, different, count = (
                    max(lsb, int(apart.max())),
                    different + int((apart > 0).sum()),
                    count + apart.size,
                )
                values[node.output] = known
    return {"lsb": lsb, "relative": relative, "different": different, "of": count}


def _arranged(known: Any, like: Any) -> list[Any]:
    """ONNX Runtime's value as this graph may hold it: with its axes in another order."""
    orders = permutations(range(known.ndim)) if known.ndim <= 4 else [range(known.ndim)]
    moved = [np.ascontiguousarray(known.transpose(*order)) for order in orders]
    return [one for one in moved if one.shape == like.shape] or [known.reshape(like.shape)]


def sentence(result: dict[str, Any]) -> str:
    """What became of a model, in a few words."""
    if result["stage"] != "ran":
        return f"{result['stage']}: {result['message']}"
    outputs = result["outputs"]
    integers = [one for one in outputs if "lsb" in one]
    texts = ["equal" if one["holds"] else f"{one['lsb']} LSB in {one['different']} of {one['of']}" for one in integers]
    floats = [one["relative"] for one in outputs if "lsb" not in one]
    texts += ["not finite alike"] if None in floats else [f"{max(floats):.1e}"] if floats else []
    told = ", ".join(dict.fromkeys(texts))
    if "steps" in result:
        one = result["steps"]
        told += f"; each step {one['lsb']} LSB in {one['different']} of {one['of']}"
    return f"{told} against {result['outputs'][0]['runtime']}{'' if result['holds'] else ': DIFFERS'}"


def table(found: dict[str, dict[str, Any]]) -> Rows:
    """The table: model, nearness to its runtime, cycles."""
    rows: list[list[object]] = [["model", "against its runtime", "cycles"]]
    for name, result in found.items():
        rows.append([f"{name}{' (float)' if result.get('float') else ''}", sentence(result), result.get("cycles", "")])
    return rows


def _reference(path: Path) -> Path:
    return path.with_name(f"{path.name}.ref.npz")


if __name__ == "__main__":
    main()
