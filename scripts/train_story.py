"""Trains the zoo's language model on sentences of its own and writes dovetail/guests/zoo/story.npz.

Run from anywhere, in a few minutes on one core; the same machine gives the same file:

    python scripts/train_story.py [file to write]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from math import cos, log, pi
from pathlib import Path

import numpy as np
import numpy.typing as npt
from train_digits import adam

from dovetail.guests.zoo.story import EPSILON, HEADS, LAYERS, PIECES, PLACES, parameter_shapes
from dovetail.ir.types import Array

Tokens = npt.NDArray[np.int64]
Parameters = dict[str, Array]
Back = Callable[[Array], Array]
"""From the gradient of a result to that of the operand; it adds those of the parameters to a dictionary."""

STEPS, BATCH, LEARNING_RATE = 1200, 32, 4e-3
HELD_BACK, CALIBRATION, TEST = 64, 16, 8
"""Texts that training does not see; texts of both kinds that the file has."""

LIVES = {
    "cat": ("house", "milk"),
    "frog": ("pond", "flies"),
    "bee": ("garden", "flowers"),
    "fox": ("forest", "berries"),
    "hen": ("yard", "corn"),
    "mouse": ("barn", "cheese"),
    "duck": ("lake", "bread"),
    "goat": ("meadow", "grass"),
}
KINDS = ("little", "happy", "brave", "quiet", "young", "clever")
WISHES = ("liked", "looked for", "dreamed of", "asked for")
ENDS = ("sang all day", "slept in the sun", "was never sad", "shared it with a friend")


def sentences() -> list[str]:
    """All texts, of two sentences each."""
    return [
        f"a {kind} {animal} lived in a {home}. the {animal} {wish} {food} and {end}."
        for (animal, (home, food)), kind, wish, end in product(LIVES.items(), KINDS, WISHES, ENDS)
    ]


def texts(seed: int) -> Tokens:
    """All texts as tokens [N, PLACES] in a seeded random order, filled up with the token that ends a text."""
    coded = [[1, *(PIECES.index(letter) for letter in f" {text}")] for text in sentences()]
    rows = np.array([[*row, *(2,) * (PLACES - len(row))] for row in coded])
    return rows[np.random.default_rng(seed).permutation(len(rows))]


def _dense(p: Parameters, g: Parameters, name: str, x: Array) -> tuple[Array, Back]:
    def back(dy: Array) -> Array:
        g[name] = np.tensordot(x, dy, ((0, 1), (0, 1)))
        return dy @ p[name].T

    return x @ p[name], back


def _normal(p: Parameters, g: Parameters, name: str, x: Array) -> tuple[Array, Back]:
    """Layer normalisation, without an offset."""
    centred = x - x.mean(axis=-1, keepdims=True)
    factor = 1 / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(EPSILON))
    row = centred * factor

    def back(dy: Array) -> Array:
        g[name] = (dy * row).sum(axis=(0, 1))
        d = dy * p[name]
        slope = d - d.mean(axis=-1, keepdims=True) - row * (d * row).mean(axis=-1, keepdims=True)
        return np.asarray(factor * slope)

    return row * p[name], back


def _heads(x: Array) -> Array:
    return x.reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)


def _flat(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def _attended(x: tuple[Array, Array, Array]) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """Attention of queries, keys and values [B, T, width] to the places up to each one's own."""
    query, key, value = map(_heads, x)
    scale = np.float32(query.shape[-1] ** -0.5)
    scores = query @ key.swapaxes(2, 3) * scale + np.triu(np.full(query.shape[2:3] * 2, -1e9, np.float32), 1)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares = powers / powers.sum(axis=-1, keepdims=True)

    def back(dy: Array) -> tuple[Array, ...]:
        dy = _heads(dy)
        d = dy @ value.swapaxes(2, 3)
        d = shares * (d - (d * shares).sum(axis=-1, keepdims=True)) * scale
        return tuple(map(_flat, (d @ key, d.swapaxes(2, 3) @ query, shares.swapaxes(2, 3) @ dy)))

    return _flat(shares @ value), back


