#include "frames.h"

#include "board.h"

#define HEADER 8u
#define TRAILER 4u
#define FIRST 0xD7u
#define SECOND 0xE9u

enum { ANSWER = 0x80, REFUSED = 0xFF };

static uint8_t heard[HEADER + BOARD_PAYLOAD + TRAILER];
static uint32_t held; /* bytes in it */
static uint8_t said[HEADER + BOARD_PAYLOAD + TRAILER];

uint32_t frames_get(const uint8_t *bytes, uint32_t count)
{
    uint32_t value = 0;
    while (count-- != 0u) {
        value = value << 8 | bytes[count];
    }
    return value;
}

void frames_put(uint8_t *bytes, uint64_t value, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        bytes[i] = (uint8_t)(value >> 8u * i & 0xFFu);
    }
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
        const uint32_t length = frames_get(heard + 4, 2u), all = HEADER + length + TRAILER;
        if (length <= BOARD_PAYLOAD && frames_get(heard + 6, 2u) == (crc32(heard, 6u) & 0xFFFFu)) {
            if (held < all) {
                return 0u;
            }
            if (frames_get(heard + all - TRAILER, TRAILER) == crc32(heard, all - TRAILER)) {
                return all;
            }
        }
        drop(1u);
    }
}

static void answer(frames_server *serve, uint32_t all)
{
    const int32_t made = serve(heard[2], heard + HEADER, all - HEADER - TRAILER, said + HEADER);
    const uint32_t length = made < 0 ? (uint32_t)(-1 - made) : (uint32_t)made;
    said[0] = FIRST;
    said[1] = SECOND;
    said[2] = made < 0 ? (uint8_t)REFUSED : (uint8_t)(heard[2] | ANSWER);
    said[3] = heard[3];
    frames_put(said + 4, length, 2u);
    frames_put(said + 6, crc32(said, 6u), 2u);
    frames_put(said + HEADER + length, crc32(said, HEADER + length), TRAILER);
    board_write(said, HEADER + length + TRAILER);
    drop(all);
}

void frames_serve(frames_server *serve)
{
    for (;;) {
        for (uint32_t all = frame(); all != 0u; all = frame()) {
            answer(serve, all);
        }
        const uint32_t got = board_read(heard + held, (uint32_t)sizeof heard - held);
        held = got == 0u ? 0u : held + got;
    }
}
