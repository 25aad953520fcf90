"""Plants the standard faults of ports, one at a time, into copies of bundled ports, and looks who finds them.

    python scripts/port_faults.py [--only PORT[:FAULT]] [--kept FILE] [--write]

Of each: whether the default `dovetail check` finds it, whether its first suspicion is the right one, and whether
`dovetail run` ends with status 1 where an output of a small network changes. Prints the tables of docs/benchmarks.md;
`--write` puts them there, `--kept` goes on where an earlier run ended: a fault on a chip takes a minute of a core. The
faults stand in scripts/port_faults.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "benchmarks.md"
MARKS = "<!-- port faults: python scripts/port_faults.py --write -->", "<!-- end of port faults -->"
PACKAGE = "port_with_a_fault"


@dataclass(frozen=True)
class Fault:
    """Something planted into a port."""

    port: str
    name: str
    edits: tuple[tuple[str, str, str], ...]
    """File of the port, what stands there, what shall stand there."""
    means: str
    """A regular expression for the right suspicion."""
    kin: str = ""
    """What was planted where the port cannot have the fault itself."""


@dataclass(frozen=True)
class Found:
    """What came of a fault."""

    suspicion: str
    """The first; empty where `check` found nothing."""
    right: bool
    """Whether it is the right one."""
    changes: bool
    """Whether an output of the network changes, or it does not run any more."""
    status: int
    """Of `dovetail run`."""
    network: str = ""
    """What the run said."""


def faults() -> list[Fault]:
    """All there are, port by port."""
    table = tomllib.loads((REPOSITORY / "scripts" / "port_faults.toml").read_text())
    return [
        Fault(port, name, tuple((a, b, c) for a, b, c in one["edits"]), one["means"], one.get("kin", ""))
        for port, some in table.items()
        for name, one in some.items()
    ]


def planted(fault: Fault, folder: Path) -> Path:
    """A copy of the port with the fault in it: its target file.

    Raises:
        ValueError: what an edit looks for does not stand there.
    """
    package = folder / PACKAGE
    shutil.copytree(REPOSITORY / "dovetail" / "targets" / fault.port, package)
    for file in (*package.rglob("*.py"), *package.rglob("*.c"), *package.rglob("*.h")):
        file.write_text(file.read_text().replace(f"dovetail.targets.{fault.port}", PACKAGE))
    for name, old, new in fault.edits:
        text = (package / name).read_text()
        if old not in text:
            raise ValueError(f"{fault.port} {fault.name}: {name} has no {old!r}")
        (package / name).write_text(text.replace(old, new))
    return package / "__init__.py"


def network(shifts: bool) -> Any:
    """A small network with all that the ports compute: an integer graph before any policy. `shifts`: of scales that are
    powers of two, and without zero points."""
    from dovetail.ir.operators.arithmetic import Add
    from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
    from dovetail.ir.operators.movement import Reshape
    from dovetail.ir.rewrite import simplify
    from dovetail.quantize import quantize
    from dovetail.tools.check.layers import NUMBERS, SIZES
    from dovetail.tools.check.networks import Network, Real

    numbers = {name: values[0] for name, values in NUMBERS.items()}
    common = SIZES | numbers | {"rows": 12, "columns": 12, "channels": 8, "bottom": 1}
    if shifts:
        common |= {"scales": 1, "per_channel": 0, "input_zero": 0, "output_zero": 0}
    net = Network(common)
    x = net.layer(net.padded(net.input()), Conv2d((1, 1)), (24, 3, 3, 8))
    y = net.layer(net.padded(x), Conv2d((1, 1)), (24, 3, 3, 24))
    x = net.add(Add(), x, y, scale=2 * x.scale)
    x = net.layer(net.padded(x), DepthwiseConv2d((1, 1)), (1, 3, 3, 24))
    uneven = {} if shifts else {"top": 0, "right": 0}
    net.settings = {**common, **uneven, "relu": 1}
    x = net.layer(net.padded(x), Conv2d((2, 2)), (40, 3, 3, 24))
    flat = net.builder.add(Reshape((1, 6 * 6 * 40)), [x.name])
    x = net.layer(Real(flat, x.scale), FullyConnected(), (20, 6 * 6 * 40))
    whole = {node.output: node for node in net.builder.finish([x.name]).nodes}[x.name].inputs[0]
    return quantize(simplify(net.builder.finish([whole])))


def one(fault: Fault) -> Found:
    """Plant a fault and look, in this process."""
    from dovetail.targets import load_target
    from dovetail.tools.check.cases import QUICK
    from dovetail.tools.check.suite import Order, check

    with tempfile.TemporaryDirectory() as folder:
        file = planted(fault, Path(folder))
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(REPOSITORY)])
        target = load_target(str(file))
        findings = check(target, Order(QUICK)).findings
        suspicion = findings[0].suspicions[0] if findings else ""
        right = bool(re.search(fault.means, suspicion)) and bool(suspicion)
        changes, status, said = _run(fault, target, file, Path(folder))
    return Found(suspicion, right, changes, status, said)


def _run(fault: Fault, target: Any, file: Path, folder: Path) -> tuple[bool, int, str]:
    """Whether the network's output changes, the status of `dovetail run`, and what it said."""
    from dovetail.cli.main import main
    from dovetail.codegen.emit.project import write_project
    from dovetail.compile import Options, compile_graph
    from dovetail.errors import DovetailError
    from dovetail.ir.graph import evaluate
    from dovetail.legalize import adapt
    from dovetail.run import default_simulator, open_build, run_build
    from dovetail.tools.arrays import seeded_inputs

    graph = adapt(network(fault.port == "diana"), target.policies[0])
    compiled = compile_graph(graph, target, Options())
    write_project(compiled.project, folder / "build", replace=False)
    build = open_build(folder / "build", target)
    inputs = seeded_inputs(build.manifest["inputs"])
    try:
        result = run_build(build, default_simulator(target), [inputs]).outputs[0]
        meant = evaluate(graph, inputs)
        changes = any(not np.array_equal(result[name], meant[name]) for name in graph.outputs)
    except DovetailError:
        changes = True
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main(["run", str(folder / "build"), "--target", str(file)])
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    return changes, status, lines[-1] if lines else ""


