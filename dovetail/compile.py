"""All stages of a compilation, top to bottom: a model file in, a verified C project out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import to_builtins

from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.build.toolchain import find_compiler
from dovetail.codegen.emit import Project, Unit, emit_project, make_unit
from dovetail.codegen.emit.firmware import STACK_ALIGNMENT
from dovetail.codegen.emit.manifest import manifest
from dovetail.codegen.emit.measured import larger, stack_need
from dovetail.codegen.emit.plan_file import model_work, plan_text
from dovetail.codegen.emit.prefill import check_prefill, joined_units
from dovetail.codegen.emit.project import joined, with_need, with_said
from dovetail.codegen.emit.unit import CODE_RESERVE, StackNeed, state_bytes
from dovetail.codegen.emit.weights import Weights
from dovetail.codegen.manifest import OperatorWork
from dovetail.codegen.plan_file import PLAN
from dovetail.documented import document
from dovetail.errors import BuildError, MissingExtraError, ModelError, PlanError, TargetError, TileError
from dovetail.fields import changed, settings_of
from dovetail.ir.boundary import Steps, boundary
from dovetail.ir.crop import total_macs, trim
from dovetail.ir.dead import without_dead
from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.prefill import check_steps, place_of, prefilled
from dovetail.ir.redundant import DeduplicatedGraph, without_redundant
from dovetail.ir.rewrite import simplify
from dovetail.ir.rows import rows_as_matrix
from dovetail.kernels import Optimize
from dovetail.kernels.c import is_identifier
from dovetail.notes import Kind, Note, check_strict
from dovetail.operators import combined
from dovetail.options import Options as Options
from dovetail.program.interpret import check_program
from dovetail.program.interpret import sample_inputs as sample_inputs
from dovetail.program.loops import rolled
from dovetail.program.stages import Stages
from dovetail.program.verify import verify
from dovetail.quantize import quantize
from dovetail.quantize.ends import integer_inputs, integer_outputs
from dovetail.read import load_model, own_rounding
from dovetail.records import Record, field
from dovetail.schedule.assign import Assignment, Refused, assign, one_by_one
from dovetail.schedule.assign.pins import read_pins
from dovetail.schedule.joint import side_by_side
from dovetail.schedule.knobs import alike, choose, region_space
from dovetail.schedule.layout import LayoutPlan, choose_layouts
from dovetail.schedule.partition import initial_partition
from dovetail.schedule.pipeline import Pipeline, check_pipeline, pipelined
from dovetail.schedule.plan import Plan, check_reserved, plan
from dovetail.schedule.policies import PolicyRivals
from dovetail.schedule.region import CoreGroup, LaidRegion, Region
from dovetail.schedule.stripe import StripedNetwork, StripeLimit, Striping, within
from dovetail.schedule.tiles.tiling import Progress as Progress
from dovetail.schedule.tuning import choices_for, identity
from dovetail.schedule.weights import with_narrow_weights
from dovetail.target.adapt import adapt
from dovetail.target.calibration import calibrated
from dovetail.target.description import Policy, Target, check_cores, with_cores
from dovetail.target.pattern import Choice


class Compiled(Record):
    """A compiled network, and all that was decided on the way."""

    graph: Graph
    """The integer graph as the target computes it, relayouts included."""
    regions: tuple[LaidRegion, ...]
    """Regions of the graph, with the layouts of their values."""
    plan: Plan
    """Program with addresses."""
    unit: Unit
    """Parts of the C source."""
    project: Project
    """Files of the C project."""
    striped: StripedNetwork | None = None
    """The segments computed in stripes to fit the memory budget; None where none was needed."""
    pipeline: Pipeline | None = None
    """The stages, of which `graph` is one step; None without."""
    assignment: Assignment = field(default_factory=lambda: Assignment(()))
    """The engine or core that computes each layer, and a bound on the cycles."""
    notes: tuple[Note, ...] = ()
    """Told to the user, in order."""
    prefill: Compiled | None = None
    """Several steps in one call, with the states and constants of this network; None without."""


def machine(target: Target, options: Options) -> tuple[Target, Options]:
    """The target with the cores and numbers of the options, and the options with these numbers and all pins.

    Raises:
        DovetailError: the target has no such number, or cannot have it; a file of pins is not one.
    """
    target = calibrated(target, options.calibration) if options.calibration else target
    target = with_cores(target, options.cores)
    settings = settings_of(target, [f"{name}={value}" for name, value in options.settings.items()])
    pins = {**(read_pins(options.pins_file) if options.pins_file else {}), **options.pins}
    target = changed(target, settings) if settings else target
    return target, replace(options, settings=settings, pins=pins, pins_file=None, calibration=None)


def rounding_of(model: Path | None, target: Target, options: Options) -> Rounding:
    """The rounding of a model's own requantisations; raises TargetError if the target does not have the policy."""
    of_format = own_rounding(model) if model else Rounding.DOUBLE
    return Rounding(options.rounding or policy_of(target, options).rounding or of_format)


