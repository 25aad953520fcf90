"""Entry points: how targets, commands and operators come in, Dovetail's own and those of other packages.

A package declares each in its pyproject.toml, by a name and the place of a Python object:

    [project.entry-points."dovetail.targets"]
    mine = "my_package.target:TARGET"
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import TypeGuard, TypeVar

from dovetail.errors import DovetailError

TARGETS = "dovetail.targets"
"""The group of targets: each a `Target`, by its name."""
COMMANDS = "dovetail.commands"
"""The group of commands: each a function with typer's annotations (dovetail/cli/options.py)."""
OPERATORS = "dovetail.operators"
"""The group of operators: each a class of `UserOperator`."""
BUILDS = "dovetail.builds"
"""The group of other folders that `dovetail run` takes: a function, by the file that tells the kind of folder."""
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
            return {name: EntryPoint(name, value, group) for name, value in declared.items()}
    try:
        points: Iterable[EntryPoint] = distribution(_OWN).entry_points.select(group=group)
    except PackageNotFoundError:
        points = EntryPoints()
    return {point.name: point for point in points}


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


def load(group: str, name: str, suits: Callable[[object], TypeGuard[T]], kind: str) -> T | None:
    """The object of an entry point; None where no package declares one of this name.

    Args:
        group: one of this module's groups.
        name: of the entry point.
        suits: whether an object is of the kind that the group is for.
        kind: that kind in words, such as "a Target".

    Raises:
        PluginError: the entry point of another package does not import, or is something else.
    """
    point = bundled(group).get(name) or _points(group)[0].get(name)
    if point is None:
        return None
    # an error in one of Dovetail's own is a bug, which shows its stack
    value = point.load() if _package(point) == _OWN else _load_foreign(point)
    if not suits(value):
        what = f"{point.value} is {type(value).__name__}, not {kind}"
        hint = f"correct the entry point of {_package(point)}, or uninstall that package"
        raise PluginError(point, what, hint=hint)
    return value


def load_all(
    group: str, suits: Callable[[object], TypeGuard[T]], kind: str
) -> tuple[Mapping[str, T], tuple[PluginError, ...]]:
    """The objects of a group by name, and an error for each that cannot be used; arguments as for `load`."""
    points, errors = _points(group)
    values: dict[str, T] = {}
    failures: list[PluginError] = []
    for name in points:
        try:
            value = load(group, name, suits, kind)
        except PluginError as error:
            failures.append(error)
        else:
            assert value is not None, "it was listed"
            values[name] = value
    return values, (*errors, *failures)


def _load_foreign(point: EntryPoint) -> object:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        text = str(error).strip()
        what = f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__
        hint = f"install a version of {_package(point)} for this one of dovetail, or uninstall that package"
        raise PluginError(point, f"{point.value} does not import: {what}", hint=hint) from error


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else _OWN
