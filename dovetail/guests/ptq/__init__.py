"""Quantise a network after training: a float model, or a quantised one anew, and data give one that a target takes.

`network.quantise_network` is the table of contents. The result is in QDQ form, which the quantize stage takes.
"""

from typing import TYPE_CHECKING

from dovetail.names import names

if TYPE_CHECKING:
    from dovetail.guests.ptq.calibration import finds_two_bits as finds_two_bits
    from dovetail.guests.ptq.calibration import named_activations as named_activations
    from dovetail.guests.ptq.calibration import named_widths as named_widths
    from dovetail.guests.ptq.data import Samples as Samples
    from dovetail.guests.ptq.data import read_samples as read_samples
    from dovetail.guests.ptq.data import unscaled as unscaled
    from dovetail.guests.ptq.network import QuantisedNetwork as QuantisedNetwork
    from dovetail.guests.ptq.network import quantise_network as quantise_network
    from dovetail.guests.ptq.preparation import input_steps as input_steps
    from dovetail.guests.ptq.preparation import is_quantised as is_quantised
    from dovetail.guests.ptq.preparation import prepare as prepare
    from dovetail.guests.ptq.sequences import with_tables as with_tables
    from dovetail.guests.ptq.settings import Method as Method
    from dovetail.guests.ptq.settings import Preprocessing as Preprocessing
    from dovetail.guests.ptq.settings import Settings as Settings

__getattr__ = names(
    __name__,
    {
        "dovetail.guests.ptq.calibration": ("finds_two_bits", "named_activations", "named_widths"),
        "dovetail.guests.ptq.data": ("Samples", "read_samples", "unscaled"),
        "dovetail.guests.ptq.network": ("QuantisedNetwork", "quantise_network"),
        "dovetail.guests.ptq.sequences": ("with_tables",),
        "dovetail.guests.ptq.settings": ("Method", "Preprocessing", "Settings"),
        "dovetail.guests.ptq.preparation": ("input_steps", "is_quantised", "prepare"),
    },
    Quantised="dovetail.guests.ptq.network.QuantisedNetwork",
)
