/* The harness of sim_main.c for QEMU, where a debugger stops the core in functions instead of answering registers. They
   have a page of their own: QEMU executes the code of a page with a breakpoint one instruction at a time. */
#include "dovetail_rt.h"
#include DOVETAIL_MODEL_HEADER

int main(void);
void qemu_command(uint32_t what);
extern const uint32_t qemu_vectors[];

__asm__(".section .text.qemu_stops, \"ax\", %progbits\n"
        ".balign 4096\n"
        ".thumb\n"
        ".globl qemu_command\n"
        ".thumb_func\n"
        ".type qemu_command, %function\n"
        "qemu_command:\n\tbx lr\n"
        ".globl dovetail_mark\n"
        ".thumb_func\n"
        ".type dovetail_mark, %function\n"
        "dovetail_mark:\n\tbx lr\n"
        ".globl qemu_fault\n"
        ".thumb_func\n"
        ".type qemu_fault, %function\n"
        "qemu_fault:\n\tbx lr\n"
        ".balign 128\n"
        ".globl qemu_vectors\n"
        "qemu_vectors:\n"
        ".rept 32\n\t.word qemu_fault\n\t.endr\n"
        ".balign 4096\n"
        ".text\n");

int main(void)
{
    dovetail_mmio_write(0xE000ED08u, (uint32_t)(uintptr_t)qemu_vectors); /* VTOR */
    for (;;) {
        qemu_command(DOVETAIL_SIM_READY);
        DOVETAIL_MODEL_RUN();
        qemu_command(DOVETAIL_SIM_DONE);
    }
}
