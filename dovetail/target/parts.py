"""Microcontrollers one can buy: the target with their core, and where flash and RAM lie, as their data sheets say.

Of several RAMs only those that follow one another are counted, as values lie in one. Sizes are those of the variant
named; flash that is not in the chip is that of the maker's own board.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.target import Target

_K = 1024
_M = 1024 * _K


@dataclass(frozen=True)
class Microcontroller:
    """A microcontroller."""

    core: str
    """The target whose core it has, in `BUILT_IN`."""
    flash: tuple[int, int]
    """First address and bytes of the memory of code and constants."""
    ram: tuple[int, int]
    """The same of the memory of values."""
    name: str
    """Maker's name of the variant."""
    source: str
    """The document sizes and addresses are from."""


PARTS = {
    "stm32f103": Microcontroller("cortex_m3", (0x08000000, 64 * _K), (0x20000000, 20 * _K), "ST STM32F103C8", "DS5319"),
    "stm32f407": Microcontroller("cortex_m4", (0x08000000, _M), (0x20000000, 128 * _K), "ST STM32F407xG", "DS8626"),
    "stm32f446": Microcontroller(
        "cortex_m4", (0x08000000, 512 * _K), (0x20000000, 128 * _K), "ST STM32F446xE", "DS10693"
    ),
    "stm32f746": Microcontroller("cortex_m7", (0x08000000, _M), (0x20000000, 320 * _K), "ST STM32F746xG", "DS10916"),
    "stm32g071": Microcontroller(
        "cortex_m0plus", (0x08000000, 128 * _K), (0x20000000, 36 * _K), "ST STM32G071xB", "DS12232"
    ),
    "stm32h743": Microcontroller(
        "cortex_m7", (0x08000000, 2 * _M), (0x24000000, 512 * _K), "ST STM32H743xI, AXI SRAM", "DS12110"
    ),
    "stm32l476": Microcontroller(
        "cortex_m4", (0x08000000, _M), (0x20000000, 96 * _K), "ST STM32L476xG, SRAM1", "DS10198"
    ),
    "stm32u575": Microcontroller(
        "cortex_m33", (0x08000000, 2 * _M), (0x20000000, 768 * _K), "ST STM32U575xI", "DS13737"
    ),
    "rp2040": Microcontroller(
        "cortex_m0plus",
        (0x10000000, 2 * _M),
        (0x20000000, 264 * _K),
        "Raspberry Pi RP2040 with the Pico's flash",
        "RP2040 Datasheet, Raspberry Pi Pico Datasheet",
    ),
    "rp2350": Microcontroller(
        "cortex_m33",
        (0x10000000, 4 * _M),
        (0x20000000, 520 * _K),
        "Raspberry Pi RP2350 with the Pico 2's flash",
        "RP2350 Datasheet, Raspberry Pi Pico 2 Datasheet",
    ),
    "nrf52832": Microcontroller(
        "cortex_m4", (0, 512 * _K), (0x20000000, 64 * _K), "Nordic nRF52832-QFAA", "nRF52832 Product Specification"
    ),
    "nrf52840": Microcontroller(
        "cortex_m4", (0, _M), (0x20000000, 256 * _K), "Nordic nRF52840", "nRF52840 Product Specification"
    ),
    "nrf5340": Microcontroller(
        "cortex_m33",
        (0, _M),
        (0x20000000, 512 * _K),
        "Nordic nRF5340, application core",
        "nRF5340 Product Specification",
    ),
    "samd21": Microcontroller(
        "cortex_m0plus", (0, 256 * _K), (0x20000000, 32 * _K), "Microchip ATSAMD21x18", "DS40001882"
    ),
    "saml11": Microcontroller("cortex_m23", (0, 64 * _K), (0x20000000, 16 * _K), "Microchip ATSAML11x16", "DS60001513"),
    "esp32c3": Microcontroller(
        "riscv",
        (0x42000000, 4 * _M),
        (0x3FC80000, 384 * _K),
        "Espressif ESP32-C3FH4, SRAM that is no cache",
        "ESP32-C3 Series Datasheet and Technical Reference Manual",
    ),
    "gd32vf103": Microcontroller(
        "riscv_imac", (0x08000000, 128 * _K), (0x20000000, 32 * _K), "GigaDevice GD32VF103xB", "GD32VF103 Datasheet"
    ),
}
"""Name -> part. Software that shares the chip (a boot loader, a radio's stack) takes its share: `--set ram.size=`."""


def part_of(name: str, core: Target) -> Target:
    """The target of a part: that of its core, with the part's memories."""
    part = PARTS[name]
    sizes = {core.code: part.flash, core.values: part.ram}
    return replace(
        core,
        name=name,
        sentence=f"{part.name}: {part.core}, {_bytes(part.flash[1])} flash, {_bytes(part.ram[1])} RAM",
        memories=tuple(replace(m, base=sizes[m.name][0], size=sizes[m.name][1]) for m in core.memories),
    )


def _bytes(size: int) -> str:
    return f"{size // _M} MiB" if size % _M == 0 else f"{size / _K:.4g} KiB"
