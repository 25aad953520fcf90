"""Small networks written by today's exporters, kept in tests/data/exporters with the tools' versions.

    python scripts/exporters.py TOOL ...   writes the files of these tools, whose packages must be installed
    python scripts/exporters.py --judge    compares each file with its runtime and notes it in exporters.json

Tools need packages that exclude one another, so each is installed in an environment of its own (`pip install` its
packages) and run there; scripts/support_tables.py makes the table of the support page of exporters.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "exporters"
LIST = FOLDER / "exporters.json"
RNG = np.random.default_rng(7)
IMAGE = (1, 1, 8, 8)


def samples(shape: Sequence[int] = IMAGE, count: int = 16) -> list[Any]:
    """Inputs to calibrate with."""
    return [RNG.normal(size=shape).astype(np.float32) for _ in range(count)]


# Torch


def torch_net() -> Any:
    """A convolution with a batch normalisation, a residual block, a pool and a dense layer."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(1, 4, 3, 2, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU6())
            self.deep = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Hardswish(), nn.Conv2d(4, 4, 1))
            self.last = nn.Linear(4, 5)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            x = x + self.deep(x)
            x = nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)
            return torch.softmax(self.last(x), -1)

    return Net().eval()


def torch_attention() -> Any:
    """An encoder of one layer, whose shapes the exporter computes at run time."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.heads = nn.LayerNorm(8), nn.Linear(8, 24)
            self.wide, self.last = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: Any) -> Any:
            batch, count, size = x.shape
            parts = self.heads(self.rows(x)).view(batch, count, 3, 2, size // 2).permute(2, 0, 3, 1, 4)
            q, k, v = parts.unbind(0)
            mask = torch.full((count, count), float("-inf")).triu(1)
            mixed = torch.softmax(q @ k.transpose(-1, -2) / 2 + mask, -1) @ v
            x = x + mixed.transpose(1, 2).reshape(batch, count, size)
            return x + self.last(nn.functional.gelu(self.wide(x)))

    return Net().eval()


def torch_lstm() -> Any:
    """An LSTM of both directions and a dense layer behind it."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = nn.LSTM(3, 4, bidirectional=True, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.cell(x)[0][:, -1])

    return Net().eval()


def _torch(dynamo: bool) -> Iterator[str]:
    import torch

    kind = "dynamo" if dynamo else "script"
    networks = {
        "net": (torch_net(), IMAGE),
        "attention": (torch_attention(), (1, 6, 8)),
        "lstm": (torch_lstm(), (1, 5, 3)),
    }
    for name, (network, shape) in networks.items():
        path = f"torch_{kind}_{name}.onnx"
        more: dict[str, Any] = (
            {"dynamo": True, "external_data": False} if dynamo else {"dynamo": False, "opset_version": 17}
        )
        torch.onnx.export(network, (torch.zeros(shape),), str(FOLDER / path), verbose=False, **more)
        slim(path)
        yield path


def slim(path: str) -> None:
    """Take the traces of Python out of a file, which say where each operator comes from."""
    import onnx

    model = onnx.load(FOLDER / path)
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        del value.metadata_props[:]
    onnx.save(model, FOLDER / path)


def torch_dynamo() -> Iterator[str]:
    yield from _torch(dynamo=True)


def torch_script() -> Iterator[str]:
    yield from _torch(dynamo=False)


def brevitas() -> Iterator[str]:
    import brevitas.nn as qnn
    import torch
    from brevitas.export import export_onnx_qcdq, export_qonnx
    from torch import nn

    torch.manual_seed(0)
    network = nn.Sequential(
        qnn.QuantIdentity(bit_width=8, return_quant_tensor=True),
        qnn.QuantConv2d(1, 4, 3, weight_bit_width=4, bias=False),
        qnn.QuantReLU(bit_width=4, return_quant_tensor=True),
        nn.Flatten(),
        qnn.QuantLinear(144, 5, bias=True, weight_bit_width=4),
    )
    for inputs in samples():
        network(torch.from_numpy(inputs))
    network.eval()
    for name, export in (("brevitas_qonnx.onnx", export_qonnx), ("brevitas_qcdq.onnx", export_onnx_qcdq)):
        export(network, args=torch.zeros(IMAGE), export_path=str(FOLDER / name), dynamo=False)
        yield name


