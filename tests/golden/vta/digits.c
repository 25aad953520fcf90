#include "digits.h"

#include "dovetail_rt.h"
#include "copy.h"
#include "vta.h"
#include "digits_constants.h"
#include "digits_kernels.h"

uint8_t digits_dram[4672] __attribute__((aligned(16), section(".dram")));

/* relayout_0 on the core: made by the compiler */
static void relayout_0(void)
{
    DOVETAIL_MARK(1);
    copy_into_blocks(digits_dram + 176, digits_dram + 1600, 1, 8, 16, 1, 8, 160, 8);
}

/* pad_1 on the core: Conv 3 (/conv1/Conv) */
static void pad_1(void)
{
    DOVETAIL_MARK(2);
    copy_fill_border(digits_dram, 128, 8, 160, 1, 0, &(const copy_padding){1, 1, 16, 16, 128});
}

/* conv_2 on vta: Conv 3 (/conv1/Conv) */
static void conv_2(void)
{
    DOVETAIL_MARK(3);
    (void)vta_start(digits_conv_2_task, digits_conv_2_constants);
}

/* pad_3 on the core: Conv 9 (/conv2/Conv) */
static void pad_3(void)
{
    DOVETAIL_MARK(4);
    copy_fill_border(digits_dram + 1600, 128, 8, 144, 1, 0, &(const copy_padding){0, 1, 0, 16, 128});
}

/* conv_4 on vta: Conv 9 (/conv2/Conv) */
static void conv_4(void)
{
    DOVETAIL_MARK(5);
    (void)vta_start(digits_conv_4_task, digits_conv_4_constants);
}

/* pad_5 on the core: Conv 15 (/block1/depthwise/Conv) */
static void pad_5(void)
{
    DOVETAIL_MARK(6);
    copy_fill_border(digits_dram + 4096, 64, 4, 96, 1, 0, &(const copy_padding){1, 1, 16, 16, 128});
}

/* depthwise_6 on vta: Conv 15 (/block1/depthwise/Conv) */
static void depthwise_6(void)
{
    DOVETAIL_MARK(7);
    (void)vta_start(digits_depthwise_6_task, digits_depthwise_6_constants);
}

/* conv_7 on vta: Conv 21 (/block1/pointwise/Conv) */
static void conv_7(void)
{
    DOVETAIL_MARK(8);
    (void)vta_start(digits_conv_7_task, digits_conv_7_constants);
}

/* pad_8 on the core: Conv 27 (/block2/depthwise/Conv) */
static void pad_8(void)
{
    DOVETAIL_MARK(9);
    copy_fill_border(digits_dram + 2944, 64, 4, 96, 2, 576, &(const copy_padding){1, 1, 16, 16, 128});
}

/* depthwise_9 on vta: Conv 27 (/block2/depthwise/Conv) */
static void depthwise_9(void)
{
    DOVETAIL_MARK(10);
    (void)vta_start(digits_depthwise_9_task, digits_depthwise_9_constants);
}

/* conv_10 on vta: Conv 33 (/block2/pointwise/Conv) */
static void conv_10(void)
{
    DOVETAIL_MARK(11);
    (void)vta_start(digits_conv_10_task, digits_conv_10_constants);
}

/* depthwise_11 on vta: GlobalAveragePool 37 (/head/pool/GlobalAveragePool) */
static void depthwise_11(void)
{
    DOVETAIL_MARK(12);
    (void)vta_start(digits_depthwise_11_task, digits_depthwise_11_constants);
}

static void dense_13_to_relayout_1(void)
{
    /* dense_13 on vta: Gemm 45 (/head/fc/Gemm) */
    DOVETAIL_MARK(14);
    uint32_t dense_13_launched_0 = vta_start(digits_dense_13_task, digits_dense_13_constants);

    /* relayout_1 on the core: made by the compiler */
    DOVETAIL_MARK(15);
    vta_wait(dense_13_launched_0);
    copy_1d(digits_dram, digits_dram + 64, 10);
}

/* softmax_14 on the core: Softmax 48 (/head/softmax/Softmax) */
static void softmax_14(void)
{
    DOVETAIL_MARK(16);
    digits_softmax_14_kernel((int8_t *)(void *)(digits_dram + 64), (const int8_t *)(const void *)(digits_dram), digits_softmax_14_exponentials);
}

void digits_run(void)
{
    vta_init();
    relayout_0();
    pad_1();
    conv_2();
    pad_3();
    conv_4();
    pad_5();
    depthwise_6();
    conv_7();
    pad_8();
    depthwise_9();
    conv_10();
    depthwise_11();
    dense_13_to_relayout_1();
    softmax_14();
    DOVETAIL_MARK_END();
}
