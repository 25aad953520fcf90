"""Operators of a user's own: from the model's custom operator to C that equals their meaning, and what goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from command_line import dovetail, refused
from dovetail import api as dovetail_api
from dovetail.arrays import built, seeded_inputs
from dovetail.compile import Options
from dovetail.errors import DovetailError, ModelError
from dovetail.guests.check.suite import check
from dovetail.kernels import Optimize
from dovetail.operators import installed_operators, load_operators
from dovetail.read.tflite.file import read_map
from dovetail.run import run_build
from dovetail.targets import load_target
from porting import order
from tflite_writer import ModelWriter
from user_operators import compiled_from, run_everywhere

RISCV = load_target("riscv")

MINE = '''\
from dataclasses import dataclass

import numpy as np

from dovetail.operators import TensorType, UserOperator, require


@dataclass(frozen=True)
class RowDistance(UserOperator):
    """Distances of neighbours in a row, times a factor."""

    factor: int
    custom_code, domain, op_type = "RowDistance", "my.lab", "RowDistance"
    function = "row_distance"
    c = """
static void row_distance(int8_t *out, const int8_t *x, int32_t rows, int32_t size, int32_t factor)
{
    for (int32_t row = 0; row < rows; ++row) {
        for (int32_t i = 0; i + 1 < size; ++i) {
            const int32_t step = factor * (x[row * size + i + 1] - x[row * size + i]);
            out[row * (size - 1) + i] = (int8_t)(step < -128 ? -128 : step > 127 ? 127 : step);
        }
    }
}
"""

    def results(self, inputs):
        require(inputs[0].dtype.text == "int8" and inputs[0].shape[-1] > 1, f"expects rows of int8, got {inputs[0]}")
        return (TensorType((*inputs[0].shape[:-1], inputs[0].shape[-1] - 1), inputs[0].dtype),)

    def compute(self, inputs):
        return [np.clip(self.factor * np.diff(inputs[0].astype(np.int32)), -128, 127).astype(np.int8)]

    def numbers(self, inputs):
        return inputs[0].elements // inputs[0].shape[-1], inputs[0].shape[-1], self.factor
'''
"""A file of one operator."""


def mine(folder: Path, text: str = MINE, old: str = "", new: str = "") -> Path:
    """The file, with something else in one place."""
    assert old in text
    path = folder / "mine.py"
    path.write_text(text.replace(old, new, 1) if old else text)
    return path


def tflite_file(folder: Path) -> Path:
    """A network: an operator of one's own between two of TFLite's."""
    writer = ModelWriter()
    x, raised = (writer.tensor(name, (3, 20), "INT8", quantised=(0.1, 0)) for name in ("x", "raised"))
    far, y = (writer.tensor(name, (3, 19), "INT8", quantised=(0.1, 0)) for name in ("far", "y"))
    writer.operator("ADD", [x, x], [raised], "AddOptions")
    writer.custom("RowDistance", [raised], [far], {"factor": 3})
    writer.operator("ADD", [far, far], [y], "AddOptions")
    writer.ends([x], [y])
    path = folder / "net.tflite"
    path.write_bytes(writer.finish())
    return path


def onnx_file(folder: Path, domain: str = "my.lab", **attributes: Any) -> Path:
    """The operator alone, as ONNX has it."""
    node = helper.make_node("RowDistance", ["x"], ["y"], domain=domain, **(attributes or {"factor": -5}))
    x, y = (helper.make_tensor_value_info(n, TensorProto.INT8, [2, s]) for n, s in (("x", 9), ("y", 8)))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 3)]
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=9)
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def feeds(count: int, *shape: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.random.default_rng(n).integers(-128, 128, shape).astype(np.int8)} for n in range(count)]


@pytest.mark.parametrize("target", ["riscv", "cortex_m4", "ne16", "riscv_big_small"])
@pytest.mark.parametrize("optimize", list(Optimize))
def test_an_operator_of_ones_own_is_compiled_and_exact(tmp_path: Path, target: str, optimize: Optimize) -> None:
    own, known = load_operators(mine(tmp_path)), load_target(target)
    options = Options(operators=own, optimize=optimize, check=True, save_stages=tmp_path / "stages")
    for file, shape in ((tflite_file(tmp_path), (3, 20)), (onnx_file(tmp_path), (2, 9))):
        run_everywhere(compiled_from(file.read_bytes(), tmp_path, file.name, known, options), known, feeds(4, *shape))


def test_the_command_line_takes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model, build = mine(tmp_path), tflite_file(tmp_path), tmp_path / "build"
    given = ("--operators", file)
    assert "RowDistance" in refused(capsys, "compile", model, "-t", "riscv", "-o", build)
    assert dovetail("compile", model, "-t", "riscv", "-o", build, *given) == 0
    assert "an operator of a file of your own" in refused(capsys, "run", build)
    for simulator in ("iss", "host"):
        assert dovetail("run", build, *given, "--sim", simulator) == 0
        assert "outputs equal the integer graph\n" in capsys.readouterr().out
    assert dovetail("run", build, *given, "--check-layers") == 0
    capsys.readouterr()
    assert dovetail("explain", model, "-t", "ne16", *given, "--json") == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert any("RowDistance 1 (far)" in layer["operators"] and layer["engine"] == "core" for layer in layers)
    assert dovetail("report", build, *given, "-o", tmp_path / "page.html") == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [("factor * (x", "(factor + 1) * (x"), ("x[row * size + i])", "x[row * size])"), ("i + 1 < size", "i + 2 < size")],
)
def test_a_fault_in_its_c_is_found_by_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    file, build = mine(tmp_path, old=old, new=new), tmp_path / "build"
    assert dovetail("compile", tflite_file(tmp_path), "-t", "riscv", "-o", build, "--operators", file) == 0
    for simulator in ("iss", "host"):
        capsys.readouterr()
        assert dovetail("run", build, "--operators", file, "--sim", simulator) == 1
        assert "the outputs are not those of the integer graph" in capsys.readouterr().err


WRONG = {
    "compute": ("np.clip(self.factor", "np.clip(self.fctor", ("AttributeError", "in compute: ", "mine.py:")),
    "types": ("astype(np.int8)]", "astype(np.int16)]", ("compute gives int16[3, 19]", "results says int8[3, 19]")),
    "results": ("return (TensorType((*inputs[0]", "return (TensorType((*inputs[1]", ("IndexError", "in results: ")),
    "refused": ('== "int8"', '== "int16"', ("expects rows of int8, got int8[3x20]", "RowDistance 1 (far)")),
    "numbers": (
        "return inputs[0].elements",
        "return 1 // 0, inputs[0].elements",
        ("ZeroDivisionError", "in numbers: "),
    ),
    "Python": ("import numpy as np", "import nmpy as np", ("ModuleNotFoundError", "mine.py:3")),
    "attribute": ("factor: int", "fctor: int", ("factor is not known to RowDistance", "RowDistance 1 (far)")),
    "no dataclass": ("@dataclass(frozen=True)\n", "", ("is no dataclass", "@dataclass(frozen=True)")),
    "no meaning": ("def compute", "def computes", ("RowDistance has no compute",)),
    "no name": ('custom_code, domain, op_type = "RowDistance", "my.lab", "RowDistance"', "", ("defines no operator",)),
    "no C": ("static void row_distance(", "static void rows(", ("defines no function 'row_distance'",)),
    "our function": (
        "static void row_distance",
        "static int clip(int x) { return x; }\nstatic void row_distance",
        ("defines clip",),
    ),
    "our class": ("class RowDistance", "class Add", ("own operators is called Add",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_the_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    old, new, said = WRONG[name]
    file = mine(tmp_path, old=old, new=new)
    text = refused(capsys, "compile", tflite_file(tmp_path), "-t", "riscv", "-o", tmp_path / "b", "--operators", file)
    for part in said:
        assert part in text


def test_onnx_names_and_attributes_are_checked(tmp_path: Path) -> None:
    own = Options(operators=load_operators(mine(tmp_path)))
    for wrong, said in (
        ({"domain": "other.lab"}, "domain other.lab is not supported"),
        ({"factor": 1.5}, "factor is 1.5"),
        ({"factor": 2, "more": 1}, "more is not known"),
    ):
        file = onnx_file(tmp_path, **wrong)
        with pytest.raises(ModelError, match=said):
            compiled_from(file.read_bytes(), tmp_path, "net.onnx", RISCV, own)


SEVERAL = '''\
from dataclasses import dataclass

import numpy as np

from dovetail.operators import DType, TensorType, UserOperator


@dataclass(frozen=True)
class RunningSum(UserOperator):
    """Sums since the start, whether they are over a limit, and their number of steps; with a table and scratch."""

    limit: float
    names: tuple[int, ...] = (1, 2)
    custom_code = "RunningSum"
    function = "running_sum"
    c = ("static int32_t one_step(int32_t a, int32_t b) { return a + b; }", """
