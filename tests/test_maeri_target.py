"""MAERI as a target: firmware on the simulated chip, what `dovetail schedule` writes, and what the device refuses."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.cli.main import main
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, compile_model, prepare, sample_inputs
from dovetail.errors import SimulationError
from dovetail.guests import zoo
from dovetail.ir.graph import GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import DType, TensorType
from dovetail.run import open_build, run_build
from dovetail.sim.device import MemoryBus, MemoryRegion
from dovetail.target import Target
from dovetail.targets import load_target
from dovetail.targets.maeri import target
from dovetail.targets.maeri.coded import FeatureMap, StepConstant, step_of
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.device import MaeriDevice, MaeriRegister
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import OrderLayer, network
from dovetail.targets.maeri.outputs import phases
from dovetail.targets.maeri.task import Task, decode, encode
from dovetail.targets.maeri.tile import Item
from firmware import require_chip
from test_end_to_end import network_file, run, stored
from test_maeri_schedule import random_network

HAL = """
#include <inttypes.h>
#include <stdio.h>
#include "maeri_order.h"
void maeri_wait_until(uint32_t cycle) { printf("wait %" PRIu32 "\\n", cycle); }
void maeri_configure(const uint32_t *words)
{
    printf("configure");
    for (uint32_t word = 0; word < MAERI_TREE_WORDS; ++word) { printf(" %08" PRIX32, words[word]); }
    printf("\\n");
}
void maeri_start(const maeri_item_t *item)
{
    printf("start %s %u %u %u %" PRIu32 " %" PRIu32, maeri_layer_names[item->layer], (unsigned)item->multiplier,
           (unsigned)item->size, (unsigned)item->neurons, item->product, item->products);
    for (uint32_t segment = 0; segment < item->segments; ++segment) {
        const maeri_segment_t *part = &maeri_segments[item->segment + segment];
        printf(" %" PRIu32 ":%" PRIu32 "+%" PRIu32, part->channel, part->first, part->count);
    }
    printf("\\n");
}
int main(void) { maeri_run(); return 0; }
"""


@pytest.mark.parametrize("name", ["ic_resnet8", "kws_dscnn", "vww_mobilenetv1", "ad_autoencoder"])
def test_firmware_equals_micro(name: str, tmp_path: Path) -> None:
    """Every byte of output, all multiply-accumulates on the engine."""
    require_chip()
    compiled = compile_model(network_file(name), load_target("maeri"), Options())
    inputs, reference = stored(name, compiled)
    for index, outputs in enumerate(run(compiled, tmp_path / "build", inputs[:2]).outputs):
        np.testing.assert_array_equal(outputs[compiled.graph.outputs[0]], reference[f"out_{index}__tflm"])
    on_core = sum(region.macs for region in compiled.regions if region.engine is None)
    assert on_core == 0


SUMS = target(MaeriConfig(requantise=False, padding=False), "maeri_sums")
"""The engine without a stage behind its bus, and without padding."""


@pytest.mark.parametrize("name", ["ic_resnet8", "vww_mobilenetv1"])
def test_firmware_equals_micro_without_the_stage(name: str, tmp_path: Path) -> None:
    """The core requantises, pads and adds."""
    require_chip()
    compiled = compile_model(network_file(name), SUMS, Options())
    inputs, reference = stored(name, compiled)
    write_project(compiled.project, tmp_path / "build")
    result = run_build(open_build(tmp_path / "build", SUMS), "iss", inputs[:1])
    np.testing.assert_array_equal(result.outputs[0][compiled.graph.outputs[0]], reference["out_0__tflm"])
    assert {region.offload.name for region in compiled.regions if region.offload} <= {
        *("convolution", "depthwise convolution", "dense", "convolution without bias", "dense without bias")
    }


@pytest.mark.parametrize("chip", [load_target("maeri"), SUMS], ids=["stage", "sums"])
@pytest.mark.parametrize("seed", range(8))
def test_random_networks_on_the_chip(seed: int, chip: Target, tmp_path: Path) -> None:
    require_chip()
    graph, inputs = random_network(seed)
    compiled = compile_graph(graph, chip, Options())
    write_project(compiled.project, tmp_path / "build")
    for simulator in ("iss", "host"):
        result = run_build(open_build(tmp_path / "build", chip), simulator, [dict(inputs)])
        for name, array in evaluate(graph, inputs).items():
            np.testing.assert_array_equal(result.outputs[0][name], array)


def test_a_users_own_configuration(tmp_path: Path) -> None:
    require_chip()
    file = tmp_path / "small.py"
    file.write_text(
        "from dovetail.targets.maeri import target\nfrom dovetail.targets.maeri.config import MaeriConfig\n"
        "TARGET = target(MaeriConfig(32, 8, 8), 'small_maeri')\n"
    )
    model = tmp_path / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    chip = load_target(str(file))
    compiled = compile_model(model, chip, Options())
    inputs = sample_inputs(compiled.graph)
    write_project(compiled.project, tmp_path / "build")
    result = run_build(open_build(tmp_path / "build", chip), "iss", [inputs])
    for name, array in evaluate(compiled.graph, inputs).items():
        np.testing.assert_array_equal(result.outputs[0][name], array)


def scheduled(folder: Path, *more: str) -> Path:
    """The order of the zoo's digits network, written out."""
    model = folder / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    main_ok(["schedule", str(model), "--target", "maeri", "-o", str(folder / "order"), *more])
    return folder / "order"


