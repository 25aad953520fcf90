"""What `dovetail schedule` gives: the best order as a table, JSON, a trace, a page, switch words, and a C program.

Words of switches and layers have the published format (maeri-project/MAERI_bsv@1351d1b, src/maeri_controller/
CR_Types.bsv, compiler/lib/include). A double switch takes a byte, four to a word, the first lowest: mode of the left
half, of the right half, two bits each; whether the left and the right half give out a sum; two zeros. A single switch
takes four bits, eight to a word: mode, whether it gives out a sum, zero. Switches are counted from the root, left to
right. Modes of half a double switch: how many values it adds; of a single one: idle, add two, flow left, flow right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array
from dovetail.target import Ordered, OrderRequest
from dovetail.targets.maeri.tiling import best_tile
from dovetail.targets.maeri.tile import MultiplierTile
from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.coded import read_image, write_image
from dovetail.targets.maeri.config import MaeriConfig, configured
from dovetail.targets.maeri.execute import execute
from dovetail.targets.maeri.kept import broken
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.machine import play
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer, OrderNetwork, network
from dovetail.targets.maeri.order import Item, NetworkOrder, neurons
from dovetail.targets.maeri.picture import page
from dovetail.targets.maeri.programming import inner, programmed
from dovetail.targets.maeri.rules import Rules, load_rules
from dovetail.targets.maeri.simulate import simulate
from dovetail.targets.maeri.solve import best_order
from dovetail.targets.maeri.steps import FORMS
from dovetail.targets.maeri.tree import Range, Switch, TreeConfiguration, configure, is_single

FORMAT = 1
"""Version of the JSON."""
HEADINGS = ("layer", "start", "end", "virtual neurons", "multipliers each", "steps", "MACs", "used")
"""Of the table of layers."""
_EARLIEST = 0.9
"""How much sooner than the order says the hardware may be done, as a part of it."""
_FLOAT_ERROR = 1e-4
"""Most that sums of floats in another order may differ, as a part of the largest result."""


def ordering(graph: Graph, request: OrderRequest, config: MaeriConfig, rules: Rules) -> Ordered:
    """The best order that is found, simulated if asked for.

    Args:
        graph: the network.
        request: what the user asks for; a file of rules stands instead of the target's.
        config: the target's.
        rules: the target's.

    Raises:
        DovetailError: the network has no layer, one does not fit, or rules or sizes are wrong.
    """
    config = configured(config, request.settings)
    rules = load_rules(request.rules) if request.rules else rules

    def found(how: str, makespan: int, least: int) -> None:
        request.progress(f"{how}: {makespan:,} cycles, {100 * (makespan / least - 1):.1f} % above the bound {least:,}")

    order = best_order(network(graph), config, rules, request.seconds, found)
    wrong = broken(order, rules)
    if wrong:
        raise AssertionError(f"the order breaks rules: {wrong}")
    notes, spans = [_summary(order)], phases(order)
    if request.inputs is not None:
        request.progress("simulating")
        notes.append(_simulated(order, request.inputs))
    files, refused = images(order, spans)
    notes += refused
    if files and request.inputs is not None:
        notes.append(_executed(order, files, request.inputs))
    rows = tuple(cells for _, cells in _rows(order))
    return Ordered(HEADINGS, rows, tuple(notes), {**_files(order, spans), **files})


def _simulated(order: NetworkOrder, inputs: Mapping[str, Array]) -> str:
    """Execute the order, compare with the graph; a sentence."""
    result, graph = simulate(order, inputs), order.network.graph
    off = max(_off(result.outputs[name], array) for name, array in evaluate(graph, inputs).items())
    integers = all(graph.types[name].dtype.is_integer for name in graph.outputs)
    late = not _EARLIEST * order.makespan <= result.cycles <= order.makespan
    if late or off > (0 if integers else _FLOAT_ERROR):
        raise AssertionError(f"results off by {off}, {result.cycles} cycles instead of {order.makespan}")
    share = 100 * result.utilisation(order.config)
    how = "equal to the network's in every bit" if not off else f"those of the network within {off:.1e} of the largest"
    return f"Simulated: {result.cycles:,} cycles, {share:.1f} % of the multipliers used, results {how}."


def images(order: NetworkOrder, spans: Sequence[Phase]) -> tuple[dict[str, bytes], list[str]]:
    """The programming images, by file; sentences that say why there is none."""
    trees = {phase.configuration: tuple(tree_words(order.config, phase.tree)) for phase in spans}
    words = tuple(trees[number] for number in sorted(trees))
    numbers = tuple((phase.start, phase.configuration) for phase in spans)
    infos = [tuple(layer_words(order.config, work.layer, tile)) for work, tile in _first_tiles(order)]
    files, refused = dict[str, bytes](), dict[str, None]()
    for name, form in FORMS.items():
        try:
            files[f"image/{name}.bin"] = write_image(programmed(order, form, infos, words, numbers))
        except ModelError as error:
            refused[f"No image for an FPGA: {error.where}: {error.what}."] = None
    return files, list(refused)


def _executed(order: NetworkOrder, images: Mapping[str, bytes], inputs: Mapping[str, Array]) -> str:
    """Read the images back, execute them, compare with the graph; a sentence."""
    inside = inner(order.network.graph)
    known = evaluate(order.network.graph, inputs, (*inside.inputs, *inside.outputs))
    for name, data in images.items():
        found = execute(read_image(data), [known[each] for each in inside.inputs])
        for output, value in zip(found.outputs, inside.outputs, strict=True):
            if output.tobytes() != known[value].tobytes():
                raise AssertionError(f"{name} gives another {value}")
    sizes = " and ".join(f"{name} ({len(data):,} bytes)" for name, data in images.items())
    return f"{sizes} read back and executed: results equal to the network's in every bit."


def _first_tiles(order: NetworkOrder) -> list[tuple[MultiplierLayer, MultiplierTile]]:
    """Each layer with the tile of its first item."""
    return [
        (work, next(item.tile for item in order.items if item.work == number))
        for number, work in enumerate(order.network.works)
    ]


def _off(found: Array, expected: Array) -> float:
    """The largest difference, as a part of the largest expected number."""
    differences = np.abs(found.astype(np.float64) - expected)
    return float(differences.max(initial=0.0) / max(np.abs(expected.astype(np.float64)).max(initial=0.0), 1e-30))


def _files(order: NetworkOrder, spans: Sequence[Phase]) -> dict[str, bytes]:
    config = order.config
    files = {
        "schedule.json": _json(order, spans),
        "schedule.html": order_page(order),
        "trace.json": _trace(order),
        **{f"host/{name}": text for name, text in _host_files(order, spans).items()},
    }
    for phase in spans:
        files.setdefault(f"trees/RN_Config_{phase.configuration:04d}.vmh", _vmh(tree_words(config, phase.tree), 3))
    for number, (work, tile) in enumerate(_first_tiles(order)):
        files[f"layers/Layer_Info_{number:03d}.vmh"] = _vmh(layer_words(config, work.layer, tile), 2)
    return {name: text.encode() for name, text in files.items()}


@dataclass(frozen=True)
class Phase:
    """A span of time in which the same virtual neurons work."""

    start: int
    """Its first cycle."""
    places: tuple[Range, ...]
    """The virtual neurons at work, from the left."""
    tree: TreeConfiguration
    """How the reduction tree adds them up; outputs in the order of the places."""
    configuration: int
    """Phases with the same virtual neurons have the same number, from 0 in the order they first come."""


def phases(order: NetworkOrder) -> list[Phase]:
    """The phases of an order, in order of time; neighbours differ. A phase without virtual neurons is idle."""
    changes: dict[int, tuple[set[Range], set[Range]]] = {}
    for item in order.items:
        end = max(order.end(item), _until(order, item))
        for place in neurons(item, order.timing(item)):
            changes.setdefault(item.start, (set(), set()))[0].add(place)
            changes.setdefault(end, (set(), set()))[1].add(place)
    found: list[Phase] = []
    trees: dict[tuple[Range, ...], TreeConfiguration] = {}
    active: set[Range] = set()
    for cycle in sorted(changes):
        begun, ended = changes[cycle]
        active = (active - ended) | begun
        places = tuple(sorted(active, key=lambda place: place.start))
        if not found or places != found[-1].places:
            if places not in trees:
                trees[places] = configure(order.config.multipliers, places)
            found.append(Phase(cycle, places, trees[places], list(trees).index(places)))
    return found


def _until(order: NetworkOrder, item: Item) -> int:
    """From when the tree may be set up anew, by the machine: an order says it only nearly where sums go round."""
    layer, taps = order.work(item).layer, item.taps[1] - item.taps[0]
    return play(order.config, layer, item.tile, taps, item.place.start, item.start, item.segments).until


def tree_words(config: MaeriConfig, tree: TreeConfiguration) -> list[int]:
    """A configuration of the reduction tree, 32 bits each: double switches, then single ones."""
    gives = set(tree.outputs)
    double, single = [], []
    for level in range(config.levels):
        for number in range(1 << level):
            place = level, number
            if is_single(place):
                single.append(_mode(tree, place) << 2 | (place in gives) << 1)
            elif number % 2:
                right = level, number + 1
                halves = _mode(tree, place) << 6 | _mode(tree, right) << 4
                double.append(halves | (place in gives) << 3 | (right in gives) << 2)
    return [*_packed(double, 8), *_packed(single, 4)]


def _mode(tree: TreeConfiguration, place: Switch) -> int:
    values = sum(tree.loads.get(place, {}).values())
    if not is_single(place):
        return min(values, 3)
    if values == 1:
        return 3 if min(tree.children[place]) % 2 else 2
    return min(values, 1)


def _packed(fields: Sequence[int], bits: int) -> list[int]:
    """Fields into words, the first lowest."""
    each = 32 // bits
    groups = (fields[first : first + each] for first in range(0, len(fields), each))
    return [sum(field << bits * place for place, field in enumerate(group)) for group in groups]


def layer_words(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile) -> list[int]:
    """The sizes of a layer and of its tile: for K, C, R, S, Y and X a word of size and tile and one of what is left
    over and how many times the tile fits; then multipliers and virtual neurons, and the size of one. A tile of any
    products of a sum is one of the layer as a matrix product, its patches as channels."""
    if tile.flat:
        rows, columns = layer.out_rows, layer.out_columns
        layer = OrderLayer(1, 1, layer.taps, layer.filters, rows, columns, layer.groups)
    words = []
    sizes = (
        (layer.filters * layer.groups, tile.filters * tile.groups, layer.filters * layer.groups),
        (layer.channels, tile.channels, layer.channels),
        (layer.rows, tile.rows, layer.rows),
        (layer.columns, tile.columns, layer.columns),
        (layer.in_rows, tile.out_rows, layer.out_rows),
        (layer.in_columns, tile.out_columns, layer.out_columns),
    )
    for size, step, count in sizes:
        rounds, left = divmod(count, step)
        words += [size << 16 | step, left << 16 | rounds]
    return [*words, config.multipliers << 16 | tile.neurons, tile.size]


def _vmh(words: Sequence[int], digits: int) -> str:
    """Words as the text of a memory file that `$readmemh` reads."""
    return "\n".join([f"@{0:0{digits}d}", *(f"{word & 0xFFFFFFFF:08X}" for word in words)]) + "\n"


def _rows(order: NetworkOrder) -> list[tuple[int, tuple[str, ...]]]:
    """The number of each layer and its cells under `HEADINGS`, by start.

    Virtual neurons are all that are ever used; "used" are products per cycle and multiplier taken.
    """
    found = []
    for number, work in enumerate(order.network.works):
        items = [item for item in order.items if item.work == number]
        times, ends = [order.timing(item) for item in items], [order.end(item) for item in items]
        taken = sum(
            (end - item.start) * time.size * item.tile.neurons
            for end, time, item in zip(ends, times, items, strict=True)
        )
        start, end = min(item.start for item in items), max(ends)
        cells = (
            work.name,
            f"{start:,}",
            f"{end:,}",
            str(sum(item.tile.neurons for item in items)),
            ", ".join(map(str, sorted({time.size for time in times}))),
            str(max(time.folds for time in times)),
            f"{work.layer.macs:,}",
            f"{100 * (work.layer.macs / taken):.1f} %",
        )
        found.append((start, end, number, cells))
    return [(number, cells) for _, _, number, cells in sorted(found, key=lambda row: row[:2])]


@dataclass(frozen=True, slots=True)
class OrderComparison:
    """An order beside other ways, in cycles."""

    makespan: int
    bound: int
    one_by_one: int
    """Each layer alone, as it would be without the others, one after the other."""
    uniform: int
    """One after the other, each with the best tile of equal virtual neurons in step."""


def compare(order: NetworkOrder) -> OrderComparison:
    """An order beside its bound, layer after layer, and the best equal virtual neurons."""
    config, graph = order.config, order.network.graph
    alone = uniform = 0
    for work in order.network.works:
        # as if the layer's operand existed from the start
        only = replace(graph, nodes=(work.node,), inputs=(work.node.inputs[0],), outputs=(work.node.output,))
        alone += arrange(OrderNetwork(only, (work,)), config, Rules()).makespan
        uniform += best_tile(work.layer, config)[1]
    return OrderComparison(order.makespan, bound(order.network, config).cycles, alone, uniform)


def _summary(order: NetworkOrder) -> str:
    """One sentence: the order beside its bound and other ways."""
    found, least = compare(order), bound(order.network, order.config)
    times = f"{found.makespan / found.bound:.3f} times the bound of {found.bound:,}"
    return (
        f"{found.makespan:,} cycles, {times} ({least.binds}); "
        f"layer by layer {found.one_by_one:,}, with the best equal virtual neurons {found.uniform:,}."
    )


def order_page(order: NetworkOrder) -> str:
    """The picture of an order."""
    return page(order, _summary(order), HEADINGS, _rows(order))


def _json(order: NetworkOrder, spans: Sequence[Phase]) -> str:
    """The whole order: configuration, layers, items, and the virtual neurons of each phase."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "model": order.network.graph.name,
        "configuration": asdict(order.config),
        "makespan": order.makespan,
        "bound": asdict(bound(order.network, order.config)),
        "layers": [{"name": work.name, **asdict(work.layer)} for work in order.network.works],
        "items": [
            {
                "layer": order.work(item).name,
                "start": item.start,
                "end": order.end(item),
                "multipliers": [item.place.start, item.place.end],
                "tile": asdict(item.tile),
                "products": list(item.taps),
                "segments": [[part.channel, part.first, part.count] for part in item.segments],
            }
            for item in order.items
        ],
        "phases": [
            {
                "start": phase.start,
                "configuration": phase.configuration,
                "neurons": [[place.start, place.end] for place in phase.places],
            }
            for phase in spans
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def _trace(order: NetworkOrder) -> str:
    """The order in the Trace Event format (a JSON array of complete events; a cycle is a microsecond there)."""

    def event(kind: str, name: str, **more: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": 1, **more}

    def track(place: Range) -> int:
        return place.start * 100_000 + place.end

    events = [event("M", "process_name", args={"name": f"MAERI {order.config.multipliers}"})]
    for place in sorted({item.place for item in order.items}, key=lambda place: (place.start, place.end)):
        name = f"multipliers {place.start}..{place.end - 1}"
        events.append(event("M", "thread_name", tid=track(place), args={"name": name}))
    for item in order.items:
        channels = sorted({part.channel for part in item.segments})[:64]
        when = {"tid": track(item.place), "ts": item.start, "dur": order.end(item) - item.start}
        events.append(event("X", order.work(item).name, **when, args={"channels": channels}))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}) + "\n"


