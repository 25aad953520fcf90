"""The trial log and the tuning file as they are written.

The log is JSON lines, appended and forced to disk as each trial ends, so that a kill loses no finished trial. Its first
line says what is tuned. Every other line is one trial of a layer (`layer`, `choice`) or of the whole network
(`network`, choices by region), with `cycles` or, if it failed, `error`. The tuning file says in TOML, which people
read, commit and may edit, what was chosen for each layer; `dovetail.schedule.knobs` reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from dovetail.errors import DovetailError
from dovetail.guests.tune.search import TrialOutcome
from dovetail.schedule.knobs import SCHEMA, Identity, Tuning, TuningEntry, TuningError, read_tuning
from dovetail.schedule.partition import Region
from dovetail.target.pattern import Choice, Value

LOG_SCHEMA = 1
"""Version of the log. It grows when a line of an older log would be read wrongly."""
NETWORK = ""
"""Key of trials of the whole network."""


class LogError(DovetailError):
    """A trial log that is damaged or belongs to something else."""


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
    """Those of them that were asked for."""

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
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole == 0 and not (_text(header) + "\n").encode().startswith(content):
            raise _no_log(path)
        finished = _read(content[:whole], header, path)
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
        raise LogError(f"cannot be written: {error.strerror}", where=str(path), hint="what is in it is kept") from None


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise LogError(
            "another process is tuning with this log", where=str(path), hint="choose another --log"
        ) from None


def _read(content: bytes, header: Mapping[str, Any], path: Path) -> dict[tuple[str, str], TrialOutcome]:
    lines = content.split(b"\n")[:-1]
    found = _line(lines[0], 1, path) if lines else header
    if "dovetail_tuning_log" not in found:
        raise _no_log(path)
    for name, wanted in header.items():
        if found.get(name) != wanted:
            what = f"this log was made with {name} = {found.get(name)}, now it is {wanted}"
            hint = "choose another --log, or tune what the log was made for; it is left as it is"
            raise LogError(what, where=f"{path}, line 1", hint=hint)
    finished: dict[tuple[str, str], TrialOutcome] = {}
    for number, text in enumerate(lines[1:], 2):
        key, choice, outcome = _trial(_line(text, number, path), number, path)
        finished.setdefault((key, _text(choice)), outcome)
    return finished


def _no_log(path: Path) -> LogError:
    return LogError(
        "this is not a trial log", where=f"{path}, line 1", hint="choose another --log; it is left as it is"
    )


def _line(text: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise _damaged(number, path) from None
    if not isinstance(value, dict):
        raise _damaged(number, path)
    return value


def _trial(line: Mapping[str, Any], number: int, path: Path) -> tuple[str, Choice, TrialOutcome]:
    whole = "network" in line
    key, choice = (NETWORK, line["network"]) if whole else (line.get("layer"), line.get("choice"))
    cycles, error = line.get("cycles"), line.get("error", "")
    good = (type(cycles) is int and cycles >= 0 and not error) or (cycles is None and isinstance(error, str) and error)
    if not isinstance(key, str) or not isinstance(choice, dict) or not good or bool(key) == whole:
        raise _damaged(number, path)
    return key, choice, TrialOutcome(cycles, error)


def _damaged(number: int, path: Path) -> LogError:
    hint = "delete that line to go on with the others, or choose another --log; it is left as it is"
    return LogError("the line is not a trial: the log is damaged", where=f"{path}, line {number}", hint=hint)


def to_toml(tuning: Tuning) -> str:
    """The file's text; the same for the same content."""
    lines = ["# Written by dovetail tune, used by dovetail compile --tuning. Cycles are of one inference."]
    lines.append(f"schema = {SCHEMA}")
    lines += [f"{field.name} = {_toml(getattr(tuning.identity, field.name))}" for field in fields(Identity)]
    lines.append(f"measure = {_toml(tuning.measure)}")
    lines += [f"default_cycles = {tuning.default_cycles}", f"tuned_cycles = {tuning.tuned_cycles}"]
    for entry in tuning.layers:
        settings = ", ".join(f"{name} = {_toml(value)}" for name, value in entry.choice.items())
        lines += ["", "[[layer]]", f"name = {_toml(entry.name)}", f"signature = {_toml(entry.signature)}"]
        lines += [f"default_cycles = {entry.default_cycles}", f"tuned_cycles = {entry.tuned_cycles}"]
        lines.append(f"choice = {{ {settings} }}")
    return "\n".join(lines) + "\n"


def _toml(value: Value) -> str:
    """A TOML integer or basic string; JSON's escapes are TOML's, but for DEL."""
    return str(value) if isinstance(value, int) else json.dumps(value).replace("\x7f", "\\u007f")


def may_be_written(path: Path) -> None:
    """Check before hours of work that the output can be written there.
    Raises TuningError where something lies there that is not a tuning file."""
    if path.is_dir():
        raise TuningError(
            "a folder lies where the tuning file shall be written", where=str(path), hint="choose another file with -o"
        )
    if path.exists() and path.stat().st_size:
        try:
            read_tuning(path)
        except TuningError as error:
            what = f"the output exists and is not a tuning file ({error.what})"
            raise TuningError(what, where=str(path), hint="choose another --output") from None


def entries_in_order(entries: Mapping[str, TuningEntry], regions: Sequence[Region]) -> tuple[TuningEntry, ...]:
    """Entries by region name in the network's order."""
    return tuple(entries[region.name] for region in regions if region.name in entries)
