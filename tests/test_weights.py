"""Constants as bytes in a file: the same arrays, the same outputs, in every build that takes them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from command_line import dovetail, refused
from dovetail.codegen.emit import weights as writing
from dovetail.codegen.emit import write_project
from dovetail.codegen.emit.stored import WeightOrder, find_weights, order_of
from dovetail.codegen.emit.weights import LEAST, BinaryArray, Weights, as_bytes, weights_files
from dovetail.compile import Compiled, Options, compile_graph, sample_inputs
from dovetail.ir.graph import GraphBuilder, evaluate
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.kernels.c import array_definition, elements
from dovetail.run import open_build, run_build
from dovetail.target import Match
from dovetail.targets import load_target
from dovetail.targets.ne16.packing import pack_linear_weights, pack_weights
from firmware import require_chip
from networks import Net, single
from test_core_kernels import needs_compiler
from test_export import answers, program

CASES = {"riscv": (8, 16, 40), "cortex_m0plus": (8, 16, 40), "ne16": (8, 32, 40), "macarray": (8, 16, 40)}
"""Target -> size, inputs and outputs of its layer."""


def made(target: str, weights: Weights) -> Compiled:
    graph = replace(single(*CASES.get(target, (8, 16, 40))), name="words")
    return compile_graph(graph, load_target(target), Options(weights=weights), interpret=False)


def types(array: Array) -> str:
    """The type of C with elements like these."""
    return "float" if array.dtype.kind == "f" else f"{array.dtype.name}_t"


ARRAYS = st.builds(
    lambda kind, order, count, seed: (
        np.random.default_rng(seed).integers(-(2**31), 2**31, count).astype(np.dtype(kind).newbyteorder(order))
    ),
    st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "f4"]),
    st.sampled_from("<>"),
    st.integers(1, 70),
    st.integers(0, 9),
)


@needs_compiler
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays=st.lists(ARRAYS, min_size=1, max_size=6), alignment=st.sampled_from([1, 16, 64]))
def test_the_assembler_makes_the_arrays_of_the_text(
    arrays: Sequence[Array], alignment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any elements in any order of bytes: equal to what the C compiler makes of them as text."""
    held = {f"bytes_{n}": BinaryArray(array, alignment, f".rodata.bytes_{n}") for n, array in enumerate(arrays)}
    source, content = weights_files("some", held)
    (tmp_path / "some_weights.S").write_text(source)
    (tmp_path / "some_weights.bin").write_bytes(b"".join(part.tobytes() for part in content))
    lines = ["#include <stdint.h>", "#include <string.h>"]
    tests = []
    for n, array in enumerate(arrays):
        native = array.astype(array.dtype.newbyteorder("="))
        lines.append(f"extern const {types(native)} bytes_{n}[{array.size}];")
        lines.append(array_definition(f"static const {types(native)} text_{n}[{array.size}]", elements(native)))
        tests += [f"if (memcmp(bytes_{n}, text_{n}, sizeof(text_{n})) != 0) {{ return {n + 1}; }}"]
        tests += [f"if ((uintptr_t)bytes_{n} % {alignment}u != 0) {{ return {n + 101}; }}"]
    (tmp_path / "main.c").write_text("\n".join([*lines, "int main(void) {", *tests, "return 0; }", ""]))
    words = [
        "cc",
        "-Wall",
        "-Werror",
        "-Wl,--fatal-warnings",
        f"-I{tmp_path}",
        "main.c",
        "some_weights.S",
        "-o",
        "some",
    ]
    subprocess.run(words, cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "some"], check=False).returncode == 0


def test_what_is_written_as_bytes() -> None:
    """The larger arrays whose bytes are those of C, and by itself of large networks alone."""
    large, small = np.zeros(writing.LARGE, np.int8), np.zeros(LEAST - 1, np.int8)
    constants = {"large": ("int8_t", large), "small": ("int8_t", small), "other": ("int8_t", large.astype(np.int16))}
    assert as_bytes(constants, Weights.BINARY) == as_bytes(constants, Weights.AUTO) == {"large"}
    assert not as_bytes(constants, Weights.TEXT)
    constants["large"] = ("int8_t", large[LEAST:])
    del constants["other"]
    assert not as_bytes(constants, Weights.AUTO) and as_bytes(constants, Weights.BINARY) == {"large"}
    assert Weights(Options().weights) is Weights.AUTO


