#include "digits.h"

#include "dovetail_rt.h"
#include "cores.h"
#include "digits_constants.h"
#include "digits_kernels.h"

uint8_t digits_ram[1536] __attribute__((aligned(16)));

static void conv_1_on_core1(void)
{
    digits_conv_1_kernel((int8_t *)(void *)(digits_ram + 256), (const int8_t *)(const void *)(digits_ram + 536), digits_conv_1_bias, digits_conv_1_weights, digits_conv_1_multiplier, digits_conv_1_shift, &digits_conv_1_layer);
}

static void conv_2_on_core1(void)
{
    digits_conv_2_kernel((int8_t *)(void *)(digits_ram + 640), (const int8_t *)(const void *)(digits_ram + 256), digits_conv_2_border_bias, digits_conv_2_weights, digits_conv_2_multiplier, digits_conv_2_shift);
}

static void depthwise_3_on_core1(void)
{
    digits_depthwise_3_kernel((int8_t *)(void *)(digits_ram + 896), (const int8_t *)(const void *)(digits_ram + 576), digits_depthwise_3_weights, digits_depthwise_3_border_bias, digits_depthwise_3_multiplier, digits_depthwise_3_shift);
}

static void conv_1_to_depthwise_3(void)
{
    /* conv_1 on core 0 and 1: Conv 3 (/conv1/Conv) */
    DOVETAIL_MARK(1);
    uint32_t conv_1_started_0 = core_start(1u, conv_1_on_core1);
    digits_conv_1_2_kernel((int8_t *)(void *)(digits_ram), (const int8_t *)(const void *)(digits_ram + 512), digits_conv_1_bias, digits_conv_1_weights, digits_conv_1_multiplier, digits_conv_1_shift, &digits_conv_1_2_layer);

    /* conv_2 on core 0 and 1: Conv 9 (/conv2/Conv) */
    DOVETAIL_MARK(2);
    uint32_t conv_2_started_0 = core_start(1u, conv_2_on_core1);
    core_wait(1u, conv_1_started_0);
    digits_conv_2_2_kernel((int8_t *)(void *)(digits_ram + 512), (const int8_t *)(const void *)(digits_ram), digits_conv_2_border_bias, digits_conv_2_weights, digits_conv_2_multiplier, digits_conv_2_shift);

    /* depthwise_3 on core 0 and 1: Conv 15 (/block1/depthwise/Conv) */
    DOVETAIL_MARK(3);
    (void)core_start(1u, depthwise_3_on_core1);
    core_wait(1u, conv_2_started_0);
    digits_depthwise_3_2_kernel((int8_t *)(void *)(digits_ram + 768), (const int8_t *)(const void *)(digits_ram + 512), digits_depthwise_3_weights, digits_depthwise_3_border_bias, digits_depthwise_3_multiplier, digits_depthwise_3_shift);
}

static void conv_4_on_core1(void)
{
    digits_conv_4_kernel((int8_t *)(void *)(digits_ram + 256), (const int8_t *)(const void *)(digits_ram + 896), digits_conv_4_bias, digits_conv_4_weights, digits_conv_4_multiplier, digits_conv_4_shift);
}

static void depthwise_5_on_core1(void)
{
    digits_depthwise_5_kernel((int8_t *)(void *)(digits_ram + 768), (const int8_t *)(const void *)(digits_ram + 128), digits_depthwise_5_weights, digits_depthwise_5_border_bias, digits_depthwise_5_multiplier, digits_depthwise_5_shift);
}

static void conv_4_to_depthwise_5(void)
{
    /* conv_4 on core 0 and 1: Conv 21 (/block1/pointwise/Conv) */
    DOVETAIL_MARK(4);
    uint32_t conv_4_started_0 = core_start(1u, conv_4_on_core1);
    digits_conv_4_kernel((int8_t *)(void *)(digits_ram), (const int8_t *)(const void *)(digits_ram + 768), digits_conv_4_bias, digits_conv_4_weights, digits_conv_4_multiplier, digits_conv_4_shift);

    /* depthwise_5 on core 0 and 1: Conv 27 (/block2/depthwise/Conv) */
    DOVETAIL_MARK(5);
    (void)core_start(1u, depthwise_5_on_core1);
    core_wait(1u, conv_4_started_0);
    digits_depthwise_5_2_kernel((int8_t *)(void *)(digits_ram + 512), (const int8_t *)(const void *)(digits_ram), digits_depthwise_5_weights, digits_depthwise_5_border_bias, digits_depthwise_5_multiplier, digits_depthwise_5_shift);
}

static void conv_6_on_core1(void)
{
    digits_conv_6_kernel((int8_t *)(void *)(digits_ram + 1280), (const int8_t *)(const void *)(digits_ram + 768), digits_conv_6_bias, digits_conv_6_weights, digits_conv_6_multiplier, digits_conv_6_shift);
}

static void conv_6_to_average_pool_7(void)
{
    /* conv_6 on core 0 and 1: Conv 33 (/block2/pointwise/Conv) */
    DOVETAIL_MARK(6);
    uint32_t conv_6_started_0 = core_start(1u, conv_6_on_core1);
    digits_conv_6_kernel((int8_t *)(void *)(digits_ram + 1024), (const int8_t *)(const void *)(digits_ram + 512), digits_conv_6_bias, digits_conv_6_weights, digits_conv_6_multiplier, digits_conv_6_shift);

    /* average_pool_7 on core 0: GlobalAveragePool 37 (/head/pool/GlobalAveragePool) */
    DOVETAIL_MARK(7);
    core_wait(1u, conv_6_started_0);
    digits_average_pool_7_kernel((int8_t *)(void *)(digits_ram), (const int8_t *)(const void *)(digits_ram + 1024));
}

static void dense_9_on_core1(void)
{
    digits_dense_9_kernel((int8_t *)(void *)(digits_ram + 40), (const int8_t *)(const void *)(digits_ram), &digits_dense_9_layer);
}

static void dense_9_to_softmax_10(void)
{
    /* dense_9 on core 0 and 1: Gemm 45 (/head/fc/Gemm) */
    DOVETAIL_MARK(9);
    uint32_t dense_9_started_0 = core_start(1u, dense_9_on_core1);
    digits_dense_9_2_kernel((int8_t *)(void *)(digits_ram + 32), (const int8_t *)(const void *)(digits_ram), digits_dense_9_2_bias, digits_dense_9_2_weights, digits_dense_9_2_multiplier, digits_dense_9_2_shift);

    /* softmax_10 on core 0: Softmax 48 (/head/softmax/Softmax) */
    DOVETAIL_MARK(10);
    core_wait(1u, dense_9_started_0);
    digits_softmax_10_kernel((int8_t *)(void *)(digits_ram), (const int8_t *)(const void *)(digits_ram + 32), digits_softmax_10_exponentials);
}

void digits_run(void)
{
    conv_1_to_depthwise_3();
    conv_4_to_depthwise_5();
    conv_6_to_average_pool_7();
    dense_9_to_softmax_10();
    DOVETAIL_MARK_END();
}
