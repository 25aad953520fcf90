"""Networks on an OpenCL device, bit for bit, and the program a user builds; skipped where there is no device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_kernel_cases import FAMILIES, Case, Maker
from dovetail.cli.main import main
from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_graph, compile_model
from dovetail.errors import DovetailError, SimulationError, TargetError
from dovetail.guests.tune.measure import measured
from dovetail.ir.graph import GraphBuilder, evaluate
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Lookup
from dovetail.ir.operators.movement import Concat, Pad, Slice
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import DType, TensorType
from dovetail.run import open_build, run_build
from dovetail.schedule.knobs import region_space
from dovetail.schedule.partition import partition, rivals
from dovetail.target import apply, constant, operand
from dovetail.targets.opencl import TARGET, with_kernels
from dovetail.targets.opencl.project import VARIABLE, environment
from dovetail.targets.opencl.vendor import BinaryKernel
from opencl_networks import (
    launches,
    library,
    moves,
    random_inputs,
    reads_all,
    require_device,
    run_equals_graph,
    side_by_side,
)
from test_end_to_end import network_file
from test_state import by_hand, frames, ring_network, same

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    """One there is."""
    require_device()


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Compiled, Path]]:
    """ResNet8 compiled, and its project."""
    compiled = compile_model(network_file("ic_resnet8"), TARGET, Options())
    folder = tmp_path_factory.mktemp("resnet") / "build"
    write_project(compiled.project, folder)
    yield compiled, folder


@pytest.mark.parametrize("name", ["ic_resnet8", "kws_dscnn", "ad_autoencoder", "vww_mobilenetv1"])
def test_a_network_equals_the_integer_graph(name: str, tmp_path: Path) -> None:
    """Bit for bit; all sums of products on the device; the input goes there once, and one value comes back."""
    compiled = compile_model(network_file(name), TARGET, Options())
    run_equals_graph(compiled, random_inputs(compiled.graph, 2), tmp_path / "build")
    assert all(region.engine is not None for region in compiled.regions if region.macs)
    assert [move.to_engine for move in moves(compiled)] == [True, False] and launches(compiled) >= 10


@given(st.data())
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_regions(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Layers, pools, movements, pointwise operators; random shapes, types, groups, dilations, paddings, endings."""
    seed = data.draw(st.integers(0, 1 << 30))
    cases = [FAMILIES[family](Maker(f"{family} {seed}")) for family in [*FAMILIES][:6]]
    graph, inputs = side_by_side([case for case in cases if reads_all(case)])
    compiled = compile_graph(graph, TARGET, Options(), interpret=False)
    assert launches(compiled) >= 3
    run_equals_graph(compiled, [inputs], tmp_path_factory.mktemp("regions") / "build")


@pytest.mark.parametrize("vector", [1, 8])
def test_widths_and_groups(vector: int, tmp_path: Path) -> None:
    """Every layer with another width of vectors and a work-group of its own; what does not fit is refused."""
    cases = [FAMILIES[family](Maker(f"{family} knobs")) for family in ("conv2d", "depthwise", "pooling")]
    graph, inputs = side_by_side(cases)
    regions = [region for region in partition(graph, TARGET) if region.engine is not None]
    choices = {}
    for region in regions:
        space = region_space(region, TARGET)
        points = [p for p in space.points() if p["placement"] == "opencl" and p["vector"] == vector]
        choices[region.name] = points[-1] if points else {}
        assert space.refusal({"vector": 1, "group_channels": 64, "group_columns": 1})
    compiled = compile_graph(graph, TARGET, Options(), choices=choices)
    run_equals_graph(compiled, [inputs], tmp_path / "build")
    assert measured(graph, TARGET, None, choices, simulator="host") > 1000, "nanoseconds, for dovetail tune"


def test_host_between_kernels(tmp_path: Path) -> None:
    """A softmax on the host in the middle: there and back once each, though the device reads both of its ends too."""
    builder = GraphBuilder("middle")
    x = builder.input("x", TensorType((1, 6, 6, 8), DType.INT8))
    pooled = builder.add(MaxPool2d((2, 2), (1, 1)), [x])
    soft = builder.add(FixedSoftmax(1 << 30, 22, -124, DType.INT8), [pooled])
    ends = [builder.add(MaxPool2d((3, 3), (1, 1)), [value]) for value in (soft, soft, pooled)]
    graph = builder.finish(ends)
    compiled = compile_graph(graph, TARGET, Options())
    assert [move.to_engine for move in moves(compiled)] == [True, False, True, False, False, False]
    assert launches(compiled) == 4
    run_equals_graph(compiled, random_inputs(graph, 2), tmp_path / "build")


