#include "digits.h"

#include "dovetail_rt.h"
#include "maeri.h"
#include "digits_constants.h"
#include "digits_kernels.h"

uint8_t digits_ram[1024] __attribute__((aligned(16), section(".ram")));

static void conv_1_to_depthwise_7(void)
{
    /* conv_1, conv_2, ..., conv_6 on maeri: Conv 3 (/conv1/Conv), Conv 9 (/conv2/Conv), Conv 21 (/block1/pointwise/Conv), Conv 33 (/block2/pointwise/Conv) */
    /* depthwise_3, depthwise_5, depthwise_7 on maeri: Conv 15 (/block1/depthwise/Conv), Conv 27 (/block2/depthwise/Conv), GlobalAveragePool 37 (/head/pool/GlobalAveragePool) */
    static const struct { const uint32_t *task; const uint8_t *constants; } conv_1_turns[7] = {
        {digits_conv_1_task, digits_conv_1_constants},
        {digits_conv_2_task, digits_conv_2_constants},
        {digits_depthwise_3_task, digits_depthwise_3_constants},
        {digits_conv_4_task, digits_conv_4_constants},
        {digits_depthwise_5_task, digits_depthwise_5_constants},
        {digits_conv_6_task, digits_conv_6_constants},
        {digits_depthwise_7_task, digits_depthwise_7_constants},
    };
    for (uint32_t i = 0; i < 7; ++i) {
        DOVETAIL_MARK(1 + i);
        (void)maeri_start(conv_1_turns[i].task, conv_1_turns[i].constants);
    }
}

static void dense_9_to_softmax_10(void)
{
    /* dense_9 on maeri: Gemm 45 (/head/fc/Gemm) */
    DOVETAIL_MARK(9);
    uint32_t dense_9_launched_0 = maeri_start(digits_dense_9_task, digits_dense_9_constants);

    /* softmax_10 on the core: Softmax 48 (/head/softmax/Softmax) */
    DOVETAIL_MARK(10);
    maeri_wait(dense_9_launched_0);
    digits_softmax_10_kernel((int8_t *)(void *)(digits_ram + 64), (const int8_t *)(const void *)(digits_ram), digits_softmax_10_exponentials);
}

void digits_run(void)
{
    maeri_init();
    conv_1_to_depthwise_7();
    dense_9_to_softmax_10();
    DOVETAIL_MARK_END();
}
