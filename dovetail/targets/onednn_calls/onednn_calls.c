/* oneDNN's C API (oneDNN Developer Guide, "Convolution", "Quantization"), one primitive per layer, made at its first call
   and kept. The weights are brought into the order the primitive wants then, too. */
#include "onednn_calls.h"

#include "oneapi/dnnl/dnnl.h"

#ifndef ONEDNN_LAYERS
#define ONEDNN_LAYERS 512
#endif

typedef struct {
    const onednn_layer *layer;
    const int8_t *weights_given;
    dnnl_primitive_t primitive;
    dnnl_memory_t x, weights, sums, zero;
    int32_t zero_point;
} made_layer;

static made_layer made[ONEDNN_LAYERS];
static int32_t layers;
static dnnl_engine_t engine;
static dnnl_stream_t stream;

#define TRY(call)                                                                                                        \
    do {                                                                                                                 \
        if ((call) != dnnl_success) { return 1; }                                                                        \
    } while (0)

/* Images in rows of pixels. */
static dnnl_status_t describe_image(dnnl_memory_desc_t *to, int32_t images, int32_t channels, int32_t rows,
                                    int32_t columns, dnnl_data_type_t type)
{
    const dnnl_dims_t sizes = {images, channels, rows, columns};
    return dnnl_memory_desc_create_with_tag(to, 4, sizes, type, dnnl_nhwc);
}

/* Weights as they are given, or (any) in the order oneDNN likes best. */
static dnnl_status_t describe_weights(dnnl_memory_desc_t *to, const onednn_layer *l, int any)
{
    const int64_t inputs = l->channels / l->groups, outputs = l->outputs / l->groups;
    const dnnl_dims_t sizes = {l->groups, outputs, inputs, l->kernel_rows, l->kernel_columns};
    const dnnl_dims_t strides = {l->weights_group, l->weights_output, l->weights_input, l->weights_row,
                                 l->weights_column};
    const int first = l->groups == 1; /* without groups it has one dimension less */
    if (any) {
        return dnnl_memory_desc_create_with_tag(to, 5 - first, sizes + first, dnnl_s8, dnnl_format_tag_any);
    }
    return dnnl_memory_desc_create_with_strides(to, 5 - first, sizes + first, dnnl_s8, strides + first);
}

static int32_t run(dnnl_primitive_t primitive, int32_t count, const dnnl_exec_arg_t *arguments)
{
    TRY(dnnl_primitive_execute(primitive, stream, count, arguments));
    TRY(dnnl_stream_wait(stream));
    return 0;
}

/* Weights in the order of `wanted`. */
static int32_t order_weights(made_layer *m, const_dnnl_memory_desc_t given, const_dnnl_memory_desc_t wanted)
{
    union {
        const int8_t *from;
        void *to;
    } place = {m->weights_given}; /* oneDNN only reads it */
    dnnl_memory_t source;
    dnnl_primitive_desc_t description;
    dnnl_primitive_t reorder;
    TRY(dnnl_memory_create(&source, given, engine, place.to));
    TRY(dnnl_memory_create(&m->weights, wanted, engine, DNNL_MEMORY_ALLOCATE));
    TRY(dnnl_reorder_primitive_desc_create(&description, given, engine, wanted, engine, 0));
    TRY(dnnl_primitive_create(&reorder, description));
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_FROM, source}, {DNNL_ARG_TO, m->weights}};
    const int32_t status = run(reorder, 2, arguments);
    TRY(dnnl_primitive_destroy(reorder));
    TRY(dnnl_primitive_desc_destroy(description));
    TRY(dnnl_memory_destroy(source));
    return status;
}

