"""The report's page in a real browser: no errors, every figure from its JSON, figures that agree with one another."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import pytest

from browser import Browser, chromium
from command_line import refused
from dovetail.arrays import seeded_inputs
from dovetail.bounds import core_product
from dovetail.codegen.emit.project import write_project
from dovetail.codegen.plan_file import PLAN
from dovetail.compile import Options, compile_model
from dovetail.errors import DovetailError
from dovetail.guests import zoo
from dovetail.guests.report.detail import detail, trace_text
from dovetail.guests.report.page import page
from dovetail.kernels import Optimize
from dovetail.report import make_report
from dovetail.run import RunResult, default_simulator, open_build, run_build
from dovetail.targets import BUILT_IN, load_target

pytestmark = pytest.mark.skipif(find_spec("unicorn") is None, reason="the simulator needs unicorn (dovetail[iss])")

SHOWN = """[...document.querySelectorAll('[data-of]')].map(e => [e.dataset.of, e.dataset.as, e.textContent])"""
STRAY = """(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (/[0-9]/.test(walker.currentNode.data) && !parent.closest('[data-of], .tick, .key, #tip, script'))
      found.push(walker.currentNode.data);
  }
  return found;
})()"""
USED = """(() => {
  for (const button of document.querySelectorAll('button:not(#save)'))
    for (let press = 0; press < 3; press++) button.click();
  for (const shape of document.querySelectorAll('rect, circle, path, i'))
    shape.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));
  for (const canvas of document.querySelectorAll('canvas')) {
    const box = canvas.getBoundingClientRect();
    const at = {clientX: box.x + box.width / 2, clientY: box.y + 5, bubbles: true};
    canvas.dispatchEvent(new WheelEvent('wheel', {...at, deltaY: -300, cancelable: true}));
    canvas.dispatchEvent(new PointerEvent('pointermove', at));
    canvas.dispatchEvent(new MouseEvent('click', at));
    canvas.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', cancelable: true}));
  }
  return document.querySelectorAll('details[open]').length;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all pages."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits model as a file."""
    path = tmp_path_factory.mktemp("model") / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    return path


def ran(model: Path, target_name: str, folder: Path, simulator: str | None = None) -> RunResult:
    """A model compiled and run once; without a core's own instructions, whose search takes long. Skips the test where a
    target whose core is this computer cannot be run on it."""
    target = load_target(target_name)
    optimize = Optimize.SIZE if target.core.instructions else Optimize.SPEED
    write_project(compile_model(model, target, Options(optimize=optimize)).project, folder)
    build = open_build(folder, target)
    try:
        return run_build(build, simulator, [seeded_inputs(build.manifest.inputs)])
    except DovetailError as error:
        if default_simulator(target) == "host":
            pytest.skip(f"{target_name} does not run on this computer: {error.what}")
        raise