# ONNX


def _reader() -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter([{"x": one} for one in samples()])

        def get_next(self) -> Any:
            return next(self.left, None)

    return Reader()


def _source() -> Path:
    """A float network of the TorchScript exporter as the tools below take it."""
    import onnx

    path = Path("/tmp/exporters_float.onnx")
    model = onnx.load(FOLDER / "torch_script_net.onnx")
    old = model.graph.input[0].name
    for node in model.graph.node:
        node.input[:] = ["x" if name == old else name for name in node.input]
    model.graph.input[0].name = "x"
    onnx.save(model, path)
    return path


def ort_static() -> Iterator[str]:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    kinds = {
        "qdq_s8s8": (QuantFormat.QDQ, QuantType.QInt8, QuantType.QInt8, True),
        "qdq_u8u8": (QuantFormat.QDQ, QuantType.QUInt8, QuantType.QUInt8, False),
        "qdq_u16s8": (QuantFormat.QDQ, QuantType.QUInt16, QuantType.QInt8, True),
        "qoperator_u8s8": (QuantFormat.QOperator, QuantType.QUInt8, QuantType.QInt8, False),
    }
    for name, (form, activations, weights, per_channel) in kinds.items():
        path = f"ort_{name}.onnx"
        quantize_static(
            str(_source()),
            str(FOLDER / path),
            _reader(),
            quant_format=form,
            per_channel=per_channel,
            activation_type=activations,
            weight_type=weights,
        )
        yield path


def ort_dynamic() -> Iterator[str]:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(_source()), str(FOLDER / "ort_dynamic.onnx"), weight_type=QuantType.QUInt8)
    yield "ort_dynamic.onnx"
    quantize_dynamic(
        str(FOLDER / "torch_script_lstm.onnx"), str(FOLDER / "ort_dynamic_lstm.onnx"), weight_type=QuantType.QInt8
    )
    yield "ort_dynamic_lstm.onnx"


def ort_nbits() -> Iterator[str]:
    import onnx
    from onnxruntime.quantization import QuantFormat
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    for name, form in (("ort_nbits.onnx", QuantFormat.QOperator), ("ort_nbits_qdq.onnx", QuantFormat.QDQ)):
        w = onnx.numpy_helper.from_array(RNG.normal(size=(64, 8)).astype(np.float32), "w")
        node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
        ends = [onnx.helper.make_tensor_value_info(end, 1, [2, size]) for end, size in (("x", 64), ("y", 8))]
        graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:], [w])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
        quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=name == "ort_nbits.onnx", quant_format=form)
        quantizer.process()
        onnx.save(quantizer.model.model, FOLDER / name)
        yield name


def nncf() -> Iterator[str]:
    import nncf as tool
    import onnx

    quantised = tool.quantize(onnx.load(_source()), tool.Dataset([{"x": one} for one in samples()]), subset_size=16)
    onnx.save(quantised, FOLDER / "nncf.onnx")
    yield "nncf.onnx"


def onnxslim() -> Iterator[str]:
    import onnx
    import onnxslim as tool

    onnx.save(tool.slim(str(FOLDER / "torch_script_attention.onnx")), FOLDER / "onnxslim_attention.onnx")
    yield "onnxslim_attention.onnx"


