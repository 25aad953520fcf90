"""Entry points: how targets, commands and operators come in, Dovetail's own and those of other packages.

A package declares each in its pyproject.toml, by a name and the place of a Python object:

    [project.entry-points."dovetail.targets"]
    mine = "my_package.target:TARGET"
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import Distribution, EntryPoint, EntryPoints, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any, TypeVar

from dovetail.documented import document
from dovetail.errors import DovetailError

TARGETS = "dovetail.targets"
"""The group of targets: each a `Target`, by its name."""
COMMANDS = "dovetail.commands"
"""The group of commands: each a function with typer's annotations (dovetail/cli/options.py)."""
OPERATORS = "dovetail.operators"
"""The group of operators: each a class of `UserOperator`."""
BUILDS = "dovetail.builds"
"""The group of other folders that `dovetail run` takes, by the file that tells the kind of folder: each a function of
the folder, `dovetail.cli.run.RunOptions`, `dovetail.cli.options.BoardOptions` and `dovetail.options.Options`."""
PAGES = "dovetail.pages"
"""The group of pages: each a function that gives the HTML of a run (`dovetail.run.RunResult`)."""

T = TypeVar("T")
_OWN = "dovetail"
_LONGEST = 200


class PluginError(DovetailError):
    """An entry point of another package that cannot be used."""

    def __init__(self, point: EntryPoint, what: str, *, hint: str) -> None:
        super().__init__(what, where=f"package {_package(point)}, {point.group} '{point.name}'", hint=hint)


def names(group: str) -> tuple[str, ...]:
    """The names of a group, Dovetail's own first."""
    return tuple(_points(group)[0])


@cache
def bundled(group: str) -> Mapping[str, EntryPoint]:
    """Dovetail's own entry points of a group, by name.

    A checkout reads them from its pyproject.toml: the metadata of an editable installation may be older.
    """
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if table.get("name") == _OWN:
            declared = table.get("entry-points", {}).get(group, {})
            return {name: EntryPoint(name, value, group) for name, value in sorted(declared.items())}
    try:
        points: Iterable[EntryPoint] = distribution(_OWN).entry_points.select(group=group)
    except PackageNotFoundError:
        points = EntryPoints()
    return {point.name: point for point in sorted(points, key=lambda point: point.name)}


@cache
def _points(group: str) -> tuple[Mapping[str, EntryPoint], tuple[PluginError, ...]]:
    """The entry points of a group by name, and an error for each whose name another package has first."""
    points, errors = dict(bundled(group)), []
    for point in sorted(entry_points(group=group), key=lambda point: (_package(point), point.name)):
        if _package(point) == _OWN:
            continue
        if point.name in points:
            what = f"the name '{point.name}' is that of the package {_package(points[point.name])} already"
            hint = f"give it another name in {_package(point)}, or uninstall that"
            errors.append(PluginError(point, what, hint=hint))
        else:
            points[point.name] = point
    return points, tuple(errors)


def collisions(group: str) -> tuple[PluginError, ...]:
    """An error for each entry point of a group whose name another package has already."""
    return _points(group)[1]


def load(group: str, name: str, accept: Callable[[object], T]) -> T | None:
    """The object of an entry point; None where no package declares one of this name.

    Args:
        group: one of this module's groups.
        name: of the entry point.
        accept: gives the object back, or raises DovetailError where it cannot be used in this group.

    Raises:
        PluginError: the entry point of another package does not import, or is not accepted.
    """
    point = bundled(group).get(name) or _points(group)[0].get(name)
    if point is None:
        return None
    if _package(point) == _OWN:  # an error is a bug, which shows its stack
        return accept(point.load())
    try:
        return accept(point.load())
    except DovetailError as error:
        what = error.what
    except (Exception, SystemExit) as error:
        text = str(error).strip()[:_LONGEST]
        what = f"does not import: {type(error).__name__}{': ' if text else ''}{text}"
    hint = f"correct {_package(point)}, install another version of it, or uninstall it"
    raise PluginError(point, f"{point.value}: {what}", hint=hint)


def load_all(group: str, accept: Callable[[object], T]) -> tuple[Mapping[str, T], tuple[PluginError, ...]]:
    """The objects of a group by name, and an error for each that cannot be used; arguments as for `load`."""
    points, errors = _points(group)
    values: dict[str, T] = {}
    failures: list[PluginError] = []
    for name in points:
        try:
            value = load(group, name, accept)
        except PluginError as error:
            failures.append(error)
        else:
            assert value is not None, "it was listed"
            values[name] = value
    return values, (*errors, *failures)


def function(value: object) -> Callable[..., Any]:
    """Accept a function; raises DovetailError for anything else."""
    if not callable(value):
        raise DovetailError(f"is {type(value).__name__}, not a function", where="entry point", hint="name a function")
    return value


def _package(point: EntryPoint) -> str:
    return _name(point.dist) if point.dist is not None else _OWN


@cache
def _name(package: Distribution) -> str:
    """A package's name: it is read from a file each time one asks."""
    return package.name


document(__name__)