def _host_files(order: NetworkOrder, spans: Sequence[Phase]) -> dict[str, str]:
    """The C program that feeds an order to the engine: phases, the tree's words, and the items each begins."""
    trees = {phase.configuration: tree_words(order.config, phase.tree) for phase in spans}
    size, starts = len(trees[0]), [item.start for item in order.items]
    segments = [part for item in order.items for part in item.segments]
    items, at = [], 0
    for item in order.items:
        each = item.place.size // item.tile.neurons if item.tile.neurons > 1 else item.tile.size
        low, high = item.taps
        parts = (item.tile.neurons, low, high - low, at, len(item.segments))
        items.append(_row(item.start, item.work, item.place.start, each, *parts))
        at += len(item.segments)
    begun = []
    for phase in spans:
        first = starts.index(phase.start) if phase.start in starts else 0
        begun.append(_row(phase.start, phase.configuration * size, first, starts.count(phase.start)))
    names = (f'"{_plain(work.name)}"' for work in order.network.works)
    arrays = [
        *_array("const char *const maeri_layer_names[MAERI_LAYERS]", names, 1),
        *_array("const maeri_segment_t maeri_segments[]", (_row(p.channel, p.first, p.count) for p in segments), 4),
        *_array("const maeri_item_t maeri_items[MAERI_ITEMS]", items, 2),
        *_array("const maeri_phase_t maeri_phases[MAERI_PHASES]", begun, 4),
        *_array(
            "const uint32_t maeri_words[]", (f"0x{word:08x}u" for number in sorted(trees) for word in trees[number]), 8
        ),
    ]
    counts = {"layers": len(order.network.works), "items": len(items), "phases": len(spans), "words": size}
    header = _template("maeri_order.h") % {**counts, "makespan": order.makespan}
    return {"maeri_order.h": header, "maeri_order.c": _template("maeri_order.c") % {"arrays": "\n".join(arrays)}}


def _row(*numbers: int) -> str:
    return "{" + ", ".join(f"{number}u" for number in numbers) + "}"


def _array(declaration: str, elements: Iterable[str], each: int) -> list[str]:
    """A constant array, so many elements on a line."""
    found = list(elements)
    lines = [f"    {', '.join(found[at : at + each])}," for at in range(0, len(found), each)]
    return [f"{declaration} = {{", *lines, "};", ""]


def _plain(name: str) -> str:
    """A name as it may stand in a C string."""
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\?' else "_" for c in name)


def _template(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text()
