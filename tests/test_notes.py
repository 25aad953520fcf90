"""What users are told of a compilation goes one way: records with a kind and level, printed, in files, strict."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import dovetail as package
from command_line import dovetail, refused
from dovetail import DovetailError, Options
from dovetail.guests import zoo
from dovetail.notes import Kind, Note

CORE = Path(package.__file__).parent
STAGES = ("read", "quantize", "ir", "legalize", "schedule", "program", "kernels", "loops", "codegen", "operators")
"""Folders of what a compilation does; `compile.py` beside them."""


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    """The stages' modules."""
    paths = [CORE / "compile.py", *(path for folder in STAGES for path in sorted((CORE / folder).rglob("*.py")))]
    for path in paths:
        yield path, ast.parse(path.read_text("utf-8"))


def called(node: ast.AST) -> str:
    """The name of what a node calls; empty for another node."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_stages_tell_notes_and_nothing_else() -> None:
    """No stage prints, warns or logs, and all that is told is a note of a kind; each kind is used."""
    kinds = set[str]()
    for path, module in parsed():
        for node in ast.walk(module):
            place, name = f"{path.relative_to(CORE)}:{getattr(node, 'lineno', 0)}", called(node)
            assert name not in ("print", "showwarning", "getLogger"), place
            if name == "tell":
                assert isinstance(node, ast.Call)
                (said,) = node.args
                assert called(said) == "Note" or ast.unparse(said) == "note", place
            if name == "Note":
                assert isinstance(node, ast.Call)
                assert ast.unparse(node.args[0]).startswith("Kind."), place
                kinds.add(ast.unparse(node.args[0]).removeprefix("Kind."))
    assert kinds == {kind.name for kind in Kind if kind not in (Kind.FIGURES, Kind.HIDING)}


def test_policies_that_move_values_are_told(tmp_path: Path) -> None:
    """Where a rewrite that is not exact changes something, or a policy rounds otherwise than the model's runtime."""
    model = tmp_path / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    for target, policy, said in (
        ("ne16", "engine", "requantisation 2"),
        ("ne16", "exact", ""),
        ("macarray", "exact", "round as double"),
        ("kestrel", "engine", ""),  # the model's own requantisations round once already
    ):
        told = [
            note.text for note in package.compile(model, target, policy=policy).notes if note.kind is Kind.APPROXIMATE
        ]
        assert [said in text for text in told] == [True] * bool(said), (target, told)


def test_notes_are_printed_and_kept_and_strict_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "open.onnx"
    model.write_bytes(open_batch())
    for _ in range(2):  # the second time it is kept from the first
        place = tmp_path / "build"
        assert dovetail("compile", model, "-t", "riscv", "--float", "-o", place, "--force") == 0
        assert "warning, assumed: open.onnx: the batch 'n' of the input 'x' is taken as 1" in capsys.readouterr().err
        (note,) = json.loads((place / "dovetail.json").read_text())["notes"]
        assert (note["level"], note["kind"]) == ("warning", "assumed")
    assert dovetail("run", place, "--sim", "host", "--json", tmp_path / "run.json") == 0
    assert json.loads((tmp_path / "run.json").read_text())["notes"] == [note]
    assert "open.onnx: the batch 'n'" in capsys.readouterr().out
    said = refused(capsys, "compile", model, "-t", "riscv", "--float", "--strict", "-o", tmp_path / "strict")
    assert "--strict takes no warnings: assumed: open.onnx: the batch" in said and not (tmp_path / "strict").exists()
    fixed = ("--strict", "--shape", "x=1,4", "-o", tmp_path / "strict")
    assert dovetail("compile", model, "-t", "riscv", "--float", *fixed) == 0


def open_batch() -> bytes:
    """A model whose batch is open."""
    from onnx import parser

    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[n,4] x) => (float[n,4] y) { y = Relu (x) }'
    return bytes(parser.parse_model(text).SerializeToString())


def test_python_is_told_the_same(tmp_path: Path) -> None:
    model = tmp_path / "open.onnx"
    model.write_bytes(open_batch())
    heard = list[Note]()
    build = package.compile(model, options=Options(allow_float=True, tell=heard.append))
    assert list(build.notes) == heard and [note.kind for note in heard] == [Kind.ASSUMED]
    with pytest.raises(DovetailError, match="--strict takes no warnings"):
        package.compile(model, allow_float=True, strict=True)


def test_saturated_outputs_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Integers at an end of their range, and a softmax in floats that is 0 but for one; not sums within their range."""
    from onnx import parser

    for step, kind, said in (("0.01", "int8", "31 of 32"), ("1.0", "int8", ""), ("0.01", "float", "32 of 32")):
        scaled = "f = DequantizeLinear (x, one) "
        ends = (
            "y = QuantizeLinear (f, s, z)"
            if kind == "int8"
            else "t = Constant <value_float = 100.0> () m = Mul (f, t) y = Softmax (m)"
        )
        text = (
            f'<ir_version: 10, opset_import: ["" : 21]> g (int8[1,32] x) => ({kind}[1,32] y) '
            f"<float one = {{1.0}}, float s = {{{step}}}, int8 z = {{0}}> {{ {scaled}{ends} }}"
        )
        model = tmp_path / "ends.onnx"
        model.write_bytes(parser.parse_model(text).SerializeToString())
        place = tmp_path / "build"
        assert dovetail("compile", model, "-t", "riscv", "--float", "-o", place, "--force") == 0
        assert dovetail("run", place, "--sim", "host", "--json", tmp_path / "run.json") == 0
        told = [note for note in json.loads((tmp_path / "run.json").read_text())["notes"] if note["kind"] == "hiding"]
        assert [(note["level"], note["text"].split(" elements")[0]) for note in told] == [("note", said)] * bool(said)
        assert ("at an end of their range" in capsys.readouterr().out) == bool(said)
