#include "digits.h"

#include "dovetail_rt.h"
#include "digits_constants.h"
#include "digits_kernels.h"

uint8_t digits_ram[1024] __attribute__((aligned(16)));

/* conv_1 on the core: Conv 3 (/conv1/Conv) */
static void conv_1(void)
{
    DOVETAIL_MARK(1);
    digits_conv_1_kernel((int8_t *)(void *)(digits_ram), (const int8_t *)(const void *)(digits_ram + 512), digits_conv_1_bias, digits_conv_1_weights, digits_conv_1_multiplier, digits_conv_1_shift, &digits_conv_1_layer);
}

/* conv_2 on the core: Conv 9 (/conv2/Conv) */
static void conv_2(void)
{
    DOVETAIL_MARK(2);
    digits_conv_2_kernel((int8_t *)(void *)(digits_ram + 512), (const int8_t *)(const void *)(digits_ram), digits_conv_2_bias, digits_conv_2_weights, digits_conv_2_multiplier, digits_conv_2_shift, &digits_conv_2_layer);
}

/* depthwise_3 on the core: Conv 15 (/block1/depthwise/Conv) */
static void depthwise_3(void)
{
    DOVETAIL_MARK(3);
    digits_depthwise_3_kernel((int8_t *)(void *)(digits_ram + 768), (const int8_t *)(const void *)(digits_ram + 512), digits_depthwise_3_weights, digits_depthwise_3_border_bias, digits_depthwise_3_multiplier, digits_depthwise_3_shift);
}

/* conv_4 on the core: Conv 21 (/block1/pointwise/Conv) */
static void conv_4(void)
{
    DOVETAIL_MARK(4);
    digits_conv_4_kernel((int8_t *)(void *)(digits_ram), (const int8_t *)(const void *)(digits_ram + 768), digits_conv_4_bias, digits_conv_4_weights, digits_conv_4_multiplier, digits_conv_4_shift);
}

/* depthwise_5 on the core: Conv 27 (/block2/depthwise/Conv) */
static void depthwise_5(void)
{
    DOVETAIL_MARK(5);
    digits_depthwise_5_kernel((int8_t *)(void *)(digits_ram + 512), (const int8_t *)(const void *)(digits_ram), digits_depthwise_5_weights, digits_depthwise_5_border_bias, digits_depthwise_5_multiplier, digits_depthwise_5_shift);
}

/* conv_6 on the core: Conv 33 (/block2/pointwise/Conv) */
static void conv_6(void)
{
    DOVETAIL_MARK(6);
    digits_conv_6_kernel((int8_t *)(void *)(digits_ram), (const int8_t *)(const void *)(digits_ram + 512), digits_conv_6_bias, digits_conv_6_weights, digits_conv_6_multiplier, digits_conv_6_shift);
}

/* average_pool_7 on the core: GlobalAveragePool 37 (/head/pool/GlobalAveragePool) */
static void average_pool_7(void)
{
    DOVETAIL_MARK(7);
    digits_average_pool_7_kernel((int8_t *)(void *)(digits_ram + 512), (const int8_t *)(const void *)(digits_ram));
}

/* dense_9 on the core: Gemm 45 (/head/fc/Gemm) */
static void dense_9(void)
{
    DOVETAIL_MARK(9);
    digits_dense_9_kernel((int8_t *)(void *)(digits_ram), (const int8_t *)(const void *)(digits_ram + 512), digits_dense_9_bias, digits_dense_9_weights, digits_dense_9_multiplier, digits_dense_9_shift);
}

/* softmax_10 on the core: Softmax 48 (/head/softmax/Softmax) */
static void softmax_10(void)
{
    DOVETAIL_MARK(10);
    digits_softmax_10_kernel((int8_t *)(void *)(digits_ram + 16), (const int8_t *)(const void *)(digits_ram), digits_softmax_10_exponentials);
}

void digits_run(void)
{
    conv_1();
    conv_2();
    depthwise_3();
    conv_4();
    depthwise_5();
    conv_6();
    average_pool_7();
    dense_9();
    softmax_10();
    DOVETAIL_MARK_END();
}
