"""Keras files written by hand, as Keras 2 writes them and as no Keras would."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.read.keras.hdf5 import Contents

h5py = pytest.importorskip("h5py", reason="Keras files are read with h5py")
Array = np.ndarray[Any, Any]


def read_here(name: str, data: bytes) -> Contents:
    """What the worker does, in this process: a third of a second less."""
    from dovetail.read.keras.hdf5 import Hdf5Reader

    return Contents(name, Hdf5Reader(data).read())


def layer(kind: str, name: str, inbound: list[Any] | None = None, **config: Any) -> dict[str, Any]:
    """A layer as Keras 2 writes it, in a functional model with `inbound`."""
    entry = {"class_name": kind, "config": {"name": name, "trainable": True, "dtype": "float32", **config}}
    return entry if inbound is None else {**entry, "name": name, "inbound_nodes": inbound}


def functional(name: str, layers: list[Any], inputs: Sequence[str], outputs: list[Any]) -> dict[str, Any]:
    """A functional model; inputs by name, outputs as [layer, call, result]."""
    ends = {"input_layers": [[entry, 0, 0] for entry in inputs], "output_layers": outputs}
    return {"class_name": "Functional", "config": {"name": name, "layers": layers, **ends}}


def write_h5(
    path: Path,
    config: Any,
    weights: Mapping[str, Mapping[str, Array]],
    version: str | None = "2.8.0",
    names: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """An `.h5` file: for each layer its weights by name."""
    with h5py.File(path, "w") as file:
        text = config if isinstance(config, str) else json.dumps(config)
        file.attrs["model_config"] = text
        if version is not None:
            file.attrs["keras_version"] = version
        groups = file.create_group("model_weights")
        for name, arrays in weights.items():
            group = groups.create_group(name)
            group.attrs["weight_names"] = [key.encode() for key in (names or {}).get(name, list(arrays))]
            for key, array in arrays.items():
                group.create_dataset(key, data=array)
    return path


def members(path: Path) -> dict[str, bytes]:
    """What a `.keras` file holds."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_zip(path: Path, entries: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """A `.keras` file of these members."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def write_keras(path: Path, config: Any, weights: Mapping[str, Array], version: str = "3.11.0") -> Path:
    """A `.keras` file: a configuration, and weights by their paths."""
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        for key, array in weights.items():
            file.create_dataset(key, data=array)
    entries = {
        "metadata.json": json.dumps({"keras_version": version}).encode(),
        "config.json": config if isinstance(config, bytes) else json.dumps(config).encode(),
        "model.weights.h5": stream.getvalue(),
    }
    return write_zip(path, entries)


def dense_model(units: int = 2, **config: Any) -> dict[str, Any]:
    """A sequential model of an input of 3 and a dense layer, as Keras 2 writes it."""
    layers = [
        layer("InputLayer", "x", batch_input_shape=[None, 3]),
        layer("Dense", "dense", units=units, activation="linear", use_bias=True, **config),
    ]
    return {"class_name": "Sequential", "config": {"name": "net", "layers": layers}}


def dense_weights(units: int = 2) -> dict[str, Array]:
    """Its weights."""
    kernel = np.arange(3 * units, dtype=np.float32).reshape(3, units)
    return {"dense/kernel:0": kernel, "dense/bias:0": np.ones(units, np.float32)}
