"""Reads an ONNX file into plain, checked data: versions, external data and model-local functions come first, then
ONNX's own checker, then decoding. No access to the protobuf is trusted after this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.onnx_wire import elements_of, without_large
from dovetail.ir.types import Array, DType, Shape, TensorType
from dovetail.notes import Kind, Note, Tell
from dovetail.read.values import MAX_ELEMENTS, Refusing
from dovetail.records import Record, field

IR_VERSIONS = (3, 14)
"""Oldest and newest file format read."""

OPSETS = {**dict.fromkeys(("", "ai.onnx"), (7, 28)), "com.microsoft": (1, 1)}
"""Oldest and newest version of the operators of a domain read: the standard ones, ONNX Runtime's own."""

MAX_NODES = 100_000
"""Most operators, initialisers or inputs of a model, model-local functions expanded."""

DTYPES: Mapping[str, DType] = {
    "FLOAT": DType.FLOAT32,
    "BOOL": DType.BOOL,
    **{kind.text.upper(): kind for kind in DType if kind.is_integer},
}
"""Element types by their names in ONNX."""

FIX_SHAPES = "give its sizes, for instance --shape {name}={sizes}"
"""Advice for a model with symbolic sizes."""

"""Is told in a sentence what was taken for granted."""


class Constant(Record):
    """A tensor known at compile time."""

    array: Array
    """Elements; int2 and int4 in int8, uint2 and uint4 in uint8."""
    dtype: DType | None
    """None for a type no value of a graph can have (float64, float16, string): such a constant can only be folded."""


class OnnxNode(Record):
    """One operator of the model."""

    index: int
    name: str
    domain: str
    """"" for the standard operators."""
    op_type: str
    inputs: tuple[str, ...]
    """"" for an absent optional operand."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    """Numbers, strings, tuples of them, `Constant` for tensors."""


class Subgraph(Record):
    """A graph within an operator: what a loop repeats, or one way of a condition."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Constant]
    nodes: tuple[OnnxNode, ...]


class OnnxFile(Record):
    """A whole model."""

    name: str
    """File name, for messages."""
    opsets: Mapping[str, int]
    """Version per domain."""
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[tuple[str, TensorType | None], ...]
    """Names, and their types where the model declares fixed ones."""
    constants: Mapping[str, Constant]
    nodes: tuple[OnnxNode, ...]
    types: Mapping[str, TensorType] = field(default_factory=dict)
    """Types the file declares of values on the way."""