def onnxscript() -> Iterator[str]:
    import onnx
    import onnxscript as tool
    from onnxscript import FLOAT
    from onnxscript import opset17 as op

    @tool.script()  # type: ignore[untyped-decorator]
    def net(x):  # type: ignore[no-untyped-def]
        total = x * 0.5
        for turn in range(3):
            total = total + x * op.Cast(turn, to=1)
        return op.Tanh(total)

    onnx.save(
        net.to_model_proto(input_types=[FLOAT[2, 6]], output_types=[FLOAT[2, 6]]), FOLDER / "onnxscript_loop.onnx"
    )
    yield "onnxscript_loop.onnx"


def skl2onnx() -> Iterator[str]:
    import onnx
    from skl2onnx import to_onnx
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    x = RNG.normal(size=(64, 6)).astype(np.float32)
    regressor = MLPRegressor(hidden_layer_sizes=(7,), max_iter=30, random_state=0).fit(x, x[:, :2] - x[:, 2:4])
    classifier = MLPClassifier(hidden_layer_sizes=(7,), activation="tanh", max_iter=30, random_state=0).fit(
        x, (x.sum(1) > 0).astype(int)
    )
    onnx.save(to_onnx(regressor, x[:1]), FOLDER / "skl2onnx_regressor.onnx")
    yield "skl2onnx_regressor.onnx"
    found = to_onnx(classifier, x[:1], options={"zipmap": False})
    onnx.save(found, FOLDER / "skl2onnx_classifier.onnx")
    yield "skl2onnx_classifier.onnx"


def paddle2onnx() -> Iterator[str]:
    import paddle

    paddle.seed(0)
    nn = paddle.nn
    network = nn.Sequential(
        nn.Conv2D(1, 4, 3, padding=1),
        nn.BatchNorm2D(4),
        nn.Hardswish(),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    network.eval()
    spec = [paddle.static.InputSpec(list(IMAGE), "float32", "x")]
    paddle.onnx.export(network, str(FOLDER / "paddle2onnx"), input_spec=spec, opset_version=17)
    yield "paddle2onnx.onnx"


# Keras and TensorFlow


def keras_net(keras: Any) -> Any:
    """A small convolutional network."""
    layers = keras.layers
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), batch_size=1),
            layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(6.0),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, activation="softmax"),
        ]
    )


def keras3() -> Iterator[str]:
    import keras

    keras_net(keras).save(FOLDER / "keras3.keras")
    yield "keras3.keras"


def keras2() -> Iterator[str]:
    import tf_keras

    for ending in ("h5", "keras"):
        keras_net(tf_keras).save(FOLDER / f"keras2.{ending}")
        yield f"keras2.{ending}"


def _converter() -> Any:
    import keras
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_keras_model(keras_net(keras))
    converter.representative_dataset = lambda: ([one] for one in samples((1, 8, 8, 1)))
    return converter


def tensorflow() -> Iterator[str]:
    import tensorflow as tf

    ops = tf.lite.OpsSet
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "float": (None, {}),
        "float16": (None, {"supported_types": [tf.float16]}),
        "dynamic": (None, {}),
        "int8": (tf.int8, {"supported_ops": [ops.TFLITE_BUILTINS_INT8]}),
        "int16x8": (tf.int16, {"supported_ops": [ops.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8]}),
    }
    for name, (ends, spec) in kinds.items():
        converter = _converter()
        if name != "float":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if ends is None:
            converter.representative_dataset = None
        else:
            converter.inference_input_type = converter.inference_output_type = ends
        for key, value in spec.items():
            setattr(converter.target_spec, key, value)
        (FOLDER / f"tensorflow_{name}.tflite").write_bytes(converter.convert())
        yield f"tensorflow_{name}.tflite"


def ai_edge_quantizer() -> Iterator[str]:
    from ai_edge_quantizer import quantizer, recipe

    source = str(FOLDER / "tensorflow_float.tflite")
    recipes = {
        "dynamic": recipe.dynamic_wi8_afp32(),
        "static": recipe.static_wi8_ai8(),
        "static16": recipe.static_wi8_ai16(),
    }
    for name, chosen in recipes.items():
        tool = quantizer.Quantizer(source, chosen)
        found = None
        if tool.need_calibration:
            signature = next(iter(tool_signatures(source)))
            data = {signature[0]: [{signature[1]: one} for one in samples((1, 8, 8, 1))]}
            found = tool.calibrate(data)
        path = f"ai_edge_{name}.tflite"
        (FOLDER / path).write_bytes(tool.quantize(found).quantized_model)
        yield path


