"""Procedures and their parts as text, by Exo's own printer but without the formatter behind it, which takes minutes.

Exo has no public way to leave the formatter out; this is the one file that uses the functions beneath it.
"""

from __future__ import annotations

from typing import Any

from dovetail.loops.text import Procedure


def procedure_text(procedure: Procedure) -> str:
    """A procedure as `dovetail.loops.procedure` reads it, a name per line that binds one."""
    from exo.core.LoopIR_pprint import PrintEnv, _print_proc

    return "\n".join(_print_proc(procedure.INTERNAL_proc(), PrintEnv(), "")) + "\n"


def statement_text(statement: Any) -> str:
    """The first line of the statement at a cursor."""
    from exo.core.LoopIR_pprint import PrintEnv, _print_stmt

    return str(_print_stmt(statement._impl._node, PrintEnv(), "")[0])


def expression_text(expression: Any) -> str:
    """The expression at a cursor."""
    from exo.core.LoopIR_pprint import PrintEnv, _print_expr

    return str(_print_expr(expression._impl._node, PrintEnv()))
