"""Spoils model files at random and compiles each: it compiles or is refused as the user's file, within ten seconds.

    python scripts/mutated_models.py ../shared/models --count 5000

Files of every format are cut off, get other bits, bytes and words, and of what they say (ONNX's messages, Keras's
configuration, TFLite's small numbers) parts are removed, exchanged and replaced. A failure is an error that is no
DovetailError, a message that asks to report it, one of the model that does not name the file, or ten seconds of
computing. The same count and seed give the same files; `--keep` says where those that fail are left.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from dovetail.compile import Options, compile_model
from dovetail.errors import DovetailError, ModelError
from dovetail.target.description import Target
from dovetail.targets import load_target

SUFFIXES = (".tflite", ".onnx", ".keras", ".h5")
LARGEST = 120_000
"""Bytes of the largest file that is spoilt: what is computed with grows with it, what is read does not."""
SECONDS = 10.0
ODD: tuple[Any, ...] = (
    None,
    0,
    -1,
    1,
    2,
    3,
    1 << 40,
    1.5,
    float("inf"),
    True,
    "",
    "relu",
    "same",
    [],
    [1],
    [-1, 0],
    {},
)
"""What may stand in a configuration in place of something else."""
NUMBERS = (0, 1, 2, 3, 5, 7, 8, 127, 128, 255, 1 << 15, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)
"""What may stand in place of a small number."""


class _TooLong(BaseException):
    """Computing took longer than it may."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder of models of any depth")
    parser.add_argument("--count", type=int, default=5000, help="files tried, shared out over the models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the files that fail")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    found = sorted(path for path in given.models.rglob("*") if path.suffix in SUFFIXES)
    models = [path for path in found if path.stat().st_size <= LARGEST]
    if not models:
        raise SystemExit(f"no model of at most {LARGEST:,} bytes in {given.models}")
    target = load_target("riscv")
    memories = tuple(replace(memory, size=max(memory.size, 16 << 20)) for memory in target.memories)
    outcomes, failures = Counter[str](), list[str]()
    with TemporaryDirectory() as folder:
        for number in range(given.count):
            model = models[number % len(models)]
            source = random.Random(f"{given.seed} {number}")
            path = Path(folder) / model.name
            path.write_bytes(spoilt(model.read_bytes(), model.suffix, source))
            outcome, text = tried(path, replace(target, memories=memories))
            outcomes[outcome] += 1
            if text:
                failures.append(f"{number}, {model.name}: {text}")
                print(failures[-1], flush=True)
                if given.keep is not None:
                    given.keep.mkdir(parents=True, exist_ok=True)
                    (given.keep / f"{number}_{model.name}").write_bytes(path.read_bytes())
    counted = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{given.count:,} files of {len(models)} models: {counted}; {len(failures)} failures")
    sys.exit(bool(failures))


def tried(path: Path, target: Target) -> tuple[str, str]:
    """What became of a file, and what is wrong with that; the second is empty where nothing is."""
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        compile_model(path, target, Options(allow_float=True))
    except DovetailError as error:
        text = str(error)
        asks = "report this" in text.lower()
        unnamed = isinstance(error, ModelError) and path.name not in text
        return "refused", f"asks to report: {text}" if asks else f"names no file: {text}" if unnamed else ""
    except _TooLong as error:
        return "too long", f"longer than {SECONDS:g} s: {error}"
    except Exception:
        return "broken", traceback.format_exc(limit=-4)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "compiled", ""


def _stop(_number: int, frame: FrameType | None) -> None:
    raise _TooLong("".join(traceback.format_stack(frame, limit=4)))


def spoilt(data: bytes, suffix: str, source: random.Random) -> bytes:
    """The file with random faults: of its bytes, or of what it says."""
    says: dict[str, Callable[[bytes, random.Random], bytes]] = {".onnx": _messages, ".keras": _configuration}
    if suffix in says and source.random() < 0.7:
        return says[suffix](data, source)
    return _bytes(data, source, small=suffix == ".tflite")


