"""Launches of the engine: a task as words, orders of one or several layers side by side, a target's rules for them.

The chip has no clock of its own, so places in time (`Pin.begin`, `Pin.end`) are for `dovetail schedule` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, combinations, pairwise, permutations
from pathlib import Path

import numpy as np
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json

from dovetail.errors import DovetailError, ModelError, SimulationError
from dovetail.files import kept_answer
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.linear import Linear
from dovetail.ir.types import DType, Shape, TensorType
from dovetail.records import Record, field
from dovetail.target import Match
from dovetail.targets.maeri.coded import Step, items_of, words_of_items
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import OrderNetwork, layers_in, network, own_name
from dovetail.targets.maeri.order import NetworkOrder, check
from dovetail.targets.maeri.rules import Pin, Rules, consistent_rules, grain
from dovetail.targets.maeri.tile import Item, in_order
from dovetail.targets.maeri.words import Natural, WordReader, words_of


class Task(Record):
    """A step as an image's: a layer, or an addition of two images; and the items of its order.

    Addresses of features are those of the memory, addresses of constants are bytes from the start of the launch's.
    Results are int8, or int32 where the step ends in sums.
    """

    step: Step
    strides: tuple[tuple[Natural, ...], ...]
    """Bytes between neighbours along each axis, of each feature that is read and of the result."""
    unsigned: bool
    """Whether inputs are uint8, else int8."""
    items: tuple[Item, ...] = ()
    """None for an addition."""


def encode(task: Task) -> tuple[int, ...]:
    """The words of a launch."""
    return (*words_of(task, "items"), *words_of_items(task.items, "work"))


def decode(words: Sequence[int]) -> Task:
    """Read the words of a launch.

    Raises:
        SimulationError: they are too few, too many, or no task.
    """
    reader = WordReader(words, _wrong)
    task = replace(reader.record(Task, items=()), items=items_of(reader, work=0))
    if reader.left:
        raise _wrong(f"there are {reader.left} words after the last item")
    return task


def _wrong(what: str) -> SimulationError:
    hint = "look at the driver: WORDS must count the words of the whole task, and TASK must point to it"
    return SimulationError(f"these words are no task: {what}", where="maeri", hint=hint)


Part = tuple[Linear, Shape, Shape]
"""A layer, the shape of its image or vectors, and the shape of its weights."""
_TURNS = 3
"""Layers of which every turn is tried."""
_WORTH = 100
"""Multipliers are shared out where that could save one in so many cycles."""


class ChipRules(Record):
    """The user's rules for layers of a launch, which they know by name."""

    names: tuple[str, ...] = ()
    rules: Rules = field(default_factory=Rules)


FREE = ChipRules()
"""No rules."""


def of_parts(parts: Sequence[Part], names: Sequence[str] = ()) -> OrderNetwork:
    """Layers beside each other as a network with weights of zeros, with names if these are given."""
    builder, results = GraphBuilder("launch"), []
    for layer, image, shape in parts:
        x = builder.input(builder.fresh("x"), TensorType(image, DType.INT8))
        results.append(builder.add(layer, [x, builder.constant("weights", np.zeros(shape, np.int8))], "result"))
    net = network(builder.finish(results))
    works = (replace(work, name=name) for work, name in zip(net.works, names, strict=True)) if names else net.works
    return replace(net, works=tuple(works))


@lru_cache(maxsize=1024)
def side_by_side(parts: tuple[Part, ...], config: MaeriConfig, kept: ChipRules = FREE) -> NetworkOrder | None:
    """The order of a launch's layers that ends first, of those tried; its `makespan` is the machine's.

    Of several layers is tried one after the other without a gap, in every turn; and where more than that can be saved,
    multipliers shared out by the layers' work: to each of them, or to one, which the others then fill up.

    Returns:
        None where one of several layers does not fit.

    Raises:
        TargetError: the only layer does not fit, or not as the rules say.
        ModelError: rules for the only layer contradict each other.
    """
    if len(parts) > 1:
        return stored(("beside", parts, kept), of_parts(parts), config, lambda: find_together(parts, config, kept))
    net = of_parts(parts, kept.names)
    return stored(("alone", parts, kept), net, config, lambda: arrange(net, config, kept.rules))


def stored(
    question: object, network: OrderNetwork, config: MaeriConfig, find: Callable[[], NetworkOrder | None]
) -> NetworkOrder | None:
    """The order of a network from the cache, else from `find`, and then kept; None where there is none. The question's
    `repr` stands for all that the order depends on beside the configuration."""

    def answer() -> bytes:
        order = find()
        return encode_json(order and (order.makespan, order.items))

    kept = decode_json(kept_answer(Path(__file__).parent, f"{question!r} {config!r}", answer), type=_KeptOrder)
    return NetworkOrder(network, config, kept[1], kept[0]) if kept else None


_KeptOrder = tuple[int, tuple[Item, ...]] | None
"""Makespan and items."""


