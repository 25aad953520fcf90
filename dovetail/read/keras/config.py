"""From the configuration in a Keras file, as Keras 1, 2 and 3 write it, to layers and their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from dovetail.errors import ModelError
from dovetail.read.keras.archive import KerasFile
from dovetail.read.keras.layer import KerasCall, KerasLayer, KerasNetwork, Reference
from dovetail.read.values import AGAIN, SMALLER, words

MODELS = ("Sequential", "Functional")
"""Kinds of layers that are networks."""

MAX_NESTED = 16
"""Most models and wrappers inside one another."""

MAX_LAYERS = 20_000
"""Most layers of one model."""

RENAMED = {
    **dict.fromkeys(("BatchNormalizationV1", "BatchNormalizationV2"), "BatchNormalization"),
    **{"GRUV2": "GRU", "LSTMV2": "LSTM", "Model": "Functional", "SlicingOpLambda": "TFOpLambda"},
}
"""Older names of classes, and today's."""

FLOATS = words("float32 float16 bfloat16 float64 mixed_float16 mixed_bfloat16")
"""Types and policies of layers that are read as float32."""

INTEGER_LAYERS = words("InputLayer Embedding Cast Reshape Flatten RepeatVector Permute Concatenate")


def parse(file: KerasFile) -> KerasLayer:
    """The model as a layer with a network.

    Raises:
        ModelError: the configuration contradicts itself, or holds code or a class of the user's own.
    """
    model = _layer(file, file.config, "config", 0)
    model.wrong_if(model.network is None, "the file holds a layer of this class, not a Sequential or Functional model")
    return model


def _layer(file: KerasFile, entry: Any, place: str, depth: int) -> KerasLayer:
    """One serialised layer."""

    def damaged(what: str) -> ModelError:
        hint = "save the whole model again with model.save('model.keras')"
        return ModelError(f"the configuration is damaged: {what}", where=f"{file.name}, {place}", hint=hint)

    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise damaged("expected a layer with a class_name")
    kind = str(RENAMED.get(entry["class_name"], entry["class_name"]))
    config = entry.get("config", {})
    if isinstance(config, list) and kind == "Sequential":  # as Keras wrote it before 2.2.3
        config = {"layers": config}
    if not isinstance(config, Mapping):
        raise damaged(f"the config of {kind:.80} is no object")
    name, module = config.get("name", entry.get("name", kind.lower())), entry.get("module")
    if not isinstance(name, str) or not isinstance(module, str | None):
        raise damaged(f"the name or module of {kind:.80} is no text")
    bare = module is None and file.version >= 3 and "trainable" not in config and kind not in (*MODELS, "InputLayer")
    operation = (module or "").startswith("keras.src.ops") or bare
    shared = str(entry.get("shared_object_id", ""))
    layer = KerasLayer(file.name, kind[:200], name, place, file.version, config, operation, shared)
    _refuse_code(layer, module)
    _check_type(layer)
    layer.refuse_if(depth > MAX_NESTED, f"more than {MAX_NESTED} models and wrappers lie inside one another", SMALLER)
    if kind in MODELS:
        return replace(layer, network=_network(file, layer, depth + 1))
    held = [] if operation else [key for key in ("layer", "backward_layer", "cell") if _is_layer(config.get(key))]
    return replace(layer, parts={key: _layer(file, config[key], f"{place}.{key}", depth + 1) for key in held})


def _is_layer(entry: Any) -> bool:
    return isinstance(entry, Mapping) and "class_name" in entry


def _refuse_code(layer: KerasLayer, module: str | None) -> None:
    """Nothing that is code, or needs code of the user's, is accepted."""
    hint = "say it with standard layers, and save again"
    layer.refuse_if(layer.kind == "Lambda", "a Lambda layer holds Python code, which is never executed", hint)
    own = (module or "keras").split(".")[0] not in ("keras", "builtins") or module == ""
    what = f"the class {layer.kind} of the module {(module or '')[:80]} is not one of Keras's own"
    layer.refuse_if(own, f"{what}, and no code is executed", hint)


def _check_type(layer: KerasLayer) -> None:
    """Refuse layers quantised by Keras; all floats are read as float32."""
    policy, mode = map(layer.policy.get, ("name", "mode"))
    marks = (layer.config.get("quantization_config"), layer.config.get("quantization_mode"), mode)
    odd = any(mark is not None for mark in marks) or (isinstance(policy, str) and "_from_" in policy)
    layer.refuse_if(
        odd, "the model's weights are already quantised by Keras, which is not supported", "save the float model"
    )
    is_float = policy in (None, *FLOATS) or layer.kind in INTEGER_LAYERS or layer.is_operation
    layer.refuse_if(not is_float, f"computes in {policy!s:.80}; only floats are supported")