@pytest.mark.parametrize("target", sorted(CASES))
def test_outputs_are_those_of_text(target: str, tmp_path: Path) -> None:
    """In firmware and on this computer; and a byte of the file that is another one is seen."""
    require_chip()
    text, compiled = made(target, Weights.TEXT), made(target, Weights.BINARY)
    assert not text.project.data and not [name for name in text.project.files if name.endswith("_weights.S")]
    constants = "src/words_constants.c"
    assert 2 * len(compiled.project.files[constants]) < len(text.project.files[constants])
    write_project(compiled.project, tmp_path / "build")
    build, inputs = open_build(tmp_path / "build"), sample_inputs(compiled.graph)
    expected = evaluate(compiled.graph, inputs)[compiled.graph.outputs[0]]

    def outputs(simulator: str) -> Array:
        return run_build(build, simulator, [inputs]).outputs[0][compiled.graph.outputs[0]]

    assert np.array_equal(outputs("iss"), expected) and np.array_equal(outputs("host"), expected)
    file = tmp_path / "build" / "src" / "words_weights.bin"
    file.write_bytes(bytes(byte ^ 0x55 for byte in file.read_bytes()))
    assert not np.array_equal(outputs("iss"), expected), "an object made of other bytes was taken"


@needs_compiler
def test_clean_under_sanitisers(tmp_path: Path) -> None:
    compiled = made("riscv", Weights.BINARY)
    write_project(compiled.project, tmp_path / "build")
    (tmp_path / "build" / "main.c").write_text(program("words"))
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    words = ["cc", *flags, "-DDOVETAIL_HOST", "-Isrc", "-Iruntime", *compiled.project.host_sources, "main.c"]
    subprocess.run([*words, "-o", "words"], cwd=tmp_path / "build", check=True)
    answers([tmp_path / "build" / "words"], compiled)


@pytest.mark.parametrize("gcc", ["riscv64-unknown-elf-gcc", "arm-none-eabi-gcc"])
def test_the_makefile_builds_the_firmware(gcc: str, tmp_path: Path) -> None:
    if not shutil.which(gcc):
        pytest.skip(f"{gcc} is not installed")
    write_project(made("riscv" if "riscv" in gcc else "cortex_m0plus", Weights.BINARY).project, tmp_path / "build")
    subprocess.run(["make", "-s", f"CC={gcc}", "words.elf"], cwd=tmp_path / "build", check=True)
    held = (tmp_path / "build" / "src" / "words_weights.bin").read_bytes()
    assert held[:LEAST] in (tmp_path / "build" / "words.elf").read_bytes()


@pytest.mark.parametrize("form", ["make", "cmake"])
def test_exports_build(form: str, tmp_path: Path) -> None:
    """And run: on this computer, for they are made for whichever compiler is told."""
    if not shutil.which(form):
        pytest.skip(f"{form} is not installed")
    compiled = made("riscv", Weights.BINARY)
    write_project(compiled.project, tmp_path / "build")
    folder = tmp_path / "library"
    assert dovetail("export", tmp_path / "build", "--to", form, "-o", folder) == 0
    (tmp_path / "main.c").write_text(program("words"))
    if form == "make":
        subprocess.run(["make", "-s", "CC=cc", "AR=ar"], cwd=folder, check=True)
    else:
        subprocess.run(["cmake", "-S", folder, "-B", folder], stdout=subprocess.DEVNULL, check=True)
        subprocess.run(["cmake", "--build", folder, "--target", "words"], stdout=subprocess.DEVNULL, check=True)
    words = ["cc", f"-I{folder / 'src'}", tmp_path / "main.c", folder / "libwords.a", "-o", tmp_path / "program"]
    subprocess.run(words, check=True)
    answers([tmp_path / "program"], compiled)