def main_ok(arguments: list[str]) -> None:
    """Run the command line; status 0."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None)


def test_what_schedule_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = scheduled(tmp_path, "--multipliers", "32", "--seconds", "1")
    printed = capsys.readouterr()
    assert "times the bound" in printed.out and "equal to the network's in every bit" in printed.out
    assert "above the bound" in printed.err
    data = json.loads((folder / "schedule.json").read_text())
    assert data["configuration"]["multipliers"] == data["configuration"]["distribution"] == 32
    assert data["makespan"] == max(item["end"] for item in data["items"])
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(data["items"])
    page = (folder / "schedule.html").read_text()
    assert not re.search("https?:", page) and "<svg" in page
    assert (folder / "trees" / "RN_Config_0000.vmh").read_text().startswith("@000\n")
    assert len(list((folder / "layers").iterdir())) == len(data["layers"])


def test_the_host_program_feeds_the_order(tmp_path: Path) -> None:
    """Compiled without a warning; what it asks of the platform is the order, phase by phase."""
    folder = scheduled(tmp_path, "--no-simulate", "--seconds", "0") / "host"
    (folder / "hal.c").write_text(HAL)
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-fsanitize=undefined"]
    subprocess.run(["cc", *flags, "hal.c", "maeri_order.c", "-o", "order"], cwd=folder, check=True)
    said = subprocess.run([str(folder / "order")], capture_output=True, text=True, check=True).stdout.splitlines()

    graph = prepare(tmp_path / "digits.onnx", load_target("maeri"), Options())
    schedule = arrange(network(graph), MaeriConfig())
    expected = []
    for phase in phases(schedule):
        expected += [f"wait {phase.start}"]
        expected += ["configure " + " ".join(f"{word:08X}" for word in phase.words)]
        for item in schedule.items:
            if item.start == phase.start:
                parts = " ".join(f"{part.channel}:{part.first}+{part.count}" for part in item.segments)
                name = schedule.network.works[item.work].name
                expected += [f"start {name} {item.place.start} {item.tile.size} 1 0 {item.taps[1]} {parts}"]
    assert said == [*expected, f"wait {schedule.makespan}"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--multipliers", "48"], "power of two"),
        (["--set", "colour=3"], "no size 'colour'"),
        (["--set", "distribution=x"], "NAME=NUMBER"),
        (["--set", "distribution=0"], "power of two"),
        (["--rules", "nowhere.yaml"], "the file of rules cannot be read: No such file"),
    ],
)
def test_bad_requests(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    with pytest.raises(SystemExit) as end:
        main(["schedule", str(model), "--target", "maeri", *more])
    assert end.value.code == 1
    assert message in capsys.readouterr().err


def test_rules_of_a_target_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They hold where no file is given."""
    (tmp_path / "mine.py").write_text(
        "from dovetail.targets.maeri import target\nfrom dovetail.targets.maeri.config import MaeriConfig\n"
        "from dovetail.targets.maeri.rules import Rules\n"
        "TARGET = target(MaeriConfig(), 'mine', Rules(apart=(('nothing', 'nowhere'),)))\n"
    )
    (tmp_path / "free.yaml").write_text("before: []\n")
    (tmp_path / "digits.onnx").write_bytes(zoo.build("digits"))
    order = ["schedule", str(tmp_path / "digits.onnx"), "--target", str(tmp_path / "mine.py"), "--seconds", "0"]
    with pytest.raises(SystemExit):
        main(order)
    assert "rules: there is no layer 'nothing'" in capsys.readouterr().err
    main_ok([*order, "--rules", str(tmp_path / "free.yaml")])


