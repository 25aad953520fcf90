"""Placement: pins and their mistakes, limits of accuracy, costs at borders, and schedules against all there are."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path

import pytest

from command_line import dovetail, refused
from dovetail.compile import Options, compile_graph, prepare
from dovetail.documents import MOST_BYTES
from dovetail.errors import PlaceError
from dovetail.guests import zoo
from dovetail.ir.graph import Graph
from dovetail.ir.layout import blocked
from dovetail.program.ir import Begin, Wait
from dovetail.schedule.assign import assign, placement_reasons
from dovetail.schedule.assign.costs import ALL_ROOM, Candidate, CandidateStep, LayerOptions, QueueUse, Schedule, border
from dovetail.schedule.assign.exact import improve
from dovetail.schedule.assign.pins import parse_pins, read_pins
from dovetail.schedule.assign.timetable import _merit, heuristic, in_order, lower_bound, settled
from dovetail.schedule.layout import _waits_for
from dovetail.schedule.partition import initial_partition
from dovetail.schedule.plan.lower import in_turn
from dovetail.schedule.plan.lowered import LayerStatements
from dovetail.schedule.region import AssignedRegion, Region, Slot
from dovetail.target import Constraint, Memory, Target
from dovetail.targets import load_target, ne16
from two_engines.twins import machine

TWINS = machine()
TWINS_FILE = str(Path(__file__).parent / "two_engines" / "twins.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network that reads digits."""
    path: Path = tmp_path_factory.mktemp("place") / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    return path


@pytest.fixture(scope="module")
def graph(model: Path) -> Graph:
    """Its integer graph on the chip with two engines."""
    return prepare(model, TWINS, Options())


def placed(graph: Graph, target: Target, pins: Mapping[str, str]) -> dict[str, str]:
    """Region name -> where it is."""
    return {
        region.name: region.place for region in assign(graph, initial_partition(graph, target), target, pins).regions
    }


# -- pins


def test_pins_by_layer_and_by_operator(graph: Graph) -> None:
    """To one engine, to several, to the core; the reason given is the user's."""
    regions = [region for region in initial_partition(graph, TWINS) if region.engine is not None]
    operator = next(name for name in regions[1].origins if "Conv" in name)
    pins = {regions[0].name: "second", operator: "ne16+second", regions[-1].name: "core"}
    found = assign(graph, initial_partition(graph, TWINS), TWINS, pins)
    where = {region.name: region.place for region in found.regions}
    assert where[regions[0].name] == "second" and where[regions[1].name] == "ne16+second"
    assert where[regions[-1].name] == "core"
    reasons = placement_reasons(found.layers, found.schedule) if found.schedule else {}
    assert reasons[regions[-1].name].why == "the user pinned it to core"
    compile_graph(graph, TWINS, Options(pins=pins))  # the program computes the same


def test_one_engine_needs_no_placement_but_takes_pins(model: Path) -> None:
    """Regions are the partition's own; a pin to the core moves one layer and nothing else."""
    target = load_target("ne16")
    graph = prepare(model, target, Options())
    regions = initial_partition(graph, target)
    found = assign(graph, regions, target, {})
    assert found.regions == tuple(map(AssignedRegion.of, regions)) and found.describe() == ""
    layer = next(region.name for region in regions if region.engine is not None)
    moved = placed(graph, target, {layer: "core"})
    assert moved == {region.name: "core" if region.name == layer else region.place for region in regions}


