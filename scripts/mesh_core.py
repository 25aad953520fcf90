"""Measures what the core of a mesh's elements takes beside the MAC array: the `CoreClocks` of a target.

    python scripts/mesh_core.py [--target spinnaker2] [--pieces]

Layers of many kinds are put on elements as a whole, or cut over what they sum, and their firmware is executed. Printed
are the clocks with which the model comes nearest to the cycles of all pieces, by the squares of the relative errors;
with `--pieces` each piece too. Takes about 10 s of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from dovetail.compile import sample_inputs  # noqa: E402
from dovetail.errors import TargetError  # noqa: E402
from dovetail.guests.mesh.compiled import with_compiler  # noqa: E402
from dovetail.guests.mesh.cuts import Cut, PieceSizes, by_turns, core_clocks, rows_together  # noqa: E402
from dovetail.guests.mesh.emit import emit_mesh  # noqa: E402
from dovetail.guests.mesh.layers import MeshLayer, network_of  # noqa: E402
from dovetail.guests.mesh.mapping import place_and_route  # noqa: E402
from dovetail.guests.mesh.partition import (  # noqa: E402
    Objective,
    resident_section,
    sizes_of,
)
from dovetail.guests.mesh.rack import run_exact  # noqa: E402
from dovetail.guests.mesh.topology import build_topology  # noqa: E402
from dovetail.ir.graph import Graph  # noqa: E402
from dovetail.ir.operators.activation import FixedSoftmax  # noqa: E402
from dovetail.ir.operators.arithmetic import Clip, Dequantize, Quantize  # noqa: E402
from dovetail.ir.operators.linear import Conv2d, FullyConnected  # noqa: E402
from dovetail.ir.operators.movement import Concat, Transpose  # noqa: E402
from dovetail.ir.operators.reduction import AveragePool2d  # noqa: E402
from dovetail.ir.types import DType  # noqa: E402
from dovetail.schedule.partition import partition  # noqa: E402
from dovetail.target.description import Target  # noqa: E402
from dovetail.target.mesh import CoreClocks, Mesh  # noqa: E402
from dovetail.targets import load_target  # noqa: E402
from networks import Net  # noqa: E402

START = CoreClocks(
    **{"read": 3.0, "moved": 1.0, "compared": 5.0, "averaged": 2.0, "result": 10.0, "divided": 10.0, "row": 50.0},
    **{"reordered": 3.0, "quantised": 10.0, "floating": 500.0, "dequantised": 50.0},
    **{"finished": 8.0, "gaining": 5.0},
    **{"without_lines": 16.0, "passed": 6.0, "joined": 2.0, "added": 6.0, "group": 20.0},
    **{"turn": 100.0, "handling": 100.0},
)
"""Where the search begins, and by which the goes of the measured pieces are chosen."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Stages:
    """The pieces of a layer, and what they took."""

    layer: MeshLayer
    sizes: PieceSizes
    mesh: Mesh
    turns: Floats
    """[pieces, 3] as `ExactRun.turns`, means of all inputs."""

    @property
    def executed(self) -> Floats:
        """[pieces] cycles of an input."""
        return self.turns[:, 2]

    def charged(self, core: CoreClocks) -> Floats:
        """[pieces] clocks of the model."""
        if not self.layer.on_array:
            return core_clocks(self.layer, self.sizes, core)
        together = rows_together(self.layer, self.sizes, self.mesh)  # as they were emitted
        return by_turns(self.layer, self.sizes, replace(self.mesh, core=core), together)


def chain(zero_point: int, rows: int, columns: int) -> Graph:
    """Layers of many sizes one after the other, on an image of so many rows and columns."""
    net = Net(f"chain_{rows}_{columns}", (rows, columns, 4), zero_point=zero_point, seed=1)
    value = net.convolution(net.x, 8, 3)
    value = net.convolution(value, 16, 1)
    value = net.convolution(value, 4, 3)
    value = net.convolution(value, 20, 3, stride=2)
    value = net.addition(value, net.convolution(value, 20, 1))
    value = net.convolution(value, 24, 1)
    value = net.addition(value, net.convolution(value, 24, 3))
    value = net.convolution(value, 36, 3, stride=2)
    value = net.convolution(value, 128, 1)
    value = net.dense(net.mean(value), 64)
    for outputs in (32, 16, 10):
        value = net.dense(value, outputs)
    return net.finish(net.builder.add(FixedSoftmax(1 << 30, 22, -124, DType.INT8), [value]))


