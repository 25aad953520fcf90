#include "arm_nnfunctions.h"
#include "arm_nnsupport.h"

arm_cmsis_nn_status arm_fully_connected_s8(const cmsis_nn_context *ctx, const cmsis_nn_fc_params *fc_params,
                                           const cmsis_nn_per_tensor_quant_params *quant_params,
                                           const cmsis_nn_dims *input_dims, const int8_t *input_data,
                                           const cmsis_nn_dims *filter_dims, const int8_t *filter_data,
                                           const cmsis_nn_dims *bias_dims, const int32_t *bias_data,
                                           const cmsis_nn_dims *output_dims, int8_t *output_data)
{
    (void)ctx;
    (void)bias_dims;
    for (int32_t batch = 0; batch < input_dims->n; batch++) {
        for (int32_t row = 0; row < output_dims->c; row++) {
            int32_t total = bias_data ? bias_data[row] : 0;
            for (int32_t at = 0; at < filter_dims->n; at++) {
                const int32_t x = arm_nn_read_s8(input_data + batch * filter_dims->n + at) + fc_params->input_offset;
                total += x * arm_nn_read_s8(filter_data + row * filter_dims->n + at);
            }
            total = arm_nn_scaled(total, quant_params->multiplier, quant_params->shift) + fc_params->output_offset;
            *output_data++ = arm_clamp_s8(total, &fc_params->activation);
        }
    }
    return ARM_CMSIS_NN_SUCCESS;
}
