"""The hardware that Dovetail comes with, a module or a folder each. `load_target` finds it, and others', by name."""

from dovetail import plugins
from dovetail.target.registry import load_target

__all__ = ["BUILT_IN", "load_target"]

BUILT_IN = {name: point.value for name, point in plugins.bundled(plugins.TARGETS).items()}
"""The targets in this package: name -> module and variable. The microcontrollers of `parts.PARTS` are targets too."""
