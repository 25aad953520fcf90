"""Functions that layers share, compiled and run, against the graphs' own meaning in numpy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_kernel_cases import FAMILIES, Case, Maker
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Dequantize, Quantize
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.kernels import BLOCK, CoreKernel, CoreTraits, Parameter, generate, generate_all, helper_source, scope_of
from test_core_kernels import WARNINGS, build, c_array, convolution_region, describe, needs_compiler

COMPACT = ("conv2d", "depthwise", "fully_connected", "pooling")
"""Families with a compact form."""


def pairs(name: str, count: int) -> list[Case]:
    """`count` structures of a family, each with two sets of numbers: what shares a function as far as it can."""
    return [FAMILIES[name](Maker(f"{name} {seed}", sizes)) for seed in range(count) for sizes in ("first", "second")]


def all_of(
    graphs: Sequence[Graph],
    names: Sequence[str],
    little: Collection[int],
    core: CoreTraits = CoreTraits(),  # noqa: B008
    texts: dict[Hashable, CoreKernel] | None = None,
) -> list[CoreKernel]:
    scopes = [scope_of(graph, name, core, texts=texts) for graph, name in zip(graphs, names, strict=True)]
    return generate_all(scopes, little)


def kernels_of(cases: list[Case], little: bool, accumulators: int = 16) -> list[CoreKernel]:
    """The kernels of the cases as layers of one network."""
    names = [f"kernel_{number}" for number in range(len(cases))]
    chosen = range(len(cases) if little else 0)
    return all_of([case.graph for case in cases], names, chosen, CoreTraits(accumulators))


def kernel_text(kernels: list[CoreKernel]) -> str:
    """Everything the kernels are made of, each part once."""
    needed = [helper for kernel in kernels for helper in kernel.helpers]
    parts = ["#include <stdint.h>", helper_source(dict.fromkeys(needed))]
    parts += dict.fromkeys(text for kernel in kernels for text in kernel.declarations)
    parts += dict.fromkeys(kernel.block.definition() for kernel in kernels if kernel.block)
    parts += dict.fromkeys(kernel.shared for kernel in kernels)
    parts += dict.fromkeys(kernel.source for kernel in kernels)
    return "\n".join(parts)


def operand(
    number: int, case: Case, parameter: Parameter, constants: Mapping[str, Array], end: str = ""
) -> tuple[str, str]:
    """C name and definition of an array of exactly its size."""
    array = constants[parameter.value] if parameter.is_constant else case.inputs[parameter.value]
    name = f"{parameter.name}_{number}{end}"
    return name, c_array(name, parameter.c_type, np.asarray(array))


def call(number: int, case: Case, kernel: CoreKernel) -> tuple[list[str], str]:
    """Definitions of everything a kernel is given, and the statement that calls it."""
    definitions, arguments = [], [f"result_{number}"]
    for parameter in kernel.parameters[1:]:
        if parameter.value == BLOCK:
            assert kernel.block is not None
            given = {}
            for member in kernel.block.members:
                given[member.value], text = operand(number, case, member, kernel.block.constants, "_member")
                definitions.append(text)
            members = ", ".join(kernel.block.initialisers(given))
            definitions.append(f"static const {kernel.block.c_type} block_{number} = {{{members}}};")
            arguments.append(f"&block_{number}")
            continue
        name, text = operand(number, case, parameter, kernel.constants)
        definitions.append(text)
        arguments.append(name)
    return definitions, f"{kernel.name}({', '.join(arguments)});"


def program(cases: list[Case], kernels: list[CoreKernel]) -> str:
    """A program that ends with 1 + the number of the first case whose result is wrong."""
    parts, statements = ["#include <string.h>", "#include <stdio.h>", kernel_text(kernels)], []
    for number, (case, kernel) in enumerate(zip(cases, kernels, strict=True)):
        wanted = evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
        kind = kernel.parameters[0].c_type
        definitions, statement = call(number, case, kernel)
        parts += [*definitions, c_array(f"wanted_{number}", kind, wanted)]
        parts.append(f"static {kind} result_{number}[{wanted.size}] __attribute__((aligned(8)));")
        wrong = f"memcmp(wanted_{number}, result_{number}, sizeof wanted_{number}) != 0"
        statements += [f"    {statement}", f'    if ({wrong}) {{ printf("{number}\\n"); return 1; }}']
    return "\n".join([*parts, "int main(void)", "{", *statements, "    return 0;", "}", ""])


def check(cases: list[Case], kernels: list[CoreKernel], folder: Path) -> None:
    """Run all under the sanitisers, every operand an array of exactly its size; some functions must be shared."""
    blocks = [kernel.block for kernel in kernels if kernel.block and kernel.block.numbers]
    functions = {block.c_type for block in blocks}
    print(f"{len(cases)} layers; {len(blocks)} are told numbers by blocks, for {len(functions)} shared functions")
    assert len(blocks) >= 2 * len(functions) > 0
    sanitised = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    path = build(folder, program(cases, kernels), *sanitised)
    done = subprocess.run([str(path)], capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr[:3000]
    assert done.returncode == 0, f"wrong: {describe(cases[int(done.stdout)])}\n{kernels[int(done.stdout)].source}"


@needs_compiler
@pytest.mark.parametrize(("accumulators", "count"), [(16, 6), (6, 2)])
def test_compact_kernels_equal_the_graph(accumulators: int, count: int, tmp_path: Path) -> None:
    cases = [case for name in FAMILIES for case in pairs(name, count if name in COMPACT else 1)]
    check(cases, kernels_of(cases, True, accumulators), tmp_path)


@needs_compiler
def test_kernels_with_shared_borders_equal_the_graph(tmp_path: Path) -> None:
    cases = [case for name in ("conv2d", "depthwise") for case in pairs(name, 60)]
    kernels = kernels_of(cases, little=False)
    told = [number for number, kernel in enumerate(kernels) if kernel.block and kernel.block.numbers]
    alone = [number for number, kernel in enumerate(kernels) if kernel.block and number not in told]
    chosen = [*told, *alone[:8]]
    check([cases[number] for number in chosen], [kernels[number] for number in chosen], tmp_path)


def test_shared_functions_compile_for_riscv(tmp_path: Path) -> None:
    """Clang's warnings, and no call outside the text but memcpy, memset and float arithmetic."""
    pytest.importorskip("ziglang", reason="the cross compiler is not installed")
    cases = [case for name in COMPACT for case in pairs(name, 3)]
    source = tmp_path / "kernels.c"
    texts = [kernel_text(kernels_of(cases, little)) for little in (True, False)]
    for text in texts:
        source.write_text(text)
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            "riscv32-freestanding-none",
            "-O2",
            "-mcpu=generic_rv32+m+c",
            "-ffreestanding",
            *WARNINGS,
            "-Wno-unused-function",
            "-c",
            "-o",
            str(tmp_path / "kernels.o"),
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]


