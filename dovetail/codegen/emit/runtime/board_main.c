/* The firmware of a board: answers the frames of `dovetail run --on` (frames.h), one at a time, without heap or
   interrupts. */
#include "board.h"

#include "board_network.h"
#include "frames.h"

typedef struct {
    uint8_t *first;
    uint32_t bytes;
} port;

int main(void);

uint64_t board_total_cycles;
uint64_t board_layer_cycles[BOARD_LAYERS];
const volatile uint8_t board_digest[16] = BOARD_DIGEST; /* volatile: kept as a whole, for debuggers */

static const port inputs[] = BOARD_INPUTS;
static const port outputs[] = BOARD_OUTPUTS;

static uint32_t before;      /* the counter when time was last noted */
static uint32_t layer_now;   /* whose time it is */
static uint32_t session;     /* what HELLO called it; 0 when this program has just begun */
static uint32_t last_run;    /* number of the last inference of this session */

void board_mark(uint32_t layer)
{
    const uint32_t now = board_cycles();
    const uint32_t taken = now - before;
    before = now;
    board_total_cycles += taken;
    board_layer_cycles[layer_now] += taken;
    if (layer < BOARD_LAYERS) { /* what follows the last layer is counted with it */
        layer_now = layer;
    }
}

__attribute__((noinline)) void board_infer(void)
{
    board_total_cycles = 0u;
    for (uint32_t layer = 0; layer < BOARD_LAYERS; layer++) {
        board_layer_cycles[layer] = 0u;
    }
    layer_now = 0u;
    before = board_cycles();
    BOARD_RUN();
    board_mark(BOARD_LAYERS);
}

void board_reset(void)
{
    BOARD_RESET();
}

/* `count` bytes of a port from `offset` on; a null pointer where it has not so many, or there is no such port. */
static uint8_t *part(const port *ports, uint32_t many, uint32_t index, uint32_t offset, uint32_t count)
{
    if (index >= many || offset > ports[index].bytes || count > ports[index].bytes - offset) {
        return 0;
    }
    return ports[index].first + offset;
}

static uint32_t hello(uint32_t name, uint8_t *to)
{
    session = name;
    last_run = 0u;
    frames_put(to, FRAMES_VERSION, 2u);
    frames_put(to + 2, BOARD_PAYLOAD, 2u);
    frames_put(to + 4, BOARD_LAYERS, 4u);
    for (uint32_t i = 0; i < sizeof board_digest; i++) {
        to[8u + i] = board_digest[i];
    }
    return 8u + (uint32_t)sizeof board_digest;
}

static uint32_t cycles(uint32_t from, uint8_t *to)
{
    uint32_t count = 0;
    for (; count + 8u <= BOARD_PAYLOAD && from < BOARD_LAYERS; count += 8u, from++) {
        frames_put(to + count, board_layer_cycles[from], 8u);
    }
    return count;
}

static void move(const uint8_t *from, uint8_t *to, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        to[i] = from[i];
    }
}

static int32_t serve(uint32_t kind, const uint8_t *from, uint32_t length, uint8_t *to)
{
    const uint32_t index = length >= 2u ? frames_get(from, 2u) : 0u, offset = length >= 8u ? frames_get(from + 4, 4u) : 0u;
    uint8_t *place;
    if (kind == HELLO && length == 4u) {
        return (int32_t)hello(frames_get(from, 4u), to);
    }
    if (kind == SESSION && length == 0u) {
        frames_put(to, session, 4u);
        return 4;
    }
    if (kind == WRITE && length >= 8u) {
        place = part(inputs, sizeof inputs / sizeof inputs[0], index, offset, length - 8u);
        if (place != 0) {
            move(from + 8, place, length - 8u);
        }
        return place == 0 ? -1 : 0;
    }
    if (kind == RUN && length == 4u) {
        const uint32_t number = frames_get(from, 4u);
        if (number != last_run) {
            board_infer();
            last_run = number;
        }
        frames_put(to, board_total_cycles, 8u);
        return 8;
    }
    if (kind == READ && length == 8u) {
        const uint32_t count = frames_get(from + 2, 2u);
        place = count > BOARD_PAYLOAD ? 0 : part(outputs, sizeof outputs / sizeof outputs[0], index, offset, count);
        if (place != 0) {
            move(place, to, count);
        }
        return place == 0 ? -1 : (int32_t)count;
    }
    if (kind == CYCLES && length == 4u) {
        return (int32_t)cycles(frames_get(from, 4u), to);
    }
    if (kind == RESET && length == 0u) {
        board_reset();
        return 0;
    }
    return -1;
}

int main(void)
{
    frames_serve(serve);
}