def apart(fault: Fault) -> Found:
    """The same in a process of its own: files of one name and another content are read anew there."""
    command = [sys.executable, __file__, "--one", f"{fault.port}:{fault.name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{fault.port} {fault.name}: {done.stderr}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def table(rows: Mapping[tuple[str, str], tuple[Fault, Found]]) -> Iterator[str]:
    """The tables of the page."""
    ports = list(dict.fromkeys(port for port, _ in rows))
    yield "| port | faults | found by `check` | right suspicion first | change the output | then `run` fails |"
    yield "|---|---:|---:|---:|---:|---:|"
    for port in ports:
        some = [found for (name, _), (_, found) in rows.items() if name == port]
        changing = [found for found in some if found.changes]
        counts = (len(some), sum(bool(f.suspicion) for f in some), sum(f.right for f in some), len(changing))
        yield f"| {port} | {' | '.join(map(str, counts))} | {sum(found.status == 1 for found in changing)} |"
    yield ""
    yield f"| fault | {' | '.join(ports)} |"
    yield f"|---|{'---|' * len(ports)}"
    for name in dict.fromkeys(name for _, name in rows):
        cells = []
        for port in ports:
            fault, found = rows.get((port, name), (None, None))
            if fault is None or found is None:
                cells.append("")
                continue
            mark = "" if found.right else " (not the place)" if found.suspicion else ""
            text = found.suspicion.split(":")[0] if len(found.suspicion) > 60 else found.suspicion or "not found"
            kin = f" [{fault.kin}]" if fault.kin else ""
            cells.append(f"{text}{mark}{'' if found.changes else ' ·'}{kin}")
        yield f"| {name} | {' | '.join(cells)} |"


def _kept(file: Path | None) -> dict[str, Found]:
    """What an earlier run found, by PORT:FAULT."""
    lines = file.read_text().splitlines() if file is not None and file.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {row.pop("fault"): Found(**row) for row in rows}


def main() -> int:
    """The command line; 1 where a fault is not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a port, or PORT:FAULT")
    parser.add_argument("--one", default="", help="plant PORT:FAULT in this process and print JSON")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    parser.add_argument("--kept", type=Path, help="a file of what was found so far, which is added to")
    given = parser.parse_args()
    if given.one:
        found = one(next(fault for fault in faults() if f"{fault.port}:{fault.name}" == given.one))
        print(json.dumps(asdict(found)))
        return 0
    rows: dict[tuple[str, str], tuple[Fault, Found]] = {}
    known = _kept(given.kept)
    for fault in faults():
        if given.only in ("", fault.port, f"{fault.port}:{fault.name}"):
            key = f"{fault.port}:{fault.name}"
            found = known[key] if key in known else apart(fault)
            rows[fault.port, fault.name] = fault, found
            print(f"{fault.port} {fault.name}: {found}", file=sys.stderr, flush=True)
            if given.kept and key not in known:
                with given.kept.open("a") as file:
                    file.write(json.dumps({"fault": key, **asdict(found)}) + "\n")
    text = "\n".join(table(rows))
    print(text)
    if given.write:
        page = PAGE.read_text()
        before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}")
    silent = [found for _, found in rows.values() if not found.suspicion or (found.changes and found.status != 1)]
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
