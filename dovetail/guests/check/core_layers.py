"""Checks a core's own instructions in layers: small networks of the usual kinds, on the core alone.

Instructions with operands in registers, functions without known arguments, and blocks of pairs or vectors have no
loop of their own in a test firmware. Dovetail's kernels call them, so kernels are what is tried: outputs on the
simulated chip must equal the integer graph.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dovetail.arrays import built
from dovetail.compile import Options, compile_graph
from dovetail.errors import DovetailError
from dovetail.guests.check.findings import Checked, Finding, Tested
from dovetail.guests.check.networks import NETWORKS, integer_graph
from dovetail.ir.graph import Graph
from dovetail.kernels import core_traits, offered
from dovetail.program.interpret import sample_inputs
from dovetail.prove import difference
from dovetail.records import Record
from dovetail.run import chip_simulator, run_build
from dovetail.schedule.partition import partition
from dovetail.target.description import Target
from dovetail.target.pattern import Choice

DRAWN = 3
"""Layers of each kind of network."""
_DRAWS = 6
"""Settings drawn for a layer until a network can be made of them."""
_INPUTS = 2
"""Inferences of each layer."""
_SETTINGS: dict[str, Sequence[int]] = {
    **dict.fromkeys(("rows", "columns"), (8, 3, 5, 12)),
    **dict.fromkeys(("channels", "outputs"), (8, 1, 3, 4, 7, 16, 24)),
    **dict.fromkeys(("kernel_rows", "kernel_columns"), (3, 1, 2)),
    **dict.fromkeys(("stride_rows", "stride_columns"), (1, 1, 2)),
    **dict.fromkeys(("dilation_rows", "dilation_columns"), (1,)),
    **dict.fromkeys(("top", "left", "bottom", "right", "relu", "per_channel", "bias"), (1, 0)),
    **dict.fromkeys(("input_zero", "output_zero"), (-128, -5, 0)),
    **{"depth": (1,), "scales": (0,)},
}
"""Values that the settings of a network are drawn from; the first ones are those of the first layer of each kind."""


class _CoreLayer(Record):
    """The outcome of a small network."""

    kind: str
    calls: frozenset[str]
    """The core's own instructions and functions in its C."""
    wrong: str
    """The first wrong output, in words; empty where all are right."""


def layer_graphs() -> Iterator[tuple[str, Graph]]:
    """(kind in words, integer graph) of small networks; the same ones each time."""
    random = np.random.default_rng(46)
    for number, (kind, _) in enumerate(NETWORKS):
        made = 0
        for draw in range(DRAWN * _DRAWS):
            settings = {name: int(random.choice(values if draw else values[:1])) for name, values in _SETTINGS.items()}
            try:
                graph = integer_graph(settings, number)
            except (ValueError, DovetailError):
                continue
            yield kind, graph
            made += 1
            if made == DRAWN:
                break


def own_names(target: Target) -> list[str]:
    """Names of a core's own instructions and functions."""
    return [*(one.name for one in target.core.instructions), *target.core.functions]


def check_core_layers(
    target: Target, checked: Checked, progress: Callable[[str], None] = lambda text: None, only: Sequence[str] = ()
) -> None:
    """Try a core's kernels with its own instructions in small layers, and add what is found.

    Args:
        target: whose core has instructions, functions, pairs or vectors of its own.
        checked: to which findings and counts are added; a count for each name that only layers use.
        progress: told what is being done.
        only: names of what is tried; empty for all.
    """
    alone = replace(target, engines=())
    simulator, began, layers = chip_simulator(alone), time.monotonic(), list[_CoreLayer]()
    graphs = list(layer_graphs())
    random = np.random.default_rng(7)
    for number, (kind, graph) in enumerate(graphs):
        progress(f"core: layer {number + 1} of {len(graphs)} on {simulator}: {kind}")
        choices = _drawn(graph, alone, random) if number % DRAWN else {}
        layers.append(_tried(kind, graph, alone, simulator, choices))
    seconds, failed = time.monotonic() - began, [layer for layer in layers if layer.wrong]
    known = {one.offload for one in checked.tested if one.cases}
    checked.tested[:] = [one for one in checked.tested if one.engine != "core" or one.cases]
    for name in (one for one in own_names(target) if one not in known and (not only or one in only)):
        using = [layer for layer in layers if name in layer.calls]
        wrong = sum(bool(layer.wrong) for layer in using)
        remark = "" if using else "no layer of the usual networks uses it"
        checked.tested.append(Tested("core", name, simulator, len(using), wrong, remark=remark))
    checked.tested.append(Tested("core", "layers", simulator, len(layers), len(failed), 0, seconds))
    right = {name for layer in layers if not layer.wrong for name in layer.calls}
    for layer in failed:
        suspects = sorted(layer.calls - right) or sorted(layer.calls)
        suspicion = f"{', '.join(suspects)}" if suspects else "pairs or vectors of the core"
        sentence = f"core, {simulator}: {layer.kind}: {layer.wrong}; suspicion: {suspicion}"
        checked.findings.append(Finding(sentence, (suspicion,), simulator))


def _drawn(graph: Graph, target: Target, random: np.random.Generator) -> dict[str, Choice]:
    """Settings of each kernel's knobs, drawn at random: so blocks that are seldom the fastest are tried too."""
    choices: dict[str, Choice] = {}
    for region in partition(graph, target):
        points = list(offered(region.graph, core_traits(target.core)).space.points())
        choices[region.name] = points[random.integers(len(points))]
    return choices


def _tried(kind: str, graph: Graph, target: Target, simulator: str, choices: Mapping[str, Choice]) -> _CoreLayer:
    names = own_names(target)
    try:
        compiled = compile_graph(graph, target, Options(), choices=choices, interpret=False)
        texts = [text for name, text in compiled.project.files.items() if name.endswith(".c")]
        calls = frozenset(name for name in names if any(re.search(rf"\b{name}\(", text) for text in texts))
        inputs = [sample_inputs(graph, seed) for seed in range(_INPUTS)]
        with built(compiled, target) as build:
            outputs = run_build(build, simulator, inputs).outputs
    except DovetailError as error:
        return _CoreLayer(kind, frozenset(names), str(error))
    wrong = difference(graph, inputs, outputs)
    return _CoreLayer(kind, calls, str(wrong) if wrong else "")
