/* The protocol of an element that manages a mesh: sessions, builds, and runs that happen once (docs/agent.md). */
#include "mesh_manager.h"

#include "frames.h"

#define DIGEST 16u
#define NOTHING 0u
#define COUNTS (BOARD_PAYLOAD / 8u)

static uint8_t digest[DIGEST]; /* of the build that was started; zeros for none */
static uint32_t session;       /* what HELLO called it; 0 when this program has just begun */
static uint32_t last_run;      /* number of the last run of this session */
static uint32_t room;          /* inputs it takes at once */
static uint64_t cycles;        /* of the last run */

static int32_t refused(const char *why, uint8_t *to)
{
    int32_t count = 0;
    while (why[count] != '\0' && (uint32_t)count < BOARD_PAYLOAD) {
        to[count] = (uint8_t)why[count];
        count++;
    }
    return -1 - count;
}

static void set_digest(const uint8_t *from)
{
    for (uint32_t i = 0; i < DIGEST; i++) {
        digest[i] = from == 0 ? 0u : from[i];
    }
}

static uint32_t is_started(void)
{
    uint32_t any = 0;
    for (uint32_t i = 0; i < DIGEST; i++) {
        any |= digest[i];
    }
    return any;
}

static int32_t hello(uint32_t name, uint8_t *to)
{
    session = name;
    last_run = 0u;
    frames_put(to, FRAMES_VERSION, 2u);
    frames_put(to + 2, BOARD_PAYLOAD, 2u);
    frames_put(to + 4, manager_elements(), 4u);
    for (uint32_t i = 0; i < DIGEST; i++) {
        to[8u + i] = digest[i];
    }
    return (int32_t)(8u + DIGEST);
}

static int32_t load(const uint8_t *from, uint32_t length, uint8_t *to)
{
    const uint32_t what = frames_get(from, 4u);
    const char *why = 0;
    set_digest(0);
    if (what == NOTHING) {
        manager_forget();
        cycles = 0u;
    } else if (what > LOADED_DRAM) {
        why = "nothing is loaded by this number";
    } else {
        why = manager_load(what, frames_get(from + 4, 4u), frames_get(from + 8, 4u), from + 12, length - 12u);
    }
    return why == 0 ? 0 : refused(why, to);
}

static int32_t start(const uint8_t *from, uint8_t *to)
{
    uint32_t inputs = 0;
    const char *why = manager_start(&inputs);
    if (why != 0) {
        return refused(why, to);
    }
    set_digest(from);
    room = inputs;
    frames_put(to, inputs, 4u);
    return 4;
}

static int32_t run(uint32_t number, uint32_t inputs, uint8_t *to)
{
    if (!is_started() || inputs == 0u || inputs > room) {
        return refused("nothing was started, or it takes another number of inputs", to);
    }
    if (number != last_run) {
        const char *why = manager_run(inputs, &cycles);
        if (why != 0) {
            return refused(why, to);
        }
        last_run = number;
    }
    frames_put(to, cycles, 8u);
    return 8;
}

static int32_t clocks(uint32_t first, uint8_t *to)
{
    static uint64_t counts[COUNTS];
    const uint32_t found = manager_clocks(first, counts, COUNTS);
    for (uint32_t i = 0; i < found; i++) {
        frames_put(to + 8u * i, counts[i], 8u);
    }
    return (int32_t)(8u * found);
}

static int32_t write_or_read(uint32_t kind, const uint8_t *from, uint32_t length, uint8_t *to)
{
    const uint32_t number = frames_get(from, 2u), count = frames_get(from + 2, 2u), offset = frames_get(from + 4, 4u);
    const char *why;
    if (kind == WRITE) {
        why = is_started() ? manager_write(number, offset, from + 8, length - 8u) : "nothing was started";
    } else {
        why = count <= BOARD_PAYLOAD ? manager_read(number, offset, to, count) : "a payload has not so many bytes";
    }
    return why != 0 ? refused(why, to) : kind == WRITE ? 0 : (int32_t)count;
}

static int32_t serve(uint32_t kind, const uint8_t *from, uint32_t length, uint8_t *to)
{
    if (kind == HELLO && length == 4u) {
        return hello(frames_get(from, 4u), to);
    }
    if (kind == SESSION && length == 0u) {
        frames_put(to, session, 4u);
        return 4;
    }
    if (kind == RESET && length == 0u) {
        return 0; /* a mapped network keeps nothing from one input to the next */
    }
    if (kind == LOAD && length >= 12u) {
        return load(from, length, to);
    }
    if (kind == START && length == DIGEST) {
        return start(from, to);
    }
    if (kind == RUN && length == 8u) {
        return run(frames_get(from, 4u), frames_get(from + 4, 4u), to);
    }
    if (kind == CYCLES && length == 4u) {
        return clocks(frames_get(from, 4u), to);
    }
    if ((kind == WRITE && length >= 8u) || (kind == READ && length == 8u)) {
        return write_or_read(kind, from, length, to);
    }
    return refused("there is no such request", to);
}

void mesh_manage(void)
{
    frames_serve(serve);
}