def test_mistaken_pins_are_explained(graph: Graph) -> None:
    """Unknown names with what is near, unknown engines with what there is, an engine that cannot with its own limit."""
    conv = next(region for region in initial_partition(graph, TWINS) if region.engine is not None)
    with pytest.raises(PlaceError, match=f"'{conv.name}x': there is no such layer .*\n.*perhaps '{conv.name}'"):
        placed(graph, TWINS, {f"{conv.name}x": "core"})
    with pytest.raises(PlaceError, match=r"'third', which two_engines does not have\n.*use ne16, second, core"):
        placed(graph, TWINS, {conv.name: "third"})
    with pytest.raises(PlaceError, match="'ne16\\+core' is not one place"):
        placed(graph, TWINS, {conv.name: "ne16+core"})
    with pytest.raises(PlaceError, match=f"'{conv.name}' is pinned to core and '.*' to ne16, and both are this layer"):
        placed(graph, TWINS, {conv.name: "core", next(name for name in conv.origins): "ne16"})
    mover = next(region for region in initial_partition(graph, TWINS) if region.copied_by)
    with pytest.raises(PlaceError, match="elements only move"):
        placed(graph, TWINS, {mover.name: "ne16"})
    small = Constraint("there must be at most 4 channels", lambda m: m.result.shape[-1], lambda v: v <= 4)
    limited = machine(limits=(small,))
    with pytest.raises(PlaceError, match=r"second does not take it: .*there must be at most 4 channels; here: "):
        placed(graph, limited, {conv.name: "second"})
    assert "second" not in {part for where in placed(graph, limited, {}).values() for part in where.split("+")}


def test_pins_on_the_command_line() -> None:
    """Names may hold "="; what is no pin, and a layer in two places, is refused."""
    assert parse_pins(["a=b=core", " conv = ne16+second "]) == {"a=b": "core", "conv": "ne16+second"}
    for text in ("conv_4", "=core", "conv_4="):
        with pytest.raises(PlaceError, match="is not NAME=ENGINE"):
            parse_pins([text])
    with pytest.raises(PlaceError, match="pinned to core and to ne16"):
        parse_pins(["a=core", "a=ne16"])