static void running_sum(
    int32_t *sums, float *over, int32_t *steps, int32_t *next, int32_t *count, const int8_t *x, const int32_t *before,
    const int32_t *counted, const int16_t *table, int32_t *room, int32_t size, float limit)
{
    for (int32_t i = 0; i < size; ++i) {
        room[i] = one_step(before[i], x[i] * table[i]);
        sums[i] = next[i] = room[i];
        over[i] = (float)room[i] > limit ? 1.0f : 0.0f;
    }
    *steps = *count = clip(*counted + 1, 0, 5);
}
""")

    def states(self, inputs):
        return np.full(inputs[0].shape, 7, np.int32), np.zeros((), np.int32)

    def results(self, inputs):
        x, number = TensorType(inputs[0].shape, DType.INT32), TensorType((), DType.INT32)
        return x, TensorType(x.shape, DType.FLOAT32), number, x, number

    def compute(self, inputs):
        sums = inputs[1] + inputs[0] * self.tables(())[0][: inputs[0].size]
        count = np.minimum(inputs[2] + 1, 5).astype(np.int32)
        return [sums, (sums > self.limit).astype(np.float32), count, sums, count]

    def tables(self, inputs):
        return [np.arange(1, 9, dtype=np.int16)]

    def scratch(self, inputs):
        return [TensorType(inputs[0].shape, DType.INT32)]

    def numbers(self, inputs):
        return inputs[0].elements, self.limit
'''


@pytest.mark.parametrize("target", ["riscv", "riscv_big_small", "ne16"])
def test_results_of_several_types_states_tables_and_scratch(tmp_path: Path, target: str) -> None:
    writer = ModelWriter()
    ends = []
    given = [writer.tensor(name, (8,), "INT8", quantised=(1.0, 0)) for name in "xy"]
    for number, x in enumerate(given):
        kinds = (("sums", (8,), "INT32"), ("over", (8,), "FLOAT32"), ("steps", (), "INT32"))
        own = [writer.tensor(f"{name}{number}", shape, kind) for name, shape, kind in kinds]
        writer.custom("RunningSum", [x], own, {"limit": 40.0 + number, "names": [3, 4, 5]})
        ends += own
    writer.ends(given, ends)
    known = load_target(target)
    options = Options(operators=load_operators(mine(tmp_path, SEVERAL)), check=True)
    rng = np.random.default_rng(3)
    inputs = [{name: rng.integers(-9, 10, 8).astype(np.int8) for name in "xy"} for _ in range(7)]
    found = run_everywhere(compiled_from(writer.finish(), tmp_path, "sum.tflite", known, options), known, inputs)
    total = np.full(8, 7, np.int32)
    for number, (one, feed) in enumerate(zip(found, inputs, strict=True), 1):
        total += feed["x"] * np.arange(1, 9, dtype=np.int32)
        np.testing.assert_array_equal(one["sums0"], total)
        np.testing.assert_array_equal(one["over0"], (total > 40).astype(np.float32))
        assert one["steps0"] == min(number, 5)


PORT = (
    MINE
    + """
    @classmethod
    def example(cls, sizes):
        from dovetail.operators import DType
        return cls(3), (TensorType((sizes["rows"], sizes["columns"] + 1), DType.INT8),)


