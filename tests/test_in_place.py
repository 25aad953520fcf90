"""Results that take the place of an operand: kernels, plans, and what the verifier refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Case, Maker
from dovetail.compile import Compiled, Options, compile_graph, compile_model, sample_inputs
from dovetail.errors import ProgramError
from dovetail.ir.crop import reads_in_place
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import DType, TensorType
from dovetail.kernels import CoreKernel, CoreTraits, generate, may_overwrite
from dovetail.program.interpret import check_program
from dovetail.program.ir import Call, overwritten
from dovetail.program.verify import verify
from dovetail.targets import load_target
from oracles import NETWORKS
from test_core_kernels import aligned, build, describe, needs_compiler
from test_end_to_end import network_file
from test_scheduled_kernels import DOT4, host_text


def residual(seed: int) -> Case:
    """A convolution or fully connected layer with an addition, or an addition alone; `skip` is added."""
    maker = Maker(f"in place {seed}")
    kind, outputs = ("conv", "dense", "add")[seed % 3], maker.number(1, 20)
    if kind == "conv":
        depth = maker.one_of(1, 3, 4, 8)
        x = maker.input((1, maker.number(3, 9), maker.number(3, 17), depth), DType.INT8)
        x = maker.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 3), x)
        weights = maker.constant((outputs, 3, 3, depth), DType.INT8)
        value = maker.requantize(maker.add(Conv2d((1, 1), (1, 1), 3, 0), x, weights))
    elif kind == "dense":
        x = maker.input((maker.number(1, 7), 12), DType.INT8)
        value = maker.requantize(maker.add(FullyConnected(3, 0), x, maker.constant((outputs, 12), DType.INT8)))
    else:
        value = maker.requantize(maker.input((1, 5, maker.number(1, 9), outputs), DType.INT8))
    skip = maker.builder.input("skip", TensorType(maker.builder.type_of(value).shape, DType.INT8))
    total = maker.requantize(maker.add(Add(), maker.requantize(skip), value))
    return maker.case(maker.add(Clip(-128, 127, DType.INT8), total))


def check(cases: Sequence[Case], kernels: Sequence[CoreKernel], folder: Path) -> None:
    """Run every kernel with `skip` where the result goes; compare with the graph."""
    library = ctypes.CDLL(str(build(folder, host_text(list(kernels)), "-O2", "-shared", "-fPIC")))
    for case, kernel in zip(cases, kernels, strict=True):
        wanted = evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
        place = aligned(case.inputs["skip"])[0]
        operands = []
        for parameter in kernel.parameters:
            array = kernel.constants if parameter.is_constant else case.inputs
            is_place = parameter.name == "output" or parameter.value == "skip"
            assert parameter.overlaps == is_place == ("restrict" not in parameter.declaration)
            operands.append(place if is_place else aligned(np.asarray(array[parameter.value]))[0])
        pointers = (ctypes.c_void_p * len(operands))(*(operand.ctypes.data for operand in operands))
        getattr(library, f"run_{kernel.name}")(pointers)
        got = np.frombuffer(place.tobytes(), np.int8).reshape(wanted.shape)
        assert np.array_equal(got, wanted), f"{describe(case)}\n{kernel.source}"


@needs_compiler
@pytest.mark.parametrize("instructions", [(), (DOT4,)], ids=["plain", "dot4"])
def test_kernels_written_over_an_operand(instructions: tuple[object, ...], tmp_path: Path) -> None:
    cases = [residual(seed) for seed in range(18 if instructions else 60)]
    assert all(reads_in_place(c.graph, "skip") and may_overwrite(c.graph) for c in cases)
    kernels = [
        generate(c.graph, f"kernel_{n}", CoreTraits(instructions=instructions), overwritten="skip")
        for n, c in enumerate(cases)
    ]
    assert bool(instructions) == any(kernel.instructions for kernel in kernels)
    check(cases, kernels, tmp_path)


def wide(builder: GraphBuilder, value: str) -> str:
    """An int8 value as int32, as an addition takes it."""
    numbers = [builder.constant("n", np.array([number], np.int32)) for number in (1 << 30, 1)]
    return builder.add(Requantize(), [value, *numbers])


def chain(last: str) -> Graph:
    """A value, an addition to it of two convolutions of it, and one more step."""
    builder = GraphBuilder("chain")
    x = builder.input("x", TensorType((1, 8, 8, 4), DType.INT8))
    generator = np.random.default_rng(5)

    def convolution(value: str) -> str:
        """A 1x1 convolution."""
        weights = builder.constant("w", generator.integers(-3, 4, (4, 1, 1, 4)).astype(np.int8))
        return builder.add(Clip(-128, 127, DType.INT8), [builder.add(Conv2d(), [value, weights])])

    first = convolution(x)
    second = convolution(convolution(first))
    total = builder.add(Add(), [wide(builder, first), wide(builder, second)])
    value = builder.add(Clip(-128, 127, DType.INT8), [total])
    if last == "pool":
        value = builder.add(MaxPool2d((1, 1), (1, 1)), [value])
    if last == "clip":
        value = builder.add(MaxPool2d((2, 2), (1, 1), ((0, 1), (0, 1))), [value])
        value = builder.add(Clip(-5, 5, DType.INT8), [builder.add(Clip(-9, 9, DType.INT8), [value])])
    return builder.finish([value])


def compiled(graph: Graph) -> Compiled:
    """For a core alone, verified and interpreted."""
    return compile_graph(graph, load_target("riscv"), Options())


def test_an_addition_is_written_over_what_dies_there() -> None:
    found = compiled(chain("none"))
    calls = [s for s in found.plan.program.statements if isinstance(s, Call)]
    assert [overwritten(call, found.plan.program.buffers) is not None for call in calls] == [False, False, True]
    (ram,) = (p for p in found.plan.placements if p.memory == "ram")
    assert ram.peak == ram.lower_bound == 2 * 256


def test_what_is_read_again_is_not_overwritten() -> None:
    """The first convolution's result is an output, too."""
    graph = chain("none")
    graph = replace(graph, outputs=(*graph.outputs, graph.nodes[1].output))
    found = compiled(graph)
    calls = [s for s in found.plan.program.statements if isinstance(s, Call)]
    assert overwritten(calls[-1], found.plan.program.buffers) != graph.nodes[1].output


