"""Texts of a language model: tokens chosen step by step from the logits of a graph with states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array, TensorType
from dovetail.records import Record


class Sampling(Record):
    """How a token is chosen."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    seed: int = 0

    def choose(self, logits: Array, step: int) -> int:
        """The token for the logits of a step; the same for the same seed and step."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        wide = logits.astype(np.float64) / self.temperature
        powers = np.exp(wide - wide.max())
        drawn = np.random.default_rng((self.seed, step)).random() * powers.sum()
        return int(min(np.searchsorted(np.cumsum(powers), drawn, side="right"), len(powers) - 1))


class Roles(Record):
    """The inputs of a language model, by their names."""

    token: str
    position: str
    """Empty where it takes none."""
    mask: str
    """1 for places that count; empty where it takes none."""
    newest_last: bool
    """Whether the places that count are the last ones of the mask, and not the first."""

    def inputs(self, types: Mapping[str, TensorType], token: int, step: int) -> dict[str, Array]:
        """The inputs of a step."""
        found: dict[str, Array] = {}
        for name, value in ((self.token, token), (self.position, step)):
            if name:
                found[name] = np.full(types[name].shape, value, types[name].dtype.numpy)
        if self.mask:
            kind = types[self.mask]
            live = np.arange(kind.shape[-1]) <= step
            row = live[::-1] if self.newest_last else live
            found[self.mask] = np.broadcast_to(row, kind.shape).astype(kind.dtype.numpy)
        return found


def together(steps: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The inputs of several steps in one call, from those of each."""
    shape = {name: array.shape[1:] if array.shape[:1] == (1,) else array.shape for name, array in steps[0].items()}
    return {name: np.stack([one[name].reshape(shape[name]) for one in steps]) for name in shape}


def roles_of(graph: Graph) -> Roles:
    """The inputs of a language model, found by names and shapes; raises DovetailError for others than a token, perhaps
    a position and a mask, and for a graph without states."""
    single = [name for name in graph.given if graph.types[name].elements == 1 and graph.types[name].dtype.is_integer]
    positions = [name for name in single if "pos" in name]
    tokens = [name for name in single if name not in positions]
    masks = [name for name in graph.given if graph.types[name].elements > 1 and "mask" in name]
    known = [*tokens, *positions, *masks]
    if not graph.states or len(tokens) != 1 or max(len(positions), len(masks)) > 1 or len(known) < len(graph.given):
        what = f"its inputs are {', '.join(f'{name} {graph.types[name]}' for name in graph.given)}"
        what += "" if graph.states else ", and it keeps no states"
        hint = "generate takes a model of one token a step with states, perhaps with a position and a mask"
        raise DovetailError(what, where=graph.name, hint=hint)
    turned = any("past_place" in read for read, _, _ in graph.kept)
    position, mask = (names[0] if names else "" for names in (positions, masks))
    return Roles(tokens[0], position, mask, turned)


def places_of(graph: Graph) -> int:
    """How many steps the states of a graph hold."""
    return max(max(array.shape, default=1) for array in graph.states)


def generate(graph: Graph, prompt: Sequence[int], count: int, how: Sampling, ends: frozenset[int]) -> Iterator[int]:
    """The tokens behind a prompt, each once it is known, as the graph computes them in numpy.

    Args:
        graph: with states, of one token a step.
        prompt: at least one token.
        count: most tokens, those of the prompt included; at most what the states hold.
        how: they are chosen.
        ends: tokens behind which a text ends.
    """
    roles, held = roles_of(graph), {read: first for read, _, first in graph.kept}
    token = prompt[0]
    for step in range(count - 1):
        found = evaluate(graph, {**roles.inputs(graph.types, token, step), **held})
        held = {read: found[written] for read, written, _ in graph.kept}
        if step + 1 < len(prompt):
            token = prompt[step + 1]
            continue
        token = how.choose(found[graph.results[0]].reshape(-1), step)
        yield token
        if token in ends:
            return


def first_other(tokens: Sequence[int], outputs: Mapping[int, Array], prompt: int, how: Sampling) -> int | None:
    """The first place at which logits that were computed elsewhere choose another token; None where none does.

    Args:
        tokens: of the text, those of the prompt first.
        outputs: the logits by step; those of the prompt's last one and all behind.
        prompt: how many tokens the prompt has.
        how: they are chosen.
    """
    for step in range(prompt - 1, len(tokens) - 1):
        if how.choose(outputs[step].reshape(-1), step) != tokens[step + 1]:
            return step + 1
    return None