@pytest.fixture(scope="module")
def results(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    """Runs of digits by target, made when they are first asked for."""
    folder = tmp_path_factory.mktemp("builds")

    class Made(dict[str, RunResult]):
        """Runs as they are wanted."""

        def __missing__(self, name: str) -> RunResult:
            self[name] = ran(digits, name, folder / name)
            return self[name]

    return Made()


def number_of(text: str) -> float:
    """The number a page shows; a percentage as a part of 1."""
    plain = text.replace(",", "").removesuffix(" \u00d7")
    return float(plain.removesuffix("%")) / 100 if plain.endswith("%") else float(plain)


def resolved(data: Any, pointer: str) -> Any:
    """What a JSON pointer points at."""
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


def check_figures(browser: Browser, data: Mapping[str, Any]) -> int:
    """Everything the page shows is what the JSON says; the number of figures."""
    shown = browser.evaluate(SHOWN)
    for pointer, kind, text in shown:
        value = resolved(data, pointer)
        if kind == "text":
            assert text == (value or "\u2013"), pointer
        elif value is None:
            assert text == "\u2013", pointer
        else:
            near = max(0.006, 0.006 * abs(value))
            close = {"value": 0, "count": 0.5, "percent": 0.00051, "rate": near, "ratio": 0.0051}[kind]
            assert abs(number_of(text) - value) <= close, (pointer, text, value)
    assert browser.evaluate(STRAY) == [], "numbers that do not say where they come from"
    return len(shown)


@pytest.mark.parametrize("target", sorted(BUILT_IN))
def test_page_of_each_target(target: str, results: dict[str, RunResult], browser: Browser, tmp_path: Path) -> None:
    data = json.loads(json.dumps(detail(results[target])))
    text = page(data)
    assert len(text.encode()) <= 2_000_000 and not re.search(r"(src|href)=\"(?!#)", text)
    (tmp_path / "page.html").write_text(text)
    browser.open(tmp_path / "page.html")
    assert json.loads(browser.evaluate("document.getElementById('data').textContent")) == data
    assert check_figures(browser, data) > 100
    assert browser.evaluate(USED) >= len(data["groups"])
    assert check_figures(browser, data) > 100, "after everything was used"
    name = next(name for name, memory in data["memories"].items() if memory["buffers"])
    browser.evaluate(f"""document.querySelector('rect.buffer[data-memory="{name}"]')
        .dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))""")
    buffer = data["memories"][name]["buffers"][0]
    told = f"{buffer['name']} ({buffer['role']})\n{buffer['bytes']:,} bytes at {buffer['address']:,}\n"
    assert browser.evaluate("document.getElementById('tip').textContent").startswith(told)
    assert browser.faults == []
    assert browser.pale_anywhere() == []


def test_json_is_a_superset_of_the_runs(results: dict[str, RunResult]) -> None:
    data = json.loads(json.dumps(detail(results["ne16"])))
    run = json.loads(json.dumps(make_report(results["ne16"]).to_json()))
    for name, value in run.items():
        if name != "layers":
            assert data[name] == value
    for own, layer in zip(run["layers"], data["layers"], strict=True):
        assert {name: layer[name] for name in own} == own


@pytest.mark.parametrize("target", ["riscv", "cortex_m4", "ne16", "vta", "maeri"])
def test_times_add_up_and_keep_their_bounds(target: str, results: dict[str, RunResult]) -> None:
    data = detail(results[target])
    layers, total = data["layers"], data["cycles"]["total"]
    assert sum(layer["time"] for layer in layers) == total == sum(data["summary"]["spent"].values())
    for layer in layers:
        assert sum(layer["spent"].values()) == layer["time"]
        hidden = layer["gap"].startswith("hidden")
        assert hidden or layer["bound"] <= layer["time"], layer["name"]
        assert layer["gap"] or not layer["time"]
    assert 0 < data["bound"] <= data["least"] <= total
    for name in ("time", "macs", "bytes_moved"):
        assert sum(group[name] for group in data["groups"]) == sum(layer[name] for layer in layers)
    assert sum(device["busy"] for device in data["devices"] if device["kind"] == "engine") <= total


def test_a_block_of_products_is_no_instruction() -> None:
    """SMLAD is two products a cycle, whatever the loops that are made of it compute."""
    assert core_product([load_target("cortex_m4").core]) == 1 / 2
    assert core_product([load_target("riscv_dot4").core]) == 1 / 4
    assert core_product([load_target("cortex_m3").core]) == 1


def test_stages_of_a_pipeline_have_times_of_their_own(digits: Path, tmp_path: Path) -> None:
    target = load_target("riscv_big_small")
    write_project(compile_model(digits, target, Options(pipeline=True)).project, tmp_path / "build")
    build = open_build(tmp_path / "build", target)
    data = detail(run_build(build, "iss", [seeded_inputs(build.manifest.inputs)]))
    worked = {name: cycles for core in data["cores"] for name, cycles in core["layers"].items()}
    for layer in data["layers"]:
        assert layer["bound"] <= layer["time"]
        assert layer["engine"] != "core" or layer["time"] >= worked.get(layer["name"], 0) * 0.99


@pytest.mark.parametrize("target", ["riscv", "ne16", "vta"])
def test_memory_is_a_tetris(target: str, results: dict[str, RunResult]) -> None:
    data = detail(results[target])
    for name, memory in data["memories"].items():
        if not memory["buffers"]:
            continue
        parts = [
            (b["address"] + start, b["address"] + stop, first, last)
            for b in memory["buffers"]
            for start, stop, first, last, _ in b["parts"]
        ]
        assert max(stop for _, stop, _, _ in parts) <= data["memory"][name]["peak"] <= data["memory"][name]["size"]
        for number, one in enumerate(parts):
            for other in parts[number + 1 :]:
                shared = min(one[1], other[1]) > max(one[0], other[0])
                together = min(one[3], other[3]) - max(one[2], other[2])
                assert not shared or together <= 1, "two buffers in one place, longer than the step that overwrites one"
        use = data["memory"][name]
        assert use["lower_bound"] - 64 <= max(total for _, total in memory["live"]) <= use["peak"]
        for step, total in memory["live"]:
            used = {place for low, high, first, last in parts if first <= step < last for place in range(low, high)}
            assert total == len(used)


def test_names_cannot_leave_their_place(digits: Path, browser: Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=\"document.title='hacked'\">"
    model = onnx.load(str(digits))
    names = {name: f"{evil}{name}" for node in model.graph.node for name in (*node.input, *node.output)}
    for node in model.graph.node:
        node.name = f"{evil}{node.name}"
        node.input[:] = [names[name] for name in node.input]
        node.output[:] = [names[name] for name in node.output]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer, *model.graph.value_info):
        value.name = names.get(value.name, value.name)
    onnx.save(model, str(tmp_path / "evil.onnx"))
    data = json.loads(json.dumps(detail(ran(tmp_path / "evil.onnx", "riscv", tmp_path / "build"))))
    assert evil in json.dumps(data).replace('\\"', '"')
    (tmp_path / "page.html").write_text(page({**data, "model": f"{evil}&amp;", "policy": evil}))
    browser.open(tmp_path / "page.html")
    browser.evaluate(USED)
    assert browser.evaluate("document.images.length") == 0 and browser.faults == []
    assert browser.evaluate("document.title") == f"{evil}&amp; on riscv"
    assert check_figures(browser, {**data, "model": f"{evil}&amp;", "policy": evil}) > 100


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_does_not_scroll_sideways(
    width: int, results: dict[str, RunResult], browser: Browser, tmp_path: Path
) -> None:
    """Nor do its links at the top; a picture of it is kept with the test's files."""
    (tmp_path / "page.html").write_text(page(json.loads(json.dumps(detail(results["ne16"])))))
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        browser.open(tmp_path / "page.html")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width and browser.faults == []
        assert browser.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('nav'))") <= 0
        browser.screenshot(tmp_path / f"report_{width}.png")
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_host_has_a_page_without_times(digits: Path, browser: Browser, tmp_path: Path) -> None:
    data = json.loads(json.dumps(detail(ran(digits, "ne16", tmp_path / "build", "host"))))
    (tmp_path / "page.html").write_text(page(data))
    browser.open(tmp_path / "page.html")
    assert check_figures(browser, data) > 100 and browser.evaluate(USED) > 0 and browser.faults == []
    assert browser.evaluate("document.getElementById('timeline')") is None


