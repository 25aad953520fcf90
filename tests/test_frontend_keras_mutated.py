"""Keras files with random faults: each is read or refused with a DovetailError, in bounded time."""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import DovetailError
from dovetail.read import keras, load_model
from dovetail.read.keras import archive, hdf5
from keras_writer import dense_model, dense_weights, members, read_here, write_h5, write_keras


@pytest.mark.parametrize(("kind", "count"), [("h5", 16), ("keras", 300)])
def test_mutated_files_import_or_are_refused(
    kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncations and overwritten bytes. Those of an archive are found by its checksums."""
    monkeypatch.setattr(archive, "read_hdf5", hdf5.read_hdf5 if kind == "h5" else read_here)
    weights = {"dense": dense_weights(40)}
    whole = tmp_path / f"whole.{kind}"
    if kind == "h5":
        write_h5(whole, dense_model(40), weights)
    else:
        paths = dict(zip(("layers/dense/vars/0", "layers/dense/vars/1"), weights["dense"].values(), strict=True))
        write_keras(whole, dense_model(40), paths)
    data, source, path = whole.read_bytes(), random.Random(6), tmp_path / f"m.{kind}"
    done = 0
    for number in range(count):
        spoilt = bytearray(data)
        if number % 6 == 0:
            del spoilt[source.randrange(8, len(data)) :]
        for _ in range(source.choice((1, 1, 2, 8))):
            place = source.randrange(8, len(spoilt) - 4) if len(spoilt) > 13 else 8
            spoilt[place : place + 1] = bytes([source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))])
        path.write_bytes(spoilt)
        start = time.perf_counter()
        try:
            load_model(path)
            done += 1
        except DovetailError as error:
            assert path.name in str(error), f"mutation {number}"
        assert time.perf_counter() - start < 60, f"mutation {number} took too long"
    assert 0 < done < count


ODD: tuple[Any, ...] = (
    *(None, 0, -1, 1, 2, 3, 1 << 40, 1.5, float("nan"), float("inf"), True, False, "", "relu", "same", "0"),
    *([], [1], [1, 2], [-1, 0], [[1, 2], [3, 4]], [None, 3], ["input_layer", 0, 0], {}, {"a": 1}),
)
"""What may stand in a configuration in place of something else."""

MUTATIONS = 80
"""For each group of layers."""


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a nest."""
    if not isinstance(value, dict | list):
        return []
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in _places(inner)]


def _mutated(config: Any, source: random.Random) -> Any:
    """A configuration with one to four parts removed, exchanged or replaced."""
    config = copy.deepcopy(config)
    for _ in range(source.choice((1, 1, 2, 4))):
        places = _places(config)
        container, key = source.choice(places)
        other, other_key = source.choice(places)
        kind = source.randrange(6)
        if kind == 0:
            del container[key]
        else:
            container[key] = copy.deepcopy(other[other_key] if kind == 1 else source.choice(ODD))
    return config


@pytest.mark.filterwarnings("ignore::DeprecationWarning:keras")
@pytest.mark.parametrize("group", ["convolutions", "normalisations", "movement", "products", "recurrent", "operations"])
def test_mutated_configurations_import_or_are_refused(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = pytest.importorskip("keras_cases", reason="Keras writes the models")
    held = members(cases.saved(cases.together(cases.GROUPS[group]), tmp_path, "m")[0])
    config, weights = json.loads(held["config.json"]), read_here("m.keras", held["model.weights.h5"])
    source = random.Random(len(group))
    for number in range(MUTATIONS):
        file = archive.KerasFile("m.keras", _mutated(config, source), source.choice((2, 3, 3)), weights, True)
        monkeypatch.setattr(keras, "read_keras", lambda _name, _data, file=file: file)
        start = time.perf_counter()
        try:
            keras.load_keras("m.keras", b"", "m")
        except DovetailError as error:
            assert "m.keras" in str(error), f"mutation {number}"
        assert time.perf_counter() - start < 5, f"mutation {number} took too long"
