"""The work for a layer stays the same however many layers a network has: lines of Python that run are counted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import onnx
import pytest

from dovetail.codegen.emit import network
from dovetail.compile import Options, compile_model
from dovetail.schedule import plan
from dovetail.targets import load_target

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from compile_times import deep

FEW, MANY = 15, 45
"""Layers of a short and of a long chain."""
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "riscv": {},
    "ne16": {},
    "kestrel": {},
    "gemmini": {},
    "macarray": {"L1.size": "6K"},  # as in a long chain, constants do not all fit at once
}
"""Memories by target."""
TRACED = ("compile.py", "read", "quantize", "legalize", "schedule", "program", "codegen")
"""Files and folders whose lines are counted; of others, the calls of functions."""
SEARCHED = {"macarray": ("loops.py", "series.py")}
"""Files by target that are left out: the search for loops tries ever more periods, up to a number that only longer
chains reach."""
_PACKAGE = Path(sys.modules[compile_model.__module__].__file__ or "").parent


@contextmanager
def counted() -> Iterator[Counter[CodeType]]:
    """Count the lines that each function runs, turns of its loops and comprehensions included."""
    lines, traced = Counter[CodeType](), dict[str, bool]()

    def of_call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        lines[code] += 1
        if code.co_filename not in traced:
            path = Path(code.co_filename)
            traced[code.co_filename] = path.is_relative_to(_PACKAGE) and path.relative_to(_PACKAGE).parts[0] in TRACED
        return of_line if traced[code.co_filename] else None

    def of_line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        lines[frame.f_code] += event == "line"
        return of_line

    before = sys.gettrace()
    sys.settrace(of_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def lines_of(layers: int, target: str, folder: Path) -> Counter[CodeType]:
    """The lines that a chain's compilation runs, by function."""
    path, machine, options = folder / f"{layers}.onnx", load_target(target), Options(settings=SETTINGS[target])
    onnx.save(deep(layers).model(), path)
    with counted() as lines:
        compile_model(path, machine, options)
    return lines


def growing(few: Counter[CodeType], many: Counter[CodeType]) -> dict[str, tuple[float, float]]:
    """Functions that run more lines for a layer of the long chain than for one of the short chain: lines for each."""
    pairs = {code: (few[code] / FEW, count / MANY) for code, count in many.items() if code.co_filename != "<string>"}
    grown = {code: pair for code, pair in pairs.items() if pair[1] > 1.6 * pair[0] and pair[1] > pair[0] + 2}
    return {f"{code.co_filename} {code.co_firstlineno} {code.co_name}": pair for code, pair in grown.items()}


@pytest.mark.parametrize("target", SETTINGS)
def test_a_layer_of_a_long_chain_is_no_more_work(target: str, tmp_path: Path) -> None:
    lines_of(2, target, tmp_path)  # imports, and answers that are kept
    few, many = (lines_of(layers, target, tmp_path) for layers in (FEW, MANY))
    found, left_out = growing(few, many), SEARCHED.get(target, ())
    assert {place: pair for place, pair in found.items() if Path(place.split()[0]).name not in left_out} == {}


def test_compilers_put_few_layers_into_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their time grows with the square of a function's statements."""
    path, apart = tmp_path / "chain.onnx", "static __attribute__((noinline)) void conv_"
    onnx.save(deep(6).model(), path)
    texts = list[str]()
    for most, aim in ((network._TOGETHER, "speed"), (3, "speed"), (3, "size")):
        monkeypatch.setattr(network, "_TOGETHER", most)
        made = compile_model(path, load_target("riscv"), Options(optimize=aim))
        texts.append(made.project.files["src/chain.c"])
    assert texts[1].count(apart) == texts[0].count("static void conv_") == 6
    assert texts[1].replace("static __attribute__((noinline)) void", "static void") == texts[0]
    assert "noinline" not in texts[2]


def test_tiles_are_chosen_anew_only_behind_a_value_that_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the engine's memory holds no value beside a tile, every layer gives one up."""
    choose_tiling, counts, spilled = plan.choose_tiling, list[int](), plan._Planner.spilled

    def chosen(*arguments: Any) -> Any:
        counts[-1] += 1
        return choose_tiling(*arguments)

    def given_up(*arguments: Any) -> Any:
        rounds.append(arguments)
        return spilled(*arguments)

    monkeypatch.setattr(plan, "choose_tiling", chosen)
    monkeypatch.setattr(plan._Planner, "spilled", given_up)
    for layers in (4, 12):
        rounds = list[object]()
        counts.append(0)
        onnx.save(deep(layers).model(), tmp_path / f"{layers}.onnx")
        compile_model(tmp_path / f"{layers}.onnx", load_target("ne16"), Options(settings={"L1.size": "2200"}))
        assert len(rounds) >= 2 * layers
    assert counts[1] <= 3.5 * counts[0]
