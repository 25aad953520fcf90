"""From a QDQ graph, which means floats, to an integer graph, in which every rounding is spelled out."""

from dovetail.quantize.lowering import quantize

__all__ = ["quantize"]
