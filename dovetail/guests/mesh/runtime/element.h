/* An element: its program and what is its own. */
#ifndef ELEMENT_H
#define ELEMENT_H

#include <stdint.h>

/* What stands at the start of an element's data; the constants follow at places the program knows, then the transfers. */
typedef struct {
    uint32_t key;           /* of the messages it sends */
    uint32_t sends;         /* 1: somebody reads them */
    uint32_t stores;        /* 1: its results go to DRAM */
    uint32_t skip;          /* bytes of the first operand before those it multiplies */
    uint32_t transfers;     /* place of the transfers of messages, in bytes from here, and how many there are */
    uint32_t messages;
    uint32_t fetches;       /* how many transfers from DRAM follow them */
    uint32_t reserved;
} element_t;

/* Once, before the first input. */
void element_begin(void);
/* Computes an input: 0, 1, 2, ... Of an element with several pieces: an input of one of them, so that as many turns as there
   are pieces make an input. */
void element_run(uint32_t turn);

#endif