def read_onnx(name: str, data: bytes, folder: Path, shapes: Mapping[str, Shape], tell: Tell) -> OnnxFile:
    """Decode and check the bytes of the file `name`; external data must lie in `folder`.

    Args:
        name: of the file. data: its bytes. folder: where it lies.
        shapes: of inputs whose sizes the model leaves open.
        tell: is told what was taken for granted.

    Raises:
        ModelError: the file is damaged, or holds something outside the limits above.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    model = onnx.ModelProto()
    damaged = (DecodeError, ValueError, TypeError, RuntimeError, KeyError, IndexError, OverflowError)
    try:
        slim, large = without_large(data)
        model.ParseFromString(slim)
        return _OnnxReader(name, folder, large, tell).read(model, shapes)
    except (*damaged, onnx.checker.ValidationError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"the ONNX file is damaged or invalid: {reason:.300}"
        raise ModelError(what, where=name, hint="export the model again") from error


class _OnnxReader(Refusing):
    """Decodes one file. `large` has the contents of large initializers, which are empty in the model (an
    onnx.ModelProto), by name, and gains those of external data. Methods raise ModelError, or one of the errors a
    damaged file gives."""

    def __init__(self, name: str, folder: Path, large: dict[str, Array], tell: Tell) -> None:
        self.name, self.folder, self.large, self.tell = name, folder, large, tell

    @property
    def where(self) -> str:
        return self.name

    def read(self, model: Any, shapes: Mapping[str, Shape]) -> OnnxFile:
        """The model as plain data, once it has passed ONNX's checker."""
        from onnx import inliner

        self.check_versions(model)
        for what, entries in (("operators", "node"), ("initialisers", "initializer")):
            count = sum(len(getattr(graph, entries)) for graph in graphs(model))
            hint = "split the model, or simplify it first"
            self.refuse_if(count > MAX_NODES, f"the model has {count} {what}; the limit is {MAX_NODES}", hint)
        sparse = any(graph.sparse_initializer for graph in graphs(model))
        self.refuse_if(sparse, "the model has sparse initialisers", "store the weights dense")
        if model.functions:
            self.check_functions(model)
            model = inliner.inline_local_functions(model)
        for tensor in all_tensors(model):
            what = f"tensor {tensor.name!r} has the shape {list(tensor.dims)}; the limit is {MAX_ELEMENTS} elements"
            if min(tensor.dims, default=1) < 0 or prod(tensor.dims) >= MAX_ELEMENTS:
                raise self.refuse(what, "export the model again; its tensors are too large or damaged")
        self.read_external(model)
        self.check(model)
        self.widen(model)
        self.fix_shapes(model, shapes)
        return self.decode(model)

    def check(self, model: Any) -> None:
        """Hold the model to ONNX's checker, but for what runtimes take: an operator of the standard domain that is not
        standard, an output whose shape is not said, a domain without a version, as Brevitas leaves out its own."""
        import onnx

        other, standard = "dovetail.unknown", ("", "ai.onnx")
        nodes = [node for graph in graphs(model) for node in graph.node]
        unknown = [n for n in nodes if n.domain in standard and not onnx.defs.has(n.op_type)]
        bare = [out.type.tensor_type for out in model.graph.output if out.type.HasField("tensor_type")]
        bare = [kind for kind in bare if not kind.HasField("shape")]
        for node in unknown:
            node.domain = other
        for kind in bare:
            kind.shape.SetInParent()
        known = {entry.domain or "ai.onnx" for entry in model.opset_import}
        used = dict.fromkeys(node.domain for node in nodes)
        lacking = [domain for domain in used if domain not in (*known, *standard)]
        model.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in lacking)
        onnx.checker.check_model(model)
        for node in unknown:
            node.domain = ""
        for kind in bare:
            kind.ClearField("shape")

    def check_versions(self, model: Any) -> None:
        """File format and operator versions are in the ranges read."""
        low, high = IR_VERSIONS
        what = f"ONNX IR version {model.ir_version} is not supported, only {low} to {high}"
        hint = "export the model again with a current version of its exporter"
        self.refuse_if(not low <= model.ir_version <= high, what, hint)
        for entry in model.opset_import:
            low, high = OPSETS.get(entry.domain, (0, 2**63))
            what = f"operator set {entry.domain or 'ai.onnx'} version {entry.version} is not supported"
            hint = "convert it with onnx.version_converter, or export with another opset_version"
            self.refuse_if(not low <= entry.version <= high, f"{what}, only {low} to {high}", hint)

    def check_functions(self, model: Any) -> None:
        """Functions do not call themselves, and expand to a bounded number of operators."""
        bodies = {(entry.domain, entry.name): entry for entry in model.functions}
        sizes: dict[tuple[str, str], int] = {}

        def expanded(nodes: Any, depth: int) -> int:
            """Operators that nodes are, with functions written out."""
            total = 0
            for key in ((node.domain, node.op_type) for node in nodes):
                what = f"the model-local function {key[1]!r} is nested too deep or calls itself"
                self.refuse_if(key in bodies and depth > 50, what, "export the model without model-local functions")
                if key in bodies and key not in sizes:
                    sizes[key] = expanded(bodies[key].node, depth + 1)
                total += sizes.get(key, 1)
            return total

        total = expanded(model.graph.node, 0)
        what = f"the model's functions expand to {total} operators; the limit is {MAX_NODES}"
        self.refuse_if(total > MAX_NODES, what, "export the model without model-local functions, or a smaller one")

    def read_external(self, model: Any) -> None:
        """Bring external data into the tensors; only files inside the model's folder are read."""
        from onnx import TensorProto

        total, initializers = 0, len(model.graph.initializer)
        for place, tensor in enumerate(all_tensors(model)):
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            data = self.external_bytes(tensor.name, {entry.key: entry.value for entry in tensor.external_data})
            total += len(data)
            what = f"the external data takes more than {MAX_ELEMENTS} bytes"
            self.refuse_if(total >= MAX_ELEMENTS, what, "compile a smaller network")
            array = elements_of(data, tensor.data_type, tensor.dims) if place < initializers else None
            if array is None or tensor.name in self.large:
                tensor.raw_data = data
            else:
                self.large[tensor.name] = array
                tensor.dims[:] = [0]
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]

    def external_bytes(self, tensor: str, entries: Mapping[str, str]) -> bytes:
        """The bytes of one tensor kept in another file."""
        location, root = entries.get("location", ""), self.folder.resolve()
        path = (root / location).resolve()
        what, hint = f"tensor {tensor!r} keeps its data in {location!r}", "put the data file beside the model"
        if not location or Path(location).is_absolute() or not path.is_relative_to(root):
            raise self.refuse(f"{what}, outside the model's folder", f"{hint}, and refer to it by a relative name")
        self.refuse_if(not path.is_file(), f"{what}, which does not exist", hint)
        size, offset = path.stat().st_size, int(entries.get("offset", "0"))
        length = int(entries.get("length", size - offset))
        what = f"tensor {tensor!r} wants bytes {offset} to {offset + length} of {location!r}, which has {size}"
        hint = "copy the data file again, or export the model again"
        self.refuse_if(offset < 0 or length < 0 or offset + length > size, what, hint)
        with path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(length)

    def widen(self, model: Any) -> None:
        """Take float16 and bfloat16 as float32, inputs and outputs too: the core has no narrower floats."""
        from onnx import TensorProto, numpy_helper

        narrow, every = (TensorProto.FLOAT16, TensorProto.BFLOAT16), list(graphs(model))
        tensors = [tensor for tensor in all_tensors(model) if tensor.data_type in narrow]
        ends = [entry for graph in every for entry in (*graph.input, *graph.output, *graph.value_info)]
        entries = [entry.type.tensor_type for entry in ends]
        declared = [entry for entry in entries if entry.elem_type in narrow]
        for tensor in tensors:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
        for entry in declared:
            entry.elem_type = TensorProto.FLOAT
        for attribute in (attribute for graph in every for node in graph.node for attribute in node.attribute):
            if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in narrow:
                attribute.i = TensorProto.FLOAT
        if tensors or declared:
            self.tell(Note(Kind.WIDENED, f"{self.name}: its 16-bit floats are computed, taken and given as float32"))

    def fix_shapes(self, model: Any, shapes: Mapping[str, Shape]) -> None:
        """Fix the sizes of the inputs: as asked, else the batch taken as 1. A name that stands for a size in several
        places has the same one everywhere."""
        constants = {entry.name for entry in model.graph.initializer}
        inputs = {entry.name: entry for entry in model.graph.input if entry.name not in constants}
        named: dict[str, int] = {}
        for wanted, shape in shapes.items():
            sizes, place = _sizes(inputs[wanted]) if wanted in inputs else None, f"{self.name}, --shape {wanted}"
            if sizes is None or len(sizes) != len(shape):
                what = f"has no input {wanted!r}" if sizes is None else f"gives the input {wanted!r} {len(sizes)} sizes"
                hint = f"its inputs are {', '.join(f'{other}{_sizes(inputs[other])}' for other in inputs)}"
                raise ModelError(f"the model {what}", where=place, hint=hint)
            for given, size in zip(sizes, shape, strict=True):
                if (given if isinstance(given, int) else named.get(given, size)) != size:
                    what = f"{given} of the shape {sizes} of the input {wanted!r} cannot be {size}"
                    raise ModelError(what, where=place, hint="give another shape")
                named |= {given: size} if isinstance(given, str) and given != "?" else {}
        for own, entry in inputs.items():
            dims, (batch, *_) = entry.type.tensor_type.shape.dim, _sizes(entry) or [""]
            if own in shapes:
                _fix(entry, dict(enumerate(shapes[own])))
            elif dims and not dims[0].HasField("dim_value") and batch not in named:
                what = f"{self.name}: the batch {batch!r} of the input {own!r} is taken as 1; --shape gives another"
                self.tell(Note(Kind.ASSUMED, what))
                named |= {str(batch): 1} if batch != "?" else {}
                _fix(entry, {0: 1})
        for entry in (*inputs.values(), *model.graph.output):
            sizes = _sizes(entry) if entry.type.HasField("tensor_type") else []
            _fix(entry, {place: named[str(size)] for place, size in enumerate(sizes) if size in named})

    def decode(self, model: Any) -> OnnxFile:
        """The model as plain data."""
        graph = model.graph
        constants = {
            _text(entry.name): wrap(self.large[entry.name], element_type(entry.data_type))
            if entry.name in self.large and list(entry.dims) == [0]
            else decode_tensor(entry)
            for entry in graph.initializer
        }
        inputs = tuple(self.input(entry) for entry in graph.input if entry.name not in constants)
        outputs = tuple((_text(entry.name), _declared(entry)) for entry in graph.output)
        nodes = tuple(self.node(index, node) for index, node in enumerate(graph.node))
        opsets = {entry.domain if entry.domain != "ai.onnx" else "": entry.version for entry in model.opset_import}
        declared = ((entry.name, _declared(entry)) for entry in graph.value_info)
        types = {name: kind for name, kind in declared if kind is not None}
        return OnnxFile(self.name, opsets, inputs, outputs, constants, nodes, types)

    def input(self, entry: Any) -> tuple[str, TensorType]:
        """An input, whose type must be fixed."""
        stem, found = f"input {entry.name!r}", _declared(entry)
        hint = "export the model again with a tensor of fixed shape there"
        self.refuse_if(not _is_tensor(entry), f"{stem} is not a tensor with a known rank", hint)
        odd = element_type(entry.type.tensor_type.elem_type) is None
        hint = "use float32, int8, uint8, int16, int32, int64 or bool"
        self.refuse_if(odd, f"{stem} has an element type that is not supported", hint)
        if found is None:
            sizes = _sizes(entry)
            example = [size if isinstance(size, int) else 32 if place else 1 for place, size in enumerate(sizes)]
            hint = FIX_SHAPES.format(name=entry.name, sizes=",".join(map(str, example)))
            raise self.refuse(f"{stem} has the shape {sizes}, which is not fixed", hint)
        what = f"{stem} has {found.elements} elements; the limit is {MAX_ELEMENTS}"
        self.refuse_if(found.elements >= MAX_ELEMENTS, what, "give it a smaller fixed shape")
        return _text(entry.name), found

    def node(self, index: int, node: Any) -> OnnxNode:
        """One operator."""
        domain = "" if node.domain == "ai.onnx" else _text(node.domain)
        inputs, outputs = tuple(map(_text, node.input)), tuple(map(_text, node.output))
        attributes = {entry.name: self.attribute(node, entry) for entry in node.attribute}
        return OnnxNode(index, _text(node.name), domain, _text(node.op_type), inputs, outputs, attributes)

    def body(self, graph: Any) -> Subgraph:
        """A graph within an operator."""
        inputs, outputs = (tuple(_text(entry.name) for entry in ends) for ends in (graph.input, graph.output))
        constants = {_text(entry.name): decode_tensor(entry) for entry in graph.initializer}
        nodes = tuple(self.node(index, node) for index, node in enumerate(graph.node))
        return Subgraph(inputs, outputs, constants, nodes)

    def attribute(self, node: Any, entry: Any) -> Any:
        """The value of an attribute."""
        from onnx import AttributeProto, TensorProto, helper

        if entry.type == AttributeProto.GRAPH:
            return self.body(entry.g)
        inner = entry.type == AttributeProto.GRAPHS
        self.refuse_if(
            inner, f"{node.op_type} {node.name!r} has several bodies in {entry.name}, which is not supported"
        )
        value = helper.get_attribute_value(entry)
        if isinstance(value, TensorProto):
            return decode_tensor(value)
        if isinstance(value, bytes):
            return value.decode("utf-8")
        return tuple(value) if isinstance(value, list) or hasattr(value, "extend") else value


