"""Test vectors replayed on the device, as a test bench does, give the expected bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import DovetailError
from dovetail.guests.check import vectors
from dovetail.guests.check.vectors import FORMATS, read_vectors, write_vectors
from dovetail.sim.device import DeviceSpec, MemoryBus, MemoryRegion, make_device
from dovetail.target import Engine, Offload, Target
from dovetail.targets import load_target

DRAWN: dict[tuple[str, str, str], Any] = {}


@pytest.fixture(autouse=True)
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors of an offload are the same in every form, and take seconds to draw."""
    draw = vectors.vectors_of

    def kept(target: Target, engine: Engine, offload: Offload) -> Any:
        key = (target.name, engine.name, offload.name)
        if key not in DRAWN:
            DRAWN[key] = draw(target, engine, offload)
        return DRAWN[key]

    monkeypatch.setattr(vectors, "vectors_of", kept)


def replay(name: str, entry: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The result the device leaves in memory, and the expected one, where they count."""
    target = load_target(name)
    bus = MemoryBus([MemoryRegion(m.name, m.base, m.size) for m in target.memories])
    model = target.engine(entry["engine"]).device
    assert model is not None
    device = make_device(DeviceSpec(model.factory, model.base, model.size, model.arguments), bus)
    device.reset()
    blocks = dict(entry["blocks"])
    expected = blocks.pop("expected")
    for block, place in blocks.items():
        bus.view(place["address"], place["bytes"])[:] = arrays[block]
    for now, (offset, value) in enumerate(arrays["registers"].tolist()):
        device.advance(now)
        device.write(offset, value, now)
    while (event := device.next_event()) is not None:
        device.advance(event)
    result = bus.view(expected["address"], expected["bytes"])
    counts = arrays["mask"] != 0
    return result[counts].tobytes(), arrays["expected"][counts].tobytes()


@pytest.mark.parametrize("form", FORMATS)
def test_replayed_vectors_of_the_mac_array(tmp_path: Path, form: str) -> None:
    count, without = write_vectors(load_target("macarray"), form, tmp_path / "vectors")
    assert count + len(without) == 7 and set(without) <= {"addition"}
    index = json.loads((tmp_path / "vectors" / "index.json").read_text())
    read = read_vectors(tmp_path / "vectors")
    for entry in index["kernels"]:
        actual, expected = replay("macarray", entry, read[entry["kernel"]])
        assert actual == expected, entry["kernel"]
        assert len(set(expected)) > 4
        changed = dict(read[entry["kernel"]])
        constants = "weights" if "weights" in changed else "parameters"
        changed[constants] = np.roll(changed[constants], 1)
        assert replay("macarray", entry, changed)[0] != expected, f"the {constants} matter"


def test_hex_is_what_readmemh_takes(tmp_path: Path) -> None:
    write_vectors(load_target("macarray"), "hex", tmp_path / "v")
    folder = tmp_path / "v" / "convolution"
    assert all(len(line) == 2 and int(line, 16) < 256 for line in (folder / "x.hex").read_text().split())
    writes = [(int(line[:8], 16), int(line[8:], 16)) for line in (folder / "registers.hex").read_text().split()]
    assert writes[-1] == (0, 1), "START comes last"
    assert [offset for offset, _ in writes[:-1]] == [0x10 + 4 * word for word in range(16)]


def test_register_writes_seen_on_the_chip(tmp_path: Path) -> None:
    from dovetail.guests.check.cases import Case, base
    from dovetail.guests.check.vectors import vectors_of, writes_seen

    target = load_target("macarray")
    engine = target.engines[0]
    offload = next(one for one in engine.offloads if one.name == "dense")
    start = base(offload)
    assert start is not None
    made = vectors_of(target, engine, offload)
    assert made is not None
    assert writes_seen(target, Case(engine.name, offload.name, start, "")) == made.writes


def test_bad_wishes(tmp_path: Path) -> None:
    for target, form, hint in (("macarray", "csv", "use one of"), ("riscv", "hex", "an engine")):
        with pytest.raises(DovetailError) as raised:
            write_vectors(load_target(target), form, tmp_path / "v")
        assert raised.value.where and hint in raised.value.hint
    (tmp_path / "mine").mkdir()
    with pytest.raises(DovetailError, match="holds no vectors"):
        write_vectors(load_target("macarray"), "hex", tmp_path / "mine", force=True)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("index.json", b"{", "this is not JSON"),
        ("index.json", None, "the index cannot be read"),
        ("convolution/x.hex", b"zz", "a damaged file of vectors"),
        ("convolution/x.hex", b"00", "the files of 'convolution' lack elements of x"),
        ("convolution/registers.hex", None, "the files of 'convolution' lack elements of registers"),
    ],
)
def test_damaged_vectors_are_named(tmp_path: Path, file: str, content: bytes | None, message: str) -> None:
    write_vectors(load_target("macarray"), "hex", tmp_path / "v")
    place = tmp_path / "v" / file
    place.unlink() if content is None else place.write_bytes(content)
    with pytest.raises(DovetailError, match=message):
        read_vectors(tmp_path / "v")


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    write_vectors(load_target("macarray"), "npz", tmp_path / "v")
    index = tmp_path / "v" / "index.json"
    index.write_text(index.read_text().replace('"convolution.npz"', '"../convolution.npz"'))
    with pytest.raises(DovetailError, match="must be the name of a file or folder beside it"):
        read_vectors(tmp_path / "v")
