"""MAERI's programming images: written, read back and executed with the network's own bytes; faults are found."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conftest import shared_dir
from dovetail.compile import Options, prepare, sample_inputs
from dovetail.errors import DovetailError, ModelError, TargetError
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip, Dequantize, Quantize, Requantize
from dovetail.ir.operators.linear import Linear
from dovetail.ir.operators.movement import Concat, Pad, Slice, Transpose
from dovetail.ir.operators.reduction import Pool2d, SumPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.target import OrderRequest
from dovetail.targets import load_target
from dovetail.targets.maeri.coded import FORMS, ProgrammingImage, Step, read_image, write_image
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.execute import execute
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.outputs import phases, tree_words
from dovetail.targets.maeri.schedule import images
from dovetail.targets.maeri.tree import Range, configure
from maeri_judge import added
from networks import Net, limited_net
from test_maeri_schedule import CONFIGS, Made, shared_network

T = TypeVar("T")


def files_of(graph: Graph, config: MaeriConfig) -> Mapping[str, bytes]:
    """The images of a network's first order, by form."""
    order = arrange(network(graph), config)
    files, refusals = images(order, phases(order))
    assert len(files) == len(FORMS) and not refusals
    return {name.split("/")[1].removesuffix(".bin"): data for name, data in files.items()}


def check(data: bytes, graph: Graph, inputs: Mapping[str, Array]) -> ProgrammingImage:
    """A file, read back and executed, gives what the graph means."""
    image = read_image(data)
    assert write_image(image) == data
    found = execute(image, [inputs[name] for name in graph.inputs])
    for output, array in zip(found.outputs, evaluate(graph, inputs).values(), strict=True):
        assert output.tobytes() == array.tobytes()
    return image


TINY = ("ad_autoencoder", "ic_resnet8", "kws_dscnn", "vww_mobilenetv1")


@pytest.mark.parametrize("name", TINY)
def test_networks_of_mlperf_tiny(name: str) -> None:
    graph, inputs = shared_network(name)
    for form, data in files_of(graph, MaeriConfig()).items():
        image = check(data, graph, inputs)
        assert image.form == FORMS[form]
        every = sum(place.elements for place in (*image.inputs, *(step.result for step in image.steps)))
        features = (image.memory - len(image.constants)) / image.form.element
        assert features < (1.01 if name == "ad_autoencoder" else 0.7) * every  # what has been read makes room
        print(f"{name}, {form}: {len(data):,} bytes, memory {image.memory:,}")


def joined(net: Net, x: str, axis: int = 3) -> str:
    """A value, and the same on another scale, one behind the other."""
    names = [net.builder.constant(name, np.array([number], np.int32)) for name, number in (("m", 3 << 29), ("s", -1))]
    operator = Requantize(input_zero_point=net.zero_point, output_zero_point=net.zero_point)
    changed = net.builder.add(Clip(-128, 127, net.dtype), [net.builder.add(operator, [x, *names])])
    return net.builder.add(Concat(axis), [x, changed, x])


def scaled_mean(net: Net, x: str) -> str:
    """The mean over the image, as a sum that is scaled."""
    kernel = net.builder.type_of(x).shape[1:3]
    total = net.builder.add(SumPool2d(kernel, (1, 1), input_zero_point=net.zero_point), [x])
    names = [net.builder.constant(name, np.array([number], np.int32)) for name, number in (("m", 1 << 30), ("s", -4))]
    scaled = net.builder.add(Requantize(output_zero_point=net.zero_point), [total, *names])
    return net.builder.add(Clip(-128, 127, net.dtype), [scaled])


@cache
def mixed(seed: int, zero_point: int = -5) -> Made:
    """A few layers, an addition and a pool with random sizes."""
    random = np.random.default_rng(seed)
    size, channels = (int(random.integers(6, 13)) for _ in range(2))
    net = Net("mixed", (size, size + 1, channels), zero_point, seed=seed)
    x = net.convolution(net.x, channels, 3, relu=True)
    x = added_to(net, x, net.convolution(x, channels, int(random.choice([1, 3]))))
    x = net.convolution(
        x, int(random.integers(2, 20)), int(random.choice([1, 3, 5])), stride=int(random.integers(1, 3))
    )
    x = (net.pool, net.mean, lambda value: scaled_mean(net, joined(net, value)))[seed % 3](x)
    return net.finish(net.dense(x, int(random.integers(2, 12)))), net.inputs()