def prepare(model: Path, target: Target, options: Options, progress: Progress = lambda text: None) -> Graph:
    """Read a model file and make it the integer graph that the target computes."""
    return _prepared(model, target, options, progress).graph


def operator_work(model: Path, target: Target, options: Options) -> tuple[OperatorWork, ...]:
    """The work of a model file's operators, as `model_work` has it, dead parts left out."""
    return _prepared(model, target, options, lambda text: None).work


class _IntegerModel(Record):
    """The integer graph of a model file."""

    graph: Graph
    steps: Mapping[str, Steps]
    """Scale and zero point of the integers of inputs and outputs."""
    work: tuple[OperatorWork, ...]
    """As `model_work` has it, dead parts left out in any case."""
    integers: Graph
    """The graph before it was adapted to the target."""


def _prepared(model: Path, target: Target, options: Options, progress: Progress) -> _IntegerModel:
    """The integer graph, and what is known of the model besides."""
    stages = Stages(options.save_stages, options.check)
    progress("reading the model")
    operators = combined(target.operators, options.operators)
    graph = simplify(load_model(model, options.shapes, options.tell, operators, options.states))
    graph, steps = replace(graph, name=options.name or graph.name), boundary(graph)
    stages.add("model", graph, lsb=0)
    progress("making every number an integer" if not options.allow_float else "making integers of what is quantised")
    graph = trim(quantize(graph, rounding_of(model, target, options), options.allow_float, options.tell))
    stages.add("integer", graph, lsb=1)
    graph, scales = integer_inputs(graph) if options.integer_inputs else (graph, {})
    graph, others = integer_outputs(graph) if options.integer_outputs else (graph, {})
    _say_float_ends(graph, options)
    stages.before = None if scales or others else stages.before  # other ends than those of the stage before
    dead, kept = 0, graph
    slimmer = DeduplicatedGraph(graph, 0, 0) if options.keep_dead else without_redundant(graph)
    if not options.keep_dead:
        alive = without_dead(slimmer.graph)
        if alive is not graph:
            stages.add("alive", alive, lsb=0)
        dead, graph = total_macs(graph) - total_macs(alive), alive
    work = model_work(without_dead(without_redundant(kept).graph) if options.keep_dead else graph)
    progress(f"adapting to {target.name}")
    if (matrices := rows_as_matrix(graph)) is not graph:
        stages.add("matrices", graph := matrices, lsb=0)
    integers, last, off, rivals = graph, graph, dict[str, int](), PolicyRivals(graph, target)

    def adapted(name: str, after: Graph, lsb: int) -> None:
        nonlocal last
        off.update({name: lsb} if lsb and after.nodes != last.nodes else {})
        last = after
        rivals.follow(after)
        stages.add(name, after, lsb)

    policy = policy_of(target, options)
    graph = adapt(graph, policy, adapted)
    if options.policy is None and (note := rivals.note(graph)) is not None:
        options.tell(note)
    _say_other_bits(model, target, policy, off, options)
    _say_slimmer(dead, slimmer, options)
    return _IntegerModel(graph, {**steps, **scales, **others}, work, integers)


