"""The one family of errors a user of Dovetail can meet.

Each error says what is wrong, where, and what to do about it. Anything else that is raised is a bug of
Dovetail's own and shows its stack.
"""

from __future__ import annotations


def visible(text: str) -> str:
    r"""Text from outside as it may be printed or written: control characters, marks that turn the direction of writing
    and bytes of file names that are no UTF-8 are escaped; ends of lines and tabs stay.

    >>> visible("refused \x1b[31m")
    'refused \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class DovetailError(Exception):
    """A mistake or a limit the user can act on.

    Args:
        what: the fault in one sentence, with the limit and the value where there are any.
        where: file, operator, tensor or line the fault was found at; empty when there is none.
        hint: what to do about it; empty when there is nothing to suggest.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f"\n  what to do: {self.hint}" if self.hint else ""
        return visible(f"{place}{self.what}{advice}")


class ModelError(DovetailError):
    """A model file that is damaged, or says something Dovetail cannot honour."""


class TargetError(DovetailError):
    """A target description that contradicts itself or names something that does not exist."""


class PlanError(DovetailError):
    """A network or region that does not fit the memories of the target."""


class TileError(PlanError):
    """A region whose smallest tile an engine does not compute, or that does not fit its memory."""

    layer = engine = ""
    """Their names."""


class PlaceError(DovetailError):
    """A wish about where a layer is computed that cannot be kept."""


class ProgramError(DovetailError):
    """A program that breaks one of its own rules (found by the verifier or the interpreter)."""


class BuildError(DovetailError):
    """The C project could not be written or compiled."""


class SimulationError(DovetailError):
    """The simulated chip did something it must not: a bad access, an unknown register, a hang."""


class MissingExtraError(DovetailError):
    """A feature was used whose optional dependency, a package that an extra of Dovetail brings, is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        hint = f"pip install 'dovetail[{extra}]'"
        super().__init__(f"{purpose} needs it, and it is not installed", where=f"Python package '{package}'", hint=hint)


class BoardError(DovetailError):
    """A board that cannot be reached, does not answer, or answers what it must not."""
