"""C99 kernels that compute a region of the integer graph on the core; every module here registers what it writes."""

from importlib import import_module
from pkgutil import iter_modules

from dovetail.kernels.core import (
    generate,
    generate_all,
    generated,
    may_overwrite,
    offered,
    scope_of,
    supports,
    takes_packed,
    unused_instructions,
)
from dovetail.kernels.helpers import HELPERS, helper_source, needed_helpers
from dovetail.kernels.kernel import (
    BLOCK,
    BYTES,
    WEIGHTS,
    ConstantBlock,
    CoreKernel,
    CoreTraits,
    Optimize,
    Parameter,
    core_traits,
)
from dovetail.kernels.registry import is_pointwise
from dovetail.kernels.turns import compared, cycles, turns

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "BLOCK",
    "BYTES",
    "HELPERS",
    "WEIGHTS",
    "ConstantBlock",
    "CoreKernel",
    "CoreTraits",
    "Optimize",
    "Parameter",
    "compared",
    "core_traits",
    "cycles",
    "generate",
    "generate_all",
    "generated",
    "helper_source",
    "is_pointwise",
    "may_overwrite",
    "needed_helpers",
    "offered",
    "scope_of",
    "supports",
    "takes_packed",
    "turns",
    "unused_instructions",
]
