"""What words of RN_Config make of products: values followed from the multipliers up, switch by switch.

Written from the switches of the published hardware (maeri-project/MAERI_bsv@1351d1b src/reduction_network) and from
nothing that makes the words. A mode says how many values a half of a double switch adds: its own two, and with three
the neighbour's inner one. Of a single switch it says which of its two pass. A sum that is given out leaves; otherwise
it goes up. Where both halves of a double switch add for one virtual neuron and only the left one gives out, it gives
out the sum of both. A switch that gets nothing waits, whatever its mode; one that gets less than it adds does forever.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.targets.maeri.config import MaeriConfig

Value = tuple[int, int]
"""(whose virtual neuron, of how many products)."""
_IDLE, _BOTH, _LEFT, _RIGHT = range(4)
"""Modes of a single switch."""


def added(config: MaeriConfig, words: Sequence[int], places: Sequence[tuple[int, int]]) -> str:
    """Why a configuration does not add up virtual neurons, each alone and whole; empty where it does.

    Args:
        config: the engine's sizes.
        words: of the configuration: double switches, then single ones.
        places: [first, end) of each virtual neuron, in order.
    """
    values: dict[int, Value] = {}
    for number, (first, end) in enumerate(places):
        if any(leaf in values for leaf in (first, end - 1)):
            return f"two virtual neurons lie on multiplier {first}"
        values.update(dict.fromkeys(range(first, end), (number, 1)))
    modes, out = _modes(config, words), dict[int, int]()
    for level in range(config.levels - 1, -1, -1):
        above: dict[int, Value] = {}
        for number, own in _arriving(level, values, modes).items():
            if own is None or len({owner for owner, _ in own}) > 1:
                return f"switch {number} of level {level} does not get what it adds"
            if own:
                above[number] = own[0][0], sum(count for _, count in own)
        for number in list(above):
            fault = _leave(level, number, above, modes, out, places)
            if fault:
                return fault
        values = above
    missing = [place for number, place in enumerate(places) if number not in out]
    if missing or values:
        return f"the sum of [{missing[0][0]}, {missing[0][1]}) never leaves" if missing else "a sum is left at the root"
    return ""


def _modes(config: MaeriConfig, words: Sequence[int]) -> dict[tuple[int, int], tuple[int, bool]]:
    """Mode of each switch by (level, number), and whether it gives its sum out."""
    found: dict[tuple[int, int], tuple[int, bool]] = {}
    halves = [
        (level, left) for level in range(config.levels) for left in range(1, (1 << level) - 1, 2)
    ]  # left halves of double switches
    alone = [(level, edge) for level in range(config.levels) for edge in sorted({0, (1 << level) - 1})]
    for number, (level, left) in enumerate(halves):
        byte = words[number // 4] >> 8 * (number % 4) & 0xFF
        found[level, left] = byte >> 6, bool(byte & 8)
        found[level, left + 1] = byte >> 4 & 3, bool(byte & 4)
    base = -(-len(halves) // 4)
    for number, place in enumerate(alone):
        four = words[base + number // 8] >> 4 * (number % 8) & 0xF
        found[place] = four >> 2, bool(four & 2)
    return found


def _arriving(
    level: int, values: dict[int, Value], modes: dict[tuple[int, int], tuple[int, bool]]
) -> dict[int, list[Value] | None]:
    """What each switch of a level adds; None where its mode says something else than what comes."""
    found: dict[int, list[Value] | None] = {}
    last = (1 << level) - 1
    for number in range(last + 1):
        mode, own = modes[level, number][0], [2 * number, 2 * number + 1]
        if number in (0, last):
            wanted = {_IDLE: [], _BOTH: own, _LEFT: own[:1], _RIGHT: own[1:]}[mode]
            there = [child for child in own if child in values]
            found[number] = [values[child] for child in there] if there in ([], wanted) else None
            continue
        neighbour, given, taken = (
            (number + 1, own[1], 2 * number + 2) if number % 2 else (number - 1, own[0], own[0] - 1)
        )
        if modes[level, neighbour][0] == 3:
            own.remove(given)
        if mode == 3:
            own.append(taken)
        adds = [values[child] for child in own if child in values]
        found[number] = adds if len(adds) in (0, mode) else None
    return found


def _leave(
    level: int,
    number: int,
    above: dict[int, Value],
    modes: dict[tuple[int, int], tuple[int, bool]],
    out: dict[int, int],
    places: Sequence[tuple[int, int]],
) -> str:
    """Let a switch's sum leave, if it gives it out; why that is wrong."""
    if number not in above or not modes[level, number][1]:
        return ""
    owner, count = above.pop(number)
    left_half = number % 2 == 1 and number != (1 << level) - 1
    if left_half and above.get(number + 1, (-1, 0))[0] == owner and not modes[level, number + 1][1]:
        count += above.pop(number + 1)[1]
    first, end = places[owner]
    if count != end - first or owner in out:
        return f"switch {number} of level {level} gives out {count} of the products of [{first}, {end})"
    out[owner] = count
    return ""
