"""A mapped network on a rack, here or somewhere else: `dovetail run` of a folder that `dovetail mesh` wrote.

Programs, data and routes go up, inputs up, outputs and clocks down. Whatever goes away meanwhile, each input gives one
result: the line may be cut, and a rack that begins anew is loaded anew and given the inputs again whose results did not
come.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np

from dovetail.arrays import inputs_of, write_outputs
from dovetail.cli.console import beside_json, note_seeded, progress, say
from dovetail.cli.options import BoardOptions, changed_options
from dovetail.cli.run import RunOptions
from dovetail.errors import BuildError, DovetailError
from dovetail.files import TemporaryFolder
from dovetail.guests.mesh.building import build_programs
from dovetail.guests.mesh.compiled import with_compiler
from dovetail.guests.mesh.layers import Ints, Show, unseen
from dovetail.guests.mesh.manifest import GRAPH, Images, MeshRecord, outputs_of, rack_images, read_mesh
from dovetail.guests.mesh.rack import EmulatedElements
from dovetail.guests.mesh.reporting import require_equal
from dovetail.ir.onnx_file import load_graph
from dovetail.ir.types import Array
from dovetail.operators import combined, known_operators
from dovetail.options import Options
from dovetail.records import Record
from dovetail.sim.board import opener
from dovetail.sim.frames import (
    BoardRestart,
    FrameConversation,
    FrameKind,
    open_first,
    read_all,
    read_cycles,
    write_all,
)
from dovetail.sim.line import Link
from dovetail.sim.rack import LoadKind, Rack, rack_link
from dovetail.target.description import Target
from dovetail.target.registry import load_target

_UNSUITED = ("sim", "core", "waves", "io", "load", "check_layers")
"""Options of `dovetail run` that a rack does not have."""
_MOST_RESTARTS = 20
"""How often a rack may begin anew before one more result has come."""
_LEAST_PAYLOAD = 32
_FOLDERS = ("programs", "runtime", "driver", "link.ld", "chips")
"""Files of a folder that its programs are built from, and images of its chips."""
_HINT = "see that a rack of the mesh's target is there: dovetail agent, or mesh_manager.c"


class MeshRun(Record):
    """Outputs and cycles of a stream of inputs, and how the line was."""

    outputs: tuple[Mapping[str, Array], ...]
    """Per input, by the network's output names."""
    clocks: Ints
    """[inputs, pieces, 4] when each piece began an input, gave its slots back, sent, and when its element was free,
    from the beginning of the stream the input was sent in, or of the piece's section where there are several; pieces by
    the words of their elements."""
    asked: int
    """Requests sent."""
    repeated: int
    """Requests sent again."""
    restarts: int
    """Times the rack had begun anew."""


def mesh_images(path: Path, build: MeshRecord, target: Target, show: Show = unseen) -> Images:
    """Build the programs of a network's folder; returns everything a rack is loaded with. `show` is told how far it is.

    Raises:
        DovetailError: the folder is damaged, or the compiler refuses a program.
    """
    paths = {one.relative_to(path).as_posix(): one for one in sorted(path.rglob("*"))}
    files = {n: p.read_bytes() for n, p in paths.items() if n.split("/")[0] in _FOLDERS and p.is_file()}
    for program in build.programs:
        if not any(name.startswith(f"programs/{program}/") for name in files):
            raise BuildError(f"there is no program {program}", where=str(path), hint="run dovetail mesh again")
    with TemporaryFolder() as folder:
        return rack_images(build, build_programs(files, target, Path(folder), 1, show), files)


