"""What public VTA hardware does with what Dovetail emits: prints tables; --write puts them into docs/figures.

    python scripts/vta_hardware.py [accuracy | launches ...] [--orders 20] [--write]

accuracy   decisions and logits of networks against TensorFlow Lite Micro, for each way to requantise
launches   every launch of networks and of ResNet-18's convolutions, for every configuration, run by
           ../shared/hardware/vta_strict.py, which does what the HLS and the Chisel sources do; takes some ten minutes

Needs ../shared.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = REPOSITORY.parent / "shared" / "models"
STRICT = REPOSITORY.parent / "shared" / "hardware" / "vta_strict.py"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "scripts")]

from tables import Rows, show, write  # noqa: E402

from dovetail.codegen.emit.dump import dump  # noqa: E402
from dovetail.compile import Compiled, Options, compile_graph, compile_model, sample_inputs  # noqa: E402
from dovetail.guests import zoo  # noqa: E402
from dovetail.ir.graph import Graph, evaluate  # noqa: E402
from dovetail.ir.operators.activation import FixedSoftmax  # noqa: E402
from dovetail.ir.rewrite import simplify  # noqa: E402
from dovetail.legalize import adapt, engine_requantisation  # noqa: E402
from dovetail.legalize.requantisation import Accepts  # noqa: E402
from dovetail.quantize import quantize  # noqa: E402
from dovetail.read import load_model, own_rounding  # noqa: E402
from dovetail.target.description import Policy  # noqa: E402
from dovetail.targets.vta import requantisation_limits, takes, target  # noqa: E402
from dovetail.targets.vta.config import PRESETS, VtaConfig  # noqa: E402
from vta_layers import RESNET, graph_of, resnet_layer  # noqa: E402

NETWORKS = ("ad_autoencoder", "ic_resnet8", "kws_dscnn", "vww_mobilenetv1")
CLASSIFIERS = NETWORKS[1:]
INPUTS = 12
CONFIGURATIONS: Mapping[str, VtaConfig] = {
    "default": VtaConfig(),
    "block 8": VtaConfig(block=8, uop_bytes=16384, inp_bytes=16384, wgt_bytes=65536, acc_bytes=65536),
    "block 32": VtaConfig(block=32, wgt_bytes=524288),
    "halved memories": VtaConfig(uop_bytes=16384, inp_bytes=16384, wgt_bytes=131072, acc_bytes=65536),
    "mixed memories": VtaConfig(uop_bytes=8192, inp_bytes=65536, wgt_bytes=65536),
    "batch 2": VtaConfig(batch=2),
    "de10nano": PRESETS["de10nano"],
    "fsim": PRESETS["fsim"],
}
"""What the launches are made for: the default, sizes other than the public ones, and other hardware."""
HARDWARE = {"de10nano": "chisel", "fsim": "fsim"}
"""What `vta_strict.py` is told; "hls" where nothing is said."""


def network(name: str) -> Path:
    """The int8 file of one of NETWORKS."""
    return MODELS / "mlperf_tiny" / f"{name}_int8.tflite"


@dataclass(frozen=True)
class Agreement:
    """A network's answers beside TensorFlow Lite Micro's."""

    agreed: int
    """Inputs with the same decision."""
    largest: int
    """Largest difference before the softmax, in steps of the logits."""
    mean: float
    """Root mean square of the differences."""


def ways() -> Mapping[str, Policy]:
    """How networks are requantised."""
    shifts, product = (target(PRESETS[preset]).policy(None) for preset in ("pynq", "fsim"))
    limits = requantisation_limits(PRESETS["pynq"])

    def other(chosen: Accepts | None) -> Policy:
        """The policy without a product, digits of scales in chosen layers."""
        first = replace(shifts.rewrites[0], apply=engine_requantisation(takes, limits, chosen))
        return replace(shifts, rewrites=(first, *shifts.rewrites[1:]))

    return {
        "one shift, the rest in the weights": other(None),
        "the same, digits in dense layers (the default)": shifts,
        "the same, digits wherever weights lose much": other(lambda types, node: True),
        "MUL and a shift (fsim)": product,
    }


def agreement(name: str, policy: Policy) -> Agreement:
    """One of CLASSIFIERS, its integer graph as a policy makes it (the firmware equals it)."""
    graph = quantize(simplify(load_model(network(name))), own_rounding(network(name)))
    made = adapt(with_logits(graph), policy)
    agreed, differences = 0, []
    with np.load(MODELS / "mlperf_tiny" / f"{name}_int8.many.npz") as reference:
        for number in range(INPUTS):
            found = evaluate(made, {made.inputs[0]: reference[f"in_{number}"]})
            answer, logits = (found[value].reshape(-1) for value in made.outputs)
            wanted = reference[f"out_{number}__tflm"].reshape(-1)
            agreed += bool(wanted[answer.argmax()] == wanted.max())
            if f"pretail_{number}__tflm" in reference:
                differences.append(logits - reference[f"pretail_{number}__tflm"].reshape(-1).astype(np.int64))
    every = np.abs(np.concatenate(differences))
    return Agreement(agreed, int(every.max()), float(np.sqrt((every**2).mean())))


def with_logits(graph: Graph) -> Graph:
    """The graph with the value before a final softmax as a second output."""
    logits = [node.inputs[0] for node in graph.nodes if isinstance(node.operator, FixedSoftmax)]
    return replace(graph, outputs=(*graph.outputs, *logits))


def accuracy(_: int) -> Rows:
    """The table of decisions and logits."""
    rows: list[tuple[object, ...]] = [
        ("network", "requantised by", "decisions as TFLM", "largest difference", "root mean square")
    ]
    for name in CLASSIFIERS:
        for how, policy in ways().items():
            found = agreement(name, policy)
            cells = (f"{found.agreed} of {INPUTS}", f"{found.largest} steps", f"{found.mean:.2f} steps")
            rows.append((name, how, *cells))
            print(*rows[-1], sep=", ", flush=True)
    return rows


def strict() -> ModuleType:
    """The executor of the hardware's rules."""
    spec = importlib.util.spec_from_file_location("vta_strict", STRICT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replayed(judge: ModuleType, compiled: Compiled, name: str, orders: int) -> tuple[int, bool]:
    """Launches of one inference, and whether all are right on the configuration's hardware."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump"
        count = dump(compiled.unit, sample_inputs(compiled.graph), path)
        return count, bool(judge.replay(path, HARDWARE.get(name, "hls"), orders))


def launches(orders: int) -> Rows:
    """The table of launches."""
    judge = strict()
    models = {name: network(name).read_bytes() for name in NETWORKS} | {"mobilenet_v1": zoo.build("mobilenet_v1")}
    rows: list[tuple[str, ...]] = [("network", *CONFIGURATIONS)]
    for name, content in models.items():
        cells = []
        for key, config in CONFIGURATIONS.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{name}{'.onnx' if name == 'mobilenet_v1' else '.tflite'}"
                path.write_bytes(content)
                compiled = compile_model(path, target(config), Options())
            count, right = replayed(judge, compiled, key, orders)
            cells.append(f"{count} right" if right else "WRONG")
        rows.append((name, *cells))
        print(*rows[-1], sep=", ", flush=True)
    counts = []
    for layer in RESNET:
        for bias in (False, True):
            compiled = compile_graph(graph_of(resnet_layer(layer, bias)), target(VtaConfig()), Options())
            counts.append(replayed(judge, compiled, "default", orders))
    right = all(each for _, each in counts)
    rows.append(("ResNet-18 C2 to C11", f"{sum(n for n, _ in counts)} {'right' if right else 'WRONG'}", *["-"] * 7))
    return rows


SECTIONS: Mapping[str, Callable[[int], Rows]] = {"accuracy": accuracy, "launches": launches}


def main() -> None:
    """Print the sections that the command line names; write them with --write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="which; all if not given")
    parser.add_argument("--orders", type=int, default=20, help="random orders that the tokens allow, per launch")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    for name in given.sections or SECTIONS:
        table = {f"vta_{name}": SECTIONS[name](given.orders)}
        show(table)
        if given.write:
            write(table, f"python scripts/vta_hardware.py {name}")


if __name__ == "__main__":
    main()
