"""Reads inputs from and writes outputs to `.npz` files. Files are untrusted: sizes are bounded, nothing is executed."""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import DovetailError
from dovetail.npy import InputError, check_archive, read_npy

if TYPE_CHECKING:
    import numpy as np

    from dovetail.graph.types import Array, DType

def read_inputs(path: Path, ports: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Array]], bool]:
    """The inferences a file asks for.

    Args:
        path: an `.npz` keyed by input tensor names; for a model with one input, any single array.
        ports: the model's inputs as a build describes them: name, shape, dtype.

    Returns:
        Arrays by input name for each inference, and whether the file has a batch axis.

    Raises:
        InputError: damaged, too large, or other names, shapes or types than the model's.
    """
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), hint="give an .npz file, or leave out --input")
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = _read_archive(archive, path, ports)
    except zipfile.BadZipFile as error:
        raise InputError(f"not an .npz file: {error}", where=str(path), hint="write it with numpy.savez") from None
    except (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zlib.error) as error:
        raise InputError(f"a damaged .npz file: {error}", where=str(path), hint="write it with numpy.savez") from None
    return _batch(arrays, path, ports)


def _read_archive(archive: zipfile.ZipFile, path: Path, ports: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    entries = check_archive(archive, str(path), "run fewer inferences at once")
    names = [str(port["name"]) for port in ports]
    if len(ports) == 1 and len(entries) == 1:
        entries = {names[0]: next(iter(entries.values()))}
    if set(entries) != set(names):
        raise InputError(
            f"expected arrays {_list(names)}, got {_list(sorted(entries))}",
            where=str(path),
            hint="name each array as the model does",
        )
    return {port["name"]: _read_array(archive, entries[port["name"]], path, port) for port in ports}


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, port: Mapping[str, Any]) -> Array:
    """Read one array after its header was found to be what the model wants."""
    kind, expected = _dtype(port), list(port["shape"])

    def accept(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """The model's own shape and type, or a batch of it."""
        fits = list(shape) == expected or (
            len(shape) == len(expected) + 1 and list(shape[1:]) == expected and shape[0] > 0
        )
        if not fits or dtype != kind.numpy:
            raise InputError(
                f"input '{port['name']}' must be {kind.numpy} {expected} (or [n, {str(expected)[1:]} for a batch), "
                f"got {dtype} {list(shape)}",
                where=str(path),
                hint="reshape and convert the array, such as array.astype(...).reshape(...)",
            )

    array: Array = read_npy(lambda: archive.open(info), info.file_size, str(port["name"]), accept)
    _check_values(array, kind, port["name"], path)
    return array


def _check_values(array: Array, kind: DType, name: str, path: Path) -> None:
    import numpy as np

    if not kind.is_integer:
        if array.dtype.kind == "f" and bool(np.isnan(array).any()):
            raise InputError(f"input '{name}' must be numbers, got {int(np.isnan(array).sum())} NaN", where=str(path),
                             hint="replace the NaN before saving the array")
    elif array.size and not (kind.low <= int(array.min()) and int(array.max()) <= kind.high):
        got = f"{int(array.min())} to {int(array.max())}"
        raise InputError(f"input '{name}' must be {kind.text}, {kind.low} to {kind.high}, got {got}", where=str(path),
                         hint=f"quantise the array to {kind.text} first, with the input's scale and zero point")


def _batch(
    arrays: Mapping[str, Array], path: Path, ports: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Array]], bool]:
    counts = {
        port["name"]: arrays[port["name"]].shape[0] if arrays[port["name"]].ndim > len(port["shape"]) else None
        for port in ports
    }
    if len(set(counts.values())) > 1:
        got = ", ".join(f"'{name}' {'none' if count is None else count}" for name, count in counts.items())
        raise InputError(f"expected the same leading batch axis for every input, got {got}", where=str(path),
                         hint="give every input the batch axis, of one length, or none of them")
    count = next(iter(counts.values()), None)
    if count is None:
        return [dict(arrays)], False
    return [{name: array[index] for name, array in arrays.items()} for index in range(count)], True


def seeded_inputs(ports: Sequence[Mapping[str, Any]], seed: int = 0) -> dict[str, Array]:
    """Inputs for one inference that use the whole range of their types; the same for a seed."""
    import numpy as np

    generator = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for port in ports:
        kind = _dtype(port)
        if kind.is_integer:
            found[port["name"]] = generator.integers(kind.low, kind.high + 1, port["shape"]).astype(kind.numpy)
        else:
            found[port["name"]] = generator.random(port["shape"], dtype=np.float32).astype(kind.numpy)
    return found


def write_outputs(path: Path, outputs: Sequence[Mapping[str, Array]], batched: bool) -> None:
    """Write the outputs by tensor name, with a leading batch axis if `batched`; all or nothing.

    Raises:
        DovetailError: the file cannot be written.
    """
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

    Raises:
        DovetailError: it cannot be written.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise DovetailError(
            f"cannot be written: {error.strerror}", where=str(path), hint="choose another path"
        ) from None


def _dtype(port: Mapping[str, Any]) -> DType:
    from dovetail.graph.types import DType

    return next(kind for kind in DType if kind.text == port["dtype"])


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) if names else "none"
