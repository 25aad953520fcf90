/* The firmware of a board: answers the frames of `dovetail run --on`, one at a time, without heap or interrupts.

   A frame: 0xD7 0xE9, kind, sequence number, 16-bit length of the payload, the low 16 bits of the CRC-32 of these six
   bytes, the payload, the CRC-32 of all before it. Numbers are little-endian, the CRC is that of Ethernet. An answer
   has the sequence number of the request and bit 7 of its kind set. Whoever asks waits for the answer and asks again
   when none comes, so every request may come twice: carrying it out again changes nothing, and RUN has a number by
   which a second one is known. What is no frame is skipped byte by byte. */
#include "board.h"

#include "board_network.h"

#ifndef BOARD_PAYLOAD
#define BOARD_PAYLOAD 1024u /* most bytes of a payload; at least 32 */
#endif
#if BOARD_PAYLOAD < 32u || BOARD_PAYLOAD > 32768u
#error "BOARD_PAYLOAD is 32 to 32768 bytes"
#endif
#define BOARD_VERSION 2u
#define HEADER 8u
#define TRAILER 4u
#define FIRST 0xD7u
#define SECOND 0xE9u

enum { HELLO = 1, WRITE = 2, RUN = 3, READ = 4, CYCLES = 5, RESET = 6, SESSION = 7, ANSWER = 0x80, REFUSED = 0xFF };

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
static uint8_t heard[HEADER + BOARD_PAYLOAD + TRAILER];
static uint32_t held;        /* bytes in it */
static uint8_t said[HEADER + BOARD_PAYLOAD + TRAILER];

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

static uint32_t crc32(const uint8_t *bytes, uint32_t count)
{
    uint32_t crc = 0xFFFFFFFFu;
    for (uint32_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (uint32_t bit = 0; bit < 8u; bit++) {
            crc = crc >> 1 ^ ((crc & 1u) != 0u ? 0xEDB88320u : 0u);
        }
    }
    return ~crc;
}

static uint32_t get(const uint8_t *bytes, uint32_t count)
{
    uint32_t value = 0;
    while (count-- != 0u) {
        value = value << 8 | bytes[count];
    }
    return value;
}

static void put(uint8_t *bytes, uint64_t value, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        bytes[i] = (uint8_t)(value >> 8u * i & 0xFFu);
    }
}

/* Forgets the first bytes heard. */
static void drop(uint32_t count)
{
    held -= count;
    for (uint32_t i = 0; i < held; i++) {
        heard[i] = heard[i + count];
    }
}

/* The bytes of the frame that what is held begins with, after what is no frame was dropped; 0 when more are needed. */
static uint32_t frame(void)
{
    for (;;) {
        uint32_t skip = 0;
        while (skip < held && (heard[skip] != FIRST || (skip + 1u < held && heard[skip + 1u] != SECOND))) {
            skip++;
        }
        drop(skip);
        if (held < HEADER) {
            return 0u;
        }
        const uint32_t length = get(heard + 4, 2u), all = HEADER + length + TRAILER;
        if (length <= BOARD_PAYLOAD && get(heard + 6, 2u) == (crc32(heard, 6u) & 0xFFFFu)) {
            if (held < all) {
                return 0u;
            }
            if (get(heard + all - TRAILER, TRAILER) == crc32(heard, all - TRAILER)) {
                return all;
            }
        }
        drop(1u);
    }
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
    put(to, BOARD_VERSION, 2u);
    put(to + 2, BOARD_PAYLOAD, 2u);
    put(to + 4, BOARD_LAYERS, 4u);
    for (uint32_t i = 0; i < sizeof board_digest; i++) {
        to[8u + i] = board_digest[i];
    }
    return 8u + (uint32_t)sizeof board_digest;
}

static uint32_t cycles(uint32_t from, uint8_t *to)
{
    uint32_t count = 0;
    for (; count + 8u <= BOARD_PAYLOAD && from < BOARD_LAYERS; count += 8u, from++) {
        put(to + count, board_layer_cycles[from], 8u);
    }
    return count;
}

static void move(const uint8_t *from, uint8_t *to, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        to[i] = from[i];
    }
}

/* Carries out a request; returns the bytes of its answer in `to`, or -1 for one that cannot be carried out. */
static int32_t serve(uint32_t kind, const uint8_t *from, uint32_t length, uint8_t *to)
{
    const uint32_t index = length >= 2u ? get(from, 2u) : 0u, offset = length >= 8u ? get(from + 4, 4u) : 0u;
    uint8_t *place;
    if (kind == HELLO && length == 4u) {
        return (int32_t)hello(get(from, 4u), to);
    }
    if (kind == SESSION && length == 0u) {
        put(to, session, 4u);
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
        const uint32_t number = get(from, 4u);
        if (number != last_run) {
            board_infer();
            last_run = number;
        }
        put(to, board_total_cycles, 8u);
        return 8;
    }
    if (kind == READ && length == 8u) {
        const uint32_t count = get(from + 2, 2u);
        place = count > BOARD_PAYLOAD ? 0 : part(outputs, sizeof outputs / sizeof outputs[0], index, offset, count);
        if (place != 0) {
            move(place, to, count);
        }
        return place == 0 ? -1 : (int32_t)count;
    }
    if (kind == CYCLES && length == 4u) {
        return (int32_t)cycles(get(from, 4u), to);
    }
    if (kind == RESET && length == 0u) {
        board_reset();
        return 0;
    }
    return -1;
}

static void answer(uint32_t all)
{
    const int32_t made = serve(heard[2], heard + HEADER, all - HEADER - TRAILER, said + HEADER);
    const uint32_t length = made < 0 ? 0u : (uint32_t)made;
    said[0] = FIRST;
    said[1] = SECOND;
    said[2] = made < 0 ? (uint8_t)REFUSED : (uint8_t)(heard[2] | ANSWER);
    said[3] = heard[3];
    put(said + 4, length, 2u);
    put(said + 6, crc32(said, 6u), 2u);
    put(said + HEADER + length, crc32(said, HEADER + length), TRAILER);
    board_write(said, HEADER + length + TRAILER);
    drop(all);
}

int main(void)
{
    for (;;) {
        for (uint32_t all = frame(); all != 0u; all = frame()) {
            answer(all);
        }
        const uint32_t got = board_read(heard + held, (uint32_t)sizeof heard - held);
        held = got == 0u ? 0u : held + got;
    }
}