class RackSession(AbstractContextManager["RackSession"]):
    """A conversation with a rack that has a build, or is given it."""

    def __init__(
        self, build: MeshRecord, images: Images, open_line: Callable[[], Link], timeout: float, report: Show
    ) -> None:
        """`open_line` opens its line, again where it was cut; `report` is called with news in words."""
        self._build, self._images, self._report = build, images, report
        self.talk = FrameConversation(open_first(open_line), timeout, open_line, _HINT)
        self.restarts = 0
        self._runs, self._room, self._most = 0, 0, 0

    def run(self, inputs: Sequence[Mapping[str, Array]]) -> MeshRun:
        """Compute inputs in streams of as many as the rack takes.

        Raises:
            BoardError: it does not do its part, or begins anew again and again.
        """
        outputs: list[dict[str, Array]] = []
        clocks: list[Ints] = []
        failed = 0
        while len(outputs) < len(inputs):
            try:
                if not self._room:
                    self._begin()
                some = inputs[len(outputs) : len(outputs) + self._room]
                results, marks = self._stream(some)
            except BoardRestart as error:
                failed += 1
                if failed > _MOST_RESTARTS:
                    raise
                self._report(f"{error.what}: loading it again")
                self.restarts += 1
                self._room = 0
                continue
            failed = 0
            outputs += results
            clocks.append(marks)
            self._report(f"{len(outputs)} of {len(inputs)} inputs")
        every = np.concatenate(clocks) if clocks else np.zeros((0, self._build.pieces, 4), np.int64)
        return MeshRun(tuple(outputs), every, self.talk.asked, self.talk.repeated, self.restarts)

    def __exit__(self, *error: object) -> None:
        self.talk.link.close()

    def _ask(self, kind: FrameKind, payload: bytes, nbytes: int) -> bytes:
        """The answer to a request, which has so many bytes."""
        return self.talk.sized(self.talk.ask(kind, payload, nbytes), nbytes)

    def _begin(self) -> None:
        """Begin a session, and load what is not there."""
        greeting = self.talk.hello()
        if greeting.payload < _LEAST_PAYLOAD:
            raise self.talk.wrong(f"it takes {greeting.payload} bytes in a frame")
        self._most = greeting.payload
        if greeting.digest != self._build.digest:
            self._load()
        self._room = int.from_bytes(self._ask(FrameKind.START, bytes.fromhex(self._build.digest), 4), "little")
        if not 0 < self._room <= 1 << 16:
            raise self.talk.wrong(f"it takes {self._room} inputs at once")

    def _load(self) -> None:
        total, done = sum(len(content) for _, _, content in self._images), 0
        self._ask(FrameKind.LOAD, struct.pack("<III", LoadKind.NOTHING, 0, 0), 0)
        step = self._most - 12
        for what, number, content in self._images:
            for offset in range(0, len(content), step):
                part = content[offset : offset + step]
                self._ask(FrameKind.LOAD, struct.pack("<III", what, number, offset) + part, 0)
            done += len(content)
            self._report(f"loading: {done} of {total} bytes")

    def _stream(self, inputs: Sequence[Mapping[str, Array]]) -> tuple[list[dict[str, Array]], Ints]:
        """Some inputs at once."""
        tensors = list(enumerate(self._build.tensors))
        for number, name in ((number, tensor.input) for number, tensor in tensors if tensor.input):
            content = b"".join(np.ascontiguousarray(one[name]).tobytes() for one in inputs)
            write_all(self.talk, number, content, self._most)
        self._runs += 1
        self._ask(FrameKind.RUN, struct.pack("<II", self._runs, len(inputs)), 8)
        wanted = ((number, tensor.bytes * len(inputs)) for number, tensor in tensors if tensor.outputs)
        stored = {number: read_all(self.talk, number, nbytes, self._most) for number, nbytes in wanted}
        marks = read_cycles(self.talk, 4 * self._build.pieces * len(inputs), self._most)
        clocks = np.array(marks, np.int64).reshape(len(inputs), self._build.pieces, 4)
        return outputs_of(self._build, stored, len(inputs)), clocks


def run_mesh(folder: Path, options: RunOptions, on: BoardOptions, own: Options) -> None:
    """Run a mapped network on a rack, or without one on emulated elements of this computer: the entry point `mesh.json`
    of `dovetail.builds`.

    Raises:
        DovetailError: an option is not for racks, the rack does not do its part, or an output differs.
    """
    unsuited = [*changed_options(options, _UNSUITED), *changed_options(on, _UNSUITED)]
    if unsuited:
        what = "a mapped network runs on a rack, and its programs are made by dovetail itself"
        raise DovetailError(what, where=", ".join(unsuited), hint="leave it out; name a rack with --on")
    board = on.board()
    if board is not None:
        board.check()
    with progress("reading the mapped network") as show:
        build = read_mesh(folder)
        element = with_compiler(load_target(options.target or build.target))
        inputs, batched = inputs_of(options.input_file, build.inputs)
        show("compiling the elements' programs")
        images = mesh_images(folder, build, element, show)
        here = partial(rack_link, Rack(EmulatedElements(element)), "this process")
        open_line, timeout = (opener(board), board.timeout) if board else (here, 600.0)
        with RackSession(build, images, open_line, timeout, show) as session:
            run = session.run(inputs)
    note_seeded(options.input_file)
    if options.output_file is not None:
        write_outputs(options.output_file, run.outputs, batched)
    with beside_json(options.json_file, _as_json(folder, build, run)):
        _print_run(build, run)
    if options.check:
        graph = load_graph(folder / GRAPH, known_operators(combined(element.operators, own.operators)))
        require_equal(graph, inputs, run.outputs, "the elements give", "look at the rack, or report this")
        say("every output equals the integer graph's")


def _print_run(build: MeshRecord, run: MeshRun) -> None:
    taken = run.clocks[:, :, 3] - run.clocks[:, :, 0]
    names = [one.program for one in build.elements for _ in one.places]
    slowest = int(taken.max(axis=0).argmax())
    say(
        f"{len(build.elements)} elements, {len(run.outputs)} inputs; the slowest piece, of {names[slowest]}, "
        f"took {int(taken[:, slowest].max())} cycles; {run.asked} requests, {run.repeated} sent again, "
        f"the rack loaded anew {run.restarts} times"
    )


def _as_json(folder: Path, build: MeshRecord, run: MeshRun) -> dict[str, object]:
    """The run with the clocks of every piece: began, gave its slots back, sent, was free."""
    return {
        "schema": 1,
        "network": str(folder),
        "elements": [[*one.on, one.program] for one in build.elements],
        "clocks": run.clocks.tolist(),
        "requests": run.asked,
        "sent_again": run.repeated,
        "loaded_anew": run.restarts,
    }
