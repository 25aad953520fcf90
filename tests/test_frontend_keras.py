"""Every supported Keras layer against Keras itself, from both file formats, and the shared models."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.ir.graph import evaluate, verify
from dovetail.read import load_model
from dovetail.read.keras import LAYERS

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "keras"
SHARED = ("ic_resnet8", "tinymaix_mnist_valid", "vww_96")
TOLERANCE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:keras")

try:
    import keras_cases as cases
except pytest.skip.Exception as absent:  # the shared models need no Keras
    WITHOUT: str | None = str(absent)
    CASES: list[Any] = []
else:
    WITHOUT = None
    CASES = [
        pytest.param(group, place, id=entry.name)
        for group, listed in cases.GROUPS.items()
        for place, entry in enumerate(listed)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keras")


@cache
def compared(group: str, folder: Path) -> list[tuple[Any, list[Any]]]:
    """What Keras computes for each case of a group, and what the graphs of both files compute."""
    listed = cases.GROUPS[group]
    model = cases.together(listed)
    cases.randomise(model, seed=len(group))
    arrays = cases.drawn(listed, seed=len(group))
    found = []
    for path in cases.saved(model, folder, group):
        graph = load_model(path)
        verify(graph)
        found.append(list(evaluate(graph, dict(zip(graph.inputs, arrays, strict=True))).values()))
    return [(wanted, list(ours)) for wanted, *ours in zip(cases.run_keras(model, arrays), *found, strict=True)]


@pytest.mark.parametrize(("group", "place"), CASES)
def test_layers_equal_keras(group: str, place: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keras_writer import read_here

    monkeypatch.setattr("dovetail.read.keras.archive.read_hdf5", read_here)
    wanted, found = compared(group, folder)[place]
    assert np.abs(wanted).max() > 0, "the case tests nothing"
    for ours in found:
        assert ours.shape == wanted.shape
        assert np.abs(ours - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.skipif(WITHOUT is not None, reason="Keras is not installed")
def test_every_layer_of_the_table_has_a_case() -> None:
    """But those Keras 3 does not write (to .h5); test_frontend_keras_models has them."""
    seen = {layer.__class__.__name__ for listed in cases.GROUPS.values() for layer in cases.together(listed).layers}
    assert set(LAYERS) - seen == {"RandomBrightness", "TFOpLambda", "ThresholdedReLU"}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")
def test_shared_models_equal_their_references(name: str) -> None:
    graph = load_model(MODELS / f"{name}.h5")
    reference = np.load(MODELS / f"{name}.h5.ref.npz")
    (found,) = evaluate(graph, {graph.inputs[0]: reference["in_0"]}).values()
    wanted = reference["out_0__keras_torch"]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=0)


@pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")
def test_normalisations_are_folded() -> None:
    """ResNet8 has 9 convolutions and 7 batch normalisations: only the convolutions are left."""
    names = [type(node.operator).__name__ for node in load_model(MODELS / "ic_resnet8.h5").nodes]
    assert names.count("Conv2d") == 9 and "DepthwiseConv2d" not in names


@pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")
def test_reading_a_model_imports_no_framework() -> None:
    script = (
        "import sys; from pathlib import Path; from dovetail.read import load_model\n"
        f"load_model(Path({str(MODELS / 'tinymaix_mnist_valid.h5')!r}))\n"
        "print(sorted({'keras', 'tensorflow', 'jax', 'torch', 'pickle5'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    light = "import sys, dovetail, dovetail.read; print('h5py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
