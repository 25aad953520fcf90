"""A C library as a target: networks through the library's own C on the simulated chip and the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_model, prepare
from dovetail.errors import SimulationError, TargetError
from dovetail.ir.graph import evaluate
from dovetail.run import open_build, run_build
from dovetail.schedule.partition import partition, rivals
from dovetail.target import Target, operand
from dovetail.targets import riscv
from dovetail.targets.vendorlib import function, with_library
from firmware import require_chip
from test_end_to_end import network_file
from vendor_library import LATER, LIBRARY, TARGET, convolution


def run_equals_graph(compiled: Compiled, target: Target, folder: Path, simulator: str, count: int = 2) -> None:
    """Every output byte of random inputs equals the integer graph's."""
    write_project(compiled.project, folder)
    generator = np.random.default_rng(1)
    kinds = {name: compiled.graph.types[name] for name in compiled.graph.inputs}
    inputs = [
        {name: generator.integers(-128, 128, kind.shape).astype(kind.dtype.numpy) for name, kind in kinds.items()}
        for _ in range(count)
    ]
    result = run_build(open_build(folder, target), simulator, inputs)
    for given, outputs in zip(inputs, result.outputs, strict=True):
        expected = evaluate(compiled.graph, given)
        for value in compiled.graph.outputs:
            np.testing.assert_array_equal(outputs[value], expected[value])


@pytest.mark.parametrize("name", ["kws_dscnn", "ic_resnet8", "ad_autoencoder"])
@pytest.mark.parametrize("simulator", ["iss", "host"])
def test_a_network_through_the_library(name: str, simulator: str, tmp_path: Path) -> None:
    """Bit for bit the integer graph."""
    if simulator == "iss":
        require_chip()
    compiled = compile_model(network_file(name), TARGET, Options())
    run_equals_graph(compiled, TARGET, tmp_path / "build", simulator)


def test_the_calls_are_in_the_emitted_c() -> None:
    """Plain calls with pointers and constant structures, nothing waited for, the library's files beside them."""
    compiled = compile_model(network_file("kws_dscnn"), TARGET, Options())
    text = compiled.project.files["src/kws_dscnn_int8.c"]
    assert text.count("dovetail_check(vl_conv(&") == 5 and text.count("dovetail_check(vl_depthwise(&") == 4
    assert text.count("dovetail_check(vl_dense(64, 12, &") == 1
    assert "static const vl_window " in text and ".row_stride = 2" in text and "wait" not in text
    assert {"driver/vl.h", "driver/vl.c"} < compiled.project.files.keys()
    assert "driver/vl.c" in compiled.project.host_sources


@pytest.mark.parametrize("simulator", ["iss", "host"])
def test_a_function_that_only_starts_is_waited_for(simulator: str, tmp_path: Path) -> None:
    """The library computes nothing before `vl_wait`, so that a wait too late would leave old bytes."""
    if simulator == "iss":
        require_chip()
    compiled = compile_model(network_file("ic_resnet8"), LATER, Options())
    text = compiled.project.files["src/ic_resnet8_int8.c"]
    assert "_launched_0 = vl_conv_start(&" in text and text.count("vl_wait(") == text.count("= vl_conv_start(")
    run_equals_graph(compiled, LATER, tmp_path / "build", simulator)


@pytest.mark.parametrize("simulator", ["iss", "host"])
@pytest.mark.parametrize(("target", "function"), [(TARGET, "vl_conv"), (LATER, "vl_wait")])
def test_a_device_that_is_gone(target: Target, function: str, simulator: str, tmp_path: Path) -> None:
    """The third convolution fails: the function, the layer and the status are named, and nothing is returned."""
    if simulator == "iss":
        require_chip()
    engine = replace(target.engines[0], defines={"VL_LAST": 2})
    compiled = compile_model(network_file("kws_dscnn"), replace(target, engines=(engine,)), Options())
    write_project(compiled.project, tmp_path / "build")
    build = open_build(tmp_path / "build", replace(target, engines=(engine,)))
    values = {name: np.zeros(kind.shape, kind.dtype.numpy) for name, kind in compiled.graph.types.items()}
    inputs = [{name: values[name] for name in compiled.graph.inputs}]
    with pytest.raises(SimulationError, match=rf"{function} of vl\w* in conv_\d+: the call failed: it returned -19"):
        run_build(build, simulator, inputs)


def test_a_status_that_no_function_returns() -> None:
    """A function without a result cannot say that it failed."""
    with pytest.raises(TargetError, match=r"library vl: vl_reset returns nothing that could be 0"):
        replace(LIBRARY, wait="vl_reset")


def test_a_function_the_header_does_not_declare() -> None:
    """Named, with the nearest that is declared; so is one with other parameters."""
    nothing = operand("x")
    message = r"library vl: vl\.h declares no function vl_convolve\n.*use vl_conv, the nearest"
    with pytest.raises(TargetError, match=message):
        function(LIBRARY, "vl_convolve", nothing, [])
    with pytest.raises(TargetError, match="library vl: vl_dense has 7 parameters; 1 are described"):
        function(LIBRARY, "vl_dense", nothing, [3])
    with pytest.raises(TargetError, match=r"library vl: there is no file gone\.h"):
        replace(LIBRARY, header="gone.h")


def test_a_scratch_query_that_disagrees() -> None:
    """Both numbers and both names."""
    wrong = convolution(LIBRARY, "vl_conv", scratch=lambda m: 96)
    message = "vl_conv_scratch says vl_conv needs [0-9]+ bytes of scratch, the declaration says 96"
    with pytest.raises(TargetError, match=message):
        compile_model(network_file("ic_resnet8"), with_library(riscv.TARGET, LIBRARY, [wrong]), Options())


def test_two_functions_for_one_pattern() -> None:
    """The first declared computes it, and the other is named with the reason."""
    conv = TARGET.engines[0].offloads[0]
    target = with_library(riscv.TARGET, LIBRARY, [conv, replace(conv, name="vl_conv_slow")])
    graph = prepare(network_file("ic_resnet8"), target, Options())
    region = next(region for region in partition(graph, target) if region.engine is not None)
    assert rivals(graph, target, region) == ("vl vl_conv_slow takes it too; vl vl_conv is declared first",)
    assert region.offload is not None and region.offload.name == "vl_conv"


def test_the_description_is_short() -> None:
    """At most 60 lines with something on them."""
    lines = (Path(__file__).parent / "vendor_library" / "__init__.py").read_text().splitlines()
    assert sum(1 for line in lines if line.strip()) <= 60