def test_trace_has_every_bar(results: dict[str, RunResult]) -> None:
    data = detail(results["ne16"])
    events = json.loads(trace_text(data))["traceEvents"]
    lines = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    bars = [(lines[e["tid"]], e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["ph"] == "X"]
    assert bars == [(n, b["start"], b["end"], b["label"]) for n, own in data["timeline"].items() for b in own]
    assert {event["name"] for event in events if event["ph"] == "C"} == {f"bytes in use, {n}" for n in data["memories"]}


def test_what_is_no_build(results: dict[str, RunResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page_file = ("-o", tmp_path / "r.html")
    assert "is not a build" in refused(capsys, "report", tmp_path, *page_file)
    folder = tmp_path / "build"
    shutil.copytree(results["riscv"].build.folder, folder)
    assert "leave --trace out" in refused(capsys, "report", folder, "--sim", "host", "--trace", "t", *page_file)
    plan = json.loads((folder / PLAN).read_text())
    for text, message in (
        ("{", "plan.json:1: this is not JSON"),
        ("[]", "this must be a mapping of begins, graph"),
        (json.dumps({**plan, "schema": 9}), "schema: is 9, expected 1"),
        (json.dumps({**plan, "layers": plan["layers"][1:]}), "does not fit the build"),
        (json.dumps({key: value for key, value in plan.items() if key != "graph"}), "'graph' is missing"),
    ):
        (folder / PLAN).write_text(text)
        assert message in refused(capsys, "report", folder, *page_file)
    (folder / PLAN).unlink()
    assert "compile the model again" in refused(capsys, "report", folder, *page_file)
    assert not (tmp_path / "r.html").exists()
