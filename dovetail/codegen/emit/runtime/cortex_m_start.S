/* Start-up of a Cortex-M firmware: vectors, stack, .data, .bss, then main(). Symbols come from the linker script. */
    .syntax unified
    .thumb
    .section .text.start, "ax", %progbits

/* A word from or to where a pointer points, which moves on: in 16 bits where the core has no other form. */
#if __ARM_ARCH_ISA_THUMB == 1
    .macro take word, pointer
    ldmia   \pointer!, {\word}
    .endm
    .macro put word, pointer
    stmia   \pointer!, {\word}
    .endm
#else
    .macro take word, pointer
    ldr     \word, [\pointer], #4
    .endm
    .macro put word, pointer
    str     \word, [\pointer], #4
    .endm
#endif

    .balign 128                     /* a power of two that holds the table, as VTOR wants it */
    .globl dovetail_vectors
    .type dovetail_vectors, %object
dovetail_vectors:
    .word   __stack_top
    .word   Reset_Handler
    .rept   14                      /* NMI, faults, SVCall, PendSV, SysTick */
    .word   dovetail_trap
    .endr
    .word   dovetail_interrupt      /* interrupt 0: the line of all devices */
    .size dovetail_vectors, . - dovetail_vectors

    .globl Reset_Handler
    .type Reset_Handler, %function
    .thumb_func
Reset_Handler:
    cpsid   i                       /* the interrupt line ends wfi, but traps only after cpsie i */
    ldr     r0, =__stack_top        /* again, and the vectors: a boot loader need not have done it */
    mov     sp, r0
#if defined(__ARM_FEATURE_MVE)
    ldr     r0, =0xE000ED88         /* CPACR: Helium's registers, coprocessors 10 and 11 */
    ldr     r1, [r0]
    orr     r1, r1, #0xF00000
    str     r1, [r0]
    dsb
    isb
#endif
#if defined(__ARM_ARCH_8M_MAIN__) || defined(__ARM_ARCH_8_1M_MAIN__)
    ldr     r0, =__stack_bottom     /* ARMv7-M has no limit register: there the linker puts nothing below the stack */
    msr     msplim, r0
#endif
    ldr     r0, =dovetail_vectors
    ldr     r1, =0xE000ED08         /* VTOR */
    str     r0, [r1]
#ifdef DOVETAIL_MAILBOX
    ldr     r0, =DOVETAIL_MAILBOX
    ldr     r1, [r0]                /* the number of this core */
    cmp     r1, #0
    bne     worker
#endif /* DOVETAIL_MAILBOX */

    ldr     r0, =__data_load
    ldr     r1, =__data_start
    ldr     r2, =__data_end
    cmp     r0, r1
    beq     2f                      /* already where it belongs */
    b       1f
0:  take    r3, r0
    put     r3, r1
1:  cmp     r1, r2
    blo     0b

2:  ldr     r1, =__bss_start
    ldr     r2, =__bss_end
    movs    r3, #0
    b       4f
3:  put     r3, r1
4:  cmp     r1, r2
    blo     3b

    movs    r0, #1
    ldr     r1, =0xE000E100         /* NVIC_ISER0: interrupt 0 */
    str     r0, [r1]
    bl      main
    .size Reset_Handler, . - Reset_Handler

#ifdef DOVETAIL_MAILBOX
/* Every other core: a stack of its own, then whatever core 0 starts. */
worker:
#if defined(__ARM_ARCH_8M_MAIN__)
    movs    r2, #0                  /* the limit was that of the stack of core 0 */
    msr     msplim, r2
#endif
    ldr     r0, =__worker_stack_tops
    subs    r1, r1, #1
    lsls    r1, r1, #2
    ldr     r0, [r0, r1]
    mov     sp, r0
    movs    r0, #1
    ldr     r1, =0xE000E100         /* NVIC_ISER0: interrupt 0 */
    str     r0, [r1]
    bl      core_serve
#endif /* DOVETAIL_MAILBOX */

    .globl dovetail_halt
    .type dovetail_halt, %function
    .thumb_func
dovetail_halt:
    b       dovetail_halt
    .size dovetail_halt, . - dovetail_halt
    .ltorg

/* Where exceptions go unless the firmware says otherwise: stop here, for a debugger to find. */
    .globl dovetail_trap
    .type dovetail_trap, %function
    .thumb_func
dovetail_trap:
    b       dovetail_trap
    .size dovetail_trap, . - dovetail_trap

/* A firmware that takes interrupts defines its own. */
    .weak dovetail_interrupt
    .type dovetail_interrupt, %function
    .thumb_func
dovetail_interrupt:
    b       dovetail_interrupt
    .size dovetail_interrupt, . - dovetail_interrupt

#if defined(__clang__) && __ARM_ARCH_ISA_THUMB != 1
/* 64-bit division as the run-time ABI of the Arm architecture names it (section "Integer division"): quotient in
   r0:r1, remainder in r2:r3. GCC brings its own in libgcc. */
    .macro division name, function
    .section .text.\name, "ax", %progbits
    .globl \name
    .type \name, %function
    .thumb_func
\name:
    push    {r4, lr}
    sub     sp, sp, #16
    add     r4, sp, #8
    str     r4, [sp]                /* fifth argument: where the remainder goes */
    bl      \function
    ldrd    r2, r3, [sp, #8]
    add     sp, sp, #16
    pop     {r4, pc}
    .size \name, . - \name
    .endm
    division __aeabi_ldivmod, dovetail_divide_signed
    division __aeabi_uldivmod, dovetail_divide_unsigned
#endif
