"""The notes of a compilation beside its result: records with a kind, which says their level.

Every stage that assumes, approximates, widens, leaves out or gives up something tells it here, by the `tell` of its
options. The command line prints notes, the build's description and the report have them, and with `--strict` warnings
are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from dovetail.documented import document
from dovetail.errors import ModelError
from dovetail.records import Record


class Kind(StrEnum):
    """The event that a note is about."""

    ASSUMED = "assumed"
    """The model leaves something open, or the compiler chose something else than asked."""
    APPROXIMATE = "approximate"
    """Results may be others than those of the runtime of the model's format."""
    LEFT_OUT = "left out"
    """The build lacks a part of the model, or a requested feature."""
    WIDENED = "widened"
    """Computed with more bits than the model says."""
    NOT_USED = "not used"
    """Something of the model or the target that changes nothing, or is not needed."""
    SLOWER = "slower"
    """Memory is too small for a faster way."""
    FIGURES = "figures"
    """Figures of a run count something not."""
    HIDING = "hiding"
    """Outputs of a run are such that a wrong layer may not show in them."""

    @property
    def level(self) -> str:
        """Severity: "warning" if results may be wrong, otherwise "note"."""
        return "warning" if self in (Kind.ASSUMED, Kind.APPROXIMATE, Kind.LEFT_OUT) else "note"


class Note(Record):
    """A remark of the compiler for its user."""

    kind: Kind
    """Kind of the remark."""
    text: str
    """A sentence that begins with the place, if the note has a place."""

    def __str__(self) -> str:
        return f"{self.kind.level}, {self.kind}: {self.text}"

    def to_json(self) -> dict[str, str]:
        """The remark as plain values."""
        return {"level": self.kind.level, "kind": self.kind.value, "text": self.text}


Tell = Callable[[Note], None]


def silent(said: object) -> None:
    """Hears of something and keeps it to itself."""


def check_strict(notes: Sequence[Note], where: str) -> None:
    """Raise ModelError with all warnings, if there are any."""
    if warnings := [note for note in notes if note.kind.level == "warning"]:
        said = "; ".join(f"{note.kind}: {note.text}" for note in warnings)
        hint = "correct their causes, or leave --strict out"
        raise ModelError(f"--strict takes no warnings: {said}", where=where, hint=hint)


document(__name__)
