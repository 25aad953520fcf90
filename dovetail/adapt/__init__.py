"""Adapt: bring the integer graph into the form a target takes.

The rewrites here are tools a target chooses from; which it uses, and when, is said in its policies.
"""

from __future__ import annotations

from collections.abc import Callable

from dovetail.adapt.borders import even_borders
from dovetail.adapt.converter import ConverterLimits, through_converter
from dovetail.adapt.engine_requantisation import RequantisationLimits, engine_requantisation, split_bias
from dovetail.adapt.narrow import narrow_weights
from dovetail.adapt.patches import convolution_as_patches, stride_as_slice
from dovetail.adapt.residual import addition_as_convolution
from dovetail.adapt.shifts import addition_by_shift, dense_results_of
from dovetail.adapt.unsigned import unsigned_activations
from dovetail.graph.graph import Graph
from dovetail.target.description import Policy

Stage = Callable[[str, Graph, int], None]
"""Told the name of each rewrite, the graph after it, and how far a value may have moved."""


def adapt(graph: Graph, policy: Policy, done: Stage | None = None) -> Graph:
    """The graph after every rewrite of a policy, in its order."""
    for rewrite in policy.rewrites:
        graph = rewrite.apply(graph)
        if done is not None:
            done(rewrite.name, graph, rewrite.lsb)
    return graph


__all__ = [
    "ConverterLimits",
    "RequantisationLimits",
    "adapt",
    "addition_as_convolution",
    "addition_by_shift",
    "convolution_as_patches",
    "dense_results_of",
    "engine_requantisation",
    "even_borders",
    "narrow_weights",
    "split_bias",
    "stride_as_slice",
    "through_converter",
    "unsigned_activations",
]
