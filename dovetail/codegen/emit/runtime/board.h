/* What a board gives so that `dovetail run --on` can reach it: three functions you write, in one C file.

   `make board BOARD_IO=your_file.c` links them with the network and board_main.c. */
#ifndef DOVETAIL_BOARD_H
#define DOVETAIL_BOARD_H

#include <stdint.h>

/* Waits for at least one byte, then gives those that are there, at most `most`; returns how many. May return 0 when
   the line has been quiet for a while (some 50 ms): a frame that was only half received is then given up. */
uint32_t board_read(uint8_t *bytes, uint32_t most);

/* Sends all of them, in order. */
void board_write(const uint8_t *bytes, uint32_t count);

/* A counter of cycles, or of any unit of time, that goes up and wraps at 2^32. No layer may take longer than one turn
   of it. Return 0 if there is none. */
uint32_t board_cycles(void);

/* For those who call the network from a main of their own, and for debuggers. */

/* One inference, timed. */
void board_infer(void);
/* At the start of a layer; DOVETAIL_MARK calls it. */
void board_mark(uint32_t layer);
/* The network's states as they were at the start; nothing where it has none. */
void board_reset(void);

extern uint64_t board_total_cycles;   /* of the last inference */
extern uint64_t board_layer_cycles[]; /* of its layers, which add up to the total */
extern const volatile uint8_t board_digest[16]; /* which build this is: `digest` of dovetail.json */

#endif
