#include "digits.h"

#include "dovetail_rt.h"
#include "dma.h"
#include "macarray.h"
#include "digits_constants.h"
#include "digits_kernels.h"

uint8_t digits_l2[64] __attribute__((aligned(16)));
uint8_t digits_l1[8240] __attribute__((aligned(16), section(".l1")));

/* reshape_0 on the core: Conv 3 (/conv1/Conv) */
static void reshape_0(void)
{
    DOVETAIL_MARK(0);
    (void)dma_copy_1d(digits_l1 + 6560, digits_conv_1_constants, 704);
}

static void conv_1_to_softmax_10(void)
{
    /* conv_1 on macarray: Conv 3 (/conv1/Conv) */
    DOVETAIL_MARK(1);
    uint32_t conv_1_copied_0 = dma_copy_1d(digits_l1 + 8176, digits_l2, 64);
    uint32_t depthwise_5_copied_0 = dma_copy_1d(digits_l1 + 1536, digits_conv_2_constants, 1408);
    dma_wait(conv_1_copied_0);
    (void)macarray_start(digits_conv_1_task);

    /* conv_2, conv_4, conv_6 on macarray: Conv 9 (/conv2/Conv), Conv 21 (/block1/pointwise/Conv), Conv 33 (/block2/pointwise/Conv) */
    /* depthwise_3, depthwise_5, depthwise_7 on macarray: Conv 15 (/block1/depthwise/Conv), Conv 27 (/block2/depthwise/Conv), GlobalAveragePool 37 (/head/pool/GlobalAveragePool) */
    static const struct { const uint8_t *from; const uint32_t *task; const uint8_t *from_1; const uint32_t *task_1; const uint8_t *from_2; const uint32_t *task_2; } conv_2_turns[2] = {
        {digits_depthwise_3_constants, digits_conv_2_task, digits_conv_4_constants, digits_depthwise_3_task, digits_depthwise_5_constants, digits_conv_4_task},
        {digits_conv_6_constants, digits_depthwise_5_task, digits_depthwise_7_constants, digits_conv_6_task, digits_dense_9_constants, digits_depthwise_7_task},
    };
    for (uint32_t i = 0; i < 2; ++i) {
        DOVETAIL_MARK(2 + 3 * i);
        const uint32_t depthwise_3_copied_0 = dma_copy_1d(digits_l1 + 7776 - 7776 * i, conv_2_turns[i].from, 400 + 1136 * i);
        dma_wait(depthwise_5_copied_0);
        (void)macarray_start(conv_2_turns[i].task);
        DOVETAIL_MARK(3 + 3 * i);
        const uint32_t conv_4_copied_0 = dma_copy_1d(digits_l1 + 2944 + 1024 * i, conv_2_turns[i].from_1, 1024);
        dma_wait(depthwise_3_copied_0);
        (void)macarray_start(conv_2_turns[i].task_1);
        DOVETAIL_MARK(4 + 3 * i);
        depthwise_5_copied_0 = dma_copy_1d(digits_l1 + 4992 + 800 * i, conv_2_turns[i].from_2, 800 - 32 * i);
        dma_wait(conv_4_copied_0);
        (void)macarray_start(conv_2_turns[i].task_2);
    }

    /* dense_9 on macarray: Gemm 45 (/head/fc/Gemm) */
    DOVETAIL_MARK(9);
    dma_wait(depthwise_5_copied_0);
    uint32_t dense_9_launched_0 = macarray_start(digits_dense_9_task);

    /* softmax_10 on the core: Softmax 48 (/head/softmax/Softmax) */
    DOVETAIL_MARK(10);
    macarray_wait(dense_9_launched_0);
    digits_softmax_10_kernel((int8_t *)(void *)(digits_l2), (const int8_t *)(const void *)(digits_l1 + 32), digits_softmax_10_exponentials);
}

void digits_run(void)
{
    macarray_init();
    reshape_0();
    conv_1_to_softmax_10();
    DOVETAIL_MARK_END();
}
