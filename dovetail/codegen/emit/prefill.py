"""A project of two networks: a step, and several steps in one call. They have one arena, one set of states and each
constant once; the second network has sources of its own, and its description lies in a folder of the build.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.emit.unit import Unit
from dovetail.errors import PlanError, TargetError
from dovetail.target.description import Target


def check_prefill(target: Target, is_special: bool) -> None:
    """Raise TargetError where the network of a step cannot share its memory with that of several steps.

    Args:
        target: the machine.
        is_special: whether it is a pipeline, is computed in stripes, or has its values in an array of the user's.
    """
    kinds = "takes lists of commands, has memory of its own or a driver made for one network"
    why = [f"the engine {one.name} {kinds}" for one in target.engines if one.stream or one.mirror or one.made]
    if is_special:
        why.append("it is for networks with an arena of their own, without stripes and pipelines")
    if why:
        what = f"several steps in one call: {'; '.join(why)}"
        raise TargetError(what, where="--prefill", hint="leave out --prefill")


def joined_units(step: Unit, several: Unit) -> tuple[Unit, Unit]:
    """The networks of a step and of several, which know of each other.

    Raises:
        PlanError: their states do not lie at the same places.
    """
    places = [[one.place(kept.view) for kept in one.program.states] for one in (step, several)]
    layouts = [[kept.view.layout for kept in one.program.states] for one in (step, several)]
    if places[0] != places[1] or layouts[0] != layouts[1]:
        what = "the states lie elsewhere when several steps are computed in one call"
        raise PlanError(what, where=step.program.name, hint="report this with model and target; leave out --prefill")
    step = replace(step, room=several.own_extents())
    return step, replace(several, base=step)
