"""Calibration data: what is read, and one clear message for each thing that is wrong with it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import DovetailError
from dovetail.guests.ptq import Preprocessing, read_samples
from dovetail.guests.ptq.data import check_labels
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.types import Array, DType, TensorType

SHAPE = (1, 4, 6, 3)


def network(*shapes: tuple[int, ...]) -> Graph:
    """A graph with inputs x, y, ... of these shapes."""
    builder = GraphBuilder("net")
    names = [builder.input("xyz"[i], TensorType(shape, DType.FLOAT32)) for i, shape in enumerate(shapes or (SHAPE,))]
    results = [builder.add(Clamp(0.0, 6.0), [name], f"clamp_{name}") for name in names]
    if len(results) > 1:
        builder.add(Add(), results, "sum")
    return builder.finish([results[0] if len(results) == 1 else "sum"])


def samples(count: int = 5, shape: tuple[int, ...] = SHAPE) -> Array:
    return np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)


@pytest.mark.parametrize("shape", [(5, *SHAPE), (5, *SHAPE[1:]), SHAPE[1:]])
def test_samples_come_with_or_without_the_models_batch(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "a.npz"
    array = samples(shape=SHAPE).reshape(-1)[: int(np.prod(shape))].reshape(shape)
    np.savez(path, anything=array)
    found = read_samples(path, network(), Preprocessing())
    assert found.inputs["x"].shape == ((5 if len(shape) > 3 else 1), *SHAPE)
    assert np.array_equal(found.inputs["x"].reshape(-1), array.reshape(-1))


def test_scale_offset_and_number_are_applied(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    whole = np.random.default_rng(0).integers(0, 256, (9, *SHAPE[1:]), np.uint8)
    np.savez(path, x=whole, labels=np.arange(9))
    found = read_samples(path, network(), Preprocessing(scale=2 / 255, offset=-1.0, most=4))
    assert np.allclose(found.inputs["x"][:, 0], whole[:4] * (2 / 255) - 1, atol=1e-6)
    assert found.labels is not None and found.labels.tolist() == [0, 1, 2, 3]


def test_folders_of_arrays(tmp_path: Path) -> None:
    array = samples(4)
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "b.npy", array[2:])
        np.save(tmp_path / name / "a.npy", array[:2])
    found = read_samples(tmp_path, network(SHAPE, SHAPE), Preprocessing())
    assert all(np.array_equal(found.inputs[name], array) for name in "xy")
    np.save(tmp_path / "x" / "labels.npy", np.arange(4))
    single = read_samples(tmp_path / "x", network(), Preprocessing())
    assert single.labels is not None and single.count == 4


@pytest.mark.parametrize("first", [False, True])
def test_folders_of_images(tmp_path: Path, first: bool) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow reads images (dovetail[images])")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), np.uint8)
    for index, one in enumerate(pixels):
        image.fromarray(one).save(tmp_path / f"{index}.png")
    shape = (1, 3, 4, 6) if first else SHAPE
    found = read_samples(tmp_path, network(shape), Preprocessing()).inputs["x"][:, 0]
    assert np.array_equal(found.transpose(0, 2, 3, 1) if first else found, pixels.astype(np.float32))
    image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "9.png")
    with pytest.raises(DovetailError, match="8x8 pixels, the model takes 6x4"):
        read_samples(tmp_path, network(shape), Preprocessing())
    assert read_samples(tmp_path, network(shape), Preprocessing(resize=True)).count == 3
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8 not one")
    with pytest.raises(DovetailError, match="not a PNG or JPEG image"):
        read_samples(tmp_path, network(shape), Preprocessing(resize=True))
    with pytest.raises(DovetailError, match="not one image of 1 or 3 channels"):
        read_samples(tmp_path, network((1, 4)), Preprocessing(resize=True))


def bad_value(value: float) -> Array:
    array = samples()
    array[1, 0, 2, 2, 0] = value
    return array


BAD = {
    "NaN": ({"x": bad_value(np.nan)}, "'x' holds 1 values that are NaN or infinite"),
    "infinite": ({"x": bad_value(-np.inf)}, "'x' holds 1 values that are NaN or infinite"),
    "shape": ({"x": samples(5, (1, 4, 5, 3))}, r"'x' must be \[n, 4, 6, 3\], got \[5, 1, 4, 5, 3\]"),
    "no samples": ({"x": samples(0)}, "'x' is empty"),
    "no arrays": ({}, "there are no arrays for the model's inputs"),
    "only labels": ({"labels": np.arange(3)}, "there are no arrays for the model's inputs"),
    "names": ({"u": samples(), "v": samples()}, "expected arrays 'x', got 'u', 'v'"),
    "text": ({"x": np.array(["a"] * 5)}, "'x' holds <U1, not numbers"),
    "complex": ({"x": samples().astype(np.complex64)}, "'x' holds complex64, not numbers"),
    "label count": ({"x": samples(), "labels": np.arange(4)}, "4 labels for 5 samples"),
    "label type": ({"x": samples(), "labels": np.zeros(5)}, "labels must be integers"),
    "overflow": ({"x": np.full((2, *SHAPE), 1e300)}, "'x' is not finite after preprocessing"),
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_refused(tmp_path: Path, case: str) -> None:
    arrays, message = BAD[case]
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    with pytest.raises(DovetailError, match=message):
        read_samples(path, network(), Preprocessing())


def npy(array: Array) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, array, allow_pickle=True)
    return content.getvalue()


def enormous() -> bytes:
    """A header that announces 4 TiB."""
    content = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
    np.lib.format.write_array_header_1_0(content, header)
    return content.getvalue() + b"\0" * 64


ARCHIVES = {
    "pickle": ({"x.npy": npy(np.array([{}], object))}, "'x' holds object, not numbers"),
    "enormous": ({"x.npy": enormous()}, "announces 4398046511104 bytes and has"),
    "not npy": ({"x.npy": b"hello"}, "a damaged .npz file"),
    "parent": ({"../x.npy": npy(samples())}, "a path that leaves the archive"),
    "absolute": ({"/etc/x.npy": npy(samples())}, "a path that leaves the archive"),
    "backslash": ({"..\\x.npy": npy(samples())}, "a path that leaves the archive"),
    "twice": ({"x.npy": npy(samples()), "x": npy(samples())}, "the array 'x' is there twice"),
    "many": ({f"{index}.npy": b"" for index in range(1100)}, "1100 arrays, the limit is 1024"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_bad_archives_are_refused(tmp_path: Path, case: str) -> None:
    members, message = ARCHIVES[case]
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(DovetailError, match=message):
        read_samples(path, network(), Preprocessing())


def test_too_many_bytes_are_refused_before_any_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.files.MOST_BYTES", 1000)
    np.savez(tmp_path / "a.npz", x=samples())
    with pytest.raises(DovetailError, match="1568 bytes, the limit is 1000"):
        read_samples(tmp_path / "a.npz", network(), Preprocessing())


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DovetailError, match="no such file or folder"):
        read_samples(tmp_path / "a.npz", network(), Preprocessing())
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DovetailError, match=r"not an \.npz file"):
        read_samples(tmp_path / "a.npz", network(), Preprocessing())
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DovetailError, match=r"no \.npy files and no images"):
        read_samples(empty, network(), Preprocessing())
    (empty / "a.npy").write_bytes(enormous())
    with pytest.raises(DovetailError, match=r"damaged \.npy file"):
        read_samples(empty, network(), Preprocessing())
    with pytest.raises(DovetailError, match="there is no such folder"):
        read_samples(empty, network(SHAPE, SHAPE), Preprocessing())


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "secret.npy", samples())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.npy").symlink_to(tmp_path / "secret.npy")
    with pytest.raises(DovetailError, match="not a file of this folder"):
        read_samples(folder, network(), Preprocessing())


def test_inputs_must_have_as_many_samples_each(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=samples(3), y=samples(4))
    with pytest.raises(DovetailError, match=r"different numbers of samples: \{'x': 3, 'y': 4\}"):
        read_samples(tmp_path / "a.npz", network(SHAPE, SHAPE), Preprocessing())


@pytest.mark.parametrize("label", [-1, 10])
def test_labels_out_of_range_are_refused(label: int) -> None:
    with pytest.raises(DovetailError, match=f"1 labels are out of range: label {label} of sample 2"):
        check_labels(np.array([0, 9, label]), 10)