def test_targets_without_orders_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    with pytest.raises(SystemExit):
        main(["schedule", str(model), "--target", "ne16"])
    assert "ne16: this target does not order whole networks" in capsys.readouterr().err


def layer_task(layer: OrderLayer, items: tuple[Item, ...] = (), padding: int = 0, stage: bool = False) -> Task:
    """A task of a convolution, its image and its result at 0x1000, its constants at the start of the launch's."""
    builder = GraphBuilder("task")
    sizes = (layer.in_rows - padding, layer.in_columns, layer.channels * layer.groups)
    x = builder.input("x", TensorType((1, *sizes), DType.INT8))
    image = builder.add(Pad((0, padding, 0, 0), (0,) * 4, 0), [x]) if padding else x
    shape = (layer.filters * layer.groups, layer.rows, layer.columns, layer.channels)
    weights = builder.constant("weights", np.zeros(shape, np.int8))
    result = builder.add(Conv2d(layer.strides, layer.dilations), [image, weights])
    if stage:
        scale = [builder.constant(name, np.array([number], np.int32)) for name, number in (("m", 1 << 30), ("s", -4))]
        result = builder.add(
            Clip(-128, 127, DType.INT8), [builder.add(Requantize(output_zero_point=-3), [result, *scale])]
        )
    graph = builder.finish([result])
    constants = {name: StepConstant(0, array.shape, array.ndim == 4) for name, array in graph.constants.items()}
    step = step_of(graph, constants, lambda value: FeatureMap(0x1000, graph.types[value].shape, 0))
    return Task(step, tuple((0, 24, 4, 1) for _ in range(2)), False, items)


def first_layer() -> tuple[OrderLayer, tuple[Item, ...]]:
    """A layer and its items."""
    net = network(random_network(3)[0])
    return net.works[0].layer, tuple(item for item in arrange(net, MaeriConfig()).items if item.work == 0)


def test_tasks_survive_their_words() -> None:
    task = layer_task(*first_layer())
    assert decode(encode(task)) == task
    staged = layer_task(*first_layer(), padding=2, stage=True)
    assert decode(encode(staged)) == staged and len(encode(staged)) > len(encode(task))
    for spoilt in (encode(task)[:-1], (*encode(task), 0)):
        with pytest.raises(SimulationError, match=r"wanted|after the last"):
            decode(spoilt)


def test_the_device_refuses() -> None:
    """Damaged tasks and wrong use of the registers."""
    bus = MemoryBus([MemoryRegion("ram", 0x1000, 0x4000)])
    device = MaeriDevice(bus)
    with pytest.raises(SimulationError, match="no register"):
        device.read(0x40, 0)
    with pytest.raises(SimulationError, match="read-only"):
        device.write(MaeriRegister.ROOM, 1, 0)
    with pytest.raises(SimulationError, match="takes 1"):
        device.write(MaeriRegister.CONTROL, 2, 0)
    layer, items = first_layer()
    task = layer_task(layer, items)
    (weights,) = task.step.constants
    larger = replace(task.step, constants=(replace(weights, shape=(layer.filters, 99, 99, layer.channels)),))
    for spoilt in (replace(task, items=(replace(items[0], segments=()),)), replace(task, step=larger)):
        words = encode(spoilt)
        bus.view(0x1000, 4 * len(words)).view("<u4")[:] = words
        device.write(MaeriRegister.TASK, 0x1000, 0)
        device.write(MaeriRegister.WORDS, len(words), 0)
        with pytest.raises(SimulationError):
            device.write(MaeriRegister.CONTROL, 1, 0)


def test_a_device_without_the_stage_refuses_it() -> None:
    """So does one without padding: such a task was made for another configuration."""
    bus = MemoryBus([MemoryRegion("ram", 0x1000, 0x4000)])
    for other, fields in (
        (layer_task(*first_layer(), stage=True), {"requantise": False}),
        (layer_task(*first_layer(), padding=1), {"padding": False}),
    ):
        words = encode(other)
        bus.view(0x1000, 4 * len(words)).view("<u4")[:] = words
        device = MaeriDevice(bus, **fields)
        device.write(MaeriRegister.TASK, 0x1000, 0)
        device.write(MaeriRegister.WORDS, len(words), 0)
        with pytest.raises(SimulationError, match="asks for a stage or a padding"):
            device.write(MaeriRegister.CONTROL, 1, 0)
