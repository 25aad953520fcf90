"""The description of CMSIS-NN: its C compiles against the library's prototypes, and runs where the library is given."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.build.toolchain import compile_host
from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_graph, compile_model
from dovetail.errors import TargetError
from dovetail.explain import explain
from dovetail.guests import zoo
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, Offset, Requantize
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import DType, TensorType
from dovetail.run import open_build, run_build
from dovetail.targets import cmsis_nn, load_target
from firmware import require_chip
from test_end_to_end import network_file
from test_vendor_library import run_equals_graph

STUB = Path(__file__).parent / "cmsis_nn_stub"


def offloads(compiled: Compiled) -> set[str]:
    """Functions of the library a network uses."""
    return {region.offload.name for region in compiled.regions if region.offload is not None}


CONVOLVE, DEPTHWISE = "arm_convolve_wrapper_s8", "arm_depthwise_conv_wrapper_s8"
DENSE, AVERAGE, ADD = "arm_fully_connected_s8", "arm_avgpool_s8", "arm_elementwise_add_s8"
SOFTMAX = "arm_softmax_s8"
EXPECTED = {
    "ic_resnet8": {CONVOLVE, DENSE, AVERAGE, ADD, SOFTMAX},
    "kws_dscnn": {CONVOLVE, DEPTHWISE, DENSE, AVERAGE, SOFTMAX},
    "ad_autoencoder": {DENSE},
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_emitted_c_fits_the_prototypes(name: str, tmp_path: Path) -> None:
    """Without a warning; every layer that computes is a call of the library's."""
    compiled = compile_model(network_file(name), cmsis_nn.target(STUB, prefer=True), Options())
    assert offloads(compiled) == EXPECTED[name]
    assert [region.name for region in compiled.regions if region.macs and region.engine is None] == []
    write_project(compiled.project, tmp_path / "build")
    model = compiled.unit.model
    compile_host(
        tmp_path / "build",
        [Path(f"src/{model}.c")],
        include=[Path(p) for p in ("src", "runtime", "driver")],
        defines={"DOVETAIL_HOST": None},
        cache=tmp_path / "cache",
        flags=("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"),
    )


@pytest.mark.parametrize("simulator", ["host", "iss"])
def test_a_library_as_it_is_published(simulator: str, tmp_path: Path) -> None:
    """Sources in folders by kind, one for a type the compiler lacks, and <string.h>: firmware has only what is called,
    and no call for a memcpy of a few bytes."""
    if simulator == "iss":
        require_chip()
    target = cmsis_nn.target(STUB, prefer=True)
    compiled = compile_model(network_file("ad_autoencoder"), target, Options())
    sources = [name for name in compiled.project.target_sources if name.startswith("driver/Source")]
    named = {name.rpartition("/")[2] for name in sources}
    assert named == {"queries.c", "arm_fully_connected_s8.c", "arm_clamp_s8.c", "arm_nn_scaled.c"}
    run_equals_graph(compiled, target, tmp_path / "build", simulator)


