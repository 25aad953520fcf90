/* A mesh of one element that adds up what it was loaded with and given: `Adder` of tests/test_rack.py, in C. */
#include <string.h>
#include <unistd.h>

#include "board.h"
#include "mesh_manager.h"

enum { DATA = 5000, INPUT = 24, ROOM = 8, ELEMENT = 7 };

typedef struct {
    uint8_t bytes[4096];
    uint32_t count;
} part;

static uint8_t data[DATA];
static uint32_t loaded, computed;
static uint32_t any; /* data came */
static part tensor_size;
static uint8_t given[ROOM * INPUT], result[ROOM * INPUT];
static uint32_t is_ready;

uint32_t board_read(uint8_t *bytes, uint32_t most)
{
    const ssize_t got = read(0, bytes, most);
    if (got <= 0) {
        _exit(0);
    }
    return (uint32_t)got;
}

void board_write(const uint8_t *bytes, uint32_t count)
{
    while (count != 0u) {
        const ssize_t put = write(1, bytes, count);
        if (put <= 0) {
            _exit(0);
        }
        bytes += put;
        count -= (uint32_t)put;
    }
}

void manager_forget(void)
{
    loaded = any = tensor_size.count = computed = is_ready = 0;
}

const char *manager_load(uint32_t what, uint32_t number, uint32_t offset, const uint8_t *content, uint32_t bytes)
{
    uint8_t *to = what == LOADED_DATA && number == ELEMENT ? data : tensor_size.bytes;
    uint32_t *count = to == data ? &loaded : &tensor_size.count;
    const uint32_t most = to == data ? DATA : (uint32_t)sizeof tensor_size.bytes;
    if (to != data && (what != LOADED_TENSOR || number != 0u)) {
        return "this machine takes no such thing";
    }
    if (offset > *count || bytes > most - offset) {
        return "it does not follow what is there, or is too much";
    }
    if (bytes != 0u) {
        memcpy(to + offset, content, bytes);
    }
    *count = offset + bytes > *count ? offset + bytes : *count;
    any |= to == data;
    return 0;
}

uint32_t manager_elements(void) { return any; }

const char *manager_start(uint32_t *inputs)
{
    if (loaded != DATA) {
        return "the element's data are not whole";
    }
    memset(given, 0, sizeof given);
    is_ready = tensor_size.count != 0u && tensor_size.bytes[0] == INPUT;
    *inputs = ROOM;
    return 0;
}

const char *manager_write(uint32_t tensor, uint32_t offset, const uint8_t *content, uint32_t bytes)
{
    if (!is_ready || tensor != 0u || offset > sizeof given || bytes > sizeof given - offset) {
        return "the tensor has no such byte";
    }
    memcpy(given + offset, content, bytes);
    return 0;
}

const char *manager_run(uint32_t inputs, uint64_t *cycles)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < DATA; i++) {
        sum += data[i];
    }
    for (uint32_t i = 0; i < inputs * INPUT; i++) {
        result[i] = (uint8_t)(given[i] + sum);
    }
    computed = inputs;
    *cycles = 5u;
    return 0;
}

const char *manager_read(uint32_t number, uint32_t offset, uint8_t *to, uint32_t bytes)
{
    if (number != 0u || computed == 0u || offset > computed * INPUT || bytes > computed * INPUT - offset) {
        return "the result has no such byte";
    }
    memcpy(to, result + offset, bytes);
    return 0;
}

uint32_t manager_clocks(uint32_t first, uint64_t *to, uint32_t most)
{
    uint32_t count = 0;
    for (; count < most && first < 4u * computed; count++, first++) {
        to[count] = 5u;
    }
    return count;
}

int main(void) { mesh_manage(); }
