"""Damaged models with custom operators, loops and choices: a message of one error, never another exception."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from dovetail.compile import Options, prepare
from dovetail.errors import DovetailError
from dovetail.targets import load_target
from test_control_flow import choosing, recurrent, summing
from test_detectors import Yolo, quantised_ends, ssd, suppression
from test_signal_operators import front_end

LIMITS = [np.array([3], np.int64), np.array([0.5], np.float32)]
MODELS = {
    **{"ssd.tflite": lambda: ssd(True), "front.tflite": lambda: front_end()[0], "yolo.onnx": lambda: Yolo().file},
    **{
        "quantised.tflite": lambda: quantised_ends("UINT8")[0],
        "nms.onnx": lambda: suppression((1, 9, 4), (1, 2, 9), LIMITS),
    },
    **{"loop.tflite": lambda: summing(5), "cell.tflite": recurrent, "choice.tflite": lambda: choosing(None)},
}


@pytest.mark.parametrize("name", MODELS)
def test_mutated_files_end_in_a_message(tmp_path: Path, name: str) -> None:
    data, rng, refused = MODELS[name](), np.random.default_rng(0), 0
    target, path = load_target("riscv"), tmp_path / name
    for _ in range(150):
        changed = bytearray(data)
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            changed[place] = rng.choice([0, 1, 127, 128, 255, rng.integers(256)])
        path.write_bytes(bytes(changed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                prepare(path, target, Options())
            except DovetailError as error:
                refused += 1
                assert error.where and error.hint and "report this" not in error.hint
    assert refused