from pathlib import Path

import dovetail.target as dt
from dovetail.targets import riscv
from dovetail.targets.vendorlib import Library, function, pointer, with_library

LIBRARY = Library("lab", Path(__file__).parent, "lab.h", ("lab.c",))
SHORT = dt.Constraint("rows have at most 32 values", lambda m: m.type("x").shape[-1], lambda size: size <= 32)
SIZES = [lambda m: m.type("x").elements // m.type("x").shape[-1], lambda m: m.type("x").shape[-1]]
DISTANCE = function(
    LIBRARY,
    "lab_distance",
    dt.apply(RowDistance, dt.operand("x"), name="rows"),
    [pointer("result", "int8_t"), pointer("x"), *SIZES, lambda m: m.operator("rows", RowDistance).factor],
    constraints=(SHORT,),
)
TARGET = replace(with_library(riscv.TARGET, LIBRARY, [replace(DISTANCE, prefer=True)]), operators=(RowDistance,))
"""
).replace("import dataclass\n", "import dataclass, replace\n")


def port(folder: Path, factor: str = "factor") -> Path:
    """A target whose library computes the operator."""
    head = "void lab_distance(int8_t *out, const int8_t *x, int32_t rows, int32_t size, int32_t factor)"
    body = MINE.partition('c = """\n')[2].partition('"""')[0].partition("\n")[2].replace("factor *", f"({factor}) *")
    (folder / "lab.h").write_text(f"#include <stdint.h>\n{head};\n")
    (folder / "lab.c").write_text(f'#include "lab.h"\n{head}\n{body}')
    return mine(folder, PORT)


def test_a_target_brings_operators_and_an_engine_computes_them(tmp_path: Path) -> None:
    known = load_target(str(port(tmp_path)))
    compiled = compiled_from(onnx_file(tmp_path).read_bytes(), tmp_path, "net.onnx", known)
    assert [region.place for region in compiled.regions] == ["lab"]
    run_everywhere(compiled, known, feeds(4, 2, 9))
    with built(compiled, known) as build:
        assert run_build(build, "iss", [seeded_inputs(build.manifest.inputs)]).outputs


@pytest.mark.parametrize("factor", ["factor", "factor + 1"])
def test_dovetail_check_tries_the_engine_with_the_operators_example(tmp_path: Path, factor: str) -> None:
    found = check(load_target(str(port(tmp_path, factor))), order(simulators=("host",)), lambda text: None)
    assert bool(found.findings) == (factor != "factor"), found.findings
    assert sum(one.cases for one in found.tested)


def test_every_bundled_operator_is_complete() -> None:
    for kind in installed_operators():
        assert kind.__doc__ and kind.c and kind.function
        assert "compute" in vars(kind) and "results" in vars(kind) and "numbers" in vars(kind)


KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=9)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, width=32)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, dict) else value


@given(st.dictionaries(KEYS, PLAIN, max_size=6))
def test_options_are_read_as_the_flatbuffers_library_writes_them(options: dict[str, object]) -> None:
    flexbuffers = pytest.importorskip("flatbuffers.flexbuffers", reason="it writes the options")
    data = bytes(flexbuffers.Dumps(options))
    assert _plain(read_map(data)) == _plain(flexbuffers.Loads(data))


@given(
    st.dictionaries(KEYS, PLAIN, max_size=5), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4)
)
def test_damaged_options_are_refused_at_once(options: dict[str, object], changes: list[tuple[int, int]]) -> None:
    flexbuffers = pytest.importorskip("flatbuffers.flexbuffers", reason="it writes the options")
    data = bytearray(flexbuffers.Dumps(options))
    for place, value in changes:
        data[place % len(data)] = value
    try:
        read_map(bytes(data))
    except ValueError as error:
        assert "custom options" in str(error)


def test_python_programs_give_the_classes_themselves(tmp_path: Path) -> None:
    own = load_operators(mine(tmp_path))
    options = Options(operators=own)
    build = dovetail_api.compile(tflite_file(tmp_path), "riscv", tmp_path / "build", options=options)
    assert build.run().proof == dovetail_api.open_build(tmp_path / "build", operators=own).run().proof
    with pytest.raises(DovetailError, match="RowDistance is an operator of a file"):
        dovetail_api.open_build(tmp_path / "build").run()


def test_an_unknown_build_says_which_file_is_missing(tmp_path: Path) -> None:
    own = Options(operators=load_operators(mine(tmp_path)))
    compiled = compiled_from(tflite_file(tmp_path).read_bytes(), tmp_path, "net.tflite", RISCV, own)
    from dovetail.prove import read_graph

    with built(compiled, RISCV) as build:
        with pytest.raises(DovetailError, match="RowDistance is an operator of a file"):
            read_graph(build)
        assert read_graph(build, own.operators).outputs == ("y",)


REAL = '''\
from dataclasses import dataclass

import numpy as np

from dovetail.operators import UserOperator


@dataclass(frozen=True)
class Halved(UserOperator):
    """Half of each value above a limit."""

    limit: float
    domain, op_type = "my.lab", "Halved"
    function = "half_of_large"
    c = """
static void half_of_large(float *out, const float *x, int32_t count, float limit)
{
    for (int32_t i = 0; i < count; ++i) {
        out[i] = x[i] > limit ? x[i] * 0.5f : x[i];
    }
}
"""

    def results(self, inputs):
        return inputs

    def compute(self, inputs):
        return [np.where(inputs[0] > np.float32(self.limit), inputs[0] * np.float32(0.5), inputs[0])]

    def numbers(self, inputs):
        return inputs[0].elements, self.limit
'''


def float_file(folder: Path) -> tuple[Path, Path]:
    """A float network with the operator between two layers, and data."""
    rng = np.random.default_rng(2)
    held = [
        numpy_helper.from_array(rng.normal(0, 0.4, shape).astype(np.float32), name)
        for name, shape in (("w", (8, 6)), ("u", (6, 5)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Halved", ["a"], ["b"], domain="my.lab", limit=0.25),
        helper.make_node("MatMul", ["b", "u"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, s]) for n, s in (("x", 8), ("y", 5)))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.lab", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], held), opset_imports=opsets, ir_version=9)
    (folder / "float.onnx").write_bytes(model.SerializeToString())
    np.savez(folder / "data.npz", x=rng.normal(0, 1, (32, 8)).astype(np.float32))
    return folder / "float.onnx", folder / "data.npz"


def test_quantize_leaves_it_on_floats_between_integers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = float_file(tmp_path)
    given = ("--operators", mine(tmp_path, REAL))
    made, build = tmp_path / "int8.onnx", tmp_path / "build"
    assert dovetail("quantize", model, "--data", data, "-t", "riscv", "-o", made, *given) == 0
    assert "an operator of a file of your own" not in capsys.readouterr().err
    assert dovetail("compile", made, "-t", "riscv", "-o", build, *given, "--check") == 0  # without --float
    assert dovetail("run", build, *given) == 0
    assert "outputs equal the integer graph\n" in capsys.readouterr().out  # to the bit
    figures = tmp_path / "accuracy.json"
    words = ("--data", data, "--float-model", model, "-t", "riscv", "--json", figures, *given)
    assert dovetail("accuracy", made, *words) == 0
    assert min(column["sqnr"] for column in json.loads(figures.read_text())["columns"]) > 25


def test_floats_around_it_still_want_to_be_quantised(tmp_path: Path) -> None:
    own = Options(operators=load_operators(mine(tmp_path, REAL)))
    data = float_file(tmp_path)[0].read_bytes()
    with pytest.raises(ModelError, match="the model is not quantised: FullyConnected"):
        compiled_from(data, tmp_path, "net.onnx", RISCV, own)
    compiled_from(data, tmp_path, "net.onnx", RISCV, replace(own, allow_float=True))
