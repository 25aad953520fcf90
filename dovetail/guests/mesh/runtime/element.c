/* What every piece begins with. */
#include "element.h"

#include "mesh_hal.h"

static void fill_row(uint8_t *to, uint32_t value, uint32_t bytes)
{
    const uint32_t word = value * 0x01010101u;
    for (; bytes > 0u && ((uintptr_t)to & 3u) != 0u; --bytes) {
        *to++ = (uint8_t)value;
    }
    for (; bytes >= 16u; bytes -= 16u, to += 16) {
        __builtin_memcpy(to, &word, 4);
        __builtin_memcpy(to + 4, &word, 4);
        __builtin_memcpy(to + 8, &word, 4);
        __builtin_memcpy(to + 12, &word, 4);
    }
    for (; bytes > 0u; --bytes) {
        *to++ = (uint8_t)value;
    }
}

static void fill(const mesh_fill_t *box, uint8_t *operand)
{
    for (uint32_t slot = 0; slot < box->slots; ++slot) {
        uint8_t *row = operand + slot * box->slot_bytes + box->offset;
        for (uint32_t count = 0; count < box->rows; ++count, row += box->row_bytes) {
            fill_row(row, box->value, box->bytes);
        }
    }
}

void element_prepare(uint8_t *data, uint8_t *const *operands)
{
    const element_t *self = (const element_t *)(const void *)data;
    mesh_transfer_t *transfers = (mesh_transfer_t *)(void *)(data + self->transfers);
    const uint32_t count = self->messages + self->fetches;
    const mesh_fill_t *fills = (const mesh_fill_t *)(const void *)(transfers + count + self->stores);
    for (uint32_t i = 0; i < self->fills; ++i) {
        fill(fills + i, operands[0]);
    }
    for (uint32_t i = 0; i < count; ++i) {
        transfers[i].target += (uint32_t)(uintptr_t)operands[transfers[i].operand];
    }
    mesh_expect(transfers, self->messages);
}