def test_branches_stay_on_the_device(tmp_path: Path) -> None:
    """What is cut, padded and put side by side again between kernels is so there."""
    builder = GraphBuilder("branches")
    x = builder.input("x", TensorType((1, 8, 8, 8), DType.INT8))
    left = builder.add(Slice((0, 0, 0, 0), (1, 8, 8, 4), (1, 1, 1, 1)), [x])
    right = builder.add(MaxPool2d((3, 3), (1, 1)), [builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), -128), [x])])
    joined = builder.add(Concat(3), [x, left, right, x])
    graph = builder.finish([builder.add(MaxPool2d((2, 2), (2, 2)), [joined])])
    compiled = compile_graph(graph, TARGET, Options())
    assert [move.to_engine for move in moves(compiled)] == [True, False] and launches(compiled) == 5
    run_equals_graph(compiled, random_inputs(graph, 2), tmp_path / "build")


def test_states_are_carried_over(tmp_path: Path) -> None:
    """What a network keeps is the host's between inferences."""
    graph, feeds = ring_network(), frames(4)
    compiled = compile_graph(graph, TARGET, Options())
    write_project(compiled.project, tmp_path / "build")
    same(graph, run_build(open_build(tmp_path / "build"), None, feeds).outputs, by_hand(graph, feeds))
    assert launches(compiled) >= 2


def built(folder: Path, *words: str) -> Path:
    """The program of a project."""
    subprocess.run(["make", "-s", "-C", folder, *words], check=True)
    return next(path for path in folder.iterdir() if path.is_file() and not path.suffix and path.name != "Makefile")


