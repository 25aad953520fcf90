"""Keras files that are damaged, dangerous, or say what cannot be honoured: one clear message each, nothing executed."""

from __future__ import annotations

import io
import json
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import DovetailError, ModelError
from dovetail.read import load_model
from dovetail.read.keras import archive, hdf5
from keras_writer import (
    dense_model,
    dense_weights,
    functional,
    h5py,
    layer,
    members,
    read_here,
    write_h5,
    write_keras,
    write_zip,
)

NET = {"dense": dense_weights()}
PATHS = {"layers/dense/vars/0": dense_weights()["dense/kernel:0"], "layers/dense/vars/1": np.ones(2, np.float32)}
HEAD = layer("InputLayer", "x", batch_input_shape=[None, 3])


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read without the worker, which tests of its own start."""
    monkeypatch.setattr(archive, "read_hdf5", read_here)


def refused(path: Path, message: str) -> str:
    """Loading fails with this message, which names the file, in little memory and time."""
    start = time.process_time()
    tracemalloc.start()
    with pytest.raises(ModelError, match=message) as error:
        load_model(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.name in str(error.value)
    assert peak < 256 * 2**20 and time.process_time() - start < 10
    return str(error.value)


def sequence(*layers: Any) -> dict[str, Any]:
    return {"class_name": "Sequential", "config": {"name": "net", "layers": [HEAD, *layers]}}


def test_the_writers_files_are_read(tmp_path: Path) -> None:
    """What the other tests spoil is right before."""
    load_model(write_h5(tmp_path / "m.h5", dense_model(), NET))
    load_model(write_keras(tmp_path / "m.keras", dense_model(), PATHS))


LAYERS = {
    "custom": (layer("MyLayer", "mine", units=3), r"MyLayer 'mine' \(config\.layers\[1\]\): the layer MyLayer is not"),
    "module": ({**layer("Dense", "d"), "module": "evil.layers"}, "of the module evil.layers is not one of Keras's own"),
    "lambda": (layer("Lambda", "fn", function=["4wEAAAAA", None, None]), "Lambda 'fn'.*never executed"),
    "activation": (
        layer("Activation", "a", activation={"class_name": "function", "config": "mine", "module": "builtins"}),
        "the activation mine is not one of Keras's own",
    ),
    "activation module": (
        layer("Activation", "a", activation={"class_name": "function", "config": "relu", "module": "os"}),
        "the activation os.relu is not",
    ),
    "quantised": (layer("Dense", "d", units=2, quantization_config={"mode": "int8"}), "already quantised by Keras"),
    "quantised policy": (layer("Dense", "d", units=2, dtype="int8_from_float32"), "already quantised by Keras"),
    "qkeras": (layer("QDense", "q", units=2), "the layer QDense is not supported"),
    "mask": (layer("Masking", "m", mask_value=0.0), "the layer Masking is not supported"),
    "setting": (layer("Dropout", "d", rate=0.5, temperature=3), "the setting temperature = 3 is not supported"),
    "size": (layer("Reshape", "r", target_shape=[2, -1]), r"3 elements have not the shape \[2, -1\]"),
    "repeat": (layer("RepeatVector", "r", n=1 << 30), "picks 1073741824 places along one axis; the limit is 65536"),
    "padding size": (layer("ZeroPadding1D", "p", padding=[1 << 19, 1]), "works on 3 axes"),
    "axis": (layer("Softmax", "s", axis=5), "the setting axis = 5 must name different axes of 2"),
    "negative": (layer("Dense", "d", units=-3), "units = -3 must be an integer of at least 1"),
    "not a number": (layer("LeakyReLU", "l", alpha=float("nan")), "alpha = nan must be a number"),
    "text": (layer("Dense", "d", units="8"), "units = 8 must be an integer"),
    "rank": (layer("Conv2D", "c", filters=2, kernel_size=3), "works on 4 axes"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, tmp_path: Path) -> None:
    entry, message = LAYERS[name]
    names = {"d": {"d/kernel:0": np.ones((3, 2), np.float32), "d/bias:0": np.ones(2, np.float32)}}
    weights = names if entry["class_name"] == "Dense" else {}
    if entry["class_name"] == "Conv2D":
        weights = {"c": {"c/kernel:0": np.ones((3, 3, 3, 2), np.float32), "c/bias:0": np.ones(2, np.float32)}}
    refused(write_h5(tmp_path / "m.h5", sequence(entry), weights), message)


def _open(axis: int) -> dict[str, Any]:
    shape = [None, 8, 8, 3]
    shape[axis] = None
    return {"class_name": "Sequential", "config": [layer("InputLayer", "x", batch_input_shape=shape)]}


def _chain_of_models(depth: int) -> dict[str, Any]:
    """Each model calls the next one twice."""
    entry = functional("m", [_input(), layer("ReLU", "r", [[["x", 0, 0, {}]]])], ["x"], [["r", 0, 0]])
    for index in range(depth):
        inner = {**entry, "name": f"m{index}", "inbound_nodes": [[["x", 0, 0, {}]], [[f"m{index}", 1, 0, {}]]]}
        entry = functional(f"n{index}", [_input(), inner], ["x"], [[f"m{index}", 2, 0]])
    return entry


def _input() -> dict[str, Any]:
    return layer("InputLayer", "x", [], batch_input_shape=[None, 3])


def _circle() -> dict[str, Any]:
    layers = [_input(), layer("ReLU", "a", [[["b", 0, 0, {}]]]), layer("ReLU", "b", [[["a", 0, 0, {}]]])]
    return functional("net", layers, ["x"], [["b", 0, 0]])


CONFIGS: dict[str, tuple[Any, str]] = {
    "open size": (_open(1), r"axis 1 of the input .* is left open.*\n.*fixed sizes"),
    "no shape": ({"class_name": "Sequential", "config": [layer("ReLU", "r")]}, "does not say the shape of its input"),
    "huge input": (
        {"class_name": "Sequential", "config": [layer("InputLayer", "x", batch_input_shape=[None, 1 << 30, 9])]},
        "the limit is",
    ),
    "a layer only": (layer("Dense", "d", units=2), "not a Sequential or Functional model"),
    "no layers": ({"class_name": "Sequential", "config": {"name": "n", "layers": []}}, "needs a list of 1 to"),
    "circle": (_circle(), "never computed, or that depends on itself"),
    "unknown output": (functional("n", [_input()], ["x"], [["y", 0, 0]]), "call 0 of 'y' is never computed"),
    "two of a name": (functional("n", [_input(), _input()], ["x"], [["x", 0, 0]]), "two layers of the model"),
    "no outputs": (functional("n", [_input()], ["x"], []), "output_layers is empty"),
    "wrong reference": (
        functional("n", [_input(), layer("ReLU", "r", [[["x", -1, "0"]]])], ["x"], [["r", 0, 0]]),
        "is not \\[layer, call, result\\]",
    ),
    "growing": (_chain_of_models(14), "more than 10000 calls of layers"),
    "nested": (_chain_of_models(30), "more than 16 models and wrappers lie inside one another"),
    "class": ({"class_name": 5}, "expected a layer with a class_name"),
    "name": (sequence({"class_name": "ReLU", "config": {"name": ["x"]}}), "the name or module of ReLU is no text"),
    "list": ("[1, 2]", "no JSON object"),
    "no JSON": ("{", "this is not JSON"),
    "deep": ("[" * 100_000, "brackets stand inside one another"),
    "rather deep": ('{"a":' * 300 + "1" + "}" * 300, "more than 200 brackets"),
    "long number": ('{"a": ' + "9" * 5000 + "}", "this is not JSON"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str, tmp_path: Path) -> None:
    config, message = CONFIGS[name]
    refused(write_h5(tmp_path / "m.h5", config, {}), f"(?s:.*){message}")


def _sized(*shape: int) -> dict[str, dict[str, Any]]:
    return {"dense": {"dense/kernel:0": np.ones(shape, np.float32), "dense/bias:0": np.ones(2, np.float32)}}


def _with(value: float) -> dict[str, dict[str, Any]]:
    found = _sized(3, 2)
    found["dense"]["dense/kernel:0"][1, 1] = value
    return found


WEIGHTS: dict[str, tuple[Any, str]] = {
    "shape": (_sized(4, 2), r"Dense 'dense'.* the kernel has the shape \[4, 2\], expected \[3, 2\]"),
    "NaN": (_with(np.nan), "dense/kernel:0: the weights hold NaN or infinite"),
    "infinite": (_with(np.inf), "NaN or infinite"),
    "none": ({}, "the layer has the weights kernel, bias; the file holds 0"),
    "too few": ({"dense": {"dense/kernel:0": np.ones((3, 2), np.float32)}}, "the file holds 1 for it"),
    "of others": ({"dense": {"dense/gamma:0": np.ones(2), "dense/beta:0": np.ones(2)}}, "stand where the kernel of"),
    "integers": ({"dense": {"dense/kernel:0": np.ones((3, 2), np.int8), "dense/bias:0": np.ones(2)}}, "type int8"),
    "complex": ({"dense": {"dense/kernel:0": np.ones((3, 2), complex), "dense/bias:0": np.ones(2)}}, "type complex"),
    "text": ({"dense": {"dense/kernel:0": np.array([b"a"] * 6), "dense/bias:0": np.ones(2)}}, "of the type"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, tmp_path: Path) -> None:
    arrays, message = WEIGHTS[name]
    refused(write_h5(tmp_path / "m.h5", dense_model(), arrays), message)


def test_a_name_listed_but_absent(tmp_path: Path) -> None:
    names = {"dense": ["dense/kernel:0", "dense/other/bias:0"]}
    refused(write_h5(tmp_path / "m.h5", dense_model(), NET, names=names), "holds no such weights")


def _external_link(group: Any, tmp_path: Path) -> None:
    write_h5(tmp_path / "other.h5", dense_model(), NET)
    group["kernel:0"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/model_weights/dense/dense/kernel:0")


def _soft_link(group: Any, tmp_path: Path) -> None:
    group["kernel:0"] = h5py.SoftLink("/model_weights/dense/dense/bias:0")


def _external_data(group: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(24))
    group.create_dataset("kernel:0", (3, 2), "f4", external=[(str(tmp_path / "secret.bin"), 0, 24)])


def _virtual(group: Any, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other.create_dataset("data", data=np.ones((3, 2), np.float32))
    layout = h5py.VirtualLayout((3, 2), "f4")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "data", (3, 2))
    group.create_virtual_dataset("kernel:0", layout)


def _huge(group: Any, tmp_path: Path) -> None:
    group.create_dataset("kernel:0", (1 << 20, 1 << 20), "f4", chunks=(16, 16))


def _huge_chunk(group: Any, tmp_path: Path) -> None:
    group.create_dataset("kernel:0", (3, 2), "f4", chunks=(1 << 14, 1 << 14), maxshape=(None, None))


def _bomb(group: Any, tmp_path: Path) -> None:
    group.create_dataset("kernel:0", data=np.zeros((1 << 20, 8), np.float32), compression="gzip", compression_opts=9)


def _objects(group: Any, tmp_path: Path) -> None:
    group.create_dataset("kernel:0", (3, 2), h5py.string_dtype())


def _references(group: Any, tmp_path: Path) -> None:
    group.create_dataset("kernel:0", (3, 2), h5py.ref_dtype)


def _fields(group: Any, tmp_path: Path) -> None:
    group.create_dataset("kernel:0", (3, 2), np.dtype([("a", "f4"), ("b", "f4")]))


def _group(group: Any, tmp_path: Path) -> None:
    group.create_group("kernel:0")


DATASETS: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "external link": (_external_link, "ExternalLink, which is not followed"),
    "soft link": (_soft_link, "SoftLink, which is not followed"),
    "external data": (_external_data, "lie in another file, which is not read"),
    "virtual": (_virtual, "lie in another file, which is not read"),
    "huge": (_huge, r"have \d{13} bytes; the file holds 0 of them"),
    "huge chunk": (_huge_chunk, "have 1073741824 bytes; the file holds"),
    "bomb": (_bomb, "the weights are compressed"),
    "objects": (_objects, "the weights are of the type object"),
    "references": (_references, "the weights are of the type object"),
    "fields": (_fields, "the weights are of the type"),
    "group": (_group, "the file holds no such weights"),
}


@pytest.mark.parametrize("name", DATASETS)
def test_datasets(name: str, tmp_path: Path) -> None:
    spoil, message = DATASETS[name]
    path = write_h5(tmp_path / "m.h5", dense_model(), NET)
    with h5py.File(path, "r+") as file:
        group = file["model_weights/dense/dense"]
        del group["kernel:0"]
        spoil(group, tmp_path)
    refused(path, message)


def test_links_to_groups_are_not_followed(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "m.h5", dense_model(), NET)
    write_h5(tmp_path / "other.h5", dense_model(), NET)
    with h5py.File(path, "r+") as file:
        del file["model_weights"]
        file["model_weights"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/model_weights")
    refused(path, "ExternalLink, which is not followed")


def test_one_dataset_under_many_names_is_not_read_without_end(tmp_path: Path) -> None:
    """The file holds its weights once; layers that list them again and again would take any memory."""
    count = 50
    layers = [layer("Dense", f"d{index}", units=300, use_bias=False) for index in range(count)]
    path = tmp_path / "m.h5"
    config = {"class_name": "Sequential", "config": [layer("InputLayer", "x", batch_input_shape=[None, 300]), *layers]}
    write_h5(path, config, {"d0": {"kernel:0": np.ones((300, 300), np.float32)}})
    with h5py.File(path, "r+") as file:
        for index in range(1, count):
            group = file.create_group(f"model_weights/d{index}")
            group.attrs["weight_names"] = [b"kernel:0"]
            group["kernel:0"] = file["model_weights/d0/kernel:0"]
    refused(path, "the file holds")


def test_an_attribute_of_too_many_names(tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.attrs["model_config"] = json.dumps(dense_model())
        file.create_group("model_weights/dense").attrs["weight_names"] = np.zeros(1 << 17, "S1")
    refused(path, r"lists 131072 names; the limit is 65536")


def _archive(tmp_path: Path) -> dict[str, bytes]:
    return members(write_keras(tmp_path / "good.keras", dense_model(), PATHS))


ARCHIVES: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = {
    "path up": (lambda held: {**held, "../../etc/cron.d/x": b"1"}, "whose name leads out of it"),
    "absolute": (lambda held: {**held, "/etc/passwd": b"1"}, "whose name leads out of it"),
    "drive": (lambda held: {**held, "C:/x": b"1"}, "whose name leads out of it"),
    "no config": (lambda held: {k: v for k, v in held.items() if k != "config.json"}, "has no config.json"),
    "no weights": (lambda held: {k: v for k, v in held.items() if k != "model.weights.h5"}, "has no model.weights.h5"),
    "weights are no HDF5": (lambda held: {**held, "model.weights.h5": b"x" * 100}, "the file is damaged"),
    "many": (lambda held: held | {f"assets/{n}": b"" for n in range(5000)}, "members; the limit is 4096"),
    "config is no JSON": (lambda held: {**held, "config.json": b"\x80\x04K\x01."}, "config.json: this is not JSON"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(name: str, tmp_path: Path) -> None:
    spoil, message = ARCHIVES[name]
    refused(write_zip(tmp_path / "m.keras", spoil(_archive(tmp_path))), message)


def test_a_zip_bomb(tmp_path: Path) -> None:
    held = {**_archive(tmp_path), "config.json": b" " * (20 << 20)}
    refused(write_zip(tmp_path / "m.keras", held, zipfile.ZIP_DEFLATED), "declares 20971520 bytes, .* are stored")


def test_a_member_that_declares_too_much(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "m.keras", _archive(tmp_path))
    data = bytearray(path.read_bytes())
    place = data.rfind(b"PK\x01\x02", 0, data.rfind(b"model.weights.h5"))
    data[place + 24 : place + 28] = (0xFFFFFFF0).to_bytes(4, "little")
    path.write_bytes(data)
    refused(path, r"declares 4294967280 bytes; the limit is 536870912")


def test_a_member_twice(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "m.keras", _archive(tmp_path))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("config.json", b"{}")
    refused(path, "two members with the name 'config.json'")


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    """A pickle in an asset or in place of weights is only bytes."""
    code = b"cos\nsystem\n(S'touch " + str(tmp_path / "hit").encode() + b"'\ntR."
    held = {**_archive(tmp_path), "assets/evil.pkl": code}
    load_model(write_zip(tmp_path / "m.keras", held))
    assert not (tmp_path / "hit").exists()


def test_a_file_the_library_dies_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of an attribute's type: HDF5 2.0 reads where it must not."""
    monkeypatch.setattr(archive, "read_hdf5", hdf5.read_hdf5)
    path = write_h5(tmp_path / "m.h5", dense_model(), {"dense": dense_weights()}, names={"dense": ["a" * 9, "b" * 9]})
    with h5py.File(path, "r+") as file:
        group = file["model_weights/dense"]
        del group.attrs["weight_names"]
        group.attrs.create("weight_names", ["dense/kernel:0", "dense/bias:0"], dtype=h5py.string_dtype())
    data = path.read_bytes()
    before, after = b"weight_names\0\0\0\0\x19\x01", b"weight_names\0\0\0\0\x19\xbd"
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, after))
    refused(path, "the file is damaged")  # "the HDF5 library died of it", or a later one's own message


