"""`dovetail generate`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dovetail.cli.console import beside_json, note, progress, say
from dovetail.cli.options import BoardOptions, Simulator, argument
from dovetail.errors import DovetailError
from dovetail.options import Options, flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.guests.language.generation import Sampling
    from dovetail.ir.graph import Graph
    from dovetail.run import ProjectBuild
    from dovetail.sim.line import Board


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `dovetail generate`."""

    tokenizer: Path = flag(
        Path(), "llama2.c's tokenizer .bin, Hugging Face's tokenizer.json or SentencePiece's .model."
    )
    prompt: str = flag("", "The beginning of the text.")
    tokens: int = flag(64, "Most tokens of the text, the prompt's included.", min=2)
    temperature: float = flag(0.0, "0 takes the most likely token, 1 draws as the model says.", min=0.0)
    seed: int = flag(0, "Seed of the tokens that are drawn.", min=0)
    sim: Simulator | None = flag(None, "As of dovetail run.", kind=Simulator | None)
    hertz: float = flag(0.0, "Clock of the core, for tokens per second of a simulated chip.", min=0.0)
    json_file: Path | None = flag(None, "Write the figures here as JSON; - for stdout.", "--json", kind=Path | None)


def generate(
    build: Annotated[Path, argument(help="A folder made by dovetail compile.")],
    options: GenerateOptions,
    own: Annotated[Options, "operators"],
    on: BoardOptions,
) -> None:
    """Let a language model write a text.

    The text appears as the integer graph computes it on this machine. Then the firmware computes the same steps, on a
    simulated chip, on this machine or on a board, and must choose the same tokens.

    Example: dovetail generate build/stories --tokenizer tok512.bin --prompt "Once upon a time"
    """
    from dovetail import prove
    from dovetail.guests.language import generation
    from dovetail.guests.language.tokenizers import load_tokenizer
    from dovetail.run import open_build

    tokenizer, project = load_tokenizer(options.tokenizer), open_build(build)
    graph = prove.read_graph(project, own.operators)
    how = generation.Sampling(options.temperature, options.seed)
    prompt = [*([] if tokenizer.begin is None else [tokenizer.begin]), *tokenizer.encode(options.prompt)]
    if not prompt:
        raise DovetailError("there is nothing to begin with", where="--prompt", hint="give the first words")
    _check_vocabulary(graph, prompt)
    most = min(options.tokens, generation.places_of(graph))
    if len(prompt) >= most:
        hint = "give a shorter prompt, or more --tokens; a text has at most the places of the model's states"
        raise DovetailError(
            f"the prompt has {len(prompt)} tokens, the text at most {most}", where="--prompt", hint=hint
        )
    if most < options.tokens:
        note(f"the states of the model hold {most} tokens: the text ends there")
    tokens, shown, quiet = list(prompt), "", str(options.json_file) == "-"
    start = time.perf_counter()
    for token in generation.generate(graph, prompt, most, how, tokenizer.end):
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not quiet and not text.endswith("�"):  # a character may be several tokens
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    if not quiet:
        sys.stdout.write(f"{tokenizer.decode(tokens)[len(shown) :]}\n")
    figures = {"schema": 1, "text": tokenizer.decode(tokens), "tokens": tokens, "prompt": len(prompt)}
    seconds = time.perf_counter() - start
    figures["graph_tokens_per_second"] = round((len(tokens) - 1) / max(seconds, 1e-9), 2)
    figures |= _on_firmware(project, graph, (tokens, len(prompt)), how, options, on.board())
    with beside_json(options.json_file, figures):
        say(_sentence(figures))


def _check_vocabulary(graph: Graph, prompt: Sequence[int]) -> None:
    """Raise DovetailError for tokens that the model has none of."""
    classes = graph.types[graph.results[0]].elements
    if max(prompt) >= classes:
        what = f"the prompt has the token {max(prompt)}, the model knows {classes}"
        raise DovetailError(what, where="--tokenizer", hint="give the tokenizer the model was trained with")


def _on_firmware(
    build: ProjectBuild,
    graph: Graph,
    text: tuple[Sequence[int], int],
    how: Sampling,
    options: GenerateOptions,
    board: Board | None,
) -> dict[str, object]:
    """The figures of the firmware's run over a text, given with the tokens of its prompt.
    Raises DovetailError where it chooses another token than the graph."""
    from dovetail.guests.language import generation
    from dovetail.run import BOARD, default_simulator, run_build, runs_several

    tokens, prompt = text
    roles, where = generation.roles_of(graph), board.where if board else options.sim or default_simulator(build.target)
    each = [roles.inputs(graph.types, token, step) for step, token in enumerate(tokens[:-1])]
    entry = build.manifest.prefill
    count = entry.steps if entry and runs_several(build, BOARD if board else str(where)) else prompt + 1
    if entry and count > prompt:
        note(f"the prompt is computed token by token: it has {prompt} tokens, calls of {entry.steps} are for the chip")
    calls = prompt // count
    ends = [*range(count - 1, calls * count, count), *range(calls * count, len(each))]
    steps = [generation.together(each[at - count + 1 : at + 1]) for at in ends[:calls]] + each[calls * count :]
    with progress("starting") as report:
        report(f"running {len(each)} steps on {where}")
        start = time.perf_counter()
        result = run_build(build, options.sim, steps, board=board)
        seconds = time.perf_counter() - start
    outputs = {at: found[graph.results[0]] for at, found in zip(ends, result.outputs, strict=True)}
    other = generation.first_other(tokens, outputs, prompt, how)
    if other is not None:
        what = f"the firmware chooses another token than the integer graph at place {other}"
        raise DovetailError(what, where=str(where), hint="see dovetail run --check-layers for the layer that differs")
    figures: dict[str, object] = {"where": str(where), "steps": len(each), "seconds": round(seconds, 3)}
    taken = [one.total_cycles for one in result.simulation.inferences if one.total_cycles is not None]
    cycles = taken[calls:]
    if calls and taken:
        figures |= {
            "prefill_steps": calls * count,
            "prefill_cycles_per_token": round(sum(taken[:calls]) / calls / count),
        }
    if cycles:
        figures["cycles_per_token"] = round(sum(cycles) / len(cycles))
        if options.hertz:
            figures["tokens_per_second"] = round(options.hertz * len(cycles) / sum(cycles), 2)
    return figures


def _sentence(figures: dict[str, object]) -> str:
    """The figures as a line."""
    parts = [f"{figures['steps']} steps on {figures['where']} choose the same tokens"]
    if "prefill_steps" in figures:
        each = f"{figures['prefill_cycles_per_token']:,} cycles each"
        parts.append(f"the first {figures['prefill_steps']} were computed several in a call, in {each}")
    if "cycles_per_token" in figures:
        parts.append(f"{figures['cycles_per_token']:,} cycles a token")
    if "tokens_per_second" in figures:
        parts.append(f"{figures['tokens_per_second']} tokens/s at that clock")
    return "; ".join(parts)