def _say_other_bits(model: Path, target: Target, policy: Policy, off: Mapping[str, int], options: Options) -> None:
    """Tell where requantised values may be others than the runtime's; `off` has steps by rewrite."""
    exact = [one.name for one in target.policies if not any(rewrite.lsb for rewrite in one.rewrites)]
    if off:
        steps = ", ".join(f"{name} {lsb}" for name, lsb in off.items())
        hint = f"; --requant {exact[0]!r} keeps every bit" if exact else ""
        what = f"values may be some steps off those of the model's runtime, as layers are rewritten ({steps}){hint}"
        options.tell(Note(Kind.APPROXIMATE, f"{target.name}, policy {policy.name!r}: {what}"))
    used, own = rounding_of(model, target, options), own_rounding(model)
    if used is not own and options.rounding is None:
        what = f"requantisations round as {used.value}, those of the model's runtime as {own.value}"
        options.tell(Note(Kind.APPROXIMATE, f"{target.name}, policy {policy.name!r}: {what}"))


def _say_slimmer(dead: int, slimmer: DeduplicatedGraph, options: Options) -> None:
    """Tell what of the model was left out because it changes nothing."""
    if dead:
        what = f"{dead:,} dead MACs of the model left out (--keep-dead computes them)"
        options.tell(Note(Kind.NOT_USED, what))
    if slimmer.twice or slimmer.idle:
        counts = f"{slimmer.twice} computed twice, {slimmer.idle} that change nothing"
        options.tell(Note(Kind.NOT_USED, f"operators left out: {counts} (--keep-dead keeps them)"))


def _say_float_ends(graph: Graph, options: Options) -> None:
    """Tell which ends stay floats that were asked for as integers."""
    ends = ((options.integer_inputs, "inputs", graph.inputs), (options.integer_outputs, "outputs", graph.outputs))
    for wanted, kind, names in ends:
        if floats := [name for name in names if wanted and not graph.types[name].dtype.is_integer]:
            why = "they are not only quantised" if kind == "inputs" else "they do not come from integers"
            options.tell(Note(Kind.LEFT_OUT, f"--{kind} int8: {', '.join(floats)} stay float32: {why}"))


def compile_model(model: Path, target: Target, options: Options, progress: Progress = lambda text: None) -> Compiled:
    """Compile a model file to a C project, which is verified and interpreted on the way.

    Raises:
        DovetailError: the model, the target or the memories do not allow it; says what, where and what to do.
    """
    target, asked = machine(target, options)
    notes = list[Note]()

    def tell(note: Note) -> None:
        notes.append(note)
        if not asked.strict or note.kind.level == "note":  # the error names all others
            asked.tell(note)

    options = replace(asked, tell=tell)
    prepared = _prepared(model, target, options, progress)
    graph = prepared.graph
    if empty := [node for node in graph.nodes if not graph.types[node.output].elements]:
        hint = "take it out of the model, or export it again with sizes of at least 1"
        raise ModelError(f"the value {empty[0].output} has no elements", where=empty[0].origin or model.name, hint=hint)
    choices: Mapping[str, Choice] = {}
    if options.tuning is not None:
        policy = policy_of(target, options).name
        of = identity(graph.name, model.read_bytes(), target.name, policy, rounding_of(model, target, options).value)
        choices = choices_for(options.tuning, of, initial_partition(graph, target), target)
    several = _several(prepared, target, options) if options.prefill else None
    if several is not None:
        choices = {**alike(initial_partition(graph, target), initial_partition(several, target)), **choices}
    least, steps = prepared.work, prepared.steps
    made = compile_graph(graph, target, options, progress, model=model, choices=choices, steps=steps, work=least)
    made = made if several is None else _with_prefill(made, several, prepared, options, progress)
    told = [*_notes_of(made, graph.name), *(_notes_of(made.prefill, made.prefill.graph.name) if made.prefill else ())]
    for place, note in enumerate(told):
        if note not in told[:place]:  # of both networks
            tell(note)
    if options.strict:
        check_strict(notes, model.name)
    progress("looking at the stack it needs")
    return _described(replace(made, notes=tuple(notes)))


