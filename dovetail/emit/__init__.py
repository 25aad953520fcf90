"""Emit: the C project of a placed program."""

from dovetail.emit.project import Project, emit_project, write_project
from dovetail.emit.source import Unit, make_unit

__all__ = ["Project", "Unit", "emit_project", "make_unit", "write_project"]