def find_together(parts: tuple[Part, ...], config: MaeriConfig, kept: ChipRules = FREE) -> NetworkOrder | None:
    """As `side_by_side`, without the cache."""
    turns = list(permutations(range(len(parts)))) if len(parts) <= _TURNS else [tuple(range(len(parts)))]
    best = _first_to_end([_in_turn(parts, turn, config, kept) for turn in turns])
    macs = [work.layer.macs for work in of_parts(parts).works]
    if best is None or (best.makespan - sum(macs) // config.multipliers) * _WORTH < best.makespan:
        return best
    by_work = sorted(range(len(parts)), key=macs.__getitem__)
    ways = [(turn, _shares([macs[number] for number in turn], config)) for turn in (by_work, by_work[::-1])]
    ways += [(by_work, [(0, config.multipliers * quarters // 4)]) for quarters in (2, 3)]
    return _first_to_end([best, *(_in_turn(parts, turn, config, kept, places) for turn, places in ways if places)])


def _first_to_end(orders: Sequence[NetworkOrder | None]) -> NetworkOrder | None:
    return min((order for order in orders if order), key=lambda order: order.makespan, default=None)


def _in_turn(
    parts: tuple[Part, ...],
    turn: Sequence[int],
    config: MaeriConfig,
    kept: ChipRules,
    places: Sequence[tuple[int, int]] = (),
) -> NetworkOrder | None:
    """An order in which layers are laid out in turn, the first of them on multipliers [first, end) of their own; None
    where there is none."""
    net = of_parts(tuple(parts[number] for number in turn), [kept.names[number] for number in turn if kept.names])
    pins = tuple(Pin(work.name, place) for work, place in zip(net.works, places, strict=False))
    try:
        order = arrange(net, config, Rules(pin=pins) | kept.rules)
        cycles = check(order)
    except DovetailError:
        return None
    items = in_order(replace(item, work=turn[item.work]) for item in order.items)
    return NetworkOrder(of_parts(parts), config, items, cycles)


def _shares(work: Sequence[int], config: MaeriConfig) -> list[tuple[int, int]]:
    """Multipliers for each layer, by its products; none where one has no port."""
    width = grain(config)
    ports = config.multipliers // width
    ends = [round(total * ports / sum(work)) for total in accumulate(work)]
    spans = list(pairwise((0, *ends)))
    return [(first * width, end * width) for first, end in spans] if all(first < end for first, end in spans) else []


def chip_rules(matches: Sequence[Match], rules: Rules) -> ChipRules:
    """The rules of a launch of some layers.

    Raises:
        ModelError: a layer of the launch is to begin with one that is not in it.
    """
    if rules == Rules():
        return ChipRules()
    nodes = [match.nodes["layer"] for match in matches]
    names = tuple(own_name(node.origin or node.output) for node in nodes)
    for group in rules.together:
        layers = [what.partition("[")[0] for what in group]
        if set(layers) & set(names) and not set(layers) <= set(names):
            hint = "raise MaeriConfig.joint, or leave the rule to `dovetail schedule --rules`"
            raise ModelError(f"{', '.join(layers)} do not begin together on this chip", where="rules", hint=hint)
    return ChipRules(names, rules.about(names))


def in_ruled_order(rules: Rules, config: MaeriConfig) -> Callable[[Graph], Graph]:
    """A rewrite: nodes in the order that `before` and `priority` want, each layer under the name that rules know.

    It raises ModelError where rules name layers that are not there, contradict each other or name cycles.
    """

    def apply(graph: Graph) -> Graph:
        works = tuple(layers_in(graph))
        if not works:
            return graph
        net = OrderNetwork(graph, works)
        consistent_rules(rules, net, config)
        for pin in rules.pin:
            if pin.begin or pin.end is not None:
                hint = "leave begin and end to a file of --rules"
                raise ModelError(f"the compiled chip knows no cycles: {pin}", where="rules", hint=hint)
        names = {work.node.output: work.name for work in works}
        layers = {work.name: work.node.output for work in works}
        pairs = chain(*map(pairwise, rules.before), *(combinations(group, 2) for group in rules.priority))
        after: dict[str, set[str]] = {name: set() for name in names}
        for first, second in ((layers[what.partition("[")[0]] for what in pair) for pair in pairs):
            after[second] |= {first} - {second}
        return replace(graph, nodes=tuple(_named(node, names) for node in _sorted(graph, after)))

    return apply


def _named(node: Node, names: dict[str, str]) -> Node:
    """A layer under the name that rules know."""
    name = names.get(node.output)
    if name is None or own_name(node.origin or node.output) == name:
        return node
    return replace(node, origin=f"{(node.origin or node.output).partition(' (')[0]} ({name})")


def _sorted(graph: Graph, after: Mapping[str, set[str]]) -> list[Node]:
    """The nodes in their order, but each layer behind those it must come after, and what only layers feed right behind
    these."""
    waiting, done, nodes = list(graph.nodes), {*graph.inputs, *graph.constants}, list[Node]()
    while waiting:
        ready = [node for node in waiting if done.issuperset(node.inputs)]
        free = (node for node in ready if node.output not in after)
        kept = (node for node in ready if done >= after.get(node.output, set()))
        node = next(chain(free, kept), ready[0])  # else a priority that the network's own order stands against
        waiting.remove(node)
        nodes.append(node)
        done.add(node.output)
    return nodes
