"""The float functions of the core kernels against float64, and what their comments promise."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from math import erf, erfc
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.build.toolchain import compile_host
from dovetail.ir.types import Array
from dovetail.kernels import HELPERS, helper_source
from dovetail.kernels.helpers import FLOAT_HELPERS

Function = Callable[[Array], Array]


def each(function: Callable[[float], float]) -> Function:
    return lambda x: np.array([function(float(value)) for value in x])


FUNCTIONS: dict[str, tuple[Function, float, float]] = {
    "exponential": (np.exp, -104.0, 88.7),
    "exponential_less_one": (np.expm1, -104.0, 88.7),
    "logarithm": (np.log, 1e-44, 3e38),
    "logarithm_above_one": (np.log1p, 0.0, 1.0),
    "square_root": (np.sqrt, 0.0, 3e38),
    "hyperbolic_tangent": (np.tanh, -12.0, 12.0),
    "logistic": (lambda x: 1 / (1 + np.exp(-x)), -87.0, 40.0),
    "soft_plus": (lambda x: np.logaddexp(x, 0.0), -80.0, 80.0),
    "error_function": (each(erf), -6.0, 6.0),
}
"""Each function's meaning, and the range it is measured over."""


@cache
def library(folder: Path) -> ctypes.CDLL:
    source = ["#include <stdint.h>", helper_source(FLOAT_HELPERS)]
    for name in (*FUNCTIONS, "sine", "cosine", "gaussian_share", "nearest", "floor_of", "ceiling_of", "sign_of"):
        loop = f"for (int32_t i = 0; i < count; ++i) {{ y[i] = {name}(x[i]); }}"
        source.append(f"void run_{name}(float *y, const float *x, int32_t count);")
        source.append(f"void run_{name}(float *y, const float *x, int32_t count) {{ {loop} }}")
    for name in ("scaled_real", "shifted_real"):
        head = f"void run_{name}(float *y, const int32_t *x, float scale, int32_t count)"
        loop = f"for (int32_t i = 0; i < count; ++i) {{ y[i] = {name}(x[i], scale); }}"
        source += [f"{head};", f"{head} {{ {loop} }}"]
    (folder / "functions.c").write_text("\n".join(source))
    warnings = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wdouble-promotion", "-Werror", "-Wno-unused-function")
    flags = ("-O2", *warnings)
    return ctypes.CDLL(str(compile_host(folder, [Path("functions.c")], flags=flags, cache=folder / "cache")))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Array], Array]:
    made = library(tmp_path_factory.mktemp("functions"))

    def call(name: str, x: Array) -> Array:
        x, y = np.ascontiguousarray(x, np.float32), np.empty(x.shape, np.float32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (y, x)]
        made[f"run_{name}"](*pointers, ctypes.c_int32(x.size))
        return y

    return call