def by_the_core() -> Graph:
    """Sums, joints, pools, means and softmaxes of several sizes side by side."""
    net = Net("by_the_core", (16, 16, 32), zero_point=-3)
    halved, soft = net.pool(net.x), FixedSoftmax(1 << 30, 22, -124, DType.INT8)
    means = [net.mean(halved), net.mean(net.x)]
    for kernel, stride in ((3, 3), (2, 2), (4, 4)):
        mean = net.builder.add(AveragePool2d((kernel, kernel), (stride, stride)), [halved])
        means.append(net.builder.add(Clip(-128, 127, DType.INT8), [mean]))
    shared = net.convolution(halved, 32, 1)
    joined = net.builder.add(Concat(3), [shared, halved])
    values = [net.addition(shared, halved), joined, net.pool(halved, 3, 1), *means[1:], net.dense(halved, 3)]
    return net.finish(*values[:-1], *(net.builder.add(soft, [value]) for value in (means[-1], means[0], values[-1])))


def with_floats(*shape: int) -> Graph:
    """Floats of an image, plane by plane, quantised; and floats as the result."""
    net = Net(f"floats_{'_'.join(map(str, shape))}", shape, dtype=DType.FLOAT32)
    net.dtype = DType.INT8
    line = [net.builder.constant("scale", np.array([0.04], np.float32))]
    line.append(net.builder.constant("zero_point", np.array([0], np.int32)))
    planes = net.builder.add(Quantize(DType.INT8), [net.x, *line])
    value = net.convolution(net.builder.add(Transpose((0, 2, 3, 1)), [planes]), 12)
    return net.finish(net.builder.add(Dequantize(), [net.dense(net.mean(value), 40), *line]))


def without_lines(graph: Graph) -> Graph:
    """The same with a channel of each layer that no line requantises."""
    linear = [node.inputs[2] for node in graph.nodes if isinstance(node.operator, Conv2d | FullyConnected)]
    biases = {name: graph.constants[name].copy() for name in linear}
    for array in biases.values():
        array[0] = 1 << 30
    return replace(graph, constants={**graph.constants, **biases})


def networks() -> Iterator[tuple[Graph, int, float]]:
    """Networks, into how many parts the sums of their layers are cut, and the clocks of a go by which goes are chosen:
    few and many goes, rounding that depends on the sign or does not, and without lines."""
    yield chain(-128, 8, 16), 1, 100.0
    yield chain(-128, 16, 6), 1, 30.0
    yield chain(-128, 12, 12), 1, 300.0
    yield chain(-128, 16, 4), 1, 100.0
    yield chain(-128, 8, 4), 1, 30.0
    yield chain(4, 12, 8), 1, 100.0
    yield chain(4, 6, 16), 1, 100.0
    yield without_lines(chain(-128, 8, 6)), 1, 100.0
    yield chain(-128, 6, 8), 3, 100.0
    yield by_the_core(), 1, 100.0


def executed(graph: Graph, sums: int, target: Target, mesh: Mesh) -> list[Stages]:
    """The pieces of a network, whole but for their sums, and what they took on elements of a chip."""
    target = replace(target, mesh=mesh)
    regions, topology = partition(graph, target), build_topology(mesh)
    network = network_of(graph, regions)
    cuts = [Cut(sums=sums if layer.on_array and layer.summed >= 4 * sums else 1) for layer in network.layers]
    made = resident_section(network.layers, cuts, mesh)
    found = place_and_route(network, made, topology, Objective.LATENCY)
    project = emit_mesh(found, target)
    given = [sample_inputs(graph, seed) for seed in range(2)]
    clocks = run_exact(found, project, target, given, jobs=1).turns.mean(axis=0)
    return [
        Stages(
            stage.layer,
            sizes_of(stage.layer, stage.cut, stage.boxes, mesh),
            mesh,
            clocks[stage.first : stage.first + stage.pieces],
        )
        for stage in made.stages
    ]


