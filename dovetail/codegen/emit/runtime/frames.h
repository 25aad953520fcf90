/* Frames on a line, for whoever answers them: a board, or the element that manages a mesh.

   A frame: 0xD7 0xE9, kind, sequence number, 16-bit length of the payload, the low 16 bits of the CRC-32 of these six
   bytes, the payload, the CRC-32 of all before it. Numbers are little-endian, the CRC is that of Ethernet. An answer
   has the sequence number of the request and bit 7 of its kind set. Whoever asks waits for the answer and asks again
   when none comes, so every request may come twice: carrying it out again changes nothing, and RUN has a number by
   which a second one is known. What is no frame is skipped byte by byte. */
#ifndef DOVETAIL_FRAMES_H
#define DOVETAIL_FRAMES_H

#include <stdint.h>

#ifndef BOARD_PAYLOAD
#define BOARD_PAYLOAD 1024u /* most bytes of a payload; at least 32 */
#endif
#if BOARD_PAYLOAD < 32u || BOARD_PAYLOAD > 32768u
#error "BOARD_PAYLOAD is 32 to 32768 bytes"
#endif
#define FRAMES_VERSION 2u

enum { HELLO = 1, WRITE = 2, RUN = 3, READ = 4, CYCLES = 5, RESET = 6, SESSION = 7, LOAD = 8, START = 9 };

/* Carries out a request, whose payload is `from`; returns the bytes of its answer in `to`, at most BOARD_PAYLOAD. Of a
   request that cannot be carried out, -1 less the bytes of a sentence in `to` that says why, which may be none. */
typedef int32_t frames_server(uint32_t kind, const uint8_t *from, uint32_t length, uint8_t *to);

/* Answers all that `board_read` brings, for ever. */
void frames_serve(frames_server *serve);

/* A number of up to 4 bytes, and one of up to 8. */
uint32_t frames_get(const uint8_t *bytes, uint32_t count);
void frames_put(uint8_t *bytes, uint64_t value, uint32_t count);

#endif
