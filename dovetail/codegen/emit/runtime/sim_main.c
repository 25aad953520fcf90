/* The harness a simulator runs: says it is ready for inputs, runs the model, says it is done, again and again.

   DOVETAIL_MODEL_HEADER  the model's header, quoted, e.g. -DDOVETAIL_MODEL_HEADER='"net.h"'
   DOVETAIL_MODEL_RUN     its entry point, void f(void) */
#include "dovetail_rt.h"
#include DOVETAIL_MODEL_HEADER

int main(void);

/* Not inlined: the simulator stops at the end of a straight run of instructions, and the model must not begin in
   the one that says ready. The barriers keep inputs and outputs on their side of the command. */
__attribute__((noinline)) static void command(uint32_t what)
{
    dovetail_compiler_barrier();
    dovetail_mmio_write(DOVETAIL_SIM_COMMAND, what);
    dovetail_compiler_barrier();
}

int main(void)
{
    for (;;) {
        command(DOVETAIL_SIM_READY);
        DOVETAIL_MODEL_RUN();
        command(DOVETAIL_SIM_DONE);
    }
}
