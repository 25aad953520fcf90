"""Plain Cortex-M microcontrollers: one core with the DSP extension, flash and RAM, no accelerator.

Instructions are exact on all of them. Cycles of all three follow the Cortex-M4's table (`simulate/arm_costs.py`): Arm
publishes none for the Cortex-M7, which issues up to two instructions at once, and none for the Cortex-M33.
"""

from __future__ import annotations

from dovetail.target import Core, Memory, Policy, Target


def cortex_m(number: int) -> Target:
    """The microcontroller with a Cortex-M of that number: 4, 7 or 33."""
    return Target(
        name=f"cortex_m{number}",
        sentence=f"Arm Cortex-M{number} core alone (DSP extension, no floating point), 1 MiB flash, 256 KiB RAM",
        core=Core(f"cortex-m{number}"),
        memories=(
            Memory("flash", base=0x08000000, size=1024 * 1024),
            Memory("ram", base=0x20000000, size=256 * 1024),
        ),
        code="flash",
        values="ram",
        policies=(Policy("exact", "the core requantises as TFLite Micro does", ()),),
    )


M4, M7, M33 = cortex_m(4), cortex_m(7), cortex_m(33)
