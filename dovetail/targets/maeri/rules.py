"""What the user asks of an order beyond what the hardware does: rules, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.errors import ModelError
from dovetail.targets.maeri.work import Network

MAX_BYTES = 1 << 20
"""Largest file of rules read, in bytes."""
_KEYS = ("before", "apart", "at_most", "whole_filters")


@dataclass(frozen=True)
class Rules:
    """Conditions on an order; layers are named as the model names them."""

    before: tuple[tuple[str, str], ...] = ()
    """(x, y): y begins when all results of x exist."""
    apart: tuple[tuple[str, str], ...] = ()
    """(x, y): the two never work at the same time."""
    at_most: int | None = None
    """Virtual neurons that work at the same time; None for as many as fit."""
    whole_filters: bool = False
    """Whether all sums of an output channel come from one virtual neuron, as large as its kernel where that fits."""


def load_rules(path: Path) -> Rules:
    """Read rules from a small YAML file: `before` and `apart` are lists of pairs of layers, `at_most` a number,
    `whole_filters` true or false.

    Raises:
        ModelError: the file cannot be read, or says something else.
    """
    import yaml  # type: ignore[import-untyped]

    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise ModelError(f"there is no such file, or it is larger than {MAX_BYTES} bytes", where=str(path),
                         hint="check the spelling; rules are a small YAML file")
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ModelError(f"this is not YAML: {error}", where=str(path),
                         hint="write rules such as before: [[conv_0, conv_2]]") from error
    if not isinstance(found, dict) or set(found) - set(_KEYS):
        raise ModelError(f"rules are a mapping with some of {', '.join(_KEYS)}", where=str(path),
                         hint="leave out what is not one of these keys")
    most, whole = found.get("at_most"), found.get("whole_filters", False)
    if not (most is None or (type(most) is int and most >= 1)):
        raise ModelError(f"at_most must be a number of virtual neurons, at least 1, is {most!r}", where=str(path),
                         hint="give a whole number, such as at_most: 4")
    if type(whole) is not bool:
        raise ModelError(f"whole_filters must be true or false, is {whole!r}", where=str(path),
                         hint="give true or false")
    return Rules(_pairs(found, "before", path), _pairs(found, "apart", path), most, whole)


def _pairs(found: dict[str, object], key: str, path: Path) -> tuple[tuple[str, str], ...]:
    pairs = found.get(key) or []
    good = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(name, str) for name in pair) for pair in pairs
    )
    if not good:
        raise ModelError(f"{key} must be a list of pairs of layer names", where=str(path),
                         hint=f"write it such as {key}: [[conv_0, conv_2]]")
    assert isinstance(pairs, list)
    return tuple((pair[0], pair[1]) for pair in pairs)


def check(rules: Rules, network: Network) -> None:
    """Refuse rules that name no layer, and those that no order can keep.

    Raises:
        ModelError: naming the layer, or the smallest set of rules and dependencies that contradict each other.
    """
    names = {work.name: number for number, work in enumerate(network.works)}
    for name in (name for pair in (*rules.before, *rules.apart) for name in pair):
        if name not in names:
            raise ModelError(f"there is no layer '{name}' in the network", where="rules",
                             hint=f"use {', '.join(list(names)[:12])}{' ...' if len(names) > 12 else ''}")
    for pair in rules.apart:
        if pair[0] == pair[1]:
            raise ModelError(f"apart: [{pair[0]}, {pair[1]}] keeps a layer from itself", where="rules",
                             hint="leave this pair out")
    circle = _smallest_circle(rules, network, names)
    if circle:
        raise ModelError(f"they contradict each other: {'; '.join(circle)}", where="rules",
                         hint="leave one of them out")


def _smallest_circle(rules: Rules, network: Network, names: dict[str, int]) -> list[str]:
    """The sentences of the shortest circle of what must come before what; empty where there is none."""
    arrows: dict[int, dict[int, str]] = {number: {} for number in names.values()}
    for work in network.works:
        for earlier in network.before(work):
            sentence = f"{work.name} reads what {earlier.name} computes"
            arrows[names[earlier.name]][names[work.name]] = sentence
    for x, y in rules.before:
        arrows[names[x]].setdefault(names[y], f"{x} before {y}")
    best: list[str] = []
    for start in arrows:
        path = _shortest(arrows, start)
        if path and (not best or len(path) < len(best)):
            best = path
    return best


def _shortest(arrows: dict[int, dict[int, str]], start: int) -> list[str]:
    """The sentences of the shortest way from a layer back to itself."""
    came: dict[int, tuple[int, str]] = {}
    waiting: Sequence[int] = [start]
    while waiting:
        following = []
        for place in waiting:
            for to, sentence in arrows[place].items():
                if to == start:
                    path = [sentence]
                    while place != start:
                        place, earlier = came[place]
                        path.insert(0, earlier)
                    return path
                if to not in came:
                    came[to] = (place, sentence)
                    following.append(to)
        waiting = following
    return []
