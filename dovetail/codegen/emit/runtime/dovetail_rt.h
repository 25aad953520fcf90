/* What emitted code needs of the machine: register access, waiting, and markers for the simulator. */
#ifndef DOVETAIL_RT_H
#define DOVETAIL_RT_H

#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "this C is for little-endian processors: elements of several bytes are read and written as they lie"
#endif

#ifdef DOVETAIL_HOST

/* Supplied by whoever loads the library, if it contains drivers at all. */
uint32_t dovetail_mmio_read(uint32_t address);
void dovetail_mmio_write(uint32_t address, uint32_t value);

static inline void dovetail_wait_for_interrupt(void)
{
}

#else

static inline uint32_t dovetail_mmio_read(uint32_t address)
{
    return *(volatile uint32_t *)(uintptr_t)address;
}

static inline void dovetail_mmio_write(uint32_t address, uint32_t value)
{
    *(volatile uint32_t *)(uintptr_t)address = value;
}

#ifdef DOVETAIL_WAIT_HOOK

/* Yours: blocks the task until an engine or the DMA has raised its interrupt since the last call. */
void dovetail_wait(void);

static inline void dovetail_wait_for_interrupt(void)
{
    dovetail_wait();
}

#else

/* Sleeps until a device raises its interrupt line. Interrupts stay masked, so no handler runs; it returns at once when
   the line is high already, so no completion can be missed. Memory may have changed afterwards, and writes before must
   have happened: hence the clobber. */
static inline void dovetail_wait_for_interrupt(void)
{
    __asm__ volatile("wfi" ::: "memory");
}

#endif
#endif

/* Called when a library says that a call failed; `what` names function and layer. The one of dovetail_rt.c tells the
   simulator and stops the core. Define your own to log, to reset, or to leave by longjmp: if it returns, the inference
   goes on, and its outputs mean nothing. */
void dovetail_failed(const char *what, int32_t status);

static inline void dovetail_check(int32_t status, int32_t success, const char *what)
{
    if (status != success) {
        dovetail_failed(what, status);
    }
}

/* Keeps the compiler from moving memory accesses across this point. */
static inline void dovetail_compiler_barrier(void)
{
    __asm__ volatile("" ::: "memory");
}

#ifndef DOVETAIL_SIM_CONTROL
#define DOVETAIL_SIM_CONTROL 0x1A000000u /* registers of the simulator's harness */
#endif
#define DOVETAIL_SIM_COMMAND (DOVETAIL_SIM_CONTROL + 0u)
#define DOVETAIL_SIM_EXIT_CODE (DOVETAIL_SIM_CONTROL + 4u)
#define DOVETAIL_SIM_MARKER (DOVETAIL_SIM_CONTROL + 8u)
#define DOVETAIL_SIM_CYCLES_LOW (DOVETAIL_SIM_CONTROL + 12u) /* reading it latches the high word */
#define DOVETAIL_SIM_CYCLES_HIGH (DOVETAIL_SIM_CONTROL + 16u)
#define DOVETAIL_SIM_STATUS (DOVETAIL_SIM_CONTROL + 20u) /* of a call that failed, */
#define DOVETAIL_SIM_FAILED (DOVETAIL_SIM_CONTROL + 24u) /* and the address of its name */
#define DOVETAIL_SIM_READY 1u
#define DOVETAIL_SIM_DONE 2u
#define DOVETAIL_SIM_EXIT 3u

/* At the start of layer `index`: tells the simulator, board_main.c, or a function of your own, to which it is 0xFFFFFFFF
   after the last layer (DOVETAIL_MARK_END). */
#if defined(DOVETAIL_BOARD)
void board_mark(uint32_t layer);
#define DOVETAIL_MARK(index) board_mark((uint32_t)(index))
#elif defined(DOVETAIL_SIM) && !defined(DOVETAIL_HOST)
#define DOVETAIL_MARK(index) dovetail_mmio_write(DOVETAIL_SIM_MARKER, (uint32_t)(index))
#elif defined(DOVETAIL_MARK_HOOK)
void dovetail_mark(uint32_t layer);
#define DOVETAIL_MARK(index) dovetail_mark((uint32_t)(index))
#else
#define DOVETAIL_MARK(index) ((void)(index))
#endif
#define DOVETAIL_MARK_END() DOVETAIL_MARK(0xFFFFFFFFu)

#endif
