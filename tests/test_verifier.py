"""A correct program is broken in one place at a time; verifier or interpreter must refuse each for the right reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dovetail.compile import Options, prepare, sample_inputs
from dovetail.errors import ProgramError
from dovetail.guests import zoo
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.interpret import check_program
from dovetail.program.ir import (
    Begin,
    Buffer,
    Call,
    Copy,
    LaunchStatement,
    Program,
    Role,
    Statement,
    View,
    Wait,
    queue_of,
)
from dovetail.program.verify import verify
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import plan
from dovetail.target import Target
from dovetail.targets import load_target


@dataclass(frozen=True)
class Case:
    """A correct program: MobileNetV1 in so little engine memory that most layers are cut and double-buffered."""

    program: Program
    target: Target
    graph: Graph
    inputs: dict[str, Array]

    def find(self, kind: type[Any], accept: Callable[[int, Any], bool] = lambda index, statement: True) -> list[int]:
        """Indices of the statements of a kind that are accepted."""
        statements = enumerate(self.program.statements)
        return [index for index, statement in statements if isinstance(statement, kind) and accept(index, statement)]

    def at(self, index: int) -> Any:
        """A statement."""
        return self.program.statements[index]

    def change(self, index: int, **changes: object) -> Program:
        """The program with some fields of one statement changed."""
        return self.put(index, replace(self.at(index), **changes))

    def put(self, index: int, *statements: Statement) -> Program:
        """The program with other statements from `index` on, as many as given."""
        found = list(self.program.statements)
        found[index : index + len(statements)] = statements
        return replace(self.program, statements=tuple(found))

    def drop(self, index: int) -> Program:
        """The program without a statement (a mark in its place, so that no other moves); waits for it wait for the
        one before it on its queue."""
        dropped = self.at(index)
        found = list(self.program.statements)
        found[index] = Begin(dropped.layer)
        if not isinstance(dropped, Wait):
            queue = queue_of(dropped, self.program.dma)
            same = [i for i in range(index) if not isinstance(found[i], Begin | Wait)]
            earlier = [i for i in same if queue_of(found[i], self.program.dma) == queue]
            for position, statement in enumerate(found):
                if isinstance(statement, Wait) and statement.statement == index:
                    found[position] = replace(statement, statement=earlier[-1])
        return replace(self.program, statements=tuple(found))

    def buffer(self, name: str, **changes: Any) -> Program:
        """The program with a buffer changed."""
        return replace(self.program, buffers={**self.program.buffers, name: replace(self.of(name), **changes)})

    def of(self, name: str) -> Buffer:
        """A buffer."""
        return self.program.buffers[name]

    def refuses(self, program: Program, message: str) -> str:
        """The verifier refuses a program with a message; the whole of it."""
        with pytest.raises(ProgramError, match=message) as refused:
            verify(program, self.target)
        return str(refused.value)

    def computes_wrongly(self, program: Program, message: str) -> None:
        """The verifier has nothing to object, the interpreter has."""
        verify(program, self.target)
        with pytest.raises(ProgramError, match=message):
            check_program(program, self.target, self.graph, self.inputs)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = tmp_path_factory.mktemp("model") / "mobilenet_v1.onnx"
    model.write_bytes(zoo.build("mobilenet_v1"))
    target = load_target("ne16")
    memories = tuple(replace(m, size=40 * 1024) if m.name == "L1" else m for m in target.memories)
    target = replace(target, memories=memories)
    graph = prepare(model, target, Options())
    regions = partition(graph, target)
    planned = plan(choose_layouts(graph, regions, target), target, {target.code: 300_000})
    return Case(planned.program, target, graph, sample_inputs(graph))


def is_tile_load(case: Case, copy: Copy) -> bool:
    """Whether a copy loads part of an activation for an engine."""
    return case.of(copy.source.buffer).role is Role.VALUE and case.of(copy.destination.buffer).role is Role.TILE


def short(view: View) -> View:
    """The view without its last row."""
    shape = view.type.shape
    return replace(view, type=TensorType((shape[0], shape[1] - 1, *shape[2:]), view.type.dtype))


def overlaps(case: Case, index: int) -> bool:
    """Whether a load reads rows that the load before it to the same layer read as well: a halo."""
    copy = case.at(index)
    before = [i for i in case.find(Copy, lambda i, c: i < index and c.layer == copy.layer and is_tile_load(case, c))]
    if not before or not is_tile_load(case, copy):
        return False
    other = case.at(before[-1])
    return bool(other.source.span[0] < copy.source.span[0] < other.source.span[1])


def test_the_program_has_everything_to_break(case: Case) -> None:
    verify(case.program, case.target)
    check_program(case.program, case.target, case.graph, case.inputs)
    assert len(case.find(LaunchStatement)) > 60
    assert len(case.find(Call)) >= 2
    assert {wait.queue for wait in case.program.statements if isinstance(wait, Wait)} == {"dma", "ne16"}
    assert case.find(Copy, lambda i, c: overlaps(case, i)), "no halo is copied"
    assert case.find(Copy, lambda i, c: bool(c.before)), "nothing is padded"
    assert {"_in0_0", "_in0_1", "_out_0", "_out_1"} <= {name[name.rfind("_", 0, -2) :] for name in case.program.buffers}


def test_address_outside_memory(case: Case) -> None:
    memory = case.target.memory("L1")
    name = case.at(case.find(LaunchStatement)[0]).result.buffer
    case.refuses(case.buffer(name, address=memory.base + memory.size - 8), "are outside L1")
    case.refuses(case.buffer(name, address=memory.base - 8), "are outside L1")


def test_misaligned_address(case: Case) -> None:
    name = case.at(case.find(LaunchStatement)[0]).result.buffer
    case.refuses(case.buffer(name, address=case.of(name).address + 4), "not aligned to 8 bytes")


def test_no_address(case: Case) -> None:
    case.refuses(case.buffer(case.at(case.find(LaunchStatement)[0]).result.buffer, address=None), "has no address")


def test_unknown_memory_and_buffer(case: Case) -> None:
    index = case.find(LaunchStatement)[0]
    case.refuses(case.buffer(case.at(index).result.buffer, memory="L3"), "lies in L3, which ne16 does not have")
    case.refuses(case.change(index, result=replace(case.at(index).result, buffer="gone")), "unknown buffer gone")


def test_wrong_address_within_a_buffer(case: Case) -> None:
    """A load from one row further up."""
    index = case.find(Copy, lambda i, c: is_tile_load(case, c) and c.source.offset >= c.source.strides[1])[0]
    source = case.at(index).source
    moved = replace(source, offset=source.offset - source.strides[1])
    case.computes_wrongly(case.change(index, source=moved), "elements of .* differ from the graph")


def before(case: Case, queue: str, accept: Callable[[Statement], bool]) -> Iterator[int]:
    """Waits for a queue that stand right before a statement that is accepted."""
    for index in case.find(Wait, lambda i, w: w.queue == queue):
        following = case.program.statements[index + 1 : index + 2]
        if following and accept(following[0]):
            yield index


def test_missing_wait_for_the_load_before_a_launch(case: Case) -> None:
    index = next(before(case, "dma", lambda s: isinstance(s, LaunchStatement)))
    case.refuses(case.drop(index), "reads .* while dma may still be writing there .*: a wait is missing")


def test_missing_wait_for_the_engine_before_a_store(case: Case) -> None:
    def is_store(statement: Statement) -> bool:
        return isinstance(statement, Copy) and case.of(statement.source.buffer).role is Role.TILE

    index = next(before(case, "ne16", is_store))
    case.refuses(case.drop(index), "reads .* while ne16 may still be writing there .*: a wait is missing")


def test_missing_wait_for_the_engine_before_a_reload(case: Case) -> None:
    def is_load(statement: Statement) -> bool:
        return isinstance(statement, Copy) and case.of(statement.destination.buffer).role is Role.TILE

    index = next(before(case, "ne16", is_load))
    case.refuses(case.drop(index), "writes .* while ne16 may still be reading there .*: a wait is missing")


def test_missing_wait_before_a_call(case: Case) -> None:
    index = next(i for queue in ("dma", "ne16") for i in before(case, queue, lambda s: isinstance(s, Call)))
    case.refuses(case.drop(index), "a wait is missing")


@pytest.mark.parametrize("part", range(4))
def test_every_wait_is_needed(case: Case, part: int) -> None:
    """Also a proof that none is superfluous."""
    for index in case.find(Wait)[part::8]:
        case.refuses(case.drop(index), "a wait is missing|ends while .* may still run")


def test_wait_for_a_statement_too_early(case: Case) -> None:
    position = next(
        i for i in before(case, "dma", lambda s: isinstance(s, LaunchStatement)) if case.at(i).statement > 20
    )
    earlier = case.find(Copy, lambda i, c: i < case.at(position).statement)
    case.refuses(case.change(position, statement=earlier[0]), "a wait is missing")


def test_wait_for_what_was_not_issued(case: Case) -> None:
    index = case.find(Wait)[0]
    later = case.find(Copy, lambda i, c: i > index)[0]
    case.refuses(case.change(index, statement=later), "has not been issued")
    case.refuses(case.change(index, statement=-1), "has not been issued")


def test_wait_on_the_wrong_queue(case: Case) -> None:
    index = case.find(Wait, lambda i, w: w.queue == "dma")[0]
    case.refuses(case.change(index, queue="ne16"), "does not run on ne16")
    case.refuses(case.change(index, statement=0), "does not run on dma")


def test_short_halo_of_the_first_tile(case: Case) -> None:
    """One row fewer: the engine reads bytes that nobody put there."""
    loads = case.find(Copy, lambda i, c: is_tile_load(case, c) and c.source.type.shape[1] > 2)
    first = min(loads)
    program = case.change(first, source=short(case.at(first).source), destination=short(case.at(first).destination))
    case.refuses(program, "bytes were never written|lifetimes overlap")


def test_short_halo_of_a_later_tile(case: Case) -> None:
    """One row fewer where a row of an older tile still lies: only the values show it."""
    found = []
    for index in case.find(Copy, lambda i, c: overlaps(case, i)):
        copy = case.at(index)
        program = case.change(index, source=short(copy.source), destination=short(copy.destination))
        try:
            verify(program, case.target)
        except ProgramError:
            continue
        found.append(program)
    assert found
    case.computes_wrongly(found[0], "elements of .* differ from the graph")


def test_halo_short_on_one_side(case: Case) -> None:
    index = case.find(Copy, lambda i, c: overlaps(case, i))[0]
    case.refuses(case.change(index, source=short(case.at(index).source)), r"copies uint8\[.* into uint8\[")


def test_overlapping_lifetimes(case: Case) -> None:
    """Input and constants of a tile at one address: wherever that is, and where no transfer meets another before, the
    message says that lifetimes overlap."""
    found = []
    for index in case.find(LaunchStatement):
        names = {view.buffer for view in case.at(index).operands.values()}
        tiles = sorted(name for name in names if case.of(name).role is Role.TILE)
        if len(tiles) == 2:
            program = case.buffer(tiles[0], address=case.of(tiles[1]).address)
            found.append(case.refuses(program, "lifetimes overlap|is outside|a wait is missing"))
    assert any("lifetimes overlap" in message for message in found), found


def test_result_over_its_own_operand(case: Case) -> None:
    """A convolution that writes where it still reads."""
    for kind in (LaunchStatement, Call):
        index = case.find(kind)[-1]
        statement = case.at(index)
        operand = statement.operands[statement.graph.inputs[0]]
        home = case.of(operand.buffer)
        program = case.buffer(statement.result.buffer, memory=home.memory, address=home.address)
        case.refuses(program, "overlap")


def test_constant_of_another_layer(case: Case) -> None:
    def is_constant(index: int, copy: Copy) -> bool:
        return case.of(copy.source.buffer).role is Role.CONSTANT

    loads = case.find(Copy, is_constant)
    large = max(loads, key=lambda i: case.of(case.at(i).source.buffer).nbytes)
    small = next(i for i in loads if case.at(i).source.buffer != case.at(large).source.buffer)
    source = replace(case.at(small).source, buffer=case.at(large).source.buffer)
    case.computes_wrongly(case.change(small, source=source), "the bytes of .* are not its packed constants")


def test_write_to_a_constant(case: Case) -> None:
    index = case.find(Copy, lambda i, c: case.of(c.source.buffer).role is Role.CONSTANT)[0]
    copy = case.at(index)
    case.refuses(case.change(index, destination=copy.source), "writes to the constant")


def test_view_beyond_its_buffer(case: Case) -> None:
    index = case.find(Copy, lambda i, c: is_tile_load(case, c))[0]
    copy = case.at(index)
    for name in ("source", "destination"):
        view = getattr(copy, name)
        end = case.of(view.buffer).nbytes
        case.refuses(case.change(index, **{name: replace(view, offset=end - 4)}), f"touches bytes .* which has {end}")
    case.refuses(case.change(index, source=replace(copy.source, offset=-1)), "touches bytes -1")


def test_swapped_statements(case: Case) -> None:
    wait = next(before(case, "dma", lambda s: isinstance(s, LaunchStatement)))
    case.refuses(case.put(wait, case.at(wait + 1), case.at(wait)), "a wait is missing")


def test_a_value_read_before_it_is_computed(case: Case) -> None:
    """The last two kernels of the core in the wrong order."""
    first, second = case.find(Call)[-2:]
    found = list(case.program.statements)
    found[first], found[second] = found[second], found[first]
    case.refuses(replace(case.program, statements=tuple(found)), "never written|lifetimes overlap|a wait is missing")


def test_wrong_shape(case: Case) -> None:
    index = case.find(LaunchStatement, lambda i, s: len(s.result.type.shape) == 4 and s.result.type.shape[1] > 1)[0]
    launch = case.at(index)
    case.refuses(case.change(index, result=short(launch.result)), r"writes uint8\[.*\], computes uint8\[")
    name = launch.graph.inputs[0]
    operands = {**launch.operands, name: short(launch.operands[name])}
    case.refuses(case.change(index, operands=operands), r"operand .* is uint8\[.*\], expected uint8\[")
    packed = {**launch.operands, "weights": replace(launch.operands["weights"], type=TensorType((16,), DType.UINT8))}
    case.refuses(case.change(index, operands=packed), "constant weights has 16 of")


def test_operand_in_the_wrong_memory(case: Case) -> None:
    launch = case.at(case.find(LaunchStatement)[0])
    far = case.target.memory("L2")
    program = case.buffer(launch.result.buffer, memory="L2", address=far.base + far.size // 2)
    case.refuses(program, "ne16 reaches L1 only; .* lies in L2")


def test_dropped_store(case: Case) -> None:
    stores = case.find(Copy, lambda i, c: case.of(c.source.buffer).role is Role.TILE)
    case.refuses(case.drop(stores[0]), "never written|overwritten")


def test_dropped_launch(case: Case) -> None:
    """Its result was never computed, or is that of an older tile."""
    for index in (case.find(LaunchStatement)[1], case.find(LaunchStatement)[-1]):
        with pytest.raises(ProgramError, match=r"never written|overwritten|differ from the graph"):
            program = case.drop(index)
            verify(program, case.target)
            check_program(program, case.target, case.graph, case.inputs)


def test_wrong_fill(case: Case) -> None:
    index = case.find(Copy, lambda i, c: bool(c.before))[0]
    copy = case.at(index)
    case.computes_wrongly(case.change(index, fill=(copy.fill + 1) % 256), "elements of .* differ from the graph")


def test_padding_off_by_one(case: Case) -> None:
    def shiftable(index: int, copy: Copy) -> bool:
        pairs = list(zip(copy.before, copy.source.type.shape, copy.destination.type.shape, strict=False))
        return len(pairs) == 4 and pairs[1][0] + pairs[1][1] < pairs[1][2]

    for index in case.find(Copy, lambda i, c: bool(c.before)):
        copy = case.at(index)
        row = copy.before[1] + (1 if shiftable(index, copy) else -1)
        program = case.change(index, before=(copy.before[0], row, *copy.before[2:]))
        with pytest.raises(ProgramError, match=r"differ from the graph|copies .* into"):
            verify(program, case.target)
            check_program(program, case.target, case.graph, case.inputs)


def test_wrong_packed_constants(case: Case) -> None:
    """The constants in the program are not those the tile was matched with."""
    name = next(iter(case.program.constants))
    spoilt = case.program.constants[name].copy()
    spoilt[0] ^= np.uint8(1)
    program = replace(case.program, constants={**case.program.constants, name: spoilt})
    case.computes_wrongly(program, "are not its packed constants|differ from the graph")
