"""The published programming format: switch configurations and layer information as words of a `.vmh` file.

Formats after maeri-project/MAERI_bsv@1351d1b (src/maeri_controller/CR_Types.bsv, compiler/lib/include). A double
switch takes a byte, four to a word, the first lowest: mode of the left half, of the right half, two bits each; whether
the left and the right half give out a sum; two zeros. A single switch takes four bits, eight to a word: mode, whether
it gives out a sum, zero. Switches are counted from the root, left to right.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.delivery import Tile
from dovetail.targets.maeri.layer import Layer
from dovetail.targets.maeri.tree import Switch, Tree

ADDS = ("idle", "addOne", "addTwo", "addThree")
"""Modes of half a double switch, by the number that stands for them: how many values it adds."""
SINGLE = ("idle", "addTwo", "flowLeft", "flowRight")
"""Modes of a single switch."""


def modes(config: MaeriConfig, tree: Tree) -> dict[Switch, str]:
    """What each switch that is not idle does, by the published names."""
    found = {}
    for level in range(config.levels):
        for number in range(1 << level):
            mode = _mode(tree, (level, number))
            if mode:
                found[(level, number)] = (SINGLE if _is_single(level, number) else ADDS)[mode]
    return found


def tree_words(config: MaeriConfig, tree: Tree) -> list[int]:
    """A configuration of the reduction tree, 32 bits each: double switches, then single ones."""
    gives = set(tree.outputs)
    double, single = [], []
    for level in range(config.levels):
        for number in range(1 << level):
            place = level, number
            if _is_single(level, number):
                single.append(_mode(tree, place) << 2 | (place in gives) << 1)
            elif number % 2:
                right = level, number + 1
                halves = _mode(tree, place) << 6 | _mode(tree, right) << 4
                double.append(halves | (place in gives) << 3 | (right in gives) << 2)
    return [*_packed(double, 8), *_packed(single, 4)]


def layer_words(config: MaeriConfig, layer: Layer, tile: Tile) -> list[int]:
    """The sizes of a layer and of its tile: for K, C, R, S, Y and X a word of size and tile and one of what is left
    over and how many times the tile fits; then multipliers and virtual neurons, and the size of one."""
    words = []
    sizes = (
        (layer.filters * layer.groups, tile.filters * tile.groups, 1), (layer.channels, tile.channels, 1),
        (layer.rows, tile.rows, 1), (layer.columns, tile.columns, 1),
        (layer.in_rows, tile.out_rows, layer.rows), (layer.in_columns, tile.out_columns, layer.columns),
    )  # fmt: skip
    for size, step, window in sizes:
        rounds, left = divmod(size - window + 1, step)
        words += [size << 16 | step, left << 16 | rounds]
    return [*words, config.multipliers << 16 | tile.neurons, tile.size]


def vmh(words: Sequence[int], digits: int = 3) -> str:
    """Words as the text of a memory file that `$readmemh` reads."""
    return "\n".join([f"@{0:0{digits}d}", *(f"{word & 0xFFFFFFFF:08X}" for word in words)]) + "\n"


def _is_single(level: int, number: int) -> bool:
    return number in (0, (1 << level) - 1)


def _mode(tree: Tree, place: Switch) -> int:
    """The number of a switch's mode."""
    loads = tree.loads.get(place, {})
    values = sum(loads.values())
    if not _is_single(*place):
        return min(values, 3)
    if values == 1:
        return 3 if min(tree.children[place]) % 2 else 2
    return min(values, 1)


def _packed(fields: Sequence[int], bits: int) -> list[int]:
    """Fields into words, the first lowest."""
    each = 32 // bits
    groups = (fields[first : first + each] for first in range(0, len(fields), each))
    return [sum(field << bits * place for place, field in enumerate(group)) for group in groups]