def test_what_is_the_same_in_all_layers_is_no_member() -> None:
    graphs = [convolution_region(outputs, seed, -seed) for seed, outputs in ((1, 8), (2, 8), (3, 16))]
    first, second, third = all_of(graphs, ["first", "second", "third"], range(3))
    assert first.name == second.name == third.name == "first"
    assert first.source == second.source == third.source and first.block and third.block
    assert first.block.numbers == {"outputs": 8, "pad_value": -1}
    assert third.block.numbers == {"outputs": 16, "pad_value": -3}
    alone = all_of(graphs[:1], ["alone"], [0])[0]
    assert alone.block and not alone.block.numbers, "one layer alone has its numbers in the text"
    assert len(first.source) < sum(len(generate(graph, "own").source) for graph in graphs) / 3


def test_borders_are_shared() -> None:
    """Layers with loops of their own call one function for the pixels at their borders."""
    graphs = [convolution_region(outputs, seed) for seed, outputs in ((1, 8), (2, 16))]
    first, second = all_of(graphs, ["first", "second"], [])
    assert first.shared == second.shared and first.source != second.source
    assert all("first_pixel(output, input, layer, " in kernel.source for kernel in (first, second))
    assert first.block and second.block
    assert (first.block.numbers["outputs"], second.block.numbers["outputs"]) == (8, 16)


def test_floats_in_a_block_are_seen() -> None:
    """The build asks `told` whether the compiler's floating point is needed."""
    builder = GraphBuilder("scaled")
    x = builder.input("x", TensorType((1, 4, 4, 2), DType.INT8))
    value = builder.add(Conv2d(), [x, builder.constant("w", np.ones((3, 1, 1, 2), np.int8))])
    for operator in (Dequantize(), Quantize(DType.INT8)):
        scale, zero_point = builder.constant("s", np.ones(1, np.float32)), builder.constant("z", np.zeros(1, np.int32))
        value = builder.add(operator, [value, scale, zero_point])
    (kernel,) = all_of([builder.finish([value])], ["kernel"], [0])
    assert "float" not in [parameter.c_type for parameter in kernel.parameters]
    assert "float" in [parameter.c_type for parameter in kernel.told]


def other_numbers(graph: Graph) -> list[Graph]:
    """The graph with other constants: in another order, the first number everywhere, the least everywhere."""
    kinds = (lambda array: np.roll(array, 1), lambda array: array.flat[0], lambda array: array.min())
    made = [{name: change(array) for name, array in graph.constants.items()} for change in kinds]
    return [
        replace(graph, constants={name: np.broadcast_to(new[name], old.shape) for name, old in graph.constants.items()})
        for new in made
    ]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_layers_alike_have_the_text_of_the_first(name: str) -> None:
    """Whatever the numbers of layers are, the text that they share is the text that each would have alone."""
    graphs = [graph for case in pairs(name, 8) for graph in (case.graph, *other_numbers(case.graph))]
    names, shared = [f"kernel_{number:03}" for number in range(len(graphs))], 0
    texts: dict[Hashable, CoreKernel] = {}
    several: dict[Hashable, CoreKernel] = {}
    ones = [[generate(*one, texts=known) for one in zip(graphs, names, strict=True)] for known in (None, texts)]
    layers = [all_of(graphs, names, (), texts=known) for known in (None, several)]
    for alone, found in zip(ones[0] + layers[0], ones[1] + layers[1], strict=True):
        assert (found.key, found.parameters, found.lanes) == (alone.key, alone.parameters, alone.lanes)
        assert (found.shared, set(found.helpers)) == (alone.shared, set(alone.helpers))
        for held, wanted in ((found.constants, alone.constants), *members(found, alone)):
            assert list(held) == list(wanted)
            for key, array in wanted.items():
                np.testing.assert_array_equal(held[key], array, strict=True)
        shared += found.name != alone.name
    assert shared > 16 or name not in ("conv2d", "fully_connected")


def members(one: CoreKernel, other: CoreKernel) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The constants and the numbers of two kernels' blocks."""
    if one.block is None or other.block is None:
        assert one.block is other.block
        return []
    numbers = [{name: np.array(value) for name, value in each.block.numbers.items()} for each in (one, other)]
    return [(one.block.constants, other.block.constants), (numbers[0], numbers[1])]