def test_scratch_is_what_the_library_says() -> None:
    """112 bytes for 3x3 over 3 channels, where the formula without rounding gives 108."""
    compiled = compile_model(network_file("ic_resnet8"), cmsis_nn.target(STUB, prefer=True), Options())
    text = compiled.project.files[f"src/{compiled.unit.model}.c"]
    assert ".size = 112}" in text and ".buf = (void *)(void *)(" in text


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says where it is looked for."""
    monkeypatch.delenv(cmsis_nn.VARIABLE, raising=False)
    with pytest.raises(TargetError, match=f"CMSIS-NN: the library is not part of Dovetail\n.*set {cmsis_nn.VARIABLE}"):
        load_target(cmsis_nn.__file__)
    with pytest.raises(TargetError, match=r"library cmsis_nn: there is no file arm_nnfunctions\.h"):
        cmsis_nn.target(Path(__file__).parent)


def test_the_description_is_short() -> None:
    """At most 200 lines."""
    assert len(Path(cmsis_nn.__file__).read_text().splitlines()) <= 200


@pytest.mark.parametrize("name", [*sorted(EXPECTED), "vww_mobilenetv1"])
@pytest.mark.parametrize("simulator", ["host", "iss"])
def test_the_library_itself(name: str, simulator: str, tmp_path: Path) -> None:
    """Bit for bit the integer graph, where DOVETAIL_CMSIS_NN names the library."""
    if not os.environ.get(cmsis_nn.VARIABLE):
        pytest.skip(f"CMSIS-NN is not here: {cmsis_nn.VARIABLE} is not set")
    target = cmsis_nn.target(Path(os.environ[cmsis_nn.VARIABLE]), prefer=True)
    run_equals_graph(compile_model(network_file(name), target, Options()), target, tmp_path / "build", simulator)


@pytest.mark.parametrize("name", [*sorted(EXPECTED), "vww_mobilenetv1"])
def test_no_network_is_slower_with_the_library(name: str, tmp_path: Path) -> None:
    """On the simulated chip, beside Dovetail's own kernels alone."""
    if not os.environ.get(cmsis_nn.VARIABLE):
        pytest.skip(f"CMSIS-NN is not here: {cmsis_nn.VARIABLE} is not set")
    require_chip()
    cycles = []
    for target in (cmsis_nn.target(Path(os.environ[cmsis_nn.VARIABLE])), load_target("cortex_m4")):
        compiled = compile_model(network_file(name), target, Options())
        write_project(compiled.project, tmp_path / target.name)
        given = {name: np.zeros(compiled.graph.types[name].shape, np.int8) for name in compiled.graph.inputs}
        result = run_build(open_build(tmp_path / target.name, target), "iss", [given])
        cycles.append(result.simulation.inferences[0].total_cycles or 0)
    assert 0 < cycles[0] <= cycles[1]


def test_the_faster_of_library_and_core() -> None:
    """By its measured cycles every convolution is slower than the core's own: the plan is the core's alone."""
    for name in EXPECTED:
        both = compile_model(network_file(name), cmsis_nn.target(STUB), Options())
        alone = compile_model(network_file(name), load_target("cortex_m4"), Options())
        assert offloads(both) == set()
        assert [r.graph.nodes for r in both.regions] == [r.graph.nodes for r in alone.regions]


def test_what_the_library_would_take_is_said() -> None:
    """The losing figures of both layers a kernel of the core computes together."""
    told = explain(network_file("ic_resnet8"), cmsis_nn.target(STUB), Options(), lambda text: None)
    row = next(row for row in told.rows() if row["name"] == "add_3")
    assert len(re.findall(r"fastest there: [\d,]+ cycles, [\d,]+ on cmsis_nn arm_", row["why"])) == 2


def test_networks_that_round_once(tmp_path: Path) -> None:
    """An ONNX model, whose runtime rounds once, is computed with the library's rounding."""
    model = tmp_path / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    assert offloads(compile_model(model, cmsis_nn.target(STUB, prefer=True), Options())) >= {CONVOLVE, DEPTHWISE}


def test_a_product_and_a_largest() -> None:
    """What the networks above have not: the product of two images, and the largest of each window."""
    image = TensorType((1, 8, 8, 4), DType.INT8)
    wide, parameter = TensorType(image.shape, DType.INT32), TensorType((1,), DType.INT32)
    nodes = (
        Node(Offset(3, DType.INT32), ("one",), "left"),
        Node(Offset(-5, DType.INT32), ("other",), "right"),
        Node(Binary(BinaryKind.MULTIPLY), ("left", "right"), "product"),
        Node(Requantize(output_zero_point=7), ("product", "multiplier", "shift"), "scaled"),
        Node(Clip(-128, 127, DType.INT8), ("scaled",), "clipped"),
        Node(MaxPool2d((2, 2), (2, 2)), ("clipped",), "largest"),
    )
    types = {
        **dict.fromkeys(("one", "other", "clipped"), image),
        "largest": TensorType((1, 4, 4, 4), DType.INT8),
        **dict.fromkeys(("left", "right", "product", "scaled"), wide),
        "multiplier": parameter,
        "shift": parameter,
    }
    constants = {"multiplier": np.array([1 << 30], np.int32), "shift": np.array([-6], np.int32)}
    graph = Graph("product", ("one", "other"), ("largest",), nodes, types, constants)
    compiled = compile_graph(graph, cmsis_nn.target(STUB, prefer=True), Options())
    assert offloads(compiled) == {"arm_elementwise_mul_s8", "arm_max_pool_s8"}
    text = compiled.project.files["src/product.c"]
    assert ", 3, -5, (int8_t *)" in text and ", 7, 1073741824, -6, -128, 127, 256);" in text
