"""What the tests of the simulator `rtl` and scripts/benchmarks.py share: networks on the MAC array, and their speed."""

from __future__ import annotations

from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, prepare, sample_inputs
from dovetail.ir.graph import Graph
from dovetail.run import ProjectBuild, open_build, run_build
from dovetail.schedule.partition import partition
from dovetail.target import Target
from dovetail.targets import load_target


def layer(model: Path, number: int) -> Graph:
    """The layer with this number among those the engine of `macarray` takes, as a network of its own."""
    target = load_target("macarray")
    regions = partition(prepare(model, target, Options()), target)
    return [region.graph for region in regions if region.engine is not None][number]


def built(graph: Graph, folder: Path, target: Target | None = None) -> ProjectBuild:
    """A network compiled for `macarray`, or for a target like it."""
    target = target or load_target("macarray")
    write_project(compile_graph(graph, target, Options()).project, folder, replace=True)
    return open_build(folder, target)


def million_cycles_per_second(build: ProjectBuild, graph: Graph, simulator: str, inferences: int) -> float:
    """Simulated cycles per second of processor time (of wall time where nothing else runs), start-up left out."""
    given, seconds, cycles = sample_inputs(graph), [], []
    run_build(build, simulator, [given])  # builds what is not in the cache
    for count in (1, 1 + inferences):
        began = getrusage(RUSAGE_CHILDREN)
        result = run_build(build, simulator, [given] * count)
        ended = getrusage(RUSAGE_CHILDREN)
        seconds.append(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime)
        cycles.append(sum(one.total_cycles or 0 for one in result.simulation.inferences))
    return (cycles[1] - cycles[0]) / (seconds[1] - seconds[0]) / 1e6
