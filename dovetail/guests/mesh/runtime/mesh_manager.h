/* The element that manages a mesh, so that `dovetail run --on` can use it: functions you write, and the protocol.

   Link mesh_manager.c and frames.c with your main, which calls mesh_manage when the machine is up, with board_read and
   board_write of board.h, and with the functions below. What words, results and clocks mean says docs/agent.md under
   "A rack". A function that can fail returns a null pointer when it did not, else a sentence in ASCII that says why. */
#ifndef MESH_MANAGER_H
#define MESH_MANAGER_H

#include <stdint.h>

enum { LOADED_PROGRAM = 1, LOADED_DATA = 2, LOADED_TABLE = 3, LOADED_ROUTES = 4, LOADED_TENSOR = 5, LOADED_DRAM = 6 };

/* Answers requests, for ever. */
void mesh_manage(void);

/* Forgets everything that was loaded. */
void manager_forget(void);
/* Keeps part of a program, of an element's data and table, of a chip's routes or DRAM, or of a tensor's size. `offset` must be at
   most the number of bytes that are there of it; what is there from it on is replaced. */
const char *manager_load(uint32_t what, uint32_t number, uint32_t offset, const uint8_t *content, uint32_t bytes);
/* How many elements have data. */
uint32_t manager_elements(void);
/* Looks whether all is there, and makes the machine ready; says how many inputs it takes at once, at least 1. */
const char *manager_start(uint32_t *inputs);
/* Sets part of a tensor, in which the inputs lie one after the other. */
const char *manager_write(uint32_t tensor, uint32_t offset, const uint8_t *content, uint32_t bytes);
/* Computes so many inputs; gives the cycles of the element that took most. */
const char *manager_run(uint32_t inputs, uint64_t *cycles);
/* Gives part of a tensor that pieces stored, of all inputs one after the other. */
const char *manager_read(uint32_t tensor, uint32_t offset, uint8_t *to, uint32_t bytes);
/* Gives at most `most` counts of cycles of the last run from the `first` on; returns how many. */
uint32_t manager_clocks(uint32_t first, uint64_t *to, uint32_t most);

#endif
