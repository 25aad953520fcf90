"""ONNX Runtime's own quantisers on the same network and data, beside the model of `dovetail quantize`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dovetail.errors import DovetailError, MissingExtraError
from dovetail.guests.ptq.accuracy import Column, column
from dovetail.guests.ptq.data import Samples
from dovetail.guests.ptq.settings import Told
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.types import Array


def compare_with_runtime(
    model: Path, made: bytes, calibration: Samples, measured: Samples, classifies: bool, report: Told
) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """The figures of the model that was made, and of those ONNX Runtime's quantisers make with their defaults, all run
    by ONNX Runtime against the float model; and a sentence for each that they cannot make or run.

    Args:
        model: the float network, an ONNX file.
        made: the quantised one, with float ends.
        calibration: what the static quantisers are given.
        measured: what is compared, perhaps with labels.
        classifies: whether the answer is the greatest output.
        report: told the progress.

    Raises:
        DovetailError: the model is no ONNX file, ONNX Runtime does not run it, or onnxruntime is not installed.
    """
    if model.suffix.lower() != ".onnx":
        what = f"ONNX Runtime's quantisers take ONNX files, not '{model.name}'"
        raise DovetailError(what, where="--compare", hint="export the network as ONNX, or leave --compare out")
    try:
        from onnxruntime import quantization  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "check", "comparing with its quantisers") from error

    def static(target: Path, per_channel: bool) -> None:
        quantization.quantize_static(model, target, _reader(calibration.inputs), per_channel=per_channel)

    ways: dict[str, Callable[[Path], object]] = {
        "Dovetail": lambda target: target.write_bytes(made),
        "ONNX Runtime, static": lambda target: static(target, False),
        "ONNX Runtime, static, per channel": lambda target: static(target, True),
        "ONNX Runtime, dynamic": lambda target: quantization.quantize_dynamic(model, target),
    }
    columns, failures = list[Column](), list[str]()
    with TemporaryDirectory() as folder, _quiet():
        try:
            wanted = _outputs(model, measured.inputs)
        except Exception as error:  # what the runtime raises has no common class
            what = f"ONNX Runtime does not run it: {_first_line(error)}"
            raise DovetailError(what, where=model.name, hint="leave --compare out") from error
        for number, (name, make) in enumerate(ways.items()):
            report(f"comparing: {name}")
            target = Path(folder) / f"{number}.onnx"
            try:
                make(target)
                got = _outputs(target, measured.inputs)
            except Exception as error:
                failures.append(f"{name}: {_first_line(error)}")
                continue
            columns.append(column(name, wanted, got, measured.labels, classifies))
    return tuple(columns), tuple(failures)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of the quantisers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _reader(inputs: Mapping[str, Array]) -> Any:
    """The samples one after another, as the static quantiser asks for them."""
    from onnxruntime.quantization import CalibrationDataReader  # type: ignore[import-untyped]

    class CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = iter(_feeds(inputs))

        def get_next(self) -> dict[str, Array] | None:
            return next(self.feeds, None)

    return CalibrationReader()


def _feeds(inputs: Mapping[str, Array]) -> list[dict[str, Array]]:
    count = len(next(iter(inputs.values())))
    return [{name: np.ascontiguousarray(array[at]) for name, array in inputs.items()} for at in range(count)]


def _outputs(model: Path, inputs: Mapping[str, Array]) -> Sequence[Array]:
    """The first output of each sample, the network computed as it is written."""
    session = runtime_session(model, optimised=False)
    return [session.run(None, feed)[0] for feed in _feeds(inputs)]
