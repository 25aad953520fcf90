"""The trial log, and whether a tuning file may be written to a place.

The log is JSON lines, appended and forced to disk as each trial ends, so that a kill loses no finished trial. Its first
line says what is tuned. Every other line is one trial of a layer (`layer`, `choice`) or of the whole network
(`network`, choices by region), with `cycles` or, if it failed, `error`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from dovetail.documents import parse_document
from dovetail.errors import DovetailError
from dovetail.guests.tune.search import TrialOutcome
from dovetail.schedule.tuning import Cycles, TuningError, read_tuning

LOG_SCHEMA = 1
"""Version of the log. It grows when a line of an older log would be read wrongly."""
NETWORK = ""
"""Key of trials of the whole network."""
_HEADER = "dovetail_tuning_log"
_MOST_BYTES = 256 << 20
_KEPT = "it is left as it is"


class LogError(DovetailError):
    """A trial log that is damaged or belongs to something else."""


class TrialLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the log: a trial of a layer, or of the network with the choices of its layers."""

    layer: str | None = None
    choice: dict[str, Any] | None = None
    network: dict[str, Any] | None = None
    cycles: Cycles | None = None
    error: str = ""

    def __post_init__(self) -> None:
        if (self.cycles is None) != bool(self.error):
            raise ValueError("this is no trial: it has either cycles or an error")
        if (self.network is None) != bool(self.layer) or bool(self.layer) != (self.choice is not None):
            raise ValueError("this is no trial: it has either a layer and its choice, or the network's choices")

    def trial(self) -> tuple[str, str]:
        """Key of the layer, and the choice as JSON."""
        return self.layer or NETWORK, _text(self.choice if self.network is None else self.network)


@dataclass
class TrialLog:
    """An open log: what is in it, and where more goes."""

    path: Path
    finished: dict[tuple[str, str], TrialOutcome]
    """By layer key (`NETWORK` for the whole) and the choice as JSON."""
    _file: IO[bytes]
    old: frozenset[tuple[str, str]]
    """Trials that were in the log when it was opened."""
    used: set[tuple[str, str]] = field(default_factory=set)
    """The old trials that were looked up."""

    def find(self, key: str, choice: Mapping[str, Any]) -> TrialOutcome | None:
        """The outcome of a finished trial; None when it is still to be made."""
        trial = (key, _text(choice))
        if trial in self.old:
            self.used.add(trial)
        return self.finished.get(trial)

    def add(self, key: str, choice: Mapping[str, Any], outcome: TrialOutcome) -> None:
        """Append a trial; when this returns it is on the disk. Raises LogError where it cannot be written."""
        line: dict[str, Any] = {"network": choice} if key == NETWORK else {"layer": key, "choice": choice}
        line.update({"error": outcome.error} if outcome.cycles is None else {"cycles": outcome.cycles})
        _append(self._file, line, self.path)
        self.finished[key, _text(choice)] = outcome


@contextmanager
def open_log(path: Path, header: Mapping[str, Any], note: Callable[[str], None]) -> Iterator[TrialLog]:
    """Open a log to go on with, or begin one.

    Args:
        path: the file.
        header: what is tuned: plain JSON values. An existing log must say the same.
        note: told about a last line that was cut off.

    Raises:
        LogError: the log is of something else, is damaged, is in use, or cannot be opened. It is left as it is.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")  # noqa: SIM115 - closed below
    except OSError as error:
        raise LogError(f"cannot be opened: {error.strerror}", where=str(path), hint="choose another --log") from None
    with file:
        _lock(file, path)
        file.seek(0)
        content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise LogError(f"larger than {_MOST_BYTES:,} bytes", where=str(path), hint="choose another --log")
        whole = content.rfind(b"\n") + 1
        if whole == 0 and not (_text(header) + "\n").encode().startswith(content):
            raise _no_log(path)
        finished = _read(content[:whole].decode(errors="replace").split("\n")[:-1], header, path)
        if whole < len(content):
            file.truncate(whole)
            note(f"{path}: the last line was cut off and is dropped; its trial is made again")
        if whole == 0:
            _append(file, header, path)
        yield TrialLog(path, finished, file, frozenset(finished))


def _append(file: IO[bytes], line: Mapping[str, Any], path: Path) -> None:
    try:
        file.write(_text(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise LogError(
            f"cannot be written: {error.strerror}", where=str(path), hint="the trials in it are kept"
        ) from None


def _text(value: Mapping[str, Any] | None) -> str:
    return json.dumps(value, sort_keys=True)


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        what = "another process is tuning with this log"
        raise LogError(what, where=str(path), hint="choose another --log") from None


def _read(lines: list[str], header: Mapping[str, Any], path: Path) -> dict[tuple[str, str], TrialOutcome]:
    """The trials of a log that has the header."""
    if not lines:
        return {}
    if f'"{_HEADER}"' not in lines[0]:
        raise _no_log(path)
    hint = f"choose another --log, or tune what the log was made for; {_KEPT}"
    first = parse_document(lines[0], str(path), "json", dict[str, Any], hint=hint, first_line=1, error=LogError)
    for name, wanted in header.items():
        if (of := first.value.get(name)) != wanted:
            raise first.wrong(f"this log was made with {name} = {of}, now it is {wanted}")
    finished: dict[tuple[str, str], TrialOutcome] = {}
    hint = f"delete that line to go on with the others, or choose another --log; {_KEPT}"
    for number, text in enumerate(lines[1:], 2):
        line = parse_document(text, str(path), "json", TrialLine, hint=hint, first_line=number, error=LogError).value
        finished.setdefault(line.trial(), TrialOutcome(line.cycles, line.error))
    return finished


def _no_log(path: Path) -> LogError:
    return LogError("this is not a trial log", where=f"{path}:1", hint=f"choose another --log; {_KEPT}")


def may_be_written(path: Path) -> None:
    """Check before hours of work that a tuning file can be written to a place.
    Raises TuningError where something lies there that is not a tuning file."""
    if path.is_dir():
        what = "a folder lies where the tuning file shall be written"
        raise TuningError(what, where=str(path), hint="choose another file with -o")
    if path.exists() and path.stat().st_size:
        try:
            read_tuning(path)
        except TuningError as error:
            what = f"the output exists and is not a tuning file ({error.what})"
            raise TuningError(what, where=str(path), hint="choose another --output") from None
