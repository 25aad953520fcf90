"""Folders that are written as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import BuildError
from dovetail.files import TemporaryFolder

MANIFEST = "dovetail.json"
"""The file of a build that describes it."""
PREFILL = "prefill"
"""The folder of a build that describes its network of several steps."""
if TYPE_CHECKING:
    from numpy.typing import NDArray

    Contents = bytes | Sequence[bytes | NDArray[Any]]
    """Bytes, or bytes and arrays one after the other."""


def check_replaced(folder: Path, replace: bool) -> None:
    """Raise BuildError where a folder that is to be replaced is no build: it has other files, and no `MANIFEST`."""
    foreign = folder.exists() and not (folder / MANIFEST).is_file()
    if replace and foreign and (not folder.is_dir() or any(folder.iterdir())):
        hint = "choose another folder"
        raise BuildError("this is not a build of Dovetail's and is not replaced", where=str(folder), hint=hint)


def check_free(folder: Path, replace: bool) -> None:
    """Raise BuildError where a folder is a link, or exists and `replace` is not given."""
    if folder.is_symlink():
        hint = "name the folder it leads to, or remove the link"
        raise BuildError(f"this is a link to {os.readlink(folder)}, and is not replaced", where=str(folder), hint=hint)
    if folder.exists() and not replace:
        hint = "choose another folder, or give --force to replace it"
        raise BuildError("the output folder exists", where=str(folder), hint=hint)


def write_files(files: Mapping[str, Contents], folder: Path, replace: bool = False) -> None:
    """Write files, by relative path, bytes or arrays one after the other, into a temporary folder beside `folder`, then
    rename it there: whenever this process ends, the folder is the old one, the new one or not there, and never a part
    of either. Raises BuildError as `check_free`, or where it cannot be written."""
    check_free(folder, replace)
    place = folder.parent
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder(folder.parent) as temporary, TemporaryFolder(folder.parent) as old:
            place, new = folder, Path(temporary, "new")
            new.mkdir(mode=0o755)
            for name, content in files.items():
                path = new / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    parts = [content] if isinstance(content, bytes) else content
                    file.writelines(part if isinstance(part, bytes) else part.data for part in parts)
            new.chmod(0o755)
            if replaced := folder.exists():
                os.rename(folder, Path(old, "old"))
            try:
                os.rename(new, folder)
            except BaseException:
                if replaced:
                    os.rename(Path(old, "old"), folder)
                raise
    except OSError as error:
        hint = "free space and give permission there, or choose another folder: with -o, or TMPDIR for one in that"
        raise BuildError(f"cannot write there: {error.strerror}", where=str(place), hint=hint) from None
