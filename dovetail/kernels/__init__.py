"""C99 kernels that compute a region of the integer graph on the core; modules register what they write."""

from dovetail.kernels import (  # noqa: F401
    bits,
    compact,
    convolution,
    depthwise,
    epilogue,
    gated,
    movement,
    recurrent,
    relayout,
    rows,
    user,
    window,
)
from dovetail.kernels.choices import offered
from dovetail.kernels.core import generate, generate_all, may_overwrite, supports, takes_packed, unused_instructions
from dovetail.kernels.kernel import (
    BLOCK,
    HELPERS,
    ConstantBlock,
    CoreKernel,
    CoreTraits,
    Optimize,
    Parameter,
    core_traits,
    helper_source,
    is_pointwise,
    needed_helpers,
)
from dovetail.kernels.turns import turns

__all__ = [
    "BLOCK",
    "HELPERS",
    "ConstantBlock",
    "CoreKernel",
    "CoreTraits",
    "Optimize",
    "Parameter",
    "core_traits",
    "generate",
    "generate_all",
    "helper_source",
    "is_pointwise",
    "may_overwrite",
    "needed_helpers",
    "offered",
    "supports",
    "takes_packed",
    "turns",
    "unused_instructions",
]