def added_to(net: Net, a: str, b: str) -> str:
    """The sum of two values as TensorFlow Lite Micro adds them."""
    raised = []
    for value in (a, b):
        names = [
            net.builder.constant(name, np.array([number], np.int32)) for name, number in (("m", 1 << 30), ("s", -1))
        ]
        operator = Requantize(input_zero_point=net.zero_point, left_shift=20)
        raised.append(net.builder.add(operator, [value, *names]))
    total = net.builder.add(Add(), raised)
    names = [net.builder.constant(name, np.array([number], np.int32)) for name, number in (("m", 1 << 30), ("s", -17))]
    value = net.builder.add(Requantize(output_zero_point=net.zero_point), [total, *names])
    return net.builder.add(Clip(-128, 127, net.dtype), [value])


@pytest.mark.parametrize("name", CONFIGS)
def test_random_networks(name: str) -> None:
    """All kinds of steps on all kinds of engines; the image of INT16 has other zero points at its limits."""
    for seed, zero_point in ((11, 127),) if name == "no buffer" else ((1, 127), (11, -128)):  # there sums are played
        graph, inputs = mixed(seed, zero_point)
        for data in files_of(graph, CONFIGS[name]).values():
            check(data, graph, inputs)


def test_the_bandwidth_of_the_rtl() -> None:
    """128 multipliers, 16 values sent and 16 sums taken per cycle: gangs of virtual neurons that share ports."""
    graph, inputs = mixed(11)
    for data in files_of(graph, MaeriConfig(128, 16, 16)).values():
        check(data, graph, inputs)


def test_what_the_published_multiplier_keeps() -> None:
    """Bits 31 and 26 to 12 of a product of 16 bits, for every feature less any zero point and every weight."""
    form = FORMS["int16"]
    features, weights = np.arange(-255, 256)[:, None], np.arange(-128, 128)[None]
    product = (features << form.feature_shift) * (weights << form.weight_shift)
    kept = ((product >> 31 & 1) << 15 | (product >> 12 & 0x7FFF)).astype(np.uint16).view(np.int16)
    assert (kept == features * weights).all()
    for values, shift in ((features, form.feature_shift), (weights, form.weight_shift)):
        assert np.array_equal((values << shift).astype(np.int16), values << shift)


def layer_of(image: ProgrammingImage, number: int = 1) -> tuple[int, Step]:
    """The place of a layer in the steps, and it."""
    return image.layers[number], image.steps[image.layers[number]]


def with_step(image: ProgrammingImage, number: int, **changed: object) -> ProgrammingImage:
    """One step's fields changed."""
    steps = list(image.steps)
    steps[number] = replace(steps[number], **changed)  # type: ignore[arg-type]
    return replace(image, steps=tuple(steps))


def with_operator(image: ProgrammingImage, number: int, kind: type, **changed: object) -> ProgrammingImage:
    """The fields of one step's last operator of a kind changed."""
    nodes = list(image.steps[number].nodes)
    at = max(at for at, node in enumerate(nodes) if isinstance(node.operator, kind))
    nodes[at] = replace(nodes[at], operator=replace(nodes[at].operator, **changed))  # type: ignore[type-var]
    return with_step(image, number, nodes=tuple(nodes))


def operator_of(image: ProgrammingImage, number: int, kind: type[T]) -> T:
    """The last operator of a kind in one step."""
    return [node.operator for node in image.steps[number].nodes if isinstance(node.operator, kind)][-1]


def with_constant(image: ProgrammingImage, address: int, by: int) -> ProgrammingImage:
    """One int32 among the constants raised."""
    data = bytearray(image.constants)
    struct.pack_into("<i", data, address, struct.unpack_from("<i", data, address)[0] + by)
    return replace(image, constants=bytes(data))


def changed_layer(kind: type, field: str, by: int) -> Callable[[ProgrammingImage], ProgrammingImage]:
    """A number of a layer's operator raised."""

    def change(image: ProgrammingImage) -> ProgrammingImage:
        at, _ = layer_of(image)
        return with_operator(image, at, kind, **{field: getattr(operator_of(image, at, kind), field) + by})

    return change


