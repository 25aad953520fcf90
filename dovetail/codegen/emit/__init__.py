"""Emit: the C project of a placed program."""

from dovetail.codegen.emit.project import Project, emit_project, write_project
from dovetail.codegen.emit.unit import Unit, make_unit

__all__ = ["Project", "Unit", "emit_project", "make_unit", "write_project"]