FLOATS = ("reordered", "quantised", "floating", "dequantised")
"""Clocks that networks with floats are measured for."""


def fitted(
    stages: Sequence[Stages], start: CoreClocks = START, names: Sequence[str] = (), after: float | None = None
) -> CoreClocks:
    """The clocks by which the model comes nearest, by least squares: what is not below zero, to a tenth; those of
    `names`, all but those of floats if none are given."""
    names = names or [one.name for one in fields(CoreClocks) if one.name not in ("after", "tabled", *FLOATS)]
    taken = np.concatenate([one.executed for one in stages])

    def errors(point: Floats) -> Floats:
        core = replace(start, **dict(zip(names, point.tolist(), strict=True)))
        return np.concatenate([one.charged(core) for one in stages]) / taken - 1

    found = scale = np.array([getattr(start, name) for name in names])
    for _ in range(STEPS):
        now = errors(found)
        slopes = [(errors(found + STEP * unit) - now) / STEP for unit in np.eye(len(names))]
        rows = [np.stack(slopes, axis=1) * scale, HELD * np.eye(len(names))]
        change = np.linalg.lstsq(np.concatenate(rows), np.append(-now, np.zeros(len(names))), rcond=None)[0]
        found = np.maximum(found + scale * change, 0.0)
    if after is None:
        after = float(np.concatenate([one.turns[:, 2] - one.turns[:, 1] for one in stages]).mean())
    return replace(start, **dict(zip(names, np.round(found, 1).tolist(), strict=True)), after=round(after, 1))


STEPS, STEP, HELD = 8, 0.01, 0.01
"""Of the search: the model is linear but for whether core or array takes longer; and how little it changes what nothing
that was executed depends on."""


def measured(target: Target) -> tuple[CoreClocks, list[Stages]]:
    """The clocks of a target's core, and all that was executed for them.

    Raises:
        TargetError: the target is not a mesh of elements with a MAC array.
    """
    if target.mesh is None or target.mesh.pieces is not None:
        hint = "others are charged by the plans of their own compiler"
        raise TargetError("its elements have no MAC array", where=target.name, hint=hint)
    mesh = target.mesh.resized(chips=1)
    stages = []
    for graph, sums, turn in networks():
        stages += executed(graph, sums, target, replace(mesh, core=replace(START, turn=turn)))
    core, floats = fitted(stages), list[Stages]()
    for shape in ((3, 16, 16), (3, 12, 20), (3, 6, 6), (4, 8, 8)):
        floats += executed(with_floats(*shape), 1, target, replace(mesh, core=core))
    return fitted(floats, core, FLOATS, core.after), [*stages, *floats]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="spinnaker2", help="a target, or a file that has one")
    parser.add_argument("--pieces", action="store_true", help="print every piece: executed, modelled")
    given = parser.parse_args()
    core, stages = measured(with_compiler(load_target(given.target)))
    ratios = np.concatenate([one.charged(core) / one.executed for one in stages])
    for one in stages if given.pieces else ():
        for piece, taken, charged in zip(range(len(one.turns)), one.executed, one.charged(core), strict=True):
            axes = (one.sizes.rows, one.sizes.columns, one.sizes.channels, one.sizes.sums)
            size = "x".join(str(axis[piece]) for axis in axes)
            print(
                f"{one.layer.name:16} {one.layer.kind:12} {size:14} {taken:8.0f} {charged:8.0f} {charged / taken:6.2f}"
            )
    print(f"CoreClocks({', '.join(f'{name}={value}' for name, value in asdict(core).items())})")
    print(f"{len(ratios)} pieces, modelled / executed {ratios.min():.2f} to {ratios.max():.2f}")


if __name__ == "__main__":
    main()