def element_type(number: int) -> DType | None:
    """Our element type for an ONNX one."""
    from onnx import TensorProto

    return DTYPES.get(TensorProto.DataType.Name(number)) if number else None


def decode_tensor(tensor: Any) -> Constant:
    """An ONNX tensor as a constant."""
    from onnx import numpy_helper

    return wrap(np.asarray(numpy_helper.to_array(tensor)), element_type(tensor.data_type))


def wrap(array: Array, dtype: DType | None) -> Constant:
    """A constant of `dtype` in the numpy type that holds it."""
    return Constant(array if dtype is None else array.astype(dtype.numpy, copy=False), dtype)


def _is_tensor(entry: Any) -> bool:
    return bool(entry.type.HasField("tensor_type") and entry.type.tensor_type.HasField("shape"))


def _sizes(entry: Any) -> list[int | str]:
    """Declared sizes; a name or "?" for one that is not fixed."""
    dims = entry.type.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else d.dim_param or "?" for d in dims]


def _fix(entry: Any, sizes: Mapping[int, int]) -> None:
    """Fix the sizes of some axes."""
    for place, size in sizes.items():
        entry.type.tensor_type.shape.dim[place].dim_value = size


def _declared(entry: Any) -> TensorType | None:
    """The declared type of an input or output, where it is fixed."""
    if not _is_tensor(entry):
        return None
    dtype, sizes = element_type(entry.type.tensor_type.elem_type), _sizes(entry)
    fixed = tuple(size for size in sizes if isinstance(size, int))
    return TensorType(fixed, dtype) if dtype is not None and len(fixed) == len(sizes) else None


def _text(value: object) -> str:
    """A name; protobuf gives bytes for one that is not UTF-8."""
    if not isinstance(value, str) or "\x00" in value:
        raise ValueError(f"the name {value!r} is not text")
    return value


def graphs(model: Any) -> Iterator[Any]:
    """The model's graph, and those within its operators."""
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting += [entry.g for node in graph.node for entry in node.attribute if entry.HasField("g")]


def all_tensors(model: Any) -> Iterator[Any]:
    """Every tensor stored in the model's graphs and their nodes' attributes, those of the first graph first."""
    for graph in graphs(model):
        yield from graph.initializer
        for entry in (entry for node in graph.node for entry in node.attribute):
            if entry.HasField("t"):
                yield entry.t
            yield from entry.tensors
