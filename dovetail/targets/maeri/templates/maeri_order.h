/* Feeds an order of a network to a MAERI. Written by Dovetail. */
#ifndef MAERI_ORDER_H
#define MAERI_ORDER_H

#include <stdint.h>

/* Some sums of one output channel, or of as many as the item's tile has filters. */
typedef struct {
    uint32_t channel;  /* the (first) output channel */
    uint32_t first;    /* first position of the result, rows first, in tiles */
    uint32_t count;    /* so many positions from there */
} maeri_segment_t;

/* Equal virtual neurons side by side, from their first weight to their last product. */
typedef struct {
    uint32_t start;          /* cycle of the first weight */
    uint16_t layer;          /* into maeri_layer_names */
    uint16_t multiplier;     /* the first of them */
    uint16_t size;           /* multipliers of one virtual neuron */
    uint16_t neurons;        /* how many of them */
    uint32_t product;        /* first product of each sum, counted by channel, row, column of the kernel */
    uint32_t products;       /* how many of them */
    uint32_t segment;        /* into maeri_segments */
    uint32_t segments;       /* how many of them */
} maeri_item_t;

/* A span of time with one configuration of the reduction tree. */
typedef struct {
    uint32_t start;          /* first cycle */
    uint32_t words;          /* into maeri_words, MAERI_TREE_WORDS of them */
    uint32_t item;           /* first item that begins with it */
    uint32_t items;          /* how many */
} maeri_phase_t;

#define MAERI_LAYERS %(layers)du
#define MAERI_ITEMS %(items)du
#define MAERI_PHASES %(phases)du
#define MAERI_TREE_WORDS %(words)du
#define MAERI_MAKESPAN %(makespan)du

extern const char *const maeri_layer_names[MAERI_LAYERS];
extern const maeri_segment_t maeri_segments[];
extern const maeri_item_t maeri_items[MAERI_ITEMS];
extern const maeri_phase_t maeri_phases[MAERI_PHASES];
extern const uint32_t maeri_words[];

/* What the platform implements. */
void maeri_wait_until(uint32_t cycle);               /* of the engine, counted from maeri_run */
void maeri_configure(const uint32_t *words);         /* write the reduction tree's configuration */
void maeri_start(const maeri_item_t *item);          /* send an item's weights, then its inputs */

/* Feed the whole order; returns when its last result exists. */
void maeri_run(void);

#endif
