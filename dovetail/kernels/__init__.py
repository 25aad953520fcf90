"""C99 kernels that compute a region of the integer graph on the core."""

from dovetail.kernels.core import generate, may_overwrite, supports, unused_instructions
from dovetail.kernels.epilogue import is_pointwise
from dovetail.kernels.helpers import HELPERS, helper_source, needed_helpers
from dovetail.kernels.kernel import BLOCK, Block, CoreKernel, Optimize, Parameter
from dovetail.kernels.scope import CoreTraits
from dovetail.kernels.sharing import generate_all

__all__ = [
    "BLOCK",
    "HELPERS",
    "Block",
    "CoreKernel",
    "CoreTraits",
    "Optimize",
    "Parameter",
    "generate",
    "generate_all",
    "helper_source",
    "is_pointwise",
    "may_overwrite",
    "needed_helpers",
    "supports",
    "unused_instructions",
]