def test_a_file_the_library_reads_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space of no size in the heap of texts: HDF5 2.0 walks over it for ever."""
    monkeypatch.setattr(archive, "read_hdf5", hdf5.read_hdf5)
    monkeypatch.setattr(hdf5, "SECONDS", 2.0)
    path = write_h5(tmp_path / "m.h5", dense_model(), NET)
    data = bytearray(path.read_bytes())
    place = data.find(b"GCOL") + 16
    while int.from_bytes(data[place : place + 2], "little"):
        place += 16 + (int.from_bytes(data[place + 8 : place + 16], "little") + 7) // 8 * 8
    data[place + 8 : place + 16] = bytes(8)
    path.write_bytes(data)
    refused(path, "the file is damaged")  # "reading it comes to no end", or a later one's own message


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    wholes = (write_h5(tmp_path / "w.h5", dense_model(), NET), write_keras(tmp_path / "w.keras", dense_model(), PATHS))
    for whole in wholes:
        data = whole.read_bytes()
        for length in (1, 4, 8, 20, 100, 600, len(data) // 2, len(data) - 40):
            path = tmp_path / f"m{whole.suffix}"
            path.write_bytes(data[:length])
            with pytest.raises(DovetailError):
                load_model(path)


def test_a_zip_that_is_no_model(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("word/document.xml", json.dumps({}))
    path = tmp_path / "m.keras"
    path.write_bytes(stream.getvalue())
    refused(path, "has no config.json")