def _several(prepared: _IntegerModel, target: Target, options: Options) -> Graph:
    """The graph of several steps as the target computes it; raises ModelError where the model does not allow it."""
    check_prefill(target, bool(options.pipeline or options.memory_budget or options.arena))
    graph = adapt(prefilled(prepared.integers, options.prefill), policy_of(target, options))
    check_steps(prepared.graph, graph, place_of(prepared.integers)[0], sample_inputs(graph))
    return graph


def _with_prefill(
    made: Compiled, graph: Graph, prepared: _IntegerModel, options: Options, progress: Progress
) -> Compiled:
    """The compiled network of a step with that of several; raises DovetailError where the target does not allow it."""
    check_prefill(made.unit.target, made.striped is not None)
    progress(f"making one network of {options.prefill} steps")
    if options.pins or options.tuning:
        options.tell(Note(Kind.NOT_USED, "--pin and --tuning are for the network of one step, not that of several"))
    options.tell(Note(Kind.NOT_USED, "report, explain and --dump show the network of one step, not that of several"))
    own = replace(options, pins={}, tuning=None)
    more = compile_graph(graph, made.unit.target, own, progress, steps=prepared.steps, base=made.unit)
    unit, several = joined_units(made.unit, more.unit)
    project = joined(made.project, more.project, unit, several, place_of(prepared.integers))
    return replace(made, unit=unit, project=project, prefill=replace(more, unit=several))


def _notes_of(made: Compiled, name: str) -> Iterator[Note]:
    """Notes on a program, of the network `name`."""
    if (own := made.unit.model).startswith("m_") and not name.startswith("m_"):
        what = f"C names begin with {own}: '{own[2:]}' is no name of C's, or one that is in use already"
        yield Note(Kind.ASSUMED, what)
    yield from (Note(Kind.SLOWER, what) for what in made.assignment.losses())
    engines = [engine.name for engine in made.unit.target.engines]
    largest = max(made.regions, key=lambda region: region.macs, default=None)
    if engines and largest and largest.macs and not any(region.shares for region in made.regions):
        why = f"the largest, {largest.name}: {largest.reason}"
        yield Note(Kind.SLOWER, f"no layer is computed by {' or '.join(engines)}; {why}")
    if striped := made.striped:
        macs = sum(region.macs for region in made.regions)
        more = 100 * striped.extra_macs / max(macs - striped.extra_macs, 1)
        yield Note(Kind.SLOWER, f"to fit the memory {striped.describe()} ({more:.2f} %)")
    yield from made.unit.notes