def test_forms_of_c_alone_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_project(made("riscv", Weights.BINARY).project, tmp_path / "build")
    for form in ("arduino", "cmsis-pack"):
        said = refused(capsys, "export", tmp_path / "build", "--to", form, "-o", tmp_path / form)
        assert "--weights text" in said and not (tmp_path / form).exists()
    for form in ("zephyr", "esp-idf", "platformio"):
        assert dovetail("export", tmp_path / "build", "--to", form, "-o", tmp_path / form) == 0
        assert {"words_weights.S", "words_weights.bin"} <= {file.name for file in (tmp_path / form / "src").iterdir()}


def a_match(weights: Array, depthwise: bool) -> Match:
    """A convolution, or a depthwise one, with these weights [outputs, taps, taps, channels]."""
    build = GraphBuilder("layer")
    x = build.input("x", TensorType((1, 8, 8, weights.shape[-1]), DType.INT8))
    w = build.constant("w", weights.astype(np.int8), DType.INT8)
    return Match(build.finish([build.add(DepthwiseConv2d() if depthwise else Conv2d(), [x, w], "y")]), "y")


def in_blocks(weights: Array, spoilt: str = "") -> dict[str, Array]:
    """Signed bytes behind 3 others, in the order (blocks of 8 outputs, taps, blocks of 4 channels, outputs, channels),
    blocks filled up; or spoilt so that there is no such order."""
    outputs, rows, columns, channels = weights.shape
    blocks = np.pad(weights, [(0, -outputs % 8), (0, 0), (0, 0), (0, -channels % 4)]).astype(np.int8)
    blocks = blocks.reshape(-1, 8, rows * columns, blocks.shape[3] // 4, 4).transpose(0, 2, 3, 1, 4)
    packed = np.concatenate([np.ones(3, np.uint8), np.ascontiguousarray(blocks).reshape(-1).view(np.uint8)])
    if spoilt == "refused" and not weights.any():
        raise ValueError("weights that are all zero")
    turned = packed[::-1].copy() if spoilt == "turned" else packed
    sums = {"sums": weights.sum(axis=(1, 2, 3)).astype(np.uint8)} if spoilt == "in two" else {}
    return {"weights": turned[turned != 0] if spoilt == "compressed" else turned, **sums}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), depthwise=st.booleans(), engine=st.sampled_from(["planes", "linear", "blocks"]))
