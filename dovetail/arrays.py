"""Inputs and outputs of runs as `.npz` files, which are untrusted: sizes are bounded. Also builds for a while."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import DovetailError
from dovetail.files import InputError, TemporaryFolder, open_archive, read_npy, replace_file

if TYPE_CHECKING:
    import numpy as np

    from dovetail.codegen.manifest import TensorPort
    from dovetail.compile import Compiled
    from dovetail.ir.types import Array, DType
    from dovetail.run import ProjectBuild
    from dovetail.target import Target


def inputs_of(path: Path | None, ports: Sequence[TensorPort]) -> tuple[list[dict[str, Array]], bool]:
    """The inferences of a file as `read_inputs` gives them; without one, a single inference of seeded inputs."""
    return read_inputs(path, ports) if path else ([seeded_inputs(ports)], False)


def read_inputs(path: Path, ports: Sequence[TensorPort]) -> tuple[list[dict[str, Array]], bool]:
    """The inputs of each inference in a file.

    Args:
        path: an `.npz` keyed by input tensor names; for a model with one input also one array without a name, which
            numpy calls arr_0.
        ports: the model's inputs as a build describes them: name, shape, dtype.

    Returns:
        Arrays by input name for each inference, and whether the file has a batch axis.

    Raises:
        InputError: damaged, too large, or other names, shapes or types than the model's.
    """
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), hint="give an .npz file, or leave out --input")
    names = [port.name for port in ports]
    with open_archive(path, "run fewer inferences at once") as (archive, entries):
        if len(ports) == 1 and set(entries) == {"arr_0"}:
            entries = {names[0]: entries["arr_0"]}
        if set(entries) != set(names):
            what = f"expected arrays {_list(names)}, got {_list(sorted(entries))}"
            raise InputError(what, where=str(path), hint="name each array as the model does")
        arrays = {port.name: _read_array(archive, entries[port.name], path, port) for port in ports}
    return _batch(arrays, path, ports)


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, port: TensorPort) -> Array:
    """Read one array after its header was found to be what the model wants."""
    kind, expected = port.kind, list(port.shape)

    def accept(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        batch = list(shape[1:]) == expected and len(shape) == len(expected) + 1 and shape[0] > 0
        if not (batch or list(shape) == expected) or dtype != kind.numpy:
            raise InputError(
                f"input '{port.name}' must be {kind.numpy} {expected} (or [n, {str(expected)[1:]} for a batch), "
                f"got {dtype} {list(shape)}",
                where=str(path),
                hint=advice(shape, dtype, port),
            )

    array: Array = read_npy(lambda: archive.open(info), info.file_size, port.name, accept)
    _check_values(array, kind, port.name, path)
    return array


def checked(array: Array, port: TensorPort, where: Path | str) -> Array:
    """An array for one inference; raises InputError where it is not of the input's type and shape."""
    kind, expected = port.kind, list(port.shape)
    if array.dtype != kind.numpy or list(array.shape) != expected:
        what = f"input '{port.name}' must be {kind.numpy} {expected}, got {array.dtype} {list(array.shape)}"
        raise InputError(what, where=str(where), hint=advice(array.shape, array.dtype, port))
    _check_values(array, kind, port.name, where)
    return array


def advice(shape: tuple[int, ...], dtype: np.dtype[Any], port: TensorPort) -> str:
    """A Python expression that converts an array of another shape or type to an input; otherwise a sentence of
    advice."""
    kind, expected, steps = port.kind, port.shape, ""
    if sorted(shape) == sorted(expected) and shape != expected:
        axes, left = [], list(enumerate(shape))
        for size in expected:
            axes.append(next(axis for axis in left if axis[1] == size))
            left.remove(axes[-1])
        steps = f".transpose{tuple(axis for axis, _ in axes)}"
    elif shape != expected and math.prod(shape) == math.prod(expected):
        steps = f".reshape{expected}"
    elif shape not in (expected, (*shape[:1], *expected)):
        return f"give arrays of the shape {list(expected)}"
    scale, zero = getattr(port, "scale", None), getattr(port, "zero_point", None)
    if dtype == kind.numpy or not (kind.is_integer and dtype.kind == "f"):
        return f"give array{steps}" + (f".astype('{kind.numpy}')" if dtype != kind.numpy else "")
    if scale is None or zero is None:
        return f"these are real numbers: give the integers of type {kind.text} that stand for them"
    reals = f"(array{steps} / {scale!r}).round() + {zero}"
    return f"quantise the real numbers: ({reals}).clip({kind.low}, {kind.high}).astype('{kind.numpy}')"


