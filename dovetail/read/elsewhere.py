"""Model formats of other tools, which are not read: how to get from each to a file that is."""

from __future__ import annotations

import re
from pathlib import Path

_TORCH = 'in Python: torch.onnx.export(model, (example,), "net.onnx", dynamo=True)'
_WEIGHTS = "it holds weights and no network: load them in their framework and export that to ONNX"

OTHERS: tuple[tuple[str, str, bytes, str], ...] = (
    (
        "a TensorFlow SavedModel",
        r"saved_model\.pb",
        b"",
        "convert its folder: python -m tf2onnx.convert --saved-model FOLDER --output net.onnx, or "
        "tf.lite.TFLiteConverter.from_saved_model(FOLDER) in Python",
    ),
    (
        "a frozen TensorFlow graph",
        r".*\.pb",
        b"",
        "python -m tf2onnx.convert --graphdef FILE --inputs NAME:0 --outputs NAME:0 --output net.onnx",
    ),
    ("an ExecuTorch program", r".*\.pte", b"", f"export the PyTorch model that it is made from; {_TORCH}"),
    ("a file of PyTorch", r".*\.(pt|pth|pt2|ckpt)", b"", _TORCH),
    ("a Core ML model", r".*\.(mlmodel|mlpackage)", b"", "export the model that it is made from to ONNX"),
    ("a TensorFlow.js model", r"model\.json", b"", "export the Keras model or SavedModel that it is made from"),
    ("an OpenVINO model", r".*\.xml", b"", "export the model that it is made from to ONNX"),
    ("a TensorRT engine", r".*\.(engine|plan)", b"", "give the ONNX file that it is made from"),
    ("a safetensors file", r".*\.safetensors", b"", _WEIGHTS),
    ("a GGUF file", r".*\.gguf", b"GGUF", _WEIGHTS),
    ("a file of pickled Python objects", r".*\.(pkl|pickle|joblib)", b"\x80", "export the model to ONNX"),
)
"""For each format: its name, a regular expression for file names, its first bytes if known, and the way to ONNX."""


def known_elsewhere(path: Path, data: bytes = b"") -> tuple[str, str] | None:
    """The name of another tool's format, as a fault, and the way to a model file; None for an unknown format."""
    folder = path.is_dir() and (path / "saved_model.pb").exists()
    name = "saved_model.pb" if folder else path.name.lower()
    for what, names, magic, how in OTHERS:
        if re.fullmatch(names, name) or (magic and data.startswith(magic)):
            return f"this is {what}, which is not read", how
    return None