def test_where_weights_lie(data: st.DataObject, depthwise: bool, engine: str) -> None:
    """What a packer does is found out, for every weight; and one that changes is another one."""
    outputs, channels, side = (data.draw(st.integers(1, most)) for most in (20, 40, 3))
    side, depthwise = (1, False) if engine == "linear" else (side, depthwise)
    channels = 16 * -(-channels // 16) if engine == "linear" else channels
    bits = data.draw(st.integers(2, 8)) if engine != "blocks" else 8
    shape = (1 if depthwise else outputs, side, side, channels)
    weights = np.random.default_rng(0).integers(-(1 << (bits - 1)), 1 << (bits - 1), shape)

    def pack(match: Match) -> dict[str, Array]:
        held = match.graph.constants["w"]
        if engine == "blocks":
            return in_blocks(held)
        if engine == "linear":
            return {"weights": pack_linear_weights(held[:, 0, 0], bits).reshape(-1)}
        return {"weights": pack_weights(held.transpose(3, 1, 2, 0) if depthwise else held, bits, depthwise).reshape(-1)}

    told, packed = find_weights(pack, a_match(weights, depthwise)), pack(a_match(weights, depthwise))["weights"]
    assert told is not None and told[0] == "weights"
    stored, flat = told[1], weights.reshape(shape[0], side * side, channels)
    found = stored.weights(packed)
    assert found is not None and np.array_equal(found, flat)
    assert stored.weights(packed[:0]) is None
    for lanes in (1, 2, 4, outputs):
        if shape[0] % lanes == 0:
            held = WeightOrder(lanes).of(flat).astype(np.int8)
            assert order_of(held, stored, packed) is not None
            held[data.draw(st.integers(0, held.size - 1))] ^= 1
            assert order_of(held, stored, packed) is None


@pytest.mark.parametrize("spoilt", ["turned", "in two", "compressed", "refused"])
def test_weights_that_lie_otherwise(spoilt: str) -> None:
    """Where a packer does something else, nothing is found, or something that is then seen not to be so."""
    weights = np.random.default_rng(0).integers(-128, 128, (20, 3, 3, 12))
    told = find_weights(lambda match: in_blocks(match.graph.constants["w"], spoilt), a_match(weights, False))
    packed = in_blocks(weights, spoilt)["weights"]
    flat = weights.reshape(20, 9, 12)
    assert told is None or order_of(WeightOrder(4).of(flat).astype(np.int8), told[1], packed) is None


@needs_compiler
@pytest.mark.parametrize("target", ["ne16", "macarray", "vta", "kestrel"])
def test_weights_stand_once(target: str, tmp_path: Path) -> None:
    """The build for this computer has no weights of its own, is clean under sanitisers, and depends on the engine's."""
    compiled = made(target, Weights.TEXT)
    host = compiled.project.files["src/words_host.c"]
    assert max(map(int, re.findall(r"static const int8_t held_\d+\[(\d+)\]", host)), default=0) <= 40
    write_project(compiled.project, tmp_path / "build")
    (tmp_path / "build" / "main.c").write_text(program("words"))
    strict = ["-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    flags = [*strict, "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DDOVETAIL_HOST"]
    words = ["cc", *flags, "-Isrc", "-Iruntime", "-Idriver", *compiled.project.host_sources, "main.c", "-o", "words"]
    subprocess.run(words, cwd=tmp_path / "build", check=True)
    answers([tmp_path / "build" / "words"], compiled)
    constants = tmp_path / "build" / "src" / "words_constants.c"
    constants.write_text(re.sub(r"(?m)^    (\d)", r"    85 ^ \1", constants.read_text()))
    plain = [word for word in words if "sanitize" not in word]  # shifts are others now, too
    subprocess.run(plain, cwd=tmp_path / "build", check=True)
    with pytest.raises(AssertionError):
        answers([tmp_path / "build" / "words"], compiled)


@needs_compiler
def test_weights_of_layers_alike_may_lie_otherwise(tmp_path: Path) -> None:
    """Of layers of one form the first is asked where weights lie; one whose weights do not lie so is asked again."""
    target, net = load_target("macarray"), Net("words", (8, 8, 16))
    value = net.x
    for _ in range(3):
        value = net.convolution(value, 16, 3)
    seen: set[bool] = set()

    def moved(pack: Callable[[Match], Mapping[str, Array]]) -> Callable[[Match], Mapping[str, Array]]:
        def packed(match: Match) -> dict[str, Array]:
            others = (array for name, array in match.graph.constants.items() if name != match.values["weights"])
            later = bool(sum(int(array.sum()) for array in others) % 2)
            seen.add(later)
            return {name: np.pad(array, (8 * later, 0)) for name, array in pack(match).items()}

        return packed

    (engine,) = target.engines
    offloads = tuple(replace(offload, pack=moved(offload.pack)) for offload in engine.offloads)
    compiled = compile_graph(
        net.finish(value), replace(target, engines=(replace(engine, offloads=offloads),)), Options(), interpret=False
    )
    assert len(seen) == 2
    host = compiled.project.files["src/words_host.c"]
    assert max(map(int, re.findall(r"static const int8_t held_\d+\[(\d+)\]", host)), default=0) <= 40
    write_project(compiled.project, tmp_path / "build")
    (tmp_path / "build" / "main.c").write_text(program("words"))
    words = ["cc", "-DDOVETAIL_HOST", "-Isrc", "-Iruntime", "-Idriver", *compiled.project.host_sources, "main.c"]
    subprocess.run([*words, "-o", "words"], cwd=tmp_path / "build", check=True)
    answers([tmp_path / "build" / "words"], compiled)
