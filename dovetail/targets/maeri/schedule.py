"""`dovetail schedule`: the best order of a network, executed, with its files and its programming images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dovetail.documents import read_document
from dovetail.errors import ModelError, SimulationError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array
from dovetail.target import Ordered, OrderRequest
from dovetail.targets.maeri.bound import best_tile, bound
from dovetail.targets.maeri.coded import FORMS, read_image, write_image
from dovetail.targets.maeri.config import MaeriConfig, configured
from dovetail.targets.maeri.execute import execute, inner, programmed
from dovetail.targets.maeri.listing import arrange, best_order
from dovetail.targets.maeri.machine import clock_of
from dovetail.targets.maeri.network import OrderNetwork, network
from dovetail.targets.maeri.order import NEEDS, NetworkOrder, broken, check
from dovetail.targets.maeri.outputs import HEADINGS, FileItem, OrderFile, Phase, layer_rows, order_files, phases
from dovetail.targets.maeri.picture import page
from dovetail.targets.maeri.rules import Rules, load_rules
from dovetail.targets.maeri.tile import ChannelSegment, Item, in_order
from dovetail.targets.maeri.tree import Range


def ordering(graph: Graph, request: OrderRequest, config: MaeriConfig, rules: Rules) -> Ordered:
    """The best order that is found, simulated if the request has inputs; a file of rules stands instead of `rules`.

    Raises:
        DovetailError: the network has no layer, one does not fit, or rules or sizes are wrong.
    """
    config = configured(config, request.settings)
    rules = load_rules(request.rules) if request.rules else rules

    def report(source: str, makespan: int, least: int) -> None:
        request.progress(
            f"{source}: {makespan:,} cycles, {100 * (makespan / least - 1):.1f} % above the bound {least:,}"
        )

    if request.check:
        order, notes = checked(request.check, network(graph), config, rules)
    else:
        order, notes = best_order(network(graph), config, rules, request.seconds, report), []
        if wrong := broken(order, rules):
            raise AssertionError(f"the order breaks rules: {wrong}")
    timeline, rows, summary = phases(order), layer_rows(order), _summary(order)
    notes = [*notes, summary, *_prices(order, rules)]
    if request.inputs is not None:
        request.progress("simulating")
        notes.append(_simulation_note(order))
    files, refusals = images(order, timeline)
    notes += refusals
    if files and request.inputs is not None:
        notes.append(_image_note(order, files, request.inputs))
    files |= order_files(order, timeline, page(order, summary, rows))
    return Ordered(HEADINGS, tuple(cells for _, cells in rows), tuple(notes), files)


def _prices(order: NetworkOrder, rules: Rules) -> list[str]:
    """Sentences about what sizes of memories cost."""
    sizes = {name: 0 for name in NEEDS if getattr(order.config, name)}
    if not sizes:
        return []
    free = arrange(order.network, configured(order.config, sizes), rules)
    cost, ways = order.makespan - free.makespan, [f"{name}={NEEDS[name](free).used}" for name in sizes]
    return [f"The memories' sizes cost {cost:,} cycles: with {' and '.join(ways)} none."] if cost > 0 else []


def _simulation_note(order: NetworkOrder) -> str:
    """Check the order on the machine; a sentence about it."""
    cycles, graph = check(order), order.network.graph
    if cycles != order.makespan:
        raise AssertionError(f"{cycles} cycles instead of {order.makespan}")
    share = 100 * sum(work.layer.macs for work in order.network.works) / (cycles * order.config.multipliers)
    integers = all(graph.types[name].dtype.is_integer for name in graph.outputs)
    how = "equal to the network's in every bit" if integers else "those of the network, but for the order of additions"
    return (
        f"Simulated: {cycles:,} cycles, {share:.1f} % of the multipliers used, every product of every sum added once: "
        f"results {how}."
    )


def images(order: NetworkOrder, timeline: Sequence[Phase]) -> tuple[dict[str, bytes], list[str]]:
    """The programming images by file, and sentences that say why one is missing."""
    files, refusals = dict[str, bytes](), dict[str, None]()
    for name, form in FORMS.items():
        try:
            files[f"image/{name}.bin"] = write_image(programmed(order, form, timeline))
        except ModelError as error:
            refusals[f"No image for an FPGA: {error.where}: {error.what}; {error.hint}."] = None
    return files, list(refusals)


def _image_note(order: NetworkOrder, images: Mapping[str, bytes], inputs: Mapping[str, Array]) -> str:
    """Read the images back, execute them and compare with the graph; a sentence about it."""
    inside = inner(order.network.graph)
    values = evaluate(order.network.graph, inputs, (*inside.inputs, *inside.outputs))
    for name, data in images.items():
        run = execute(read_image(data), [values[each] for each in inside.inputs])
        for output, value in zip(run.outputs, inside.outputs, strict=True):
            if output.tobytes() != values[value].tobytes():
                raise AssertionError(f"{name} gives another {value}")
    sizes = " and ".join(f"{name} ({len(data):,} bytes)" for name, data in images.items())
    return f"{sizes} read back and executed: results equal to the network's in every bit."


def compare(order: NetworkOrder) -> tuple[int, int]:
    """Cycles of a network's layers one after the other: each alone, as it would be without the others; and each with
    the best tile of equal virtual neurons in step."""
    config, graph = order.config, order.network.graph
    alone = uniform = 0
    for work in order.network.works:
        # as if the layer's operand existed from the start
        only = replace(graph, nodes=(work.node,), inputs=(work.node.inputs[0],), outputs=(work.node.output,))
        alone += arrange(OrderNetwork(only, (work,)), config).makespan
        uniform += best_tile(work.layer, config)[1]
    return alone, uniform


def _summary(order: NetworkOrder) -> str:
    """One sentence: the order beside its bound and other ways."""
    (alone, uniform), least = compare(order), bound(order.network, order.config)
    times = f"{order.makespan / least.cycles:.3f} times the bound of {least.cycles:,}"
    return (
        f"{order.makespan:,} cycles, {times} ({least.binds}); "
        f"layer by layer {alone:,}, with the best equal virtual neurons {uniform:,}."
    )


_HINT = "take schedule.json of `dovetail schedule -o` as an example, and change its items"


def checked(path: Path, network: OrderNetwork, config: MaeriConfig, rules: Rules) -> tuple[NetworkOrder, list[str]]:
    """An order from a file, and a sentence about what was checked: memories, hardware, inputs, sums and rules.

    Raises:
        ModelError: the file is no order of this network; or, with all there is to say, the order cannot be kept.
    """
    document = read_document(path, "json", OrderFile, hint=_HINT, error=ModelError, what="the order")
    numbers = {work.name: number for number, work in enumerate(network.works)}
    items = list[Item]()
    for at, each in enumerate(document.value.items):
        where = document.place(("items", at))
        if each.layer not in numbers:
            hint = f"use {', '.join(numbers)}"
            raise ModelError(f"there is no layer '{each.layer}' in the network", where=where, hint=hint)
        items.append(_item(each, numbers[each.layer], network, config, where))
    if missing := [name for name, number in numbers.items() if number not in {item.work for item in items}]:
        raise ModelError(f"no item computes {', '.join(missing)}", where=str(path), hint="add items for it")
    order = NetworkOrder(network, config, in_order(items), 0)
    wrong = [f"rules: {rule}" for rule in broken(order, rules)]
    try:
        cycles = check(order)
    except SimulationError as error:
        wrong.append(f"{error.where}: {error.what}")
    if wrong:
        hint = "change these items; without --check an order is found"
        raise ModelError("; ".join(wrong), where=str(path), hint=hint)
    kept = "rules, " if rules != Rules() else ""
    note = f"{path.name} is kept: {kept}memories, multipliers, ports, lines, the tree, inputs and sums."
    return NetworkOrder(network, config, order.items, cycles), [note]


def _item(each: FileItem, number: int, network: OrderNetwork, config: MaeriConfig, where: str) -> Item:
    """An item of a layer, its sizes those of the layer and the engine."""
    layer = network.works[number].layer
    low, high = each.products or (0, layer.taps)
    first, end = each.multipliers
    parts = tuple(ChannelSegment(*part) for part in each.segments)
    item = Item(number, each.start, Range(first, end - first), each.tile, (low, high), parts)
    if wrong := item.fault(layer, config):
        hint = "give the tile, products and multipliers that belong together; count channels and positions from 0"
        raise ModelError(wrong, where=where, hint=hint)
    clock_of(config, layer, item)
    return item
