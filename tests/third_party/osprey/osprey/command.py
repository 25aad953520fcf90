"""`dovetail wingspan`: operators of a model on a target, with options of `dovetail compile`."""

from __future__ import annotations

from typing import Annotated

from dovetail.cli.console import progress, say
from dovetail.cli.options import Model, TargetName
from dovetail.options import Options


def wingspan(model: Model, target: TargetName, options: Annotated[Options, "optimize", "settings"]) -> None:
    """Count the layers of a model.

    Example: dovetail wingspan net.onnx --target osprey --optimize size
    """
    with progress("compiling"):
        from dovetail.compile import compile_model
        from dovetail.target.registry import load_target

        compiled = compile_model(model, load_target(target), options)
    say(f"{len(compiled.regions)} layers for {options.optimize}")
