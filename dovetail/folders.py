"""Folders that are written as a whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import BuildError

MANIFEST = "dovetail.json"
"""The file of a build that describes it."""
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


def write_files(files: Mapping[str, Contents], folder: Path, replace: bool = False) -> None:
    """Write files, by relative path, bytes or arrays one after the other, into a temporary folder beside `folder`, then
    rename it there: whenever this process ends, the folder is the old one, the new one or not there, and never a part
    of either. A link in its place is replaced, not followed. Raises BuildError where the folder exists and `replace` is
    not given, or it cannot be written."""
    if folder.exists() and not replace:
        hint = "choose another folder, or give --force to replace it"
        raise BuildError("the output folder exists", where=str(folder), hint=hint)
    place, temporary, old = folder.parent, None, None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        place = folder
        for name, content in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                parts = [content] if isinstance(content, bytes) else content
                file.writelines(part if isinstance(part, bytes) else part.data for part in parts)
        temporary.chmod(0o755)
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            os.rename(folder, old)  # onto an empty folder
        try:
            os.rename(temporary, folder)
        except BaseException:
            if old is not None:
                os.rename(old, folder)
            raise
    except OSError as error:
        hint = "choose another folder with -o, or free space and give permission"
        raise BuildError(f"cannot write there: {error.strerror}", where=str(place), hint=hint) from None
    finally:
        for rest in (temporary, old):
            if rest is not None:  # the first is gone where all went well
                shutil.rmtree(rest, ignore_errors=True)
