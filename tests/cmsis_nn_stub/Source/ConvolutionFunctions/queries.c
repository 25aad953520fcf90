#include "arm_nnfunctions.h"

/* The sizes ../shared/hardware/vendorlib.md states for cores with the DSP extension. */
int32_t arm_convolve_wrapper_s8_get_buffer_size_dsp(const cmsis_nn_conv_params *conv_params,
                                                    const cmsis_nn_dims *input_dims, const cmsis_nn_dims *filter_dims,
                                                    const cmsis_nn_dims *output_dims)
{
    int single = filter_dims->h == 1 && filter_dims->w == 1 && conv_params->padding.h == 0 &&
                 conv_params->padding.w == 0 && conv_params->stride.h == 1 && conv_params->stride.w == 1;
    (void)output_dims;
    return single ? 0 : 2 * ((input_dims->c * filter_dims->h * filter_dims->w + 3) / 4 * 4) * 2;
}

int32_t arm_depthwise_conv_wrapper_s8_get_buffer_size_dsp(const cmsis_nn_dw_conv_params *dw_conv_params,
                                                          const cmsis_nn_dims *input_dims,
                                                          const cmsis_nn_dims *filter_dims,
                                                          const cmsis_nn_dims *output_dims)
{
    (void)dw_conv_params;
    (void)output_dims;
    return input_dims->c * filter_dims->h * filter_dims->w * 2;
}

int32_t arm_avgpool_s8_get_buffer_size_dsp(const int dim_dst_width, const int ch_src)
{
    (void)dim_dst_width;
    return ch_src * 4;
}