def _block(p: Parameters, g: Parameters, layer: int, x: Array) -> tuple[Array, Back]:
    """Attention and a feed-forward layer, each added to what it reads."""
    row, of_row = _normal(p, g, f"{layer}.norm1", x)
    read, of_read = zip(*(_dense(p, g, f"{layer}.{name}", row) for name in ("query", "key", "value")), strict=True)
    attended, of_attended = _attended(read)
    out, of_out = _dense(p, g, f"{layer}.out", attended)
    inner = x + out
    wide, of_wide = _normal(p, g, f"{layer}.norm2", inner)
    up, of_up = _dense(p, g, f"{layer}.up", wide)
    down, of_down = _dense(p, g, f"{layer}.down", np.maximum(up, 0))

    def back(dy: Array) -> Array:
        dy = dy + of_wide(of_up(of_down(dy) * (up > 0)))
        parts = of_attended(of_out(dy))
        return dy + of_row(sum(of(part) for of, part in zip(of_read, parts, strict=True)))

    return inner + down, back


def loss_and_gradients(p: Parameters, tokens: Tokens) -> tuple[float, Parameters]:
    """Mean cross-entropy of the tokens [B, T] behind the first, in nats, and its gradient for every parameter."""
    g: Parameters = {}
    read, wanted, backs = tokens[:, :-1], tokens[:, 1:], list[Back]()
    x = p["embedding"][read] + p["places"][: read.shape[1]]
    for layer in range(LAYERS):
        x, back = _block(p, g, layer, x)
        backs.append(back)
    x, of_norm = _normal(p, g, "norm", x)
    logits, of_logits = _dense(p, g, "head", x)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares = powers / powers.sum(axis=-1, keepdims=True)
    truth = np.eye(len(PIECES), dtype=np.float32)[wanted]
    loss = -float(np.log((shares * truth).sum(axis=-1)).mean())
    dx = of_norm(of_logits((shares - truth) / np.float32(wanted.size)))
    for back in reversed(backs):
        dx = back(dx)
    g["places"] = np.zeros_like(p["places"])
    g["places"][: read.shape[1]] = dx.sum(axis=0)
    g["embedding"] = np.zeros_like(p["embedding"])
    np.add.at(g["embedding"], read, dx)
    return loss, g


def train(tokens: Tokens, seed: int, steps: int = STEPS) -> Parameters:
    """Weights from a seeded start, by Adam under a cosine-shaped learning rate; rounded to float16."""
    rng = np.random.default_rng(seed)
    p = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        for name, shape in parameter_shapes().items()
    }
    memory = {name: (np.zeros_like(one), np.zeros_like(one)) for name, one in p.items()}
    for step in range(steps):
        _, g = loss_and_gradients(p, tokens[rng.integers(0, len(tokens), BATCH)])
        rate = LEARNING_RATE * (1 + cos(pi * step / steps)) / 2
        p = {name: adam(one, g[name], *memory[name], step + 1, rate) for name, one in p.items()}
    return {name: one.astype(np.float16).astype(np.float32) for name, one in p.items()}


def save(file: Path, parameters: Parameters, seen: Tokens, held_back: Tokens) -> None:
    """Writes the weights as float16, and some texts, all as long as the shortest."""
    steps = int((held_back != 2).sum(axis=1).min())
    arrays = {name: one.astype(np.float16) for name, one in parameters.items()}
    arrays |= {
        name: rows[:, :steps].astype(np.uint8) for name, rows in (("calibration", seen), ("held_back", held_back))
    }
    np.savez_compressed(file, allow_pickle=False, **arrays)


def main() -> None:
    """Trains, prints what the model knows of texts it never saw, and writes the file."""
    default = Path(__file__).resolve().parents[1] / "dovetail" / "guests" / "zoo" / "story.npz"
    parser = argparse.ArgumentParser(description="Trains the zoo's language model.")
    parser.add_argument("file", nargs="?", type=Path, default=default)
    file: Path = parser.parse_args().file
    tokens = texts(seed=0)
    held_back, seen = tokens[:HELD_BACK], tokens[HELD_BACK:]
    parameters = train(seen, seed=0)
    save(file, parameters, seen[:CALIBRATION], held_back[:TEST])
    bits = [loss_and_gradients(parameters, part)[0] / log(2) for part in (held_back, seen[:HELD_BACK])]
    print(
        f"{bits[0]:.4f} bits per token of {HELD_BACK} texts held back, {bits[1]:.4f} of the training; wrote {file.name}"
    )


if __name__ == "__main__":
    main()