def test_the_verifier_refuses_unsafe_overwriting() -> None:
    """A convolution placed over its own operand, and a result over an operand that is read again."""
    found, target = compiled(chain("none")), load_target("riscv")
    program = found.plan.program
    first, second, last = (s for s in program.statements if isinstance(s, Call))

    def moved(buffer: str, over: str) -> None:
        """The verifier refuses the program with one buffer placed over another."""
        changed = replace(program.buffers[buffer], address=program.buffers[over].address)
        verify(replace(program, buffers={**program.buffers, buffer: changed}), target)

    verify(program, target)
    with pytest.raises(ProgramError, match="reads at other places too"):
        moved(first.result.buffer, next(iter(first.operands.values())).buffer)
    with pytest.raises(ProgramError, match="reads at other places too"):
        moved(second.result.buffer, first.result.buffer)
    shifted = replace(program.buffers[last.result.buffer], address=program.buffers[first.result.buffer].address + 16)
    with pytest.raises(ProgramError, match="over its own operand"):
        verify(replace(program, buffers={**program.buffers, shifted.name: shifted}), target)
    graph = chain("none")
    twice = compiled(replace(graph, outputs=(*graph.outputs, graph.nodes[1].output)))
    program = twice.plan.program
    last = [s for s in program.statements if isinstance(s, Call)][-1]
    with pytest.raises(ProgramError, match="have been overwritten by"):
        moved(last.result.buffer, next(v.buffer for n, v in last.operands.items() if n == graph.nodes[1].output))


def test_depthwise_columns_computed_twice_stay_apart() -> None:
    """The kernel draws its last columns back over others: what it adds must still be there."""
    builder = GraphBuilder("depthwise")
    x = builder.input("x", TensorType((1, 4, 7, 2), DType.INT8))
    skip = builder.input("skip", TensorType((1, 4, 7, 2), DType.INT8))
    weights = builder.constant("w", np.full((1, 1, 1, 2), 3, np.int8))
    total = builder.add(Add(), [builder.add(DepthwiseConv2d(), [x, weights]), wide(builder, skip)])
    graph = builder.finish([builder.add(Clip(-128, 127, DType.INT8), [total])])
    assert reads_in_place(graph, "skip") and not may_overwrite(graph)
    assert not reads_in_place(graph, "x")


@pytest.mark.parametrize("last", ["none", "pool", "clip"])
def test_programs_in_place_equal_the_graph(last: str) -> None:
    graph, target = chain(last), load_target("riscv")
    found = compiled(graph)
    for seed in range(3):
        check_program(found.plan.program, target, found.graph, sample_inputs(graph, seed))


@pytest.mark.parametrize("name", NETWORKS)
def test_peaks_equal_the_bound(name: str) -> None:
    found = compile_model(network_file(name), load_target("riscv"), Options())
    (ram,) = (p for p in found.plan.placements if p.memory == "ram")
    print(f"{name}: {ram.peak} bytes")
    assert ram.peak == ram.lower_bound
    assert name != "ic_resnet8" or ram.peak == 32_768, "the addition is written over its operand"
