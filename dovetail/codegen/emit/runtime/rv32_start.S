/* Start-up of an RV32 firmware: stack, .data, .bss, then main(). Symbols come from the linker script. */
    .section .text.start, "ax", @progbits
    .globl _start
    .type _start, @function
_start:
    la      sp, __stack_top
    la      t0, dovetail_trap
    csrw    mtvec, t0
#ifdef DOVETAIL_MAILBOX
    li      t0, DOVETAIL_MAILBOX
    lw      t1, 0(t0)               /* the number of this core */
    bnez    t1, worker
#endif /* DOVETAIL_MAILBOX */

    la      t0, __data_load
    la      t1, __data_start
    la      t2, __data_end
    beq     t0, t1, 2f              /* already where it belongs */
    j       1f
0:  lw      t3, 0(t0)
    sw      t3, 0(t1)
    addi    t0, t0, 4
    addi    t1, t1, 4
1:  bltu    t1, t2, 0b

2:  la      t1, __bss_start
    la      t2, __bss_end
    j       4f
3:  sw      zero, 0(t1)
    addi    t1, t1, 4
4:  bltu    t1, t2, 3b

    li      t0, 0x800               /* the external interrupt line ends wfi ... */
    csrw    mie, t0                 /* ... but traps only where mstatus.MIE is set */
    call    main
    .size _start, . - _start

    .globl dovetail_halt
    .type dovetail_halt, @function
dovetail_halt:
    j       dovetail_halt
    .size dovetail_halt, . - dovetail_halt

#ifdef DOVETAIL_MAILBOX
/* Every other core: a stack of its own, then whatever core 0 starts. */
worker:
    la      t0, __worker_stack_tops
    slli    t1, t1, 2
    add     t0, t0, t1
    lw      sp, -4(t0)
    li      t0, 0x800
    csrw    mie, t0
    call    core_serve
    j       dovetail_halt
#endif /* DOVETAIL_MAILBOX */

/* Where traps go unless the firmware sets mtvec: stop here, for a debugger to find. */
    .balign 4
    .globl dovetail_trap
    .type dovetail_trap, @function
dovetail_trap:
    j       dovetail_trap
    .size dovetail_trap, . - dovetail_trap