def tool_signatures(path: str) -> Iterator[tuple[str, str]]:
    """Signatures of a TFLite file with their first input."""
    from ai_edge_litert.interpreter import Interpreter

    for name, ends in Interpreter(path).get_signature_list().items():
        yield name, ends["inputs"][0]


def tf2onnx() -> Iterator[str]:
    import onnx
    import tensorflow as tf
    import tf2onnx as tool

    network = keras_net(__import__("tf_keras"))
    spec = [tf.TensorSpec((1, 8, 8, 1), tf.float32, "x")]
    model, _ = tool.convert.from_function(tf.function(lambda x: network(x), input_signature=spec), spec, opset=17)
    onnx.save(model, FOLDER / "tf2onnx.onnx")
    yield "tf2onnx.onnx"
    model, _ = tool.convert.from_tflite(str(FOLDER / "tensorflow_int8.tflite"), opset=17)
    onnx.save(model, FOLDER / "tf2onnx_int8.onnx")
    yield "tf2onnx_int8.onnx"


def jax2onnx() -> Iterator[str]:
    import jax.numpy as jnp
    import onnx
    from jax2onnx import to_onnx

    w = jnp.asarray(RNG.normal(size=(6, 4)), jnp.float32)
    model = to_onnx(lambda x: jnp.tanh(x @ w).mean(axis=0), [(5, 6)])
    onnx.save(model, FOLDER / "jax2onnx.onnx")
    yield "jax2onnx.onnx"


TOOLS: dict[str, tuple[Callable[[], Iterator[str]], str]] = {
    "torch.onnx (dynamo)": (torch_dynamo, "torch"),
    "torch.onnx (TorchScript)": (torch_script, "torch"),
    "Brevitas": (brevitas, "brevitas"),
    "ONNX Runtime quantize_static": (ort_static, "onnxruntime"),
    "ONNX Runtime quantize_dynamic": (ort_dynamic, "onnxruntime"),
    "ONNX Runtime matmul_nbits": (ort_nbits, "onnxruntime"),
    "NNCF": (nncf, "nncf"),
    "OnnxSlim": (onnxslim, "onnxslim"),
    "ONNX Script": (onnxscript, "onnxscript"),
    "skl2onnx": (skl2onnx, "skl2onnx"),
    "Paddle2ONNX": (paddle2onnx, "paddle2onnx"),
    "Keras 3": (keras3, "keras"),
    "Keras 2": (keras2, "tf-keras"),
    "TensorFlow's converter": (tensorflow, "tensorflow-cpu"),
    "ai-edge-quantizer": (ai_edge_quantizer, "ai-edge-quantizer"),
    "tf2onnx": (tf2onnx, "tf2onnx"),
    "jax2onnx": (jax2onnx, "jax2onnx"),
}
"""Tools by their names: what writes their files, and the package whose version is noted."""


def write(names: Sequence[str]) -> None:
    """Write the files of tools, and note them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    entries = json.loads(LIST.read_text()) if LIST.exists() else {}
    for name in names:
        make, package = TOOLS[name]
        entries |= {path: {"tool": name, "version": f"{package} {version(package)}"} for path in make()}
        LIST.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def judge() -> None:
    """Note for each file how near Dovetail's integer or float graph is to its runtime."""
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "tests")]
    from exported_models import verdict

    entries = json.loads(LIST.read_text())
    for name, entry in entries.items():
        entry["bits"] = verdict(FOLDER / name)
        print(name, entry["bits"])
    LIST.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--judge"]:
        judge()
    else:
        write(sys.argv[1:] or list(TOOLS))
