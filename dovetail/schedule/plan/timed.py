"""The clock's figures of a planned network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.ir.types import Shape
from dovetail.program.ir import Call, LaunchStatement, Program
from dovetail.records import replace
from dovetail.schedule.region import AssignedRegion, Region
from dovetail.target.description import Target
from dovetail.target.engine import Launched
from dovetail.target.offload import Offload
from dovetail.timing.kernels import core_cycles
from dovetail.timing.program import replay
from dovetail.user_file import asking


def timed(program: Program, regions: Sequence[AssignedRegion], target: Target) -> tuple[int, list[int]]:
    """Cycles of an inference by the clock, and of each layer as `timing.program.replay` has them."""

    def launches(together: Sequence[LaunchStatement]) -> tuple[int, int]:
        return launch_cycles(together, program, regions, target)

    def call(one: Call) -> float:
        return core_cycles(one.graph, target, regions[one.layer].choice) / target.cores[one.core].speed

    return replay(program, target, launches, call)


def launch_cycles(
    together: Sequence[LaunchStatement], program: Program, regions: Sequence[Region], target: Target
) -> tuple[int, int]:
    """Cycles of launches that begin together, as a rule one: of the engine, and of the core that goes along with it."""

    def offload(launch: LaunchStatement) -> Offload:
        return next(one.offload for one in regions[launch.layer].shares if one.engine.name == launch.engine)

    joint = target.engine(together[0].engine).joint
    if len(together) > 1 and joint is not None:
        cycles = joint.cycles([Launched(offload(one).name, one.match) for one in together])
        return cycles or 0, 0
    (launch,) = together
    asked, within = offload(launch), _within(launch, program)
    loaded = frozenset(name for name, one in launch.buffered.items() if one.is_loaded)
    match = replace(launch.match, within=within, loaded=loaded) if within or loaded else launch.match

    def answer() -> tuple[Offload, int, int]:
        with asking(f"the cycles of {asked.name} for {regions[launch.layer].name}"):
            return asked, asked.cycles(match), asked.starting(match)

    settings = tuple(sorted(match.choice.items()))
    question = "launch cycles", id(asked), tuple(within.items()), loaded, settings  # the answer keeps the offload
    _, own, started = launch.graph.once(question, answer)
    return own, started


def _within(launch: LaunchStatement, program: Program) -> Mapping[str, Shape]:
    """Values that the engine reaches where they lie, of which the launch takes a part, with their shapes."""
    views = {**launch.operands, launch.match.graph.outputs[0]: launch.result}
    whole = {name: program.values[name] for name in views if name in program.values}
    return {
        name: whole[name].type.shape
        for name, view in views.items()
        if name in whole and whole[name].buffer == view.buffer and whole[name].type.shape != view.type.shape
    }
