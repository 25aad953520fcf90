"""Adapt: bring the integer graph into the form a target takes.

The rewrites here are tools a target chooses from; which it uses, and when, is said in its policies.
"""

from __future__ import annotations

from dovetail.documented import document
from dovetail.ir.requantisation.engine import RequantisationLimits
from dovetail.legalize.additions import addition_as_convolution, addition_by_shift
from dovetail.legalize.attention import attention_of_bits
from dovetail.legalize.bands import (
    first_layer_in_bands,
    last_layer_in_parts,
    moves_before_offset,
    patches_in_bands,
)
from dovetail.legalize.dilation import without_dilation
from dovetail.legalize.layers import (
    convolution_as_im2col,
    dense_results_of,
    even_borders,
    narrow_weights,
    stride_as_slice,
)
from dovetail.legalize.matrices import dense_as_convolution, products_of_bits, views_first
from dovetail.legalize.narrow import narrow_activations
from dovetail.legalize.pixels import pixels_as_one, windows_as_one
from dovetail.legalize.pools import (
    average_pool_as_depthwise,
    average_pool_in_bands,
    average_pool_in_channels,
    pools_as_depthwise,
    pools_in_words,
)
from dovetail.legalize.ready import READY, Requantisation
from dovetail.legalize.requantisation import ConverterLimits, engine_requantisation, split_bias, through_converter
from dovetail.legalize.spans import bands_ahead, bands_behind, soonest
from dovetail.legalize.stretched import without_zeros
from dovetail.legalize.together import results_together
from dovetail.legalize.unsigned import unsigned_activations
from dovetail.target.adapt import adapt

__all__ = [
    "READY",
    "ConverterLimits",
    "Requantisation",
    "RequantisationLimits",
    "adapt",
    "addition_as_convolution",
    "addition_by_shift",
    "attention_of_bits",
    "average_pool_as_depthwise",
    "average_pool_in_bands",
    "average_pool_in_channels",
    "bands_ahead",
    "bands_behind",
    "convolution_as_im2col",
    "dense_as_convolution",
    "dense_results_of",
    "engine_requantisation",
    "even_borders",
    "first_layer_in_bands",
    "last_layer_in_parts",
    "moves_before_offset",
    "narrow_activations",
    "narrow_weights",
    "patches_in_bands",
    "pixels_as_one",
    "pools_as_depthwise",
    "pools_in_words",
    "products_of_bits",
    "results_together",
    "soonest",
    "split_bias",
    "stride_as_slice",
    "through_converter",
    "unsigned_activations",
    "views_first",
    "windows_as_one",
    "without_dilation",
    "without_zeros",
]

document(__name__)
