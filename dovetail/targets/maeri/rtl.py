"""Words of the published hardware: RN_Config of the reduction tree, Layer_Info of a layer; and an order's phases.

Words have the published format (maeri-project/MAERI_bsv@1351d1b, src/maeri_controller/CR_Types.bsv,
compiler/lib/include). A double switch takes a byte, four to a word, the first lowest: mode of the left half, of the
right half, two bits each; whether the left and the right half give out a sum; two zeros. A single switch takes four
bits, eight to a word: mode, whether it gives out a sum, zero. Switches are counted from the root, left to right. Modes
of half a double switch: how many values it adds; of a single switch: idle, add two, flow left, flow right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.machine import play
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.order import NetworkOrder, neurons, sweep
from dovetail.targets.maeri.tile import MultiplierTile
from dovetail.targets.maeri.tree import (
    Range,
    Switch,
    TreeConfiguration,
    configure,
    double_switches,
    is_single,
    single_switches,
)


@dataclass(frozen=True)
class Phase:
    """A span of time in which the same virtual neurons work."""

    start: int
    """Its first cycle."""
    places: tuple[Range, ...]
    """The virtual neurons at work, from the left."""
    words: tuple[int, ...]
    """The tree's configuration that adds them up."""
    configuration: int
    """Number of the configuration, from 0 in the order they first come; equal virtual neurons have equal numbers."""


def phases(order: NetworkOrder) -> list[Phase]:
    """The phases of an order, in order of time; neighbours differ. A phase without virtual neurons is idle."""
    spans, own = list[tuple[int, int]](), list[list[Range]]()
    for item in order.items:
        # By the machine, too: where sums go round, the end in the order is only close.
        until = play(order.config, order.work(item).layer, item).until
        spans.append((item.start, max(order.end(item), until)))
        own.append(neurons(item, order.timing(item)))
    timeline, trees = list[Phase](), dict[tuple[Range, ...], tuple[int, ...]]()
    for cycle, working in sweep(spans):
        places = tuple(sorted({place for number in working for place in own[number]}, key=lambda place: place.start))
        if not timeline or places != timeline[-1].places:
            if places not in trees:
                trees[places] = tuple(tree_words(order.config, configure(order.config.multipliers, places)))
            timeline.append(Phase(cycle, places, trees[places], list(trees).index(places)))
    return timeline


def configurations(timeline: Sequence[Phase]) -> list[tuple[int, ...]]:
    """The words of every configuration of the tree, by number."""
    words = {phase.configuration: phase.words for phase in timeline}
    return [words[number] for number in sorted(words)]


def tree_size(config: MaeriConfig) -> int:
    """Words of a configuration of the reduction tree."""
    single = 2 * config.levels - 1
    return -(-(config.multipliers - 1 - single) // 2 // 4) + -(-single // 8)


def tree_words(config: MaeriConfig, tree: TreeConfiguration) -> list[int]:
    """A configuration of the reduction tree, 32 bits each: double switches, then single switches."""
    double, single, gives = [], [], set(tree.outputs)
    for level, number in double_switches(config.levels):
        left, right = (level, number), (level, number + 1)
        modes = _mode(tree, left) << 6 | _mode(tree, right) << 4
        double.append(modes | (left in gives) << 3 | (right in gives) << 2)
    for switch in single_switches(config.levels):
        single.append(_mode(tree, switch) << 2 | (switch in gives) << 1)
    return [*_packed(double, 8), *_packed(single, 4)]


def _mode(tree: TreeConfiguration, switch: Switch) -> int:
    values = sum(tree.loads.get(switch, {}).values())
    if not is_single(switch):
        return min(values, 3)
    if values == 1:
        return 3 if min(tree.children[switch]) % 2 else 2
    return min(values, 1)


def _packed(fields: Sequence[int], bits: int) -> list[int]:
    """Fields as words, the first lowest."""
    each = 32 // bits
    groups = (fields[first : first + each] for first in range(0, len(fields), each))
    return [sum(field << bits * place for place, field in enumerate(group)) for group in groups]


def layer_words(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile) -> list[int]:
    """The sizes of a layer and of its tile.

    For each of K, C, R, S, Y and X a word of size and tile, and a word of the rest and how many times the tile fits;
    then multipliers and virtual neurons, and the size of one. A tile of any products of a sum is a tile of the layer as
    a matrix product, its patches as channels.
    """
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