@pytest.mark.parametrize("linked", [False, True])
def test_the_program_a_user_builds(resnet: tuple[Compiled, Path], linked: bool, tmp_path: Path) -> None:
    """`make` without a warning; files in, files out; the OpenCL library loaded, or linked with."""
    compiled = resnet[0]
    write_project(compiled.project, tmp_path / "build")
    words = ["DEFINES=-DDOVETAIL_HOST -DDOVETAIL_OPENCL_LINKED", f"LIBRARIES={library()}"] if linked else []
    program = built(tmp_path / "build", "CFLAGS=-std=c99 -Wall -Wextra -Wconversion -Wshadow -Werror -O1", *words)
    (inputs,) = random_inputs(compiled.graph, 1)
    (tmp_path / "in").write_bytes(next(iter(inputs.values())).tobytes())
    command, found = [program, tmp_path / "in", tmp_path / "out"], {**os.environ, **environment()}
    subprocess.run(command, check=True, env=found)
    expected = evaluate(compiled.graph, inputs)[compiled.graph.outputs[0]]
    np.testing.assert_array_equal(np.frombuffer((tmp_path / "out").read_bytes(), np.int8), expected.reshape(-1))
    (tmp_path / "in").write_bytes(b"few")
    short = subprocess.run(command, capture_output=True, text=True, env=found)
    assert short.returncode == 1 and "does not have the 3072 bytes of" in short.stderr


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of `opencl_shim.c`."""
    path = tmp_path_factory.mktemp("shim") / "shim.so"
    driver = HERE.parent / "dovetail" / "targets" / "opencl" / "driver"
    flags = ("-shared", "-fPIC", "-Wl,--no-as-needed", f"-I{driver}")
    subprocess.run(["cc", *flags, "-o", path, HERE / "opencl_shim.c", library(), "-ldl"], check=True)
    return path


def put_before(shim: Path, log: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Puts the shim before the real library for what runs from now on; it lists the calls in `log`."""
    real = library().removeprefix("-l:")
    given = {**environment(), VARIABLE: str(shim), "OPENCL_REAL": real, "OPENCL_LOG": str(log), **settings}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_transfers_are_few(
    resnet: tuple[Compiled, Path], shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the OpenCL library sees it: three inferences are three writes, three reads and 33 kernels, which are built and
    given their constants once."""
    (compiled, folder), log = resnet, tmp_path / "log"
    put_before(shim, log, monkeypatch)
    run_build(open_build(folder, TARGET), None, random_inputs(compiled.graph, 3))
    lines = log.read_text().splitlines()
    calls = [line.split()[0] for line in lines]
    assert lines.count("clEnqueueWriteBuffer 3072") == calls.count("clEnqueueWriteBuffer") == 3
    assert lines.count("clEnqueueReadBuffer 10") == calls.count("clEnqueueReadBuffer") == 3
    assert calls.count("clEnqueueNDRangeKernel") == 3 * launches(compiled) == 33
    assert calls.count("clBuildProgram") == 1 and calls.count("clCreateBuffer") == 1 + 10


FAULTS = [
    ("clEnqueueNDRangeKernel", 5, -5, r"clEnqueueNDRangeKernel failed in conv_4: CL_OUT_OF_RESOURCES \(-5\)"),
    ("clEnqueueNDRangeKernel", 14, -2, r"clEnqueueNDRangeKernel failed in conv_2: CL_DEVICE_NOT_AVAILABLE \(-2\)"),
    ("clEnqueueReadBuffer", 1, -36, r"clEnqueueReadBuffer failed in softmax_12: CL_INVALID_COMMAND_QUEUE \(-36\)"),
    ("clGetEventInfo", 8, -9999, r"a kernel failed in conv_7: an error without a name here \(-9999\)"),
    ("clSetKernelArg", 1, -51, r"clSetKernelArg failed in conv_0: CL_INVALID_ARG_SIZE \(-51\)"),
    ("clCreateBuffer", 4, -6, r"clCreateBuffer failed in conv_2: CL_OUT_OF_HOST_MEMORY \(-6\)"),
    ("clBuildProgram", 1, -11, r"clBuildProgram failed in the network's kernels: CL_BUILD_PROGRAM_FAILURE \(-11\)"),
]


@pytest.mark.parametrize(("call", "number", "code", "message"), FAULTS)
def test_a_device_that_fails(
    call: str,
    number: int,
    code: int,
    message: str,
    resnet: tuple[Compiled, Path],
    shim: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or is gone from some moment on: the call, the layer and the code."""
    compiled, folder = resnet
    fault = {"OPENCL_FAIL": call, "OPENCL_FAIL_AT": str(number), "OPENCL_CODE": str(code)}
    put_before(shim, tmp_path / "log", monkeypatch, **fault)
    with pytest.raises(SimulationError, match=f"^firmware: {message}"):
        run_build(open_build(folder, TARGET), None, random_inputs(compiled.graph, 2))


def test_a_device_that_is_not_there(
    resnet: tuple[Compiled, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No library, no such device; the emitted program ends with status 1."""
    compiled, folder = resnet
    inputs = random_inputs(compiled.graph, 1)
    monkeypatch.setenv("DOVETAIL_OPENCL_DEVICE", "GTX")
    with pytest.raises(SimulationError, match="there is no OpenCL device named GTX"):
        run_build(open_build(folder, TARGET), None, inputs)
    monkeypatch.setenv(VARIABLE, "/none/libOpenCL.so")
    with pytest.raises(SimulationError, match=r"the OpenCL library cannot be loaded: /none/libOpenCL\.so: .* set D"):
        run_build(open_build(folder, TARGET), None, inputs)
    (tmp_path / "in").write_bytes(next(iter(inputs[0].values())).tobytes())
    ended = subprocess.run([built(folder), tmp_path / "in", tmp_path / "out"], capture_output=True, text=True)
    assert ended.returncode == 1 and "the OpenCL library cannot be loaded" in ended.stderr
    with pytest.raises(DovetailError, match="opencl: the core is this computer, there is no chip to simulate"):
        run_build(open_build(folder, TARGET), "iss", inputs)


def test_the_emitted_c_can_be_read(resnet: tuple[Compiled, Path]) -> None:
    """A layer is a call; the .cl file is what the program gives the device."""
    files = resnet[0].project.files
    text, started = files["src/ic_resnet8_int8.c"], files["driver/opencl_kernels.c"]
    assert re.search(r"opencl_to_device\(ic_resnet8_int8_values( \+ \d+)?, 3072\);\n    \(void\)conv_\w{8}\(ic_", text)
    assert text.count("opencl_from_device(") == 1 and text.count("opencl_to_device(") == 1
    listed = re.search(r"source\[\] = \{\n(.*?)\n\};", started, re.DOTALL)
    assert listed is not None
    lines = [line.strip()[1:-4].replace('\\"', '"').replace("\\\\", "\\") for line in listed[1].splitlines()]
    assert lines == files["driver/ic_resnet8_int8.cl"].splitlines()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """compile, run without a word about a simulator, and explain."""
    model = str(network_file("kws_dscnn"))

    def printed(*words: str) -> str:
        """What the command prints."""
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert ended.value.code == 0
        return capsys.readouterr().out

    build = str(tmp_path / "build")
    summary = printed("compile", model, "--target", "opencl", "-o", build)
    assert "11 of 12 layers and 100.0 % of 2,656,768 MACs on an engine" in summary
    report = printed("run", build)
    assert "on opencl (host" in report and "100.0 % on opencl" in report and "us of kernels, by the device's" in report
    printed("run", build, "--json", str(tmp_path / "run.json"))
    layers = json.loads((tmp_path / "run.json").read_text())["layers"]
    assert all((layer["nanoseconds"] or 0) > 0 for layer in layers if layer["engine"] == "opencl")
    assert all(layer["nanoseconds"] is None is layer["cycles"] for layer in layers if layer["engine"] == "core")
    rows = json.loads(printed("explain", model, "--target", "opencl", "--json"))["layers"]
    assert [row["name"] for row in rows if row["engine"] != "opencl"] == ["reshape_10", "softmax_12"]


VENDOR = """
__kernel void table(__global const char *x, __constant char *values, __global char *y, int zero)
{
    y[get_global_id(0)] = values[x[get_global_id(0)] - zero];
}
"""
_MAKE = """
import sys, pyopencl
context = pyopencl.Context(pyopencl.get_platforms()[0].get_devices()[:1])
program = pyopencl.Program(context, sys.argv[1]).build(cache_dir=False)
open(sys.argv[2], "wb").write(program.get_info(pyopencl.program_info.BINARIES)[0])
"""


def vendor(file: Path, kernel: str = "table") -> BinaryKernel:
    """A vendor's table lookup, of which there is only a binary."""
    pattern = apply(Lookup, operand("x"), constant("table"))
    arguments = ("x", "table", "result", lambda match: match.type("x").dtype.low)
    return BinaryKernel(
        "vendor_table", pattern, file, kernel, arguments, items=lambda match: (match.result.elements, 1, 1)
    )


def looked_up() -> Case:
    """Pools with a table between them."""
    builder = GraphBuilder("looked_up")
    x = builder.input("x", TensorType((1, 9, 9, 8), DType.INT8))
    table = builder.constant("table", np.random.default_rng(2).integers(-128, 128, 256).astype(np.int8))
    value = builder.add(Lookup(), [builder.add(MaxPool2d((2, 2), (1, 1)), [x]), table])
    graph = builder.finish([builder.add(MaxPool2d((3, 3), (2, 2)), [value])])
    return Case(graph, random_inputs(graph, 1)[0])


def test_a_vendors_binary(tmp_path: Path) -> None:
    """Between two generated kernels, on the same bytes, and nothing is brought to the host for it."""
    pytest.importorskip("pyopencl", reason="pyopencl makes the binary")
    file = tmp_path / "table.bin"
    subprocess.run([sys.executable, "-c", _MAKE, VENDOR, file], check=True, stderr=subprocess.DEVNULL)
    target, case = with_kernels(TARGET, [vendor(file)]), looked_up()
    compiled = compile_graph(case.graph, target, Options())
    offloads = [region.offload.name for region in compiled.regions if region.offload]
    assert offloads == ["max_pool", "vendor_table", "max_pool"]
    assert [move.to_engine for move in moves(compiled)] == [True, False]
    assert "opencl max_pool takes it too; opencl vendor_table is preferred" in rivals(
        case.graph, target, compiled.regions[1]
    )
    run_equals_graph(compiled, [case.inputs], tmp_path / "build", target)
    wrong = compile_graph(case.graph, with_kernels(TARGET, [vendor(file, "tables")]), Options())
    with pytest.raises(SimulationError, match=r"clCreateKernel failed in lookup_1: CL_INVALID_KERNEL_NAME \(-46\)"):
        run_equals_graph(wrong, [case.inputs], tmp_path / "wrong", target)


def test_a_binary_that_is_none(tmp_path: Path) -> None:
    """A file that is not there, and one of another device."""
    with pytest.raises(TargetError, match="vendor: it is given 'w', which is no operand of its pattern"):
        BinaryKernel("vendor", operand("x"), tmp_path, "k", ("x", "w"), items=lambda match: (1, 1, 1))
    with pytest.raises(TargetError, match=r"none\.bin: the OpenCL program cannot be read: No such file"):
        compile_graph(looked_up().graph, with_kernels(TARGET, [vendor(tmp_path / "none.bin")]), Options())
    (tmp_path / "other.bin").write_bytes(b"for another device")
    compiled = compile_graph(looked_up().graph, with_kernels(TARGET, [vendor(tmp_path / "other.bin")]), Options())
    with pytest.raises(SimulationError, match=r"clCreateProgramWithBinary failed in lookup_1: CL_INVALID_BINARY"):
        run_equals_graph(compiled, [looked_up().inputs], tmp_path / "build")


def test_a_network_without_kernels(tmp_path: Path) -> None:
    """No device is asked for."""
    builder = GraphBuilder("soft")
    x = builder.input("x", TensorType((1, 10), DType.INT8))
    graph = builder.finish([builder.add(FixedSoftmax(1 << 30, 22, -124, DType.INT8), [x])])
    compiled = compile_graph(graph, TARGET, Options())
    run_equals_graph(compiled, random_inputs(graph, 1), tmp_path / "build")
    assert moves(compiled) == [] and "opencl_open" not in compiled.project.files["driver/opencl_kernels.c"]