def constants_elsewhere(number: int, by: int) -> Callable[[ProgrammingImage], ProgrammingImage]:
    """A layer's weights (0), biases (1), multipliers (2) or shifts (3) somewhere else."""

    def change(image: ProgrammingImage) -> ProgrammingImage:
        at, step = layer_of(image)
        own = list(step.constants)
        own[number] = replace(own[number], address=own[number].address + by)
        return with_step(image, at, constants=tuple(own))

    return change


def elsewhere(which: str, by: int) -> Callable[[ProgrammingImage], ProgrammingImage]:
    """A layer's source or result somewhere else."""

    def change(image: ProgrammingImage) -> ProgrammingImage:
        at, step = layer_of(image)
        if which == "result":
            return with_step(image, at, result=replace(step.result, address=step.result.address + by))
        return with_step(image, at, reads=tuple(replace(place, address=place.address + by) for place in step.reads))

    return change


def first(image: ProgrammingImage, *kinds: type) -> int:
    """The number of the first step with an operator of a kind."""
    return next(
        at for at, step in enumerate(image.steps) if any(isinstance(node.operator, kinds) for node in step.nodes)
    )


def swapped_trees(image: ProgrammingImage) -> ProgrammingImage:
    """The two configurations that come first, each in the other's place."""
    return replace(image, trees=(image.trees[1], image.trees[0], *image.trees[2:]))


def spoilt_word(image: ProgrammingImage) -> ProgrammingImage:
    """A bit of the first configuration that says something."""
    at = next(number for number, word in enumerate(image.trees[0]) if word)
    word = image.trees[0][at]
    words = (*image.trees[0][:at], word & (word - 1), *image.trees[0][at + 1 :])
    return replace(image, trees=(words, *image.trees[1:]))


def item_changed(**fields: object) -> Callable[[ProgrammingImage], ProgrammingImage]:
    """The last item's fields changed."""
    return lambda image: replace(image, items=(*image.items[:-1], replace(image.items[-1], **fields)))  # type: ignore[arg-type]


def early(image: ProgrammingImage) -> ProgrammingImage:
    """The second layer's items begin a cycle sooner."""
    at = layer_of(image)[0]
    sooner = [replace(item, start=item.start - (item.work == at)) for item in image.items]
    return replace(image, items=tuple(sooner))


def over_another(image: ProgrammingImage) -> ProgrammingImage:
    """A result where the step before has its own, which is still to be read."""
    at = first(image, Add)
    step = image.steps[at - 1]
    other = next(place for place in image.steps[at].reads if place != step.result)
    return with_step(image, at - 1, result=replace(step.result, address=other.address))


FAULTS: Mapping[str, Callable[[ProgrammingImage], ProgrammingImage]] = {
    "weights from elsewhere": constants_elsewhere(0, 64),
    "biases from elsewhere": constants_elsewhere(1, 4),
    "scales from elsewhere": constants_elsewhere(2, -8),
    "inputs from elsewhere": elsewhere("reads", 64),
    "results elsewhere": elsewhere("result", 64),
    "a result over another": over_another,
    "a wrong factor": lambda image: with_constant(image, layer_of(image)[1].constants[2].address, -(1 << 28)),
    "a wrong shift": lambda image: with_constant(image, layer_of(image)[1].constants[3].address, 1),
    "a wrong factor of an addition": lambda image: with_constant(
        image, image.steps[first(image, Add)].constants[-2].address, 1 << 28
    ),
    "another zero point": changed_layer(Requantize, "output_zero_point", 1),
    "another operand's zero point": changed_layer(Linear, "input_zero_point", 1),
    "another limit": changed_layer(Clip, "low", 40),
    "padding on the other side": lambda image: with_operator(
        image, layer_of(image, 0)[0], Pad, before=(0, 0, 1, 0), after=(0, 2, 1, 0)
    ),
    "another window": lambda image: with_operator(image, first(image, Pool2d), Pool2d, kernel=(1, 2), stride=(2, 2)),
    "fewer bits for sums": lambda image: with_step(
        image, layer_of(image)[0], sum_bits=layer_of(image)[1].sum_bits - 8
    ),
    "swapped RN_Config": swapped_trees,
    "a bit of RN_Config": spoilt_word,
    "swapped Layer_Info": lambda image: replace(image, infos=image.infos[::-1]),
    "a word of Layer_Info": lambda image: replace(image, infos=((*image.infos[0][:3], 1, *image.infos[0][4:]),
                                                                *image.infos[1:])),
    "an item for another layer": item_changed(work=0),
    "an item sooner": early,
    "an item left out": lambda image: replace(image, items=image.items[:-1]),
    "fewer products": lambda image: item_changed(taps=(0, image.items[-1].taps[1] - 1))(image),
    "a shorter order": lambda image: replace(image, makespan=image.makespan - 1),
    "another order of outputs": lambda image: replace(image, outputs=image.inputs),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, form: str) -> None:
    graph, inputs = mixed(3)
    image = FAULTS[fault](read_image(written(3)[form]))
    wrong = []
    for turn in range(3):
        rolled = {name: np.roll(array, turn) for name, array in inputs.items()}
        try:
            found = execute(read_image(write_image(image)), [rolled[name] for name in graph.inputs])
        except DovetailError as error:
            print(error)
            return
        (array,) = evaluate(graph, rolled).values()
        wrong.append(found.outputs[0].tobytes() != array.tobytes())
    assert any(wrong)