def _network(file: KerasFile, model: KerasLayer, depth: int) -> KerasNetwork:
    """The layers of a model and how they are called."""
    entries = model.config.get("layers")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_LAYERS:
        raise model.refuse(f"a model needs a list of 1 to {MAX_LAYERS} layers", AGAIN)
    place = f"{model.place}.layers" if model.place == "config" else f"{model.place}.config.layers"
    layers = [_layer(file, entry, f"{place}[{index}]", depth) for index, entry in enumerate(entries)]
    if model.kind == "Sequential":
        return _chain(model, layers)
    for index, entry in enumerate(entries):  # they go by the name beside the configuration
        name = entry.get("name", layers[index].name)
        layers[index].wrong_if(not isinstance(name, str), "its name is no text")
        layers[index] = replace(layers[index], name=name)
    _check_names(layers)
    calls = {
        layer.name: tuple(_call(layer, node) for node in _nodes(layer, entry))
        for layer, entry in zip(layers, entries, strict=True)
    }
    first = _first_calls(layers, calls)
    counted = {
        name: tuple(replaced(call, lambda ref: _shifted(ref, first.get(ref.layer, 0))) for call in listed)
        for name, listed in calls.items()
    }
    inputs, outputs = (tuple(_ends(model, key)) for key in ("input_layers", "output_layers"))
    shifts = {layer.name: _end_shift(layer, len(calls[layer.name]), outputs, first) for layer in layers}
    return KerasNetwork(
        tuple(layers), counted, inputs, tuple(_shifted(ref, shifts.get(ref.layer, 0)) for ref in outputs)
    )


def _check_names(layers: Sequence[KerasLayer]) -> None:
    seen = set()
    for layer in layers:
        layer.wrong_if(layer.name in seen, "two layers of the model have this name")
        seen.add(layer.name)


def _chain(model: KerasLayer, layers: list[KerasLayer]) -> KerasNetwork:
    """A sequential model: each layer called with what the one before gives."""
    if layers[0].kind != "InputLayer":
        shape = layers[0].config.get("batch_input_shape", model.config.get("build_input_shape"))
        head = {"batch_shape": shape, "dtype": layers[0].config.get("dtype", "float32")}
        name = f"{layers[0].name}_input"
        layers = [KerasLayer(model.file, "InputLayer", name, layers[0].place, model.version, head), *layers]
    _check_names(layers)
    calls = {layers[0].name: ()} | {
        layer.name: (KerasCall((Reference(before.name, 0, 0),)),) for before, layer in pairwise(layers)
    }
    return KerasNetwork(tuple(layers), calls, (Reference(layers[0].name, 0, 0),), (Reference(layers[-1].name, 0, 0),))


def _nodes(layer: KerasLayer, entry: Mapping[str, Any]) -> list[Any]:
    nodes = entry.get("inbound_nodes", [])
    if not isinstance(nodes, list) or len(nodes) > MAX_LAYERS:
        raise layer.refuse(f"inbound_nodes must be a list of at most {MAX_LAYERS}", SMALLER)
    return list(nodes)


def _call(layer: KerasLayer, node: Any) -> KerasCall:
    """One call of a layer. Keras 3: {"args", "kwargs"}; before: a list of [layer, call, result, arguments]."""
    if isinstance(node, Mapping) and "args" in node:
        arguments, named = _plain(layer, node["args"]), _plain(layer, node.get("kwargs", {}))
        odd = not isinstance(arguments, list) or not isinstance(named, Mapping)
        layer.wrong_if(odd, "a call's args and kwargs must be a list and an object")
        return KerasCall(tuple(arguments), named)
    found, named = list[Any](), dict[str, Any]()
    if isinstance(node, Mapping):
        node = list(node.values())
    listed: list[Any] = [node] if _is_old_reference(node) else node if isinstance(node, list) else [None]
    for entry in listed:
        layer.wrong_if(not _is_old_reference(entry), f"a call's argument {entry!s:.80} is not [layer, call, result]")
        found.append(entry[2] if entry[0] == "_CONSTANT_VALUE" else Reference(*entry[:3]))
        if len(entry) > 3 and isinstance(entry[3], Mapping):
            named |= {key: _old_plain(value) for key, value in entry[3].items()}
    return KerasCall((found,) if len(found) > 1 else tuple(found), named)


