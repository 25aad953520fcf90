/* An element: its program and what is its own. */
#ifndef ELEMENT_H
#define ELEMENT_H

#include <stdint.h>

/* What stands at the start of a piece's data; the constants follow at places the program knows, then the transfers, then
   the padding. */
typedef struct {
    uint32_t key;           /* of the messages it sends */
    uint32_t sends;         /* 1: somebody reads them */
    uint32_t stores;        /* how many transfers to DRAM follow those from it: 1 where its result is wanted there */
    uint32_t skip;          /* bytes of the first operand before those it multiplies */
    uint32_t transfers;     /* place of the transfers of messages, in bytes from here, and how many there are */
    uint32_t messages;
    uint32_t fetches;       /* how many transfers from DRAM follow them; then those to it */
    uint32_t fills;         /* how many boxes of padding follow those */
} element_t;

/* Padding around the first operand, which no message writes. */
typedef struct {
    uint32_t offset;        /* from the slot of input 0 */
    uint32_t rows;
    uint32_t bytes;         /* of each row */
    uint32_t row_bytes;     /* from row to row */
    uint32_t value;
    uint32_t slots;
    uint32_t slot_bytes;
} mesh_fill_t;

/* Once, before the first input. */
void element_begin(void);
/* Computes an input: 0, 1, 2, ... Of an element with several pieces: an input of one of them, so that as many turns as there
   are pieces make an input. */
void element_run(uint32_t turn);
/* Writes the padding, says where messages belong, and expects them: what a piece begins with, given its data and operands. */
void element_prepare(uint8_t *data, uint8_t *const *operands);

#endif