def test_faults_of_joints_and_sums() -> None:
    graph, inputs = mixed(2)
    image = read_image(written(2)["int8"])
    joint, pool = first(image, Concat), first(image, SumPool2d)
    (array,), (node,) = evaluate(graph, inputs).values(), image.steps[joint].nodes
    for spoilt in (
        with_step(image, joint, nodes=(replace(node, reads=(1, 0, 0)),)),
        with_constant(image, image.steps[pool].constants[0].address, -(1 << 29)),
        with_operator(image, pool, SumPool2d, input_zero_point=-60),
    ):
        found = execute(read_image(write_image(spoilt)), [inputs[name] for name in graph.inputs])
        assert found.outputs[0].tobytes() != array.tobytes()
    with pytest.raises(DovetailError, match="its result is"):
        execute(with_operator(image, joint, Concat, axis=1), [inputs[name] for name in graph.inputs])


@cache
def written(seed: int) -> Mapping[str, bytes]:
    """Images of a network of all kinds of steps."""
    return files_of(mixed(seed)[0], MaeriConfig(32, 32, 32))


DAMAGE: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "no programming image"),
    "cut": (lambda data: data[:-4], "damaged"),
    "a byte": (lambda data: data[:40] + b"\x01" + data[41:], "damaged"),
    "another file": (lambda data: b"\x00" * 4 + data[4:], "begins with"),
    "another format": (lambda data: data[:4] + b"\x63" + data[5:], "begins with"),
    "longer": (lambda data: data + b"\x00", "no programming image"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(damage: str) -> None:
    spoil, message = DAMAGE[damage]
    with pytest.raises(ModelError, match=message):
        read_image(spoil(written(3)["int8"]))


@settings(max_examples=100, deadline=None)
@given(form=st.sampled_from([*FORMS]), at=st.floats(0, 1), number=st.integers(0, (1 << 32) - 1), low=st.booleans())
def test_hostile_files(form: str, at: float, number: int, low: bool) -> None:
    """Any word another, the check right again: refused, or executed to the end."""
    words = np.frombuffer(written(3)[form], "<u4").copy()
    place = 4 + int(at * (len(words) - 5))
    words[place] = number % 64 if low else number
    body = words[4:].tobytes()
    words[3] = zlib.crc32(body)
    graph, inputs = mixed(3)
    try:
        execute(read_image(words.tobytes()), [inputs[name] for name in graph.inputs])
    except DovetailError as error:
        assert error.what and error.where and error.hint


@settings(max_examples=100, deadline=None)
@given(levels=st.integers(1, 7), data=st.data())
def test_words_are_what_they_were_made_for(levels: int, data: st.DataObject) -> None:
    """Whatever virtual neurons: followed switch by switch, words add them up; with another bit they do not, or the bit
    says nothing where nothing comes."""
    multipliers = 1 << levels
    config = MaeriConfig(multipliers, multipliers, multipliers)
    cuts = sorted(data.draw(st.sets(st.integers(0, multipliers), min_size=2)))
    pairs = [pair for pair in pairwise(cuts) if data.draw(st.booleans())]
    try:
        tree = configure(multipliers, [Range(start, end - start) for start, end in pairs])
    except TargetError:
        assume(False)
    words = tree_words(config, tree)
    assert added(config, words, pairs) == ""
    for start, end in pairs[:1]:
        silent = [0] * len(words)
        assert "never leaves" in added(config, silent, [(start, end)]) or "adds" in added(
            config, silent, [(start, end)]
        )


def test_what_has_no_image() -> None:
    """Sums that are only limited, without a scale, are no network of an image; the order is given without one."""
    net = limited_net("sums", 6, 6, 2)
    graph = net.finish(net.convolution(net.x, 3))
    request = OrderRequest({}, None, 0.0, net.inputs(), lambda text: None)
    ordering = load_target("maeri").ordering
    assert ordering is not None
    ordered = ordering(graph, request)
    assert not any(name.startswith("image/") for name in ordered.files)
    assert any("No image for an FPGA" in note and "no step for Conv2d" in note for note in ordered.notes)


def test_what_the_host_does() -> None:
    """Floats are quantised and transposed before, dequantised behind; an image holds what is between."""
    net = Net("floats", (5, 6, 3), -5)
    builder, scale = GraphBuilder("floats"), np.array([0.5], np.float32)
    real, unread = (builder.input(name, TensorType((1, 3, 5, 6), DType.FLOAT32)) for name in ("real", "unread"))
    numbers = [builder.constant(name, array) for name, array in (("scale", scale), ("zero", np.array([-5], np.int32)))]
    whole = builder.add(Quantize(DType.INT8), [real, *numbers])
    net.builder, net.x = builder, builder.add(Transpose((0, 2, 3, 1)), [whole])
    result = builder.add(Dequantize(), [net.dense(joined(net, net.convolution(net.x, 4), 1), 7), *numbers])
    graph = builder.finish([result])
    drawn = np.random.default_rng(1).normal(0, 20, (1, 3, 5, 6)).astype(np.float32)
    request = OrderRequest({}, None, 0.0, {real: drawn, unread: drawn}, lambda text: None)
    ordering = load_target("maeri").ordering
    assert ordering is not None
    ordered = ordering(graph, request)
    assert "read back and executed: results equal" in ordered.notes[-1]
    image = read_image(ordered.files["image/int16.bin"])
    assert len(image.inputs) == 1 and first(image, Concat)


def test_rows_that_nobody_reads() -> None:
    """The compiler cuts them off by a slice of the input."""
    graph = prepare(shared_dir() / "faults" / "maeri" / "odd_m.onnx", load_target("maeri"), Options(allow_float=True))
    ordering = load_target("maeri").ordering
    assert ordering is not None
    ordered = ordering(graph, OrderRequest(seconds=0.0, inputs=sample_inputs(graph)))
    assert {"image/int8.bin", "image/int16.bin"} <= set(ordered.files)
    assert "read back and executed: results equal" in ordered.notes[-1]


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_slices_along_any_axis(axis: int) -> None:
    net = Net("slices", (9, 8, 7), -5)
    x = net.convolution(net.x, 6, 3, relu=True)
    shape = net.builder.type_of(x).shape
    start, step = (
        tuple(number if place == axis else other for place in range(4)) for number, other in ((1, 0), (2, 1))
    )
    part = net.builder.add(Slice(start, shape, step), [x])
    graph = net.finish(net.dense(part, 5))
    for data in files_of(graph, MaeriConfig()).values():
        check(data, graph, net.inputs())


def test_features_that_have_no_room() -> None:
    """Those of 16 bits take twice as much."""
    graph, inputs = mixed(3)
    free = read_image(files_of(graph, MaeriConfig())["int8"])
    config = MaeriConfig(feature_memory=free.memory - len(free.constants) + 64)
    order = arrange(network(graph), config)
    files, refused = images(order, phases(order))
    check(files["image/int8.bin"], graph, inputs)
    assert len(files) == 1 and "features of 16 bits need" in refused[0]


def test_inputs_of_another_size() -> None:
    with pytest.raises(DovetailError, match="elements are wanted"):
        execute(read_image(written(3)["int8"]), [np.zeros(3, np.int8)])
