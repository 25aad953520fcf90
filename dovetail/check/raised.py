"""What a port's own code raised, in one line with the place in the user's file."""

from __future__ import annotations

import traceback
from pathlib import Path

from dovetail.simulate.worker_process import BUG


def raised(error: Exception) -> str:
    """Type, message, file and line of an exception; of one in a simulator's process what that process said."""
    text = str(error)
    if isinstance(error, RuntimeError) and text.startswith(BUG):
        lines = text.strip().splitlines()
        places = [line.strip().split('"') for line in lines if line.strip().startswith('File "')]
        if not places:
            return lines[-1]
        _, file, rest = places[-1][:3]
        return f"{lines[-1]} ({Path(file).name}:{rest.split(',')[1].removeprefix(' line ')})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"