def _is_old_reference(value: Any) -> bool:
    """A result as Keras 1 and 2 name it: [layer, call, result], perhaps with arguments by name."""
    if not isinstance(value, list) or not 3 <= len(value) <= 4 or not isinstance(value[0], str):
        return False
    return (_is_count(value[1]) and _is_count(value[2])) or value[0] == "_CONSTANT_VALUE"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_LAYERS


def _old_plain(value: Any) -> Any:
    """An argument by name in a file of Keras 2."""
    if _is_old_reference(value):
        return Reference(*value[:3])
    if isinstance(value, Mapping) and set(value) == {"start", "stop", "step"}:
        return _slice(value)
    return [_old_plain(part) for part in value] if isinstance(value, list) else value


def _slice(config: Mapping[str, Any]) -> Any:
    """A serialised slice; None where its bounds are no integers, which no index is."""
    bounds = [config.get(key) for key in ("start", "stop", "step")]
    whole = all(bound is None or (isinstance(bound, int) and abs(bound) < 1 << 31) for bound in bounds)
    return slice(*bounds) if whole else None


def _plain(layer: KerasLayer, value: Any) -> Any:
    """A serialised argument: lists, mappings, numbers, slices and references."""
    if isinstance(value, list):
        return [_plain(layer, part) for part in value]
    if not isinstance(value, Mapping):
        return value
    kind, config = value.get("class_name"), value.get("config", {})
    if kind == "__tuple__":
        return [_plain(layer, part) for part in value.get("items", [])]
    if kind is None:
        return {key: _plain(layer, part) for key, part in value.items()}
    if kind == "__keras_tensor__" and isinstance(config, Mapping) and _is_old_reference(config.get("keras_history")):
        return Reference(*config["keras_history"][:3])
    if kind == "__slice__" and isinstance(config, Mapping):
        return _slice(config)
    if kind == "__ellipsis__":
        return Ellipsis
    if kind in ("__numpy__", "__tensor__") and isinstance(config, Mapping):
        return config.get("value")
    raise layer.refuse(f"a call's argument of the kind {kind!s:.80} is not supported")


def replaced(call: KerasCall, change: Callable[[Reference], Any]) -> KerasCall:
    """A call with every reference replaced by what `change` gives for it."""

    def mapped(value: Any) -> Any:
        """The same nest with other leaves."""
        if isinstance(value, Mapping):
            return {key: mapped(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(mapped(part) for part in value)
        return change(value) if isinstance(value, Reference) else value

    return KerasCall(mapped(call.arguments), mapped(call.named))


def _shifted(ref: Reference, shift: int) -> Reference:
    return Reference(ref.layer, ref.call - shift, ref.result)


def _first_calls(layers: Sequence[KerasLayer], calls: Mapping[str, tuple[KerasCall, ...]]) -> dict[str, int]:
    """How the calls of models are counted in arguments: from 0 (Keras 3), or from 1 (before), since a model once
    counted its own definition as its first call."""
    used: dict[str, set[int]] = {}
    for ref in (ref for listed in calls.values() for call in listed for ref in call.all(Reference)):
        used.setdefault(ref.layer, set()).add(ref.call)
    modern = any(layer.version >= 3 for layer in layers)
    found = {}
    for layer in (layer for layer in layers if layer.network is not None):
        counts = used.get(layer.name, set())
        highest = max(counts, default=0) == len(calls[layer.name])
        found[layer.name] = 0 if 0 in counts or (modern and not highest) else 1
    return found


def _end_shift(layer: KerasLayer, calls: int, ends: Sequence[Reference], first: Mapping[str, int]) -> int:
    """How a layer's calls are counted among a model's outputs: those of functional models from 1 even by Keras 3."""
    counts = {ref.call for ref in ends if ref.layer == layer.name}
    if layer.network is None or 0 in counts or not counts:
        return 0
    return 1 if max(counts) == calls or layer.kind == "Functional" else first[layer.name]


def _ends(model: KerasLayer, key: str) -> list[Reference]:
    """A model's inputs or outputs: one, a list or a mapping of [layer, call, result]."""

    def flat(value: Any) -> list[Reference]:
        """Every reference in a nest, in order."""
        if _is_old_reference(value):
            return [Reference(*value[:3])]
        if isinstance(value, Mapping):
            value = [value[name] for name in sorted(value)]
        if not isinstance(value, list):
            raise model.refuse(f"{key} must name results of layers, not {value!s:.80}", AGAIN)
        return [ref for part in value for ref in flat(part)]

    found = flat(model.config.get(key))
    model.wrong_if(not found, f"{key} is empty")
    return found
