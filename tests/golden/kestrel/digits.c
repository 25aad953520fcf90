#include "digits.h"

#include "dovetail_rt.h"
#include "kestrel.h"
#include "digits_constants.h"
#include "digits_kernels.h"

uint8_t digits_ram[64] __attribute__((aligned(16), section(".ram")));

/* digits_list_0 is a list of commands for conv_1, conv_2, depthwise_3, conv_4, depthwise_5, conv_6, average_pool_7, dense_9 */
static void conv_1_to_softmax_10(void)
{
    /* conv_1 on kestrel: Conv 3 (/conv1/Conv) */
    DOVETAIL_MARK(1);
    uint32_t conv_1_listed_0 = kestrel_start(digits_list_0, 252);

    /* softmax_10 on the core: Softmax 48 (/head/softmax/Softmax) */
    DOVETAIL_MARK(10);
    kestrel_wait(conv_1_listed_0);
    digits_softmax_10_kernel((int8_t *)(void *)(digits_ram + 16), (const int8_t *)(const void *)(digits_ram), digits_softmax_10_exponentials);
}

void digits_run(void)
{
    kestrel_init();
    conv_1_to_softmax_10();
    DOVETAIL_MARK_END();
}