def operands(low: float, high: float) -> Array:
    """Floats spread over the range evenly, and evenly over their exponents."""
    random = np.random.default_rng(5)
    even = random.uniform(low, high, 60_000)
    sizes = np.exp(random.uniform(np.log(1e-30), np.log(max(abs(low), abs(high))), 60_000))
    signed = np.concatenate([sizes, -sizes])
    found = np.concatenate([even, signed[(signed >= low) & (signed <= high)]]).astype(np.float32)
    return found[(found >= low) & (found <= high)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_as_stated(name: str, run: Callable[[str, Array], Array]) -> None:
    function, low, high = FUNCTIONS[name]
    stated = re.search(r"within (\d+) units? in the last place", HELPERS[name])
    assert stated is not None
    x = operands(low, high)
    exact = function(x.astype(np.float64))
    units = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    error = np.abs(run(name, x) - exact) / units
    print(f"{name}: {error.max():.2f} units at {x[error.argmax()]!r}")
    assert error.max() <= int(stated[1])


def test_the_share_of_the_normal_distribution(run: Callable[[str, Array], Array]) -> None:
    x = operands(-11.0, 11.0)
    exact = np.array([erfc(-value / np.sqrt(2.0)) / 2 for value in x.astype(np.float64)])
    shown = exact > 2.0**-100
    assert (np.abs(run("gaussian_share", x) - exact)[shown] / exact[shown]).max() < 2.0**-16


@pytest.mark.parametrize(("name", "function"), [("sine", np.sin), ("cosine", np.cos)])
def test_turns(name: str, function: Function, run: Callable[[str, Array], Array]) -> None:
    x = operands(-8192.0, 8192.0)
    assert np.abs(run(name, x) - function(x.astype(np.float64))).max() < 2.0**-22
    assert np.isnan(run(name, np.array([np.inf, -np.inf, np.nan], np.float32))).all()


def test_special_values(run: Callable[[str, Array], Array]) -> None:
    inf, nan = np.inf, np.nan
    cases = {
        "exponential": ([inf, -inf, nan, 200.0, -200.0, 0.0], [inf, 0.0, nan, inf, 0.0, 1.0]),
        "logarithm": ([0.0, -1.0, inf, nan, 1.0], [-inf, nan, inf, nan, 0.0]),
        "square_root": ([0.0, -1.0, inf, nan, 4.0], [0.0, nan, inf, nan, 2.0]),
        "hyperbolic_tangent": ([inf, -inf, nan, 0.0], [1.0, -1.0, nan, 0.0]),
        "error_function": ([inf, -inf, nan, 0.0], [1.0, -1.0, nan, 0.0]),
        "gaussian_share": ([inf, -inf, nan, 0.0], [1.0, 0.0, nan, 0.5]),
        "nearest": ([0.5, 1.5, -2.5, 8388609.0, 1e30, nan, -inf], [0.0, 2.0, -2.0, 8388609.0, 1e30, nan, -inf]),
        "floor_of": ([0.5, -0.5, 2.0, -3.9], [0.0, -1.0, 2.0, -4.0]),
        "ceiling_of": ([0.5, -0.5, 2.0, -3.9], [1.0, 0.0, 2.0, -3.0]),
        "sign_of": ([3.0, -0.1, 0.0, nan], [1.0, -1.0, 0.0, nan]),
    }
    for name, (given, expected) in cases.items():
        np.testing.assert_array_equal(run(name, np.array(given, np.float32)), np.array(expected, np.float32), name)


def test_integers_are_scaled_as_floats(tmp_path: Path) -> None:
    """To the last bit, ties and all: what float32 gives for integers of up to 24 bits."""
    rng, made = np.random.default_rng(6), library(tmp_path)
    ends = np.array([0, 1, -1, 3, 1 << 24, -(1 << 24), (1 << 24) - 1], np.int32)
    for number in range(300):
        scale = np.float32(2.0 ** rng.uniform(-99, 99)) if number % 3 else np.float32(1 + number / 256)
        bits = rng.integers(1, 25, 500)
        x = np.concatenate([ends, rng.integers(-(1 << bits), (1 << bits) + 1).astype(np.int32)])
        y = np.empty(len(x), np.float32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (y, x)]
        made.run_scaled_real(*pointers, ctypes.c_float(scale), len(x))
        np.testing.assert_array_equal(y.view(np.uint32), (x.astype(np.float32) * scale).view(np.uint32))


def test_integers_are_shifted_as_floats(tmp_path: Path) -> None:
    """All integers of 16 bits and a sign, times powers of two."""
    made, x = library(tmp_path), np.arange(-(1 << 16) + 1, 1 << 16, dtype=np.int32)
    for power in (-99, -10, 0, 13, 99):
        y, scale = np.empty(len(x), np.float32), np.float32(2.0**power)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (y, x)]
        made.run_shifted_real(*pointers, ctypes.c_float(scale), len(x))
        np.testing.assert_array_equal(y.view(np.uint32), (x.astype(np.float32) * scale).view(np.uint32))
