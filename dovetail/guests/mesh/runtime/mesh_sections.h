/* What a program of several sections needs of the machine beside mesh_hal.h, and what its element's data hold. */
#ifndef MESH_SECTIONS_H
#define MESH_SECTIONS_H

#include <stdint.h>

/* A stretch of the chip's DRAM that belongs into the memory of a section. */
typedef struct {
    uint32_t place;         /* in the DRAM's image, in bytes */
    uint32_t offset;        /* from the section's data */
    uint32_t bytes;
} mesh_load_t;

/* What an element does in a section. */
typedef struct {
    uint32_t part;          /* which part of the program; no part: nothing */
    uint32_t data;          /* places in the element's memory for sections */
    uint32_t buffers;
    uint32_t early;         /* 1: its data are loaded while the section before computes */
    uint32_t loads;         /* how many, and the first of them */
    uint32_t first_load;
} mesh_section_t;

/* Begins what the element's data are; the sections follow, then the loads at this place. */
typedef struct {
    uint32_t sections;
    uint32_t loads;
} mesh_sections_t;

/* Waits until every element has called it for this turn, and what all sent and stored before is where it belongs. */
void mesh_join(uint32_t turn);
/* DMA from the chip's DRAM: starts a load. What several elements ask for at once is read once. */
void mesh_load(void *to, uint32_t place, uint32_t bytes);
/* Waits for all loads of this element. */
void mesh_loaded(void);

#endif