def compile_graph(
    graph: Graph,
    target: Target,
    options: Options,
    progress: Progress = lambda text: None,
    *,
    model: Path | None = None,
    choices: Mapping[str, Choice] | None = None,
    near: Collection[str] = (),
    interpret: bool = True,
    steps: Mapping[str, Steps] | None = None,
    work: Sequence[OperatorWork] = (),
    base: Unit | None = None,
) -> Compiled:
    """Compile the integer graph that a target computes to a C project.

    Args:
        graph: what `prepare` gives, or a part of it as a network of its own.
        target: the machine.
        options: its policy and rounding are only noted down; its tuning file is not read.
        progress: told what is being done.
        choices: what is chosen for the knobs of regions, by region name.
        model: the file the graph comes from, for the build's description.
        near: inputs and outputs that shall lie in the engines' memory, as the engines have them.
        interpret: whether it is compared with the graph in numpy; without, only its rules are verified.
        steps: of the integers of inputs and outputs, where known.
        work: the least work, where known.
        base: the network of one step, for that of several.

    Raises:
        DovetailError: as `compile_model`.
    """
    meant = graph
    graph, pipeline = _step(graph, target, options, interpret)
    progress("partitioning")
    regions = pipeline.regions if pipeline else initial_partition(graph, target)
    check_reserved(regions, target, reserved(graph, target))  # before anything that takes time
    request = _CompileRequest(target, options, choices or {}, near, pipeline.cores if pipeline else None, progress)
    made, striped = _within_budget(graph, regions, request)
    laid, planned = made.laid, replace(made.plan, program=rolled(made.plan.program))
    progress("verifying the program")
    verify(planned.program, target)
    if interpret:
        check_program(planned.program, target, graph if striped else laid.graph, sample_inputs(graph))
    progress("writing C")
    aim, delay = Optimize(options.optimize), pipeline.delay if pipeline else 0
    unit = make_unit(planned.program, laid.regions, target, aim, delay, base)
    rounding = rounding_of(model, target, options)
    unit = replace(unit, weights=Weights(options.weights), rounding=rounding, steps=steps or {})
    unit = replace(unit, shared_arena=_shared_arena(unit, options.arena))
    settings = _manifest_options(target, options, rounding, work)
    described = manifest(model, target, settings, made.assignment, laid, planned, options.pins, striped, pipeline)
    clock = described.get("estimated", 0)
    pipeline = replace(pipeline, interval=clock) if pipeline and clock else pipeline
    project = replace(emit_project(unit, described), graph=meant)
    project = project.with_file(PLAN, plan_text(laid.graph, laid.regions, planned, target))
    assignment = replace(made.assignment, clock=clock)
    return Compiled(laid.graph, laid.regions, planned, unit, project, striped, pipeline, assignment)


