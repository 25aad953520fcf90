"""What `dovetail run`, `targets` and `zoo` do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.console import note, output, progress, say
from dovetail.errors import BuildError

if TYPE_CHECKING:
    from dovetail.board import Board

_NEEDED = (
    "dovetail", "entry", "inputs", "layers", "memory", "model", "model_prefix", "outputs", "policy", "sources",
    "uses_float", "work",
)  # fmt: skip
"""What a run needs to know of a build."""


@dataclass(frozen=True)
class RunOrder:
    """The arguments of the command; see `dovetail run --help`."""

    folder: Path
    simulator: str | None
    board: Board | None
    inputs: Path | None
    outputs: Path | None
    json_file: Path | None
    target: str | None
    waves: Path | None
    wave_cycles: int


def run_folder(order: RunOrder) -> None:
    """Run a build, print the report and write what is asked for; raises DovetailError."""
    with progress("starting") as show:
        from dovetail.cli.arrays import read_inputs, seeded_inputs, write_file, write_outputs
        from dovetail.report import make_report, print_report
        from dovetail.run import Waves, default_simulator, open_build, run_build
        from dovetail.targets import load_target

        build = open_build(order.folder, load_target(order.target) if order.target else None)
        missing = [key for key in _NEEDED if key not in build.manifest]
        if missing:
            raise BuildError(f"the build does not say its {missing[0]}", where=str(order.folder),
                             hint="compile the model again")  # fmt: skip
        ports = build.manifest["inputs"]
        inputs, batched = read_inputs(order.inputs, ports) if order.inputs else ([seeded_inputs(ports)], False)
        board = order.board
        where = board.where if board else f"the {order.simulator or default_simulator(build.target)}"
        show(f"compiling and running {len(inputs)} inference{'s' if len(inputs) > 1 else ''} on {where}")
        waves = Waves(order.waves, order.wave_cycles) if order.waves else None
        result = run_build(build, order.simulator, inputs, waves=waves, board=board)
        report = make_report(result)
    if order.inputs is None:
        note("no --input: the inputs are random numbers with seed 0")
    if order.outputs is not None:
        write_outputs(order.outputs, result.outputs, batched)
    if order.json_file is not None:
        write_file(order.json_file, (json.dumps(report.to_json(), indent=2) + "\n").encode())
    print_report(report, output())


def list_targets() -> None:
    """Print the targets Dovetail comes with."""
    from dovetail.targets import BUILT_IN, load_target

    width = max(map(len, BUILT_IN))
    for name in BUILT_IN:
        target = load_target(name)
        say(f"{name:{width}} {target.sentence}")
        for index, policy in enumerate(target.policies):
            say(f"{'':{width}} --requant {policy.name}{' (default)' if index == 0 else ''}: {policy.sentence}")


def write_zoo(
    name: str | None, path: Path | None, real: bool = False, calibration: Path | None = None, test: Path | None = None
) -> None:
    """Write a model of the zoo and data for it, or list its names; raises DovetailError."""
    from dovetail import zoo
    from dovetail.cli.arrays import write_file, write_outputs

    if name is None:
        for known in zoo.names():
            say(known)
        return
    path = path or Path(f"{name}.onnx")
    with progress(f"making {name}"):
        content = zoo.build_float(name) if real else zoo.build(name)
        samples = zoo.calibration(name) if calibration else None
        held_back = zoo.held_back(name) if test else None
    write_file(path, content)
    say(f"{path}: {len(content):,} bytes")
    if calibration is not None and samples is not None:
        write_outputs(calibration, [{"input": samples}], batched=False)
        say(f"{calibration}: {len(samples)} samples")
    if test is not None and held_back is not None:
        write_outputs(test, [{"input": held_back[0], "labels": held_back[1]}], batched=False)
        say(f"{test}: {len(held_back[1])} labelled samples")
