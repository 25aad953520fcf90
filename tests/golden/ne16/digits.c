#include "digits.h"

#include "dovetail_rt.h"
#include "dma.h"
#include "ne16.h"
#include "digits_constants.h"
#include "digits_kernels.h"

uint8_t digits_l2[64] __attribute__((aligned(16)));
uint8_t digits_l1[7456] __attribute__((aligned(16), section(".l1")));

/* offset_0 on the core: made by the compiler */
static void offset_0(void)
{
    DOVETAIL_MARK(0);
    (void)dma_copy_1d(digits_l1 + 2400, digits_conv_4_constants, 1216);
    digits_offset_0_kernel(digits_l1 + 104, (const int8_t *)(const void *)(digits_l2));
}

/* pad_2 on dma: Conv 3 (/conv1/Conv) */
static void pad_2(void)
{
    DOVETAIL_MARK(2);
    (void)dma_copy_pad(digits_l1, digits_l1 + 104, 8, 8, 10, 8, 1, 0, 0, &(const dma_padding){1, 1, 1, 1, 0});
}

static void patches_3_to_softmax_14(void)
{
    /* patches_3 on dma: Conv 3 (/conv1/Conv) */
    DOVETAIL_MARK(3);
    (void)dma_copy_3d(digits_l1 + 6928, digits_l1, 6, 2, 18, 4, 8, 36, 10);
    (void)dma_copy_3d(digits_l1 + 6934, digits_l1 + 10, 6, 2, 18, 4, 8, 36, 10);
    uint32_t patches_3_copied_0 = dma_copy_3d(digits_l1 + 6940, digits_l1 + 20, 6, 2, 18, 4, 8, 36, 10);

    /* conv_4 on ne16: Conv 3 (/conv1/Conv) */
    DOVETAIL_MARK(4);
    uint32_t depthwise_7_copied_0 = dma_copy_1d(digits_l1, digits_conv_6_constants, 2400);
    dma_wait(patches_3_copied_0);
    (void)ne16_start(digits_conv_4_task);

    /* conv_6, conv_8, conv_10 on ne16: Conv 9 (/conv2/Conv), Conv 21 (/block1/pointwise/Conv), Conv 33 (/block2/pointwise/Conv) */
    /* depthwise_7, depthwise_9 on ne16: Conv 15 (/block1/depthwise/Conv), Conv 27 (/block2/depthwise/Conv) */
    static const struct { uint32_t to; const uint8_t *from; uint32_t bytes; const uint32_t *task; } conv_6_turns[5] = {
        {7216, digits_depthwise_7_constants, 240, digits_conv_6_task},
        {4832, digits_conv_8_constants, 704, digits_depthwise_7_task},
        {6048, digits_depthwise_9_constants, 480, digits_conv_8_task},
        {3616, digits_conv_10_constants, 1216, digits_depthwise_9_task},
        {6528, digits_dense_13_constants, 400, digits_conv_10_task},
    };
    uint32_t conv_6_launched_0 = 0;
    for (uint32_t i = 0; i < 5; ++i) {
        DOVETAIL_MARK(6 + i);
        const uint32_t depthwise_7_copied_0_before = depthwise_7_copied_0;
        depthwise_7_copied_0 = dma_copy_1d(digits_l1 + conv_6_turns[i].to, conv_6_turns[i].from, conv_6_turns[i].bytes);
        dma_wait(depthwise_7_copied_0_before);
        conv_6_launched_0 = ne16_start(conv_6_turns[i].task);
    }

    /* average_pool_11 on the core: GlobalAveragePool 37 (/head/pool/GlobalAveragePool) */
    DOVETAIL_MARK(11);
    ne16_wait(conv_6_launched_0);
    digits_average_pool_11_kernel(digits_l1 + 512, digits_l1);

    /* dense_13 on ne16: Gemm 45 (/head/fc/Gemm) */
    DOVETAIL_MARK(13);
    dma_wait(depthwise_7_copied_0);
    uint32_t dense_13_launched_0 = ne16_start(digits_dense_13_task);

    /* softmax_14 on the core: Softmax 48 (/head/softmax/Softmax) */
    DOVETAIL_MARK(14);
    ne16_wait(dense_13_launched_0);
    digits_softmax_14_kernel((int8_t *)(void *)(digits_l2), digits_l1, digits_softmax_14_exponentials);
}

void digits_run(void)
{
    ne16_init();
    offset_0();
    pad_2();
    patches_3_to_softmax_14();
    DOVETAIL_MARK_END();
}
