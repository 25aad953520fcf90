"""Calibrate: from a float network and data to a quantised one that a target takes, and how much that costs.

`quantise_network` is the table of contents. The result is in QDQ form, which the quantize stage takes.
"""

from dovetail.calibrate.calibration import Settings, named_widths
from dovetail.calibrate.data import Preprocessing, Samples, read_samples
from dovetail.calibrate.prepare import prepare
from dovetail.calibrate.quantiser import Quantised, quantise_network
from dovetail.calibrate.ranges import Method

__all__ = [
    "Method",
    "Preprocessing",
    "Quantised",
    "Samples",
    "Settings",
    "named_widths",
    "prepare",
    "quantise_network",
    "read_samples",
]
