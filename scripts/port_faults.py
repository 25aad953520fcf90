"""Plants the standard faults of ports, one at a time, into copies of bundled ports, and looks who finds them.

    python scripts/port_faults.py [--only PORT[:FAULT]] [--kept FILE] [--old] [--write]

Of each: whether the default `dovetail check` finds it, whether its first suspicion is the right one, and whether
`dovetail run` ends with status 1 where an output of a small network changes. Prints two tables; `--write` puts them
into docs/figures. Results are kept under a digest of the port, the fault and the package. A run goes on where an
earlier one ended, and tries anew what has changed (all of it takes some 12 minutes of a core). With `--old` it takes
results of earlier revisions, and prints which. The faults are in scripts/port_faults.toml.
"""

from __future__ import annotations

import argparse
import hashlib
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
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from tables import Rows, show, write

from dovetail.files import default_cache

REPOSITORY = Path(__file__).resolve().parents[1]
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

    @property
    def key(self) -> str:
        """Port and fault."""
        return f"{self.port}:{self.name}"

    def named_by(self, found: Found) -> bool:
        """Whether the first suspicion is the right one."""
        return bool(found.suspicion) and bool(re.search(self.means, found.suspicion))


@dataclass(frozen=True)
class Found:
    """What came of a fault."""

    suspicion: str
    """The first; empty where `check` found nothing."""
    changes: bool
    """Whether an output of the network changes, or it does not run any more."""
    status: int
    """Of `dovetail run`."""
    network: str = ""
    """What the run said."""
    digest: str = ""
    """Of all that this depends on."""
    revision: str = ""
    """Of the repository, for people."""


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
    from dovetail.guests.check.layers import NUMBERS, SIZES
    from dovetail.guests.check.networks import CheckNetwork, RealValue
    from dovetail.ir.operators.arithmetic import Add
    from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
    from dovetail.ir.operators.movement import Reshape
    from dovetail.ir.rewrite import simplify
    from dovetail.quantize import quantize

    numbers = {name: values[0] for name, values in NUMBERS.items()}
    common = SIZES | numbers | {"rows": 12, "columns": 12, "channels": 8, "bottom": 1}
    if shifts:
        common |= {"scales": 1, "per_channel": 0, "input_zero": 0, "output_zero": 0}
    net = CheckNetwork(common)
    x = net.layer(net.padded(net.input()), Conv2d((1, 1)), (24, 3, 3, 8))
    y = net.layer(net.padded(x), Conv2d((1, 1)), (24, 3, 3, 24))
    x = net.add(Add(), x, y, scale=2 * x.scale)
    x = net.layer(net.padded(x), DepthwiseConv2d((1, 1)), (1, 3, 3, 24))
    uneven = {} if shifts else {"top": 0, "right": 0}
    net.settings = {**common, **uneven, "relu": 1}
    x = net.layer(net.padded(x), Conv2d((2, 2)), (40, 3, 3, 24))
    flat = net.builder.add(Reshape((1, 6 * 6 * 40)), [x.name])
    x = net.layer(RealValue(flat, x.scale), FullyConnected(), (20, 6 * 6 * 40))
    whole = {node.output: node for node in net.builder.finish([x.name]).nodes}[x.name].inputs[0]
    return quantize(simplify(net.builder.finish([whole])))


def one(fault: Fault) -> Found:
    """Plant a fault and look, in this process."""
    from dovetail.guests.check.cases import QUICK
    from dovetail.guests.check.suite import Order, check
    from dovetail.targets import load_target

    with tempfile.TemporaryDirectory() as folder:
        file = planted(fault, Path(folder))
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(REPOSITORY)])
        target = load_target(str(file))
        findings = check(target, Order(QUICK, first=True)).findings  # whose first is that of the whole check
        suspicion = findings[0].suspicions[0] if findings else ""
        changes, status, said = _run(fault, target, file, Path(folder))
    return Found(suspicion, changes, status, said)


def _run(fault: Fault, target: Any, file: Path, folder: Path) -> tuple[bool, int, str]:
    """Whether the network's output changes, the status of `dovetail run`, and what it said."""
    from dovetail.arrays import seeded_inputs
    from dovetail.cli.main import main
    from dovetail.codegen.emit.project import write_project
    from dovetail.compile import Options, compile_graph
    from dovetail.errors import DovetailError
    from dovetail.ir.graph import evaluate
    from dovetail.legalize import adapt
    from dovetail.run import default_simulator, open_build, run_build

    graph = adapt(network(fault.port == "diana"), target.policies[0])
    compiled = compile_graph(graph, target, Options())
    write_project(compiled.project, folder / "build", replace=False)
    build = open_build(folder / "build", target)
    inputs = seeded_inputs(build.manifest.inputs)
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
    command = [sys.executable, __file__, "--one", fault.key]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{fault.key}: {done.stderr}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def digest(fault: Fault) -> str:
    """Of what a fault's result depends on: this script, the package without the other ports, and the edits."""
    targets = REPOSITORY / "dovetail" / "targets"
    found = hashlib.sha256(f"{fault.key} {fault.edits}".encode() + Path(__file__).read_bytes())
    for file in sorted(path for path in (REPOSITORY / "dovetail").rglob("*") if path.is_file()):
        place = file.relative_to(targets).parts if file.is_relative_to(targets) else ()
        if "__pycache__" not in file.parts and (len(place) < 2 or place[0] == fault.port):
            found.update(f"{file.relative_to(REPOSITORY)} {file.stat().st_size} ".encode() + file.read_bytes())
    return found.hexdigest()