/* The primitive of a layer and its memories. */
static int32_t make(made_layer *m, const onednn_layer *l)
{
    const dnnl_dims_t strides = {l->stride_down, l->stride_right};
    const dnnl_dims_t holes = {l->dilation_down - 1, l->dilation_right - 1};
    const dnnl_dims_t before = {l->top, l->left}, after = {l->bottom, l->right};
    dnnl_memory_desc_t x, weights, any, sums, zero;
    dnnl_primitive_attr_t attributes;
    dnnl_primitive_desc_t description;
    const dnnl_dims_t one = {1};
    m->zero_point = l->zero_in;
    TRY(describe_image(&x, l->images, l->channels, l->height, l->width, dnnl_s8));
    TRY(describe_image(&sums, l->images, l->outputs, l->rows, l->columns, dnnl_s32));
    TRY(describe_weights(&weights, l, 0));
    TRY(describe_weights(&any, l, 1));
    TRY(dnnl_memory_desc_create_with_tag(&zero, 1, one, dnnl_s32, dnnl_a));
    TRY(dnnl_primitive_attr_create(&attributes));
    if (l->zero_in != 0) {
        TRY(dnnl_primitive_attr_set_zero_points_mask(attributes, DNNL_ARG_SRC, 0));
    }
    TRY(dnnl_convolution_forward_primitive_desc_create(&description, engine, dnnl_forward_inference,
                                                       dnnl_convolution_direct, x, any, 0, sums, strides, holes, before,
                                                       after, attributes));
    TRY(dnnl_primitive_create(&m->primitive, description));
    TRY(dnnl_memory_create(&m->x, x, engine, DNNL_MEMORY_NONE));
    TRY(dnnl_memory_create(&m->sums, sums, engine, DNNL_MEMORY_NONE));
    TRY(dnnl_memory_create(&m->zero, zero, engine, &m->zero_point));
    const_dnnl_memory_desc_t wanted = dnnl_primitive_desc_query_md(description, dnnl_query_weights_md, 0);
    const int32_t status = order_weights(m, weights, wanted);
    TRY(dnnl_primitive_desc_destroy(description));
    TRY(dnnl_primitive_attr_destroy(attributes));
    TRY(dnnl_memory_desc_destroy(x));
    TRY(dnnl_memory_desc_destroy(weights));
    TRY(dnnl_memory_desc_destroy(any));
    TRY(dnnl_memory_desc_destroy(sums));
    TRY(dnnl_memory_desc_destroy(zero));
    return status;
}

/* The layer of these constants, made if it is new: null with a status where it cannot be. */
static made_layer *find(const onednn_layer *layer, const int8_t *weights, int32_t *status)
{
    for (int32_t at = 0; at < layers; at++) {
        if (made[at].layer == layer && made[at].weights_given == weights) {
            return &made[at];
        }
    }
    const unsigned adds_bytes = 8u | 64u; /* bits of AVX-VNNI and AVX512-VNNI in dnnl_cpu_isa_t */
    *status = layers == ONEDNN_LAYERS ? 3 : ((unsigned)dnnl_get_effective_cpu_isa() & adds_bytes) == 0u ? 2 : 0;
    if (*status == 0 && engine == 0) {
        *status = dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success ||
                  dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) != dnnl_success;
    }
    if (*status == 0) {
        made[layers].layer = layer;
        made[layers].weights_given = weights;
        *status = make(&made[layers], layer);
    }
    return *status == 0 ? &made[layers++] : 0;
}

/* Bias, scale, zero point and limits of one row of sums; also compiled for processors with wider vectors, where the
   compiler can choose at run time.

   A sum is scaled as TensorFlow Lite Micro does, rounded twice: to the upper word of the doubled product, halves up, then
   by a shift to the right, halves away from zero. A shift to the left comes first. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#endif
static void requantise(const onednn_layer *layer, const int32_t *bias, const int32_t *multiplier, const int32_t *shift,
                       const int32_t *sums, int8_t *result)
{
    for (int32_t channel = 0; channel < layer->outputs; channel++) {
        const int32_t left = shift[channel] > 0 ? shift[channel] : 0, right = shift[channel] < 0 ? -shift[channel] : 0;
        const uint32_t sum = ((uint32_t)sums[channel] + (uint32_t)bias[channel]) << left;
        const int32_t high = (int32_t)(((int64_t)(int32_t)sum * multiplier[channel] + 0x40000000) >> 31);
        const int32_t halved = (((high + (high >> 31)) >> (right > 0 ? right - 1 : 0)) + 1) >> 1;
        const int32_t y = (right > 0 ? halved : high) + layer->zero_out;
        const int32_t raised = y < layer->low ? layer->low : y;
        result[channel] = (int8_t)(raised > layer->high ? layer->high : raised);
    }
}

int32_t onednn_convolution(const onednn_layer *layer, const int8_t *x, const int8_t *weights, const int32_t *bias,
                           const int32_t *multiplier, const int32_t *shift, int32_t *sums, int8_t *result)
{
    union {
        const int8_t *from;
        void *to;
    } place = {x};
    int32_t status = 0;
    made_layer *m = find(layer, weights, &status);
    if (m == 0) {
        return status;
    }
    TRY(dnnl_memory_set_data_handle(m->x, place.to));
    TRY(dnnl_memory_set_data_handle(m->sums, sums));
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, m->x},
                                         {DNNL_ARG_WEIGHTS, m->weights},
                                         {DNNL_ARG_DST, m->sums},
                                         {DNNL_ARG_ATTR_ZERO_POINTS | DNNL_ARG_SRC, m->zero}};
    status = run(m->primitive, layer->zero_in != 0 ? 4 : 3, arguments);
    const int32_t pixels = layer->images * layer->rows * layer->columns;
    for (int32_t pixel = 0; pixel < pixels; pixel++) {
        requantise(layer, bias, multiplier, shift, sums + pixel * layer->outputs, result + pixel * layer->outputs);
    }
    return status;
}