def _described(compiled: Compiled) -> Compiled:
    """The compiled network with its notes and the stack its program needs, or why that has no bound, in header and
    description, as the compiler of its firmware says; without a stack where the core is this computer.

    Raises:
        BuildError: the emitted C does not compile. PlanError: it needs more stack or memory than there is.
    """
    unit, target, project = compiled.unit, compiled.unit.target, compiled.project
    if instruction_set(target.core.isa).is_host:
        return replace(compiled, project=with_said(project, unit, compiled.notes))
    try:
        find_compiler(target.core.isa)
    except (BuildError, MissingExtraError) as error:
        need = StackNeed(None, why=f"no compiler of the firmware was found, {error.what}")
    else:
        need = stack_need(unit, project, compiled.prefill.unit if compiled.prefill else None)
        if compiled.prefill is not None:
            own = stack_need(compiled.prefill.unit, project, unit)
            several = replace(compiled.prefill.unit, stack=own)
            project = with_need(project, several)
            compiled = replace(compiled, prefill=replace(compiled.prefill, unit=several))
            constants = sum(array.nbytes for _, array in several.constants.values())
            need = replace(larger(need, own), flash=need.flash + constants)
        _check_room(unit, need.flash, compiled.prefill is not None)
    if need.nbytes is not None and need.nbytes > (reserved := target.core.stack):
        what = f"it needs {need.nbytes:,} bytes of stack as {need.compiler} compiles it, {reserved:,} are reserved"
        hint = "--set core.stack={0}, or Core(stack={0}) in the target's file".format(-(-need.nbytes // 64) * 64)
        raise PlanError(what, where=target.name, hint=hint)
    unit = replace(unit, stack=need)
    return replace(compiled, unit=unit, project=with_said(project, unit, compiled.notes))


def _check_room(unit: Unit, flash: int, both: bool) -> None:
    """Raise PlanError where code and constants, perhaps of `both` networks, and values are more than their memory."""
    target = unit.target
    values = unit.arenas().get(target.values, 0) + _stacks(target) if target.code == target.values else 0
    if (short := flash + values - (size := target.memory(target.code).size)) > 0:
        beside = f", and values and stack {values:,}" if values else ""
        taken = f"code and constants{' of both networks' if both else ''} take about {flash:,}{beside}"
        what = f"{target.code} has {size:,} bytes; {taken}: {short:,} bytes short"
        hint = f"--set {target.code}.size=BYTES, --optimize size{', fewer --cores' if target.workers else ''}"
        raise PlanError(what, where=target.name, hint=hint + (", or fewer steps in --prefill, or none" * both))


class _CompileRequest(Record):
    """Arguments of the stages from a partition to a program."""

    target: Target
    options: Options
    choices: Mapping[str, Choice]
    """By region name."""
    near: Collection[str]
    """Inputs and outputs in the engines' memory."""
    cores: Mapping[str, CoreGroup] | None
    """The cores of each region in a pipeline; None without one."""
    progress: Progress


def _within_budget(
    graph: Graph, regions: tuple[Region, ...], request: _CompileRequest
) -> tuple[_ProgramPlan, StripedNetwork | None]:
    """The stages from a partition to a program; in stripes if the activations do not fit memory or budget."""
    target, budget = request.target, request.options.memory_budget
    striping = Striping(graph, target, regions) if budget is not None else None
    limit = None if budget is None else StripeLimit(budget, _stacks(target), f"the memory budget of {budget}")
    try:
        made = _plan_regions(graph, regions, request)
    except PlanError:
        if target.engines or target.dma or request.cores is not None:
            raise
        striping, limit = striping or Striping(graph, target, regions), _tighter(limit, graph, target)
        request = replace(request, target=_roomy(target))
        made = _plan_regions(graph, regions, request)
    if striping is None or limit is None or made.peak <= limit.room:
        return made, None

    def in_stripes(striped: StripedNetwork) -> tuple[_ProgramPlan, int]:
        """A program in stripes, and its activations' bytes."""
        request.progress("partitioning")
        parts = initial_partition(striped.graph, target)
        spaces = {part.name: region_space(part, target) for part in parts if part.name in request.choices}
        kept = {
            name: request.choices[name] for name, one in spaces.items() if one.refusal(request.choices[name]) is None
        }
        made = _plan_regions(striped.graph, parts, replace(request, choices=kept))
        return made, made.peak

    return within(striping, limit, made.peak, in_stripes, request.progress)


def _tighter(limit: StripeLimit | None, graph: Graph, target: Target) -> StripeLimit:
    """The memory of values as a limit, or a budget that is smaller."""
    stacks, size = _stacks(target), target.memory(target.values).size
    others = reserved(graph, target)[target.values] - stacks
    name = f"the {size - others} bytes of {target.values}"
    fits = StripeLimit(size - others, stacks, name, others, target.values)
    return limit if limit is not None and limit.nbytes < fits.nbytes else fits


def _roomy(target: Target) -> Target:
    """The target with a memory of values that holds any plan, to learn how many bytes one takes."""
    memories = (replace(m, size=1 << 40) if m.name == target.values else m for m in target.memories)
    return replace(target, memories=tuple(memories))


def _plan_regions(
    graph: Graph, regions: tuple[Region, ...], request: _CompileRequest, refused: Refused = MappingProxyType({})
) -> _ProgramPlan:
    """The stages after partitioning; `refused` says which engines have no tiles for a layer, and why."""
    chosen = choose(regions, request.choices, request.target)
    chosen = with_narrow_weights(chosen, request.target, reserved(graph, request.target))
    request.progress("placing")
    pins = request.options.pins if request.cores is None else {}  # which the stages keep
    assignment = assign(graph, chosen, request.target, pins, request.choices, refused)
    try:
        try:
            return _plan_layouts(graph, assignment, request)
        except PlanError:
            if all(region.slot is None for region in assignment.regions):
                raise
        return _plan_layouts(graph, one_by_one(assignment), request)
    except TileError as error:
        layer = assignment.layer_of(error.layer)
        known = refused.get(layer, {})
        if error.engine in known or layer in request.choices:
            raise
        return _plan_regions(graph, regions, request, {**refused, layer: {**known, error.engine: error.what}})


def _plan_layouts(graph: Graph, assignment: Assignment, request: _CompileRequest) -> _ProgramPlan:
    """The stages behind engine assignment."""
    target, near, progress = request.target, request.near, request.progress
    progress("choosing layouts")
    laid = choose_layouts(graph, assignment.regions, target, near)
    progress("planning tiles, order and addresses")
    states_lowest = bool(request.options.prefill)
    others = (target, reserved(graph, target), near, request.cores, progress, assignment.tiles, states_lowest)
    joint = side_by_side(laid, target)
    try:
        program = plan(joint, *others)
    except PlanError:
        if not joint.turns:
            raise
        joint, program = laid, plan(laid, *others)
    peak = next(use.peak for use in program.placements if use.memory == target.values)
    return _ProgramPlan(assignment, joint, program, peak)


def _manifest_options(
    target: Target, options: Options, rounding: Rounding, work: Sequence[OperatorWork]
) -> dict[str, Any]:
    """The options that the manifest keeps, and the model's least work."""
    kept: dict[str, Any] = {"policy": target.policy(options.policy).name, "rounding": rounding.value}
    kept["memory_budget"] = options.memory_budget
    settings = {"settings": dict(options.settings)} if options.settings else {}
    return kept | settings | ({"operators": to_builtins(work)} if work else {})


def _shared_arena(unit: Unit, name: str | None) -> str | None:
    """The user's own array for the values, if there is one; raises TargetError where it cannot be."""
    if name is None:
        return None
    if not is_identifier(name):
        raise TargetError(f"'{name}' is no name of C", where="--arena", hint="letters, digits and _, such as arena")
    if unit.is_fixed(unit.target.values):
        what = f"the engines of {unit.target.name} are told addresses within {unit.target.values}"
        raise TargetError(what, where="--arena", hint="leave it out: the values must lie where they are planned")
    return name


class _ProgramPlan(Record):
    """The stages from a partition to a program, done."""

    assignment: Assignment
    laid: LayoutPlan
    plan: Plan
    peak: int
    """Bytes of the memory of values it needs."""


def _step(graph: Graph, target: Target, options: Options, check: bool) -> tuple[Graph, Pipeline | None]:
    """One step of a pipeline and its stages, compared with the network if `check`; otherwise the network."""
    check_cores(target)
    if not options.pipeline:
        return graph, None
    if options.memory_budget is not None:
        hint = "leave one of them out"
        raise TargetError("a pipeline cannot be computed in stripes", where="--memory-budget, --pipeline", hint=hint)
    pipeline = pipelined(graph, target, options.pins)
    if check:
        check_pipeline(graph, pipeline, [sample_inputs(graph, seed) for seed in range(pipeline.delay + 2)])
    return pipeline.graph, pipeline


def policy_of(target: Target, options: Options) -> Policy:
    """The policy that options name, or the target's first; raises TargetError for an unknown name."""
    try:
        return target.policy(options.policy)
    except KeyError:
        known = ", ".join(policy.name for policy in target.policies)
        raise TargetError(
            f"there is no requantisation policy '{options.policy}'", where=target.name, hint=f"use one of {known}"
        ) from None


def reserved(graph: Graph, target: Target) -> dict[str, int]:
    """Bytes that constants, code, stacks, kernels and libraries take in each memory, by its name."""
    states = (one for array in graph.states if (one := state_bytes(array)).size > 1)
    constants = sum(array.nbytes for array in (*graph.constants.values(), *states))
    types = graph.types
    workspaces = (node.operator.workspace([types[name] for name in node.inputs]) for node in graph.nodes)
    nbytes = {target.code: constants + CODE_RESERVE}
    nbytes[target.values] = (
        nbytes.get(target.values, 0) + _stacks(target) + sum(-(-size // 8) * 8 for size in workspaces)
    ) + sum(engine.holds for engine in target.engines)
    return nbytes


def _stacks(target: Target) -> int:
    """Bytes of the memory of values that the stacks of the cores take, as the linker lays them out."""
    of_chip = not instruction_set(target.core.isa).is_host
    return sum(-(-core.stack // STACK_ALIGNMENT) * STACK_ALIGNMENT for core in target.cores) if of_chip else 0


document(__name__)
