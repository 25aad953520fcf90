"""Where the OpenCL library is on this computer."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

VARIABLE = "DOVETAIL_OPENCL"
"""Environment variable: the library the emitted program loads."""


def environment() -> dict[str, str]:
    """What a process needs so that the emitted C finds the library: nothing where `VARIABLE` says it or the system has
    one; else that of the packages pyopencl and pocl-binary-distribution (the extra `opencl`), if they are installed.

    Their library looks for devices in the folder PYOPENCL_HOME names and finds PoCL through the search path.
    """
    if os.environ.get(VARIABLE):
        return {}
    found = importlib.util.find_spec("pyopencl")
    for folder in map(Path, (found.submodule_search_locations or ()) if found else ()):
        for place in (folder / ".libs", folder.parent / "pyopencl.libs"):
            for library in sorted(place.glob("libOpenCL*.so*")):
                paths = [str(place), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
                joined = os.pathsep.join(paths)
                return {VARIABLE: str(library), "PYOPENCL_HOME": str(folder), "LD_LIBRARY_PATH": joined}
    return {}
