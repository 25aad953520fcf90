"""A network beside an operating system: its task blocks while an engine or a DMA works, and one task at a time uses it.

A device holds its interrupt line up until its driver has cleared it, which the task does once it runs again. So the
handler switches the line off and gives a semaphore, and whoever waits switches the line on again first: a line that is
up then gives the semaphore at once, and no completion is missed. A semaphore given too often only wakes the driver,
which looks and waits again.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.guests.export.library import RUNTIME, ExportLibrary, template, with_macros

ZEPHYR, FREERTOS = "Zephyr", "FreeRTOS"


def beside(library: ExportLibrary, system: str, folder: str = "") -> ExportLibrary:
    """The library with a C file for a system and its header: it waits by semaphores.

    Args:
        library: as it is on a bare chip.
        system: `ZEPHYR` or `FREERTOS`.
        folder: where headers of FreeRTOS lie, such as "freertos/".
    """
    name, headers = f"{library.name}_rtos", dict(library.headers)
    words = {"name": library.name, "upper": library.upper, "system": system, "folder": folder}
    *others, last = library.waits or ("",)
    devices = " and ".join(filter(None, (", ".join(others), last)))
    what = "its task sleeps while it waits" if library.waits else "one task at a time"
    begin = ("begin", *(["interrupt"] if library.waits else [])) if system == FREERTOS else ()
    headers[f"{name}.h"] = template("rtos.h").fill(begin, what=what, devices=devices, **words)
    if library.waits:
        headers[RUNTIME] = with_macros(headers[RUNTIME], {"DOVETAIL_WAIT_HOOK": "1"})
    lines = [f"CONFIG_{option}" for option in interrupt_options(library)]
    calls = {
        "connect": "\n".join(f"    IRQ_CONNECT({line}, 0, handler, NULL, 0);" for line in lines),
        "disable": "\n".join(f"    irq_disable({line});" for line in lines),
        "enable": "\n".join(f"    irq_enable({line});" for line in lines),
    }
    shown = ("memory", "create", "waits") if library.waits else ()
    source = template(f"{system.lower()}.c").fill(shown, **calls, **words)
    return replace(library, sources={**library.sources, f"{name}.c": source}, headers=headers, system=system)


def interrupt_options(library: ExportLibrary) -> dict[str, str]:
    """Kconfig options with the numbers of interrupt lines, and the devices they are of."""
    return {f"DOVETAIL_{library.upper}_{device.upper()}_IRQ": device for device in library.waits}
