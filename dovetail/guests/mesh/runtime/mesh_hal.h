/* What an element program needs of the machine. The user's runtime supplies these functions; mesh_sim.c is the one for the
   simulator. */
#ifndef MESH_HAL_H
#define MESH_HAL_H

#include <stdint.h>

/* Where part of a message (or of a tensor in DRAM) belongs: a box of rows, columns and bytes. */
typedef struct {
    uint32_t key;           /* of the message, or number of the tensor */
    uint32_t source;        /* byte of the message the box begins at */
    uint32_t target;        /* address the box begins at, in the slot of input 0 (before element_begin: from its operand) */
    uint32_t operand;       /* which operand of the element it is part of */
    uint32_t rows;
    uint32_t columns;
    uint32_t bytes;         /* of each column */
    uint32_t source_row;    /* bytes from row to row, and from column to column */
    uint32_t source_column;
    uint32_t target_row;
    uint32_t target_column;
    uint32_t slots;         /* input n lies in slot n modulo slots */
    uint32_t slot_bytes;
} mesh_transfer_t;

/* Rows of results of the MAC array: 32-bit sums of int8 (or uint8) images and int8 weights. */
typedef struct {
    const void *image;      /* first byte of the window of the first column */
    const void *weights;    /* groups of 4 channels (dense: 16): [outputs/4][rows][columns][inputs][4] */
    int32_t *sums;          /* [rows][columns][outputs] */
    uint32_t image_row;     /* bytes from row to row of the image */
    uint32_t columns;       /* of the result */
    uint32_t outputs;
    uint32_t inputs;        /* channels of a pixel of the image; a dense layer's elements */
    uint32_t kernel_rows;
    uint32_t kernel_columns;
    uint32_t stride;        /* columns of the image from one window to the next */
    uint32_t kind;          /* MAC_CONVOLUTION, MAC_DEPTHWISE, MAC_DENSE */
    uint32_t is_unsigned;   /* 1: the image is uint8 */
    uint32_t row_stride;    /* rows of the image from one window to the next */
    uint32_t rows;          /* of the result */
} mac_job_t;

enum { MAC_CONVOLUTION = 0, MAC_DEPTHWISE = 1, MAC_DENSE = 2 };

/* Receive: says once where messages belong. They are put there as they come, each in the slot of its input, when that slot
   is free; the sender is held up until then. */
void mesh_expect(const mesh_transfer_t *transfers, uint32_t count);
/* Waits until everything of an input is there. */
void mesh_wait(uint32_t input);
/* Gives an input's slots back. */
void mesh_release(uint32_t input);
/* Sends a message to whoever its key is routed to; returns at once, `data` must stay until mesh_sent. */
void mesh_send(uint32_t key, uint32_t input, const void *data, uint32_t bytes);
/* Waits until the message of an input, and what is stored of it, is on its way. */
void mesh_sent(uint32_t input);
/* DMA from the chip's DRAM: boxes of the tensors of an input; waits for them. Those of later inputs may be brought ahead, each into
   the slot of its input when that is free; the model of time takes it so. */
void mesh_fetch(const mesh_transfer_t *transfers, uint32_t count, uint32_t input);
/* DMA to the chip's DRAM: this element's part of a tensor; returns at once. Of the transfer, `source` and its steps are places in the
   tensor, `target` and its steps those in the data. */
void mesh_store(const mesh_transfer_t *transfer, uint32_t input, const void *data);
/* Only for elements of several pieces, which take turns: the calls after it are about this one (0 before the first). */
void mesh_select(uint32_t piece);
/* 1 where the piece need not wait: everything of the input is there, in DRAM too, and what it sent two inputs before is on
   its way. */
uint32_t mesh_ready(uint32_t input);
/* Waits until something has changed for any piece. */
void mesh_idle(void);
/* Starts the MAC array, which has taken the job over when this returns; waits for it. */
void mac_start(const mac_job_t *job);
void mac_wait(void);

#endif
