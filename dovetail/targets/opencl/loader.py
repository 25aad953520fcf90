"""Where the OpenCL library is on this computer."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

VARIABLE = "DOVETAIL_OPENCL"
"""Environment variable: the library the emitted program loads."""


def environment() -> dict[str, str]:
    """What a process needs so that the emitted C finds the library of the packages pyopencl and
    pocl-binary-distribution (the extra `opencl`), if they are installed; nothing otherwise, for that of the system.
    What `VARIABLE` says stays.

    Their library looks for devices in the folder PYOPENCL_HOME names, where the system says, and finds PoCL through the
    search path.
    """
    found = importlib.util.find_spec("pyopencl")
    for folder in map(Path, (found.submodule_search_locations or ()) if found else ()):
        for place in (folder / ".libs", folder.parent / "pyopencl.libs"):
            for library in sorted(place.glob("libOpenCL*.so*")):
                paths = [str(place), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
                joined = os.pathsep.join(paths)
                chosen = os.environ.get(VARIABLE) or str(library)
                return {VARIABLE: chosen, "PYOPENCL_HOME": str(folder), "LD_LIBRARY_PATH": joined}
    return {}
