"""Exact execution: every element's real firmware in its own emulated core, as on a rack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dovetail.errors import MissingExtraError, SimulationError
from dovetail.farm import farm
from dovetail.files import TemporaryFolder
from dovetail.guests.mesh.building import build_programs, used_bytes
from dovetail.guests.mesh.emit import Element, MeshProject
from dovetail.guests.mesh.layers import Ints, Show, unseen
from dovetail.guests.mesh.manifest import Images, mesh_build, outputs_of, rack_images
from dovetail.guests.mesh.mapping import MeshMapping
from dovetail.guests.mesh.rack import LoadedElements
from dovetail.guests.mesh.workers import element_setup
from dovetail.ir.types import Array
from dovetail.sim.rack import LoadKind, RackContents, RefusedError
from dovetail.target.description import Target


@dataclass(frozen=True)
class ExactRun:
    """Outputs of the elements of a network, and what they used."""

    outputs: tuple[Mapping[str, Array], ...]
    """Per input, by the network's output names."""
    instructions: int
    """Sum over all elements and inputs."""
    cycles: tuple[int, ...]
    """Per element, as in `MeshProject.elements`: executing and waiting for the MAC array, all inputs."""
    clocks: Ints
    """[inputs, pieces of all sections, 4] cycles from the beginning of the stream, or of the piece's section where
    there are several, to when a piece began, had given its slots back, had sent its message, and was done."""
    paces: tuple[int, ...]
    """Per element: the cycles of an input, all its pieces, the longest of the inputs."""
    memory: tuple[int, ...]
    """Per element: bytes of its memory that its program, stack, data and buffers take."""
    stack: int
    """Most bytes of stack any of them used."""

    @property
    def turns(self) -> Ints:
        """[inputs, pieces, 3] cycles from when a piece began to the later points of `clocks`."""
        return self.clocks[:, :, 1:] - self.clocks[:, :, :1]


def _loaded(images: Images, elements: Mapping[int, Element]) -> RackContents:
    """The contents of a rack with these images, and the data of elements, by their words, in place of theirs."""
    loaded = RackContents()
    for kind, number, content in images:
        loaded.parts[kind][number] = bytearray(content)
    loaded.parts[LoadKind.DATA].update((word, bytearray(one.data)) for word, one in elements.items())
    return loaded


def run_exact(
    mapped: MeshMapping,
    project: MeshProject,
    target: Target,
    inputs: Sequence[Mapping[str, Array]],
    jobs: int = 2,
    scheduler: str | None = None,
    show: Show = unseen,
) -> ExactRun:
    """Run every element of a network over some inputs.

    Args:
        mapped: the network.
        project: programs and data.
        target: the element.
        inputs: arrays by input name, for each inference.
        jobs: processes.
        scheduler: address of a Dask scheduler whose workers are used instead; the results are the same.
        show: told how far it is.

    Raises:
        SimulationError: an element does something it must not, or ends the process it runs in.
        PlanError: a program does not fit its element.
        DovetailError: `jobs` is below 1, or the scheduler does not answer.
        MissingExtraError: Unicorn or Dask is not installed.
    """
    if find_spec("unicorn") is None:
        raise MissingExtraError("unicorn", "iss", "simulating firmware")
    build = mesh_build(mapped, project, target)
    words = {one.record.word: one for one in project.elements}
    given = [(number, one.input) for number, one in enumerate(build.tensors) if one.input]
    tensors = [{n: np.ascontiguousarray(arrays[name]).tobytes() for n, name in given} for arrays in inputs]
    with farm(jobs, scheduler) as spread, TemporaryFolder() as folder:
        firmware = build_programs(project.files, target, Path(folder), jobs, show)
        hint = "cut the layer into more pieces in the mapping file, give fewer slots, or use more chips"
        used = used_bytes(firmware, target, mapped.parts.mesh.usable, hint)
        loaded = _loaded(rack_images(build, firmware, project.files), words)
        try:
            elements = LoadedElements(loaded, mapped.topology)
            run, of_elements = elements.run(spread, element_setup(target), tensors, show)
        except RefusedError as error:
            hint = "report this: the tables of sender and receiver disagree"
            raise SimulationError(str(error), where="mesh", hint=hint) from None
    outputs = outputs_of(build, run.results, len(inputs))
    order = [piece for one in project.elements for piece in one.pieces]
    clocks = np.array(run.clocks).reshape(len(inputs), build.pieces, 4)[:, np.argsort(order)]
    taken, runs = clocks[:, :, 3] - clocks[:, :, 0], [of_elements[word] for word in words]
    return ExactRun(
        tuple(outputs),
        sum(run.instructions for run in runs),
        tuple(run.cycles for run in runs),
        clocks,
        tuple(int(taken[:, one.pieces].sum(axis=1).max()) for one in project.elements),
        tuple(used[one.record.program] for one in project.elements),
        max(run.stack for run in runs),
    )
