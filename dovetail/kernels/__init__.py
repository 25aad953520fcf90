"""C99 kernels that compute a region of the integer graph on the core."""

from dovetail.kernels.compact import BLOCK
from dovetail.kernels.core import generate, supports, unused_instructions
from dovetail.kernels.epilogue import is_pointwise
from dovetail.kernels.helpers import HELPERS, helper_source, needed_helpers
from dovetail.kernels.kernel import CoreKernel, Optimize, Parameter
from dovetail.kernels.sharing import block_members, block_type, generate_compact

__all__ = [
    "BLOCK",
    "HELPERS",
    "CoreKernel",
    "Optimize",
    "Parameter",
    "block_members",
    "block_type",
    "generate",
    "generate_compact",
    "helper_source",
    "is_pointwise",
    "needed_helpers",
    "supports",
    "unused_instructions",
]