def test_files_of_pins(tmp_path: Path) -> None:
    """TOML and JSON say the same."""
    (tmp_path / "pins.toml").write_text('[pins]\n"a/b" = "core"\nconv_4 = "second"\n')
    (tmp_path / "pins.json").write_text('{"pins": {"a/b": "core", "conv_4": "second"}}')
    assert read_pins(tmp_path / "pins.toml") == read_pins(tmp_path / "pins.json") == {"a/b": "core", "conv_4": "second"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.toml", b"[pins\n", r"p.toml:1: this is not TOML"),
        ("p.toml", b"\xff\xfe", "p.toml:1: the file of pins is not text in UTF-8"),
        ("p.json", b"[" * 100_000, "nested more than"),
        ("p.json", b'{"pins": {"a": "core", "a": "ne16"}}', "'a' stands here twice"),
        ("p.json", b"[]", "must be a mapping of pins, not "),
        ("p.json", b'{"pins": {}, "more": 1}', "more: there is no such entry"),
        ("p.toml", b"[pins]\na = 3\n", "p.toml:2: pins.a: must be a name of 1 to 1000 characters, not 3"),
        ("p.toml", b"[pins]\na = ''\n", "1 to 1000 characters"),
        ("p.json", json.dumps({"pins": {"a": "x" * 2000}}).encode(), "1 to 1000 characters"),
        (
            "p.json",
            json.dumps({"pins": {str(n): "core" for n in range(10_001)}}).encode(),
            "at most 10000 .* 10001 entries",
        ),
        ("p.toml", b"#" * (MOST_BYTES + 1), f"larger than {MOST_BYTES:,} bytes"),
    ],
)
def test_damaged_files_of_pins(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    """One clear sentence, whatever is in the file."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PlaceError) as caught:
        read_pins(tmp_path / name)
    assert re.search(message, str(caught.value))
    with pytest.raises(PlaceError, match="cannot be read"):
        read_pins(tmp_path / "absent.toml")


def test_explain_compares_candidates(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Costs of every candidate, the reason, and how good the placement is; a file and options together."""
    (tmp_path / "pins.toml").write_text('[pins]\nconv_3 = "core"\n')
    command = ["explain", str(model), "--target", TWINS_FILE, "--pins", str(tmp_path / "pins.toml"), "--pin"]

    def explained(*arguments: str) -> str:
        capsys.readouterr()
        assert dovetail(*arguments) == 0
        return capsys.readouterr().out

    layers = json.loads(explained(*command[:4], "--json"))["layers"]
    convs = [layer["name"] for layer in layers if layer["name"].startswith("conv")]
    (tmp_path / "pins.toml").write_text(f'[pins]\n{convs[0]} = "core"\n{convs[1]} = "core"\n')
    described = json.loads(explained(*command, f"{convs[1]}=second", "--json"))
    rows = {row["name"]: row for row in described["layers"]}
    assert rows[convs[0]]["engine"] == "core" and rows[convs[1]]["engine"] == "second"
    assert rows[convs[1]]["why"] == "the user pinned it to second"
    free = next(row for row in layers if row["name"] == convs[0])
    assert {"ne16", "second", "ne16+second", "core"} == {one["place"] for one in free["candidates"]}
    assert 0 < described["placement"]["bound"] <= described["placement"]["cycles"]
    text = explained(*command[:4])
    assert "cycles: ne16 " in text.replace("\n", " ") and "proven to be the least" in text
    assert "pin 'conv_x': there is no such layer or operator" in refused(capsys, *command, "conv_x=second")


# -- accuracy and borders


def test_what_costs_accuracy_is_used_only_where_pinned(graph: Graph) -> None:
    """An engine all of whose offloads are lossy computes what is pinned to it; for the rest its sentence is shown."""
    sentence = "it computes in analog, to about 6 bits"
    one, other = TWINS.engines
    analog = replace(other, offloads=tuple(replace(offload, lossy=sentence) for offload in other.offloads))
    for engines in ((one, analog), (analog, one)):
        target = replace(TWINS, engines=engines)
        assert not any("second" in where for where in placed(graph, target, {}).values())
        layer = next(region.name for region in initial_partition(graph, target) if region.engine is not None)
        found = assign(graph, initial_partition(graph, target), target, {layer: "second"})
        assert [region.name for region in found.regions if "second" in region.place] == [layer]
        free = assign(graph, initial_partition(graph, target), target, {})
        assert free.schedule is not None
        assert sentence in placement_reasons(free.layers, free.schedule)[layer].refused["second"]
    sole = replace(TWINS, engines=(analog,))
    assert not any(region.engine for region in initial_partition(graph, sole))


def test_borders_cost_relayouts_and_transfers(graph: Graph) -> None:
    """Nothing between engines alike; a row of each block's channels where layouts differ; bytes copied where memories
    do."""
    regions = [region for region in initial_partition(graph, TWINS) if region.engine is not None]
    maker, reader = next((a, b) for a in regions for b in regions if a.output in b.graph.inputs)
    value, dma = maker.output, ne16.DMA
    nbytes = graph.types[value].nbytes
    assert border(value, maker, reader, TWINS) == 0
    (maker_share,), (reader_share,) = maker.shares, reader.shares
    apart = replace(reader, shares=(replace(reader_share, engine=replace(reader_share.engine, memory="L1b")),))
    target = replace(TWINS, memories=(*TWINS.memories, Memory("L1b", 0x10400000, 1 << 16)))
    copied = dma.setup_cycles + -(-nbytes // dma.bytes_per_cycle)
    assert border(value, maker, apart, target) == copied
    channels = graph.types[value].shape[-1]
    halves = replace(maker_share.offload, layouts={"result": blocked((0, 3, 1, 2), 3, channels // 2)})
    laid = replace(maker, shares=(replace(maker_share, offload=halves),))
    rows = nbytes // (channels // 2)
    assert border(value, laid, reader, TWINS) == dma.setup_cycles + rows * -(-(channels // 2) // dma.bytes_per_cycle)
    assert border(value, laid, apart, target) > copied


# -- schedules


def sample(seed: int, region: Region) -> list[LayerOptions]:
    """Five layers on two engines and the core, some with constants to fetch, some with delays between them."""
    source = random.Random(seed)
    found: list[LayerOptions] = []
    for index in range(5):
        candidates = []
        for number, queue in enumerate(("a", "b", "core")):
            cycles = source.randint(1, 9) * (3 if queue == "core" else 1)
            if number == 0 or source.random() < 0.7:
                fetch = source.randint(0, 3) if queue != "core" else 0
                candidates.append(
                    Candidate(queue, (CandidateStep(region, cycles, (QueueUse(queue, 0, cycles),), fetch),))
                )
        if source.random() < 0.4:
            both = (QueueUse("a", 0, 3), QueueUse("b", 0, 4))
            candidates.append(Candidate("a+b", (CandidateStep(region, 4, both),)))
        after = tuple(one for one in range(index) if source.random() < 0.4)
        delays = {(one, 0, 0): source.randint(1, 4) for one in after if source.random() < 0.5}
        found.append(LayerOptions(region, tuple(candidates), {}, after, delays))
    return found


def best_of_all(layers: list[LayerOptions]) -> int:
    """The earliest end of all candidates in all orders, each as early as the ones before it in the order allow. Fetches
    are taken in every order too."""
    best = 1 << 30
    every = permutations(range(len(layers)))
    orders = [o for o in every if all(o.index(b) < o.index(i) for i in o for b in layers[i].after)]
    for picks in product(*(range(len(layer.candidates)) for layer in layers)):
        steps = [layer.candidates[pick].steps[0] for layer, pick in zip(layers, picks, strict=True)]
        fetching = [index for index, step in enumerate(steps) if step.fetch]
        for fetches in permutations(fetching):
            fetched, dma = {}, 0
            for index in fetches:
                dma += steps[index].fetch
                fetched[index] = dma
            for order in orders:
                free: dict[str, int] = {}
                ends = [0] * len(layers)
                for index in order:
                    start = max([fetched.get(index, 0), *(free.get(use.queue, 0) for use in steps[index].uses)])
                    for one in layers[index].after:
                        start = max(start, ends[one] + layers[index].delays.get((one, picks[one], picks[index]), 0))
                    ends[index] = start + steps[index].cycles
                    free |= {use.queue: start + use.length for use in steps[index].uses}
                best = min(best, max(ends))
    return best


def check(layers: list[LayerOptions], found: Schedule, dma: str) -> None:
    """A schedule keeps every queue's work apart, and every layer behind what it reads."""
    busy: dict[str, list[tuple[int, int]]] = {}
    ends: list[int] = []
    for index, (layer, pick) in enumerate(zip(layers, found.picks, strict=True)):
        ready = max((ends[one] + layer.delays.get((one, found.picks[one], pick), 0) for one in layer.after), default=0)
        step, start = layer.candidates[pick].steps[0], found.starts[index][0]
        assert start >= ready and start >= step.fetch
        for use in step.uses:
            busy.setdefault(use.queue, []).append((start + use.offset, start + use.offset + use.length))
        ends.append(start + step.cycles)
    assert max(ends) == found.finish
    for stretches in busy.values():
        ordered = sorted(stretches)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))


@pytest.mark.parametrize("seed", range(6))
def test_schedules_against_all_there_are(seed: int, graph: Graph) -> None:
    """The exact answer is the best of all, the heuristic's none better, the bound none worse; both are valid."""
    layers = sample(seed, initial_partition(graph, TWINS)[0])
    best = best_of_all(layers)
    fast, bound = heuristic(layers, "dma"), lower_bound(layers, "dma")
    exact, proven = improve(layers, fast, bound, "dma", 5.0)
    print(f"seed {seed}: bound {bound}, best {best}, heuristic {fast.finish}, exact {exact.finish}, proven {proven}")
    assert bound <= best == exact.finish == proven <= fast.finish <= 1.25 * best
    near = settled(layers, fast, "dma")
    assert near.finish <= fast.finish and _merit(near) <= _merit(fast)
    for found in (fast, exact, near, settled(layers, exact, "dma"), in_order(layers, exact, "dma")):
        check(layers, found, "dma")
        assert found.finish >= best
    assert improve(layers, fast, bound, "dma", 5.0) == (exact, proven)


@pytest.mark.parametrize(
    ("filled", "finish"), [(400, 15), (ALL_ROOM // 2, 15), (ALL_ROOM // 2 + 1, 21), (ALL_ROOM, 21)]
)
def test_constants_wait_where_there_is_room(filled: int, finish: int, graph: Graph) -> None:
    """Those of the last step are fetched while the first computes if they fit beside those of the second, else when
    has begun: by the quick schedule and by the exact one."""
    region = initial_partition(graph, TWINS)[0]
    layers = []
    for index, (cycles, fetch) in enumerate(((10, 0), (2, 1), (3, 8))):
        own = CandidateStep(
            region, cycles, (QueueUse("a", 0, cycles),), fetch, taken=cycles, engines=("a",), filled=(filled,)
        )
        after = (index - 1,) if index else ()
        layers.append(LayerOptions(region, (Candidate("a", (own,)),), {}, after, {}))
    fast = heuristic(layers, "dma")
    exact, _ = improve(layers, fast, lower_bound(layers, "dma"), "dma", 5.0)
    assert fast.finish == exact.finish == finish


def test_constants_and_a_relayout_take_turns(graph: Graph) -> None:
    """Both go by one queue before the layer begins: the quick schedule knows it too, else no solver finds any."""
    region = initial_partition(graph, TWINS)[0]
    made = CandidateStep(region, 1, (QueueUse("core", 0, 1),))
    uses = (QueueUse("a", 0, 10), QueueUse("dma", -4, 4))
    own = CandidateStep(region, 10, uses, 8, taken=10, engines=("a",), filled=(ALL_ROOM,))
    layers = [
        LayerOptions(region, (Candidate("core", (made,)),), {}, (), {}),
        LayerOptions(region, (Candidate("a", (own,)),), {}, (0,), {(0, 0, 0): 4}),
    ]
    fast = heuristic(layers, "dma")
    assert fast.finish == 8 + 4 + 10
    assert improve(layers, fast, lower_bound(layers, "dma"), "dma", 5.0) == (fast, fast.finish)


@pytest.mark.parametrize("seed", range(12))
def test_every_quick_schedule_is_one_a_solver_knows(seed: int, graph: Graph) -> None:
    """With copies before layers too: a solver that finds no schedule at all leaves the bound below."""
    layers = []
    for layer in sample(seed, initial_partition(graph, TWINS)[0]):
        candidates = list(layer.candidates)
        if layer.delays:
            (own,), lead = candidates[0].steps, max(layer.delays.values())
            candidates[0] = replace(
                candidates[0], steps=(replace(own, uses=(*own.uses, QueueUse("dma", -lead, lead))),)
            )
        layers.append(replace(layer, candidates=tuple(candidates)))
    fast = heuristic(layers, "dma")
    exact, proven = improve(layers, fast, lower_bound(layers, "dma"), "dma", 5.0)
    assert proven == exact.finish <= fast.finish


def test_a_relayout_is_waited_for_where_the_wait_is_short_beside_what_is_issued() -> None:
    kernel = Slot(100, 100, 140, issued=140)
    assert [_waits_for(end, kernel) for end in (90, 100, 110, 111)] == [True, True, True, False]
    assert not _waits_for(101, Slot(100, 100, 140)), "an engine's launch, which takes no time"


def test_tiles_of_layers_at_the_same_time_take_turns() -> None:
    """By their times; a layer without one comes right before the next; without any, one after the other."""

    def tiles(layer: int, count: int) -> LayerStatements:
        return LayerStatements(
            rest=[[Wait(layer, "x", number)] for number in range(count)], tail=[Wait(layer, "tail", 0)]
        )

    def text(slots: list[Slot | None]) -> str:
        made = in_turn(slots, [tiles(layer, 2) for layer in range(len(slots))])
        words = (
            "(" if isinstance(s, Begin) else "t" if s.queue == "tail" else str(s.statement)  # type: ignore[union-attr]
            for s in made
        )
        owners = [s.layer for s in made]
        return " ".join(f"{word}{owner}" for word, owner in zip(words, owners, strict=True) if word != "(")

    assert text([None, None]) == "00 10 t0 01 11 t1"
    assert text([Slot(0, 0, 10), Slot(2, 2, 20)]) == "00 01 10 t0 11 t1"
    assert text([Slot(0, 0, 10), None, Slot(4, 10, 12)]) == "00 01 11 t1 02 10 t0 12 t2"
