"""A network beside an operating system: its task blocks while an engine or a DMA works, and one task at a time uses it.

A device holds its interrupt line up until its driver has cleared it, which the task does once it runs again. So the
handler switches the line off and gives a semaphore, and whoever waits switches the line on again first: a line that is
up then gives the semaphore at once, and no completion is missed. A semaphore given too often only wakes the driver,
which looks and waits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.guests.export.library import RUNTIME, ExportLibrary, with_macros

ZEPHYR, FREERTOS = "Zephyr", "FreeRTOS"

_HEAD = """\
/* {name} beside {system}: {what}. */
#ifndef {upper}_RTOS_H
#define {upper}_RTOS_H
#ifdef __cplusplus
extern "C" {{
#endif

{begin}/* The network is one static instance. Take it, fill the inputs, run, read the outputs, give it back. */
void {name}_take(void);
void {name}_give(void);
{interrupt}
#ifdef __cplusplus
}}
#endif
#endif
"""


def beside(library: ExportLibrary, system: str, folder: str = "") -> ExportLibrary:
    """The library with what a system wants of it: a C file, its header, and waiting by semaphores.

    Args:
        library: as it is on a bare chip. system: `ZEPHYR` or `FREERTOS`. folder: where headers of FreeRTOS lie.
    """
    name = f"{library.name}_rtos"
    source = zephyr(library) if system == ZEPHYR else freertos(library, folder)
    headers = {**library.headers, f"{name}.h": header(library, system)}
    if library.waits:
        headers[RUNTIME] = with_macros(headers[RUNTIME], {"DOVETAIL_WAIT_HOOK": "1"})
    return replace(library, sources={**library.sources, f"{name}.c": source}, headers=headers, system=system)


def header(library: ExportLibrary, system: str) -> str:
    """The header of that file."""
    bare, name = system == FREERTOS, library.name
    begin = "" if not bare else f"/* Call it once, before any of the others. */\nvoid {name}_begin(void);\n\n"
    interrupt = ""
    if library.waits and bare:
        interrupt = f"""
/* Call it from the handlers of {_listed(library.waits)}. */
void {name}_interrupt(void);

/* Yours: switches their lines on or off in the interrupt controller; also called from the handlers. */
void {name}_lines(int on);
"""
    what = "its task sleeps while it waits" if library.waits else "one task at a time"
    return _HEAD.format(
        name=name, upper=library.upper, system=system, what=what, begin=begin, interrupt=interrupt
    ).replace("\n\n\n", "\n\n")


def zephyr(library: ExportLibrary) -> str:
    """The C file for Zephyr; the numbers of interrupts come from Kconfig (`interrupt_options`)."""
    name, lines = library.name, [f"CONFIG_{option}" for option, _ in interrupt_options(library)]
    text = f"""\
#include "{name}_rtos.h"

#include <zephyr/init.h>
#include <zephyr/irq.h>
#include <zephyr/kernel.h>

static K_MUTEX_DEFINE(turn);

void {name}_take(void)
{{
    (void)k_mutex_lock(&turn, K_FOREVER);
}}

void {name}_give(void)
{{
    (void)k_mutex_unlock(&turn);
}}
"""
    if not lines:
        return text
    connect = "\n".join(f"    IRQ_CONNECT({line}, 0, handler, NULL, 0);" for line in lines)
    off, on = ("\n".join(f"    irq_{way}({line});" for line in lines) for way in ("disable", "enable"))
    return f"""{text}
void dovetail_wait(void);

static K_SEM_DEFINE(done, 0, 1);

static void handler(const void *unused)
{{
    ARG_UNUSED(unused);
{off}
    k_sem_give(&done);
}}

void dovetail_wait(void)
{{
{on}
    (void)k_sem_take(&done, K_FOREVER);
}}

static int connect_lines(void)
{{
{connect}
    return 0;
}}

SYS_INIT(connect_lines, POST_KERNEL, CONFIG_KERNEL_INIT_PRIORITY_DEVICE);
"""


def freertos(library: ExportLibrary, folder: str = "") -> str:
    """The C file for FreeRTOS with static allocation; `folder` is where its headers lie, such as "freertos/"."""
    name, waits = library.name, bool(library.waits)
    kept = "static StaticSemaphore_t turn_memory;\nstatic SemaphoreHandle_t turn;\n"
    made = "    turn = xSemaphoreCreateMutexStatic(&turn_memory);\n"
    if waits:
        kept += "static StaticSemaphore_t done_memory;\nstatic SemaphoreHandle_t done;\n"
        made += "    done = xSemaphoreCreateBinaryStatic(&done_memory);\n"
    text = f"""\
#include "{name}_rtos.h"

#include "{folder}FreeRTOS.h"
#include "{folder}semphr.h"

{kept}
void {name}_begin(void)
{{
{made}}}

void {name}_take(void)
{{
    (void)xSemaphoreTake(turn, portMAX_DELAY);
}}

void {name}_give(void)
{{
    (void)xSemaphoreGive(turn);
}}
"""
    if not waits:
        return text
    return f"""{text}
void dovetail_wait(void);

void {name}_interrupt(void)
{{
    BaseType_t woken = pdFALSE;
    {name}_lines(0);
    (void)xSemaphoreGiveFromISR(done, &woken);
    portYIELD_FROM_ISR(woken);
}}

void dovetail_wait(void)
{{
    {name}_lines(1);
    (void)xSemaphoreTake(done, portMAX_DELAY);
}}
"""


def interrupt_options(library: ExportLibrary) -> tuple[tuple[str, str], ...]:
    """For each device that interrupts, the Kconfig option with the number of its line, and the device's name."""
    return tuple((f"DOVETAIL_{library.upper}_{device.upper()}_IRQ", device) for device in library.waits)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
