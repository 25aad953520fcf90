"""Writes a folder of files: all or nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dovetail.errors import BuildError


def write_files(files: Mapping[str, bytes], folder: Path, replace: bool = False) -> None:
    """Write every file into a temporary folder beside `folder`, then rename it there.

    Args:
        files: contents by relative path.
        folder: where to.
        replace: whether a folder that is there gives way.

    Raises:
        BuildError: the folder exists and `replace` is not given, or it cannot be written.
    """
    if folder.exists() and not replace:
        raise BuildError("the output folder exists", where=str(folder),
                         hint="choose another folder, or give --force to replace it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise BuildError(f"cannot write there: {error.strerror}", where=str(folder.parent),
                         hint="choose another folder with -o, or free space and give permission") from None
    try:
        for name, content in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise BuildError(f"cannot write there: {error.strerror}", where=str(folder),
                         hint="choose another folder with -o, or free space and give permission") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
