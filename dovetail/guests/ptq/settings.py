"""Choices of a user: how a network is quantised, under which budget, and how data are prepared."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dovetail.errors import DovetailError
from dovetail.options import flag
from dovetail.records import Record

Told = Callable[[str], None]
"""Told what is being done now."""


class Method(enum.StrEnum):
    """How a range is chosen."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    MSE = "mse"
    ENTROPY = "entropy"
    """For values with few elements least square error instead."""


class Budget(Record):
    """A limit for the network as a whole."""

    kind: str
    """"bytes" of weights (and of activations where their widths are searched for too), "cycles" of an inference,
    "loss" in points of top-1, "sqnr" in dB."""
    limit: float


def parse_budget(text: str) -> Budget:
    """A budget as the command line has it: "bytes=20k", "cycles=200000", "loss=1.5", "sqnr=20".
    Raises DovetailError for another text."""
    match = re.fullmatch(r"(bytes|cycles|loss|sqnr)=([0-9]+(?:\.[0-9]+)?)(k|M)?", text)
    if match is None:
        hint = "give bytes=N or cycles=N (k and M allowed), loss=POINTS of top-1, or sqnr=DB"
        raise DovetailError(f"'{text}' is no budget", where="--budget", hint=hint)
    return Budget(match[1], float(match[2]) * {"k": 1e3, "M": 1e6}.get(match[3] or "", 1.0))


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of data: element * scale + offset, after images are resized (bilinear)."""

    most: int = flag(512, "Samples read, from the first.", "--samples", min=1)
    scale: float = flag(1.0, "Every element of the data is multiplied with this first.", "--scale")
    offset: float = flag(0.0, "And this is added to it.", "--offset")
    resize: bool = flag(False, "Scale images of another size than the model's.", "--resize")


@dataclass(frozen=True)
class Settings:
    """Options of quantising a network."""

    method: Method = flag(
        Method.MINMAX,
        "How ranges of activations are chosen.",
        kind=Literal["minmax", "percentile", "mse", "entropy"],
        unset="minmax",
        read=Method,
    )
    bits: int = 8
    """Width of weights that are not in `widths`."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Bits of the weights by result of the layer."""
    activation_bits: int = 8
    """Width of activations that are not in `activation_widths`; the network's outputs and the operands of its softmaxes
    keep 8 bits."""
    activation_widths: Mapping[str, int] = field(default_factory=dict)
    """Bits of activations by value."""
    equalise: bool = flag(False, "Even out channels between neighbouring layers.", "--equalise")
    correct_bias: bool = flag(True, "Take each channel's mean error off its bias.", "--correct-bias/--keep-bias")
    adaptive: bool = flag(True, "Fit the rounding of int4 and int2 weights to the data.", "--adaptive/--nearest")
    per_channel: bool = flag(
        True, "A scale per output channel of the weights, where the target takes it.", "--per-channel/--per-tensor"
    )
    symmetric: bool = flag(False, "Activations with zero point 0, as some targets need.", "--symmetric")
    integer_ends: bool = flag(
        False, "Inputs and outputs become integers: nothing is left to the core.", "--integer-ends"
    )
    budget: Budget | None = flag(
        None,
        "For mixed: bytes=N of weights (and of activations, if these are mixed), cycles=N simulated, loss=POINTS of "
        "top-1, or sqnr=DB.",
        read=lambda text: None if text is None else parse_budget(text),
    )
    """Search for the width of each layer's weights under this budget; `bits` and `widths` are not used then."""
    mixed_activations: bool = False
    """Search for the width of each activation under the budget too; `mixed_weights` says whether of weights as well."""
    mixed_weights: bool = True
