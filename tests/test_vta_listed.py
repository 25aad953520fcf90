"""Schedules that come with the package are run without Exo; what they issue is what Exo's own cursors say."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

from conftest import shared_dir
from dovetail.compile import Options, compile_graph, prepare
from dovetail.loops import memory, trace
from dovetail.loops.procedures import exo, parsed
from dovetail.targets import load_target
from dovetail.targets.vta import listed, mapping

Case = tuple[str, int, int, tuple[int, int], Mapping[str, int]]
"""An algorithm's text, lanes, strides of its window, sizes."""


def cases(network: str, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Every schedule a network asks for, with its sizes; fails where one does not come with the package."""
    asked: dict[str, Case] = {}
    lowering = import_module("dovetail.targets.vta.lower")

    def noted(
        text: str, batch: int, block: int, stride: tuple[int, int], sizes: Mapping[str, int]
    ) -> tuple[listed.Event, ...]:
        asked[f"{text} {stride} {sorted(sizes.items())}"] = (text, batch, block, stride, sizes)
        found = listed.listed(text, batch, block, stride, sizes)
        assert found is not None, "run scripts/ship_loops.py vta"
        return found

    lowering._events.cache_clear()  # what was asked for before is known
    with monkeypatch.context() as patch:
        patch.setattr(lowering, "listed", noted)
        target = load_target("vta")
        model = shared_dir() / "models" / "mlperf_tiny" / f"{network}.tflite"
        compile_graph(prepare(model, target, Options()), target, Options(), interpret=False)
    return list(asked.values())


@pytest.mark.parametrize(
    "network", ["ad_autoencoder_int8", "kws_dscnn_int8", "ic_resnet8_int8", "vww_mobilenetv1_int8"]
)
def test_it_issues_what_exo_says(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exo()
    found = cases(network, monkeypatch)
    for text, batch, block, stride, sizes in found:
        known = {name: mapping.instruction(name, batch, block, stride) for name in mapping.MEANINGS}
        scope = {**known, **{name: memory(name) for name in ("INP", "WGT", "ACC")}}
        shipped = listed._shipped()[listed.digest_of(text, batch, block, stride)]
        assert listed.listed(text, batch, block, stride, sizes) == trace(parsed(shipped, scope), sizes)
    assert len(found) >= 3


def test_what_is_shipped_is_what_is_scheduled_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest, afresh. Exo's text of it differs from run to run in the order of terms, what it does must not."""
    exo()
    text, batch, block, stride, sizes = min(cases("ad_autoencoder_int8", monkeypatch), key=lambda case: len(case[0]))
    known = [mapping.instruction(name, batch, block, stride) for name in mapping._ORDER]
    today = trace(mapping.schedule(text, batch, block, known), sizes)
    assert today == listed.listed(text, batch, block, stride, sizes), "run scripts/ship_loops.py vta"


def test_the_networks_need_no_exo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "exo", None)
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    assert cases("kws_dscnn_int8", monkeypatch)


@pytest.mark.parametrize(
    "text",
    [
        "def f(H: size):\n    assert H > 4\n",
        "def f(H: size):\n    x[0] = 1.0\n",
        "def f(H: size):\n    eval(H)\n",
        "def f(H: size):\n    shift_by(H.real, 1)\n",
        "def f(H: size):\n    load_padded(1, 1, 0 - H, 0, 0, 0, x, y)\n",
        "def f(H: size):\n    t : i32\n",
        "def f(",
    ],
)
def test_another_text_is_left_to_exo(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "_shipped", lambda: {listed.digest_of("a", 1, 16, (1, 1)): text})
    assert listed.listed("a", 1, 16, (1, 1), {"H": 4}) is None


def test_loops_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
def f(H: size):
    for h in seq(0, H):
        if h < 1 or h == 2:
            t : i8[H, h + 1] @INP
            add_number(1, 1, h / 2, t[0:H, h], low)
"""
    monkeypatch.setattr(listed, "_shipped", lambda: {listed.digest_of("a", 1, 16, (1, 1)): text})
    found = listed.listed("a", 1, 16, (1, 1), {"H": 3})
    assert found is not None
    assert [event.operands["OW"] for event in found if isinstance(event, listed.Issue)] == [0, 1]
    second = [event for event in found if isinstance(event, listed.Issue)][1]
    assert second.operands["total"] == listed.Window("t", 1, ((0, 3), (2, 3)))
    assert second.operands["number"] == "low"
    assert [event.shape for event in found if isinstance(event, listed.Allocation)] == [(3, 1), (3, 3)]
