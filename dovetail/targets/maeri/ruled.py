"""A target's rules on the compiled chip: layers begin in the order that rules want, and each launch keeps its own.

The chip has no clock of its own, so places in time (`Pin.begin`, `Pin.end`) are for `dovetail schedule` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, Node
from dovetail.target import Match
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderNetwork, layers_in, own_name
from dovetail.targets.maeri.rules import Rules, consistent_rules
from dovetail.targets.maeri.task import ChipRules


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
        users, layers = graph.users(), {work.name: work.node for work in works}

        def last(node: Node) -> Node:
            """The last of the operators behind a layer that only it feeds."""
            while len(users[node.output]) == 1 and node.output not in graph.outputs:
                following = users[node.output][0]
                if following.output in names or any(name in graph.producers() for name in following.inputs[1:]):
                    break
                node = following
            return node

        pairs = [pair for chain in rules.before for pair in pairwise(chain)]
        pairs += [pair for chain in rules.priority for pair in combinations(chain, 2)]
        after: dict[str, set[str]] = {}
        for x, y in pairs:
            first, second = (layers[what.partition("[")[0]] for what in (x, y))
            if first is not second:
                after.setdefault(second.output, set()).add(last(first).output)
        return replace(graph, nodes=tuple(_named(node, names) for node in _sorted(graph, after)))

    return apply


def _named(node: Node, names: dict[str, str]) -> Node:
    """A layer under the name that rules know."""
    name = names.get(node.output)
    if name is None or own_name(node.origin or node.output) == name:
        return node
    return replace(node, origin=f"{(node.origin or node.output).partition(' (')[0]} ({name})")


def _sorted(graph: Graph, after: dict[str, set[str]]) -> list[Node]:
    """The nodes, each behind those it reads and those it must come after; else in their order."""
    waiting, done, nodes = list(graph.nodes), {*graph.inputs, *graph.constants}, list[Node]()
    while waiting:
        ready = (n for n in waiting if done.issuperset(n.inputs) and done >= after.get(n.output, set()))
        node = next(ready, waiting[0])  # a priority that the network's own order stands against
        waiting.remove(node)
        nodes.append(node)
        done.add(node.output)
    return nodes