def _check_values(array: Array, kind: DType, name: str, path: Path | str) -> None:
    import numpy as np

    if not kind.is_integer:
        if array.dtype.kind == "f" and bool(np.isnan(array).any()):
            what = f"input '{name}' must be numbers, got {int(np.isnan(array).sum())} NaN"
            raise InputError(what, where=str(path), hint="replace the NaN before saving the array")
    elif array.size and not (kind.low <= int(array.min()) and int(array.max()) <= kind.high):
        got = f"{int(array.min())} to {int(array.max())}"
        what = f"input '{name}' must be {kind.text}, {kind.low} to {kind.high}, got {got}"
        hint = f"quantise the array to {kind.text} first, with the input's scale and zero point"
        raise InputError(what, where=str(path), hint=hint)


def _batch(arrays: Mapping[str, Array], path: Path, ports: Sequence[TensorPort]) -> tuple[list[dict[str, Array]], bool]:
    named = [(port.name, arrays[port.name], len(port.shape)) for port in ports]
    counts = {name: array.shape[0] if array.ndim > rank else None for name, array, rank in named}
    if len(set(counts.values())) > 1:
        got = ", ".join(f"'{name}' {'none' if count is None else count}" for name, count in counts.items())
        hint = "give every input the batch axis, of one length, or none of them"
        raise InputError(f"expected the same leading batch axis for every input, got {got}", where=str(path), hint=hint)
    count = next(iter(counts.values()), None)
    if count is None:
        return [dict(arrays)], False
    return [{name: array[index] for name, array in arrays.items()} for index in range(count)], True


def seeded_inputs(ports: Sequence[TensorPort], seed: int = 0) -> dict[str, Array]:
    """Inputs for one inference that use the whole range of their types; the same for a seed."""
    import numpy as np

    generator = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for port in ports:
        kind = port.kind
        if kind.is_integer:
            found[port.name] = generator.integers(kind.low, kind.high + 1, port.shape).astype(kind.numpy)
        else:
            found[port.name] = generator.random(port.shape, dtype=np.float32).astype(kind.numpy)
    return found


def write_outputs(path: Path, outputs: Sequence[Mapping[str, Array]], batched: bool) -> None:
    """Write the outputs by tensor name, with a leading batch axis if `batched`; all or nothing.
    Raises DovetailError where the file cannot be written."""
    import io

    import numpy as np

    arrays = {name: np.stack([one[name] for one in outputs]) if batched else outputs[0][name] for name in outputs[0]}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            # A fixed date: the same outputs give the same file.
            with archive.open(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.ascontiguousarray(array), allow_pickle=False)
    write_file(path, content.getvalue())


def write_file(path: Path, content: bytes) -> None:
    """Write a file through a temporary one beside it, so that it is never half there.
    Raises DovetailError where it cannot be written."""
    try:
        replace_file(path, content)
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)
    except OSError as error:
        raise DovetailError(
            f"cannot be written: {error.strerror}", where=str(path), hint="choose another path"
        ) from None


@contextmanager
def built(compiled: Compiled, target: Target) -> Iterator[ProjectBuild]:
    """A compiled network as a build, alone in a folder that goes when the body ends; raises DovetailError."""
    from dovetail.codegen.emit.project import write_project
    from dovetail.run import open_build

    with TemporaryFolder() as folder:
        write_project(compiled.project, Path(folder) / "build", replace=False)
        yield open_build(Path(folder) / "build", target)


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) if names else "none"