def _bytes(data: bytes, source: random.Random, small: bool) -> bytes:
    """Cut off, or with other bits, bytes and words, most of them where the structure is: at both ends."""
    made = bytearray(data)
    kind = source.randrange(6)
    if kind == 0:
        return bytes(made[: source.randrange(len(data))])
    for _ in range(source.choice((1, 1, 2, 8))):
        edge = source.choice((0, max(len(data) - 12_000, 0), source.randrange(len(data))))
        place = min(edge + source.randrange(12_000), len(data) - 5)
        if kind == 1:
            made[place] ^= 1 << source.randrange(8)
        elif kind == 2:
            made[place] = source.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 3 or not small:
            made[place : place + 4] = (source.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "little")
        else:  # a small number of a table, aligned: an operator's operand, a size, an option, a type
            places = [at for at in range(place & ~3, min(len(data) - 4, (place & ~3) + 400), 4)]
            numbers = [at for at in places if 0 < int.from_bytes(data[at : at + 4], "little") < 256]
            at = source.choice(numbers or [place & ~3])
            made[at : at + 4] = source.randrange(-1, 40).to_bytes(4, "little", signed=True)
    return bytes(made)


def _messages(data: bytes, source: random.Random) -> bytes:
    """An ONNX model of which parts are removed, exchanged, doubled, or have other numbers and texts."""
    import onnx

    model = onnx.load_from_string(data)
    for _ in range(source.choice((1, 1, 2, 4))):
        places = _fields(model)
        message, field = source.choice(places)
        others = [one for one in places if one[1] is field and one[0] is not message]
        _spoil(message, field, source.choice(others)[0] if others else message, source)
    return bytes(model.SerializeToString())


def _fields(message: Any) -> list[tuple[Any, Any]]:
    """(message, field) of everything a message holds."""
    found = []
    for field, value in message.ListFields():
        found.append((message, field))
        if field.type == field.TYPE_MESSAGE:
            for inner in value if _repeated(message, field) else (value,):
                found += _fields(inner)
    return found


def _repeated(message: Any, field: Any) -> bool:
    return hasattr(getattr(message, field.name), "append")


def _spoil(message: Any, field: Any, other: Any, source: random.Random) -> None:
    """Change one field: leave it out, take what stands in another message, or write something else."""
    kind, value = source.randrange(3), getattr(message, field.name)
    if kind == 0:
        message.ClearField(field.name)
    elif _repeated(message, field):
        if kind == 1 and len(value):
            del value[source.randrange(len(value))]
        elif kind == 1 or field.type == field.TYPE_MESSAGE:
            value.extend(list(getattr(other, field.name))[:3])
        elif len(value):
            value[source.randrange(len(value))] = _other(field, value[0], source)
    elif field.type == field.TYPE_MESSAGE:
        value.CopyFrom(getattr(other, field.name))
    else:
        setattr(message, field.name, getattr(other, field.name) if kind == 1 else _other(field, value, source))


def _other(field: Any, value: Any, source: random.Random) -> Any:
    """Another value for a field of one value."""
    if isinstance(value, bytes):
        return value[: source.randrange(len(value) + 1)]
    if isinstance(value, str):
        return source.choice(("", "x", value + "_", value.lower()))
    if isinstance(value, float):
        return source.choice((0.0, -1.0, 1e-38, 1e38, float("inf"), float("nan")))
    if field.type == field.TYPE_ENUM:
        return source.choice([one.number for one in field.enum_type.values])
    bits = 31 if field.type == field.TYPE_INT32 else 63
    return source.choice([number for number in NUMBERS if number < 1 << bits] + [-1])


def _configuration(data: bytes, source: random.Random) -> bytes:
    """A Keras file whose configuration has parts removed, exchanged or replaced."""
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as held, zipfile.ZipFile(made, "w") as result:
        for name in held.namelist():
            content = held.read(name)
            result.writestr(name, _replaced(content, source) if name == "config.json" else content)
    return made.getvalue()


def _replaced(text: bytes, source: random.Random) -> bytes:
    config = json.loads(text)
    for _ in range(source.choice((1, 1, 2, 4))):
        places = _places(config)
        (container, key), (other, other_key) = source.choice(places), source.choice(places)
        if source.randrange(6) == 0:
            del container[key]
        else:
            container[key] = json.loads(json.dumps(other[other_key])) if source.random() < 0.3 else source.choice(ODD)
    return json.dumps(config).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a nest."""
    if not isinstance(value, dict | list):
        return []
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in _places(inner)]


if __name__ == "__main__":
    main()