def revision() -> str:
    """The commit the repository is at; empty where there is no git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def tables(rows: Mapping[tuple[str, str], tuple[Fault, Found]]) -> dict[str, Rows]:
    """The tables of the page: counts of each port, and the first suspicion of each fault."""
    ports = list(dict.fromkeys(port for port, _ in rows))
    head = ["port", "faults", "found by `check`", "right suspicion first", "change the output", "then `run` fails"]
    counts: list[list[object]] = [head]
    for port in ports:
        some = [(fault, found) for (name, _), (fault, found) in rows.items() if name == port]
        changing = [found for _, found in some if found.changes]
        right = sum(fault.named_by(found) for fault, found in some)
        seen = sum(bool(found.suspicion) for _, found in some)
        counts.append([port, len(some), seen, right, len(changing), sum(found.status == 1 for found in changing)])
    suspicions: list[list[object]] = [["fault", *ports]]
    for name in dict.fromkeys(name for _, name in rows):
        suspicions.append([name, *(cell(*rows[port, name]) if (port, name) in rows else "" for port in ports)])
    return {"port_faults": counts, "port_faults_found": suspicions}


def cell(fault: Fault, found: Found) -> str:
    """The first suspicion; a dot where no output changes, in brackets what was planted in the fault's place."""
    mark = "" if fault.named_by(found) else " (not the place)" if found.suspicion else ""
    text = found.suspicion.split(":")[0] if len(found.suspicion) > 60 else found.suspicion or "not found"
    kin = f" [{fault.kin}]" if fault.kin else ""
    return f"{text}{mark}{'' if found.changes else ' ·'}{kin}"


def outdated(rows: Mapping[tuple[str, str], tuple[Fault, Found]]) -> Iterator[str]:
    """Sentences: which results are of an earlier revision."""
    old: dict[str, list[str]] = {}
    for fault, found in rows.values():
        if found.digest != digest(fault):
            old.setdefault(found.revision, []).append(fault.key)
    for number, keys in old.items():
        which = "" if len(keys) == len(rows) else f": {', '.join(keys)}"
        yield f"Measured at revision {number}{which}."


def _kept(file: Path) -> dict[str, list[Found]]:
    """What earlier runs found, by PORT:FAULT, the latest last."""
    found: dict[str, list[Found]] = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        row = json.loads(line)
        found.setdefault(row.pop("fault"), []).append(Found(**row))
    return found


def looked_up(fault: Fault, file: Path, old: bool) -> Found:
    """What a fault came to: as it was kept, of other content too if `old` is enough, else tried now and kept."""
    now, known = digest(fault), _kept(file).get(fault.key, [])
    fitting = [one for one in known if one.digest == now] or (known if old else [])
    if fitting:
        return fitting[-1]
    found = replace(apart(fault), digest=now, revision=revision())
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps({"fault": fault.key, **asdict(found)}) + "\n")
    return found


def main() -> int:
    """The command line; 1 where a fault is not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a port, or PORT:FAULT")
    parser.add_argument("--one", default="", help="plant PORT:FAULT in this process and print JSON")
    parser.add_argument("--write", action="store_true", help="write the tables to docs/figures")
    parser.add_argument("--kept", type=Path, help="the file of what was found so far; in the cache folder if not given")
    parser.add_argument("--old", action="store_true", help="what was found before something changed is good enough")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(asdict(one(next(fault for fault in faults() if fault.key == given.one)))))
        return 0
    kept = given.kept or default_cache() / "port_faults.jsonl"
    rows: dict[tuple[str, str], tuple[Fault, Found]] = {}
    for fault in faults():
        if given.only in ("", fault.port, fault.key):
            found = looked_up(fault, kept, given.old)
            rows[fault.port, fault.name] = fault, found
            print(f"{fault.key}: {fault.named_by(found)}, {found}", file=sys.stderr, flush=True)
    show(tables(rows))
    print(*outdated(rows), sep="\n")
    if given.write:
        write(tables(rows), "python scripts/port_faults.py")
    silent = [found for _, found in rows.values() if not found.suspicion or (found.changes and found.status != 1)]
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
